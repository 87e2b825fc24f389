"""What a layer keeps for its backward pass, against every choice that there is, and against bytes counted by hand."""

import re
from itertools import chain, combinations, pairwise, product
from math import prod

import jax
import jax.extend.core.primitives
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler
from helpers.named_models import model_of
from helpers.programs import h100s, pairs, traced
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import io_callback
from jax.extend.core import Literal

import jzero
from jzero.config.sections import ActivationCheckpointing
from jzero.kernels.trace import elementwise_primitives
from jzero.passes.remat import Remat, leanly
from jzero.planner import gpu_devices
from jzero.tracing.chunk import Chunk
from jzero.tracing.equations import Equations
from jzero.tracing.residuals import fewest_bytes, is_cheap
from models.llama import LlamaConfig


def bytes_of(variables):
    return sum(prod(v.aval.shape) * v.aval.dtype.itemsize for v in variables)


def can_compute(program, wanted, given_ones):
    """Whether cheap equations compute all wanted variables from the given ones."""
    known = set(given_ones)
    for eqn in program.eqns:
        if is_cheap(eqn) and all(isinstance(v, Literal) or v in known for v in eqn.invars):
            known.update(eqn.outvars)
    return known.issuperset(wanted)


def minimum(program, wanted, free):
    variables = [*program.inputs, *(v for eqn in program.eqns for v in eqn.outvars)]
    sets = chain.from_iterable(combinations(variables, n) for n in range(len(variables) + 1))
    return min(bytes_of(set(some) - set(free)) for some in sets if can_compute(program, wanted, {*some, *free}))


def test_elementwise_functions_of_one_or_two_arrays_are_in_the_table():
    """JAX 0.11 has a primitive for tanh's derivative; before the table knew it, layers with GELU kept it too."""
    seen, missing, x = set(), set(), np.random.default_rng(0).uniform(0.1, 0.9, (3, 4)).astype(np.float32)
    for name, n in product(dir(jax.extend.core.primitives), (1, 2)):
        f = getattr(jax.lax, name.removesuffix("_p"), None)
        try:
            (eqn,) = jax.make_jaxpr(f)(*[x] * n).eqns
        except (TypeError, ValueError):  # f takes other arguments
            continue
        seen.add(eqn.primitive.name)
        if eqn.primitive.name not in elementwise_primitives() and getattr(eqn.outvars[0].aval, "shape", ()) == x.shape:
            turned = f(*[x[::-1, ::-1]] * n)
            missing |= {name} if np.array_equal(turned, f(*[x] * n)[::-1, ::-1], equal_nan=True) else set()
    assert seen >= {"add", "tanh", "erf"}
    assert not missing


UNARY = [
    jnp.exp,
    lambda x: x.astype(jnp.bfloat16),
    lambda x: jnp.sort(x, axis=0),  # not cheap
    lambda x: x.sum(1, keepdims=True) * jnp.ones((1, 4), x.dtype),  # a sum is not cheap
    lambda x: x[:2],
    lambda x: x > 0,
    lambda x: jnp.concatenate([x, x]),
    lambda x: x * jax.lax.reshape(2.0, (1, 1)),  # a view of a number
]
STEPS = st.lists(st.tuples(st.integers(0, len(UNARY)), st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5)


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, wanted=st.sets(st.integers(0, 9), min_size=1, max_size=3), free=st.booleans())
def test_no_set_has_fewer_bytes(steps, wanted, free):
    def f(x, w):
        made = [x, w]
        for op, a, b in steps:
            a, b = made[a % len(made)], made[b % len(made)]
            if op < len(UNARY):
                made.append(UNARY[op](a))
            elif a.shape == b.shape:
                made.append(a * b)
        return [made[i % len(made)] for i in sorted(wanted)]

    program = Equations(jax.make_jaxpr(f)(jnp.ones((4, 4)), jnp.ones((4, 4))))
    free_ones = program.inputs[1:] if free else []
    chosen = fewest_bytes(program, program.outputs, free_ones)
    assert can_compute(program, program.outputs, {*chosen, *free_ones})
    if len(program.eqns) <= 11:
        assert bytes_of(chosen) == minimum(program, program.outputs, free_ones)


def kept(f, *args):
    program = Equations(jax.make_jaxpr(f)(*args))
    return [v.aval.str_short() for v in fewest_bytes(program, program.outputs, [])]


@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.parametrize("length", [64, 65])
def test_what_attention_reads_is_kept_as_it_is(length):
    """Not the product that it was cut from; with an odd length, which cuDNN refuses, padded."""

    def heads(x, w):
        return [part.squeeze(2) for part in jnp.split(jnp.einsum("bsd,dphc->bsphc", x, w), 3, axis=2)]

    def attention(x, w):
        return jzero.attention(*heads(x, w), implementation="cudnn")

    x, w = jnp.ones((2, length, 16), jnp.bfloat16), jnp.ones((16, 3, 2, 64), jnp.bfloat16)
    mesh = jzero.make_mesh(devices=gpu_devices("h100", 1))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.make_jaxpr(lambda x, w: jax.vjp(attention, x, w))(x, w)
    program = Equations(traced)
    read = next(eqn.invars[:3] for eqn in program.eqns if eqn.primitive.name.startswith("dot_product_attention"))
    assert {v.aval.shape for v in read} == {(2, 2 * -(-length // 2), 2, 64)}
    assert set(fewest_bytes(program, program.outputs, program.inputs)) >= set(read)
    assert kept(heads, x, w) == [f"bfloat16[2,{length},3,2,64]"]  # no kernel reads these


def lean(block, policy=None):
    config = policy and ActivationCheckpointing(policy=policy)
    layer = leanly(lambda pair: pair[0], block, Remat(config, 0, False), unrolled=True, layer=True)
    return lambda w, x: layer((w, ()), x, None)[0]


def test_an_effect_happens_once():
    calls = []

    def block(w, x, key):
        factor = io_callback(lambda: calls.append(0) or np.float32(len(calls)), jax.ShapeDtypeStruct((), jnp.float32))
        return jnp.sin(x @ w) * factor, ()

    w, x = np.eye(4, dtype=np.float32), np.ones((3, 4), np.float32)
    found = jax.grad(lambda w: lean(block)(w, x).sum())(w)
    assert len(calls) == 1
    np.testing.assert_allclose(found, jax.grad(lambda w: jnp.sin(x @ w).sum())(w), rtol=1e-6)


def test_the_gradient_of_complex_activations():
    def block(w, x, key):
        return jnp.sin(x @ w) + x * jnp.exp(1j * x.real), ()

    def gradient(layer):
        return jax.jit(jax.grad(lambda w: (jnp.abs(layer(w, layer(w, x))) ** 2).sum()))(np.eye(4, dtype=np.float32))

    x = np.linspace(-1, 1, 12).reshape(3, 4).astype(np.complex64)
    found, expected = gradient(lean(block)), gradient(lambda w, x: block(w, x, None)[0])
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_jit_in_a_layer_hides_nothing():
    def feed_forward(w, x, key):
        y = jnp.sin(x @ w)
        return (jnp.sort(y) * y) @ w, ()

    def kept(block):
        _, pullback = jax.eval_shape(lambda w, x: jax.vjp(lean(block, "matmuls"), w, x), w, x)
        return sorted(str(x) for x in jax.tree.leaves(pullback))

    w, x = jnp.ones((8, 8)), jnp.ones((4, 8))
    assert kept(jax.jit(feed_forward)) == kept(feed_forward)


ROWS, LENGTH, WIDTH, HIDDEN, HEADS, KV_HEADS, VOCAB, LAYERS = 2, 256, 256, 512, 4, 2, 512, 2


def traced_for_gpus():
    shape = LlamaConfig(LAYERS, WIDTH, HEADS, KV_HEADS, HIDDEN, vocab_size=VOCAB, attention="cudnn")
    more = {"train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": 3}}
    return traced(model_of(shape), h100s(zero=2), pairs(2 * ROWS, LENGTH), {}, **more)[1]


def test_bytes_of_a_llamas_layer(monkeypatch):
    """Per token: the layer's input, queries, keys and values, attention's result, the sum after it, gate and up."""
    chunks, make = [], Chunk.__init__

    def note(self, *args, **options):
        make(self, *args, **options)
        chunks.append(self)

    monkeypatch.setattr(Chunk, "__init__", note)
    traced_for_gpus()
    assert len(chunks) == LAYERS
    head = WIDTH // HEADS
    numbers = 3 * WIDTH + (HEADS + 2 * KV_HEADS) * head + 2 * HIDDEN
    float32 = HEADS + 2  # attention's log-sum-exp, and a factor of each norm
    for chunk in chunks:
        assert bytes_of(chunk.stashed) == ROWS * LENGTH * (2 * numbers + 4 * float32)


@pytest.mark.slow
@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.usefixtures("no_compilation_cache")
def test_a_layers_weight_gradients_come_before_the_layer_below():
    """In the compiled program, whose text is in the order of execution."""
    entry = traced_for_gpus().lower().compile().as_text().split("\nENTRY ")[1]
    weights = {f"{WIDTH},{2 * HIDDEN}", f"{2 * HIDDEN},{WIDTH}"}  # of gate and up
    products = [re.findall(r"bf16\[([\d,]+)\]", line)[0] for line in entry.splitlines() if "$lt$matmul" in line]
    assert len(products) >= 12 * LAYERS, products
    at = [i for i, shape in enumerate(products) if shape in weights]
    assert len(at) == LAYERS
    assert all(b - a >= 6 for a, b in pairwise(at)), products  # the other products of a layer
