"""The models of `first.py` in PyTorch: compiled as a whole, a Llama block by block, with the fused AdamW."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from models.llama import LlamaConfig

from . import torch_llama
from .first_flax import STAGES, Size
from .gpu import measure


class Block(nn.Module):
    def __init__(self, size: Size, causal: bool = False, before: bool = True, tanh: bool = False, cross: bool = False):
        super().__init__()
        d = size.d
        self.heads, self.causal, self.before, self.gelu = size.heads, causal, before, "tanh" if tanh else "none"
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, size.d_ff), nn.Linear(size.d_ff, d)
        self.dropout = nn.Dropout(size.dropout)
        if cross:
            self.norm3, self.query, self.kv, self.cross = nn.LayerNorm(d), *(nn.Linear(d, n) for n in (d, 2 * d, d))

    def split(self, y: torch.Tensor, n: int) -> tuple[torch.Tensor, ...]:
        return y.view(*y.shape[:2], n, self.heads, -1).permute(2, 0, 3, 1, 4).unbind()

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        y = F.scaled_dot_product_attention(*self.split(self.qkv(x), 3), is_causal=self.causal)
        return self.dropout(self.out(y.transpose(1, 2).reshape(x.shape)))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.down(F.gelu(self.up(x), approximate=self.gelu)))

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
        if not self.before:
            x = self.norm1(x + self.attention(x))
            return self.norm2(x + self.mlp(x))
        x = x + self.attention(self.norm1(x))
        if other is not None:
            q, k, v = *self.split(self.query(self.norm3(x)), 1), *self.split(self.kv(other), 2)
            y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
            x = x + self.dropout(self.cross(y))
        return x + self.mlp(self.norm2(x))


def places(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.shape[1], device=x.device)


class Text(nn.Module):
    """GPT-2, or BERT with its head for masked words."""

    def __init__(self, size: Size, causal: bool):
        super().__init__()
        d, vocab = size.d, size.vocab_rows
        self.embed, self.positions = nn.Embedding(vocab, d), nn.Embedding(size.length, d)
        self.types = None if causal else nn.Embedding(2, d)
        self.first = None if causal else nn.LayerNorm(d)
        self.blocks = nn.ModuleList(Block(size, causal, causal, causal) for _ in range(size.layers))
        self.norm, self.dropout = nn.LayerNorm(d), nn.Dropout(size.dropout)
        self.dense = None if causal else nn.Linear(d, d)
        self.head = nn.Linear(d, vocab, bias=not causal)
        self.head.weight = self.embed.weight

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        x = self.embed(inputs) + self.positions(places(inputs))
        if self.types is not None:
            x = self.first(x + self.types(torch.zeros_like(inputs)))
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x if self.dense is None else F.gelu(self.dense(x))))


class ViT(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        d = size.d
        self.patches, self.first = nn.Conv2d(3, d, 16, 16), nn.Parameter(torch.zeros(1, 1, d))
        self.positions = nn.Parameter(torch.randn(1, (size.length // 16) ** 2 + 1, d) * 0.02)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, size.vocab)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), 1, -1), x], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class Whisper(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        d, vocab = size.d, size.vocab_rows
        self.convs = nn.ModuleList(nn.Conv1d(n, d, 3, s, 1) for n, s in ((80, 1), (d, 2)))
        self.places = nn.Embedding(size.frames // 2, d)
        self.encoder = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.embed, self.positions = nn.Embedding(vocab, d), nn.Embedding(size.length, d)
        self.decoder = nn.ModuleList(Block(size, causal=True, cross=True) for _ in range(size.layers))
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, audio: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        y = audio.transpose(1, 2)
        for conv in self.convs:
            y = F.gelu(conv(y))
        y = y.transpose(1, 2)
        y = y + self.places(places(y))
        for block in self.encoder:
            y = block(y)
        y, x = self.norm1(y), self.embed(inputs) + self.positions(places(inputs))
        for block in self.decoder:
            x = block(x, y)
        return F.linear(self.norm2(x), self.embed.weight)


class Adapted(nn.Module):
    """A frozen product in bf16 with an adapter of rank 16."""

    def __init__(self, into: int, out: int):
        super().__init__()
        frozen = torch.randn(out, into, dtype=torch.bfloat16) * 0.02
        self.weight = nn.Parameter(frozen, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(16, into) * 0.01), nn.Parameter(torch.zeros(out, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) + F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype)) * 2.0


class Llama(nn.Module):
    """A Llama, or its frozen weights in bf16 with adapters."""

    def __init__(self, size: Size, lora: bool = False):
        super().__init__()
        shape = LlamaConfig(size.layers, size.d, size.heads, size.kv_heads, size.d_ff, vocab_size=size.vocab)
        self.llama = model = torch_llama.Llama(shape, False)
        self.angles = torch_llama.tables(shape, size.length, torch.get_default_device())
        torch_llama.initialize(model)
        if not lora:
            model.head.weight = model.embed.weight
            return
        model.requires_grad_(False).to(torch.bfloat16)
        for part in [part for block in model.blocks for part in (block.attention, block.mlp)]:
            for name, x in list(part.named_children()):
                setattr(part, name, Adapted(x.in_features, x.out_features))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.llama(inputs, *self.angles)


class Bottleneck(nn.Module):
    def __init__(self, features: int, width: int, stride: int):
        super().__init__()
        sizes = [(features, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1)]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, k, s, k // 2, bias=False) for a, b, k, s in sizes)
        self.norms = nn.ModuleList(nn.BatchNorm2d(b) for _, b, _, _ in sizes)
        self.shortcut = nn.Identity()
        if features != 4 * width:
            conv = nn.Conv2d(features, 4 * width, 1, stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(4 * width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for i, (conv, norm) in enumerate(zip(self.convs, self.norms, strict=True)):
            y = norm(conv(F.relu(y) if i else y))
        return F.relu(y + self.shortcut(x))


def resnet(size: Size) -> nn.Module:
    blocks: list[nn.Module] = []
    features = size.d
    for i, depth in enumerate(STAGES[: size.layers]):
        for j in range(depth):
            blocks.append(Bottleneck(features, size.d * 2**i, 2 if i and not j else 1))
            features = 4 * size.d * 2**i
    stem = nn.Conv2d(3, size.d, 7, 2, 3, bias=False), nn.BatchNorm2d(size.d), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(features, size.vocab))


class UNet(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        pairs = list(pairwise(size.d * 2**i for i in range(size.layers)))
        self.downs = nn.ModuleList(self.double(a, b) for a, b in [(3, size.d), *pairs])
        self.ups = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairs[::-1])
        self.joined = nn.ModuleList(self.double(b, a) for a, b in pairs[::-1])
        self.head = nn.Conv2d(size.d, size.vocab, 1)

    def double(self, a: int, b: int) -> nn.Module:
        parts = ((nn.Conv2d(n, b, 3, 1, 1), nn.GroupNorm(8, b), nn.SiLU()) for n in (a, b))
        return nn.Sequential(*(part for three in parts for part in three))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for down in self.downs:
            x = down(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        for up, joined, skip in zip(self.ups, self.joined, skips[-2::-1], strict=True):
            x = joined(torch.cat([skip, up(x)], 1))
        return self.head(x).permute(0, 2, 3, 1)


FAMILIES: dict[str, Callable[[Size], nn.Module]] = {
    "gpt2": partial(Text, causal=True), "bert": partial(Text, causal=False), "vit": ViT, "whisper": Whisper,
    "llama": Llama, "lora": partial(Llama, lora=True), "resnet": resnet, "unet": UNet,
}  # fmt: skip


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.model, self.cross_entropy = model, F.cross_entropy

    def forward(self, labels: torch.Tensor, *inputs: torch.Tensor) -> torch.Tensor:
        logits = self.model(*inputs)
        return self.cross_entropy(logits.flatten(0, -2), labels.flatten())


def compiled(model: nn.Module, how: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """Compile the model with its loss; a Llama block by block."""
    with_loss = WithLoss(model)
    if not isinstance(model, Llama):
        return torch.compile(with_loss, **how)
    for block in model.llama.blocks:
        block.compile(dynamic=False, **how)
    with_loss.cross_entropy = torch.compile(F.cross_entropy, **how)
    return with_loss


def made(case: Any) -> nn.Module:
    """Make the model, with weights of an embedding that are as small as GPT-2's."""
    model = FAMILIES[case.family](case.size)
    for part in model.modules():
        if type(part) is nn.Embedding:
            nn.init.normal_(part.weight, std=0.02)
    return model.to(memory_format=torch.channels_last)


def measured(case: Any, batch: dict[str, Any], tuned: bool = False) -> dict[str, Any]:
    """Run a case; return its record."""
    from .first import DECAY

    begin, on_gpu = time.perf_counter(), torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device(device):
        model = made(case)
    # A CPU traces alone: nobody measures there, and Inductor would compile C++.
    how = {"mode": "max-autotune-no-cudagraphs" if tuned else "default"} if on_gpu else {"backend": "eager"}
    loss_of = compiled(model, how)
    weights = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=case.rate, weight_decay=DECAY, fused=True)
    arrays = [
        torch.from_numpy(batch[name].copy()).to(device) for name in ("labels", *sorted(batch.keys() - {"labels"}))
    ]
    # The channels stay last in memory.
    labels, *inputs = (x.permute(0, 3, 1, 2) if x.is_floating_point() and x.dim() == 4 else x for x in arrays)
    labels = labels.long()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()  # a LoRA's frozen weights were made in fp32

    def run() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, torch.bfloat16):
            loss = loss_of(labels, *inputs)
        loss.backward()
        if "gradient_clipping" in case.config:
            nn.utils.clip_grad_norm_(weights, case.config["gradient_clipping"])
        optimizer.step()
        return loss.detach()

    return record(run, begin)


def record(run: Callable[[], torch.Tensor], begin: float) -> dict[str, Any]:
    """Measure steps; `begin` is when the model began to be made."""
    from .first import steps

    on_gpu = torch.cuda.is_available()
    first = float(run())
    start_s = time.perf_counter() - begin
    wait = (lambda _: torch.cuda.synchronize()) if on_gpu else float
    found = measure(run, wait, steps=steps(run, float))
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return {
        "torch": torch.__version__, "device": torch.cuda.get_device_name() if on_gpu else "cpu",
        "start_s": round(start_s, 1), **found, "peak_gib": round(peak, 2),
        "losses": [round(first, 4), round(float(run()), 4)],
    }  # fmt: skip
