"""Pipeline parallelism: two stages of one layer each, four micro-batches per batch of 64, ZeRO-1 inside a stage.

python -m experiments.tutorial.pipeline
"""

from pathlib import Path

import jax
import optax
from flax import nnx

import jzero
from experiments.tutorial import digits
from jzero.pipeline.draw import draw_text
from jzero.pipeline.schedules import make_schedule

CONFIG = Path(__file__).with_name("ds_config_pipeline.json")


class SimpleLayer(nnx.Module):
    def __init__(self, d_in: int, d_out: int, relu: bool = False, *, rngs: nnx.Rngs):
        self.linear, self.relu = nnx.Linear(d_in, d_out, rngs=rngs), relu

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.linear(x.reshape(len(x), -1))
        return nnx.relu(x) if self.relu else x


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def main(epochs: int = 15) -> float:
    jax.config.update("jax_num_cpu_devices", 8)  # simulated devices, for a machine without GPUs
    train, test = digits.load()

    layers = [jzero.LayerSpec(SimpleLayer, 784, 128, relu=True), jzero.LayerSpec(SimpleLayer, 128, 10)]
    model = jzero.PipelineModule(layers, num_stages=2, loss_fn=cross_entropy)
    engine, _, loader, _ = jzero.initialize(model=model, config=CONFIG, training_data=train)

    boundaries = model.boundaries(2)
    for stage, devices in enumerate(engine.mesh.devices):
        mine = layers[boundaries[stage] : boundaries[stage + 1]]
        print(f"stage {stage}: {mine} on devices {[device.id for device in devices.flat]}")
    micro_batches = engine.gradient_accumulation_steps()
    pipeline = engine.config.pipeline
    print(draw_text(make_schedule(pipeline.schedule, 2, micro_batches, pipeline.chunks)))
    print(f"forward, untrained: loss {engine.eval_batch(tuple(x[:64] for x in test)):.4f}")

    for epoch in range(1, epochs + 1):
        losses = [float(engine.train_batch()) for _ in range(len(loader) // micro_batches)]
        print(f"epoch {epoch:2}: loss {sum(losses) / len(losses):.4f}")

    accuracy = digits.accuracy(engine.module(), test)
    print(f"test accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    main()
