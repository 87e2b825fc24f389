"""LoRA fine-tuning in every layout is that of plain Flax and optax on one device."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.cuda import needs_cuda_compiler
from helpers.refusals import refuses
from helpers.sampling import some

import jzero
from jzero.config import ActivationCheckpointing
from jzero.passes.remat import Remat, checkpointed
from jzero.planner import gpu_devices, memory
from jzero.planner.state_bytes import state_bytes
from models.llama import Llama, LlamaConfig, preset
from models.lora import MODULES, FusedLinear, LoRAConfig, LoRALinear

STEPS, ROWS, VOCAB, CLIP = 4, 8, 64, 0.1
# With adapters for a part of qkv only.
LORA = LoRAConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
CONFIG = LlamaConfig(2, 32, 4, 2, 48, vocab_size=VOCAB, lora=LORA)
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (STEPS, ROWS, 9))
# stage, mesh, accumulation, precision
LAYOUTS = {
    "stage1": (1, {"zero": 4, "data": 2}, 1, "fp32"),
    "stage2": (2, {"zero": 4}, 2, "fp32"),
    "stage3": (3, {"zero": 8}, 1, "fp32"),
    "pipe": (0, {"pipe": 2, "zero": 1}, 4, "fp32"),
    "stage1-bf16": (1, {"zero": 4, "data": 2}, 1, "bf16"),
    "pipe-stage3-bf16": (3, {"pipe": 2, "zero": 2}, 2, "bf16"),
}


def build(rngs):
    return Llama(CONFIG, rngs=rngs)


def is_adapter(path):
    return "lora_" in jax.tree_util.keystr(path)


def leaves(tree):
    return jax.tree_util.tree_flatten_with_path(tree)[0]


@cache
def reference():
    """(losses, parameters after the last step) of plain Flax and optax, on one device and in float32."""
    graph, params = nnx.split(build(nnx.Rngs(jax.random.key(0))))
    labels = jax.tree_util.tree_map_with_path(lambda path, _: is_adapter(path), params)
    adamw = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(1e-2, weight_decay=0.1))
    tx = optax.multi_transform({True: adamw, False: optax.set_to_zero()}, labels)

    @jax.jit
    def update(params, opt_state, tokens):
        def mean(params):
            logits = nnx.merge(graph, params)(tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        loss, gradient = jax.value_and_grad(mean)(params)
        updates, opt_state = tx.update(gradient, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = tx.init(params), []
    for tokens in TOKENS:
        params, opt_state, loss = update(params, opt_state, tokens)
        losses.append(float(loss))
    params = nnx.to_pure_dict(params)
    stack = params.pop("stack")
    return losses, dict(leaves({"ends": params, "stack": stack}))


def train_step(layout, **more):
    stage, axes, accum, precision = LAYOUTS[layout]
    config = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": accum,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "trainable_parameters": ["lora_"],
        "bf16": {"enabled": precision == "bf16"},
        **more,
    }
    mesh = jzero.make_mesh(**axes, devices=jax.devices()[: np.prod(list(axes.values()))])
    return jzero.make_train_step(jzero.from_flax(build), config, mesh=mesh)


@pytest.mark.parametrize("layout", some(LAYOUTS, ["stage3"]))
def test_the_losses_of_optax(layout):
    """Frozen leaves keep their bits, in the compute dtype."""
    step, fp32 = train_step(layout), not layout.endswith("bf16")
    state = step.init(jax.random.key(0))
    start, losses, (expected, theirs) = jax.device_get(state.params), [], reference()
    for tokens in TOKENS:
        state, metrics = step(state, {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]})
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected, rtol=1e-6 if fp32 else 1e-2)
    for (path, x), (_, old) in zip(leaves(jax.device_get(state.params)), leaves(start), strict=True):
        assert np.array_equal(x, old) != is_adapter(path), path
        assert x.dtype == (jnp.float32 if fp32 or is_adapter(path) else jnp.bfloat16), path
        if fp32:
            np.testing.assert_allclose(x, theirs[path], rtol=1e-4, atol=2e-6, err_msg=str(path))


@pytest.mark.parametrize(("policy", "unrolled"), [("full", False), ("matmuls", True)])
def test_frozen_layers_are_scanned_under_full_remat(policy, unrolled):
    """Unrolled, XLA would copy all of them; with more activations in memory that costs nothing."""
    step = train_step("stage3", bf16={"enabled": True}, activation_checkpointing={"policy": policy})
    assert step.setup.passes.facts.unrolled == unrolled


@pytest.mark.slow
@pytest.mark.gpu_compile
@needs_cuda_compiler
def test_one_h200_holds_the_frozen_weights_once(no_compilation_cache):
    """LoRA on Llama 8B: 2 bytes per frozen parameter, 12 per trained one; the step adds no copy of the weights."""
    lora = LoRAConfig(r=16, target_modules="all-linear")
    config = preset("8b", vocab_size=128_256, attention="cudnn", lora=lora)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "bf16": {"enabled": True},
        "activation_checkpointing": {"policy": "full"},
        "trainable_parameters": ["lora_"],
    }
    model = jzero.from_flax(lambda rngs: Llama(config, rngs=rngs))
    step = jzero.make_train_step(model, settings, mesh=jzero.make_mesh(devices=gpu_devices("h200", 1)))
    trained = 32 * 16 * sum(map(sum, [(4096, 4096), (4096, 1024), (4096, 1024), (4096, 4096)] + 3 * [(4096, 14336)]))
    assert sum(x.size for path, x in leaves(step.state_shapes.params) if is_adapter(path)) == trained
    assert state_bytes(step).persistent == 2 * config.num_parameters + 12 * trained + 2 * 4
    tokens = jax.ShapeDtypeStruct((1, 4096), np.int32)
    found = memory(step.lower({"inputs": tokens, "labels": tokens}).compile())
    assert found.arguments == pytest.approx(2 * config.num_parameters + 12 * trained, rel=1e-4)
    logits = 4096 * 128_256 * (2 + 2)  # and their gradient
    layer_inputs = 32 * 4096 * 4096 * 2
    assert found.peak - found.arguments < 1.2 * (logits + layer_inputs)


BF16 = {"use_bias": True, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}


@pytest.mark.parametrize("bias", [jnp.float32, jnp.bfloat16])
def test_a_fused_layer_promotes_its_bias_as_flax_does(bias):
    """A float32 bias on a bfloat16 kernel gives float32."""
    layer, own = FusedLinear(8, (6,), 0, {"q_proj": 4, "k_proj": 2}, **BF16), nnx.Linear(8, 6, **BF16)
    own.kernel[...] = layer.kernel[...]
    layer.bias, own.bias = (nnx.Param(jnp.linspace(-1, 1, 6, dtype=bias)) for _ in range(2))
    x = jax.random.normal(jax.random.key(1), (2, 3, 8), jnp.bfloat16)
    parts = layer(x)
    assert [part.dtype for part in parts] == [bias, bias]
    np.testing.assert_array_equal(jnp.concatenate(parts, -1), own(x))


def test_the_bias_of_one_module_comes_before_its_adapter():
    """As in peft: their sum in bfloat16 depends on the order."""
    lora, options = LoRAConfig(r=2, target_modules=["o_proj"]), {**BF16, "dtype": jnp.bfloat16}
    layer, own = LoRALinear(8, (64,), 0, {"o_proj": 64}, lora, **options), nnx.Linear(8, 64, **options)
    own.kernel[...] = layer.kernel[...]
    layer.bias[...] = own.bias[...] = jnp.linspace(-1, 1, 64, dtype=jnp.bfloat16)
    a, b = layer.o_proj.lora_a[...].astype(jnp.bfloat16), jnp.linspace(1, -2, 128, dtype=jnp.bfloat16).reshape(2, 64)
    layer.o_proj.lora_a, layer.o_proj.lora_b = nnx.Param(a), nnx.Param(b)
    x = jax.random.normal(jax.random.key(1), (2, 3, 8), jnp.bfloat16)
    np.testing.assert_array_equal(layer(x), own(x) + x @ a * lora.scale @ b)


def test_adapters_start_at_nothing():
    """B is zero, and A as wide as peft's; fused modules have an A and a B each, in the widths of peft."""
    shapes = {"q_proj": (32, 32), "k_proj": (32, 16), "v_proj": (32, 16), "o_proj": (32, 32)}
    shapes |= {"gate_proj": (32, 48), "up_proj": (32, 48), "down_proj": (48, 32)}
    config = replace(CONFIG, lora=LoRAConfig(target_modules="all-linear"))
    model, found = jzero.from_flax(lambda rngs: Llama(config, rngs=rngs)), {name: {} for name in shapes}
    for path, x in leaves(jax.jit(model.init)(jax.random.key(0))):
        if is_adapter(path):
            found[path[-2].key][path[-1].key] = x
    assert set(found) == set(MODULES)
    for name, (width, out) in shapes.items():
        a, b = found[name]["lora_a"], found[name]["lora_b"]
        assert (a.shape, b.shape) == ((2, width, 8), (2, 8, out))
        assert not b.any()
        assert 0.8 * width**-0.5 < abs(a).max() <= width**-0.5
    rows = model.weights_layout()["adapters"]["tensors"]
    assert len(rows) == 2 * len(MODULES)
    assert rows[0]["name"] == "base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"target_modules": ["q_proj", "lm_head"]}, r"target_modules = \['q_proj', 'lm_head'\].*\"all-linear\""),
        ({"target_modules": []}, r"target_modules = \[\]"),
        ({"r": 0}, "r = 0: must be at least 1"),
    ],
)
def test_bad_configs(fields, words):
    refuses(lambda: LoRAConfig(**fields), words)


def test_the_policy_matmuls_keeps_the_sum_of_a_product_and_its_adapter():
    rows, width, rank = 64, 32, 2
    shapes = [(rows, width), (width, width), (width, rank), (rank, width)]
    x, *weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)

    def block(weights, x, key):
        w, a, b = weights
        return jnp.tanh(x @ w + (x @ a) @ b)

    remat = Remat(ActivationCheckpointing(policy="matmuls"), 0, False)
    run = checkpointed(lambda pair: (*pair[1], *pair[0]), block, remat, unrolled=True)
    _, pull = jax.eval_shape(lambda x, w, *ab: jax.vjp(lambda *ab: run((ab, (w,)), x, None), *ab), x, *weights)
    kept = [leaf.shape for leaf in jax.tree.leaves(pull)]
    assert kept.count((rows, width)) == 2  # x, and the sum
