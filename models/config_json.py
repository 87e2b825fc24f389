"""Models of the `transformers` library: the reading and the writing of config.json, and the table of the weights.

`there` is the content of a config.json, with the family's values of keys that it lacks.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jzero.errors import ConfigError

from .decoder_config import DecoderConfig, LatentConfig, check_fields
from .downloads import ADVICE, OWN, Download
from .families import EXPERTS, FAMILIES, LATENT, SIZES, TIMES, Family
from .lora import adapters_table
from .moe import MixtureConfig
from .rope import RopeScaling
from .tensor_names import tensor_rows

FULL, SLIDING, CHUNKED = KINDS = "full_attention", "sliding_attention", "chunked_attention"
CHUNK, TUNING = "attention_chunk_size", "attn_temperature_tuning"
MOST, ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
LOCAL, PART = "rope_local_base_freq", "partial_rotary_factor"
OWN_NAMES = "weights in files have jzero's own names: "
FUTURE = "num_nextn_predict_layers"
# Keys of a config.json that concern the training alone, and what is said of them in the run report.
DROPOUT = ("attention_dropout", "hidden_dropout", "embedding_dropout", "residual_dropout")
LEFT_OUT = {
    **dict.fromkeys((*DROPOUT, "embd_pdrop", "attn_pdrop", "resid_pdrop"), "decoders have no dropout; it is left out"),
    "aux_loss_alpha": "this loss is left out, as in transformers; mixture.balance sets a balance loss",
}
# The fields that files do not have.
OURS = (
    "attention", "future_layers", "future_weight", "pad_vocab_to", "loss_tiles", "mlp_tiles", "lora", "download",
    "family", "mixture.capacity_factor", "mixture.balance", "mixture.bias_rate",
)  # fmt: skip
MAY_DIFFER = (
    "architectures", "bos_token_id", "eos_token_id",
    "head_dim",  # the tensors' shapes imply it
    "rope_parameters",  # its entries are compared individually
    "max_window_layers",
    "n_inner",  # null is 4 * n_embd
    FUTURE,  # files may have more of these layers than the model
)  # fmt: skip
EXPERTS_SIZES = ("mixture.num_experts", "mixture.top_k", "mixture.width")
ENCODER_SIZES = ("num_types", "num_classes", "image_size", "patch_size", "num_channels")
COUNTS = (*SIZES, "num_kv_heads", "max_positions", *LATENT, *EXPERTS_SIZES, *ENCODER_SIZES)
NEEDED = (*SIZES, "max_positions", *EXPERTS_SIZES, "mixture.shared", *ENCODER_SIZES)
ANEW = {*OWN, FUTURE, "no_rope_layers"}  # what depends on num_layers is always written
NULLS = ("sliding_window", CHUNK, "q_lora_rank", TIMES)  # keys whose null is not their default
REFUSED = ("use_bidirectional_attention", "quantization_config", "clip_qkv", "router_jitter_noise")


def read_config(download: Download, **changes: Any) -> DecoderConfig:
    """Read the shape of a decoder or encoder from a config.json of `transformers`, versions 4 and 5.

    A ConfigError lists all that jzero's models lack.

    >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> read_config(Download({"model_type": "qwen2", "vocab_size": 64, **shape})).qkv_bias
    True
    """
    name, family = download.config["model_type"], FAMILIES[download.config["model_type"]]
    kind = family.kind
    check_fields(kind, changes)
    there = {"rms_norm_eps": 1e-6, "rope_theta": 10_000.0, **family.absent}  # transformers' defaults
    there |= {key: value for key, value in download.config.items() if value is not None or key in NULLS}
    if download.config.get("rope_parameters"):  # of transformers 5, in the place of a family's rope_scaling
        there["rope_scaling"] = download.config.get("rope_scaling")
    quantized = there.get("quantization_config", {})
    method, blocks = (quantized.get(key) for key in ("quant_method", "weight_block_size"))
    if method == "mxfp4" or (method == "fp8" and blocks == [128, 128]):
        del there["quantization_config"]  # `load_weights` reads both
    if name == "gpt2" and "n_embd" in there:
        there.setdefault("n_inner", 4 * there["n_embd"])
    if name == "vit":
        there.setdefault("num_labels", len(there.get("id2label") or range(2)))  # transformers makes two
    keys = family.all_keys
    if EXPERTS in there and "mixture.num_experts" in keys:
        there.setdefault(keys["mixture.num_experts"], there[EXPERTS])
    # Where the caller gives a number, the file needs none.
    there |= {keys[x]: changes[x] for x in COUNTS if x in keys and x in changes and not there.get(keys[x])}
    problems = [f"config.json has no {keys[x]}" for x in NEEDED if x in keys and keys[x] not in there]
    counts = {keys[x]: there.get(keys[x]) for x in COUNTS if x in keys}
    wrong = {key: "a positive integer" for key, n in counts.items() if n is not None and (type(n) is not int or n < 1)}
    wrong |= {key: repr(value) for key, value in family.needs.items() if there.get(key, value) != value}
    problems += [f"config.json has {key} = {there[key]!r}: must be {value}" for key, value in wrong.items()]
    lacking = [f"{key} = {there[key]!r}" for key in REFUSED if there.get(key)]
    kinds = set(there.get("layer_types", ())) - {*KINDS, "attention"}
    lacking += [f"{kind!r} in layer_types" for kind in sorted(kinds)]
    problems += [f"config.json has {what}: jzero's models lack it" for what in lacking]
    activation, kept = keys["activation"]
    allowed = [key for key, x in kept.items() if "activation" not in family.fixed or x.startswith("gelu")]
    for key in (activation, "hidden_activation"):
        if key not in wrong and there.get(key, allowed[0]) not in allowed:
            problems.append(f"config.json has {key} = {there[key]!r}: must be one of {', '.join(allowed)}")
    if problems:
        raise ConfigError(*problems)
    found: dict[str, Any] = {}
    for path, value in {**{field: _read(there, key) for field, key in keys.items()}, **family.fixed}.items():
        group, _, field = path.rpartition(".")
        if value is not None:
            (found.setdefault(group, {}) if group else found)[field] = value
    found.setdefault("num_kv_heads", found["num_heads"])
    there["num_hidden_layers"] = found["num_layers"]
    if "latent" in found:
        found["latent"] = LatentConfig(**found["latent"])
    if "mixture" in found:
        found["mixture"] = mixture_of(found["mixture"], there, download.directory is not None)
        found["dense_layers"] = dense_of(there)
    width, heads = there.get("head_dim") if kind.causal and "latent" not in found else None, found["num_heads"]
    if width and width * heads != found["d_model"]:
        found["head_width"] = width
    if found.get("attention_scale") == (width or found["d_model"] // heads) ** -0.5:
        del found["attention_scale"]  # the default
    found = {**(patterns_of(there) if kind.causal else {}), **found, "family": name, "download": download}
    if kind.causal and not found.get("max_positions"):
        found |= rope_of(there, found["global_layers"] is not None)
    fields = {field.name for field in dataclasses.fields(kind) if field.init}
    return kind(**{**{key: x for key, x in found.items() if key in fields and x is not None}, **changes})


def _read(there: Mapping[str, Any], key: Any) -> Any:
    key, change = (key, 1) if isinstance(key, str) else key
    value = there.get(key)
    if isinstance(change, Mapping):
        return change.get(value)
    return value if change == 1 or value is None else value**change


def weights_table(config: DecoderConfig) -> tuple[dict[str, Any] | None, list[str]]:
    """Describe the parameters in `transformers`, see `jzero.weights.name_map`; return lines for the run report too.

    The table is None if the family does not have all that the config has.
    """
    c, family = config, FAMILIES.get(config.family)
    if family is None:
        raise ConfigError(f"family = {c.family!r}: must be one of {', '.join(FAMILIES)}")
    if c.mixture and "mixture.width" not in family.keys:
        return None, [f"{OWN_NAMES}{family.architecture} has no mixture"]
    content, lost = config_json(c, family)
    if lost := lost + ["future_layers"] * (c.future_layers > 0 and FUTURE not in family.absent):
        return None, [f"{OWN_NAMES}{family.architecture} has no {', '.join(lost)}"]
    rows = tensor_rows(c, family.names)
    if c.lora and c.lora.quantized:
        return None, [f"{OWN_NAMES}these are quantised"]
    more = {
        # The names of the tensors imply the number of experts; the rest is what the loss counts.
        ("num_experts", "num_local_experts", "router_aux_loss_coef", "output_router_logits"): c.mixture,
        # One value has several names; older downloads of Gemma call tanh's approximation gelu.
        ("hidden_act", "activation_function"): c.activation == "gelu_tanh",
        ("rope_scaling",): c.rope_scaling,
        ("sliding_window",): c.window is None,  # not used then
        (MOST,): not c.max_positions,  # RoPE has no limit
    }
    absent = {"rope_theta": 10_000.0, "rope_type": "default", **family.absent}
    # In files of transformers 5 these lie deeper, or have another name.
    deeper = {"rotary_pct"} | ({"rope_theta", "rope_type", LOCAL} if LOCAL in absent else set())
    left_out, notes = _left_out(c)
    table = {
        "config": content,
        "may_differ": [*MAY_DIFFER, *(key for keys, may in more.items() if may for key in keys)],
        "absent": {key: x for key, x in absent.items() if key not in deeper},
        "advice": ADVICE,
        "aliases": family.aliases,
        # rotary_emb.inv_freq: in older downloads; rope_theta implies them
        "ignored": ["*.rotary_emb.inv_freq", *family.ignored, *left_out],
        "tensors": rows,
    }
    table |= {"download": c.download.table(c.vocab_size)} if c.download else {}
    return table | ({"adapters": adapters_table(c.lora, rows)} if c.lora else {}), notes


def _left_out(config: DecoderConfig) -> tuple[list[str], list[str]]:
    """Return patterns of a download's tensors that are not read, and lines about what the model leaves out."""
    c, there = config, config.download.config if config.download else {}
    notes = [f"{key} = {there[key]}: {why}" for key, why in LEFT_OUT.items() if there.get(key)]
    if not (ahead := there.get(FUTURE)):
        return [], notes
    if ahead > c.future_layers:
        advice = f"from_hf(..., future_layers={ahead}) reads and trains them"
        notes.append(f"{FUTURE} = {ahead}: these layers are left out; {advice}")
    # Layers that predict further tokens, with their copies of embedding and head.
    layers = [f"model.layers.{number}.*" for number in range(c.num_layers + c.future_layers, c.num_layers + ahead)]
    return [*layers, "model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight"], notes


def config_json(config: DecoderConfig, family: Family) -> tuple[dict[str, Any], list[str]]:
    """Return the content of a config.json, for `transformers` 4 and 5, and the fields that it cannot say.

    A download's own keys stay while they say the same.
    """
    own = config.download.config if config.download else {}
    own = own if own.get("model_type") == config.family else {}
    there = {**family.absent, **{key: own[key] for key in own.keys() & {*family.absent, "layer_types"}}}
    parts = [*_parts(config, family, there)]
    content = {key: x for part in parts for key, x in part.items()}
    lost = _differences(config, content)
    for part in parts:
        kept = {**content, **{key: own[key] for key in part.keys() & own.keys() - ANEW}}
        # Without the part's other keys, which might outweigh the download's: transformers 4 and 5 have different ones.
        alone = {**own, **{key: x for key, x in kept.items() if key not in part or key in own or key in ANEW}}
        with contextlib.suppress(ConfigError):  # valid only with the fields that the user changed
            content = kept if _differences(config, alone) == lost else content
    return content, lost


def _differences(config: DecoderConfig, content: Mapping[str, Any]) -> list[str]:
    """List the fields that are others in a config.json, but for those that files do not have."""
    here, there = _fields(config), _fields(read_config(Download(content)))
    return [f"{key}={x!r}" for key, x in here.items() if key not in OURS and x != there.get(key)]


def _fields(config: DecoderConfig) -> dict[str, Any]:
    found = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}
    if mixture := config.mixture:
        found |= {f"mixture.{name}": x for name, x in vars(mixture).items()}
        found |= {"mixture": "experts", "a bias for the choice": mixture.bias_rate is not None}
    return found


def _parts(c: DecoderConfig, family: Family, there: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield keys of a config.json: together those that are read together."""
    keys = family.all_keys
    yield {"architectures": [family.architecture], "model_type": c.family, **family.needs}
    for path, key in keys.items():
        group, _, field = path.rpartition(".")
        part = getattr(c, group) if group else c
        key, change = (key, 1) if isinstance(key, str) else key
        if part is not None:
            yield {key: _written(part, field, change)}
    yield {keys["d_model"]: c.d_model}  # embed_scale has this key too
    if "attention_softcap" in keys:
        yield {"hidden_activation": _written(c, "activation", keys["activation"][1])}
    if FUTURE in family.absent:
        yield {FUTURE: c.future_layers}
    if not c.causal:
        return
    if not c.download:
        yield {"bos_token_id": None, "eos_token_id": None}
    if c.max_positions:
        return
    if not c.download:
        yield {"max_position_embeddings": 4096}  # RoPE has no limit
    yield {"head_dim": c.latent.rotated, "qk_head_dim": c.head_dim} if c.latent else {"head_dim": c.head_dim}
    if c.mixture:
        yield mixture_json(c, c.mixture, family.dense)
    yield patterns_json(c, there)
    yield rope_json(c, there)


def _written(c: Any, field: str, change: float | Mapping[Any, Any]) -> Any:
    value = getattr(c, field)
    if isinstance(change, Mapping):
        return next((name for name, stands_for in change.items() if stands_for == value), False)
    if field == "attention_scale" and value is None:
        value = c.head_dim**-0.5
    if change == 1 or value is None:
        return value
    value = round(value ** (1 / change), 9)
    return int(value) if value.is_integer() else value  # transformers refuses 24.0


# ------------------------------------------------------------------------------------------- windows

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


def mixture_of(fields: dict[str, Any], there: Mapping[str, Any], trained: bool = False) -> MixtureConfig:
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
