"""Families of models in the `transformers` library: one row for each.

A row names what differs from Llama: the fields that a family always has, the keys of config.json that decide others,
the values of keys that config.json may lack, and the names of the weights.
"""

from dataclasses import dataclass, field
from typing import Any

from .decoder_config import BertConfig, DecoderConfig, GPT2Config, ViTConfig

EXPERTS = "num_local_experts"  # what transformers 5 calls their number in each family
TIMES = "n_shared_experts"  # the width of DeepSeek's shared expert, in widths of the others

# A field of DecoderConfig -> the key of config.json, or (the key, the power of its value that the field is), or (the
# key, the fields of its values). "mixture.width" is the field `width` of the field `mixture`.
Keys = dict[str, Any]
SIZES: Keys = {
    "d_model": "hidden_size", "d_ff": "intermediate_size", "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads", "vocab_size": "vocab_size",
}  # fmt: skip
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}
KEYS: Keys = {
    **SIZES, "num_kv_heads": "num_key_value_heads", "tied": "tie_word_embeddings", "norm_eps": "rms_norm_eps",
    "activation": ("hidden_act", ACTIVATIONS),
}  # fmt: skip
LATENT: Keys = {
    "latent.rank": "kv_lora_rank", "latent.query_rank": "q_lora_rank", "latent.plain": "qk_nope_head_dim",
    "latent.rotated": "qk_rope_head_dim", "latent.value": "v_head_dim",
}  # fmt: skip
EXPERT: Keys = {
    "mixture.num_experts": "num_experts", "mixture.top_k": "num_experts_per_tok",
    "mixture.width": "moe_intermediate_size", "mixture.normalize": "norm_topk_prob",
}  # fmt: skip
LOCAL: Keys = {
    "mixture.num_experts": EXPERTS, "mixture.top_k": "num_experts_per_tok", "mixture.width": "intermediate_size",
}  # fmt: skip


@dataclass(frozen=True)
class Family:
    """A family: its class in `transformers`, and in what it differs from Llama."""

    architecture: str
    fixed: dict[str, Any] = field(default_factory=dict)  # the fields that it always has
    keys: Keys = field(default_factory=dict)  # of config.json, for fields that it may have; None: it has not
    absent: dict[str, Any] = field(default_factory=dict)  # the values of keys that config.json lacks
    names: dict[str, str] = field(default_factory=dict)  # of the weights, see tensor_names.py
    aliases: dict[str, str] = field(default_factory=dict)  # as `ignored`: see jzero.weights.name_map
    ignored: tuple[str, ...] = ()
    needs: dict[str, Any] = field(default_factory=dict)  # the only values of keys that the model has
    dense: str | None = None  # the key of the layers without a mixture
    kind: type[DecoderConfig] = DecoderConfig  # whose defaults are the family's

    @property
    def all_keys(self) -> Keys:
        return {field: key for field, key in {**KEYS, **self.keys}.items() if key}


BIAS: Keys = {"qkv_bias": "attention_bias", "out_bias": "attention_bias"}
MLP_BIAS: Keys = {"mlp_bias": "mlp_bias"}
EPS: Keys = {"norm_eps": "layer_norm_eps"}
GEMMA = {"norm": "offset_rms", "activation": "gelu_tanh"}
GEMMA_KEYS: Keys = {**BIAS, "embed_scale": ("hidden_size", 0.5)}
GEMMA2: Keys = {
    **GEMMA_KEYS, "attention_scale": ("query_pre_attn_scalar", -0.5), "attention_softcap": "attn_logit_softcapping",
    "logit_softcap": "final_logit_softcapping",
}  # fmt: skip
TIED = {"tie_word_embeddings": True}
SLIDING = {"use_sliding_window": False}
SANDWICH = {"mlp_norm": "pre_feedforward_layernorm"}
OLMO = {"norms": "after", "qk_norm": "all"}
COHERE = {"norm": "layer_unbiased", "parallel": "one_norm", "interleaved_rope": True}
GRANITE: Keys = {
    **BIAS, "embed_scale": "embedding_multiplier", "residual_scale": "residual_multiplier",
    "attention_scale": "attention_multiplier", "logit_scale": ("logits_scaling", -1),
}  # fmt: skip
DEEPSEEK = {"attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1}
DEEPSEEK_KEYS: Keys = {
    **LATENT, **EXPERT, "mixture.num_experts": "n_routed_experts", "mixture.shared": TIMES,
    "mixture.scale": "routed_scaling_factor",
}  # fmt: skip
DEEPSEEK_ABSENT = {
    "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "norm_topk_prob": False, "routed_scaling_factor": 1.0,
}  # fmt: skip
DEEPSEEK_NAMES = {"shared": "mlp.shared_experts"}
QWEN_MOE = {**SLIDING, "norm_topk_prob": False}
FAMILIES = {
    "bert": Family(
        "BertForMaskedLM", {},
        {**EPS, "num_kv_heads": "num_attention_heads", "max_positions": "max_position_embeddings",
         "num_types": "type_vocab_size"},
        {"type_vocab_size": 2, "layer_norm_eps": 1e-12},
        {"embed": "bert.embeddings.word_embeddings", "ends/embed_norm": "bert.embeddings.LayerNorm",
         "ends/positions": "bert.embeddings.position_embeddings.weight",
         "ends/types": "bert.embeddings.token_type_embeddings.weight",
         "layer": "bert.encoder.layer.{layer}.", "qkv": "attention.self.{part}", "parts": "query key value",
         "attention/out": "attention.output.dense", "attention_norm": "attention.output.LayerNorm",
         "mlp/up": "intermediate.dense", "mlp/down": "output.dense", "mlp_norm": "output.LayerNorm",
         "ends/head": "cls.predictions.transform.dense", "ends/head_norm": "cls.predictions.transform.LayerNorm",
         "head_bias": "cls.predictions.bias"},
        {r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"},
        ("bert.pooler.*", "cls.seq_relationship.*", "cls.predictions.decoder.*", "bert.embeddings.position_ids"),
        {"hidden_act": "gelu", **TIED, "is_decoder": False, "add_cross_attention": False,
         "position_embedding_type": "absolute"},
        kind=BertConfig,
    ),
    "vit": Family(
        "ViTForImageClassification", {},
        {**EPS, "num_kv_heads": "num_attention_heads", "tied": None, "vocab_size": None, "num_classes": "num_labels",
         "image_size": "image_size", "patch_size": "patch_size", "num_channels": "num_channels"},
        {"layer_norm_eps": 1e-12},
        {"ends/class_token": "vit.embeddings.cls_token", "ends/positions": "vit.embeddings.position_embeddings",
         "ends/patches/bias": "vit.embeddings.patch_embeddings.projection.bias",
         "layer": "vit.encoder.layer.{layer}.", "qkv": "attention.attention.{part}", "parts": "query key value",
         "attention/out": "attention.output.dense", "attention_norm": "layernorm_before",
         "mlp/up": "intermediate.dense", "mlp/down": "output.dense", "mlp_norm": "layernorm_after",
         "ends/norm": "vit.layernorm", "ends/head": "classifier"},
        needs={"hidden_act": "gelu", "qkv_bias": True}, kind=ViTConfig,
    ),
    "llama": Family("LlamaForCausalLM", {}, {**BIAS, **MLP_BIAS}),
    "llama4_text": Family(
        "Llama4ForCausalLM",
        {"interleaved_rope": True, "mixture.balance": 0.0, "mixture.normalize": False, "mixture.score": "sigmoid",
         "mixture.scale_inputs": True},
        {**BIAS, **LOCAL, "d_ff": "intermediate_size_mlp", "qk_norm": ("use_qk_norm", {True: "unscaled"}),
         "mixture.shared": "intermediate_size"},
        {"attention_chunk_size": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True, "floor_scale": 8192,
         "head_dim": 128, "intermediate_size_mlp": 16384, "no_rope_layer_interval": 4, "rms_norm_eps": 1e-5,
         "rope_theta": 500_000.0, "use_qk_norm": True, EXPERTS: 16, "num_experts_per_tok": 1},
        {"gate_up": "feed_forward.{part}_proj", "mlp/down": "feed_forward.down_proj",
         "mlp/router": "feed_forward.router", "expert": "feed_forward.experts.{part}",
         "shared": "feed_forward.shared_expert"},
        aliases={r"^language_model\.": ""}, ignored=("vision_model.*", "multi_modal_projector.*"), dense="moe_layers",
    ),
    "mistral": Family("MistralForCausalLM"),
    "qwen2": Family("Qwen2ForCausalLM", {"qkv_bias": True}, absent=SLIDING),
    "qwen3": Family("Qwen3ForCausalLM", {"qk_norm": "shared"}, BIAS, {**SLIDING, "head_dim": 128}),
    "mixtral": Family(
        "MixtralForCausalLM", {"mixture.normalize": True}, LOCAL, {EXPERTS: 8, "num_experts_per_tok": 2},
        {"mlp/router": "block_sparse_moe.gate", "expert": "block_sparse_moe.experts.{expert}.{part}",
         "expert_parts": "w1 w3 w2"},
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", {"qk_norm": "shared"}, {**BIAS, **EXPERT}, QWEN_MOE, dense="mlp_only_layers"
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM", {"mixture.shared_gate": True},
        {**EXPERT, "mixture.shared": "shared_expert_intermediate_size", "qkv_bias": "qkv_bias"},
        {**QWEN_MOE, "qkv_bias": True}, needs=SLIDING, dense="mlp_only_layers",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM", {"sinks": True, "mixture.normalize": True, "mixture.biases": True}, {**BIAS, **LOCAL},
        {
            EXPERTS: 128, "num_experts_per_tok": 4, "swiglu_alpha": 1.702, "swiglu_limit": 7.0,
            "attention_bias": True, "head_dim": 64, "rms_norm_eps": 1e-5, "rope_theta": 150_000.0,
            "sliding_window": 128, "sliding_window_pattern": 2, "max_position_embeddings": 131_072,
            "rope_scaling": {
                "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        {"mlp/router": "mlp.router", "expert": "mlp.experts.{part}", "together": "0 1 3 2"},
        needs={"hidden_act": "silu"},  # of its experts, which have their own
    ),
    "gemma": Family("GemmaForCausalLM", GEMMA, GEMMA_KEYS, {**TIED, "head_dim": 256}),
    "gemma2": Family(
        "Gemma2ForCausalLM", {**GEMMA, "norms": "both"}, GEMMA2,
        {**TIED, "head_dim": 256, "sliding_window_pattern": 2}, SANDWICH,
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", {**GEMMA, "norms": "both", "qk_norm": "shared"}, GEMMA2,
        # The text_config of a download has what differs from the class only.
        {**TIED, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 262_208,
         "sliding_window": 4096, "sliding_window_pattern": 6, "query_pre_attn_scalar": 256,
         "rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0},
        SANDWICH,
        {r"^(language_model\.model|model\.language_model)\.": "model."},
        ("*vision_tower.*", "*multi_modal_projector.*", "language_model.lm_head.weight"),
    ),
    "phi3": Family(
        "Phi3ForCausalLM", absent={"rms_norm_eps": 1e-5},
        names={"qkv": "self_attn.qkv_proj[{part}]", "parts": "0 1 2", "gate_up": "mlp.gate_up_proj"},
    ),
    "olmo2": Family("Olmo2ForCausalLM", OLMO, BIAS, {"rms_norm_eps": 1e-5}, SANDWICH),
    "olmo3": Family(
        "Olmo3ForCausalLM", OLMO, BIAS,
        {"rms_norm_eps": 1e-5, "sliding_window": 4096, "sliding_window_pattern": 4, "rope_theta": 500_000.0,
         "rope_local_base_freq": None},
        SANDWICH,
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM", {}, {**BIAS, **MLP_BIAS},
        {**TIED, **SLIDING, "no_rope_layer_interval": 4, "rope_theta": 2_000_000.0},
    ),
    "granite": Family("GraniteForCausalLM", {}, {**GRANITE, **MLP_BIAS}, {"attention_multiplier": 1.0}),
    "granitemoehybrid": Family(
        "GraniteMoeHybridForCausalLM", {}, {**GRANITE, "d_ff": "shared_intermediate_size"},
        {"attention_multiplier": 1.0, "num_local_experts": 8, "position_embedding_type": "none",
         "layer_types": ("mamba",)},
        {"gate_up": "shared_mlp.input_linear", "mlp/down": "shared_mlp.output_linear"},
        needs={"num_local_experts": 0},
    ),
    "stablelm": Family(
        "StableLmForCausalLM", {"norm": "layer"},
        {**EPS, "qkv_bias": "use_qkv_bias", "qk_norm": ("qk_layernorm", {True: "each"}),
         "parallel": ("use_parallel_residual", {True: "one_norm"})},
        {"partial_rotary_factor": 0.25, "layer_norm_eps": 1e-5},
        {"q_norm": "self_attn.q_layernorm.norms.{head}", "k_norm": "self_attn.k_layernorm.norms.{head}"},
    ),
    "cohere": Family(
        "CohereForCausalLM", COHERE,
        {**EPS, **BIAS, "qk_norm": ("use_qk_norm", {True: "each"}), "logit_scale": "logit_scale"},
        {**TIED, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "rope_theta": 500_000.0},
    ),
    "cohere2": Family(
        "Cohere2ForCausalLM", COHERE, {**EPS, **BIAS, "logit_scale": "logit_scale"},
        {**TIED, "layer_norm_eps": 1e-5, "logit_scale": 0.0625, "sliding_window": 4096, "sliding_window_pattern": 4,
         "global_layers_have_rope": False},
    ),
    "glm4": Family(
        "Glm4ForCausalLM", {"norms": "both", "interleaved_rope": True}, {"qkv_bias": "attention_bias"},
        {"partial_rotary_factor": 0.5, "head_dim": 128, "attention_bias": True, "rms_norm_eps": 1.5625e-7},
        {"attention_post_norm": "post_self_attn_layernorm", "mlp_post_norm": "post_mlp_layernorm",
         "gate_up": "mlp.gate_up_proj"},
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM", {"norm": "layer", "gated": False, "mlp_bias": True},
        {**EPS, **BIAS, "parallel": ("use_parallel_residual", {True: "two_norms"})},
        {"attention_bias": True, "use_parallel_residual": True, "layer_norm_eps": 1e-5, "hidden_act": "gelu",
         "rotary_pct": 0.25},
        {"embed": "gpt_neox.embed_in", "layer": "gpt_neox.layers.{layer}.", "ends/norm": "gpt_neox.final_layer_norm",
         "head": "embed_out", "qkv": "attention.query_key_value", "attention/out": "attention.dense",
         "mlp/up": "mlp.dense_h_to_4h", "mlp/down": "mlp.dense_4h_to_h"},
        {r"^lm_head\.": "embed_out."},
        ("gpt_neox.layers.*.attention.bias", "gpt_neox.layers.*.attention.masked_bias"),
    ),
    "starcoder2": Family(
        "Starcoder2ForCausalLM", {"norm": "layer", "gated": False},
        {"norm_eps": "norm_epsilon", "qkv_bias": "use_bias", "out_bias": "use_bias", "mlp_bias": "use_bias"},
        {**TIED, "use_bias": True, "norm_epsilon": 1e-5, "hidden_act": "gelu_pytorch_tanh"},
        {"mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj"},
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM", {"interleaved_rope": True, "mixture.balance": 0.0}, DEEPSEEK_KEYS,
        {**DEEPSEEK_ABSENT, "n_shared_experts": 2, "n_routed_experts": 64, "moe_intermediate_size": 1407,
         "topk_method": "greedy"},
        DEEPSEEK_NAMES, needs={"norm_topk_prob": False, "scoring_func": "softmax", **DEEPSEEK},
        dense="first_k_dense_replace",
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        {"mixture.balance": 0.0, "mixture.score": "sigmoid", "mixture.bias_rate": 1e-3},
        {**DEEPSEEK_KEYS, "interleaved_rope": "rope_interleave"},
        {**DEEPSEEK_ABSENT, "n_shared_experts": 1, "n_routed_experts": 256, "moe_intermediate_size": 2048,
         "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "norm_topk_prob": True,
         "rope_interleave": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 3,
         "num_nextn_predict_layers": 1},
        DEEPSEEK_NAMES, needs={"scoring_func": "sigmoid", **DEEPSEEK}, dense="first_k_dense_replace",
    ),
    "gpt2": Family(
        "GPT2LMHeadModel", {},
        {"d_model": "n_embd", "d_ff": "n_inner", "num_layers": "n_layer", "num_heads": "n_head",
         "num_kv_heads": "n_head", "max_positions": "n_positions", "norm_eps": "layer_norm_epsilon",
         "activation": ("activation_function", {"gelu_new": "gelu_tanh", **ACTIVATIONS})},
        {**TIED, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 1024},
        {"embed": "transformer.wte", "ends/positions": "transformer.wpe.weight", "layer": "transformer.h.{layer}.",
         "ends/norm": "transformer.ln_f", "attention_norm": "ln_1", "mlp_norm": "ln_2", "qkv": "attn.c_attn",
         "attention/out": "attn.c_proj", "mlp/up": "mlp.c_fc", "mlp/down": "mlp.c_proj", "matrices": "[in, out]"},
        {r"^(h\.|wte\.|wpe\.|ln_f\.)": r"transformer.\1"},  # names of the first downloads
        ("transformer.h.*.attn.bias", "transformer.h.*.attn.masked_bias", "lm_head.weight"),
        {"scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False, "scale_attn_weights": True, **TIED},
        kind=GPT2Config,
    ),
}  # fmt: skip
