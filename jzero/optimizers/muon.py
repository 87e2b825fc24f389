"""Muon with DeepSpeed's arithmetic: momentum, then the nearest orthogonal matrix; AdamW for everything else.

Sources: kellerjordan.github.io/posts/muon; deepspeed/runtime/zero/muon/original_muon.py and the ZeRO-2 path of
DeepSpeed 0.19.8 (its ZeRO-3 path differs under gradient accumulation, its issue 8600).

Two differences remain. jzero clips the gradients; DeepSpeed's ZeRO clips the orthogonalised updates. DeepSpeed iterates
in half precision on every GPU (its `gram` method in fp16); jzero in bfloat16 if the model computes in 16 bits, else in
fp32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jzero.errors import ConfigError
from jzero.optimizers.transforms import Axes, Knobs, Transform, adam, add_decay, first, labels
from jzero.tree import PyTree, named, path_name
from jzero.values.parameters import Values

FUSED = "fused_matrices"  # the model's attribute


# A dimension of one layer's parameter, the widths into which it is cut, and the dimensions before its matrices.
Cut = tuple[int, Sequence[int]] | tuple[int, Sequence[int], int]


def fused_matrices(model: Any, params: PyTree) -> dict[str, Cut]:
    """Find the parameters that contain several matrices, such as one weight for q, k and v.

    Muon orthogonalises each matrix on its own, as it does separate weights.

    Args:
      model: may have an attribute `fused_matrices`: name of a parameter -> (dimension, widths) or (dimension, widths,
        batch). The widths cut this dimension (of one layer's parameter) into matrices. The first `batch` dimensions
        (default 0), such as experts, count them; the next is a matrix's input, and all others are its columns.
      params: the model's parameters, or a tree of objects with their `shape`, and `stacked` in a layer stack.

    Returns:
      The attribute, checked; empty if the model has none.

    Raises:
      ConfigError: a name that is no parameter, no (dimension, widths), or widths that do not add up to the dimension.

    >>> from types import SimpleNamespace
    >>> fused_matrices(SimpleNamespace(fused_matrices={"qkv": (1, [4, 2, 2])}), {"qkv": jnp.ones((3, 8))})
    {'qkv': (1, (4, 2, 2))}
    """
    fused = dict(getattr(model, FUSED, {}))
    shapes = {n: x.shape[getattr(x, "stacked", False) :] for n, x in named(params).items()} if fused else {}
    problems = {name: _misfit(cut, shapes.get(name), shapes) for name, cut in fused.items()}
    if wrong := [f"{model!r}: {FUSED}[{n!r}] = {fused[n]!r}: {problem}" for n, problem in problems.items() if problem]:
        raise ConfigError(*wrong)
    return {name: (dim, tuple(widths), *batch) for name, (dim, widths, *batch) in fused.items()}


def _misfit(cut: Any, shape: tuple[int, ...] | None, names: Iterable[str]) -> str:
    """Explain why a cut does not fit a parameter; "" if it does."""
    if shape is None:
        return f"no such parameter; they are {', '.join(names)}"
    form = isinstance(cut, Sequence) and len(cut) in (2, 3) and isinstance(cut[1], Sequence)
    if not form or not all(isinstance(n, int) for n in (cut[0], *cut[2:])) or not 1 <= cut[0] < len(shape):
        return f"must be (dimension, widths), such as (1, (4, 2, 2)), with a dimension of 1 to {len(shape) - 1}"
    if not 0 <= sum(cut[2:]) < cut[0]:
        return f"batch = {cut[2]}; must be 0 to {cut[0] - 1}: the matrix's input comes before dimension {cut[0]}"
    if sum(cut[1]) != shape[cut[0]]:
        return f"the widths must add up to dimension {cut[0]} of the parameter, {shape}"
    return ""


def muon(k: Knobs, p: Values) -> Transform:
    """Make Muon for the hidden matrices, Adam for the rest.

    Hidden: at least 2-D per layer, and inside the layer stack, or, in a model without one, with no "embed" or
    "lm_head" in its name; no biases, which may have a shape of heads. Matrices are the last two axes, [..., in, out];
    the axes before them (layers, experts) are a batch. Parameters in `fused_matrices` are cut as that says.
    """
    hidden = optax.chain(
        _scale_by_muon(k, p["momentum"]),
        add_decay(k, p),
        optax.scale_by_learning_rate(k.lr_from(first(p["muon_lr"], p["lr"], 0.02))),
    )
    rest = adam(k, {**p, "bias_correction": True}, k.lr_from(first(p["adam_lr"], p["lr"], 3e-4)))
    return optax.partition({"muon": hidden, "adam": rest}, partial(_muon_labels, k.stacked))


def _muon_labels(stacked: PyTree, params: PyTree) -> PyTree:
    if stacked is not None and any(jax.tree.leaves(stacked)):
        made = labels(stacked, lambda s, p: "muon" if s and p.ndim >= 3 else "adam", params)
        return jax.tree_util.tree_map_with_path(lambda path, x: "adam" if _is_bias(path_name(path)) else x, made)

    def label(path: tuple, p: Any) -> str:
        name = path_name(path).lower()
        others = "embed" in name or "lm_head" in name or _is_bias(name)
        return "muon" if p.ndim >= 2 and not others else "adam"

    return jax.tree_util.tree_map_with_path(label, params)


def _is_bias(name: str) -> bool:
    return name.rpartition("/")[2] == "bias"


def _scale_by_muon(k: Knobs, beta: float) -> Transform:
    """Make a transformation to Nesterov momentum, orthogonalised.

    optax corrects the momentum's bias, which gives it more weight in the blend: 10 % of the second update.
    """
    stack = named(k.stacked) if k.stacked is not None else {}  # names of parameters, or of trees of them

    def init(params: PyTree) -> optax.TraceState:
        return optax.TraceState(optax.tree.zeros_like(params))

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, optax.TraceState]:
        momentum = jax.tree.map(lambda g, m: m + (1 - beta) * (g - m), updates, state.trace)
        blend = jax.tree.map(lambda g, m: g + beta * (m - g), updates, momentum)
        parts = {name: parts_of(name, u) for name, u in named(blend).items()}
        mesh = k.placement.mesh if k.placement else None
        dtype = jnp.bfloat16 if jnp.dtype(k.compute_dtype).itemsize == 2 else None
        done = iter(orthogonalised([part for found in parts.values() for part in found], mesh, dtype))
        found = {name: [next(done) for _ in those] for name, those in parts.items()}
        direction = jax.tree_util.tree_map_with_path(
            lambda path, u: joined(found[path_name(path)], path_name(path), u), blend
        )
        return direction, optax.TraceState(momentum)

    def cut(name: str) -> tuple[int, Sequence[int], int] | None:
        """Return the dimension, the widths and the batch dimensions of a fused parameter, the layer axis included."""
        if name not in k.fused:
            return None
        dim, widths, *batch = k.fused[name]
        in_stack = any(has_layers and f"{name}/".startswith(f"{part}/") for part, has_layers in stack.items())
        return dim + in_stack, widths, sum(batch) + in_stack

    def parts_of(name: str, u: jax.Array) -> list[Matrices]:
        axes = k.placement.axes(name, u.ndim) if k.placement else ((),) * u.ndim
        if (how := cut(name)) is None:
            return [Matrices(u, axes)]
        dim, widths, batch = how
        columns = tuple(axis for of_dim in axes[batch + 1 :] for axis in of_dim)
        parts = jnp.split(u, list(accumulate(widths))[:-1], axis=dim)
        return [Matrices(x.reshape(*x.shape[: batch + 1], -1), (*axes[: batch + 1], columns)) for x in parts]

    def joined(parts: Sequence[jax.Array], name: str, u: jax.Array) -> jax.Array:
        if (how := cut(name)) is None:
            return parts[0]
        dim, widths, _ = how
        shapes = [(*u.shape[:dim], width, *u.shape[dim + 1 :]) for width in widths]
        return jnp.concatenate([x.reshape(shape) for x, shape in zip(parts, shapes, strict=True)], axis=dim)

    return Transform(init, update)


# ---- the nearest orthogonal matrices, each computed on one device -------------------------------------------------
#
# A matrix that ZeRO or `tensor` divides would need a collective in each product of the iteration. Matrices of one shape
# form a batch instead, which one all-to-all divides by matrices, and another divides as before (Liu et al.,
# arXiv:2502.16982, gather each matrix on its owner).


class Matrices(NamedTuple):
    """Matrices [..., in, out], and the mesh axes that divide each dimension."""

    x: jax.Array
    axes: tuple[Axes, ...]


def orthogonalised(
    all_matrices: Sequence[Matrices], mesh: Mesh | None, dtype: DTypeLike | None = None
) -> list[jax.Array]:
    """Return orthogonal matrices scaled by sqrt(max(1, out / in)), in the shapes given.

    Args:
      mesh: None: all matrices are whole on each device.
      dtype: of what is moved, and of the iteration; default: the matrices' dtype, which the results always have.
        bfloat16 is enough, as in DeepSpeed's `original_muon.py`: in float32, too, singular values are only roughly 1.
    """
    batches = [_batch(Matrices(x.astype(dtype or x.dtype), axes)) for x, axes in all_matrices]
    groups: dict[object, list[int]] = {}
    for i, (x, axes) in enumerate(batches):
        alone = not (axes[-2] or axes[-1])  # nothing to move: a copy into a batch would gain nothing
        groups.setdefault((i if alone else None, x.shape[:-3], x.shape[-2:], axes), []).append(i)
    found: dict[int, jax.Array] = {}
    for members in groups.values():
        together = jnp.concatenate([batches[i].x for i in members], axis=-3) if members[1:] else batches[members[0]].x
        y, start = _on_owners(Matrices(together, batches[members[0]].axes), mesh), 0
        for i in members:
            n = batches[i].x.shape[-3]
            found[i] = _unbatch(jax.lax.slice_in_dim(y, start, start + n, axis=y.ndim - 3), all_matrices[i])
            start += n
    return [found[i] for i in range(len(batches))]


def _order(m: Matrices) -> tuple[list[int], list[int], bool]:
    """Return the divided and the other dimensions before the matrices, and whether these are tall."""
    before = range(m.x.ndim - 2)
    tall = m.x.shape[-2] > m.x.shape[-1]
    return [d for d in before if m.axes[d]], [d for d in before if not m.axes[d]], tall


def _batch(m: Matrices) -> Matrices:
    """Return matrices as [divided dimensions..., B, n, k] with n <= k."""
    divided, undivided, tall = _order(m)
    ends = [m.x.ndim - 1, m.x.ndim - 2] if tall else [m.x.ndim - 2, m.x.ndim - 1]
    x = jnp.transpose(m.x, (*divided, *undivided, *ends))
    x = x.reshape(*x.shape[: len(divided)], -1, *x.shape[-2:])
    return Matrices(x, (*(m.axes[d] for d in divided), (), *(m.axes[d] for d in ends)))


def _unbatch(y: jax.Array, m: Matrices) -> jax.Array:
    """Invert `_batch`, and scale."""
    divided, undivided, tall = _order(m)
    y = y.reshape(*(m.x.shape[d] for d in (*divided, *undivided)), *y.shape[-2:])
    y = jnp.swapaxes(y, -1, -2) if tall else y
    y = jnp.transpose(y, (*np.argsort([*divided, *undivided]).tolist(), y.ndim - 2, y.ndim - 1))
    return max(1.0, m.x.shape[-1] / m.x.shape[-2]) ** 0.5 * y.astype(m.x.dtype)


def _on_owners(batch: Matrices, mesh: Mesh | None) -> jax.Array:
    """Orthogonalise a batch [..., B, n, k], each matrix on one of the devices that divide it.

    The result has further matrices after the batch, up to a multiple of the devices.
    """
    x, (*before, _, n, k) = batch
    owners = (*n, *k)
    if mesh is None or not owners:
        return _newton_schulz(x)

    def placed(x: jax.Array, *axes: Axes) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*(a or None for a in axes))))

    size, devices = x.shape[-3], prod(mesh.shape[axis] for axis in owners)
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 3) + [(0, -size % devices), (0, 0), (0, 0)])
    steps = [((), n, k), (n, (), k), (owners, (), ())]  # XLA can move the axes of one dimension at a time
    for axes in steps:
        x = placed(x, *before, *axes)
    y = _newton_schulz(x)
    for axes in reversed(steps):
        y = placed(y, *before, *axes)
    return y


def _newton_schulz(x: jax.Array) -> jax.Array:
    """Run five quintic Newton-Schulz steps on matrices [..., n, k], n <= k: singular values end in about 0.5 to 1.5.

    In 16 bits the products are; what lies between is computed in float32. Coefficients in bfloat16 would double the
    error.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    dtype = x.dtype
    wide = x.astype(jnp.promote_types(dtype, jnp.float32))
    x = (wide / (jnp.linalg.norm(wide, axis=(-2, -1), keepdims=True) + 1e-7)).astype(dtype)  # spectral norm <= 1

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        return (x @ y).astype(wide.dtype)

    def step(_: int, x: jax.Array) -> jax.Array:
        gram = x @ jnp.swapaxes(x, -1, -2)
        polynomial = (b * gram.astype(wide.dtype) + c * product(gram, gram)).astype(dtype)
        return (a * x.astype(wide.dtype) + product(polynomial, x)).astype(dtype)

    return jax.lax.fori_loop(0, 5, step, x)
