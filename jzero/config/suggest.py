"""Advice for an unknown key: the section it belongs in, or the known key that resembles it."""

from collections.abc import Collection, Iterable

from jzero.config.ignored import OPTIMIZER_PARAMS, SCHEDULER_PARAMS
from jzero.config.keys import CLIP, dotted_key
from jzero.values.kinds import as_json, closest, either

# Parameters of an optimizer or schedule that users write one level too high.
_PARAMS = {"optimizer.params": OPTIMIZER_PARAMS, "scheduler.params": SCHEDULER_PARAMS}
_ADVICE = {key: f"it belongs in {home}" for home, keys in _PARAMS.items() for key in keys.split()}
_ADVICE["max_grad_norm"] = CLIP
_ADVICE["learning_rate"] = "write it as optimizer.params.lr"
LISTED = 10  # names; more are a wall of text


def names_inside(section: str, keys: Iterable[str]) -> list[str]:
    """List the names directly inside a section ("" is the top level) of dotted keys.

    >>> names_inside("fp16", ["fp16.enabled", "bf16.enabled"])
    ['enabled']
    """
    inside = f"{section}." if section else ""
    return sorted({k.removeprefix(inside).split(".")[0] for k in keys if k.startswith(inside)})


def suggest(section: str, key: str, value: object, working: Collection[str], known: Collection[str]) -> str:
    """Advise on an unknown key, most certain advice first.

    Args:
      section, key, value: of the unknown key.
      working: the dotted keys of fields.
      known: the same, and the replaced and refused keys.

    Returns:
      A clause for the error message. The cutoffs are similarity ratios of difflib: near-identical names in the same
      section beat a known home elsewhere, which beats a loose resemblance.

    >>> suggest("zero_optimization", "gradient_clipping", 1, ["gradient_clipping"], ["zero_optimization.stage"])
    'it belongs at the top level'
    """
    low, sections = key.lower(), {k.rpartition(".")[0] for k in known}

    def fits(known_key: str) -> bool:
        # a flag for a section with a device is offload_optimizer: true, in the wrong place
        return isinstance(value, dict) or known_key not in sections or f"{known_key}.device" in working

    def homes(keys: Collection[str]) -> list[str]:
        return sorted({k.rpartition(".")[0] for k in keys if k.rpartition(".")[2] == low and fits(k)})

    if dotted_key(section, key) in known:
        return "write its dots as nested sections"
    if close := closest(key, names_inside(section, known), 0.85):
        return f"did you mean {as_json(close)}?"
    if key in _ADVICE:
        return _ADVICE[key]
    places = homes(working) or homes(known)
    if "" in places:
        return "it belongs at the top level"
    if 0 < len(places) <= 3:
        return f"it belongs in {either(places)}"
    if close := closest(key, names_inside(section, known), 0.65):
        return f"did you mean {as_json(close)}?"
    here = names_inside(section, working) or names_inside(section, known)
    if len(here) <= LISTED:
        return f"the keys here are {', '.join(here)}"
    if close := closest(key, {k.rpartition(".")[2] for k in working if fits(k)}, 0.8):
        return f"did you mean {either(k for k in working if k.rpartition('.')[2] == close)}?"
    return 'no known key resembles it; docs/configuration.md lists all, and "strict": false makes this a warning'
