"""Reads the files of a DeepSpeed checkpoint: puts ZeRO's partitions together, without copying them.

A directory has model states (one file; with ZeRO-3 one for each rank, in a pipeline one for each stage) and, with ZeRO,
optimizer states of every rank. Stages 1 and 2 cut each parameter group, as one flat vector, into a part for each rank.
Stage 3 cuts every parameter, and a rank's flat vectors contain its parts one after the other. Without ZeRO the model
states contain the optimizer's. A universal checkpoint has a directory for each parameter. Weights alone are what
zero_to_fp32.py and save_16bit_model write.
Source: deepspeed/utils/zero_to_fp32.py, runtime/zero/stage_1_and_2.py, stage3.py, runtime/bf16_optimizer.py,
runtime/fp16/fused_optimizer.py and checkpoint/ds_to_universal.py of DeepSpeed 0.19.8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, islice
from math import prod
from pathlib import Path

from jzero.deepspeed.pieces import TensorPieces, cut_group, cut_pieces
from jzero.deepspeed.torch_files import Pickled, Record, TorchTensor, load_torch
from jzero.errors import ConfigError, in_a_line, some_of
from jzero.weights.safetensors import File

MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
LAYER = re.compile(r"layer_(\d+)(?:-model_00)?-model_states\.pt")
WEIGHTS = re.compile(r"(?:pytorch_)?model(?:-\d+-of-(\d+))?\.(?:bin|safetensors)")
UNIVERSAL = "zero"  # its directory
MASTER = "fp32"  # universal checkpoints' name for the master weights
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass
class DeepSpeedState:
    """The contents of a DeepSpeed checkpoint; tensors are still in their files.

    Attributes:
      path: of the directory.
      model: the model states of the first rank, without the tensors.
      tensors: kind ("fp32", "exp_avg", ...) -> the tensors by name. "fp32" also has frozen parameters and buffers.
      buffers: names of tensors that are no parameters.
      steps: updates that the optimizer has counted; None if it counts none.
      scaler: the fields of the loss scaler; {} without one.
      weights_alone: whether it has neither an optimizer's state nor counters.
    """

    path: Path
    model: dict[str, Pickled]
    tensors: dict[str, TensorPieces] = field(default_factory=dict)
    buffers: set[str] = field(default_factory=set)
    steps: int | None = None
    scaler: dict[str, Pickled] = field(default_factory=dict)
    weights_alone: bool = False

    def add(self, kind: str, name: str, shape: Sequence[int], pieces: list[TorchTensor]) -> None:
        """Add a tensor; a weight that stages of a pipeline tie is the first's."""
        some = self.tensors.setdefault(kind, TensorPieces(self.path))
        if name not in some.entries:
            some.add(name, shape, pieces)

    def take_steps(self, states: Iterable[Pickled], groups: Iterable[Pickled]) -> None:
        """Take the step count of an optimizer: of parameters' states, or of parameter groups.

        The largest, since DeepSpeed's FusedAdam counts in the last parameter of a group alone.
        """
        counts = [one.get("step") for one in (*states, *groups)]
        counts = [x.read().item() if isinstance(x, TorchTensor) and x.size == 1 else x for x in counts]
        self.steps = max((int(x) for x in counts if isinstance(x, int | float)), default=self.steps)

    def take_scaler(self, optimizer: Mapping[str, Pickled]) -> None:
        """Take the loss scaler's fields: ZeRO stores the object, the fp16 optimizers some of its numbers."""
        stored = optimizer.get("loss_scaler")
        fields = stored.fields if isinstance(stored, Record) else optimizer
        if "cur_scale" in fields:
            self.scaler = {key: x for key, x in fields.items() if isinstance(x, int | float)}


def is_deepspeed(path: Path) -> bool:
    """Return whether a directory is a checkpoint of DeepSpeed; a universal one has model states too."""
    return any(path.glob("*mp_rank_*_model_states.pt"))


def weight_files(path: Path) -> list[Path]:
    """List the files of a directory that has weights alone, or the one that the path names; [] if there are none."""
    some = [path] if path.is_file() else sorted(path.glob("*model*"), key=lambda file: file.suffix, reverse=True)
    found = [file for file in some if WEIGHTS.fullmatch(file.name)]
    return [file for file in found if file.suffix == found[0].suffix]  # of both formats safetensors, as transformers


def read_deepspeed(path: Path) -> DeepSpeedState:
    """Read a checkpoint's files, and where its tensors are.

    Raises:
      ConfigError: a file is damaged or missing, or the checkpoint is of a kind that jzero does not read.
    """
    if files := [] if is_deepspeed(path) else weight_files(path):
        return _read_weights(path, files)
    names = sorted(file.name for file in path.iterdir())
    if experts := [name for name in names if "expert" in name or name.startswith("expp_")]:
        raise ConfigError(
            f"{path} has experts in files of their own ({some_of(experts, 2)}), which jzero does not read"
        )
    models = {(int(m[2]), int(m[1] or 0)): path / m[0] for m in map(MODEL.fullmatch, names) if m}
    if not models:
        raise ConfigError(f"{path} has no file mp_rank_00_model_states.pt: a process has not saved its part")
    stages: dict[int, dict[int, Path]] = {}
    for (stage, rank), file in sorted(models.items()):
        stages.setdefault(stage, {})[rank] = file
    try:
        state = DeepSpeedState(path, load_torch(models[min(models)]))
        if any(type(state.model[key]) is not int or state.model[key] < 0 for key in COUNTERS):
            raise ValueError(f"{some_of(COUNTERS)} must be whole numbers")
        if (path / UNIVERSAL).is_dir():
            _read_universal(state, stages)
        elif (degree := _tensor_degree(state.model)) != 1:
            raise ConfigError(
                f"{path} is divided by tensor parallelism (in {degree}): convert it with DeepSpeed's "
                "ds_to_universal.py, and import the result"
            )
        elif ranks := _ranks(path, names):
            for stage, files in ranks.items():
                _read_zero(state, stages[stage], files)
        else:
            _read_without_zero(state, [models[key] for key in sorted(models)], names)
    except ConfigError:
        raise
    except Exception as error:  # a file of torch.save may contain anything, where a checkpoint has a dict or a list
        raise ConfigError(f"{path} is not a complete checkpoint of DeepSpeed: {in_a_line(error)}") from None
    return state


def _tensor_degree(model: dict[str, Pickled]) -> int:
    """Return the degree of tensor parallelism; before `checkpoint_parallel_dimensions`, that of both together."""
    if known := model.get("checkpoint_parallel_dimensions"):
        return int(known["tp_degree"])
    return 1 if model["module"] is None else int(model.get("mp_world_size", 1))


def _ranks(path: Path, names: list[str]) -> dict[int, list[Path]]:
    """Map pipeline stages to the files of their ranks, in order."""
    found: dict[int, dict[int, Path]] = {}
    for match in filter(None, map(OPTIMIZER.fullmatch, names)):
        found.setdefault(int(match[2]), {})[int(match[1])] = path / match[0]
    for stage, ranks in found.items():
        if lost := _lost(ranks):
            raise ConfigError(f"{path} lacks the optimizer states of rank {lost} (mp_rank_{stage:02d})")
    if lost := _lost(found):
        raise ConfigError(f"{path} lacks the optimizer states of mp_rank {lost}")
    return {stage: [ranks[i] for i in sorted(ranks)] for stage, ranks in sorted(found.items())}


def _lost(found: Mapping[int, object]) -> str:
    """Name the first numbers below the largest that are not there; a file's name may have any number.

    >>> _lost({0: "", 3: ""}), _lost({0: ""}), _lost({10**12: ""})
    ('1, 2', '', '0, 1, 2, 3 and 999999999996 more')
    """
    largest = max(found, default=-1)
    count = largest + 1 - len(found)
    first = islice((i for i in range(largest) if i not in found), min(count, 4))
    return some_of(first) + (f" and {count - 4} more" if count > 4 else "")


def _read_weights(path: Path, files: list[Path]) -> DeepSpeedState:
    """Read files of weights; a run that starts from them begins at step 0."""
    counts = {int(found[1] or 1) for file in files if (found := WEIGHTS.fullmatch(file.name))}
    if counts != {len(files)}:
        raise ConfigError(f"{path} has {len(files)} files of weights, and their names say {some_of(counts)}")
    state = DeepSpeedState(path, {"module": {}} | dict.fromkeys(COUNTERS, 0), weights_alone=True)
    module: dict[str, TorchTensor] = {}
    for file in files:
        if file.suffix == ".bin":
            module |= load_torch(file)
        else:
            some = File.open(file).entries.items()
            module |= {name: TorchTensor(file, x.dtype, x.shape, x.start) for name, x in some}
    if not module or not all(isinstance(x, TorchTensor) for x in module.values()):
        raise ConfigError(f"{path} is no file of weights by name")
    _add_module(state, module)
    return state


# ---- ZeRO ---------------------------------------------------------------------------------------------------------


def _read_zero(state: DeepSpeedState, models: dict[int, Path], files: list[Path]) -> None:
    """Add the tensors of one pipeline stage, from the files of all its ranks."""
    model = load_torch(models[0])
    ranks = [load_torch(file)["optimizer_state_dict"] for file in files]
    first, counts = ranks[0], ranks[0]["partition_count"]
    counts = counts if isinstance(counts, list) else [counts]
    if not all(type(n) is int for n in counts):
        raise ValueError("partition_count is no whole number")
    count = max(counts)
    if count != len(ranks):
        raise ConfigError(f"{state.path} has optimizer states of {len(ranks)} ranks, but {count} ranks wrote it")
    state.take_scaler(first)
    add = _add_stage3 if "fp32_flat_groups" in first else _add_stage12
    add(state, [_shapes(group) for group in model["param_shapes"]], ranks)
    _add_others(state, model, [models[rank] for rank in sorted(models)])


def _shapes(group: Mapping[str, Pickled]) -> dict[str, tuple[int, ...]]:
    """Check the shapes of parameters."""
    for name, shape in group.items():
        if type(shape) is not tuple or len(shape) > 32 or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError(f"the shape of {name} is no tuple of at most 32 whole numbers")
    return dict(group)


def _kinds(states: Mapping[str, Pickled]) -> list[str]:
    return [key for key, x in states.items() if isinstance(x, TorchTensor) and x.shape]


def _add_stage12(state: DeepSpeedState, shapes: list[dict[str, tuple]], ranks: list[dict[str, Pickled]]) -> None:
    """Add tensors of stages 1 and 2: each group is one vector, cut into equal parts."""
    inner = [rank["base_optimizer_state"] for rank in ranks]
    states = [dict(enumerate(one)) if isinstance(one, list) else one["state"] for one in inner]  # a list: elastic
    state.take_steps(states[0].values(), [] if isinstance(inner[0], list) else inner[0]["param_groups"])
    for i, group in enumerate(shapes):
        paddings = (ranks[0].get("param_alignment_paddings") or {i: [0] * len(group)})[i]
        flat = {MASTER: [rank["single_partition_of_fp32_groups"][i] for rank in ranks]}
        flat |= {kind: [one[i][kind] for one in states] for kind in _kinds(states[0].get(i, {}))}
        sizes = [prod(shape) + padding for shape, padding in zip(group.values(), paddings, strict=True)]
        spans = [(end - n, prod(shape)) for end, n, shape in zip(accumulate(sizes), sizes, group.values(), strict=True)]
        for kind, parts in flat.items():
            for (name, shape), pieces in zip(group.items(), cut_group(parts, flat[MASTER], spans), strict=True):
                state.add(kind, name, shape, pieces)


def _add_stage3(state: DeepSpeedState, shapes: list[dict[str, tuple]], ranks: list[dict[str, Pickled]]) -> None:
    """Add tensors of stage 3: a rank has its part of each parameter, with padding, one after the other."""
    inner = [rank["optimizer_state_dict"] for rank in ranks]
    every = range(len(ranks[0]["fp32_flat_groups"]))
    states = [[one["state"].get(i, {}) for i in every] for one in inner]
    state.take_steps(states[0], inner[0]["param_groups"])
    groups: list[Sequence[int]] = [[i] for i in every]
    if len(shapes) != len(every):  # the groups in one row
        shapes, groups = [{name: shape for group in shapes for name, shape in group.items()}], [every]
    for group, own in zip(shapes, groups, strict=True):
        flat = {MASTER: [[rank["fp32_flat_groups"][i] for i in own] for rank in ranks]}
        flat |= {kind: [[rank[i][kind] for i in own] for rank in states] for kind in _kinds(states[0][own[0]])}
        for kind, parts in flat.items():
            start = 0
            for name, shape in group.items():
                each = -(-prod(shape) // len(ranks))
                pieces = []
                for rank, part in enumerate(parts):
                    pieces += cut_pieces(part, start, max(0, min(each, prod(shape) - rank * each)))
                state.add(kind, name, shape, pieces)
                start += each


def _add_others(state: DeepSpeedState, model: dict[str, Pickled], files: list[Path]) -> None:
    """Add frozen parameters and buffers, which the optimizer does not have."""
    state.buffers |= set(model.get("buffer_names") or ())
    for name in [name for name in model["module"] or () if name in state.buffers]:
        tensor = model["module"][name]
        state.add(MASTER, name, tensor.shape, [tensor])
    frozen = _shapes(model.get("frozen_param_shapes") or {})
    parts = [load_torch(file)["frozen_param_fragments"] for file in files] if frozen else []
    for name, shape in frozen.items():
        state.add(MASTER, name, shape, cut_pieces([part[name] for part in parts], 0, prod(shape)))


# ---- without ZeRO -------------------------------------------------------------------------------------------------


def _read_without_zero(state: DeepSpeedState, files: list[Path], names: list[str]) -> None:
    """Add the tensors of model states that contain the optimizer's, of one process or of each pipeline stage."""
    models = [load_torch(file) for file in files]
    module = models[0]["module"] or _layers(state.path, names)
    state.buffers = {name for model in models for name in model.get("buffer_names") or ()}
    parameters = iter(_parameters(module, state.buffers))
    optimizers = [model["optimizer"] for model in models if model["optimizer"]]
    for optimizer in optimizers:
        state.take_scaler(optimizer)
        _add_optimizer(state, optimizer, parameters, module)
    _check_clear(state.path, not optimizers or next(parameters, None) is None)
    _add_module(state, module)


def _parameters(module: dict[str, TorchTensor], buffers: set[str]) -> list[str]:
    """List the weights of a module in its order, a tied one by its first name."""
    first = {(x.path, x.start): name for name, x in reversed(module.items())}
    return [name for name, x in module.items() if first[x.path, x.start] == name and name not in buffers]


def _add_module(state: DeepSpeedState, module: dict[str, TorchTensor]) -> None:
    """Add the weights that have no masters, and the buffers."""
    for name in [*_parameters(module, state.buffers), *(name for name in module if name in state.buffers)]:
        state.add(MASTER, name, module[name].shape, [module[name]])


def _add_optimizer(
    state: DeepSpeedState, optimizer: dict[str, Pickled], names: Iterator[str], module: dict[str, TorchTensor]
) -> None:
    """Add the tensors of an optimizer, whose parameters have numbers in the order of the module's."""
    inner = optimizer.get("optimizer_state_dict", optimizer)
    groups, states = inner["param_groups"], inner["state"]
    state.take_steps(states.values(), groups)
    if flat := optimizer.get("fp32_groups_flat"):  # fp16: all of a group is one parameter
        _check_clear(state.path, len(groups) == 1)
        where, start = {MASTER: flat[0]} | {kind: states[0][kind] for kind in _kinds(states.get(0, {}))}, 0
        for name in names:
            for kind, tensor in where.items():
                state.add(kind, name, module[name].shape, cut_pieces([tensor], start, prod(module[name].shape)))
            start += prod(module[name].shape)
        return
    masters = [master for group in optimizer.get("fp32_groups") or () for master in group]
    numbers = [number for group in groups for number in group["params"]]
    found = {i: {kind: states[i][kind] for kind in _kinds(states.get(i, {}))} for i in numbers}
    for i, master in zip(numbers, masters, strict=False):
        found[i][MASTER] = master
    shapes = {i: next((x.shape for x in some.values()), None) for i, some in found.items()}
    rows: list[list[int]] = []  # of parameters in the module's order
    for group in groups:  # Muon sorts its group by shape
        some = groupby(group["params"], shapes.get) if group.get("use_muon") else [(None, group["params"])]
        rows += [[*row] for _, row in some]
    own, order = [next(names) for _ in numbers], [0] * len(numbers)
    if len(rows) > 1:
        order = _place_in_groups([module[name].shape for name in own], [[shapes[i] for i in row] for row in rows])
        _check_clear(state.path, bool(order))
    places = [iter(row) for row in rows]
    for k, name in zip(order, own, strict=True):
        i = next(places[k])
        for kind, tensor in found[i].items():
            _check_clear(state.path, tensor.shape == module[name].shape)
            state.add(kind, name, tensor.shape, [tensor])


def _check_clear(path: Path, clear: bool) -> None:
    if not clear:
        raise ConfigError(
            f"{path} is without ZeRO, and its files do not say which parameters the optimizer's numbers belong to "
            "(it has several parameter groups, or not all parameters): save it once with ZeRO stage 1"
        )


def _place_in_groups(shapes: Sequence[tuple], groups: Sequence[Sequence[tuple | None]]) -> list[int]:
    """Return the group of each parameter; groups keep the module's order. [] if there is no or more than one way.

    >>> _place_in_groups([(2, 3), (2,), (4, 2), (4,)], [[(2, 3), (4, 2)], [(2,), (4,)]])
    [0, 1, 0, 1]
    """
    ways: dict[tuple[int, ...], Pickled] = {(0,) * len(groups): ()}  # numbers taken -> the one way there, else None
    for shape in shapes:
        further: dict[tuple[int, ...], Pickled] = {}
        for taken, way in ways.items():
            for k, group in enumerate(groups):
                if taken[k] < len(group) and group[taken[k]] == shape:
                    after = (*taken[:k], taken[k] + 1, *taken[k + 1 :])
                    further[after] = None if way is None or after in further else (way, k)
        ways = further
        if len(ways) * len(groups) > 1000:  # a crafted file could make ways without end
            return []
    found, way = [], next(iter(ways.values()), None)
    while way:
        way, k = way
        found.append(k)
    return found[::-1]


def _layers(path: Path, names: list[str]) -> dict[str, TorchTensor]:
    """Return the weights of a pipeline by name: those of layer 3 begin with "3."."""
    found: dict[str, TorchTensor] = {}
    for match in sorted(filter(None, map(LAYER.fullmatch, names)), key=lambda match: int(match[1])):
        found |= {f"{int(match[1])}.{name}": x for name, x in load_torch(path / match[0]).items()}
    if not found:
        raise ConfigError(f"{path} has no weights: neither in the model states nor in files of layers")
    return found


# ---- universal ----------------------------------------------------------------------------------------------------


def _read_universal(state: DeepSpeedState, stages: Mapping[int, dict[int, Path]]) -> None:
    """Add the tensors of a universal checkpoint: zero/NAME/KIND.pt, and frozen ones in the model states."""
    folder = state.path / UNIVERSAL
    optimizer = load_torch(folder / "optimizer_state.pt") if (folder / "optimizer_state.pt").exists() else {}
    state.take_scaler(optimizer)
    shapes = {name: x for group in state.model.get("param_shapes") or () for name, x in _shapes(group).items()}
    steps: list[dict[str, Pickled]] = []
    for file in sorted(folder.glob("*/*.pt")):
        stored = load_torch(file)
        if file.stem == "step":
            steps.append({"step": stored})
            continue
        tensor = stored["param"] if isinstance(stored, dict) else stored
        shape = shapes.get(file.parent.name, tensor.shape)  # stage 3's are flat, and tensor parallelism's joined
        state.add(file.stem, file.parent.name, shape if prod(shape) == tensor.size else tensor.shape, [tensor])
    state.take_steps(steps, optimizer.get("param_groups", []))
    for files in stages.values():
        _add_others(state, load_torch(files[0]), [*files.values()])
