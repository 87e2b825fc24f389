"""Models against `transformers`: logits, losses of twenty steps, weights in both directions."""

import json
from itertools import product

import jax
import numpy as np
import pytest
from helpers.sampling import keep, some
from hugging_face import (
    CASES,
    DECODER,
    LR,
    OTHERS,
    TOKENS,
    as_torch,
    assert_same_files,
    assert_same_logits,
    logits,
    step_from,
    step_of,
    torch,
    torch_logits,
    torch_model,
    transformers,
)
from safetensors.numpy import load_file

import jzero
from jzero import weights
from models.decoder import Decoder
from models.downloads import IDS
from models.families import from_hf

FLOAT32 = np.dtype("float32")


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    """A function of a name: (the directory of transformers' weights, their model)."""
    made = {}

    def download(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name), torch_model(name)
            made[name][1].save_pretrained(made[name][0])
        return made[name]

    return download


@pytest.mark.parametrize("name", keep(CASES, [*OTHERS, "llama3.1", "qwen2-window", "qwen3_moe", "gemma3"]))
def test_weights_in_and_out(name, downloads, tmp_path):
    """The files of transformers give its logits, and ours give transformers ours."""
    (directory, theirs), case = downloads(name), CASES[name]
    config, batch = case.from_hf(directory), case.batches[0]
    step = step_of(config, case.kind)
    params, expected = weights.load(directory, step), torch_logits(theirs, **as_torch(batch))
    assert_same_logits(logits(step, params, batch), expected, batch)
    weights.save(params, step, tmp_path, "model.safetensors", FLOAT32)
    assert_same_files(directory, tmp_path)
    assert case.from_hf(tmp_path) == config
    auto = transformers.AutoModelForCausalLM if case.kind is Decoder else type(theirs)
    back = auto.from_pretrained(tmp_path, attn_implementation="eager")
    assert type(back) is type(theirs)
    assert_same_logits(torch_logits(back, **as_torch(batch)), expected, batch)
    weights.load(tmp_path, step)
    if case.kind is Decoder:
        assert config.num_parameters == sum(x.size for x in jax.tree.leaves(params))


WRITING = ["gpt2", "llama3.1", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3"]


@pytest.mark.parametrize("name", some(WRITING, ["gpt2", "gemma3"]))
def test_generated_text(name, tmp_path):
    """Greedy, in rows of unequal length, further than windows reach."""
    theirs = torch_model(name)
    last = theirs.transformer.ln_f if name == "gpt2" else theirs.model.norm
    torch.nn.init.normal_(last.weight, std=2)  # otherwise the last token repeats itself
    theirs.save_pretrained(tmp_path)
    # GPT-2 has 16 positions
    width, new, begins = (8, 8, [[0], [5], [2], [6]]) if name == "gpt2" else (13, 12, [[0], [4], [9], [12]])
    step = step_from(name, tmp_path, stage=3, zero=2)
    state = step.init(jax.random.key(0), weights.load(tmp_path, step))
    rows, mask = TOKENS[:2].reshape(4, 13)[:, :width], (np.arange(width) >= begins).astype(np.int32)
    options = {"attention_mask": torch.tensor(mask), "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    expected = theirs.generate(torch.tensor(rows), **options).numpy()
    assert len(set(expected[:, width:].ravel().tolist())) > 5
    np.testing.assert_array_equal(step.generate(state, rows, new, attention_mask=mask, numpy=True), expected)


@pytest.mark.parametrize("name", some(CASES, ["bert", "gemma3"]))
def test_losses_of_twenty_steps(name, downloads):
    directory, _ = downloads(name)
    step, theirs = step_from(name, directory), torch_model(name)
    state = step.init(jax.random.key(0), weights.load(directory, step))
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR, weight_decay=0.1, eps=1e-3)
    found, expected = [], []
    for batch in CASES[name].batches:
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
        values, labels = theirs(**as_torch(batch)).logits, torch.tensor(batch["labels"]).reshape(-1)
        loss = torch.nn.functional.cross_entropy(values.reshape(len(labels), -1), labels)  # ignores -100
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_text_decoder_of_a_model_with_images(tmp_path):
    """Gemma 3 from 4B: a text_config that has only what differs from the class, and a vision tower."""
    text = {key: x for key, x in DECODER.items() if key not in ("num_attention_heads", "num_key_value_heads", *IDS)}
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

    config = from_hf(theirs)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.window) == (8, 4, 256, 4096)
    step, tokens = step_of(config), TOKENS[0]
    params = weights.load(theirs, step)
    expected = torch_logits(made, input_ids=torch.tensor(tokens), token_type_ids=torch.zeros(tokens.shape))
    assert_same_logits(logits(step, params, {"inputs": tokens}), expected)
    weights.save(params, step, ours, "model.safetensors", FLOAT32)
    auto = transformers.AutoModelForCausalLM.from_pretrained(ours)
    assert (type(auto).__name__, auto.config.eos_token_id) == ("Gemma3ForCausalLM", [1, 60])
    assert_same_logits(torch_logits(auto, input_ids=torch.tensor(tokens)), expected)

    found = load_file(min(theirs.glob("*.safetensors")))
    assert any(name.startswith("language_model.model.") for name in found)
    there["text_config"]["query_pre_attn_scalar"] = 24
    (theirs / "config.json").write_text(json.dumps(there))
    with pytest.raises(jzero.ConfigError, match=r"query_pre_attn_scalar = 24, not 256"):
        weights.load(theirs, step)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_packed_documents_have_their_own_positions(name, downloads):
    """The logits of a document in a packed row are those of transformers for the document alone."""
    directory, theirs = downloads(name)
    step, rows = step_from(name, directory), TOKENS[0]
    segments = np.array([[1] * 4 + [2] * 7 + [3] * 2, [1] * 6 + [2] * 5 + [0] * 2])
    found = logits(step, weights.load(directory, step), {"inputs": rows, "segments": segments})
    for b, s in ((0, 1), (0, 2), (0, 3), (1, 1), (1, 2)):
        here = segments[b] == s
        alone = torch_logits(theirs, input_ids=torch.tensor(rows[b][here])[None])[0]
        np.testing.assert_allclose(found[b][here], alone, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------- layouts, padding

HALVES = {"gradient_accumulation_steps": 2}
LAYOUTS = {
    "zero3": {"stage": 3, "zero": 2},
    "pipe": {"stage": 1, "pipe": 2, "more": HALVES},
    "interleaved": {"stage": 1, "pipe": 2, "more": {**HALVES, "pipeline": {"schedule": "interleaved", "chunks": 2}}},
}


@pytest.mark.parametrize(("name", "layout"), keep(product(OTHERS, ["zero3", "pipe"]), [("gpt2", "zero3")]))
def test_layouts(name, layout, downloads):
    """One step on two devices; a vocabulary is padded, so that two stages divide it."""
    directory, _ = downloads(name)
    step = step_from(name, directory, {} if name == "vit" else {"pad_vocab_to": 16}, **LAYOUTS[layout])
    params, batch = weights.load(directory, step), CASES[name].batches[0]
    loss = jax.jit(lambda params: step.model.loss(params, batch, None))(jax.device_get(params))
    _, metrics = step(step.init(jax.random.key(0), params), batch)
    np.testing.assert_allclose(metrics["loss"], loss[0] / loss[1], rtol=1e-6)


@pytest.mark.parametrize("layout", some(LAYOUTS, ["interleaved"]))
def test_layers_that_differ_on_every_layout(layout):
    """The layer's index travels with the activations; documents are packed and the vocabulary is padded."""
    config = from_hf(torch_model("gemma3").config.to_dict(), pad_vocab_to=16)
    rows = np.random.default_rng(1).integers(0, 61, (4, 12)).astype(np.int32)
    segments = np.sort(np.random.default_rng(2).integers(1, 4, (4, 12)), axis=1).astype(np.int32)
    batch = {"inputs": rows, "labels": np.roll(rows, -1, 1), "segments": segments}

    def losses(options):
        step = step_of(config, **{**options, "more": {**options.get("more", {}), "train_batch_size": 4}})
        state = step.init(jax.random.key(0))
        found = []
        for _ in range(2):
            state, metrics = step(state, batch)
            found.append(float(metrics["loss"]))
        return found

    step = step_of(config)
    values = logits(step, step.init(jax.random.key(0)).params, batch)
    expected = -np.take_along_axis(np.asarray(jax.nn.log_softmax(values)), batch["labels"][..., None], 2).mean()
    found = losses(LAYOUTS[layout])
    np.testing.assert_allclose(found[0], expected, rtol=1e-6)
    np.testing.assert_allclose(found, losses({}), rtol=1e-6)


@pytest.mark.parametrize("name", some(["qwen2", "qwen3"], ["qwen3"]))  # tied and untied
def test_a_padded_vocabulary(name, downloads, tmp_path):
    """Files have no padding, logits have none, and the loss and its gradient do not see it."""
    directory, _ = downloads(name)
    steps = [step_from(name, directory, {"pad_vocab_to": n}, stage=3, zero=2) for n in (1, 64)]
    plain, padded = (weights.load(directory, step) for step in steps)
    assert padded["ends"]["embed"].shape == (64, 32)
    assert (np.asarray(padded["ends"]["embed"])[61:] == 0).all()
    batch = CASES[name].batches[0]
    a, b = (logits(step, p, batch) for step, p in zip(steps, (plain, padded), strict=True))
    assert b.shape[-1] == 61
    np.testing.assert_allclose(a, b, atol=1e-6, rtol=0)

    garbage = jax.tree.map(np.array, jax.device_get(padded))  # what the padding contains has no effect
    if "head" in garbage["ends"]:
        garbage["ends"]["head"]["kernel"][:, 61:] = 9
    else:
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
    weights.save(padded, steps[1], tmp_path, "model.safetensors", FLOAT32)
    assert_same_files(directory, tmp_path)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == 61
