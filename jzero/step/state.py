"""The state of a run: its contents, its sharding, its initial value."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jzero._compat.kernels import threefry_kernel
from jzero.errors import ConfigError, some_of
from jzero.kernels.fp8 import delayed_scaling
from jzero.layout import offload
from jzero.layout.sharding import ParamLayout, optimizer_layouts, specs, trainable
from jzero.loss_scale import LossScale
from jzero.mesh import is_gpu, shardings
from jzero.pictures import html
from jzero.step.setup import Setup
from jzero.stored_names import StoredNames
from jzero.tree import PyTree, cast, differences, named, partition, path_name

LARGE = 2**30  # bytes on the host that one program makes of a new state
DRAWN = 2**26  # elements of a parameter that the kernel for random bits draws; it takes 16 bytes for each meanwhile
RUN_KEY = 2**31 - 1  # folded into `init`'s key to make the steps' key; no model draws this many parameters


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything a run carries from step to step; a pytree, sharded by `TrainStep.state_shardings`.

    `step` counts the calls of the train step; `loss_scale.skipped` counts the calls that changed nothing because a
    gradient was not finite. `params` are the master weights. `rng` is the run's key, the step folds `step` into it.
    `fp8` has the maxima of former steps by weight, with `fp8.recipe` "delayed". `names` are other names in checkpoints.
    """

    step: jax.Array
    params: Any
    opt_state: Any
    loss_scale: LossScale
    rng: jax.Array
    fp8: delayed_scaling.Histories = dataclasses.field(default_factory=dict)
    names: StoredNames | None = dataclasses.field(default=None, metadata={"static": True})

    def __repr__(self) -> str:
        leaves = jax.tree.leaves(self.params)
        known = not isinstance(self.step, jax.ShapeDtypeStruct)
        consumed = isinstance(self.step, jax.Array) and self.step.is_deleted()
        numbers = "given to an earlier step, " if consumed else f"step={int(self.step)}, " if known else ""
        return f"TrainState({numbers}parameters={sum(x.size for x in leaves):,} in {len(leaves)} leaves)"

    def _repr_html_(self) -> str:
        """Show every leaf in a notebook: shape, dtype, spec, and bytes per device."""
        return f"<div><code>{html.escape(repr(self))}</code></div>" + html.leaves(self)


def check_alive(state: TrainState | None) -> None:
    """Raise a ConfigError for a state that a step has consumed: the runtime would only name a deleted buffer."""
    if state is None:
        raise ConfigError("there is no state: reading a checkpoint into its place failed; load another one")
    if state.step.is_deleted():
        raise ConfigError(
            "this state was given to an earlier step, which replaced it: write state, metrics = step(state, batch)"
        )


def check_key(rng: Any) -> jax.Array:
    """Return a random key, also for one of the older kind; raise a ConfigError for anything else."""
    dtype = getattr(rng, "dtype", None)
    if dtype == jnp.uint32 and jnp.shape(rng) == (2,):  # jax.random.PRNGKey(0)
        return jax.random.wrap_key_data(rng)
    if dtype is None or not jnp.issubdtype(dtype, jax.dtypes.prng_key) or jnp.shape(rng):
        raise ConfigError(f"rng = {rng!r}: must be one key; write jax.random.key(0)")
    return rng


class States:
    """A factory for the states of a train step.

    Attributes:
      shapes, specs, shardings: of a `TrainState`.
      on_host: a `TrainState` of bools: whether a leaf lies in host memory. The sharding of an absent GPU cannot tell.
    """

    def __init__(self, setup: Setup):
        self._setup = setup
        self.shapes = jax.eval_shape(self._new, jax.random.key(0))
        everywhere = jax.tree.map(lambda _: PartitionSpec(), self.shapes)
        params, opt_state = setup.layouts, optimizer_layouts(self.shapes.opt_state, setup.layouts)
        self.specs = dataclasses.replace(
            everywhere, params=specs(params), opt_state=specs(opt_state), fp8=setup.histories
        )
        self.on_host = dataclasses.replace(
            jax.tree.map(lambda _: False, self.shapes),
            params=jax.tree.map(lambda layout: layout.on_host.master, params),
            opt_state=jax.tree.map(lambda layout: layout.on_host.moments, opt_state),
        )
        self.shardings = jax.tree.map(
            lambda there, s: s.with_memory_kind(offload.HOST) if there else s,
            self.on_host, shardings(setup.mesh, self.specs),
        )  # fmt: skip
        self._init = self._in_parts(self._new, lambda state: state)
        # Without the parameters, which are there already: only what is around them is made.
        without = partial(dataclasses.replace, params=None)
        self._init_around = self._in_parts(lambda params, rng: without(self._around(params, rng)), without)

    def _new(self, rng: jax.Array) -> TrainState:
        return self._around(self._stored(self._setup.model.init(rng)), rng)

    def _stored(self, params: PyTree) -> PyTree:
        """Cast trained parameters to the dtype of the masters, frozen ones to the compute dtype; leave state alone."""
        precision = self._setup.precision

        def store(layout: ParamLayout, x: jax.Array) -> jax.Array:
            return x if layout.state else cast(x, precision.master if layout.trainable else precision.compute)

        return jax.tree.map(store, self._setup.layouts, params)

    def _around(self, params: PyTree, rng: jax.Array) -> TrainState:
        """Make a new state around these parameters."""
        opt_state = self._setup.optimizer.tx.init(
            offload.on_device(partition(params, trainable(self._setup.layouts))[0])
        )
        return TrainState(
            jnp.zeros((), jnp.int32), params, opt_state, self._loss_scale(), jax.random.fold_in(rng, RUN_KEY),
            self._histories(params), getattr(self._setup.model, "names", None),
        )  # fmt: skip

    def _histories(self, params: PyTree) -> delayed_scaling.Histories:
        names, steps = self._setup.histories, self._setup.config.fp8.amax_history_len
        weights = offload.on_device({name: x for name, x in named(params).items() if name in names})
        return {name: delayed_scaling.initial_history(x, steps) for name, x in weights.items()}

    def _loss_scale(self) -> LossScale:
        return self._setup.precision.scaler.init(len(self._setup.gradient_names))

    def init(self, rng: jax.Array, params: PyTree = None, donate: bool = False) -> TrainState:
        """Make a new state; see `TrainStep.init`."""
        # Programs make it, sharded from the start: arrays made on one device and then moved would need its memory.
        offload.check_pinned(self.host_bytes, self._setup.mesh)
        rng, model = check_key(rng), self._setup.model
        values, adopt = getattr(model, "values", None), getattr(model, "adopt", lambda params: params)
        if params is None:
            params, donate = values, False
        if params is None:
            return self._init(rng)
        if isinstance(params, str | os.PathLike):
            from jzero.checkpoint.orbax_trees import read_params  # here, because Orbax takes a second to import

            params = read_params(params, model, self.shapes.params, self.shardings.params)
        else:
            params = self._fit(self._filled(adopt(params), None if values is None else adopt(values), rng), donate)
        return dataclasses.replace(self._init_around(params, rng), params=params)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory per device."""
        return sum(self._host_bytes(lambda state: state))

    def _host_bytes(self, of_state: Callable[[TrainState], PyTree]) -> list[int]:
        """List the bytes of every leaf that each device keeps in host memory."""
        leaves = (jax.tree.leaves(of_state(tree)) for tree in (self.shapes, self.shardings, self.on_host))
        return [
            prod(to.shard_shape(x.shape)) * x.dtype.itemsize if on_host else 0
            for x, to, on_host in zip(*leaves, strict=True)
        ]

    def _in_parts(self, make: Callable, of_state: Callable[[TrainState], PyTree]) -> Callable:
        """Compile `make` as one program, or as one for every `LARGE` bytes that go to the host.

        Args:
          make: its results are a part of a state.
          of_state: takes this part from a state.
        """
        # One program would hold all of its results on the devices before they go to the host.
        to, sizes = jax.tree.leaves(of_state(self.shardings)), self._host_bytes(of_state)
        parts, size = [[i for i, n_bytes in enumerate(sizes) if not n_bytes]], 0
        for i, n_bytes in enumerate(sizes):
            if n_bytes:
                if size and size + n_bytes > LARGE:
                    parts.append([])
                    size = 0
                parts[-1].append(i)
                size += n_bytes

        def program(part: list[int]) -> Callable:
            def some(*args: Any) -> list[jax.Array]:
                leaves = jax.tree.leaves(make(*args))
                return [leaves[i] for i in part]

            return self._setup.jit(some, out_shardings=[to[i] for i in part])

        programs = [program(part) for part in parts]

        def run(*args: Any) -> PyTree:
            made: list[Any] = [None] * len(to)
            for part, program in zip(parts, programs, strict=True):
                with self._draws():
                    new = program(*args)
                if len(parts) > 1:
                    jax.block_until_ready(new)  # then the devices are free for the next part
                for i, x in zip(part, new, strict=True):
                    made[i] = x
            return jax.tree.unflatten(jax.tree.structure(of_state(self.shapes)), made)

        return run

    def _draws(self) -> contextlib.AbstractContextManager[object]:
        """Return the context of the programs that draw parameters: on one GPU, with JAX's kernel for random bits.

        A Whisper of Flax layers has 264 draws, whose program XLA compiles in 65 s, and in 8 with the kernel (an H200).
        The kernel's operands and results are arrays in memory, and XLA does not divide it.
        """
        mesh = self._setup.mesh
        few = all(prod(x.shape) <= DRAWN for x in jax.tree.leaves(self.shapes.params))
        return threefry_kernel() if is_gpu(mesh) and mesh.size == 1 and few else contextlib.nullcontext()

    def _filled(self, params: PyTree, values: PyTree, rng: jax.Array) -> PyTree:
        """Replace None by the parameter in `values`, or by that of `init`; only these parameters are made."""
        model, is_none = self._setup.model, lambda x: x is None
        paths = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_none)[0]
        missing = {path_name(path) for path, x in paths if x is None} & named(self.shapes.params).keys()
        if not missing:
            return params

        def chosen(params: PyTree) -> dict[str, Any]:
            return {name: x for name, x in named(params).items() if name in missing}

        make = self._in_parts(lambda rng: chosen(self._stored(model.init(rng))), lambda state: chosen(state.params))
        start = make(rng) if values is None else {name: jnp.array(x) for name, x in chosen(values).items()}
        return jax.tree_util.tree_map_with_path(
            lambda path, x: start.get(path_name(path)) if x is None else x, params, is_leaf=is_none
        )

    def _fit(self, params: PyTree, donate: bool) -> PyTree:
        """Shard parameters like this step's state, in its dtypes; copy them unless `donate`."""
        own = self.shapes.params
        params = jax.tree.map(lambda x: x if hasattr(x, "shape") else np.asarray(x), params)
        here, there = ({name: x.shape for name, x in named(tree).items()} for tree in (own, params))
        if problems := differences(there, here):
            raise ConfigError(f"init(rng, params): the params are another model's: {some_of(problems)}")

        def fit(x: Any, like: Any, to: Any) -> jax.Array:
            # The first step deletes the state's buffers; without a copy it would delete the caller's too, even NumPy's.
            if isinstance(x, jax.Array) and not donate:
                x = jnp.copy(x)  # may_alias does not hold for the first copy of an array that device_put replicates
            alias = {"donate": True} if donate else {"may_alias": False}
            return jax.device_put(x if x.dtype == like.dtype else x.astype(like.dtype), to, **alias)

        return jax.tree.map(fit, params, own, self.shardings.params)

    def new_loss_scale(self, skipped: jax.Array) -> LossScale:
        """Make a fresh loss scale; see `TrainStep.new_loss_scale`."""
        new = jax.jit(
            lambda skipped: dataclasses.replace(self._loss_scale(), skipped=skipped),
            out_shardings=self.shardings.loss_scale,
        )
        return new(skipped)
