"""Trains with DeepSpeed on CPU processes and saves its checkpoints, with the losses of its own continuation.

It needs deepspeed and torch, and nothing of jzero: `python make_checkpoints.py OUT [CASE ...]` writes OUT/CASE/ckpt,
OUT/CASE/universal, OUT/CASE/weights-* and OUT/CASE/losses.json, for the cases of `CASES`.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np

STEPS, ROWS = 20, 8
ADAM = {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True}}
SGD = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}}
ADAGRAD = {"type": "Adagrad", "params": {"lr": 0.05}}
MUON = {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}}
LION = {"type": "Lion", "params": {"lr": 0.002, "betas": [0.9, 0.95], "weight_decay": 0.1}}
FUSED = ADAM | {"params": {key: x for key, x in ADAM["params"].items() if key != "torch_adam"}}
LAMB = {"type": "Lamb", "params": {"lr": 0.02, "betas": [0.9, 0.95], "weight_decay": 0.1}}
WEIGHTS = {"bin": (), "shards": ("--max_shard_size", "0.2KB"), "safe": ("--safe_serialization",)}  # of zero_to_fp32.py
LLAMA = {
    "vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 32, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
FOUR = {"mlp-2-fp32", "mlp-3-fp32", "mlp-1-bf16", "mlp-2-fp16", "llama-3-fp32", "llama-1-bf16"}  # processes, else two
# name -> model, ZeRO stage, precision, processes, optimizer, universal too
CASES = {
    (case := f"{kind}-{stage}-{precision}"): (kind, stage, precision, 4 if case in FOUR else 2, ADAM, stage > 0)
    for kind in ("mlp", "llama") for stage in range(4) for precision in ("fp32", "bf16", "fp16")
}  # fmt: skip
CASES |= {
    "mlp-0-fused": ("mlp", 0, "fp32", 2, FUSED, False),
    "mlp-0-bf16-fused": ("mlp", 0, "bf16", 2, FUSED, False),
    "mlp-1-sgd": ("mlp", 1, "fp32", 2, SGD, False),
    "mlp-2-adagrad": ("mlp", 2, "fp32", 2, ADAGRAD, False),
    "mlp-0-lamb": ("mlp", 0, "fp32", 2, LAMB, False),
    "mlp-0-fp16-lamb": ("mlp", 0, "fp16", 2, LAMB, False),
    "mlp-2-lion": ("mlp", 2, "fp32", 2, LION, False),
    "mlp-3-lion": ("mlp", 3, "fp32", 2, LION, False),
    "mlp-0-muon": ("mlp", 0, "fp32", 2, MUON, False),
    "mlp-2-muon": ("mlp", 2, "fp32", 2, MUON, False),
    "mlp-3-muon": ("mlp", 3, "fp32", 2, MUON, False),  # matrices and biases in groups, with other moments
    "mlp-0-groups": ("mlp", 0, "fp32", 2, ADAM, False),  # biases, in a group of their own, do not decay
    "mlp-0-bf16-groups": ("mlp", 0, "bf16", 2, ADAM, False),
    "mlp-0-frozen": ("mlp", 0, "fp32", 2, ADAM, False),  # fc2 is frozen, and the optimizer lacks it
    "mlp-2-frozen": ("mlp", 2, "fp32", 2, ADAM, False),
    "mlp-3-frozen": ("mlp", 3, "fp32", 2, ADAM, True),
    "pipe-1-fp32": ("pipe", 1, "fp32", 4, ADAM, True),
}


def ds_config(stage, precision, optimizer):
    """Return the config of a case, which jzero reads too (with its own number of devices)."""
    warmup = {"warmup_num_steps": 30, "warmup_max_lr": optimizer["params"]["lr"]}
    config = {
        "train_batch_size": ROWS, "gradient_accumulation_steps": 1, "optimizer": optimizer,
        "gradient_clipping": 0.0 if optimizer is MUON else 1.0,  # DeepSpeed clips Muon's updates, jzero the gradients
        "scheduler": {"type": "WarmupLR", "params": warmup},
        "zero_optimization": {"stage": stage} | ({"reduce_scatter": False} if optimizer is MUON and stage == 3 else {}),
        "steps_per_print": 10**9, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    if optimizer is LION:  # DeepSpeed's other Lion runs on GPUs alone
        config["zero_optimization"] |= {"offload_optimizer": {"device": "cpu"}}
    if precision == "bf16":
        config["bf16"] = {"enabled": True}
    if precision == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 19, "hysteresis": 2}
    return config


def batch(kind, step):
    """Return the global batch of a step: arrays of ROWS rows."""
    random = np.random.default_rng(step % 4)
    if kind == "llama":
        return (random.integers(0, LLAMA["vocab_size"], (ROWS, 9)),)
    x = random.normal(size=(ROWS, 5)).astype(np.float32)
    return x, np.tanh(x[:, :3]).astype(np.float32)


def make_model(kind):
    """Return a PyTorch model, and its loss on a part of a batch."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    if kind == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(**LLAMA, attn_implementation="eager"))
        return model, lambda engine, tokens: engine(input_ids=tokens, labels=tokens, use_cache=False).loss

    class MLP(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.fc3 = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)

        def forward(self, x):
            return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x)))))

    if kind == "pipe":
        from deepspeed.pipe import LayerSpec, PipelineModule

        layers = [
            LayerSpec(nn.Linear, 5, 7), LayerSpec(nn.Tanh), LayerSpec(nn.Linear, 7, 7), LayerSpec(nn.Tanh),
            LayerSpec(nn.Linear, 7, 3),
        ]  # fmt: skip
        return PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform"), None
    return MLP(), lambda engine, x, y: ((engine(x).float() - y) ** 2).mean()


class LambOnCpu:
    """DeepSpeed's kernel of Lamb, which is CUDA alone, in PyTorch; all around it is DeepSpeed's own.

    Source: csrc/lamb/fused_lamb_cuda_kernel.cu of DeepSpeed 0.19.8.
    """

    def lamb(self, p, p_copy, m, v, g, lr, beta1, beta2, max_coeff, min_coeff, eps, scale, step, mode, correct, decay):
        import torch

        g = g.float() / scale
        m.mul_(beta1).add_(g, alpha=1 - beta1)
        v.mul_(beta2).add_(g * g, alpha=1 - beta2)
        update = m / (v.sqrt() + eps if mode else (v + eps).sqrt()) + decay * p
        weight, size = p.norm(), update.norm()
        coefficient = (weight / size).clamp(min_coeff, max_coeff) if weight and size else torch.ones(())
        rate = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step) if correct else lr
        p.sub_(rate * coefficient * update)
        if p_copy.numel():
            p_copy.data.copy_(p)
        return coefficient


def worker(case, out):
    """Train, save, and go on, as one of the processes."""
    import deepspeed
    import torch

    kind, stage, precision, processes, optimizer, universal = CASES[case]
    torch.set_num_threads(1)
    if optimizer is LAMB:
        from deepspeed.ops.lamb import fused_lamb

        fused_lamb.FusedLambBuilder = lambda: SimpleNamespace(load=LambOnCpu)
    device = deepspeed.accelerator.get_accelerator()
    # DeepSpeed asks for fp16 kernels, and PyTorch computes without them.
    device.is_fp16_supported = lambda: precision == "fp16"
    device.supported_dtypes = lambda: [torch.float32, torch.bfloat16, torch.float16]
    deepspeed.init_distributed(dist_backend="gloo")
    rank = int(os.environ["RANK"])
    model, loss_of = make_model(kind)
    config = ds_config(stage, precision, optimizer)
    if kind == "pipe":
        config |= {"gradient_accumulation_steps": 2}
    if case.endswith("frozen"):
        model.fc2.requires_grad_(False)
    parameters = [x for x in model.parameters() if x.requires_grad]
    if case.endswith("groups"):
        parameters = [
            {"params": [x for x in parameters if x.ndim > 1]},
            {"params": [x for x in parameters if x.ndim < 2], "weight_decay": 0.0},
        ]
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=parameters, config=config)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]

    def step(n):
        parts = [torch.from_numpy(part) for part in batch(kind, n)]
        parts = [part.to(dtype) if part.is_floating_point() and i == 0 else part for i, part in enumerate(parts)]
        if kind == "pipe":
            replicas, micro = engine.dp_world_size, engine.micro_batches
            place = engine.grid.get_data_parallel_rank()
            rows = [tuple(part.chunk(replicas)[place].chunk(micro)[i] for part in parts) for i in range(micro)]
            return float(engine.train_batch(iter(rows)))
        loss = loss_of(engine, *(part.chunk(processes)[rank] for part in parts))
        # Without ZeRO, DeepSpeed 0.19.8 divides by a scale that it does not multiply the loss with.
        engine.backward(loss * engine.optimizer.loss_scale if precision == "fp16" and stage == 0 else loss)
        engine.step()
        mean = loss.detach().float().clone()
        torch.distributed.all_reduce(mean)
        return float(mean) / processes

    before = [step(n) for n in range(STEPS)]
    engine.save_checkpoint(str(out / "ckpt"), client_state={"epoch": 3, "note": "twenty"})
    after = [step(n) for n in range(STEPS, 2 * STEPS)]
    if rank == 0:
        scale = getattr(engine.optimizer, "loss_scale", None)
        about = {"before": before, "after": after, "config": config, "scale": scale, "lr": engine.get_lr()}
        (out / "losses.json").write_text(json.dumps(about))
    torch.distributed.barrier()
    for name, options in WEIGHTS.items() if case == "mlp-2-fp32" and rank == 0 else ():
        script = [sys.executable, out / "ckpt" / "zero_to_fp32.py", out / "ckpt", out / f"weights-{name}", *options]
        subprocess.run(script, check=True)
    if universal and rank == 0:
        tag = f"global_step{STEPS}"
        folders = "--input_folder", str(out / "ckpt" / tag), "--output_folder", str(out / "universal" / tag)
        workers = "--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"
        subprocess.run([sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *folders, *workers], check=True)
        (out / "universal" / "latest_universal").write_text(f"global_step{STEPS}")


def make(case, out):
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    processes = CASES[case][3]
    common = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes)}
    common |= {"TORCHDYNAMO_DISABLE": "1"}  # Muon's functions would be compiled, for minutes
    running = [
        subprocess.Popen(
            [sys.executable, __file__, str(out), case, "--worker"],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=(out.parent / f"{case}.{rank}.log").open("w"), stderr=subprocess.STDOUT,
        )
        for rank in range(processes)
    ]  # fmt: skip
    if any([process.wait(600) for process in running]):
        raise SystemExit(f"{case}: {(out.parent / f'{case}.0.log').read_text()[-1500:]}")


if __name__ == "__main__":
    if sys.argv[-1] == "--worker":
        worker(sys.argv[2], Path(sys.argv[1]))
    else:
        for name in sys.argv[2:] or CASES:
            make(name, Path(sys.argv[1]) / name)
            print(name, "done", flush=True)
