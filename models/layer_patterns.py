"""Which layers of a decoder have a window, and which have RoPE: as config.json says it, and as patterns that repeat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .decoder_config import DecoderConfig

KINDS = {True: "full_attention", False: "sliding_attention"}
CHUNKED = "chunked_attention"
CHUNK, TUNING = "attention_chunk_size", "attn_temperature_tuning"


def patterns_of(there: Mapping[str, Any]) -> dict[str, Any]:
    """Return window, global_layers, rope_layers and more of a config.json."""
    chunk = there.get(CHUNK)
    layers, window = there["num_hidden_layers"], chunk or there.get("sliding_window")
    if not there.get("use_sliding_window", True):
        window = None
    wide = _global(there) if window else [True] * layers
    if not there.get("global_layers_have_rope", True):
        rope = [not is_wide for is_wide in wide]
    else:
        rope = _has_rope(there)
    if there.get("position_embedding_type", "rope") != "rope":
        rope = [False] * layers
    found: dict[str, Any] = {"rope_layers": repeated(rope, True)}
    if there.get(TUNING) and not all(rope):
        found["temperature"] = float(there["attn_scale"]), int(there["floor_scale"])
    if all(wide):
        return {"window": None, "global_layers": None, **found}
    # Gemma 3 has another base in layers with a window, even if there are no others.
    pattern = repeated(wide, False) or ((False,) if "rope_local_base_freq" in there else None)
    return {"window": window, "global_layers": pattern, "chunked": bool(chunk), **found}


def _global(there: Mapping[str, Any]) -> list[bool]:
    """Return which layers have no window."""
    layers = there["num_hidden_layers"]
    if kinds := there.get("layer_types"):
        return [kind == KINDS[True] for kind in kinds[:layers]]
    if there.get(CHUNK):
        return [not has for has in _has_rope(there)]
    if every := there.get("sliding_window_pattern"):
        return [(i + 1) % every == 0 for i in range(layers)]
    if "no_rope_layer_interval" in there:
        return _has_rope(there)
    return [i < there.get("max_window_layers", 0) for i in range(layers)]


def _has_rope(there: Mapping[str, Any]) -> list[bool]:
    layers, interval = there["num_hidden_layers"], there.get("no_rope_layer_interval")
    default = [interval is None or (i + 1) % interval != 0 for i in range(layers)]
    return [bool(flag) for flag in there.get("no_rope_layers") or default]


def repeated(flags: Sequence[bool], plain: bool) -> tuple[bool, ...] | None:
    """Return the shortest pattern whose repetition begins with these flags; None if all are `plain`.

    >>> repeated([False, False, True, False], False), repeated([True, True], True)
    ((False, False, True), None)
    """
    if set(flags) == {plain}:
        return None
    size = next(n for n in range(1, len(flags) + 1) if all(x == flags[i % n] for i, x in enumerate(flags)))
    return tuple(flags[:size])


def patterns_json(config: DecoderConfig, absent: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json has of the patterns.

    Args:
      absent: the family's values of keys that config.json may lack.
    """
    c, content = config, dict[str, Any]()
    layers = range(c.num_layers)
    wide = c.global_layers or (c.window is None,)
    if "use_sliding_window" in absent:
        content["use_sliding_window"] = c.window is not None
    if CHUNK in absent:
        content[CHUNK] = c.window
        content |= dict(zip(("attn_scale", "floor_scale"), c.temperature or (), strict=False))
        if c.rope_layers:
            content[TUNING] = c.temperature is not None
    else:
        content["sliding_window"] = c.window
    listed = bool({"sliding_window_pattern", CHUNK, "layer_types"} & {*absent})
    listed |= c.download is not None and "layer_types" in c.download.config
    if c.global_layers or listed:
        kinds = {**KINDS, False: CHUNKED} if CHUNK in absent else KINDS
        content["layer_types"] = [kinds[wide[i % len(wide)]] for i in layers]
    elif c.window is not None and "use_sliding_window" in absent:
        content["max_window_layers"] = 0
    if "position_embedding_type" in absent:
        content["position_embedding_type"] = None if c.rope_layers else "rope"
    if "no_rope_layer_interval" in absent:
        rope = c.rope_layers or (True,)
        content["no_rope_layers"] = [int(rope[i % len(rope)]) for i in layers]
    return content
