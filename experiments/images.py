"""Train a ResNet on images, and evaluate it on held-out images after every epoch.

    python -m experiments.images
    python -m experiments.images --data DIRECTORY --size 224 --resnet50 --steps 5000
    python -m experiments.images --data uoft-cs/cifar10 --size 32 --steps 5000

Without --data it classifies scikit-learn's handwritten digits. A directory has a subdirectory of images for each class.
BatchNorm's running statistics are state: training updates them over all devices, evaluation reads them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jzero
from experiments.resnet import ResNet
from experiments.show import finish, options, read_config


def loss_fn(model: nnx.Module, batch: dict[str, jax.Array]) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch["images"]), batch["labels"]).mean()


def main(argv: list[str] | None = None) -> tuple[list[float], list[float]]:
    """Train, and return the loss of each step and the held-out accuracy after each epoch."""
    p = options("images", __doc__, "runs/images")
    p.add_argument("--data", metavar="DIR", help="a directory of images, or a data set of Hugging Face")
    p.add_argument("--size", type=int, default=32, help="pixels that images are resized to (default 32)")
    p.add_argument("--resnet50", action="store_true", help="a ResNet-50 (default: a small ResNet for small images)")
    args = p.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine without GPUs
    config, steps = read_config(args)

    # 1. The data, and a model for it.
    train, test = read_images(args.data, args.size) if args.data else digits()
    shape = {} if args.resnet50 else {"stages": (1, 1, 1), "width": 16, "small": True}
    model = jzero.from_flax(partial(ResNet, classes=train.classes, channels=train.channels, **shape), loss_fn)
    engine, _, loader, _ = jzero.initialize(model=model, config=config, training_data=train)

    # 2. The training.
    losses, accuracies = [], []
    for step in range(1, steps + 1):
        losses.append(engine.train_batch())
        if step % len(loader) == 0 or step == steps:
            accuracies.append((step, accuracy(engine, test)))
            jzero.log_dist(f"step {step:5}   loss {float(losses[-1]):.3f}   held-out accuracy {accuracies[-1][1]:.1%}")

    engine.save_checkpoint(args.out / "checkpoint").wait()
    title = "A ResNet on images"
    return finish(args.out, losses, {"held-out accuracy": accuracies}, title), [value for _, value in accuracies]


def accuracy(engine: jzero.Engine, test: Images) -> float:
    """Compute the share of the images whose class is the most probable one."""
    right = 0
    for part in np.array_split(np.arange(len(test)), -(-len(test) // engine.train_batch_size())):
        batch = test.rows(part)
        logits = engine.predict(batch["images"], numpy=True)
        right += int((logits.argmax(-1) == batch["labels"]).sum())
    return right / len(test)


@dataclass(frozen=True)
class Images:
    """Images that are read when a batch needs them: `read(indices)` -> floats [n, height, width, channels]."""

    read: Callable[[np.ndarray], np.ndarray]
    labels: np.ndarray
    classes: int
    channels: int

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        return {"images": self.read(indices), "labels": self.labels[indices]}


def digits() -> tuple[Images, Images]:
    """Return (training images, held-out images) of 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images, labels = images.reshape(-1, 8, 8, 1).astype(np.float32) / 8 - 1, labels.astype(np.int32)
    test, train = np.split(np.random.default_rng(0).permutation(len(labels)), [360])
    train, test = (Images(images[part].__getitem__, labels[part], classes=10, channels=1) for part in (train, test))
    return train, test


def read_images(data: str, size: int) -> tuple[Images, Images]:
    """Return the splits "train" and "test" of a data set of Hugging Face; without "test" a tenth is held out."""
    import datasets

    splits = datasets.load_dataset(data)  # a directory of images too
    if "test" not in splits:
        splits = splits["train"].train_test_split(0.1, seed=0)
    kinds = {type(kind): name for name, kind in splits["train"].features.items()}
    image, label = kinds[datasets.Image], kinds[datasets.ClassLabel]

    def make(split: Any) -> Images:
        def read(indices: np.ndarray) -> np.ndarray:
            pictures = [picture.convert("RGB").resize((size, size)) for picture in split[indices.tolist()][image]]
            return np.stack(pictures).astype(np.float32) / 127.5 - 1

        labels = np.asarray(split[label][:], np.int32)
        return Images(read, labels, classes=split.features[label].num_classes, channels=3)

    return make(splits["train"]), make(splits["test"])


if __name__ == "__main__":
    main()
