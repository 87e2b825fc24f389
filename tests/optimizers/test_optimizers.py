"""Every optimizer: layer stacks, state paths and dtypes; a caller's own; reports and errors."""

import warnings
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from helpers.engines import build, rows
from helpers.optimizers import STEPS, assert_close, config, few, kinds, make, owned, schedule, train, tree, unstack
from helpers.oracle import plain_loop
from helpers.oracle import train as train_step
from helpers.refusals import refuses, says
from helpers.steps import mesh, settings
from layouts import FEATURES, LAYERS, TRAIN, Net, batch

import jzero
from jzero.optimizers import base_lr, callers_optimizer, fused_matrices, make_optimizer, per_layer
from jzero.optimizers.stack_probe import stack_warning


@few
def test_a_stack_is_trained_as_its_layers_would_be(name, params):
    grads = [tree(seed) for seed in range(1, STEPS)]
    stacked, _ = train(make(name, params), tree(0), grads)
    by_layer, _ = train(make(name, params, stacked=None), unstack(tree(0)), [unstack(g) for g in grads])
    assert_close(unstack(stacked), by_layer)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(stacked))


COPIES = {".init_params", ".params0", ".init_particles", ".x0", ".nu_max"}  # of parameters, and a running maximum


@kinds
def test_the_state_of_a_parameter(name, params):
    """Its path ends with the parameter's; it is bfloat16 where that is asked for, but for copies of the parameter."""
    tx, p = make(name, params, state_dtype=jnp.bfloat16), tree(0, jnp.bfloat16)
    state = jax.device_get(jax.jit(tx.init)(p))
    found = owned(state, p)
    if name != "sm3":  # whose accumulators, one vector for each axis, have paths that go on below the parameter's
        others = sum(x.size for x in jax.tree.leaves(state)) - sum(x.size for x, _ in found.values())
        assert others <= 64  # what belongs to no parameter are counters and constants
    if name not in ("adafactor", "novograd", "sm3"):
        assert all(x.shape == param.shape for x, param in found.values())
    if name in ("Adam", "AdamW", "Lamb"):
        assert len(found) == 2 * len(jax.tree.leaves(p))
    for keys, (x, param) in found.items():
        is_copy = not COPIES.isdisjoint(keys)
        assert x.dtype == (jnp.float32 if is_copy else jnp.bfloat16) or not jnp.issubdtype(x.dtype, jnp.floating)
        assert is_copy or x.shape != param.shape or not (x == param).all()  # some optimizers measure from one
    updates, after = jax.eval_shape(tx.update, p, state, p)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}


def test_base_lr():
    for name, params, lr in (
        ("adamw", {"lr": 0.5}, 0.5), ("AdamW", {"lr": "auto"}, 5e-5), ("Adagrad", {}, 1e-2),
        ("adamax", {"learning_rate": 0.25}, 0.25), ("prodigy", {}, 1.0),
    ):  # fmt: skip
        assert base_lr(config(name, params)) == lr
    assert base_lr(None) is None


def test_an_optimizer_from_user_code_or_the_config():
    own = optax.sgd(1.0)
    assert callers_optimizer(own, None) is own
    assert per_layer(own, None) is per_layer(own, {"a": False}) is own
    built = make_optimizer(config("SGD", {"lr": 0.5}), schedule(), stacked=None)
    zero, one = np.zeros(1, np.float32), np.ones(1, np.float32)
    for tx in (built, callers_optimizer(lambda rate: optax.sgd(rate), schedule())):
        assert train(tx, zero, [one])[0] == pytest.approx(-0.01)
    several = 'MultiSteps.* set "gradient_accumulation_steps" in the config'
    for optimizer, lr, words in (
        ("adam", schedule(), "'adam' is neither"),
        (lambda rate: optax.MultiSteps(own, 4), schedule(), f"returned .*{several}"),
        (optax.MultiSteps(own, 4), schedule(), several),
        (optax.sgd, None, "needs one"),
    ):
        refuses(lambda optimizer=optimizer, lr=lr: callers_optimizer(optimizer, lr), words)
    refuses(lambda: make_optimizer(None, None, stacked=None), "none given")


@pytest.mark.slow
def test_optimizers_passed_to_initialize():
    """One of optax's with a constant rate, one that tells its rate, and a function of the schedule."""
    own = optax.sgd(0.1)
    e, tx, _, schedule = build(3, optimizer=own)
    assert (tx, schedule) == (own, None)
    assert np.isnan(e.get_lr()[0])
    injected, *_ = build(3, optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    assert injected.get_lr() == pytest.approx([0.1])
    e, _, _, schedule = build(3, optimizer=lambda lr: optax.sgd(lr), lr_scheduler=lambda count: 0.1 * (count + 1))
    assert [float(schedule(n)) for n in (0, 4)] == pytest.approx([0.1, 0.5])
    e.train_batch(rows(0))
    assert e.get_lr() == pytest.approx([0.2])


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("AdamWW", {}, ["optimizer.type: 'AdamWW'", "did you mean 'AdamW'", "Use Adam, AdamW"]),
        ("MuSGD", {}, ["is not supported", "μP"]),
        ("AdamW", {"beta": [0.9, 0.9]}, ["optimizer.params.beta", "'betas'"]),
        ("AdamW", {"b2": 1.5}, ["optimizer.params.betas: [0.9, 1.5]", "two numbers in [0, 1)"]),
        ("AdamW", {"lr": "3e-4"}, ["lr: '3e-4'", "a number >= 0 in float32's range", "without quotes"]),
        ("AdamW", {"eps": 1e-50}, ["eps: 1e-50", "float32's range"]),
        ("AdamW", {"amsgrad": True}, ["amsgrad: True", '"amsgrad"']),
        ("AdamW", {"adam_w_mode": False}, ["adam_w_mode: False", '"Adam"']),
        ("AdamW", {"b1": 0.9, "betas": [0.9, 0.99]}, ["optimizer.params.b1: betas [0.9, 0.99] is given too"]),
        ("SGD", {"state_dtype": "fp8"}, ["optimizer.params.state_dtype: 'fp8' belongs to \"optimizer\", next to"]),
        ("SGD", {"dampening": 0.1}, ["dampening: 0.1"]),
        ("SGD", {"nesterov": True}, ["nesterov: true needs a momentum"]),
        ("Muon", {"ns_method": "polar"}, ["ns_method: 'polar'", '"gram" or "standard"']),
        ("Muon", {"per_head_muon": True}, ["per_head_muon: True", "not supported yet"]),
        ("adafactor", {"decay_rate": "high"}, ["decay_rate: 'high'", "a number"]),
        ("nadam", {"mu_dtype": "float12"}, ["nadam refuses"]),
    ],
)
def test_errors(name, params, words):
    says(lambda: make(name, params), *words)


FORM = "must be (dimension, widths), such as (1, (4, 2, 2)), with a dimension of 1 to 1"


@pytest.mark.parametrize(
    ("name", "cut", "text"),
    [
        ("mlp/kernel", (1, [6, 8]), "the widths must add up to dimension 1 of the parameter, (4, 12)"),
        ("mlp/up", (1, [12]), "no such parameter; they are mlp/kernel"),
        *(("mlp/kernel", cut, FORM) for cut in ([6, 6], (0, [2, 2]), (2, [1]), 12)),
    ],
    ids=str,
)
def test_fused_matrices_that_do_not_fit(name, cut, text):
    """A cut is a dimension and widths."""
    params = {"mlp": {"kernel": jax.ShapeDtypeStruct((4, 12), jnp.float32)}}
    model = SimpleNamespace(fused_matrices={name: cut})
    says(lambda: fused_matrices(model, params), f"fused_matrices['{name}'] = {cut!r}: {text}")
    assert fused_matrices(object(), params) == {}


# ------------------------------------------------------------------ optimizers of the caller on a stack


WHICH = {"ends": False, "stack": True}
BATCHES = [batch(seed) for seed in range(3)]


def is_matrix(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


def tuned(params):
    return {"ends": is_matrix(params["ends"]), "stack": jax.tree.map(lambda p: p.ndim > 2, params["stack"])}


def by_key(params):
    return {key: dict.fromkeys(part, key) for key, part in params.items()}


MASKED = optax.adamw(0.05, weight_decay=2.0, mask=is_matrix)


@cache
def begin():
    params = jax.device_get(jax.jit(Net().init)(jax.random.key(0)))
    params["stack"]["b"] = np.random.default_rng(1).normal(size=params["stack"]["b"].shape).astype(np.float32)
    return params


def make_step(tx):
    config = {key: x for key, x in settings(TRAIN, 3, stack={"unroll": False}).items() if key != "optimizer"}
    return jzero.make_train_step(Net(), config, optimizer=tx, mesh=mesh())


def train_layers(tx):
    def loss(params, batch):
        x = batch["x"] @ params["ends"]["first"]
        for layer in params["layers"]:
            x = x + jnp.tanh(x @ layer["w"] + layer["b"])
        return ((x @ params["ends"]["last"] - batch["y"]) ** 2).mean()

    params = begin()
    layers = [jax.tree.map(lambda x, k=k: x[k], params["stack"]) for k in range(LAYERS)]
    return plain_loop(loss, {"ends": params["ends"], "layers": layers}, BATCHES, tx).losses


def test_per_layer_is_optax_on_the_layers():
    expected = train_layers(MASKED)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        seen, _ = train_step(make_step(per_layer(MASKED, WHICH)), begin(), BATCHES)
    np.testing.assert_allclose(seen[:, 0], expected, rtol=2e-5)
    bare = plain_loop(lambda params, batch: Net().loss(params, batch, None), begin(), BATCHES, MASKED).losses
    assert max(abs(bare - expected)) > 1e-3 * max(expected)
    with pytest.warns(UserWarning, match="per_layer"):
        text = jzero.report(make_step(MASKED))
    warned = text.split("Warnings")[1].split("Layout")[0]
    assert "stack/b" in warned
    assert "per_layer(tx" in warned


SHAPES = {
    "ends": {"out": jax.ShapeDtypeStruct((FEATURES, 1000), jnp.float32)},
    "stack": {
        "kernel": jax.ShapeDtypeStruct((LAYERS, FEATURES, FEATURES), jnp.float32),
        "bias": jax.ShapeDtypeStruct((LAYERS, FEATURES), jnp.float32),
    },
}
BOTH = "stack/bias, stack/kernel"
PROBED = [
    (optax.adamw(0.01, weight_decay=1e-4, mask=is_matrix), "stack/bias"),
    (optax.partition({"stack": optax.lars(0.1), "ends": optax.sgd(0.1)}, by_key), BOTH),
    (optax.adamw(0.01, mask=tuned), None),
    (optax.partition({"stack": optax.adam(0.01), "ends": optax.sgd(0.1)}, by_key), None),
    (optax.chain(optax.clip_by_global_norm(1.0), per_layer(optax.lars(0.1), WHICH)), None),
    (optax.adamw(0.01, mask={"ends": {"out": True}, "stack": {"kernel": True, "bias": False}}), None),
    (optax.chain(optax.add_noise(0.1, 0.5, 0), optax.sgd(1.0)), None),
]


@pytest.mark.parametrize(("tx", "leaves"), PROBED)
def test_which_optimizers_warn(tx, leaves):
    text = stack_warning(tx, SHAPES)
    assert text.startswith(f"the optimizer passed in does not update {leaves} layer") if leaves else not text


# ------------------------------------------------------------------ the moving average of the weights


ROWS, DECAY = 16, 0.9
X = np.random.default_rng(0).normal(size=(5, ROWS, 4)).astype(np.float32)


def engine(stage, lr_scheduler=None, **more):
    config = settings(ROWS, stage, ema={"decay": DECAY}, optimizer={"type": "AdamW", "params": {"lr": 0.05}}) | more
    loss = lambda model, batch: jnp.mean((model(batch["x"]) - 1) ** 2)  # noqa: E731
    model = jzero.from_flax(lambda rngs: nnx.Linear(4, 4, rngs=rngs), loss)
    return jzero.initialize(model=model, config=config, mesh=mesh(), lr_scheduler=lr_scheduler)[0]


def test_a_scheduler_for_the_configs_optimizer():
    e = engine(2, optax.linear_schedule(0.0, 1.0, 10))
    before = jax.device_get(e.state.params)
    e.train_batch({"x": X[0]})
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(e.state.params), before)  # the rate is 0
    assert e.get_lr() == pytest.approx([0.1])


def test_the_moving_average_is_that_of_the_steps_and_resumes(tmp_path):
    run = engine(3, frozen_parameters=["bias"])
    resumed = engine(2, frozen_parameters=["bias"])
    ema = jax.device_get(run.state.params)
    for i, x in enumerate(X):
        if i == len(X) - 1:
            run.save_checkpoint(tmp_path)
            resumed.load_checkpoint(tmp_path)
            resumed.train_batch({"x": x})
        run.train_batch({"x": x})
        params = jax.device_get(run.state.params)
        ema = optax.incremental_update(params, ema, 1 - DECAY)
    averaged = run.step_fn.averaged(run.state)
    kernel = np.asarray(averaged.params["kernel"])
    np.testing.assert_allclose(kernel, ema["kernel"], rtol=1e-6)
    np.testing.assert_allclose(resumed.state.opt_state.ema["kernel"], ema["kernel"], rtol=1e-6)
    assert np.abs(ema["kernel"] - params["kernel"]).max() > 0.01
    assert averaged.params["kernel"].sharding == run.state.params["kernel"].sharding
    np.testing.assert_array_equal(averaged.params["bias"], params["bias"])
    plain = np.mean((X[0] @ ema["kernel"] + ema["bias"] - 1) ** 2)
    assert float(run.eval_batch({"x": X[0]}, ema=True)) == pytest.approx(float(plain), rel=1e-5)
    run.save_16bit_model(tmp_path, ema=True)
    loaded = jzero.weights.load(tmp_path, run.step_fn)
    np.testing.assert_array_equal(loaded["kernel"], kernel.astype(jnp.bfloat16))
    run.train_batch({"x": np.full_like(X[0], np.nan)})  # skipped
    np.testing.assert_array_equal(run.state.opt_state.ema["kernel"], kernel)


def test_the_moving_average_is_float32_beside_half_masters():
    run = engine(2, bf16={"enabled": True, "bf16_master_weights_and_grads": True})
    assert run.state.params["kernel"].dtype == jnp.bfloat16
    assert run.state.opt_state.ema["kernel"].dtype == jnp.float32


def test_the_moving_average_without_its_section_is_an_error():
    refuses(lambda: engine(0, ema=None).eval_batch({"x": X[0]}, ema=True), r'add "ema": {"decay": 0.999}')
    refuses(lambda: engine(0, ema={"decay": 1}), r"ema.decay = 1")
