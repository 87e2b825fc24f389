"""Which parameters a group has and what it may set, one word for undecayed ones, and the groups of μP."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from helpers.configs import problem, problems
from helpers.optimizers import config

import jzero
from jzero.errors import ConfigError
from jzero.optimizers import make_groups, make_optimizer
from jzero.optimizers.lr_schedules import make_lr_schedule
from models.llama import Llama, LlamaConfig


def groups_of(names, *groups, word=None, frozen=()):
    section = SimpleNamespace(type="AdamW", params={}, groups=groups, no_weight_decay=word)
    return make_groups(section, names, frozen)


@pytest.mark.parametrize("word", [None, "norms_biases", "norms_biases_embeddings"])
def test_no_weight_decay(word):
    """Names of Flax, the transformers of its Hugging Face ports, gemma and ViTs, with dimensions of one layer."""
    norms = {"ends/norm/scale": 1, "stack/mlp_norm/scale": 1, "layers/norm/scale": 2}  # the last: stacked by nn.scan
    biases = {"fc1/bias": 1, "stack/attention/query/bias": 2, "b": 1, "logit_scale": 0, "patch_embedding/bias": 1}
    tables = {"ends/embed": 2, "embed/embedding": 2, "transformer/wte/embedding": 2, "embedder/input_embedding": 2,
              "pos_embedding": 3, "gpt/wpe/weight": 2, "Embed_0/embedding": 2, "emb/weight": 2}  # fmt: skip
    matrices = {"head/kernel": 2, "patch_embedding/kernel": 4, "stack/attention/qkv/kernel": 2, "lm_head/weight": 2,
                "member/weight": 2, "stack/w_lora_a": 2}  # fmt: skip
    (group,) = groups_of(norms | biases | tables | matrices, word=word)
    wanted = {None: {}, "norms_biases": norms | biases, "norms_biases_embeddings": norms | biases | tables}[word]
    assert set(group.undecayed) == set(wanted)
    assert set(group.leaves) == set(norms | biases | tables | matrices)


def test_a_groups_own_decay_wins_over_the_word():
    groups = {"match": "stack/", "lr_scale": 0.5}, {"match": "norm", "weight_decay": 0.2}
    names = {"stack/norm": 1, "stack/w": 2, "norm": 1, "bias": 1}
    first, second, rest = groups_of(names, *groups, word="norms_biases")
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
        (nested([{"match": "w", "weight_decay": 0}], "radam"), ["weight_decay: radam has no weight decay"]),
        (nested([{"match": "", "lr_scale": 0.3}], "madgrad"), ["lr_scale: madgrad has steps that are not prop"]),
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


def test_all_problems_at_once():
    wrong = problems(nested([{"match": "w", "lr_scale": -1}, {"betas": 3}], params={"lr": "fast"}))
    assert [w.partition(":")[0] for w in wrong] == [
        "optimizer.params.lr", "optimizer.groups[0].lr_scale", "optimizer.groups[1].betas", "optimizer.groups[1].match"
    ]  # fmt: skip


def test_groups_without_parameters():
    groups = {"match": "stack/"}, {"match": "stack/w", "lr_scale": 2.0}, {"match": "heed"}, {"match": "frozen"}
    with pytest.raises(ConfigError) as error:
        groups_of({"embed": 2, "stack/w": 2}, *groups, frozen=["frozen/w"])
    taken, nothing, frozen = error.value.problems
    assert taken.startswith('optimizer.groups[1].match = "stack/w": earlier groups have all its parameters (stack/w)')
    assert nothing.endswith("matches no parameter; the names are embed, stack/w")
    assert "matches only frozen parameters (frozen/w)" in frozen


def test_betas_under_a_cycled_momentum_are_refused():
    lr = make_lr_schedule("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1}, 0.1)
    betas, rate = (groups_of({"w": 2}, {"match": "w", **own}) for own in ({"betas": [0.5, 0.9]}, {"lr_scale": 0.5}))
    make_optimizer(config("AdamW", {}), lr, stacked=None, groups=rate)
    with pytest.raises(ConfigError, match="betas have no effect under OneCycle's cycle_momentum"):
        make_optimizer(config("AdamW", {}), lr, stacked=None, groups=betas)


def test_mup_of_a_llama():
    """Table 8, Adam: hidden matrices 1/fan-in, everything else 1. The widths grow by 4, and by 5 in the MLP."""
    base, wide = (
        jzero.from_flax(lambda rngs, shape=shape: Llama(LlamaConfig(*shape, vocab_size=64), rngs=rngs))
        for shape in ((2, 32, 2, 2, 96), (3, 128, 8, 8, 480))
    )
    groups = jzero.mup_groups(wide, base, weight_decay=0.1)
    config = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"weight_decay": 0.1}, "groups": groups}}
    made = jzero.make_train_step(wide, config).setup.optimizer.groups
    scales = {name: (group.lr_scale, group.values.get("weight_decay")) for group in made for name in group.leaves}
    hidden = {f"stack/{name}/kernel": (1 / 4, 0.4) for name in ("attention/qkv", "attention/out", "mlp/gate_up")}
    hidden["stack/mlp/down/kernel"] = (1 / 5, 0.5)
    others = {name for name in scales if name.startswith("ends/") or name.endswith("scale")}
    assert scales == hidden | dict.fromkeys(others, (1.0, None))
    assert jzero.mup_groups(base, base) == []


@pytest.mark.parametrize(
    ("wide", "base", "message"),
    [
        ({"a": (4,)}, {"a": (2,), "b": (2,)}, "other parameters than its base: missing b"),
        ({"a": (4, 4)}, {"a": (2,)}, r"a is \(4, 4\), and \(2,\) in the base: other dimensions"),
        ({"a": (4, 4, 8)}, {"a": (2, 2, 4)}, "more than two dimensions grow; give both models the same head width"),
    ],
)
def test_mup_of_models_that_do_not_fit(wide, base, message):
    def model(shapes):
        return SimpleNamespace(init=lambda rng: {name: jnp.zeros(shape) for name, shape in shapes.items()})

    with pytest.raises(ConfigError, match=message):
        jzero.mup_groups(model(wide), model(base))
