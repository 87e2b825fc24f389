"""Models against `transformers`, family by family: see the checks in hugging_face.py."""

import json
from itertools import product

import hugging_face as hf
import jax
import numpy as np
import pytest
from helpers.sampling import keep
from hugging_face import torch, transformers
from safetensors.numpy import load_file, save_file

import jzero
from jzero import weights
from models import config_from_hf
from models.downloads import IDS

FLOAT32 = np.dtype("float32")
DEFAULT = ["gpt2", "bert", "vit", "llama3.1", "qwen3_moe", "gemma3", "granite", "stablelm-parallel", "gpt_neox",
           "phi3", "qwen2_moe", "gpt_oss", "llama4"]  # fmt: skip
CELLS = [(name, check) for name in hf.CASES for check in hf.checks_of(name)]
# The logits of each family, in packed rows by each kind of mask: learned positions, windows, sinks, chunks. Loss and
# gradients, which follow from the logits of labelled tokens, of each kind of batch, and of a mixture.
GRADIENTS, PACKED = ["gpt2", "bert", "vit", "gpt_oss"], ["gpt2", "gemma3", "gpt_oss", "llama4"]
DEFAULT_CELLS = [
    *product(GRADIENTS, ["gradients"]),
    *product(PACKED, ["packed"]),
    *((name, "logits") for name in DEFAULT if name not in {*GRADIENTS, *PACKED}),
    ("gpt_oss", "export"),
]


@pytest.mark.parametrize(("name", "check"), keep(CELLS, DEFAULT_CELLS))
def test_family(name, check):
    assert getattr(hf.pair(name), check)() < 5e-6


@pytest.mark.parametrize("name", keep(hf.CASES, DEFAULT))
def test_files_go_back_as_they_came(name):
    made = hf.pair(name)
    hf.assert_same_files(made.directory, made.exported)
    assert config_from_hf(made.exported) == made.config
    jax.tree.map(np.testing.assert_array_equal, weights.load(made.exported, made.step), made.params)
    if name not in hf.OTHERS:
        pairs = zip(*map(jax.tree.leaves, (made.params, made.step.layouts)), strict=True)
        assert made.config.num_parameters == sum(x.size for x, layout in pairs if not layout.state)


CHANGES = {"norm_eps": 1e-3, "rope_theta": 777.0}
EVERY_2 = {"decoder_sparse_step": 2, "mlp_only_layers": None}
# family, keys of the download, changed fields, what is written
KEPT = (
    ("qwen2_moe-every_2", {"mlp_only_layers": []}, CHANGES, {**EVERY_2, "mlp_only_layers": []}),
    ("qwen3_moe", {"decoder_sparse_step": 2}, {"num_layers": 2}, {"decoder_sparse_step": 2, "mlp_only_layers": [0]}),
    ("llama4", {"attn_temperature_tuning": 4}, CHANGES, {"attn_temperature_tuning": 4}),
    ("olmo3", {}, {"norm_eps": 1e-3}, {"rope_parameters": hf.CASES["olmo3"].options["rope_parameters"]}),
    # Before the change, its heads do not divide its width.
    ("biases", {"num_attention_heads": 5}, {"num_heads": 4, "num_kv_heads": 4}, {"num_attention_heads": 4}),
)


@pytest.mark.parametrize(("name", "keys", "changes", "written"), KEPT, ids=lambda x: x if isinstance(x, str) else "")
def test_keys_of_a_download_stay_while_they_hold(name, keys, changes, written):
    """Whatever else the user changes: the files of an earlier export have them too."""
    case = hf.CASES[name]
    there = {**case.options, "model_type": getattr(transformers, case.config).model_type, **keys}
    config = config_from_hf(there, **changes)
    found = hf.written(config)
    assert {key: found.get(key) for key in written} == written
    assert config_from_hf(found) == config


def test_the_text_decoder_of_a_model_with_images(tmp_path):
    """Gemma 3 from 4B: a text_config that has only what differs from the class, and a vision tower."""
    text = {key: x for key, x in hf.DECODER.items() if key not in ("num_attention_heads", "num_key_value_heads", *IDS)}
    text |= {"hidden_size": 64, "num_hidden_layers": 7, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 16, "patch_size": 4}  # fmt: skip
    torch.manual_seed(0)
    config = transformers.Gemma3Config(text_config=dict(text), vision_config=vision, mm_tokens_per_image=4)
    made = transformers.Gemma3ForConditionalGeneration(config).eval()
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    made.save_pretrained(theirs, max_shard_size="300KB")
    there = json.loads((theirs / "config.json").read_text())
    there |= {"text_config": {"model_type": "gemma3_text", **text}, "eos_token_id": [1, 60]}  # as in the downloads
    (theirs / "config.json").write_text(json.dumps(there))

    config, tokens = config_from_hf(theirs), hf.TOKENS[0]
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.window) == (8, 4, 256, 4096)
    step = hf.step_of(config)
    params = weights.load(theirs, step)
    expected = hf.torch_logits(made, input_ids=torch.tensor(tokens), token_type_ids=torch.zeros(tokens.shape))
    assert hf.error_of(hf.logits(step, params, {"inputs": tokens}), expected) < 5e-6
    weights.save(params, step, ours, "model.safetensors", FLOAT32)
    auto = transformers.AutoModelForCausalLM.from_pretrained(ours)
    assert (type(auto).__name__, auto.config.eos_token_id) == ("Gemma3ForCausalLM", [1, 60])
    assert hf.error_of(hf.torch_logits(auto, input_ids=torch.tensor(tokens)), expected) < 5e-6
    there["text_config"]["query_pre_attn_scalar"] = 24
    (theirs / "config.json").write_text(json.dumps(there))
    with pytest.raises(jzero.ConfigError, match=r"query_pre_attn_scalar = 24, not 256"):
        weights.load(theirs, step)


def test_the_text_decoder_of_a_llama_4_with_images(tmp_path):
    """The names of its downloads, and a text_config without what transformers 5 adds."""
    theirs = hf.pair("llama4")
    tensors = load_file(theirs.directory / "model.safetensors")
    tensors = {f"language_model.{name}": x for name, x in tensors.items()} | {"vision_model.x": np.ones(2, "f4")}
    save_file(tensors, tmp_path / "model.safetensors")
    text = json.loads((theirs.directory / "config.json").read_text())
    added = ("layer_types", "moe_layers", "attn_temperature_tuning")
    text = {key: x for key, x in text.items() if key not in added} | {"interleave_moe_layer_step": 1}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama4", "text_config": text}))
    config = config_from_hf(tmp_path)
    assert (config, config.temperature, config.window) == (theirs.config, (0.5, 3), 5)
    jax.tree.map(np.testing.assert_array_equal, weights.load(tmp_path, theirs.step), theirs.params)
    with pytest.raises(jzero.ConfigError, match=r"top_k = 2 \(num_experts_per_tok\): must be 1 with scale_inputs"):
        config_from_hf({**text, "num_experts_per_tok": 2})


def test_a_bias_that_is_state_keeps_its_dtype(tmp_path):
    """Near 4, bfloat16 would round away what balances the experts of a DeepSeek-V3; transformers keeps float32 too."""
    made, name = hf.pair("deepseek_v3"), "model.layers.1.mlp.gate.e_score_correction_bias"
    assert made.config.mixture.bias_rate == 0.0  # that of trained experts stays
    params = jax.tree.map(np.array, made.params)
    params["stack"]["mlp"]["bias"] += 4
    engine = jzero.Engine(made.step, jax.random.key(0), params=params)
    engine.save_checkpoint(tmp_path / "ckpt").wait()
    weights.export(tmp_path / "ckpt", tmp_path / "out", dtype="bfloat16")
    engine.save_16bit_model(tmp_path / "saved")
    for directory in ("out", "saved"):
        found = load_file(tmp_path / directory / "model.safetensors")
        np.testing.assert_array_equal(found[name], params["stack"]["mlp"]["bias"][0])
        assert {str(x.dtype) for key, x in found.items() if "correction_bias" not in key} == {"bfloat16"}


# ------------------------------------------------------------------------------------------- layouts, padding

HALVES = {"gradient_accumulation_steps": 2}
LAYOUTS = {
    "zero3": {"stage": 3, "zero": 2},
    "tensor": {"tensor": 2},
    "pipe": {"stage": 1, "pipe": 2, "more": HALVES},
    "interleaved": {"stage": 1, "pipe": 2, "more": {**HALVES, "pipeline": {"schedule": "interleaved", "chunks": 2}}},
}
ON = [*product(hf.CASES, ["zero3", "tensor", "pipe"]), ("gemma3", "interleaved")]
SHOWN = [("gpt_oss", "tensor")]  # experts, biases and sinks of the heads


@pytest.mark.parametrize(("name", "layout"), keep(ON, SHOWN))
def test_layouts(name, layout, tmp_path):
    """One step on two devices. The padding of a vocabulary is in no loss, logits or files of an export."""
    made, step = hf.pair(name), hf.step_from(name, {} if name == "vit" else {"pad_vocab_to": 16}, **LAYOUTS[layout])
    params, batch = weights.load(made.directory, step), hf.CASES[name].batch
    weights.save(params, step, tmp_path, "model.safetensors", FLOAT32)
    hf.assert_same_files(made.directory, tmp_path)
    found, plain = (hf.logits(one, jax.device_get(x), batch) for one, x in ((step, params), (made.step, made.params)))
    assert hf.error_of(found, plain) < 1e-6
    loss = jax.jit(lambda params: made.step.model.loss(params, batch, None))(made.params)
    loss = jax.tree.leaves(loss, is_leaf=lambda x: isinstance(x, jzero.Mean))[0]  # not a mixture's metrics and state
    _, metrics = step(step.init(jax.random.key(0), params), batch)
    np.testing.assert_allclose(metrics["loss"], loss.sum / loss.count, rtol=1e-6)


def test_text_of_latents_under_tensor():
    """The cache of layers before the stack, and of latents, which `tensor` does not divide: transformers' tokens."""
    step = hf.step_from("deepseek_v3", {"pad_vocab_to": 16}, tensor=2)
    assert hf.pair("deepseek_v3").generate(step) == 0
