"""ZeRO-1: the optimizer state is partitioned; every device updates its part of the parameters.

python -m experiments.tutorial.zero1
"""

from pathlib import Path

import jax

import jzero
from experiments.tutorial import digits
from models.mlp import MLP, cross_entropy

CONFIG = Path(__file__).with_name("ds_config_zero1.json")


def main(epochs: int = 15) -> float:
    jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine without GPUs
    train, test = digits.load()

    model = jzero.from_flax(MLP, cross_entropy)
    engine, _, loader, _ = jzero.initialize(model=model, config=CONFIG, training_data=train)

    for epoch in range(1, epochs + 1):
        losses = [float(engine.train_batch()) for _ in range(len(loader))]
        print(f"epoch {epoch:2}: loss {sum(losses) / len(losses):.4f}")

    state = jax.tree.leaves(engine.state.opt_state)
    held = sum(x.addressable_shards[0].data.nbytes for x in state)
    print(f"optimizer state: {sum(x.nbytes for x in state):,} bytes; the first device holds {held:,}")

    accuracy = digits.accuracy(engine.module(), test)
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
