"""DeepSpeed's `tensor_parallel.partition_config`: the same table as by hand, for names of PyTorch and of the model."""

import jax.numpy as jnp
import pytest
from helpers import tensor_models
from helpers.refusals import refused

import jzero
from jzero.config import Config
from jzero.tree import named

COLUMN = {"patterns": [r".*\.up\.weight$"], "partition_type": "column"}
ROW = {"patterns": [r".*\.down\.weight$"], "partition_type": "row"}


def make_step(name, specs, defaults=True, **section):
    section["partition_config"] = {"use_default_specs": defaults, "layer_specs": specs}
    own = Weights() if name == "weights" else name
    return tensor_models.make_step(own, tensor=2, zero=2, dimensions={}, more={"tensor_parallel": section})


def divided_by_tensor(step):
    specs = {name: layout.axes_by_dim for name, layout in named(step.layouts).items()}
    return {name: d for name, dims in specs.items() for d, axes in enumerate(dims) if "tensor" in axes}


class Weights:
    """A matrix, gates and values side by side, experts, three in one with heads."""

    def init(self, rng):
        shapes = {"dense": (8, 16), "fused": (8, 2, 16), "experts": (4, 8, 16), "heads": (8, 3, 2, 16)}
        return {name: {"kernel": jnp.ones(shape)} for name, shape in shapes.items()} | {"norm": {"scale": jnp.ones(8)}}

    def loss(self, params, batch, rng):
        return (batch["inputs"] @ params["dense"]["kernel"][: batch["inputs"].shape[1]]).mean()


SKIP, UP = COLUMN | {"partition_type": "skip"}, {"stack/up/kernel": 1, "stack/up/bias": 0}
SHAPES = [
    ("dense", {}, 1),
    ("dense", {"partition_dim": 1}, 0),
    ("dense", {"shape": [-1, 8]}, 1),
    ("fused", {"shape": [2, -1], "partition_dim": 0}, 2),
    ("experts", {"shape": [4, -1, 8], "partition_dim": 1}, 2),
    ("experts", {"shape": [4, 16, 8], "partition_type": "row", "partition_dim": 2}, 1),
    ("experts", {"shape": [4, -1, 8], "partition_dim": 0}, 0),
]
TABLES = [  # model, specs, the dimension of each parameter that is divided
    ("nnx", [COLUMN, ROW], UP | {"stack/down/kernel": 0}),  # columns have their bias, and rows do not
    *(("nnx", [{"patterns": [pattern]}], UP) for pattern in (r".*\.up\.kernel$", r"(?i)stack\.UP")),
    # The first spec decides.
    ("nnx", [COLUMN | {"partition_type": "row"}, ROW, SKIP], {"stack/up/kernel": 0, "stack/down/kernel": 0}),
    ("nnx", [SKIP, ROW, COLUMN], {"stack/down/kernel": 0}),
    *(("weights", [{"patterns": [rf"{name}\.weight"], **spec}], {f"{name}/kernel": d}) for name, spec, d in SHAPES),
]


@pytest.mark.parametrize(("name", "specs", "table"), TABLES)
def test_the_table_of_specs(name, specs, table):
    step = make_step(name, specs)
    assert divided_by_tensor(step) == table
    parameter, dimension = next(iter(table.items()))
    words = f'tensor_parallel.partition_config, as dimensions: {{"^{parameter}$": {dimension}'
    assert words in " ".join(jzero.report(step).split())


def test_default_specs_are_the_models_table():
    gates = {"patterns": [r".*gate_up.weight"], "partition_type": "skip"}
    table = divided_by_tensor(make_step("llama", [gates]))
    assert table["stack/attention/qkv/kernel"] == 1
    assert "stack/mlp/gate_up/kernel" not in table
    out = {"patterns": [r".*\.out\.weight"], "partition_type": "row"}
    assert divided_by_tensor(make_step("llama", [out], defaults=False)) == {"stack/attention/out/kernel": 0}


REFUSED = [
    ("weights", [{"patterns": ["fused"], "shape": [[8, 4, 4], -1]}], ["side by side", "[8, 2, 16]"]),
    ("weights", [{"patterns": ["dense"], "shape": [2, -1]}], ["[in, 2, out]", "tensor_parallel.dimensions"]),
    ("weights", [{"patterns": ["heads"]}], ["heads/kernel [8, 3, 2, 16]", "2 or 3 sizes; write tensor_parallel.dim"]),
    ("weights", [{"patterns": ["fused"], "shape": [2, -1], "partition_dim": 2}], ["2 dimensions", "0 to 1"]),
    ("weights", [{"patterns": ["dense"], "partition_type": "skip"}], ["every spec skips"]),
    ("linen", [{"patterns": [r"LinenBlock_0.*Dense_1"]}, {"patterns": ["nothing"]}], ["layer_specs[1]", "match no"]),
    # Patterns match the beginning, as in DeepSpeed, by re.match.
    ("nnx", [{"patterns": ["up"]}], ["layer_specs[0].patterns = ['up']: match no weight; ", "stack.up.weight"]),
]


@pytest.mark.parametrize(("name", "specs", "parts"), REFUSED)
def test_what_no_dimension_expresses_is_refused(name, specs, parts):
    refused(lambda: make_step(name, specs), "tensor_parallel.partition_config.layer_specs", *parts)


def test_the_heads_of_an_attention():
    """The kernels of nnx.MultiHeadAttention have three dimensions; the message says how to name each."""
    query = {"patterns": [r"stack\.attn\.query\.weight"]}
    use = '"shape": [32, 8, 4] (PyTorch\'s order) and "partition_dim": 0, 2 or 1 for dimension 0, 1 or 2 of'
    parts = "stack/attn/query/kernel [32, 4, 8]", "tensor_parallel.dimensions", use
    for spec in ({}, {"shape": [-1, 32]}, {"shape": [4, 8, 32]}):
        refused(lambda spec=spec: make_step("nnx", [query | spec]), *parts)
    for dim, asked in enumerate((0, 2, 1)):
        step = make_step("nnx", [query | {"shape": [32, 8, 4], "partition_dim": asked}], defaults=False)
        assert divided_by_tensor(step)["stack/attn/query/kernel"] == dim


def test_both_tables():
    both = "dimensions and tensor_parallel.partition_config.layer_specs: both say"
    refused(lambda: make_step("nnx", [COLUMN], dimensions={"up/kernel": 1}), both)
    table = {"tensor_parallel": {"partition_config": {"layer_specs": [COLUMN]}}}
    no_axis = "tensor_parallel.partition_config: does nothing on a mesh with tensor 1"
    refused(lambda: tensor_models.make_step("nnx", zero=2, more=table), no_axis)


def test_what_asks_for_nothing_and_defaults():
    defaults = {"use_default_specs": True, "lm_head_patterns": ["lm_head", "embed_out"], "embedding_partition_dim": 1}
    for section in ({**defaults, "tp_size": 1, "strict_mode": False, "layer_specs": []}, None):
        assert repr(Config.load({"tensor_parallel": {"partition_config": section}})) == "Config()"
    config = Config.load({"tensor_parallel": {"partition_config": {"layer_specs": [COLUMN | {"gather_output": True}]}}})
    assert Config.load({"tensor_parallel": config.tensor_parallel}) == config
