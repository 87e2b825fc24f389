"""ZeRO-2: the gradients are partitioned too, as soon as they are computed; two micro-batches make a batch of 64.

python -m experiments.tutorial.zero2
"""

from pathlib import Path

import jax

import jzero
from experiments.tutorial import digits
from models.mlp import MLP, cross_entropy

CONFIG = Path(__file__).with_name("ds_config_zero2.json")


def main(epochs: int = 15) -> float:
    jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine without GPUs
    train, test = digits.load()

    model = jzero.from_flax(MLP, cross_entropy)
    engine, _, loader, _ = jzero.initialize(model=model, config=CONFIG, training_data=train)

    micro_batches = jzero.RepeatingLoader(loader)
    steps = len(loader) // engine.gradient_accumulation_steps()
    for epoch in range(1, epochs + 1):
        losses = [float(engine.train_batch(micro_batches)) for _ in range(steps)]
        print(f"epoch {epoch:2}: loss {sum(losses) / len(losses):.4f}")

    accuracy = digits.accuracy(engine.module(), test)
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
