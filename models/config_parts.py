"""Parts of a config.json that several keys say together: windows, RoPE, mixtures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jzero.errors import ConfigError

from .decoder_config import DecoderConfig, LatentConfig
from .families import EXPERTS, TIMES, Family
from .moe import MixtureConfig
from .rope import RopeScaling

FULL, SLIDING, CHUNKED = KINDS = "full_attention", "sliding_attention", "chunked_attention"
CHUNK, TUNING = "attention_chunk_size", "attn_temperature_tuning"
MOST, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
LOCAL, PART = "rope_local_base_freq", "partial_rotary_factor"


def decoder_fields(found: Mapping[str, Any], there: Mapping[str, Any], trained: bool) -> dict[str, Any]:
    """Add to the fields of a decoder what several keys decide; `trained`: there are weights."""
    fields = dict(found)
    if "latent" in fields:
        fields["latent"] = LatentConfig(**fields["latent"])
    if "mixture" in fields:
        fields["mixture"] = mixture_of(fields["mixture"], there, trained)
        fields["dense_layers"] = dense_of(there)
    width, heads = None if "latent" in fields else there.get("head_dim"), fields["num_heads"]
    if width and width * heads != fields["d_model"]:
        fields["head_width"] = width
    if fields.get("attention_scale") == (width or fields["d_model"] // heads) ** -0.5:
        del fields["attention_scale"]  # the default
    fields = {**patterns_of(there), **fields}
    return fields if fields.get("max_positions") else fields | rope_of(there, fields["global_layers"] is not None)


def decoder_parts(c: DecoderConfig, family: Family, there: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield keys of a decoder's config.json: together those that are read together."""
    yield {"head_dim": c.latent.rotated, "qk_head_dim": c.head_dim} if c.latent else {"head_dim": c.head_dim}
    if c.mixture:
        yield mixture_json(c, c.mixture, family.dense)
    yield patterns_json(c, there)
    yield rope_json(c, there)


# The first of these keys that config.json has decides whether layer i has no window; `rope`: which layers have RoPE.
WITHOUT_WINDOW: tuple[tuple[str, Callable[[Any, int, list[bool]], bool]], ...] = (
    ("layer_types", lambda kinds, i, rope: kinds[i % len(kinds)] == FULL),
    (CHUNK, lambda _, i, rope: not rope[i]),
    ("sliding_window_pattern", lambda every, i, rope: (i + 1) % every == 0),
    ("no_rope_layer_interval", lambda _, i, rope: rope[i]),
    ("max_window_layers", lambda most, i, rope: i < most),
)


def patterns_of(there: Mapping[str, Any]) -> dict[str, Any]:
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
    pattern = repeated(wide, False) or ((False,) if LOCAL in there else None)
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


def patterns_json(config: DecoderConfig, there: Mapping[str, Any]) -> dict[str, Any]:
    c, chunked = config, CHUNK in there
    patterns = c.global_layers or (c.window is None,), c.rope_layers or (True,)
    wide, rope = ([pattern[i % len(pattern)] for i in range(c.num_layers)] for pattern in patterns)
    content: dict[str, Any] = {CHUNK if chunked else "sliding_window": c.window}
    if c.global_layers or {"sliding_window_pattern", CHUNK, "layer_types"} & there.keys():
        near = CHUNKED if chunked else SLIDING
        content["layer_types"] = [FULL if is_wide else near for is_wide in wide]
    elif c.window is not None and "use_sliding_window" in there:
        content["max_window_layers"] = 0
    content |= dict(zip(("attn_scale", "floor_scale"), c.temperature or (), strict=False))
    some = {
        "use_sliding_window": c.window is not None,
        "position_embedding_type": None if c.rope_layers else "rope",
        TUNING: c.temperature is not None,
    }
    content |= {key: x for key, x in some.items() if key in there}
    return content | ({"no_rope_layers": [*map(int, rope)]} if "no_rope_layer_interval" in there else {})


# ------------------------------------------------------------------------------------------- RoPE

# kind -> {field of RopeScaling: key}
SCALINGS = {
    "linear": {},
    "dynamic": {"original": MOST},
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
    """Return the fields of RoPE; local: layers with a window may have a base of their own, without scaling."""
    rope = {**(there.get("rope_scaling") or {}), **(there.get("rope_parameters") or {})}
    near = rope.get("sliding_attention", {})
    rope |= rope.pop("full_attention", {})
    theta = float(rope.get("rope_theta") or there.get("rotary_emb_base") or there["rope_theta"])
    found: dict[str, Any] = {"rope_theta": theta, "rope_scaling": _scaling(rope, there)}
    found["partial_rotary"] = rope.get(PART) or there.get(PART) or there.get("rotary_pct") or 1.0
    if local and LOCAL in there:
        found["local_theta"] = float(near.get("rope_theta") or there[LOCAL] or theta)
    return found


def _scaling(rope: Mapping[str, Any], there: Mapping[str, Any]) -> RopeScaling | None:
    kind: Any = rope.get("rope_type", rope.get("type", "default"))
    kind = "longrope" if kind == "su" else kind
    if kind == "default":
        return None
    if kind not in SCALINGS:
        raise ConfigError(f"config.json has rope_type = {kind!r}: must be default, {', '.join(SCALINGS)}")
    if rope.get("mscale_all_dim") and kind != "yarn":
        given = f"mscale_all_dim = {rope['mscale_all_dim']} with rope_type = {kind!r}"
        raise ConfigError(f"config.json has {given}: must be yarn")
    most, keys = there.get(MOST), SCALINGS[kind]
    values = {MOST: most, ORIGINAL: there.get(ORIGINAL, most), **{key: x for key, x in rope.items() if x is not None}}
    needed = [keys[field] for field in ("original", "short", "long") if field in keys]
    if missing := [key for key in needed if not values.get(key)]:
        raise ConfigError(f"config.json has no {', '.join(missing)} for {kind}")
    found = {field: values[key] for field, key in keys.items() if values.get(key) is not None}
    factor = rope.get("factor") or (most / found["original"] if most and "original" in found else 1.0)
    found |= {key: tuple(map(float, found[key])) for key in ("short", "long") if key in found}
    return RopeScaling(kind, factor=factor, **{**(YARN if kind == "yarn" else {}), **found})


def rope_json(config: DecoderConfig, there: Mapping[str, Any]) -> dict[str, Any]:
    c, rope = config, _parameters(config.rope_theta, config.rope_scaling)
    near = _parameters(c.local_theta or c.rope_theta, None)
    content: dict[str, Any] = {MOST: rope.pop(MOST)} if MOST in rope else {}
    scaling = {key: x for key, x in rope.items() if key != "rope_theta"} if c.rope_scaling else None
    content |= {"rope_theta": c.rope_theta, "rope_scaling": scaling}  # transformers 4
    if "rotary_pct" in there:
        content |= {"rotary_pct": c.partial_rotary, "rotary_emb_base": c.rope_theta}
    elif c.partial_rotary != 1 or PART in there:
        content[PART] = c.partial_rotary
    if LOCAL in there:
        rope = {"full_attention": rope, "sliding_attention": near}
        content |= {LOCAL: near["rope_theta"]} if there[LOCAL] else {}
    elif "rotary_pct" in there or PART in content:
        rope[PART] = c.partial_rotary
    return {**content, "rope_parameters": rope}  # transformers 5


def _parameters(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    values = {key: getattr(scaling, field) for field, key in SCALINGS[scaling.kind].items()}
    values = {key: list(x) if isinstance(x, tuple) else x for key, x in values.items() if x is not None}
    return {"rope_type": scaling.kind, "rope_theta": theta, "factor": scaling.factor, **values}


# ------------------------------------------------------------------------------------------- mixtures

DENSE = ("mlp_only_layers", "decoder_sparse_step", "first_k_dense_replace", "interleave_moe_layer_step", "moe_layers")
# family -> {topk_method: how many of a group's scores count}; 0: there are no groups. V3's always has some.
METHODS = {"deepseek_v2": {"greedy": 0, "group_limited_greedy": 1}, "deepseek_v3": {"noaux_tc": 2}}


def mixture_of(fields: dict[str, Any], there: Mapping[str, Any], trained: bool) -> MixtureConfig:
    """Add to the fields of a mixture what several keys decide; the bias of `trained` weights stays as it is."""
    # transformers adds the loss only then, by default with 0.001; most downloads have a coefficient without it.
    balance = there.get("router_aux_loss_coef", 0.001) if there.get("output_router_logits") else 0.0
    fields = {"balance": balance, **fields, "groups": _groups(there, fields["num_experts"])}
    if trained and "bias_rate" in fields:
        fields["bias_rate"] = 0.0
    if there["model_type"] in METHODS:
        fields["shared"] = fields.get("shared", 0) * fields["width"]
    if "swiglu_limit" in there:
        fields["clamp"] = there["swiglu_alpha"], there["swiglu_limit"]
    return MixtureConfig(**fields)


def _groups(there: Mapping[str, Any], experts: int) -> tuple[int, int, int] | None:
    """Read the groups that limit a token's experts, see `jzero.route`; None without them, or with one."""
    methods = METHODS.get(there["model_type"])
    if methods is None or methods.get(there["topk_method"]) == 0:
        return None
    count, kept, best = there.get("n_group") or 0, there.get("topk_group") or 0, methods.get(there["topk_method"])
    top_k, size = there["num_experts_per_tok"], experts // count if count and experts % count == 0 else 0
    if best is None or not 1 <= kept <= count or kept * size < top_k or size < best:
        raise ConfigError(
            f"config.json has topk_method = {there['topk_method']!r}, n_group = {there.get('n_group')}, topk_group = "
            f"{there.get('topk_group')}: must be {' or '.join(methods)}, a number of groups that divides the {experts} "
            f"experts, and as many of them, at most n_group, as have the {top_k} of a token"
        )
    return (count, kept, best) if count > 1 else None


def dense_of(there: Mapping[str, Any]) -> tuple[int, ...]:
    only, step, first, every, sparse = (there.get(key) for key in DENSE)
    layers, step = range(there["num_hidden_layers"]), step or every or 1
    if sparse is not None:
        return tuple(i for i in layers if i not in sparse)
    return tuple(i for i in layers if i in (only or ()) or (i + 1) % step or i < (first or 0))


def mixture_json(config: DecoderConfig, mixture: MixtureConfig, key: str | None) -> dict[str, Any]:
    """Write a mixture; `key` has the layers with it, or those without."""
    c, layers = config, range(config.num_layers)
    content: dict[str, Any] = {EXPERTS: mixture.num_experts}
    content |= {} if c.download else {"router_aux_loss_coef": mixture.balance, "output_router_logits": False}
    if methods := METHODS.get(c.family):
        count, kept, best = mixture.groups or (1, 1, 0)
        method = next((name for name, x in methods.items() if x == best), next(iter(methods)))
        content |= {TIMES: mixture.shared // mixture.width, "topk_method": method}
        content |= {"n_group": count, "topk_group": kept} if methods[method] else {}
    content |= dict(zip(("swiglu_alpha", "swiglu_limit"), mixture.clamp or (), strict=False))
    dense: dict[str, dict[str, Any]] = {
        "mlp_only_layers": {"mlp_only_layers": [*c.dense_layers], "decoder_sparse_step": 1},
        "moe_layers": {"moe_layers": [i for i in layers if i not in c.dense_layers]},
        "first_k_dense_replace": {"first_k_dense_replace": len(c.dense_layers)},
    }
    return content | dense.get(key or "", {})
