"""A step through the pipeline against the same step without one: the same losses, and the same gradients.

The gradients are read off the public API: SGD's learning rate is so high (1e4) that the parameters before a step less
those after it, divided by the rate, are the gradient to float32's rounding. How far two gradients are apart is, leaf by
leaf, ||a - b|| / ||b||, the 2-norm over all of the leaf. In float32 it is at most 1e-6, and so is the relative error of
the losses and of the gradient's norm. The unpipelined step has the same ZeRO stage, replicas and micro-batches;
`test_oracle` holds it against a plain loop.
"""

from functools import lru_cache
from itertools import combinations, product
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.sampling import keep, sample
from jax import lax
from test_bad_input import mlp, refused
from test_engine import three_calls
from test_oracle import ADAMW, FAST, assert_bitwise, place
from test_pipeline_module import EMBED, HEAD, Residual, Wide, finish, pipeline, start

import jzero
from jzero.engine.run_report import report
from jzero.model import stack_loss
from jzero.pipeline import vocab_parallel
from jzero.planner import memory
from models.llama import Llama, LlamaConfig

LR, BOUND = 1e4, 1e-6
VOCAB, WIDTH, SEQUENCE, ROWS = 64, 16, 8, 2  # ROWS of a micro-batch
SGD = {"type": "SGD", "params": {"lr": LR}}


# ------------------------------------------------------------------------------------------------------- models


class Decoder:
    """Ends that are vocabulary-parallel, and layers with nothing to them; the loss is (sum, count)."""

    def __init__(self, layers, tied=False, vocab=VOCAB):
        self.layers, self.tied, self.vocab = layers, tied, vocab
        self.vocabulary = {"embed": 0} if tied else {"embed": 0, "head": 1}

    def __repr__(self):
        return f"{type(self).__name__}({self.layers} layers)"

    def init(self, rng):
        keys = jax.random.split(rng, 4)
        normal = lambda key, *shape: 0.3 * jax.random.normal(key, shape)  # noqa: E731
        head = {} if self.tied else {"head": normal(keys[1], WIDTH, self.vocab)}
        stack = {"w": normal(keys[2], self.layers, WIDTH, WIDTH), "b": normal(keys[3], self.layers, WIDTH)}
        return {"ends": {"embed": normal(keys[0], self.vocab, WIDTH), **head}, "stack": stack}

    def prefix(self, ends, batch, rng):
        return vocab_parallel.embed(ends["embed"], batch["inputs"])

    def block(self, layer, x, rng):
        return x + jnp.tanh(x @ layer["w"] + layer["b"])

    def suffix(self, ends, x, batch, rng):
        return vocab_parallel.cross_entropy(x, ends["embed"].T if self.tied else ends["head"], batch["labels"])

    def loss(self, params, batch, rng):
        return stack_loss(self, params, batch, rng)


def drop(x, rng):
    """Dropout, whose mask is as good as a name of its key."""
    return x if rng is None else jnp.where(jax.random.bernoulli(rng, 0.7, x.shape), x / 0.7, 0)


class Dropout(Decoder):
    """Draws in the prefix, in every layer and in the suffix."""

    def prefix(self, ends, batch, rng):
        return drop(super().prefix(ends, batch, rng), rng)

    def block(self, layer, x, rng):
        return x + drop(jnp.tanh(x @ layer["w"] + layer["b"]), rng)

    def suffix(self, ends, x, batch, rng):
        return super().suffix(ends, drop(x, rng), batch, rng)


class Tree(Decoder):
    """Activations with an integer (Python's, at first) that layers count up, and a mask that they turn; a mean loss."""

    def prefix(self, ends, batch, rng):
        return {"h": super().prefix(ends, batch, rng), "depth": 0, "mask": batch["labels"] >= 0}

    def block(self, layer, x, rng):
        h = jnp.tanh(x["h"] @ layer["w"] + layer["b"]) * x["mask"][..., None] / (1 + x["depth"])
        return {"h": x["h"] + h, "depth": x["depth"] + 1, "mask": jnp.roll(x["mask"], 1, axis=1)}

    def suffix(self, ends, x, batch, rng):
        total, _ = super().suffix(ends, x["h"] * x["mask"][..., None], batch, rng)
        return total / (ROWS * SEQUENCE) * x["depth"]


@jax.custom_vjp
def normed_gradient(x):
    return x


normed_gradient.defvjp(lambda x: (x, None), lambda _, g: (g / jnp.linalg.norm(g),))


class Fragile(Decoder):
    """Layers that make NaNs of zeros, and of a gradient that is zero."""

    def block(self, layer, x, rng):
        h = normed_gradient(x) / jnp.linalg.norm(x, axis=-1, keepdims=True)
        return normed_gradient(x + jnp.tanh(h @ layer["w"] + layer["b"]))


class Integers(Decoder):
    """Parameters that are no floats, in the ends and in the stack."""

    def init(self, rng):
        ends, stack = super().init(rng).values()
        return {
            "ends": {**ends, "shift": jnp.int32(1)},
            "stack": {**stack, "sign": 1 - 2 * (jnp.arange(self.layers) % 2)},
        }

    def prefix(self, ends, batch, rng):
        return vocab_parallel.embed(ends["embed"], (batch["inputs"] + ends["shift"]) % VOCAB)

    def block(self, layer, x, rng):
        return x + layer["sign"] * jnp.tanh(x @ layer["w"] + layer["b"])


class Everything(Tree, Integers):
    """What Dropout, Tree and Integers do, at once."""

    def prefix(self, ends, batch, rng):
        h = drop(Integers.prefix(self, ends, batch, rng), rng)
        return {"h": h, "depth": 0, "mask": batch["labels"] >= 0}

    def block(self, layer, x, rng):
        h = jnp.tanh(x["h"] @ layer["w"] + layer["b"]) * x["mask"][..., None] / (1 + x["depth"])
        mask = jnp.roll(x["mask"], 1, axis=1)
        return {"h": x["h"] + layer["sign"] * drop(h, rng), "depth": x["depth"] + 1, "mask": mask}


@lru_cache
def model(kind, layers, **options):
    if kind is Llama:
        config = LlamaConfig(layers, WIDTH, 2, 1, 24, vocab_size=VOCAB, **options)
        return jzero.from_flax(lambda rngs: Llama(config, rngs=rngs))
    return kind(layers, **options)


# -------------------------------------------------------------------------------------------------------- steps


class Case(NamedTuple):
    """A layout. `micro`: the micro-batches of a step. Without a schedule it is the step to compare with."""

    schedule: str | None
    stages: int
    micro: int
    stage: int = 0
    zero: int = 1
    data: int = 1
    chunks: int = 1
    gather: str | None = None
    tied: bool = False

    def __str__(self):
        chunks = f"x{self.chunks}" if self.chunks > 1 else ""
        gather = f"_{self.gather}" if self.gather else ""
        tied = "-tied" if self.tied else ""
        mesh = f"pipe{self.stages}-data{self.data}-n{self.zero}"
        return f"{self.schedule}{chunks}-{mesh}-acc{self.micro}-zero{self.stage}{gather}{tied}"

    @property
    def layers(self):
        """Two per chunk where that makes no more than four."""
        return max(4, self.stages * self.chunks)

    @property
    def unpipelined(self):
        return self._replace(schedule=None, stages=1, chunks=1, gather=None)

    @property
    def devices(self):
        return jax.devices()[: self.stages * self.data * self.zero]

    def config(self, **more):
        pipeline = {"schedule": self.schedule, "chunks": self.chunks, "gather": self.gather}
        return {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.micro,
            "mesh": {"pipe": self.stages, "data": self.data, "zero": self.zero},
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},
            "optimizer": SGD,
            "gradient_clipping": 0.0,
            "compiler_options": FAST,
            **({"pipeline": pipeline} if self.schedule else {}),
            **more,
        }

    def step(self, model, **more):
        config = self.config(**more)
        return jzero.make_train_step(model, config, mesh=jzero.make_mesh(config, devices=self.devices))


def batch_of(case, seed=0, vocab=VOCAB):
    """A global batch. Rows have 1 to SEQUENCE labels that count, and those of one micro-batch have none."""
    rng = np.random.default_rng(seed)
    rows = ROWS * case.micro * case.data * case.zero
    tokens = rng.integers(0, vocab, (rows, SEQUENCE + 1)).astype(np.int32)
    labels = np.where(np.arange(SEQUENCE) < rng.integers(1, SEQUENCE + 1, (rows, 1)), tokens[:, 1:], -1)
    if case.micro > 1:
        labels[ROWS : 2 * ROWS] = -1
    return {"inputs": tokens[:, :-1], "labels": labels}


@lru_cache
def initial(model, frozen=()):
    """A new state under SGD, born on one device: compiling `init` for every layout is another file's test."""
    return Case(None, 1, 1).step(model, frozen_parameters=list(frozen)).init(jax.random.key(0))


class Done(NamedTuple):
    """What a step did: its loss, every micro-batch's, the gradient's norm, and the gradient by leaf."""

    loss: float
    micro_losses: np.ndarray
    norm: float
    gradients: dict[str, np.ndarray]


def by_name(tree):
    return {jax.tree_util.keystr(path, simple=True, separator="/"): x for path, x in jax.tree.leaves_with_path(tree)}


def run(model, case, batch=None, **more):
    step = case.step(model, **more)
    state = place(step, initial(model, tuple(more.get("frozen_parameters", ()))))
    before = by_name(jax.device_get(state.params))
    state, metrics, details = step.run(state, batch_of(case) if batch is None else batch)
    assert not metrics["skipped"]
    for x in jax.tree.leaves(state.params):
        parts = {}
        for shard in x.addressable_shards:  # what lies on several devices is the same on all of them
            np.testing.assert_array_equal(shard.data, parts.setdefault(str(shard.index), shard.data))
    after = by_name(jax.device_get(state.params))
    gradients = {name: (np.float64(x) - np.float64(after[name])) / LR for name, x in before.items()}
    return Done(float(metrics["loss"]), np.asarray(details.micro_losses), float(metrics["grad_norm"]), gradients)


@lru_cache
def unpipelined(model, case):
    return run(model, case)


def too_far(ours, theirs):
    """Return the leaves whose gradients are more than the bound apart."""
    norm = np.linalg.norm
    errors = {name: norm(ours[name] - b) / (norm(b) or 1) for name, b in theirs.items()}
    return {name: error for name, error in errors.items() if not error <= BOUND}


def assert_close(ours, theirs):
    np.testing.assert_allclose(ours.micro_losses, theirs.micro_losses, rtol=BOUND)
    np.testing.assert_allclose(ours.loss, theirs.loss, rtol=BOUND)
    np.testing.assert_allclose(ours.norm, theirs.norm, rtol=BOUND)
    assert too_far(ours.gradients, theirs.gradients) == {}


def check(model, case, **more):
    """The pipelined step does what the unpipelined one does; returns that."""
    ours = run(model, case, **more)
    assert_close(ours, run(model, case.unpipelined, **more) if more else unpipelined(model, case.unpipelined))
    return ours


def named(cases):
    return pytest.mark.parametrize("case", cases, ids=str)


# --------------------------------------------------------------------------------------- every layout: gradients

KINDS = (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2))
ZEROS = ((0, None), (1, None), (2, None), (3, "micro_batch"), (3, "step"))


def layouts():
    """All kinds of schedule at all ZeRO stages, the other dimensions spread so that all pairs are met."""
    for (k, (schedule, chunks)), (z, (stage, gather)) in product(enumerate(KINDS), enumerate(ZEROS)):
        stages = (2, 4)[(k + z) % 2]
        data = 2 if (k + z) % 4 == 0 or (stages == 4 and not stage) else 1
        zero = 8 // stages // data if data == 2 else 2
        micro = (stages, 2 * stages, 3)[(k + z) % 3]  # 3: more than the stages, or fewer
        tied = (k + z // 2) % 2 == 0
        yield Case(schedule, stages, micro, stage, zero, data, chunks, gather, tied)


LAYOUTS = list(layouts())


def settings(case):
    """The default run has each value of each of these."""
    size = {1: "S", 2: "2S"}.get(case.micro / case.stages, "other")
    return (case.schedule, case.chunks), case.stages, size, (case.stage, case.gather), case.tied


def test_the_layouts_are_a_covering_set():
    levels = {
        "kind": KINDS, "stages": (2, 4), "micro": ("S", "2S", "other"), "zero": ZEROS, "data": (1, 2),
        "tied": (False, True),
    }  # fmt: skip
    rows = [
        {
            "kind": (case.schedule, case.chunks), "stages": case.stages, "zero": (case.stage, case.gather),
            "micro": settings(case)[2], "data": case.data, "tied": case.tied,
        }
        for case in LAYOUTS
    ]  # fmt: skip
    for a, b in combinations(levels, 2):
        missing = set(product(levels[a], levels[b])) - {(row[a], row[b]) for row in rows}
        assert not missing, (a, b, missing)


@named(sample(LAYOUTS, settings, strength=1))
def test_layouts(case):
    check(model(Decoder, case.layers, **{"tied": True} if case.tied else {}), case)


def test_one_stage_is_the_step_without_a_pipeline():
    for schedule, chunks in KINDS:
        case = Case(schedule, 1, 2, 3, 2, chunks=chunks)
        programs = [
            c.step(model(Decoder, 4)).lower(batch_of(case)).as_text() for c in (case, case._replace(schedule=None))
        ]
        assert programs[0] == programs[1], schedule
    check(model(Decoder, 4), case._replace(gather="step"))  # which is for that step too


ONE = [Case("1f1b", 2, 1, 1, 2), Case("interleaved", 2, 1, chunks=2), Case("zero_bubble", 4, 1)]


@named(keep(ONE, ONE[2:]))
def test_one_micro_batch(case):
    check(model(Decoder, case.layers), case)


@pytest.mark.parametrize("schedule", keep(["interleaved", "zero_bubble"], ["interleaved"]))
def test_two_layers_in_each_of_two_chunks(schedule):
    check(model(Decoder, 8), Case(schedule, 2, 4, chunks=2))


# ------------------------------------------------------------------------------------------ every kind of model


LLAMAS = [
    Case("gpipe", 4, 4, 2, 2),
    Case("1f1b", 2, 4, 1, 2, 2),
    Case("interleaved", 2, 4, 3, 2, chunks=2),
    Case("zero_bubble", 4, 6),
]


@named(keep(LLAMAS, LLAMAS[1:2]))
def test_llama(case):
    check(model(Llama, case.layers), case)


@pytest.mark.parametrize(
    ("kind", "case"),
    keep(  # the others' schedules and stages: the tied ones of LAYOUTS
        [
            (Llama, Case("1f1b", 2, 2)),
            (Decoder, Case("gpipe", 2, 3)),
            (Decoder, Case("1f1b", 4, 4, 3, 2)),
            (Decoder, Case("interleaved", 2, 2, 1, 2, chunks=2)),
            (Decoder, Case("zero_bubble", 2, 2, 2, 2)),
        ],
        [(Decoder, Case("zero_bubble", 2, 2, 2, 2))],
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_tied_ends(kind, case):
    """The embedding is the head too: what both ends add to its gradient, of different micro-batches, is all there."""
    ours = check(model(kind, case.layers, tied=True), case)
    assert "ends/head" not in ours.gradients


@pytest.mark.parametrize(
    ("case", "tied"),
    sample(product([Case("1f1b", 4, 3), Case("zero_bubble", 4, 4, 2, 2)], (False, True)), strength=1),
    ids=str,
)
def test_a_vocabulary_that_the_stages_do_not_divide_lies_on_all_of_them(case, tied):
    odd = model(Decoder, case.layers, tied=tied, vocab=VOCAB + 1)
    assert not any(leaf.on_pipe for leaf in jax.tree.leaves(case.step(odd).layouts["ends"]))
    assert all(leaf.on_pipe for leaf in jax.tree.leaves(case.step(model(Decoder, 4, tied=tied)).layouts["ends"]))
    check(odd, case)


FROZEN = [("stack/b", "embed"), ("stack",), ("ends",)]
FREEZING = [Case("1f1b", 2, 3, 3, 2), Case("interleaved", 2, 2, 1, 2, chunks=2), Case("zero_bubble", 2, 3, 2, 2)]


@pytest.mark.parametrize(("case", "frozen"), sample(product(FREEZING, FROZEN), strength=1), ids=str)
def test_frozen_parameters(case, frozen):
    ours = check(model(Decoder, case.layers), case, frozen_parameters=list(frozen))
    for name, gradient in ours.gradients.items():
        assert (np.abs(gradient).max() == 0) == any(pattern in name for pattern in frozen), name


EVERYTHING = [
    Case("gpipe", 2, 3),
    Case("1f1b", 4, 3),
    Case("interleaved", 2, 2, 3, 2, chunks=2),
    Case("zero_bubble", 2, 3),
]


@named(keep(EVERYTHING, EVERYTHING[1::2]))
def test_a_model_with_everything(case):
    """Dropout, integers and masks between the layers, parameters that are integers; each alone is a slow test."""
    check(model(Everything, case.layers), case)


@pytest.mark.slow
@named(
    [
        Case("gpipe", 2, 3),
        Case("1f1b", 4, 4),
        Case("interleaved", 2, 4, chunks=2),
        Case("zero_bubble", 2, 3),
        Case("zero_bubble", 2, 2, chunks=2),
    ]
)
def test_the_dropout_masks_are_those_of_the_unpipelined_step(case):
    noisy = model(Dropout, case.layers)
    assert abs(check(noisy, case).loss / unpipelined(model(Decoder, case.layers), case.unpipelined).loss - 1) > 1e-3


@pytest.mark.slow
@named([Case("gpipe", 2, 3), Case("1f1b", 2, 4, 1, 2), Case("interleaved", 2, 4, chunks=2), Case("zero_bubble", 4, 4)])
def test_activations_with_integers_and_masks(case):
    check(model(Tree, case.layers), case)


@pytest.mark.slow
@named([Case("1f1b", 2, 3, 2, 2), Case("interleaved", 2, 2, 3, 2, chunks=2), Case("zero_bubble", 2, 3)])
def test_parameters_that_are_integers(case):
    check(model(Integers, case.layers), case)


STALE = [
    Case("gpipe", 4, 3),
    Case("1f1b", 4, 4),
    Case("interleaved", 2, 3, chunks=2),
    Case("zero_bubble", 4, 3),
    Case("zero_bubble", 2, 3, chunks=2),
]


@named(keep(STALE, STALE[1:2]))
def test_stale_data_leaks_nothing(case, monkeypatch):
    """What an idle stage makes is NaN here: of the zeros that it has at first or is sent, of what its buffers hold."""
    monkeypatch.setattr(lax, "empty", lambda shape, dtype: jnp.full(shape, jnp.nan if dtype == jnp.float32 else -1))
    fragile, batch = model(Fragile, case.layers), batch_of(case)
    layer = jax.tree.map(lambda w: w[0], fragile.init(jax.random.key(0))["stack"])
    for x, dy in ((0.0, 1.0), (1.0, 0.0)):
        y, pullback = jax.vjp(lambda x: fragile.block(layer, x, None), jnp.full((1, WIDTH), x))
        assert jnp.isnan(pullback(jnp.full(y.shape, dy))[0]).all()
    batch["labels"][:, 0] = 1  # no micro-batch without any, whose gradient is zero
    assert_close(run(fragile, case, batch), run(fragile, case.unpipelined, batch))


# ----------------------------------------------------------------------------------------------- PipelineModule


def mean_cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@lru_cache
def layers(kind):
    """With dropout, tied ends around four layers alike, or five, which no stages divide; or five that are not alike,
    with integers and masks between them."""
    if kind != "different":
        alike = [jzero.LayerSpec(Residual, 8, 0.5)] * {"four": 4, "five": 5}[kind]
        return pipeline(EMBED, *alike, HEAD, loss_fn=mean_cross_entropy)
    return pipeline(start, *(jzero.LayerSpec(Wide, *size) for size in ((3, 16), (16, 16), (16, 2))), finish)


MODULES = [
    Case("gpipe", 2, 3),
    Case("1f1b", 4, 4),
    Case("interleaved", 2, 2, 3, 2, chunks=2),
    Case("zero_bubble", 2, 4),
]


@pytest.mark.parametrize(
    ("case", "kind"),
    keep(
        product(MODULES, ["four", "five", "different"]),
        [(MODULES[1], "four"), (MODULES[0], "different")],  # "five" has a test of its own
    ),
    ids=str,
)
def test_pipeline_module(kind, case):
    rng, rows = np.random.default_rng(0), ROWS * case.micro * case.data * case.zero
    tokens, targets = rng.integers(0, 16, (2, rows, SEQUENCE)).astype(np.int32)
    if kind == "different":
        x, targets = rng.normal(size=(rows, 3)), np.full((rows, 2), 9, np.float32)  # far off: no loss that cancels
        tokens = {"x": x.astype(np.float32), "ids": rng.integers(0, 2**32, rows, np.uint32)}
    assert_close(*(run(layers(kind), c, (tokens, targets)) for c in (case, case.unpipelined)))


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_stack_that_the_stages_do_not_divide(stage):
    """With frozen leaves, and leaves under the persistence threshold; the optimizer sees layers, not a stack."""
    case = Case("1f1b", 2, 2, stage, 2)
    rng, rows = np.random.default_rng(0), ROWS * case.micro * case.zero
    batch = tuple(rng.integers(0, 16, (2, rows, SEQUENCE)).astype(np.int32))
    more = {
        "frozen_parameters": ["tied/.*", "bias"],
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
    }
    assert_close(*(run(layers("five"), c, batch, **more) for c in (case, case.unpipelined)))
    if stage < 3:
        return
    lamb, params = {"optimizer": {"type": "Lamb", "params": {"lr": 0.1}}}, []
    for c in (case, case.unpipelined):
        step = c.step(layers("five"), **lamb)
        params.append(by_name(jax.device_get(step.run(step.init(jax.random.key(0)), batch)[0].params)))
    for name, x in params[0].items():
        np.testing.assert_allclose(x, params[1][name], rtol=1e-6, atol=1e-6, err_msg=name)


def test_the_report_says_what_a_switch_costs():
    case = Case("1f1b", 2, 2, 3)
    text = report(case.step(layers("five"), pipeline={"activation_checkpoint_interval": 2}))
    assert "stages x chunks = 2 does not divide the 5 equal layers" in " ".join(text.split())
    assert "in one piece whatever activation_checkpoint_interval says" in " ".join(text.split())
    assert "layer stack: 5 layers, unrolled; activation checkpointing full" in text
    text = " ".join(report(case.step(layers("different"))).split())
    assert "no run of equal layers holds half of the parameters" in text
    for policy in ("none", "matmuls"):
        step = lambda p=policy: case.step(layers("five"), activation_checkpointing={"policy": p})  # noqa: E731
        refused(step, "activation_checkpointing", "always recomputed")


# ------------------------------------------------------------------------------------- activation checkpointing


@pytest.mark.parametrize(
    ("kind", "schedule", "policy", "interval"),
    keep(
        [
            (Llama, "1f1b", "matmuls", 0),
            (Llama, "zero_bubble", "full", 2),
            (Decoder, "1f1b", "none", 0),
            (Decoder, "1f1b", "matmuls", 2),
            (Decoder, "1f1b", "full", 0),
            (Decoder, "1f1b", "full", 1),
            (Decoder, "zero_bubble", "none", 0),
            (Decoder, "zero_bubble", "matmuls", 1),
            (Decoder, "zero_bubble", "full", 0),
            (Decoder, "zero_bubble", None, 2),
        ],
        [
            (Decoder, "1f1b", "none", 0),
            (Decoder, "1f1b", "full", 0),
            (Decoder, "zero_bubble", "matmuls", 1),
            (Decoder, "zero_bubble", None, 2),
        ],
    ),
)
def test_activation_checkpointing(kind, schedule, policy, interval):
    """Two layers to a stage; the unpipelined step recomputes nothing. An interval alone is policy "full"."""
    case = Case(schedule, 2, 3, 3 * (interval == 1), 1 + (interval == 1))
    pipeline = {"schedule": schedule, "activation_checkpoint_interval": interval}
    ours = run(model(kind, 4), case, activation_checkpointing={"policy": policy}, pipeline=pipeline)
    assert_close(ours, unpipelined(model(kind, 4), case.unpipelined))


def test_what_an_interval_keeps():
    """Of the three micro-batches in flight the input of each checkpoint: four on each stage, or one."""
    case, tokens, peaks = Case("1f1b", 2, 4), jax.ShapeDtypeStruct((4 * ROWS, 4096), jnp.int32), []
    for interval in (1, 4):
        pipeline = {"schedule": "1f1b", "activation_checkpoint_interval": interval}
        step = case.step(model(Decoder, 8), pipeline=pipeline)
        peaks.append(memory(step.lower({"inputs": tokens, "labels": tokens}).compile()).peak)
    assert peaks[0] - peaks[1] == pytest.approx(3 * (4 - 1) * ROWS * 4096 * WIDTH * 4, rel=0.01)


@pytest.mark.parametrize("schedule", keep(["interleaved", "zero_bubble"], ["zero_bubble"]))
def test_recomputed_layers_draw_the_same_masks(schedule):
    check(model(Dropout, 4), Case(schedule, 2, 2, chunks=2), activation_checkpointing={"policy": "full"})


# ---------------------------------------------------------------------------------- losses without a train step

FORWARD = [Case("1f1b", 2, 3, 3, 2), Case("gpipe", 4, 2), *[Case("zero_bubble", s, 2, chunks=2) for s in (2, 4)]]


@named(keep(FORWARD, FORWARD[:1]))
def test_evaluate_and_micro_loss(case):
    """Any number of micro-batches; without dropout, and with that of a micro-batch of the next step."""
    noisy, losses = model(Dropout, case.layers), []
    for one in (case, case.unpipelined):
        step = one.step(noisy)
        state = place(step, initial(noisy))
        batch = batch_of(case._replace(micro=5))
        part = jax.tree.map(lambda x, n=step.micro_size: x[-n:], batch)
        losses.append([step.evaluate(state, batch), step.evaluate(state, part), step.micro_loss(state, part, 1)])
    np.testing.assert_allclose(*losses, rtol=BOUND)
    assert abs(losses[0][1] / losses[0][2] - 1) > 1e-3


@pytest.mark.slow
def test_micro_loss_is_the_steps():
    case, noisy = Case("interleaved", 2, 4, chunks=2), model(Dropout, 4)
    step = case.step(noisy)
    state, batch = place(step, initial(noisy)), batch_of(case)
    parts = [jax.tree.map(lambda x, i=i: x[i * ROWS : (i + 1) * ROWS], batch) for i in range(case.micro)]
    before = [step.micro_loss(state, part, i) for i, part in enumerate(parts)]
    np.testing.assert_allclose(before, step.run(state, batch)[2].micro_losses, rtol=BOUND)


THREE = [Case("1f1b", 2, 3, 1, 2), Case("interleaved", 2, 2, 3, 2, chunks=2)]


@named(keep(THREE, THREE[:1]))
def test_the_three_call_loop_is_train_batch(case, capsys):
    noisy, config, engines = model(Dropout, case.layers), case.config(optimizer=ADAMW), []
    for _ in range(2):
        mesh = jzero.make_mesh(config, devices=case.devices)
        engines.append(jzero.initialize(model=noisy, config=config, mesh=mesh)[0])
    one, three = engines
    for seed in range(2):
        parts = [batch_of(case._replace(micro=1), 10 * seed + i) for i in range(case.micro)]
        loss = one.train_batch(iter(parts))
        losses = [float(loss) for loss in three_calls(three, parts)]
        counts = [(part["labels"] >= 0).sum() for part in parts]
        np.testing.assert_allclose(np.average(losses, weights=counts), loss, rtol=BOUND)
    assert_bitwise((one.state.params, one.state.opt_state), (three.state.params, three.state.opt_state))


# ------------------------------------------------------------------------------------------------ half precision


def train(model, case, steps, **more):
    step = case.step(model, optimizer=ADAMW, **more)
    state, metrics = step.init(jax.random.key(0)), []
    for seed in range(steps):
        state, m = step(state, batch_of(case, seed))
        metrics.append(jax.device_get(m))
    return metrics


TEN = list(product((Decoder, Llama), [Case("1f1b", 2, 4, 2, 2), Case("interleaved", 2, 4, 3, 2, chunks=2)]))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "case"), TEN, ids=lambda value: getattr(value, "__name__", str(value)))
def test_ten_steps_in_bf16_stay_together(kind, case):
    runs = [train(model(kind, case.layers), c, 10, bf16={"enabled": True}) for c in (case, case.unpipelined)]
    ours, theirs = ([m["loss"] for m in metrics] for metrics in runs)
    np.testing.assert_allclose(ours, theirs, rtol=1e-2)
    assert not any(m["skipped"] for m in runs[0])


FP16 = [Case("1f1b", 2, 3, 1, 2), Case("zero_bubble", 2, 2, chunks=2)]


@named(keep(FP16, FP16[:1]))
def test_fp16(case):
    """From a loss scale at which the gradients overflow down to one at which they do not, as without a pipeline."""
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1}
    runs = [train(model(Decoder, case.layers), c, 12, fp16=fp16) for c in (case, case.unpipelined)]
    for m in runs[0]:
        assert np.isfinite(m["loss"])
    skipped = [m["skipped"] for m in runs[0]]
    assert skipped[0]
    assert not skipped[-1]
    assert skipped == [m["skipped"] for m in runs[1]]
    np.testing.assert_allclose(*([m["loss"] for m in metrics] for metrics in runs), rtol=1e-2)


def test_a_step_that_overflows_changes_nothing():
    case, fragile = Case("1f1b", 2, 3), model(Decoder, 4)
    step = case.step(fragile, fp16={"enabled": True, "loss_scale": 2.0**40}, optimizer=ADAMW)
    state = step.init(jax.random.key(0))
    before = jax.device_get((state.params, state.opt_state))
    state, metrics = step(state, batch_of(case))
    assert metrics["skipped"]
    assert_bitwise(before, (state.params, state.opt_state))


# ----------------------------------------------------------------------------------------------------- mistakes


class Widening(Decoder):
    def block(self, layer, x, rng):
        return jnp.pad(x, [(0, 0), (0, 0), (0, 1)])


class Promoting(Decoder):
    def block(self, layer, x, rng):
        return super().block(layer, x, rng).astype(jnp.float32)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [(Widening, ["float32[2, 8, 16]", "float32[2, 8, 17]"]), (Promoting, ["bfloat16[2, 8, 16]", "float32[2, 8, 16]"])],
)
def test_layers_that_do_not_fit_each_other(kind, parts):
    case = Case("1f1b", 4, 2)
    step = case.step(kind(4), bf16={"enabled": kind is Promoting})
    refused(lambda: step.lower(batch_of(case)), *parts, "every layer gives what the next one takes")


@pytest.mark.parametrize(
    ("case", "layers", "parts"),
    [
        (Case("1f1b", 4, 2), 6, ["mesh.pipe = 4", "6 layers", "2, 3 or 6 stages fit"]),
        (
            Case("interleaved", 2, 2, chunks=3),
            4,
            ["mesh.pipe = 2", "pipeline.chunks = 3", "use fewer chunks"],
        ),
        (
            Case("zero_bubble", 4, 2, chunks=2),
            12,
            ["pipeline.chunks = 2", "12 layers", "2, 3 or 6 stages fit with 2 chunks"],
        ),
    ],
)
def test_stages_that_do_not_divide_the_layers(case, layers, parts):
    refused(lambda: case.step(Decoder(layers)), *parts)


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ({"activation_checkpointing": {"cpu_checkpointing": True}}, ["cpu_checkpointing = true", "mesh.pipe = 2"]),
        ({"stack": {"unroll": False}}, ["stack.unroll = false", "mesh.pipe = 2", "always unrolled"]),
    ],
    ids=str,
)
def test_what_a_pipeline_does_not_have(more, parts):
    refused(lambda: Case("1f1b", 2, 2).step(Decoder(4), **more), *parts)


def test_a_mesh_of_other_stages():
    assert jzero.make_mesh({"pipeline": {"stages": 4}}).shape["pipe"] == 4
    config = Case("1f1b", 2, 2).config(mesh={"pipe": 2})
    refused(lambda: jzero.make_train_step(Decoder(4), config, mesh=jzero.make_mesh()), "mesh.pipe = 2", "has pipe 1")


def test_a_model_without_a_stack():
    refused(lambda: Case("1f1b", 2, 2).step(mlp()), "mesh.pipe = 2", "no layer stack", "block", "jzero.PipelineModule")


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"mesh": {"pipe": 3}}, ["mesh.pipe", "3", "8 devices", "1, 2, 4 or 8"]),
        ({"mesh": {"pipe": 4, "data": 4, "zero": 1}}, ["mesh.pipe 4", "mesh.data 4", "= 16", "8 devices"]),
        ({"mesh": {"pipe": 0}}, ["mesh.pipe = 0", "-1 or a positive integer"]),
        ({"mesh": {"pipe": 2}, "pipeline": {"stages": 4}}, ["mesh.pipe = 2", "pipeline.stages = 4", "keep one"]),
        ({"pipeline": {"schedule": "1f1b", "chunks": 2}}, ["pipeline.chunks = 2", "1f1b", "interleaved"]),
        ({"pipeline": {"schedule": "gpipe", "chunks": 2}}, ["pipeline.chunks = 2", "gpipe", "zero_bubble"]),
        ({"pipeline": {"schedule": "interleaved"}}, ["interleaved", "pipeline.chunks", "2 or more"]),
        ({"pipeline": {"schedule": "1f2b"}}, ["pipeline.schedule", "1f2b", "zero_bubble"]),
        ({"pipeline": {"gather": "micro_batch"}}, ["pipeline.gather", "micro_batch", "stage 3"]),
        (
            {"pipeline": {"activation_checkpoint_interval": 2}, "activation_checkpointing": {"policy": "none"}},
            ["pipeline.activation_checkpoint_interval = 2", '"none"', '"full"'],
        ),
    ],
    ids=str,
)
def test_configs(config, parts):
    refused(lambda: jzero.make_mesh(config), *parts)


def test_frozen_layers_in_chunks_keep_the_compute_dtype():
    """With a reduction wider than the compute dtype the layers move in the wide one; frozen ones are not cast."""
    case = Case("interleaved", 2, 2, chunks=2)
    more = {"bf16": {"enabled": True}, "communication_data_type": "fp32", "frozen_parameters": ["stack/b"]}
    case.step(model(Decoder, 4), **more).lower(batch_of(case))
