"""Every optimizer by name and parameters, and a small tree that it trains."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers.sampling import keep

from jzero import optimizers
from jzero.optimizers import table
from jzero.optimizers.lr_schedules import LRSchedule

LAYERS, STEPS = 4, 3
RATES = {"learning_rate", "max_learning_rate"}
STACKED = {"embed": False, "stack": {"w": True, "up": True, "b": True}, "head": False}

CASES = [
    ("Adam", {"weight_decay": 0.1}),
    ("Adam", {"weight_decay": 0.1, "adam_w_mode": False}),
    ("AdamW", {"weight_decay": 0.1, "betas": [0.8, 0.95], "eps": 1e-6}),
    ("AdamW", {"bias_correction": False}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("SGD", {}),
    ("Lamb", {"weight_decay": 0.1, "max_coeff": 100.0}),
    ("Lion", {"weight_decay": 0.1}),
    ("Adagrad", {"weight_decay": 0.1}),
    ("Muon", {"weight_decay": 0.1, "muon_lr": 0.02, "adam_lr": 0.01}),
    ("adafactor", {"min_dim_size_to_factor": 4}),
    ("adafactor", {"min_dim_size_to_factor": 4, "momentum": 0.9}),
    *(
        (name, {})
        for name in (*table.OPTAX_ELEMENTWISE, *table.OPTAX_PER_PARAMETER)
        if name not in ("adafactor", "noisy_sgd")
    ),
]
IDS = ["-".join([name, *params]) for name, params in CASES]
# One of each kind: moments by element, momentum, a norm by leaf, a sign, a matrix, factors, a moment by layer, an
# estimate over all parameters.
KINDS = ("AdamW", "SGD", "Lamb", "Lion", "Muon", "adafactor", "novograd", "prodigy")
FIRST = {name: (name, params) for name, params in reversed(CASES)}


def _chosen(names):
    return pytest.mark.parametrize(("name", "params"), keep(CASES, [FIRST[name] for name in names]), ids=IDS)


kinds = _chosen(KINDS)
few = _chosen(("Lamb", "Muon", "adafactor"))


def config(name, params):
    return SimpleNamespace(type=name, params=params)


def schedule():
    return LRSchedule(lambda count: 0.01 * (1.0 + jnp.asarray(count, jnp.float32)))


def make(name, params, stacked=STACKED, **more):
    return optimizers.make_optimizer(config(name, params), schedule(), stacked=stacked, **more)


def tree(seed, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.normal(size=shape).astype(dtype)  # noqa: E731
    stack = {"w": normal(LAYERS, 8, 16), "up": normal(LAYERS, 16, 8), "b": normal(LAYERS, 16)}
    return {"embed": normal(24, 8), "stack": stack, "head": normal(8, 24)}


def unstack(params):
    layers = [{name: x[i] for name, x in params["stack"].items()} for i in range(LAYERS)]
    return {"embed": params["embed"], "layers": layers, "lm_head": params["head"]}


def owned(state, params):
    """{path of a state's leaf: (the leaf, its parameter)}, where the path ends with a parameter's."""
    known = {tuple(map(str, path)): x for path, x in jax.tree_util.tree_flatten_with_path(params)[0]}
    found = {}
    for path, x in jax.tree_util.tree_flatten_with_path(state)[0]:
        keys = tuple(map(str, path))
        for suffix in known.keys() & {keys[i:] for i in range(len(keys))}:
            found[keys] = x, known[suffix]
    return found


def train(tx, params, grads):
    @jax.jit
    def step(params, state, grad):
        updates, state = tx.update(grad, state, params)
        return optax.apply_updates(params, updates), state

    state = jax.jit(tx.init)(params)
    for grad in grads:
        params, state = step(params, state, grad)
    return jax.device_get((params, state))


def assert_close(a, b, rtol=1e-6, atol=1e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)
