"""What a parameter group changes in each optimizer, what it cannot, and the groups of μP."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from helpers.configs import problem, problems
from helpers.optimizers import STACKED, assert_close, schedule, train, tree
from helpers.sampling import keep, some
from test_optimizer_arithmetic import lamb_reference
from test_optimizer_stages import Stack, batches, check_stages, newton_schulz

import jzero
from jzero import optimizers
from jzero.errors import ConfigError
from jzero.optimizers import make_groups, table
from jzero.optimizers.lr_schedules import LRSchedule, make_lr_schedule
from models.llama import Llama, LlamaConfig

DIMS = {"embed": 2, "head": 2, "stack/w": 2, "stack/up": 2, "stack/b": 1}
OPTAX = (*table.OPTAX_ELEMENTWISE, *table.OPTAX_PER_PARAMETER)


def section(name, params, groups=(), word=None):
    return SimpleNamespace(type=name, params=params, groups=groups, no_weight_decay=word)


def make(name, params, groups, *, lr=None, stacked=None, word=None):
    config = section(name, params, groups, word)
    assert not optimizers.optimizer_problems(config)
    return optimizers.make_optimizer(config, lr or schedule(), stacked=stacked, groups=make_groups(config, DIMS))


def grads(steps=5):
    return [tree(seed) for seed in range(1, steps)]


def is_stack(params):
    return {"embed": False, "head": False, "stack": {"w": True, "up": True, "b": True}}


def split(stack, rest):
    """optax.multi_transform: one optimizer for the stack, one for the rest."""
    labels = lambda params: jax.tree.map(lambda s: "stack" if s else "rest", is_stack(params))  # noqa: E731
    return optax.multi_transform({"stack": stack, "rest": rest}, labels)


def scaled(lr, scale):
    return lambda count: scale * lr(count)


# ---------------------------------------------------------------------------------------------- DeepSpeed's optimizers


def coupled(decay, tx):
    return optax.chain(optax.add_decayed_weights(decay), tx)


@pytest.mark.parametrize(
    ("name", "params", "values", "reference"),
    [
        ("AdamW", {}, {"betas": [0.8, 0.9]}, lambda lr, d, b=(0.9, 0.999): optax.adamw(lr, *b, weight_decay=d)),
        ("Adam", {"adam_w_mode": False}, {}, lambda lr, d: coupled(d, optax.adam(lr))),
        ("Lion", {}, {"betas": [0.7, 0.8]}, lambda lr, d, b=(0.9, 0.99): optax.lion(lr, *b, weight_decay=d)),
        ("SGD", {"momentum": 0.9}, {}, lambda lr, d: coupled(d, optax.sgd(lr, 0.9))),
    ],
)
def test_same_numbers_as_optax_by_group(name, params, values, reference):
    group = {"match": "^stack/", "lr_scale": 0.3, "weight_decay": 0.2, **values}
    ours, _ = train(make(name, {**params, "weight_decay": 0.05}, [group]), tree(0), grads())
    lr = schedule().lr
    stack = reference(scaled(lr, 0.3), 0.2, *([values["betas"]] if values else []))
    theirs, _ = train(split(stack, reference(lr, 0.05)), tree(0), grads())
    assert_close(ours, theirs)


def test_adagrad_by_group_is_torchs():
    torch = pytest.importorskip("torch")
    ours, _ = train(
        make("Adagrad", {"weight_decay": 0.05}, [{"match": "embed", "lr_scale": 0.3, "weight_decay": 0.2}],
             lr=LRSchedule(lambda count: 0.1)),
        tree(0), grads(),
    )  # fmt: skip
    embed, head = (torch.tensor(np.array(tree(0)[name])) for name in ("embed", "head"))
    groups = [{"params": [embed], "lr": 0.03, "weight_decay": 0.2}, {"params": [head]}]
    optimizer = torch.optim.Adagrad(groups, lr=0.1, weight_decay=0.05)
    for gradient in grads():
        embed.grad, head.grad = (torch.tensor(np.array(gradient[name])) for name in ("embed", "head"))
        optimizer.step()
    assert_close([ours["embed"], ours["head"]], [embed.numpy(), head.numpy()])


def test_lamb_by_group_is_deepspeeds():
    group = {"match": "head", "lr_scale": 0.5, "weight_decay": 0.3, "betas": [0.7, 0.8]}
    lr = LRSchedule(lambda count: 0.125)
    with jax.enable_x64(True):
        start, data = ([jax.tree.map(lambda x: x.astype(jnp.float64), t) for t in ts] for ts in ([tree(0)], grads()))
        ours, _ = train(make("Lamb", {"weight_decay": 0.1}, [group], lr=lr), start[0], data)
    reference = partial(lamb_reference, eps=1e-8, low=0.01, high=10.0)
    for name, values in (("head", (0.0625, 0.7, 0.8, 0.3)), ("embed", (0.125, 0.9, 0.999, 0.1))):
        w, *g = (np.float64(t[name]) for t in (tree(0), *grads()))
        expected = reference(w, g, **dict(zip(("lr", "b1", "b2", "decay"), values, strict=True)))
        np.testing.assert_allclose(ours[name], expected, rtol=1e-6)


def test_muon_by_group():
    """One step of the matrices of a stack and of the rest, in closed form."""
    groups = [{"match": "stack/w", "lr_scale": 0.5, "weight_decay": 0.3}, {"match": "head", "weight_decay": 0.0}]
    lr = LRSchedule(lambda count: 0.02)
    tx = make("Muon", {"lr": 0.02, "weight_decay": 0.1}, groups, lr=lr, stacked=STACKED)
    start, g = tree(0), tree(1)
    end, _ = train(tx, start, [g])
    for name, rate, decay in (("w", 0.01, 0.3), ("up", 0.02, 0.1)):
        for w, moved, gradient in zip(
            start["stack"][name], end["stack"][name], np.float64(g["stack"][name]), strict=True
        ):
            blend = newton_schulz((1 - 0.95**2) * gradient) * max(1, w.shape[1] / w.shape[0]) ** 0.5
            np.testing.assert_allclose(moved, w - rate * (blend + decay * w), rtol=1e-4, atol=1e-5)
    for name, decay in (("head", 0.0), ("embed", 0.1)):  # Adam's first step is a sign
        np.testing.assert_allclose(end[name], start[name] - 0.02 * (np.sign(g[name]) + decay * start[name]), rtol=1e-5)


# ------------------------------------------------------------------------------------------------- optax's optimizers


def call(name, lr, **arguments):
    own = name.removeprefix("optax.")
    return (getattr(optax, own, None) or getattr(optax.contrib, own))(learning_rate=lr, **arguments)


PROPORTIONAL = [name for name in OPTAX if name not in (*table.NOT_PROPORTIONAL, "noisy_sgd")]


@pytest.mark.parametrize("name", keep(PROPORTIONAL, ["rmsprop", "adafactor"]))
def test_lr_scale_is_another_learning_rate(name):
    """All parameters in one group, since DoG and its kind look at all of them."""
    ours, _ = train(make(name, {}, [{"match": "", "lr_scale": 0.3}]), tree(0), grads())
    lr = scaled(schedule().lr, 0.3)
    reference = optax.chain(optax.sm3(1.0), optax.scale_by_schedule(lr)) if name == "sm3" else call(name, lr)
    assert_close(ours, train(reference, tree(0), grads())[0])


@pytest.mark.parametrize("name", keep(table.NOT_PROPORTIONAL, ["fromage"]))
def test_lr_scale_is_refused_where_it_would_not_be(name):
    data = [tree(1)] * 40  # D-Adaptation needs some to raise its estimate of the rate
    half = train(call(name, 0.25), tree(0), data)[0]
    whole = train(optax.chain(call(name, 0.5), optax.scale(0.5)), tree(0), data)[0]
    apart = max(np.abs(a - b).max() for a, b in zip(*map(jax.tree.leaves, (half, whole)), strict=True))
    assert apart > 1e-4
    (wrong,) = optimizers.optimizer_problems(section(name, {}, [{"match": "", "lr_scale": 0.3}]))
    assert f"groups[0].lr_scale: {name} has steps that are not proportional to its learning rate" in wrong


MASKS = {"adadelta": "weight_decay_mask", "adafactor": "weight_decay_mask", "lars": "weight_decay_mask"}
DECAYING = [name for name in OPTAX if "weight_decay" in table.look_up(section(name, {}))[0].by_group]


def test_the_optimizers_with_a_mask_are_known():
    assert {"adafactor", "adamaxw", "lars", "nadamw", "optax.lamb"} <= set(DECAYING)
    assert not {"optax.muon", "prodigy", "radam", "novograd"} & set(DECAYING)


@pytest.mark.parametrize(("name", "base"), keep(product(DECAYING, (0.1, 0.0)), [("nadamw", 0.1), ("lars", 0.0)]))
def test_weight_decay_of_one_group(name, base):
    """The decay of optax on all but one group (base 0.1), and on one group alone (base 0)."""
    key = "weight_decay_rate" if name == "adafactor" else "weight_decay"
    group = {"match": "stack/", "weight_decay": 0.0 if base else 0.1}
    ours, _ = train(make(name, {key: base}, [group]), tree(0), grads())
    mask = jax.tree.map(lambda s: s != bool(base), is_stack(None))
    arguments = {key: 0.1, MASKS.get(name, "mask"): mask}
    assert_close(ours, train(call(name, schedule().lr, **arguments), tree(0), grads())[0])


def test_a_mask_over_the_layers_of_a_stack():
    tx = make("optax.lamb", {"weight_decay": 0.1}, [{"match": "stack/w|head", "weight_decay": 0.0}], stacked=STACKED)
    ours, _ = train(tx, tree(0), grads())
    plain = {decay: call("optax.lamb", schedule().lr, weight_decay=decay) for decay in (0.0, 0.1)}
    for decay, name, leaf in ((0.0, "w", ours["stack"]["w"][1]), (0.1, "up", ours["stack"]["up"][1])):
        one = lambda seed, name=name: tree(seed)["stack"][name][1]  # noqa: E731
        assert_close(leaf, train(plain[decay], one(0), [one(seed) for seed in range(1, 5)])[0])
    assert_close(ours["head"], train(plain[0.0], tree(0)["head"], [g["head"] for g in grads()])[0])


EVERY = ["AdamW", "Lamb", "Lion", "SGD", "Adagrad", "Muon", "adafactor", "nadamw", "lars"]


@pytest.mark.parametrize("name", some(EVERY, ["Muon", "adafactor"]))
def test_every_stage(name):
    params = {"adafactor": {"min_dim_size_to_factor": 4, "weight_decay_rate": 0.1}}.get(name, {"weight_decay": 0.1})
    groups = [{"match": "stack/w", "lr_scale": 0.5}, {"match": "embed", "weight_decay": 0.0}]
    check_stages(name, params, Stack(), batches(), groups=groups, no_weight_decay="norms_biases")


# ------------------------------------------------------------------------------------------------ one word; the config


@pytest.mark.parametrize("word", [None, "norms_biases", "norms_biases_embeddings"])
def test_no_weight_decay(word):
    """Names of Flax, the transformers of its Hugging Face ports, gemma and ViTs, with dimensions of one layer."""
    norms = {"ends/norm/scale": 1, "stack/mlp_norm/scale": 1, "layers/norm/scale": 2}  # the last: stacked by nn.scan
    biases = {"fc1/bias": 1, "stack/attention/query/bias": 2, "b": 1, "logit_scale": 0, "patch_embedding/bias": 1}
    tables = {"ends/embed": 2, "embed/embedding": 2, "transformer/wte/embedding": 2, "embedder/input_embedding": 2,
              "pos_embedding": 3, "gpt/wpe/weight": 2, "Embed_0/embedding": 2, "emb/weight": 2}  # fmt: skip
    matrices = {"head/kernel": 2, "patch_embedding/kernel": 4, "stack/attention/qkv/kernel": 2, "lm_head/weight": 2,
                "member/weight": 2, "stack/w_lora_a": 2}  # fmt: skip
    (group,) = make_groups(section("AdamW", {}, (), word), norms | biases | tables | matrices)
    wanted = {None: {}, "norms_biases": norms | biases, "norms_biases_embeddings": norms | biases | tables}[word]
    assert set(group.undecayed) == set(wanted)
    assert set(group.leaves) == set(norms | biases | tables | matrices)


def test_a_groups_own_decay_wins_over_the_word():
    groups = [{"match": "stack/", "lr_scale": 0.5}, {"match": "norm", "weight_decay": 0.2}]
    names = {"stack/norm": 1, "stack/w": 2, "norm": 1, "bias": 1}
    first, second, rest = make_groups(section("AdamW", {}, groups, "norms_biases"), names)
    assert first.leaves == {"stack/norm": {"weight_decay": 0.0, "lr_scale": 0.5}, "stack/w": {"lr_scale": 0.5}}
    assert second.leaves == {"norm": {"weight_decay": 0.2}}
    assert rest.leaves == {"bias": {"weight_decay": 0.0}}


def nested(groups, name="AdamW", params=None, **more):
    return {"optimizer": {"type": name, "params": params or {}, "groups": groups, **more}}


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (nested({"match": "w"}), ["optimizer.groups = ", "must be a list of objects", 'write [{"match": "w"}]']),
        (nested(["w"]), ['"w" is not an object']),
        (nested([{"lr_scale": 2}]), ["optimizer.groups[0].match: missing; give a regular expression"]),
        (nested([{"match": "w"}, {"match": "("}]), ["groups[1].match", "does not compile"]),
        (nested([{"match": 3}]), ["groups[0].match: 3 must be a regular expression"]),
        (nested([{"match": "w", "lr_scale": -1}]), ["groups[0].lr_scale: -1 must be a number >= 0"]),
        (nested([{"match": "w", "lr_scale": "auto"}]), ["groups[0].lr_scale: 'auto' must be"]),
        (nested([{"match": "w", "weight_decay": "0.1"}]), ["groups[0].weight_decay", "without quotes"]),
        (nested([{"match": "w", "betas": [0.9, 1.0]}]), ["groups[0].betas", "two numbers in [0, 1)"]),
        (nested([{"match": "w", "weight_decya": 0}]), ["groups[0].weight_decya", "did you mean 'weight_decay'?"]),
        (nested([{"match": "w", "lr": 1e-4}], params={"lr": 1e-3}), ["groups[0].lr: write lr_scale", "lr_scale 0.1"]),
        (nested([{"match": "w", "betas": [0.9, 0.9]}], "SGD"), ["betas: SGD has no betas", "lr_scale, weight_decay"]),
        (nested([{"match": "w", "betas": [0.9, 0.9]}], "Muon"), ["betas: Muon has no betas that can differ"]),
        (nested([{"match": "w", "betas": [0.9, 0.9]}], "nadamw"), ["betas: nadamw has no betas that can differ"]),
        (nested([{"match": "w", "weight_decay": 0}], "radam"), ["weight_decay: radam has no weight decay"]),
        (
            nested([{"match": "w", "weight_decay": 0.2}], "nadamw", {"weight_decay": 0.1}),
            ["groups[0].weight_decay = 0.2: optax's nadamw has one weight decay", "AdamW"],
        ),
        (nested([], no_weight_decay="norm"), ["optimizer.no_weight_decay", '"norms_biases"', "or null"]),
        (nested([], "radam", no_weight_decay="norms_biases"), ["no_weight_decay", "radam has no weight decay"]),
    ],
)  # fmt: skip
def test_bad_groups(source, parts):
    wrong = problem(source)
    assert all(part in wrong for part in parts), wrong


def test_all_problems_of_groups_at_once():
    wrong = problems(nested([{"match": "w", "lr_scale": -1}, {"betas": 3}], params={"lr": "fast"}))
    assert [w.partition(":")[0] for w in wrong] == [
        "optimizer.params.lr", "optimizer.groups[0].lr_scale", "optimizer.groups[1].betas", "optimizer.groups[1].match"
    ]  # fmt: skip


def test_groups_without_parameters():
    groups = [{"match": "stack/"}, {"match": "stack/w", "lr_scale": 2.0}, {"match": "heed"}, {"match": "frozen"}]
    with pytest.raises(ConfigError) as error:
        make_groups(section("AdamW", {}, groups), DIMS, ["frozen/w"])
    taken, nothing, frozen = error.value.problems
    assert taken.startswith('optimizer.groups[1].match = "stack/w": earlier groups have all its parameters (stack/w)')
    assert nothing.endswith(f"matches no parameter; the names are {', '.join(DIMS)}")
    assert "matches only frozen parameters (frozen/w)" in frozen


def test_betas_under_a_cycled_momentum_are_refused():
    lr = make_lr_schedule("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1}, 0.1)
    with pytest.raises(ConfigError, match="betas have no effect under OneCycle's cycle_momentum"):
        make("AdamW", {}, [{"match": "embed", "betas": [0.5, 0.9]}], lr=lr)
    make("AdamW", {}, [{"match": "embed", "lr_scale": 0.5}], lr=lr)


# ------------------------------------------------------------------------------------------------------------------ μP


def llama(width, heads, layers=2, **more):
    config = LlamaConfig(layers, width, heads, heads, 3 * width, vocab_size=64, **more)
    return jzero.from_flax(lambda rngs: Llama(config, rngs=rngs))


@pytest.mark.parametrize("tied", [False, True])
def test_mup_of_a_llama(tied):
    """Table 8, Adam: hidden matrices 1/fan-in, everything else 1. The widths grow by 4, and by 5 in the MLP."""
    base = llama(32, 2, tied=tied)
    wide = jzero.from_flax(lambda rngs: Llama(LlamaConfig(3, 128, 8, 8, 5 * 96, vocab_size=64, tied=tied), rngs=rngs))
    groups = jzero.mup_groups(wide, base, weight_decay=0.1)
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}, "groups": groups}}
    made = jzero.make_train_step(wide, config).setup.optimizer.groups
    scales = {name: (group.lr_scale, group.values.get("weight_decay")) for group in made for name in group.leaves}
    hidden = {f"stack/{name}/kernel": (1 / 4, 0.4) for name in ("attention/qkv", "attention/out", "mlp/gate_up")}
    hidden["stack/mlp/down/kernel"] = (1 / 5, 0.5)
    others = {name for name in scales if name.startswith("ends/") or name.endswith("scale")}
    assert scales == hidden | dict.fromkeys(others, (1.0, None))
    assert jzero.mup_groups(base, base) == []


def test_mup_of_models_that_do_not_fit():
    def shapes(**shape):
        return SimpleNamespace(init=lambda rng: {name: jnp.zeros(x) for name, x in shape.items()})

    with pytest.raises(ConfigError, match="other parameters than its base: missing b"):
        jzero.mup_groups(shapes(a=(4,)), shapes(a=(2,), b=(2,)))
    with pytest.raises(ConfigError, match=r"a is \(4, 4\), and \(2,\) in the base: other dimensions"):
        jzero.mup_groups(shapes(a=(4, 4)), shapes(a=(2,)))
    with pytest.raises(ConfigError, match="more than two dimensions grow; give both models the same head width"):
        jzero.mup_groups(shapes(a=(4, 4, 8)), shapes(a=(2, 2, 4)))
