"""The speed of grouped products on one GPU, against dense and batched products of the same FLOPs.

    python -m experiments.benchmarks.grouped --cases qwen_up mixtral_up

The candidates of a line take turns, so that they share the card's heat; a line shows TFLOP/s, the median of five turns.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from jzero.moe import grouped_dot

# rows, D, F, E: of Mixtral 8x7B (8,192 tokens, 2 experts each) and Qwen3-30B-A3B (8 each), gate and up in one product
CASES = {
    "mixtral_up": (16384, 4096, 28672, 8),
    "mixtral_down": (16384, 14336, 4096, 8),
    "qwen_up": (65536, 2048, 1536, 128),
    "qwen_down": (65536, 768, 2048, 128),
}
TURN = 0.025  # seconds


def sizes(rows, experts, even):
    """Rows of each expert: equal, or drawn from a Dirichlet distribution (4 for each expert)."""
    if even:
        return np.full(experts, rows // experts, np.int32)
    drawn = np.floor(np.random.default_rng(0).dirichlet(np.full(experts, 4.0)) * rows).astype(np.int32)
    drawn[0] += rows - drawn.sum()
    return drawn


def candidates(experts):
    """Name -> functions of (x, w, dy, sizes): the product, the gradient of the rows, the gradient of the matrices."""

    def rows(product):
        return lambda x, w, dy, n: jax.vjp(lambda x: product(x, w, n), x)[1](dy)[0]

    def matrices(product):
        return lambda x, w, dy, n: jax.vjp(lambda w: product(x, w, n), w)[1](dy)[0]

    def batched(x, w, n):
        return jnp.einsum("ecd,edf->ecf", x.reshape(experts, -1, x.shape[1]), w).reshape(len(x), -1)

    found = {"dense": lambda x, w, n: x @ w[0], "einsum": batched, "grouped_dot": grouped_dot}
    return {
        name: {"fwd": lambda x, w, dy, n, f=f: f(x, w, n), "dx": rows(f), "dw": matrices(f)}
        for name, f in found.items()
    }


def turn(run, args, calls):
    began = time.perf_counter()
    for _ in range(calls):
        out = run(*args)
    jax.block_until_ready(out)
    return (time.perf_counter() - began) / calls


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    for case in parser.parse_args().cases:
        rows, d, f, experts = CASES[case]
        keys = jax.random.split(jax.random.key(0), 3)
        shapes = [(rows, d), (experts, d, f), (rows, f)]
        x, w, dy = (jax.random.normal(k, shape, jnp.bfloat16) for k, shape in zip(keys, shapes, strict=True))
        for product in ("fwd", "dx", "dw"):
            runs = {}
            for name, functions in candidates(experts).items():
                for even in (True, False) if name == "grouped_dot" else (True,):
                    args = x, w, dy, jnp.asarray(sizes(rows, experts, even))
                    run = jax.jit(functions[product]).lower(*args).compile()
                    turn(run, args, 2)
                    calls = max(2, int(TURN / turn(run, args, 2)))
                    runs[name if even else f"{name} (uneven)"] = run, args, calls
            times = {name: [] for name in runs}
            for _ in range(5):
                for name, (run, args, calls) in runs.items():
                    times[name].append(turn(run, args, calls))
            speeds = {name: 2e-12 * rows * d * f / statistics.median(t) for name, t in times.items()}
            print(case, product, "  ".join(f"{name} {speed:.0f}" for name, speed in speeds.items()), flush=True)


if __name__ == "__main__":
    main()
