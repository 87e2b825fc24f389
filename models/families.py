"""Families of decoders in the `transformers` library: their differences, their config.json, the names of their weights.

config = from_hf("Qwen3-8B")  # a download's directory
model = jzero.from_flax(lambda rngs: Decoder(config, rngs=rngs))
engine.load_weights("Qwen3-8B")
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jzero.errors import ConfigError

from .attention import RopeScaling
from .decoder_config import DecoderConfig, check_fields
from .downloads import TEXT, Download
from .lora import adapters_table
from .moe_families import NAMES, lacking, mixture_json, mixture_of, mixture_rows

# The fields in which families differ, with the values that Llama has.
DIFFERENCES: dict[str, Any] = {
    "rope_scaling": None, "qkv_bias": False, "qk_norm": False, "window": None, "global_every": None,
    "local_theta": None, "norm_offset": False, "post_norms": False, "embed_scale": False, "activation": "silu",
    "query_scalar": None, "attention_softcap": None, "logit_softcap": None, "mixture": None,
}  # fmt: skip
ABSENT = {"rope_theta": 10_000.0, "rope_type": "default"}


@dataclass(frozen=True)
class Family:
    """A family: its class in `transformers`, the fields that it always has, and those that it may have."""

    architecture: str
    fixed: dict[str, Any] = field(default_factory=dict)
    free: tuple[str, ...] = ()
    absent: dict[str, Any] = field(default_factory=lambda: dict(ABSENT))  # of keys missing in config.json
    aliases: dict[str, str] = field(default_factory=dict)  # see jzero.weights.name_map, as the next
    ignored: tuple[str, ...] = ()


GEMMA = {"norm_offset": True, "embed_scale": True, "activation": "gelu_tanh"}
GEMMA2 = ("window", "global_every", "query_scalar", "attention_softcap", "logit_softcap")
FAMILIES = {
    "llama": Family("LlamaForCausalLM", {}, ("rope_scaling",)),
    "mistral": Family("MistralForCausalLM", {}, ("rope_scaling", "window")),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}, ("rope_scaling", "window")),
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": True}, ("rope_scaling", "window")),
    "mixtral": Family("MixtralForCausalLM", {}, ("rope_scaling", "window", "mixture")),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {"qk_norm": True}, ("rope_scaling", "window", "mixture")),
    "gemma": Family("GemmaForCausalLM", GEMMA),
    "gemma2": Family("Gemma2ForCausalLM", {**GEMMA, "post_norms": True}, GEMMA2),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        {**GEMMA, "post_norms": True, "qk_norm": True},
        (*GEMMA2, "local_theta", "rope_scaling"),
        # RoPE's lie one level deeper in files of transformers 5; the text_config of a download has what differs from
        # the class only.
        absent={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "vocab_size": 262_208,
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
        },
        aliases={r"^(language_model\.model|model\.language_model)\.": "model."},
        ignored=(
            "vision_tower.*",
            "multi_modal_projector.*",
            "model.vision_tower.*",
            "model.multi_modal_projector.*",
            "language_model.lm_head.weight",
        ),
    ),
}
ADVICE = "build the model from these files: Decoder(jzero.models.families.from_hf(DIR), rngs=rngs)"


# ------------------------------------------------------------------------------------------- config.json -> config


def from_hf(source: str | os.PathLike | Mapping[str, Any], **changes: Any) -> DecoderConfig:
    """Read the shape of a decoder from a config.json of `transformers`, versions 4 and 5.

    Args:
      source: the file, its directory, or its content.
      changes: to fields of the result, such as attention="xla" or pad_vocab_to=128.

    Raises:
      ConfigError: the file cannot be read, or describes what the decoder lacks; all problems at once.

    >>> shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    >>> from_hf({"model_type": "qwen2", "vocab_size": 64, **shape}).qkv_bias
    True
    """
    check_fields(DecoderConfig, changes)
    download = Download.read(source)
    name = download.config.get("model_type")
    if name not in FAMILIES:
        raise ConfigError(
            f"config.json has model_type = {name!r}: must be one of {', '.join([*FAMILIES, *TEXT])}; gpt2, bert and "
            "vit have a from_hf in models/gpt2.py, models/bert.py and models/vit.py"
        )
    family = FAMILIES[name]
    there = {**family.absent, **download.config}
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    missing = [key for key in sizes if key not in there]
    problems = [f"config.json has no {key}" for key in missing] + _unsupported(there)
    if problems:
        raise ConfigError(*problems)
    heads, layers = there["num_attention_heads"], there["num_hidden_layers"]
    windows = _windows(there)
    rope, local = _rope(there, family)
    found: dict[str, Any] = {"rope_scaling": _scaling(rope), "mixture": mixture_of(there), **windows}
    if windows.get("global_every"):
        found["local_theta"] = local
    found["query_scalar"] = there.get("query_pre_attn_scalar")
    found["attention_softcap"] = there.get("attn_logit_softcapping")
    found["logit_softcap"] = there.get("final_logit_softcapping")
    width = there.get("head_dim") or DEFAULT_HEADS.get(name)
    shape = {
        "num_layers": layers,
        "d_model": there["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": there.get("num_key_value_heads") or heads,
        "d_ff": there["intermediate_size"],
        "vocab_size": there["vocab_size"],
        "tied": there.get("tie_word_embeddings", name.startswith("gemma")),
        "rope_theta": float(rope["rope_theta"]),
        "norm_eps": there.get("rms_norm_eps", 1e-6),
        "family": name,
        "head_width": None if width is None or width * heads == there["hidden_size"] else width,
        "download": download,
    }
    of_family = {key: value for key, value in found.items() if key in family.free}
    return DecoderConfig(**{**shape, **family.fixed, **of_family, **changes})


DEFAULT_HEADS = {"qwen3": 128, "gemma": 256, "gemma2": 256}  # where config.json does not have one


def _unsupported(there: Mapping[str, Any]) -> list[str]:
    """List what the file asks for and the decoder does not have."""
    problems = []
    for key in ("attention_bias", "mlp_bias", "use_bidirectional_attention", "quantization_config"):
        if there.get(key):
            problems.append(f"config.json has {key} = {there[key]!r}: models/decoder.py does not have it")
    allowed = ("gelu_pytorch_tanh", "gelu") if there["model_type"].startswith("gemma") else ("silu",)
    for key in ("hidden_act", "hidden_activation"):
        if there.get(key) not in (None, *allowed):
            problems.append(f"config.json has {key} = {there[key]!r}: must be one of {', '.join(allowed)}")
    return problems


def _rope(there: Mapping[str, Any], family: Family) -> tuple[dict[str, Any], float]:
    """Return RoPE's parameters, of layers without a window, and the theta of those with one."""
    rope = there.get("rope_parameters") or {}
    local = there.get("rope_local_base_freq", 10_000.0)
    if "full_attention" in rope:
        local = rope.get("sliding_attention", {}).get("rope_theta", local)
        rope = rope["full_attention"]
    theta = there.get("rope_theta") or family.absent.get("rope_theta", 1_000_000.0)
    return {"rope_theta": theta, **(there.get("rope_scaling") or {}), **rope}, local


def _scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind not in ("linear", "llama3"):
        raise ConfigError(f"config.json has rope_type = {kind!r}: must be default, linear or llama3")
    if kind == "linear":
        return RopeScaling("linear", rope["factor"])
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    return RopeScaling("llama3", rope["factor"], low, high, rope["original_max_position_embeddings"])


def _windows(there: Mapping[str, Any]) -> dict[str, Any]:
    """Return window and global_every."""
    layers, window = there["num_hidden_layers"], there.get("sliding_window")
    name = there["model_type"]
    if not window or (name.startswith("qwen") and not there.get("use_sliding_window")):
        return {}
    kinds = there.get("layer_types")
    if kinds is None:
        every = {"gemma2": 2, "gemma3_text": there.get("sliding_window_pattern", 6)}.get(name)
        first = there.get("max_window_layers", 0) if name.startswith("qwen") else 0
        wide = [i < first or bool(every and (i + 1) % every == 0) for i in range(layers)]
    else:
        wide = [kind == "full_attention" for kind in kinds]
    every = wide.index(True) + 1 if True in wide else None
    if wide == [True] * layers:
        return {}
    if wide != [bool(every and (i + 1) % every == 0) for i in range(layers)]:
        raise ConfigError(f"config.json has layer_types {kinds or wide}: global layers must be every n-th layer")
    if every is None and name.startswith("gemma"):
        every = {"gemma2": 2, "gemma3_text": there.get("sliding_window_pattern") or 6}[name]  # none of the first layers
    return {"window": window, "global_every": every}


# ------------------------------------------------------------------------------------------- config -> config.json


def weights_table(config: DecoderConfig) -> tuple[dict[str, Any] | None, list[str]]:
    """Describe the parameters in `transformers`, see `jzero.weights.name_map`.

    Returns:
      (the table, lines for the run report); None if the family does not have all that the config has.
    """
    family = FAMILIES.get(config.family)
    if family is None:
        raise ConfigError(f"family = {config.family!r}: must be one of {', '.join(FAMILIES)}")
    if config.lora and config.lora.quantized:
        return None, ["weights in files have jzero's own names: these are quantised"]
    wrong = [
        f"{key}={getattr(config, key)!r}"
        for key, plain in DIFFERENCES.items()
        if key not in family.free and getattr(config, key) != family.fixed.get(key, plain)
    ]
    if config.family in NAMES:
        wrong += lacking(config.mixture) if config.mixture else ["mixture=None"]
    if wrong:
        return None, [f"weights in files have jzero's own names: {family.architecture} has no {', '.join(wrong)}"]
    may_differ = [
        "architectures", "max_position_embeddings", "bos_token_id", "eos_token_id",
        "head_dim",  # the tensors' shapes imply it
        "rope_parameters",  # its entries are compared individually
    ]  # fmt: skip
    if config.mixture:  # the names of the tensors imply it; the rest is what the loss counts
        may_differ += ["num_experts", "num_local_experts", "router_aux_loss_coef", "output_router_logits"]
    if config.rope_scaling:
        may_differ += ["rope_scaling"]  # likewise
    if config.activation == "gelu_tanh":
        may_differ += ["hidden_act"]  # older downloads call it gelu
    if config.family.startswith("qwen"):
        may_differ += ["max_window_layers", "layer_types"]
        may_differ += ["sliding_window"] * (config.window is None)  # not used then
    keys = {
        "may_differ": may_differ,
        "absent": family.absent,
        "advice": ADVICE,
        "aliases": family.aliases,
        # in older downloads; rope_theta implies them
        "ignored": ["model.layers.*.self_attn.rotary_emb.inv_freq", *family.ignored],
    }
    if config.download:
        keys["download"] = config.download.table(config.vocab_size)
    rows = _tensors(config)
    adapters = {"adapters": adapters_table(config.lora, rows)} if config.lora else {}
    return {"config": config_json(config, family), **keys, "tensors": rows, **adapters}, []


def config_json(config: DecoderConfig, family: Family) -> dict[str, Any]:
    """Return the content of a config.json, for `transformers` 4 and 5."""
    c = config
    rope = _rope_json(c.rope_theta, c.rope_scaling)
    content = {
        "architectures": [family.architecture],
        "model_type": c.family,
        "hidden_size": c.d_model,
        "intermediate_size": c.d_ff,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "vocab_size": c.vocab_size,
        "tie_word_embeddings": c.tied,
        "hidden_act": "gelu_pytorch_tanh" if c.activation == "gelu_tanh" else "silu",
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,  # transformers 4
        "rope_scaling": None if c.rope_scaling is None else {k: v for k, v in rope.items() if k != "rope_theta"},
        "rope_parameters": rope,  # transformers 5
        "attention_bias": False,
    }
    there = c.download.config if c.download else None
    if there is None:
        content |= {"max_position_embeddings": 4096, "bos_token_id": None, "eos_token_id": None}  # RoPE has no limit
    if c.mixture:
        content |= mixture_json(c.family, c.mixture)
    if c.family == "llama":
        content["mlp_bias"] = False
    if "window" in family.free:
        content["sliding_window"] = c.window
    if c.family.startswith("qwen"):
        content |= {"use_sliding_window": c.window is not None, "max_window_layers": 0 if c.window else c.num_layers}
        if there is not None and not c.window:  # not used, so the download's stay
            del content["sliding_window"], content["max_window_layers"]
    gemma = c.family in ("gemma2", "gemma3_text")
    if gemma or "layer_types" in (there or ()):
        kinds = {True: "full_attention", False: "sliding_attention"}
        wide = [not c.window or bool(c.global_every and (i + 1) % c.global_every == 0) for i in range(c.num_layers)]
        content["layer_types"] = [kinds[w] for w in wide]
    if gemma:
        content |= {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": c.query_scalar or c.head_dim,
            "attn_logit_softcapping": c.attention_softcap,
            "final_logit_softcapping": c.logit_softcap,
        }
    if c.family == "gemma3_text":
        local = c.local_theta or c.rope_theta
        content |= {
            "rope_local_base_freq": local,
            "sliding_window_pattern": c.global_every,
            "rope_parameters": {"full_attention": rope, "sliding_attention": _rope_json(local, None)},
        }
    return content


def _rope_json(theta: float, scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    content = {"rope_type": scaling.kind, "rope_theta": theta, "factor": scaling.factor}
    if scaling.kind == "llama3":
        content |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
        content["original_max_position_embeddings"] = scaling.original
    return content


def _tensors(c: DecoderConfig) -> list[dict[str, Any]]:
    """List the rows of the table."""
    layer, norm = "model.layers.{layer}.", "post_attention_layernorm"  # jzero.weights fills in {layer}
    K, G, C, D, F = c.num_kv_heads, c.num_groups, c.head_dim, c.d_model, c.d_ff

    def matrix(name: str, leaf: str, columns: list[int] | None = None) -> dict[str, Any]:
        return {"name": f"{name}.weight", "leaf": f"{leaf}/kernel", "columns": columns, "transposed": True}

    def scale(name: str, leaf: str) -> dict[str, Any]:
        return {"name": f"{name}.weight", "leaf": f"{leaf}/scale"}

    rows = [
        *embedding("model.embed_tokens.weight", "ends/embed", c.vocab_size, c.vocab_rows),
        scale(layer + "input_layernorm", "stack/attention_norm"),
    ]
    for part, start, stop in (("q", 0, G), ("k", G, G + 1), ("v", G + 1, G + 2)):
        name, leaf, width = f"{layer}self_attn.{part}_proj", "stack/attention/qkv", K * (stop - start) * C
        kernel = {"slices": [[2, start, stop]], "transposed": [1, 2, 3, 0], "reshape": [width, D]}
        rows.append({"name": f"{name}.weight", "leaf": f"{leaf}/kernel", **kernel})
        if c.qkv_bias:
            bias = {"slices": [[1, start, stop]], "reshape": [width]}
            rows.append({"name": f"{name}.bias", "leaf": f"{leaf}/bias", **bias})
        if c.qk_norm and part != "v":
            rows.append(scale(f"{layer}self_attn.{part}_norm", f"stack/attention/{part}_norm"))
    if c.post_norms:
        rows.append(scale(layer + norm, "stack/attention_post_norm"))
        rows.append(scale(layer + "post_feedforward_layernorm", "stack/mlp_post_norm"))
        norm = "pre_feedforward_layernorm"
    rows += [matrix(layer + "self_attn.o_proj", "stack/attention/out"), scale(layer + norm, "stack/mlp_norm")]
    if c.mixture:
        rows += mixture_rows(c.family, c.mixture, D, layer)
    else:
        for i, part in enumerate(("gate", "up")):
            kernel = {"slices": [[1, i, i + 1]], "transposed": [1, 2, 0], "reshape": [F, D]}
            rows.append({"name": f"{layer}mlp.{part}_proj.weight", "leaf": "stack/mlp/gate_up/kernel", **kernel})
        rows.append(matrix(layer + "mlp.down_proj", "stack/mlp/down"))
    rows.append(scale("model.norm", "ends/norm"))
    if not c.tied:
        rows.append(matrix("lm_head", "ends/head", [0, c.vocab_size]))
        if c.vocab_rows > c.vocab_size:
            rows.append({"name": None, "leaf": "ends/head/kernel", "columns": [c.vocab_size, c.vocab_rows]})
    return rows


def embedding(name: str, leaf: str, size: int, rows: int) -> list[dict[str, Any]]:
    """Describe a table whose rows after `size` are padding."""
    padding = {"name": None, "leaf": leaf, "rows": [size, rows]}
    return [{"name": name, "leaf": leaf, "rows": [0, size]}, *([padding] if rows > size else [])]
