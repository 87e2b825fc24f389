"""Measure a LoRA or QLoRA fine-tune of a Llama on one GPU in PyTorch as one JSON line, beside `lora.py`.

    python -m experiments.benchmarks.lora_torch --preset 8b --quantized nf4 --remat full --micro-batch 2

The frozen matrices are bf16, or torchao's NF4 as in torchtune's QLoRA; adapters of rank 16 beside all of a layer's
matrices, float32 with products in bf16; blocks and loss compiled, cuDNN's attention or FlashAttention, the fused AdamW.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from models.llama import PRESETS, LlamaConfig, preset

from . import torch_llama
from .gpu import PEAK, measure

RANK, SEQUENCE = 16, 4096


class Adapted(nn.Module):
    """A frozen product with an adapter."""

    def __init__(self, into: int, out: int, quantized: str):
        super().__init__()
        weight = torch.randn(out, into, dtype=torch.bfloat16) * 0.02
        self.product: Any = F.linear
        if quantized == "nf4":
            from torchao.quantization import to_nf4
            from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

            weight, self.product = to_nf4(weight), linear_nf4
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.a, self.b = nn.Parameter(torch.randn(RANK, into) * 0.01), nn.Parameter(torch.zeros(out, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype))
        return self.product(x, self.weight) + 2.0 * y


class Head(nn.Module):
    """The last norm, the product with the vocabulary and the loss."""

    def __init__(self, model: torch_llama.Llama):
        super().__init__()
        self.norm, self.head = model.norm, model.head

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return torch_llama.cross_entropy(self.head(self.norm(x)), labels)


def adapted(shape: LlamaConfig, quantized: str) -> torch_llama.Llama:
    """Make the model layer by layer, so that never more than one is unquantised."""
    with torch.device("meta"):
        model = torch_llama.Llama(shape, False)
    for block in model.blocks:
        for part in (block.attention, block.mlp):
            for name, x in list(part.named_children()):
                setattr(part, name, Adapted(x.in_features, x.out_features, quantized))
    for part in model.modules():
        for name, x in list(part.named_parameters(recurse=False)):
            if x.is_meta:  # norms, the embedding, the head
                value = torch.ones(x.shape) if x.dim() == 1 else torch.randn(x.shape) * 0.02
                setattr(part, name, nn.Parameter(value.to(torch.bfloat16), requires_grad=False))
    return model


def main(argv: list[str] | None = None) -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--preset", choices=sorted(PRESETS), default="8b")
    p.add_argument("--quantized", choices=["nf4", "none"], default="none")
    p.add_argument("--micro-batch", type=int, default=2, help="sequences")
    p.add_argument("--sequence", type=int, default=SEQUENCE)
    p.add_argument("--remat", choices=["none", "full"], default="none")
    args = p.parse_args(argv)
    on_gpu, shape = torch.cuda.is_available(), preset(args.preset)
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"):
        model = adapted(shape, args.quantized)
        cos, sin = torch_llama.tables(shape, args.sequence, torch.get_default_device())
        text = torch.randint(0, shape.vocab_size, (args.micro_batch, args.sequence + 1))
    head = Head(model)
    for block in model.blocks:
        torch_llama.prepare(block, args.remat, compiled=on_gpu)
    loss_of = torch.compile(head) if on_gpu else head
    weights = [x for x in model.parameters() if x.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, fused=True)
    inputs, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    losses = []

    def run() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        x = model.embed(inputs)
        for block in model.blocks:
            x = block(x, cos, sin)
        loss = loss_of(x, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        losses.append(loss.detach())
        return loss.detach()

    kernels = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION] if on_gpu else [SDPBackend.MATH]
    with sdpa_kernel(kernels, set_priority=True):
        found = measure(run, (lambda _: torch.cuda.synchronize()) if on_gpu else float, repeats=5, steps=4)
    tokens, device = args.micro_batch * args.sequence, torch.cuda.get_device_name() if on_gpu else "cpu"
    # As in `lora.py`.
    flops = (shape.flops_per_token(args.sequence) - shape.flops_per_token(1) / 3) * tokens
    record = {
        **vars(args), "torch": torch.__version__, **found, "device": device,
        "tokens_s": round(tokens / found["step_s"]), "model_tflops": round(flops / found["step_s"] / 1e12, 1),
        "mfu": round(flops / found["step_s"] / PEAK.get(device, float("inf")), 3),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else 0.0,
        "losses": {i + 1: round(float(losses[i]), 4) for i in (0, 4, 9, len(losses) - 1)},
    }  # fmt: skip
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
