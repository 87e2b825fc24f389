"""Parameters to start from in an Orbax checkpoint of the user's own. Oracle: the values that Flax made."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from helpers.plain_flax import mean_square
from helpers.refusals import refuses
from helpers.sampling import keep
from helpers.stack_models import SmallGPT, loss_fn
from helpers.steps import mesh, settings
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from jzero.tree import named

KEY = jax.random.key(0)
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)


class Net(nnx.Module):
    """Parameters, state, random state, and a submodule with the name of the level that nnx.State adds."""

    def __init__(self, rngs):
        self.first, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.layers = nnx.List([nnx.Dropout(0.5, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)])
        self.value = nnx.Param(jnp.arange(8.0))

    def __call__(self, x):
        x = self.norm(self.first(x))
        for layer in self.layers:
            x = layer(x)
        return x + self.value


class Deep(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.stack = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs))(rngs.split(2))

    def prefix(self, batch):
        return self.first(batch)

    def suffix(self, x, batch):
        return jnp.mean(x**2)


class Dense(linen.Module):
    @linen.compact
    def __call__(self, x, train=False):
        init = linen.with_partitioning(linen.initializers.lecun_normal(), (None, "model"))
        return linen.BatchNorm(use_running_average=not train)(linen.Dense(8, kernel_init=init)(x))


def train_dense(module, batch, rng):
    return jnp.mean(module(batch, train=rng is not None) ** 2)


def make_step(model, pipe=1):
    return jzero.make_train_step(model, settings(16, 3), mesh=mesh(8 // pipe, pipe=pipe))


MODELS = {
    "net": lambda: jzero.from_flax(Net, mean_square),
    "deep": lambda: jzero.from_flax(Deep),
    "linen": lambda: jzero.from_flax(Dense(), train_dense, example_batch=X),
}


@pytest.fixture(scope="module")
def steps():
    return {kind: make_step(model()) for kind, model in MODELS.items()}


def standard(path, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree)
    return path


def managed(path, tree):
    with ocp.CheckpointManager(path) as manager:
        manager.save(7, args=ocp.args.StandardSave(tree))
    return path / "7"


def composite(path, tree):
    with ocp.CheckpointManager(path) as manager:
        items = {"params": ocp.args.PyTreeSave(tree), "epoch": ocp.args.JsonSave({"epoch": 3})}
        manager.save(7, args=ocp.args.Composite(**items))
    return path / "7"


def two_devices(path, tree):
    cut = NamedSharding(jax.make_mesh((2,), ("x",), devices=jax.devices()[:2]), PartitionSpec("x"))
    return standard(path, jax.tree.map(lambda x: jax.device_put(x, cut) if x.ndim and x.shape[0] % 2 == 0 else x, tree))


def halves(path, tree):
    return standard(path, jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tree))


def made(module):
    return nnx.jit(lambda: module(nnx.Rngs(5)))()  # operation by operation it is many programs


@cache
def values(kind):
    """What the user saves, and the names and values of the model's parameters in it."""
    if kind == "linen":
        variables = jax.jit(Dense().init)(jax.random.key(5), X)
        plain = linen.meta.unbox(variables)
        return variables, named({**plain["params"], "batch_stats": plain["batch_stats"]})
    module = made({"net": Net, "deep": Deep}[kind])
    state = nnx.state(module)
    own = nnx.to_pure_dict(nnx.filter_state(state, nnx.Not(nnx.RngState)))
    if kind == "deep":
        own = {"ends": {"first": own["first"]}, "stack": own["stack"]}
    return nnx.state(module, nnx.Not(nnx.RngKey)), named(own)


def pure(tree):
    return nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else linen.meta.unbox(tree)


CASES = [("net", two_devices, "pure"), ("deep", managed, "own"), ("linen", composite, "own"), ("net", halves, "own")]


@pytest.mark.parametrize(("kind", "writer", "form"), keep(CASES, CASES[:3]))
def test_a_step_starts_from_a_checkpoint(kind, writer, form, steps, tmp_path):
    step, (tree, expected) = steps[kind], values(kind)
    path = writer(tmp_path / "saved", pure(tree) if form == "pure" else tree)
    state = step.init(KEY, path)
    for name, x in named(state.params).items():
        like = expected[name].astype(jnp.bfloat16) if writer is halves else expected[name]
        np.testing.assert_array_equal(x, np.asarray(like, np.float32), err_msg=name)
    assert jax.tree.map(lambda x: (x.shape, x.dtype, x.sharding), state.params) == jax.tree.map(
        lambda x, to: (x.shape, x.dtype, to), step.state_shapes.params, step.state_shardings.params
    )


def test_no_leaf_is_ever_whole_on_a_device(steps, tmp_path, monkeypatch):
    path, largest = standard(tmp_path / "saved", values("deep")[0]), []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *a, **k: largest.append(np.shape(x)) or put(x, *a, **k))
    state = steps["deep"].init(KEY, path)
    assert state.params["stack"]["kernel"].shape == (2, 8, 8)
    parts = {x.addressable_shards[0].data.size * 8 == x.size for x in jax.tree.leaves(state.params)}
    assert parts == {True}
    assert max(map(np.prod, largest)) <= 2 * 8 * 8 / 8


def test_layers_that_became_a_stack(tmp_path):
    tree = nnx.state(made(SmallGPT))
    step = make_step(jzero.from_flax(SmallGPT, loss_fn, stack="blocks"), 2)
    state = step.init(KEY, standard(tmp_path / "saved", tree))
    expected, found = named(nnx.to_pure_dict(tree)), named(state.params)
    for name, parts in step.model.names.parameters:
        layers = [expected[part] for part in parts]
        np.testing.assert_array_equal(found[name], np.stack(layers) if name.startswith("stack/") else layers[0])
    assert jax.tree.map(lambda x: x.sharding, state.params) == step.state_shardings.params
    again = step.init(KEY, standard(tmp_path / "own", jax.device_get(state.params)))
    jax.tree.map(np.testing.assert_array_equal, again.params, state.params)


def test_leaves_that_do_not_fit_are_named_together(steps, tmp_path):
    tree = pure(values("deep")[0])
    tree["second"], tree["stack"]["kernel"] = tree.pop("first"), tree["stack"]["kernel"][:1]
    path = standard(tmp_path / "saved", {**tree, "opt_state": {"mu": jnp.ones(3)}})
    text = refuses(lambda: steps["deep"].init(KEY, path), "missing")
    words = ["missing ends/first/kernel (8, 8)", "extra ends/second/bias (8,)", "extra ends/opt_state/mu (3,)"]
    words += ["stack/kernel is (1, 8, 8), not (2, 8, 8)", "without an optimizer's"]
    assert [word for word in words if word not in text] == []
    path = standard(tmp_path / "list", [{"w": jnp.ones(3)}, {"w": jnp.ones(3)}])
    for step in steps.values():
        refuses(lambda step=step: step.init(KEY, path), r"extra 0/w \(3,\)|and \d+ more")


def test_other_directories_say_what_to_call(steps, tmp_path):
    step = steps["deep"]
    jzero.checkpoint.save(step.init(KEY), tmp_path / "own", "first").wait()
    damaged = managed(tmp_path / "steps", values("deep")[0])
    (tmp_path / "tensors").mkdir()
    (tmp_path / "tensors" / "model.safetensors").touch()
    (tmp_path / "empty").mkdir()
    load = rf"engine.load_checkpoint\('{tmp_path}/own', 'first', load_module_only=True\)"
    for path, words in {
        "own": load,
        "own/first": load,
        "own/first/state": load,
        "steps": f"contains 1 Orbax checkpoints: pass one of them, such as '{tmp_path}/steps/7'",
        "tensors": "contains safetensors: call engine.load_weights",
        "empty": "is not an Orbax checkpoint",
        "nothing": "does not exist",
    }.items():
        refuses(lambda path=path: step.init(KEY, tmp_path / path), words)
    for file in damaged.rglob("d/*"):
        file.unlink()
    with pytest.raises(jzero.CheckpointError, match="reading params"):
        step.init(KEY, damaged)
