"""Steps with moments in bfloat16 and fp8: what is stored, how it is rounded, checkpoints, training."""

import dataclasses
import re
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from helpers.cuda import on_gpu
from helpers.oracle import train
from helpers.reference import Decoder, batches
from helpers.refusals import refuses
from helpers.steps import settings

import jzero
from jzero.optimizers import moments
from jzero.optimizers.moments import decode_fp8, encode_fp8, noise, state_format, to_bfloat16
from jzero.optimizers.transforms import in_fp32
from jzero.planner import collectives, gpu_devices
from jzero.run.run_report import report
from jzero.tree import named

SMALL, VECTORS = 256, ("stack/b",)
BATCH = batches("decoder")[0]


@pytest.fixture(autouse=True)
def _moments_of_small_models(monkeypatch):
    monkeypatch.setattr(moments, "FP8_LEAST", SMALL)


def config_of(stage, state_dtype="fp8", kind="AdamW", **more):
    optimizer = {"type": kind, "params": {"lr": 1e-2}, "state_dtype": state_dtype}
    return settings(len(BATCH["inputs"]), stage, optimizer=optimizer, stack={"unroll": False}) | more


def make_step(*given, devices=None, **more):
    mesh = jzero.make_mesh(zero=4, devices=devices or jax.devices()[:4])
    return jzero.make_train_step(Decoder(), config_of(*given, **more), mesh=mesh)


shared_step = lru_cache(make_step)


def test_large_moments_are_in_fp8_and_the_others_in_float32():
    state = shared_step(2, "fp8", "AdamW").init(jax.random.key(0))
    of_state, params = named(state.opt_state), named(state.params)
    found = {name: x for name, x in of_state.items() if name.split("/")[2:3] and name.split("/")[2] in ("mu", "nu")}
    assert len(found) == 4 * len(params) - 2 * len(VECTORS)
    for name, x in found.items():
        parameter = name.split("/", 3)[3]
        if name.startswith("codes/"):
            assert x.dtype == (jnp.float32 if parameter in VECTORS else jnp.float8_e5m2)
            assert x.sharding.spec == params[parameter].sharding.spec
        else:
            assert parameter not in VECTORS
            assert x.shape == ((2,) if "stack/" in name else ())
    assert {x.dtype for x in params.values()} == {jnp.dtype(jnp.float32)}


def test_a_step_rounds_once_the_same_again_and_the_next_one_anew():
    def moments_of(dtype, number):  # of a step with the same gradients
        step = shared_step(3, dtype, "AdamW")
        state = step.init(jax.random.key(0))
        state = dataclasses.replace(state, step=state.step + number)
        return [x for x in jax.tree.leaves(jax.device_get(step(state, BATCH)[0].opt_state)) if x.ndim]

    cases = ("fp32", 0), ("bf16", 0), ("bf16", 0), ("bf16", 1)
    for exact, first, again, following in zip(*(moments_of(*case) for case in cases), strict=True):
        assert first.dtype == jnp.bfloat16
        toward, beyond = neighbours_in_16_bits(exact)
        assert ((first == toward) | (first == beyond)).all()
        assert (first == again).all()
        assert (first != following).mean() > 0.2


@pytest.mark.parametrize(
    ("stage", "dtype", "kind"),
    [
        (3, "bf16", "AdamW"),
        pytest.param(2, "fp8", "AdamW", marks=pytest.mark.slow),
        pytest.param(2, "fp8", "Muon", marks=pytest.mark.slow),
    ],
)
def test_training_is_as_with_float32_moments(stage, dtype, kind):
    exact, low = (train(shared_step(stage, d, kind), None, [BATCH] * 60)[0][:, 0] for d in ("fp32", dtype))
    assert exact[-1] < 0.5 * exact[0]
    assert (low != exact).any()
    assert np.mean(low[-10:]) == pytest.approx(np.mean(exact[-10:]), rel=0.05)


def in_float32(opt_state):
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
    [("fp8", "fp8", {}, True), ("bf16", "fp8", {"ema": {"decay": 0.9}}, False), ("fp32", "fp8", OFFLOAD, True)],
)
def test_a_checkpoint_continues_with_moments_in_another_dtype(tmp_path, here, there, more, strict):
    def engine(dtype, stage, **degrees):
        config = config_of(stage, dtype, scheduler=WARMUP, **more)
        return jzero.initialize(model=Decoder(), config=config, mesh=jzero.make_mesh(**degrees))[0]

    one, other = engine(there, 1, zero=4, data=2), engine(here, 3, zero=8)
    for _ in range(3):
        one.train_batch(BATCH)
    one.save_checkpoint(tmp_path).wait()
    other.load_checkpoint(tmp_path, load_module_strict=strict)
    before, after = in_float32(one.state.opt_state), in_float32(other.state.opt_state)
    assert before.keys() == after.keys()
    for name, x in before.items():  # one of eight numbers away at most, or the smallest number
        rtol, atol = (0, 0) if here == there else (1 / 7, 1e-8)
        np.testing.assert_allclose(after[name], x, rtol=rtol, atol=atol * np.abs(x).max(), err_msg=name)
    same = [float(e.train_batch(BATCH)) for e in (one, other)]
    assert same[0] == pytest.approx(same[1], rel=1e-5)  # of the same parameters
    changed = [float(e.train_batch(BATCH)) for e in (one, other)]
    assert changed[0] == pytest.approx(changed[1], rel=0.01)  # after a step by moments of one rounding more
    assert one.get_lr() == other.get_lr()


@on_gpu
@pytest.mark.slow
def test_rounding_moves_nothing_but_maxima_and_the_state_is_smaller():
    shapes = {name: jax.ShapeDtypeStruct(x.shape, jnp.int32) for name, x in BATCH.items()}
    found = {}
    for dtype in ("fp32", "bf16", "fp8"):
        step = make_step(1, dtype, devices=gpu_devices("h100", 4), stack={"unroll": True})
        large = [x for x in jax.tree.leaves(step.state_shapes.opt_state) if x.size >= SMALL]
        size = sum(x.size * x.dtype.itemsize for x in large)
        found[dtype] = collectives(step.lower(shapes).compile(), step.mesh), size
    moved, sizes = zip(*found.values(), strict=True)
    assert sizes[0] == 2 * sizes[1] == 4 * sizes[2]
    assert moved[0].bytes == moved[1].bytes
    maxima = 2 * (2 + 1 * 2)  # of the first and second moments of two matrices at the ends and of one in two layers
    assert moved[2].bytes - moved[0].bytes == 4 * maxima
    assert moved[2].launches - moved[0].launches <= 2


UNUSED = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


@pytest.mark.parametrize(
    ("given", "more", "text"),
    [
        ((2, "fp8"), {}, "moments float8_e5m2 rounded at random (5,120 of the optimizer's 5,"),
        ((2, "fp8", "SGD"), {}, "optimizer.state_dtype has no effect: the optimizer has no moments of 256 elements"),
        ((2,), {"bf16": UNUSED, "optimizer": {"type": "SGD"}}, "bf16_optimizer_states has no effect: the opt"),
    ],
)
def test_the_run_report_names_the_rounding(given, more, text):
    assert text in " ".join(report((make_step if more else shared_step)(*given, **more)).split())


def test_what_is_refused():
    refuses(lambda: make_step(1, "fp16"), r'optimizer.state_dtype.*fp16.*"fp32", "bf16" or "fp8"')
    twice = r"bf16_optimizer_states = true and optimizer.state_dtype = .fp32.*keep one"
    refuses(lambda: make_step(1, "fp32", bf16=UNUSED), twice)


KEY, MANY = jax.random.key(3), 4096
GRID = np.arange(128, dtype=np.uint8).view(ml_dtypes.float8_e5m2).astype(np.float64)
GRID = GRID[np.isfinite(GRID)]


@partial(jax.jit, static_argnums=(2, 3))
def to_16_bits(x, key=KEY, array=0, number=0):
    return to_bfloat16(x, noise(x.shape, key, array, number))


# Two programs: in one XLA might leave out the rounding in between.
decoded = jax.jit(decode_fp8)
encoded = jax.jit(lambda x: encode_fp8(x, False, noise(x.shape, KEY)))
nearest = jax.jit(encode_fp8, static_argnums=1)


def to_8_bits(x):
    return decoded(*encoded(x))


def neighbours_in_16_bits(x):
    """Return the numbers of bfloat16 at x or towards zero, and at x or beyond."""
    toward = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)
    beyond = ((x.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    return toward.astype(np.float64), np.where(toward == x, toward, beyond).astype(np.float64)


def neighbours_in_8_bits(x):
    """The same of e5m2, scaled so that the largest number is in [2^14, 2^15)."""
    scale = 2.0 ** (np.floor(np.log2(np.abs(x).max().astype(np.float64))) - 14)
    size = np.abs(x.astype(np.float64)) / scale
    i = np.searchsorted(GRID, size)
    return np.copysign(GRID[np.where(GRID[i] == size, i, i - 1)] * scale, x), np.copysign(GRID[i] * scale, x)


NORMAL = np.random.default_rng(0).normal(size=64).astype(np.float32)
FORMATS = {
    "bf16": (to_16_bits, neighbours_in_16_bits, NORMAL * np.float32(10.0) ** np.arange(-32, 32)),
    "fp8": (to_8_bits, neighbours_in_8_bits, NORMAL * np.float32(2.0) ** -np.arange(0, 32, 0.5)),
}


@pytest.mark.parametrize("name", FORMATS)
def test_one_of_the_two_neighbours_and_the_mean_is_the_number(name):
    rounded, neighbours, x = FORMATS[name]
    x, many = x.astype(np.float32), 20_000
    found = np.asarray(rounded(np.tile(x, (many, 1))), np.float64)  # [many, 64]
    toward, beyond = neighbours(x)
    assert ((found == toward) | (found == beyond)).all()
    above = toward != 0  # only 0 becomes 0, so below the smallest number all are that
    assert above.sum() > 55
    assert (found[:, ~above] == beyond[~above]).all()
    share = ((x - toward) / (beyond - toward))[above]
    sigma = np.sqrt(share * (1 - share) / many)
    assert (np.abs((found == beyond).mean(0)[above] - share) <= 5 * sigma).all()


def test_zeros_largest_numbers_and_what_is_not_finite():
    for largest in (0, 1.0, 1.9999999, 2e38, 1e-37):
        x = np.float32([largest, -largest, 0])
        np.testing.assert_allclose(to_8_bits(x), x, rtol=0.25)
    of_gpus = np.uint32(0x7FFFFFFF).view(np.float32)  # NaN as their arithmetic returns it
    for bad in (jnp.nan, of_gpus, jnp.inf, -jnp.inf):
        assert np.isnan(to_8_bits(np.float32([1.0, 0.0, bad]))).all()
    exact = np.float32([0.0, 1.0, -3.0, np.inf, -np.inf, of_gpus, 2.0**-126, ml_dtypes.finfo("bfloat16").max])
    np.testing.assert_array_equal(np.float32(to_16_bits(exact)), exact)


def test_without_random_bits_the_nearest_number_and_each_layer_has_a_scale():
    x = np.random.default_rng(1).normal(size=(3, 20, 50)).astype(np.float32) * np.float32([[[1e-9]], [[1]], [[1e9]]])
    codes, scale = nearest(x, True)
    np.testing.assert_array_equal(scale, 2 ** (np.floor(np.log2(np.abs(x).max((1, 2)))) - 14))
    for layer, of_layer in zip(x, np.asarray(decoded(codes, scale), np.float64), strict=True):
        toward, beyond = neighbours_in_8_bits(layer)
        closest = np.minimum(np.abs(layer - toward), np.abs(beyond - layer))
        np.testing.assert_allclose(np.abs(of_layer - layer), closest, rtol=1e-6)
        assert (decoded(*nearest(layer, False)) == of_layer).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e5m2])
def test_moments_and_parameters_have_random_bits_of_their_own(dtype):
    """Two parameters with one gradient: six moments halfway between two bfloat16 numbers."""
    params = dict.fromkeys("ab", np.zeros(MANY, np.float32))
    middle, top = (1.125, 1.25) if dtype == jnp.float8_e5m2 else (1 + 1 / 256, 1 + 1 / 128)
    grads = dict.fromkeys(params, np.float32([top] + [middle] * (MANY - 1)))
    tx = in_fp32(optax.chain(*[optax.trace(0.5)] * 3), state_format(dtype))
    _, state = jax.jit(lambda grads: tx.update(grads, tx.init(params), params, rounding=KEY))(grads)
    found = jax.tree.leaves(getattr(state, "codes", state))
    assert [x.dtype for x in found] == [dtype] * 6
    found = [np.asarray(x, np.float32) for x in found]
    for i, x in enumerate(found):
        assert 0.45 < float((x == x[1:].max()).mean()) < 0.55
        for other in found[:i]:
            assert 0.45 < float((x == other).mean()) < 0.55


def test_a_new_state_is_not_computed_by_the_compiler():
    """XLA folds constants element by element, and the maximum of a new moment is one."""
    tx = in_fp32(optax.trace(0.9), state_format(jnp.float8_e5m2))
    params = {"w": jax.ShapeDtypeStruct((2**12, 2**12), jnp.float32)}
    program = jax.jit(tx.init).lower(params).compile().as_text()
    assert re.search(r" reduce\(|reduce[\w.]*fusion", program), program
