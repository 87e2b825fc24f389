"""Steps in fp8 compute what plain JAX computes with emulated fp8 products, on one device and in every layout.

The oracle is `helpers.fp8`. With `xla_allow_excess_precision` off both round at the same places, so that on one device
they agree to float32's last digits. fp8 enlarges any other difference: two values beside a border between numbers of
e5m2 end up to a quarter apart. So where products are summed in parts, the question is how far on the way from bf16 to
fp8 the gradients lie.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.fp8 import EXACT, FP8, distances, emulated, reference, shares, trained, used
from helpers.sampling import keep
from helpers.tensor_models import batches, initial, make_step

from jzero.model import Inputs, stack_functions
from jzero.run.diagnosis.repeat import Repeat
from jzero.step.programs import StepInput

E4M3 = {**FP8, "fp8": {**FP8["fp8"], "format": "e4m3"}}
DELAYED = {**FP8, "fp8": {**FP8["fp8"], "recipe": "delayed", "amax_history_len": 4}}
ADAPTERS = {**FP8, "trainable_parameters": ["lora_"]}
TWICE = {"twice": True}  # the weights come as bfloat16
FROZEN = {**TWICE, "trained": "lora_"}  # so do frozen ones


def name_of(value):
    return "-".join(f"{k}{v}" for k, v in value.items()) if isinstance(value, dict) else value


def _run(name, oracle, layout):
    """(gradients of jzero, of the oracle, of the oracle in bf16; errors of losses and norms [steps, 2])."""
    seen, gradients, _ = trained(name, **layout)
    chained = not any(layout.get(axis, 1) > 1 for axis in ("tensor", "context", "expert"))
    oracle = {"chained": chained and name != "more", **oracle}  # adapters lie between the products of SwiGLU
    known, expected = reference(name, **oracle)
    _, bf16 = reference(name, None, trained=oracle.get("trained", ""))
    return gradients, expected, bf16, np.abs(seen / known - 1)


def _matrices(values):
    return [x for key, x in values.items() if key.startswith("stack") and key.endswith(("kernel", "lora_b"))]


ALONE = [
    ("llama", {}, {}),
    ("llama", {"fp8_format": "e4m3"}, {"precision": E4M3}),
    ("llama", {}, {"unroll": False, "remat": "full"}),
    ("llama", {}, {"remat": "matmuls"}),
    ("gpt2", {}, {}),
    ("mixture", {}, {}),
    ("more", FROZEN, {"precision": ADAPTERS}),
]


@pytest.mark.parametrize(("name", "oracle", "layout"), keep(ALONE, ALONE[:1]), ids=name_of)
def test_one_device_computes_the_emulated_products(name, oracle, layout):
    gradients, expected, bf16, metrics = _run(name, oracle, layout)
    found, of_bf16 = distances(gradients, expected), distances(bf16, expected)
    assert metrics.max() < 1e-6
    assert max(_matrices(found)) < 3e-4 < min(_matrices(of_bf16)) / 50
    assert max(found.values()) < 2e-2  # the scales of norms, whose sums over rows are rounded to bfloat16


OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
HPZ = {"zero_hpz_partition_size": 2}
ZERO_BUBBLE = {"schedule": "zero_bubble"}
INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
SCANNED = {"zero": 4, "stage": 3, "accum": 2, "remat": "full", "unroll": False}
WHOLE = [
    ("llama", {}, {"zero": 2, "stage": 1, "unroll": False}),
    ("llama", {}, {"zero": 4, "data": 2, "stage": 2, "accum": 2}),
    ("llama", {}, {"zero": 8, "stage": 3}),
    ("llama", {}, SCANNED),
    ("llama", {}, {"zero": 4, "stage": 3, "zero_section": HPZ}),
    ("llama", TWICE, {"zero": 2, "stage": 2, "zero_section": OFFLOAD}),
    ("four-layers", {}, {"zero": 2, "pipe": 2, "stage": 3, "accum": 4, "pipeline": ZERO_BUBBLE}),
    ("four-layers", TWICE, {"zero": 2, "pipe": 2, "stage": 2, "accum": 4, "pipeline": INTERLEAVED}),
    ("more", FROZEN, {"zero": 4, "stage": 3, "precision": ADAPTERS}),
]


@pytest.mark.parametrize(("name", "oracle", "layout"), keep(WHOLE, [("llama", {}, SCANNED)]), ids=name_of)
def test_layouts_that_divide_no_product(name, oracle, layout):
    """Gradients are reduced and summed in bfloat16, each sum rounded to 2^-9 of its size."""
    gradients, expected, bf16, metrics = _run(name, oracle, layout)
    assert max(distances(gradients, expected).values()) < 1e-2 < min(_matrices(distances(bf16, expected))) / 6
    if oracle == FROZEN:  # small adapters: another rounding of a sum moves their codes, and the next gradients, by 2e-2
        metrics = metrics[:1]
    assert metrics[:, 0].max() < 2e-4
    assert metrics[:, 1].max() < 5e-3


DIVIDED = [
    ("llama", {"zero": 2, "tensor": 2, "stage": 3}),
    ("llama", {"zero": 2, "tensor": 2, "context": 2, "stage": 2, "unroll": False}),
    ("llama", {"tensor": 2, "pipe": 2, "zero": 2, "stage": 1, "accum": 4}),
    ("llama", {"zero": 2, "tensor": 2, "stage": 3, "regather": True, "accum": 2}),
    ("mixture", {"expert": 2, "zero": 2, "stage": 3}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), keep(DIVIDED, DIVIDED[:1]), ids=name_of)
def test_layouts_that_divide_products(name, layout):
    """Parts of a product are rounded to bfloat16 before they are summed, and those of the loss too."""
    gradients, expected, bf16, metrics = _run(name, {}, layout)
    found = shares(gradients, expected, bf16)
    assert min(_matrices(found)) > 0.6, found
    assert max(_matrices(found)) < 1.2, found
    assert metrics[:, 0].max() < 2e-4
    assert metrics[:, 1].max() < 5e-3


@pytest.mark.slow
def test_evaluation_predictions_and_a_repeated_step_are_in_fp8_too():
    """A search for what is not finite must compute what the step computed. Text is generated in bf16."""
    step, batch = make_step("llama", precision=FP8), batches("llama")[0]
    state = step.init(jax.random.key(0), initial("llama"))
    loss = reference("llama")[0][0, 0]
    assert float(step.micro_loss(state, step.place_micro_batch(batch), 0)) == pytest.approx(loss, rel=1e-6)
    assert float(step.evaluate(state, batch)) == pytest.approx(loss, rel=1e-6)
    prefix, block, _ = stack_functions(emulated("llama", "hybrid", True))

    @partial(jax.jit, compiler_options=EXACT)
    def layers(params):
        weights = jax.tree_util.tree_map_with_path(used, params)
        xs = [prefix(weights["ends"], Inputs(batch, None), None)[0]]
        for i in range(2):
            xs.append(block(jax.tree.map(lambda w, i=i: w[i], weights["stack"]), xs[-1], None)[0])
        return [jnp.abs(jax.tree.leaves(x)[0]).max() for x in xs]

    repeat = Repeat(step.setup, state, StepInput((step.place(batch),), None))
    np.testing.assert_array_equal(repeat.forward(repeat.micro_batch(0), 0)[0, :3], np.float32(layers(initial("llama"))))
    assert step.generate(state, batch["inputs"][:8], 2, numpy=True).shape == (8, 10)


SKIPPED = [("current", "mlp/down"), ("delayed", "attention/out")]


@pytest.mark.parametrize(("recipe", "name"), keep(SKIPPED, SKIPPED[:1]))
def test_a_step_with_an_infinite_weight_is_skipped(recipe, name):
    """Even where it is the only one: fp8 has no infinity, and the largest number of e4m3 would look like any other."""
    precision = FP8 if recipe == "current" else DELAYED
    step = make_step("llama", precision=precision, zero=2, stage=3, unroll=False)
    module, part = name.split("/")
    params = jax.tree.map(np.copy, initial("llama"))
    params["stack"][module][part]["kernel"].flat[5] = np.inf
    state = step.init(jax.random.key(0), params)
    before = jax.device_get((state.params, state.fp8))
    state, metrics = step(state, batches("llama")[0])
    assert bool(metrics["skipped"])
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get((state.params, state.fp8)))
