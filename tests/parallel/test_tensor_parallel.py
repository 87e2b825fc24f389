"""Tensor parallelism of unmodified models: the losses, gradient norms and parameters of one device.

The oracle (`helpers.tensor_models.reference`) is plain JAX. Default tests are a covering sample; `-m slow` runs all.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.sampling import keep
from helpers.tensor_models import BATCH, DIMENSIONS, batches, errors, initial, make_step, model

import jzero
from jzero.checkpoint import restore, save
from jzero.errors import ConfigError
from jzero.tree import named

LAYOUTS = [
    ("nnx", {"tensor": 2}),
    ("nnx", {"tensor": 4}),
    ("nnx", {"tensor": 2, "zero": 2, "stage": 0, "accum": 2}),
    ("nnx", {"tensor": 2, "zero": 2, "stage": 1, "accum": 2, "unroll": False}),
    ("nnx", {"tensor": 2, "zero": 2, "stage": 2, "accum": 2, "remat": "matmuls"}),
    ("nnx", {"tensor": 2, "zero": 2, "stage": 3}),
    ("nnx", {"tensor": 2, "zero": 2, "stage": 3, "accum": 2, "remat": "full", "unroll": False}),
    ("nnx", {"tensor": 2, "data": 2, "zero": 2, "stage": 3, "remat": "matmuls"}),
    ("linen", {"tensor": 2}),
    ("linen", {"tensor": 4, "zero": 2, "stage": 3, "remat": "full"}),
    ("llama", {"tensor": 2, "zero": 2, "stage": 3, "accum": 2, "remat": "full", "unroll": False}),
    ("more", {"tensor": 2, "zero": 2, "stage": 3}),
    ("multi-query", {"tensor": 2, "zero": 2, "stage": 2}),
    ("gpt2", {"tensor": 4, "zero": 2, "stage": 1}),
    ("bert", {"tensor": 2}),
    ("vit", {"tensor": 2, "zero": 2, "stage": 3}),
]
SAMPLE = [LAYOUTS[6]]


def name_of(value):
    return "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else value


@pytest.mark.parametrize(("name", "layout"), keep(LAYOUTS, SAMPLE), ids=name_of)
def test_one_device_computes_the_same(name, layout):
    losses, parameters, *_ = errors(name, **layout)
    assert losses < 1e-6
    assert parameters < 2e-6  # one unit in the last place of an element is 1e-7 of the leaf; three steps add up


def test_each_device_holds_its_part():
    """Of a divided weight 1 / (tensor x zero), of another 1 / zero."""
    step = make_step("nnx", tensor=2, zero=2, stage=3)
    parts = {
        name: np.prod(sharding.shard_shape(shape.shape)) / np.prod(shape.shape)
        for (name, shape), sharding in zip(
            named(step.state_shapes.params).items(), jax.tree.leaves(step.state_shardings.params), strict=True
        )
    }
    whole = {name for name in parts if "norm" in name or name.endswith(("out/bias", "down/bias"))}
    assert len(whole) == 8
    assert parts == {name: 1 / 2 if name in whole else 1 / 4 for name in parts}


@pytest.mark.slow
def test_evaluation_prediction_and_checkpoints(tmp_path):
    """A checkpoint of tensor 2 x zero 2 continues on one device; evaluation and predictions are those of one device."""
    step, one = make_step("linen", tensor=2, zero=2, stage=3), make_step("linen", dimensions={})
    first, second, third = batches()
    state, _ = step(step.init(jax.random.key(0), initial("linen")), first)
    save(state, tmp_path / "saved").wait()
    alone = restore(tmp_path / "saved", one.state_shardings, shapes=one.state_shapes)
    np.testing.assert_allclose(step.evaluate(state, second), one.evaluate(alone, second), rtol=1e-6)
    tokens = second["inputs"]
    np.testing.assert_allclose(step.predict(state, tokens), one.predict(alone, tokens), rtol=1e-4, atol=1e-5)
    _, found = step(state, third)
    _, expected = one(alone, third)
    np.testing.assert_allclose(found["loss"], expected["loss"], rtol=1e-6)


# ------------------------------------------------------------------ refused

REFUSED = [
    ({"tensor_parallel": {"dimensions": {}}}, ["mesh.tensor = 2", "no table", "example_batch"]),
    ({"tensor_parallel": {"dimensions": {"nothing": 0}}}, ["tensor_parallel.dimensions", "'nothing'", "no parameter"]),
    ({"tensor_parallel": {"dimensions": {"up/kernel": 2}}}, ["up/kernel", "= 2", "[32, 128]", "0 to 1"]),
    ({"tensor_parallel": {"dimensions": {"up/kernel": "1"}}}, ["up/kernel", '"1"', "dimension"]),
]


@pytest.mark.parametrize(("changes", "parts"), REFUSED, ids=lambda value: next(iter(value)) if value else "")
def test_refused_by_name(changes, parts):
    config = {"train_batch_size": BATCH, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    config |= {"tensor_parallel": {"dimensions": DIMENSIONS["nnx"]}, **changes}
    mesh = jzero.make_mesh(tensor=2, zero=2, devices=jax.devices()[:4])
    with pytest.raises(ConfigError) as error:
        jzero.make_train_step(model("nnx"), config, mesh=mesh)
    for part in parts:
        assert part in str(error.value)


def test_a_dimension_that_the_axis_does_not_divide():
    """In a table of the config it is a mistake; of a model's table see `test_undivided`."""
    with pytest.raises(
        ConfigError, match=r"mesh.tensor = 8 does not divide the 4 of stack/attn/key/bias.* 4 does; or leave"
    ):
        make_step("nnx", tensor=8)


def test_a_table_without_the_axis():
    with pytest.raises(ConfigError, match="does nothing on a mesh with tensor 1"):
        make_step("nnx", zero=2, dimensions=DIMENSIONS["nnx"])


def test_another_degree_than_the_meshs():
    config = {"train_batch_size": BATCH, "tensor_parallel": {"autotp_size": 4, "dimensions": DIMENSIONS["nnx"]}}
    mesh = jzero.make_mesh(tensor=2, zero=2, devices=jax.devices()[:4])
    with pytest.raises(ConfigError, match="autotp_size = 4 in the config, but the mesh passed in has tensor 2"):
        jzero.make_train_step(model("nnx"), config, mesh=mesh)


def test_a_table_that_names_state():
    class Counting:
        state = ("count",)

        def init(self, rng):
            return {"w": jnp.ones((4, 4)), "count": jnp.zeros((4,))}

        def loss(self, params, batch, rng):
            return (batch @ params["w"]).mean(), {"count": params["count"] + 1}

    config = {"train_batch_size": 4, "tensor_parallel": {"dimensions": {"w": 1, "count": 0}}}
    mesh = jzero.make_mesh(tensor=2, zero=1, devices=jax.devices()[:2])
    with pytest.raises(ConfigError, match=r"tensor_parallel.dimensions: \['count'\] are state"):
        jzero.make_train_step(Counting(), config, mesh=mesh)


class Contrastive:
    """Every row against the rows of all replicas, with dropout: collectives and random numbers inside of a loss."""

    def init(self, rng):
        a, b = jax.random.split(rng)
        return {"up": 0.3 * jax.random.normal(a, (8, 16)), "down": 0.3 * jax.random.normal(b, (16, 8))}

    def loss(self, params, batch, rng):
        hidden = jnp.tanh(batch["x"] @ params["up"])
        if rng is not None:
            hidden = jnp.where(jax.random.bernoulli(jax.random.key(7), 0.7, hidden.shape), hidden / 0.7, 0)
        y = hidden @ params["down"]
        scores = y @ jzero.all_gather(batch["x"]).T
        own = jzero.axis_index() * len(y) + jnp.arange(len(y))
        return -jnp.take_along_axis(jax.nn.log_softmax(scores), own[:, None], 1).mean()


@pytest.mark.slow
def test_a_loss_over_all_replicas_with_dropout():
    """The mask depends on the shape alone, so that one replica of 8 rows and tensor 4 are comparable."""
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    table, found = {"tensor_parallel": {"dimensions": {"up": 1, "down": 0}}}, []
    for degrees, more in (({"zero": 2}, {}), ({"zero": 2, "tensor": 4}, table)):
        mesh = jzero.make_mesh(**degrees, devices=jax.devices()[: int(np.prod(list(degrees.values())))])
        config = {"train_batch_size": 16, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, **more}
        step = jzero.make_train_step(Contrastive(), config, mesh=mesh)
        state, metrics = step(step.init(jax.random.key(0)), {"x": x})
        found.append((float(metrics["loss"]), float(metrics["grad_norm"]), *jax.tree.leaves(state.params)))
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
