"""The models of `mixtures.py` in PyTorch, as a user who wants their speed writes them today.

What was chosen, and why:

- Grouped products as in transformers 5 and torchtitan: rows sorted by expert, gate and up in one product.
- Rows move by gathers in both directions (`Moved`); the gradient of an index would add by atomics.
- Blocks and loss are compiled, each once for all layers; the fused AdamW; no CUDA graphs, no checkpointing.
- Attention by the fastest kernel of cuDNN's and FlashAttention's, with MLA's values as they are or padded to the width
  of its keys: `fastest_attention` times them first.
- RoPE rotates halves, DeepSeek's too, whose weights are permuted for that where speed counts.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.decoder_config import DecoderConfig

from .first_torch import record
from .torch_llama import Embedding, Linear, Norm, cross_entropy, rotate, swiglu

grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm  # before 2.10 it had no public name


class Moved(torch.autograd.Function):
    """Rows by their numbers: y[i] = x[to[i]]; x[j] has `copies` places in y, which are back[j * copies:]."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, to: torch.Tensor, back: torch.Tensor, copies: int) -> torch.Tensor:
        ctx.save_for_backward(back)
        ctx.copies = copies
        return x[to]

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        return dy[back].unflatten(0, (-1, ctx.copies)).sum(1), None, None, None


class Mixture(nn.Module):
    def __init__(self, shape: DecoderConfig):
        super().__init__()
        assert shape.mixture is not None
        self.mixture, d = shape.mixture, shape.d_model
        count, width = self.mixture.num_experts, self.mixture.width
        self.router = Linear(d, count)
        self.gate_up = nn.Parameter(torch.empty(count, 2 * width, d))
        self.down = nn.Parameter(torch.empty(count, d, width))
        self.shared = GatedMLP(d, self.mixture.shared) if self.mixture.shared else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        m, rows = self.mixture, x.flatten(0, 1)
        weights, chosen = F.linear(rows.float(), self.router.weight).softmax(-1).topk(m.top_k, -1)
        if m.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        experts, order = chosen.flatten().sort(stable=True)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        ends = torch.searchsorted(experts, torch.arange(m.num_experts, device=order.device), right=True, out_int32=True)
        h = Moved.apply(rows, order // m.top_k, back, m.top_k)
        h = grouped_mm(h, self.gate_up.to(x.dtype).transpose(1, 2), offs=ends)
        h = grouped_mm(swiglu(*h.chunk(2, -1)), self.down.to(x.dtype).transpose(1, 2), offs=ends)
        h = Moved.apply(h, back, order, 1).unflatten(0, (-1, m.top_k))
        y = (h * weights[..., None].to(x.dtype)).sum(1).view_as(x)
        return y if self.shared is None else y + self.shared(x)


class GatedMLP(nn.Module):
    def __init__(self, d: int, width: int):
        super().__init__()
        self.gate_up, self.down = Linear(d, 2 * width), Linear(width, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(swiglu(*self.gate_up(x).chunk(2, -1)))


class Attention(nn.Module):
    """Grouped-query attention with norms of queries and keys."""

    def __init__(self, shape: DecoderConfig):
        super().__init__()
        head, self.sizes = shape.head_dim, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        self.qkv, self.out = (
            Linear(shape.d_model, sum(self.sizes) * head),
            Linear(shape.num_heads * head, shape.d_model),
        )
        self.q_norm, self.k_norm = Norm(head, eps=shape.norm_eps), Norm(head, eps=shape.norm_eps)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (sum(self.sizes), -1)).split(self.sizes, 2)
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        return self.out(causal(q, k, v).flatten(2))


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv:2405.04434, section 2.1) without a latent of the queries."""

    def __init__(self, shape: DecoderConfig, padded: bool):
        super().__init__()
        assert shape.latent is not None
        self.latent, self.heads, self.padded, d = shape.latent, shape.num_heads, padded, shape.d_model
        m = shape.latent
        self.q, self.kv_down = Linear(d, self.heads * (m.plain + m.rotated)), Linear(d, m.rank + m.rotated)
        self.kv_norm, self.kv_up = Norm(m.rank, eps=1e-6), Linear(m.rank, self.heads * (m.plain + m.value))
        self.out = Linear(self.heads * m.value, d)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        m = self.latent
        q, q_rotated = self.q(x).unflatten(-1, (self.heads, -1)).split([m.plain, m.rotated], -1)
        latent, key = self.kv_down(x).split([m.rank, m.rotated], -1)
        k, v = self.kv_up(self.kv_norm(latent)).unflatten(-1, (self.heads, -1)).split([m.plain, m.value], -1)
        key = rotate(key[:, :, None], cos, sin).expand(-1, -1, self.heads, -1)
        q, k = torch.cat([q, rotate(q_rotated, cos, sin)], -1), torch.cat([k, key], -1)
        return self.out(causal(q, k, v, self.padded).flatten(2))


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padded: bool = False) -> torch.Tensor:
    """Attend to the past: [B, S, heads, width] -> the same; `padded`: values become as wide as keys for the kernel."""
    width = v.shape[-1]
    v = F.pad(v, (0, k.shape[-1] - width)) if padded else v
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return y.transpose(1, 2)[..., :width]


class Block(nn.Module):
    def __init__(self, shape: DecoderConfig, padded: bool):
        super().__init__()
        self.attention = LatentAttention(shape, padded) if shape.latent else Attention(shape)
        self.mlp = Mixture(shape) if shape.mixture else GatedMLP(shape.d_model, shape.d_ff)
        self.norm1, self.norm2 = (Norm(shape.d_model, eps=shape.norm_eps) for _ in range(2))

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Head(nn.Module):
    """The last norm, the product with the vocabulary and the loss."""

    def __init__(self, shape: DecoderConfig):
        super().__init__()
        self.norm, self.head = Norm(shape.d_model, eps=shape.norm_eps), Linear(shape.d_model, shape.vocab_size)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return cross_entropy(self.head(self.norm(x)), labels)


class Decoder(nn.Module):
    def __init__(self, shape: DecoderConfig, padded: bool):
        super().__init__()
        self.embed, self.head = Embedding(shape.vocab_size, shape.d_model), Head(shape)
        self.blocks = nn.ModuleList(Block(shape.of_layer(i), padded) for i in range(shape.num_layers))
        last = 0.02 / (2 * shape.num_layers) ** 0.5
        for name, x in self.named_parameters():
            if x.dim() > 1:
                nn.init.normal_(x, std=last if name.endswith(("out.weight", "down.weight", "mlp.down")) else 0.02)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(x, labels)


def angles(shape: DecoderConfig, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines [length, half of what is rotated]."""
    width = shape.rotary_width
    rates = shape.rope_theta ** (-torch.arange(0, width, 2).float() / width)
    found = torch.outer(torch.arange(length).float(), rates)
    return found.cos(), found.sin()


def fastest_attention(shape: DecoderConfig, rows: int, length: int) -> tuple[str, bool]:
    """Time forward and backward of the kernels, and let PyTorch have the fastest one alone; return (it, padded)."""
    wide = shape.latent.value if shape.latent else shape.head_dim
    sizes = (shape.num_heads, shape.head_dim), (shape.num_kv_heads, shape.head_dim), (shape.num_kv_heads, wide)
    parts = [torch.randn(rows, length, *size, dtype=torch.bfloat16, requires_grad=True) for size in sizes]
    dy = torch.randn(rows, length, shape.num_heads, wide, dtype=torch.bfloat16)
    found: dict[tuple[SDPBackend, bool], float] = {}
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        for padded in (False, True) if wide < shape.head_dim else (False,):
            try:
                with sdpa_kernel(backend):
                    for turn in range(8):
                        if turn == 3:
                            torch.cuda.synchronize()
                            begin = time.perf_counter()
                        torch.autograd.grad(causal(*parts, padded), parts, dy)
                    torch.cuda.synchronize()
                found[backend, padded] = time.perf_counter() - begin
            except RuntimeError:  # it does not take these shapes
                continue
    best, padded = min(found, key=found.__getitem__)
    torch.backends.cuda.enable_cudnn_sdp(best is SDPBackend.CUDNN_ATTENTION)
    torch.backends.cuda.enable_flash_sdp(best is SDPBackend.FLASH_ATTENTION)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_math_sdp(False)
    return best.name, padded


def measured(shape: DecoderConfig, tokens: np.ndarray, tuned: bool = False) -> dict[str, Any]:
    """Train on the same batch in every step; return what was measured."""
    from .mixtures import CLIP, OPTIMIZER

    begin, on_gpu = time.perf_counter(), torch.cuda.is_available()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda" if on_gpu else "cpu"):
        text = torch.tensor(tokens).long()
        inputs, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        kernel, padded = fastest_attention(shape, *inputs.shape) if on_gpu else ("cpu", False)
        model, (cos, sin) = Decoder(shape, padded), angles(shape, inputs.shape[1])
    # A CPU traces alone: nobody measures there, and Inductor would compile C++.
    how = {"mode": "max-autotune-no-cudagraphs" if tuned else "default"} if on_gpu else {"backend": "aot_eager"}
    for part in (*model.blocks, model.head):
        part.compile(dynamic=False, **how)
    weights = list(model.parameters())
    optimizer = torch.optim.AdamW(weights, **OPTIMIZER, fused=True)

    def run() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(inputs, labels, cos, sin)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        return loss.detach()

    return {"attention": kernel, "padded_values": padded, **record(run, begin)}
