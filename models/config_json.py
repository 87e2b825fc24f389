"""Decoders written for the `transformers` library: config.json, and the table of the weights in files."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jzero.errors import ConfigError

from .decoder_config import DecoderConfig
from .downloads import ADVICE, Download
from .families import FAMILIES, Family, decoder_config
from .layer_patterns import patterns_json
from .lora import adapters_table
from .moe_families import dense_json, mixture_json
from .rope_json import rope_json
from .tensor_names import tensor_rows

FUTURE = "num_nextn_predict_layers"
# Keys of a config.json that concern the training alone, and what is said of them in the run report.
LEFT_OUT = {
    **dict.fromkeys(
        (
            "attention_dropout",
            "hidden_dropout",
            "embd_pdrop",
            "attn_pdrop",
            "resid_pdrop",
            "embedding_dropout",
            "residual_dropout",
        ),
        "decoders have no dropout; it is left out",
    ),
    "aux_loss_alpha": "this loss is left out, as in transformers; mixture.balance sets a balance loss",
}
# The fields that files do not have.
OURS = (
    "attention", "future_layers", "future_weight", "pad_vocab_to", "loss_tiles", "mlp_tiles", "lora", "download",
    "family",
)  # fmt: skip


def weights_table(config: DecoderConfig) -> tuple[dict[str, Any] | None, list[str]]:
    """Describe the parameters in `transformers`, see `jzero.weights.name_map`.

    Returns:
      (the table, lines for the run report); None if the family does not have all that the config has.
    """
    family = FAMILIES.get(config.family)
    if family is None:
        raise ConfigError(f"family = {config.family!r}: must be one of {', '.join(FAMILIES)}")
    if config.mixture and "mixture.width" not in family.keys:
        return None, [f"weights in files have jzero's own names: {family.architecture} has no mixture"]
    content = config_json(config, family)
    wrong = _lost(config, content)
    wrong += ["future_layers"] if config.future_layers and FUTURE not in family.absent else []
    if wrong:
        return None, [f"weights in files have jzero's own names: {family.architecture} has no {', '.join(wrong)}"]
    may_differ = [
        "architectures", "max_position_embeddings", "bos_token_id", "eos_token_id",
        "head_dim",  # the tensors' shapes imply it
        "rope_parameters",  # its entries are compared individually
        "max_window_layers",
        "n_inner",  # null is 4 * n_embd
    ]  # fmt: skip
    if config.mixture:  # the names of the tensors imply it; the rest is what the loss counts
        may_differ += ["num_experts", "num_local_experts", "router_aux_loss_coef", "output_router_logits"]
    if FUTURE in family.absent:  # files may have more of these layers than the model
        may_differ += [FUTURE]
    if config.activation == "gelu_tanh":
        may_differ += [
            "hidden_act",
            "activation_function",
        ]  # two names; older downloads of Gemma call it gelu
    if config.rope_scaling:
        may_differ += ["rope_scaling"]  # likewise
    if config.window is None:
        may_differ += ["sliding_window"]  # not used then
    absent = {"rope_theta": 10_000.0, "rope_type": "default", **family.absent}
    # In files of transformers 5 these lie deeper, or have another name.
    apart = (
        {"rotary_pct", "rope_theta", "rope_type", "rope_local_base_freq"}
        if "rope_local_base_freq" in absent
        else {"rotary_pct"}
    )
    absent = {key: x for key, x in absent.items() if key not in apart}
    keys = {
        "may_differ": may_differ,
        "absent": absent,
        "advice": ADVICE,
        "aliases": family.aliases,
        # in older downloads; rope_theta implies them
        "ignored": ["model.layers.*.self_attn.rotary_emb.inv_freq", *family.ignored, *_left_out(config)],
    }
    if config.download:
        keys["download"] = config.download.table(config.vocab_size)
    rows = tensor_rows(config, family.names)
    if config.lora and config.lora.quantized:
        return None, ["weights in files have jzero's own names: these are quantised"]
    adapters = {"adapters": adapters_table(config.lora, rows)} if config.lora else {}
    return {"config": content, **keys, "tensors": rows, **adapters}, _left_out_notes(config)


def _left_out_notes(config: DecoderConfig) -> list[str]:
    there, ahead = config.download.config if config.download else {}, _future(config)
    notes = [f"{key} = {there[key]}: {why}" for key, why in LEFT_OUT.items() if there.get(key)]
    if ahead <= config.future_layers:
        return notes
    return [
        *notes,
        f"{FUTURE} = {ahead}: these layers are left out; from_hf(..., future_layers={ahead}) reads and trains them",
    ]


def _future(config: DecoderConfig) -> int:
    """Return how many layers a download has that predict further tokens."""
    return config.download.config.get(FUTURE) or 0 if config.download else 0


def _left_out(config: DecoderConfig) -> list[str]:
    """Return patterns of tensors that predict further tokens: copies of embedding and head, and whole layers."""
    ahead = _future(config)
    numbers = range(config.num_layers + config.future_layers, config.num_layers + ahead)
    copies = ["model.layers.*.embed_tokens.weight", "model.layers.*.shared_head.head.weight"] if ahead else []
    return [*(f"model.layers.{number}.*" for number in numbers), *copies]


def _lost(config: DecoderConfig, content: dict[str, Any]) -> list[str]:
    """List the fields that config.json cannot express: those that are different when it is read again."""
    back = decoder_config(Download(content))
    pairs = {f.name: (getattr(config, f.name), getattr(back, f.name)) for f in dataclasses.fields(config)}
    if config.mixture and back.mixture:
        ours = ("capacity_factor", "balance", "bias_rate")
        parts = [f.name for f in dataclasses.fields(config.mixture) if f.name not in ours]
        del pairs["mixture"]
        pairs["a bias for the choice"] = config.mixture.bias_rate is not None, back.mixture.bias_rate is not None
        pairs |= {f"mixture.{key}": (getattr(config.mixture, key), getattr(back.mixture, key)) for key in parts}
    return [f"{key}={here!r}" for key, (here, there) in pairs.items() if key not in OURS and here != there]


def config_json(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """Return the content of a config.json, for `transformers` 4 and 5."""
    c, there = config, config.download.config if config.download else {}
    content = {"architectures": [family.architecture], "model_type": c.family, **family.needs}
    keys = family.all_keys
    for path, key in keys.items():
        group, _, field = path.rpartition(".")
        part = getattr(c, group) if group else c
        key, change = (key, 1) if isinstance(key, str) else key
        content |= {} if part is None else {key: _value(part, field, change, there.get(key))}
    if "attn_logit_softcapping" in content:
        content["hidden_activation"] = content["hidden_act"]
    content[keys["d_model"]] = c.d_model  # embed_scale has this key too
    content |= {FUTURE: c.future_layers} if FUTURE in family.absent else {}
    content |= {} if c.download else {"bos_token_id": None, "eos_token_id": None}
    if c.max_positions:
        return content
    plain = c.head_width is None and there.get("head_dim", 0) is None
    content["head_dim"] = None if plain else c.head_dim
    content |= {"head_dim": c.latent.rotated, "qk_head_dim": c.head_dim} if c.latent else {}
    content |= {} if c.download else {"max_position_embeddings": 4096}  # RoPE has no limit
    if c.mixture:
        dense = dense_json(c.dense_layers, c.num_layers, family.dense, there)
        content |= {**mixture_json(c.family, c.mixture, there), **dense}
    return content | patterns_json(c, family.absent, there) | rope_json(c, family.absent)


def _value(c: Any, field: str, change: float | Mapping[Any, Any], kept: Any) -> Any:
    """Return what config.json has of a field; of two names for one value, the one that a download has."""
    value = getattr(c, field)
    if isinstance(change, Mapping):
        names = [name for name, stands_for in change.items() if stands_for == value]
        return kept if kept in names else names[0] if names else False
    if field == "attention_scale" and value is None:
        value = c.head_dim**-0.5
    if change == 1 or value is None:
        return value
    value = round(value ** (1 / change), 9)
    return int(value) if value.is_integer() else value  # transformers refuses 24.0
