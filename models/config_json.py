"""Models of the `transformers` library: the reading and the writing of config.json, and the table of the weights.

`there` is the content of a config.json, with the family's values of keys that it lacks.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jzero.errors import ConfigError

from .config_parts import CHUNK, KINDS, LOCAL, MOST, decoder_fields, decoder_parts
from .decoder_config import DecoderConfig, check_fields
from .downloads import ADVICE, OWN, Download
from .families import EXPERTS, FAMILIES, LATENT, SIZES, TIMES, Family
from .lora import adapters_table
from .tensor_names import tensor_rows

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
    if kind.causal:
        found = decoder_fields(found, there, trained=download.directory is not None)
    found |= {"family": name, "download": download}
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
    yield from decoder_parts(c, family, there)


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
