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
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero.errors import ConfigError
from jzero.optimizers.orthogonal import Matrices, orthogonalised
from jzero.optimizers.transforms import Knobs, add_decay, first, scale_by_adam
from jzero.optimizers.wrappers import Transform, labels
from jzero.tree import named, path_name

FUSED = "fused_matrices"  # the model's attribute


# A dimension of one layer's parameter, the widths into which it is cut, and the dimensions before its matrices.
Cut = tuple[int, Sequence[int]] | tuple[int, Sequence[int], int]


def fused_matrices(model: Any, params: Any) -> dict[str, Cut]:
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


def muon(k: Knobs, p: dict[str, Any]) -> Transform:
    """Make Muon for the hidden matrices, Adam for the rest.

    Hidden: at least 2-D per layer, and inside the layer stack, or, in a model without one, with no "embed" or
    "lm_head" in its name; no biases, which may have a shape of heads. Matrices are the last two axes, [..., in, out];
    the axes before them (layers, experts) are a batch. Parameters in `fused_matrices` are cut as that says.
    """
    decay = add_decay(k, p)
    hidden = optax.chain(
        _scale_by_muon(k, p["momentum"]),
        decay,
        optax.scale_by_learning_rate(k.lr_from(first(p["muon_lr"], p["lr"], 0.02))),
    )
    direction = scale_by_adam(k, p)
    rest = optax.chain(
        *((direction, decay) if p["adam_w_mode"] else (decay, direction)),
        optax.scale_by_learning_rate(k.lr_from(first(p["adam_lr"], p["lr"], 3e-4))),
    )
    return optax.partition({"muon": hidden, "adam": rest}, partial(_muon_labels, k.stacked))


def _muon_labels(stacked: Any, params: Any) -> Any:
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

    def init(params: Any) -> optax.TraceState:
        return optax.TraceState(optax.tree.zeros_like(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.TraceState]:
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
