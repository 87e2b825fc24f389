"""DeepSpeed's `tensor_parallel.partition_config`: the same table as by hand, for names of PyTorch and of the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.tensor_models import BATCH, batches, initial, model, reference

import jzero
from jzero.config import Config
from jzero.errors import ConfigError
from jzero.tree import named

COLUMN = {"patterns": [r".*\.up\.weight$"], "partition_type": "column"}
ROW = {"patterns": [r".*\.down\.weight$"], "partition_type": "row"}


def make_step(name, specs, defaults=True, **section):
    config = {
        "train_batch_size": BATCH, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0.0,
        "tensor_parallel": {"partition_config": {"use_default_specs": defaults, "layer_specs": specs}, **section},
    }  # fmt: skip
    mesh = jzero.make_mesh(tensor=2, zero=2, devices=jax.devices()[:4])
    own = Weights() if name == "weights" else model(name)
    return jzero.make_train_step(own, config, mesh=mesh)


def divided_by_tensor(step):
    specs = {name: layout.held for name, layout in named(step.layouts).items()}
    return {
        name: next(d for d, axes in enumerate(dims) if "tensor" in axes)
        for name, dims in specs.items()
        if any("tensor" in axes for axes in dims)
    }


class Weights:
    """A matrix, gates and values side by side, experts, three in one with heads."""

    def init(self, rng):
        shapes = {"dense": (8, 16), "fused": (8, 2, 16), "experts": (4, 8, 16), "heads": (8, 3, 2, 16)}
        return {name: {"kernel": jnp.ones(shape)} for name, shape in shapes.items()} | {"norm": {"scale": jnp.ones(8)}}

    def loss(self, params, batch, rng):
        return (batch["inputs"] @ params["dense"]["kernel"][: batch["inputs"].shape[1]]).mean()


def test_columns_have_their_bias_and_rows_do_not():
    assert divided_by_tensor(make_step("nnx", [COLUMN, ROW])) == {
        "stack/up/kernel": 1, "stack/up/bias": 0, "stack/down/kernel": 0,
    }  # fmt: skip


@pytest.mark.parametrize("pattern", [r".*\.up\.kernel$", r"stack\.up", r"(?i).*UP\.weight"])
def test_the_models_own_names(pattern):
    assert set(divided_by_tensor(make_step("nnx", [{"patterns": [pattern]}]))) == {"stack/up/kernel", "stack/up/bias"}


def test_patterns_match_the_beginning():
    """As in DeepSpeed, by re.match."""
    with pytest.raises(ConfigError, match=r"layer_specs\[0\].patterns = \['up'\]: match no weight; .*stack.up.weight"):
        make_step("nnx", [{"patterns": ["up"]}])


@pytest.mark.parametrize(("first", "dim"), [(COLUMN, 1), (COLUMN | {"partition_type": "row"}, 0)])
def test_the_first_spec_decides(first, dim):
    other = COLUMN | {"partition_type": "skip"}
    assert divided_by_tensor(make_step("nnx", [first, ROW, other]))["stack/up/kernel"] == dim
    assert set(divided_by_tensor(make_step("nnx", [other, ROW, first]))) == {"stack/down/kernel"}


def test_default_specs_are_the_models_table():
    """A spec wins over the table; skipped weights are whole."""
    gates = {"patterns": [r".*gate_up.weight"], "partition_type": "skip"}
    table = divided_by_tensor(make_step("llama", [gates]))
    assert table["stack/attention/qkv/kernel"] == 1
    assert "stack/mlp/gate_up/kernel" not in table
    out = {"patterns": [r".*\.out\.weight"], "partition_type": "row"}
    assert divided_by_tensor(make_step("llama", [out], defaults=False)) == {"stack/attention/out/kernel": 0}


SHAPES = [
    ("dense", {}, 1),
    ("dense", {"partition_dim": 1}, 0),
    ("dense", {"shape": [-1, 8]}, 1),
    ("fused", {"shape": [2, -1], "partition_dim": 0}, 2),
    ("experts", {"shape": [4, -1, 8], "partition_dim": 1}, 2),
    ("experts", {"shape": [4, 16, 8], "partition_type": "row", "partition_dim": 2}, 1),
    ("experts", {"shape": [4, -1, 8], "partition_dim": 0}, 0),
]


@pytest.mark.parametrize(("name", "spec", "dim"), SHAPES)
def test_shapes_of_pytorch(name, spec, dim):
    step = make_step("weights", [{"patterns": [rf"{name}\.weight"], **spec}])
    assert divided_by_tensor(step) == {f"{name}/kernel": dim}


def test_training_is_that_of_one_device():
    """The report names the table that was made of the specs."""
    step = make_step("nnx", [COLUMN, ROW, {"patterns": [r"ends\.embed"], "partition_type": "row"}])
    state, losses = step.init(jax.random.key(0), initial("nnx")), []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, reference("nnx")[0][:, 0], rtol=1e-6)
    text = " ".join(jzero.report(step).split())
    assert 'tensor_parallel.partition_config, as dimensions: {"^stack/up/kernel$": 1' in text


REFUSED = [
    ("weights", [{"patterns": ["fused"], "shape": [[8, 4, 4], -1]}], ["side by side", "[8, 2, 16]"]),
    ("weights", [{"patterns": ["dense"], "shape": [2, -1]}], ["[in, 2, out]", "tensor_parallel.dimensions"]),
    ("weights", [{"patterns": ["heads"]}], ["heads/kernel [8, 3, 2, 16]", "2 or 3 sizes; write tensor_parallel.dim"]),
    ("weights", [{"patterns": ["dense"], "partition_dim": 2}], ["partition_dim 2", "0 to 1"]),
    ("weights", [{"patterns": ["fused"], "shape": [2, -1], "partition_dim": 2}], ["2 dimensions", "0 to 1"]),
    ("weights", [{"patterns": ["dense"], "partition_type": "skip"}], ["every spec skips"]),
    ("linen", [{"patterns": [r"LinenBlock_0.*Dense_1"]}, {"patterns": ["nothing"]}], ["layer_specs[1]", "match no"]),
    ("nnx", [{"patterns": ["norm"]}], ["match no weight"]),
]


@pytest.mark.parametrize(("name", "specs", "parts"), REFUSED)
def test_what_no_dimension_expresses_is_refused(name, specs, parts):
    with pytest.raises(ConfigError) as error:
        make_step(name, specs)
    for part in ("tensor_parallel.partition_config.layer_specs", *parts):
        assert part in str(error.value)


@pytest.mark.parametrize("spec", [{}, {"partition_dim": 1}, {"shape": [-1, 32]}, {"shape": [4, 8, 32]}], ids=str)
def test_the_heads_of_an_attention(spec):
    """The kernels of nnx.MultiHeadAttention have three dimensions; the message says how to name each."""
    query = {"patterns": [r"stack\.attn\.query\.weight"]}
    with pytest.raises(ConfigError) as error:
        make_step("nnx", [query | spec])
    message = str(error.value)
    assert "stack/attn/query/kernel [32, 4, 8]" in message
    assert "tensor_parallel.dimensions" in message
    assert '"shape": [32, 8, 4] (PyTorch\'s order) and "partition_dim": 0, 2 or 1 for dimension 0, 1 or 2 of' in message
    for dim, asked in enumerate((0, 2, 1)):
        step = make_step("nnx", [query | {"shape": [32, 8, 4], "partition_dim": asked}], defaults=False)
        assert divided_by_tensor(step)["stack/attn/query/kernel"] == dim


BAD = [
    ({"layer_specs": {"patterns": ["a"]}}, ["write [{"]),
    ({"layer_specs": ["a"]}, ["number 0", "not an object"]),
    ({"layer_specs": [COLUMN, {"partition_type": "row"}]}, ["number 1", '"patterns"']),
    ({"layer_specs": [COLUMN | {"pattern": "a"}]}, ['did you mean "patterns"?']),
    ({"layer_specs": [COLUMN | {"partition_type": "colum"}]}, ['did you mean "column"?']),
    ({"layer_specs": [{"patterns": ["("]}]}, ["does not compile"]),
    ({"layer_specs": [COLUMN | {"shape": [0, -1]}]}, ["shape = [0, -1]", "positive"]),
    ({"layer_specs": [COLUMN | {"partition_dim": -1}]}, ["partition_dim = -1"]),
    ({"layer_specs": [COLUMN | {"model_types": ["llama"]}]}, ["no types of models"]),
    ({"strict_mode": True}, ["strict_mode = true", "run report"]),
    ({"embedding_partition_dim": 0}, ["embedding_partition_dim = 0", "layer_specs"]),
    ({"lm_head_patterns": ["out"]}, ["lm_head_patterns", "layer_specs"]),
    ({"tp_size": 4}, ["tp_size = 4", "mesh.tensor"]),
]


@pytest.mark.parametrize(("section", "parts"), BAD, ids=lambda value: str(next(iter(value))))
def test_bad_values_are_named(section, parts):
    with pytest.raises(ConfigError) as error:
        Config.load({"tensor_parallel": {"partition_config": section}})
    for part in ("tensor_parallel.partition_config", *parts):
        assert part in str(error.value)


def test_both_tables_or_neither_axis():
    with pytest.raises(ConfigError, match=r"dimensions and tensor_parallel.partition_config.layer_specs: both say"):
        make_step("nnx", [COLUMN], dimensions={"up/kernel": 1})
    config = {"train_batch_size": 8, "tensor_parallel": {"partition_config": {"layer_specs": [COLUMN]}}}
    with pytest.raises(ConfigError, match=r"tensor_parallel.partition_config: does nothing on a mesh with tensor 1"):
        jzero.make_train_step(model("nnx"), config, mesh=jzero.make_mesh(zero=2, devices=jax.devices()[:2]))


def test_what_asks_for_nothing_and_defaults():
    defaults = {"use_default_specs": True, "lm_head_patterns": ["lm_head", "embed_out"], "embedding_partition_dim": 1}
    section = {**defaults, "tp_size": 1, "strict_mode": False, "layer_specs": []}
    assert repr(Config.load({"tensor_parallel": {"partition_config": section}})) == "Config()"
    assert repr(Config.load({"tensor_parallel": {"partition_config": None}})) == "Config()"
    config = Config.load({"tensor_parallel": {"partition_config": {"layer_specs": [COLUMN | {"gather_output": True}]}}})
    assert Config.load({"tensor_parallel": config.tensor_parallel}) == config
