"""Decoders written for the `transformers` library: config.json, and the table of the weights in files."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from jzero.errors import ConfigError

from .decoder_config import DecoderConfig
from .downloads import ADVICE, OWN, Download
from .families import FAMILIES, Family, decoder_config
from .layer_patterns import patterns_json
from .lora import adapters_table
from .moe_families import dense_json, mixture_json
from .rope_json import rope_json
from .tensor_names import tensor_rows

OWN_NAMES = "weights in files have jzero's own names: "
FUTURE = "num_nextn_predict_layers"
# Keys of a config.json that concern the training alone, and what is said of them in the run report.
LEFT_OUT = {
    "(attention|hidden|embedding|residual)_dropout|(embd|attn|resid)_pdrop": "decoders have no dropout; it is left out",
    "aux_loss_alpha": "this loss is left out, as in transformers; mixture.balance sets a balance loss",
}
# The fields that files do not have.
OURS = (
    "attention", "future_layers", "future_weight", "pad_vocab_to", "loss_tiles", "mlp_tiles", "lora", "download",
    "family", "mixture.capacity_factor", "mixture.balance", "mixture.bias_rate",
)  # fmt: skip
MAY_DIFFER = (
    "architectures", "max_position_embeddings", "bos_token_id", "eos_token_id",
    "head_dim",  # the tensors' shapes imply it
    "rope_parameters",  # its entries are compared individually
    "max_window_layers",
    "n_inner",  # null is 4 * n_embd
    FUTURE,  # files may have more of these layers than the model
)  # fmt: skip


def weights_table(config: DecoderConfig) -> tuple[dict[str, Any] | None, list[str]]:
    """Describe the parameters in `transformers`, see `jzero.weights.name_map`.

    Returns:
      (the table, lines for the run report); None if the family does not have all that the config has.
    """
    c, family = config, FAMILIES.get(config.family)
    if family is None:
        raise ConfigError(f"family = {c.family!r}: must be one of {', '.join(FAMILIES)}")
    if c.mixture and "mixture.width" not in family.keys:
        return None, [f"{OWN_NAMES}{family.architecture} has no mixture"]
    content = config_json(c, family)
    lost = _differences(c, decoder_config(Download(content)))
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
    }
    absent = {"rope_theta": 10_000.0, "rope_type": "default", **family.absent}
    # In files of transformers 5 these lie deeper, or have another name.
    deeper = ("rope_theta", "rope_type", "rope_local_base_freq") if "rope_local_base_freq" in absent else ()
    left_out, notes = _left_out(c)
    table = {
        "config": content,
        "may_differ": [*MAY_DIFFER, *(key for keys, may in more.items() if may for key in keys)],
        "absent": {key: x for key, x in absent.items() if key not in ("rotary_pct", *deeper)},
        "advice": ADVICE,
        "aliases": family.aliases,
        # rotary_emb.inv_freq: in older downloads; rope_theta implies them
        "ignored": ["model.layers.*.self_attn.rotary_emb.inv_freq", *family.ignored, *left_out],
        "tensors": rows,
    }
    table |= {"download": c.download.table(c.vocab_size)} if c.download else {}
    return table | ({"adapters": adapters_table(c.lora, rows)} if c.lora else {}), notes


def _left_out(config: DecoderConfig) -> tuple[list[str], list[str]]:
    """Return patterns of a download's tensors that are not read, and lines about what the model leaves out.

    The tensors are those that predict further tokens: copies of embedding and head, and whole layers.
    """
    c, there = config, config.download.config if config.download else {}
    notes = [
        f"{key} = {x}: {why}"
        for pattern, why in LEFT_OUT.items()
        for key, x in there.items()
        if x and re.fullmatch(pattern, key)
    ]
    if not (ahead := there.get(FUTURE)):
        return [], notes
    if ahead > c.future_layers:
        notes += [
            f"{FUTURE} = {ahead}: these layers are left out; from_hf(..., future_layers={ahead}) reads and trains them"
        ]
    layers = [f"model.layers.{number}.*" for number in range(c.num_layers + c.future_layers, c.num_layers + ahead)]
    return [*layers, "model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight"], notes


def _differences(config: DecoderConfig, other: DecoderConfig) -> list[str]:
    """List the fields of one config that are others in another, but for those that files do not have."""
    here, there = (_fields(c) | _fields(c.mixture, "mixture.") for c in (config, other))
    found = [f"{key}={x!r}" for key, x in here.items() if key not in OURS and x != there.get(key, x)]
    both = [c.mixture and c.mixture.bias_rate is not None for c in (config, other)]
    return found + ["a bias for the choice"] * (both[0] != both[1])


def _fields(config: Any, prefix: str = "") -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(config)] if config else []
    return {prefix + name: getattr(config, name) for name in names}


def config_json(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """Return the content of a config.json, for `transformers` 4 and 5: a download's own one while it still holds."""
    c = config
    content = _content(c, family)
    own = c.download if c.download and c.family == c.download.config["model_type"] else None
    if own and not _differences(c, decoder_config(own)):
        content |= {key: x for key, x in own.config.items() if key in content and key not in OWN}
    return content | ({FUTURE: c.future_layers} if FUTURE in family.absent else {})


def _content(c: DecoderConfig, family: Family) -> dict[str, Any]:
    content = {"architectures": [family.architecture], "model_type": c.family, **family.needs}
    keys = family.all_keys
    for path, key in keys.items():
        group, _, field = path.rpartition(".")
        part = getattr(c, group) if group else c
        key, change = (key, 1) if isinstance(key, str) else key
        content |= {} if part is None else {key: _value(part, field, change)}
    if "attn_logit_softcapping" in content:
        content["hidden_activation"] = content["hidden_act"]
    content[keys["d_model"]] = c.d_model  # embed_scale has this key too
    content |= {} if c.download else {"bos_token_id": None, "eos_token_id": None}
    if c.max_positions:
        return content
    content |= {"head_dim": c.latent.rotated, "qk_head_dim": c.head_dim} if c.latent else {"head_dim": c.head_dim}
    content |= {} if c.download else {"max_position_embeddings": 4096}  # RoPE has no limit
    if c.mixture:
        dense = dense_json(c.dense_layers, c.num_layers, family.dense)
        content |= {**mixture_json(c.family, c.mixture, c.download is not None), **dense}
    return content | patterns_json(c, family.absent) | rope_json(c, family.absent)


def _value(c: Any, field: str, change: float | Mapping[Any, Any]) -> Any:
    """Return what config.json has of a field."""
    value = getattr(c, field)
    if isinstance(change, Mapping):
        return next((name for name, stands_for in change.items() if stands_for == value), False)
    if field == "attention_scale" and value is None:
        value = c.head_dim**-0.5
    if change == 1 or value is None:
        return value
    value = round(value ** (1 / change), 9)
    return int(value) if value.is_integer() else value  # transformers refuses 24.0
