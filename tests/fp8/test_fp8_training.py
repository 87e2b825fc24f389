"""Steps in fp8 compute what plain JAX computes with emulated fp8 products, on one device and in every layout.

The oracle is `helpers.fp8`. With `xla_allow_excess_precision` off both round at the same places, so that on one device
they agree to float32's last digits. fp8 enlarges any other difference: two values beside a border between numbers of
e5m2 end up to a quarter apart. So where products are summed in parts, the question is how far on the way from bf16 to
fp8 the gradients lie.
"""

import re
from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.fp8 import EXACT, FP8, distances, emulated, reference, shares, trained, used
from helpers.refusals import refuses
from helpers.sampling import keep
from helpers.steps import mesh, settings
from helpers.tensor_models import BATCH, SEQUENCE, VOCAB, batches, initial, make_step
from helpers.tensor_models import model as model_of

import jzero
from jzero.model import Inputs, stack_functions, stack_loss
from jzero.planner import matmuls
from jzero.planner.state_bytes import names_in_fp8, state_bytes
from jzero.run.diagnosis.repeat import Repeat
from jzero.run.run_report import report
from jzero.step.programs import StepInput

E4M3 = {**FP8, "fp8": {**FP8["fp8"], "format": "e4m3"}}
DELAYED = {**FP8, "fp8": {**FP8["fp8"], "recipe": "delayed", "amax_history_len": 4}}
ADAPTERS = {**FP8, "trainable_parameters": ["lora_"]}
TWICE = {"twice": True}  # the weights come as bfloat16
FROZEN = {**TWICE, "trained": "lora_"}  # so do frozen ones


def _run(name, oracle, layout):
    """(gradients of jzero, of the oracle, of the oracle in bf16; errors of losses and norms [steps, 2])."""
    seen, gradients = trained(name, **layout)
    chained = not any(layout.get(axis, 1) > 1 for axis in ("tensor", "context", "expert"))
    oracle = {"chained": chained and name != "more", **oracle}  # adapters lie between the products of SwiGLU
    known, expected, _ = reference(name, **oracle)
    _, bf16, _ = reference(name, None, trained=oracle.get("trained", ""))
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


@pytest.mark.parametrize(("name", "oracle", "layout"), keep(ALONE, ALONE[:1]), ids=str)
def test_one_device_computes_the_emulated_products(name, oracle, layout):
    gradients, expected, bf16, metrics = _run(name, oracle, layout)
    found, of_bf16 = distances(gradients, expected), distances(bf16, expected)
    assert metrics.max() < 1e-6
    assert max(_matrices(found)) < 3e-4 < min(_matrices(of_bf16)) / 50
    assert max(found.values()) < 2e-2  # the scales of norms, whose sums over rows are rounded to bfloat16


INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
SCANNED = {"zero": 4, "stage": 3, "accum": 2, "remat": "full", "unroll": False}
WHOLE = [
    ("llama", {}, {"zero": 2, "stage": 1, "unroll": False}),
    ("llama", {}, {"zero": 4, "data": 2, "stage": 2, "accum": 2}),
    ("llama", {}, {"zero": 8, "stage": 3}),
    ("llama", {}, SCANNED),
    ("llama", {}, {"zero": 4, "stage": 3, "zero_section": {"zero_hpz_partition_size": 2}}),
    ("llama", TWICE, {"zero": 2, "stage": 2, "zero_section": {"offload_optimizer": {"device": "cpu"}}}),
    ("four-layers", {}, {"zero": 2, "pipe": 2, "stage": 3, "accum": 4, "pipeline": {"schedule": "zero_bubble"}}),
    ("four-layers", TWICE, {"zero": 2, "pipe": 2, "stage": 2, "accum": 4, "pipeline": INTERLEAVED}),
    ("more", FROZEN, {"zero": 4, "stage": 3, "precision": ADAPTERS}),
]


@pytest.mark.parametrize(("name", "oracle", "layout"), keep(WHOLE, [("llama", {}, SCANNED)]), ids=str)
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
@pytest.mark.parametrize(("name", "layout"), keep(DIVIDED, DIVIDED[:1]), ids=str)
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
    prefix, block, _ = stack_functions(emulated("llama", "hybrid", True)[0])

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
    step = make_step("llama", precision=FP8 if recipe == "current" else DELAYED, **SCANNED)
    module, part = name.split("/")
    params = jax.tree.map(np.copy, initial("llama"))
    params["stack"][module][part]["kernel"].flat[5] = np.inf
    state = step.init(jax.random.key(0), params)
    before = jax.device_get((state.params, state.fp8))
    state, metrics = step(state, batches("llama")[0])
    assert bool(metrics["skipped"])
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get((state.params, state.fp8)))


# ---------------------------------------------------------------------- which weights, and the report


TOKENS = {name: jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32) for name in ("inputs", "labels")}


class Uses:
    """A layer that uses each weight [8, 8] in another way; `ends` has one too."""

    def init(self, rng):
        names = ("product", "twice", "transposed", "added", "both", "itself", "row", "wide", "checkpointed", "narrow")
        shapes = {name: (2, 8, 3) if name == "narrow" else (2, 8, 8) for name in (*names, "window")}
        stack = {name: 0.3 * jax.random.normal(rng, shape) for name, shape in shapes.items()}
        return {"ends": {"w": 0.3 * jax.random.normal(rng, (VOCAB, 8))}, "stack": stack}

    def prefix(self, ends, batch, rng):
        return ends["w"][batch["inputs"]]

    def block(self, w, x, rng):
        x = x + x @ w["product"] + jnp.tanh(x @ w["twice"]) @ w["twice"] + x @ w["transposed"].T
        x = x + x @ w["added"] + w["added"][0]  # a row of it
        rows = (jnp.abs(x[..., 0]) * 7).astype(jnp.int32) % 8
        x = x + x @ w["both"] * w["both"].mean() + x @ (w["itself"] @ w["itself"]) + w["row"][rows]
        x = x + (x.astype(jnp.float32) @ w["wide"]).astype(x.dtype)
        x = x + jax.checkpoint(jax.jit(lambda x, w: x @ w))(x, w["checkpointed"])
        numbers = ("NWC", "WIO", "NWC")
        x = x + jax.lax.conv_general_dilated(x, w["window"][None], (1,), "SAME", dimension_numbers=numbers)
        return x + (x @ w["narrow"]).sum(-1, keepdims=True)

    def suffix(self, ends, x, batch, rng):
        logits = (x @ ends["w"].T).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1).mean()

    loss = stack_loss


def step_of(model="llama", degrees=None, stage=0, more=None, **fp8):
    section = {"enabled": True, "min_size": 8, **fp8}
    config = settings(BATCH, stage, bf16={"enabled": True}, fp8=section, stack={"unroll": False}) | (more or {})
    model = model_of(model) if isinstance(model, str) else model
    return jzero.make_train_step(model, config, mesh=mesh(**{"zero": 1, **(degrees or {})}))


def chosen(*given, **more):
    step = step_of(*given, **more)
    step.trace(TOKENS)
    return step.setup.fp8.choice


def test_weights_used_for_nothing_but_products():
    found = chosen(Uses())
    assert found.names == {f"stack/{name}" for name in ("product", "twice", "checkpointed")}
    otherwise = "not used in matmuls with half-precision activations alone"
    apart = ("transposed", "added", "both", "itself", "row", "wide", "window")
    expected = {f"stack/{name}": otherwise for name in apart}
    assert found.others == expected | {"stack/narrow": "3 in or out, below min_size = 8"}


def zero(**more):
    return {"degrees": {"zero": 2}, "more": {"zero_optimization": {"stage": 3, **more}}}


ON, RECIPES = "fp8.enabled = true", 'must be "current" or "delayed"'
NOT_DIVISIBLE = {"model": "layers", "degrees": {"pipe": 3}, "more": {"gradient_accumulation_steps": 2}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_size": 33}, r".*no weight of a layer .* of fp8.min_size = 33 or more in and out .* lower min_size"),
        ({"exclude": ["mlp", "mpl"]}, r"fp8.exclude: 'mpl' matches no parameter; leave it out, or correct it"),
        ({"exclude": ["stack"]}, r".*is outside fp8.exclude; lower min_size .*, or turn fp8 off"),
        ({"model": "dropping"}, rf"{ON}: .*has no layer stack, .*from_flax\(..., stack=\)"),
        ({"more": {"bf16": {}, "fp16": {"enabled": True}}}, f"{ON} and fp16.enabled = true: fp8 needs bf16"),
        ({"more": {"bf16": {}}}, rf'{ON} in fp32: .* set "bf16": {{"enabled": true}}'),
        (zero(zero_quantized_weights=True), f"{ON} and zero_optimization.zero_quantized_weights = true: .* keep one"),
        (zero(offload_param={"device": "cpu"}), f'{ON} and .*offload_param.device = "cpu": .*use offload_optimizer'),
        ({"recipe": "nvfp4"}, f'fp8.recipe = "nvfp4": {RECIPES}; scales of blocks .* need Blackwell GPUs'),
        ({"format": "e5m2"}, 'fp8.format = "e5m2": must be "hybrid" or "e4m3"'),
        ({"amax_history_len": 16}, 'fp8.amax_history_len = 16 with fp8.recipe = "current": only the recipe "delayed"'),
        (NOT_DIVISIBLE, rf".*{ON} .*mesh.pipe = 3.*a stack divisible by the stages"),
        (
            {"more": {"fp8": {"recipe": "delayed", "exclude": ["down"]}}},
            'fp8 has exclude, recipe but no fp8.enabled = true or false, so fp8 stays off; write "enabled": true, or',
        ),
    ],
)
def test_what_is_refused(given, message):
    assert "\n" not in refuses(lambda: step_of(**given).trace(TOKENS), f"^{message}")


def test_the_report_lists_both():
    step = step_of(exclude=["down"])
    assert "bf16 and fp8: masters float32" in report(step)
    assert "ZeRO-0, bf16 and fp8, " in repr(step)
    step.trace(TOKENS)
    text = re.sub(r"\s+", " ", report(step))
    for words in (
        "fp8 - 3 weights of each layer, 77.2% of the stack's elements, are multiplied in fp8",
        "(format hybrid, current scales): attention/out/kernel, attention/qkv/kernel, mlp/gate_up/kernel",
        "- kept in bfloat16: mlp/down/kernel, excluded",
        "parameters, bfloat16 and fp8",
    ):
        assert words in text


def test_bytes_of_a_plan_before_and_after_the_trace():
    """Before it every matrix that is large enough counts; experts, with grouped products, are found out by the trace.

    The head is a product of 64 columns, and a tied embedding is looked up.
    """
    layout = {"degrees": {"zero": 2}, "stage": 2, "exclude": ["qkv"]}
    step, plain = (step_of("mixture", enabled=on, **layout) for on in (True, False))
    before = names_in_fp8(step), state_bytes(step).parameters
    step.trace(TOKENS)
    after = names_in_fp8(step), state_bytes(step).parameters
    assert before[0] > after[0] == step.setup.fp8.choice.names == {"stack/attention/out/kernel"}
    others = step.setup.fp8.choice.others
    assert others["stack/attention/qkv/kernel"] == "excluded"
    assert {"stack/mlp/gate_up", "stack/mlp/down"} <= set(others)
    leaves = {leaf.name: int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(step.layouts)}
    assert names_in_fp8(plain) == frozenset()
    assert state_bytes(plain).parameters - after[1] == sum(leaves[name] for name in after[0])


def test_as_many_flops_are_counted_as_in_bf16():
    fp8, bf16 = (matmuls(step_of(enabled=on).trace(TOKENS)) for on in (True, False))
    assert (fp8.count, fp8.flops, fp8.float32) == (bf16.count, bf16.flops, bf16.float32)
    of_fp8, of_bf16 = (Counter((p.scopes, p.part, p.flops) for p in one.all) for one in (fp8, bf16))
    assert of_fp8 == of_bf16
