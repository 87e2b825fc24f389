"""Data parallelism: every device holds the whole model and takes its part of every batch of 64.

python -m experiments.tutorial.data_parallel
"""

from pathlib import Path

import jax

import jzero
from experiments.tutorial import digits
from models.mlp import MLP, cross_entropy

CONFIG = Path(__file__).with_name("ds_config.json")


def main(epochs: int = 15) -> float:
    jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine without GPUs
    train, test = digits.load()

    model = jzero.from_flax(MLP, cross_entropy)
    engine, _, loader, _ = jzero.initialize(model=model, config=CONFIG, training_data=train)

    for epoch in range(1, epochs + 1):
        losses = []
        for batch in loader:
            loss = engine(batch)
            engine.backward(loss)
            engine.step()
            losses.append(loss)
        print(f"epoch {epoch:2}: loss {sum(map(float, losses)) / len(losses):.4f}")

    accuracy = digits.accuracy(engine.module(), test)
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
