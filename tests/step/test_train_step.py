"""What a step keeps, donates, traces and draws."""

from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.reference import (
    BATCH,
    CLIP,
    DECAY,
    DECODER,
    LR,
    Decoder,
    Layout,
    assert_bitwise,
    batches,
    initial,
    leaves,
    model,
    new_state,
    place,
    prepare,
    train,
)
from helpers.refusals import compilations
from helpers.sampling import keep
from helpers.steps import started

import jzero
from jzero.model import stack_loss
from jzero.passes.gradients import sums_of_squares
from models.mlp import MLP, cross_entropy


@pytest.mark.parametrize("stage", keep(range(4), [3]))
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


@pytest.mark.parametrize("stage", keep([1, 3], [3]))
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


@pytest.mark.slow
def test_two_runs_are_the_same_bit_for_bit():
    layout = DECODER._replace(zero=8)
    runs = []
    for _ in range(2):
        step, state = prepare("decoder", layout)
        runs.append(train(step, state, batches("decoder")))
    assert_bitwise(runs[0], runs[1])


@pytest.mark.parametrize("stage", keep([0, 3], [3]))
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


@pytest.mark.parametrize("stage", keep(range(4), [2]))
def test_the_state_is_born_sharded_and_donated(stage):
    layout = Layout(stage, 8, 1)
    step, state = started(model("untied"), layout.config(), mesh=layout.mesh)
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


@pytest.mark.slow
def test_bf16_masters_train():
    config = DECODER.config(
        bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    )
    step = jzero.make_train_step(model("decoder"), config, mesh=DECODER.mesh)
    _, _, state = train(step, step.init(jax.random.key(0)), batches("decoder")[:3])
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"bfloat16"}
    assert not np.array_equal(state.params["ends"]["head"], jnp.bfloat16(initial("decoder")["ends"]["head"]))


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

    loss = stack_loss


@pytest.mark.parametrize(
    ("drawing", "unroll"),
    keep([(Draws, True), (StackedDraws, True), (StackedDraws, False)], [(StackedDraws, False)]),
    ids=["mean", "unroll", "scan"],
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


def test_the_norms_collectives_follow_the_parameters_in_every_process():
    """A set of names would iterate by the process's hash seed, and processes would wait for each other's sums."""
    mesh = jzero.make_mesh(zero=2, tensor=2, context=2)
    groups = [("zero",), ("context",), ("tensor",), ("zero", "tensor"), ("zero", "context"), ("context", "tensor")]

    def order(groups):
        layouts = [SimpleNamespace(name=str(i), axes=set(axes), trainable=True) for i, axes in enumerate(groups)]
        run = jax.shard_map(
            lambda *gs: sums_of_squares(layouts, layouts, list(gs), 1.0, mesh),
            mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False,
        )  # fmt: skip
        jaxpr = jax.make_jaxpr(run)(*map(jnp.ones, range(1, 7))).jaxpr.eqns[0].params["jaxpr"]
        return [eqn.params["axes"] for eqn in jaxpr.eqns if eqn.primitive.name == "psum"]

    assert order(groups) == groups
    assert order(groups[::-1]) == groups[::-1]


def test_a_small_batch_of_numpy_compiles_once():
    """What reads the program of the first step finds that of the call, which takes the batch as it is."""
    config = {"train_batch_size": 16, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
    one_device = jzero.make_mesh(devices=jax.devices()[:1])
    step = jzero.make_train_step(jzero.from_flax(MLP, cross_entropy), config, mesh=one_device)
    batch = np.zeros((16, 784), np.float32), np.zeros(16, np.int32)
    state, _ = step(step.init(jax.random.key(0)), batch)
    before = len(compilations)
    step.traced.lower().compile()
    step(state, batch)
    assert len(compilations) == before
