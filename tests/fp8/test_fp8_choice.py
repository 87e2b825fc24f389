"""Which weights are multiplied in fp8, what is refused, and what the run report says of both."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.refusals import refuses
from helpers.steps import mesh, settings
from helpers.tensor_models import BATCH, SEQUENCE, VOCAB
from helpers.tensor_models import model as model_of

import jzero
from jzero.model import stack_loss
from jzero.pipeline.module import LayerSpec, PipelineModule
from jzero.planner import matmuls
from jzero.planner.state_bytes import names_in_fp8, state_bytes
from jzero.run.run_report import report

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
        x = x + x @ w["both"] * w["both"].mean() + x @ (w["itself"] @ w["itself"]) + w["row"][batch_row(x)]
        x = x + (x.astype(jnp.float32) @ w["wide"]).astype(x.dtype)
        x = x + jax.checkpoint(jax.jit(lambda x, w: x @ w))(x, w["checkpointed"])
        numbers = ("NWC", "WIO", "NWC")
        x = x + jax.lax.conv_general_dilated(x, w["window"][None], (1,), "SAME", dimension_numbers=numbers)
        return x + (x @ w["narrow"]).sum(-1, keepdims=True)

    def suffix(self, ends, x, batch, rng):
        logits = (x @ ends["w"].T).astype(jnp.float32)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], -1).mean()

    loss = stack_loss


def batch_row(x):
    return (jnp.abs(x[..., 0]) * 7).astype(jnp.int32) % 8


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


def test_layers_of_models():
    """The head is a product of 64 columns, and a tied embedding is looked up; experts have grouped products."""
    found = chosen("mixture", exclude=["qkv"])
    assert found.names == {"stack/attention/out/kernel"}
    assert found.others["stack/attention/qkv/kernel"] == "excluded"
    assert {"stack/mlp/gate_up", "stack/mlp/down"} <= set(found.others)


class NoStack:
    def init(self, rng):
        return {"w": jnp.zeros((VOCAB, 8))}

    def loss(self, params, batch, rng):
        return (params["w"][batch["inputs"]] @ params["w"].T).astype(jnp.float32).mean()


def unlike_layers():
    specs = [LayerSpec(nnx.Linear, 8, 8), LayerSpec(nnx.Linear, 8, 16), LayerSpec(nnx.Linear, 16, 4)]
    return PipelineModule(specs, 2, loss_fn=lambda out, labels: ((out - labels) ** 2).mean())


def zero(**more):
    return {"degrees": {"zero": 2}, "more": {"zero_optimization": {"stage": 3, **more}}}


ON, RECIPES = "fp8.enabled = true", 'must be "current" or "delayed"'
UNLIKE = {"model": unlike_layers(), "degrees": {"pipe": 2}, "more": {"gradient_accumulation_steps": 2}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_size": 33}, r".*no weight of a layer .* of fp8.min_size = 33 or more in and out .* lower min_size"),
        ({"exclude": ["mlp", "mpl"]}, r"fp8.exclude: 'mpl' matches no parameter; leave it out, or correct it"),
        ({"exclude": ["stack"]}, r".*is outside fp8.exclude; lower min_size .*, or turn fp8 off"),
        ({"model": NoStack()}, rf"{ON}: .*has no layer stack, .*from_flax\(..., stack=\)"),
        ({"more": {"bf16": {}, "fp16": {"enabled": True}}}, f"{ON} and fp16.enabled = true: fp8 needs bf16"),
        ({"more": {"bf16": {}}}, rf'{ON} in fp32: .* set "bf16": {{"enabled": true}}'),
        (zero(zero_quantized_weights=True), f"{ON} and zero_optimization.zero_quantized_weights = true: .* keep one"),
        (zero(offload_param={"device": "cpu"}), f'{ON} and .*offload_param.device = "cpu": .*use offload_optimizer'),
        ({"recipe": "nvfp4"}, f'fp8.recipe = "nvfp4": {RECIPES}; scales of blocks .* need Blackwell GPUs'),
        ({"recipe": 1}, f"fp8.recipe = .*: {RECIPES}; or leave it out"),
        ({"format": "e5m2"}, 'fp8.format = "e5m2": must be "hybrid" or "e4m3"'),
        ({"amax_history_len": 16}, 'fp8.amax_history_len = 16 with fp8.recipe = "current": only the recipe "delayed"'),
        (UNLIKE, rf".*{ON} .*mesh.pipe = 2.*a stack divisible by the stages"),
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
    assert "\nfp8\n" not in report(step)
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
    """Before it every matrix that is large enough counts; a mixture's experts are found out by the trace."""
    step, plain = (step_of("mixture", degrees={"zero": 2}, stage=2, enabled=on) for on in (True, False))
    before = names_in_fp8(step), state_bytes(step).parameters
    step.trace(TOKENS)
    after = names_in_fp8(step), state_bytes(step).parameters
    assert before[0] > after[0]
    leaves = {leaf.name: int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(step.layouts)}
    assert names_in_fp8(plain) == frozenset()
    assert state_bytes(plain).parameters - after[1] == sum(leaves[name] for name in after[0])


def test_as_many_flops_are_counted_as_in_bf16():
    fp8, bf16 = (matmuls(step_of(enabled=on).trace(TOKENS)) for on in (True, False))
    assert (fp8.count, fp8.flops, fp8.float32) == (bf16.count, bf16.flops, bf16.float32)
    of_fp8, of_bf16 = (Counter((p.scopes, p.part, p.flops) for p in one.all) for one in (fp8, bf16))
    assert of_fp8 == of_bf16
