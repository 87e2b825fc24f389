"""Attention of long sequences on two GPUs, by heads (Ulysses) or around a ring.

    python -m experiments.benchmarks.ring

Prints a line for each case: milliseconds forward and backward (the median of 10), and TFLOP/s a GPU of attention's
products. Two devices share 16 heads by all-to-alls; 15 heads make a ring.
"""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.spread import ModelGroup, ShardedArray, spread

HEAD, DEVICES, AXIS = 64, 2, "context"
SPEC = PartitionSpec(None, AXIS)


def attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def with_gradients(f):
    def run(*operands):
        *xs, gradient = operands
        y, pull = jax.vjp(f, *xs)
        return y, pull(gradient)

    return run


def on_shards(q, k, v):
    group = ModelGroup({AXIS: DEVICES}, {1: (AXIS,)})
    values = [
        ShardedArray(x, (x.shape[0], DEVICES * x.shape[1], *x.shape[2:]), ((), (AXIS,), (), ())) for x in (q, k, v)
    ]
    return group.in_activation_layout(spread(attention, group)(*values)).x


def milliseconds(f, operands, runs=10):
    f = jax.jit(f)
    jax.block_until_ready(f(*operands))
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(f(*operands))
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def normal(*shape):
    return jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)


def attend(sequence, heads, kv_heads, devices):
    operands = [normal(1, sequence, n, HEAD) for n in (heads, kv_heads, kv_heads, heads)]
    run = with_gradients(attention)
    if devices > 1:
        mesh = Mesh(np.array(jax.devices()[:devices]), (AXIS,))
        operands = [jax.device_put(x, NamedSharding(mesh, SPEC)) for x in operands]
        run = with_gradients(on_shards)
        run = jax.shard_map(run, mesh=mesh, in_specs=SPEC, out_specs=SPEC, check_vma=False)
    ms = milliseconds(run, operands)
    flops = 3.5 * 2 * sequence**2 * heads * HEAD  # 2 products of 2 S^2 H C forward, 5 backward, half of the pairs
    return ms, flops / devices / ms / 1e9


def main():
    print(jax.__version__, jax.devices()[0].device_kind)
    for sequence in (16_384, 65_536, 131_072):
        for name, heads, kv_heads, devices in (
            ("one GPU", 16, 16, 1), ("Ulysses", 16, 16, 2), ("ring", 15, 15, 2),
            ("Ulysses", 32, 8, 2), ("ring", 33, 11, 2),
        ):  # fmt: skip
            ms, rate = attend(sequence, heads, kv_heads, devices)
            print(
                f"{sequence} tokens, {heads} heads, {kv_heads} kv, {name}: {ms:.1f} ms, {rate:.0f} TFLOP/s a GPU",
                flush=True,
            )


if __name__ == "__main__":
    main()
