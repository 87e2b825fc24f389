"""The kernels of softmax cross-entropy and of elementwise functions, and their own erf and erfc, against float64."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from helpers.cuda import on_gpu
from jax.experimental import pallas as pl
from test_fused import BF16, compiled, numbers, passes_over

from jzero.kernels import softmax
from jzero.kernels.fusion import parts
from jzero.kernels.fusion.elementwise import Elementwise, erfc
from jzero.kernels.fusion.parts import map_parts
from jzero.pipeline.vocab_parallel import cross_entropy
from jzero.planner import gpu_devices
from jzero.tracing.chunk import Chunk

EPS = {jnp.float32: 2e-6, jnp.bfloat16: 2.0**-8, jnp.float16: 2.0**-11}


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", partial(pl.pallas_call, interpret=True))


def rows(*shape, dtype):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, shape[-1], shape[:-1])
    labels.reshape(-1)[::4] = -1
    logits = (4 * rng.normal(size=shape)).astype(dtype)
    return logits, labels.astype(np.int32), rng.normal(size=shape[:-1]).astype(np.float32)


def exact(logits, labels, size, g):
    """The maxima, the logarithms of the sums of exp(x - maximum), the labels' logits, the gradient: float64."""
    x = np.asarray(logits, np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        x[..., size:] = -np.inf
        highest = x.max(-1, keepdims=True)
        log_total = np.log(np.exp(x - highest).sum(-1, keepdims=True))
        hit = np.arange(x.shape[-1]) == np.asarray(labels)[..., None]
        picked = np.where(hit, x, 0).sum(-1)
        dx = (np.exp(x - highest - log_total) - hit) * np.asarray(g, np.float64)[..., None]
    dx[..., size:] = 0
    return highest[..., 0], log_total[..., 0], picked, dx


@jax.jit
def computed(logits, labels, size, g):
    """By rows, and in tiles: the maxima, the sums, the labels' logits, the gradient."""
    found = []
    for sums, gradient in (
        (softmax.row_sums, softmax.row_gradient),
        (softmax.tiled_sums, lambda *args: softmax.tiled_gradient(*args)[0]),
    ):
        highest, total, picked = sums(logits, labels, size)
        found.append((highest, total, picked, gradient(logits, labels, size, highest, jnp.log(total), g)))
    return found


def check(logits, labels, g, size):
    expected_highest, log_total, expected_picked, expected = exact(logits, labels, size, g)
    for highest, total, picked, dx in computed(logits, labels, np.int32(size), g):
        np.testing.assert_array_equal(np.asarray(highest, np.float64), expected_highest)
        np.testing.assert_allclose(np.log(total), log_total, rtol=1e-6, atol=2e-6)
        np.testing.assert_array_equal(np.asarray(picked, np.float64), expected_picked)
        assert dx.dtype == logits.dtype
        eps = EPS[logits.dtype.type]
        np.testing.assert_allclose(np.asarray(dx, np.float64), expected, rtol=2 * eps, atol=1e-5 * eps + 1e-7)


# In half precision one shape within a tile and one beyond it, both with padding.
@pytest.mark.parametrize(
    ("shape", "size", "dtype"),
    [
        ((3, 1), 1, jnp.float32),
        ((4, 8200), 8193, jnp.float32),
        ((3, 8192), 8192, jnp.float32),
        ((4, 8200), 8193, jnp.bfloat16),
        ((2, 3, 8), 5, jnp.float16),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else str(value),
)
def test_against_float64(shape, size, dtype):
    check(*rows(*shape, dtype=dtype), size)


@pytest.mark.parametrize(("bad", "columns"), [(np.nan, 1), (np.inf, 8100), (-np.inf, 8100)], ids=str)
def test_rows_that_are_not_finite_stay_alone(bad, columns):
    """A NaN or +inf makes its own row NaN; -inf is a logit with probability 0, also at the start of a row."""
    logits, labels, g = rows(4, 8200, dtype=jnp.bfloat16)
    logits[1, :columns] = bad
    kept = [0, 1, 2, 3] if bad == -np.inf else [0, 2, 3]
    _, log_total, _, of_logits = exact(logits, labels, 8200, g)
    for _, total, _, dx in computed(logits, labels, np.int32(8200), g):
        total, dx = np.asarray(total), np.asarray(dx, np.float64)
        np.testing.assert_allclose(np.log(total)[kept], log_total[kept], rtol=1e-6)
        assert np.isfinite(dx[kept]).all()
        np.testing.assert_allclose(dx[kept], of_logits[kept], rtol=2**-7, atol=1e-6)
        assert len(kept) == 4 or (np.isnan(total[1]) and np.isnan(dx[1]).all())


@partial(jax.jit, static_argnums=0)  # operation by operation it is many programs
def losses_and_gradient(f, logits, labels, g):
    losses, pull = jax.vjp(lambda logits: f(logits, labels), logits)
    return losses, pull(g)[0]


@pytest.mark.parametrize("offset", [1e7, -1e7])
def test_a_row_far_from_zero(offset):
    """Only differences of logits count; a sum of maximum and logarithm would be rounded as numbers of its size are."""
    logits, labels, g = rows(4, 8200, dtype=jnp.float32)
    logits = logits + np.float32(offset)
    check(logits, labels, g, 8199)
    highest, log_total, picked, expected = exact(logits, labels, 8200, g)
    losses, dx = losses_and_gradient(softmax.row_losses, logits, labels, g)
    counted = labels >= 0
    np.testing.assert_allclose(losses[counted], (log_total - (picked - highest))[counted], rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(dx, expected, rtol=4e-6, atol=2e-7)


def test_a_row_in_which_no_column_counts():
    logits, labels, g = rows(3, 1, dtype=jnp.float32)
    for highest, total, _, _ in computed(logits, labels, np.int32(0), g):
        assert np.isfinite(highest).all()  # a stage whose words are all padding adds nothing
        assert (np.asarray(total) == 0).all()


def test_what_the_kernel_does_not_take():
    shaped, gpu = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16), gpu_devices("h100", 1)[0]
    labels = jax.ShapeDtypeStruct((4,), jnp.int32)
    chosen = {V: softmax._kernel([shaped((4, V)), labels], [labels], gpu) is not None for V in (50304, 30522, 0)}
    assert chosen == {50304: True, 30522: False, 0: False}
    assert softmax._kernel([shaped((64,))], [], gpu) is None
    assert softmax._kernel([shaped((4, 64))], [], gpu_devices("t4", 1)[0]) is None


@on_gpu
def test_a_loss_on_a_gpu_is_two_kernels(monkeypatch):
    """And nothing else reads or writes an array as wide as the logits, but the products."""
    monkeypatch.undo()
    V = 5008

    def step(x, head, labels):
        return jax.value_and_grad(lambda x, head: cross_entropy(x, head, labels, vocab_size=V - 3).sum, (0, 1))(x, head)

    text = compiled(step, (2, 64, 128), (128, V), ((2, 64), jnp.int32))
    kernels = re.findall(r'custom_call_target="__gpu\$xla\.gpu\.triton".*op_name="[^"]*/(softmax_\w+)', text)
    assert sorted(kernels) == ["softmax_gradient", "softmax_sums"]
    assert not passes_over(text, f"(?:2,64|128),{V}", dtype="")


# ------------------------------------------------------------------------------------------- elementwise functions


def mixed(a, b, c):
    return [a * jax.nn.sigmoid(b), b - c, jnp.exp(-c) * a]


def with_row(a, b, c, bias):
    return [*mixed(a, b + bias, c), jnp.sum(a * c, 0, keepdims=True)]


def close(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=BF16, atol=1e-6)


# The last one has several tiles and several programs for each column; without sums a program has one tile.
@pytest.mark.parametrize(("m", "n", "row"), [(96, 1024, False), (320, 2048, True)])
def test_the_kernel_in_pallas_interpreter(m, n, row):
    *xs, bias = numbers((m, 2, n), (m, 1, n), (1, 1, n))
    f, counts, xs = (with_row, (1, 2, 1), [*xs, bias]) if row else (mixed, (1, 2), xs)
    results = [(m, 1, n), (m, 2, n), (1, 1, n)][: len(counts)]
    assert parts.supports_elementwise([x.shape for x in xs], results)
    found, plain = jax.jit(lambda *xs: (parts.tiled_map_parts(f, *xs, results=results), map_parts(f, xs, counts)))(*xs)
    close(found, plain)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, jnp.bfloat16) for x in plain]
    a, b, c = (np.asarray(x, np.float64) for x in (xs[0][:, 0], xs[0][:, 1], xs[1][:, 0]))
    b = b + np.asarray(bias[0, 0], np.float64) if row else b
    np.testing.assert_allclose(np.asarray(found[0][:, 0], np.float64), a / (1 + np.exp(-b)), rtol=BF16, atol=1e-6)
    if row:
        np.testing.assert_allclose(np.asarray(found[2][0, 0], np.float64), (a * c).sum(0), rtol=BF16, atol=1e-5)


@pytest.mark.parametrize("buffers", [{0: 2, 1: 2}, {1: 3}], ids=str)
def test_the_kernel_reads_and_writes_slots(buffers):
    """Of buffers of so many slots: the other slots stay, and the results are those of the arrays."""
    m, n, counts = 96, 1024, [1, 2]
    xs, results = numbers((m, 2, n), (m, 1, n)), [(m, p, n) for p in counts]
    eqn = jax.make_jaxpr(lambda *xs: map_parts(mixed, xs, counts))(*xs).eqns[-1]
    whole = {i: np.stack([xs[i] + xs[i].dtype.type(k) for k in range(1, slots + 1)]) for i, slots in buffers.items()}

    @jax.jit
    def run(slot, xs, whole):
        kernel, in_slot = partial(parts.tiled_map_parts, mixed, results=results, index=slot), parts.map_parts_in_slot
        there = [whole[i][slot] if i in whole else x for i, x in enumerate(xs)]
        reads = kernel(*(whole.get(i, x) for i, x in enumerate(xs))), in_slot(eqn, xs, slot, whole, {})[0]
        writes = kernel(*xs, *whole.values(), copied=(*whole,))[len(counts) :], in_slot(eqn, xs, slot, {}, whole)[1]
        return reads, writes, map_parts(mixed, there, counts)

    for slot in range(max(buffers.values())):
        reads, writes, expected = run(np.int32(slot), xs, whole)
        for found in reads:
            close(found, expected)
        new = [buffer.copy() for buffer in whole.values()]
        for i, buffer in zip(whole, new, strict=True):
            buffer[slot] = xs[i]
        for found in writes:
            jax.tree.map(np.testing.assert_array_equal, found, new)


def test_a_chunk_reads_and_writes_its_slot():
    """As it does with arrays beside the buffers; what waits in other slots stays."""

    def layers(weights, state, x, context):
        for gate_up, down in weights[0]:
            gate, up = jnp.split(x @ gate_up, 2, axis=-1)
            x = x + (jax.nn.silu(gate) * up) @ down
        return x, state

    *weights, x, dy = numbers(*[(16, 128), (64, 16)] * 2, *[(4, 8, 16)] * 2)
    operands = ([weights[:2], weights[2:]], []), (), x, ()
    chunk = Chunk(layers, operands)
    (y, _), kept = jax.jit(chunk.forward)(*operands)
    gradients = jax.jit(lambda kept: chunk.backward(operands[0], (), kept, dy))(kept)

    def traced(f, stash):
        trace = jax.jit(f).trace(stash)
        assert [eqn.primitive.name for eqn in trace.jaxpr.eqns].count("map_parts_in_slot") == 2
        return trace.lower().compile()(stash)

    stash = [np.full((3, *x.shape), 7, x.dtype) for x in kept]
    (found, _), stash = traced(lambda stash: chunk.forward_into(stash, jnp.int32(1), *operands), stash)
    np.testing.assert_array_equal(found, y)
    for buffer, expected in zip(stash, kept, strict=True):
        new = np.full_like(buffer, 7)
        new[1] = expected
        np.testing.assert_array_equal(buffer, new)
    back = traced(lambda stash: chunk.backward_from(stash, jnp.int32(1), operands[0], (), dy), stash)
    jax.tree.map(np.testing.assert_array_equal, back, gradients)


def test_what_is_not_finite_stays_in_its_place():
    @jax.jit
    def run(x, bias):
        results = [(8, 1, 1024)] * 3 + [(1, 1, 1024)]
        kernel = parts.tiled_map_parts(with_row, x, x, x, bias, results=results)
        return kernel, map_parts(with_row, [x, x, x, bias], [1] * 4)

    x, bias = numbers((8, 1, 1024), (1, 1, 1024))
    for bad in (np.nan, -np.inf):
        x[3, 0, 5] = bad
        for found in run(x, bias):
            kept = [np.isfinite(np.asarray(y, np.float32)) for y in found]
            assert all(y.sum() >= y.size - 1 and y[..., :5].all() and y[..., 6:].all() for y in kept)
            assert not kept[3][0, 0, 5]


def test_shapes_that_the_kernel_does_not_take():
    for shape in ((1, 1, 512), (7, 1, 512), (64, 1, 192), (2**20, 1, 4096)):
        assert not parts.supports_elementwise([shape], [shape])
        assert not parts.supports_elementwise([shape], [shape, (1, *shape[1:])])


@pytest.mark.parametrize("derivative", [False, True], ids=["value", "derivative"])
def test_erfc_against_float64(derivative):
    x = np.concatenate([np.linspace(-6, 6, 4001), [0.0, -np.inf, np.inf, np.nan]]).astype(np.float32)
    f, expected = erfc, scipy.special.erfc(x.astype(np.float64))
    if derivative:
        f, expected = jax.vmap(jax.grad(erfc)), -2 / np.sqrt(np.pi) * np.exp(-(x.astype(np.float64) ** 2))
    # the argument of 2^y, up to 52, is rounded twice
    np.testing.assert_allclose(jax.jit(f)(x), expected, rtol=6e-6)


def test_erf_of_small_numbers():
    """The difference 1 - erfc(x) would have no digits."""
    x = np.geomspace(1e-6, 2e-2, 40).astype(np.float32)
    trace = jax.make_jaxpr(jax.lax.erf)(x).jaxpr
    f = Elementwise(tuple(trace.eqns), tuple(trace.invars), trace.outvars[0])
    np.testing.assert_allclose(jax.jit(f)(x)[0], scipy.special.erf(x.astype(np.float64)), rtol=1e-4)
