"""Time the compressed all-reduce of 1-bit Adam beside the exact all-reduce that it replaces.

    python -m experiments.benchmarks.onebit                  # on the GPUs of this host
    python -m experiments.benchmarks.onebit --plan 8         # only compile for H100s, and list what moves

The compressed one costs 4 + 4/N bytes of errors per parameter on each of N devices.
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

from jzero.optimizers.compressed import compressed_all_reduce
from jzero.planner import collectives, gpu_devices

AXIS = "zero"


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
        "compressed": (partial(compressed_all_reduce, axes=AXIS), 3),
    }
    for elements in args.elements:
        for name, (function, arguments) in kinds.items():
            parts = [elements, elements, elements // mesh.size][:arguments]
            shapes = [
                jax.ShapeDtypeStruct((mesh.size, n), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(AXIS)))
                for n in parts
            ]
            compiled = program(function, mesh, arguments).lower(*shapes).compile()
            rows = collectives(compiled, mesh)
            record = {"elements": elements, "kind": name, "gpus": mesh.size}
            record["moved_mib"] = {
                f"{row.kind} {row.dtype}": round(row.bytes / 2**20, 1) for row in rows if row.bytes > 2**10
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
