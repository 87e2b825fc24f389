"""Measure the host memory and time to export and load a Llama on CPU devices; each phase is a process of its own.

    python -m experiments.benchmarks.weights make runs/1b --preset 1b      # a checkpoint: parameters, no moments
    python -m experiments.benchmarks.weights export runs/1b
    python -m experiments.benchmarks.weights load runs/1b

`sparse` writes a directory of zeros in bfloat16, a file for each layer, which takes no space on the disk:

    python -m experiments.benchmarks.weights sparse runs/70b --preset 70b --layers 2 --frozen
    python -m experiments.benchmarks.weights load runs/70b --preset 70b --layers 2 --frozen

Each phase prints a line of JSON: the rise of the process's peak memory in MiB, the size of the loaded parameters
(included in the rise, because CPU devices store them in host memory), the largest leaf, the largest part of it that one
device wrote, and seconds.
"""

import argparse
import json
import re
import time
from math import prod
from pathlib import Path

import jax

import jzero
from jzero import weights
from jzero.weights.name_map import leaves_of, tensors
from models.llama import PRESETS, Llama, preset


def peak() -> float:
    """Return the peak host memory of this process in MiB. (`getrusage` also counts its parent's at the start.)"""
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.M)[1]) / 1024


def write_sparse(step: jzero.TrainStep, directory: Path) -> None:
    """Write a directory as a download has it, of zeros."""
    directory.mkdir(parents=True)
    table = step.model.weights_layout()
    (directory / "config.json").write_text(json.dumps(table["config"]))
    files: dict[str, dict[str, tuple[int, ...]]] = {}
    for tensor in tensors(leaves_of(step.state_shapes.params), table):
        file = f"model-{'ends' if tensor.layer is None else f'{tensor.layer:05}'}.safetensors"
        files.setdefault(file, {})[tensor.name] = tensor.shape
    for file, shapes in files.items():
        header, end = {}, 0
        for name, sizes in shapes.items():
            header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [end, end + 2 * prod(sizes)]}
            end += 2 * prod(sizes)
        text = json.dumps(header).encode()
        with (directory / file).open("wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            f.truncate(8 + len(text) + end)
    index = {"weight_map": {name: file for file, shapes in files.items() for name in shapes}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("phase", choices=["make", "export", "sparse", "load"])
    p.add_argument("directory", type=Path)
    p.add_argument("--preset", choices=PRESETS, default="1b")
    p.add_argument("--vocab_size", type=int)
    p.add_argument("--layers", type=int)
    p.add_argument("--tied", action="store_true")
    p.add_argument("--frozen", action="store_true", help="all but the norms, which are then stored in bfloat16")
    p.add_argument("--devices", type=int, default=8)
    a = p.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", a.devices)
    changes = {"vocab_size": a.vocab_size, "num_layers": a.layers, "tied": a.tied or None}
    shape = preset(a.preset, **{key: value for key, value in changes.items() if value})
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    if a.frozen:
        config |= {"bf16": {"enabled": True}, "trainable_parameters": ["norm"]}
    step = jzero.make_train_step(jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs)), config)
    jax.device_put(0.0).block_until_ready()
    before, start, result = peak(), time.perf_counter(), 0
    if a.phase == "make":
        jzero.Engine(step, jax.random.key(0)).save_checkpoint(a.directory / "checkpoint").wait()
    elif a.phase == "sparse":
        write_sparse(step, a.directory / "export")
    elif a.phase == "export":
        weights.export(a.directory / "checkpoint", a.directory / "export")
    else:
        params = weights.load(a.directory / "export", step)
        result = sum(x.nbytes for x in jax.tree.leaves(params))
    leaves = jax.tree.leaves(step.layouts)
    largest = max(leaves, key=lambda leaf: prod(leaf.shape))
    size = 4 * prod(largest.shape) / 2**20
    found = {
        "phase": a.phase,
        "seconds": round(time.perf_counter() - start, 1),
        "peak": round(peak() - before),
        "result": round(result / 2**20),
        "largest_leaf": round(size),
        "largest_part": round(size / (a.devices if largest.dim is not None else 1)),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
