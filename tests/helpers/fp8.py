"""fp8 without jzero: products of factors that are rounded at powers of two, and models that compute them."""

from collections import defaultdict
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from helpers.tensor_models import LR, ZOO, batches, initial, make_step
from helpers.tensor_models import model as model_of

import jzero
from jzero.tree import named

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
GRADIENTS = {"hybrid": E5M2, "e4m3": E4M3}
EXACT = {"xla_allow_excess_precision": False}
BF16 = {"bf16": {"enabled": True}, "compiler_options": EXACT}
FP8 = {**BF16, "fp8": {"enabled": True, "min_size": 8}}
name_of = partial(jax.tree_util.keystr, simple=True, separator="/")


def rounded(x, dtype, axes=None, scale=None):
    """Round to fp8 in float32, by a scale for each part along the axes that are left, or by this one, and clip."""
    x, limit = x.astype(jnp.float32), float(jnp.finfo(dtype).max)
    if scale is None:
        _, exponent = jnp.frexp(limit / jnp.abs(x).max(axes, keepdims=True))
        scale = jnp.ldexp(jnp.float32(1), exponent - 1)
    return jnp.clip(x * scale, -limit, limit).astype(dtype).astype(jnp.float32) / scale


def product(fp8_format, wide, scales, note):
    """Make a `dot_general(x, w, dimension_numbers)` of factors that are rounded, forward and backward.

    The results are bfloat16; with `wide` they are so in float32, as their gradient is. `scales` are of x and
    of the product's gradient; w is rounded already then. `note` gets the largest elements of both, backward.
    """
    of_x, of_g = scales

    def exact(x, w, numbers):
        return jax.lax.dot_general(x, w, numbers, preferred_element_type=jnp.float32)

    @partial(jax.custom_vjp, nondiff_argnums=(2,))
    def dot(x, w, numbers):
        y = exact(rounded(x, E4M3, scale=of_x), rounded(w, E4M3), numbers).astype(jnp.bfloat16)
        return y.astype(jnp.float32) if wide else y

    def backward(numbers, factors, g):
        x, w = factors
        jax.debug.callback(note, jnp.abs(x).max(), jnp.abs(g).max())
        _, vjp = jax.vjp(partial(exact, numbers=numbers), rounded(x, E4M3, scale=of_x), rounded(w, E4M3))
        gradients = vjp(rounded(g, GRADIENTS[fp8_format], scale=of_g))
        return tuple(d.astype(jnp.bfloat16).astype(v.dtype) for d, v in zip(gradients, factors, strict=True))

    dot.defvjp(lambda x, w, numbers: (dot(x, w, numbers), (x, w)), backward)
    return lambda x, w, numbers, **_: dot(x, w, numbers)


@lru_cache
def emulated(name, fp8_format, chained, scales=(None, None)):
    """(the model whose stack computes such products; what `note` of `product` got, by the module's name).

    Chained: nothing between the two of SwiGLU is rounded to bfloat16.
    """
    (cls, config), noted = ZOO[name], defaultdict(list)

    def make(rngs):
        model = cls(config, rngs=rngs)
        for path, module in nnx.iter_graph(model.stack):
            if isinstance(module, nnx.Linear | nnx.LinearGeneral):
                note = partial(lambda name, *largest: noted[name].append([float(x) for x in largest]), path[-1])
                module.dot_general = product(fp8_format, chained and path[-1] == "gate_up", scales, note)
        return model

    return jzero.from_flax(make), noted


def in_fp8(path):
    """Whether a weight is multiplied in fp8: the matrices of the stack, but a mixture's, whose products are grouped."""
    name = name_of(path)
    return name.startswith("stack/") and name.endswith("/kernel") and "router" not in name


def used(path, w, fp8_format="hybrid", twice=False, scale=None):
    """A stacked weight as a step uses it: every layer has a scale of its own, or this one."""
    if fp8_format and in_fp8(path):
        w = rounded(w.astype(jnp.bfloat16) if twice else w, E4M3, tuple(range(1, w.ndim)), scale)
    return w.astype(jnp.bfloat16)


@lru_cache
def reference(name, fp8_format="hybrid", chained=True, twice=False, trained="", scales=(None, None, None)):
    """([(loss, gradient norm)], first gradients, maxima) of a plain loop in bf16 and this format; None: in bf16 alone.

    With `twice` weights are rounded to bfloat16 before. Parameters without `trained` in their names have no gradient.
    `scales` are of activations, gradients and weights; None: by the largest element. The maxima are of the first
    step: module -> [layers, (x, gradient)], the last layer first.
    """
    model, noted = emulated(name, fp8_format, chained, scales[:2]) if fp8_format else (model_of(name), {})
    noted.clear()
    copy = partial(used, fp8_format=fp8_format, twice=twice, scale=scales[2])

    def mean(weights, batch):
        loss = model.loss(weights, batch, None)
        loss = loss[0] if isinstance(loss[0], jzero.Mean) else loss  # without metrics
        return loss[0] / loss[1]

    @partial(jax.jit, compiler_options=EXACT)
    def update(params, batch):
        loss, gradient = jax.value_and_grad(mean)(jax.tree_util.tree_map_with_path(copy, params), batch)
        gradient = jax.tree_util.tree_map_with_path(
            lambda path, g: g.astype(jnp.float32) * (trained in name_of(path)), gradient
        )
        return jax.tree.map(lambda w, g: w - LR * g, params, gradient), loss, optax.tree.norm(gradient), gradient

    params, seen, first = initial(name), [], None
    for batch in batches(name):
        params, loss, norm, gradient = update(params, batch)
        seen.append((float(loss), float(norm)))
        if first is None:
            jax.effects_barrier()
            first = jax.device_get(gradient), {module: np.array(largest) for module, largest in noted.items()}
    return np.array(seen), *first


def trained(name, precision=FP8, **layout):
    """([(loss, gradient norm)], first gradients) of jzero in a layout of `helpers.tensor_models`."""
    step = make_step(name, precision=precision, **layout)
    state, seen, first = step.init(jax.random.key(0), initial(name)), [], None
    for batch in batches(name):
        state, metrics = step(state, batch)
        seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
        if first is None:  # plain SGD
            first = jax.tree.map(
                lambda before, after: (before - after) / LR, initial(name), jax.device_get(state.params)
            )
    return np.array(seen), first


def distances(gradients, others):
    norm, ours = np.linalg.norm, named(gradients)
    assert ours.keys() == named(others).keys()
    return {name: float(norm(ours[name] - x) / norm(x)) for name, x in named(others).items() if x.any()}


def shares(gradients, oracle, bf16):
    """How far gradients lie on the way from the oracle's in bf16 (0) to that in fp8 (1), leaf by leaf."""
    ours, start = named(gradients), named(bf16)
    assert ours.keys() == start.keys() == named(oracle).keys()
    ways = {name: (ours[name] - start[name], x - start[name]) for name, x in named(oracle).items() if x.any()}
    return {name: float(np.vdot(way, whole) / np.vdot(whole, whole)) for name, (way, whole) in ways.items()}
