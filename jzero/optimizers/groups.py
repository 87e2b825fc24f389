"""Parameter groups: parameters with a learning rate, a weight decay or betas of their own.

One optimizer runs over all parameters, and a group only changes numbers in it. So the optimizer's state, its sharding
and its names in a checkpoint are the same with any groups: a checkpoint loads under others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jzero.errors import ConfigError, some_of
from jzero.model import STACK, Model, StackModel
from jzero.optimizers.table import BETAS, OptimizerSection, Row, decay_key
from jzero.stored_names import StoredNames, matches
from jzero.tree import differences, named
from jzero.values.kinds import NON_NEGATIVE32, PATTERN, as_json
from jzero.values.parameters import REQUIRED, Param, Values, read_by_table

KEYS = {
    "match": Param(REQUIRED, PATTERN),
    "lr_scale": Param(1.0, NON_NEGATIVE32),
    "weight_decay": Param(None, NON_NEGATIVE32),
    "betas": Param(None, BETAS),
}
WHY = {
    "lr_scale": "has steps that are not proportional to its learning rate",
    "weight_decay": "has no weight decay that can differ by parameter",
    "betas": "has no betas that can differ by parameter",
}
_EMBEDDING = re.compile(r"embed|(^|/)(emb|wte|wpe)(/|$)")


@dataclass(frozen=True)
class Group:
    """One group and its parameters; the last group, whose `match` is None, has all that no expression matches.

    Attributes:
      values: what the group sets: lr_scale, weight_decay, betas.
      leaves: name of a trained parameter -> its own values, those of `no_weight_decay` included.
    """

    match: str | None
    values: Values
    leaves: Mapping[str, Values]

    @property
    def lr_scale(self) -> float:
        return self.values.get("lr_scale", 1.0)

    @property
    def undecayed(self) -> list[str]:
        """The names of the parameters whose weight decay `no_weight_decay` sets to 0."""
        return [name for name, own in self.leaves.items() if own.get("weight_decay") != self.values.get("weight_decay")]


def own_values(groups: Collection[Group]) -> dict[str, Values]:
    """Map the names of the parameters of all groups to their own values."""
    return {name: own for group in groups for name, own in group.leaves.items() if own}


def group_problems(optimizer_config: OptimizerSection, row: Row | None, params: Values) -> Iterator[str]:
    """Yield the problems of `optimizer.groups` and `optimizer.no_weight_decay` that show before any array is made.

    Args:
      optimizer_config: the section.
      row, params: of the optimizer, see `table.look_up`; without a row only the groups themselves are checked.
    """
    kind = optimizer_config.type
    if row and "weight_decay" not in row.by_group and (word := _word(optimizer_config)):
        yield f"optimizer.no_weight_decay = {as_json(word)}: {kind} {WHY['weight_decay']}; leave it out"
    decays = {params.get(decay_key(params)) or 0.0}
    for i, given in enumerate(_given(optimizer_config)):
        where = f"optimizer.groups[{i}]"
        if "lr" in given:
            yield f"{where}.lr: write lr_scale, the factor on the schedule's learning rate{_ratio(given, params)}"
        values, problems = read_by_table(where, {key: x for key, x in given.items() if key != "lr"}, KEYS)
        yield from problems
        if row is None or problems:
            continue
        for key in sorted(_set(values).keys() - set(row.by_group)):
            allowed = ", ".join(row.by_group) or "nothing"
            yield f"{where}.{key}: {kind} {WHY[key]}; a group can set here: {allowed}"
        decays.add(values["weight_decay"] or 0.0)
        if row.one_decay and len(decays - {0.0}) > 1:
            yield (
                f"{where}.weight_decay = {values['weight_decay']:g}: optax's {kind} has one weight decay, which a "
                "group can only set to 0; AdamW, Lamb, Lion, Muon, SGD and Adagrad take any number"
            )


def make_groups(
    optimizer_config: OptimizerSection | None,
    dims: Mapping[str, int],
    frozen: Collection[str] = (),
    names: StoredNames | None = None,
) -> tuple[Group, ...]:
    """Assign every trained parameter to the first group whose expression matches its name (`re.search`).

    Args:
      optimizer_config: the section; None (the caller's own optimizer) for one group of all.
      dims: name of a trained parameter -> its number of dimensions, without the layer axis.
      frozen: the names of the other parameters.
      names: the parameters' names without a layer stack, which expressions may match too.

    Returns:
      The groups in the config's order, then the group of all other parameters.

    Raises:
      ConfigError: a group without a parameter.
    """
    given = [(group["match"], _set(read_by_table("", group, KEYS)[0])) for group in _given(optimizer_config)]
    keys = [f"optimizer.groups[{i}].match = {as_json(match)}" for i, (match, _) in enumerate(given)]
    tests = [partial(matches, key, re.compile(match), names=names) for key, (match, _) in zip(keys, given, strict=True)]
    hits = {name: [is_match(name) for is_match in tests] for name in dims}  # all of them, since a test may fail
    first = {name: found.index(True) if True in found else None for name, found in hits.items()}
    empty = [i for i in range(len(given)) if i not in first.values()]
    if problems := [f"{keys[i]}: {_why_empty(tests[i], dims, frozen)}" for i in empty]:
        raise ConfigError(*problems)
    word = _word(optimizer_config)
    groups = []
    for index, (match, values) in [*enumerate(given), (None, (None, {}))]:
        members = [name for name, number in first.items() if number == index]
        exempt = {name: {"weight_decay": 0.0} if _is_exempt(word, name, dims[name]) else {} for name in members}
        groups.append(Group(match, values, {name: {**zero, **values} for name, zero in exempt.items()}))
    return tuple(groups)


def _given(optimizer_config: OptimizerSection | None) -> tuple[dict[str, Any], ...]:
    return tuple(getattr(optimizer_config, "groups", ()))


def _word(optimizer_config: OptimizerSection | None) -> str | None:
    return getattr(optimizer_config, "no_weight_decay", None)


def _set(values: Values) -> dict[str, Any]:
    """Drop `match` and the values that change nothing."""
    return {key: x for key, x in values.items() if key != "match" and x != KEYS[key].default}


def _is_exempt(word: str | None, name: str, dims: int) -> bool:
    """Return whether `no_weight_decay` names this parameter, by its shape and its name.

    Flax calls norms `scale` and biases `bias`. Attention biases have two dimensions, [heads, width]; so do norms that
    a module stacks itself. The convolution that embeds patches has a `kernel`.
    """
    leaf = name.rpartition("/")[2]
    if word is None or dims <= 1 or leaf in ("bias", "scale"):
        return word is not None
    return word == "norms_biases_embeddings" and leaf != "kernel" and bool(_EMBEDDING.search(name.lower()))


def _why_empty(is_match: Callable[[str], bool], names: Collection[str], frozen: Collection[str]) -> str:
    if taken := [name for name in names if is_match(name)]:
        return f"earlier groups have all its parameters ({some_of(taken)}); the first match wins, so move this group up"
    if fixed := [name for name in frozen if is_match(name)]:
        return f"matches only frozen parameters ({some_of(fixed)}); remove the group, or train them"
    return f"matches no parameter; the names are {some_of(names)}"


def _ratio(given: Values, params: Values) -> str:
    try:
        return f"; here lr_scale {given['lr'] / params['lr']:g}"
    except (KeyError, TypeError, ZeroDivisionError):
        return ""


def mup_groups(model: Model, base: Model, *, weight_decay: float | None = None) -> list[dict[str, Any]]:
    """Make the parameter groups that move Adam's learning rate from a narrow model to a wide one.

    The maximal update parametrization (μP), Yang et al., arXiv:2203.03466, table 8: rates found on the narrow model
    serve the wide one.

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
