"""DeepSeek-V3's layers for tokens further ahead: transformers' layers, and the loss of arXiv:2412.19437, eq. 24, 25."""

import jax
import numpy as np
import pytest
from helpers.named_models import model_of
from helpers.sampling import keep, some
from hugging_face import CASES, TOKENS, error_of_gradients, pair, step_of, torch, torch_model, written
from safetensors.numpy import load_file, save_file
from transformers.modeling_layers import MtpLayer
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as theirs

from jzero import weights
from models import config_from_hf

DEPTHS, WEIGHT = 2, 0.3
SEGMENTS = np.array([[1] * 5 + [2] * 7, [1] * 12])
ROWS = {"inputs": TOKENS[0][:, :-1], "labels": TOKENS[0][:, 1:].copy()}
ROWS["labels"][0, 4] = -100  # the end of a document
ROWS["labels"][1, 7] = -100


def layers_of(config):
    torch.manual_seed(1)
    made = [MtpLayer(config, theirs.DeepseekV3DecoderLayer, theirs.DeepseekV3RMSNorm, 3 + k) for k in range(DEPTHS)]
    with torch.no_grad():
        for layer in made:
            for key, x in [*layer.named_parameters(), *layer.named_buffers()]:
                x.copy_(torch.randn(x.shape) * 0.2 + ("norm" in key))
    return made


def tensors_of(layers):
    found = {}
    for k, layer in enumerate(layers):
        for key, x in layer.state_dict().items():
            name = f"model.layers.{3 + k}." + key.replace("mtp_block.", "").replace("post_norm", "shared_head.norm")
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                found[name] = x.numpy().copy()
                continue
            for e, one in enumerate(x):
                halves = {"gate_proj": one[:24], "up_proj": one[24:]} if "gate_up" in name else {"down_proj": one}
                for part, value in halves.items():
                    found[f"{name.rpartition('.')[0]}.{e}.{part}.weight"] = value.numpy().copy()
    return found


def expected_loss(model, layers, segments):
    """The losses of documents that are computed one by one."""
    sums, count = [0.0] * (1 + DEPTHS), 0
    for tokens, labels, numbers in zip(ROWS["inputs"], ROWS["labels"], segments, strict=True):
        for here in (numbers == document for document in np.unique(numbers)):
            inputs, targets = torch.tensor(tokens[here])[None], torch.tensor(labels[here])
            count += int((targets >= 0).sum())
            state, length = model.model(inputs).last_hidden_state, len(targets)
            positions = torch.arange(length)[None]
            angles = model.model.rotary_emb(state, positions)
            mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
            for depth in range(1 + DEPTHS):
                if depth:
                    ahead = model.model.embed_tokens(torch.nn.functional.pad(inputs[:, depth:], (0, depth)))
                    state = layers[depth - 1](ahead, state, angles, mask, positions, None)
                scores = model.lm_head(state)[0, : length - depth]
                sums[depth] += torch.nn.functional.cross_entropy(scores, targets[depth:], reduction="sum")
    return (sums[0] + WEIGHT * sum(sums[1:]) / DEPTHS) / count


def write(model, layers, directory):
    model.save_pretrained(directory)
    path = directory / "model.safetensors"
    save_file(load_file(path) | tensors_of(layers), path, {"format": "pt"})


# One of the packed rows is a single document.
@pytest.mark.parametrize(("packed", "gradients"), keep([(True, False), (False, True), (True, True)], [(True, False)]))
def test_loss_and_gradients(tmp_path, packed, gradients):
    """Three predictions of each token, in documents of packed rows too; and the files of an export."""
    model = torch_model("deepseek_v3")
    model.config.num_mtp_layers = DEPTHS
    layers, segments = layers_of(model.config), SEGMENTS if packed else np.ones_like(SEGMENTS)
    write(model, layers, tmp_path / "weights")
    config = config_from_hf(tmp_path / "weights", future_layers=DEPTHS, future_weight=WEIGHT)
    step = step_of(config)
    params = weights.load(tmp_path / "weights", step)
    weights.load(tmp_path / "weights", step_of(config_from_hf(tmp_path / "weights")))  # without the layers

    loss = expected_loss(model, layers, segments)
    batch = ROWS | ({"segments": segments.astype(np.int32)} if packed else {})
    state = step.init(jax.random.key(0), params)
    found, metrics = step.gradients(state, batch) if gradients else step.evaluate(state, batch)
    assert abs(float(metrics["loss"] if gradients else found) / loss.item() - 1) < 5e-6
    parts = float(metrics["cross_entropy"]) + WEIGHT * float(metrics["future_loss"])
    assert parts == pytest.approx(loss.item(), rel=5e-6)
    if gradients:
        loss.backward()
        for x in [x for module in (model, *layers) for x in module.parameters()]:
            x.data = torch.zeros_like(x) if x.grad is None else x.grad
        write(model, layers, tmp_path / "gradients")
        assert error_of_gradients(found, weights.load(tmp_path / "gradients", step)) < 5e-6

    weights.save(params, step, tmp_path / "ours", "model.safetensors", np.dtype("float32"))
    there, here = (load_file(tmp_path / name / "model.safetensors") for name in ("weights", "ours"))
    assert there.keys() == here.keys()
    assert config.num_parameters == sum(x.size for key, x in there.items() if "correction_bias" not in key)
    assert all((here[key] == x).all() for key, x in there.items())


@pytest.mark.parametrize("ahead", [0, 1])
def test_an_export_says_which_layers_it_has(ahead):
    """A reader would look for the tensors of layers that were left out."""
    config = config_from_hf(pair("deepseek_v3").directory, future_layers=ahead)
    assert config.download.config["num_nextn_predict_layers"] == 1
    notes = model_of(config).report_notes(np.dtype("float32"))
    assert written(config)["num_nextn_predict_layers"] == ahead
    assert any("num_nextn_predict_layers = 1: these layers are left out" in line for line in notes) == (ahead == 0)


@pytest.mark.parametrize("layout", some([{"pipe": 2, "stage": 1}, {"tensor": 2}], [{"pipe": 2, "stage": 1}]), ids=str)
def test_layouts(layout):
    config = config_from_hf(pair("deepseek_v3").directory, future_layers=1, pad_vocab_to=16)
    batch, losses = CASES["deepseek_v3"].batch, []
    more = {"gradient_accumulation_steps": 2} if "pipe" in layout else {}
    for axes in ({}, layout):
        step = step_of(config, more=more, **axes)
        state = step.init(jax.random.key(0))
        for _ in range(2):
            state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    np.testing.assert_allclose(*losses, rtol=1e-6)
