"""Parameter groups: in training, against optax, in layouts, in the report; what they have and may set; those of μP."""

from functools import lru_cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import optimizers
from helpers.configs import problem
from helpers.named_models import model_of
from helpers.oracle import mean_of
from helpers.reference import BATCH, VOCAB, Decoder, batches
from helpers.report_sections import section
from helpers.sampling import keep
from helpers.steps import compare, settings

import jzero
from jzero.errors import ConfigError
from jzero.optimizers import make_groups, make_optimizer
from jzero.optimizers.lr_schedules import make_lr_schedule
from models.llama import LlamaConfig

WIDTH, LAYERS, STEPS = 16, 2, 10
RATE, DECAY, BETAS, EPS = 0.01, 0.1, (0.9, 0.95), 1e-6
GROUPS = [
    {"match": "^stack/w$", "lr_scale": 0.25, "weight_decay": 0.3, "betas": [0.8, 0.99]},
    {"match": "stack/", "lr_scale": 2.0},  # not w, which the first has
    {"match": "head|norm", "weight_decay": 0.2, "betas": [0.5, 0.9]},  # the norm's own decay, whatever the word says
]
# What the groups and no_weight_decay give each parameter: rate, decay, betas. By hand.
EXPECTED = {
    "stack/w": (0.25, 0.3, (0.8, 0.99)),
    "stack/b": (2.0, 0.0, BETAS),
    "ends/head": (1.0, 0.2, (0.5, 0.9)),
    "ends/norm": (1.0, 0.2, (0.5, 0.9)),
    "ends/embed": (1.0, 0.0, BETAS),
}
FROZEN = "ends/fixed"


class Net(Decoder):
    def init(self, rng):
        params = super().init(rng)
        params["ends"] |= {"norm": jnp.ones(WIDTH), "fixed": jax.random.normal(rng, WIDTH)}
        return params

    def suffix(self, ends, x, batch, rng):
        return super().suffix(ends, ends["norm"] * x + ends["fixed"], batch, rng)


@lru_cache
def start():
    return jax.device_get(jax.jit(Net().init)(jax.random.key(0)))


def rate(step):
    return RATE * (1 - step / 40)  # optax.linear_schedule(0.01, 0, 40)


def with_optax():
    made = {
        name: optax.adamw(lambda n, s=scale: s * rate(n), *betas, eps=EPS, weight_decay=decay)
        for name, (scale, decay, betas) in EXPECTED.items()
    }
    labels = jax.tree_util.tree_map_with_path(lambda path, _: "/".join(key.key for key in path), start())
    return optax.multi_transform({**made, FROZEN: optax.set_to_zero()}, labels)


def config(stage, groups=GROUPS, word="norms_biases_embeddings"):
    params = {"lr": RATE, "weight_decay": DECAY, "betas": BETAS, "eps": EPS}
    schedule = {"init_value": RATE, "end_value": 0, "transition_steps": 40}
    return settings(
        BATCH, stage, 2, optimizer={"type": "AdamW", "params": params, "groups": groups, "no_weight_decay": word},
        scheduler={"type": "linear_schedule", "params": schedule}, frozen_parameters=[f"^{FROZEN}$"],
        stack={"unroll": False},
    )  # fmt: skip


def make(stage, pipe=1, **more):
    return jzero.make_train_step(Net(), config(stage, **more), mesh=jzero.make_mesh(pipe=pipe, zero=8 // pipe))


@pytest.mark.parametrize(("stage", "pipe"), keep([(0, 1), (3, 1), (1, 2)], [(1, 2)]))
def test_training_is_that_of_optax(stage, pipe):
    step = make(stage, pipe)
    loss = lambda params, batch, _: mean_of(Net())(params, batch)  # noqa: E731
    _, state = compare(step, batches("decoder"), loss, with_optax(), start(), rtol=1e-6, close=1e-6)
    np.testing.assert_array_equal(jax.device_get(state.params["ends"]["fixed"]), start()["ends"]["fixed"])
    _, metrics = step(state, batches("decoder")[0])
    assert float(metrics["lr"]) == pytest.approx(rate(STEPS))  # the base rate
    without = make(stage, pipe, groups=[])  # checkpoints fit other groups
    assert jax.tree.structure(step.state_shapes) == jax.tree.structure(without.state_shapes)


def test_the_report_lists_the_leaves():
    lines = section(jzero.report(make(3)), "Parameter groups")
    w, b, table = LAYERS * WIDTH * WIDTH, LAYERS * WIDTH, VOCAB * WIDTH
    assert lines == [
        f'  - "^stack/w$" (lr_scale 0.25, weight_decay 0.3, betas [0.8, 0.99]): 1 leaf, {w} elements: stack/w',
        f'  - "stack/" (lr_scale 2): 1 leaf, {b} elements: stack/b',
        f'  - "head|norm" (weight_decay 0.2, betas [0.5, 0.9]): 2 leaves, {table + WIDTH:,} elements: ends/head, '
        "ends/norm",
        f"  - all others: 1 leaf, {table:,} elements: ends/embed",
        f"  - no_weight_decay norms_biases_embeddings: 2 leaves, {b + table:,} elements: stack/b, ends/embed",
    ]
    assert section(jzero.report(make(3, groups=[], word=None)), "Parameter groups") == []


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


def nested(groups, name="AdamW", params=None, **more):
    return {"optimizer": {"type": name, "params": params or {}, "groups": groups, **more}}


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (nested({"match": "w"}), ["optimizer.groups = ", "must be a list of objects", 'write [{"match": "w"}]']),
        (nested([{"lr_scale": 2}]), ["optimizer.groups[0].match: missing; give a regular expression"]),
        (nested([{"match": "w"}, {"match": "("}]), ["groups[1].match", "does not compile"]),
        (nested([{"match": "w", "lr_scale": -1}]), ["groups[0].lr_scale: -1 must be a number >= 0"]),
        (nested([{"match": "w", "weight_decay": "0.1"}]), ["groups[0].weight_decay", "without quotes"]),
        (nested([{"match": "w", "betas": [0.9, 1.0]}]), ["groups[0].betas", "two numbers in [0, 1)"]),
        (nested([{"match": "w", "weight_decya": 0}]), ["groups[0].weight_decya", "did you mean 'weight_decay'?"]),
        (nested([{"match": "w", "lr": 1e-4}], params={"lr": 1e-3}), ["groups[0].lr: write lr_scale", "lr_scale 0.1"]),
        (nested([{"match": "w", "betas": [0.9, 0.9]}], "SGD"), ["betas: SGD has no betas", "lr_scale, weight_decay"]),
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
    make_optimizer(optimizers.config("AdamW", {}), lr, stacked=None, groups=rate)
    with pytest.raises(ConfigError, match="betas have no effect under OneCycle's cycle_momentum"):
        make_optimizer(optimizers.config("AdamW", {}), lr, stacked=None, groups=betas)


def test_mup_of_a_llama():
    """Table 8, Adam: hidden matrices 1/fan-in, everything else 1. The widths grow by 4, and by 5 in the MLP."""
    base, wide = (model_of(LlamaConfig(*shape, vocab_size=64)) for shape in ((2, 32, 2, 2, 96), (3, 128, 8, 8, 480)))
    groups = jzero.mup_groups(wide, base, weight_decay=0.1)
    optimizer = {"type": "AdamW", "params": {"weight_decay": 0.1}, "groups": groups}
    made = jzero.make_train_step(wide, settings(8, optimizer=optimizer)).setup.optimizer.groups
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


def test_the_matrices_of_a_llama():
    """Of each group of heads two queries, a key and a value; gates and values. Muon's arithmetic has such cuts."""
    model = model_of(LlamaConfig(2, 16, 2, 1, 24, vocab_size=32))
    cuts = {"stack/attention/qkv/kernel": (2, (2, 1, 1)), "stack/mlp/gate_up/kernel": (1, (1, 1))}
    assert model.fused_matrices == cuts
