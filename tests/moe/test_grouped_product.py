"""Grouped products against a loop over the groups: XLA's program, the kernels in JAX's interpreters, H100 programs."""

import functools
import re
from collections import Counter
from itertools import islice
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import on_gpu
from helpers.sampling import keep
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.config import ActivationCheckpointing
from jzero.kernels import grouped_hopper, grouped_product, grouped_triton
from jzero.kernels.grouped_triton import max_tiles, tile_map
from jzero.moe import grouped_dot
from jzero.passes.remat import Remat, checkpointed
from jzero.planner import Rates, gpu_devices, step_time

# rows, D, F, sizes: all rows in use, one group has them, no row at all; empty groups and padding
SHAPES = [
    *((24, 8, 6, sizes, jnp.float32) for sizes in ([3, 0, 14, 7], [0, 0, 24, 0], [0, 0, 0, 0])),
    (40, 8, 6, [0, 5, 1, 0, 20, 0], jnp.bfloat16),
]
# The same for the kernels: tiles of 128 rows, several in a group, partly filled, of dimensions that fill no tile.
TILED = [(304, 128, 320, [130, 0, 101]), (64, 64, 128, [64]), (704, 192, 256, [0, 3, 330, 367, 0])]


def operands(rows, d, f, sizes, dtype=jnp.float32):
    """Return rows, matrices, sizes and the result's gradient; padding rows hold NaN."""
    random = np.random.default_rng(rows)
    x, w, dy = (jnp.asarray(random.normal(size=s), dtype) for s in ((rows, d), (len(sizes), d, f), (rows, f)))
    padding = (np.arange(rows) >= sum(sizes))[:, None]
    return jnp.where(padding, jnp.nan, x), w, jnp.asarray(sizes, jnp.int32), jnp.where(padding, jnp.nan, dy)


def loop(x, w, sizes, dy):
    x, w, dy = (np.asarray(a, np.float32) for a in (x, w, dy))
    y, dx, dw = np.zeros_like(dy), np.zeros_like(x), np.zeros_like(w)
    ends = np.cumsum(np.asarray(sizes))
    for g, end in enumerate(ends):
        at = slice(end - int(sizes[g]), end)
        y[at], dx[at], dw[g] = x[at] @ w[g], dy[at] @ w[g].T, x[at].T @ dy[at]
    return y, dx, dw


def assert_products(found, *values, strict=True):
    """A rounding to bfloat16 costs 2**-8 of the 2-norm at most, and sums in float32 nothing; no NaN passes."""
    dtype, norm = values[0].dtype, np.linalg.norm
    for ours, wanted in zip(found, loop(*values), strict=strict):
        assert ours.dtype == dtype
        difference = norm(np.asarray(ours, np.float32) - wanted) / max(norm(wanted), 1e-30)
        assert difference < (2**-8 if dtype == jnp.bfloat16 else 1e-6)


@jax.jit
def with_gradients(x, w, sizes, dy):
    y, pullback = jax.vjp(lambda x, w: grouped_dot(x, w, sizes), x, w)
    return y, *pullback(dy)


@pytest.mark.parametrize(("rows", "d", "f", "sizes", "dtype"), SHAPES)
def test_product_and_gradients(rows, d, f, sizes, dtype):
    values = operands(rows, d, f, sizes, dtype)
    assert_products(with_gradients(*values), *values)


def test_sums_are_float32():
    x, w = jnp.ones((8, 4096), jnp.bfloat16), jnp.ones((1, 4096, 2), jnp.bfloat16)
    assert grouped_dot(x, w, jnp.array([8], jnp.int32)).tolist() == [[4096.0, 4096.0]] * 8  # a bfloat16 sum ends at 256
    with pytest.raises(TypeError, match="float32 rows and bfloat16 matrices"):
        grouped_dot(x.astype(jnp.float32), w, jnp.array([8], jnp.int32))


@pytest.mark.parametrize(("policy", "products"), [("matmuls", 3), ("full", 4)])
def test_checkpoints_keep_it_as_a_product_with_weights(policy, products):
    x, w, sizes, _ = operands(24, 8, 6, [3, 0, 14, 7])
    remat = Remat(ActivationCheckpointing(policy=policy), 0, False)
    block = checkpointed(
        lambda pair: pair[0], lambda w, x, key: jnp.sin(grouped_dot(x, w, sizes)), remat, unrolled=True
    )
    trace = jax.make_jaxpr(jax.grad(lambda w, x: jnp.sum(block((w, ()), x, None)), (0, 1)))(w, x)
    assert len(re.findall(r"= ragged_dot_general\[", str(trace))) == products


# ------------------------------------------------------------------------------------------------- kernels


tiles_of = jax.jit(tile_map, static_argnums=(1, 2, 3))
ENDS = st.sampled_from([0, 1, 7, 8, 127, 128, 129, 500, 872, 999, 1000])  # few, so that groups are empty or tiles full


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1, 6]).flatmap(lambda n: st.lists(ENDS, min_size=n, max_size=n)), st.booleans())
@example([0, 0, 500, 500, 1000, 1000], False)
@example([0, 0, 500, 500, 1000, 1000], True)
def test_tiles_hold_every_row_once(ends, aligned):
    """Of 1,000 rows those beyond the last group are padding; one number of rows, so that little is compiled."""
    rows, align = 1000, 8 if aligned else 1
    sizes = np.diff(sorted(ends), prepend=0).tolist()
    padding = rows - sum(sizes)
    info, used = tiles_of(jnp.asarray(sizes, jnp.int32), rows, 128, align)
    group, start, begin, end = (row[: int(used[0])] for row in np.asarray(info))
    assert int(used[0]) <= max_tiles(rows, len(sizes), 128, align) == info.shape[1]
    assert not (start % align).any()
    held = [(g, s + i) for g, s, b, e in zip(group, start, begin, end, strict=True) for i in range(b, e)]
    assert held == list(zip(np.repeat(np.arange(len(sizes) + 1), [*sizes, padding]), range(rows), strict=True))
    assert (np.asarray(info)[2] == np.asarray(info)[3])[int(used[0]) :].all()  # no row


# jax 0.10's interpreter has no transposes, and hangs where a copy reads zeros beyond an array.
FORWARD_ALONE = not hasattr(mosaic_gpu, "force_gpu_interpret_mode")


def products(kernels, x, w, sizes, dy, **more):
    """Yield the product and its two gradients."""
    yield kernels.grouped(x, w, sizes, transposed=False, **more)
    yield kernels.grouped(dy, w, sizes, transposed=True, **more)
    yield kernels.grouped_transposed(x, dy, sizes, **more)


def interpreter():
    if not FORWARD_ALONE:
        return mosaic_gpu.force_gpu_interpret_mode()
    from jax._src.pallas.mosaic_gpu.interpret.params import force_gpu_interpret_mode  # jax 0.10

    return force_gpu_interpret_mode()


@pytest.mark.parametrize(("rows", "d", "f", "sizes"), [(432, 64, 128, [130, 0, 101])] if FORWARD_ALONE else TILED)
def test_hopper_kernels(rows, d, f, sizes):
    values = operands(rows, d, f, sizes, jnp.bfloat16)
    with interpreter():
        # They run one by one, and jax 0.10 cannot run those of the backward pass.
        found = [*islice(products(grouped_hopper, *values, cores=2), 1 if FORWARD_ALONE else 3)]
    assert_products(found, *values, strict=not FORWARD_ALONE)


TRITON = [(301, 72, 200, [130, 0, 101], jnp.bfloat16), (*TILED[2], jnp.float32)]


@pytest.mark.parametrize(("rows", "d", "f", "sizes", "dtype"), keep(TRITON, TRITON[:1]))
def test_triton_kernels(rows, d, f, sizes, dtype, monkeypatch):
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, interpret=True))
    values = operands(rows, d, f, sizes, dtype)
    run = jax.jit(lambda *values: [*products(grouped_triton, *values, dtype=dtype)])
    assert_products(run(*values), *values)


# ------------------------------------------------------------------------------------------------ programs


# The product and its two gradients.
@on_gpu
@pytest.mark.parametrize(
    ("gpu", "kernel"), [("h100", "mosaic_gpu_v2"), pytest.param("a100", "__gpu$xla.gpu.triton", marks=pytest.mark.slow)]
)
def test_programs_have_no_dense_product(gpu, kernel):
    rows, d, f, whole = 1024, 256, 512, PartitionSpec()
    mesh = Mesh(np.array(gpu_devices(gpu, 2)), ("zero",))

    def loss(x, w, sizes):
        return jnp.tanh(grouped_dot(x, w, sizes)).astype(jnp.float32).sum()

    shapes = [((rows, d), jnp.bfloat16), ((16, d, f), jnp.bfloat16), ((16,), jnp.int32)]
    args = [jax.ShapeDtypeStruct(*each, sharding=NamedSharding(mesh, whole)) for each in shapes]
    run = jax.shard_map(jax.grad(loss, (0, 1)), mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    program = jax.jit(run).lower(*args).compile().as_text()
    assert Counter(re.findall(r'custom_call_target="([^"]+)"', program)) == {kernel: 3}
    assert not re.search(r" (dot|convolution)\(", program)
    assert not re.search(rf"\[({rows},16|16,{rows}),", program)  # rows by experts: XLA's masked copies
    assert step_time(program, Rates.of(gpu)).flops == 3 * (2 * rows * d * f)


ROWS, ODD = ((1024, 256), (4, 256, 512), (4,)), ((1020, 200), (4, 200, 300), (4,))
HOPPER = "NVIDIA H100 80GB HBM3"
NUMBERS = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (0,))), [1], [1])
dot = lax.ragged_dot


@pytest.mark.parametrize(
    ("f", "kind", "dtype", "shapes", "found"),
    [
        (dot, HOPPER, jnp.bfloat16, ROWS, "hopper"),
        (dot, "NVIDIA GH200 480GB", jnp.float16, ROWS, "hopper"),
        (dot, HOPPER, jnp.bfloat16, ODD, "triton"),
        (dot, "NVIDIA B200", jnp.bfloat16, ROWS, "triton"),  # its tensor cores have other instructions
        (dot, "Tesla V100-SXM2-16GB", jnp.float16, ROWS, None),
        (dot, "cpu", jnp.bfloat16, ROWS, None),
        (dot, HOPPER, jnp.float32, ROWS, "triton"),
        (functools.partial(dot, precision="highest"), HOPPER, jnp.float32, ROWS, None),
        (functools.partial(dot, precision="highest"), HOPPER, jnp.bfloat16, ROWS, "hopper"),
        (functools.partial(dot, preferred_element_type=jnp.float32), HOPPER, jnp.bfloat16, ROWS, "triton"),
        (functools.partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=NUMBERS), HOPPER, jnp.bfloat16,
            ((2, 64, 64), (2, 4, 64, 128), (4,)), None),
    ],
)  # fmt: skip
def test_choice_of_the_kernel(f, kind, dtype, shapes, found):
    """The module of the kernel for the only grouped product in `f`; None: XLA's."""
    device = SimpleNamespace(device_kind=kind, platform="cpu" if kind == "cpu" else "gpu", num_cores=132)
    args = [jax.ShapeDtypeStruct(shape, dtype if len(shape) > 1 else jnp.int32) for shape in shapes]
    (eqn,) = [e for e in jax.make_jaxpr(f)(*args).eqns if e.primitive.name.startswith("ragged_dot")]
    kernel = grouped_product.choose_kernel([v.aval for v in eqn.invars], eqn.outvars[0].aval, eqn.params, device)
    assert (kernel and kernel.func.__module__.rpartition("_")[2]) == found
