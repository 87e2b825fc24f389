"""The Llama of `models/llama.py` in PyTorch, for the peers in these benchmarks: fp32 parameters, products in bf16."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from models.llama import LlamaConfig


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


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


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
        return self.down(swiglu(self.gate(x), self.up(x)))


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


def initialize(model: Llama) -> None:
    """Draw the parameters as `models/llama.py` does: what is added to the residual is smaller in deeper models."""
    last = 0.02 / (2 * len(model.blocks)) ** 0.5
    for name, x in model.named_parameters():
        if "norm" in name:
            nn.init.ones_(x)
        else:
            nn.init.normal_(x, std=last if name.endswith((".o.weight", ".down.weight")) else 0.02)


def prepare(block: nn.Module, remat: str, compiled: bool) -> None:
    """Let a block checkpoint its activations ("none", "matmuls" or "full"), and compile it."""
    if remat != "none":
        context = {"context_fn": _kept} if remat == "matmuls" else {}
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **context)
    if compiled:
        block.forward = torch.compile(block.forward, dynamic=False)


def _kept() -> Any:
    """Selective checkpointing: keep products and attention outputs, recompute the rest."""
    names = ("mm", "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention")
    ops = {getattr(torch.ops.aten, name).default for name in names}

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
