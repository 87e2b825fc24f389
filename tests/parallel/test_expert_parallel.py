"""Expert parallelism in training: the losses, gradient norms and parameters of one device.

The oracle is a plain loop on one device of the same decoder, whose experts all compute every token
(`helpers.mixtures`). The balance loss of a replica is not linear in its rows, so it counts only where one replica has
the whole batch.
"""

import dataclasses
import re
from functools import lru_cache
from typing import ClassVar

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.mixture_models import BATCH, CONFIG, LR, VOCAB, batches, initial, make_step, model
from helpers.mixtures import plain_mixtures
from helpers.sampling import keep, some

import jzero
from jzero.errors import ConfigError
from jzero.planner.state_bytes import leaf_bytes, state_bytes
from jzero.planner.traced_collectives import whole_sequences
from jzero.tree import named
from models.moe import MixtureConfig

LAYOUTS = [
    {"expert": 1},
    {"expert": 2},
    {"expert": 4, "stage": 3},
    {"expert": 2, "zero": 2, "stage": 1},
    {"expert": 2, "zero": 2, "stage": 2, "accum": 2},
    {"expert": 2, "data": 2, "zero": 2, "stage": 3, "accum": 2},
    {"expert": 2, "tensor": 2, "zero": 2, "stage": 3, "remat": "full"},
    {"expert": 2, "context": 2, "tensor": 2, "stage": 3},
    {"expert": 4, "context": 2, "stage": 2, "unroll": False, "remat": "matmuls"},
    {"pipe": 2, "expert": 2, "zero": 2, "stage": 3, "accum": 2},
    {"pipe": 2, "expert": 2, "tensor": 2, "stage": 2, "accum": 4, "schedule": "zero_bubble"},
]
CASES = [(layout, factor) for layout in LAYOUTS for factor in (None, 1.0)]
SAMPLE = [(LAYOUTS[i], factor) for i, factor in ((7, 1.0),)]


def config_of(layout, factor):
    balance = 0.01 if layout.get("accum", 1) == layout.get("zero", 1) == layout.get("data", 1) == 1 else 0.0
    mixture = dataclasses.replace(CONFIG.mixture, capacity_factor=factor, balance=balance)
    return dataclasses.replace(CONFIG, mixture=mixture)


@lru_cache
def reference(config):
    """([(loss, gradient norm)], parameters) of the plain loop."""

    def mean(params, batch):
        loss, _ = model(config).loss(params, batch, None)
        return loss.sum / loss.count

    params, seen = initial(config), []
    with plain_mixtures():
        for batch in batches():
            loss, gradient = jax.jit(jax.value_and_grad(mean))(params, batch)
            params = jax.tree.map(lambda w, g: w - LR * g, params, gradient)
            seen.append((float(loss), float(optax.tree.norm(gradient))))
    return np.array(seen), jax.device_get(params)


@pytest.mark.parametrize(("layout", "factor"), keep(CASES, SAMPLE), ids=str)
def test_one_device_computes_the_same(layout, factor):
    config = config_of(layout, factor)
    step = make_step(config, **layout)
    state, seen = step.init(jax.random.key(0), initial(config)), []
    for batch in batches():
        state, metrics = step(state, batch)
        seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        assert (metrics["drop_rate"] > 0) == (factor is not None)
        assert metrics["balance_loss"] > 1.9
        assert metrics["cross_entropy"] + config.mixture.balance * metrics["balance_loss"] == pytest.approx(
            metrics["loss"]
        )
    known, params = reference(config)
    assert np.abs(np.array(seen) / known - 1).max() < 1e-6
    for name, x in named(jax.device_get(state.params)).items():
        other = named(params)[name]
        assert np.abs(x - other).max() < 2e-6 * max(np.abs(other).max(), 1e-2), name


DEEPSEEK = MixtureConfig(4, 2, 16, score="sigmoid", scale=2.5, shared=24, balance=0.0, bias_rate=0.01)


@pytest.mark.parametrize(
    "layout",
    some(
        [
            {"expert": 2, "zero": 2, "stage": 3},
            {"expert": 2, "tensor": 2, "data": 2, "stage": 0},
            {"pipe": 2, "expert": 2, "stage": 2},
        ],
        [{"expert": 2, "zero": 2, "stage": 3}],
    ),
    ids=str,
)
def test_a_bias_and_a_shared_expert(layout):
    """All replicas move the bias by the counts of the whole batch, as one device does."""
    config = dataclasses.replace(CONFIG, mixture=DEEPSEEK)
    step = make_step(config, **layout)
    state = step.init(jax.random.key(0), initial(config))
    for batch in batches():
        state, _ = step(state, batch)

    def mean(params, batch):
        (loss, _), new = model(config).loss(params, batch, jax.random.key(0))
        return loss.sum / loss.count, new

    params = initial(config)
    with plain_mixtures():
        for batch in batches():
            gradient, new = jax.jit(jax.grad(mean, has_aux=True))(params, batch)
            trained = jax.tree.map(lambda w, g: w - LR * g, params, gradient)
            params = jax.tree.map(lambda x, w: w if x is None else x, new, trained, is_leaf=lambda x: x is None)
    found, known = named(jax.device_get(state.params)), named(params)
    assert (known["stack/mlp/bias"] != 0).any()
    for name, x in found.items():
        assert np.abs(x - known[name]).max() < 2e-6 * max(np.abs(known[name]).max(), 1e-2), name


def test_rows_count_along_expert():
    step = make_step(CONFIG, expert=2, zero=2, accum=2)
    assert step.batch_sizes[:3] == (16, 2, 2)
    assert step.replicas == 4


def test_zero_partitions_experts_and_the_rest():
    """Experts lie along `expert`, and ZeRO partitions them over `zero`; other parameters it partitions over both."""
    specs = named(make_step(CONFIG, expert=2, zero=2, stage=3).state_specs.params)
    assert specs["stack/mlp/gate_up"] == jax.sharding.PartitionSpec(None, ("expert", "zero"))
    assert specs["stack/attention/out/kernel"] == jax.sharding.PartitionSpec(None, ("zero", "expert"))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bytes_of_state(stage):
    """Masters and fp32 gradients, 4 bytes each, and weights that stage 1 and 2 gather; experts are always divided."""
    step = make_step(CONFIG, expert=2, zero=2, stage=stage)
    found = leaf_bytes(step)
    for layout in jax.tree.leaves(step.layouts):
        size = 4 * int(np.prod(layout.shape))
        own = 2 if layout.name in ("stack/mlp/gate_up", "stack/mlp/down") else 1
        state, gradients = (4 if stage >= s else own for s in (1, 2))
        weights = size / own if stage in (1, 2) else 0
        assert tuple(found.pop(layout.name)) == (size / state, 0, weights, size / gradients, 0), layout.name
    whole = state_bytes(step)
    assert whole.formula == pytest.approx(whole.total, abs=16)  # the optimizer's counters


def test_deepspeeds_names():
    mesh = jzero.make_mesh({"train_batch_size": 8, "expert_parallel": {"enabled": True, "autoep_size": 2}})
    assert mesh.shape["expert"] == 2
    off = jzero.make_mesh({"train_batch_size": 8, "expert_parallel": {"enabled": False, "autoep_size": 2}})
    assert off.shape["expert"] == 1
    with pytest.raises(ConfigError, match=r"expert_parallel.autoep_size = 2 and mesh.expert = 4: both are the degree"):
        jzero.make_mesh({"expert_parallel": {"enabled": True, "autoep_size": 2}, "mesh": {"expert": 4}})
    with pytest.raises(ConfigError, match=r"expert_parallel.top_k = 2: .*jzero.route"):
        jzero.Config.load({"expert_parallel": {"top_k": 2}})


def test_experts_that_the_axis_does_not_divide():
    with pytest.raises(ConfigError) as error:
        make_step(CONFIG, expert=8)
    assert re.fullmatch(
        r"the model's divided\['expert'\]\['mlp/.*'\] = 0: mesh\.expert = 8 does not divide the 4 of stack/mlp/\w+ "
        r"\[.*\]; "
        r"what fits: mesh\.expert = 4, or a number of experts that is a multiple of 8",
        str(error.value),
    )


def test_a_model_without_a_table():
    dense = dataclasses.replace(CONFIG, mixture=None)
    with pytest.raises(
        ConfigError, match=r"mesh.expert = 2: no table says .* write expert_parallel.dimensions = .*the names are"
    ):
        make_step(dense, expert=2)
    with pytest.raises(ConfigError, match=r"expert_parallel.dimensions: does nothing on a mesh with expert 1"):
        make_step(CONFIG, more={"expert_parallel": {"dimensions": {"mlp/down": 0}}})


class Own(nnx.Module):
    """A block of a user's own."""

    def __init__(self, rngs):
        self.router = nnx.Linear(16, 4, use_bias=False, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(rngs.params(), (4, 16, 2, 8)) / 4)
        self.down = nnx.Param(jax.random.normal(rngs.params(), (4, 8, 16)) / 4)

    def __call__(self, x):
        return x + jzero.experts(x, jzero.route(self.router(x), 2), self.up[...], self.down[...])


class OwnModel(nnx.Module):
    divided: ClassVar = {"expert": {"blocks/.*/(up|down)$": 0}}

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, 16, rngs=rngs)
        self.blocks = nnx.List([Own(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


class Both(OwnModel):
    divided: ClassVar = OwnModel.divided | {"tensor": {"(up|down)$": 0, "embed": 1}}


def divided_by_both(model, devices=8, example=None, **more):
    config = {"train_batch_size": 8, "optimizer": {"type": "Adam"}, "mesh": {"expert": 4, "tensor": 2, "zero": 1}}
    mesh = jzero.make_mesh(expert=4, tensor=2, zero=1, devices=jax.devices()[:devices])
    built = jzero.from_flax(model, own_loss, example_batch=example)
    return jzero.make_train_step(built, config | more, mesh=mesh)


@pytest.mark.slow
def test_experts_that_both_axes_would_divide():
    """4 experts are no multiple of 4 x 2."""
    batch = {name: np.zeros((8, 6), np.int32) for name in ("inputs", "labels")}
    found = divided_by_both(OwnModel, example=batch)
    assert {found.config.tensor_parallel.dimensions[f"^blocks/\\d+/{name}$"] for name in ("up", "down")} <= {1, 2, 3}
    found(found.init(jax.random.key(0)), batch)
    specs = named(divided_by_both(Both).state_specs.params)
    assert ("tensor" in specs["embed/embedding"], "tensor" in specs["blocks/0/up"]) == (True, False)
    with pytest.raises(ConfigError, match=r"mesh.expert = 4 divides the 4 of .*, and mesh.tensor = 2 does not"):
        divided_by_both(OwnModel, tensor_parallel={"dimensions": {"(up|down)$": 0}})


@pytest.mark.parametrize(
    ("divided", "message"),
    [
        ({"experts": {"up": 0}}, r"the model's divided\['experts'\]: no such axis; choose \"expert\" or \"tensor\""),
        ({"expert": {"up": "0"}}, r"the model.s divided\['expert'\] = {.up.: .0.}: must be"),
        ({"expert": "up"}, r"the model's divided\['expert'\] = 'up': must be \{regular expression: dimension\}"),
    ],
)
def test_bad_tables_of_a_model(divided, message):
    with pytest.raises(ConfigError, match=message):
        divided_by_both(type("Wrong", (OwnModel,), {"divided": divided}))


def own_loss(module, batch):
    return optax.softmax_cross_entropy_with_integer_labels(module(batch["inputs"]), batch["labels"]).mean()


@pytest.mark.slow
@pytest.mark.parametrize("stack", [pytest.param(None, marks=pytest.mark.slow), "blocks"])
def test_a_module_of_a_users_own(stack):
    """Its table counts with and without a layer stack."""
    subject, losses = jzero.from_flax(OwnModel, own_loss, stack=stack), []
    for expert in (1, 2):
        mesh = jzero.make_mesh(expert=expert, zero=1, devices=jax.devices()[:expert])
        settings = {"train_batch_size": BATCH, "optimizer": {"type": "SGD", "params": {"lr": LR}}}
        step = jzero.make_train_step(subject, settings, mesh=mesh)
        state = step.init(jax.random.key(0))
        divided = {name.rpartition("/")[2] for name, spec in named(step.state_specs.params).items() if "expert" in spec}
        assert divided == ({"up", "down"} if expert == 2 else set())
        for batch in batches():
            state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize(("name", "dim", "shape"), [("up", 1, [4, 16, 2, 8]), ("down", 2, [4, 8, 16])])
def test_a_dimension_that_is_not_that_of_the_experts(name, dim, shape):
    settings = {
        "train_batch_size": BATCH, "optimizer": {"type": "SGD", "params": {"lr": LR}}, "mesh": {"expert": 2},
        "expert_parallel": {"dimensions": {f"blocks/.*/{name}$": dim}},
    }  # fmt: skip
    step = jzero.make_train_step(jzero.from_flax(OwnModel, own_loss), settings)
    with pytest.raises(ConfigError) as error:
        step.trace(batches()[0])
    text = f"mesh.expert divides dimension {dim} of the experts' weight {shape}, which would be gathered; "
    assert text + "expert_parallel.dimensions must give dimension 0, that of the experts" in str(error.value)


def test_the_length_of_a_sequence_is_not_experts_matter():
    """`expert` divides rows: an odd length beside it needs no warning."""
    step = make_step(CONFIG, expert=2)
    tokens = jax.ShapeDtypeStruct((BATCH, 7), np.int32)
    traced = step.trace({"inputs": tokens, "labels": tokens})
    assert list(whole_sequences(step.model, step.setup.weights, traced, step.mesh)) == []


def test_what_the_report_says_of_experts_that_both_axes_would_divide():
    text = " ".join(jzero.report(divided_by_both(Both)).split())
    assert (
        "replicated over tensor: mesh.tensor = 2 x mesh.expert = 4 does not divide the 4 of blocks/0/down, "
        "blocks/1/down [4, 8, 16]:"
    ) in text
    assert "8 would fit" in text
