"""Products with an elementwise function between them against float64, and the kernels of compiled GPU programs."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import on_gpu
from helpers.named_models import model_of
from helpers.programs import h100s, pairs, traced
from helpers.sampling import keep

import jzero
from jzero.kernels.fusion.chains import Chains
from jzero.planner import gpu_devices
from jzero.spread.interpreter import interpret
from jzero.spread.sharded_array import ModelGroup, whole
from jzero.tracing.equations import operations
from jzero.tracing.fused import fused
from models.llama import LlamaConfig

M, K, F, R = 24, 16, 32, 8
BF16 = 2.0**-8
EXACTLY = partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})  # rounds where the program does
silu, tanh = jax.nn.silu, jnp.tanh


def halves(x, gate_up, down):
    gate, up = jnp.split(x @ gate_up, 2, axis=-1)
    return (silu(gate) * up) @ down


def beside(x, gate_up, down):
    y = jnp.einsum("...k,kpf->...pf", x, gate_up)
    gate, up = jnp.split(y, 2, axis=-2)
    return (silu(gate.squeeze(-2)) * up.squeeze(-2)) @ down


def gelu(x, w, down):
    return jax.nn.gelu(x @ w) @ down


def biased_exact(x, w, bias, down):
    return jax.nn.gelu(x @ w + bias.reshape(1, 1, -1), approximate=False) @ down


def adapted(x, gate_up, a, b, down, c, d):
    gate, up = jnp.split(x @ gate_up + x @ a @ b, 2, axis=-1)
    hidden = silu(gate) * up
    return hidden @ down + hidden @ c @ d


def together(q, k, v):
    return tanh(q) * k + v


def cut_then_biased(x, w, bias):
    """As queries, keys and values of `models/`."""
    rows = jnp.split(bias[None, None], 3, axis=2)
    parts = jnp.split(jnp.einsum("...k,kpf->...pf", x, w), 3, axis=2)
    return together(*((part + row).squeeze(2) for part, row in zip(parts, rows, strict=True)))


X, W, DOWN = (2, M, K), (K, F), (F, K)
GELU, BIASED = (X, W, DOWN), (X, W, (F,), DOWN)
# Larger: most of the error is that of roundings between the products, with or without a chain.
WIDE = (2, 4 * M, 4 * K)
ADAPTED = ((2, 8 * M, 4 * K), (4 * K, 8 * F), (4 * K, R), (R, 8 * F), (4 * F, 4 * K), (4 * F, R), (R, 4 * K))
CHAINS = {
    "separate": (lambda x, gate, up, down: (silu(x @ gate) * (x @ up)) @ down, (X, W, W, DOWN), jnp.bfloat16),
    "halves of two": (halves, ((3, 2, K), (K, 2 * F), DOWN), jnp.bfloat16),  # the length is the number of parts, too
    "beside": (beside, (X, (K, 2, F), DOWN), jnp.bfloat16),
    "biased exact": (biased_exact, BIASED, jnp.float16),
    "two biases": (
        lambda x, gate, up, a, b, down: (silu(x @ gate + a) * (x @ up + b)) @ down,
        (X, W, W, (F,), (F,), DOWN),
        jnp.bfloat16,
    ),
    # the row is no bias, and is used twice
    "scaled": (lambda x, w, scale, down: (tanh(x @ w * scale) + scale) @ down, BIASED, jnp.bfloat16),
    "cut then biased": (cut_then_biased, (WIDE, (4 * K, 3, 4 * K), (3, 4 * K)), jnp.bfloat16),
    "biased then cut": (
        lambda x, w, bias: together(*jnp.split(x @ w + bias, 3, axis=-1)),
        (WIDE, (4 * K, 12 * K), (12 * K,)),
        jnp.bfloat16,
    ),
    "adapted": (adapted, ADAPTED, jnp.bfloat16),
}


def numbers(*shapes, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=shape) / np.sqrt(shape[0])).astype(dtype) for shape in shapes]


def primitives(f, *args):
    return [eqn.primitive.name for eqn in jax.make_jaxpr(f)(*args).eqns]


def gradients(f, args, g):
    y, pull = jax.vjp(f, *args)
    return [y, *pull(g)]


def distance(a, b):
    return np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b)) / np.linalg.norm(b)


@pytest.mark.parametrize("name", CHAINS)
def test_values_and_gradients_against_float64(name):
    f, shapes, dtype = CHAINS[name]
    args, (g,) = numbers(*shapes, dtype=dtype), numbers(shapes[0], dtype=dtype, seed=1)
    assert "custom_vjp_call" in primitives(fused(f), *args)  # else this compared a function with itself
    found, unfused = EXACTLY(lambda args, g: [gradients(run, args, g) for run in (fused(f), f)])(args, g)
    with jax.enable_x64(True):
        wide = [x.astype(np.float64) for x in (*args, g)]
        expected = jax.jit(partial(gradients, f))(wide[:-1], wide[-1])
    for a, rounded, b in zip(found, unfused, expected, strict=True):
        assert a.dtype == dtype
        assert distance(a, b) <= min(2 * BF16, distance(rounded, b))  # fewer results are rounded
    # No function with a derivative of its own is left, in which policies of checkpoints would see no product.
    backward = jax.make_jaxpr(partial(gradients, fused(f)))(args, g)
    assert not [one for one in operations(backward.jaxpr) if one.name.startswith("custom_vjp_call")]


def test_the_gradients_of_three_unequal_parts_are_written_into_one_array():
    """As of grouped queries with their keys and values; XLA's concatenation is slower. Parts of integers stay."""

    def f(x, w):
        numbers, _, _ = jnp.split(jnp.arange(6), 3)
        q, k, _ = jnp.split(x @ w, [R, R + 4], axis=-1)
        return jnp.sin(q).sum() + (k * numbers[0] + k**2).sum()

    args = numbers((M, K), (K, R + 8))
    found, known = EXACTLY(lambda *args: [jax.grad(g, (0, 1))(*args) for g in (fused(f), f)])(*args)
    jax.tree.map(np.testing.assert_array_equal, found, known)
    backward = jax.make_jaxpr(jax.grad(fused(f)))(*args).jaxpr
    assert [one.name for one in operations(backward)].count("dynamic_update_slice") == 3


def test_a_product_of_one_row_is_no_part():
    """A kernel would read it as an array of many rows."""

    def conditioned(x, c, w1, w2, w3):
        return (silu(x @ w1) * (c @ w2)) @ w3

    shapes = [(2, 64, 256), (1, 1, 256), (256, 512), (256, 512), (512, 256)]
    trace = jax.make_jaxpr(conditioned)(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    assert not Chains(trace.jaxpr, plain=True).of
    assert len(Chains(trace.jaxpr).of) == 1


def on_a_group(f):
    def run(*args):
        (y,) = interpret(ModelGroup({}), jax.make_jaxpr(f)(*args), [whole(x) for x in args])
        return y.x

    return run


@pytest.mark.parametrize("run", [fused, on_a_group], ids=lambda run: run.__name__)
def test_a_program_with_a_print(run, capfd):
    """An equation without a result runs, too, and those around it are found as without it."""

    def printed(x, w, down):
        y = x @ w
        jax.debug.print("largest {}", x.max())
        return jax.nn.gelu(y) @ down

    args = numbers(*GELU)
    np.testing.assert_array_equal(*(jax.jit(run(f))(*args) for f in (printed, gelu)))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("largest") == 1


def test_results_that_are_no_arrays_and_errors_of_the_function_itself():
    traces = []

    def f(x):
        traces.append(x)
        return {"a": x @ x, "b": "text", "c": (1.0, None)}

    (x,) = numbers((K, K))
    found = fused(f)(x)
    np.testing.assert_array_equal(found["a"], jnp.matmul(x, x))
    assert (found["b"], found["c"]) == ("text", (1.0, None))
    with pytest.raises(TypeError, match="unsupported operand"):
        fused(lambda x: f(x) + 1)(x)
    assert len(traces) == 2


def with_a_weight_that_waits(x, w, down):
    hidden = tanh(x @ w)
    return hidden @ (hidden @ down)[0, :, :1].repeat(F // M + 1, 0)[:F]


def in_two(f, y):
    return f(*jnp.split(y, 2, axis=-1))


NARROW = jnp.arange(F, dtype=jnp.float32)
ALONE = {
    "used elsewhere": lambda x, w, down: (hidden := tanh(x @ w)) @ down + hidden.sum(),
    "product used elsewhere": lambda x, w, down: tanh(y := x @ w) @ down + y.sum(),
    "returned": lambda x, w, down: ((hidden := tanh(x @ w)) @ down, hidden),
    "of rows": lambda x, w, down: jax.nn.softmax(x @ w) @ down,
    "of another array": lambda x, w, down: (tanh(x @ w) * jnp.tile(x, 2)) @ down,
    "as in fp8": lambda x, w, down: tanh(x @ w).astype(jnp.float8_e4m3fn).astype(x.dtype) @ down,
    "as in fp16": lambda x, w, down: (x @ w).astype(jnp.float16).astype(x.dtype) @ down,
    "closed over": lambda x, w, down: jax.jit(lambda y: y * np.arange(F).astype(y.dtype))(x @ w) @ down,
    "with itself": lambda x, w, down: (hidden := tanh(x[0, :K] @ w[:, :K])) @ hidden,
    "with its own maximum": lambda x, w, down: jnp.exp((y := x @ w) - y.max((0, 1), keepdims=True)) @ down,
    "with a wide bias": lambda x, w, down: tanh((x @ w).astype(jnp.float32) + NARROW).astype(x.dtype) @ down,
    "with a wide result": lambda x, w, down: jnp.matmul(tanh(x @ w), down, preferred_element_type=jnp.float32),
    "with two precisions": lambda x, w, down: (h := tanh(x @ w)) @ down + jnp.matmul(h, down, precision="highest"),
    "with a weight that waits": with_a_weight_that_waits,
    "of biases alone": lambda x, w, down: tanh(w[:1]) @ down,
    "of one row": lambda x, w, down: jax.nn.gelu(x[0, :1] @ w + w[0]) @ down,  # a bias would have an array's shape
    "a number plus a product, cut": lambda x, w, down: in_two(lambda a, b: x * a + b, 1 + x @ w),
    "a product plus a number, cut": lambda x, w, down: in_two(lambda a, b: x * a + b, x @ w + 1),
    "a number plus an array, cut": lambda x, w, down: in_two(lambda a, b: a * b, 1 + x),
    "cut, then a number": lambda x, w, down: in_two(lambda a, b: x * (a + 1) + (b + 1), x @ w),
    "in float32": lambda *args: gelu(*(x.astype(jnp.float32) for x in args)),
    "empty": lambda x, w, down: tanh(x @ w[:, :0]) @ down[:0],
}


@pytest.mark.parametrize("name", ALONE)
def test_what_is_not_between_two_products_alone_is_left_alone(name):
    f, args = ALONE[name], numbers(*GELU)
    assert "custom_vjp_call" not in primitives(fused(f), *args)

    @partial(jax.jit, static_argnums=0)
    @partial(jax.value_and_grad, argnums=1)
    def scalar(run, args):
        return sum((y.astype(jnp.float32) ** 2).sum() for y in jax.tree.leaves(run(*args)))

    jax.tree.map(np.testing.assert_array_equal, *(scalar(run, args) for run in (fused(f), f)))


# ---------------------------------------------------------------- compiled for GPUs


OTHERS = [
    jax.lax.erf, lambda x: jnp.minimum(x, jnp.exp(x)) - 1, jnp.tanh, jax.nn.sigmoid, lambda x: jnp.maximum(x, 0) ** 2,
    jnp.exp2, lambda x: jnp.log1p(x * x), lambda x: jax.lax.rsqrt(1 + x * x), lambda x: (1 + x * x) ** 1.5,
    lambda x: jnp.abs(x) * jnp.sign(x), lambda x: jnp.sin(x) * jnp.cos(x),
    lambda x: jnp.log(2 + x * x) / (1 + jnp.exp(-x)), lambda x: jnp.sqrt(1 + x * x),
    lambda x: getattr(jax.lax, "log2", jax.lax.log)(1 + x * x),  # log2 exists since jax 0.11
]  # fmt: skip
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "exact gelu": partial(jax.nn.gelu, approximate=False),
    "in float32": lambda x: jnp.copy(jnp.square(x.astype(jnp.float32)).astype(x.dtype)),
    "all others": lambda x: sum(f(x) for f in OTHERS),  # one program: a GPU's compiler takes a second for each
}


def compiled(f, *shapes):
    placed = jax.sharding.NamedSharding(jzero.make_mesh(devices=gpu_devices("h100", 1)), jax.P())
    given = [s if isinstance(s[0], tuple) else (s, jnp.bfloat16) for s in shapes]
    args = [jax.ShapeDtypeStruct(*each, sharding=placed) for each in given]
    return jax.jit(f).lower(*args).compile().as_text()


def kernels(text):
    return re.findall(r'custom_call_target="__gpu\$xla\.gpu\.triton".*op_name="[^"]*/map_parts', text)


def passes_over(text, shape, dtype="bf16"):
    loops = rf"{dtype}\[{shape}\].* fusion\(.*kind=k(?:Loop|Input)"  # kCustom: products
    return [line for line in text.split("\nENTRY ")[1].splitlines() if re.search(loops, line)]


@on_gpu
@pytest.mark.parametrize("name", keep(ACTIVATIONS, []))  # exact GELU with a bias is below
def test_every_elementwise_operation_compiles_for_a_gpu(name):
    """Forward and backward: two kernels, and no other pass over an array as wide as the hidden layer."""

    def step(x, w, down, g):
        return gradients(fused(lambda x, w, down: ACTIVATIONS[name](x @ w) @ down), (x, w, down), g)

    text = compiled(step, (64, 128), (128, 512), (512, 128), (64, 128))
    assert len(kernels(text)) == 2
    assert not passes_over(text, "64,512")


@on_gpu
def test_gradients_of_biases_need_no_pass_of_their_own():
    shapes = (2, 32, 128), (128, 1024), (1024,), (1024, 128), (2, 32, 128)
    text = compiled(lambda *args: gradients(fused(biased_exact), args[:-1], args[-1]), *shapes)
    assert len(kernels(text)) == 2
    assert not passes_over(text, "(?:2,32|64),(?:1,)?1024")
    reduced = r"\n\s+%\S*reduce\S* = .* fusion\(.*bf16\[(?:2,32|64),(?:1,)?1024\]"
    assert not re.search(reduced, text.split("\nENTRY ")[1])


ROWS, LENGTH, WIDTH, HIDDEN, LAYERS = 2, 128, 128, 512, 2


@on_gpu
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_has_two_kernels_for_each_layer(stage):
    shape = LlamaConfig(LAYERS, WIDTH, 2, 2, HIDDEN, vocab_size=256, attention="xla")
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    model, batch = model_of(shape), pairs(2 * ROWS, LENGTH)
    _, trace = traced(model, h100s(zero=2), batch, {}, train_batch_size=2 * ROWS, zero_optimization=zero)
    text = trace.lower().compile().as_text()
    assert len(kernels(text)) == 2 * LAYERS
    assert not passes_over(text, rf"(?:{ROWS},{LENGTH}|{ROWS * LENGTH}),(?:1,)?{HIDDEN}")
