"""Each rule of `jzero.spread`, with arrays divided in any way: values and gradients of the plain function."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.sampling import some
from helpers.spreading import REST, check, forms
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax


def attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def loop(x, w, xs):
    def body(carry, item):
        carry = jnp.tanh(carry @ w + item)
        return carry, carry.sum(-1)

    return lax.scan(body, x, xs)


def shifted(x, i):
    return jnp.sin(x) + i


def backward(saved, g):
    x, mean = saved
    return 2 * g * jnp.cos(x) + mean, None  # not its derivative: the custom one must be used


own_backward = jax.custom_vjp(shifted)
own_backward.defvjp(lambda x, i: (shifted(x, i), (x, x.mean(-1, keepdims=True))), backward)


def calls_itself(x):
    return jnp.tanh(x @ x.swapaxes(-1, -2))


recursive = jax.custom_vjp(calls_itself)  # the usual form: the forward pass calls the function, which has it
recursive.defvjp(lambda x: (recursive(x), x), lambda x, g: jax.vjp(calls_itself, x)[1](2 * g))


def by_table(x):
    return x * jnp.arange(8.0)


with_a_table = jax.custom_vjp(by_table)  # a closed-over array, as QLoRA's table of values
with_a_table.defvjp(lambda x: (by_table(x), None), lambda _, g: (2 * g * jnp.arange(8.0),))


def conv(x, w, groups=1):
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=groups)


depthwise = partial(conv, groups=4)


def turns(x, w):
    """Turns until a condition holds that needs a sum over all devices; no reverse derivative."""
    x, w = lax.stop_gradient((x, w))
    return lax.while_loop(lambda c: (c[0] < 3) & (c[1].sum() < 100), lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))


def pooled(x):
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1), (1, 2, 1), "VALID")


DISTINCT = np.array([0, 3])  # of updates of one element, which comes last is not defined


def slope(f):
    """A gradient inside of the function: its operations, transposes among them, run by rules."""
    return lambda x, *rest: jax.grad(lambda x: 0.1 * (f(x, *rest) ** 2).sum())(x)


CASES = {  # name: (function, shapes of floats, (shape, limit) of integers)
    "elementwise": (
        lambda x, y: jnp.where(x > 0, jnp.tanh(x) * lax.rsqrt(x**2 + 1), jnp.clip(y, -0.5, 0.5)) - x / 3 + y,
        [(4, 8, 2), (4, 8, 2)], [],
    ),
    "broadcast": (lambda x, y: x * y + 2.0, [(4, 8, 4), (8, 1)], []),
    "cast": (lambda x: x.astype(jnp.float16).astype(jnp.float32), [(4, 8, 4)], []),
    "barrier": (lambda x, y: lax.optimization_barrier((x, y))[0], [(4, 8), (4,)], []),
    "two matmuls": (lambda x, w, v: x + jax.nn.gelu(x @ w) @ v, [(2, 8, 4), (4, 8), (8, 4)], []),
    "batched": (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), [(4, 2, 4), (4, 4, 8)], []),
    "contracted": (lambda x, y: jnp.einsum("bsd,bsf->df", x, y), [(2, 4, 4), (2, 4, 8)], []),
    "attention": (attention, [(4, 4, 4, 2), (4, 4, 4, 2), (4, 4, 4, 2)], []),
    "grouped attention": (attention, [(2, 4, 4, 2), (2, 4, 2, 2), (2, 4, 2, 2)], []),
    "merge": (lambda x: x.reshape(8, 16), [(2, 4, 4, 4)], []),
    "part": (lambda x: x.reshape(2, 2, 1, 8, 2), [(4, 16)], []),
    "regroup": (lambda x: x.reshape(4, 6), [(8, 3)], []),
    "transpose": (lambda x: x.transpose(1, 2, 0) * 2, [(2, 4, 8)], []),
    "squeeze": (lambda x: x[:, 0] + x.squeeze(1), [(4, 1, 8)], []),
    "sum": (lambda x: (x.sum(1), x.mean(), x.sum((0, 2))), [(2, 4, 8)], []),
    "max": (lambda x: (x.max(-1), x.min(), jnp.any(x > 1), x.prod(0)), [(4, 8)], []),
    "argmax": (lambda x: (x.argmax(1), x), [(4, 8)], []),
    "cumsum": (lambda x: (jnp.cumsum(x, 1), lax.cummax(x, 0)), [(4, 8)], []),
    "sort": (lambda x: (jnp.sort(x, 1), jnp.flip(x, 0), lax.top_k(x, 2)[0]), [(4, 8)], []),
    "concatenate": (lambda x, y: jnp.concatenate([x, y], 1), [(4, 8), (4, 4)], []),
    "stack": (lambda x, y: jnp.stack([x, y], 1), [(4, 8), (4, 8)], []),
    "split": (lambda x: [p * p for p in jnp.split(x, [4, 6], -1)], [(2, 4, 8)], []),
    "slice": (lambda x: x[:, 1:5:2] * x[:, :2], [(4, 8)], []),
    "dynamic slice": (lambda x: lax.dynamic_slice(x, (1, 0), (2, 8)), [(4, 8)], []),
    "dynamic update": (lambda x, y: lax.dynamic_update_slice(x, y, (1, 0)), [(4, 8), (2, 8)], []),
    "pad": (lambda x: jnp.pad(x, ((0, 0), (1, 2))), [(4, 8)], []),
    "embedding": (lambda t, i: t[i], [(8, 4)], [((4, 4), 8)]),
    "embedding, filled": (lambda t, i: jnp.nan_to_num(jnp.take(t, i, 0, mode="fill")), [(8, 4)], [((4, 4), 12)]),
    "embedding, clipped": (lambda t, i: jnp.take(t, i, 0, mode="clip"), [(8, 4)], [((4, 4), 12)]),
    "elements": (lambda x, i, j: jnp.asarray(x)[i, j], [(4, 8, 2)], [((4, 4), 4), ((4, 4), 8)]),
    "elements, filled": (
        lambda x, i, j: jnp.asarray(x).at[i, j].get(mode="fill", fill_value=3.0), [(4, 8, 2)],
        [((4, 4), 6), ((4, 4), 12)],
    ),
    "elements of columns": (lambda x, i, j: jnp.asarray(x)[i, :, j], [(4, 8, 2)], [((4,), 4), ((4,), 2)]),
    "along": (lambda x, i: jnp.take_along_axis(x, i, 1), [(4, 8)], [((4, 2), 8)]),
    "scatter": (lambda x, i: jnp.asarray(x).at[i].add(1.0), [(8, 4)], [((4,), 8)]),
    "scatter, many": (lambda x, y, i: jnp.asarray(x).at[i].add(y), [(4, 8), (4, 4, 8)], [((4, 4), 5)]),
    "scatter, columns": (lambda x, y, i: jnp.asarray(x).at[:, i[0] + DISTINCT].set(y), [(4, 8), (4, 2)], [((1,), 8)]),
    "scatter, largest": (lambda x, y, i: jnp.asarray(x).at[i].max(y), [(8, 4), (2, 4)], [((2,), 8)]),
    "scatter, one": (lambda x, y, i: jnp.asarray(x).at[i[0]].set(y), [(4, 8, 2), (8, 2)], [((1,), 4)]),
    "gradient of a lookup": (slope(lambda t, i: t[i]), [(8, 4)], [((4, 4), 8)]),
    "gradient of along": (slope(lambda x, i: jnp.take_along_axis(x, i, 1)), [(4, 8)], [((4, 2), 8)]),
    "pooling": (
        lambda x: (pooled(x), lax.reduce_window(x, 0.0, lax.add, (2, 1, 1), (1, 1, 1), "SAME")), [(4, 8, 4)], [],
    ),
    "gradient of pooling": (slope(pooled), [(4, 8, 4)], []),
    "depthwise": (depthwise, [(4, 4, 4, 4), (3, 3, 1, 8)], []),
    "gradient of depthwise": (slope(depthwise), [(4, 4, 4, 4), (3, 3, 1, 8)], []),
    "upwards": (lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"), [(4, 4, 4, 4), (2, 2, 4, 8)], []),
    "gradient of convolution": (slope(conv), [(4, 4, 4, 4), (3, 3, 4, 8)], []),
    "turns": (turns, [(2, 8, 4), (4, 4)], []),
    "switch": (
        lambda x, w, i: lax.switch(i[0], [lambda x: x @ w, lambda x: 2 * x, lambda x: jnp.ones_like(x)], x),
        [(2, 8, 4), (4, 4)], [((1,), 3)],
    ),
    "fourier transform": (lambda x: jnp.fft.fft(x, axis=1).imag, [(8, 8, 8)], []),
    "convolution": (conv, [(4, 4, 4, 4), (3, 3, 4, 8)], []),
    "cross-entropy": (optax.softmax_cross_entropy_with_integer_labels, [(4, 4, 8)], [((4, 4), 8)]),
    "custom_jvp": (lambda x, w: jax.nn.relu(x @ w), [(2, 4, 4), (4, 8)], []),
    "custom_vjp": (own_backward, [(4, 8)], [((4, 8), 5)]),
    "recursive custom_vjp": (recursive, [(4, 8, 2)], []),
    "custom_vjp with a table": (with_a_table, [(4, 8)], []),
    "checkpoint": (jax.checkpoint(lambda x, w: jnp.sin(x @ w)), [(2, 4, 4), (4, 8)], []),
    "scan": (loop, [(2, 8, 4), (4, 4), (4, 2, 8, 4)], []),
    "cond": (lambda x: lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), [(4, 8)], []),
}  # fmt: skip


def example(data, name):
    f, floats, integers = CASES[name]
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in floats]
    arrays += [rng.integers(0, limit, shape).astype(np.int32) for shape, limit in integers]
    drawn = [data.draw(forms(x.shape, integer=x.dtype == np.int32)) for x in arrays]
    tolerance = 3e-3 if name == "cast" else 2e-5
    check(f, arrays, drawn, data.draw(st.sampled_from([None, REST])), tolerance)


@settings(max_examples=8)
@given(st.data())
def test_rules(data):
    example(data, data.draw(st.sampled_from(list(CASES))))


@pytest.mark.parametrize("name", some(CASES, []))
@settings(max_examples=20)
@given(st.data())
def test_each_rule(name, data):
    example(data, name)


@jax.custom_vjp
def clipped(x):
    """The identity, with a backward pass that is not linear: it must see the gradient, not a device's share of it."""
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -0.1, 0.1),))


@jax.custom_vjp
def with_largest(x):
    return x, x.argmax()


with_largest.defvjp(lambda x: (with_largest(x), None), lambda _, g: (jnp.clip(g[0], -0.1, 0.1),))


@jax.custom_vjp
def power(z):
    """|z|^2 of complex numbers."""
    return jnp.abs(z) ** 2


power.defvjp(lambda z: (power(z), z), lambda z, g: (2 * jnp.clip(g, -0.1, 0.1) * z.conj(),))


def climb(x):
    return lax.while_loop(lambda x: x < 5, lambda x: x + 1, lax.stop_gradient(x))


WHOLE, DIVIDED = (None, None), (0, None)
ROWS = np.array([1, 2, 3, -1, 4, -5, -6, -7], np.float32)


@pytest.mark.parametrize(
    ("f", "x", "form"),
    [
        (lambda x: clipped(2 * x), ROWS, WHOLE),
        (jax.jit(lambda x: clipped(2 * x)), ROWS, WHOLE),
        (lambda x: lax.scan(lambda c, y: (clipped(c + y), y), jnp.zeros(()), x)[0], ROWS, WHOLE),
        (lambda x: clipped(2 * x), ROWS, DIVIDED),
        (lambda x: with_largest(2 * x)[0], ROWS, WHOLE),  # with an integer among its results
        (lambda x: with_largest(2 * x)[0], ROWS, DIVIDED),
        (lambda x: power(lax.complex(x, 2 * x)), ROWS, DIVIDED),
        (lambda x: turns(x.reshape(2, 4), jnp.eye(4))[1], ROWS, DIVIDED),  # all take as many turns
        (jax.vmap(climb), ROWS, DIVIDED),  # each row takes turns of its own
        (lambda x: lax.associative_scan(jnp.multiply, x), ROWS, DIVIDED),  # it makes arrays of size 0
        (lambda x: lax.cond(x.sum() < 0, clipped, jnp.sin, 2 * x), ROWS, WHOLE),
        (lambda x: lax.cond(x.sum() < 0, clipped, jnp.sin, 2 * x), ROWS, DIVIDED),
        (lambda x: ((x > 0).sum() // 4) * x.sum(), ROWS, DIVIDED),  # the parts' quotients add up to less
        (lambda x: x.max(), np.array([1, 1, 1, 0], np.float32), DIVIDED),  # equal elements on two devices
        (lambda x: 2 * jnp.asarray(x).at[jnp.array([0, 5])].get(unique_indices=True, mode="clip"), ROWS, DIVIDED),
    ],
)
def test_what_shares_and_parts_could_get_wrong(f, x, form):
    check(f, [x], [(form, False)])
