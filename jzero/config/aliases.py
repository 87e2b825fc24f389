"""Keys that stand for others: second and old names, and the automatic casts of PyTorch and apex.

`torch_autocast` and `amp` keep float32 parameters and cast operation by operation. jzero casts by one dtype policy: the
model computes in the half precision, and a layer that is declared float32 stays so. So they are read as the section
`bf16` or `fp16`.
"""

from collections.abc import Collection, Iterator
from typing import Any

from jzero.config.keys import CURRICULUM_METRICS, KEYS, SWITCH, ZERO, Ignored, Replaced
from jzero.errors import mask
from jzero.values.kinds import DTYPE, as_json, number

# Another name of a key -> the key, in the same section. Giving both is an error.
RENAMED = {
    "bfloat16": "bf16",
    "tensor_parallel.tensor_parallel": "tensor_parallel.tp",
    f"{CURRICULUM_METRICS}.seqlen_truncate": f"{CURRICULUM_METRICS}.seqlen",  # Megatron-DeepSpeed's name
    # DeepSpeed takes both names of these.
    **{f"{ZERO}.{name}": f"{ZERO}.stage3_{name}" for name in (
        "prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold", "max_live_parameters",
        "max_reuse_distance", "gather_16bit_weights_on_model_save", "module_granularity_threshold",
        "use_all_reduce_for_fetch_params", "allgather_sequential",
    )},
}  # fmt: skip

# Old flag -> the section that `true` stands for, with the device "cpu".
OLD_OFFLOAD = {
    f"{ZERO}.cpu_offload": f"{ZERO}.offload_optimizer",
    f"{ZERO}.cpu_offload_param": f"{ZERO}.offload_param",
    f"{ZERO}.cpu_offload_params": f"{ZERO}.offload_param",
}

# Old key -> the key of the same section that took its place; giving both is an error. An old key with a row in
# `keys.KEYS` keeps its name, so that the run report names what the user wrote.
DEPRECATED = {
    **OLD_OFFLOAD,
    f"{ZERO}.stage3_gather_fp16_weights_on_model_save": f"{ZERO}.stage3_gather_16bit_weights_on_model_save",
}


def renamed(path: str) -> str:
    """Return the key that a dotted key is another name of, itself if it is none."""
    for other, key in RENAMED.items():
        if path == other or path.startswith(f"{other}."):
            return key + path.removeprefix(other)
    return path


def rename(data: dict[str, Any]) -> Iterator[str]:
    """Give the values of second and old names to the keys that they stand for; yield the problems."""
    for other, key in (RENAMED | DEPRECATED).items():
        section, name, new = section_of(data, other), other.rpartition(".")[2], key.rpartition(".")[2]
        if name not in section or ((value := section.pop(name)) is None and other in OLD_OFFLOAD):
            continue
        if section.get(new) is not None:
            what = "the deprecated" if other in DEPRECATED else "another"
            yield f"{setting_text(other, value)}: is {what} name of {key}, also given; keep {key}"
        elif other not in OLD_OFFLOAD:
            section[new if other in RENAMED else name] = value
        elif type(value) is not bool:
            yield f'{setting_text(other, value)}: must be true or false; or write {key}: {{"device": "cpu"}}'
        elif value:
            section[new] = {"device": "cpu"}


def section_of(data: object, path: str) -> dict[str, Any]:
    """Return the section that a dotted key is in; {} if there is none."""
    for name in path.split(".")[:-1]:
        data = data.get(name) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


def setting_text(key: str, value: object) -> str:
    """Write a key and its value as in the JSON file, masked under a secret's name."""
    return f"{key} = {as_json(mask(key, value))}"


# ---- automatic casts ------------------------------------------------------------------------------------------------

# apex/amp/scaler.py: it halves at the first overflow, and doubles after 2,000 clean steps.
_APEX_SCALER = {"loss_scale_window": 2000, "hysteresis": 1}


def is_autocast(path: str) -> bool:
    """Return whether a dotted key is one that `translate` moves.

    >>> is_autocast("amp.opt_level"), is_autocast("amp.level")
    (True, False)
    """
    return path in KEYS and path.partition(".")[0] in _READERS


def translate(data: dict[str, Any], autos: Collection[str] = ()) -> Iterator[Replaced | Ignored | str]:
    """Move the keys of an enabled `torch_autocast` or `amp` section into `bf16` or `fp16`.

    Args:
      data: the config.
      autos: the keys that it gives as "auto", and `data` no longer has.

    Yields:
      The keys that were moved, those without an `enabled` beside them, and the problems.

    >>> data = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    >>> list(translate(data))[1]
    Replaced(key='torch_autocast.dtype', value='bfloat16', by='one dtype policy: the model computes in bf16')
    >>> data
    {'torch_autocast': {}, 'bf16': {'enabled': True}}
    """
    for name, read in _READERS.items():
        section = data.get(name)
        if not isinstance(section, dict):
            continue
        without = "enabled" not in section and f"{name}.enabled" not in autos
        if not (without or _enabled(section)):
            continue
        given = {key: section.pop(key) for key in list(section) if is_autocast(f"{name}.{key}")}
        if without:
            yield from (Ignored(f"{name}.{key}", value, SWITCH) for key, value in given.items())
            continue
        try:
            precision, settings = read(given, data)
        except ValueError as wrong:
            yield str(wrong)
            continue
        other = "fp16" if precision == "bf16" else "bf16"
        if _enabled(data.get(other)):
            yield f"{name}.enabled = true: means {precision}, and {other}.enabled = true {other}; keep one"
            continue
        own = data.get(precision)
        data[precision] = {**settings, **(own if isinstance(own, dict) else {}), "enabled": True}
        by = f"one dtype policy: the model computes in {precision}"
        yield from (Replaced(f"{name}.{key}", value, by) for key, value in given.items())


def _enabled(section: object) -> bool:
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


_READERS = {"torch_autocast": _torch_autocast, "amp": _amp}
