"""The protocols that a model follows.

A model is anything with

    init(rng) -> params                                a pytree of arrays
    loss(params, batch, rng) -> scalar | Mean          rng is None in evaluation: no dropout

A scalar loss is averaged over micro-batches and replicas. With `jzero.Mean(sum, count)` the loss of the global batch is
the sum of sums divided by the sum of counts, for any micro-batch size; a count that depends on the parameters has its
gradient and costs one more forward pass. With `has_aux = True` on the model, `loss` returns (loss, {name: metric}); a
metric, too, is a scalar or a `Mean`. Parameters arrive in the compute dtype; the floats of the batch unchanged, or cast
as `auto_cast` in the config decides. For half precision cast those that are left: `x.astype(self.kernel.dtype)`.

These functions are traced several times and must be pure: do not keep an array from one call for the next.

A model with a layer stack keeps its parameters as {"ends": ..., "stack": ...}, each leaf of the stack with a
leading layer axis [L, ...], and also has

    prefix(ends, batch, rng) -> x                      x: any pytree of arrays
    block(layer, x, rng) -> x                          one layer: a slice of the stack
    suffix(ends, x, batch, rng) -> what `loss` returns

With these ZeRO-3 gathers, activation checkpointing recomputes and the pipeline cuts layer by layer.

Some leaves may be state that a forward pass replaces instead of an optimizer: BatchNorm's statistics, spectral norms,
counters. The model's `state: Collection[str]` names them (as in `tree.named`: "stack/norm/mean"). Then `loss`, or each
of `prefix`, `block` and `suffix`, returns (what it returns otherwise, {name: new value}), with the names of the tree
that it got. In training every micro-batch replaces the state, in order; in evaluation the new values are dropped. State
keeps its dtype. Replicas that compute different floats are averaged.

A model may have `predicting(fn) -> model`, for `jzero.make_eval_step`: a model whose `loss`, or `suffix`, returns
predictions [rows, ...], or what `fn` makes of them.

A model generates text (`jzero.step.generate`) if it has a cache of the tokens that it has seen, and

    make_cache(rows, length, dtype) -> cache            empty: a pytree of arrays [rows, ...] for `length` columns
    decode(params, tokens, column, padding, cache) -> (logits [rows, vocabulary] of each row's last token, cache)

The first call gets the prompts, tokens [rows, S] from column 0 on; each further one a token of every row, [rows, 1],
which is in column `column`. `padding` [rows] counts the columns at the left of each row that hold no token; None: there
are none. With a layer stack the cache is one layer's, and `decode` has three parts:

    decode_prefix(ends, tokens, column, padding) -> x
    decode_block(layer, x, cache) -> (x, cache)
    decode_suffix(ends, x) -> logits

For layers in the prefix a model has `make_prefix_cache(rows, length, dtype)`; then `decode_prefix` takes their cache,
too, and returns (x, cache).

In a pipeline a stage may read the same tokens several times in a row: an array of the cache whose shape depends on
`length` must then get the same values in the same columns. Others (the state of a recurrent layer) may accumulate.

A Flax module has these methods without the parameters; `decode_block` is a method `decode(x, cache)` of its `stack`.
With an attribute `vocab_size`, prompts with other tokens are refused.

A model may have `values`, parameters to start from instead of those of `init`; and `adopt(values) -> params`, which
converts what a caller passes as `params` (an nnx.State, Linen variables).

A model may have `names`, a `jzero.stored_names.StoredNames`: the names of its parameters in checkpoints and files. With
`one_key = True` its prefix and suffix get the same key, because they run the same module.

What the caller passes as `step(state, batch, extra)` reaches `loss`, or `prefix` and `suffix`, as a keyword argument
`extra`, whole on every device; without it the argument is absent.

Its `vocabulary: dict[str, int]` may map leaves of the ends ("embed", without "ends/") to their vocabulary dimension.
A pipeline divides them among its stages; prefix and suffix must use them through `jzero.pipeline.vocab_parallel` alone.

Any model may have `divided: dict[str, dict[str, int]]`: {"tensor": {regular expression: dimension}} says which
dimension of the matching parameters (in the stack: of one layer) that mesh axis divides. It changes what is moved, not
the result.

Any model may have `fused_matrices: dict[str, tuple]`, which maps leaves that hold several matrices
("stack/attention/qkv/kernel") to a dimension (in the stack: of one layer), the widths into which it is cut, and how
many dimensions before the matrices count them (experts; default 0). Each part, as [first dimension, all others], is one
matrix; Muon orthogonalises each for itself.

Any model may have `check_batch(batch)`, which raises a ConfigError for values that it cannot train on. It runs on the
host before the first step, with each process's rows of that step's batch as NumPy arrays; an error is
raised on all processes.

Any model may also have `report_notes(dtype) -> list[str]`, lines for the run report, given the compute dtype; and
`weights_layout() -> dict`, the names of its parameters in other libraries (`jzero.weights.name_map`). `from_flax` takes
a module's methods of these names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from jzero.errors import ConfigError, some_of
from jzero.kernels.fp8.quantized import Quantized
from jzero.tree import leading_dim, named, path_name

ENDS, STACK = "ends", "stack"
PREFIX, SUFFIX, WHOLE = "prefix", "suffix", "loss"  # with STACK: the scopes of the functions' operations
_PARTS = (("prefix", PREFIX), ("block", STACK), ("suffix", SUFFIX))


@runtime_checkable
class Model(Protocol):
    """Anything that can be initialised and has a loss; see the module's docstring."""

    def init(self, rng: jax.Array) -> Any: ...
    def loss(self, params: Any, batch: Any, rng: jax.Array | None) -> Any: ...


@runtime_checkable
class StackModel(Model, Protocol):
    """A model that is prefix + layer stack + suffix."""

    def prefix(self, ends: Any, batch: Any, rng: jax.Array | None) -> Any: ...
    def block(self, layer: Any, x: Any, rng: jax.Array | None) -> Any: ...
    def suffix(self, ends: Any, x: Any, batch: Any, rng: jax.Array | None) -> Any: ...


def check_model(model: Any) -> None:
    """Raise a ConfigError unless `model` follows the protocol."""
    if not isinstance(model, Model):
        raise ConfigError(
            f"model is {model.__name__ if isinstance(model, type) else type(model).__name__}, which has no init(rng) "
            "and loss(params, batch, rng): wrap a Flax module with jzero.from_flax(module, loss_fn), or with "
            "jzero.from_flax(module, criterion=criterion)"
        )


class ModelFacts(NamedTuple):
    """The facts of a model that its layout depends on.

    Attributes:
      shapes: the tree of its parameters, as ShapeDtypeStructs.
      has_stack: whether `shapes["stack"]` is a layer stack.
      state: the names of the leaves that the forward pass replaces.
      names: the parameters' names without a layer stack; None: they are those of the tree.
    """

    model: Model
    shapes: Any
    has_stack: bool
    state: Collection[str]
    names: Any

    @classmethod
    def of(cls, model: Model) -> ModelFacts:
        """Read the facts of a model; nothing is computed."""
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        names = getattr(model, "names", None)
        return cls(model, shapes, isinstance(model, StackModel), getattr(model, "state", ()), names)


def fold(rng: jax.Array | None, index: int | jax.Array) -> jax.Array | None:
    """Derive the `index`-th key below `rng`; None (evaluation) stays None."""
    return None if rng is None else jax.random.fold_in(rng, index)


def suffix_key(model: Any, rng: jax.Array | None, layers: int) -> jax.Array | None:
    """Derive the suffix's key: its own, or, with `one_key`, the prefix's, as the two run the same module."""
    return fold(rng, 0 if getattr(model, "one_key", False) else layers + 1)


class Inputs(NamedTuple):
    """A micro-batch, and what the caller passed to the step besides the batch (None: nothing)."""

    batch: Any
    extra: Any = None


def uniform(model: Any, f: Callable, scope: str) -> Callable:
    """Make `f(weights, ...)`, a function of a model, take `Inputs` for the batch and return (result, new state).

    Its operations are in the scope, by which profiles tell them apart.

    The new state is a tree like `weights`, with None in the place of everything else.
    """

    def run(weights: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        for arg in args:
            if isinstance(arg, Inputs) and arg.extra is not None:
                kwargs["extra"] = arg.extra
        args = tuple(arg.batch if isinstance(arg, Inputs) else arg for arg in args)
        with jax.named_scope(scope):
            result = f(weights, *args, **kwargs)
        new: dict[str, Any] = {}
        if getattr(model, "state", ()):
            if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[1], dict):
                raise ConfigError(
                    f"{model!r} has state, so each of its functions must return (result, {{name: new value}}); found "
                    f"{type(result).__name__}"
                )
            result, new = result
        values, shapes = named(new), {name: jnp.shape(x) for name, x in named(weights).items()}
        if unknown := sorted(values.keys() - shapes.keys()):
            raise ConfigError(f"{model!r}: new state {some_of(unknown)} has no leaf of that name in the parameters")
        for name, x in values.items():
            if jnp.shape(x) != shapes[name]:
                raise ConfigError(f"{model!r}: new state {name} has shape {jnp.shape(x)}, must have {shapes[name]}")
        state = jax.tree_util.tree_map_with_path(
            lambda path, _: values.get(path_name(path)), weights, is_leaf=lambda x: isinstance(x, Quantized)
        )
        return result, jax.lax.stop_gradient(state)

    return run


def stack_functions(model: StackModel) -> list[Callable]:
    """Return prefix, block and suffix, `uniform`."""
    return [uniform(model, getattr(model, name), scope) for name, scope in _PARTS]


def replace_state(tree: Any, state: Any) -> Any:
    """Replace the leaves of a tree for which `state`, a tree with None elsewhere, has a value."""
    return jax.tree.map(lambda new, old: old if new is None else new, state, tree, is_leaf=lambda x: x is None)


def stack_loss(model: StackModel, params: Any, batch: Any, rng: jax.Array | None) -> Any:
    """Compute the loss of a model with a stack directly: prefix, then every block, then suffix."""
    prefix, block, suffix = stack_functions(model)
    x, first = prefix(params[ENDS], batch, fold(rng, 0))
    layers = leading_dim(params[STACK])

    def layer(x: Any, item: Any) -> tuple[Any, Any]:
        index, weights = item
        return block(weights, x, fold(rng, index + 1))

    x, stack = jax.lax.scan(layer, x, (jnp.arange(layers), params[STACK]))
    result, last = suffix(replace_state(params[ENDS], first), x, batch, suffix_key(model, rng, layers))
    new = {ENDS: replace_state(first, last), STACK: stack}
    return (result, new) if getattr(model, "state", ()) else result


def loss_of_passes(model: Any) -> Callable:
    """Return (weights, inputs, key) -> (loss, new state), with the random numbers that the passes draw.

    A stack model's own `loss` may derive other keys than prefix, block and suffix get.
    """
    if isinstance(model, StackModel):
        return uniform(model, partial(stack_loss, model), WHOLE)
    return uniform(model, model.loss, WHOLE)


def weights_layout(model: Any) -> dict[str, Any] | None:
    """Look up the names of the model's parameters in other libraries; None if the model has no table."""
    return getattr(model, "weights_layout", lambda: None)()
