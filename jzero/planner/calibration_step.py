"""The real step of a calibration: a few layers of a decoder, measured beside their estimate."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jzero.mesh import make_mesh
from jzero.planner.rates import Rates
from jzero.planner.step_time import step_time
from jzero.train_step import make_train_step

_WARM, _HEAD_WIDTH = 4, 128


@dataclass(frozen=True)
class DecoderShape:
    """A Llama's layers; the defaults are those of 8B."""

    width: int = 4096
    hidden: int = 14336
    layers: int = 4
    vocabulary: int = 32000
    rows: int = 2
    sequence: int = 4096

    @property
    def heads(self) -> tuple[int, int]:
        """Return the heads of queries, and of keys and values."""
        return self.width // _HEAD_WIDTH, max(1, self.width // _HEAD_WIDTH // 4)

    def matrices(self) -> list[tuple[int, int]]:
        """Return (inputs, outputs) of a layer's four matrices: qkv, output, gate and up, down."""
        queries, keys = self.heads
        qkv = (queries + 2 * keys) * _HEAD_WIDTH
        return [(self.width, qkv), (self.width, self.width), (self.width, 2 * self.hidden), (self.hidden, self.width)]


class _Decoder:
    """A decoder in plain JAX, without positions: they cost next to nothing."""

    def __init__(self, shape: DecoderShape, kernel: Any):
        self.shape, self.kernel = shape, kernel

    def init(self, rng: jax.Array) -> dict[str, Any]:
        s, keys = self.shape, iter(jax.random.split(rng, 6))

        def normal(*dims: int) -> jax.Array:
            return 0.02 * jax.random.normal(next(keys), dims, jnp.float32)

        stack = {name: normal(s.layers, *dims) for name, dims in zip("qogd", s.matrices(), strict=True)}
        ends = {"embed": normal(s.vocabulary, s.width), "head": normal(s.width, s.vocabulary)}
        return {"ends": ends, "stack": stack}

    def loss(self, params: Any, batch: Any, rng: jax.Array | None) -> jax.Array:
        x = self.prefix(params["ends"], batch, rng)
        x, _ = jax.lax.scan(lambda x, layer: (self.block(layer, x, rng), None), x, params["stack"])
        return self.suffix(params["ends"], x, batch, rng)

    def prefix(self, ends: Any, batch: Any, rng: jax.Array | None) -> jax.Array:
        return ends["embed"][batch["inputs"]]

    def block(self, layer: Any, x: jax.Array, rng: jax.Array | None) -> jax.Array:
        queries, keys = self.shape.heads
        B, S, _ = x.shape
        heads = (_norm(x) @ layer["q"]).reshape(B, S, queries + 2 * keys, _HEAD_WIDTH)
        q, k, v = jnp.split(heads, [queries, queries + keys], 2)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.kernel)
        x = x + mixed.reshape(B, S, -1) @ layer["o"]
        gate, up = jnp.split(_norm(x) @ layer["g"], 2, -1)
        return x + (jax.nn.silu(gate) * up) @ layer["d"]

    def suffix(self, ends: Any, x: jax.Array, batch: Any, rng: jax.Array | None) -> jax.Array:
        logits = (_norm(x) @ ends["head"]).astype(jnp.float32)
        right = jnp.take_along_axis(logits, batch["labels"][..., None], -1)[..., 0]
        return (jax.nn.logsumexp(logits, -1) - right).mean()


def attention_kernel(device: jax.Device) -> Literal["cudnn", "xla"]:
    """Return the attention that a device runs: cuDNN's needs Ampere or later."""
    return "cudnn" if device.platform == "gpu" and float(device.compute_capability) >= 8.0 else "xla"


def _norm(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)


def measured_ratio(devices: list[jax.Device], rates: Rates, shape: DecoderShape, seconds: float) -> float:
    """Return the measured time of a step on the devices, at ZeRO stage 3 if they are several, over its estimate.

    A CPU's program has no schedule to walk; its ratio is 1.
    """
    on_gpu = devices[0].platform == "gpu"
    config = {
        "train_micro_batch_size_per_gpu": shape.rows,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3 if len(devices) > 1 else 0},
    }
    step = make_train_step(
        _Decoder(shape, attention_kernel(devices[0])), config, mesh=make_mesh(config, devices=devices)
    )
    tokens = np.random.default_rng(0).integers(0, shape.vocabulary, (step.batch_sizes.train, shape.sequence), np.int32)
    batch = step.place({"inputs": tokens, "labels": tokens})
    state = step.init(jax.random.key(0))
    times, begin = list[float](), time.perf_counter()
    while len(times) < 2 * _WARM or time.perf_counter() - begin < 5 * seconds:
        start = time.perf_counter()
        state, _ = step(state, batch)
        jax.block_until_ready(state)
        times.append(time.perf_counter() - start)
    measured = statistics.median(times[_WARM:])
    if not on_gpu:
        return 1.0
    return measured / step_time(step.lower(batch).compile(), rates, mesh=step.mesh).step_s
