"""Steps with moments in bfloat16 and fp8: what is stored, how it is rounded, checkpoints, training."""

import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler
from helpers.oracle import train
from helpers.reference import Decoder, batches
from helpers.refusals import refuses
from test_rounding import neighbours_in_16_bits

import jzero
from jzero.optimizers import moments
from jzero.optimizers.moments import decode_fp8
from jzero.planner import collectives, gpu_devices
from jzero.run.run_report import report
from jzero.tree import named

SMALL, VECTORS = 256, ("stack/b",)
BATCH = batches("decoder")[0]


@pytest.fixture(autouse=True)
def _moments_of_small_models(monkeypatch):
    """Round their matrices to fp8 too."""
    monkeypatch.setattr(moments, "FP8_LEAST", SMALL)


def config_of(stage, state_dtype="fp8", kind="AdamW", **more):
    return {
        "train_batch_size": len(BATCH["inputs"]),
        "optimizer": {"type": kind, "params": {"lr": 1e-2}, "state_dtype": state_dtype},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def make_step(*given, devices=None, **more):
    mesh = jzero.make_mesh(zero=4, devices=devices or jax.devices()[:4])
    return jzero.make_train_step(Decoder(), config_of(*given, **more), mesh=mesh)


shared_step = lru_cache(make_step)


def run(step, steps):
    seen, state = train(step, None, [BATCH] * steps)
    return seen[:, 0], state


def arrays(state):
    return [x for x in jax.tree.leaves(state.opt_state) if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim]


def test_the_first_moments_in_bfloat16_are_neighbours_of_the_exact_ones():
    (_, exact), (_, low) = (run(shared_step(3, dtype), 1) for dtype in ("fp32", "bf16"))
    assert {x.dtype for x in arrays(low)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(low.params)} == {jnp.dtype(jnp.float32)}
    up = nearest = 0
    for a, b in zip(arrays(exact), arrays(low), strict=True):
        a, b = np.asarray(a), np.asarray(b, np.float64)
        toward, beyond = neighbours_in_16_bits(a)
        assert ((b == toward) | (b == beyond)).all()
        up += ((b == beyond) & (toward != beyond)).sum()
        nearest += (b == a.astype(ml_dtypes.bfloat16).astype(np.float64)).sum()
    between = sum(np.count_nonzero(np.subtract(*neighbours_in_16_bits(np.asarray(a)))) for a in arrays(exact))
    assert between > 1000
    assert 0.4 < up / between < 0.6
    assert nearest < 0.9 * sum(x.size for x in arrays(exact))


def test_the_stages_round_alike():
    """But for elements whose gradients, summed in another order, lie on two sides of what the bits decide."""
    first, other = (run(shared_step(stage, "bf16"), 2)[1] for stage in (1, 3))
    same = [np.mean(np.asarray(a == b)) for a, b in zip(arrays(first), arrays(other), strict=True)]
    assert np.mean(same) > 0.99


def test_large_moments_are_in_fp8_and_the_others_in_float32():
    state = shared_step(2).init(jax.random.key(0))
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


@pytest.mark.parametrize(("stage", "dtype"), [(1, "bf16"), (2, "fp8")])
def test_a_step_again_rounds_the_same_and_the_next_one_anew(stage, dtype):
    step = shared_step(stage, dtype)
    state = step.init(jax.random.key(0))
    first, again, later = (
        step(dataclasses.replace(jax.tree.map(jnp.copy, state), step=state.step + i), BATCH)[0].opt_state
        for i in (0, 0, 1)  # the same gradients
    )
    pairs = [x for x in zip(*map(jax.tree.leaves, (first, again, later)), strict=True) if x[0].dtype.itemsize < 4]
    assert all((a == b).all() for a, b, _ in pairs)
    assert all((a != c).mean() > 0.2 for a, _, c in pairs)


@pytest.mark.parametrize(
    ("stage", "dtype", "kind"),
    [
        (3, "bf16", "AdamW"),
        pytest.param(2, "fp8", "AdamW", marks=pytest.mark.slow),
        pytest.param(2, "fp8", "Muon", marks=pytest.mark.slow),
    ],
)
def test_training_is_as_with_float32_moments(stage, dtype, kind):
    (exact, _), (low, _) = (run(shared_step(stage, d, kind), 60) for d in ("fp32", dtype))
    assert exact[-1] < 0.5 * exact[0]
    assert (low != exact).any()
    assert np.mean(low[-10:]) == pytest.approx(np.mean(exact[-10:]), rel=0.05)


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
        ("fp8", "fp8", {}, True),
        ("bf16", "fp8", {"ema": {"decay": 0.9}}, False),
        ("fp32", "fp8", OFFLOAD, True),
    ],
)
def test_a_checkpoint_continues_with_moments_in_another_dtype(tmp_path, here, there, more, strict):
    """On another mesh at another stage, too."""

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


@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.slow
def test_rounding_moves_nothing_but_maxima_and_the_state_is_smaller():
    shapes = {name: jax.ShapeDtypeStruct(x.shape, jnp.int32) for name, x in BATCH.items()}
    found = {}
    for dtype in ("fp32", "bf16", "fp8"):
        step = make_step(1, dtype, devices=gpu_devices("h100", 4))
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
        ((1, "bf16"), {}, "moments bfloat16 rounded at random"),
        ((2, "fp8"), {}, "moments float8_e5m2 rounded at random (5,120 of the optimizer's 5,"),
        ((2, "fp8", "SGD"), {}, "optimizer.state_dtype has no effect: the optimizer has no moments of 256 elements"),
        (
            (2,),
            {"bf16": UNUSED, "optimizer": {"type": "SGD"}},
            "bf16_optimizer_states has no effect: the opt",
        ),
    ],
)
def test_the_run_report_names_the_rounding(given, more, text):
    assert text in " ".join(report((make_step if more else shared_step)(*given, **more)).split())


def test_what_is_refused():
    refuses(lambda: make_step(1, "fp16"), r'optimizer.state_dtype.*fp16.*"fp32", "bf16" or "fp8"')
    twice = r"bf16_optimizer_states = true and optimizer.state_dtype = .fp32.*keep one"
    refuses(lambda: make_step(1, "fp32", bf16=UNUSED), twice)
