"""RoPE in a config.json of transformers 4 or 5: its base, the part of a head that it rotates, its scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jzero.errors import ConfigError

from .decoder_config import DecoderConfig
from .rope import RopeScaling

ORIGINAL = "original_max_position_embeddings"
# kind -> {field of RopeScaling: key}
SCALINGS = {
    "linear": {},
    "dynamic": {},
    "llama3": {"low": "low_freq_factor", "high": "high_freq_factor", "original": ORIGINAL},
    "yarn": {
        "low": "beta_slow", "high": "beta_fast", "original": ORIGINAL, "attention_factor": "attention_factor",
        "mscale": "mscale", "mscale_all": "mscale_all_dim", "truncate": "truncate",
    },
    "longrope": {
        "original": ORIGINAL, "attention_factor": "attention_factor", "short": "short_factor", "long": "long_factor",
    },
}  # fmt: skip
YARN = {"low": 1.0, "high": 32.0}  # transformers' defaults


def rope_of(there: Mapping[str, Any], local: bool) -> dict[str, Any]:
    """Return rope_theta, rope_scaling, partial_rotary and local_theta of a config.json.

    Args:
      local: whether layers with a window have a base of their own, without scaling.
    """
    rope = {**(there.get("rope_scaling") or {}), **(there.get("rope_parameters") or {})}
    near = rope.get("sliding_attention", {})
    rope |= rope.pop("full_attention", {})
    theta = float(rope.get("rope_theta") or there.get("rotary_emb_base") or there["rope_theta"])
    found: dict[str, Any] = {"rope_theta": theta, "rope_scaling": _scaling(rope, there)}
    part = rope.get("partial_rotary_factor") or there.get("partial_rotary_factor") or there.get("rotary_pct")
    found["partial_rotary"] = part or 1.0
    if local and "rope_local_base_freq" in there:
        found["local_theta"] = float(near.get("rope_theta") or there["rope_local_base_freq"] or theta)
    return found


def _scaling(rope: Mapping[str, Any], there: Mapping[str, Any]) -> RopeScaling | None:
    kind: Any = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    if kind == "default":
        return None
    if kind not in SCALINGS:
        raise ConfigError(f"config.json has rope_type = {kind!r}: must be default, {', '.join(SCALINGS)}")
    most = there.get("max_position_embeddings")
    values = {ORIGINAL: there.get(ORIGINAL, most), **{key: x for key, x in rope.items() if x is not None}}
    found = {field: values[key] for field, key in SCALINGS[kind].items() if values.get(key) is not None}
    if kind == "dynamic":
        found["original"] = most
    if rope.get("mscale_all_dim") and kind != "yarn":
        raise ConfigError(
            f"config.json has mscale_all_dim = {rope['mscale_all_dim']} with rope_type = {kind!r}: must be yarn"
        )
    missing = [key for field, key in SCALINGS[kind].items() if field in ("short", "long", "original")]
    missing = [key for key in missing if not values.get(key)]
    if missing or (kind == "dynamic" and not most):
        raise ConfigError(f"config.json has no {', '.join(missing or ['max_position_embeddings'])} for {kind}")
    factor = rope.get("factor") or (most / found["original"] if most and "original" in found else 1.0)
    found |= {key: tuple(map(float, found[key])) for key in ("short", "long") if key in found}
    return RopeScaling(kind, factor=factor, **{**(YARN if kind == "yarn" else {}), **found})


def rope_json(config: DecoderConfig, absent: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json has of RoPE; a download's own entries stay while they hold.

    Args:
      absent: the family's values of keys that config.json may lack.
    """
    c = config
    rope = _parameters(c.rope_theta, c.rope_scaling)
    scaling = None if c.rope_scaling is None else {key: x for key, x in rope.items() if key != "rope_theta"}
    content: dict[str, Any] = {"rope_theta": c.rope_theta, "rope_scaling": scaling}  # transformers 4
    part = {"partial_rotary_factor": c.partial_rotary} if c.partial_rotary != 1 or "rotary_pct" in absent else {}
    if "rotary_pct" in absent:
        content |= {"rotary_pct": c.partial_rotary, "rotary_emb_base": c.rope_theta}
    elif part or "partial_rotary_factor" in absent:
        content["partial_rotary_factor"] = c.partial_rotary
        part = {"partial_rotary_factor": c.partial_rotary}
    content["rope_parameters"] = {**rope, **part}  # transformers 5
    if c.rope_scaling and c.rope_scaling.kind == "dynamic":
        content["max_position_embeddings"] = c.rope_scaling.original
    if "rope_local_base_freq" in absent:
        near = c.local_theta or c.rope_theta
        content["rope_parameters"] = {"full_attention": rope, "sliding_attention": _parameters(near, None)}
        content |= {"rope_local_base_freq": near} if absent["rope_local_base_freq"] else {}
    own = {key: x for key, x in c.download.config.items() if x is not None} if c.download else {}
    # A family's own scaling goes back as numbers.
    same = rope_of({"rope_theta": 10_000.0, **absent, "rope_scaling": None, **own}, c.local_theta is not None)
    if all(getattr(c, key) == value for key, value in same.items()):
        content |= {key: own[key] for key in ("rope_parameters", "rope_scaling") if own.get(key)}
    return content


def _parameters(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    values = {key: getattr(scaling, field) for field, key in SCALINGS[scaling.kind].items()}
    values = {key: list(x) if isinstance(x, tuple) else x for key, x in values.items() if x is not None}
    return {"rope_type": scaling.kind, "rope_theta": theta, "factor": scaling.factor, **values}
