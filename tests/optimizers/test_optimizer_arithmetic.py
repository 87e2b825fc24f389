"""The arithmetic of the optimizers, by parameter group too: in closed form, and of DeepSpeed, torch and optax."""

import inspect
from itertools import product
from types import SimpleNamespace

import jax
import numpy as np
import optax
import optax.contrib
import pytest
from helpers.optimizers import RATES, STACKED, assert_close, config, make, schedule, train, tree
from helpers.sampling import keep
from test_optimizer_stages import newton_schulz

from jzero import optimizers
from jzero.errors import ConfigError
from jzero.optimizers import base_lr, describe, make_groups, table
from jzero.optimizers.lr_schedules import LRSchedule, make_lr_schedule

DIMS = {"embed": 2, "head": 2, "stack/w": 2, "stack/up": 2, "stack/b": 1}
IS_STACK = {"embed": False, "head": False, "stack": {"w": True, "up": True, "b": True}}


def grouped(name, params, *groups, rate=None, stacked=None, names=DIMS):
    config = SimpleNamespace(type=name, params=params, groups=groups, no_weight_decay=None)
    assert not optimizers.optimizer_problems(config)
    lr = LRSchedule(lambda count: rate) if rate else schedule()
    return optimizers.make_optimizer(config, lr, stacked=stacked, groups=make_groups(config, names))


def grads(steps=5):
    return [tree(seed) for seed in range(1, steps)]


def trained(tx, gradients=None):
    return train(tx, tree(0), gradients or grads())[0]


def scaled(lr, scale):
    return lambda count: scale * lr(count)


# ---------------------------------------------------------------------------------------------- DeepSpeed's optimizers


def coupled(decay, tx):
    return optax.chain(optax.add_decayed_weights(decay), tx)


@pytest.mark.parametrize(
    ("name", "params", "values", "reference"),
    [
        ("AdamW", {"eps": 1e-3}, {"betas": [0.8, 0.9]},
         lambda lr, d, b=(0.9, 0.999): optax.adamw(lr, *b, eps=1e-3, weight_decay=d)),
        ("Adam", {"adam_w_mode": False}, {}, lambda lr, d: coupled(d, optax.adam(lr))),
        ("Lion", {}, {"betas": [0.7, 0.8]}, lambda lr, d, b=(0.9, 0.99): optax.lion(lr, *b, weight_decay=d)),
        ("SGD", {"momentum": 0.9}, {}, lambda lr, d: coupled(d, optax.sgd(lr, 0.9))),
        ("SGD", {"momentum": 0.9, "nesterov": True}, {}, lambda lr, d: coupled(d, optax.sgd(lr, 0.9, nesterov=True))),
    ],
)  # fmt: skip
def test_same_numbers_as_optax(name, params, values, reference):
    group = {"match": "^stack/", "lr_scale": 0.3, "weight_decay": 0.2, **values}
    lr = schedule().lr
    parts = {True: reference(scaled(lr, 0.3), 0.2, *values.values()), False: reference(lr, 0.05)}
    ours = trained(grouped(name, {**params, "weight_decay": 0.05}, group))
    assert_close(ours, trained(optax.multi_transform(parts, IS_STACK)))


def adam_reference(w, grads, *, lr, b1, b2, corrected, eps=1e-8):
    """Adam in float64 NumPy, from the paper; b1(step)."""
    m = v = 0.0
    for t, g in enumerate(grads, start=1):
        m, v = b1(t - 1) * m + (1 - b1(t - 1)) * g, b2 * v + (1 - b2) * g * g
        m_hat, v_hat = (m / (1 - b1(t - 1) ** t), v / (1 - b2**t)) if corrected else (m, v)
        w = w - lr(t - 1) * m_hat / (np.sqrt(v_hat) + eps)
    return w


def heads(trees):
    return [np.asarray(t["head"], np.float64) for t in trees]


def test_adam_without_bias_correction():
    ours = trained(make("AdamW", {"bias_correction": False, "betas": [0.8, 0.95], "eps": 0.1}))
    given = {"lr": schedule().lr, "b1": lambda n: 0.8, "b2": 0.95, "corrected": False, "eps": 0.1}
    expected = adam_reference(*heads([tree(0)]), heads(grads()), **given)
    np.testing.assert_allclose(ours["head"], expected, rtol=2e-6, atol=2e-6)


def test_one_cycle_momentum_drives_beta1():
    cycle = {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 4}
    lr = make_lr_schedule("OneCycle", {**cycle, "cycle_min_mom": 0.0, "cycle_max_mom": 0.99}, 0.1)
    ours = trained(optimizers.make_optimizer(config("Adam", {}), lr, stacked=STACKED))
    moved = lambda n: float(lr.momentum(n))  # noqa: E731
    expected = adam_reference(*heads([tree(0)]), heads(grads()), lr=lr.lr, b1=moved, b2=0.99, corrected=True)
    np.testing.assert_allclose(ours["head"], expected, rtol=1e-5, atol=1e-6)
    assert any("beta1" in note for note in describe(config("Adam", {}), lr))
    (note,) = describe(config("SGD", {}), lr)
    assert note == "SGD: OneCycle's cycle_momentum is not used, the optimizer has no betas"


def test_adagrad_is_torchs():
    """The decay is added to the gradient, and eps to the root; gradients so small that it counts."""
    small = [jax.tree.map(lambda x: 1e-9 * x, t) for t in grads()]
    decayed = {"match": "embed", "lr_scale": 0.3, "weight_decay": 0.2}
    ours = trained(grouped("Adagrad", {}, decayed, rate=0.1), small)
    for name, rate, decay in (("embed", 0.03, 0.2), ("head", 0.1, 0.0)):
        w, *gs = (np.float64(t[name]) for t in (tree(0), *small))
        total = 0.0
        for g in gs:
            g = g + decay * w
            total = total + g * g
            w = w - rate * g / (np.sqrt(total) + 1e-10)
        np.testing.assert_allclose(ours[name], w, rtol=1e-5, atol=1e-6)


def lamb_reference(w, grads, *, lr, b1, b2, decay):
    """DeepSpeed 0.19.8, csrc/lamb/fused_lamb_cuda_kernel.cu: kernel parts 1 and 3, and `step_size` (line 367)."""
    m = v = 0.0
    for step, g in enumerate(grads, start=1):
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        update = m / (np.sqrt(v) + 1e-6) + decay * w
        w_norm, u_norm = np.sqrt((w * w).sum()), np.sqrt((update * update).sum())
        coeff = min(max(w_norm / u_norm, 0.05), 5.0) if w_norm != 0 and u_norm != 0 else 1.0
        w = w - lr * np.sqrt(1 - b2**step) / (1 - b1**step) * coeff * update
    return w


@pytest.mark.parametrize("scale", [1.0, 0.0, 1e-4, 1e3], ids=["between", "zero", "low", "high"])
def test_lamb_is_deepspeeds(scale):
    hyper = {"betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1, "min_coeff": 0.05, "max_coeff": 5.0}
    group = {"match": "head", "lr_scale": 0.5, "weight_decay": 0.3, "betas": [0.7, 0.8]}
    w, *gs = (dict(zip(("head", "embed"), weights(seed, 8, 16, count=2), strict=True)) for seed in range(6))
    w = {name: scale * x for name, x in w.items()}
    with jax.enable_x64(True):
        tx = grouped("Lamb", hyper, group, rate=0.125, names={"head": 2, "embed": 2})
        ours, _ = train(tx, w, gs)
    for name, (lr, b1, b2, decay) in {"head": (0.0625, 0.7, 0.8, 0.3), "embed": (0.125, 0.8, 0.95, 0.1)}.items():
        expected = lamb_reference(w[name], [g[name] for g in gs], lr=lr, b1=b1, b2=b2, decay=decay)
        np.testing.assert_allclose(ours[name], expected, rtol=1e-12, atol=1e-12)


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


@pytest.mark.parametrize("layers", [None, 3])
def test_muon_is_deepspeeds(layers):
    """Parameters of all these shapes in one model."""
    series = [weights(i, *([layers] if layers else []), *shape) for i, (shape, _) in enumerate(SHAPES)]
    cuts = {f"mlp/{i}": cut for i, (_, cut) in enumerate(SHAPES) if cut}
    with jax.enable_x64(True):
        tx = optimizers.make_optimizer(
            config("Muon", {"weight_decay": 0.1, "momentum": 0.9}), LRSchedule(lambda count: 0.125),
            stacked=layers and {"mlp": True}, fused=cuts,
        )  # fmt: skip
        w, *gs = ({"mlp": {str(i): x for i, x in enumerate(xs)}} for xs in zip(*series, strict=True))
        end = train(tx, w, gs)[0]["mlp"]
    for i, layer in product(range(len(SHAPES)), range(layers or 1)):
        cut = cuts.get(f"mlp/{i}")
        ours, *mine = (x[layer] if layers else x for x in (end[str(i)], *series[i]))
        given = zip(*(in_torch(x, cut) for x in mine), strict=True)
        for part, (w, *gs) in zip(in_torch(ours, cut), given, strict=True):
            expected = muon_reference(w, gs, lr=0.125, beta=0.9, decay=0.1)
            np.testing.assert_allclose(part, expected, rtol=1e-9, atol=1e-9, err_msg=str(SHAPES[i]))


@pytest.mark.parametrize("stacked", [{"mlp": True}, None], ids=["stack", "none"])
def test_muon_leaves_biases_of_heads_to_adam(stacked):
    """A bias [K, G + 2, C] is no matrix: Adam's first step is ± lr."""
    w, g = ({"mlp": {"bias": x.astype(np.float32)}} for x in weights(0, 3, 2, 4, 5, count=2))
    tx = optimizers.make_optimizer(config("Muon", {"lr": 0.1}), LRSchedule(lambda count: 0.1), stacked=stacked)
    moved = jax.tree.map(np.subtract, train(tx, w, [g])[0], w)
    np.testing.assert_allclose(np.abs(moved["mlp"]["bias"]), 0.1, rtol=1e-4)


def test_muon_on_hidden_matrices_and_adam_on_the_rest():
    """One step in closed form, by group too; both rates keep their ratio to the one that the schedule starts from."""
    groups = [{"match": "stack/w", "lr_scale": 0.5, "weight_decay": 0.3}, {"match": "head", "weight_decay": 0.0}]
    params = {"lr": 0.2, "muon_lr": 0.4, "adam_lr": 0.1, "weight_decay": 0.1}
    assert base_lr(config("Muon", params)) == 0.2
    start, g = tree(0), tree(1)
    end = trained(grouped("Muon", params, *groups, rate=0.02, stacked=STACKED), [g])
    for name, rate, decay in (("w", 0.02, 0.3), ("up", 0.04, 0.1)):
        layers = start["stack"][name], end["stack"][name], np.float64(g["stack"][name])
        for w, moved, gradient in zip(*layers, strict=True):
            blend = newton_schulz((1 - 0.95**2) * gradient) * max(1, w.shape[1] / w.shape[0]) ** 0.5
            np.testing.assert_allclose(moved, w - rate * (blend + decay * w), rtol=1e-4, atol=1e-5)
    leaves = [(t["embed"], t["head"], t["stack"]["b"]) for t in (start, end, g)]
    for w, moved, gradient, decay in zip(*leaves, (0.1, 0.0, 0.1), strict=True):  # Adam's first step is a sign
        np.testing.assert_allclose(moved, w - 0.01 * (np.sign(gradient) + decay * w), rtol=1e-5, atol=1e-6)


def test_a_one_bit_optimizer_is_the_exact_one():
    """DeepSpeed's configs load; what compresses has no effect, and the report says by what it is replaced."""
    for name, exact, params in [
        ("OneBitAdam", "Adam", {"freeze_step": 1}),
        ("ZeroOneAdam", "Adam", {"var_freeze_step": 2, "local_step_clipper": 4}),
        ("OneBitLamb", "Lamb", {"freeze_step": 1, "coeff_beta": 0.9}),
    ]:
        assert table.DEEPSPEED[name].make is table.DEEPSPEED[exact].make
        notes = describe(config(name, {**params, "weight_decay": 0.3}), schedule())
        assert notes[0].startswith(f"{name} is replaced by {exact}")
        assert all(any(f"{key} has no effect" in note for note in notes) for key in params)


# ------------------------------------------------------------------------------------------------- optax's optimizers


def call(name, lr, **arguments):
    own = name.removeprefix("optax.")
    return (getattr(optax, own, None) or getattr(optax.contrib, own))(learning_rate=lr, **arguments)


OPTAX = (*table.OPTAX_ELEMENTWISE, *table.OPTAX_PER_PARAMETER)
PROPORTIONAL = [name for name in OPTAX if name not in (*table.NOT_PROPORTIONAL, "noisy_sgd")]


@pytest.mark.parametrize("name", keep(PROPORTIONAL, ["rmsprop", "sm3", "optax.adagrad", "optax.lamb", "optax.muon"]))
def test_lr_scale_is_another_learning_rate(name):
    """All parameters in one group, since DoG and its kind look at all of them. Names in any letter case."""
    lr = scaled(schedule().lr, 0.3)
    reference = optax.chain(optax.sm3(1.0), optax.scale_by_schedule(lr)) if name == "sm3" else call(name, lr)
    assert_close(trained(grouped(name.title(), {}, {"match": "", "lr_scale": 0.3})), trained(reference))


MASKS = {"adadelta": "weight_decay_mask", "adafactor": "weight_decay_mask", "lars": "weight_decay_mask"}
DECAYING = [name for name in OPTAX if "weight_decay" in table.look_up(config(name, {}))[0].by_group]


@pytest.mark.parametrize(("name", "base"), keep(product(DECAYING, (0.1, 0.0)), [("nadamw", 0.1), ("lars", 0.0)]))
def test_weight_decay_of_one_group(name, base):
    key = "weight_decay_rate" if name == "adafactor" else "weight_decay"
    ours = grouped(name, {key: base}, {"match": "stack/", "weight_decay": 0.0 if base else 0.1})
    arguments = {key: 0.1, MASKS.get(name, "mask"): jax.tree.map(lambda s: s != bool(base), IS_STACK)}
    assert_close(trained(ours), trained(call(name, schedule().lr, **arguments)))
    assert not {"optax.muon", "prodigy", "radam", "novograd"} & {*DECAYING}  # they have none, or no mask


def test_a_mask_over_the_layers_of_a_stack():
    without = {"match": "stack/w|head", "weight_decay": 0.0}
    ours = trained(grouped("optax.lamb", {"weight_decay": 0.1}, without, stacked=STACKED))
    plain = {decay: call("optax.lamb", schedule().lr, weight_decay=decay) for decay in (0.0, 0.1)}
    for decay, name in ((0.0, "w"), (0.1, "up")):
        w, *gs = (t["stack"][name][1] for t in (tree(0), *grads()))
        assert_close(ours["stack"][name][1], train(plain[decay], w, gs)[0])
    assert_close(ours["head"], train(plain[0.0], tree(0)["head"], [g["head"] for g in grads()])[0])


def test_optax_spellings_of_deepspeeds_optimizers():
    for name, theirs, ours in (
        ("adamw", {"learning_rate": 0.1, "b1": 0.8, "b2": 0.95}, {"lr": 0.1, "betas": [0.8, 0.95]}),
        ("lion", {"b2": 0.9}, {"betas": [0.9, 0.9]}),
        ("adamw", {"b1": "auto", "betas": [0.8, 0.95]}, {"betas": [0.8, 0.95]}),
    ):
        assert optimizers.parameters(config(name, theirs)) == optimizers.parameters(config(name, ours))


def test_every_optax_optimizer_is_known_or_refused_with_a_reason():
    public = {n: getattr(m, n) for m in (optax, optax.contrib) for n in dir(m) if not n.startswith(("_", "scale_by"))}
    functions = {name: inspect.signature(f).parameters for name, f in public.items() if inspect.isfunction(f)}
    takes_a_rate = {name for name, parameters in functions.items() if parameters.keys() & RATES}
    known = {n.lower() for n in table.DEEPSPEED} | {*OPTAX}
    assert takes_a_rate - known - {"schedule_free"} <= table.REFUSED.keys()  # that one wraps an optimizer
    for name in table.REFUSED:
        with pytest.raises(ConfigError, match="is not supported: "):
            make(name, {})


@pytest.mark.parametrize(("name", "part"), [("Muon", "up"), ("adafactor", "embed")])
def test_frozen_parameters_are_none(name, part):
    def without(t):
        return {**t, "embed": None} if part == "embed" else {**t, "stack": {**t["stack"], "up": None}}

    expected = train(make(name, {}), tree(0), [tree(1)])[0]
    for stacked in (STACKED, without(STACKED)):
        found, _ = train(make(name, {}, stacked=stacked), without(tree(0)), [without(tree(1))])
        assert_close(found, without(expected))
