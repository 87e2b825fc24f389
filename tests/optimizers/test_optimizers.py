"""Every optimizer: layer stacks, state paths and dtypes; a caller's own; reports and errors."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.engines import assert_same, build, rows
from helpers.optimizers import STEPS, assert_close, config, few, kinds, make, schedule, train, tree, unstack
from helpers.refusals import refuses

from jzero.errors import ConfigError
from jzero.optimizers import base_lr, callers_optimizer, fused_matrices, make_optimizer, per_layer


@few
def test_a_stack_is_trained_as_its_layers_would_be(name, params):
    grads = [tree(seed) for seed in range(1, STEPS)]
    stacked, _ = train(make(name, params), tree(0), grads)
    by_layer, _ = train(make(name, params, stacked=None), unstack(tree(0)), [unstack(g) for g in grads])
    assert_close(unstack(stacked), by_layer)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(stacked))


def owners(state, params):
    """{state leaf's path: (state leaf, parameter)} for the state leaves that belong to a parameter."""
    known = {tuple(map(str, path)): x for path, x in jax.tree_util.tree_flatten_with_path(params)[0]}
    found = {}
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        keys = tuple(map(str, path))
        for suffix, param in known.items():
            if keys[-len(suffix) :] == suffix:
                found[keys] = (x, param)
    return found


COPIES = {".init_params", ".params0", ".init_particles", ".x0", ".nu_max"}  # of parameters, and a running maximum


@kinds
def test_the_state_of_a_parameter(name, params):
    """Its path ends with the parameter's; it is bfloat16 where that is asked for, but for copies of the parameter."""
    tx, p = make(name, params, state_dtype=jnp.bfloat16), tree(0, jnp.bfloat16)
    state = tx.init(p)
    found = owners(state, p)
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
    assert base_lr(config("adamw", {"lr": 0.5})) == 0.5
    assert base_lr(config("AdamW", {"lr": "auto"})) == 5e-5
    assert base_lr(config("Adagrad", {})) == 1e-2
    assert base_lr(config("adamax", {"learning_rate": 0.25})) == 0.25
    assert base_lr(config("prodigy", {})) == 1.0
    assert base_lr(None) is None


def test_an_optimizer_from_user_code_or_the_config():
    own = optax.sgd(1.0)
    assert callers_optimizer(own, None) is own
    assert per_layer(own, None) is per_layer(own, {"a": False}) is own
    built = make_optimizer(config("SGD", {"lr": 0.5}), schedule(), stacked=None)
    for tx in (built, callers_optimizer(lambda rate: optax.sgd(rate), schedule())):
        assert float(tx.update(jnp.ones(1), tx.init(jnp.ones(1)), jnp.ones(1))[0][0]) == pytest.approx(-0.01)
    several = 'MultiSteps.* set "gradient_accumulation_steps" in the config'
    for optimizer, lr, words in (
        ("adam", schedule(), "'adam' is neither"),
        (
            lambda rate: optax.MultiSteps(optax.sgd(rate), 4),
            schedule(),
            'returned .*MultiSteps.*"gradient_accumulation',
        ),
        (optax.MultiSteps(own, 4), schedule(), several),
        (optax.sgd, None, "needs one"),
    ):
        refuses(lambda optimizer=optimizer, lr=lr: callers_optimizer(optimizer, lr), words)
    refuses(lambda: make_optimizer(None, None, stacked=None), "none given")


def test_a_scheduler_for_the_configs_optimizer():
    e, *_ = build(lr_scheduler=optax.linear_schedule(0.0, 1.0, 10))
    before = jax.device_get(e.state.params)
    e.train_batch(rows(0))
    assert_same(e.state.params, before)  # the rate is 0
    assert e.get_lr() == pytest.approx([0.1])


@pytest.mark.slow
def test_optimizers_passed_to_initialize():
    """Constant rates of optax's own, and one that takes the rate of a schedule, are the same SGD."""
    own, by_rate = optax.sgd(0.1), lambda lr: optax.sgd(lr)
    e, tx, _, schedule = build(3, optimizer=own)
    assert tx is own
    assert schedule is None
    assert np.isnan(e.get_lr()[0])
    injected, *_ = build(3, optimizer=optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
    assert injected.get_lr() == pytest.approx([0.1])
    scheduled, _, _, schedule = build(3, optimizer=by_rate, lr_scheduler=lambda count: 0.1 * (count + 1))
    assert [float(schedule(n)) for n in (0, 4)] == pytest.approx([0.1, 0.5])
    for engine in (e, injected, scheduled):
        engine.train_batch(rows(0))
        assert_close(engine.state.params, e.state.params, rtol=1e-5, atol=1e-6)
    assert scheduled.get_lr() == pytest.approx([0.2])


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("AdamWW", {}, ["optimizer.type: 'AdamWW'", "did you mean 'AdamW'", "Use Adam, AdamW"]),
        ("MuSGD", {}, ["is not supported", "μP"]),
        ("AdamW", {"beta": [0.9, 0.9]}, ["optimizer.params.beta", "'betas'"]),
        ("AdamW", {"betas": [0.9, 1.5]}, ["[0.9, 1.5]", "two numbers in [0, 1)"]),
        ("AdamW", {"lr": "3e-4"}, ["lr: '3e-4'", "a number >= 0 in float32's range", "without quotes"]),
        ("Adam", {"torch_adam": "true"}, ["torch_adam: 'true'", "without quotes"]),
        ("AdamW", {"eps": 1e-50}, ["eps: 1e-50", "float32's range"]),
        ("AdamW", {"amsgrad": True}, ["amsgrad: True", '"amsgrad"']),
        ("AdamW", {"adam_w_mode": False}, ["adam_w_mode: False", '"Adam"']),
        ("AdamW", {"b1": 0.9, "betas": [0.9, 0.99]}, ["optimizer.params.b1: betas [0.9, 0.99] is given too"]),
        ("AdamW", {"b2": 1.5}, ["optimizer.params.betas: [0.9, 1.5]", "two numbers in [0, 1)"]),
        ("SGD", {"state_dtype": "fp8"}, ["optimizer.params.state_dtype: 'fp8' belongs to \"optimizer\", next to"]),
        ("adamax", {"learning_rate": 0.1, "lr": 0.1}, ["optimizer.params.learning_rate: lr 0.1 is given too"]),
        ("SGD", {"dampening": 0.1}, ["dampening: 0.1"]),
        ("SGD", {"nesterov": True}, ["nesterov: true needs a momentum"]),
        ("Muon", {"ns_method": "polar"}, ["ns_method: 'polar'", '"gram" or "standard"']),
        ("Muon", {"per_head_muon": True}, ["per_head_muon: True", "not supported yet"]),
        ("adafactor", {"decay_rate": "high"}, ["decay_rate: 'high'", "a number"]),
        ("nadam", {"mu_dtype": "float12"}, ["nadam refuses"]),
    ],
)
def test_errors(name, params, words):
    with pytest.raises(ConfigError) as error:
        make(name, params)
    for word in words:
        assert word in str(error.value)


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
    with pytest.raises(ConfigError) as error:
        fused_matrices(SimpleNamespace(fused_matrices={name: cut}), params)
    assert f"fused_matrices['{name}'] = {cut!r}: {text}" in str(error.value)
    assert fused_matrices(object(), params) == {}
