"""Measure a Llama under DeepSpeed as one JSON line, beside `llama.py`.

    torchrun --nproc_per_node 2 -m experiments.benchmarks.torch_deepspeed --stage 2 --micro-batch 4

The settings are DeepSpeed's fast ones: overlapped communication, contiguous gradients, AdamW by PyTorch's fused kernel,
blocks compiled, at stage 3 gathered block by block. Its check for gradients that overflow in bf16 is off.
"""

from __future__ import annotations

import argparse
import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import sdpa_kernel

from experiments.benchmarks import torch_steps
from experiments.benchmarks.torch_llama import Block, Llama, cross_entropy, initialize, prepare, tables
from experiments.benchmarks.torch_steps import BACKENDS


def parse() -> argparse.Namespace:
    p = torch_steps.parser(__doc__.splitlines()[0])
    p.add_argument("--stage", type=int, choices=[1, 2, 3], default=2)
    torch_steps.add_reduce(p)
    return p.parse_args()


def settings(args: argparse.Namespace, block_size: int) -> dict:
    zero = {
        "stage": args.stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True,
        "reduce_bucket_size": int(5e8), "allgather_bucket_size": int(5e8),
    }  # fmt: skip
    if args.stage == 3:
        bucket = int(max(5e7, 1.25 * block_size))
        zero = {
            "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": bucket,
            "stage3_prefetch_bucket_size": bucket, "stage3_param_persistence_threshold": int(1e5),
            "stage3_max_live_parameters": int(1e9), "stage3_max_reuse_distance": int(1e9),
        }  # fmt: skip
    return {
        "train_micro_batch_size_per_gpu": args.micro_batch, "steps_per_print": 10**9, "gradient_clipping": 1.0,
        "bf16": {"enabled": True, "check_grad_overflow": False}, "communication_data_type": args.reduce,
        "zero_optimization": zero, "zero_allow_untested_optimizer": True,
    }  # fmt: skip


def main() -> None:
    args = parse()
    device, shape = torch_steps.join(), torch_steps.shape_of(args)
    import deepspeed
    from deepspeed.utils import logger, set_z3_leaf_modules

    logger.setLevel(logging.WARNING)
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False)
    torch.manual_seed(0)
    with device:
        model = Llama(shape, repeat=False)
    initialize(model)
    block_size = sum(x.numel() for x in model.blocks[0].parameters())
    for block in model.blocks:
        prepare(block, args.remat, not args.eager)
    if args.stage == 3:
        set_z3_leaf_modules(model, [Block])
    angles = tables(shape, args.sequence, device)
    loss_of = torch.compile(cross_entropy, dynamic=False)

    def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(parameters), 3e-4, (0.9, 0.95), weight_decay=0.1, fused=True)

    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), optimizer=adamw, config=settings(args, block_size)
    )
    pool = torch_steps.random_tokens(shape.vocab_size, args.micro_batch, args.sequence, device, dist.get_rank())

    def step(i: int) -> torch.Tensor:
        with sdpa_kernel(BACKENDS[args.attention]):
            loss = loss_of(engine(pool[i % 4, :, :-1].contiguous(), *angles), pool[i % 4, :, 1:].contiguous())
            engine.backward(loss)
        engine.step()
        return loss

    tokens = args.micro_batch * dist.get_world_size() * args.sequence
    torch_steps.run(step, args, tokens, deepspeed=deepspeed.__version__)


if __name__ == "__main__":
    main()
