"""Which layers of a decoder have a window, and which have RoPE: as config.json says it, and as patterns that repeat."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .decoder_config import DecoderConfig

KINDS = {True: "full_attention", False: "sliding_attention"}
CHUNKED = "chunked_attention"
CHUNK, TUNING = "attention_chunk_size", "attn_temperature_tuning"


# The first of these keys that config.json has decides whether layer i has no window; `rope`: which layers have RoPE.
WITHOUT_WINDOW: tuple[tuple[str, Callable[[Any, int, list[bool]], bool]], ...] = (
    ("layer_types", lambda kinds, i, rope: kinds[i % len(kinds)] == KINDS[True]),
    (CHUNK, lambda _, i, rope: not rope[i]),
    ("sliding_window_pattern", lambda every, i, rope: (i + 1) % every == 0),
    ("no_rope_layer_interval", lambda _, i, rope: rope[i]),
    ("max_window_layers", lambda most, i, rope: i < most),
)


def patterns_of(there: Mapping[str, Any]) -> dict[str, Any]:
    """Return window, global_layers, rope_layers and more of a config.json."""
    layers, chunk, every = range(there["num_hidden_layers"]), there.get(CHUNK), there.get("no_rope_layer_interval")
    rope = [bool(has) for has in there.get("no_rope_layers") or [not every or (i + 1) % every for i in layers]]
    window = (chunk or there.get("sliding_window")) if there.get("use_sliding_window", True) else None
    key, rule = next((row for row in WITHOUT_WINDOW if there.get(row[0])), ("", lambda _, i, rope: False))
    wide = [not window or rule(there.get(key), i, rope) for i in layers]
    if not there.get("global_layers_have_rope", True):
        rope = [not is_wide for is_wide in wide]
    if there.get("position_embedding_type", "rope") != "rope":
        rope = [False for _ in layers]
    found: dict[str, Any] = {"rope_layers": repeated(rope, True)}
    if there.get(TUNING) and not all(rope):
        found["temperature"] = float(there["attn_scale"]), int(there["floor_scale"])
    if all(wide):
        return {"window": None, "global_layers": None, **found}
    # Gemma 3 has another base in layers with a window, even if there are no others.
    pattern = repeated(wide, False) or ((False,) if "rope_local_base_freq" in there else None)
    return {"window": window, "global_layers": pattern, "chunked": bool(chunk), **found}


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
    c, chunked = config, CHUNK in absent
    wide, rope = (
        [pattern[i % len(pattern)] for i in range(c.num_layers)]
        for pattern in (c.global_layers or (c.window is None,), c.rope_layers or (True,))
    )
    listed = {"sliding_window_pattern", CHUNK, "layer_types"} & {*absent} or c.global_layers
    content: dict[str, Any] = {CHUNK if chunked else "sliding_window": c.window}
    if listed or (c.download and "layer_types" in c.download.config):
        kinds = {**KINDS, False: CHUNKED} if chunked else KINDS
        content["layer_types"] = [kinds[is_wide] for is_wide in wide]
    elif c.window is not None and "use_sliding_window" in absent:
        content["max_window_layers"] = 0
    if chunked:
        content |= dict(zip(("attn_scale", "floor_scale"), c.temperature or (), strict=False))
        tuning = c.temperature is not None and ((c.download and c.download.config.get(TUNING)) or True)
        content |= {TUNING: tuning} if c.rope_layers else {}
    family = {
        "use_sliding_window": c.window is not None,
        "position_embedding_type": None if c.rope_layers else "rope",
    }
    content |= {key: x for key, x in family.items() if key in absent}
    return content | ({"no_rope_layers": [*map(int, rope)]} if "no_rope_layer_interval" in absent else {})
