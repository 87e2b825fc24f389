"""GPT-2, BERT and ViT against `transformers`: logits, losses of twenty steps, weights in both directions."""

import dataclasses
import json
import math
from itertools import product

import jax
import numpy as np
import pytest
from flax import nnx
from helpers.sampling import keep, some
from safetensors.numpy import load_file, save_file

import jzero
from jzero import weights
from models import bert, families, gpt2, vit

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

STEPS, LR, V = 20, 3e-3, 61
RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, V, (STEPS, 2, 13))
IMAGES = RNG.normal(size=(STEPS, 2, 8, 8, 3)).astype("f4")
LENGTHS = np.array([[13], [9]])  # the second row of BERT ends with padding
MASK = (np.arange(13) < LENGTHS).astype(np.int32)
SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 16, "vocab_size": V,
        "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": None, "eos_token_id": None,
        "initializer_range": 0.2}  # fmt: skip


def lm_batch(rows):
    return {"inputs": rows[:, :-1], "labels": rows[:, 1:]}


def masked_batch(rows):
    """Every third token is predicted, none of them padding."""
    predicted = (np.arange(13) % 3 == 1) & (MASK == 1)
    types = (np.arange(13) > 5).astype(np.int32) * np.ones_like(rows)
    inputs = np.where(predicted, 0, rows)
    return {"inputs": inputs, "labels": np.where(predicted, rows, -100), "segments": MASK, "types": types}


def image_batch(i):
    return {"images": IMAGES[i], "labels": np.array([i % 5, 3 * i % 5])}


def as_torch(batch):
    """The keyword arguments of transformers' classes."""
    names = {"inputs": "input_ids", "segments": "attention_mask", "types": "token_type_ids", "images": "pixel_values"}
    moved = {name: np.moveaxis(x, -1, 1) if name == "images" else x for name, x in batch.items()}
    return {names[name]: torch.tensor(x) for name, x in moved.items() if name in names}


CASES = {
    "gpt2": (gpt2, gpt2.GPT2, "GPT2LMHeadModel", "GPT2Config", GPT2, [lm_batch(rows) for rows in TOKENS]),
    "bert": (
        bert, bert.Bert, "BertForMaskedLM", "BertConfig",
        {**SHAPE, **NO_DROPOUT, "vocab_size": V, "max_position_embeddings": 16, "pad_token_id": None},
        [masked_batch(rows) for rows in TOKENS],
    ),
    "vit": (
        vit, vit.ViT, "ViTForImageClassification", "ViTConfig",
        {**SHAPE, **NO_DROPOUT, "image_size": 8, "patch_size": 2, "num_labels": 5},
        [image_batch(i) for i in range(STEPS)],
    ),
}  # fmt: skip


def torch_model(name):
    _, _, architecture, config, options, _ = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, config)(**options, attn_implementation="eager")
    made = getattr(transformers, architecture)(config)
    with torch.no_grad():
        for key, x in made.named_parameters():
            if key.endswith("bias") or "norm" in key.lower() or "ln_" in key or "cls_token" in key:
                x.add_(0.3 * torch.randn(x.shape))
    return made.eval()


def step_of(name, directory, stage=0, more=None, changes=None, **axes):
    module, kind, *_ = CASES[name]
    config, axes = module.from_hf(directory, **(changes or {})), {"zero": 1, **axes}
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


def logits(step, params, batch):
    names = {"inputs": "tokens_BS", "segments": "segments_BS", "types": "types_BS", "images": "images"}
    some = {names[name]: x for name, x in batch.items() if name in names}
    return np.asarray(jax.jit(lambda params, some: step.model.module(params)(**some))(params, some))


def same_where_counted(found, expected, batch):
    counted = np.asarray(batch["segments"]) > 0 if "segments" in batch else ...
    assert abs(expected).max() > 0.5
    np.testing.assert_allclose(found[counted], expected[counted], atol=1e-5, rtol=0)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(name, directory of transformers' weights, its model)."""
    directory = tmp_path_factory.mktemp(request.param)
    made = torch_model(request.param)
    made.save_pretrained(directory)
    return request.param, directory, made


def test_weights_in_and_out(case, tmp_path):
    name, directory, theirs = case
    step, batch = step_of(name, directory), CASES[name][-1][0]
    params = weights.load(directory, step)
    with torch.no_grad():
        expected = theirs(**as_torch(batch)).logits.numpy()
    same_where_counted(logits(step, params, batch), expected, batch)
    weights.save(params, step, tmp_path, "model.safetensors", np.dtype("float32"))
    there, here = (load_file(path / "model.safetensors") for path in (directory, tmp_path))
    assert there.keys() == here.keys()
    for key, x in there.items():
        np.testing.assert_array_equal(x, here[key])
    auto = type(theirs).from_pretrained(tmp_path, attn_implementation="eager")
    with torch.no_grad():
        same_where_counted(auto(**as_torch(batch)).logits.numpy(), expected, batch)
    assert CASES[name][0].from_hf(tmp_path) == CASES[name][0].from_hf(directory)
    before, after = (json.loads((path / "config.json").read_text()) for path in (directory, tmp_path))
    assert {key: after.get(key) for key in before if key != "dtype"} == {
        k: x for k, x in before.items() if k != "dtype"
    }
    weights.load(tmp_path, step)


@pytest.mark.slow
def test_generated_text(tmp_path):
    """GPT-2, greedy, in rows of unequal length."""
    theirs = torch_model("gpt2")
    torch.nn.init.normal_(theirs.transformer.ln_f.weight, std=2)  # otherwise the last token repeats itself
    theirs.save_pretrained(tmp_path)
    step = step_of("gpt2", tmp_path, zero=2)
    state = step.init(jax.random.key(0), weights.load(tmp_path, step))
    rows, mask = TOKENS[0, :, :8], (np.arange(8) >= [[0], [5]]).astype(np.int32)
    options = {"attention_mask": torch.tensor(mask), "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = theirs.generate(torch.tensor(rows), **options).numpy()
    assert len(set(expected[:, 8:].ravel().tolist())) > 5
    np.testing.assert_array_equal(step.generate(state, rows, 8, attention_mask=mask, numpy=True), expected)


@pytest.mark.parametrize("case", some(list(CASES), ["bert"]), indirect=True)
def test_losses_of_twenty_steps(case):
    name, directory, _ = case
    step, theirs = step_of(name, directory), torch_model(name)
    state, batches = step.init(jax.random.key(0), weights.load(directory, step)), CASES[name][-1]
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=LR, weight_decay=0.1, eps=1e-3)
    found, expected = [], []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(float(metrics["loss"]))
        values = theirs(**as_torch(batch)).logits
        labels = torch.tensor(batch["labels"]).reshape(-1)
        loss = torch.nn.functional.cross_entropy(values.reshape(len(labels), -1), labels)  # ignores -100
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    np.testing.assert_allclose(found, expected, rtol=1e-5)


LAYOUTS = {"zero3": (3, {"zero": 2}, {}), "pipe": (1, {"pipe": 2}, {"gradient_accumulation_steps": 2})}


@pytest.mark.parametrize(
    ("case", "layout"), keep(list(product(CASES, LAYOUTS)), [("gpt2", "zero3")]), indirect=["case"]
)
def test_layouts(case, layout):
    """One step on two devices; a vocabulary is padded, so that two stages divide it."""
    name, directory, _ = case
    stage, axes, more = LAYOUTS[layout]
    changes = {} if name == "vit" else {"pad_vocab_to": 16}
    batch = CASES[name][-1][0]
    step = step_of(name, directory, stage, more, changes, **axes)
    params = weights.load(directory, step)
    loss = step.model.loss(jax.device_get(params), batch, None)
    _, metrics = step(step.init(jax.random.key(0), params), batch)
    np.testing.assert_allclose(metrics["loss"], loss[0] / loss[1], rtol=1e-6)


# ------------------------------------------------------------------------------------------- packed rows


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_packed_documents_have_their_own_positions(name, tmp_path):
    """The logits of a document in a packed row are those of transformers for the document alone."""
    theirs = torch_model(name)
    theirs.save_pretrained(tmp_path)
    step = step_of(name, tmp_path)
    rows = TOKENS[0]
    segments = np.array([[1] * 4 + [2] * 7 + [3] * 2, [1] * 6 + [2] * 5 + [0] * 2])
    found = logits(step, weights.load(tmp_path, step), {"inputs": rows, "segments": segments})
    for b, s in ((0, 1), (0, 2), (0, 3), (1, 1), (1, 2)):
        here = segments[b] == s
        with torch.no_grad():
            alone = theirs(input_ids=torch.tensor(rows[b][here])[None]).logits[0].numpy()
        np.testing.assert_allclose(found[b][here], alone, atol=1e-5, rtol=0)


# ------------------------------------------------------------------------------------------- names, mistakes


OLD = {
    "gpt2": lambda key: key.removeprefix("transformer."),
    "bert": lambda key: key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"),
}
EXTRA = {"gpt2": "h.0.attn.bias", "bert": "bert.pooler.dense.weight"}


@pytest.mark.parametrize("name", OLD)
def test_names_of_the_first_downloads(name, tmp_path):
    torch_model(name).save_pretrained(tmp_path)
    step = step_of(name, tmp_path)
    new = weights.load(tmp_path, step)
    found = {OLD[name](key): x for key, x in load_file(tmp_path / "model.safetensors").items()}
    assert found.keys() != load_file(tmp_path / "model.safetensors").keys()
    save_file(found | {EXTRA[name]: np.ones(2, np.float32)}, tmp_path / "model.safetensors")
    old = weights.load(tmp_path, step)
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), old, new)))


def test_the_labels_of_other_classes_do_not_go_back(tmp_path):
    labels = {"id2label": {"0": "cat", "1": "dog"}, "label2id": {"cat": 0, "dog": 1}}
    there = vit.from_hf({"model_type": "vit", "hidden_act": "gelu", **CASES["vit"][4], "num_channels": 3, **labels})
    for classes, kept in ((2, labels), (3, {})):
        shape = dataclasses.replace(there, num_classes=classes)
        table = jzero.from_flax(lambda rngs, shape=shape: vit.ViT(shape, rngs=rngs)).weights_layout()
        assert {key: x for key, x in table["download"]["config"].items() if key in labels} == kept


def test_mistakes(tmp_path):
    gpt = gpt2.GPT2Config(2, 32, 4, 48, vocab_size=V, max_positions=8)
    model = jzero.from_flax(lambda rngs: gpt2.GPT2(gpt, rngs=rngs))
    with pytest.raises(jzero.ConfigError, match="a row has 12 tokens, but the model has 8 positions"):
        jax.eval_shape(lambda: model.loss(model.init(jax.random.key(0)), lm_batch(TOKENS[0]), None))
    shape = vit.ViTConfig(2, 32, 4, 48, image_size=8, patch_size=4)
    model = jzero.from_flax(lambda rngs: vit.ViT(shape, rngs=rngs))
    images = {"images": np.ones((1, 3, 8, 8), "f4"), "labels": np.zeros(1, int)}
    with pytest.raises(jzero.ConfigError, match="with the channels last"):
        jax.eval_shape(lambda: model.loss(model.init(jax.random.key(0)), images, None))
    with pytest.raises(jzero.ConfigError, match="patch_size = 3 must divide image_size = 8"):
        dataclasses.replace(shape, patch_size=3)
    with pytest.raises(jzero.ConfigError, match="num_heads = 5 must divide d_model = 32"):
        dataclasses.replace(gpt, num_heads=5)
    with pytest.raises(jzero.ConfigError, match="pad_vocab_to = 0: must be at least 1"):
        jax.eval_shape(lambda: gpt2.GPT2(dataclasses.replace(gpt, pad_vocab_to=0), rngs=nnx.Rngs(0)))
    torch_model("gpt2").save_pretrained(tmp_path)
    with pytest.raises(jzero.ConfigError, match="model_type = 'gpt2': must be bert"):
        bert.from_hf(tmp_path)
    with pytest.raises(jzero.ConfigError, match=r"(?s)n_layer.*activation_function = 'relu': must be 'gelu_new'"):
        gpt2.from_hf({"model_type": "gpt2", **{k: v for k, v in GPT2.items() if k != "n_layer"},
                      "activation_function": "relu"})  # fmt: skip
    with pytest.raises(jzero.ConfigError, match=r"gpt2, bert and vit have a from_hf in models/gpt2\.py"):
        families.from_hf(tmp_path)
