"""ZeRO-3: the parameters are partitioned too, and gathered where the model needs them.

python -m experiments.tutorial.zero3
"""

from pathlib import Path

import jax

import jzero
from experiments.tutorial import digits
from models.mlp import MLP, cross_entropy

CONFIG = Path(__file__).with_name("ds_config_zero3.json")


def main(epochs: int = 15) -> float:
    jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine without GPUs
    train, test = digits.load()

    model = jzero.from_flax(MLP, cross_entropy)
    engine, _, loader, _ = jzero.initialize(model=model, config=CONFIG, training_data=train)

    for epoch in range(1, epochs + 1):
        losses = [float(engine.train_batch(batch)) for batch in loader]
        print(f"epoch {epoch:2}: loss {sum(losses) / len(losses):.4f}")

    kernel = engine.state.params["fc1"]["kernel"]
    print(f"fc1/kernel: {kernel.shape} on all devices; the first one holds {kernel.addressable_shards[0].data.shape}")

    accuracy = digits.accuracy(engine.module(), test)
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
