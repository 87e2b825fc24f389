"""NNX modules as models: a module becomes a pure function of its parameters."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jzero.adapters.constants import Constants, same
from jzero.adapters.methods import outputs_of, take_methods
from jzero.adapters.nnx_names import name_parts
from jzero.adapters.torch_habits import refuses_of_models
from jzero.communication.replicas import replica_axes
from jzero.errors import ConfigError
from jzero.model import ENDS, STACK, Inputs, stack_loss
from jzero.pictures.html import ParametersInHTML
from jzero.tree import named

Build = Callable[[nnx.Rngs], nnx.Module]
MASKED = (
    "from_flax: BatchNorm with a mask cannot be synchronised, since Flax averages the replicas' means whatever their "
    "masks: pass sync_batch_norm=False"
)
MODES = ("deterministic", "use_running_average")  # the attributes that nnx.Module.train and eval set


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
    """Build the module with ShapeDtypeStructs for arrays."""
    _register_tracers()
    module = nnx.eval_shape(lambda: build(nnx.Rngs(0)))
    _check_attributes(module)
    return module


def _check_attributes(module: nnx.Module) -> None:
    """Raise ConfigError if an attribute that NNX takes for a setting holds arrays, which are tracers now."""
    for path, node in nnx.iter_modules(module):
        for name, value in vars(node).items():
            if any(isinstance(x, jax.core.Tracer) for x in getattr(value, "__dict__", {}).values()):
                raise ConfigError(
                    f"from_flax: {_dotted((*path, name))} is a {type(value).__name__}, which is no nnx.Module, and "
                    "holds arrays: pass a built module, not a function of rngs, so that they are constants"
                )


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

    def arrays() -> dict[str, Any]:
        parts: Any = nnx.split(build(nnx.Rngs(0)), nnx.Variable, ...)
        return {_dotted(path): x for path, x in nnx.to_flat_state(parts[2])}

    return Constants(arrays)


class Apply:
    """An NNX module as a pure function of its parameters: `apply(params, rng) -> module`.

    `nnx.split` divides a module into its graph (static: classes, hyperparameters, modes) and its state: parameters,
    which the caller passes, with the other nnx.Variables (BatchNorm's statistics, ...) among them; random state, made
    from `rng` in each call; constants, which are closed over. Merging them is cheap and happens under the caller's
    trace, so the result is an ordinary module.

    Args:
      abstract: the result of `abstract_module`, or a part of it.
      constants: of the whole module.
      stack: the name of the part, if it is a layer stack. `params` are then one layer's, and random state and constants
        have no layer axis either.
      sync_batch_norm: whether BatchNorm's statistics in training are those of all replicas.

    Attributes:
      state: the names of the variables that a forward pass may replace.
    """

    def __init__(
        self, abstract: nnx.Module, constants: Constants, stack: str | None = None, *, sync_batch_norm: bool = True
    ):
        self.graph, self.evaluation = _graphs(abstract)
        parts: Any = nnx.split(abstract, nnx.RngState, nnx.Variable, ...)
        _, random, self.variables, plain = parts
        self.state = frozenset(named(nnx.to_pure_dict(nnx.filter_state(self.variables, nnx.Not(nnx.Param)))))
        if sync_batch_norm:
            for path, layer in nnx.iter_modules(abstract):
                if isinstance(layer, nnx.BatchNorm) and layer.axis_name is not None:
                    raise ConfigError(
                        f"from_flax: {_dotted(path)} has axis_name = {layer.axis_name!r}: leave it out, since jzero "
                        "synchronises BatchNorm over all replicas"
                    )
        self.sync_batch_norm = sync_batch_norm
        self.random_names = frozenset(named(nnx.to_pure_dict(random)))
        self.random, self.random_tree = jax.tree.flatten(random)
        if stack:
            self.random = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in self.random]
        self.paths, self.constants, self.stack = [path for path, _ in nnx.to_flat_state(plain)], constants, stack

    def __call__(self, params: Any, rng: jax.Array | None = None) -> Any:
        variables = jax.tree.map(lambda v: v, self.variables)
        nnx.replace_by_pure_dict(variables, params)
        base = jax.random.key(0) if rng is None else rng
        random = [_random(base, i, x) for i, x in enumerate(self.random)]
        graph = self.evaluation if rng is None else self.graph
        module = nnx.merge(graph, variables, jax.tree.unflatten(self.random_tree, random), self._merged_constants())
        for _, layer in nnx.iter_modules(module):
            if not isinstance(layer, nnx.BatchNorm):
                continue
            if layer.dtype is None:
                promote = partial(_promote_without_statistics, layer.promote_dtype)
                layer.promote_dtype = promote  # type: ignore[assignment]
            if rng is not None and self.sync_batch_norm and replica_axes():
                layer.axis_name = replica_axes()  # type: ignore[assignment]
                object.__setattr__(layer, "__class__", _without_mask(type(layer)))  # nnx's would record it
        name_parts(module)
        return module

    def with_new_state(self, module: Any, result: Any) -> Any:
        """Pair the result of a function of `module` with the state after it, if there is state; see `jzero.model`."""
        if not self.state:
            return result
        after = named(nnx.to_pure_dict(nnx.state(module, nnx.Variable)))
        return result, {name: after[name] for name in self.state}

    def _merged_constants(self) -> Any:
        """Return this part's constants in the form that nnx.merge takes."""
        if not self.paths:
            return nnx.State({})
        values = self.constants.values
        if self.stack is None:
            return nnx.from_flat_state({path: values[_dotted(path)] for path in self.paths})
        names = {path: _dotted((self.stack, *path)) for path in self.paths}
        return nnx.from_flat_state({path: _of_one_layer(name, values[name]) for path, name in names.items()})

    @property
    def structure(self) -> Any:
        """A value that is equal for modules that differ only in their parameters' values."""
        return self.graph, self.constants.fingerprint if self.paths else None


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


def _promote_without_statistics(promote: Callable, arrays: tuple, **options: Any) -> tuple:
    """Promote the input of a BatchNorm with its scale and bias, as in Linen.

    The running statistics are float32 in half precision too. NNX promotes the input with them, and so all that follows.
    """
    x, mean, var, scale, bias = arrays
    x, scale, bias = promote((x, scale, bias), **options)
    return x, mean, var, scale, bias


def _graphs(module: nnx.Module) -> tuple[Any, Any]:
    """Return the module's graph in training and in evaluation.

    `nnx.Module.train` switches everything on. A layer that its constructor switched off (`deterministic=True`) stays
    off.
    """
    nodes = [node for _, node in nnx.iter_modules(module)]
    off = [(node, name) for node in nodes for name in MODES if getattr(node, name, None) is True]
    module.eval()
    evaluation = nnx.graphdef(module)
    module.train()
    for node, name in off:
        setattr(node, name, True)
    return nnx.graphdef(module), evaluation


def _random(base: jax.Array, i: int, like: Any) -> jax.Array:
    """Make the i-th leaf of the random state: a count, or a key below `base`, split to the shape from nnx.vmap."""
    if not jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jnp.zeros(like.shape, like.dtype)
    key = jax.random.fold_in(base, i)
    return jax.random.split(key, like.shape) if like.shape else key


def _of_one_layer(name: str, constant: Any) -> Any:
    """Drop a constant's layer axis. All layers must hold the same values, because a block is one program."""
    if isinstance(constant, jax.core.Tracer):  # only shapes are wanted
        return constant[0]
    with jax.ensure_compile_time_eval():
        if not same(constant, constant[:1]):
            raise ConfigError(
                f"from_flax: the constant {name} {constant.dtype}{list(constant.shape)} differs between the layers: "
                "make it an nnx.Param and name it in frozen_parameters"
            )
        return constant[0]


def _dotted(path: tuple) -> str:
    return ".".join(map(str, path))


def predictor(fn: Callable | None) -> Callable:
    """Make a loss function of (module, batch, rng) that returns `fn(module, batch)`, or `module(batch)`."""
    if fn is None:
        return lambda module, batch, rng, **extra: outputs_of(module, batch, rng is not None)
    return lambda module, batch, rng, **extra: fn(module, batch, **taken(fn, extra))


def taken(method: Callable, extra: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments that a method takes: `prefix` and `suffix` both may, but need not, take `extra`."""
    return {name: value for name, value in extra.items() if name in inspect.signature(method).parameters}


def pure_values(values: Any, random: frozenset[str]) -> Any:
    """Return the variables of a module, an nnx.State or a pure dict as a pure dict, without the random state."""
    if isinstance(values, nnx.Module):
        values = nnx.state(values)
    if isinstance(values, nnx.State):
        return nnx.to_pure_dict(nnx.filter_state(values, nnx.All(nnx.Variable, nnx.Not(nnx.RngState))))
    if not isinstance(values, dict) or random.isdisjoint(named(values)):
        return values
    leaves = flatten_dict(values)
    return unflatten_dict({path: x for path, x in leaves.items() if "/".join(map(str, path)) not in random})


@refuses_of_models
class NNXModel(ParametersInHTML):
    """An NNX module and a loss function as a model."""

    def __init__(
        self, build: Build, abstract: nnx.Module, loss_fn: Callable, has_aux: bool = False, sync_batch_norm: bool = True
    ):
        self.build, self.loss_fn, self.has_aux, self.name = build, loss_fn, has_aux, type(abstract).__name__
        self.module = Apply(abstract, constants_of(build), sync_batch_norm=sync_batch_norm)
        self.state = self.module.state
        take_methods(self, abstract)

    def __repr__(self) -> str:
        return f"from_flax({self.name})"

    def init(self, rng: jax.Array) -> Any:
        return self.adopt(self.build(nnx.Rngs(rng)))

    def adopt(self, values: Any) -> Any:
        """Convert a module, an nnx.State or a pure dict to the model's parameters."""
        return pure_values(values, self.module.random_names)

    def predicting(self, fn: Callable | None) -> NNXModel:
        """Return the model with `fn(module, batch)`, or `module(batch)`, in the place of the loss."""
        other = copy.copy(self)
        other.loss_fn, other.has_aux = predictor(fn), False
        return other

    def loss(self, params: Any, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
        module = self.module(params, rng)
        return self.module.with_new_state(module, self.loss_fn(module, batch, rng, **extra))

    def decode(self, params: Any, *args: Any) -> Any:
        return self.module(params).decode(*args)


@refuses_of_models
class NNXStackModel(ParametersInHTML):
    """An NNX module with `prefix`, `stack` and `suffix` as a model with a layer stack."""

    def __init__(self, build: Build, abstract: Any, has_aux: bool = False, sync_batch_norm: bool = True):
        self.build, self.has_aux, self.name = build, has_aux, repr(getattr(abstract, "config", type(abstract).__name__))
        apply = partial(Apply, constants=constants_of(build), sync_batch_norm=sync_batch_norm)
        self.whole, self.layer = apply(abstract), apply(abstract.stack, stack=STACK)
        take_methods(self, abstract)
        self.end: Callable | None = None  # instead of the module's suffix
        self.has_outputs = hasattr(abstract, "outputs")
        self.takes_extra = any(taken(f, {"extra": None}) for f in (abstract.prefix, abstract.suffix))
        stack = abstract.stack
        del abstract.stack
        self.ends = apply(abstract)
        states = ((ENDS, self.ends), (STACK, self.layer))
        self.state = frozenset(f"{part}/{name}" for part, apply in states for name in apply.state)
        abstract.stack = stack  # for the methods taken above, which belong to this object

    def __repr__(self) -> str:
        return f"from_flax({self.name})"

    def module(self, params: Any, rng: jax.Array | None = None) -> Any:
        return self.whole({**params[ENDS], STACK: params[STACK]}, rng)

    def init(self, rng: jax.Array) -> Any:
        return self.adopt(self.build(nnx.Rngs(rng)))

    def adopt(self, values: Any) -> Any:
        """Convert a module, an nnx.State or a pure dict to the model's parameters."""
        params = pure_values(values, self.whole.random_names)
        converted = not isinstance(values, nnx.Module | nnx.State) and set(params) == {ENDS, STACK}
        if converted or STACK not in params:
            return params
        return {STACK: params[STACK], ENDS: {name: x for name, x in params.items() if name != STACK}}

    def prefix(self, ends: Any, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
        if extra and not self.takes_extra:
            raise ConfigError("extra: neither prefix nor suffix takes it; write def suffix(self, x, batch, extra)")
        return self._call(self.ends, ends, rng, lambda module: module.prefix(batch, **taken(module.prefix, extra)))

    def block(self, layer: Any, x: Any, rng: jax.Array | None) -> Any:
        return self._call(self.layer, layer, rng, lambda module: module(x))

    def suffix(self, ends: Any, x: Any, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
        end = self.end
        if end is not None:
            return self._call(self.ends, ends, rng, lambda module: end(module, x, batch, **taken(end, extra)))
        return self._call(self.ends, ends, rng, lambda module: module.suffix(x, batch, **taken(module.suffix, extra)))

    def predicting(self, fn: Callable | None) -> NNXStackModel:
        """Return the model with `fn(module, x, batch)`, or `module.outputs(x, batch)`, in the place of the suffix."""
        if fn is None and not self.has_outputs:
            raise ConfigError(
                f"{self!r} has no predictions: give the module a method outputs(x, batch), with x the output of its "
                "stack, or pass a function of (module, x, batch) to jzero.make_eval_step"
            )
        other = copy.copy(self)
        other.end, other.has_aux = fn or (lambda module, x, batch: module.outputs(x, batch)), False
        return other

    def decode_prefix(self, ends: Any, tokens: Any, column: Any, padding: Any) -> Any:
        return self.ends(ends).decode_prefix(tokens, column, padding)

    def decode_block(self, layer: Any, x: Any, cache: Any) -> Any:
        return self.layer(layer).decode(x, cache)

    def decode_suffix(self, ends: Any, x: Any) -> Any:
        return self.ends(ends).decode_suffix(x)

    def _call(self, apply: Apply, weights: Any, rng: jax.Array | None, f: Callable) -> Any:
        module = apply(weights, rng)
        result = f(module)
        if not self.state:
            return result
        return apply.with_new_state(module, result) if apply.state else (result, {})

    def loss(self, params: Any, batch: Any, rng: jax.Array | None, **extra: Any) -> Any:
        return stack_loss(self, params, Inputs(batch, **extra), rng)
