"""Every optimizer at every stage: its state lies as the table says, its result is stage 0's; Muon's matrices."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import on_gpu
from helpers.named_models import model_of
from helpers.optimizers import CASES, IDS, owned
from helpers.oracle import train
from helpers.programs import pairs
from helpers.reference import BATCH, Decoder, batches
from helpers.sampling import keep, some
from helpers.steps import settings
from jax import P
from jax.sharding import NamedSharding

import jzero
from jzero.optimizers import Placement
from jzero.optimizers.muon import Matrices, orthogonalised
from jzero.planner import collectives, gpu_devices
from models.llama import LlamaConfig

DEVICES, STEPS = 8, 3


def make(name, params, stage):
    optimizer = {"type": name, "params": params}
    if "weight_decay" in params:
        optimizer["groups"] = [{"match": "/w$", "lr_scale": 0.5}, {"match": "embed", "weight_decay": 0.0}]
    config = settings(BATCH, stage, gradient_clipping=1.0, stack={"unroll": False}, optimizer=optimizer)
    return jzero.make_train_step(Decoder(), config, mesh=jzero.make_mesh(zero=DEVICES))


def assert_same_training(ours, theirs, start):
    """1e-6 of what each leaf has moved, over the whole leaf, and the rounding of the parameters themselves.

    Not element by element: where a gradient cancels to nearly nothing it is rounding noise, and Adam, Lion and their
    kin make a full step of it in a direction that depends on the order of a sum.
    """

    def check(path, a, b, s):
        moved, apart = np.linalg.norm(np.float64(b) - s), np.linalg.norm(np.float64(a) - b)
        assert moved > 1e-6 * np.linalg.norm(s), (path, "did not train")
        assert apart <= 1e-6 * moved + 6e-8 * STEPS * np.linalg.norm(b), (path, apart / moved)

    jax.tree_util.tree_map_with_path(check, ours, theirs, start)


def elements(tree, device=False):
    """Count those of a tree, or of its parts on the first device."""
    return sum((x.addressable_shards[0].data if device else x).size for x in jax.tree.leaves(tree))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "params"), keep(CASES, [case for case in CASES if case[0] == "Muon"]), ids=IDS)
def test_sharding_stays_and_the_result_is_stage_0s(name, params):
    data = batches("decoder")[:STEPS]
    steps = [make(name, params, stage) for stage in range(4)]
    start = jax.device_get(steps[0].init(jax.random.key(0)).params)
    end = jax.device_get(train(steps[0], start, data)[1].params)
    for step in steps[1:]:
        state = step.init(jax.random.key(0), start)
        before = jax.tree.map(lambda x: x.sharding, state)
        assert elements(state.params, device=True) == elements(state.params) // DEVICES
        mine = [(x, param) for x, param in owned(state.opt_state, state.params).values() if x.shape == param.shape]
        assert all(x.sharding == param.sharding for x, param in mine)
        divided = sum(x.size for x, _ in mine)
        replicated = elements(state.opt_state) - divided
        assert elements(state.opt_state, device=True) == divided // DEVICES + replicated
        if name not in ("adafactor", "novograd", "sm3"):  # factored moments, one moment a layer: small
            assert replicated < 100  # counters
        _, after = train(step, start, data)
        assert jax.tree.map(lambda x: x.sharding, after) == before
        assert_same_training(jax.device_get(after.params), end, start)


def newton_schulz(g):
    """DeepSpeed 0.19.8, deepspeed/runtime/zero/muon/original_muon.py, `zeropower_via_newtonschulz5` (line 51)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (np.linalg.norm(x) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x


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


@pytest.mark.parametrize(("dtype", "error"), [(None, 1e-4), (jnp.bfloat16, 0.04)])  # DeepSpeed's in bfloat16: 0.051
def test_every_matrix_is_numpys(dtype, error):
    mesh = jzero.make_mesh(data=2, expert=2, zero=2)
    rng = np.random.default_rng(0)
    xs = [rng.normal(size=shape).astype(np.float32) for shape, _ in GIVEN]
    placement = Placement(mesh, {str(i): spec for i, (_, spec) in enumerate(GIVEN)})
    assert Placement(mesh, {"a": P("zero")}).axes("a", 2) == (("zero",), ())

    @jax.jit
    def run(*xs):
        return orthogonalised([Matrices(x, placement.axes(str(i), x.ndim)) for i, x in enumerate(xs)], mesh, dtype)

    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, (_, spec) in zip(xs, GIVEN, strict=True)]
    alone = jax.jit(lambda *xs: orthogonalised([Matrices(x, ((),) * x.ndim) for x in xs], None, dtype))(*xs)
    for x, found, one in zip(xs, run(*placed), alone, strict=True):
        rows, columns = x.shape[-2:]
        matrices = x.astype(np.float64).reshape(-1, rows, columns)
        expected = np.reshape([newton_schulz(m) * max(1, columns / rows) ** 0.5 for m in matrices], x.shape)
        for y in (found, one):
            assert np.linalg.norm(np.asarray(y) - expected) < error * np.linalg.norm(expected)
            assert y.dtype == np.float32
            assert dtype is None or np.linalg.norm(np.asarray(y) - expected) > 1e-3 * np.linalg.norm(expected)


DEPTH, WIDTH, HIDDEN, HEADS, KV_HEADS = 3, 128, 256, 4, 2
PROGRAMS = [({"tensor": 2, "zero": 2}, 3, True), ({"data": 2, "zero": 2}, 1, False), ({"pipe": 3, "zero": 2}, 3, True)]


@on_gpu
@pytest.mark.parametrize(("sizes", "stage", "bf16"), some(PROGRAMS, PROGRAMS[:1]), ids=str)
def test_two_all_to_alls_for_each_shape_and_none_in_the_iteration(sizes, stage, bf16):
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4 if "pipe" in sizes else 1,
        "optimizer": {"type": "Muon", "params": {"lr": 0.02}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "compiler_options": {"xla_gpu_autotune_level": 0}, "mesh": sizes, "bf16": {"enabled": bf16},
    }  # fmt: skip
    shape = LlamaConfig(DEPTH, WIDTH, HEADS, KV_HEADS, HIDDEN, vocab_size=256, attention="xla")
    mesh = jzero.make_mesh(config, devices=gpu_devices("h100", int(np.prod([*sizes.values()]))))
    step = jzero.make_train_step(model_of(shape), config, mesh=mesh)
    program = step.lower(pairs(step.batch_sizes.train, 64)).compile()
    found = Counter()
    for row in collectives(program, mesh):
        assert not (row.loops and row.bytes > 4 * WIDTH and 5 in row.loops), row
        if row.kind == "all-to-all":
            found[row.axes, row.bytes] += row.operands
    by_tensor = sizes.get("tensor", 1)
    layers, key = DEPTH // sizes.get("pipe", 1), WIDTH // HEADS * KV_HEADS
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
