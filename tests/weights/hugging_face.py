"""Models of transformers with random weights, their batches, and jzero's models of the same files."""

import json
import math
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import jzero
from models import bert, families, gpt2, vit
from models.decoder import Decoder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

STEPS, LR, V = 20, 3e-3, 61
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, V, (STEPS, 2, 13))
IMAGES = RNG.normal(size=(STEPS, 2, 8, 8, 3)).astype("f4")
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
FAMILIES = {
    "llama3.1": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 4.0}, **WIDE}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0, "layer_types": KINDS[:1] * 4},
    ),
    "qwen3": ("Qwen3", WIDE),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "router_aux_loss_coef": 0.0}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**WIDE, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True,
         "router_aux_loss_coef": 0.0},
    ),
    "gemma": ("Gemma", WIDE),
    "gemma2": (
        "Gemma2",
        {**WIDE, "sliding_window": 5, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0,
         "final_logit_softcapping": 1.5},
    ),
    "gemma3": (
        "Gemma3",
        {**WIDE, "sliding_window": 5, "query_pre_attn_scalar": 24, "layer_types": [*KINDS[:1] * 2, KINDS[1], KINDS[0]],
         "rope_parameters": NESTED},
    ),
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
    """A model here and there."""

    from_hf: Any
    kind: Any
    architecture: str
    config: str
    options: dict
    batches: list


TEXTS = [lm_batch(rows) for rows in TOKENS]
PICTURES = [{"images": IMAGES[i], "labels": np.array([i % 5, 3 * i % 5])} for i in range(STEPS)]
OTHERS = {
    "gpt2": Case(gpt2.from_hf, gpt2.GPT2, "GPT2LMHeadModel", "GPT2Config", GPT2, TEXTS),
    "bert": Case(
        bert.from_hf, bert.Bert, "BertForMaskedLM", "BertConfig", BERT, [masked_batch(rows) for rows in TOKENS]
    ),
    "vit": Case(vit.from_hf, vit.ViT, "ViTForImageClassification", "ViTConfig", VIT, PICTURES),
}
CASES = OTHERS | {
    name: Case(
        families.from_hf, Decoder, f"{family}ForCausalLM",
        f"{family}TextConfig" if family == "Gemma3" else f"{family}Config", {**DECODER, **more}, TEXTS,
    )
    for name, (family, more) in FAMILIES.items()
}  # fmt: skip


def torch_model(name):
    """A model of transformers with random weights, biases and scales included."""
    _, _, architecture, config, options, _ = CASES[name]
    torch.manual_seed(0)
    made = getattr(transformers, architecture)(getattr(transformers, config)(**options, attn_implementation="eager"))
    with torch.no_grad():
        for key, x in made.named_parameters():
            if key.endswith("bias") or "norm" in key.lower() or "ln_" in key or "cls_token" in key:
                x.add_(0.3 * torch.randn(x.shape))
    return made.eval()


def step_of(config, kind=Decoder, stage=0, more=None, **axes):
    """A train step of a model; its large eps keeps a gradient's rounding error near zero from changing a sign."""
    axes = {"zero": 1, **axes}
    settings = {
        "train_batch_size": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1, "eps": 1e-3}},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **({} if "pipe" in axes else {"stack": {"unroll": False}}),
        **(more or {}),
    }
    devices = jax.devices()[: math.prod(axes.values())]
    model = jzero.from_flax(lambda rngs: kind(config, rngs=rngs))
    return jzero.make_train_step(model, settings, mesh=jzero.make_mesh(devices=devices, **axes))


def step_from(name, directory, changes=None, **layout):
    case = CASES[name]
    return step_of(case.from_hf(directory, **(changes or {})), case.kind, **layout)


def as_torch(batch):
    """The keyword arguments of transformers' classes."""
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


def assert_same_logits(found, expected, batch=()):
    counted = np.asarray(batch["segments"]) > 0 if "segments" in batch else ...
    assert abs(expected).max() > 0.5
    np.testing.assert_allclose(found[counted], expected[counted], atol=1e-5, rtol=0)


def assert_same_files(theirs, ours):
    """The tensors, and the config but for its dtype."""
    there, here = (load_file(path / "model.safetensors") for path in (theirs, ours))
    assert there.keys() == here.keys()
    for key, x in there.items():
        np.testing.assert_array_equal(x, here[key])
    before, after = (json.loads((path / "config.json").read_text()) for path in (theirs, ours))
    keys = before.keys() - {"dtype"}
    assert {key: after.get(key) for key in keys} == {key: before[key] for key in keys}
