"""Measure a Llama in PyTorch under FSDP2, tensor or context parallelism as one JSON line, beside `llama.py`.

    torchrun --nproc_per_node 2 -m experiments.benchmarks.torch_parallel --parallel context --sequence 16384

The conditions are those of `llama.py`: random tokens, bf16 compute over fp32 masters, AdamW, clip 1.0, cross-entropy in
fp32. Each block is compiled. Tensor parallelism is laid out as in torchtitan: sequence parallel norms and residuals, a
vocabulary-parallel loss, and with `--async-tp` collectives split into pieces behind the products.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
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
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from models.llama import PRESETS, LlamaConfig, preset

WARM_UP = 4
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


class Linear(nn.Linear):
    """A product in the dtype of its input: fp32 masters are cast where they are used."""

    def __init__(self, into: int, out: int):
        super().__init__(into, out, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Embedding(nn.Embedding):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return F.embedding(tokens, self.weight.to(torch.bfloat16))


class Norm(nn.RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.float().chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: LlamaConfig, repeat: bool):
        super().__init__()
        d, self.head, self.repeat = shape.d_model, shape.d_model // shape.num_heads, repeat
        self.q, self.o = Linear(d, d), Linear(d, d)
        self.k, self.v = (Linear(d, self.head * shape.num_kv_heads) for _ in range(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head)) for f in (self.q, self.k, self.v))
        q, k, v = (y.transpose(1, 2) for y in (rotate(q, cos, sin), rotate(k, cos, sin), v))
        if self.repeat:  # ring attention takes as many key-value heads as heads
            k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=not self.repeat)
        return self.o(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, shape: LlamaConfig):
        super().__init__()
        self.gate, self.up = (Linear(shape.d_model, shape.d_ff) for _ in range(2))
        self.down = Linear(shape.d_ff, shape.d_model)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, shape: LlamaConfig, repeat: bool):
        super().__init__()
        self.attention, self.mlp = Attention(shape, repeat), MLP(shape)
        self.norm1, self.norm2 = Norm(shape.d_model), Norm(shape.d_model)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, shape: LlamaConfig, repeat: bool):
        super().__init__()
        self.embed = Embedding(shape.vocab_size, shape.d_model)
        self.blocks = nn.ModuleList(Block(shape, repeat) for _ in range(shape.num_layers))
        self.norm, self.head = Norm(shape.d_model), Linear(shape.d_model, shape.vocab_size)

    def forward(self, tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def tables(shape: LlamaConfig, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [length, half a head]."""
    head = shape.d_model // shape.num_heads
    rates = shape.rope_theta ** (-torch.arange(0, head, 2, device=device).float() / head)
    angles = torch.outer(torch.arange(length, device=device).float(), rates)
    return angles.cos(), angles.sin()


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    p.add_argument("--preset", choices=sorted(PRESETS), default="1b")
    p.add_argument("--layers", type=int, help="instead of the preset's")
    p.add_argument("--parallel", choices=["fsdp", "tensor", "context"], default="fsdp", help="fsdp and context: ZeRO-3")
    p.add_argument("--async-tp", action="store_true")
    p.add_argument("--rotate", choices=["allgather", "alltoall"], default="alltoall", help="of keys and values")
    p.add_argument("--rows", type=int, default=1, help="sequences per GPU with fsdp, else of all GPUs together")
    p.add_argument("--sequence", type=int, default=4096)
    p.add_argument("--remat", choices=["none", "matmuls", "full"], default="none")
    p.add_argument("--reduce", choices=["fp32", "bf16"], default="bf16", help="dtype of the gradient reduction")
    p.add_argument("--attention", choices=sorted(BACKENDS), default="cudnn")
    p.add_argument("--eager", action="store_true", help="compile nothing but the loss")
    p.add_argument("--steps", type=int, default=10)
    p.add_argument("--tag", default="")
    return p.parse_args()


def kept() -> Any:
    """Selective checkpointing: keep products and attention outputs, recompute the rest."""
    names = ("mm", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention")
    ops = {getattr(torch.ops.aten, name).default for name in names}

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def build(args: argparse.Namespace, shape: LlamaConfig, device: torch.device, mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Llama(shape, repeat=args.parallel == "context")
    if args.parallel == "tensor":
        divide(model, mesh)
    for block in model.blocks:
        if args.remat != "none":
            context = {"context_fn": kept} if args.remat == "matmuls" else {}
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, **context)
        if not args.eager:
            block.forward = torch.compile(block.forward, dynamic=False)
        if args.parallel != "tensor":
            fully_shard(block, mesh=mesh, mp_policy=policy(args))
    if args.parallel != "tensor":
        fully_shard(model, mesh=mesh, mp_policy=policy(args))
    if args.async_tp:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        torch._inductor.config._micro_pipeline_tp = True
        enable_symm_mem_for_group(mesh.get_group().group_name)
    model.to_empty(device=device)
    for name, x in model.named_parameters():
        nn.init.ones_(x) if "norm" in name else nn.init.normal_(x, std=0.02)
    return model


def policy(args: argparse.Namespace) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16 if args.reduce == "bf16" else torch.float32)


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
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    set_rotate_method(args.rotate)
    shape = preset(args.preset, **({"num_layers": args.layers} if args.layers else {}))
    start = time.perf_counter()
    model = build(args, shape, device, mesh)
    loss_fn = cross_entropy if args.parallel == "tensor" else torch.compile(cross_entropy, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, (0.9, 0.95), weight_decay=0.1, fused=True)
    stream = dist.get_rank() if args.parallel == "fsdp" else 0
    generator = torch.Generator().manual_seed(1 + stream)
    pool = torch.randint(0, shape.vocab_size, (4, args.rows, args.sequence + 1), generator=generator).to(device)
    losses, times = [], []
    for i in range(WARM_UP + args.steps):
        begin = time.perf_counter()
        tokens, labels = pool[i % 4, :, :-1].clone(), pool[i % 4, :, 1:].clone()
        cos, sin = tables(shape, args.sequence, device)
        with (
            sdpa_kernel(BACKENDS[args.attention]),
            over_parts(args, mesh, (tokens, 1), (labels, 1), (cos, 0), (sin, 0)),
        ):
            loss = loss_fn(model(tokens, cos, sin), labels)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
        losses.append(float((loss.full_tensor() if hasattr(loss, "full_tensor") else loss).detach()))
        if i == 0:
            first_s = time.perf_counter() - start
    median, gpus = statistics.median(times[WARM_UP:]), dist.get_world_size()
    tokens_per_gpu = args.rows * args.sequence / (1 if args.parallel == "fsdp" else gpus)
    record = {
        **vars(args), "gpus": gpus, "first_step_s": round(first_s, 1), "step_s": round(median, 5),
        "step_s_min": round(min(times[WARM_UP:]), 5), "step_s_max": round(max(times[WARM_UP:]), 5),
        "tokens_s_gpu": round(tokens_per_gpu / median), "losses": [round(x, 5) for x in losses[:4]],
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if cuda else 0,
        "torch": torch.__version__,
    }  # fmt: skip
    if dist.get_rank() == 0:
        print(json.dumps(record), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
