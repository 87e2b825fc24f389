"""LoRA fine-tuning in every layout is that of plain Flax and optax on one device; frozen weights exist once."""

from dataclasses import replace
from functools import cache
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.cuda import needs_cuda_compiler
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
# stage, mesh, accumulation
LAYOUTS = {
    "stage0": (0, {"zero": 8}, 1),
    "stage1": (1, {"zero": 4, "data": 2}, 1),
    "stage2": (2, {"zero": 4}, 2),
    "stage3": (3, {"zero": 8}, 1),
    "pipe": (0, {"pipe": 2, "zero": 1}, 4),
    "pipe-stage3": (3, {"pipe": 2, "zero": 2}, 2),
}


def build(rngs):
    return Llama(CONFIG, rngs=rngs)


def is_adapter(path):
    return "lora_" in jax.tree_util.keystr(path)


def labels(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "train" if is_adapter(path) else "freeze", params)


@cache
def reference():
    """(losses, module after the last step) of plain Flax and optax, on one device and in float32."""
    adamw = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(1e-2, weight_decay=0.1))
    tx = optax.multi_transform({"train": adamw, "freeze": optax.set_to_zero()}, labels)
    graph, params = nnx.split(build(nnx.Rngs(jax.random.key(0))))

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
    return losses, nnx.to_pure_dict(params)


def train_step(layout, precision, **more):
    stage, axes, accum = LAYOUTS[layout]
    config = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": accum,
        "gradient_clipping": CLIP,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "trainable_parameters": ["lora_"],
        **({} if precision == "fp32" else {precision: {"enabled": True}}),
        **more,
    }
    mesh = jzero.make_mesh(**axes, devices=jax.devices()[: np.prod(list(axes.values()))])
    return jzero.make_train_step(jzero.from_flax(build), config, mesh=mesh)


def leaves(tree):
    return jax.tree_util.tree_flatten_with_path(tree)[0]


PRECISIONS = [*product(LAYOUTS, ["fp32"]), ("stage1", "bf16"), ("stage3", "bf16"), ("pipe-stage3", "bf16")]
CHOSEN = [("stage3", "fp32")]


@pytest.mark.parametrize(("layout", "precision"), some(PRECISIONS, CHOSEN))
def test_the_losses_of_optax(layout, precision):
    """Frozen leaves keep their bits, and a device holds each once, in the compute dtype."""
    step = train_step(layout, precision)
    state = step.init(jax.random.key(0))
    start = jax.device_get(state.params)
    found = state_bytes(step)
    group = step.mesh.shape["zero"] if LAYOUTS[layout][0] else 1
    frozen_group = group if LAYOUTS[layout][0] == 3 else 1
    itemsize, pipe = (4 if precision == "fp32" else 2), step.mesh.shape["pipe"]
    masters = moments = 0
    for path, x in leaves(state.params):
        part = x.size // pipe if path[0].key == "stack" or "embed" in str(path) or "head" in str(path) else x.size
        masters += 4 * part // group if is_adapter(path) else itemsize * part // frozen_group
        moments += 8 * part // group if is_adapter(path) else 0
        assert x.dtype == (jnp.bfloat16 if precision == "bf16" and not is_adapter(path) else jnp.float32)
    assert (found.masters, found.optimizer) == (masters, moments + 2 * 4)  # two counters
    for tree, size in ((state.params, masters), (state.opt_state, moments + 2 * 4)):
        on_device_0 = [s.data.nbytes for x in jax.tree.leaves(tree) for s in x.addressable_shards if s.device.id == 0]
        assert sum(on_device_0) == size

    losses, expected = [], reference()
    for tokens in TOKENS:
        state, metrics = step(state, {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]})
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, expected[0], rtol=1e-6 if precision == "fp32" else 1e-2)
    after = jax.device_get(state.params)
    ends = {name: x for name, x in expected[1].items() if name != "stack"}
    theirs = dict(leaves({"ends": ends, "stack": expected[1]["stack"]}))
    for (path, x), (_, old) in zip(leaves(after), leaves(start), strict=True):
        assert np.array_equal(x, old) != is_adapter(path), path
        if precision == "fp32":
            np.testing.assert_allclose(x, theirs[path], rtol=1e-4, atol=2e-6, err_msg=str(path))


@pytest.mark.parametrize(("policy", "unrolled"), [("full", False), ("matmuls", True)])
def test_frozen_layers_are_scanned_under_full_remat(policy, unrolled):
    """Unrolled, XLA would copy all of them; with more activations in memory that costs nothing."""
    step = train_step("stage3", "bf16", activation_checkpointing={"policy": policy})
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


@pytest.mark.parametrize("bias", [jnp.float32, jnp.bfloat16])
def test_a_fused_layer_promotes_its_bias_as_flax_does(bias):
    """A float32 bias on a bfloat16 kernel gives float32."""
    options = {"use_bias": True, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    layer, own = FusedLinear(8, (6,), 0, {"q_proj": 4, "k_proj": 2}, **options), nnx.Linear(8, 6, **options)
    own.kernel[...] = layer.kernel[...]
    layer.bias, own.bias = (nnx.Param(jnp.linspace(-1, 1, 6, dtype=bias)) for _ in range(2))
    x = jax.random.normal(jax.random.key(1), (2, 3, 8), jnp.bfloat16)
    parts = layer(x)
    assert [part.dtype for part in parts] == [bias, bias]
    np.testing.assert_array_equal(jnp.concatenate(parts, -1), own(x))


def test_the_bias_of_one_module_comes_before_its_adapter():
    """As in peft: their sum in bfloat16 depends on the order."""
    options = {"use_bias": True, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    lora = LoRAConfig(r=2, target_modules=["o_proj"])
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
        ({"target_modules": ["q_proj", "lm_head"]}, ["target_modules = ['q_proj', 'lm_head']", '"all-linear"']),
        ({"target_modules": []}, ["target_modules = []"]),
        ({"r": 0}, ["r = 0: must be at least 1"]),
    ],
)
def test_bad_configs(fields, words):
    with pytest.raises(jzero.ConfigError) as error:
        LoRAConfig(**fields)
    assert [word for word in words if word not in str(error.value)] == []


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


@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.usefixtures("no_compilation_cache")
def test_the_policy_matmuls_is_a_step_between_none_and_full():
    """Of temporary memory in a program for a GPU, with XLA's attention, whose scores it does not keep."""
    lora = LoRAConfig(r=8, lora_alpha=8, target_modules="all-linear")
    widths = {"d_model": 256, "d_ff": 1024, "num_heads": 2, "num_kv_heads": 2, "attention": "xla"}
    shape = preset("tiny", num_layers=4, **widths, lora=lora)
    mesh, tokens = jzero.make_mesh(devices=gpu_devices("h200", 1)), jax.ShapeDtypeStruct((8, 512), np.int32)
    temporary = {}
    for policy in ("none", "matmuls", "full"):
        settings = {
            "train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "bf16": {"enabled": True},
            "trainable_parameters": ["lora_"], "activation_checkpointing": {"policy": policy},
        }  # fmt: skip
        step = jzero.make_train_step(jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs)), settings, mesh=mesh)
        compiled = step.lower({"inputs": tokens, "labels": tokens}).compile()
        temporary[policy] = compiled.memory_analysis().temp_size_in_bytes
    assert temporary["full"] < temporary["matmuls"] < temporary["none"]
