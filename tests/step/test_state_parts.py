"""State under PipelineModules, without synchronisation, in checkpoints, in skipped steps; and what is refused."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers.refusals import refuses
from helpers.sampling import some
from helpers.steps import assert_close, mesh, run, started
from test_state import ACCUM, BATCHES, LR, config, cross_entropy, linen_model, micro_batches, nnx_model, plain_norm

import jzero
from jzero.model import stack_loss
from jzero.tree import named


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.linear, self.norm = nnx.Linear(8, width, rngs=rngs), nnx.BatchNorm(width, momentum=0.8, rngs=rngs)

    def __call__(self, x):
        return nnx.relu(self.norm(self.linear(x)))


class LinenBlock(linen.Module):
    width: int

    @linen.compact
    def __call__(self, x, train):
        return linen.relu(linen.BatchNorm(use_running_average=not train, momentum=0.8)(linen.Dense(self.width)(x)))


def layers(equal, kind):
    block = (lambda width: LinenBlock(width)) if kind == "linen" else (lambda width: jzero.LayerSpec(Block, width))
    widths = [8, 8, 8, 8] if equal else [8, 12, 8, 8]
    inner = [block(8) for _ in widths] if equal else [block(8), jzero.LayerSpec(nnx.Linear, 8, 8), block(8), block(16)]
    out = jzero.LayerSpec(nnx.Linear, 8 if equal else 16, 3)
    example = (BATCHES[0]["x"], BATCHES[0]["y"])
    return jzero.PipelineModule(
        [jzero.LayerSpec(nnx.Linear, 6, 8), *inner, out], loss_fn=cross_entropy, example_batch=example
    )


def pairs(params, model, n=4):
    """Turn the parameters into a list with those of every layer."""
    if model.stack:
        ends = params["ends"]["layers"]
        return [ends["0"], *[jax.tree.map(lambda w, i=i: w[i], params["stack"]) for i in range(n)], ends[str(n + 1)]]
    return [params["layers"][str(i)] for i in range(n + 2)]


def dense(p, x):
    return x @ p["kernel"] + p["bias"]


def forward(layers, x):
    """Run the layers by hand; return the logits and the layers with new statistics."""
    after = []
    for p in layers:
        if "norm" in p:
            x, new = plain_norm(p["norm"], dense(p["linear"], x))
            x, p = jax.nn.relu(x), {**p, "norm": {**p["norm"], **new}}
        else:
            x = dense(p, x)
        after.append(p)
    return x, after


def by_hand(params, model, step):
    layers, losses = [jax.tree.map(jnp.asarray, p) for p in pairs(params, model)], []

    def loss_fn(layers, part):
        logits, after = forward(layers, part["x"])
        return cross_entropy(logits, part["y"]), after

    def statistics(path):
        return path[-1].key in ("mean", "var")

    gradient_of = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    for batch in BATCHES:
        total = []
        for part in micro_batches(step, batch):
            (value, after), gradient = gradient_of(layers, part)
            layers = jax.tree_util.tree_map_with_path(lambda at, p, q: q if statistics(at) else p, layers, after)
            total.append((value, gradient))
        layers = jax.tree_util.tree_map_with_path(
            lambda at, p, *gs: p if statistics(at) else p - LR * sum(gs) / ACCUM, layers, *[g for _, g in total]
        )
        losses.append(np.mean([value for value, _ in total]))
    return losses, layers


EQUAL = [
    (True, {"zero": 2}, 3, 1), (True, {"pipe": 2, "zero": 2}, 0, 1), (False, {"pipe": 2, "data": 2, "zero": 1}, 0, 1),
    (False, {"pipe": 2, "zero": 2}, 3, 2), (False, {"zero": 2}, 3, 1),
]  # fmt: skip


@pytest.mark.parametrize(("equal", "degrees", "stage", "chunks"), some(EQUAL, EQUAL[1:2]))
def test_layers_with_batch_norm_train_as_on_one_device(equal, degrees, stage, chunks):
    pipeline = {"pipeline": {"schedule": "interleaved", "chunks": 2}} if chunks > 1 else {}
    model = layers(equal, "nnx")
    assert bool(model.stack) == equal
    step = jzero.make_train_step(model, config(stage, **pipeline), mesh=mesh(**degrees))
    start, losses, state = run(step, [(batch["x"], batch["y"]) for batch in BATCHES])
    expected, after = by_hand(start, model, step)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for mine, plain in zip(pairs(jax.device_get(state.params), model), after, strict=True):
        assert_close(mine, plain, rtol=5e-4, atol=5e-6)
    evaluation = float(step.evaluate(state, (BATCHES[0]["x"], BATCHES[0]["y"])))
    x = BATCHES[0]["x"]
    for p in after:
        if "norm" in p:
            norm = p["norm"]
            x = (dense(p["linear"], x) - norm["mean"]) / np.sqrt(norm["var"] + 1e-5) * norm["scale"] + norm["bias"]
            x = np.maximum(x, 0)
        else:
            x = dense(p, x)
    assert evaluation == pytest.approx(float(cross_entropy(x, BATCHES[0]["y"])), rel=1e-4)


@pytest.mark.slow
def test_linen_layers_with_batch_norm():
    """Layer by layer they are the nnx module's, which is compared by hand above."""
    step, state = started(layers(True, "linen"), config(), mesh=mesh(2, pipe=2))
    assert {name.split("/")[1] for name in step.model.state} == {"batch_stats"}
    params = jax.device_get(state.params)
    stack = params["stack"]
    first = {"linear": stack["Dense_0"], "norm": {**stack["BatchNorm_0"], **stack["batch_stats"]["BatchNorm_0"]}}
    start = {"ends": params["ends"], "stack": first}
    _, metrics = step(state, (BATCHES[0]["x"], BATCHES[0]["y"]))
    plain = [forward(pairs(start, step.model), part["x"])[0] for part in micro_batches(step, BATCHES[0])]
    total = [cross_entropy(x, part["y"]) for x, part in zip(plain, micro_batches(step, BATCHES[0]), strict=True)]
    assert float(metrics["loss"]) == pytest.approx(float(np.mean(total)), rel=1e-5)


@pytest.mark.parametrize("make", some([nnx_model, linen_model], [nnx_model]))
def test_without_synchronisation_every_replica_has_its_own_statistics(make):
    step, state = started(make(sync_batch_norm=False), config(), mesh=mesh(1, data=4))
    params = named(jax.device_get(state.params))
    first, last = ("first", "last") if make is nnx_model else ("Dense_0", "Dense_1")
    norm, stats = ("norm", "norm") if make is nnx_model else ("BatchNorm_0", "batch_stats/BatchNorm_0")
    losses, running = [], []
    for replica in range(4):  # its rows, in two micro-batches
        mean, var = params[f"{stats}/mean"], params[f"{stats}/var"]
        for half in range(2):
            rows = slice(8 * replica + 4 * half, 8 * replica + 4 * half + 4)
            x = BATCHES[0]["x"][rows] @ params[f"{first}/kernel"] + params[f"{first}/bias"]
            p = {"scale": params[f"{norm}/scale"], "bias": params[f"{norm}/bias"], "mean": mean, "var": var}
            y, new = plain_norm(p, x)
            mean, var = new["mean"], new["var"]
            logits = np.maximum(y, 0) @ params[f"{last}/kernel"] + params[f"{last}/bias"]
            losses.append(cross_entropy(logits, BATCHES[0]["y"][rows]))
        running.append((mean, var))
    state, metrics = step(state, BATCHES[0])
    assert float(metrics["loss"]) == pytest.approx(float(np.mean(losses)), rel=1e-5)
    after = named(jax.device_get(state.params))
    np.testing.assert_allclose(after[f"{stats}/mean"], np.mean([m for m, _ in running], 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after[f"{stats}/var"], np.mean([v for _, v in running], 0), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_run_resumes_bit_for_bit_on_another_stage(tmp_path):
    def engine(stage):
        return jzero.initialize(model=nnx_model(), config=config(stage), mesh=mesh())[0]

    straight = engine(3)
    for batch in BATCHES[:2]:
        straight.train_batch(batch)
    straight.save_checkpoint(tmp_path)
    other = engine(1)
    other.load_checkpoint(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, straight.state.params, other.state.params)
    same = engine(3)
    same.load_checkpoint(tmp_path)
    assert float(straight.train_batch(BATCHES[2])) == float(same.train_batch(BATCHES[2]))
    jax.tree.map(np.testing.assert_array_equal, straight.state.params, same.state.params)


def test_state_is_not_trained_keeps_its_dtype_and_does_not_move_in_a_skipped_step():
    fp16 = {"enabled": True, "initial_scale_power": 4}
    step, state = started(nnx_model(), config(fp16=fp16), mesh=mesh(2))
    before = named(jax.device_get(state.params))
    assert all(before[name].dtype == np.float32 for name in step.model.state)
    assert not set(step.model.state) & set(step.trainable_names)
    bad = {**BATCHES[0], "x": np.where(np.arange(6) == 0, np.nan, BATCHES[0]["x"])}
    state, metrics = step(state, bad)
    assert metrics["skipped"]
    for name, x in named(jax.device_get(state.params)).items():
        np.testing.assert_array_equal(x, before[name], err_msg=name)


class Counts:
    """A model without Flax that counts its micro-batches and remembers a large array."""

    state = ("calls", "memory")

    def init(self, rng):
        return {"w": jax.random.normal(rng, (6, 3)), "calls": jnp.zeros((), jnp.int32), "memory": jnp.zeros((8, 64))}

    def loss(self, params, batch, rng):
        memory = 0.5 * params["memory"] + batch["x"].mean()
        new = {"calls": params["calls"] + 1, "memory": memory}
        return cross_entropy(batch["x"] @ params["w"], batch["y"]), new


def test_zero_3_partitions_large_state():
    more = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100}}
    step = jzero.make_train_step(Counts(), config(**more), mesh=mesh())
    assert step.state_shardings.params["memory"].spec == jax.sharding.PartitionSpec("zero")
    state = step.init(jax.random.key(0))
    memory = 0.0
    for batch in BATCHES[:2]:
        state, _ = step(state, batch)
        for part in micro_batches(step, batch):
            memory = 0.5 * memory + part["x"].mean()
    assert int(state.params["calls"]) == 2 * ACCUM
    np.testing.assert_allclose(state.params["memory"], memory, rtol=1e-5, atol=1e-7)
    loss = float(step.evaluate(state, BATCHES[0]))
    assert int(state.params["calls"]) == 2 * ACCUM
    assert np.isfinite(loss)


class Unknown(Counts):
    state = ("calls", "other")


class Wrong(Counts):
    def loss(self, params, batch, rng):
        return cross_entropy(batch["x"] @ params["w"], batch["y"]), {"calles": 1}


def test_what_is_refused():
    with pytest.raises(jzero.ConfigError, match=r"the model's state: \['other'\] are not among the names .*calls"):
        jzero.make_train_step(Unknown(), config(), mesh=mesh(2))
    step = jzero.make_train_step(Wrong(), config(), mesh=mesh(2))
    refuses(lambda: step(step.init(jax.random.key(0)), BATCHES[0]), r"new state calles")
    with pytest.raises(jzero.ConfigError, match=r"TiedLayerSpec\('a', Block\): tied layers cannot have state"):
        jzero.PipelineModule([jzero.TiedLayerSpec("a", Block, 8)], loss_fn=cross_entropy)


class Moving:
    """A stack after a prefix whose output depends on state, as with spectral normalisation."""

    state = ("ends/u",)

    def init(self, rng):
        w = np.random.default_rng(5).normal(size=(5, 8, 8)).astype(np.float32) / 3
        return {"ends": {"w": jnp.asarray(w[4, :6]), "u": jnp.ones(8)}, "stack": {"w": jnp.asarray(w[:4])}}

    def prefix(self, ends, batch, rng):
        x = batch["x"] @ ends["w"]
        return x * ends["u"], {"u": 0.5 * ends["u"] + 0.5 * jnp.abs(x).mean(0)}

    def block(self, layer, x, rng):
        return jnp.tanh(x @ layer["w"]), {}

    def suffix(self, ends, x, batch, rng):
        return (x**2).mean(), {}

    loss = stack_loss


def plain_moving(params, replicas, partitioned):
    """Train by hand. The replicas agree on u after the step, or, if ZeRO partitions it, after every micro-batch."""

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def gradient_of(trained, u, x):
        x = x @ trained["ends"]
        new, x = 0.5 * u + 0.5 * jnp.abs(x).mean(0), x * u
        for w in trained["stack"]:
            x = jnp.tanh(x @ w)
        return (x**2).mean(), new

    trained, u, losses = {"ends": params["ends"]["w"], "stack": params["stack"]["w"]}, params["ends"]["u"], []
    for batch in BATCHES:
        values, gradients, us = [], [], [u] * replicas
        rows = batch["x"].reshape(replicas, ACCUM, -1, 6)
        for i in range(ACCUM):
            for r in range(replicas):
                (value, us[r]), gradient = gradient_of(trained, us[r], rows[r, i])
                values.append(value)
                gradients.append(gradient)
            us = [sum(us) / replicas] * replicas if partitioned else us
        trained, u = jax.tree.map(lambda p, *g: p - LR * sum(g) / len(g), trained, *gradients), sum(us) / replicas
        losses.append(float(sum(values) / len(values)))
    return losses, {"ends/u": u, "ends/w": trained["ends"], "stack/w": trained["stack"]}


MOVING = [
    (2, 3, {}), (1, 0, {"schedule": "gpipe"}), (2, 1, {"schedule": "interleaved", "chunks": 2}),
    (2, 3, {"schedule": "zero_bubble"}),
]  # fmt: skip


@pytest.mark.parametrize(("zero", "stage", "pipeline"), some(MOVING, MOVING[:1]))
def test_a_prefix_of_a_pipeline_may_depend_on_its_state(zero, stage, pipeline):
    step = jzero.make_train_step(Moving(), config(stage, pipeline=pipeline), mesh=mesh(zero, pipe=2))
    start, losses, state = run(step, BATCHES)
    expected, after = plain_moving(start, zero, partitioned=stage == 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_close(state.params, after)


class Sharing(Moving):
    """A prefix and a suffix with the state u: each replaces it, reads it, or neither."""

    def __init__(self, first, last):
        self.first, self.last = first, last

    def prefix(self, ends, batch, rng):
        x = batch["x"] @ ends["w"]
        return x, {"u": {"replaces": 0.5 * ends["u"] + x.mean(0), "passes": ends["u"]}[self.first]}

    def suffix(self, ends, x, batch, rng):
        loss = (x * ends["u"]).mean() if self.last == "reads" else x.mean()
        return loss, {"u": 2 * ends["u"] if self.last == "replaces" else ends["u"]}


@pytest.mark.parametrize(
    ("first", "last", "refused"),
    [
        ("replaces", "replaces", True),
        ("replaces", "reads", True),
        ("replaces", "passes", False),
        ("passes", "replaces", False),
        ("passes", "reads", False),
    ],
)
def test_state_that_both_ends_of_a_pipeline_share_is_refused(first, last, refused):
    step = jzero.make_train_step(Sharing(first, last), config(3), mesh=mesh(2, pipe=2))
    shapes = jax.tree.map(jnp.asarray, BATCHES[0])
    if refused:
        refuses(lambda: step.lower(shapes), "prefix and suffix share the state ends/u")
    else:
        step.lower(shapes)
