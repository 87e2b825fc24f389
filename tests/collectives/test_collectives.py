"""The compiled H100 program holds the collectives of the ZeRO table (`jzero.layout.zero`), and no others.

Expected are arrays by (kind, dtype, axes, bytes, place), times loop trips, from the leaves' shapes and the table alone;
nothing is combined. Per micro-batch stage 3 gathers a leaf of the stack twice, for both passes, whatever is recomputed;
one of the ends once. A model without a stack is one layer, of which "none" gathers again only what the backward pass
reads: the kernels of all linear layers but the first. Once a step come the losses and counts of the micro-batches, the
whole count, and over `zero` a number for each partitioned leaf, its part of the gradient's norm.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import prod

import jax
import jax.numpy as jnp
import pytest
from helpers.named_models import model_of
from helpers.programs import SIZE, WITH_CUBLAS, collectives_of, h100s, needs_gpu_programs, one_by_one, pairs, traced
from helpers.reference import ADAMW
from helpers.sampling import keep, some
from helpers.steps import settings

import jzero
from jzero.tree import named
from models.llama import LlamaConfig
from models.lora import LoRAConfig
from models.mlp import MLP, cross_entropy

pytestmark = needs_gpu_programs
LAYERS, SEQUENCE, MICRO = 3, 16, 2
LLAMA = LlamaConfig(LAYERS, 64, 4, 2, 96, vocab_size=128, attention="xla")
HLO = {"bf16": "bf16", "fp32": "f32", "fp16": "f16"}


@dataclass(frozen=True)
class Case:
    stage: int
    data: int = 1
    zero: int = 8
    accum: int = 8
    unroll: bool = True
    precision: str = "bf16"
    policy: str = "none"
    reduce: str | None = None  # communication_data_type
    llama: bool = True

    @property
    def batch_axes(self):
        return tuple(axis for axis, n in (("data", self.data), ("zero", self.zero)) if n > 1)


# The stage that gathers and scatters layer by layer, without a layer stack, and with a bias of 10 that nothing divides.
CHOSEN = Case(3, data=2, zero=4, llama=False)
CASES = [
    # Once a step, whatever the accumulation: stages 0 and 1.
    Case(0, accum=1, unroll=False, precision="fp32"),
    Case(0, data=2, zero=4, unroll=False),
    Case(1, accum=1, unroll=False, reduce="fp32"),
    Case(1),
    # Gathered once a step, reduced every micro-batch: stage 2.
    Case(2, accum=1, precision="fp32"),
    # Gathered layer by layer: stage 3.
    Case(3, accum=1, unroll=False, precision="fp32"),
    Case(3, data=2, zero=4, unroll=False, reduce="fp32"),
    Case(3, accum=1, policy="full"),
    Case(3, unroll=False, policy="matmuls"),
    # No layer stack.
    CHOSEN,
    *[Case(stage, data=2, zero=4, llama=False) for stage in (0, 1, 2)],
    Case(3, data=8, zero=1, llama=False, precision="fp32"),
    Case(3, accum=1, llama=False, precision="fp16", policy="full"),
]


def compiled(case, llama=LLAMA, options=WITH_CUBLAS, **more):
    rows = MICRO * case.accum * case.data * case.zero
    config = settings(
        rows, case.stage, case.accum, optimizer=ADAMW, gradient_clipping=1, communication_data_type=case.reduce,
        activation_checkpointing={"policy": case.policy}, stack={"unroll": case.unroll},
        bf16={"enabled": case.precision == "bf16"}, fp16={"enabled": case.precision == "fp16"}, **more,
    )  # fmt: skip
    if case.llama:
        model, batch = model_of(llama), pairs(rows, SEQUENCE)
    else:
        model = jzero.from_flax(MLP, cross_entropy)
        batch = (jax.ShapeDtypeStruct((rows, 784), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32))
    step, trace = traced(model, h100s(data=case.data, zero=case.zero), batch, options, **config)
    return collectives_of(step, trace), step.state_shapes.params


def leaves_of(case, params):
    for name, x in named(params).items():
        layers = LAYERS if name.startswith("stack/") else 1
        shape = x.shape[1:] if layers > 1 else x.shape
        yield name, shape, layers, case.stage > 0 and case.zero > 1 and any(size % case.zero == 0 for size in shape)


def expected(case, params):
    moved = Counter()
    compute, wire = HLO[case.precision], HLO[case.reduce or case.precision]
    inside = "micro-batch" if case.accum > 1 else "step"

    def add(kind, dtype, axes, elements, place, times):
        if axes:
            moved[kind, dtype, axes, elements * SIZE[dtype], place] += times

    leaves = list(leaves_of(case, params))
    for name, shape, layers, partitioned in leaves:
        one = prod(shape)
        # What happens once a step happens to a scanned stack's leaf as a whole, to an unrolled one's layer by layer.
        times, elements = (layers, one) if case.unroll else (1, layers * one)
        if not partitioned:
            add("all-reduce", wire, case.batch_axes, elements, "step", times)
            continue
        if case.stage == 3:
            # For both passes or for one, see the module's docstring.
            both = name.startswith("stack/") if case.llama else case.policy == "full" or name == "fc2/kernel"
            passes = 2 if both else 1
            add("all-gather", compute, ("zero",), one, inside, passes * layers * case.accum)
        else:
            add("all-gather", compute, ("zero",), elements, "step", times)
        if case.stage == 1:
            add("reduce-scatter", wire, ("zero",), elements, "step", times)
        else:
            add("reduce-scatter", wire, ("zero",), one, inside, layers * case.accum)
        add("all-reduce", wire, ("data",) * (case.data > 1), elements // case.zero, "step", times)
    if divided := sum(partitioned for *_, partitioned in leaves):
        add("all-reduce", "f32", ("zero",), divided, "step", 1)  # the norm
    add("all-reduce", "f32", case.batch_axes, 2 * case.accum, "step", 1)  # the losses and counts of the micro-batches
    if case.llama:
        add("all-reduce", "f32", case.batch_axes, 1, "step", 1)  # the total count, which the gradients are divided by
    return moved


@pytest.mark.parametrize("case", keep(CASES, [CHOSEN]), ids=str)
def test_collectives_are_the_tables(case):
    def key(row):
        in_micro_batch = case.accum > 1 and row.loops[:1] == (case.accum,)
        assert in_micro_batch or case.accum == 1 or not row.loops, f"in a loop that is not the micro-batches': {row}"
        return row.kind, row.dtype, row.axes, row.bytes, "micro-batch" if in_micro_batch else "step"

    program, params = compiled(case)
    assert one_by_one(program, key) == expected(case, params)


@pytest.mark.parametrize("policy", some(["none", "full"], ["none"]))
def test_frozen_weights_are_gathered_layer_by_layer_too(policy):
    """They have no gradient, so nothing but the loop over the layers keeps XLA from gathering the whole stack."""
    lora = replace(LLAMA, lora=LoRAConfig(r=4, target_modules="all-linear"))
    found, _ = compiled(Case(3, accum=2, unroll=False, policy=policy), lora, trainable_parameters=["lora_"])
    gathers = [one for one in found if one.kind == "all-gather"]
    largest = 2 * LLAMA.d_model * LLAMA.d_ff * 2  # bytes of one layer's gate and up projections in bf16
    assert max(one.bytes for one in gathers) == largest
    assert sum(one.times for one in gathers if one.bytes == largest) == 2 * 2 * LAYERS  # micro-batches, both passes
