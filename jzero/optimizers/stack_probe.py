"""Compares a caller's optimizer on a layer stack with itself on the layers, in tiny arrays."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jzero.errors import some_of
from jzero.tree import PyTree, named

SIZE, STEPS, CLOSE = 2, 2, 1e-4  # of each dimension; updates; the difference that is more than rounding
FAST = {"xla_backend_optimization_level": 0}


def stack_warning(tx: optax.GradientTransformation, params: PyTree) -> str:
    """Warn of an optimizer whose updates of stacked parameters are not those of their layers; "" if they are.

    An optimizer that cannot take the layers as parameters (its masks are trees, say), or that draws random numbers, is
    not compared.

    Args:
      tx: the optimizer.
      params: the trained parameters {"ends", "stack"}: anything that has a shape.
    """
    leaves, tree = jax.tree.flatten(params)
    with contextlib.suppress(Exception), jax.default_device(_host()):
        if names := _misread(tx, tree, tuple(tuple(x.shape) for x in leaves)):
            return (
                f"the optimizer passed in does not update {some_of(names, 3)} layer by layer: it sees each "
                "parameter of the layer stack as one array [layers, ...], so that masks by ndim, norms and matrices "
                'are not those of a layer; pass jzero.optimizers.per_layer(tx, {"ends": False, "stack": True}), and '
                "leave clipping by the global norm outside of it (gradient_clipping in the config)"
            )
    return ""


def _host() -> jax.Device | None:
    """Return a device that runs small operations without compiling long; None, the default one, if there is none."""
    with contextlib.suppress(RuntimeError):
        return jax.local_devices(backend="cpu")[0]
    return None


@lru_cache(maxsize=8)  # a search for other configs makes many steps with one optimizer
def _misread(
    tx: optax.GradientTransformation, tree: jax.tree_util.PyTreeDef, shapes: tuple[tuple[int, ...], ...]
) -> list[str]:
    """List the stacked parameters whose updates differ from those of their layers, wherever the layers are."""
    rng = np.random.default_rng(0)
    values = [jax.tree.unflatten(tree, [_draw(rng, shape) for shape in shapes]) for _ in range(1 + STEPS)]
    # An optimizer may know the stack by its key: for a rate of its own, or to see its layers (`per_layer`). So the
    # layers count as read if they are so in the stack's place or among the other parameters.
    in_stack, in_ends = ([_split(x, place) for x in values] for place in ("stack", "ends"))
    whole, apart = _updates(tx, values, in_stack)
    stacked = _layers(whole["stack"], axis=1)
    if names := _differing(stacked, apart["stack"]["layers"]):
        names = _differing(stacked, _updates(tx, in_ends)[0]["ends"]["layers"])
    return [f"stack/{name}" for name in names]


def _draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Draw an array of few elements whose rows, and so layers, have norms of their own."""
    small = [min(size, SIZE) for size in shape]
    rows = small[:1] + [1] * (len(small) - 1)
    return np.asarray(10 ** rng.uniform(-2, 2, rows) * rng.normal(size=small), np.float32)


def _layers(stack: PyTree, axis: int = 0) -> dict[str, PyTree]:
    layers = jax.tree.leaves(stack)[0].shape[axis]
    return {str(k): jax.tree.map(partial(np.take, indices=k, axis=axis), stack) for k in range(layers)}


def _split(params: PyTree, place: str) -> PyTree:
    """Make each layer's parameters leaves of their own, in the stack's place or among the other parameters."""
    layers = {"layers": _layers(params["stack"])}
    if place == "stack":
        return {"ends": params["ends"], "stack": layers}
    return {"ends": {"ends": params["ends"], **layers}, "stack": {}}


def _updates(tx: optax.GradientTransformation, *runs: Sequence[PyTree]) -> list[PyTree]:
    """Run the optimizer on parameters, the first value of each run, with the others as gradients: updates [steps, ...].

    One program for all runs, which compiles fast: operation by operation it takes ten times as long.
    """

    update, leaves = optax.with_extra_args_support(tx).update, jax.tree.leaves

    def run(params: PyTree, gradients: PyTree) -> PyTree:
        def step(state: PyTree, gradient: PyTree) -> tuple[PyTree, PyTree]:
            return update(gradient, state, params, value=jnp.float32(1))[::-1]

        state = tx.init(params)
        if any(x.dtype == jnp.uint32 or jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves(state)):
            raise NotImplementedError("the noise of a leaf depends on the number of leaves")
        return jax.lax.scan(step, state, gradients)[1]

    stacked = [(first, jax.tree.map(lambda *xs: np.stack(xs), *rest)) for first, *rest in runs]
    program = jax.jit(lambda runs: [run(*each) for each in runs], compiler_options=FAST)
    return jax.device_get(program(stacked))


def _differing(stacked: PyTree, apart: PyTree) -> list[str]:
    """List the parameters of a layer with an update that differs by more than rounding."""
    names: dict[str, None] = {}
    for k, layer in stacked.items():
        others = named(apart[k])
        for name, x in named(layer).items():
            largest = np.abs(x[np.isfinite(x)]).max(initial=0)
            if not np.allclose(x, others[name], rtol=0, atol=CLOSE * largest, equal_nan=True):
                names[name] = None
    return list(names)
