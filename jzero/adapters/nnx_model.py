"""NNX modules: as pure functions of their parameters, and as models."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jzero._compat import make_sharding_errors_cheap, subclass
from jzero.adapters.constants import Constants, same
from jzero.adapters.layer_paths import Key
from jzero.adapters.methods import ModuleModel, Outcome, add_state, changed, copy_description, stack_outputs, with_taken
from jzero.errors import ConfigError, some_of
from jzero.layout.replicas import replica_axes
from jzero.model import ENDS, STACK, Inputs, stack_loss
from jzero.tree import PyTree, named

Build = Callable[[nnx.Rngs], nnx.Module]
MASKED = (
    "from_flax: BatchNorm with a mask cannot be synchronised, since Flax averages the replicas' means whatever their "
    "masks: pass sync_batch_norm=False"
)
MODES = ("deterministic", "use_running_average")  # the attributes that nnx.Module.train and eval set
VALUES = nnx.All(nnx.Variable, nnx.Not(nnx.RngState))


def builder(module_fn: Callable) -> Build:
    """Wrap `module_fn` as a function of rngs, whether it takes them by position or by keyword."""
    function: Any = module_fn
    while isinstance(function, functools.partial):
        function = function.func
    function = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    parameter = inspect.signature(function).parameters.get("rngs")
    by_keyword = parameter is not None and parameter.kind is not parameter.POSITIONAL_ONLY

    def build(rngs: nnx.Rngs) -> nnx.Module:
        # Without this, Flax requires a mesh for parameters with sharding annotations. jzero shards parameters itself.
        with nnx.use_eager_sharding(False):
            return module_fn(rngs=rngs) if by_keyword else module_fn(rngs)

    return build


def abstract_module(build: Build) -> Any:
    """Build the module with ShapeDtypeStructs for arrays.

    Raises:
      ConfigError: an attribute that NNX takes for a setting holds arrays, which are tracers now.
    """
    _register_tracers()
    make_sharding_errors_cheap()
    module = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    for path, node in nnx.iter_modules(module):
        for name, value in vars(node).items():
            if any(isinstance(x, jax.core.Tracer) for x in getattr(value, "__dict__", {}).values()):
                raise ConfigError(
                    f"from_flax: {part_name((*path, name))} is a {type(value).__name__}, which is no nnx.Module, and "
                    "holds arrays: pass a built module, not a function of rngs, so that they are constants"
                )
    return module


@functools.cache
def _register_tracers() -> None:
    """Make Flax recognise tracers as arrays.

    Flax 0.12 tests attributes with `isinstance(x, typing.Union[jax.Array, ...])`, which compares classes on Python 3.11
    and misses tracers. It then treats a traced constant as a static attribute: the tracer outlives its trace, and
    nnx.vmap does not stack it.
    """

    def register(x: jax.Array) -> jax.Array:
        nnx.register_data_type(type(x))
        return x

    jax.eval_shape(lambda x: register(jax.vmap(register)(x)), jax.ShapeDtypeStruct((1,), jnp.float32))


def constants_of(build: Build) -> Constants:
    """Return the array attributes of a module that are not nnx.Variables, with their values under `nnx.Rngs(0)`."""

    def arrays() -> dict[str, jax.Array]:
        parts: Any = nnx.split(build(nnx.Rngs(0)), nnx.Variable, ...)
        return {part_name(path): x for path, x in nnx.to_flat_state(parts[2])}

    return Constants(arrays)


def variables(module: nnx.Module, kind: Any = nnx.Variable) -> dict[str, Any]:
    """Map the names of a module's variables of a kind to their values."""
    return named(nnx.to_pure_dict(nnx.state(module, kind)))


def part_name(path: tuple) -> str:
    """Format the path of a part of a module: `encoder.layers.0`."""
    return ".".join(map(str, path))


class Apply:
    """An NNX module, or a part of one, as a pure function of its parameters: `apply(params, rng) -> module`.

    `nnx.split` divides a module into its graph (static: classes, hyperparameters, modes) and its state: parameters,
    which the caller passes, with the other nnx.Variables (BatchNorm's statistics, ...) among them; random state, made
    from `rng` in each call; constants, which are closed over. Merging them is cheap and happens under the caller's
    trace, so the result is an ordinary module.

    Args:
      abstract: the result of `abstract_module`, or a part of it.
      constants: of the whole module.
      keys: the path of the part in the module. Several: the paths of equal layers, `abstract` is one of them.
      stacked: whether the part is a layer stack. `params` are then one layer's, and random state and constants have no
        layer axis either.
      sync_batch_norm: whether BatchNorm's statistics in training are those of all replicas.

    Attributes:
      state: the names of the variables that a forward pass may replace.
      fixed: the paths of the layers that stay in evaluation mode.
    """

    def __init__(
        self, abstract: nnx.Module, constants: Constants, keys: Sequence[Key] = ((),), stacked: bool = False, *,
        sync_batch_norm: bool = True,
    ):  # fmt: skip
        self.graph, self.evaluation, self.fixed = _graphs(abstract)
        parts: Any = nnx.split(abstract, nnx.RngState, nnx.Variable, ...)
        _, random, self.variables, plain = parts
        self.state = frozenset(variables(abstract, nnx.All(VALUES, nnx.Not(nnx.Param))))
        for path, layer in nnx.iter_modules(abstract):
            if sync_batch_norm and isinstance(layer, nnx.BatchNorm) and layer.axis_name is not None:
                raise ConfigError(
                    f"from_flax: {part_name(path)} has axis_name = {layer.axis_name!r}: leave it out, since jzero "
                    "synchronises BatchNorm over all replicas"
                )
        self.sync_batch_norm, self.constants, self.keys, self.stacked = sync_batch_norm, constants, keys, stacked
        self.random_names = frozenset(variables(abstract, nnx.RngState))
        self.random, self.random_tree = jax.tree.flatten(random)
        if stacked:
            self.random = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in self.random]
        self.paths = [path for path, _ in nnx.to_flat_state(plain)]

    def __call__(self, params: PyTree, rng: jax.Array | None = None) -> Any:
        variables = jax.tree.map(lambda v: v, self.variables)
        nnx.replace_by_pure_dict(variables, params)
        base = jax.random.key(0) if rng is None else rng
        random = jax.tree.unflatten(self.random_tree, [_random(base, i, x) for i, x in enumerate(self.random)])
        values = self.constants.values if self.paths else {}
        constants = nnx.from_flat_state({path: self._constant(values, path) for path in self.paths})
        module = nnx.merge(self.evaluation if rng is None else self.graph, variables, random, constants)
        for _, layer in nnx.iter_modules(module):
            if isinstance(layer, nnx.BatchNorm):
                _set_up_batch_norm(layer, replica_axes() if rng is not None and self.sync_batch_norm else ())
        name_parts(module)
        return module

    def run(self, params: PyTree, rng: jax.Array | None, f: Callable[[Any], PyTree]) -> Outcome:
        """Compute `f(module)`, and the state after it."""
        module = self(params, rng)
        result = f(module)
        after = variables(module) if self.state else {}
        return result, {name: after[name] for name in self.state}

    def _constant(self, values: dict[str, Any], path: Key) -> Any:
        """Find a constant of this part, of one layer. All must hold the same values, because a block is one program."""
        first, *others = ((key, values[part_name((*key, *path))]) for key in self.keys)
        key, constant = first
        if isinstance(constant, jax.core.Tracer):  # only shapes are wanted
            return constant[0] if self.stacked else constant
        with jax.ensure_compile_time_eval():  # under any trace
            differing = "the layers" if self.stacked and not same(constant, constant[:1]) else ""
            for other, value in others:
                if not same(constant, value):
                    differing = f"{part_name(key)} and {part_name(other)}"
            if not differing:
                return constant[0] if self.stacked else constant
        name = f"{part_name((*key, *path))} {constant.dtype}{list(constant.shape)}" if self.stacked else part_name(path)
        raise ConfigError(
            f"from_flax: the constant {name} differs between {differing}: make it an nnx.Param and name it in "
            "frozen_parameters"
        )

    @property
    def structure(self) -> Any:
        """A value that is equal for modules that differ only in their parameters' values."""
        return self.graph, self.constants.fingerprint if self.paths else None


def _graphs(module: nnx.Module) -> tuple[Any, Any, list[str]]:
    """Return the module's graph in training and in evaluation, and the paths of the layers that stay off.

    `nnx.Module.train` switches everything on. A layer that its constructor switched off (`deterministic=True`, or
    `use_running_average=True` for a frozen BatchNorm) stays off.
    """
    nodes = list(nnx.iter_modules(module))
    off = [(path, node, name) for path, node in nodes for name in MODES if getattr(node, name, None) is True]
    module.eval()
    evaluation = nnx.graphdef(module)
    module.train()
    for _, node, name in off:
        setattr(node, name, True)
    return nnx.graphdef(module), evaluation, [part_name(path) for path, _, _ in off]


def _random(base: jax.Array, i: int, like: Any) -> jax.Array:
    """Make the i-th leaf of the random state: a count, or a key below `base`, split to the shape from nnx.vmap."""
    if not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jnp.zeros(like.shape, like.dtype)
    key = jax.random.fold_in(base, i)
    return jax.random.split(key, like.shape) if like.shape else key


# ------------------------------------------------------------------ classes of parts, changed while they run
# `object.__setattr__(part, "__class__", cls)`: nnx.Module.__setattr__ would record the class as state.


def name_parts(module: nnx.Module) -> None:
    """Let each part of a module that is called run in a `jax.named_scope` with its name: "fc1", "layers/3".

    Traces, programs and profiles then have the names, as in Linen. A name is the path from the part that calls it, so
    scopes nest as the calls do.
    """
    called = {path: part for path, part in nnx.iter_modules(module) if callable(part)}
    for path, part in called.items():
        if path:
            above = next(n for n in reversed(range(len(path))) if n == 0 or path[:n] in called)
            object.__setattr__(part, "__class__", _named(type(part), "/".join(map(str, path[above:]))))


@functools.cache
def _named(cls: Any, name: str) -> type:
    """Make a class like `cls` whose calls run in a scope."""

    @functools.wraps(cls.__call__)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with jax.named_scope(name):
            return cls.__call__(self, *args, **kwargs)

    try:
        return with_call(cls, call)
    except Exception:  # a metaclass or `__init_subclass__` of the user's own refuses it; the part then has no name
        return cls


def with_call(cls: type, call: Callable) -> type:
    """Make a class like `cls` with another `__call__`."""
    names = ("__module__", "__qualname__", "__doc__")
    return subclass(cls, {"__call__": call, **{name: getattr(cls, name) for name in names}})


def _set_up_batch_norm(layer: Any, axes: tuple[str, ...]) -> None:
    """Let a BatchNorm average over the axes, and keep the dtype of its input."""
    if layer.dtype is None:
        layer.promote_dtype = partial(_promote_without_statistics, layer.promote_dtype)
    if axes:
        layer.axis_name = axes
        cls: type = type(layer)
        object.__setattr__(layer, "__class__", _without_mask(cls))


def _promote_without_statistics(promote: Callable, arrays: tuple, **options: Any) -> tuple:
    """Promote the input of a BatchNorm with its scale and bias, as in Linen.

    The running statistics are float32 in half precision too. NNX promotes the input with them, and so all that follows.
    """
    x, mean, var, scale, bias = arrays
    x, scale, bias = promote((x, scale, bias), **options)
    return x, mean, var, scale, bias


class _Unmasked(nnx.BatchNorm):
    """BatchNorm over the replicas, which Flax computes wrongly with a mask."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("mask") is not None:
            raise ConfigError(MASKED)
        return super().__call__(*args, **kwargs)


@functools.cache
def _without_mask(kind: type) -> type:
    """Put the check between a subclass of BatchNorm and BatchNorm, where it sees what the subclass passes on."""
    if issubclass(kind, _Unmasked):
        return kind
    return _Unmasked if kind is nnx.BatchNorm else type(kind.__name__, (kind, _Unmasked), {})


# ------------------------------------------------------------------ models


class NNXModel(ModuleModel):
    """An NNX module and a loss function as a model.

    Attributes:
      apply: the module as a function of its parameters.
    """

    def __init__(
        self, build: Build, abstract: nnx.Module, loss_fn: Callable, has_aux: bool = False, sync_batch_norm: bool = True
    ):
        self.build, self.loss_fn, self.has_aux, self.name = build, loss_fn, has_aux, type(abstract).__name__
        self.apply = Apply(abstract, constants_of(build), sync_batch_norm=sync_batch_norm)
        self.state = self.apply.state
        copy_description(self, abstract)
        if self.apply.fixed:
            notes: Callable = getattr(self, "report_notes", lambda dtype: [])
            line = "use_running_average or deterministic is true, as built, in training too"
            self.report_notes = lambda dtype: [*notes(dtype), f"{some_of(self.apply.fixed)}: {line}"]

    def init(self, rng: jax.Array) -> PyTree:
        return self.adopt(self.build(nnx.Rngs(rng)))

    def adopt(self, values: PyTree) -> PyTree:
        """Convert a module, an nnx.State or a pure dict to the model's parameters, without the random state."""
        if isinstance(values, nnx.Module):
            values = nnx.state(values)
        if isinstance(values, nnx.State):
            return nnx.to_pure_dict(nnx.filter_state(values, VALUES))
        random = self.apply.random_names
        if not isinstance(values, dict) or random.isdisjoint(named(values)):
            return values
        leaves = flatten_dict(values)
        return unflatten_dict({path: x for path, x in leaves.items() if "/".join(map(str, path)) not in random})

    def module(self, params: PyTree, rng: jax.Array | None = None) -> Any:
        return self.apply(params, rng)

    def run(self, params: PyTree, rng: jax.Array | None, f: Callable[[Any], PyTree]) -> Outcome:
        return self.apply.run(params, rng, f)


class NNXStackModel(NNXModel):
    """An NNX module with `prefix`, `stack` and `suffix` as a model with a layer stack."""

    end: Callable | None = None  # instead of the module's suffix

    def __init__(self, build: Build, abstract: Any, has_aux: bool = False, sync_batch_norm: bool = True):
        super().__init__(build, abstract, stack_outputs, has_aux, sync_batch_norm)
        self.name = repr(getattr(abstract, "config", self.name))
        self.takes_extra = any("extra" in inspect.signature(f).parameters for f in (abstract.prefix, abstract.suffix))
        apply = partial(Apply, constants=self.apply.constants, sync_batch_norm=sync_batch_norm)
        stack = abstract.stack
        self.layer = apply(stack, keys=((STACK,),), stacked=True)
        del abstract.stack
        self.ends = apply(abstract)
        abstract.stack = stack  # for the methods that describe the module, which belong to this object
        states = ((ENDS, self.ends), (STACK, self.layer))
        self.state = frozenset(f"{part}/{name}" for part, apply in states for name in apply.state)

    def adopt(self, values: PyTree) -> PyTree:
        params = super().adopt(values)
        converted = not isinstance(values, nnx.Module | nnx.State) and set(params) == {ENDS, STACK}
        if converted or STACK not in params:
            return params
        return {STACK: params[STACK], ENDS: {name: x for name, x in params.items() if name != STACK}}

    def module(self, params: PyTree, rng: jax.Array | None = None) -> Any:
        return self.apply({**params[ENDS], STACK: params[STACK]}, rng)

    def loss(self, params: PyTree, batch: PyTree, rng: jax.Array | None, **extra: PyTree) -> PyTree:
        return stack_loss(self, params, Inputs(batch, **extra), rng)

    def prefix(self, ends: PyTree, batch: PyTree, rng: jax.Array | None, **extra: PyTree) -> PyTree:
        if extra and not self.takes_extra:
            raise ConfigError("extra: neither prefix nor suffix takes it; write def suffix(self, x, batch, extra)")
        return add_state(self, *self.ends.run(ends, rng, lambda module: with_taken(extra, module.prefix, batch)))

    def block(self, layer: PyTree, x: PyTree, rng: jax.Array | None) -> PyTree:
        return add_state(self, *self.layer.run(layer, rng, lambda module: module(x)))

    def suffix(self, ends: PyTree, x: PyTree, batch: PyTree, rng: jax.Array | None, **extra: PyTree) -> PyTree:
        def call(module: Any) -> PyTree:
            return with_taken(extra, partial(self.end, module) if self.end else module.suffix, x, batch)

        return add_state(self, *self.ends.run(ends, rng, call))

    def predicting(self, fn: Callable | None) -> Self:
        """Return the model with `fn(module, x, batch)`, or `module.outputs(x, batch)`, in the place of the suffix."""
        return changed(self, end=fn or stack_outputs, has_aux=False)

    def decode_prefix(self, ends: PyTree, *args: PyTree) -> PyTree:
        return self.ends(ends).decode_prefix(*args)

    def decode_block(self, layer: PyTree, x: PyTree, cache: PyTree) -> tuple[PyTree, PyTree]:
        return self.layer(layer).decode(x, cache)

    def decode_suffix(self, ends: PyTree, x: PyTree) -> jax.Array:
        return self.ends(ends).decode_suffix(x)
