"""The examples learn, and leave their files; the losses of DPO and of the two towers are the papers' formulas."""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from experiments import clip, dpo, finetune_lora, gpt, images, tiny_chat
from jzero.data import Pairs
from models import config_from_hf
from models.decoder import Decoder
from models.llama import preset

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A directory like that of a download, with a model that has learned little."""
    pytest.importorskip("transformers")
    return tiny_chat.make_model(tmp_path_factory.mktemp("tiny"), steps=10)


def config(program, tmp_path, lr):
    """A program's config with another learning rate, for a few steps, as a file."""
    path = tmp_path / "config.json"
    read = json.loads(Path(program.__file__).with_suffix(".json").read_text())
    path.write_text(json.dumps({**read, "optimizer": {"type": "AdamW", "params": {"lr": lr}}}))
    return str(path)


def tokenizer_of(directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


def is_picture(path):
    return path.read_bytes().startswith(b"\x89PNG")


def test_gpt(tmp_path, capsys):
    """On a text file; a byte at random costs log 256 = 5.5 nats."""
    shape = f"--layers 1 --width 64 --sequence 32 --steps 60 --text {argparse.__file__} --out {tmp_path}"
    losses, held_out, bigram = gpt.main([*shape.split(), "--prompt", "def "])
    assert len(losses) == 60
    assert losses[0] > 5
    assert held_out < 3.3
    assert 2 < bigram < 3
    sample = (tmp_path / "sample.txt").read_text()
    assert sample.startswith("def ")
    assert len(sample.encode()) >= 32
    assert f"a sample:\n\n{sample}" in capsys.readouterr().out
    assert is_picture(tmp_path / "curves.png")


def test_images(tmp_path, capsys):
    """One digit in ten is right by chance; the running statistics must be those of the training for more."""
    losses, accuracies = images.main(["--steps", "46", "--out", str(tmp_path)])
    assert len(losses) == 46
    assert losses[-1] < 1
    assert len(accuracies) == 2
    assert accuracies[-1] > 0.8
    assert f"held-out accuracy {accuracies[-1]:.1%}" in capsys.readouterr().out
    assert is_picture(tmp_path / "curves.png")


def test_images_of_a_directory(tmp_path):
    """A subdirectory for each class; the smallest value of a pixel becomes -1, the largest 1."""
    pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image")
    colors = {"blue": (0, 0, 255), "red": (255, 0, 0)}
    for name, color in colors.items():
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(10):
            image.new("RGB", (20, 10), color).save(tmp_path / "data" / name / f"{i}.png")
    train, test = images.read_images(str(tmp_path / "data"), size=8)
    assert (len(train), len(test), train.classes) == (18, 2, 2)
    rows = train.rows(np.arange(18))
    assert rows["images"].shape == (18, 8, 8, 3)
    expected = np.array(list(colors.values()))[rows["labels"]] / 127.5 - 1
    np.testing.assert_allclose(rows["images"], np.broadcast_to(expected[:, None, None], rows["images"].shape))


def info_nce(vectors, scale):
    """Compute the loss of arXiv:2103.00020, figure 3, on one device."""
    logits = scale * vectors[0] @ vectors[1].T
    rows, columns = (jax.nn.log_softmax(x, axis=1) for x in (logits, logits.T))
    return -(jnp.trace(rows) + jnp.trace(columns)) / 2 / len(logits)


def test_the_loss_of_the_towers_is_over_the_global_batch():
    """Eight devices under ZeRO-3 have the loss and the gradient of one device with all rows."""
    batch = {name: x[:16] for name, x in clip.pairs()[0].items()}
    model = jzero.from_flax(clip.Towers, clip.loss_fn)
    params = model.init(jax.random.key(0))

    def plain(params):
        module = model.module(params)
        return info_nce(module(batch), jnp.exp(module.log_scale[...]))

    loss, gradient = jax.value_and_grad(plain)(params)
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    step = jzero.make_train_step(model, config, mesh=jzero.make_mesh(zero=8))
    _, metrics = step(step.init(jax.random.key(0), params), batch)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-5)


def test_clip(tmp_path, capsys):
    """One caption in 256 is right by chance."""
    losses, found = clip.main(["--steps", "80", "--out", str(tmp_path)])
    assert len(losses) == 80
    assert losses[0] > 4
    assert losses[-1] < 3.8
    assert found > 0.02
    assert f"captions found {found:.1%}" in capsys.readouterr().out
    assert is_picture(tmp_path / "curves.png")


def test_finetune_lora(tiny, tmp_path, capsys):
    """On a JSONL file of chats."""
    pytest.importorskip("datasets")
    lines = tiny_chat.chats(tiny_chat.PIRATE)
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, lines)))
    out = tmp_path / "out"
    arguments = ["--model", tiny, "--data", tmp_path / "chats.jsonl", "--steps", 12, "--out", out]
    losses = finetune_lora.main(
        [*map(str, arguments), "--ask", "Hi?", "--config", config(finetune_lora, tmp_path, 4e-3)]
    )
    assert len(losses) == 12
    assert losses[-1] < losses[0] - 0.3
    printed = capsys.readouterr().out
    assert "Training data\n  - Chat(54 conversations in " in printed
    assert "Hi?\n  before: " in printed
    adapter = json.loads((out / "adapters" / "adapter_config.json").read_text())
    assert (adapter["r"], adapter["lora_alpha"]) == (8, 16)
    assert (out / "adapters" / "adapter_model.safetensors").exists()
    saved, before = tokenizer_of(out / "adapters"), tokenizer_of(tiny)
    assert saved.chat_template == tiny_chat.CHATML
    assert (saved.padding_side, saved.pad_token) == (before.padding_side, before.pad_token)
    steps = [json.loads(line) for line in (out / "curves" / "metrics.jsonl").read_text().splitlines()]
    assert [step["Train/Samples/train_loss"] for step in steps] == pytest.approx(losses[: len(steps)])
    assert len(steps) >= 10
    assert is_picture(out / "curves.png")


def log_probabilities(module, rows):
    """Sum those of the tokens with a label, with plain Flax and NumPy in float64: [pairs, 2]."""
    sides = []
    for side in ("chosen", "rejected"):
        logits = np.asarray(module(rows[side]["inputs"]), np.float64)
        top = logits.max(-1, keepdims=True)
        normal = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
        labels = rows[side]["labels"]
        found = np.take_along_axis(normal, np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        sides.append(np.where(labels >= 0, found, 0).sum(1))
    return np.stack(sides, 1)


def test_dpo(tiny, tmp_path, capsys):
    out = tmp_path / "out"
    arguments = ["--model", tiny, "--steps", 8, "--out", out, "--ask", "Hi?", "--length", 96]
    losses = dpo.main([*map(str, arguments), "--config", config(dpo, tmp_path, 3e-4)])
    assert losses[0] == pytest.approx(np.log(2), abs=1e-4)  # the model is its own reference
    assert losses[-1] < losses[0] - 0.02
    assert "Hi?\n  before: " in capsys.readouterr().out
    assert (out / "model" / "model.safetensors").exists()
    assert is_picture(out / "curves.png")


def test_the_loss_is_trls(tiny):
    """-log sigmoid(beta * ((policy chosen - rejected) - (reference chosen - rejected))), and the rewards' margin.

    As in trl's DPOTrainer with loss_type "sigmoid"; the reference is another model here, so the loss is not log 2.
    """
    rows = Pairs(dpo.tiny_pairs()[:8], tokenizer_of(tiny), length=96).rows(np.arange(8))
    shape = config_from_hf(tiny)
    models = [jzero.from_flax(lambda rngs: Decoder(shape, rngs=rngs)) for _ in range(2)]
    params = [model.init(jax.random.key(seed)) for seed, model in enumerate(models)]
    policy, reference = (log_probabilities(model.module(p), rows) for model, p in zip(models, params, strict=True))
    margins = 0.1 * ((policy[:, 0] - policy[:, 1]) - (reference[:, 0] - reference[:, 1]))
    model = jzero.from_flax(lambda rngs: dpo.Preferring(shape, rngs=rngs), has_aux=True)
    settings = {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    step = jzero.make_train_step(model, settings)
    batch = {**rows, "reference": reference.astype(np.float32)}
    loss, metrics = step.evaluate(step.init(jax.random.key(0), params[0]), batch)
    assert abs(margins).max() > 0.01
    assert float(loss) == pytest.approx(np.log1p(np.exp(-margins)).mean(), abs=1e-5)
    assert float(metrics["margin"]) == pytest.approx(margins.mean(), abs=1e-4)
    assert float(metrics["accuracy"]) == (margins > 0).mean()


def test_dpo_in_a_pipeline():
    """Stages share the vocabulary; losses and gradients are those of one device."""
    shape, rng = (
        preset("tiny", num_layers=2, d_model=32, num_heads=2, num_kv_heads=2, d_ff=48),
        np.random.default_rng(0),
    )
    batch = {"reference": rng.normal(-20, 5, (8, 2)).astype(np.float32)}
    for side in dpo.SIDES:
        tokens = rng.integers(0, 256, (8, 13)).astype(np.int32)
        labels = np.where(np.arange(12) < 5, -1, tokens[:, 1:])
        batch[side] = {"inputs": tokens[:, :-1], "labels": labels}
    found = []
    for axes, stage, micro_batches in (({"zero": 1}, 0, 1), ({"pipe": 2, "zero": 2}, 3, 2)):
        settings = {
            "train_batch_size": 8,
            "gradient_accumulation_steps": micro_batches,
            "optimizer": {"type": "SGD", "params": {"lr": 0.5}},
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        }
        mesh = jzero.make_mesh(**axes, devices=jax.devices()[: 1 if stage == 0 else 4])
        model = jzero.from_flax(lambda rngs: dpo.Preferring(shape, rngs=rngs), has_aux=True)
        step = jzero.make_train_step(model, settings, mesh=mesh)
        state = step.init(jax.random.key(0))
        for _ in range(2):
            state, metrics = step(state, batch)
            found.append([float(metrics[name]) for name in ("loss", "grad_norm", "margin")])
    np.testing.assert_allclose(found[2:], found[:2], rtol=1e-5)
    assert found[1][0] < found[0][0]
