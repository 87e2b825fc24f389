"""Time the compressed all-reduce of 1-bit Adam beside the exact all-reduce that it replaces.

    python -m experiments.benchmarks.onebit                  # on the GPUs of this host
    python -m experiments.benchmarks.onebit --plan 8         # only compile for H100s, and list what moves

The compressed one is DeepSpeed's `compressed_allreduce` (runtime/comm/nccl.py): every device adds its error to its
momentum and sends the signs of each part to the part's server with one scale; the server averages, adds its error, and
sends the signs of the average to all. It costs 4 + 4/N bytes of errors per parameter on each of N devices.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jzero.planner import collectives, gpu_devices

AXIS = "zero"


def pack(signs: jax.Array) -> jax.Array:
    """Pack bools [..., n] into uint8 [..., n / 8], bit k from the k-th eighth: no stride, so no slow reads."""
    eighths = jnp.split(signs.astype(jnp.uint8), 8, axis=-1)
    return sum(part << k for k, part in enumerate(eighths))  # type: ignore[return-value]


def unpack(packed: jax.Array) -> jax.Array:
    """Invert `pack`: float32, 1 or -1."""
    bits = jnp.concatenate([(packed >> k) & 1 for k in range(8)], axis=-1)
    return bits.astype(jnp.float32) * 2 - 1


def squeeze(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the signs of x [..., n] packed, the scale that keeps its norm, and the error of both."""
    scale = jnp.sqrt(jnp.mean(x * x))
    signs = x >= 0
    return pack(signs), scale, x - jnp.where(signs, scale, -scale)


def compressed_all_reduce(
    momentum: jax.Array, worker_error: jax.Array, server_error: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Average over the devices.

    Args:
      momentum, worker_error: this device's, float32 [n], n a multiple of 8 times the devices.
      server_error: of the part that this device averages, [n / devices].

    Returns:
      The average [n], the same on all devices, and the new errors.
    """
    size = lax.axis_size(AXIS)
    packed, scale, worker_error = squeeze((momentum + worker_error).reshape(size, -1))
    packed, scales = lax.all_to_all(packed, AXIS, 0, 0), lax.all_gather(scale, AXIS)
    average = (unpack(packed) * scales[:, None]).sum(0) / size
    packed, scale, server_error = squeeze(average + server_error)
    packed, scales = lax.all_gather(packed, AXIS), lax.all_gather(scale, AXIS)
    return (unpack(packed) * scales[:, None]).reshape(-1), worker_error.reshape(-1), server_error


def exact(dtype: jnp.dtype, momentum: jax.Array) -> jax.Array:
    """Average over the devices, summed in `dtype`."""
    return lax.psum(momentum.astype(dtype), AXIS).astype(jnp.float32) / lax.axis_size(AXIS)


def program(function: object, mesh: Mesh, arguments: int) -> jax.stages.Wrapped:
    """Map `function` over the devices; each has its row of every argument."""

    def local(*rows: jax.Array) -> tuple:
        results = function(*(row[0] for row in rows))  # type: ignore[operator]
        return tuple(x[None] for x in (results if isinstance(results, tuple) else (results,)))

    spec = PartitionSpec(AXIS)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * arguments, out_specs=spec, check_vma=False)
    return jax.jit(mapped, donate_argnums=tuple(range(arguments)))


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--elements", type=int, nargs="*", default=[2**24, 2**26, 2**28, 2**30], help="of the momentum")
    p.add_argument("--plan", type=int, metavar="GPUS", help="only compile, for this many H100s")
    args = p.parse_args(argv)
    if args.plan:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_enable_compilation_cache", False)  # it cannot read back programs for absent GPUs
    devices = gpu_devices("h100", args.plan) if args.plan else jax.devices()
    mesh = Mesh(np.array(devices), AXIS)
    kinds = {
        "float32": (partial(exact, jnp.float32), 1),
        "bfloat16": (partial(exact, jnp.bfloat16), 1),
        "compressed": (compressed_all_reduce, 3),
    }
    for elements in args.elements:
        for name, (function, arguments) in kinds.items():
            parts = [elements, elements, elements // mesh.size][:arguments]
            shapes = [
                jax.ShapeDtypeStruct((mesh.size, n), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(AXIS)))
                for n in parts
            ]
            compiled = program(function, mesh, arguments).lower(*shapes).compile()
            ledger = collectives(compiled, mesh)
            record = {"elements": elements, "kind": name, "gpus": mesh.size}
            record["moved_mib"] = {
                f"{row.kind} {row.dtype}": round(row.bytes / 2**20, 1) for row in ledger if row.bytes > 2**10
            }
            if not args.plan:
                record["ms"] = round(1e3 * seconds(compiled, shapes), 3)
            print(json.dumps(record), flush=True)


def seconds(compiled: jax.stages.Compiled, shapes: list[jax.ShapeDtypeStruct], times: int = 20) -> float:
    """Return the median of five times the mean time of a call, each on the results of the one before."""
    make = jax.jit(lambda: tuple(jnp.ones(s.shape, s.dtype) for s in shapes), out_shardings=shapes[0].sharding)
    rows, measured = make(), []
    for _ in range(6):  # the first warms up
        start = time.perf_counter()
        for _ in range(times):
            rows = compiled(*rows)
        jax.block_until_ready(rows)
        measured.append((time.perf_counter() - start) / times)
    return statistics.median(measured[1:])


if __name__ == "__main__":
    main()
