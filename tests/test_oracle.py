"""Every layout against the plain single-device optax loop, and what a step keeps, skips, donates and draws.

The oracle is `reference`: value_and_grad of the model's own loss, clipping by global norm, optax.adamw, one device, no
jzero. Every layout trains on the same global batches, so one run of it per model serves them all.
"""

import re
from functools import lru_cache
from itertools import combinations, product
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.sampling import keep, sample

import jzero
from jzero.loss_scale import NonFiniteError
from jzero.model import stack_loss
from models.llama import Llama, LlamaConfig
from models.mlp import MLP, cross_entropy

BATCH, SEQUENCE, VOCAB, STEPS = 32, 8, 64, 10
LR, DECAY = 1e-3, 0.1
CLIP = {"untied": 0.71, "tied": 0.71, "decoder": 0.53, "mlp": 0.85}  # among the gradient norms of the ten steps
# Less of LLVM's work: compiling is what these tests spend their time on. The partitioned program is the same.
FAST = {"xla_backend_optimization_level": 0}
ADAMW = {"type": "AdamW", "params": {"lr": LR, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": DECAY}}


# ------------------------------------------------------------------------------------------------------- models


class Decoder:
    """A layer stack without attention, in plain JAX; JAX's attention on CPUs has no float16."""

    def init(self, rng):
        keys = jax.random.split(rng, 4)
        normal = lambda key, *shape: 0.3 * jax.random.normal(key, shape)  # noqa: E731
        return {
            "ends": {"embed": normal(keys[0], VOCAB, 16), "head": normal(keys[1], 16, VOCAB)},
            "stack": {"w": normal(keys[2], 2, 16, 16), "b": normal(keys[3], 2, 16)},
        }

    def prefix(self, ends, batch, rng):
        return ends["embed"][batch["inputs"]]

    def block(self, layer, x, rng):
        return x + jnp.tanh(x @ layer["w"] + layer["b"])

    def suffix(self, ends, x, batch, rng):
        labels, logits = batch["labels"], (x @ ends["head"]).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        return jnp.sum(losses, where=labels >= 0), (labels >= 0).sum()

    def loss(self, params, batch, rng):
        x = self.prefix(params["ends"], batch, rng)
        for i in range(2):
            x = self.block(jax.tree.map(lambda w, i=i: w[i], params["stack"]), x, rng)
        return self.suffix(params["ends"], x, batch, rng)


def llama(tied):
    config = LlamaConfig(2, 32, 4, 2, 48, vocab_size=VOCAB, tied=tied)
    return jzero.from_flax(lambda rngs: Llama(config, rngs=rngs))


@lru_cache
def model(name):
    if name == "mlp":
        return jzero.from_flax(lambda rngs: MLP(20, 16, 10, rngs=rngs), cross_entropy)
    return Decoder() if name == "decoder" else llama(tied=name == "tied")


@lru_cache
def batches(name):
    """Ten global batches. Rows have 1 to SEQUENCE labels that count: a mean of means would be another number."""
    rng = np.random.default_rng(0)
    if name == "mlp":
        images, labels = rng.normal(size=(STEPS, BATCH, 20)), rng.integers(0, 10, (STEPS, BATCH))
        return list(zip(images.astype(np.float32), labels.astype(np.int32), strict=True))
    tokens = rng.integers(0, VOCAB, (STEPS, BATCH, SEQUENCE + 1)).astype(np.int32)
    lengths = rng.integers(1, SEQUENCE + 1, (STEPS, BATCH, 1))
    labels = np.where(np.arange(SEQUENCE) < lengths, tokens[..., 1:], -1)
    return [{"inputs": x[:, :-1], "labels": y} for x, y in zip(tokens, labels, strict=True)]


# ---------------------------------------------------------------------------------------------------- the oracle


class Run(NamedTuple):
    losses: np.ndarray
    norms: np.ndarray
    start: dict
    params: dict
    mu: dict


@lru_cache
def initial(name):
    return jax.device_get(jax.jit(model(name).init, compiler_options=FAST)(jax.random.key(0)))


@lru_cache
def reference(name):
    """The plain loop."""
    tx = optax.chain(optax.clip_by_global_norm(CLIP[name]), optax.adamw(LR, weight_decay=DECAY))

    def mean(params, batch):
        loss = model(name).loss(params, batch, None)
        return loss[0] / loss[1] if isinstance(loss, tuple) else loss

    def update(params, opt_state, batch):
        loss, gradient = jax.value_and_grad(mean)(params, batch)
        updates, opt_state = tx.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, optax.tree.norm(gradient)

    update = jax.jit(update, compiler_options=FAST)
    params, losses, norms = initial(name), [], []
    opt_state = tx.init(params)
    for batch in batches(name):
        params, opt_state, loss, norm = update(params, opt_state, batch)
        losses.append(float(loss))
        norms.append(float(norm))
    assert min(norms) < CLIP[name] < max(norms), (name, norms)
    mu = optax.tree.get(opt_state, "mu")
    return Run(np.array(losses), np.array(norms), initial(name), *jax.device_get((params, mu)))


# ------------------------------------------------------------------------------------------------------- layouts


class Layout(NamedTuple):
    stage: int
    zero: int
    accum: int
    remat: str = "none"
    unroll: bool = True
    precision: str = "fp32"
    data: int = 1

    def __str__(self):
        mesh = f"n{self.zero}" if self.data == 1 else f"data{self.data}x{self.zero}"
        stack = "unroll" if self.unroll else "scan"
        return f"zero{self.stage}-{mesh}-acc{self.accum}-{self.remat}-{stack}-{self.precision}"

    @property
    def mesh(self):
        return jzero.make_mesh(data=self.data, zero=self.zero, devices=jax.devices()[: self.data * self.zero])

    def config(self, **more):
        precision = {} if self.precision == "fp32" else {self.precision: {"enabled": True}}
        return {
            "train_batch_size": BATCH,
            "gradient_accumulation_steps": self.accum,
            "optimizer": ADAMW,
            "gradient_clipping": 0.0,
            "zero_optimization": {"stage": self.stage, "stage3_param_persistence_threshold": 0},
            "activation_checkpointing": {"policy": self.remat},
            "stack": {"unroll": self.unroll},
            "compiler_options": FAST,
            **precision,
            **more,
        }


REMATS = ("none", "full", "matmuls")
COUNTS = (1, 2, 4, 8)
LLAMA_LAYOUTS = [
    Layout(s, n, (1, 4)[(s + k + p) % 2], REMATS[(s + 2 * k + p) % 3], (s // 2 + k + p) % 2 == 0, precision)
    for p, precision in enumerate(("fp32", "bf16"))
    for s, (k, n) in product(range(4), enumerate(COUNTS))
]
HSDP_LAYOUTS = [
    Layout(s, zero, (1, 2, 4)[(s + k) % 3], REMATS[(s + k) % 3], (s + k) % 2 == 0, precision, data=8 // zero)
    for s, (k, zero) in product(range(4), enumerate((4, 2)))
    for precision in (("fp32", "bf16") if s == 2 + k else ("fp32",))
]
DECODER_LAYOUTS = [
    Layout(s, COUNTS[3 - (s + shift) % 4], (4, 1)[(s + shift) % 2], REMATS[(s + shift) % 3], s % 2 == shift, "fp16")
    for s, shift in product(range(4), (0, 1))
]
MLP_LAYOUTS = [
    *[
        Layout(s, 8, accum, remat)
        for s, accum, remat in ((0, 4, "none"), (1, 1, "full"), (2, 4, "full"), (3, 4, "none"))
    ],
    Layout(3, 2, 1, "matmuls"),
    Layout(2, 4, 1, "none", precision="bf16"),
    Layout(3, 8, 4, "none", precision="fp16"),
    Layout(3, 4, 2, "none", data=2),
]


def cases(layouts):
    return pytest.mark.parametrize("layout", layouts, ids=str)


def test_the_layouts_are_a_covering_set():
    levels = {
        "stage": range(4), "zero": COUNTS, "accum": (1, 4), "remat": REMATS, "unroll": (True, False),
        "precision": ("fp32", "bf16", "fp16"),
    }  # fmt: skip
    rows = [layout._asdict() for layout in LLAMA_LAYOUTS + DECODER_LAYOUTS]
    for a, b in combinations(levels, 2):
        missing = set(product(levels[a], levels[b])) - {(row[a], row[b]) for row in rows}
        assert not missing, (a, b, missing)
    for precision in ("fp32", "bf16"):
        seen = {(x.stage, x.zero) for x in LLAMA_LAYOUTS if x.precision == precision}
        assert seen == set(product(range(4), COUNTS))


@lru_cache
def new_state(name, precision):
    """A new state for all layouts, born on one device; `init` on the others is a test of its own."""
    layout = Layout(0, 1, 1, precision=precision)
    return jzero.make_train_step(model(name), layout.config(), mesh=layout.mesh).init(jax.random.key(0))


def prepare(name, layout, **more):
    """(step, state) of a layout; `more` are keys that do not change the state."""
    config = layout.config(**{"gradient_clipping": CLIP[name], **more})
    step = jzero.make_train_step(model(name), config, mesh=layout.mesh)
    return step, place(step, new_state(name, layout.precision))


def place(step, state):
    """A copy of `state` (a step donates its own) laid out for `step`."""
    return jax.device_put(jax.tree.map(jnp.copy, state), step.state_shardings)


def train(step, state, data):
    """(losses, gradient norms, state) of a run."""
    metrics = []
    for batch in data:
        state, m = step(state, batch)
        metrics.append(m)
    assert not any(m["skipped"] for m in metrics)
    return np.array([m["loss"] for m in metrics]), np.array([m["grad_norm"] for m in metrics]), state


def leaf_errors(ours, theirs, start):
    """Per leaf, how far the two are apart, in units of how far `theirs` has come from `start`."""

    def error(a, b, c):
        return np.linalg.norm(np.float64(a) - np.float64(b)) / np.linalg.norm(np.float64(b) - np.float64(c))

    return max(jax.tree.leaves(jax.tree.map(error, jax.device_get(ours), theirs, start)))


def check_against_reference(name, layout, **more):
    step, state = prepare(name, layout, **more)
    losses, norms, state = train(step, state, batches(name))
    run = reference(name)
    if layout.precision != "fp32":
        np.testing.assert_allclose(losses, run.losses, rtol=1e-2)
        return
    np.testing.assert_allclose(losses, run.losses, rtol=1e-6)
    np.testing.assert_allclose(norms, run.norms, rtol=1e-6)
    # Adam's first moment is linear in the gradients: what differs is the order of their sums, 1e-7 of the largest
    # terms, more where they cancel (measured: 6e-6 of a leaf's norm).
    mu = optax.tree.get(state.opt_state, "mu")
    assert leaf_errors(mu, run.mu, jax.tree.map(np.zeros_like, run.mu)) < 2e-5
    # Its update divides by the root of the second, so an element whose gradient is rounding noise moves by a full
    # learning rate in a direction that is noise too. Hence norms of whole leaves (measured: 2e-5), not elements.
    assert leaf_errors(state.params, run.params, run.start) < 1e-4


# Every pair of settings on the small model; the Llama, which compiles for longer, with each setting once.
PAIRS = sample(LLAMA_LAYOUTS + DECODER_LAYOUTS)


@cases(sample(LLAMA_LAYOUTS + HSDP_LAYOUTS, strength=1))
def test_llama(layout):
    check_against_reference("tied" if (layout.stage + layout.zero // 2) % 2 else "untied", layout)


@cases([case for case in PAIRS if not case.marks or case.values[0].precision == "fp16"])
def test_decoder(layout):
    check_against_reference("decoder", layout)


@cases(sample(MLP_LAYOUTS, lambda layout: (layout.stage, layout.data), strength=1))
def test_mlp(layout):
    check_against_reference("mlp", layout)


@pytest.mark.parametrize(("threshold", "unroll"), keep(product([600, 2000], [True, False]), [(2000, False)]))
def test_leaves_under_the_persistence_threshold_stay_replicated(threshold, unroll):
    layout = Layout(3, 8, 4, "none", unroll)
    section = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    check_against_reference("untied", layout, zero_optimization=section)
    step, _ = prepare("untied", layout, zero_optimization=section)
    for leaf in jax.tree.leaves(step.layouts):
        elements = np.prod(leaf.shape[leaf.stacked :])
        assert (leaf.dim is None) == (elements < threshold), leaf
    assert {leaf.dim is None for leaf in jax.tree.leaves(step.layouts)} == {True, False}


def test_bf16_reduced_in_fp32():
    layout = Layout(2, 8, 4, precision="bf16")
    check_against_reference("decoder", layout, communication_data_type="fp32")

    def dtypes(**more):
        text = prepare("decoder", layout, **more)[0].lower(batches("decoder")[0]).as_text()
        return set(re.findall(r"stablehlo.reduce_scatter.*?-> tensor<[\dx]*x(\w+)>", text, re.DOTALL))

    assert dtypes(communication_data_type="fp32") == {"f32"}
    assert dtypes() == {"bf16"}


@pytest.mark.parametrize("stage", keep([1, 2, 3], [1, 3]))
def test_the_dtype_of_the_reduction_is_not_the_weights(stage):
    """A narrow reduction rounds gradients only: the first loss, before any, is that of wide weights."""
    step, state = prepare("untied", Layout(stage, 8, 1), communication_data_type="bf16")
    _, metrics = step(state, batches("untied")[0])
    assert float(metrics["loss"]) == pytest.approx(reference("untied").losses[0], rel=1e-6)


def test_llama_in_fp16_on_cpus():
    step, state = prepare("untied", Layout(3, 8, 1, precision="fp16"))
    for batch, loss in zip(batches("untied")[:3], reference("untied").losses, strict=False):
        state, metrics = step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(loss, rel=1e-2)


# ------------------------------------------------------------------------------------------- what a step is

DECODER = Layout(3, 4, 2, unroll=False)


def leaves(tree):
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]


def assert_bitwise(a, b):
    for x, y in zip(leaves(a), leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert x.tobytes() == y.tobytes()


@pytest.mark.parametrize("stage", keep(range(4), [1, 3]))
def test_frozen_leaves(stage):
    """Bitwise alone, no optimizer state, and out of the gradient norm: as if they were constants."""
    layout = DECODER._replace(stage=stage)
    config = layout.config(frozen_parameters=["embed", "stack/b"], gradient_clipping=CLIP["decoder"])
    step = jzero.make_train_step(model("decoder"), config, mesh=layout.mesh)
    start = initial("decoder")
    losses, norms, state = train(step, step.init(jax.random.key(0)), batches("decoder"))
    for part, name, frozen in (("ends", "embed", 1), ("stack", "b", 1), ("ends", "head", 0), ("stack", "w", 0)):
        assert np.array_equal(state.params[part][name], start[part][name]) == bool(frozen), name
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(state.opt_state)[0]]
    assert sum("'head'" in p for p in paths) == sum("'w'" in p for p in paths) == 2
    assert not any("'embed'" in p or "'b'" in p for p in paths)

    trained = {"ends": {"head": start["ends"]["head"]}, "stack": {"w": start["stack"]["w"]}}
    tx = optax.chain(optax.clip_by_global_norm(CLIP["decoder"]), optax.adamw(LR, weight_decay=DECAY))

    @jax.jit
    def update(trained, opt_state, batch):
        def mean(trained):
            params = jax.tree.map(jnp.asarray, {part: {**start[part], **trained[part]} for part in start})
            total, count = model("decoder").loss(params, batch, None)
            return total / count

        loss, gradient = jax.value_and_grad(mean)(trained)
        updates, opt_state = tx.update(gradient, opt_state, trained)
        return optax.apply_updates(trained, updates), opt_state, loss, optax.tree.norm(gradient)

    opt_state, expected = tx.init(trained), []
    for batch in batches("decoder"):
        trained, opt_state, *numbers = update(trained, opt_state, batch)
        expected.append(numbers)
    np.testing.assert_allclose(losses, [loss for loss, _ in expected], rtol=1e-6)
    np.testing.assert_allclose(norms, [norm for _, norm in expected], rtol=1e-6)


@pytest.mark.parametrize("stage", [1, 3])
def test_the_model_is_traced_twice(stage):
    """Once for the count of its loss, once for the gradient. A second step compiles nothing; other rows are another
    program.
    """
    chex.clear_trace_counter()

    class Once(Decoder):
        suffix = chex.assert_max_traces(Decoder.suffix, n=2)

    layout = DECODER._replace(stage=stage)
    step = jzero.make_train_step(Once(), layout.config(), mesh=layout.mesh)
    _, _, state = train(step, step.init(jax.random.key(0)), batches("decoder")[:3])
    with pytest.raises(AssertionError, match="traced > 2 times"):
        step.evaluate(state, batches("decoder")[0])


def test_two_runs_are_the_same_bit_for_bit():
    layout = DECODER._replace(zero=8)
    runs = []
    for _ in range(2):
        step, state = prepare("decoder", layout)
        runs.append(train(step, state, batches("decoder")))
    assert_bitwise(runs[0], runs[1])


@pytest.mark.parametrize("stage", [0, 3])
def test_sum_is_mean_times_replicas(stage):
    layout = DECODER._replace(stage=stage)
    results = {}
    for op in ("mean", "sum"):
        sgd = {"type": "SGD", "params": {"lr": 0.125}}
        config = layout.config(gradient_allreduce_op=op, optimizer=sgd, gradient_clipping=0)
        step = jzero.make_train_step(model("decoder"), config, mesh=layout.mesh)
        losses, norms, state = train(step, step.init(jax.random.key(0)), batches("decoder")[:1])
        moved = jax.tree.map(lambda a, b: np.asarray(a) - b, state.params, initial("decoder"))
        results[op] = losses[0], norms[0], moved
    assert results["sum"][0] == results["mean"][0]
    np.testing.assert_allclose(results["sum"][1], 4 * results["mean"][1], rtol=1e-6)
    # The difference of two parameters has their rounding, 6e-8 of numbers around 1.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 4 * b, atol=5e-7), results["sum"][2], results["mean"][2])


@pytest.mark.parametrize("stage", keep(range(4), [1, 3]))
def test_the_state_is_born_sharded_and_donated(stage):
    layout = Layout(stage, 8, 1)
    step = jzero.make_train_step(model("untied"), layout.config(), mesh=layout.mesh)
    state = step.init(jax.random.key(0))
    assert_bitwise(state, new_state("untied", "fp32"))
    mu, nu = optax.tree.get(state.opt_state, "mu"), optax.tree.get(state.opt_state, "nu")
    for x in jax.tree.leaves((state.params, mu, nu)):
        assert {shard.data.size for shard in x.addressable_shards} == {x.size // (8 if stage else 1)}
        assert len(x.addressable_shards) == 8
    if stage in (0, 3):
        state = place(step, state)  # a copy that no NumPy view keeps from being donated
        after, _ = step(state, batches("untied")[0])
        assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state)))
        assert jax.tree.map(lambda x: x.sharding, after) == step.state_shardings


def test_bf16_masters_and_optimizer_states():
    def dtypes(**bf16):
        config = DECODER.config(bf16={"enabled": True, **bf16})
        shapes = jzero.make_train_step(model("decoder"), config, mesh=DECODER.mesh).state_shapes
        mu = optax.tree.get(shapes.opt_state, "mu")
        (master,), (moment,) = ({x.dtype.name for x in jax.tree.leaves(tree)} for tree in (shapes.params, mu))
        return master, moment

    assert dtypes() == ("float32", "float32")
    assert dtypes(bf16_master_weights_and_grads=True) == ("bfloat16", "float32")
    assert dtypes(bf16_master_weights_and_grads=True, bf16_optimizer_states=True) == ("bfloat16", "bfloat16")


def test_bf16_masters_train():
    config = DECODER.config(
        bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    )
    step = jzero.make_train_step(model("decoder"), config, mesh=DECODER.mesh)
    _, _, state = train(step, step.init(jax.random.key(0)), batches("decoder")[:3])
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"bfloat16"}
    assert not np.array_equal(state.params["ends"]["head"], jnp.bfloat16(initial("decoder")["ends"]["head"]))


# ------------------------------------------------------------------------------------------- not finite

WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": LR, "warmup_num_steps": 100, "warmup_type": "linear"}}
SCALED = {"enabled": True, "initial_scale_power": 3, "hysteresis": 2}


def spoiled(batch):
    images, labels = batch
    images = images.copy()
    images[-1, 0] = np.nan  # one pixel of one row of the last replica
    return images, labels


@pytest.mark.parametrize(("precision", "stage"), sample(product(["fp32", "bf16", "fp16"], [0, 3]), strength=1))
def test_a_step_that_is_not_finite_changes_nothing(precision, stage):
    layout = Layout(stage, 4, 2, precision=precision)
    more = {"fp16": SCALED} if precision == "fp16" else {}
    config = layout.config(scheduler=WARMUP, **more)
    step, data = jzero.make_train_step(model("mlp"), config, mesh=layout.mesh), batches("mlp")
    state = step.init(jax.random.key(0))
    rates, scales, skipped = [], [], []
    for i in range(6):
        bad = i in (2, 3)
        before = jax.device_get((state.params, state.opt_state)) if bad else None
        state, metrics = step(state, spoiled(data[i]) if bad else data[i])
        if bad:
            assert_bitwise(before, (state.params, state.opt_state))
            assert not np.isfinite(metrics["loss"])
        rates.append(float(metrics["lr"]))
        scales.append(float(metrics["loss_scale"]))
        skipped.append(bool(metrics["skipped"]))
    assert skipped == [False, False, True, True, False, False]
    assert int(state.loss_scale.skipped) == 2
    assert rates[2] == rates[3] == rates[4] < rates[5]  # the schedule counts the steps that were applied
    # The first overflow is tolerated (hysteresis 2), the second halves.
    assert scales == ([8, 8, 8, 8, 4, 4] if precision == "fp16" else [1] * 6)
    assert all(np.isfinite(x).all() for x in leaves(state.params))


def test_without_the_overflow_check_bf16_takes_what_comes():
    config = Layout(3, 4, 2).config(bf16={"enabled": True, "check_grad_overflow": False})
    step = jzero.make_train_step(model("mlp"), config, mesh=Layout(3, 4, 2).mesh)
    state, metrics = step(step.init(jax.random.key(0)), spoiled(batches("mlp")[0]))
    assert not metrics["skipped"]
    assert not np.isfinite(state.params["fc2"]["kernel"]).all()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_run_that_is_stuck_ends_with_the_leaves_names(precision):
    config = Layout(3, 4, 2).config(**({"fp16": SCALED} if precision == "fp16" else {}))
    engine, *_ = jzero.initialize(model=model("mlp"), config=config, mesh=Layout(3, 4, 2).mesh)
    bad = spoiled(batches("mlp")[0])

    def run():
        for _ in range(40):
            engine.train_batch(bad)

    # fc1/bias is not among them: ReLU's gradient at NaN is 0.
    with pytest.raises(NonFiniteError, match=r"20 optimizer steps .*: fc1/kernel, fc2/bias, fc2/kernel\."):
        run()
    # The engine is whole: the state can be saved, the run can go on.
    assert engine.skipped_steps == engine.global_steps >= 20
    assert_bitwise(engine.state.params, initial("mlp"))


# ------------------------------------------------------------------------------------------- randomness


class Draws:
    """Row i of a batch has the loss w[i] * u with u drawn from the key: the gradient tells every draw."""

    def init(self, rng):
        return {"w": jnp.ones(BATCH)}

    def loss(self, params, batch, rng):
        u = 1.0 if rng is None else jax.random.uniform(rng)
        return (params["w"][batch["row"]] * u).mean()


class StackedDraws:
    """The same in each of three layers."""

    def init(self, rng):
        return {"ends": {"w": jnp.ones(BATCH)}, "stack": {"w": jnp.ones((3, BATCH))}}

    def prefix(self, ends, batch, rng):
        return batch["row"], ends["w"][batch["row"]] * self.draw(rng)

    def block(self, layer, x, rng):
        return x[0], x[1] + layer["w"][x[0]] * self.draw(rng)

    def suffix(self, ends, x, batch, rng):
        return x[1].mean()

    def draw(self, rng):
        return 1.0 if rng is None else jax.random.uniform(rng)

    def loss(self, params, batch, rng):
        return stack_loss(self, params, batch, rng)


@pytest.mark.parametrize(
    ("drawing", "unroll"), [(Draws, True), (StackedDraws, True), (StackedDraws, False)], ids=["mean", "unroll", "scan"]
)
def test_every_replica_micro_batch_layer_and_step_draws_anew(drawing, unroll):
    layout = Layout(0, 4, 8, "full", unroll)  # one row a micro-batch
    sgd = {"type": "SGD", "params": {"lr": 1.0}}
    config = layout.config(optimizer=sgd, gradient_clipping=0)
    step = jzero.make_train_step(drawing(), config, mesh=layout.mesh)
    state, batch = step.init(jax.random.key(0)), {"row": np.arange(BATCH)}
    layers = 1 if drawing is Draws else 4
    assert float(step.evaluate(state, batch)) == float(step.evaluate(state, batch)) == layers  # 1 a layer, no draw
    draws = []
    for _ in range(2):
        before = leaves(state.params)
        micro = float(step.micro_loss(state, {"row": np.array([0, 8, 16, 24])}, 0))  # of the next step, before it
        state, metrics = step(state, batch)
        draw = [(a - b) * BATCH for a, b in zip(before, leaves(state.params), strict=True)]
        rows = sum(d.sum(axis=0) if d.ndim > 1 else d for d in (a * b for a, b in zip(draw, before, strict=True)))
        np.testing.assert_allclose(metrics["loss"], rows.mean(), rtol=1e-4)
        np.testing.assert_allclose(micro, rows[[0, 8, 16, 24]].mean(), rtol=1e-4)
        draws += [d.ravel() for d in draw]
    draws = np.concatenate(draws)
    assert ((draws > 0) & (draws < 1)).all()
    assert len(np.unique(draws.round(4))) > 0.95 * draws.size
