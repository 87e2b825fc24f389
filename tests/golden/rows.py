"""About eighty train steps: models, meshes and config sections in the combinations that share code.

`python tests/golden/rows.py DIRECTORY [part of a name]` writes the program of each row, to compare with `diff`.
"""

import re
import sys
from functools import lru_cache
from pathlib import Path

import jax
import numpy as np

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

from flax import linen, nnx
from helpers import tensor_models
from helpers.steps import mesh
from helpers.tensor_models import BATCH, WIDTH, linen_loss
from layouts import Net

import jzero
from models.mlp import MLP, cross_entropy

CPU = {"device": "cpu"}
BF16, FP16 = {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}
FP8 = {**BF16, "fp8": {"enabled": True, "min_size": 8}}
DELAYED = {**BF16, "fp8": {"enabled": True, "min_size": 8, "recipe": "delayed"}}


class Normed(nnx.Module):
    """BatchNorm and dropout: state and random numbers, in no layer stack."""

    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.BatchNorm(WIDTH, rngs=rngs)
        self.dropout, self.last = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


class NormedLinen(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        x = linen.BatchNorm(use_running_average=not train)(linen.Dense(WIDTH)(x))
        return linen.Dense(4)(linen.Dropout(0.1, deterministic=not train)(x))


def square(module, batch):
    return (module(batch["x"]) ** 2).mean()


X = {"x": np.ones((BATCH, WIDTH), np.float32)}
MODELS = {
    "functions": lambda: Net(noise=True),
    "mlp": lambda: jzero.from_flax(lambda rngs: MLP(WIDTH, 16, 4, rngs=rngs), cross_entropy),
    "normed": lambda: jzero.from_flax(lambda rngs: Normed(rngs=rngs), square),
    "normed-linen": lambda: jzero.from_flax(NormedLinen(), square, example_batch=X),
    "linen-stack": lambda: jzero.from_flax(
        tensor_models.LinenGPT(), linen_loss, stack="LinenBlock", example_batch=batch("linen")
    ),
}
BATCHES = {
    "functions": {"x": np.ones((BATCH, 8), np.float32), "y": np.ones((BATCH, 8), np.float32)},
    "mlp": (np.ones((BATCH, WIDTH), np.float32), np.ones(BATCH, np.int32)),
    "normed": X,
    "normed-linen": X,
}
ZERO3 = {"stage": 3, "stage3_param_persistence_threshold": 0}


def _rows():
    """Yield (name, model, mesh, zero_optimization, other sections)."""
    for kind in ("functions", "mlp", "nnx", "linen", "mixture", "normed"):
        for stage in range(4):
            yield f"{kind}-zero{stage}", kind, {"data": 2, "zero": 4}, {**ZERO3, "stage": stage}, {}
    for kind in ("llama", "gpt2", "bert", "vit", "linen-stack", "normed-linen", "more", "tiled"):
        yield f"{kind}-zero2-bf16", kind, {"zero": 4}, {"stage": 2}, BF16
        yield f"{kind}-zero3", kind, {"zero": 4}, ZERO3, {}
    for schedule in ("1f1b", "gpipe", "interleaved", "zero_bubble"):
        section = {"schedule": schedule, **({"chunks": 2} if schedule == "interleaved" else {})}
        for stage in (0, 1, 3):
            zero = {**ZERO3, "stage": stage}
            yield f"functions-{schedule}-zero{stage}", "functions", {"pipe": 2, "zero": 4}, zero, {"pipeline": section}
    yield "layers-pipe2", "layers", {"pipe": 2, "zero": 2}, {"stage": 2}, {}
    yield "layers-pipe3-switched", "layers", {"pipe": 3, "zero": 2}, {"stage": 1}, {}
    yield "llama-pipe2-zero3", "llama", {"pipe": 2, "zero": 4}, ZERO3, BF16
    yield "nnx-pipe2-full", "nnx", {"pipe": 2, "zero": 2}, {"stage": 1}, SECTIONS["remat-full"]
    for axes in ({"tensor": 2}, {"context": 2}, {"tensor": 2, "context": 2}, {"pipe": 2, "tensor": 2}):
        name = "-".join(f"{axis}{n}" for axis, n in axes.items())
        for stage in (1, 3):
            yield f"llama-{name}-zero{stage}", "llama", {**axes, "zero": 2}, {**ZERO3, "stage": stage}, {}
    for axes in ({"expert": 2}, {"expert": 2, "tensor": 2}, {"pipe": 2, "expert": 2}):
        name = "-".join(f"{axis}{n}" for axis, n in axes.items())
        yield f"mixture-{name}-zero3", "mixture", {**axes, "zero": 2}, ZERO3, BF16
    yield "nnx-tensor2", "nnx", {"tensor": 2, "zero": 2}, {"stage": 2}, {}
    for name, sections in SECTIONS.items():
        yield f"llama-{name}", "llama", {"data": 2, "zero": 4}, ZERO3, sections
    for name in ("ema", "muon"):
        yield f"functions-{name}", "functions", {"data": 2, "zero": 4}, ZERO3, SECTIONS[name]
    for name, zero in ZERO_SECTIONS.items():
        yield f"llama-{name}", "llama", {"zero": 8}, {**ZERO3, **zero}, BF16
    yield "llama-fp8-zero2", "llama", {"zero": 4}, {"stage": 2}, FP8
    yield "llama-fp8-delayed-pipe2", "llama", {"pipe": 2, "zero": 2}, {"stage": 1}, DELAYED
    yield "llama-fp8-tensor2", "llama", {"tensor": 2, "zero": 2}, ZERO3, FP8
    yield "normed-fp16", "normed", {"zero": 4}, {"stage": 2}, FP16


GROUPS = [{"match": "norm|bias", "weight_decay": 0.0}]
SECTIONS = {
    "fp16": FP16,
    "fp8": FP8,
    "fp8-delayed": DELAYED,
    "remat-full": {"activation_checkpointing": {"policy": "full"}},
    "remat-matmuls": {**BF16, "activation_checkpointing": {"policy": "matmuls"}},
    "remat-offloaded": {"activation_checkpointing": {"policy": "full", "cpu_checkpointing": True}},
    "scanned": {"stack": {"unroll": False}},
    "unclipped": {"gradient_clipping": 0.0},
    "sum": {"gradient_allreduce_op": "sum"},
    "reduce-fp32": {**BF16, "communication_data_type": "fp32"},
    "bf16-masters": {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
    "ema": {"ema": {"decay": 0.9}},
    "muon": {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}},
    "lamb": {"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}},
    "sgd": {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
    "lion": {"optimizer": {"type": "Lion", "params": {"lr": 0.1}}},
    "moments-fp8": {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}, "state_dtype": "fp8"}},
    "moments-bf16": {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}, "state_dtype": "bf16"}},
    "frozen": {"frozen_parameters": ["embed"]},
    "groups": {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}, "groups": GROUPS}},
}
ZERO_SECTIONS = {
    "hpz": {"zero_hpz_partition_size": 2},
    "qwz": {"zero_quantized_weights": True},
    "qgz": {"zero_quantized_gradients": True},
    "zeropp": {"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True},
    "offload-optimizer": {"offload_optimizer": CPU},
    "offload-both": {"offload_optimizer": CPU, "offload_param": CPU},
}
ROWS = {name: row for name, *row in _rows()}


@lru_cache
def model(name):
    return MODELS[name]() if name in MODELS else tensor_models.model(name)


def batch(name):
    return BATCHES[name] if name in BATCHES else tensor_models.batches(name)[0]


def setting(name: str) -> dict:
    """Return model, config and mesh of a row, as `jzero.initialize` and `jzero.make_train_step` take them."""
    kind, degrees, zero, sections = ROWS[name]
    config = {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
        "zero_optimization": zero,
        **sections,
    }
    if degrees.get("tensor", 1) > 1 and tensor_models.DIMENSIONS.get(kind):
        config["tensor_parallel"] = {"dimensions": tensor_models.DIMENSIONS[kind]}
    return {"model": model(kind), "config": config, "mesh": mesh(**{"zero": 1, **degrees})}


def program(name: str) -> str:
    """Return the StableHLO of a row's step without what a rename or a move changes: symbols and results' names."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch(ROWS[name][0]))
    return anonymous(jzero.make_train_step(**setting(name)).lower(shapes).as_text())


def anonymous(text: str) -> str:
    """Number functions in the order of their appearance, and drop the names of results and of the module."""
    text = re.sub(r'jax\.result_info = "[^"]*"', 'jax.result_info = ""', text)
    text = re.sub(r"^module @\S+", "module", text, flags=re.MULTILINE)
    names: dict[str, str] = {}
    for name in re.findall(r"func\.func (?:public |private )?@([\w.$-]+)", text):
        names.setdefault(name, f"f{len(names)}")
    return re.sub(r"@([\w.$-]+)", lambda found: f"@{names.get(found[1], found[1])}", text)


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name in ROWS:
        if not sys.argv[2:] or sys.argv[2] in name:
            (directory / f"{name}.mlir").write_text(program(name))
