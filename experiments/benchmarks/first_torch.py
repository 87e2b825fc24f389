"""The models of `first.py` in PyTorch: compiled as a whole, or block by block where that is what fits, fused AdamW."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from models.llama import preset

from . import torch_llama
from .gpu import measure

RATE, DECAY = 3e-4, 0.1


class Block(nn.Module):
    def __init__(self, d: int, heads: int, causal: bool, before: bool, dropout: float):
        super().__init__()
        self.heads, self.causal, self.before = heads, causal, before
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)
        self.dropout = nn.Dropout(dropout)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        B, S, D = x.shape
        q, k, v = self.qkv(x).view(B, S, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.dropout(self.out(y.transpose(1, 2).reshape(B, S, D)))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(F.gelu(self.up(x), approximate="tanh" if self.causal else "none")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.before:
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class Text(nn.Module):
    """GPT-2, or BERT with its head for masked words."""

    def __init__(self, vocab: int, layers: int, d: int, heads: int, length: int, causal: bool, dropout: float = 0):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab, d), nn.Embedding(length, d)
        self.types = None if causal else nn.Embedding(2, d)
        self.first = None if causal else nn.LayerNorm(d)
        self.blocks = nn.ModuleList(Block(d, heads, causal, causal, dropout) for _ in range(layers))
        self.norm, self.dropout = nn.LayerNorm(d), nn.Dropout(dropout)
        self.dense = None if causal else nn.Linear(d, d)
        self.head = nn.Linear(d, vocab, bias=not causal)
        self.head.weight = self.embed.weight
        for x in self.parameters():
            if x.dim() > 1:
                nn.init.normal_(x, std=0.02)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        if self.types is not None:
            x = self.first(x + self.types(torch.zeros_like(tokens)))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        if self.dense is not None:
            x = F.gelu(self.dense(x))
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


class Images(nn.Module):
    """A model of torchvision with its loss; ViT with fused attention, as `Block` has it."""

    def __init__(self, name: str):
        super().__init__()
        if name == "resnet50":
            import torchvision

            self.model = torchvision.models.resnet50()
            return
        d = 768
        self.patches, self.first = nn.Conv2d(3, d, 16, 16), nn.Parameter(torch.zeros(1, 1, d))
        self.positions = nn.Parameter(torch.randn(1, 197, d) * 0.02)
        self.blocks = nn.Sequential(*(Block(d, 12, False, True, 0) for _ in range(12)))
        self.norm, self.head, self.model = nn.LayerNorm(d), nn.Linear(d, 1000), None

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.model is not None:
            return F.cross_entropy(self.model(images), labels)
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), 1, -1), x], 1) + self.positions
        return F.cross_entropy(self.head(self.norm(self.blocks(x))[:, 0]), labels)


class Adapted(nn.Module):
    """A frozen product in bf16 with an adapter of rank 16."""

    def __init__(self, into: int, out: int):
        super().__init__()
        frozen = torch.randn(out, into, dtype=torch.bfloat16) * 0.02
        self.weight = nn.Parameter(frozen, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(16, into) * 0.01), nn.Parameter(torch.zeros(out, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype)) * 2.0


def llama(name: str, length: int) -> tuple[nn.Module, Callable]:
    """Return a Llama, and its loss, compiled block by block."""
    shape = preset({"lora-8b": "8b", "llama-125m": "125m"}[name])
    if name == "lora-8b":
        torch_llama.Linear = Adapted
    model = torch_llama.Llama(shape, False)
    if name == "lora-8b":
        for key, x in model.named_parameters():
            if not key.endswith((".a", ".b")) or key.startswith("head"):
                x.requires_grad_(False)
                x.data = x.data.to(torch.bfloat16)
    else:
        torch_llama.initialize(model)
        model.head.weight = model.embed.weight
    for block in model.blocks:
        torch_llama.prepare(block, "none", True)
    cos, sin = torch_llama.tables(shape, length, torch.device("cuda"))
    if name == "lora-8b":
        head = torch.compile(lambda x, y: torch_llama.cross_entropy(F.linear(model.norm(x), model.head.weight), y))
    else:
        head = torch.compile(lambda x, y: torch_llama.cross_entropy(model.head(model.norm(x)), y))

    def loss(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = model.embed(tokens)
        for block in model.blocks:
            x = block(x, cos, sin)
        return head(x, labels)

    return model, loss


TEXT = {
    "gpt2": (50304, 12, 768, 12, 1024, True),
    "gpt2-large": (50304, 36, 1280, 20, 1024, True),
    "bert-large": (30592, 24, 1024, 16, 512, False),
    "gpt2-dropout": (50304, 12, 768, 12, 1024, True, 0.1),
}


def measured(name: str, case: Any, batch: dict[str, Any]) -> dict[str, Any]:
    """Run a case; return its record."""
    begin = time.perf_counter()
    torch.set_float32_matmul_precision("high")
    torch.set_default_device("cuda")
    if name in TEXT or name in ("vit", "resnet50"):
        model = Text(*TEXT[name]) if name in TEXT else Images(name).to(memory_format=torch.channels_last)
        loss_of = torch.compile(model)
    else:
        model, loss_of = llama(name, case.length)
    weights = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, weight_decay=DECAY, fused=True)
    x, labels = (torch.from_numpy(batch[key].copy()).cuda() for key in (*(batch.keys() - {"labels"}), "labels"))
    labels = labels.long()
    if "images" in batch:
        x = x.permute(0, 3, 1, 2)  # the channels stay last in memory

    def run() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(x, labels)
        loss.backward()
        if "gradient_clipping" in case.config:
            nn.utils.clip_grad_norm_(weights, case.config["gradient_clipping"])
        optimizer.step()
        return loss.detach()

    from .first import steps

    first = float(run())
    start_s = time.perf_counter() - begin
    found = measure(run, lambda _: torch.cuda.synchronize(), steps=steps(run, float))
    return {
        "torch": torch.__version__, "device": torch.cuda.get_device_name(), "start_s": round(start_s, 1), **found,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "losses": [round(first, 4), round(float(run()), 4)],
    }  # fmt: skip
