"""What the benchmarks in PyTorch share: options, processes, tokens, measured steps, and the record of a case."""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend

from experiments.benchmarks.gpu import MEASURED, WARM
from models.llama import PRESETS, LlamaConfig, preset

WARM_UP = 4
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}


def parser(description: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--preset", choices=sorted(PRESETS), default="1b")
    p.add_argument("--layers", type=int, help="instead of the preset's")
    p.add_argument("--micro-batch", type=int, default=1, help="sequences per GPU; of all GPUs if they share a batch")
    p.add_argument("--sequence", type=int, default=4096)
    p.add_argument("--remat", choices=["none", "matmuls", "full"], default="none")
    p.add_argument("--attention", choices=sorted(BACKENDS), default="cudnn")
    p.add_argument("--eager", action="store_true", help="compile nothing but the loss")
    p.add_argument("--steps", type=int, default=10, help="measured steps, with and without synchronisation")
    p.add_argument("--tag", default="")
    return p


def add_reduce(p: argparse.ArgumentParser) -> None:
    p.add_argument("--reduce", choices=["fp32", "bf16"], default="bf16", help="dtype of the gradient reduction")


def shape_of(args: argparse.Namespace) -> LlamaConfig:
    return preset(args.preset, **({"num_layers": args.layers} if args.layers else {}))


def join() -> torch.device:
    """Join the process group, and return this process's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl" if cuda else "gloo", **({"device_id": device} if cuda else {}))
    return device


def random_tokens(vocab: int, rows: int, length: int, device: torch.device, stream: int = 0) -> torch.Tensor:
    """Return four batches [4, rows, length + 1]; each stream has its own."""
    generator = torch.Generator().manual_seed(1 + stream)
    return torch.randint(0, vocab, (4, rows, length + 1), generator=generator).to(device)


def run(step: Callable[[int], torch.Tensor], args: argparse.Namespace, tokens: int, **more: Any) -> None:
    """Measure `step(i)`, and print the record.

    Args:
      step: returns a loss; the record has the mean over all processes.
      tokens: those of a step on all GPUs.
    """
    cuda = torch.cuda.is_available()
    losses: list[torch.Tensor] = []

    def timed(n: int, synchronise: bool) -> list[float]:
        times = []
        for _ in range(n):
            begin = time.perf_counter()
            losses.append(step(len(losses)).detach())
            if synchronise and cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        return times

    timed(WARM_UP, True)
    gc.collect()
    gc.freeze()  # nothing that is alive now has to be looked at again
    say(WARM)
    times = timed(args.steps, True)
    begin = time.perf_counter()
    timed(args.steps, False)
    if cuda:
        torch.cuda.synchronize()
    free = (time.perf_counter() - begin) / args.steps
    say(MEASURED)
    gpus, median = dist.get_world_size(), statistics.median(times)
    flops = shape_of(args).flops_per_token(args.sequence)
    peaks = everywhere(torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0)
    means = [statistics.fmean(everywhere(float(x.full_tensor() if hasattr(x, "full_tensor") else x))) for x in losses]
    record = {
        **vars(args), "gpus": gpus, "step_s": round(median, 5),
        "step_s_min": round(min(times), 5), "step_s_max": round(max(times), 5), "free_step_s": round(free, 5),
        "tokens_s_gpu": round(tokens / gpus / median), "free_tokens_s_gpu": round(tokens / gpus / free),
        "model_tflops": round(tokens / gpus / median * flops / 1e12, 1), "peak_gib": round(max(peaks), 2),
        "losses": [round(x, 5) for x in means[:4]], "last_loss": round(means[-1], 4),
        "torch": torch.__version__, "device": torch.cuda.get_device_name() if cuda else "cpu", **more,
    }  # fmt: skip
    say(json.dumps(record))
    dist.destroy_process_group()


def everywhere(value: float) -> list[float]:
    """Return the values of all processes."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def say(line: str) -> None:
    if dist.get_rank() == 0:
        print(line, flush=True)
