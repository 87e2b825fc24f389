"""Muon with DeepSpeed's arithmetic: momentum, then the nearest orthogonal matrix; AdamW for everything else.

Sources: kellerjordan.github.io/posts/muon; deepspeed/runtime/zero/muon/original_muon.py and the ZeRO-2 path of
DeepSpeed 0.19.8 (its ZeRO-3 path differs under gradient accumulation, its issue 8600).

Two differences remain. jzero clips the gradients; DeepSpeed's ZeRO clips the orthogonalised updates. jzero iterates in
fp32; DeepSpeed in half precision on GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jzero.errors import ConfigError
from jzero.optimizers.transforms import Knobs, add_decay, first, scale_by_adam
from jzero.optimizers.wrappers import Transform, labels
from jzero.tree import named, path_name

FUSED = "fused_matrices"  # the model's attribute


def fused_matrices(model: Any, params: Any) -> dict[str, tuple[int, ...]]:
    """Find the parameters that contain several matrices side by side, such as one weight for q, k and v.

    Muon orthogonalises each matrix on its own, as it does separate weights.

    Args:
      model: may have an attribute `fused_matrices`: name of a parameter -> widths of its matrices along the last axis.
      params: the model's parameters, or a tree of objects with their `shape`.

    Returns:
      The attribute, checked; empty if the model has none.

    Raises:
      ConfigError: a name that is no parameter, or widths that do not add up to the last axis.

    >>> from types import SimpleNamespace
    >>> fused_matrices(SimpleNamespace(fused_matrices={"qkv": [4, 2, 2]}), {"qkv": jnp.ones((3, 8))})
    {'qkv': (4, 2, 2)}
    """
    fused = {name: tuple(widths) for name, widths in getattr(model, FUSED, {}).items()}
    shapes = {name: x.shape for name, x in named(params).items()} if fused else {}
    wrong = [
        f"{model!r}: {FUSED}[{name!r}] = {list(widths)}: "
        + (
            f"must add up to the last axis of the parameter, {shapes[name]}"
            if name in shapes
            else f"no such parameter; they are {', '.join(shapes)}"
        )
        for name, widths in fused.items()
        if sum(widths) != shapes.get(name, (None,))[-1]
    ]
    if wrong:
        raise ConfigError(*wrong)
    return fused


def muon(k: Knobs, p: dict[str, Any]) -> Transform:
    """Make Muon for the hidden matrices, Adam for the rest.

    Hidden: at least 2-D per layer, and inside the layer stack, or, in a model without one, with no "embed" or
    "lm_head" in its name. Matrices are the last two axes, [..., in, out]; the axes before them (layers, experts) are a
    batch.
    """
    decay = add_decay(k, p)
    hidden = optax.chain(
        _scale_by_muon(p["momentum"], k.fused),
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
        return labels(stacked, lambda s, p: "muon" if s and p.ndim >= 3 else "adam", params)

    def label(path: tuple, p: Any) -> str:
        name = path_name(path).lower()
        return "muon" if p.ndim >= 2 and "embed" not in name and "lm_head" not in name else "adam"

    return jax.tree_util.tree_map_with_path(label, params)


def _scale_by_muon(beta: float, fused: Mapping[str, Sequence[int]]) -> Transform:
    """Make a transformation to Nesterov momentum, orthogonalised.

    optax corrects the momentum's bias, which gives it more weight in the blend: 10 % of the second update.
    """

    def init(params: Any) -> optax.TraceState:
        return optax.TraceState(optax.tree.zeros_like(params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, optax.TraceState]:
        momentum = jax.tree.map(lambda g, m: m + (1 - beta) * (g - m), updates, state.trace)
        blend = jax.tree.map(lambda g, m: g + beta * (m - g), updates, momentum)
        direction = jax.tree_util.tree_map_with_path(
            lambda path, u: _orthogonalise_parts(u, fused.get(path_name(path))), blend
        )
        return direction, optax.TraceState(momentum)

    return Transform(init, update)


def _orthogonalise_parts(u: jax.Array, widths: Sequence[int] | None) -> jax.Array:
    """Orthogonalise each matrix of a parameter, scaled by sqrt(max(1, out / in))."""
    parts = jnp.split(u, list(accumulate(widths))[:-1], axis=-1) if widths else [u]
    scales = [max(1.0, part.shape[-1] / part.shape[-2]) ** 0.5 for part in parts]
    return jnp.concatenate([s * _orthogonalise(part) for s, part in zip(scales, parts, strict=True)], axis=-1)


def _orthogonalise(u: jax.Array) -> jax.Array:
    """Run five quintic Newton-Schulz steps on matrices [..., in, out]: singular values end in about 0.5 to 1.5."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = u.shape[-2] > u.shape[-1]  # iterate on the smaller Gram matrix
    x = jnp.swapaxes(u, -1, -2) if tall else u
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)  # the spectral norm is at most 1

    def step(_: int, x: jax.Array) -> jax.Array:
        gram = x @ jnp.swapaxes(x, -1, -2)
        return a * x + (b * gram + c * (gram @ gram)) @ x

    x = jax.lax.fori_loop(0, 5, step, x)
    return jnp.swapaxes(x, -1, -2) if tall else x
