"""Measure a Llama in PyTorch under FSDP2, tensor or context parallelism as one JSON line, beside `llama.py`.

    torchrun --nproc_per_node 2 -m experiments.benchmarks.torch_parallel --stage 2 --micro-batch 4
    torchrun --nproc_per_node 2 -m experiments.benchmarks.torch_parallel --parallel context --sequence 16384

The conditions are those of `llama.py`: random tokens, bf16 compute over fp32 masters, AdamW, clip 1.0, cross-entropy in
fp32. Each block is compiled. fp8 is torchao's, tensor by tensor with current scales and gathered in fp8, as torchtitan
uses it. Tensor parallelism is laid out as in torchtitan: sequence parallel norms and residuals, a vocabulary-parallel
loss, and with `--async-tp` collectives split into pieces behind the products.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator
from importlib.metadata import version

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.attention import sdpa_kernel

from experiments.benchmarks import torch_steps
from experiments.benchmarks.torch_llama import Llama, cross_entropy, initialize, prepare, tables
from experiments.benchmarks.torch_steps import BACKENDS
from models.llama import LlamaConfig


def parse() -> argparse.Namespace:
    p = torch_steps.parser(__doc__.splitlines()[0])
    p.add_argument("--parallel", choices=["fsdp", "tensor", "context"], default="fsdp")
    p.add_argument("--stage", type=int, choices=[2, 3], help="ZeRO's, of fsdp and context; default 3")
    torch_steps.add_reduce(p)
    p.add_argument("--fp8", action="store_true", help="multiply the blocks' weights in fp8 (torchao)")
    p.add_argument("--async-tp", action="store_true")
    p.add_argument("--rotate", choices=["allgather", "alltoall"], default="alltoall", help="of keys and values")
    args = p.parse_args()
    if args.parallel == "tensor" and args.stage:
        p.error(f"--stage {args.stage} with --parallel tensor: nothing is sharded by ZeRO there; leave it out")
    if args.parallel != "fsdp" and args.fp8:
        p.error(f"--fp8 with --parallel {args.parallel}: only fsdp multiplies in fp8 here")
    if args.parallel != "tensor" and args.async_tp:
        p.error(f"--async-tp with --parallel {args.parallel}: only tensor has these collectives")
    args.stage = args.stage or (3 if args.parallel != "tensor" else None)
    return args


def build(args: argparse.Namespace, shape: LlamaConfig, device: torch.device, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Llama(shape, repeat=args.parallel == "context")
    if args.fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        settings = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=device.type != "cuda")
        convert_to_float8_training(model.blocks, config=settings)
    if args.parallel == "tensor":
        divide(model, mesh)
    for block in model.blocks:
        prepare(block, args.remat, not args.eager)
    if args.parallel != "tensor":
        shard(model, args, mesh)
    if args.async_tp:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        torch._inductor.config._micro_pipeline_tp = True
        enable_symm_mem_for_group(mesh.get_group().group_name)
    model.to_empty(device=device)
    initialize(model)
    return model


def shard(model: nn.Module, args: argparse.Namespace, mesh: DeviceMesh) -> None:
    """Shard as torchtitan does: the embedding, each block, and what the step uses last, which stays gathered."""
    reduce = torch.bfloat16 if args.reduce == "bf16" else torch.float32
    options = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce, cast_forward_inputs=False)}
    for part in (model.embed, *model.blocks):
        fully_shard(part, reshard_after_forward=args.stage == 3, **options)
    fully_shard([model.norm, model.head], reshard_after_forward=False, **options)
    fully_shard(model, reshard_after_forward=False, **options)


def divide(model: nn.Module, mesh: DeviceMesh) -> None:
    """Lay the model out over the mesh as torchtitan does."""
    rows, whole = Shard(1), Replicate()
    ends = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=rows),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=rows, output_layouts=Shard(-1), use_local_output=False),
    }
    plan = {
        "norm1": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(rows, None, None), desired_input_layouts=(whole, None, None)),
        **{f"attention.{name}": ColwiseParallel() for name in "qkv"},
        "attention.o": RowwiseParallel(output_layouts=rows),
        "norm2": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(rows,), desired_input_layouts=(whole,)),
        "mlp.gate": ColwiseParallel(),
        "mlp.up": ColwiseParallel(),
        "mlp.down": RowwiseParallel(output_layouts=rows),
    }
    parallelize_module(model, mesh, ends)
    for block in model.blocks:
        parallelize_module(block, mesh, plan)


@contextlib.contextmanager
def over_parts(args: argparse.Namespace, mesh: DeviceMesh, *by_sequence: tuple[torch.Tensor, int]) -> Iterator[None]:
    """Divide these tensors along their dimensions of the sequence, and attention with them; or the vocabulary."""
    if args.parallel == "context":
        buffers, dims = map(list, zip(*by_sequence, strict=True))
        with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=set(buffers)):
            yield
    elif args.parallel == "tensor":
        with loss_parallel():
            yield
    else:
        yield


def main() -> None:
    args = parse()
    device, shape = torch_steps.join(), torch_steps.shape_of(args)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    set_rotate_method(args.rotate)
    model = build(args, shape, device, mesh)
    loss_fn = cross_entropy if args.parallel == "tensor" else torch.compile(cross_entropy, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, (0.9, 0.95), weight_decay=0.1, fused=True)
    alone = args.parallel == "fsdp"
    stream = dist.get_rank() if alone else 0
    pool = torch_steps.random_tokens(shape.vocab_size, args.micro_batch, args.sequence, device, stream)
    angles = tables(shape, args.sequence, device)

    def step(i: int) -> torch.Tensor:
        tokens, labels = pool[i % 4, :, :-1].clone(), pool[i % 4, :, 1:].clone()
        cos, sin = (x.clone() for x in angles)
        with (
            sdpa_kernel(BACKENDS[args.attention]),
            over_parts(args, mesh, (tokens, 1), (labels, 1), (cos, 0), (sin, 0)),
        ):
            loss = loss_fn(model(tokens, cos, sin), labels)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if args.fp8:
            from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

            precompute_float8_dynamic_scale_for_fsdp(model)  # of all weights, in one all-reduce
        return loss

    rows = args.micro_batch * (dist.get_world_size() if alone else 1)
    torch_steps.run(step, args, rows * args.sequence, **({"torchao": version("torchao")} if args.fp8 else {}))


if __name__ == "__main__":
    main()
