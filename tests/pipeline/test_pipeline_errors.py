"""What a pipeline refuses; refusals of the config alone are rows of parallel/test_refused."""

import jax.numpy as jnp
import pytest
from helpers.layer_lists import layers
from helpers.pipelines import Case, Decoder, batch_of, model
from helpers.refusals import refused

import jzero
from models.mlp import MLP, cross_entropy


class Widening(Decoder):
    def block(self, layer, x, rng):
        return jnp.pad(x, [(0, 0), (0, 0), (0, 1)])


class Promoting(Decoder):
    def block(self, layer, x, rng):
        return super().block(layer, x, rng).astype(jnp.float32)


FOUR, TWO = Case("1f1b", 4, 2), Case("1f1b", 2, 2)
INTERVAL = {"activation_checkpoint_interval": 3}
EACH = "each layer's output must match the next layer's input"
SCANNED = {"stack": {"unroll": False}}
REFUSED = {
    "other shapes": (
        lambda: FOUR.step(Widening(4)).lower(batch_of(FOUR)), "float32[2, 8, 16]", "float32[2, 8, 17]", EACH
    ),
    "other dtypes": (
        lambda: FOUR.step(Promoting(4), bf16={"enabled": True}).lower(batch_of(FOUR)),
        "bfloat16[2, 8, 16]", "float32[2, 8, 16]", EACH,
    ),
    "chunks": (
        lambda: Case("interleaved", 2, 2, chunks=3).step(Decoder(4)),
        "mesh.pipe = 2", "pipeline.chunks = 3", "use fewer chunks",
    ),
    "stages and chunks": (
        lambda: Case("zero_bubble", 4, 2, chunks=2).step(Decoder(12)),
        "pipeline.chunks = 2", "12 layers", "2, 3 or 6 stages fit with 2 chunks",
    ),
    "a loop over checkpoints that do not divide a chunk": (
        lambda: TWO.step(Decoder(8), pipeline=INTERVAL, **SCANNED),
        "stack.unroll = false", "mesh.pipe = 2", "activation_checkpoint_interval = 3", "the 4 layers",
    ),
    "a loop over layers of different structure": (
        lambda: Case("gpipe", 2, 3).step(layers("different"), **SCANNED),
        "stack.unroll = false", "mesh.pipe = 2", "always unrolled",
    ),
    "a mesh of other stages": (
        lambda: jzero.make_train_step(Decoder(4), TWO.config(mesh={"pipe": 2}), mesh=jzero.make_mesh()),
        "mesh.pipe = 2", "has pipe 1",
    ),
    "a model without a stack": (
        lambda: TWO.step(jzero.from_flax(MLP, cross_entropy)),
        "mesh.pipe = 2", "no layer stack", "block", "jzero.PipelineModule",
    ),
    **{f"recomputing that is {policy}": (
        lambda policy=policy: TWO.step(layers("five"), activation_checkpointing={"policy": policy}),
        "activation_checkpointing", "always recomputed",
    ) for policy in ("none", "matmuls")},
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    call, *parts = REFUSED[case]
    refused(call, *parts)


@pytest.mark.parametrize(
    ("case", "zero", "other"),
    [
        (FOUR, {}, "mesh.pipe = 4 stages"),
        (
            Case(None, 1, 2, zero=4), {"zero_hpz_partition_size": 3},
            "zero_optimization.zero_hpz_partition_size = 3: must divide the mesh's zero 4; allowed: 2",
        ),
        (
            TWO, {"offload_param": {"device": "cpu"}},
            'zero_optimization.offload_param.device = "cpu" with mesh.pipe = 2',
        ),
    ],
)  # fmt: skip
def test_the_problem_of_the_batch_comes_with_that_of_the_layout(case, zero, other):
    with pytest.raises(jzero.ConfigError) as error:
        case.step(Decoder(6), train_batch_size=7, zero_optimization={"stage": 3, **zero})
    batch, layout = error.value.problems
    assert batch.startswith("train_batch_size = 7: must equal ")
    assert layout.startswith(other)


def test_frozen_layers_in_chunks_keep_the_compute_dtype():
    """With a reduction wider than the compute dtype the layers move in the wide one; frozen ones are not cast."""
    case = Case("interleaved", 2, 2, chunks=2)
    more = {"bf16": {"enabled": True}, "communication_data_type": "fp32", "frozen_parameters": ["stack/b"]}
    case.step(model(Decoder, 4), **more).lower(batch_of(case))
