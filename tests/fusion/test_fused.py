"""Products with an elementwise function between them against float64, and the kernels of compiled GPU programs."""

import re
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers.cuda import needs_cuda_compiler
from helpers.sampling import keep

import jzero
from jzero.kernels.fusion.chains import Chains
from jzero.kernels.fusion.elementwise import PRIMITIVES, is_elementwise
from jzero.planner import gpu_devices
from jzero.spread.interpreter import interpret
from jzero.spread.sharded_array import ModelGroup, whole
from jzero.tracing.equations import operations
from jzero.tracing.fused import fused
from models.llama import Llama, LlamaConfig

M, K, F, R = 24, 16, 32, 8
BF16 = 2.0**-8


def separate(x, gate, up, down):
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def halves(x, gate_up, down):
    gate, up = jnp.split(x @ gate_up, 2, axis=-1)
    return (jax.nn.silu(gate) * up) @ down


def beside(x, gate_up, down):
    y = jnp.einsum("...k,kpf->...pf", x, gate_up)
    gate, up = jnp.split(y, 2, axis=-2)
    return (jax.nn.silu(gate.squeeze(-2)) * up.squeeze(-2)) @ down


def gelu(x, w, down):
    return jax.nn.gelu(x @ w) @ down


def squared(x, w, down):
    return (jnp.maximum(x @ w, 0) ** 2) @ down


def biased(x, w, bias, down):
    return jax.nn.gelu(x @ w + bias) @ down


def biased_exact(x, w, bias, down):
    return jax.nn.gelu(x @ w + bias.reshape(1, 1, -1), approximate=False) @ down


def two_biases(x, gate, up, a, b, down):
    return (jax.nn.silu(x @ gate + a) * (x @ up + b)) @ down


def scaled(x, w, scale, down):
    """The row is no bias, and is used twice."""
    return (jnp.tanh(x @ w * scale) + scale) @ down


def adapted(x, gate_up, a, b, down, c, d):
    """SwiGLU with low-rank adapters."""
    gate, up = jnp.split(x @ gate_up + x @ a @ b, 2, axis=-1)
    hidden = jax.nn.silu(gate) * up
    return hidden @ down + hidden @ c @ d


def together(q, k, v):
    return jnp.tanh(q) * k + v


def cut_then_biased(x, w, bias):
    """As queries, keys and values of `models/`."""
    rows = jnp.split(bias[None, None], 3, axis=2)
    parts = jnp.split(jnp.einsum("...k,kpf->...pf", x, w), 3, axis=2)
    return together(*((part + row).squeeze(2) for part, row in zip(parts, rows, strict=True)))


def biased_then_cut(x, w, bias):
    return together(*jnp.split(x @ w + bias, 3, axis=-1))


def numbers(*shapes, dtype=jnp.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), dtype) for shape in shapes]


SHAPES = {
    separate: [(2, M, K), (K, F), (K, F), (F, K)],
    halves: [(2, M, K), (K, 2 * F), (F, K)],
    beside: [(2, M, K), (K, 2, F), (F, K)],
    gelu: [(2, M, K), (K, F), (F, K)],
    squared: [(2, M, K), (K, F), (F, K)],
    biased: [(2, M, K), (K, F), (F,), (F, K)],
    biased_exact: [(2, M, K), (K, F), (F,), (F, K)],
    two_biases: [(2, M, K), (K, F), (K, F), (F,), (F,), (F, K)],
    scaled: [(2, M, K), (K, F), (F,), (F, K)],
    # Larger: most of the error is that of roundings between the products, with or without a chain.
    cut_then_biased: [(2, 4 * M, 4 * K), (4 * K, 3, 4 * K), (3, 4 * K)],
    biased_then_cut: [(2, 4 * M, 4 * K), (4 * K, 12 * K), (12 * K,)],
    adapted: [(2, 8 * M, 4 * K), (4 * K, 8 * F), (4 * K, R), (R, 8 * F), (4 * F, 4 * K), (4 * F, R), (R, 4 * K)],
}


def primitives(f, *args):
    return [eqn.primitive.name for eqn in jax.make_jaxpr(f)(*args).eqns]


def gradients(f, args, g):
    y, pull = jax.vjp(f, *args)
    return [y, *pull(g)]


def distance(a, b):
    return np.linalg.norm(np.asarray(a, np.float64) - np.asarray(b)) / np.linalg.norm(b)


def equal_to_separate(f, args):
    """Assert that the values and gradients of f, run without kernels, are those of f."""

    def scalar(run):
        return lambda args: sum((y.astype(jnp.float32) ** 2).sum() for y in jax.tree.leaves(run(*args)))

    found, expected = (jax.value_and_grad(scalar(run))(args) for run in (fused(f), f))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


VALUES = list(product(SHAPES, [jnp.bfloat16, jnp.float16]))
CHOSEN = [*product(SHAPES, [jnp.bfloat16]), (halves, jnp.float16), (biased, jnp.float16)]


@pytest.mark.parametrize(("f", "dtype"), keep(VALUES, CHOSEN), ids=lambda value: value.__name__)
def test_values_and_gradients_against_float64(f, dtype):
    args, (g,) = numbers(*SHAPES[f], dtype=dtype), numbers(SHAPES[f][0], dtype=dtype, seed=1)
    assert "custom_vjp_call" in primitives(fused(f), *args)  # else this compared a function with itself
    found = gradients(fused(f), args, g)
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(x, np.float64)) for x in (*args, g)]
        expected = jax.jit(partial(gradients, f))(wide[:-1], wide[-1])
    for a, unfused, b in zip(found, gradients(f, args, g), expected, strict=True):
        assert a.dtype == dtype
        assert distance(a, b) <= min(2 * BF16, distance(unfused, b))  # fewer results are rounded


@pytest.mark.parametrize("f", [biased, cut_then_biased, biased_then_cut], ids=lambda f: f.__name__)
def test_policies_of_checkpoints_see_what_a_forward_pass_computes(f):
    """No function with a derivative of its own is left, in which they see no product."""
    args, (g,) = numbers(*SHAPES[f]), numbers(SHAPES[f][0])
    backward = jax.make_jaxpr(partial(gradients, fused(f)))(args, g)
    assert not [one for one in operations(backward.jaxpr) if one.name.startswith("custom_vjp_call")]


def test_a_single_row_has_no_bias():
    """A bias of it would have the shape of an array."""
    args = numbers((1, K), *SHAPES[biased][1:])
    assert "custom_vjp_call" not in primitives(fused(biased), *args)
    equal_to_separate(biased, args)


def test_a_product_of_one_row_is_no_part():
    """A kernel would read it as an array of many rows."""

    def conditioned(x, c, w1, w2, w3):
        return (jax.nn.silu(x @ w1) * (c @ w2)) @ w3

    shapes = [(2, 64, 256), (1, 1, 256), (256, 512), (256, 512), (512, 256)]
    trace = jax.make_jaxpr(conditioned)(*(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    assert not Chains(trace.jaxpr, plain=True).of
    assert len(Chains(trace.jaxpr).of) == 1


@pytest.mark.parametrize("module", [nnx, linen], ids=["nnx", "linen"])
@pytest.mark.parametrize("approximate", [True, False], ids=["tanh", "erf"])
def test_layers_of_flax_are_found(module, approximate):
    """Two linear layers with biases, as they are: no pass over the hidden layer is left outside of the chain."""
    x = numbers((2, M, K))[0]
    if module is nnx:
        graph, weights = nnx.split(
            [nnx.Linear(*n, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16) for n in [(K, F), (F, K)]]
        )

        def f(weights, x):
            up, down = nnx.merge(graph, weights)
            return down(nnx.gelu(up(x), approximate=approximate))

    else:
        up, down = (linen.Dense(n, param_dtype=jnp.bfloat16) for n in (F, K))
        weights = up.init(jax.random.key(0), x), down.init(jax.random.key(1), jnp.ones((1, F), jnp.bfloat16))

        def f(weights, x):
            return down.apply(weights[1], nnx.gelu(up.apply(weights[0], x), approximate=approximate))

    wide = [eqn for eqn in jax.make_jaxpr(fused(f))(weights, x).eqns if eqn.outvars[0].aval.size == 2 * M * F]
    assert [eqn.primitive.name for eqn in wide if eqn.primitive.name != "reshape"] == ["dot_general"]


def test_float32_is_left_to_xla():
    args = numbers(*SHAPES[halves], dtype=jnp.float32)
    assert primitives(fused(halves), *args) == primitives(halves, *args)


def test_wide_results_are_left_alone():
    def f(x, w, down):
        return jax.lax.dot_general(jnp.tanh(x @ w), down, (((2,), (0,)), ((), ())), preferred_element_type=jnp.float32)

    args = numbers(*SHAPES[gelu])
    y = fused(f)(*args)
    assert y.dtype == jnp.float32
    assert (y == f(*args)).all()


def test_halves_of_a_sequence_of_two():
    """The length is the number of parts, too."""
    args, (g,) = numbers((3, 2, K), (K, 2 * F), (F, K)), numbers((3, 2, K), seed=1)
    for a, b in zip(gradients(fused(halves), args, g), gradients(halves, args, g), strict=True):
        assert distance(a, np.asarray(b, np.float64)) < 2 * BF16


def test_a_constant_result():
    found = fused(lambda *args: (squared(*args), 1.0))(*numbers(*SHAPES[squared]))
    assert found[1] == 1.0


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

    args = numbers(*SHAPES[gelu])
    assert (run(printed)(*args) == run(gelu)(*args)).all()
    jax.effects_barrier()
    assert capfd.readouterr().out.count("largest") == 1


def test_a_long_sum_of_products_is_found_in_one_walk():
    def doubled(x, w, down):
        y = x @ w
        for _ in range(2000):
            y = y + y
        return jnp.tanh(y) @ down

    assert len(Chains(jax.make_jaxpr(doubled)(*numbers(*SHAPES[gelu])).jaxpr).of) == 1


def test_results_that_are_no_arrays_and_errors_of_the_function_itself():
    """Both without a second trace."""
    traces = []

    def f(x):
        traces.append(x)
        return {"a": x @ x, "b": "text", "c": (1.0, None)}

    (x,) = numbers((K, K))
    found = fused(f)(x)
    assert (found["a"] == x @ x).all()
    assert (found["b"], found["c"]) == ("text", (1.0, None))
    with pytest.raises(TypeError, match="unsupported operand"):
        fused(lambda x: f(x) + 1)(x)
    assert len(traces) == 2


def used_elsewhere(x, w, down):
    hidden = jnp.tanh(x @ w)
    return hidden @ down + hidden.sum()


def product_used_elsewhere(x, w, down):
    y = x @ w
    return jnp.tanh(y) @ down + y.sum()


def returned(x, w, down):
    hidden = jnp.tanh(x @ w)
    return hidden @ down, hidden


def of_rows(x, w, down):
    return jax.nn.softmax(x @ w) @ down


def of_another_array(x, w, down):
    return (jnp.tanh(x @ w) * jnp.tile(x, 2)) @ down


def as_in_fp8(x, w, down):
    return jnp.tanh(x @ w).astype(jnp.float8_e4m3fn).astype(x.dtype) @ down


def as_in_fp16(x, w, down):
    return (x @ w).astype(jnp.float16).astype(x.dtype) @ down


def closed_over(x, w, down):
    return jax.jit(lambda y: y * np.arange(F, dtype=np.float32).astype(y.dtype))(x @ w) @ down


def with_itself(x, w, down):
    hidden = jnp.tanh(x[0, :K] @ w[:, :K])
    return hidden @ hidden


def with_its_own_maximum(x, w, down):
    y = x @ w
    return jnp.exp(y - y.max((0, 1), keepdims=True)) @ down


def with_a_wide_bias(x, w, down):
    return jnp.tanh((x @ w).astype(jnp.float32) + jnp.arange(F, dtype=jnp.float32)).astype(x.dtype) @ down


def with_two_precisions(x, w, down):
    hidden = jnp.tanh(x @ w)
    return hidden @ down + jnp.matmul(hidden, down, precision="highest")


def with_a_weight_that_waits(x, w, down):
    hidden = jnp.tanh(x @ w)
    return hidden @ (hidden @ down)[0, :, :1].repeat(F // M + 1, 0)[:F]


def cut_after_a_number_plus_a_product(x, w, down):
    scale, shift = jnp.split(1 + x @ w, 2, axis=-1)
    return x * scale + shift


def cut_after_a_product_plus_a_number(x, w, down):
    scale, shift = jnp.split(x @ w + 1, 2, axis=-1)
    return x * scale + shift


def cut_after_a_number_plus_an_array(x, w, down):
    scale, shift = jnp.split(1 + x, 2, axis=-1)
    return scale * shift


def cut_then_a_number(x, w, down):
    scale, shift = jnp.split(x @ w, 2, axis=-1)
    return x * (scale + 1) + (shift + 1)


def of_biases_alone(x, w, down):
    return jnp.tanh(w[:1]) @ down


def empty(x, w, down):
    return jnp.tanh(x @ w[:, :0]) @ down[:0]


ALONE = [
    used_elsewhere, product_used_elsewhere, returned, of_rows, of_another_array, as_in_fp8, as_in_fp16, closed_over,
    with_itself, with_its_own_maximum, with_a_wide_bias, with_two_precisions, with_a_weight_that_waits, of_biases_alone,
    cut_after_a_number_plus_a_product, cut_after_a_product_plus_a_number, cut_after_a_number_plus_an_array,
    cut_then_a_number, empty,
]  # fmt: skip


@pytest.mark.parametrize("f", ALONE)
def test_what_is_not_between_two_products_alone_is_left_alone(f):
    args = numbers(*SHAPES[gelu])
    assert "custom_vjp_call" not in primitives(fused(f), *args)
    equal_to_separate(f, args)


# ---------------------------------------------------------------- compiled for GPUs


OTHERS = [
    jax.lax.erf, lambda x: jnp.minimum(x, jnp.exp(x)) - 1, jnp.tanh, jax.nn.sigmoid, lambda x: jnp.maximum(x, 0) ** 2,
    jnp.exp2, lambda x: jnp.log1p(x * x), lambda x: jax.lax.rsqrt(1 + x * x), lambda x: (1 + x * x) ** 1.5,
    lambda x: jnp.abs(x) * jnp.sign(x), lambda x: jnp.sin(x) * jnp.cos(x),
    lambda x: jnp.log(2 + x * x) / (1 + jnp.exp(-x)), lambda x: jnp.sqrt(1 + x * x),
]  # fmt: skip
ACTIVATIONS = {
    "silu": jax.nn.silu,
    "exact gelu": partial(jax.nn.gelu, approximate=False),
    "in float32": lambda x: jnp.copy(jnp.square(x.astype(jnp.float32)).astype(x.dtype)),
    "all others": lambda x: sum(f(x) for f in OTHERS),  # one program: a GPU's compiler takes a second for each
}


def test_the_activations_below_use_every_elementwise_operation():
    wide = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)
    traces = (jax.make_jaxpr(partial(gradients_of, f))(wide, wide).jaxpr for f in ACTIVATIONS.values())
    used = {operation.name for trace in traces for operation in operations(trace)}
    assert used >= PRIMITIVES


def gradients_of(f, x, g):
    return gradients(f, [x], g)


@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.parametrize("name", keep(ACTIVATIONS, ["in float32"]))
def test_every_elementwise_operation_compiles_for_a_gpu(name):
    """Forward and backward: two kernels, and no other pass over an array as wide as the hidden layer."""
    activation, wide = ACTIVATIONS[name], jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)
    traced = jax.make_jaxpr(activation)(wide)
    assert all(is_elementwise(eqn, jnp.bfloat16) for eqn in traced.eqns)
    mesh = jzero.make_mesh(devices=gpu_devices("h100", 1))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    shapes = [
        jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=whole) for s in [(64, 128), (128, 512), (512, 128), (64, 128)]
    ]

    @jax.jit
    def step(x, w, down, g):
        return gradients(fused(lambda x, w, down: activation(x @ w) @ down), (x, w, down), g)

    text = step.lower(*shapes).compile().as_text()
    assert len(kernels(text)) == 2
    assert not passes_over(text, "64,512")


@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.parametrize("f", [biased, biased_exact], ids=lambda f: f.__name__)
def test_gradients_of_biases_need_no_pass_of_their_own(f):
    whole = jax.sharding.NamedSharding(jzero.make_mesh(devices=gpu_devices("h100", 1)), jax.P())
    sizes = {M: 32, K: 128, F: 1024}
    shapes = [tuple(sizes.get(n, n) for n in shape) for shape in [*SHAPES[f], (2, M, K)]]
    *args, g = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=whole) for shape in shapes)
    text = jax.jit(partial(gradients, fused(f))).lower(args, g).compile().as_text()
    assert len(kernels(text)) == 2
    assert not passes_over(text, "(?:2,32|64),(?:1,)?1024")
    assert not re.search(
        r"\n\s+%\S*reduce\S* = .* fusion\(.*bf16\[(?:2,32|64),(?:1,)?1024\]", text.split("\nENTRY ")[1]
    )


@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.parametrize(("gpu", "kernel"), keep([("t4", False), ("a100", True)], [("t4", False)]))
def test_gpus_before_ampere_have_no_kernels(gpu, kernel):
    mesh = jzero.make_mesh(devices=gpu_devices(gpu, 1))
    whole = jax.sharding.NamedSharding(mesh, jax.P())
    shapes = [jax.ShapeDtypeStruct(s, jnp.float16, sharding=whole) for s in [(64, 128), (128, 512), (512, 128)]]
    text = jax.jit(fused(gelu)).lower(*shapes).compile().as_text()
    assert bool(kernels(text)) == kernel


def kernels(text):
    return re.findall(r'custom_call_target="__gpu\$xla\.gpu\.triton".*op_name="[^"]*/map_parts', text)


def passes_over(text, shape):
    """The fusions of the entry that write an array of this shape."""
    entry = text.split("\nENTRY ")[1]
    loops = rf"= \(?bf16\[{shape}\].* fusion\(.*kind=k(?:Loop|Input)"  # kCustom: products
    return [line for line in entry.splitlines() if re.search(loops, line)]


ROWS, LENGTH, WIDTH, HIDDEN, LAYERS = 2, 128, 128, 512, 2
MODEL = jzero.from_flax(
    lambda rngs: Llama(LlamaConfig(LAYERS, WIDTH, 2, 2, HIDDEN, vocab_size=256, attention="xla"), rngs=rngs)
)


@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.usefixtures("no_compilation_cache")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_a_step_has_two_kernels_for_each_layer(stage):
    config = {
        "train_batch_size": 2 * ROWS, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}, "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }  # fmt: skip
    mesh = jzero.make_mesh(zero=2, devices=gpu_devices("h100", 2))
    step = jzero.make_train_step(MODEL, config, mesh=mesh)
    tokens = jax.ShapeDtypeStruct((2 * ROWS, LENGTH), jnp.int32)
    text = step.lower({"inputs": tokens, "labels": tokens}).compile().as_text()
    assert len(kernels(text)) == 2 * LAYERS
    assert not passes_over(text, rf"(?:{ROWS},{LENGTH}|{ROWS * LENGTH}),(?:1,)?{HIDDEN}")
