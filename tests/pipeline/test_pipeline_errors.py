"""What a pipeline refuses: models, layers, stages and configs that do not fit."""

import jax.numpy as jnp
import pytest
from helpers.layer_lists import layers
from helpers.pipelines import Case, Decoder, batch_of, model
from helpers.refusals import refused

import jzero
from models.mlp import MLP, cross_entropy

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
    refused(lambda: step.lower(batch_of(case)), *parts, "each layer's output must match the next layer's input")


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
    ("case", "more", "other"),
    [
        (Case("1f1b", 4, 2), {}, "mesh.pipe = 4 stages"),
        (
            Case(None, 1, 2, zero=4),
            {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 3}},
            "zero_optimization.zero_hpz_partition_size = 3",
        ),
        (
            Case("1f1b", 2, 2),
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
            'zero_optimization.offload_param.device = "cpu" with mesh.pipe = 2',
        ),
    ],
)
def test_the_problem_of_the_batch_comes_with_that_of_the_layout(case, more, other):
    with pytest.raises(jzero.ConfigError) as error:
        case.step(Decoder(6), train_batch_size=7, **more)
    batch, layout = error.value.problems
    assert batch.startswith("train_batch_size = 7: must equal ")
    assert layout.startswith(other)


def test_a_loop_over_checkpoints_that_do_not_divide_a_chunk():
    pipeline = {"activation_checkpoint_interval": 3}
    step = lambda **more: Case("1f1b", 2, 2).step(Decoder(8), pipeline=pipeline, **more)  # noqa: E731
    parts = "stack.unroll = false", "mesh.pipe = 2", "activation_checkpoint_interval = 3", "the 4 layers"
    refused(lambda: step(stack={"unroll": False}), *parts)
    assert step().setup.passes.facts.unrolled


def test_a_loop_over_layers_of_different_structure():
    step = lambda: Case("gpipe", 2, 3).step(layers("different"), stack={"unroll": False})  # noqa: E731
    refused(step, "stack.unroll = false", "mesh.pipe = 2", "always unrolled")


def test_a_mesh_of_other_stages():
    assert jzero.make_mesh({"pipeline": {"stages": 4}}).shape["pipe"] == 4
    config = Case("1f1b", 2, 2).config(mesh={"pipe": 2})
    refused(lambda: jzero.make_train_step(Decoder(4), config, mesh=jzero.make_mesh()), "mesh.pipe = 2", "has pipe 1")


def test_a_model_without_a_stack():
    refused(
        lambda: Case("1f1b", 2, 2).step(jzero.from_flax(MLP, cross_entropy)),
        "mesh.pipe = 2",
        "no layer stack",
        "block",
        "jzero.PipelineModule",
    )


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ({"mesh": {"pipe": 3}}, ["mesh.pipe", "3", "devices, 8", "1, 2, 4 or 8"]),
        ({"mesh": {"pipe": 4, "data": 4, "zero": 1}}, ["mesh.pipe 4", "mesh.data 4", "= 16", "devices, 8"]),
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
