"""`torch_autocast` and `amp`: PyTorch's and apex's automatic casts, read as the `bf16` or `fp16` section.

Both keep float32 parameters and cast operation by operation. jzero casts by one dtype policy: the model computes in the
half precision, and a layer that is declared float32 stays so.
"""

from collections.abc import Collection
from typing import Any

from jzero.config.ignored import SWITCH, Ignored
from jzero.config.keys import REFUSED, Replaced, dotted_key
from jzero.values.kinds import DTYPE, as_json, number

# apex/amp/scaler.py: it halves at the first overflow, and doubles after 2,000 clean steps.
_APEX_SCALER = {"loss_scale_window": 2000, "hysteresis": 1}


def is_autocast(path: str) -> bool:
    """Return whether a dotted key is one that `translate` moves.

    >>> is_autocast("amp.opt_level"), is_autocast("amp.level")
    (True, False)
    """
    return path in REFUSED and path.partition(".")[0] in ("torch_autocast", "amp")


def translate(data: dict[str, Any], autos: Collection[str] = ()) -> tuple[list[Replaced], list[Ignored], list[str]]:
    """Move the keys of an enabled `torch_autocast` or `amp` section into `bf16` or `fp16`.

    Args:
      data: the config.
      autos: the keys that it gives as "auto", and `data` no longer has.

    Returns:
      The keys that were moved, those without an `enabled` beside them, and the problems.

    >>> data = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    >>> translate(data)[0][1]
    Replaced(key='torch_autocast.dtype', value='bfloat16', by='one dtype policy: the model computes in bf16')
    >>> data
    {'torch_autocast': {}, 'bf16': {'enabled': True}}
    """
    replaced, ignored, problems = [], [], []
    for name, read in (("torch_autocast", _torch_autocast), ("amp", _amp)):
        section = data.get(name)
        if not isinstance(section, dict):
            continue
        without = "enabled" not in section and f"{name}.enabled" not in autos
        if not (without or _enabled(section)):
            continue
        given = {key: section.pop(key) for key in list(section) if is_autocast(dotted_key(name, key))}
        if without:
            ignored += [Ignored(f"{name}.{key}", value, SWITCH) for key, value in given.items()]
            continue
        try:
            precision, settings = read(given, data)
        except ValueError as wrong:
            problems.append(str(wrong))
            continue
        other = "fp16" if precision == "bf16" else "bf16"
        if _enabled(data.get(other)):
            problems.append(f"{name}.enabled = true: means {precision}, and {other}.enabled = true {other}; keep one")
            continue
        own = data.get(precision)
        data[precision] = {**settings, **(own if isinstance(own, dict) else {}), "enabled": True}
        by = f"one dtype policy: the model computes in {precision}"
        replaced += [Replaced(f"{name}.{key}", value, by) for key, value in given.items()]
    return replaced, ignored, problems


def _enabled(section: Any) -> bool:
    return isinstance(section, dict) and section.get("enabled") in (True, 1)


def _torch_autocast(given: dict[str, Any], data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    dtype = given.get("dtype") or ("bf16" if _enabled(data.get("bf16")) else "fp16")  # float16 is PyTorch's default
    try:
        if (precision := DTYPE(dtype)) != "fp32":
            return precision, {}
    except ValueError:
        pass
    raise ValueError(f'torch_autocast.dtype = {as_json(dtype)}: must be "bfloat16" or "float16"')


def _amp(given: dict[str, Any], data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    level, scale = given.get("opt_level", "O1"), given.get("loss_scale", "dynamic")
    if level not in ("O1", "O2"):
        raise ValueError(
            f'amp.opt_level = {as_json(level)}: must be "O1" or "O2"; for O0 (float32) set amp.enabled to false, for '
            'O3 (no float32 masters) write "fp16": {"enabled": true, "fp16_master_weights_and_grads": true}'
        )
    if scale == "dynamic":
        return "fp16", dict(_APEX_SCALER)
    try:
        return "fp16", {"loss_scale": number(above=0, float32=True)(float(scale))}
    except (TypeError, ValueError):
        raise ValueError(f'amp.loss_scale = {as_json(scale)}: must be "dynamic" or a positive number') from None
