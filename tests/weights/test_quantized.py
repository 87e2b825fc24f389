"""Matrices in few bits: the table of NF4, double quantisation, and QLoRA's losses and gradients."""

import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler
from helpers.sampling import keep
from scipy.stats import norm

import jzero
from jzero.config import ActivationCheckpointing
from jzero.errors import ConfigError
from jzero.passes.remat import Remat, checkpointed
from jzero.planner import gpu_devices
from jzero.tracing.equations import operations
from jzero.tracing.fused import fused
from models.decoder import Decoder
from models.llama import preset
from models.lora import LoRAConfig
from models.quantized import NF4, Quantized, dequantize, quantize, quantize_params, quantized_matmul


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


@pytest.mark.parametrize("shape", [(96, 64), (128, 4, 6)])
def test_error_of_quantised_matrices(shape):
    """Double quantisation adds little to NF4's own error; int8's is far smaller."""
    matrix = np.random.default_rng(0).normal(0, 0.02, shape).astype(np.float32)
    again = jax.jit(lambda x, kind: dequantize(quantize(x, kind), jnp.float32), static_argnums=1)
    found = {kind: np.asarray(again(matrix, kind)) for kind in ("nf4", "int8")}
    flat = matrix.reshape(shape[0], -1)
    once = plain_nf4(flat, np.gcd(shape[0], 64))
    error = np.sqrt(((found["nf4"].reshape(flat.shape) - flat) ** 2).mean())
    assert error < 1.02 * np.sqrt(((once - flat) ** 2).mean())
    assert np.sqrt(((found["int8"] - matrix) ** 2).mean()) < error / 8


def test_bits_of_a_matrix():
    q = quantize(jnp.ones((4096, 512)), "nf4")
    assert sum(x.nbytes for x in q) * 8 / (4096 * 512) == pytest.approx(4.125, abs=0.01)
    assert bool((dequantize(q, jnp.float32) == 1).all())
    half = [x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x for x in q]  # as a step in bf16 has them
    assert bool((dequantize(type(q)(*half), jnp.float32) == dequantize(q, jnp.float32)).all())


def decoder(quantized):
    """A decoder with adapters at some matrices; all of them are quantised."""
    lora = LoRAConfig(4, 8, ("q_proj", "v_proj", "down_proj"), quantized)
    shape = preset("tiny", num_layers=1, d_model=64, d_ff=96, num_heads=2, num_kv_heads=1, lora=lora)
    return jzero.from_flax(lambda rngs: Decoder(shape, rngs=rngs))


def mapped(function, params):
    """Map over the leaves of nested dicts, each with its name."""
    return jax.tree_util.tree_map_with_path(lambda path, x: function(path[-1].key, x), params)


def filled(part, own):
    """Put the values of `own` in the places of None."""
    if isinstance(part, dict):
        return {name: filled(value, own.get(name, {})) for name, value in part.items()}
    return own if part is None else part


def dense(params):
    """Put the matrices, made again in float32, in the places of their codes."""
    found = {name: dense(part) if isinstance(part, dict) else part for name, part in params.items()}
    if "codes" in found:
        layers = zip(*(found.pop(name) for name in Quantized._fields), strict=True)
        found["kernel"] = jnp.stack([dequantize(Quantized(*layer), jnp.float32) for layer in layers])
    return found


CASES = [("nf4", 1), ("int8", 1), ("nf4", 2), ("int8", 2)]


@pytest.mark.parametrize(("kind", "tensor"), keep(CASES, [CASES[0], CASES[2]]))
def test_losses_and_gradients_are_those_of_lora_on_the_dequantised_weights(kind, tensor):
    """The oracle: the decoder whose kernels are the dequantised ones, by plain Flax and JAX."""
    model, plain = decoder(kind), decoder(None)
    params = mapped(lambda name, x: x + 0.05 if name == "lora_b" else x, jax.jit(plain.init)(jax.random.key(0)))
    like = jax.eval_shape(model.init, jax.random.key(0))
    few = filled(quantize_params(mapped(lambda name, x: None if "lora" in name else x, params), like, kind), params)
    tokens = np.random.default_rng(1).integers(0, 256, (4, 17)).astype(np.int32)
    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
    settings = {
        "train_batch_size": 4,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "trainable_parameters": ["lora_"],
        "activation_checkpointing": {"policy": "matmuls"},
    }
    mesh = jzero.make_mesh(zero=1, tensor=tensor, devices=jax.devices()[:tensor])
    step = jzero.make_train_step(model, settings, mesh=mesh)
    state = step.init(jax.random.key(0), few)
    for name in ("codes", "scales"):  # of the columns; a half of two rows of NF4 is one byte of `down`
        codes = state.params["stack"]["mlp"]["gate_up"][name]
        assert codes.sharding.shard_shape(codes.shape)[3] == codes.shape[3] // tensor
    found, metrics = step.gradients(state, batch)

    def loss(params):
        logits = jax.nn.log_softmax(plain.module(params)(batch["inputs"]))
        return -jnp.take_along_axis(logits, batch["labels"][..., None], -1).mean()

    expected, gradients = jax.jit(jax.value_and_grad(loss))(jax.jit(dense)(few))
    assert float(metrics["loss"]) == pytest.approx(float(expected), rel=1e-5)
    wanted = dict(jax.tree_util.tree_leaves_with_path(gradients))
    adapters = {path: x for path, x in jax.tree_util.tree_leaves_with_path(found) if "lora_" in path[-1].key}
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


def two_checkpointed(f, weights, x):
    return two(jax.checkpoint(f), weights, x)


def two_on_devices(f, weights, x):
    mesh = jzero.make_mesh(zero=2, devices=jax.devices()[:2])
    specs = {"in_specs": (jax.P(), jax.P("zero")), "out_specs": jax.P("zero")}
    return jax.shard_map(partial(two, f), mesh=mesh, check_vma=False, **specs)(weights, x)


@pytest.mark.parametrize("kind", keep(["nf4", "int8"], ["nf4"]))
@pytest.mark.parametrize("run", [two_mapped, two_scanned, two_checkpointed, two_on_devices], ids=lambda f: f.__name__)
def test_swiglu_between_quantised_matrices_is_one_chain(run, kind):
    """The oracle, in float64: the same with the dequantised matrices. Plain bfloat16 must not be nearer to it."""
    rng = np.random.default_rng(0)
    shapes = [(64, 2, 96), (96, 64)]
    weights = [quantize(jnp.asarray(rng.normal(size=s) * 2 / s[0] ** 0.5, jnp.float32), kind) for s in shapes]
    x, g = (jnp.asarray(rng.normal(size=(2, 32, 64)), jnp.bfloat16) for _ in range(2))

    def gradients(f, run, weights, x, g):
        y, pull = jax.vjp(partial(run, f, weights), x)
        return [y, *pull(g)]

    found = jax.jit(partial(gradients, fused(swiglu), run))
    names = [one.name for one in operations(jax.make_jaxpr(found)(weights, x, g).jaxpr)]
    assert run is two_mapped or names.count("map_parts") >= 2  # `jax.vmap` leaves no names
    assert "frozen_dot_general" not in names
    matrices = [dequantize(q, jnp.bfloat16) for q in weights]
    rounded = gradients(plain_swiglu, two, matrices, x, g)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(matrix, np.float64)) for matrix in matrices]
        expected = gradients(plain_swiglu, two, wide, *(np.asarray(v, np.float64) for v in (x, g)))
    for a, b, exact in zip(found(weights, x, g), rounded, expected, strict=True):
        error, bound = (np.linalg.norm(np.asarray(y, np.float64) - exact) for y in (a, b))
        assert error <= bound < 2**-5 * np.linalg.norm(exact)


@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.usefixtures("no_compilation_cache")
def test_swiglu_of_a_qlora_step_is_two_kernels():
    """In a program for a GPU, as in bfloat16 LoRA."""
    widths = {"d_model": 128, "d_ff": 512, "num_heads": 2, "num_kv_heads": 2, "attention": "xla"}
    shape = preset("tiny", num_layers=1, **widths, lora=LoRAConfig(8, 8, "all-linear", "nf4"))
    config = {
        "train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "bf16": {"enabled": True},
        "trainable_parameters": ["lora_"],
    }  # fmt: skip
    mesh = jzero.make_mesh(devices=gpu_devices("h200", 1, per_host=1))
    step = jzero.make_train_step(jzero.from_flax(lambda rngs: Decoder(shape, rngs=rngs)), config, mesh=mesh)
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    text = step.lower({"inputs": tokens, "labels": tokens}).compile().as_text()
    assert len(re.findall(r'custom_call_target="__gpu\$xla\.gpu\.triton".*op_name="[^"]*/map_parts', text)) == 2


@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.usefixtures("no_compilation_cache")
def test_the_chain_of_quantised_matrices_takes_no_more_memory():
    (device,) = gpu_devices("h200", 1, per_host=1)
    sharding, width = jax.sharding.NamedSharding(jzero.make_mesh(devices=[device]), jax.P()), 1024
    weights = [jax.eval_shape(lambda s=s: quantize(jnp.zeros(s), "nf4")) for s in [(width, 2, width), (width, width)]]
    weights, x = jax.tree.map(
        lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding),
        (weights, jax.ShapeDtypeStruct((8 * width, width), jnp.bfloat16)),
    )

    def memory(f):
        def loss(x, weights):
            for _ in range(4):
                x = f(weights, x)
            return x.astype(jnp.float32).sum()

        return jax.jit(jax.grad(loss)).lower(x, weights).compile().memory_analysis().temp_size_in_bytes

    assert memory(fused(swiglu)) <= memory(swiglu)


def test_nf4_of_an_odd_dimension_is_refused():
    with pytest.raises(ConfigError, match="a matrix has 3 inputs, must be even"):
        quantize(jnp.ones((3, 4)), "nf4")
    assert quantize(jnp.ones((3, 4)), "int8").codes.shape == (3, 4)


@pytest.mark.parametrize("cpu_checkpointing", [False, True])
def test_the_policy_matmuls_keeps_the_products(cpu_checkpointing):
    """Two layers: with checkpoints their gradients take as many products as without."""
    width = 64
    q = jax.eval_shape(lambda: quantize(jnp.zeros((width, width)), "nf4"))
    section = ActivationCheckpointing(policy="matmuls", cpu_checkpointing=cpu_checkpointing)

    def layers(pair, x, key):
        for part in pair[1]:
            x = jnp.tanh(quantized_matmul(SimpleNamespace(**part._asdict()), x))
        return x

    def products(run):
        def loss(x, weights):
            return run(((), weights), x, None).astype(jnp.float32).sum()

        traced = jax.make_jaxpr(jax.grad(loss))(jax.ShapeDtypeStruct((8, width), jnp.bfloat16), [q, q])
        return sum(one.name == "dot_general" for one in operations(traced.jaxpr))

    run = checkpointed(lambda pair: pair, layers, Remat(section, 0, False), unrolled=True)
    assert products(run) == products(layers) == 4


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_a_backward_pass_keeps_no_matrix(kind):
    """Unrolled layers in a program for a GPU: XLA has one matrix at a time, and would like to have all six."""
    layers, width = 6, 1024
    q = jax.eval_shape(lambda: quantize(jnp.zeros((width, width)), kind))
    (device,) = gpu_devices("h200", 1, per_host=1)
    sharding = jax.sharding.SingleDeviceSharding(device)
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
