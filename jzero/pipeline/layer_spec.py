"""The layers of a `PipelineModule`: their specs, and each layer as pure functions of its parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from jzero.adapters.from_flax import from_flax
from jzero.adapters.nnx_model import part_name
from jzero.errors import ConfigError, some_of
from jzero.tree import PyTree


class LayerSpec:
    """The description of a layer, built when its parameters are needed: `typename(*args, **kwargs)`.

    An nnx module also gets `rngs=rngs`. Dropout is on in training only: jzero switches nnx modules between `train()`
    and `eval()`, and passes a Linen module's `__call__` the arguments `train`, `training` and `deterministic` if it has
    them.

    >>> LayerSpec(nnx.Linear, 3, 8, use_bias=False)
    LayerSpec(Linear, 3, 8, use_bias=False)
    """

    def __init__(self, typename: type, *args: Any, **kwargs: Any):
        if not (isinstance(typename, type) and issubclass(typename, nnx.Module | linen.Module)):
            raise ConfigError(
                f"{type(self).__name__}: typename {typename!r} is not a class of nnx or Linen modules: pass the class "
                "and its arguments, as in LayerSpec(nnx.Linear, 3, 8); a function x -> x is a layer without LayerSpec"
            )
        self.typename, self.args, self.kwargs = typename, args, kwargs

    def __repr__(self) -> str:
        arguments = [self.typename.__name__, *map(repr, self.args), *(f"{k}={v!r}" for k, v in self.kwargs.items())]
        return f"{type(self).__name__}({', '.join(arguments)})"

    def build(self, **rngs: nnx.Rngs) -> Any:
        """Build the module, with `rngs` if its `__init__` takes them."""
        init = self.typename.__init__  # type: ignore[misc]
        places = [] if init is object.__init__ else inspect.signature(init).parameters.values()
        wanted = any(p.name == "rngs" or p.kind is p.VAR_KEYWORD for p in places)
        return self.typename(*self.args, **self.kwargs, **(rngs if wanted else {}))


class TiedLayerSpec(LayerSpec):
    """The description of a layer that shares parameters with all layers of its `key`; the first initialises them.

    Args:
      key: the name of the shared parameters.
      typename, args, kwargs: as in `LayerSpec`.
      forward_fn: `forward_fn(module, x)` is called instead of `module(x)`.
      tied_weight_attr: the shared parameters, "embedding" or ["mlp.kernel", ...]; the others are the layer's own.
        None: all are shared.
    """

    def __init__(
        self, key: str, typename: type, *args: Any, forward_fn: Callable | None = None,
        tied_weight_attr: str | list[str] | None = None, **kwargs: Any,
    ):  # fmt: skip
        super().__init__(typename, *args, **kwargs)
        self.key, self.forward_fn = key, forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else tied_weight_attr


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer as pure functions.

    Attributes:
      init: `init(rng) -> params`. call: `call(params, x, rng) -> x`; with `state`, (x, {name: new value}).
      params: ShapeDtypeStructs.
      structure: equal for layers that differ only in their parameters' values; None for a function or a tied layer.
      key: of a tied layer. shared: the names of the parameters that all layers with this key share.
      state: the names of the leaves that a forward pass replaces.
    """

    name: str
    init: Callable[[jax.Array], PyTree]
    call: Callable[[PyTree, PyTree, jax.Array | None], PyTree]
    params: PyTree
    structure: object
    key: str | None = None
    shared: frozenset[str] = frozenset()
    state: frozenset[str] = frozenset()

    def split(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Split `params` into (own, shared)."""
        if self.key is None:
            return params, {}
        own: dict[tuple, PyTree] = {}
        shared: dict[tuple, PyTree] = {}
        for path, leaf in flatten_dict(params).items():
            (shared if part_name(path) in self.shared else own)[path] = leaf
        return unflatten_dict(own), unflatten_dict(shared)

    def join(self, own: PyTree, shared: PyTree) -> PyTree:
        """Undo `split`."""
        return own if self.key is None else unflatten_dict({**flatten_dict(own), **flatten_dict(shared)})


def make_layer(item: Any, x: PyTree) -> Layer:
    """Make the layer that `item` describes; `x` is its abstract input, which only Linen needs."""
    name = layer_name(item)
    forward_fn = getattr(item, "forward_fn", None)
    module: Any
    if is_linen(item):
        module = item.build() if isinstance(item, LayerSpec) else item
        flags = inspect.signature(type(module).__call__).parameters.keys() & {"train", "training", "deterministic"}
    elif isinstance(item, LayerSpec):
        module, flags = (lambda rngs: item.build(rngs=rngs)), set()
    elif isinstance(item, nnx.Module | type) or not callable(item):
        raise ConfigError(
            f"{item if isinstance(item, type) else name} is not a layer: a layer is LayerSpec({name}, ...), so that "
            "jzero can build it with keys of its own, or a Linen module, or a function x -> x"
        )
    else:
        return Layer(name, lambda rng: {}, lambda params, x, rng: item(x), {}, None)

    def forward(module: Any, x: PyTree, rng: jax.Array | None) -> PyTree:
        if forward_fn:
            return forward_fn(module, x)
        return module(x, **{flag: (rng is None) == (flag == "deterministic") for flag in flags})

    model: Any = from_flax(module, forward, example_batch=x)
    params = jax.eval_shape(lambda: model.init(jax.random.key(0)))
    if isinstance(item, TiedLayerSpec):
        if model.state:
            raise ConfigError(
                f"TiedLayerSpec({item.key!r}, {name}): tied layers cannot have state ({some_of(model.state)}); use "
                "LayerSpec, or LayerNorm, RMSNorm or GroupNorm for BatchNorm"
            )
        shared = _shared(item, [part_name(path) for path in flatten_dict(params)])
        return Layer(name, model.init, model.loss, params, None, item.key, shared)
    structure = (module if is_linen(item) else model.apply.structure, signature(params))
    return Layer(name, model.init, model.loss, params, structure, state=frozenset(model.state))


def _shared(spec: TiedLayerSpec, names: list[str]) -> frozenset[str]:
    if spec.tied_weight_attr is None:
        return frozenset(names)
    found = {attr: [name for name in names if f"{name}.".startswith(f"{attr}.")] for attr in spec.tied_weight_attr}
    if missing := [attr for attr, matches in found.items() if not matches]:
        raise ConfigError(f"tied_weight_attr {', '.join(missing)}: the parameters are {', '.join(names) or 'none'}")
    return frozenset(name for matches in found.values() for name in matches)


def is_linen(item: object) -> bool:
    """Return whether `item` is a Linen module or the spec of one."""
    return isinstance(item, linen.Module) or issubclass(getattr(item, "typename", int), linen.Module)


def layer_name(item: Any) -> str:
    """Return the name of the class or function."""
    item = getattr(item, "typename", getattr(item, "func", item))  # func: functools.partial's
    return getattr(item, "__name__", type(item).__name__)


def same_spec(a: object, b: object) -> bool:
    """Return whether two items describe the same layer, neither of them tied."""
    if not type(a) is type(b) is LayerSpec:
        return False
    try:
        return (a.typename, a.args, a.kwargs) == (b.typename, b.args, b.kwargs)
    except ValueError:  # comparing arrays does not give a bool
        return False


def signature(tree: PyTree) -> tuple[object, list[tuple]]:
    """Return the structure, shapes and dtypes of a tree of arrays, to compare."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def size(tree: PyTree) -> int:
    """Count the elements of a tree of arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def show(tree: PyTree) -> str:
    """Format a tree of arrays in one line.

    >>> show((jnp.zeros((2, 3)), jnp.zeros(3, bool)))
    '(float32[2,3], bool[3])'
    """
    text = jax.tree.map(lambda v: f"{jnp.result_type(v)}[{','.join(map(str, jnp.shape(v)))}]", tree)
    return str(text).replace("'", "")


@contextmanager
def prefixed_errors(what: str) -> Iterator[None]:
    """Turn any error into a ConfigError that starts with `what`."""
    try:
        yield
    except Exception as error:
        first = str(error).removeprefix("from_flax: ").partition("\n")[0]
        raise ConfigError(f"{what}: {first}") from error


def partition_layers(method: str, names: Sequence[str], sizes: Sequence[int], parts: int) -> list[int]:
    """Cut layers into parts; return the boundaries [parts + 1]: part p is the layers [b[p], b[p + 1]), never empty.

    The methods are DeepSpeed's (`PipelineModule._partition_layers`).

    Args:
      method: "uniform": equal numbers of layers, with the remainder in the first parts. "parameters", or "best":
        minimize the parameters of the largest part. "type:regex": minimize the layers whose class name matches
        (case-insensitive) in the largest part.
      names: the layers' class names.
      sizes: the layers' numbers of parameters.
      parts: the number of parts.

    Raises:
      ConfigError: an unknown method, a regex that matches no layer, more parts than layers.

    >>> partition_layers("uniform", ["Linear"] * 7, [1] * 7, 3)
    [0, 3, 5, 7]
    >>> partition_layers("parameters", ["Embed", "Block", "Block", "Block", "Norm"], [7, 4, 4, 4, 1], 2)
    [0, 2, 5]
    >>> partition_layers("type:block", ["Embed", "Block", "Block", "Block", "Block", "Norm"], [7, 4, 4, 4, 4, 1], 2)
    [0, 3, 6]
    """
    layers, kind = len(names), str(method).lower()
    if not 1 <= parts <= layers:
        wrong = "exceed the layers" if parts > layers else "are too few"
        raise ConfigError(
            f"pipeline: {parts} parts (num_stages x chunks) {wrong}: there are {layers} layers, ask for 1 to {layers}"
        )
    if kind == "uniform":
        return [part * (layers // parts) + min(part, layers % parts) for part in range(parts + 1)]
    if kind in ("parameters", "best"):
        return _balanced(sizes, parts)
    if kind.startswith("type:"):
        return _balanced(_matches(method, names), parts)
    raise ConfigError(
        f"partition_method {method!r} is unknown: allowed are 'parameters' (or 'best'), 'uniform' and 'type:regex', "
        "which counts the layers whose class name matches"
    )


def _matches(method: str, names: Sequence[str]) -> list[int]:
    """Return 1 for each layer whose class name matches "type:regex", else 0."""
    try:
        regex = re.compile(method.partition(":")[2], re.IGNORECASE)
    except re.error as error:
        raise ConfigError(f"partition_method {method!r}: the text after 'type:' is not a regex: {error}") from None
    matches = [int(bool(regex.search(name))) for name in names]
    if not any(matches):
        raise ConfigError(
            f"partition_method {method!r} matches no layer: the class names are {', '.join(dict.fromkeys(names))}"
        )
    return matches


def _balanced(weights: Sequence[int], parts: int) -> list[int]:
    """Return the boundaries that make the heaviest part as light as possible, by dynamic programming over the parts.

    Ties go to the most even cut (the least sum of squares), then to the one that cuts latest.
    """
    total = [0, *accumulate(weights)]
    best = {0: (0, 0, [0])}  # layers -> (heaviest part, sum of squares, boundaries) of their best cut into parts
    for _ in range(parts):
        previous, best = best, {}
        least, most = min(previous), max(previous)
        for stop in range(least + 1, len(weights) + 1):
            for start in range(min(most, stop - 1), least - 1, -1):
                weight = total[stop] - total[start]
                if stop in best and weight > best[stop][0]:
                    break  # an earlier start makes this part only heavier
                heaviest, squares, boundaries = previous[start]
                cost = max(heaviest, weight), squares + weight**2
                if stop not in best or cost < best[stop][:2]:
                    best[stop] = (*cost, [*boundaries, stop])
    return best[len(weights)][2]
