"""The sharding of every parameter: the layout of a parameter tree, and the PartitionSpecs that follow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jzero.config import Config
from jzero.errors import ConfigError, some_of
from jzero.layout.zero import RULES, Rule, stage_rule
from jzero.layout.zeropp import NO_ZEROPP, ZeroPlusPlus
from jzero.mesh import PIPE, ZERO, ZERO_AXES, present
from jzero.model import ENDS, STACK, Model, ModelFacts
from jzero.precision import Precision
from jzero.stored_names import matches
from jzero.tree import PyTree, named, path_name


class OnHost(NamedTuple):
    """Which parts of a parameter's state live in host memory, see `jzero.layout.offload.choose_host_state`.

    Attributes:
      master: the master, or a frozen parameter.
      moments: the optimizer's state of it.
      in_use: the weight stays there inside a step; each layer's comes to the device where the layer runs.
    """

    master: bool = False
    moments: bool = False
    in_use: bool = False


ON_DEVICE = OnHost()


@dataclass(frozen=True, kw_only=True)
class ParamLayout:
    """The placement of one parameter, shared by its master, moments and reduced gradient.

    Attributes:
      name: as in `tree.named`.
      shape: global.
      spec: over the mesh.
      dim: the dimension that ZeRO partitions (of one layer's slice if the parameter is stacked); None: replicated.
      stacked: whether the leading dimension is the layer axis of a layer stack.
      trainable: whether it has a gradient.
      state: whether the forward pass replaces it; it is not trained then, and keeps its dtype.
      rule: the stage's rule if the parameter is partitioned, rule 0 if it is replicated. A frozen parameter follows
        rule 3 or rule 0.
      why: why the stage's rule does not apply; empty if it does.
      on_host: which parts of its state live in host memory.
      divided: (axis, dimension of one layer's slice) that a table names: so it is divided while it is used, too.
    """

    name: str
    shape: tuple[int, ...]
    spec: PartitionSpec
    dim: int | None = None
    stacked: bool = False
    trainable: bool = False
    rule: Rule
    why: str = ""
    state: bool = False
    on_host: OnHost = ON_DEVICE
    divided: tuple[tuple[str, int], ...] = ()

    @property
    def axes(self) -> set[str]:
        """The mesh axes that divide it."""
        return {axis for axes in self.spec for axis in (axes if isinstance(axes, tuple) else (axes,)) if axis}

    @property
    def group(self) -> tuple[str, ...]:
        """The axes over which ZeRO partitions it."""
        return tuple(axis for axis in ZERO_AXES if axis in self.axes and axis not in dict(self.divided))

    @property
    def axes_by_dim(self) -> tuple[tuple[str, ...], ...]:
        """For each dimension (of one layer's slice) the axes that divide it while it is used."""
        dims = range(len(self.shape) - self.stacked)
        return tuple(tuple(axis for axis, dim in self.divided if dim == d) for d in dims)

    @property
    def by_layer(self) -> bool:
        """True if a layer's weight comes where the layer runs: gathered, or copied from the host."""
        return self.rule.gather == "layer" or self.on_host.in_use

    @property
    def on_pipe(self) -> bool:
        """True if every pipeline stage holds its own part."""
        return PIPE in self.axes


@dataclass(frozen=True)
class PlacedModel:
    """A model on a mesh, from which its passes are made; `layouts` is the tree of `ParamLayout`s."""

    model: Model
    config: Config
    mesh: Mesh
    layouts: PyTree
    precision: Precision


def param_layouts(
    facts: ModelFacts, config: Config, mesh: Mesh, plus: ZeroPlusPlus = NO_ZEROPP,
    divided: Mapping[str, Mapping[str, int]] | None = None,
) -> PyTree:  # fmt: skip
    """Decide the `ParamLayout` of every parameter; nothing else decides how a parameter is sharded.

    ZeRO never partitions the layer axis of a stack. If the pipeline's stages x chunks do not divide the layers, every
    stage holds all of them.

    Args:
      plus: how stage 3 moves weights and gradients; a model's state it moves as they are.
      divided: axis -> name -> the dimension that it divides, of one layer's slice; ZeRO partitions what is left.

    Returns:
      A tree of `ParamLayout`s with the structure of `facts.shapes`.

    Raises:
      ConfigError: an expression or a name of the model's state that matches nothing, a complex parameter, nothing to
        train.
    """
    to_train, stages, chunks = _to_train(facts, config), mesh.shape[PIPE], config.pipeline.chunks
    vocabulary = _vocabulary(facts, stages)
    stage, threshold = config.zero_optimization.stage, config.zero_optimization.stage3_param_persistence_threshold
    # The persistence threshold is stage 3's own, also where a pipeline has it gather once a step: hence two rules.
    staged, stages_own = stage_rule(stage, config.pipeline.gather == "step"), RULES[stage]

    def layout(path: tuple, x: Any) -> ParamLayout:
        name = path_name(path)
        if jnp.issubdtype(x.dtype, jnp.complexfloating):
            raise ConfigError(
                f"parameter {name!r} is {x.dtype}: only real parameters are trained; keep two real arrays"
            )
        stacked, trainable = facts.has_stack and name.startswith(STACK + "/"), name in to_train
        # All stages hold the same number of layers, so that one program runs on all of them.
        by_layers = stacked and x.shape and x.shape[0] % (stages * chunks) == 0
        pipe_dim = None if stages == 1 else 0 if by_layers else vocabulary.get(name)
        local = [size // stages if dim == pipe_dim else size for dim, size in enumerate(x.shape)][stacked:]
        own = {axis: dims[name] for axis, dims in (divided or {}).items() if name in dims}
        for axis, at in own.items():
            local[at] //= mesh.shape[axis]
        rule, asked = staged, stages_own
        if not trainable and rule.gather == "step":
            asked = RULES[0]  # needed whole at every step: a shard besides it would be a second copy
        groups = [tuple(axis for axis in present(mesh, *axes) if axis not in own) for axes in (ZERO_AXES, (ZERO,))]
        dim, group, why = _partitioned_dim(tuple(local), asked, mesh, groups, threshold)
        # In one dimension ZeRO's axes are the minor ones: a gather over them gives the part that this device uses.
        inner = own | dict.fromkeys(group, dim)
        spec = _spec({PIPE: pipe_dim} | {axis: None if at is None else stacked + at for axis, at in inner.items()})
        if dim is None:
            rule = RULES[0]
        elif name not in facts.state:
            rule = rule._replace(plus=plus.of(x, tuple(local), mesh.shape[ZERO]))
        return ParamLayout(
            name=name, shape=tuple(x.shape), spec=spec, dim=dim, stacked=stacked, trainable=trainable, rule=rule,
            why=why, state=name in facts.state, divided=tuple(own.items()),
        )  # fmt: skip

    layouts = jax.tree_util.tree_map_with_path(layout, facts.shapes)
    if unknown := sorted(set(facts.state) - {layout.name for layout in jax.tree.leaves(layouts)}):
        known = some_of(layout.name for layout in jax.tree.leaves(layouts))
        raise ConfigError(f"the model's state: {unknown} are not among the names of init(rng): {known}")
    return layouts


def _to_train(facts: ModelFacts, config: Config) -> set[str]:
    """Choose the names of the parameters to train."""
    dtypes = {name: x.dtype for name, x in named(facts.shapes).items() if name not in facts.state}
    floats = [name for name, dtype in dtypes.items() if jnp.issubdtype(dtype, jnp.floating)]

    def matched(key: str, patterns: Iterable[str], candidates: Iterable[str]) -> set[str]:
        found = {p: {name for name in candidates if matches(f"{key}: {p!r}", p, name, facts.names)} for p in patterns}
        if unused := sorted(p for p, hits in found.items() if not hits):
            raise ConfigError(f"{key}: {unused} match no parameter; the names are {some_of(candidates)}")
        return set().union(*found.values())

    trained = config.trainable_parameters
    wanted = set(floats) if trained is None else matched("trainable_parameters", trained, floats)
    if chosen := wanted - matched("frozen_parameters", config.frozen_parameters, dtypes):
        return chosen
    given = {"trainable_parameters": trained, "frozen_parameters": config.frozen_parameters or None}
    if keys := [f"{key} = {list(patterns)}" for key, patterns in given.items() if patterns is not None]:
        raise ConfigError(f"{', '.join(keys)}: every parameter is frozen; leave one to train")
    raise ConfigError(f"{facts.model!r} has no parameters to train: init(rng) returned no floating-point arrays")


def _vocabulary(facts: ModelFacts, stages: int) -> dict[str, int]:
    """Map the names of the parameters whose vocabulary the pipeline divides to that dimension: all of them or none."""
    known = named(facts.shapes)
    wanted = {f"{ENDS}/{name}": dim for name, dim in getattr(facts.model, "vocabulary", {}).items()}
    if unknown := sorted(wanted.keys() - known.keys()):
        raise ConfigError(
            f"{facts.model!r}: vocabulary names {unknown}, which are not parameters; the names are {', '.join(known)}"
        )
    return wanted if all(known[name].shape[dim] % stages == 0 for name, dim in wanted.items()) else {}


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
    """Choose the first dimension that a group divides, and the axes of this group.

    The first group that divides one is taken. Otherwise the dimension is None, with the reason.
    """
    groups = [axes for axes in groups if axes]
    if not rule.shards_state or not groups:
        return None, (), ""
    # A small gather costs its latency in every layer, and saves few bytes.
    if rule.gather == "layer" and prod(shape) < threshold:
        return None, (), f"under stage3_param_persistence_threshold {threshold}"
    sizes = [prod(mesh.shape[axis] for axis in axes) for axes in groups]
    # The first dimension: the shards of all devices are then consecutive, and a gather copies them as they arrive.
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


def optimizer_layouts(opt_state: PyTree, layouts: PyTree) -> PyTree:
    """Find the layouts of an optimizer's state: a moment lies where its parameter's master lies.

    A leaf belongs to a parameter if its key path ends with the parameter's name and the shapes agree. All other leaves
    (step counters, factored moments) are replicated.
    """
    owner_of = owners(layouts)

    def layout(path: tuple, x: Any) -> ParamLayout:
        owner = owner_of(path_name(path))
        if owner is not None and owner.shape == tuple(x.shape):
            return owner
        return ParamLayout(name=path_name(path), shape=tuple(x.shape), spec=PartitionSpec(), rule=RULES[0])

    return jax.tree_util.tree_map_with_path(layout, opt_state)
