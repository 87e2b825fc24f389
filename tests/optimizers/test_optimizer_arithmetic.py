"""The arithmetic of the optimizers in closed form, against DeepSpeed's, torch's and optax's."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers.optimizers import RATES, STACKED, STEPS, assert_close, config, make, schedule, train, tree
from helpers.sampling import keep, sample
from test_optimizer_stages import newton_schulz

from jzero import optimizers
from jzero.errors import ConfigError
from jzero.optimizers import base_lr, describe, table
from jzero.optimizers.lr_schedules import LRSchedule, make_lr_schedule


def adam_reference(w, grads, *, lr, b1, b2, eps, decay, decoupled, bias_correction=True):
    """Adam in float64 NumPy, from the paper."""
    w, m, v = np.asarray(w, np.float64), 0.0, 0.0
    for t, g in enumerate(grads, start=1):
        g = np.asarray(g, np.float64) + (0 if decoupled else decay * w)
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        m_hat, v_hat = (m / (1 - b1**t), v / (1 - b2**t)) if bias_correction else (m, v)
        w = w - lr(t - 1) * (m_hat / (np.sqrt(v_hat) + eps) + (decay * w if decoupled else 0))
    return w


@pytest.mark.parametrize(
    ("name", "exact", "params"),
    [
        ("OneBitAdam", "Adam", {"freeze_step": 1}),
        ("ZeroOneAdam", "Adam", {"var_freeze_step": 2, "local_step_clipper": 4}),
        ("OneBitLamb", "Lamb", {"freeze_step": 1, "coeff_beta": 0.9, "max_coeff": 0.3}),
    ],
)
def test_a_one_bit_optimizer_is_the_exact_one(name, exact, params):
    """DeepSpeed's configs load; what compresses has no effect, and the report says by what it is replaced."""
    grads = [tree(seed) for seed in range(1, 6)]
    shared = {"weight_decay": 0.1} | {key: x for key, x in params.items() if key == "max_coeff"}
    trained, _ = train(make(name, {**shared, **params}), tree(0), grads)
    expected, _ = train(make(exact, shared), tree(0), grads)
    assert_close(trained, expected, rtol=0, atol=0)
    notes = describe(config(name, params), schedule())
    assert notes[0].startswith(f"{name} is replaced by {exact}")
    assert all(any(f"{key} has no effect" in note for note in notes) for key in params if key != "max_coeff")


@pytest.mark.parametrize(
    ("name", "mode", "decoupled"), [("Adam", True, True), ("Adam", False, False), ("AdamW", True, 1)]
)
@pytest.mark.parametrize("bias_correction", [True, False])
def test_adam(name, mode, decoupled, bias_correction):
    params = {"weight_decay": 0.1, "betas": [0.8, 0.95], "eps": 1e-6, "adam_w_mode": mode}
    params["bias_correction"] = bias_correction
    grads = [tree(seed) for seed in range(1, 6)]
    trained, _ = train(make(name, params), tree(0), grads)
    expected = adam_reference(
        tree(0)["head"], [g["head"] for g in grads], lr=lambda n: 0.01 * (1 + n), b1=0.8, b2=0.95, eps=1e-6, decay=0.1,
        decoupled=decoupled, bias_correction=bias_correction,
    )  # fmt: skip
    np.testing.assert_allclose(trained["head"], expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize(
    ("name", "params", "reference"),
    [
        ("AdamW", {"weight_decay": 0.1}, lambda lr: optax.adamw(lr, weight_decay=0.1)),
        ("Lion", {"weight_decay": 0.1}, lambda lr: optax.lion(lr, weight_decay=0.1)),
        ("SGD", {"momentum": 0.9, "nesterov": True}, lambda lr: optax.sgd(lr, 0.9, nesterov=True)),
        ("optax.lamb", {}, optax.lamb),
        ("optax.adagrad", {}, optax.adagrad),
        ("optax.muon", {"beta": 0.9}, lambda lr: optax.contrib.muon(lr, beta=0.9)),
        ("RMSprop", {"decay": 0.8}, lambda lr: optax.rmsprop(lr, 0.8)),
        ("sm3", {}, lambda lr: optax.chain(optax.sm3(1.0), optax.scale_by_schedule(lr))),
    ],
)
def test_same_numbers_as_optax(name, params, reference):
    grads = [tree(seed) for seed in range(1, STEPS)]
    ours, _ = train(make(name, params, stacked=None), tree(0), grads)
    theirs, _ = train(reference(schedule().lr), tree(0), grads)
    assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "theirs", "ours"),
    [
        ("adamw", {"learning_rate": 0.1, "b1": 0.8, "b2": 0.95}, {"lr": 0.1, "betas": [0.8, 0.95]}),
        ("adam", {"b1": 0.8}, {"betas": [0.8, 0.999]}),
        ("lion", {"b2": 0.9}, {"betas": [0.9, 0.9]}),
        ("sgd", {"learning_rate": 0.1}, {"lr": 0.1}),
        ("adamw", {"b1": "auto", "betas": [0.8, 0.95]}, {"betas": [0.8, 0.95]}),
    ],
)
def test_optax_spellings_of_deepspeeds_optimizers(name, theirs, ours):
    grads = [tree(seed) for seed in range(1, STEPS)]
    jax.tree.map(
        np.testing.assert_array_equal,
        train(make(name, theirs), tree(0), grads),
        train(make(name, ours), tree(0), grads),
    )
    assert base_lr(config(name, theirs)) == base_lr(config(name, ours))


def test_every_optax_optimizer_is_known_or_refused_with_a_reason():
    public = {n: getattr(m, n) for m in (optax, optax.contrib) for n in dir(m) if not n.startswith(("_", "scale_by"))}
    takes_a_rate = {
        name
        for name, function in public.items()
        if inspect.isfunction(function) and inspect.signature(function).parameters.keys() & RATES
    }
    known = {n.lower() for n in table.DEEPSPEED} | {*table.OPTAX_ELEMENTWISE, *table.OPTAX_PER_PARAMETER}
    assert takes_a_rate - known - {"schedule_free"} <= table.REFUSED.keys()  # that one wraps an optimizer
    for name in table.REFUSED:
        with pytest.raises(ConfigError, match="is not supported: "):
            make(name, {})


def test_adagrad_is_torch_adagrad():
    g = [1e-7, 2e-7]
    w = jnp.zeros(1)
    tx = optimizers.make_optimizer(config("Adagrad", {}), LRSchedule(lambda count: 0.1), stacked=None)
    trained, _ = train(tx, w, [jnp.array([x]) for x in g])
    expected = -0.1 * (1e-7 / (1e-7 + 1e-10) + 2e-7 / (np.sqrt(5e-14) + 1e-10))
    np.testing.assert_allclose(trained, [expected], rtol=1e-5)


def lamb_reference(w, grads, *, lr, b1, b2, eps, decay, low, high):
    """DeepSpeed 0.19.8, csrc/lamb/fused_lamb_cuda_kernel.cu: kernel parts 1 and 3, and `step_size` (line 367)."""
    m = v = 0.0
    for step, g in enumerate(grads, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        update = m / (np.sqrt(v) + eps) + decay * w
        w_norm, u_norm = np.sqrt((w * w).sum()), np.sqrt((update * update).sum())
        coeff = min(max(w_norm / u_norm, low), high) if w_norm != 0 and u_norm != 0 else 1.0
        w = w - lr * np.sqrt(1 - b2**step) / (1 - b1**step) * coeff * update
    return w


@pytest.mark.parametrize("scale", [1.0, 0.0, 1e-4, 1e3], ids=["between", "zero", "low", "high"])
def test_lamb_is_deepspeeds(scale):
    w, *grads = (np.random.default_rng(seed).normal(size=(8, 16)) for seed in range(6))
    hyper = {"betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1, "min_coeff": 0.05, "max_coeff": 5.0}
    with jax.enable_x64(True):
        tx = optimizers.make_optimizer(config("Lamb", hyper), LRSchedule(lambda count: 0.125), stacked=None)
        trained, _ = train(tx, jnp.asarray(scale * w), [jnp.asarray(g) for g in grads])
    expected = lamb_reference(scale * w, grads, lr=0.125, b1=0.8, b2=0.95, eps=1e-6, decay=0.1, low=0.05, high=5.0)
    np.testing.assert_allclose(trained, expected, rtol=1e-12, atol=1e-12)


def muon_reference(w, grads, *, lr, beta, decay):
    """original_muon.py, `muon_update` (line 190), and muon_optimizer.py, `step` (line 57); torch weights are [out, in].

    The ZeRO-2 path (stage_1_and_2.py, line 2865) calls the same `muon_update` on the accumulated gradient.
    """
    momentum = 0.0
    for g in grads:
        momentum = momentum + (1 - beta) * (g - momentum)
        update = g + beta * (momentum - g)
        rows, columns = g.shape
        w = w * (1 - lr * decay) - lr * newton_schulz(update) * np.sqrt(max(1, rows / columns))
    return w


def weights(seed, *shape, count=4):
    return [np.random.default_rng([seed, i]).normal(size=shape) for i in range(count)]


def in_torch(kernel, cut=None):
    """The torch weights [out, in] of a kernel [in, ...]: one for each part of its fused dimension."""
    if not cut:
        return [kernel.T]
    dim, widths, *batch = cut
    if batch:  # matrices of their own, such as experts
        return [part for one in kernel for part in in_torch(one, (dim - 1, widths))]
    parts = np.split(kernel, np.cumsum(widths)[:-1], axis=dim)
    return [part.reshape(len(part), -1).T for part in parts]


SHAPES = [
    ((8, 16), None), ((16, 8), None), ((8, 8), None), ((8, 24), (1, (12, 6, 6))), ((4, 12), (1, (6, 6))),
    ((8, 2, 4, 3), (2, (2, 1, 1))), ((6, 2, 5), (1, (1, 1))), ((3, 6, 2, 5), (2, (1, 1), 1)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("layers", "shape", "cut"),
    sample([(n, *shape) for n in (None, 3) for shape in SHAPES], lambda case: (case[0], case[1:]), strength=1),
    ids=str,
)
def test_muon_is_deepspeeds(shape, cut, layers):
    hyper = {"weight_decay": 0.1, "momentum": 0.9}
    series = weights(0, *([layers] if layers else []), *shape)
    with jax.enable_x64(True):
        tx = optimizers.make_optimizer(
            config("Muon", hyper), LRSchedule(lambda count: 0.125), stacked=layers and {"mlp": {"kernel": True}},
            fused={"mlp/kernel": cut} if cut else {},
        )  # fmt: skip
        w, *grads = ({"mlp": {"kernel": jnp.asarray(x)}} for x in series)
        trained = train(tx, w, grads)[0]["mlp"]["kernel"]
    for i in range(layers or 1):
        ours, mine = (trained[i], [x[i] for x in series]) if layers else (trained, series)
        for part, (w, *grads) in zip(
            in_torch(np.asarray(ours), cut), zip(*(in_torch(x, cut) for x in mine), strict=True), strict=True
        ):
            expected = muon_reference(w, grads, lr=0.125, beta=0.9, decay=0.1)
            np.testing.assert_allclose(part, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("stacked", [{"mlp": True}, None], ids=["stack", "none"])
def test_muon_leaves_biases_of_heads_to_adam(stacked):
    """A bias [K, G + 2, C] is no matrix: Adam's first step is ± lr."""
    w, g = ({"mlp": {"bias": jnp.asarray(x)}} for x in weights(0, 3, 2, 4, 5, count=2))
    tx = optimizers.make_optimizer(config("Muon", {"lr": 0.1}), LRSchedule(lambda count: 0.1), stacked=stacked)
    np.testing.assert_allclose(np.abs(tx.update(g, tx.init(w), w)[0]["mlp"]["bias"]), 0.1, rtol=1e-4)


def test_muon_orthogonalises_hidden_matrices_only():
    lr = LRSchedule(lambda count: 0.1)
    p, g = tree(0), tree(1)
    tx = optimizers.make_optimizer(config("Muon", {"lr": 0.1}), lr, stacked=STACKED)
    updates, _ = tx.update(g, tx.init(p), p)
    for layer in updates["stack"]["w"]:  # 8 x 16: singular values near 1, times sqrt(16 / 8)
        singular = np.linalg.svd(layer / -0.1, compute_uv=False) / np.sqrt(2)
        assert ((singular > 0.3) & (singular < 1.4)).all()
    for layer in updates["stack"]["up"]:
        singular = np.linalg.svd(layer / -0.1, compute_uv=False)
        assert ((singular > 0.3) & (singular < 1.4)).all()
    for end in (updates["embed"], updates["head"], updates["stack"]["b"]):  # Adam's first step is ± lr
        np.testing.assert_allclose(np.abs(end), 0.1, rtol=1e-4)


def test_muon_rates_keep_their_ratio_under_a_schedule():
    p, g = tree(0), tree(1)
    params = {"lr": 0.2, "muon_lr": 0.4, "adam_lr": 0.1}
    assert base_lr(config("Muon", params)) == 0.2
    tx = optimizers.make_optimizer(config("Muon", params), LRSchedule(lambda count: 0.02), stacked=STACKED)
    updates, _ = tx.update(g, tx.init(p), p)
    np.testing.assert_allclose(np.abs(updates["head"]), 0.01, rtol=1e-4)
    tx = optimizers.make_optimizer(config("Muon", {"lr": 0.2}), LRSchedule(lambda count: 0.02), stacked=STACKED)
    halved, _ = tx.update(g, tx.init(p), p)
    assert_close(updates["stack"]["w"], 2 * halved["stack"]["w"])


@pytest.mark.parametrize("name", keep(["Adam", "Lamb", "Lion", "Muon"], ["Adam", "Muon"]))
def test_one_cycle_momentum_drives_beta1(name):
    moving = {"cycle_first_step_size": 4, "cycle_min_mom": 0.0, "cycle_max_mom": 0.99}
    lr = make_lr_schedule("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, **moving}, 0.1)
    cycled = optimizers.make_optimizer(config(name, {}), lr, stacked=STACKED)
    # The momentum at steps 0, 1 is 0, 0.74: against a fixed 0 the first step agrees and the second does not.
    fixed = optimizers.make_optimizer(config(name, {"betas": [0.0, 0.99]}), LRSchedule(lr.lr), stacked=STACKED)
    grads = [tree(seed) for seed in range(1, 4)]
    assert_close(train(cycled, tree(0), grads[:1])[0], train(fixed, tree(0), grads[:1])[0])
    moved, plain = train(cycled, tree(0), grads)[0], train(fixed, tree(0), grads)[0]
    assert max(np.abs(x - y).max() for x, y in zip(*map(jax.tree.leaves, (moved, plain)), strict=True)) > 1e-4
    assert any("beta1" in note for note in describe(config(name, {}), lr))


@pytest.mark.parametrize("name", keep(["AdamW", "Muon", "adafactor"], ["Muon"]))
@pytest.mark.parametrize("part", ["embed", "up"])
def test_frozen_parameters_are_none(name, part):
    def cut(t):
        return {**t, "embed": None} if part == "embed" else {**t, "stack": {**t["stack"], "up": None}}

    expected = train(make(name, {}), tree(0), [tree(1)])[0]
    for stacked in (STACKED, cut(STACKED)):
        assert_close(train(make(name, {}, stacked=stacked), cut(tree(0)), [cut(tree(1))])[0], cut(expected))
