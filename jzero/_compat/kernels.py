"""Private APIs of JAX and flash-attn3-jax for kernels: one function each, as in `_compat`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax import Array


@functools.cache
def allow_float16_products_on_cpu() -> None:
    """Let CPUs multiply float16 matrices and sum in float32, as jax.nn's attention does.

    JAX refuses to lower them ("The precision 'F16_F16_F32' is not supported by dot_general on CPU"), although XLA
    computes the same product when it is not asked for by this name (jax 0.10 and 0.11).
    """
    from jax import lax
    from jax._src.lax import lax as internal
    from jax.interpreters import mlir

    def lower(ctx: Any, *operands: Any, precision: Any, **params: Any) -> Any:
        precision = None if precision == lax.DotAlgorithmPreset.F16_F16_F32 else precision
        return internal._dot_general_lower(ctx, *operands, precision=precision, platform="cpu", **params)

    mlir.register_lowering(lax.dot_general_p, lower, platform="cpu")


@functools.cache
def lower_grouped_products(choose: Callable[..., Any]) -> None:
    """Let CUDA devices run other kernels for `jax.lax.ragged_dot_general`.

    XLA multiplies every row by every matrix, and no compiler option of jaxlib 0.10 and 0.11 changes that on a Hopper
    GPU. JAX's own hook for a kernel, `jax_ragged_dot_use_gpu_pallas_triton_lowering`, imports a module that its wheels
    lack.

    Args:
      choose: `choose(avals, out, params, device)` returns a function of the operands, or None: as JAX does it.
    """
    import jax
    from jax._src.lax import lax as internal
    from jax.interpreters import mlir

    def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
        mesh = ctx.avals_in[0].sharding.mesh
        kernel = choose(ctx.avals_in, ctx.avals_out[0], params, mesh.abstract_device or jax.devices()[0])
        if kernel is None:
            return internal._ragged_dot_general_gpu_lowering(ctx, *operands, **params)
        kernel = jax.named_scope("grouped_dot")(kernel)
        with jax.sharding.use_abstract_mesh(mesh):  # Pallas looks there for the device
            return mlir.lower_fun(kernel, multiple_results=False)(ctx, *operands)

    mlir.register_lowering(internal.ragged_dot_general_p, lower, platform="cuda")


def function_primitive(name: str, kernel: Callable[..., Callable | None] | None = None) -> Any:
    """Make a primitive for functions of arrays: its parameter `jaxpr` is the function.

    It is differentiated, batched and compiled as the function is. JAX has no documented way to keep a function as one
    equation of a trace under a name of its own; `jax.extend.core` and `jax.interpreters` promise no compatibility.

    Args:
      kernel: `kernel(operands, results, device, **parameters)`, of shapes and dtypes, returns the function that CUDA
        devices run instead, or None: the same as others. The device may be a mesh's description of its devices.
    """
    import jax
    from jax.extend.core import Primitive, jaxpr_as_fun
    from jax.interpreters import ad, batching, mlir

    def run(*xs: Any, jaxpr: Any, **_: Any) -> Any:
        return jaxpr_as_fun(jaxpr)(*xs)

    def jvp(primals: Any, tangents: Any, *, jaxpr: Any, **_: Any) -> Any:
        # A function with a derivative of its own refuses tangents that are known to be zero.
        moving = {i: t for i, t in enumerate(tangents) if type(t) is not ad.Zero}

        def f(*xs: Array) -> list[Array]:
            known = dict(enumerate(primals)) | dict(zip(moving, xs, strict=True))
            return jaxpr_as_fun(jaxpr)(*known.values())

        return jax.jvp(f, tuple(primals[i] for i in moving), tuple(moving.values()))

    def batch(xs: Any, dims: Any, *, jaxpr: Any, **_: Any) -> Any:
        outs = jax.vmap(jaxpr_as_fun(jaxpr), in_axes=dims)(*xs)
        return outs, [0] * len(outs)

    primitive = Primitive(name)
    primitive.multiple_results = True
    primitive.def_impl(lambda *xs, jaxpr, **_: jaxpr_as_fun(jaxpr)(*xs))
    primitive.def_abstract_eval(lambda *_, jaxpr, **__: jaxpr.out_avals)
    ad.primitive_jvps[primitive] = jvp
    batching.primitive_batchers[primitive] = batch
    plain = mlir.lower_fun(run, multiple_results=True)

    def lower(ctx: Any, *operands: Any, jaxpr: Any, **params: Any) -> Any:
        mesh = ctx.avals_in[0].sharding.mesh
        chosen = kernel and kernel(ctx.avals_in, ctx.avals_out, mesh.abstract_device or jax.devices()[0], **params)
        if not chosen:
            return plain(ctx, *operands, jaxpr=jaxpr)
        with jax.sharding.use_abstract_mesh(mesh):  # Pallas looks there for the device
            return mlir.lower_fun(chosen, multiple_results=True)(ctx, *operands)

    mlir.register_lowering(primitive, plain)
    if kernel:
        mlir.register_lowering(primitive, lower, platform="cuda")
    return primitive


def flash_attention_kernels(batched: Callable) -> tuple[Any, Any]:
    """Return flash-attn3-jax's primitives; `batched(kernel, xs, dims, **options)` is their rule for `jax.vmap`.

    The primitives of the package's `flash_mha` return gradients in the wrong order of rows there (0.2.3). These two
    have no rule.
    """
    from flash_attn3_jax import flash_hlo
    from jax.interpreters import batching

    kernels = flash_hlo._flash_mha_fwd_hlo_p, flash_hlo._flash_mha_bwd_hlo_p
    for kernel in kernels:
        batching.primitive_batchers[kernel] = functools.partial(batched, kernel)
    return kernels


def cudnn_version() -> int:
    """Return the version of cuDNN, 91200 for 9.12.0, or 0 without it; no public API does."""
    from jax._src.lib import cuda_versions

    return cuda_versions.cudnn_get_version() if cuda_versions else 0


def causal_cudnn_attention(query: Array, key: Array, value: Array, scale: float) -> Array:
    """Compute causal attention by cuDNN; `jax.nn.dot_product_attention` has no values narrower than keys."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    return cudnn.dot_product_attention(query, key, value, scale=scale, mask_type=cudnn.MaskType.CAUSAL)


def threefry_kernel() -> contextlib.AbstractContextManager[object]:
    """Return the context in which programs for GPUs draw random bits by JAX's CUDA kernel for it.

    Otherwise each draw is a hundred operations. The public `jax.config` would set it for all threads (jax 0.10, 0.11).
    """
    from jax._src import config

    return config.threefry_gpu_kernel_lowering(True)
