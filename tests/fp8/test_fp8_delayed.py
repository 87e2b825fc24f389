"""Scales that the maxima of former steps decide: beside NumPy, plain JAX with the same scales, and in every layout."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.fp8 import FP8, distances, reference
from helpers.sampling import keep
from helpers.stack_models import BATCHES, ROWS, WIDTH, SmallGPT, loss_fn
from helpers.steps import settings
from helpers.tensor_models import batches, initial, make_step
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import jzero
from jzero.kernels.fp8.delayed_scaling import advance, bound, exponent_one_hot, initial_history, scales
from jzero.kernels.fp8.quantized import E4M3, E5M2
from jzero.run.run_report import report
from jzero.tree import named

STEPS = 4
SECTION = {**FP8["fp8"], "recipe": "delayed", "amax_history_len": STEPS}
DELAYED = {**FP8, "fp8": SECTION}
KERNELS = {f"stack/{name}/kernel" for name in ("attention/qkv", "attention/out", "mlp/gate_up", "mlp/down")}


def kernels(params):
    return {name: np.asarray(x) for name, x in named(params).items() if name in KERNELS}


def largest_weights(params):
    return {name: np.abs(x).reshape(len(x), -1).max(1) for name, x in kernels(params).items()}


def above(x):
    return 2.0 ** (np.floor(np.log2(np.asarray(x, np.float64))) + 1)


def started(model="llama", params=None, **layout):
    step = make_step(model, **{"precision": DELAYED, **layout})
    return step, step.init(jax.random.key(0), initial(model) if params is None else params)


@hypothesis_settings(max_examples=30)
@given(st.lists(st.floats(2.0**-126, float(np.finfo(np.float32).max), width=32), min_size=5, max_size=5))
def test_the_bound_of_summed_counts_is_that_of_the_largest(numbers):
    expected = min(above(max(numbers)), 2.0**127)
    np.testing.assert_array_equal(bounds(np.float32(numbers)), [expected] * 2)


@jax.jit
def bounds(numbers):
    counts = exponent_one_hot(numbers).sum(0)
    return bound(counts), bound(counts.astype(jnp.bfloat16))  # as a sum of gradients may be


def test_a_history_forgets():
    for nothing in (0, np.inf):  # a step with an infinity changes nothing
        np.testing.assert_array_equal(bounds(np.float32([nothing] * 5)), [0, 0])
    seen = jax.jit(initial_history, static_argnums=1)(np.full((1, 8, 8), 0.75, np.float32), 2)
    np.testing.assert_array_equal(seen[0], [[0, 0], [0, 0], [1, 0]])
    scaled = jax.jit(lambda seen, gradients: scales(seen[0], gradients), static_argnums=1)
    for gradients, before in ((E5M2, 2.0**15 * 2**6), (E4M3, 2.0**8 * 2**12)):  # before a step has seen any
        np.testing.assert_array_equal(scaled(seen, gradients), [2.0 ** (8 - 4), before, 2.0**8])
    moved = jax.jit(lambda seen, largest: advance({"w": seen}, {"w": exponent_one_hot(largest)}, ())["w"])
    # largest element of a step, bound of activations and gradients, bound of weights
    for largest, expected, of_weights in ((5.0, 8.0, 8.0), (0.3, 8.0, 8.0), (0.1, 0.5, 0.5)):
        seen = moved(seen, np.full((1, 3), largest, np.float32))
        np.testing.assert_array_equal(scaled(seen, E4M3), 256 / np.array([expected, expected, of_weights]))


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [(0.5, 2.0**-10, 0.125), (2.0**4, 2.0**-6, 2.0)], ids=["clipped", "with room"])
def test_a_step_by_known_scales(bounds):
    """The first bounds are below the maxima, so that much is clipped; plain JAX rounds by the same scales."""
    step, state = started()
    x, g, w = bounds
    known, expected, _ = reference("llama", scales=(256 / x, 2.0**15 / g, 256 / w))
    by_maxima = reference("llama")[1]
    assert state.fp8.keys() == KERNELS
    fp8 = {name: jnp.broadcast_to(jnp.float32(bounds)[:, None], x.shape) for name, x in state.fp8.items()}
    state = dataclasses.replace(state, fp8=jax.device_put(fp8, step.state_shardings.fp8))
    found, metrics = jax.device_get(step.gradients(state, batches("llama")[0]))
    np.testing.assert_allclose([float(metrics["loss"]), float(metrics["grad_norm"])], known[0], rtol=1e-6)
    assert max(distances(found, expected).values()) < 2e-2  # the scales of norms, summed over rows in bfloat16
    matrices = [d for name, d in distances(found, expected).items() if name in KERNELS]
    apart = [d for name, d in distances(by_maxima, expected).items() if name in KERNELS]
    assert max(matrices) < 3e-4
    assert max(apart) > (0.1 if x < 1 else 1e-3)  # the scales matter


LAYOUTS = [
    {"zero": 2, "data": 2, "stage": 2, "accum": 2, "unroll": False},
    {"zero": 8, "stage": 3, "remat": "full"},
    {"zero": 2, "pipe": 2, "stage": 1, "accum": 4, "pipeline": {"schedule": "zero_bubble"}},
    {"zero": 2, "tensor": 2, "stage": 3},
]


@pytest.mark.parametrize("layout", keep(LAYOUTS, LAYOUTS[:1]), ids=str)
def test_a_step_notes_what_it_saw(layout):
    """Over all layers, micro-batches, stages and devices, the maxima are those of plain JAX on one device.

    Its scales are the current ones, and a layout rounds in other places: a maximum beside a power of two may be beyond
    it, by one. A part of a divided product is not larger than the whole, so with `tensor` more are off; elsewhere at
    most one in eight is. The weights' maxima are exact.
    """
    step, state = started(**layout)
    weights = largest_weights(initial("llama"))
    for name, largest in weights.items():
        np.testing.assert_array_equal(state.fp8[name][:, 2, 0], above(largest))
        assert not np.asarray(state.fp8[name])[:, :2].any()
    state, metrics = step(state, batches("llama")[0])
    assert not bool(metrics["skipped"])
    off, noted = [], reference("llama")[2]
    for name, found in jax.device_get(state.fp8).items():
        np.testing.assert_array_equal(found[:, 2, 0], above(weights[name]))
        off.append(np.log2(found[:, :2, 0] / above(noted[name.split("/")[2]][::-1])))
    assert np.abs(off).max() <= 1, off
    assert np.count_nonzero(off) <= (6 if "tensor" in layout else 2), off


@pytest.mark.slow
def test_histories_stay_with_their_layers():
    """Also where layers move between the stages: each layer's weights have a size of their own."""
    interleaved = {"pipe": 2, "zero": 4, "stage": 1, "accum": 4, "pipeline": {"schedule": "interleaved", "chunks": 2}}
    params = jax.tree.map(np.copy, initial("four-layers"))
    sizes = 2.0 ** np.array([0, 2, 1, 3])
    for kernel in kernels(params).values():
        kernel *= sizes.reshape(-1, *[1] * (kernel.ndim - 1))
    weights = largest_weights(params)
    assert all(len(set(above(largest))) > 2 for largest in weights.values())
    found = []
    for layout in ({}, interleaved):
        step, state = started("four-layers", params, **layout)
        state, _ = step(state, batches("four-layers")[0])
        seen = jax.device_get(state.fp8)
        for name, history in seen.items():
            np.testing.assert_array_equal(history[:, 2, 0], above(weights[name]))
        found.append(np.stack([history[:, :2, 0] for _, history in sorted(seen.items())]))
    assert np.abs(np.log2(found[0] / found[1])).max() <= 1  # both round to bfloat16 in places of their own
    assert len(np.unique(np.log2(found[0]).sum(-1))) > 4  # layers differ


@pytest.mark.slow
def test_the_first_step_sees_small_gradients():
    """Those of a mean over 65,536 tokens; the model's own have 256. None may underflow to zero in a layer of e4m3."""
    norms = []
    for section in (FP8["fp8"], SECTION):
        step, state = started(precision={**FP8, "fp8": {**section, "format": "e4m3"}})
        scale = dataclasses.replace(state.loss_scale, scale=state.loss_scale.scale / 256)
        gradients, _ = step.gradients(dataclasses.replace(state, loss_scale=scale), batches("llama")[0])
        norms.append({name: np.linalg.norm(x) for name, x in kernels(jax.device_get(gradients)).items()})
    for name, norm in norms[0].items():
        assert norms[1][name] == pytest.approx(norm, rel=0.05)  # clipped and rounded elements


@pytest.mark.slow
def test_gradients_alone_move_the_histories():
    """A loop with an update of its own goes on by the state that `gradients` returns."""
    (step, state), batch = started(), batches("llama")[0]
    _, _, moved = step.gradients(state, batch, new_state=True)
    after, _ = step(state, batch)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(moved.fp8), jax.device_get(after.fp8))


def test_frozen_weights_have_current_scales():
    frozen = {**DELAYED, "frozen_parameters": ["mlp/"]}
    excluded = {**frozen, "fp8": {**SECTION, "exclude": ["mlp/down"]}}  # names a frozen one
    trained = {name for name in KERNELS if "attention" in name}
    assert make_step("llama", precision=excluded).state_shapes.fp8.keys() == trained
    step = make_step("llama", precision=frozen, unroll=False)
    assert step.state_shapes.fp8.keys() == trained
    step.trace(batches("llama")[0])
    text = re.sub(r"\s+", " ", report(step))
    assert "(format hybrid, delayed scales, by 4 steps)" in text
    assert "frozen weights use current scales: mlp/down/kernel, mlp/gate_up/kernel" in text


class Half(SmallGPT):
    def __init__(self, rngs, rate=0.0):
        super().__init__(rngs, rate)
        self.tokens.dtype = self.positions.dtype = jnp.bfloat16


def engine(recipe="delayed", length=STEPS, exclude=(), **mesh):
    history_len = {"amax_history_len": length} if recipe == "delayed" else {}
    section = {"enabled": True, "min_size": WIDTH, "recipe": recipe, "exclude": list(exclude), **history_len}
    config = settings(ROWS, 2, 2, mesh=mesh, **FP8) | {"fp8": section}
    return jzero.initialize(model=jzero.from_flax(Half, loss_fn, stack="blocks"), config=config)[0]


def histories(engine):
    return jax.tree.map(np.asarray, jax.device_get(engine.state.fp8))


BOTH = ["stack/down/kernel", "stack/up/kernel"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("former", "now", "zeros", "why"),
    [
        ({}, {}, [], None),
        ({}, {"pipe": 2, "data": 2, "zero": 2}, [], None),
        ({"recipe": "current"}, {}, BOTH, "not in the checkpoint"),
        ({"length": 2 * STEPS}, {}, BOTH, "another fp8.amax_history_len"),
        ({"exclude": ["down"]}, {"exclude": ["up"]}, ["stack/down/kernel"], "not in the checkpoint"),
        ({}, {"recipe": "current"}, [], None),
    ],
    ids=str,
)
def test_histories_of_a_checkpoint(tmp_path, capsys, former, now, zeros, why):
    """They go on as they are; those that it has not begin anew, by the engine and by the functions."""
    one, other = engine(**former), engine(**now)
    one.train_batch(BATCHES[0])
    one.save_checkpoint(tmp_path).wait()
    step = other.step_fn
    state = jzero.checkpoint.restore(tmp_path, step.state_shardings, shapes=step.state_shapes)
    other.load_checkpoint(tmp_path)
    notice = f"fp8 histories start at zero ({why}): " if why else "fp8 histories"
    assert (notice in capsys.readouterr().out) == bool(why)
    saved = histories(one)
    for found in (state.fp8, histories(other)):
        assert sorted(name for name, x in found.items() if not np.asarray(x).any()) == zeros
        for name in found.keys() - set(zeros):
            np.testing.assert_array_equal(found[name], saved[name])
    for e in (one, other):
        e.train_batch(BATCHES[0])
    assert other.global_steps == 2
    if former == now:
        jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(e.state.params) for e in (one, other)))
        jax.tree.map(np.testing.assert_array_equal, histories(one), histories(other))
    for name, x in histories(other).items():
        assert x[:, :, 0].all()
        assert x[:, :, 1:].any() == (name not in zeros)


def test_other_weights_end_a_history(tmp_path, capsys):
    """Read without the rest of a checkpoint, they may be far larger than those of this run."""
    one = engine()
    one.state = dataclasses.replace(one.state, fp8=jax.tree.map(lambda x: x + 1, one.state.fp8))
    one.save_checkpoint(tmp_path).wait()
    one.load_checkpoint(tmp_path, load_module_only=True)
    assert not any(x.any() for x in histories(one).values())
    assert "fp8 histories start at zero (only the weights are read): " in capsys.readouterr().out
