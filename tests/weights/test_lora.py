"""LoRA in every layout is that of plain Flax and optax on one device; on matrices in few bits, that on dense ones."""

from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers.drawn import drawn
from helpers.named_models import model_of
from helpers.oracle import plain_loop
from helpers.refusals import refuses
from helpers.sampling import keep, some
from helpers.steps import mesh, run, settings
from scipy.stats import norm

import jzero
from jzero.config import ActivationCheckpointing
from jzero.passes.remat import Remat, checkpointed
from jzero.planner import gpu_devices
from jzero.tracing.equations import operations
from jzero.tracing.fused import fused
from models.llama import Llama, LlamaConfig, preset
from models.lora import MODULES, LoRAConfig, LoRALinear
from models.quantized import NF4, Quantized, dequantize, quantize, quantize_params, quantized_matmul

STEPS, ROWS, VOCAB, CLIP = 4, 8, 64, 0.1
# With adapters for a part of qkv only.
LORA = LoRAConfig(r=2, lora_alpha=6, target_modules=["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"])
CONFIG = LlamaConfig(2, 32, 4, 2, 48, vocab_size=VOCAB, lora=LORA)
TOKENS = np.random.default_rng(0).integers(0, VOCAB, (STEPS, ROWS, 9))
leaves = jax.tree_util.tree_leaves_with_path


# stage, mesh, accumulation, precision
LAYOUTS = {
    "stage3": (3, {"zero": 8}, 1, "fp32"),
    "pipe": (0, {"pipe": 2, "zero": 1}, 4, "fp32"),
    "stage1-bf16": (1, {"zero": 4, "data": 2}, 1, "bf16"),
    "pipe-stage3-bf16": (3, {"pipe": 2, "zero": 2}, 2, "bf16"),
}


def build(rngs):
    return Llama(CONFIG, rngs=rngs)


def is_adapter(path):
    return "lora_" in jax.tree_util.keystr(path)


@cache
def reference():
    graph, start = nnx.split(build(nnx.Rngs(jax.random.key(0))))
    labels = jax.tree_util.tree_map_with_path(lambda path, _: is_adapter(path), start)
    adamw = optax.chain(optax.clip_by_global_norm(CLIP), optax.adamw(1e-2, weight_decay=0.1))
    tx = optax.multi_transform({True: adamw, False: optax.set_to_zero()}, labels)

    def mean(params, tokens):
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    found = plain_loop(mean, start, TOKENS, tx)
    ends = nnx.to_pure_dict(found.params)
    stack = ends.pop("stack")
    return found.losses, dict(leaves({"ends": ends, "stack": stack}))


def train_step(layout, **more):
    stage, degrees, accum, precision = LAYOUTS[layout]
    adamw = {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}}
    more = {"bf16": {"enabled": precision == "bf16"}, "trainable_parameters": ["lora_"], **more}
    config = settings(ROWS, stage, accum, gradient_clipping=CLIP, optimizer=adamw, **more)
    return jzero.make_train_step(jzero.from_flax(build), config, mesh=mesh(**degrees))


@pytest.mark.parametrize("layout", some(LAYOUTS, ["stage3"]))
def test_the_losses_of_optax(layout):
    """Frozen leaves keep their bits, in the compute dtype."""
    step, fp32 = train_step(layout), not layout.endswith("bf16")
    batches = [{"inputs": tokens[:, :-1], "labels": tokens[:, 1:]} for tokens in TOKENS]
    (start, losses, state), (expected, theirs) = run(step, batches), reference()
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


def test_the_bias_of_one_module_comes_before_its_adapter():
    """As in peft: their sum in bfloat16 depends on the order."""
    lora = LoRAConfig(r=2, target_modules=["o_proj"])
    options = {"use_bias": True, "dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    layer, own = LoRALinear(8, (64,), 0, {"o_proj": 64}, lora, **options), nnx.Linear(8, 64, **options)
    own.kernel[...] = layer.kernel[...]
    b, bias, x = (np.random.default_rng(0).normal(size=size) for size in ((2, 64), 64, (2, 3, 8)))
    a, b, bias, x = (jnp.asarray(v, jnp.bfloat16) for v in (layer.o_proj.lora_a[...], b, bias, x))
    layer.bias[...] = own.bias[...] = bias
    layer.o_proj.lora_a, layer.o_proj.lora_b = nnx.Param(a), nnx.Param(b)
    np.testing.assert_array_equal(layer(x), own(x) + x @ a * lora.scale @ b)


def test_adapters_start_at_nothing():
    """B is zero, and A as wide as peft's; fused modules have an A and a B each, in the widths of peft."""
    shapes = {"q_proj": (32, 32), "k_proj": (32, 16), "v_proj": (32, 16), "o_proj": (32, 32)}
    shapes |= {"gate_proj": (32, 48), "up_proj": (32, 48), "down_proj": (48, 32)}
    config = replace(CONFIG, lora=LoRAConfig(target_modules="all-linear"))

    @jax.jit  # which computes nothing else
    def adapters(key):
        return {(path[-2].key, path[-1].key): x for path, x in leaves(model_of(config).init(key)) if is_adapter(path)}

    found = adapters(jax.random.key(0))
    assert {name for name, _ in found} == set(MODULES)
    for name, (width, out) in shapes.items():
        a, b = found[name, "lora_a"], found[name, "lora_b"]
        assert (a.shape, b.shape) == ((2, width, 8), (2, 8, out))
        assert not b.any()
        assert 0.8 * width**-0.5 < abs(a).max() <= width**-0.5


def test_the_policy_matmuls_keeps_the_sum_of_a_product_and_its_adapter():
    rows, width, rank = 64, 32, 2
    shapes = [(rows, width), (width, width), (width, rank), (rank, width)]
    x, *weights = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)

    def block(weights, x, key):
        w, a, b = weights
        return jnp.tanh(x @ w + (x @ a) @ b)

    remat = Remat(ActivationCheckpointing(policy="matmuls"), 0, False)
    layer = checkpointed(lambda pair: (*pair[1], *pair[0]), block, remat, unrolled=True)
    _, pull = jax.eval_shape(lambda x, w, *ab: jax.vjp(lambda *ab: layer((ab, (w,)), x, None), *ab), x, *weights)
    kept = [leaf.shape for leaf in jax.tree.leaves(pull)]
    assert kept.count((rows, width)) == 2  # x, and the sum


def test_bad_configs():
    refuses(lambda: LoRAConfig(target_modules=["lm_head"]), r"target_modules = \['lm_head'\].*\"all-linear\"")
    refuses(lambda: LoRAConfig(r=0), "r = 0: must be at least 1")


# ------------------------------------------------------------------------------------------- matrices in few bits


def test_the_table_is_the_papers():
    """bitsandbytes' `create_normal_map`: quantiles of the normal distribution, 8 above zero and 7 below."""
    offset = 0.9677083
    above, below = (norm.ppf(np.linspace(offset, 0.5, count)[:-1]) for count in (9, 8))
    table = np.sort([*above, *-below, 0.0])
    np.testing.assert_allclose(NF4, table / table.max(), atol=2e-7)


def plain_nf4(matrix, block):
    """Quantise [in, out] without double quantisation, in NumPy."""
    blocks = matrix.reshape(-1, block, matrix.shape[1])
    scale = np.abs(blocks).max(1, keepdims=True)
    nearest = np.abs((blocks / scale)[..., None] - np.array(NF4)).argmin(-1)
    return (np.array(NF4)[nearest] * scale).reshape(matrix.shape)


packed, unpacked = jax.jit(quantize, static_argnums=1), jax.jit(dequantize, static_argnums=1)


@pytest.mark.parametrize("shape", [(96, 64), (128, 4, 6)])
def test_error_of_quantised_matrices(shape):
    """Double quantisation adds little to NF4's own error; int8's is far smaller."""
    matrix = np.random.default_rng(0).normal(0, 0.02, shape).astype(np.float32)
    found = {kind: np.asarray(unpacked(packed(matrix, kind), jnp.float32)) for kind in ("nf4", "int8")}
    flat = matrix.reshape(shape[0], -1)
    once = plain_nf4(flat, np.gcd(shape[0], 64))
    error = np.sqrt(((found["nf4"].reshape(flat.shape) - flat) ** 2).mean())
    assert error < 1.02 * np.sqrt(((once - flat) ** 2).mean())
    assert np.sqrt(((found["int8"] - matrix) ** 2).mean()) < error / 8


def test_bits_of_a_matrix():
    q = packed(np.ones((64, 512), np.float32), "nf4")
    assert sum(x.nbytes for x in q) * 8 / (64 * 512) == pytest.approx(4.125, abs=0.01)
    assert (np.asarray(unpacked(q, jnp.float32)) == 1).all()
    half = [np.asarray(x).astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in q]  # as in a step in bf16
    assert (np.asarray(unpacked(Quantized(*half), jnp.float32)) == 1).all()


def decoder(quantized):
    lora = LoRAConfig(4, 8, ("q_proj", "v_proj", "down_proj"), quantized)
    return model_of(preset("tiny", num_layers=1, d_model=64, d_ff=96, num_heads=2, num_kv_heads=1, lora=lora))


def dense(params):
    """Put the matrices, made again in float32, in the places of their codes."""
    found = {name: dense(part) if isinstance(part, dict) else part for name, part in params.items()}
    if "codes" in found:
        layers = zip(*(found.pop(name) for name in Quantized._fields), strict=True)
        found["kernel"] = jnp.stack([dequantize(Quantized(*layer), jnp.float32) for layer in layers])
    return found


@pytest.mark.parametrize(("kind", "tensor"), keep([("nf4", 1), ("nf4", 2), ("int8", 2)], [("nf4", 2)]))
def test_losses_and_gradients_are_those_of_lora_on_the_dequantised_weights(kind, tensor):
    """The oracle: the decoder whose kernels are the dequantised ones, by plain Flax and JAX."""
    model, plain = decoder(kind), decoder(None)
    like, shapes = (jax.eval_shape(one.init, jax.random.key(0)) for one in (model, plain))
    frozen = jax.tree_util.tree_map_with_path(lambda path, x: None if is_adapter(path) else x, drawn(shapes))
    few = jax.jit(lambda frozen: quantize_params(frozen, like, kind))(frozen)
    few = jax.tree.map(lambda own, x: own if x is None else x, drawn(like), few)
    tokens = np.random.default_rng(1).integers(0, 256, (4, 17)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
    config = settings(4, trainable_parameters=["lora_"], activation_checkpointing={"policy": "matmuls"})
    step = jzero.make_train_step(model, config, mesh=mesh(zero=1, tensor=tensor))
    state = step.init(jax.random.key(0), few)
    for name in ("codes", "scales"):  # of the columns; a half of two rows of NF4 is one byte of `down`
        codes = state.params["stack"]["mlp"]["gate_up"][name]
        assert codes.sharding.shard_shape(codes.shape)[3] == codes.shape[3] // tensor
    found, metrics = step.gradients(state, batch)

    def loss(params):
        logits = jax.nn.log_softmax(plain.module(params)(batch["inputs"]))
        return -jnp.take_along_axis(logits, batch["labels"][..., None], -1).mean()

    expected, gradients = jax.jit(lambda few: jax.value_and_grad(loss)(dense(few)))(few)
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-5)
    wanted, adapters = dict(leaves(gradients)), {path: x for path, x in leaves(found) if is_adapter(path)}
    assert len(adapters) == 6
    for path, x in adapters.items():
        np.testing.assert_allclose(x, wanted[path], atol=1e-3 * np.abs(wanted[path]).max(), err_msg=str(path))


def swiglu(weights, x):
    gate_up, down = (SimpleNamespace(**q._asdict()) for q in weights)
    gate, up = (part.squeeze(-2) for part in jnp.split(quantized_matmul(gate_up, x), 2, axis=-2))
    return quantized_matmul(down, jax.nn.silu(gate) * up)


def plain_swiglu(weights, x):
    gate_up, down = weights
    gate, up = x @ gate_up[:, 0], x @ gate_up[:, 1]
    return (gate / (1 + jnp.exp(-gate)) * up) @ down


def two(f, weights, x):
    return f(weights, f(weights, x))


def two_mapped(f, weights, x):
    return jax.vmap(partial(two, f, weights))(x)


def two_scanned(f, weights, x):
    stacked = jax.tree.map(lambda v: jnp.stack([v, v]), weights)
    return jax.lax.scan(lambda x, one: (f(one, x), None), x, stacked)[0]


def two_on_devices(f, weights, x):
    devices = mesh(zero=2)
    specs = {"in_specs": (jax.P(), jax.P("zero")), "out_specs": jax.P("zero")}
    return jax.shard_map(partial(two, f), mesh=devices, check_vma=False, **specs)(weights, x)


def gradients(f, run, weights, x, g):
    y, pull = jax.vjp(partial(run, f, weights), x)
    return [y, *pull(g)]


@cache
def chain():
    """(quantised matrices, x, g); the gradients with the dequantised matrices in plain bfloat16, and in float64."""
    rng = np.random.default_rng(0)
    weights = [packed(np.float32(rng.normal(size=s) * 2 / s[0] ** 0.5), "nf4") for s in ((64, 2, 96), (96, 64))]
    x, g = (jnp.asarray(rng.normal(size=(2, 32, 64)), jnp.bfloat16) for _ in range(2))
    given = [unpacked(q, jnp.bfloat16) for q in weights], x, g
    plain = partial(gradients, plain_swiglu, two)
    rounded = jax.jit(plain, compiler_options={"xla_allow_excess_precision": False})(*given)
    with jax.enable_x64(True):
        expected = jax.jit(plain)(*jax.tree.map(lambda v: np.asarray(v).astype(np.float64), given))
    return (weights, x, g), rounded, expected


@pytest.mark.parametrize("run", [two_mapped, two_scanned, two_on_devices], ids=lambda f: f.__name__)
def test_swiglu_between_quantised_matrices_is_one_chain(run):
    """The oracle, in float64: the same with the dequantised matrices. Plain bfloat16 must not be nearer to it."""
    given, rounded, expected = chain()
    found = jax.jit(partial(gradients, fused(swiglu), run))
    names = [one.name for one in operations(jax.make_jaxpr(found)(*given).jaxpr)]
    assert run is two_mapped or names.count("map_parts") >= 2  # `jax.vmap` leaves no names
    assert "frozen_dot_general" not in names
    for a, b, exact in zip(found(*given), rounded, expected, strict=True):
        error, bound = (np.linalg.norm(np.asarray(y, np.float64) - exact) for y in (a, b))
        assert error <= bound < 2**-5 * np.linalg.norm(exact)


def test_nf4_of_an_odd_dimension_is_refused():
    odd = jax.ShapeDtypeStruct((3, 4), np.float32)
    refuses(lambda: jax.eval_shape(partial(quantize, kind="nf4"), odd), "a matrix has 3 inputs, must be even")
    assert jax.eval_shape(partial(quantize, kind="int8"), odd).codes.shape == (3, 4)


@pytest.mark.parametrize("cpu_checkpointing", [False, True])
def test_the_policy_matmuls_keeps_the_products(cpu_checkpointing):
    """Two layers: with checkpoints their gradients take as many products as without."""
    q, x = jax.eval_shape(lambda: (quantize(jnp.zeros((64, 64)), "nf4"), jnp.zeros((8, 64), jnp.bfloat16)))
    section = ActivationCheckpointing(policy="matmuls", cpu_checkpointing=cpu_checkpointing)

    def layers(pair, x, key):
        for part in pair[1]:
            x = jnp.tanh(quantized_matmul(SimpleNamespace(**part._asdict()), x))
        return x

    def products(run):
        trace = jax.make_jaxpr(jax.grad(lambda x, qs: run(((), qs), x, None).astype(jnp.float32).sum()))(x, [q, q])
        return sum(one.name == "dot_general" for one in operations(trace.jaxpr))

    run = checkpointed(lambda pair: pair, layers, Remat(section, 0, False), unrolled=True)
    assert products(run) == products(layers) == 4


def test_a_backward_pass_keeps_no_matrix():
    """Unrolled layers in a program for a GPU: XLA has one matrix at a time, and would like to have all four."""
    layers, width = 4, 1024
    q = jax.eval_shape(lambda: quantize(jnp.zeros((width, width)), "nf4"))
    sharding = jax.sharding.SingleDeviceSharding(gpu_devices("h200", 1, per_host=1)[0])
    x, parts = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        (jax.ShapeDtypeStruct((32, width), jnp.bfloat16), [q._asdict()] * layers),
    )

    def loss(x, parts):
        for part in parts:
            x = jnp.tanh(quantized_matmul(SimpleNamespace(**part), x))
        return x.astype(jnp.float32).sum()

    compiled = jax.jit(jax.grad(loss)).lower(x, parts).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2.5 * 2 * width**2
