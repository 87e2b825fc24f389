"""What a step keeps, donates, traces and draws."""

from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.reference import ADAMW, BATCH, Decoder, Layout, assert_bitwise, batches, leaves, train
from helpers.refusals import compilations, refuses
from helpers.sampling import keep
from helpers.steps import mesh, settings, started, started_with_numpy

import jzero
from jzero.model import stack_loss
from jzero.passes.gradients import sums_of_squares
from jzero.step import state


class Square:
    def init(self, rng):
        return {"w": jax.random.normal(rng, (16, 16))}

    def loss(self, params, batch, rng):
        return ((batch @ params["w"]) ** 2).mean()


def test_only_small_parameters_on_one_gpu_are_drawn_by_a_kernel(monkeypatch):
    """XLA divides it among no devices, and for large parameters its operands would fill the memory."""
    seen = []

    class Drawn(Square):
        def init(self, rng):
            seen.append(jax.config.jax_threefry_gpu_kernel_lowering)
            return super().init(rng)

    monkeypatch.setattr(state, "is_gpu", lambda mesh: True)
    for devices, limit, by_kernel in ((1, 2**26, True), (1, 100, False), (2, 2**26, False)):
        monkeypatch.setattr(state, "DRAWN", limit)
        started(Drawn(), settings(2), mesh(devices))
        assert seen[-1] == by_kernel


@pytest.mark.parametrize("stage", keep([1, 3], [3]))
def test_the_model_is_traced_twice(stage):
    """Once for the count of its loss, once for the gradient; a second step compiles nothing."""
    chex.clear_trace_counter()

    class Once(Decoder):
        suffix = chex.assert_max_traces(Decoder.suffix, n=2)

    layout = Layout(stage, 4, 2, unroll=False)
    step, state = started_with_numpy(Once(), layout.config(), layout.mesh)
    _, _, state = train(step, state, batches("decoder")[:3])
    with pytest.raises(AssertionError, match="traced > 2 times"):
        step.evaluate(state, batches("decoder")[0])


@pytest.mark.parametrize("stage", keep([0, 2, 3], [3]))
def test_the_state_is_born_sharded_and_donated(stage):
    config = settings(16, stage, optimizer=ADAMW)
    state, alone = (started(Decoder(), config, mesh(n))[1] for n in (8, 1))
    assert_bitwise(state, alone)
    mu, nu = optax.tree.get(state.opt_state, "mu"), optax.tree.get(state.opt_state, "nu")
    for x in jax.tree.leaves((state.params, mu, nu)):
        assert {shard.data.size for shard in x.addressable_shards} == {x.size // (8 if stage else 1)}
        assert len(x.addressable_shards) == 8
    (step, state), rows = started(Square(), config, mesh(8)), np.ones((16, 16), np.float32)
    after, _ = step(state, rows)
    assert all(x.is_deleted() for x in jax.tree.leaves((state.params, state.opt_state)))
    assert jax.tree.map(lambda x: x.sharding, after) == step.state_shardings
    words = r"given to an earlier step, which replaced it: write state, metrics = step\(state, batch\)"
    for call in (step, step.gradients, step.evaluate):
        refuses(lambda call=call: call(state, rows), words)


class Draws:
    """Row i of a batch has the loss w[i] * u, in the ends and in each of three layers, with u drawn from the key.

    The gradient tells every draw.
    """

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


@pytest.mark.parametrize("unroll", keep([True, False], [False]))
def test_every_replica_micro_batch_layer_and_step_draws_anew(unroll):
    layout = Layout(0, 4, 8, "full", unroll)  # one row a micro-batch
    config = layout.config(optimizer={"type": "SGD", "params": {"lr": 1.0}}, gradient_clipping=0)
    step, state = started(Draws(), config, layout.mesh)
    batch = {"row": np.arange(BATCH)}
    assert float(step.evaluate(state, batch)) == 4  # 1 a layer, no draw
    draws = []
    for _ in range(2):
        before = leaves(state.params)
        micro = float(step.micro_loss(state, {"row": np.array([0, 8, 16, 24])}, 0))  # of the next step, before it
        state, metrics = step(state, batch)
        draw = [(a - b) * BATCH for a, b in zip(before, leaves(state.params), strict=True)]
        rows = sum((d * b).reshape(-1, BATCH).sum(0) for d, b in zip(draw, before, strict=True))
        np.testing.assert_allclose(metrics["loss"], rows.mean(), rtol=1e-4)
        np.testing.assert_allclose(micro, rows[[0, 8, 16, 24]].mean(), rtol=1e-4)
        draws += [d.ravel() for d in draw]
    draws = np.concatenate(draws)
    assert ((draws > 0) & (draws < 1)).all()
    assert len(np.unique(draws.round(4))) > 0.95 * draws.size


def test_the_norms_collectives_follow_the_parameters_in_every_process():
    """A set of names would iterate by the process's hash seed, and processes would wait for each other's sums."""
    cube = jzero.make_mesh(zero=2, tensor=2, context=2)
    groups = [("zero",), ("context",), ("tensor",), ("zero", "tensor"), ("zero", "context"), ("context", "tensor")]

    def order(groups):
        layouts = [SimpleNamespace(name=str(i), axes=set(axes), trainable=True) for i, axes in enumerate(groups)]
        run = jax.shard_map(
            lambda *gs: sums_of_squares(*[(layouts, list(gs))] * 2, 1.0, cube),
            mesh=cube, in_specs=jax.P(), out_specs=jax.P(), check_vma=False,
        )  # fmt: skip
        jaxpr = jax.make_jaxpr(run)(*map(np.ones, range(1, 7))).jaxpr.eqns[0].params["jaxpr"]
        return [eqn.params["axes"] for eqn in jaxpr.eqns if eqn.primitive.name == "psum"]

    assert order(groups) == groups
    assert order(groups[::-1]) == groups[::-1]


def test_a_small_batch_of_numpy_compiles_once():
    """What reads the program of the first step finds that of the call, which takes the batch as it is."""
    step, state = started_with_numpy(Square(), settings(16), mesh(1))
    batch = np.ones((16, 16), np.float32)
    state, _ = step(state, batch)
    before = len(compilations)
    step.traced.lower().compile()
    step(state, batch)
    assert len(compilations) == before
