"""Every optimizer: layer stacks, state paths and dtypes, sharding, reports; the errors."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers.optimizers import STEPS, assert_close, cases, config, few, kinds, make, schedule, train, tree, unstack
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.errors import ConfigError
from jzero.optimizers import base_lr, callers_optimizer, describe, fused_matrices, lr_of, make_optimizer, per_layer
from jzero.optimizers.lr_schedules import make_lr_schedule


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


@cases
def test_state_leaves_end_with_their_parameters_path(name, params):
    p = tree(0)
    state = jax.eval_shape(make(name, params).init, p)
    found = owners(state, p)
    total = sum(x.size for x in jax.tree.leaves(state))
    owned = sum(x.size for x, _ in found.values())
    if name != "sm3":  # whose accumulators, one vector for each axis, have paths that go on below the parameter's
        assert total - owned <= 64  # what belongs to no parameter are counters and constants
    if name not in ("adafactor", "novograd", "sm3"):
        assert all(x.shape == param.shape for x, param in found.values())
    if name in ("Adam", "AdamW", "Lamb"):
        assert len(found) == 2 * len(jax.tree.leaves(p))


@cases
def test_no_copy_of_a_parameter_is_rounded(name, params):
    """Some optimizers measure from one."""
    p = tree(0)
    for x, param in owners(make(name, params, state_dtype=jnp.bfloat16).init(p), p).values():
        rounded = param.astype(jnp.bfloat16)
        assert x.dtype == jnp.float32 or x.shape != param.shape or not (x == rounded).all()


COPIES = {".init_params", ".params0", ".init_particles", ".x0", ".nu_max"}  # of parameters, and a running maximum


@kinds
@pytest.mark.parametrize("state_dtype", [jnp.float32, jnp.bfloat16])
def test_state_dtype_and_low_precision_parameters(name, params, state_dtype):
    tx, p = make(name, params, state_dtype=state_dtype), tree(0, jnp.bfloat16)
    state = jax.eval_shape(tx.init, p)
    updates, after = jax.eval_shape(tx.update, p, state, p)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, state)
    floating = {keys: x.dtype for keys, (x, _) in owners(state, p).items() if jnp.issubdtype(x.dtype, jnp.floating)}
    copies = {keys for keys in floating if not COPIES.isdisjoint(keys)}
    assert {floating[keys] for keys in copies} <= {jnp.dtype(jnp.float32)}
    assert {floating[keys] for keys in floating.keys() - copies} <= {jnp.dtype(state_dtype)}
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.float32)}


@kinds
def test_sharded_equals_unsharded(name, params):
    mesh = Mesh(np.array(jax.devices()).reshape(8), ("zero",))
    specs = {
        "embed": PartitionSpec("zero"),
        "stack": {
            "w": PartitionSpec(None, "zero"),
            "up": PartitionSpec(None, "zero"),
            "b": PartitionSpec(None, "zero"),
        },
        "head": PartitionSpec("zero"),
    }
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda s: isinstance(s, PartitionSpec))
    tx, grads = make(name, params), [tree(seed) for seed in range(1, STEPS)]
    expected, _ = train(tx, tree(0), grads)

    p = jax.device_put(tree(0), shardings)
    by_path = {tuple(map(str, path)): s for path, s in jax.tree_util.tree_flatten_with_path(shardings)[0]}
    shapes = {tuple(map(str, path)): x.shape for path, x in jax.tree_util.tree_flatten_with_path(p)[0]}

    def sharding(path, x):
        keys = tuple(map(str, path))
        for suffix, s in by_path.items():
            if keys[-len(suffix) :] == suffix and x.shape == shapes[suffix]:
                return s
        return NamedSharding(mesh, PartitionSpec())

    state_shardings = jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(tx.init, p))
    state = jax.jit(tx.init, out_shardings=state_shardings)(p)

    @jax.jit
    def step(p, state, grad):
        updates, state = tx.update(grad, state, p)
        p, state = optax.apply_updates(p, updates), state
        return jax.lax.with_sharding_constraint((p, state), (shardings, state_shardings))

    for grad in grads:
        p, state = step(p, state, jax.device_put(grad, shardings))
    assert_close(p, expected)


# ---------------------------------------------------------------- reporting, clients


def test_describe():
    notes = describe(config("Adam", {"torch_adam": True, "weight_decay": 0.1}), schedule())
    assert "this is AdamW" in notes[0]
    assert "0.1" in notes[0]
    assert "torch_adam" in notes[1]
    assert describe(config("AdamW", {}), schedule()) == ()
    cycle = make_lr_schedule("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1}, 0.1)
    assert describe(config("SGD", {}), cycle) == (
        "SGD: OneCycle's cycle_momentum is not used, the optimizer has no betas",
    )


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
    made = callers_optimizer(lambda rate: optax.sgd(rate), schedule())
    assert float(made.update(jnp.ones(1), made.init(jnp.ones(1)))[0][0]) == pytest.approx(-0.01)
    built = make_optimizer(config("SGD", {"lr": 0.5}), schedule(), stacked=None)
    assert float(built.update(jnp.ones(1), built.init(jnp.ones(1)), jnp.ones(1))[0][0]) == pytest.approx(-0.01)
    for optimizer, words in (
        ("adam", "'adam' is neither"),
        (
            lambda rate: optax.MultiSteps(optax.sgd(rate), 4),
            'returned .*MultiSteps.*, which .*"gradient_accumulation_steps"',
        ),
        (optax.MultiSteps(own, 4), 'MultiSteps.* jzero accumulates: set "gradient_accumulation_steps" in the config'),
    ):
        with pytest.raises(ConfigError, match=words):
            callers_optimizer(optimizer, schedule())
    with pytest.raises(ConfigError, match="needs one"):
        callers_optimizer(optax.sgd, None)
    with pytest.raises(ConfigError, match="none given"):
        make_optimizer(None, None, stacked=None)


def test_lr_of():
    tx = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=schedule().lr))
    p = jnp.ones(2)
    state = tx.init(p)
    assert float(jax.jit(lr_of)(state)) == pytest.approx(0.01)
    _, state = tx.update(p, state, p)
    _, state = tx.update(p, state, p)
    assert float(lr_of(state)) == pytest.approx(0.02)
    assert np.isnan(lr_of(optax.adam(0.1).init(p)))


def test_per_layer_of_a_clients_transform():
    tx = optax.scale_by_trust_ratio()
    assert per_layer(tx, None) is tx
    assert per_layer(tx, {"a": False}) is tx
    p = {"stack": jnp.array([[3.0, 4.0], [0.6, 0.8]])}
    layered = per_layer(tx, {"stack": True})
    updates, _ = layered.update({"stack": jnp.ones((2, 2))}, layered.init(p), p)
    np.testing.assert_allclose(updates["stack"], np.array([[5, 5], [1, 1]]) / np.sqrt(2), rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "params", "words"),
    [
        ("AdamWW", {}, ["optimizer.type: 'AdamWW'", "did you mean 'AdamW'", "Use Adam, AdamW"]),
        ("MuSGD", {}, ["is not supported", "μP"]),
        ("lbfgs", {}, ["line search"]),
        ("AdamW", {"beta": [0.9, 0.9]}, ["optimizer.params.beta", "'betas'"]),
        ("AdamW", {"betas": [0.9, 1.5]}, ["[0.9, 1.5]", "two numbers in [0, 1)"]),
        ("AdamW", {"lr": "3e-4"}, ["lr: '3e-4'", "a number >= 0 in float32's range", "without quotes"]),
        ("AdamW", {"eps": 1e-50}, ["eps: 1e-50", "float32's range"]),
        ("AdamW", {"amsgrad": True}, ["amsgrad: True", '"amsgrad"']),
        ("AdamW", {"adam_w_mode": False}, ["adam_w_mode: False", '"Adam"']),
        ("AdamW", {"b1": 0.9, "betas": [0.9, 0.99]}, ["optimizer.params.b1: betas [0.9, 0.99] is given too"]),
        ("AdamW", {"b2": 1.5}, ["optimizer.params.betas: [0.9, 1.5]", "two numbers in [0, 1)"]),
        ("SGD", {"b1": 0.9}, ["optimizer.params.b1: unknown parameter"]),
        ("SGD", {"state_dtype": "fp8"}, ["optimizer.params.state_dtype: 'fp8' belongs to \"optimizer\", next to"]),
        ("adamax", {"learning_rate": 0.1, "lr": 0.1}, ["optimizer.params.learning_rate: lr 0.1 is given too"]),
        ("SGD", {"dampening": 0.1}, ["dampening: 0.1"]),
        ("SGD", {"nesterov": True}, ["nesterov: true needs a momentum"]),
        ("Muon", {"ns_method": "polar"}, ["ns_method: 'polar'", '"gram" or "standard"']),
        ("Muon", {"per_head_muon": True}, ["per_head_muon: True", "not supported yet"]),
        ("adafactor", {"decay": 0.8}, ["optimizer.params.decay", "did you mean 'decay_rate'"]),
        ("adafactor", {"decay_rate": "high"}, ["decay_rate: 'high'", "a number"]),
        ("nadam", {"mu_dtype": "float12"}, ["nadam refuses"]),
    ],
)
def test_errors(name, params, words):
    with pytest.raises(ConfigError) as error:
        make(name, params)
    for word in words:
        assert word in str(error.value)


def test_all_problems_at_once():
    with pytest.raises(ConfigError) as error:
        make("Adam", {"lr": -1, "torch_adam": 1.0, "epsilon": 1e-8, "betas": 0.9})
    assert len(error.value.problems) == 4


def test_fused_matrices_of_a_model():
    params = {"mlp": {"kernel": jax.ShapeDtypeStruct((4, 12), jnp.float32)}}
    read = lambda **fused: fused_matrices(SimpleNamespace(fused_matrices=fused), params)  # noqa: E731
    assert fused_matrices(object(), params) == {}
    assert read(**{"mlp/kernel": (1, [6, 6])}) == {"mlp/kernel": (1, (6, 6))}
    with pytest.raises(ConfigError) as error:
        read(**{"mlp/kernel": (1, [6, 8]), "mlp/up": (1, [12])})
    adds, unknown = error.value.problems
    assert "['mlp/kernel'] = (1, [6, 8]): the widths must add up to dimension 1 of the parameter, (4, 12)" in adds
    assert "fused_matrices['mlp/up'] = (1, [12]): no such parameter; they are mlp/kernel" in unknown


@pytest.mark.parametrize("cut", [[6, 6], (0, [2, 2]), (2, [1]), 12], ids=str)
def test_a_cut_is_a_dimension_and_widths(cut):
    params = {"mlp": {"kernel": jax.ShapeDtypeStruct((4, 12), jnp.float32)}}
    with pytest.raises(ConfigError) as error:
        fused_matrices(SimpleNamespace(fused_matrices={"mlp/kernel": cut}), params)
    text = "must be (dimension, widths), such as (1, (4, 2, 2)), with a dimension of 1 to 1"
    assert f"fused_matrices['mlp/kernel'] = {cut!r}: {text}" in str(error.value)
