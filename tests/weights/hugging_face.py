"""One row for each family: transformers' model, jzero's of the same files, and checks, which return relative errors."""

import json
import tempfile
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pytest
from helpers.named_models import model_of
from helpers.steps import mesh, settings
from safetensors.numpy import load_file

import jzero
from jzero import weights
from models import config_from_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LR, V = 3e-3, 61
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, V, (2, 2, 13))
IMAGES = RNG.normal(size=(2, 8, 8, 3)).astype("f4")
LENGTHS = np.array([[13], [9]])  # the second row of BERT ends with padding
MASK = (np.arange(13) < LENGTHS).astype(np.int32)
INITIAL = {"initializer_range": 0.2}
SHAPE = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48, **INITIAL}
DECODER = {**SHAPE, "num_hidden_layers": 4, "num_key_value_heads": 2, "vocab_size": V, "bos_token_id": None,
           "eos_token_id": None, "pad_token_id": None}  # fmt: skip
ENCODER = {**SHAPE, "num_hidden_layers": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 16, "vocab_size": V,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
        **INITIAL}  # fmt: skip
BERT = {**ENCODER, "vocab_size": V, "max_position_embeddings": 16, "pad_token_id": None}
VIT = {**ENCODER, "image_size": 8, "patch_size": 2, "num_labels": 5}
WIDE = {"head_dim": 16}  # 4 heads of 16 in a width of 32
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
NESTED = {"sliding_attention": {"rope_type": "default", "rope_theta": 10.0},
          "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0}}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"]
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 32,
        "short_factor": [1.0, 1.1], "long_factor": [2.0, 4.0]}  # fmt: skip
MIXED = {"sliding_window": 5, "layer_types": [*KINDS[:1] * 2, KINDS[1], KINDS[0]]}
GATED = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
         "router_aux_loss_coef": 0.9}  # fmt: skip
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 20, "q_lora_rank": 24, "qk_nope_head_dim": 12,
          "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 6, "num_experts_per_tok": 3,
          "moe_intermediate_size": 24}  # fmt: skip
QWEN2_MOE = {**GATED, "norm_topk_prob": False, "shared_expert_intermediate_size": 40}
GRANITE4 = {"shared_intermediate_size": 40, "num_local_experts": 0, "layer_types": KINDS[1:] * 4,
            "attention_multiplier": 0.3, "mamba_n_heads": 8}  # fmt: skip
FOUR_EXPERTS = {"num_local_experts": 4, "router_aux_loss_coef": 0.0}
CHUNKED = {**FOUR_EXPERTS, "attention_chunk_size": 5, "floor_scale": 3}
SCALED = {"rope_theta": 50.0, "factor": 4.0}
FAR = {"max_position_embeddings": 64}
# name -> (transformers' name, what its config differs in)
FAMILIES = {
    "llama3.1": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", **SCALED}, **WIDE}),
    "dynamic": ("Llama", {"rope_parameters": {"rope_type": "dynamic", **SCALED}, "max_position_embeddings": 8}),
    "yarn": ("Llama", {**FAR, "rope_parameters": YARN, "num_hidden_layers": 2}),
    "longrope": ("Llama", {"rope_parameters": {**LONG, "original_max_position_embeddings": 8},
                           "max_position_embeddings": 32, "num_attention_heads": 8}),
    "biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "qwen3": ("Qwen3", WIDE),
    "mixtral": ("Mixtral", FOUR_EXPERTS),
    "qwen2_moe": ("Qwen2Moe", QWEN2_MOE),
    "qwen2_moe-every_2": ("Qwen2Moe", {**QWEN2_MOE, "decoder_sparse_step": 2}),
    "qwen3_moe": ("Qwen3Moe", {**WIDE, **GATED}),
    "qwen3_moe-dense_0": ("Qwen3Moe", {**WIDE, **GATED, "num_hidden_layers": 3, "mlp_only_layers": [0]}),
    "gpt_oss": ("GptOss", {**WIDE, **MIXED, **FAR, "rope_parameters": {**YARN, "truncate": False}, "swiglu_limit": 1.0,
                           "num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24,
                           "router_aux_loss_coef": 0.9}),
    "llama4": ("Llama4", {**WIDE, **CHUNKED, **FAR, "rope_parameters": YARN, "no_rope_layers": [1, 0, 1, 1],
                          "attn_scale": 0.5}),
    "llama4-mixed": ("Llama4", {**CHUNKED, "head_dim": 8, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 40,
                                "use_qk_norm": False}),
    "gemma": ("Gemma", WIDE),
    "gemma2": ("Gemma2", {**WIDE, "sliding_window": 5, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
                          "final_logit_softcapping": 9.0}),
    "gemma3": ("Gemma3", {**WIDE, **MIXED, "query_pre_attn_scalar": 24, "rope_parameters": NESTED}),
    "phi3": ("Phi3", {**FAR, "rope_parameters": {**LONG, "partial_rotary_factor": 0.5}, "sliding_window": 5,
                      "original_max_position_embeddings": 32}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {**MIXED, **FAR, "rope_parameters": {
        "full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 0, 1], "use_sliding_window": False}),
    "granite": ("Granite", {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3,
                            "logits_scaling": 0.5}),
    "granite4": ("GraniteMoeHybrid", {**GRANITE4, "position_embedding_type": "rope"}),
    "granite4-nope": ("GraniteMoeHybrid", GRANITE4),
    "stablelm": ("StableLm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "stablelm-parallel": ("StableLm", {"qk_layernorm": True, "use_parallel_residual": True,
                                       "partial_rotary_factor": 0.5}),
    "cohere": ("Cohere", {"use_qk_norm": True, "logit_scale": 0.25, "tie_word_embeddings": True}),
    "cohere2": ("Cohere2", {**MIXED, "tie_word_embeddings": True, "logit_scale": 0.25}),
    "glm4": ("Glm4", {**WIDE, "eos_token_id": 60}),
    "gpt_neox": ("GPTNeoX", {"rotary_pct": 0.5, "num_key_value_heads": 4}),
    "gpt_neox-sequential": ("GPTNeoX", {"num_key_value_heads": 4, "use_parallel_residual": False,
                                        "hidden_act": "gelu_new"}),
    "starcoder2": ("Starcoder2", {"sliding_window": 5}),
    "deepseek_v2": ("DeepseekV2", {**LATENT, "num_hidden_layers": 3, "q_lora_rank": None, "first_k_dense_replace": 1,
                                   "hidden_act": "gelu", "routed_scaling_factor": 1.5}),
    "deepseek_v2-groups": ("DeepseekV2", {
        **LATENT, "num_hidden_layers": 2, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2,
        "rope_parameters": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}}),
    "deepseek_v3": ("DeepseekV3", {
        **LATENT, **FAR, "num_hidden_layers": 3, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 3,
        "topk_group": 2, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.6}}),
}  # fmt: skip


def lm_batch(rows):
    return {"inputs": rows[:, :-1], "labels": rows[:, 1:]}


def masked_batch(rows):
    """Every third token is predicted, none of them padding."""
    predicted = (np.arange(13) % 3 == 1) & (MASK == 1)
    types = (np.arange(13) > 5).astype(np.int32) * np.ones_like(rows)
    inputs = np.where(predicted, 0, rows)
    return {"inputs": inputs, "labels": np.where(predicted, rows, -100), "segments": MASK, "types": types}


class Case(NamedTuple):
    architecture: str
    config: str
    options: dict
    batch: dict


TEXT = lm_batch(TOKENS[0])
PICTURES = {"images": IMAGES, "labels": np.array([1, 3])}
OTHERS = {
    "gpt2": Case("GPT2LMHeadModel", "GPT2Config", GPT2, TEXT),
    "bert": Case("BertForMaskedLM", "BertConfig", BERT, masked_batch(TOKENS[0])),
    "vit": Case("ViTForImageClassification", "ViTConfig", VIT, PICTURES),
}
CASES = OTHERS | {
    name: Case(
        f"{family}ForCausalLM", f"{family}{'Text' * (family in ('Gemma3', 'Llama4'))}Config", DECODER | more, TEXT
    )
    for name, (family, more) in FAMILIES.items()
}


def torch_model(name):
    """A model of transformers with random weights, biases and scales included; its greedy text has many tokens."""
    case = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**case.options, attn_implementation="eager")
    made = getattr(transformers, case.architecture)(config)
    with torch.no_grad():
        for key, x in made.named_parameters():
            if key.endswith(LAST_NORMS):
                torch.nn.init.normal_(x, std=2)
            elif key.endswith("bias") or "norm" in key.lower() or "ln_" in key or "cls_token" in key:
                x.add_(0.3 * torch.randn(x.shape))
        for key, x in made.named_buffers():
            if key.endswith("e_score_correction_bias"):
                x.copy_(0.3 * torch.randn(x.shape))
    return made.eval()


LAST_NORMS = ("model.norm.weight", "ln_f.weight", "final_layer_norm.weight")  # of language models


class Pair:
    def __init__(self, name: str):
        self.name, self.case, self.theirs = name, CASES[name], torch_model(name)
        self._temporary = tempfile.TemporaryDirectory()
        self.directory = Path(self._temporary.name, "theirs")
        self.theirs.save_pretrained(self.directory)

    @cached_property
    def config(self):
        return config_from_hf(self.directory)

    @cached_property
    def step(self):
        return step_of(self.config)

    @cached_property
    def params(self):
        return weights.load(self.directory, self.step)

    @cached_property
    def exported(self):
        made = self.directory.with_name("ours")
        weights.save(self.params, self.step, made, "model.safetensors", np.dtype("float32"))
        return made

    # ---------------------------------------------------------------------------------------- checks

    def logits(self) -> float:
        expected = torch_logits(self.theirs, **as_torch(self.case.batch))
        return error_of(logits(self.step, self.params, self.case.batch), expected, self.case.batch)

    def gradients(self) -> float:
        """The loss and the gradients of one step: transformers' gradients, loaded as if they were weights."""
        batch, made = self.case.batch, torch_model(self.name)
        made = made.double() if self.name in IN_DOUBLE else made
        values, labels = made(**as_torch(batch)).logits, torch.tensor(batch["labels"]).reshape(-1)
        loss = torch.nn.functional.cross_entropy(values.reshape(len(labels), -1), labels)  # ignores -100
        loss.backward()
        for x in made.parameters():
            x.data = x.grad
        made = made.float()
        made.save_pretrained(self.directory.with_name("gradients"))
        expected = weights.load(self.directory.with_name("gradients"), self.step)
        found, metrics = self.step.gradients(self.step.init(jax.random.key(0), self.params), batch)
        return float(np.max([abs(float(metrics["loss"]) / loss.item() - 1), error_of_gradients(found, expected)]))

    def export(self) -> float:
        auto = transformers.AutoModelForCausalLM if "CausalLM" in self.case.architecture else type(self.theirs)
        back, batch = auto.from_pretrained(self.exported, attn_implementation="eager"), self.case.batch
        assert type(back) is type(self.theirs)
        return error_of(*(torch_logits(one, **as_torch(batch)) for one in (back, self.theirs)), batch)

    def generate(self, step=None) -> float:
        """The part of greedy tokens that differ: rows of unequal length, further than windows reach."""
        step = step or self.step
        # GPT-2 has 16 positions
        width, new, begins = (8, 8, [[0], [5], [2], [6]]) if self.name == "gpt2" else (13, 12, [[0], [4], [9], [12]])
        rows, mask = TOKENS[:2].reshape(4, 13)[:, :width], (np.arange(width) >= begins).astype(np.int32)
        options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        expected = np.pad(rows, ((0, 0), (0, new)))
        for b, [begin] in enumerate(begins):  # alone: some families count padding
            row = torch.tensor(rows[b : b + 1, begin:])
            made = self.theirs.generate(row, attention_mask=torch.ones_like(row), **options)[0].numpy()
            expected[b, begin : begin + len(made)] = made
        assert len(set(expected[:, width:].ravel().tolist())) > 3
        state = step.init(jax.random.key(0), weights.load(self.directory, step))
        found = step.generate(state, rows, new, attention_mask=mask, numpy=True)
        return float((found != expected).mean())

    def packed(self) -> float:
        """The logits of documents in packed rows, beside transformers' of each document alone."""
        rows, errors = TOKENS[0], []
        segments = np.array([[1] * 4 + [2] * 7 + [3] * 2, [1] * 6 + [2] * 5 + [0] * 2])
        found = logits(self.step, self.params, {"inputs": rows, "segments": segments})
        for b, s in ((0, 1), (0, 2), (0, 3), (1, 1), (1, 2)):
            here = segments[b] == s
            alone = torch_logits(self.theirs, input_ids=torch.tensor(rows[b][here])[None])[0]
            errors.append(error_of(found[b][here], alone))
        return max(errors)


pair = cache(Pair)
CHECKS = ("logits", "gradients", "export", "generate", "packed")
BY_LENGTH = ("dynamic", "longrope")  # which transformers scales by a document's length, and jzero by the row's
# The gradient of its tied embedding in float32 is 2.5e-6 from that in float64 here, and jzero's 3.6e-6.
IN_DOUBLE = ("qwen2",)
WITHOUT = {"generate": ("bert", "vit", *BY_LENGTH), "packed": ("vit", *BY_LENGTH)}


def checks_of(name):
    return [check for check in CHECKS if name not in WITHOUT.get(check, ())]


def error_of(found, expected, batch=()):
    """The largest difference over the largest value, of tokens and not of padding."""
    counted = np.asarray(batch["segments"]) > 0 if "segments" in batch else ...
    assert abs(expected).max() > 0.5
    return float(abs(found[counted] - expected[counted]).max() / abs(expected).max())


def error_of_gradients(found, expected):
    """The largest difference over the largest gradient; state has none."""
    largest = max(abs(np.asarray(x)).max() for x in jax.tree.leaves(expected))
    pairs = zip(jax.tree.leaves(found, is_leaf=lambda x: x is None), jax.tree.leaves(expected), strict=True)
    errors = [abs(np.asarray(a) - np.asarray(b)).max() for a, b in pairs if a is not None]
    return float(np.max(errors) / largest)  # NaN, if one is


def step_of(config, stage=0, more=None, **axes):
    """A train step of a model; its large eps keeps a gradient's rounding error near zero from changing a sign."""
    adamw = {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1, "eps": 1e-3}}
    more = {"optimizer": adamw, "stack": {"unroll": "auto" if "pipe" in axes else False}} | (more or {})
    return jzero.make_train_step(model_of(config), settings(2, stage, **more), mesh=mesh(**{"zero": 1, **axes}))


def step_from(name, changes=None, **layout):
    return step_of(config_from_hf(pair(name).directory, **(changes or {})), **layout)


def written(config):
    """The config.json of an export."""
    table = model_of(config).weights_layout()
    return {**table["download"]["config"], **table["config"]}


def as_torch(batch):
    names = {"inputs": "input_ids", "segments": "attention_mask", "types": "token_type_ids", "images": "pixel_values"}
    moved = {name: np.moveaxis(x, -1, 1) if name == "images" else x for name, x in batch.items()}
    return {names[name]: torch.tensor(x) for name, x in moved.items() if name in names}


def torch_logits(made, **arguments):
    with torch.no_grad():
        return made(**arguments).logits.numpy()


def logits(step, params, batch):
    names = {"inputs": "tokens_BS", "segments": "segments_BS", "types": "types_BS", "images": "images"}
    some = {names[name]: x for name, x in batch.items() if name in names}
    return np.asarray(jax.jit(lambda params, some: step.model.module(params)(**some))(params, some))


def assert_same_files(theirs, ours):
    """The tensors, and the config but for its dtype, and a number of layers that transformers does not write."""
    there, here = (load_file(path / "model.safetensors") for path in (theirs, ours))
    assert there.keys() == here.keys()
    for key, x in there.items():
        np.testing.assert_array_equal(x, here[key])
    before, after = (json.loads((path / "config.json").read_text()) for path in (theirs, ours))
    keys = before.keys() - {"dtype", "num_nextn_predict_layers"}
    assert {key: after.get(key) for key in keys} == {key: before[key] for key in keys}
