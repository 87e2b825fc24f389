"""Scales that the maxima of former steps decide: beside NumPy, plain JAX with the same scales, and in every layout."""

import dataclasses
from collections import defaultdict

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.fp8 import FP8, distances, reference
from helpers.sampling import keep
from helpers.stack_models import BATCHES, ROWS, WIDTH, SmallGPT, loss_fn
from helpers.tensor_models import batches, initial, make_step
from hypothesis import given
from hypothesis import strategies as st

import jzero
from jzero.fp8 import history
from jzero.fp8.product import dot_general
from jzero.fp8.quantized import E4M3, E5M2, Delayed, quantize_weight
from jzero.fusion.form import form_of

STEPS = 4
DELAYED = {**FP8, "fp8": {**FP8["fp8"], "recipe": "delayed", "amax_history_len": STEPS}}
KERNELS = {f"stack/{name}/kernel" for name in ("attention/qkv", "attention/out", "mlp/gate_up", "mlp/down")}


def above(x):
    """The power of two above positive numbers."""
    return 2.0 ** (np.floor(np.log2(np.asarray(x, np.float64))) + 1)


@given(st.lists(st.floats(2.0**-126, 2.0**126, width=32), min_size=1, max_size=9))
def test_the_bound_of_summed_counts_is_that_of_the_largest(numbers):
    counts = history.counts(jnp.array(numbers, jnp.float32)).sum(0)
    assert float(history.bound(counts)) == above(max(numbers))
    assert float(history.bound(counts.astype(jnp.bfloat16))) == above(max(numbers))  # as a sum of gradients may be


def test_nothing_was_seen():
    assert float(history.bound(history.counts(jnp.float32(0)))) == 0
    assert float(history.bound(history.counts(jnp.float32(np.inf)))) == 0  # this step changes nothing


def test_a_history_forgets():
    """The largest of the last steps decides the scale, until it is older than all of them."""
    seen = history.start(jnp.full((1, 8, 8), 0.75), 2)
    np.testing.assert_array_equal(seen[0], [[0, 0], [0, 0], [1, 0]])
    first = np.array(history.scales(seen[0], E5M2))
    np.testing.assert_array_equal(first, 2.0 ** np.array([8 - 4, 15 + 1, 8]))
    for largest, expected in ((5.0, 8.0), (0.3, 8.0), (0.1, 0.5)):
        counts = history.counts(jnp.full((1, 3), largest))
        seen = history.step(seen, counts)
        x, g, w = history.scales(seen[0], E4M3)
        assert float(x) == float(g) == 256 / expected
        assert float(w) == 256 / max(expected, 1.0 if expected == 8.0 else 0)


@pytest.mark.parametrize("order", ["tk,kn->tn", "tk,nk->tn"])
def test_a_product_by_known_scales(order):
    """What is out of range becomes the largest number; both maxima come out as if they were a gradient."""
    rng = np.random.default_rng(0)
    x, w, g = (rng.normal(size=s) for s in ((12, 16), (16, 20) if "kn" in order else (20, 16), (12, 20)))
    x[3, 4] = 700.0  # 448 / 4 is the largest number at this scale
    x, w, g = (jnp.asarray(v, jnp.bfloat16) for v in (x, w, 1e-4 * g))
    form = form_of((((1,), (0 if "kn" in order else 1,)), ((), ())), (2, 2), 1)
    scales = jnp.array([4.0, 2.0**20])

    def run(x, place, seen):
        q = quantize_weight(w, (), jnp.bfloat16, E5M2, jnp.float32(16))
        q = dataclasses.replace(q, delayed=Delayed(scales)).with_place(q.x8, place, seen)
        return dot_general(x, q, form, jnp.bfloat16, {})

    y, pull = jax.vjp(run, x, jnp.zeros_like(w), history.places())
    dx, dw, counts = pull(g)

    def rounded(v, scale, dtype):
        most = float(jnp.finfo(dtype).max)
        v = np.clip(np.asarray(v, np.float32) * scale, -most, most)
        return np.asarray(jnp.asarray(v).astype(dtype), np.float64) / scale

    x8, w8, g8 = rounded(x, 4, E4M3), rounded(w, 16, E4M3), rounded(g, 2.0**20, E5M2)
    w8 = w8 if "kn" in order else w8.T
    assert np.abs(x8).max() == 112
    for found, expected in ((y, x8 @ w8), (dx, g8 @ w8.T), (dw, x8.T @ g8 if "kn" in order else g8.T @ x8)):
        assert np.linalg.norm(np.asarray(found, np.float64) - expected) < 2.0**-9 * np.linalg.norm(expected)
    largest = [np.abs(np.asarray(v, np.float64)).max() for v in (x, g)]
    np.testing.assert_array_equal(history.bound(counts), above(largest))


def test_products_of_one_activation_share_its_cast():
    """Their own former maxima are the same; XLA would compute the casts one by one."""
    x, w = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 8))
    form, casts = form_of((((1,), (0,)), ((), ())), (2, 2), 1), {}
    for _ in range(3):
        q = quantize_weight(w, (), jnp.bfloat16, E5M2)
        dot_general(x, q.with_place(q.x8, jnp.zeros((8, 8), jnp.bfloat16)), form, jnp.bfloat16, casts)
    assert len(casts) == 1


def prepared(step, bounds):
    """A new state with these bounds of activations, gradients and weights."""
    state = step.init(jax.random.key(0), initial("llama"))
    assert state.fp8.keys() == KERNELS
    fp8 = {name: jnp.broadcast_to(jnp.float32(bounds)[:, None], x.shape) for name, x in state.fp8.items()}
    return dataclasses.replace(state, fp8=jax.device_put(fp8, step.state_shardings.fp8))


@pytest.mark.parametrize("bounds", [(0.5, 2.0**-10, 0.125), (2.0**4, 2.0**-6, 2.0)], ids=["clipped", "with room"])
def test_a_step_by_known_scales(bounds):
    """The first bounds are below the maxima, so that much is clipped; plain JAX rounds by the same scales."""
    step = make_step("llama", precision=DELAYED)
    x, g, w = bounds
    known, expected = reference("llama", scales=(256 / x, 2.0**15 / g, 256 / w))
    by_maxima = reference("llama")[1]
    found, metrics = jax.device_get(step.gradients(prepared(step, bounds), batches("llama")[0]))
    np.testing.assert_allclose([float(metrics["loss"]), float(metrics["grad_norm"])], known[0], rtol=1e-6)
    assert max(distances(found, expected).values()) < 2e-2  # the scales of norms, summed over rows in bfloat16
    matrices = [d for name, d in distances(found, expected).items() if name in KERNELS]
    apart = [d for name, d in distances(by_maxima, expected).items() if name in KERNELS]
    assert max(matrices) < 3e-4
    assert max(apart) > (0.1 if x < 1 else 1e-3)  # the scales matter


def noted():
    """The maxima of the first step by plain JAX: module -> sorted [layers, (x, g)]."""
    found = defaultdict(list)
    reference("llama", note=lambda name, x, g: found[name].append((float(x), float(g))))
    jax.effects_barrier()
    return {f"stack/{part}/{name}/kernel": np.array(found[name]) for part, name in PARTS}


PARTS = [("attention", "qkv"), ("attention", "out"), ("mlp", "gate_up"), ("mlp", "down")]
LAYOUTS = [
    {},
    {"unroll": False, "remat": "full", "accum": 2},
    {"zero": 4, "data": 2, "stage": 2, "accum": 2},
    {"zero": 8, "stage": 3},
    {"zero": 2, "pipe": 2, "stage": 2, "accum": 4},
    {"zero": 2, "pipe": 2, "stage": 1, "accum": 4, "pipeline": {"schedule": "zero_bubble"}},
    {"zero": 2, "tensor": 2, "stage": 3},
]


@pytest.mark.parametrize("layout", keep(LAYOUTS, [LAYOUTS[0], LAYOUTS[2], LAYOUTS[4]]), ids=str)
def test_a_step_notes_what_it_saw(layout):
    """Over all layers, micro-batches, stages and devices, the maxima are those of plain JAX on one device.

    Its scales are the current ones, and a layout rounds in other places: a maximum beside a power of two may be beyond
    it. A part of a divided product is not larger than the whole. The weights' maxima are exact.
    """
    step = make_step("llama", precision=DELAYED, **layout)
    params = initial("llama")
    state = step.init(jax.random.key(0), params)
    weights = {name: np.abs(x).reshape(len(x), -1).max(1) for name, x in kernels(params).items()}
    for name, largest in weights.items():
        np.testing.assert_array_equal(state.fp8[name][:, 2, 0], above(largest))
        assert not np.asarray(state.fp8[name])[:, :2].any()
    expected = noted()
    state, metrics = step(state, batches("llama")[0])
    assert not bool(metrics["skipped"])
    same = []
    for name, history_ in jax.device_get(state.fp8).items():
        np.testing.assert_array_equal(history_[:, 2, 0], above(weights[name]))
        off = np.log2(np.sort(history_[:, :2, 0], 0) / np.sort(above(expected[name])[: len(history_)], 0))
        assert np.abs(off).max() <= 1, (name, off)
        same += list(off.ravel() == 0)
    assert np.mean(same) > 0.8


def kernels(params):
    return {f"stack/{part}/{name}/kernel": np.asarray(params["stack"][part][name]["kernel"]) for part, name in PARTS}


def test_losses_are_beside_those_of_current_scales():
    """From the first step on, which knows the weights alone: fp8 itself moves the loss by 1e-4."""
    step = make_step("llama", precision=DELAYED, zero=2, stage=2)
    state, losses = step.init(jax.random.key(0), initial("llama")), []
    for batch in batches("llama"):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, reference("llama")[0][:, 0], rtol=3e-4)


@pytest.mark.parametrize("name", ["attention/out", "mlp/down"])
def test_a_step_with_an_infinite_weight_is_skipped(name):
    """Clipped by a known scale it would look like any other number; the history stays as it was."""
    step, (module, part) = make_step("llama", precision=DELAYED, zero=2, stage=2), name.split("/")
    params = jax.tree.map(np.copy, initial("llama"))
    params["stack"][module][part]["kernel"].flat[5] = np.inf
    before = step.init(jax.random.key(0), params)
    kept = jax.device_get(before.fp8)
    state, metrics = step(before, batches("llama")[0])
    assert bool(metrics["skipped"])
    jax.tree.map(np.testing.assert_array_equal, kept, jax.device_get(state.fp8))


# ---------------------------------------------------------------- checkpoints


class Half(SmallGPT):
    """Its embeddings are multiplied in bfloat16."""

    def __init__(self, rngs, rate=0.0):
        super().__init__(rngs, rate)
        self.tokens.dtype = self.positions.dtype = jnp.bfloat16


def engine(recipe="delayed", length=STEPS, **mesh):
    history_len = {"amax_history_len": length} if recipe == "delayed" else {}
    config = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 2},
        "mesh": mesh,
        **FP8,
        "fp8": {"enabled": True, "min_size": WIDTH, "recipe": recipe, **history_len},
    }
    model = jzero.from_flax(Half, loss_fn, stack="blocks")
    return jzero.initialize(model=model, config=config)[0]


def histories(engine):
    return {name: np.asarray(x) for name, x in jax.device_get(engine.state.fp8).items()}


def test_a_resumed_run_goes_on_as_the_straight_one(tmp_path):
    straight, resumed = engine(), engine()
    for batch in BATCHES[:2]:
        straight.train_batch(batch)
    straight.save_checkpoint(tmp_path).wait()
    resumed.load_checkpoint(tmp_path)
    for _ in range(2):
        for one in (straight, resumed):
            one.train_batch(BATCHES[0])
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(one.state.params) for one in (straight, resumed)))
    jax.tree.map(np.testing.assert_array_equal, histories(straight), histories(resumed))


def test_another_layout_reads_the_histories(tmp_path):
    one, other = engine(), engine(pipe=2, data=2, zero=2)
    one.train_batch(BATCHES[0])
    one.save_checkpoint(tmp_path).wait()
    other.load_checkpoint(tmp_path)
    assert all(x[:, :, 0].all() for x in histories(other).values())
    jax.tree.map(np.testing.assert_array_equal, histories(one), histories(other))


@pytest.mark.parametrize("functional", [False, True])
@pytest.mark.parametrize("former", [("current", STEPS), ("delayed", 2 * STEPS)], ids=str)
def test_histories_begin_anew(tmp_path, former, functional, capsys):
    """After a checkpoint without them, or of another length."""
    one, other = engine(*former), engine()
    one.train_batch(BATCHES[0])
    one.save_checkpoint(tmp_path).wait()
    if functional:
        step = other.step_fn
        state = jzero.checkpoint.restore(tmp_path, step.state_shardings, shapes=step.state_shapes)
        assert not any(np.asarray(x).any() for x in state.fp8.values())
        state, metrics = step(state, BATCHES[0])
        assert not bool(metrics["skipped"])
        return
    other.load_checkpoint(tmp_path)
    why = "has no maxima for fp8" if former[0] == "current" else "has another fp8.amax_history_len"
    assert f'the checkpoint {why}: fp8.recipe = "delayed" begins anew' in capsys.readouterr().out
    assert not any(x.any() for x in histories(other).values())
    other.train_batch(BATCHES[0])
    assert all(x[:, :, 0].all() and not x[:, :, 1:].any() for x in histories(other).values())


@pytest.mark.parametrize("functional", [False, True])
def test_current_scales_need_no_history(tmp_path, functional):
    one, other = engine(), engine("current")
    one.train_batch(BATCHES[0])
    one.save_checkpoint(tmp_path).wait()
    if functional:
        step = other.step_fn
        state = jzero.checkpoint.restore(tmp_path, step.state_shardings, shapes=step.state_shapes)
        assert state.fp8 == {}
        return
    other.load_checkpoint(tmp_path)
    assert other.global_steps == 1
    assert other.state.fp8 == {}


def test_other_weights_end_a_history(tmp_path):
    """Read without the rest of a checkpoint, they may be far larger than those of this run."""
    one, other = engine(), engine()
    for run in (one, other):
        run.train_batch(BATCHES[0])
    one.save_checkpoint(tmp_path).wait()
    other.load_checkpoint(tmp_path, load_module_only=True)
    assert not any(x.any() for x in histories(other).values())
