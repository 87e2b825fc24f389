"""Moments in bfloat16, rounded at random: against NumPy's neighbours, over every layout, and in training."""

import dataclasses
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.cuda import needs_cuda_compiler
from helpers.sampling import keep
from jax import P
from jax.sharding import NamedSharding

import jzero
from jzero.errors import ConfigError
from jzero.optimizers.moments import noise, to_bfloat16
from jzero.planner import collectives, gpu_devices

KEY = jax.random.key(3)


@partial(jax.jit, static_argnums=(2, 3))
def rounded(x, key=KEY, array=0, number=0):
    return to_bfloat16(x, noise(x.shape, key, array, number))


def neighbours(x):
    """The bfloat16 numbers at and beside x, as float64; x: float32."""
    below = (x.view(np.uint32) & 0xFFFF0000).view(np.float32)  # towards zero
    beyond = ((x.view(np.uint32) & 0xFFFF0000) + 0x10000).view(np.float32)
    return below.astype(np.float64), np.where(below == x, below, beyond).astype(np.float64)


def test_one_of_the_two_neighbours_and_the_mean_is_the_number():
    x = (np.random.default_rng(0).normal(size=40) * 10.0 ** np.arange(-20, 20)).astype(np.float32)
    many = 20_000
    found = np.asarray(rounded(jnp.tile(x, (many, 1))), np.float64)  # [many, 40]
    low, high = neighbours(x)
    assert ((found == low) | (found == high)).all()
    share = (x - low) / (high - low)
    sigma = np.sqrt(share * (1 - share) / many)
    assert (np.abs((found == high).mean(0) - share) < 5 * sigma).all()


def test_numbers_of_bfloat16_stay():
    x = np.array(
        [0.0, -0.0, 1.0, -3.0, np.inf, -np.inf, np.nan, 2.0**-126, ml_dtypes.finfo("bfloat16").max], np.float32
    )
    found = np.asarray(rounded(jnp.asarray(x)), np.float32)
    np.testing.assert_array_equal(found, x)
    assert np.signbit(found[1])


def test_an_average_does_not_stand_still():
    """It moves by 0.00001 of itself at a time, and bfloat16's last bit is 1/128."""

    def average(store):
        @jax.jit
        def advance(value, i):
            return store(0.999 * value.astype(jnp.float32) + 0.001 * 1.01, jax.random.fold_in(KEY, i))

        value = jnp.ones(1000, jnp.bfloat16)
        for i in range(300):
            value = advance(value, i)
        return float(value.astype(jnp.float32).mean())

    exact = 1.01 - 0.01 * 0.999**300
    assert average(lambda x, _: x.astype(jnp.bfloat16)) == 1.0
    assert average(rounded) == pytest.approx(exact, abs=3e-4)  # three times the mean's standard deviation


def test_arrays_and_steps_have_bits_of_their_own():
    x = jnp.full((64, 64), 1 + 1 / 256, jnp.float32)  # in the middle of two numbers
    first, *others = (
        rounded(x, key, *numbers)
        for key, *numbers in [(KEY,), (KEY, 1), (KEY, 0, 1), (KEY, 0, 2), (jax.random.fold_in(KEY, 1),)]
    )
    for other in others:
        assert 0.45 < float((first == other).mean()) < 0.55
    for rows in (first, first.T):  # nor do neighbours in one dimension go together
        assert 0.45 < float((rows[1:] == rows[:-1]).mean()) < 0.55


def test_the_bits_do_not_depend_on_the_layout():
    x = jnp.asarray(np.random.default_rng(1).normal(size=(16, 24)), jnp.float32)
    mesh = jzero.make_mesh(zero=8)
    alone = rounded(x)
    for spec in (P("zero"), P(None, "zero")):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        assert (jax.jit(rounded)(placed) == alone).all()


class Bigrams(nnx.Module):
    """A vector, a matrix and a table: every leaf's bits are code of their own, which CPUs compile slowly."""

    def __init__(self, rngs):
        self.table = nnx.Embed(64, 64, rngs=rngs)
        self.head = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.table(tokens))


def loss_fn(module, batch):
    logits = module(batch["inputs"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]).mean()


def model():
    return jzero.from_flax(lambda rngs: Bigrams(rngs), loss_fn)


TOKENS = np.random.default_rng(2).integers(0, 64, (8, 17)).astype(np.int32)
BATCH = {"inputs": TOKENS[:, :-1], "labels": TOKENS[:, 1:]}


def step_of(stage, kind="AdamW", devices=None, bf16=None, **optimizer):
    config = {
        "train_batch_size": 8, "bf16": bf16 or {}, "optimizer": {"type": kind, "params": {"lr": 1e-2}, **optimizer},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    mesh = jzero.make_mesh(zero=4, devices=devices or jax.devices()[:4])
    return jzero.make_train_step(model(), config, mesh=mesh)


shared_step = lru_cache(step_of)


def train(step, steps):
    state, losses = step.init(jax.random.key(0)), []
    for _ in range(steps):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return state, losses


def moments(state):
    return [x for x in jax.tree.leaves(state.opt_state) if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim]


@pytest.mark.parametrize("kind", keep(["AdamW", "Lion", "Muon"], ["Muon"]))
def test_moments_are_bfloat16_and_a_step_again_rounds_the_same(kind):
    step = step_of(1, kind, state_dtype="bf16")
    state, _ = train(step, 2)
    assert {x.dtype for x in moments(state)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.float32)}
    again, _ = train(step_of(1, kind, state_dtype="bf16"), 2)
    for a, b in zip(moments(state), moments(again), strict=True):
        assert (a == b).all()


def test_the_first_moments_are_neighbours_of_the_exact_ones():
    exact, low = (train(shared_step(3, **given), 1)[0] for given in ({}, {"state_dtype": "bf16"}))
    up = nearest = 0
    for a, b in zip(moments(exact), moments(low), strict=True):
        a, b = np.asarray(a), np.asarray(b, np.float64)
        below, beyond = neighbours(a)
        assert ((b == below) | (b == beyond)).all()
        up += (b == beyond).sum()
        nearest += (b == a.astype(ml_dtypes.bfloat16).astype(np.float64)).sum()
    size = sum(x.size for x in moments(exact))
    assert 0.4 < up / size < 0.6
    assert nearest < 0.9 * size


def test_the_stages_round_alike():
    """But for elements whose gradients, summed in another order, lie on two sides of what the bits decide."""
    first, other = (train(shared_step(stage, state_dtype="bf16"), 2)[0] for stage in (1, 3))
    same = [np.mean(np.asarray(a == b)) for a, b in zip(moments(first), moments(other), strict=True)]
    assert np.mean(same) > 0.99


def test_each_step_rounds_anew():
    step = shared_step(1, state_dtype="bf16")
    state = step.init(jax.random.key(0))
    first, _ = step(jax.tree.map(jnp.copy, state), BATCH)
    later, _ = step(dataclasses.replace(state, step=state.step + 1), BATCH)  # the same gradients
    assert any((a != b).mean() > 0.2 for a, b in zip(moments(first), moments(later), strict=True))


@pytest.mark.parametrize(("kind", "copies"), [("dog", "init_params"), ("prodigy", "params0"), ("amsgrad", "nu_max")])
@pytest.mark.parametrize("masters", ["fp32", "bf16"])
def test_copies_and_running_maxima_stay_float32(kind, copies, masters):
    section = {"enabled": True, "bf16_master_weights_and_grads": masters == "bf16"}
    state = step_of(1, kind, state_dtype="bf16", bf16=section).state_shapes.opt_state
    paths = {
        jax.tree_util.keystr(path): x.dtype for path, x in jax.tree_util.tree_flatten_with_path(state)[0] if x.ndim
    }
    kept = {path for path in paths if copies in path}
    assert kept
    for path, dtype in paths.items():
        assert dtype == (jnp.float32 if path in kept else jnp.bfloat16), path


def test_two_dtypes_of_moments_are_refused():
    config = {
        "train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}, "state_dtype": "fp32"},
        "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"bf16_optimizer_states = true and optimizer.state_dtype = .fp32.*keep one"):
        jzero.make_train_step(model(), config)


def test_training_is_as_with_float32_moments():
    (_, exact), (_, low) = (train(shared_step(3, **given), 60) for given in ({}, {"state_dtype": "bf16"}))
    assert exact[-1] < 0.5 * exact[0]
    assert low != exact
    assert np.mean(low[-10:]) == pytest.approx(np.mean(exact[-10:]), rel=0.05)


@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.slow
def test_rounding_moves_nothing_and_the_state_is_smaller():
    shapes = {name: jax.ShapeDtypeStruct(x.shape, jnp.int32) for name, x in BATCH.items()}
    moved, sizes = [], []
    for given in ({}, {"state_dtype": "bf16"}):
        step = step_of(1, devices=gpu_devices("h100", 4), **given)
        moved.append(collectives(step.lower(shapes).compile(), step.mesh).bytes)
        sizes.append(sum(x.size * x.dtype.itemsize for x in moments(step.state_shapes)))
    assert moved[0] == moved[1]
    assert sizes[1] * 2 == sizes[0]


def test_the_run_report_names_the_rounding(capsys):
    config = {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}, "state_dtype": "bf16"}}
    jzero.initialize(model=model(), config=config)[0].train_batch(BATCH)
    assert "moments bfloat16 rounded at random" in " ".join(capsys.readouterr().out.split())
    bf16 = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    config = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 1e-3}}, "bf16": bf16}
    jzero.initialize(model=model(), config=config)
    text = " ".join(capsys.readouterr().out.split())
    assert "bf16.bf16_optimizer_states has no effect: the optimizer has no moments" in text


def test_other_dtypes_are_refused():
    with pytest.raises(ConfigError, match=r'optimizer.state_dtype.*fp16.*"fp32", "bf16" or "fp8"'):
        step_of(1, state_dtype="fp16")
