"""Muon's matrices, each computed on one device: against NumPy's, and the collectives of the compiled H100 program."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import on_gpu
from helpers.programs import pairs
from helpers.sampling import some
from jax import P
from jax.sharding import NamedSharding
from test_optimizer_stages import newton_schulz

import jzero
from jzero.optimizers import Placement
from jzero.optimizers.muon import Matrices, orthogonalised
from jzero.planner import collectives, gpu_devices
from models.llama import Llama, LlamaConfig

# Shapes and specs over data 2, expert 2, zero 2.
GIVEN = [
    ((3, 8, 12), P(None, "zero")),
    ((5, 8, 12), P(None, "zero")),
    ((3, 12, 8), P(None, "zero")),
    ((8, 12), P("zero", "data")),
    ((8, 12), P(None, ("data", "zero"))),
    ((4, 2, 8, 12), P(None, "expert", None, "zero")),
    ((2, 4, 12, 8), P("expert", None, ("data", "zero"))),
    ((3, 8, 12), P()),
    ((2, 3, 4, 4), P("zero")),
]


def numpys(x):
    return np.stack([newton_schulz(m) * max(1, m.shape[1] / m.shape[0]) ** 0.5 for m in x]).reshape(x.shape)


@pytest.mark.parametrize(("dtype", "error"), [(None, 1e-4), (jnp.bfloat16, 0.04)])  # DeepSpeed's in bfloat16: 0.051
def test_every_matrix_is_numpys(dtype, error):
    mesh = jzero.make_mesh(data=2, expert=2, zero=2)
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=shape).astype(np.float32) for shape, _ in GIVEN]
    placement = Placement(mesh, {str(i): spec for i, (_, spec) in enumerate(GIVEN)})

    @jax.jit
    def run(*xs):
        return orthogonalised([Matrices(x, placement.axes(str(i), x.ndim)) for i, x in enumerate(xs)], mesh, dtype)

    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, (_, spec) in zip(xs, GIVEN, strict=True)]
    alone = jax.jit(lambda *xs: orthogonalised([Matrices(x, ((),) * x.ndim) for x in xs], None, dtype))(*xs)
    for x, found, one in zip(xs, run(*placed), alone, strict=True):
        expected = numpys(x.astype(np.float64).reshape(-1, *x.shape[-2:])).reshape(x.shape)
        for y in (found, one):
            assert np.linalg.norm(np.asarray(y) - expected) < error * np.linalg.norm(expected)
            assert y.dtype == np.float32
            assert dtype is None or np.linalg.norm(np.asarray(y) - expected) > 1e-3 * np.linalg.norm(expected)


LAYERS, WIDTH, HIDDEN, HEADS, KV_HEADS = 3, 128, 256, 4, 2


PROGRAMS = [
    ({"tensor": 2, "zero": 2}, 3, True),
    ({"data": 2, "zero": 2}, 1, False),
    ({"pipe": 3, "zero": 2}, 3, True),
]


@on_gpu
@pytest.mark.parametrize(("sizes", "stage", "bf16"), some(PROGRAMS, PROGRAMS[:1]), ids=str)
def test_two_all_to_alls_for_each_shape_and_none_in_the_iteration(sizes, stage, bf16):
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4 if "pipe" in sizes else 1,
        "optimizer": {"type": "Muon", "params": {"lr": 0.02}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "compiler_options": {"xla_gpu_autotune_level": 0}, "mesh": sizes, "bf16": {"enabled": bf16},
    }  # fmt: skip
    shape = LlamaConfig(LAYERS, WIDTH, HEADS, KV_HEADS, HIDDEN, vocab_size=256, attention="xla")
    mesh = jzero.make_mesh(config, devices=gpu_devices("h100", int(np.prod([*sizes.values()]))))
    step = jzero.make_train_step(jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs)), config, mesh=mesh)
    program = step.lower(pairs(step.batch_sizes.train, 64)).compile()
    found = Counter()
    for row in collectives(program, mesh):
        assert not (row.loops and row.bytes > 4 * WIDTH and 5 in row.loops), row
        if row.kind == "all-to-all":
            found[row.axes, row.bytes] += row.operands
    by_tensor = sizes.get("tensor", 1)
    layers, key = LAYERS // sizes.get("pipe", 1), WIDTH // HEADS * KV_HEADS
    # q and out have one shape; k and v; gate and up; down. `tensor` divides columns of all but out and down, whose rows
    # it divides, as `zero` does of all.
    groups = [(2, WIDTH, key, "columns"), (2, WIDTH, HIDDEN, "columns"), (1, HIDDEN, WIDTH, "rows")]
    if by_tensor > 1:
        groups += [(1, WIDTH, WIDTH, "columns"), (1, WIDTH, WIDTH, "rows")]
    else:
        groups += [(2, WIDTH, WIDTH, "columns")]
    expected = Counter()
    for count, n, k, divided in groups:
        devices = sizes["zero"] * by_tensor
        padded = -(-count * layers // devices) * devices
        there = ("zero", "tensor")[:by_tensor]
        for axes in [there] if divided == "rows" else [(axis,) for axis in there]:
            expected[axes, padded * n * k * (2 if bf16 else 4) // devices] += 2
    assert found == expected
    # the iteration is a loop
    assert re.search(r'op_name="[^"]*jzero_update[^"]*/while/body/[^"]*"', program.as_text())
