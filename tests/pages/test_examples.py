"""The examples learn, and leave their files; the loss of the two towers is the paper's formula."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jzero
from experiments import clip, gpt, images

pytestmark = pytest.mark.slow
PICTURE = b"\x89PNG"


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
    assert (tmp_path / "curves.png").read_bytes().startswith(PICTURE)


@pytest.mark.parametrize(
    ("program", "steps", "first", "last", "least", "said"),
    [
        # One digit in ten is right by chance; the running statistics must be those of the training for more.
        (images, 46, 0, 1, 0.8, "held-out accuracy {:.1%}"),
        # One caption in 256 is right by chance.
        (clip, 80, 4, 3.8, 0.02, "captions found {:.1%}"),
    ],
)
def test_an_example_learns(program, steps, first, last, least, said, tmp_path, capsys):
    losses, found = program.main(["--steps", str(steps), "--out", str(tmp_path)])
    if program is images:
        assert len(found) == 2
        found = found[-1]
    assert len(losses) == steps
    assert losses[0] > first
    assert losses[-1] < last
    assert found > least
    assert said.format(found) in capsys.readouterr().out
    assert (tmp_path / "curves.png").read_bytes().startswith(PICTURE)


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

    loss, gradient = jax.jit(jax.value_and_grad(plain))(params)
    config = {
        "train_batch_size": 16,
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    step = jzero.make_train_step(model, config, mesh=jzero.make_mesh(zero=8))
    _, metrics = step(step.init(jax.random.key(0), params), batch)
    assert float(metrics["loss"]) == pytest.approx(float(loss), rel=1e-5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(optax.tree.norm(gradient)), rel=1e-5)
