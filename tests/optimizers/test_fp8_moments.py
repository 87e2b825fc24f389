"""Moments in fp8: against NumPy's neighbours in e5m2, over every layout, in checkpoints and in training."""

import dataclasses
import re
from functools import lru_cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers.cuda import needs_cuda_compiler
from jax import P
from jax.sharding import NamedSharding
from test_state_dtype import BATCH, train

import jzero
from jzero.optimizers import moments
from jzero.optimizers.moments import decode_fp8, encode_fp8, noise, state_format
from jzero.optimizers.transforms import in_fp32
from jzero.planner import collectives, gpu_devices
from jzero.run.run_report import report
from jzero.tree import named
from models.llama import Llama, LlamaConfig

KEY, SMALL = jax.random.key(3), 4096


@pytest.fixture(autouse=True)
def _moments_of_small_models(monkeypatch):
    """Round their matrices too."""
    monkeypatch.setattr(moments, "FP8_LEAST", SMALL)


GRID = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float64)
GRID = np.sort(GRID[np.isfinite(GRID)])


# Two programs: in one XLA might leave out the rounding in between.
decoded = jax.jit(decode_fp8)
encoded = jax.jit(lambda x, layered, key: encode_fp8(x, layered, noise(x.shape, key)), static_argnums=1)
nearest = jax.jit(encode_fp8, static_argnums=1)


def rounded(x, layered=False, key=KEY):
    return decoded(*encoded(x, layered, key))


def neighbours(x, largest):
    """Return the numbers of e5m2 at and beside x, scaled so that `largest` is in [2^14, 2^15); x: float64."""
    scale = 2.0 ** (np.floor(np.log2(largest)) - 14)
    i = np.searchsorted(GRID, x / scale)
    return GRID[np.where(GRID[i] == x / scale, i, i - 1)] * scale, GRID[i] * scale


def test_one_of_the_two_neighbours_and_the_mean_is_the_number():
    x = (np.random.default_rng(0).normal(size=64) * 2.0 ** -np.arange(0, 32, 0.5)).astype(np.float32)
    many = 20_000
    found = np.asarray(rounded(jnp.tile(x, (many, 1))), np.float64)  # [many, 64]
    low, high = neighbours(x.astype(np.float64), np.abs(x).max())
    assert ((found == low) | (found == high)).all()
    away, toward = np.where(x > 0, high, low), np.where(x > 0, low, high)
    above = toward != 0  # only 0 becomes 0, so below the smallest number all are that
    assert above.sum() > 55
    assert (found[:, ~above] == away[~above]).all()
    share = ((x - low) / (high - low))[above]
    sigma = np.sqrt(share * (1 - share) / many)
    assert (np.abs((found == high).mean(0)[above] - share) <= 5 * sigma).all()


def test_zeros_largest_numbers_and_what_is_not_finite():
    assert (rounded(jnp.zeros(8)) == 0).all()
    for largest in (1.0, 1.9999999, 2e38, 1e-37):
        x = jnp.float32([largest, -largest, 0])
        found = np.asarray(rounded(x))
        np.testing.assert_allclose(found, x, rtol=0.25)
    of_gpus = np.uint32(0x7FFFFFFF).view(np.float32)  # NaN as their arithmetic returns it
    for bad in (jnp.nan, of_gpus, jnp.inf, -jnp.inf):
        assert jnp.isnan(rounded(jnp.float32([1.0, 0.0, bad]))).all()


def test_without_random_bits_the_nearest_number():
    x = np.random.default_rng(1).normal(size=1000).astype(np.float32)
    low, high = neighbours(x.astype(np.float64), np.abs(x).max())
    found = np.asarray(decoded(*nearest(x, False)), np.float64)
    np.testing.assert_allclose(np.abs(found - x), np.minimum(x - low, high - x), rtol=1e-6)


def test_each_layer_has_a_scale():
    x = np.random.default_rng(2).normal(size=(3, 4, 5)).astype(np.float32) * np.float32([[[1e-9]], [[1]], [[1e9]]])
    codes, scale = nearest(x, True)
    np.testing.assert_array_equal(scale, 2 ** (np.floor(np.log2(np.abs(x).max((1, 2)))) - 14))
    for layer in range(3):
        alone, scale_alone = nearest(x[layer], False)
        assert (codes[layer] == alone).all()
        assert scale[layer] == scale_alone


def test_an_average_does_not_stand_still():
    """It moves by 0.001 of itself at a time at most, and its last bit is 1/4; another number sets the scale."""

    @jax.jit
    def average(value, i):
        return encoded((0.999 * value + 0.001 * 2.0).at[0].set(100.0), False, jax.random.fold_in(KEY, i))

    value, size = jnp.array([100.0, *[1.0] * 4000]), 300
    for i in range(size):
        value = decoded(*average(value, i))
    exact = 2 - 0.999**size
    assert float(value[1:].mean()) == pytest.approx(exact, abs=0.03)  # three standard deviations


def test_the_bits_do_not_depend_on_the_layout():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(16, 24)), jnp.float32)
    mesh = jzero.make_mesh(zero=8)
    for spec in (P("zero"), P(None, "zero")):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        assert (jax.jit(rounded)(placed) == rounded(x)).all()


def test_small_arrays_stay_and_a_state_without_large_ones_is_as_without_fp8():
    params = {"small": jnp.zeros((3, SMALL - 1)), "large": jnp.zeros((3, SMALL))}
    tx = in_fp32(optax.trace(0.9), state_format(jnp.float8_e5m2, stacked=True))
    state = tx.init(params)
    assert (state.codes.trace["small"].dtype, state.codes.trace["large"].dtype) == (jnp.float32, jnp.float8_e5m2)
    assert {name: x.shape for name, x in state.scales.items()} == {"trace/large": (3,)}
    assert isinstance(tx.init({"small": params["small"]}), optax.TraceState)


def test_moments_and_parameters_have_random_bits_of_their_own():
    """Two parameters with one gradient: four moments whose numbers lie in the middle of two."""
    params = {"a": jnp.zeros(SMALL), "b": jnp.zeros(SMALL)}
    grads = jax.tree.map(lambda x: x.at[:].set(1.125).at[0].set(1.25), params)
    tx = in_fp32(optax.chain(optax.trace(0.5), optax.trace(0.5)), state_format(jnp.float8_e5m2))
    _, state = tx.update(grads, tx.init(params), params, rounding=KEY)
    found = jax.tree.leaves(state.codes)
    assert len(found) == 4
    for i, x in enumerate(found):
        assert 0.45 < float((x == x[1:].max()).mean()) < 0.55
        for other in found[:i]:
            assert 0.45 < float((x == other).mean()) < 0.55


SHAPE = LlamaConfig(2, 64, 4, 2, 192, vocab_size=64)


def config_of(stage=2, kind="AdamW", state_dtype="fp8", **more):
    return {
        "train_batch_size": 8,
        "optimizer": {"type": kind, "params": {"lr": 3e-3}, "state_dtype": state_dtype},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def llama():
    return jzero.from_flax(lambda rngs: Llama(SHAPE, rngs=rngs))


@lru_cache
def default_step():
    return step_of()


def step_of(*given, devices=None, **more):
    mesh = jzero.make_mesh(zero=4, devices=devices or jax.devices()[:4])
    return jzero.make_train_step(llama(), config_of(*given, **more), mesh=mesh)


def test_large_moments_are_in_fp8_and_the_others_in_float32():
    step = default_step()
    state, _ = train(step, 1)
    of_state, params = named(state.opt_state), named(state.params)
    moments = {name: x for name, x in of_state.items() if name.split("/")[2:3] and name.split("/")[2] in ("mu", "nu")}
    assert len(moments) == 4 * len(params) - 2 * sum("norm" in name for name in params)
    for name, x in moments.items():
        parameter = params[name.split("/", 3)[3]]
        small = "norm" in name
        if name.startswith("codes/"):
            assert x.dtype == (jnp.float32 if small else jnp.float8_e5m2)
            assert x.sharding.spec == parameter.sharding.spec
        else:
            assert not small
            assert x.shape == ((2,) if "stack/" in name else ())
    assert {x.dtype for x in params.values()} == {jnp.dtype(jnp.float32)}


def test_a_step_again_rounds_the_same_and_the_next_one_anew():
    step = default_step()
    state = step.init(jax.random.key(0))
    first, again, later = (
        step(dataclasses.replace(jax.tree.map(jnp.copy, state), step=state.step + i), BATCH)[0].opt_state.codes
        for i in (0, 0, 1)
    )
    pairs = [x for x in zip(*map(jax.tree.leaves, (first, again, later)), strict=True) if x[0].dtype.itemsize == 1]
    assert all((a == b).all() for a, b, _ in pairs)
    assert all((a != c).mean() > 0.2 for a, _, c in pairs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["AdamW", "Muon", "Lamb"])
def test_training_is_as_with_float32_moments(kind):
    (_, exact), (_, low) = (train(step_of(2, kind, dtype), 60) for dtype in ("fp32", "fp8"))
    assert low != exact
    np.testing.assert_allclose(low, exact, atol=0.05)  # they fall from 4.2; moments fluctuate by a quarter


@pytest.mark.slow
def test_a_skipped_step_changes_nothing():
    step = step_of(fp16={"enabled": True, "initial_scale_power": 40})  # so large that the gradients overflow
    state = step.init(jax.random.key(0))
    before = jax.tree.map(np.asarray, state.opt_state)
    state, metrics = step(state, BATCH)
    assert bool(metrics["skipped"])
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.opt_state), before)


@pytest.mark.slow
def test_a_checkpoint_continues_on_another_mesh_at_another_stage(tmp_path):
    state, _ = train(step_of(1), 3)
    jzero.checkpoint.save(state, tmp_path, "a").wait()
    step = jzero.make_train_step(llama(), config_of(3), mesh=jzero.make_mesh(zero=8))
    read = jzero.checkpoint.restore(tmp_path, step.state_shardings, shapes=step.state_shapes)
    for a, b in zip(jax.tree.leaves(state.opt_state), jax.tree.leaves(read.opt_state), strict=True):
        assert a.dtype == b.dtype
        assert (np.asarray(a) == np.asarray(b)).all()
    _, metrics = step(read, BATCH)
    assert np.isfinite(float(metrics["loss"]))


def in_float32(opt_state):
    """Return the moments by name; the bare state's names, whatever its dtype."""
    leaves = named(jax.device_get(opt_state))
    found = {}
    for name, x in leaves.items():
        scale = leaves.get(name.replace("codes/", "scales/")) if "codes/" in name else None
        if "scales/" not in name:
            x = x.astype(np.float32)
            found[name.replace("codes/", "")] = x if scale is None else np.asarray(decode_fp8(x, scale))
    return found


WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 100}}


OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("here", "there", "more", "strict"),
    [
        ("fp8", "fp32", {}, True),
        pytest.param("bf16", "fp8", {"ema": {"decay": 0.9}}, False, marks=pytest.mark.slow),
        pytest.param("fp8", "bf16", {"ema": {"decay": 0.9}}, True, marks=pytest.mark.slow),
        pytest.param("fp32", "fp8", OFFLOAD, True, marks=pytest.mark.slow),
        pytest.param("fp8", "fp32", OFFLOAD, False, marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_continues_with_moments_in_another_dtype(tmp_path, here, there, more, strict):
    def engine(dtype, stage, **degrees):
        config = config_of(stage, state_dtype=dtype, scheduler=WARMUP, **more)
        return jzero.initialize(model=llama(), config=config, mesh=jzero.make_mesh(**degrees))[0]

    one, other = engine(there, 1, zero=4, data=2), engine(here, 3, zero=8)
    for _ in range(3):
        one.train_batch(BATCH)
    one.save_checkpoint(tmp_path).wait()
    other.load_checkpoint(tmp_path, load_module_strict=strict)
    before, after = in_float32(one.state.opt_state), in_float32(other.state.opt_state)
    assert before.keys() == after.keys()
    for name, x in before.items():  # one of eight numbers away at most, or the smallest number
        np.testing.assert_allclose(after[name], x, rtol=1 / 7, atol=1e-8 * np.abs(x).max(), err_msg=name)
    same = [float(e.train_batch(BATCH)) for e in (one, other)]
    assert same[0] == pytest.approx(same[1], rel=1e-5)  # of the same parameters
    changed = [float(e.train_batch(BATCH)) for e in (one, other)]
    assert changed[0] == pytest.approx(changed[1], rel=0.01)  # after a step by moments of one rounding more
    assert one.get_lr() == other.get_lr()


@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.slow
def test_a_quarter_of_the_bytes_and_the_maxima_are_combined():
    shapes = {name: jax.ShapeDtypeStruct(x.shape, jnp.int32) for name, x in BATCH.items()}
    found = {}
    for dtype in ("fp32", "fp8"):
        step = step_of(1, state_dtype=dtype, devices=gpu_devices("h100", 4))
        moved = collectives(step.lower(shapes).compile(), step.mesh)
        large = [x for x in jax.tree.leaves(step.state_shapes.opt_state) if x.size >= SMALL]
        found[dtype] = moved, sum(x.size * x.dtype.itemsize for x in large)
    (before, exact), (after, low) = found.values()
    assert low * 4 == exact
    maxima = 2 * (2 + 4 * 2)  # of the first and second moments of two matrices at the ends and of four in two layers
    assert after.bytes - before.bytes == 4 * maxima
    assert after.launches - before.launches <= 2


def test_the_run_report_names_the_rounding():
    text = " ".join(report(default_step()).split())
    assert "moments float8_e5m2 rounded at random (212,992 of the optimizer's 213,654 elements)" in text
    text = " ".join(report(step_of(2, "SGD")).split())
    assert "optimizer.state_dtype has no effect: the optimizer has no moments of 4,096 elements" in text


def test_a_new_state_is_not_computed_by_the_compiler():
    """XLA folds constants element by element, and the maximum of a new moment is one."""
    tx = in_fp32(optax.trace(0.9), state_format(jnp.float8_e5m2))
    params = {"w": jax.ShapeDtypeStruct((2**12, 2**12), jnp.float32)}
    program = jax.jit(tx.init).lower(params).compile().as_text()
    assert re.search(r" reduce\(|reduce[\w.]*fusion", program), program
