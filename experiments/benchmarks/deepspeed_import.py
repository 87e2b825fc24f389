"""Measures the import of a large ZeRO-3 checkpoint of DeepSpeed on the CPU: the time, and the memory at the peak.

    python -m experiments.benchmarks.deepspeed_import make DIR --layers 32   # sparse files: no space on the disk
    python -m experiments.benchmarks.deepspeed_import read DIR --layers 32   # every leaf once, one at a time
    jzero import DIR OUT --model experiments.benchmarks.deepspeed_import:model_of_2_layers

The files have the layout of DeepSpeed 0.19.8 (8 ranks, fp32 masters and AdamW's moments) and zeros for numbers.
"""

import argparse
import io
import json
import pickle
import resource
import sys
import time
import types
import zipfile
from math import prod
from pathlib import Path

RANKS = 8
CONFIG = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}}}
WIDTH, HIDDEN, HEADS, VOCAB = 4096, 11008, 32, 32000


def shapes(layers):
    """The names and shapes of Llama 2 7B's tensors in transformers."""
    square, wide = (WIDTH, WIDTH), (HIDDEN, WIDTH)
    layer = {f"self_attn.{name}_proj.weight": square for name in "qkvo"}
    layer |= {"mlp.gate_proj.weight": wide, "mlp.up_proj.weight": wide, "mlp.down_proj.weight": wide[::-1]}
    layer |= {"input_layernorm.weight": (WIDTH,), "post_attention_layernorm.weight": (WIDTH,)}
    found = {"model.embed_tokens.weight": (VOCAB, WIDTH)}
    found |= {f"model.layers.{i}.{name}": shape for i in range(layers) for name, shape in layer.items()}
    return found | {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCAB, WIDTH)}


# ---- files of torch.save, without torch and without their numbers -------------------------------------------------


class Storage:
    """A storage of `numel` numbers; the pickle refers to it by its key."""

    def __init__(self, key, numel):
        self.key, self.numel = key, numel


class Flat:
    """A flat tensor: pickles as PyTorch's."""

    def __init__(self, storage):
        self.storage = storage

    def __reduce__(self):
        shape = (self.storage.numel,)
        return sys.modules["torch._utils"]._rebuild_tensor_v2, (self.storage, 0, shape, (1,), False, {})


def fake_torch():
    """Modules with the names that a pickle of PyTorch refers to."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")

    class FloatStorage:
        __module__, __qualname__ = "torch", "FloatStorage"

    def _rebuild_tensor_v2():
        pass

    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    torch.FloatStorage, torch._utils, utils._rebuild_tensor_v2 = FloatStorage, utils, _rebuild_tensor_v2
    sys.modules |= {"torch": torch, "torch._utils": utils}
    return FloatStorage


class Pickler(pickle.Pickler):
    def persistent_id(self, x):
        if isinstance(x, Storage):
            return "storage", sys.modules["torch"].FloatStorage, x.key, "cpu", x.numel
        return None


def save(path, value, storages=()):
    """Write a file of torch.save whose storages are holes."""
    pickled = io.BytesIO()
    Pickler(pickled, 2).dump(value)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled.getvalue())
        archive.writestr("archive/byteorder", "little")
        archive.writestr("archive/version", "3\n")
        for storage in storages:
            entry = zipfile.ZipInfo(f"archive/data/{storage.key}")
            entry.file_size, entry.CRC = storage.numel * 4, 0
            entry.compress_size = entry.file_size
            entry.header_offset = archive.fp.tell()
            archive.fp.write(entry.FileHeader(zip64=True))
            archive.fp.seek(entry.file_size, 1)
            archive.start_dir = archive.fp.tell()
            archive.filelist.append(entry)


def make(directory, layers):
    """Write the files of all ranks."""
    fake_torch()
    sizes = shapes(layers)
    each = sum(-(-prod(shape) // RANKS) for shape in sizes.values())
    path = directory / "global_step100"
    path.mkdir(parents=True)
    counters = {"global_steps": 100, "global_samples": 800, "skipped_steps": 0, "dp_world_size": RANKS}
    model = {"module": {}, "buffer_names": [], "optimizer": None, "param_shapes": [sizes], "ds_config": CONFIG}
    for rank in range(RANKS):
        some = [Storage(str(i), each) for i in range(3)]
        master, first, second = map(Flat, some)
        state = {"state": {0: {"step": 100, "exp_avg": first, "exp_avg_sq": second}}, "param_groups": [{"params": [0]}]}
        optimizer = {"zero_stage": 3, "partition_count": RANKS, "fp32_flat_groups": [master]}
        optimizer |= {"optimizer_state_dict": state}
        save(path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", {"optimizer_state_dict": optimizer}, some)
        save(path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt", model | counters)
    (directory / "latest").write_text(path.name)


# ---- the import ---------------------------------------------------------------------------------------------------


def make_model(layers):
    import jzero
    from jzero.models.llama import Llama, LlamaConfig

    config = LlamaConfig(layers, WIDTH, HEADS, HEADS, HIDDEN, vocab_size=VOCAB, norm_eps=1e-5, rope_theta=1e4)
    return jzero.from_flax(lambda rngs: Llama(config, rngs=rngs))


def model_of_1_layer():
    return make_model(1)


def model_of_2_layers():
    return make_model(2)


def peak():
    """MiB of memory that this process had at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def read(directory, layers):
    """Read every leaf of the state, and keep none."""
    import jax

    from jzero.deepspeed import DeepSpeedCheckpoint, find_deepspeed
    from jzero.mesh import make_mesh
    from jzero.step.train_step import make_train_step

    mesh = make_mesh(devices=jax.devices()[:1])
    step = make_train_step(make_model(layers), CONFIG, mesh=mesh)
    before, start, of_cpu = peak(), time.perf_counter(), time.process_time()
    source = DeepSpeedCheckpoint(find_deepspeed(directory), step, jax.random.key(0))
    opened, total, largest = time.perf_counter() - start, 0, 0
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for name in source.shapes:
        for leaf in source.read({name: sharding}).values():
            size = 0 if name == "rng" else leaf.nbytes
            total, largest = total + size, max(largest, size)
            del leaf
    seconds, of_cpu = time.perf_counter() - start, time.process_time() - of_cpu
    found = {
        "layers": layers, "leaves": len(source.shapes), "gb": total / 1e9, "opened_s": opened, "read_s": seconds,
        "cpu_s": of_cpu, "before_mib": before, "peak_mib": peak(), "largest_leaf_mib": largest / 2**20,
    }  # fmt: skip
    print(json.dumps({key: round(x, 1) for key, x in found.items()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["make", "read"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    args = parser.parse_args()
    {"make": make, "read": read}[args.what](args.directory, args.layers)
