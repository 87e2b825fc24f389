"""What fits by the formula alone: every ZeRO stage's model state beside the GPU, and what a plan too large could do."""

from __future__ import annotations

from collections.abc import Iterator

from jzero.config import Config
from jzero.display.table import table
from jzero.errors import ConfigError
from jzero.model import Model
from jzero.planner.bytes_by_stage import bytes_by_stage
from jzero.planner.gpus import GPUS, described_gpus, gpu
from jzero.planner.plan import Plan
from jzero.planner.state_bytes import state_bytes
from jzero.values.sizes import size_text

MOST_DOUBLINGS = 6


def formula(model: Model, config: Config, kind: str, nodes: int, gpus_per_node: int) -> str:
    """Return a table of the bytes of model state per GPU under each stage, without compiling anything.

    Raises:
      ConfigError: a config that does not fit the GPUs or itself.
    """
    devices = described_gpus(kind, nodes * gpus_per_node, per_host=gpus_per_node)
    there, rows = gpu(kind).room(len(devices)), []
    for stage, found in bytes_by_stage(model, config, devices=devices).items():
        sizes = (found.masters + found.optimizer - found.host, found.parameters, found.gradients, found.total)
        mark = "  <- the config's" if stage == config.zero_optimization.stage else ""
        rows.append([str(stage), *map(size_text, sizes), f"{found.total / there.most:.0%}{mark}"])
    columns = ["ZeRO stage", "masters, optimizer", "compute parameters", "gradients", "total", "of the GPU"]
    drawn = table(
        f"model state per GPU, on {len(devices)} x {gpu(kind).description}", columns, rows, left=["of the GPU"]
    )
    return f"{drawn}\nwithout activations and gathered layers; the GPU has {size_text(there.most)} for them all"


def too_large(plan: Plan) -> str:
    """Return one line about a plan that does not fit: the largest part, and what would fit by the formula."""
    memory = plan.memory
    largest = f"largest: {memory.largest}, {size_text(memory.parts[memory.largest])}"
    return f"{memory.verdict} per GPU; {largest}; {next(_ways(plan), 'no number of such GPUs fits it by ZeRO alone')}"


def _ways(plan: Plan) -> Iterator[str]:
    """Yield what would fit: a higher stage, more GPUs, recomputation."""
    step, kind, most = plan.step, plan.gpu, plan.memory.room.most
    name = next(name for name in GPUS if GPUS[name] == kind)
    rest = plan.memory.peak_bytes - min(state_bytes(step).total, plan.memory.peak_bytes)
    if rest > most:
        policy = (step.config.activation_checkpointing and step.config.activation_checkpointing.policy) or "none"
        yield (
            f"activations and temporaries alone take {size_text(rest)}: take a smaller micro-batch or sequence, or "
            f'another activation_checkpointing.policy than "{policy}"'
        )
    for times in (2**i for i in range(MOST_DOUBLINGS + 1)):
        devices = described_gpus(name, plan.gpus * times, per_host=plan.gpus_per_node)
        try:
            stages = bytes_by_stage(step.model, step.config, devices=devices)
        except ConfigError:  # a batch size or mesh of the config that this number of GPUs does not divide
            continue
        for stage, found in stages.items():
            if stage >= step.config.zero_optimization.stage and found.total + rest <= most:
                yield f"by the formula ZeRO-{stage} on {plan.gpus * times} of these GPUs would"
