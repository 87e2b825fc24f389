"""The maximal update parametrization (μP): learning rates found on a narrow model serve a wide one.

Yang et al., arXiv:2203.03466, table 8.
"""

from __future__ import annotations

import re
from typing import Any

import jax

from jzero.errors import ConfigError, some_of
from jzero.model import STACK, Model, StackModel
from jzero.tree import differences, named


def mup_groups(model: Model, base: Model, *, weight_decay: float | None = None) -> list[dict[str, Any]]:
    """Make the parameter groups that move Adam's learning rate from a narrow model to a wide one.

    The learning rate of a hidden matrix (both sides grow with the width) is multiplied by (fan-in of `base`) / (its
    fan-in); all other parameters keep the rate. The rest of table 8 belongs in the model: hidden matrices start with
    variance 1 / fan-in, logits are multiplied by (width of `base`) / width, and attention scores divided by the head
    width instead of its root.

    Args:
      model: the model to train. Matrices are [..., in, out], as Flax stores them.
      base: the same model at the width at which the learning rate was found. Their depth may differ if the layers are
        in a layer stack.
      weight_decay: the optimizer's. AdamW multiplies it by the learning rate; given here, it grows as that shrinks.

    Returns:
      The value of `optimizer.groups`, for Adam, AdamW, Lamb, Lion and others that normalize the gradient.

    Raises:
      ConfigError: the two have different parameters, or three dimensions of one parameter grow.

    >>> from types import SimpleNamespace
    >>> def mlp(width):
    ...     shapes = {"in": (16, width), "hidden": (width, width), "out": (width, 10)}
    ...     return SimpleNamespace(init=lambda rng: {name: jax.numpy.zeros(s) for name, s in shapes.items()})
    >>> mup_groups(mlp(256), mlp(64))
    [{'match': '^(hidden)$', 'lr_scale': 0.25}]
    """
    wide, narrow = _widths(model), _widths(base)
    if problems := differences(wide, dict.fromkeys(narrow)):
        raise ConfigError(f"mup_groups: the model has other parameters than its base: {some_of(problems)}")
    names: dict[float, list[str]] = {}
    for name, shape in wide.items():
        if len(shape) != len(narrow[name]):
            raise ConfigError(f"mup_groups: {name} is {shape}, and {narrow[name]} in the base: other dimensions")
        grown = [(n, m) for n, m in zip(narrow[name], shape, strict=True) if n != m]
        if len(grown) > 2:
            raise ConfigError(
                f"mup_groups: {name} is {shape}, and {narrow[name]} in the base: more than two dimensions grow; give "
                "both models the same head width, so that only the number of heads grows"
            )
        if len(grown) == 2:
            names.setdefault(grown[0][0] / grown[0][1], []).append(name)
    return [
        {"match": f"^({'|'.join(map(re.escape, those))})$", "lr_scale": scale}
        | ({} if weight_decay is None else {"weight_decay": weight_decay / scale})
        for scale, those in names.items()
    ]


def _widths(model: Model) -> dict[str, tuple[int, ...]]:
    """Map every parameter's name to its shape, without the layer axis of a layer stack."""
    shapes = {name: tuple(x.shape) for name, x in named(jax.eval_shape(model.init, jax.random.key(0))).items()}
    stacked = isinstance(model, StackModel)
    return {name: shape[stacked and name.startswith(STACK + "/") :] for name, shape in shapes.items()}
