"""Advice for an unknown key: where it belongs, or what it looks like."""

from collections.abc import Collection, Iterable

from jzero.config.keys import CLIP, dotted
from jzero.values.kinds import closest, either, show

# Parameters of an optimizer or schedule that people write one level too high.
_PARAMS = {
    "optimizer.params": "lr betas eps weight_decay momentum bias_correction",
    "scheduler.params": "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps cos_min_ratio",
}
_ADVICE = {key: f"it belongs in {home}" for home, keys in _PARAMS.items() for key in keys.split()}
_ADVICE["max_grad_norm"] = CLIP


def names(section: str, keys: Iterable[str]) -> list[str]:
    """The names directly inside a section ("" is the top level), given dotted keys.

    >>> names("fp16", ["fp16.enabled", "bf16.enabled"])
    ['enabled']
    """
    inside = f"{section}." if section else ""
    return sorted({k.removeprefix(inside).split(".")[0] for k in keys if k.startswith(inside)})


def suggest(section: str, key: str, working: Collection[str], known: Collection[str]) -> str:
    """Where the unknown key belongs or what it looks like, given the dotted `working` keys and all `known` ones.

    >>> suggest("zero_optimization", "gradient_clipping", ["gradient_clipping"], ["zero_optimization.stage"])
    'it belongs at the top level'
    """
    low = key.lower()

    def homes(keys: Collection[str]) -> list[str]:
        return sorted({k.rpartition(".")[0] for k in keys if k.rpartition(".")[2] == low})

    if dotted(section, key) in known:
        return "write its dots as nested sections"
    if close := closest(key, names(section, known), 0.85):
        return f"did you mean {show(close)}?"
    if key in _ADVICE:
        return _ADVICE[key]
    places = homes(working) or homes(known)
    if "" in places:
        return "it belongs at the top level"
    if 0 < len(places) <= 3:
        return f"it belongs in {either(places)}"
    if close := closest(key, names(section, known), 0.65):
        return f"did you mean {show(close)}?"
    if close := closest(key, {k.rpartition(".")[2] for k in working}, 0.8):
        return f"did you mean {either(k for k in working if k.rpartition('.')[2] == close)}?"
    return f"the keys here are {', '.join(names(section, working) or names(section, known))}"
