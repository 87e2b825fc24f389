"""Families of decoders against `transformers`: logits, losses of twenty steps, weights in both directions."""

import json
import math

import jax
import numpy as np
import pytest
from helpers.sampling import keep, some
from safetensors.numpy import load_file

import jzero
from jzero import weights
from models import bert, gpt2, llama, mixtures, vit
from models.decoder import Decoder
from models.downloads import IDS
from models.families import FAMILIES, from_hf

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

STEPS, LR = 20, 3e-3
SHAPE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 61, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
WIDE = {"head_dim": 16}  # 4 heads of 16 in a width of 32
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
NESTED = {"sliding_attention": {"rope_type": "default", "rope_theta": 10.0}}
KINDS = ["sliding_attention", "full_attention"]
CASES = {
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
         "rope_parameters": {
             **NESTED, "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
         }},
    ),
}  # fmt: skip
BATCHES = np.random.default_rng(0).integers(0, SHAPE["vocab_size"], (STEPS, 2, 13))


def torch_model(name):
    """A model of transformers with random weights, biases and scales included."""
    family, more = CASES[name]
    config = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}ForCausalLM")(config(**SHAPE, **more, attn_implementation="eager"))
    with torch.no_grad():
        for key, x in made.named_parameters():
            if key.endswith("bias") or "norm" in key:
                x.add_(0.3 * torch.randn(x.shape))
    return made.eval()


def step_of(config, stage=0, more=None, **axes):
    axes = {"zero": 1, **axes}
    settings = {
        "train_micro_batch_size_per_gpu": 2 // axes["zero"],
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": 0.1, "eps": 1e-3}},
        "gradient_clipping": 0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **(more or {}),
    }
    devices = jax.devices()[: math.prod(axes.values())]
    model = jzero.from_flax(lambda rngs: Decoder(config, rngs=rngs))
    return jzero.make_train_step(model, settings, mesh=jzero.make_mesh(devices=devices, **axes))


def torch_losses(made):
    """AdamW on the shifted labels; its large eps keeps a gradient's rounding error near zero from changing a sign."""
    optimizer = torch.optim.AdamW(made.parameters(), lr=LR, weight_decay=0.1, eps=1e-3)
    losses = []
    for rows in torch.tensor(BATCHES):
        logits = made(rows[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def module_logits(step, params, tokens, **more):
    return jax.jit(lambda params, tokens: step.model.module(params)(tokens, **more))(params, tokens)


@pytest.mark.parametrize("name", keep(list(CASES), ["llama3.1", "qwen2-window", "qwen3_moe", "gemma3"]))
def test_weights_in_and_out(name, tmp_path):
    """The files of transformers give its logits, and ours give transformers ours."""
    theirs = torch_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    config = from_hf(tmp_path / "theirs")
    step = step_of(config)
    params = weights.load(tmp_path / "theirs", step)
    tokens = BATCHES[0]
    with torch.no_grad():
        expected = theirs(torch.tensor(tokens)).logits.numpy()
    assert abs(expected).max() > 0.5
    np.testing.assert_allclose(module_logits(step, params, tokens), expected, atol=1e-5, rtol=0)

    weights.save(params, step, tmp_path / "ours", "model.safetensors", np.dtype("float32"))
    there, here = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert there.keys() == here.keys()
    for key, x in there.items():
        np.testing.assert_array_equal(x, here[key])
    assert from_hf(tmp_path / "ours") == config
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("theirs", "ours"))
    assert {key: after.get(key) for key in before if key != "dtype"} == {
        k: x for k, x in before.items() if k != "dtype"
    }
    auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    assert type(auto).__name__ == FAMILIES[config.family].architecture
    with torch.no_grad():
        np.testing.assert_allclose(auto(torch.tensor(tokens)).logits, expected, atol=1e-5, rtol=0)
    assert config.num_parameters == sum(x.size for x in jax.tree.leaves(params))


@pytest.mark.parametrize(
    "name", some(["llama3.1", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"], ["gemma3"])
)
def test_generated_text(name, tmp_path):
    """Greedy, in rows of unequal length, further than windows reach."""
    theirs = torch_model(name)
    torch.nn.init.normal_(theirs.model.norm.weight, std=2)  # otherwise the last token repeats itself
    theirs.save_pretrained(tmp_path)
    step = step_of(from_hf(tmp_path), 3, {"stack": {"unroll": False}}, zero=2)
    state = step.init(jax.random.key(0), weights.load(tmp_path, step))
    rows, mask = BATCHES[:2].reshape(4, 13), (np.arange(13) >= [[0], [4], [9], [12]]).astype(np.int32)
    options = {"attention_mask": torch.tensor(mask), "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    expected = theirs.generate(torch.tensor(rows), **options).numpy()
    assert len(set(expected[:, 13:].ravel().tolist())) > 5
    np.testing.assert_array_equal(step.generate(state, rows, 12, attention_mask=mask, numpy=True), expected)


@pytest.mark.parametrize("name", some(list(CASES), ["gemma3"]))
def test_losses_of_twenty_steps(name, tmp_path):
    theirs = torch_model(name)
    theirs.save_pretrained(tmp_path)
    step = step_of(from_hf(tmp_path), more={"stack": {"unroll": False}})
    state, losses = step.init(jax.random.key(0), weights.load(tmp_path, step)), []
    for rows in BATCHES:
        state, metrics = step(state, {"inputs": rows[:, :-1], "labels": rows[:, 1:]})
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(losses, torch_losses(theirs), rtol=1e-5)


def test_the_text_decoder_of_a_model_with_images(tmp_path):
    """Gemma 3 from 4B: a text_config that has only what differs from the class, and a vision tower."""
    text = {key: x for key, x in SHAPE.items() if key not in ("num_attention_heads", "num_key_value_heads", *IDS)}
    text |= {"hidden_size": 64, "num_hidden_layers": 7, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 16, "patch_size": 4}  # fmt: skip
    torch.manual_seed(0)
    config = transformers.Gemma3Config(text_config=dict(text), vision_config=vision, mm_tokens_per_image=4)
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="300KB")
    there = json.loads((tmp_path / "theirs" / "config.json").read_text())
    there |= {"text_config": {"model_type": "gemma3_text", **text}, "eos_token_id": [1, 60]}  # as in the downloads
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(there))

    config = from_hf(tmp_path / "theirs")
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.window) == (8, 4, 256, 4096)
    step, tokens = step_of(config), BATCHES[0]
    params = weights.load(tmp_path / "theirs", step)
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor(tokens), token_type_ids=torch.zeros(tokens.shape)).logits.numpy()
    assert abs(expected).max() > 0.5
    np.testing.assert_allclose(module_logits(step, params, tokens), expected, atol=1e-5, rtol=0)
    weights.save(params, step, tmp_path / "ours", "model.safetensors", np.dtype("float32"))
    auto = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert (type(auto).__name__, auto.config.eos_token_id) == ("Gemma3ForCausalLM", [1, 60])
    with torch.no_grad():
        np.testing.assert_allclose(auto(torch.tensor(tokens)).logits, expected, atol=1e-5, rtol=0)

    found = load_file(min((tmp_path / "theirs").glob("*.safetensors")))
    assert any(name.startswith("language_model.model.") for name in found)
    there["text_config"]["query_pre_attn_scalar"] = 24
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(there))
    with pytest.raises(jzero.ConfigError, match=r"query_pre_attn_scalar = 24, not 256"):
        weights.load(tmp_path / "theirs", step)


# ------------------------------------------------------------------------------------------- layouts, padding

DEVICE_LAYOUTS = {
    "zero3": {"stage": 3, "zero": 2},
    "1f1b": {"stage": 1, "pipe": 2, "more": {"gradient_accumulation_steps": 2}},
    "interleaved": {
        "stage": 1, "pipe": 2,
        "more": {"gradient_accumulation_steps": 2, "pipeline": {"schedule": "interleaved", "chunks": 2}},
    },
}  # fmt: skip


@pytest.mark.parametrize("layout", some(list(DEVICE_LAYOUTS), ["interleaved"]))
def test_layers_that_differ_on_every_layout(layout):
    """The layer's index travels with the activations; documents are packed and the vocabulary is padded."""
    config = from_hf(torch_model("gemma3").config.to_dict(), pad_vocab_to=16)
    rows = np.random.default_rng(1).integers(0, 61, (4, 12)).astype(np.int32)
    segments = np.sort(np.random.default_rng(2).integers(1, 4, (4, 12)), axis=1).astype(np.int32)
    batch = {"inputs": rows, "labels": np.roll(rows, -1, 1), "segments": segments}

    def losses(options):
        more = {**options.get("more", {}), "train_batch_size": 4, "train_micro_batch_size_per_gpu": None}
        step = step_of(config, **{**options, "more": more})
        state = step.init(jax.random.key(0))
        found = []
        for _ in range(2):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
        return found

    step = step_of(config)
    params = step.init(jax.random.key(0)).params
    logits = module_logits(step, params, rows, segments_BS=segments)
    expected = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), batch["labels"][..., None], 2).mean()
    found = losses(DEVICE_LAYOUTS[layout])
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)
    np.testing.assert_allclose(found, losses({}), rtol=1e-6)


@pytest.mark.parametrize("name", some(["qwen2", "qwen3"], ["qwen3"]))  # tied and untied
def test_a_padded_vocabulary(name, tmp_path):
    """Files have no padding, logits have none, and the loss and its gradient do not see it."""
    theirs = torch_model(name)
    theirs.save_pretrained(tmp_path / "theirs")
    steps = [step_of(from_hf(tmp_path / "theirs", pad_vocab_to=n), 3, zero=2) for n in (1, 64)]
    plain, padded = (weights.load(tmp_path / "theirs", step) for step in steps)
    assert padded["ends"]["embed"].shape == (64, 32)
    assert (np.asarray(padded["ends"]["embed"])[61:] == 0).all()
    tokens = BATCHES[0]
    a, b = (module_logits(step, p, tokens) for step, p in zip(steps, (plain, padded), strict=True))
    assert b.shape[-1] == 61
    np.testing.assert_allclose(a, b, atol=1e-6, rtol=0)

    batch = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}
    garbage = jax.tree.map(lambda x: x, jax.device_get(padded))  # what the padding contains has no effect
    if "head" in garbage["ends"]:
        garbage["ends"]["head"]["kernel"] = garbage["ends"]["head"]["kernel"].copy()
        garbage["ends"]["head"]["kernel"][:, 61:] = 9
    else:
        garbage["ends"]["embed"] = garbage["ends"]["embed"].copy()
        garbage["ends"]["embed"][61:] = 9

    def loss_and_gradient(step, params):
        def mean(params):
            loss = step.model.loss(params, batch, None)
            return loss[0] / loss[1]

        return jax.jit(jax.value_and_grad(mean))(params)

    (expected, there), (found, here) = map(loss_and_gradient, steps, (jax.device_get(plain), garbage))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(here["ends"]["embed"][:61], there["ends"]["embed"], atol=1e-6)
    assert (here["ends"]["embed"][61:] == 0).all()

    weights.save(padded, steps[1], tmp_path / "ours", "model.safetensors", np.dtype("float32"))
    there, here = (load_file(tmp_path / part / "model.safetensors") for part in ("theirs", "ours"))
    assert there.keys() == here.keys()
    assert all((x == here[key]).all() for key, x in there.items())
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").config.vocab_size == 61


# ------------------------------------------------------------------------------------------- mistakes


def test_a_checkpoint_of_another_family(tmp_path):
    torch_model("qwen2").save_pretrained(tmp_path)
    made = step_of(from_hf(torch_model("mistral").config.to_dict()))
    with pytest.raises(jzero.ConfigError) as error:
        weights.load(tmp_path, made)
    assert 'model_type = "qwen2", not "mistral"' in str(error.value)
    assert "build the model from these files: Decoder(jzero.models.families.from_hf(DIR)" in str(error.value)
    assert len(error.value.problems) == 1


TINY = {**SHAPE, "model_type": "llama"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "model_type = 'mamba': must be one of llama, mistral, qwen2"),
        ({"model_type": "gemma3"}, "model_type = 'gemma3': must be one of"),  # without a text_config
        ({"attention_bias": True, "hidden_act": "relu"}, "(?s)attention_bias = True.*hidden_act = 'relu'"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_type = 'yarn': must be default, linear or llama3",
        ),
        (
            {"model_type": "gemma2", "sliding_window": 4, "layer_types": [*KINDS, *KINDS[::-1]]},
            "global layers must be every n-th layer",
        ),
        ({"head_dim": 5}, "2 must divide the width of a head"),
    ],
)
def test_a_config_that_the_decoder_lacks(change, words):
    with pytest.raises(jzero.ConfigError, match=words):
        from_hf({**TINY, **change})


def test_files_that_are_no_config(tmp_path):
    with pytest.raises(jzero.ConfigError, match=r"config\.json: no such file or directory$"):
        from_hf(tmp_path / "config.json")
    with pytest.raises(
        jzero.ConfigError, match=r"^Qwen/Qwen3-8B: no such directory; .*hf download Qwen/Qwen3-8B --local-"
    ):
        from_hf("Qwen/Qwen3-8B")
    with pytest.raises(jzero.ConfigError, match=r"/Qwen3-8B: no such file or directory$"):
        from_hf(tmp_path / "Qwen3-8B")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(jzero.ConfigError, match=r"is not a config\.json: it is not an object"):
        from_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(jzero.ConfigError, match=r"(?s)has no hidden_size.*has no vocab_size"):
        from_hf(tmp_path)


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (
            {"input_ids": np.zeros((8, 9)), "labels": np.zeros((8, 9))},
            "the batch has input_ids, labels; the decoder reads",
        ),
        (
            {"inputs": np.zeros((8, 9), np.int32)},
            r"the batch has inputs; .* labels\[i\] is the token after inputs\[i\]",
        ),
        (np.zeros((8, 9), np.int32), "the batch is ndarray; the decoder reads inputs and labels"),
    ],
)
def test_a_batch_for_transformers(batch, words):
    model = jzero.from_flax(lambda rngs: Decoder(from_hf(TINY), rngs=rngs))
    with pytest.raises(jzero.ConfigError, match=words):
        model.loss(model.init(jax.random.key(0)), batch, jax.random.key(1))


def test_a_mixture_that_transformers_lacks():
    """It trains, and its files have jzero's own names; the report says why."""
    config = from_hf(TINY, qk_norm=True)
    model = jzero.from_flax(lambda rngs: Decoder(config, rngs=rngs))
    assert model.weights_layout() is None
    expected = "weights in files have jzero's own names: LlamaForCausalLM has no qk_norm=True"
    assert expected in jzero.report(step_of(config))
    with pytest.raises(jzero.ConfigError, match="family = 'lama': must be one of llama"):
        jzero.from_flax(lambda rngs: Decoder(from_hf(TINY, family="lama"), rngs=rngs)).weights_layout()


def test_files_of_transformers_4():
    """Before version 5, RoPE's settings lay at the top level, and Gemma 3 named its pattern."""
    old = {**TINY, "rope_theta": 100.0, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}
    assert from_hf(old) == from_hf({**TINY, "rope_parameters": LLAMA3})
    gemma = {**TINY, "model_type": "gemma3_text", "sliding_window": 5, "num_hidden_layers": 7}
    rope = {"rope_theta": 1000.0, "rope_local_base_freq": 10.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    made = from_hf({**gemma, **rope, "sliding_window_pattern": 3})
    assert (made.global_every, made.local_theta, made.rope_theta, made.rope_scaling.factor) == (3, 10.0, 1000.0, 8.0)
    kinds = {"layer_types": [KINDS[(i + 1) % 3 == 0] for i in range(7)]}
    new = {**NESTED, "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0}}
    assert from_hf({**gemma, **kinds, "rope_parameters": new}) == made
    qwen = {**TINY, "model_type": "qwen2", "sliding_window": 5, "use_sliding_window": False}
    assert from_hf(qwen).window is None
    assert from_hf({**qwen, "use_sliding_window": True, "max_window_layers": 0}).window == 5


@pytest.mark.parametrize(
    "make_config",
    [
        lambda **changes: llama.preset("tiny", **changes),
        lambda **changes: mixtures.preset("mixtral-8x7b", **changes),
        lambda **changes: from_hf({}, **changes),
        lambda **changes: gpt2.from_hf({}, **changes),
        lambda **changes: bert.from_hf({}, **changes),
        lambda **changes: vit.from_hf({}, **changes),
    ],
    ids=["llama", "mixtures", "families", "gpt2", "bert", "vit"],
)
def test_a_field_that_a_shape_does_not_have(make_config):
    with pytest.raises(
        jzero.ConfigError, match=r"^layers = 2: \w+Config has no such field; did you mean num_layers\?$"
    ):
        make_config(layers=2)
    with pytest.raises(jzero.ConfigError, match=r"^xyz = 'x': .* has no such field; it has num_layers, d_model"):
        make_config(xyz="x")


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_special_tokens_outside_of_a_smaller_vocabulary_do_not_go_back(family):
    """transformers refuses a padding token that its table of embeddings does not have."""
    tokens = {"bos_token_id": 1, "eos_token_id": [2, 60], "pad_token_id": 60}
    shape = from_hf({"model_type": family, **SHAPE, **tokens}, vocab_size=16)
    table = jzero.from_flax(lambda rngs: Decoder(shape, rngs=rngs)).weights_layout()
    found = {**table["download"]["config"], **table["config"]}
    assert [found[key] for key in IDS] == [1, [2], None]
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**found))
