"""Measure a Llama in PyTorch in a pipeline over all GPUs as one JSON line, beside `llama.py --pipe`.

    torchrun --nproc_per_node 4 -m experiments.benchmarks.torch_pipelines --accum 16

Parameters are bf16 with fp32 masters, and gradients are summed over the micro-batches in fp32, as jzero does. Blocks
are compiled, except under a zero-bubble schedule, which splits the backward pass of a stage: there RoPE and SwiGLU are.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage
from torch.nn.attention import sdpa_kernel

from experiments.benchmarks import torch_llama, torch_steps
from experiments.benchmarks.torch_llama import Llama, cross_entropy, initialize, prepare, tables
from experiments.benchmarks.torch_steps import BACKENDS

SCHEDULES = {
    "1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe,
    "interleaved": pipelining.ScheduleInterleaved1F1B, "zero_bubble": pipelining.ScheduleZBVZeroBubble,
}  # fmt: skip


def parse() -> argparse.Namespace:
    p = torch_steps.parser(__doc__.splitlines()[0])
    p.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b")
    p.add_argument("--accum", type=int, default=16, help="micro-batches")
    p.add_argument("--chunks", type=int, default=1, help="stages per GPU; 2 for zero_bubble")
    args = p.parse_args()
    allowed = {"zero_bubble": args.chunks == 2, "interleaved": args.chunks > 1}.get(args.schedule, args.chunks == 1)
    if not allowed:
        p.error(f"--chunks {args.chunks} with {args.schedule}: zero_bubble has 2, interleaved 2 or more, others 1")
    return args


class Part(nn.Module):
    """Some blocks of a Llama, with the embedding if it is the first part, and with norm and head if it is the last."""

    def __init__(self, whole: Llama, index: int, parts: int, angles: tuple[torch.Tensor, torch.Tensor]):
        super().__init__()
        n = len(whole.blocks) // parts
        self.embed = whole.embed if index == 0 else None
        self.blocks = nn.ModuleList(whole.blocks[index * n : (index + 1) * n])
        self.norm, self.head = (whole.norm, whole.head) if index == parts - 1 else (None, None)
        self.angles = angles

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks:
            x = block(x, *self.angles)
        return x if self.head is None else self.head(self.norm(x))


class Masters:
    """AdamW on fp32 copies of bf16 parameters, with sums of their gradients in fp32."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.masters = [p.detach().clone().float() for p in parameters]
        self.sums = {p: torch.zeros_like(m) for p, m in zip(parameters, self.masters, strict=True)}
        for p in parameters:
            p.data = p.data.to(torch.bfloat16)
        for p, m in zip(parameters, self.masters, strict=True):
            m.grad = self.sums[p]
        self.adam = torch.optim.AdamW(self.masters, 3e-4, (0.9, 0.95), weight_decay=0.1, fused=True)

    @torch.no_grad()
    def collect(self, module: nn.Module) -> None:
        """Add the gradients of a module's parameters to the sums, and drop them."""
        there = [p for p in module.parameters() if p.grad is not None]
        if there:
            torch._foreach_add_([self.sums[p] for p in there], [p.grad for p in there])
        for p in there:
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Clip by the norm over all stages, and update."""
        sums = list(self.sums.values())
        square = torch.stack(torch._foreach_norm(sums)).square().sum()
        dist.all_reduce(square)
        torch._foreach_mul_(sums, (1 / (square.sqrt() + 1e-6)).clamp(max=1.0))
        self.adam.step()
        torch._foreach_copy_(self.parameters, self.masters)
        torch._foreach_zero_(sums)


class Stage(PipelineStage):
    """A stage that moves its gradients to the fp32 sums after each backward pass."""

    optimizer: Masters

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        result = super().backward_one_chunk(*args, **kwargs)
        self.optimizer.collect(self.submod)
        return result

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        result = super().backward_weight_one_chunk(*args, **kwargs)
        self.optimizer.collect(self.submod)
        return result

    def _get_init_p2p_neighbors_ops(self) -> list[Any]:
        # Two neighbouring stages of a zero-bubble schedule are on one GPU.
        return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]


def main() -> None:
    args = parse()
    device, shape = torch_steps.join(), torch_steps.shape_of(args)
    rank, gpus = dist.get_rank(), dist.get_world_size()
    zero_bubble = args.schedule == "zero_bubble"
    parts = gpus * args.chunks
    if shape.num_layers % parts:
        raise SystemExit(
            f"{shape.num_layers} layers in {parts} parts of equal size: choose --layers or --chunks to fit"
        )
    mine = [rank, parts - 1 - rank] if zero_bubble else list(range(rank, parts, gpus))
    torch.manual_seed(0)
    with device:
        whole = Llama(shape, repeat=False)
    initialize(whole)
    angles = tables(shape, args.sequence, device)
    modules = [Part(whole, i, parts, angles) for i in mine]
    del whole
    optimizer = Masters([p for module in modules for p in module.parameters()])
    for module in modules:
        for block in module.blocks:
            prepare(block, args.remat, compiled=not (args.eager or zero_bubble))
    if zero_bubble:
        torch_llama.rotate = torch.compile(torch_llama.rotate, dynamic=False)
        torch_llama.swiglu = torch.compile(torch_llama.swiglu, dynamic=False)
        functorch_config.donated_buffer = False  # the two halves of a backward pass read the same buffers
    loss_of = torch.compile(cross_entropy, dynamic=False)

    rows, length = args.micro_batch, args.sequence
    tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
    hidden, logits = (
        torch.empty(rows, length, n, dtype=torch.bfloat16, device="meta", requires_grad=True)
        for n in (shape.d_model, shape.vocab_size)
    )
    stages = []
    for i, module in zip(mine, modules, strict=True):
        into, out = (hidden if i else tokens,), (logits if i == parts - 1 else hidden,)
        stages.append(Stage(module, i, parts, device, input_args=into, output_args=out))
        stages[-1].optimizer = optimizer
    single = args.schedule in ("1f1b", "gpipe")
    schedule = SCHEDULES[args.schedule](
        stages[0] if single else stages, args.accum, scale_grads=False,
        loss_fn=lambda y, labels: loss_of(y, labels) / args.accum,
    )  # fmt: skip
    pool = torch_steps.random_tokens(shape.vocab_size, rows * args.accum, length, device)
    last = parts - 1 in mine

    def step(i: int) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        inputs = (pool[i % 4, :, :-1].contiguous(),) if 0 in mine else ()
        labels = {"target": pool[i % 4, :, 1:].contiguous(), "losses": losses} if last else {}
        with sdpa_kernel(BACKENDS[args.attention]):
            schedule.step(*inputs, return_outputs=False, **labels)
        optimizer.step()
        return torch.stack(losses).sum() * gpus if last else torch.zeros((), device=device)

    torch_steps.run(step, args, rows * args.accum * length, pipe=gpus)


if __name__ == "__main__":
    main()
