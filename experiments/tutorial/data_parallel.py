"""Data parallelism: every device holds the whole model and takes its part of every batch of 64.

python -m experiments.tutorial.data_parallel
"""

from pathlib import Path

import jax
import optax

import jzero
from experiments.tutorial import digits
from models.mlp import MLP

CONFIG = Path(__file__).with_name("ds_config.json")


def criterion(outputs: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()


def main(epochs: int = 15) -> float:
    jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine without GPUs
    train, test = digits.load()

    engine, _, loader, _ = jzero.initialize(model=MLP, criterion=criterion, config=CONFIG, training_data=train)

    for epoch in range(1, epochs + 1):
        losses = []
        for images, labels in loader:
            outputs = engine(images)
            loss = engine.loss(outputs, labels)
            engine.backward(loss)
            engine.step()
            losses.append(loss)
        print(f"epoch {epoch:2}: loss {sum(map(float, losses)) / len(losses):.4f}")

    accuracy = digits.accuracy(engine.module(), test)
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
