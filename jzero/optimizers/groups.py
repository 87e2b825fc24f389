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

from jzero.errors import ConfigError, some_of
from jzero.optimizers.table import BETAS, Row
from jzero.stored_names import StoredNames, matches
from jzero.values.kinds import NON_NEGATIVE32, PATTERN, as_json
from jzero.values.parameters import REQUIRED, Param, read_params

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
    values: Mapping[str, Any]
    leaves: Mapping[str, Mapping[str, Any]]

    @property
    def lr_scale(self) -> float:
        return self.values.get("lr_scale", 1.0)

    @property
    def undecayed(self) -> list[str]:
        """The names of the parameters whose weight decay `no_weight_decay` sets to 0."""
        return [name for name, own in self.leaves.items() if own.get("weight_decay") != self.values.get("weight_decay")]


def own_values(groups: Collection[Group]) -> dict[str, Mapping[str, Any]]:
    """Map the names of the parameters of all groups to their own values."""
    return {name: own for group in groups for name, own in group.leaves.items() if own}


def group_problems(optimizer_config: Any, row: Row | None, params: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems of `optimizer.groups` and `optimizer.no_weight_decay` that show before any array is made.

    Args:
      optimizer_config: the section.
      row, params: of the optimizer, see `table.look_up`; without a row only the groups themselves are checked.
    """
    kind = optimizer_config.type
    if row and "weight_decay" not in row.by_group and (word := _word(optimizer_config)):
        yield f"optimizer.no_weight_decay = {as_json(word)}: {kind} {WHY['weight_decay']}; leave it out"
    decays = {params[row.decay] or 0.0} if row and row.decay in params else {0.0}
    for i, given in enumerate(_given(optimizer_config)):
        where = f"optimizer.groups[{i}]"
        if "lr" in given:
            yield f"{where}.lr: write lr_scale, the factor on the schedule's learning rate{_ratio(given, params)}"
        values, problems = read_params(where, {key: x for key, x in given.items() if key != "lr"}, KEYS)
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
    optimizer_config: Any, dims: Mapping[str, int], frozen: Collection[str] = (), names: StoredNames | None = None
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
    given = [_set(read_params("", group, KEYS)[0]) | {"match": group["match"]} for group in _given(optimizer_config)]
    patterns = [re.compile(group.pop("match")) for group in given]
    keys = [f"optimizer.groups[{i}].match = {as_json(pattern.pattern)}" for i, pattern in enumerate(patterns)]
    hits = {name: [matches(key, p, name, names) for key, p in zip(keys, patterns, strict=True)] for name in dims}
    first = {name: found.index(True) if any(found) else None for name, found in hits.items()}
    problems = [
        f"{key}: {_why_empty(partial(matches, key, pattern, names=names), dims, frozen)}"
        for i, (key, pattern) in enumerate(zip(keys, patterns, strict=True))
        if i not in first.values()
    ]
    if problems:
        raise ConfigError(*problems)
    word = _word(optimizer_config)

    def group(index: int | None, match: str | None, values: Mapping[str, Any]) -> Group:
        zero = {"weight_decay": 0.0}
        return Group(match, values, {
            name: {**(zero if _is_exempt(word, name, dims[name]) else {}), **values}
            for name, number in first.items() if number == index
        })  # fmt: skip

    rows = zip(range(len(given)), patterns, given, strict=True)
    return (*(group(i, pattern.pattern, values) for i, pattern, values in rows), group(None, None, {}))


def _given(optimizer_config: Any) -> tuple[dict[str, Any], ...]:
    return tuple(getattr(optimizer_config, "groups", ()))


def _word(optimizer_config: Any) -> str | None:
    return getattr(optimizer_config, "no_weight_decay", None)


def _set(values: Mapping[str, Any]) -> dict[str, Any]:
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


def _ratio(given: Mapping[str, Any], params: Mapping[str, Any]) -> str:
    try:
        return f"; here lr_scale {given['lr'] / params['lr']:g}"
    except (KeyError, TypeError, ZeroDivisionError):
        return ""
