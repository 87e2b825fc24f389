"""Compare cuDNN's attention in bfloat16 with XLA's in float32, on a GPU: outputs and gradients of every kind of mask.

python -m experiments.benchmarks.attention
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from models.attention import attend, same_segment, visible_ST

B, H, K = 2, 8, 4


def main() -> None:
    print("| tokens | width | mask | output | gradients of q, k, v |\n|---|---|---|---|---|")
    compare(512, (24, 64, 128, 192, 256))
    compare(511, (64, 128))


def compare(S: int, widths: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    segments = same_segment(jnp.asarray(np.sort(rng.integers(1, 5, (B, S)), axis=1), jnp.int32))
    padding = jnp.asarray(np.arange(S) < np.array([[S], [S - 100]]))[:, None, None, :]
    near = visible_ST(S, S, 100)[None, None]
    causal = {"causal": None, "segments": segments, "near": near, "near, segments": near & segments}
    kinds = {name: (mask, {"causal": True}) for name, mask in causal.items()}
    kinds |= {"window": (None, {"causal": True, "window": 100}), "full": (None, {}), "padding": (padding, {})}
    kinds |= {"window, segments": (segments, {"causal": True, "window": 100}), "both ways, segments": (segments, {})}
    for width in widths:
        half = [jnp.asarray(rng.normal(size=(B, S, n, width)), jnp.bfloat16) for n in (H, K, K)]
        weights = jnp.asarray(rng.normal(size=(B, S, H, width)), jnp.float32)
        for name, (mask, more) in kinds.items():
            run = partial(outputs, mask=mask, weights=weights, **more)
            found = jax.jit(partial(run, choice="cudnn"))(*half)
            expected = jax.jit(partial(run, choice="xla"))(*[x.astype(jnp.float32) for x in half])
            errors = [float(jnp.abs(a - b).max() / jnp.abs(b).max()) for a, b in zip(found, expected, strict=True)]
            output, *grads = (f"{error:.4f}" for error in errors)
            print(f"| {S} | {width} | {name} | {output} | {', '.join(grads)} |", flush=True)


def outputs(q, k, v, *, mask, weights, choice, **more) -> tuple[jax.Array, ...]:
    """Return the output and the gradients of a weighted sum of it, as float32."""

    def total(q, k, v):
        out = attend(q, k, v, mask, choice=choice, **more).astype(jnp.float32)
        return (out * weights).sum(), out

    (_, out), gradients = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(q, k, v)
    return out, *(g.astype(jnp.float32) for g in gradients)


if __name__ == "__main__":
    main()
