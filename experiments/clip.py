"""Train an image tower and a text tower to agree, as CLIP does (arXiv:2103.00020), and find captions for images.

    python -m experiments.clip

An image has four handwritten digits of scikit-learn, its caption has their names: "three one four seven". Each image
must find its caption among those of the whole batch, and each caption its image. For data of your own replace `pairs`:
floats [n, height, width, channels] and the captions' bytes, or tokens, [n, length].
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jzero
from experiments.show import finish, options, read_config
from experiments.text import BYTES
from models.gpt2 import GPT2, GPT2Config
from models.vit import ViT, ViTConfig

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
LENGTH = 4 * len("seven ")  # bytes of the longest caption, with a space after each word
WIDTH = 64


class Towers(nnx.Module):
    """Two towers whose outputs are unit vectors of one width."""

    def __init__(self, rngs: nnx.Rngs):
        shape = {"num_layers": 2, "d_model": WIDTH, "num_heads": 4, "d_ff": 4 * WIDTH}
        image = ViTConfig(**shape, num_classes=WIDTH, image_size=16, patch_size=8, num_channels=1)
        self.image = ViT(image, rngs=rngs)
        self.text = GPT2(GPT2Config(**shape, vocab_size=BYTES, max_positions=LENGTH), rngs=rngs)
        self.project = nnx.Linear(WIDTH, WIDTH, use_bias=False, rngs=rngs)
        self.log_scale = nnx.Param(jnp.log(1 / 0.07))

    def __call__(self, batch: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden = self.text.norm(self.text.through(self.text.prefix({"inputs": batch["captions"]})))
        return unit(self.image(batch["images"])), unit(self.project(hidden[:, -1]))


def unit(x: jax.Array) -> jax.Array:
    x = x.astype(jnp.float32)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def loss_fn(model: Towers, batch: dict[str, jax.Array]) -> jax.Array:
    """InfoNCE over the global batch: a device has its own rows, and gathers those of all others to compare with."""
    images, captions = model(batch)
    own = jnp.arange(len(images)) + jzero.axis_index() * len(images)  # which of the gathered rows belong to these
    scale = jnp.exp(model.log_scale[...].astype(jnp.float32))

    def info_nce(rows: jax.Array, others: jax.Array) -> jax.Array:
        logits = scale * rows @ jzero.all_gather(others).T
        return optax.softmax_cross_entropy_with_integer_labels(logits, own).mean()

    return (info_nce(images, captions) + info_nce(captions, images)) / 2


def main(argv: list[str] | None = None) -> tuple[list[float], float]:
    """Train, and return the loss of each step and the share of held-out images that find their captions."""
    args = options("clip", __doc__, "runs/clip").parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine without GPUs
    config, steps = read_config(args)
    train, test = pairs()
    model = jzero.from_flax(Towers, loss_fn)
    engine, *_ = jzero.initialize(model=model, config=config, training_data=train)

    losses, found = [], []
    for step in range(1, steps + 1):
        losses.append(engine.train_batch())
        if step % max(1, steps // 10) == 0 or step == steps:
            found.append((step, retrieval(engine, test)))
            jzero.log_dist(f"step {step:5}   loss {float(losses[-1]):.3f}   captions found {found[-1][1]:.1%}")

    engine.save_checkpoint(args.out / "checkpoint").wait()
    title = f"An image tower and a text tower; {len(test['images'])} captions to choose from"
    return finish(args.out, losses, {"captions found": found}, title), found[-1][1]


def retrieval(engine: jzero.Engine, test: dict[str, np.ndarray]) -> float:
    """Compute the share of the images whose nearest caption says what they show."""
    images, captions = engine.predict(test, numpy=True)
    nearest = test["captions"][(images @ captions.T).argmax(1)]
    return float((nearest == test["captions"]).all(1).mean())


def pairs() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Make (8,192 training pairs, 256 held-out pairs): images [n, 16, 16, 1] and captions [n, LENGTH] of bytes."""
    from sklearn.datasets import load_digits

    digits, labels = load_digits(return_X_y=True)
    digits = digits.reshape(-1, 8, 8).astype(np.float32) / 8 - 1
    rng = np.random.default_rng(0)
    order = rng.permutation(len(digits))

    def make(some: np.ndarray, count: int) -> dict[str, np.ndarray]:
        four = rng.choice(some, (count, 4))
        images = digits[four].reshape(count, 2, 2, 8, 8).transpose(0, 1, 3, 2, 4).reshape(count, 16, 16, 1)
        captions = [" ".join(NAMES[digit] for digit in row).ljust(LENGTH).encode() for row in labels[four]]
        return {"images": images, "captions": np.stack([np.frombuffer(c, np.uint8) for c in captions]).astype(np.int32)}

    return make(order[360:], 8192), make(order[:360], 256)


if __name__ == "__main__":
    main()
