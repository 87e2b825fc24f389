"""The configs, names and files of transformers, also of its former versions; mistakes are errors that name the fix."""

import dataclasses
import operator

import hugging_face as hf
import jax
import numpy as np
import pytest
from flax import nnx
from helpers.named_models import model_of
from helpers.refusals import refuses
from hugging_face import transformers
from safetensors.numpy import load_file, save_file

import jzero
from jzero import weights
from models import config_from_hf, from_hf, gpt2, llama, vit
from models.decoder_config import EncoderConfig
from models.downloads import IDS
from models.lora import LoRAConfig
from models.named import find_model
from models.rope import frequencies

TINY = {**hf.DECODER, "model_type": "llama"}


def test_files_of_transformers_4():
    """Before version 5, RoPE's settings lay at the top level, and Gemma 3 named its pattern."""
    old = {**TINY, "rope_theta": 100.0, "rope_scaling": {k: v for k, v in hf.LLAMA3.items() if k != "rope_theta"}}
    assert config_from_hf(old) == config_from_hf({**TINY, "rope_parameters": hf.LLAMA3})
    gemma = {**TINY, "model_type": "gemma3_text", "sliding_window": 5, "num_hidden_layers": 7}
    rope = {"rope_theta": 1000.0, "rope_local_base_freq": 10.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    made = config_from_hf({**gemma, **rope, "sliding_window_pattern": 3})
    found = made.global_layers, made.local_theta, made.rope_theta, made.rope_scaling.factor
    assert found == ((False, False, True), 10.0, 1000.0, 8.0)
    kinds = {"layer_types": [hf.KINDS[(i + 1) % 3 == 0] for i in range(7)]}
    assert config_from_hf({**gemma, **kinds, "rope_parameters": hf.NESTED}) == made
    qwen = {**TINY, "model_type": "qwen2", "sliding_window": 5, "use_sliding_window": False}
    assert config_from_hf(qwen).window is None
    assert config_from_hf({**qwen, "use_sliding_window": True, "max_window_layers": 0}).window == 5


# family -> its former name of a tensor, and a tensor that is not read
OLD = {
    "gpt2": (lambda key: key.removeprefix("transformer."), "h.0.attn.bias"),
    "bert": (
        lambda key: key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
        "bert.pooler.dense.weight",
    ),
}


@pytest.mark.parametrize("name", OLD)
def test_names_of_the_first_downloads(name, tmp_path):
    hf.torch_model(name).save_pretrained(tmp_path)
    step, (former, extra) = hf.step_from(name), OLD[name]
    new, file = weights.load(tmp_path, step), tmp_path / "model.safetensors"
    found = {former(key): x for key, x in load_file(file).items()}
    assert found.keys() != load_file(file).keys()
    save_file(found | {extra: np.ones(2, np.float32)}, file)
    jax.tree.map(np.testing.assert_array_equal, weights.load(tmp_path, step), new)


def test_a_changed_field_wins_over_the_files_key():
    """A file of transformers 4 has RoPE in two keys, which version 5 reads besides its own."""
    old = {**TINY, "rope_theta": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    changed = hf.written(config_from_hf(old, rope_theta=777.0))
    assert changed["rope_theta"] == changed["rope_parameters"]["rope_theta"] == 777
    assert hf.written(config_from_hf(old, rope_scaling=None))["rope_scaling"] is None
    assert hf.written(config_from_hf(old))["rope_scaling"] == old["rope_scaling"]
    # The key of another family says nothing of a Llama.
    assert model_of(config_from_hf({**TINY, "no_rope_layer_interval": 2})).weights_layout() is None


def test_the_labels_of_other_classes_do_not_go_back():
    labels = {"id2label": {"0": "cat", "1": "dog"}, "label2id": {"cat": 0, "dog": 1}}
    there = config_from_hf({"model_type": "vit", "hidden_act": "gelu", **hf.VIT, "num_channels": 3, **labels})
    for classes, kept in ((2, labels), (3, {})):
        shape = dataclasses.replace(there, num_classes=classes)
        table = model_of(shape).weights_layout()
        assert {key: x for key, x in table["download"]["config"].items() if key in labels} == kept


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_special_tokens_outside_of_a_smaller_vocabulary_do_not_go_back(family):
    """transformers refuses a padding token that its table of embeddings does not have."""
    tokens = {"bos_token_id": 1, "eos_token_id": [2, 60], "pad_token_id": 60}
    found = hf.written(config_from_hf({**TINY, "model_type": family, **tokens}, vocab_size=16))
    assert [found[key] for key in IDS] == [1, [2], None]
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**found))


def test_a_mixture_that_transformers_lacks():
    """It trains, and its files have jzero's own names; the report says why."""
    config = config_from_hf(TINY, qk_norm="shared")
    assert model_of(config).weights_layout() is None
    expected = "weights in files have jzero's own names: LlamaForCausalLM has no qk_norm='shared'"
    assert expected in jzero.report(hf.step_of(config))


OLD_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
ROPES = {
    "null": {"rope_scaling": None},
    "default": {"rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0}},
    "old yarn": {"rope_scaling": OLD_YARN},
    "new yarn": {"rope_parameters": {**OLD_YARN, "rope_theta": 10.0}},
}


@pytest.mark.parametrize("name", ROPES)
def test_the_rope_of_gpt_oss(name):
    """Without keys it is YaRN, in the default of transformers' class."""
    there = {**TINY, "model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 8, **ROPES[name]}
    config = config_from_hf(there)
    found = frequencies(8, config.rope_theta, config.rope_scaling, 16)
    assert config_from_hf(hf.written(config)) == config
    for keys in (there, hf.written(config)):
        theirs = transformers.GptOssConfig(**{key: x for key, x in keys.items() if key != "model_type"})
        rope = transformers.models.gpt_oss.modeling_gpt_oss.GptOssRotaryEmbedding(theirs)
        np.testing.assert_allclose(found.frequency, rope.inv_freq.numpy(), rtol=1e-6)
        assert found.magnitude == pytest.approx(rope.attention_scaling)


@pytest.mark.parametrize(
    ("keys", "told"), [({"attention_dropout": 0.1}, 1), ({"aux_loss_alpha": 0.001}, 1), ({"seq_aux": True}, 0)]
)
def test_what_is_left_out_is_reported(keys, told):
    config = config_from_hf(TINY | {"model_type": "deepseek_v2", "num_experts_per_tok": 2} | keys)
    ((key, x),) = keys.items()
    lines = [line for line in model_of(config).report_notes(np.dtype("f4")) if " = " in line]
    assert [line.startswith(f"{key} = {x}: ") for line in lines] == [True] * told


def test_a_name_in_the_hubs_cache(tmp_path, monkeypatch):
    """Shape and weights come from the files that are there; nothing is downloaded."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--some--model"
    hf.torch_model("qwen2").save_pretrained(cached / "snapshots/0123")
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0123")
    model = from_hf("some/model")
    step = jzero.make_train_step(model, {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    found, expected = (weights.load(name, step) for name in ("some/model", cached / "snapshots/0123"))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    refuses(lambda: from_hf("some/other"), "^some/other: no such directory; .*hf download some/other --local-")


DEEPSEEK = {**TINY, "model_type": "deepseek_v3", "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4}


def test_a_gpt2_without_positions_in_its_config():
    there = {key: x for key, x in hf.GPT2.items() if key != "n_positions"}
    default = transformers.GPT2Config().n_positions
    for keys in ({}, {"n_positions": None}):
        assert config_from_hf({"model_type": "gpt2", **there, **keys}).max_positions == default == 1024


BERT_JSON = {"model_type": "bert", **hf.BERT}
VIT_JSON = {"model_type": "vit", **hf.VIT, "num_channels": 3}
OSS = {**TINY, "model_type": "gpt_oss", "router_aux_loss_coef": 0.9}
SHARED = DEEPSEEK | {"topk_group": 2}
# a config.json, and what it gives
FIELDS = [
    (OSS, {"mixture.balance": 0.0}),  # transformers adds no loss without `output_router_logits`
    (OSS | {"output_router_logits": True}, {"mixture.balance": 0.9}),
    (OSS | {"model_type": "llama4_text", "num_experts_per_tok": 1}, {"mixture.balance": 0.0}),
    # From scratch it moves as in the pretraining of DeepSeek-V3.
    (TINY | {"model_type": "deepseek_v3"}, {"mixture.bias_rate": 0.001}),
    (TINY | {"model_type": "deepseek_v2", "num_experts_per_tok": 2}, {"mixture.bias_rate": None}),
    (SHARED | {"model_type": "deepseek_v2", "n_shared_experts": None}, {"mixture.shared": 0}),
    (SHARED | {"n_shared_experts": 0}, {"mixture.shared": 0}),
    (BERT_JSON | {"type_vocab_size": None, "layer_norm_eps": None}, {"num_types": 2, "norm_eps": 1e-12}),
    (BERT_JSON | {"head_dim": 16, "sliding_window": 4}, {"head_width": None, "window": None}),  # of decoders alone
    (VIT_JSON | {"num_labels": None, "id2label": {0: "a", 1: "b", 2: "c"}}, {"num_classes": 3}),
]


@pytest.mark.parametrize(("there", "fields"), FIELDS)
def test_fields_of_a_download(there, fields):
    config = config_from_hf(there)
    assert {name: operator.attrgetter(name)(config) for name in fields} == fields
    if there["model_type"] not in ("bert", "vit"):
        assert config_from_hf(hf.written(config)) == config


def test_an_encoders_config():
    # The caller's numbers need none in the file.
    assert config_from_hf(BERT_JSON | {"max_position_embeddings": None}, max_positions=64).max_positions == 64
    assert config_from_hf(VIT_JSON | {"num_labels": 0}, num_classes=3).num_classes == 3
    layout = from_hf(BERT_JSON).weights_layout()
    assert "max_position_embeddings" in layout["config"].keys() - {*layout["may_differ"]}


COUNTS = (
    ({"model_type": "gpt2", **hf.GPT2}, {"n_positions": "16", "n_head": True}),
    (TINY, {"num_key_value_heads": 0}),
    (DEEPSEEK, {"kv_lora_rank": "64", "num_experts_per_tok": 0}),
    (BERT_JSON, {"num_attention_heads": 0, "type_vocab_size": "2"}),
    (VIT_JSON, {"patch_size": 0, "num_labels": "5"}),
)


@pytest.mark.parametrize(("there", "wrong"), COUNTS, ids=lambda x: x.get("model_type", ""))
def test_counts_are_positive_integers(there, wrong):
    config_from_hf(there)
    with pytest.raises(jzero.ConfigError) as error:
        config_from_hf({**there, **wrong})
    told = {f"config.json has {key} = {value!r}: must be a positive integer" for key, value in wrong.items()}
    assert set(error.value.problems) == told


GROUPED = {**SHARED, "topk_method": "noaux_tc"}
V2 = {"model_type": "deepseek_v2"}
# What a config.json has besides, and a pattern of the error.
KEYS = [
    *((GROUPED | keys, "must be noaux_tc, a") for keys in (
        {"topk_method": "foo"}, {"n_group": 5}, {"topk_group": None, "n_group": 3}, {"topk_group": 5},
        {"topk_group": 0}, {"num_experts_per_tok": 9}, {"n_group": 12})),
    (GROUPED | V2, r"has topk_method = 'noaux_tc', n_group = 4, topk_group = 2: must be greedy or group_l"),
    (GROUPED | V2 | {"topk_method": "group_limited_greedy", "topk_group": None}, "must be greedy or group_limited_"),
    ({"model_type": "mamba"}, "model_type = 'mamba': must be one of bert, v"),
    ({"use_bidirectional_attention": True, "hidden_act": "relu"}, "(?s)attention = True.*hidden_act = 'relu'"),
    ({"rope_scaling": {"rope_type": "xpos", "factor": 4.0}},
     "rope_type = 'xpos': must be default, linear, dynamic, llama3, yarn, longrope"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "has no original_max_position_embeddings for yarn"),
    ({"rope_scaling": {"rope_type": "linear", "factor": 4.0, "mscale_all_dim": 1.0}},
     "mscale_all_dim = 1.0 with rope_type = 'linear': must be yarn"),
    ({"model_type": "deepseek_v3", "partial_rotary_factor": 0.5}, "latent attention has no partial_rotary; leave"),
    ({"model_type": "qwen2_vl"}, "jzero's models lack an encoder of images, and rot"),
    ({"head_dim": 5}, "2 must divide the rotated width of a head"),
    (BERT_JSON | {"hidden_size": 30}, "^BertConfig: num_heads must divide d_model, but 4 does not divide 30"),
    *(({"quantization_config": {"quant_method": method, "weight_block_size": [size, size]}}, "jzero's models lack it")
      for method, size in (("fp8", 64), ("int8", 128))),
    (BERT_JSON | {"hidden_size": None}, r"config\.json has no hidden_size"),
    (hf.GPT2 | {"model_type": "gpt2", "n_layer": None, "activation_function": "relu"},
     "(?s)n_layer.*activation_function = 'relu': must be one of gelu_new"),
]  # fmt: skip


@pytest.mark.parametrize(("keys", "words"), KEYS)
def test_a_config_json_that_no_model_has(keys, words):
    refuses(lambda: config_from_hf(TINY | keys), words)


SMALL_GPT = gpt2.GPT2Config(2, 32, 4, 48, vocab_size=hf.V, max_positions=8)
SMALL_VIT = vit.ViTConfig(2, 32, 4, 48, image_size=8, patch_size=4)
LORA = LoRAConfig(target_modules="all-linear")
NO_ADAPTERS = "q_proj, v_proj: files of gpt2 have no such modules; leave lora out, and train all weights"
ROWS = np.zeros((8, 9), np.int32)


def traced_loss(shape, batch):
    model, key = model_of(shape), jax.random.key(0)
    return model.loss(model.init(key), batch, key)


def test_models_and_batches_that_cannot_be():
    for make, words in (
        (lambda: model_of(config_from_hf(TINY | {"model_type": "glm4"}, lora=LORA)).weights_layout(),
         "target_modules has gate_proj, up_proj: files of glm4 have no such modules; it has down_proj, k_proj"),
        (lambda: model_of(config_from_hf(TINY, family="lama")).weights_layout(), "family = 'lama': must be"),
        (lambda: from_hf({"model_type": "gpt2", **hf.GPT2}, lora=LoRAConfig()), NO_ADAPTERS),
        (lambda: gpt2.GPT2(dataclasses.replace(SMALL_GPT, lora=LoRAConfig(quantized="nf4")), rngs=nnx.Rngs(0)),
         NO_ADAPTERS),
        (lambda: dataclasses.replace(SMALL_VIT, patch_size=3), "patch_size = 3 must divide image_size = 8"),
        (lambda: EncoderConfig(2, 32, 4, 48), "EncoderConfig: this is the base of encoders; take BertConfig or"),
        (lambda: gpt2.GPT2(dataclasses.replace(SMALL_GPT, pad_vocab_to=0), rngs=nnx.Rngs(0)),
         "pad_vocab_to = 0: must be at least 1"),
        (lambda: traced_loss(config_from_hf(TINY), {"input_ids": ROWS, "labels": ROWS}),
         "the batch has input_ids, labels; the decod"),
        (lambda: traced_loss(config_from_hf(TINY), {"inputs": ROWS}),
         r"has inputs; .* labels\[i\] is the token after inputs\[i\]"),
        (lambda: traced_loss(SMALL_GPT, hf.TEXT), "a row has 12 tokens, but the model has 8 positions"),
        (lambda: traced_loss(SMALL_VIT, {"images": np.ones((1, 3, 8, 8), "f4"), "labels": ROWS[0, :1]}),
         "with the channels last"),
    ):  # fmt: skip
        refuses(lambda make=make: jax.eval_shape(lambda: (make(), None)[1]), words)


def test_files_that_are_no_config(tmp_path):
    refuses(lambda: config_from_hf(tmp_path / "Qwen3-8B"), "/Qwen3-8B: no such file or directory$")
    for text, words in (
        ("[]", r"is not a config\.json: it is not an object"),
        ('{"model_type": "llama"}', "(?s)has no hidden_size.*has no vocab_size"),
    ):
        (tmp_path / "config.json").write_text(text)
        refuses(lambda: config_from_hf(tmp_path), words)


def test_a_field_that_a_shape_does_not_have():
    for make in (
        lambda **changes: llama.preset("tiny", **changes),
        lambda **changes: find_model("moe:mixtral-8x7b", **changes),
        lambda **changes: config_from_hf({"model_type": "vit"}, **changes),
    ):
        words = r"^layers = 2: \w+Config has no such field; did you mean num_layers\?$"
        refuses(lambda make=make: make(layers=2), words)
    refuses(lambda: llama.preset("tiny", xyz="x"), "^xyz = 'x': .* has no such field; it has num_layers, d_model")
    for changes in ({"pad_vocab_to": 128}, {"max_positions": 7}):
        refuses(lambda changes=changes: config_from_hf(VIT_JSON, **changes), "ViTConfig has no such field")
