"""Configs of layouts, and tables, axes and models that do not fit, are refused by name before anything compiles."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import mixture_models, tensor_models
from helpers.mixture_models import CONFIG, OwnModel, divided_by_both, own_loss
from helpers.named_models import model_of
from helpers.refusals import refused
from helpers.tensor_models import BATCH, DIMENSIONS, make_step, model

import jzero
from models.llama import preset
from models.moe import MixtureConfig

SGD = {"train_batch_size": BATCH, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
DENSE = dataclasses.replace(CONFIG, mixture=None)
STAGE_3 = {"context": 2, "zero": 2, "stage": 3}
SEQUENCES = np.ones((2, 24, 8), np.float32)
CPU, QWZ, HPZ = {"device": "cpu"}, {"zero_quantized_weights": True}, {"zero_hpz_partition_size": 2}


def zero(**section):
    return {"zero_optimization": section}


def tensor(dimensions, name="nnx", degree=2, **more):
    return lambda: make_step(name, tensor=degree, dimensions=dimensions, **more)


def on_mesh(config, subject=None, **mesh):
    mesh = jzero.make_mesh(**{"zero": 1, **mesh}, devices=jax.devices()[:4])
    return jzero.make_train_step(subject or model("nnx"), SGD | config, mesh=mesh)


def odd_gpt2(dimensions=None, degree=2):
    """A step of a GPT-2 whose vocabulary of 67 `degree` does not divide."""
    odd = dataclasses.replace(tensor_models.ZOO["gpt2"][1], vocab_size=67)
    return make_step(model_of(odd), tensor=degree, dimensions=dimensions)


def uneven_layers(axis):
    layers = [jzero.LayerSpec(nnx.Linear, 8, 8), jnp.tanh, jzero.LayerSpec(nnx.Linear, 8, 16)]
    module = jzero.PipelineModule(layers, num_stages=2, loss_fn=lambda y, labels: ((y - labels) ** 2).mean())
    return make_step(module, pipe=2, **{axis: 2}, dimensions={"kernel": 1} if axis == "tensor" else {})


COUNTING = SimpleNamespace(
    state=("count",),
    init=lambda rng: {"w": jnp.ones((4, 4)), "count": jnp.zeros(4)},
    loss=lambda params, batch, rng: ((batch @ params["w"]).mean(), {"count": params["count"] + 1}),
)


def table_of_a_model(divided):
    return lambda: divided_by_both(type("Wrong", (OwnModel,), {"divided": divided}))


REFUSED = {
    # the degrees of an axis
    "sequence_parallel_size and mesh": (
        lambda: jzero.make_mesh({**SGD, "sequence_parallel_size": 2, "mesh": {"context": 4}}),
        "sequence_parallel_size = 2 and mesh.context = 4", "both are the degree",
    ),
    "autoep_size and mesh": (
        lambda: jzero.make_mesh({"expert_parallel": {"enabled": True, "autoep_size": 2}, "mesh": {"expert": 4}}),
        "expert_parallel.autoep_size = 2 and mesh.expert = 4", "both are the degree",
    ),
    "sequence_parallel_size and a mesh passed in": (
        lambda: on_mesh({"sequence_parallel_size": 2}, context=4),
        "sequence_parallel_size = 2 in the config, but the mesh passed in has context 4",
    ),
    "autotp_size and a mesh passed in": (
        lambda: on_mesh({"tensor_parallel": {"autotp_size": 4, "dimensions": DIMENSIONS["nnx"]}}, tensor=2, zero=2),
        "autotp_size = 4 in the config, but the mesh passed in has tensor 2",
    ),
    "top_k": (
        lambda: jzero.Config.load({"expert_parallel": {"top_k": 2}}), "expert_parallel.top_k = 2: ", "jzero.route"
    ),
    # what does not yet go together
    **{key: (
        lambda key=key, value=value: make_step("nnx", **STAGE_3, more=zero(**{key: value})),
        "mesh.context = 2 with", key, "not yet",
    ) for key, value in (("zero_quantized_gradients", True), ("zero_hpz_partition_size", 2))},
    "regather in a pipeline": (
        lambda: make_step("llama", tensor=2, pipe=2, accum=4, more={"tensor_parallel": {"regather": True}}),
        "mesh.tensor = 2 with tensor_parallel.regather = true and mesh.pipe = 2",
    ),
    **{f"layers in no stack, {axis}": (
        lambda axis=axis: uneven_layers(axis), f"mesh.{axis} = 2 with mesh.pipe = 2 and layers of", "not yet supported"
    ) for axis in ("context", "tensor")},
    **{f"unrolled layers and {key}": (
        lambda section=section: make_step("nnx", zero=2, stage=3, remat="full", more=section),
        f"stack.unroll = true with {key}: ",
    ) for key, section in (
        ("zero_optimization.offload_param", zero(offload_param=CPU)),
        ("activation_checkpointing.cpu_checkpointing", {"activation_checkpointing": {"cpu_checkpointing": True}}),
    )},
    # tables of `tensor`; what a model's table lacks see `test_tensor_parallel`
    "no table": (tensor({}), "mesh.tensor = 2", "no table", "example_batch"),
    "no such name": (tensor({"nothing": 0}), "tensor_parallel.dimensions", "'nothing'", "no parameter"),
    "no such dimension": (tensor({"up/kernel": 2}), "up/kernel", "= 2", "[32, 128]", "0 to 1"),
    "text": (tensor({"up/kernel": "1"}), "up/kernel", '"1"', "dimension"),
    "not divided": (
        tensor(DIMENSIONS["nnx"], degree=8), "mesh.tensor = 8 does not divide the 4 of stack/attn/key/bias",
        " 4 does; or leave",
    ),
    "no axis": (tensor(DIMENSIONS["nnx"], degree=1, zero=2), "does nothing on a mesh with tensor 1"),
    "state": (
        lambda: on_mesh({"tensor_parallel": {"dimensions": {"w": 1, "count": 0}}}, COUNTING, tensor=2, zero=2),
        "tensor_parallel.dimensions: ['count'] are state",
    ),
    "nothing of the model's table fits": (  # 3 divides neither heads nor widths nor vocabulary
        lambda: odd_gpt2(degree=3), "mesh.tensor = 3 does not divide the 67 of ends/embed [67, 32]"
    ),
    "a table of the config must fit": (
        lambda: odd_gpt2({"embed": 0, "up/kernel": 1, "up/bias": 0}),
        "tensor_parallel.dimensions['embed'] = 0: ", " the 67 of ends/embed",
    ),
    # tables of `expert`
    "no table of experts": (
        lambda: mixture_models.make_step(DENSE, expert=2), "mesh.expert = 2: no table says ",
        " write expert_parallel.dimensions = ", "the names are",
    ),
    "no axis of experts": (
        lambda: mixture_models.make_step(CONFIG, more={"expert_parallel": {"dimensions": {"mlp/down": 0}}}),
        "expert_parallel.dimensions: does nothing on a mesh with expert 1",
    ),
    "experts that both axes would divide": (
        lambda: divided_by_both(OwnModel, tensor_parallel={"dimensions": {"(up|down)$": 0}}),
        "mesh.expert = 4 divides the 4 of ", ", and mesh.tensor = 2 does not",
    ),
    "experts that the axis does not divide": (
        lambda: mixture_models.make_step(CONFIG, expert=8), "the model's divided['expert']['mlp/",
        "'] = 0: mesh.expert = 8 does not divide the 4 of stack/mlp/",
        "; what fits: mesh.expert = 4, or a number of experts that is a multiple of 8",
    ),
    "a model's axis": (
        table_of_a_model({"experts": {"up": 0}}),
        "the model's divided['experts']: no such axis; choose \"expert\" or \"tensor\"",
    ),
    "a model's table": (
        table_of_a_model({"expert": "up"}),
        "the model's divided['expert'] = 'up': must be {regular expression: dimension}",
    ),
    # tiles
    "tiles": (
        lambda: jzero.tiled(jnp.tanh, SEQUENCES, 5), "tiles = 5 for the sequence of 24 in [2, 24, 8]",
        " 1, 2, 3, 4, 6, 8, 12, 24",
    ),
    "a tile without its sequence": (
        lambda: jax.eval_shape(lambda x: jzero.tiled(lambda x: x.sum(), x, 4), SEQUENCES),
        "a tile of 6 positions f returned []: dimension 1 must be the sequence",
    ),
    "tiles of a mixture": (
        lambda: preset("tiny", mlp_tiles=2, mixture=MixtureConfig(4, 2, 64)),
        "mlp_tiles = 2: experts balance over whole sequences",
    ),
}  # fmt: skip


COLUMN = {"patterns": [r".*\.up\.weight$"], "partition_type": "column"}
CONFIGS = [
    # axes and pipelines
    ({"mesh": {"pipe": 3}}, ["mesh.pipe", "3", "devices, 8", "1, 2, 4 or 8"]),
    ({"mesh": {"pipe": 4, "data": 4, "zero": 1}}, ["mesh.pipe 4", "mesh.data 4", "= 16", "devices, 8"]),
    ({"mesh": {"pipe": 2}, "pipeline": {"stages": 4}}, ["mesh.pipe = 2", "pipeline.stages = 4", "keep one"]),
    ({"pipeline": {"schedule": "1f1b", "chunks": 2}}, ["pipeline.chunks = 2", "1f1b", "interleaved"]),
    ({"pipeline": {"schedule": "interleaved"}}, ["interleaved", "pipeline.chunks", "2 or more"]),
    ({"pipeline": {"gather": "micro_batch"}}, ["pipeline.gather", "micro_batch", "stage 3"]),
    (
        {"pipeline": {"activation_checkpoint_interval": 2}, "activation_checkpointing": {"policy": "none"}},
        ["pipeline.activation_checkpoint_interval = 2", '"none"', '"full"'],
    ),
    # ZeRO++
    (zero(stage=2, **QWZ), ["zero_quantized_weights = true", "zero_optimization.stage = 2", "use stage 3"]),
    (zero(stage=2, zero_quantized_gradients=True), ["zero_quantized_gradients = true", "use stage 3"]),
    (zero(stage=2, **HPZ), ["zero_hpz_partition_size = 2", "use stage 3"]),
    (zero(stage=3, **HPZ) | {"pipeline": {"gather": "step"}}, ['pipeline.gather = "step"', "remove one"]),
    (zero(stage=3, zero_quantized_nontrainable_weights=True), ["stored as int8", "leave it out"]),
    # offload
    (zero(offload_optimizer={"device": "nvme"}), ['optimizer.device = "nvme": must be "none" or "cpu"; nothing']),
    (zero(offload_optimizer={**CPU, "ratio": 2}), ["offload_optimizer.ratio = 2: must be a number >= 0 and"]),
    (zero(stage=3, offload_param=CPU, **HPZ), ["one keeps the weights off the device, the other a copy"]),
    (zero(cpu_offload="yes"), ['cpu_offload = "yes": must be true or false']),
    (zero(cpu_offload=True, offload_optimizer=CPU), ["cpu_offload = true: is the deprecated name of"]),
    # DeepSpeed's table for `tensor`
    *[
        ({"tensor_parallel": {"partition_config": section}}, ["tensor_parallel.partition_config", *parts])
        for section, *parts in (
            ({"layer_specs": {"patterns": ["a"]}}, "write [{"),
            ({"layer_specs": ["a"]}, "number 0", "not an object"),
            ({"layer_specs": [COLUMN, {"partition_type": "row"}]}, "number 1", '"patterns"'),
            ({"layer_specs": [COLUMN | {"pattern": "a"}]}, 'did you mean "patterns"?'),
            ({"layer_specs": [{"patterns": ["("]}]}, "does not compile"),
            ({"layer_specs": [COLUMN | {"shape": [0, -1]}]}, "shape = [0, -1]", "positive"),
            ({"layer_specs": [COLUMN | {"model_types": ["llama"]}]}, "no types of models"),
            ({"strict_mode": True}, "strict_mode = true", "run report"),
            ({"embedding_partition_dim": 0}, "embedding_partition_dim = 0", "layer_specs"),
            ({"lm_head_patterns": ["out"]}, "lm_head_patterns", "layer_specs"),
            ({"tp_size": 4}, "tp_size = 4", "mesh.tensor"),
        )
    ],
]  # fmt: skip


@pytest.mark.parametrize(("config", "parts"), CONFIGS, ids=str)
def test_a_config_refused_by_name(config, parts):
    refused(lambda: jzero.make_mesh({"train_batch_size": 8, **config}), *parts)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    call, *parts = REFUSED[case]
    refused(call, *parts)


@pytest.mark.parametrize(("name", "dim", "shape"), [("up", 1, [4, 16, 2, 8]), ("down", 2, [4, 8, 16])])
def test_a_dimension_that_is_not_that_of_the_experts(name, dim, shape):
    table = {"expert_parallel": {"dimensions": {f"blocks/.*/{name}$": dim}}}
    step = make_step(jzero.from_flax(OwnModel, own_loss), expert=2, more=table)
    text = f"mesh.expert divides dimension {dim} of the experts' weight {shape}, which would be gathered; "
    text += "expert_parallel.dimensions must give dimension 0, that of the experts"
    refused(lambda: step.trace(mixture_models.batches()[0]), text)
