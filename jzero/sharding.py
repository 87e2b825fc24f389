"""How every parameter is sharded: the layout of a parameter tree, and the PartitionSpecs that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jzero.communication.zeropp import NOTHING, Plus
from jzero.errors import ConfigError, some_of
from jzero.mesh import PIPE, ZERO, ZERO_AXES, present
from jzero.model import ENDS, STACK
from jzero.optimizers.compressed import has_rows
from jzero.stored_names import StoredNames, matches
from jzero.tree import PyTree, named, path_name
from jzero.zero import RULES, ParamLayout, Rule, stage_rule


def param_layouts(
    params: PyTree, *, stage: int, mesh: Mesh, persistence_threshold: int = 0, has_stack: bool = False,
    chunks: int = 1, trained: Iterable[str] | None = None, frozen: Iterable[str] = (),
    vocabulary: Mapping[str, int] | None = None, gather_once: bool = False, state: Collection[str] = (),
    plus: Plus = NOTHING, names: StoredNames | None = None, divided: Mapping[str, Mapping[str, int]] | None = None,
) -> PyTree:  # fmt: skip
    """Decide the `ParamLayout` of every parameter; nothing else decides how a parameter is sharded.

    Args:
      params: shapes and dtypes, as from `jax.eval_shape(model.init, rng)`.
      stage: the ZeRO stage, 0 to 3.
      persistence_threshold: parameters with fewer elements (per layer) stay replicated under stage 3.
      has_stack: whether `params["stack"]` is a layer stack; ZeRO never partitions its layer axis.
      chunks: of the stack per pipeline stage; if stages x chunks does not divide the layers, every stage holds all.
      trained: regular expressions; only parameters whose name matches one (`re.search`) are trained. None: all.
      frozen: regular expressions; a parameter whose name matches one is not trained, whatever `trained` says.
      vocabulary: name -> the dimension that `pipe` divides, for parameters outside the stack.
      gather_once: stage 3 gathers once a step, as stage 2 does.
      state: the names of the leaves that the forward pass replaces.
      plus: how stage 3 moves weights and gradients; a model's state it moves as they are.
      names: the parameters' names without a layer stack, which expressions may match too.
      divided: axis -> name -> the dimension that it divides, of one layer's slice; ZeRO partitions what is left.

    Returns:
      A tree of `ParamLayout`s with the structure of `params`.

    Raises:
      ConfigError: an expression or a name in `state` that matches nothing, a complex parameter.
    """
    to_train, stages = _to_train(params, trained, frozen, state, names), mesh.shape[PIPE]

    def layout(path: tuple, x: Any) -> ParamLayout:
        name = path_name(path)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise ConfigError(
                f"parameter {name!r} is {x.dtype}: only real parameters are trained; keep two real arrays"
            )
        stacked, trainable = has_stack and name.startswith(STACK + "/"), name in to_train
        by_layers = stacked and x.shape and x.shape[0] % (stages * chunks) == 0
        pipe_dim = None if stages == 1 else 0 if by_layers else (vocabulary or {}).get(name)
        local = [size // stages if dim == pipe_dim else size for dim, size in enumerate(x.shape)][stacked:]
        own = {axis: dims[name] for axis, dims in (divided or {}).items() if name in dims}
        for axis, at in own.items():
            local[at] //= mesh.shape[axis]
        # The persistence threshold is stage 3's own, also where a pipeline has it gather once a step: hence `asked`.
        rule, asked = stage_rule(stage, gather_once), RULES[stage]
        if not trainable and rule.gather == "step":
            asked = RULES[0]  # needed whole at every step: a shard beside it would be a second copy
        groups = [tuple(axis for axis in present(mesh, *axes) if axis not in own) for axes in (ZERO_AXES, (ZERO,))]
        dim, group, why = _partitioned_dim(tuple(local), asked, mesh, groups, persistence_threshold)
        # In one dimension ZeRO's axes are the minor ones: a gather over them gives the part that this device uses.
        inner = own | dict.fromkeys(group, dim)
        spec = _spec({PIPE: pipe_dim} | {axis: None if at is None else stacked + at for axis, at in inner.items()})
        if dim is None:
            rule = RULES[0]
        elif name not in state:
            rule = rule._replace(plus=plus.of(x, tuple(local), mesh.shape[ZERO]))
        return ParamLayout(
            name, tuple(x.shape), spec, dim, stacked, trainable, rule, why, name in state, divided=tuple(own.items())
        )

    layouts = jax.tree_util.tree_map_with_path(layout, params)
    if unknown := sorted(set(state) - {layout.name for layout in jax.tree.leaves(layouts)}):
        known = some_of(layout.name for layout in jax.tree.leaves(layouts))
        raise ConfigError(f"the model's state: {unknown} are not among the names of init(rng): {known}")
    return layouts


def _to_train(
    params: PyTree, trained: Iterable[str] | None, frozen: Iterable[str], state: Collection[str],
    names: StoredNames | None,
) -> set[str]:  # fmt: skip
    """Choose the names of the parameters to train."""
    dtypes = {name: x.dtype for name, x in named(params).items() if name not in state}
    floats = [name for name, dtype in dtypes.items() if jnp.issubdtype(dtype, jnp.floating)]

    def matched(key: str, patterns: Iterable[str], candidates: Iterable[str]) -> set[str]:
        found = {p: {name for name in candidates if matches(f"{key}: {p!r}", p, name, names)} for p in patterns}
        if unused := sorted(p for p, hits in found.items() if not hits):
            raise ConfigError(f"{key}: {unused} match no parameter; the names are {some_of(candidates)}")
        return set().union(*found.values())

    wanted = set(floats) if trained is None else matched("trainable_parameters", trained, floats)
    return wanted - matched("frozen_parameters", frozen, dtypes)


def _spec(dims: Mapping[str, int | None]) -> PartitionSpec:
    """Make a PartitionSpec of the dimension that each mesh axis divides; None: it divides none.

    >>> tuple(_spec({"pipe": 0, "zero": 0})), tuple(_spec({"pipe": None, "zero": 1}))
    ((('pipe', 'zero'),), (None, 'zero'))
    """
    last = max((dim for dim in dims.values() if dim is not None), default=-1)
    axes = [tuple(axis for axis, dim in dims.items() if dim == i) for i in range(last + 1)]
    return PartitionSpec(*(one if len(one) > 1 else one[0] if one else None for one in axes))


def _partitioned_dim(
    shape: tuple[int, ...], rule: Rule, mesh: Mesh, groups: Iterable[tuple[str, ...]], threshold: int
) -> tuple[int | None, tuple[str, ...], str]:
    """Choose the first dimension that a group divides (a gather along it copies least), and the axes of this group.

    The first group that divides one is taken. Otherwise the dimension is None, with the reason.
    """
    groups = [axes for axes in groups if axes]
    if not rule.shards_state or not groups:
        return None, (), ""
    if rule.gather == "layer" and prod(shape) < threshold:
        return None, (), f"under stage3_param_persistence_threshold {threshold}"
    sizes = [prod(mesh.shape[axis] for axis in axes) for axes in groups]
    for axes, n in zip(groups, sizes, strict=True):
        for dim, size in enumerate(shape):
            if size and size % n == 0:
                return dim, axes, ""
    return None, (), f"no dimension of {shape} is a multiple of {sizes[-1]}"


def stack_length(layouts: PyTree) -> int:
    """Count the layers of a model with a layer stack.

    Raises:
      ConfigError: the parameters contain no stack, or its leaves differ in length.
    """
    if not isinstance(layouts, dict) or set(layouts) != {ENDS, STACK}:
        found = sorted(layouts) if isinstance(layouts, dict) else type(layouts).__name__
        raise ConfigError(
            f"a model with prefix, block, suffix has params {{{ENDS!r}, {STACK!r}}}; init(rng) returned {found}"
        )
    lengths = {layout.shape[:1]: layout.name for layout in jax.tree.leaves(layouts[STACK])}
    if len(lengths) != 1 or () in lengths:
        found = ", ".join(f"{name} {shape or 'a scalar'}" for shape, name in lengths.items())
        raise ConfigError(
            f"params[{STACK!r}]: every leaf has the layer axis first, all of one length; found {found}; "
            "stack the blocks with nnx.vmap, as models/llama.py does"
        )
    return next(iter(lengths))[0]


def trainable(layouts: PyTree) -> PyTree:
    """Map every layout to whether its parameter is trained: the tree of bools for `tree.partition`."""
    return jax.tree.map(lambda layout: layout.trainable, layouts)


def is_state(layouts: PyTree) -> PyTree:
    """Map every layout to whether the forward pass replaces its leaf: a tree of bools for `tree.partition`."""
    return jax.tree.map(lambda layout: layout.state, layouts)


def specs(layouts: PyTree) -> PyTree:
    """Map every layout to the PartitionSpec of the parameter, its master and its reduced gradient."""
    return jax.tree.map(lambda layout: layout.spec, layouts)


def owners(layouts: PyTree) -> Callable[[str], ParamLayout | None]:
    """Make a function: the name of a leaf of the optimizer's state -> the parameter that it ends with."""
    known = {tuple(filter(None, layout.name.split("/"))): layout for layout in jax.tree.leaves(layouts)}

    def owner_of(name: str) -> ParamLayout | None:
        keys = tuple(name.split("/"))
        return next((known[keys[i:]] for i in range(len(keys) + 1) if keys[i:] in known), None)

    return owner_of


def optimizer_layouts(opt_state: PyTree, layouts: PyTree, rows: PartitionSpec | None = None) -> PyTree:
    """Find the layouts of an optimizer's state: a moment lies where its parameter's master lies.

    A leaf belongs to a parameter if its key path ends with the parameter's name and the shapes agree. All other leaves
    (step counters, factored moments) are replicated; but some state of 1-bit optimizers has a row for each device,
    and `rows` is its spec.
    """
    owner_of = owners(layouts)

    def layout(path: tuple, x: Any) -> ParamLayout:
        owner = owner_of(path_name(path))
        if owner is not None and owner.shape == tuple(x.shape) and not has_rows(path):
            return owner
        spec = rows if rows is not None and has_rows(path) else PartitionSpec()
        return ParamLayout(path_name(path), tuple(x.shape), spec, None, False, False, RULES[0])

    return jax.tree_util.tree_map_with_path(layout, opt_state)
