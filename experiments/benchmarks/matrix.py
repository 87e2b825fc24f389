"""Run jzero and its peers side by side, one case after another, and write them as a dated page.

    python -m experiments.benchmarks.matrix cases_peers.txt OUT --gpus 2

`cases.txt`: one case a line, `gpus | program | options` (a word of the options may set a variable: `NAME=value`).
The programs, each in processes of its own:

- `jzero`: `experiments.benchmarks.llama` in one process; `jzero-launcher`: with a process for each GPU
- `torch`: FSDP2, tensor or context parallelism; `torch-pipelines`; `deepspeed` (`torch_*.py`); a program whose package
  is not installed fails with its import error

Consecutive cases on one GPU run side by side, each on a GPU of its own. OUT gets `cases.jsonl`, the logs of failed
cases, and `page.md`. Power and clock are medians of the case's first GPU while steps are measured; "start" is the time
from the command to the end of the warm-up steps.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path
from typing import Any

from experiments.benchmarks.gpu import MEASURED, WARM, smi

COLUMNS = {
    "gpus": "GPUs", "program": "program", "preset": "model", "stage": "ZeRO", "micro_batch": "micro-batch",
    "remat": "remat", "note": "note", "tokens_s_gpu": "tokens/s/GPU", "free_tokens_s_gpu": "unsynchronised",
    "spread": "spread", "model_tflops": "model TFLOP/s", "peak_gib": "peak GiB", "planned_gib": "planned GiB",
    "start_s": "start s", "power_w": "W", "clock_mhz": "MHz", "last_loss": "loss",
}  # fmt: skip
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node")
MODULES = {
    "jzero": "llama", "jzero-launcher": "llama", "torch": "torch_parallel", "torch-pipelines": "torch_pipelines",
    "deepspeed": "torch_deepspeed",
}  # fmt: skip


def command(program: str, gpus: int) -> list[str]:
    module = f"experiments.benchmarks.{MODULES[program]}"
    if program == "jzero":
        return [sys.executable, "-m", module]
    if program == "jzero-launcher":
        launcher = (sys.executable, "-m", "jzero", "--num_gpus", str(gpus), "--no_local_rank", "--module")
        return [*launcher, module]
    return [sys.executable, *TORCHRUN, str(gpus), "-m", module]


def run_case(line: str, out: Path, index: int, first_gpu: int, limit_s: float) -> dict[str, Any]:
    """Run one case and return its record; a failed case leaves its log and a record with its last error line."""
    gpus, program, options = (part.strip() for part in line.split("|", 2))
    words = options.split()
    set_here = [word for word in words if re.match(r"[A-Z_]+=", word)]
    variables = dict(word.split("=", 1) for word in set_here)
    visible = ",".join(map(str, range(first_gpu, first_gpu + int(gpus))))
    # JAX preallocates 75 % of the GPU by default; the largest cases need nearly all of it. Each start compiles.
    ours = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95", "JAX_ENABLE_COMPILATION_CACHE": "0"}
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible} | ours | variables
    arguments = [word for word in words if word not in set_here]
    base = {"program": program, "gpus": int(gpus), "note": " ".join(words)}
    start, lines, power = time.perf_counter(), [], {}
    with contextlib.ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(
                [*command(program, int(gpus)), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
        )
        timer = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
        timer.start()
        stack.callback(timer.cancel)
        measuring = stack.enter_context(contextlib.ExitStack())
        for text in process.stdout or ():
            lines.append(text)
            if WARM in text:
                base["start_s"] = round(time.perf_counter() - start, 1)
                power = measuring.enter_context(smi(first_gpu))
            elif MEASURED in text:
                measuring.close()
        process.wait()  # while the timer still runs
    records = [text[text.index("{") :] for text in lines if '"tokens_s_gpu"' in text]
    if process.returncode == 0 and records:
        return json.loads(records[-1]) | base | power
    (out / f"case{index}.log").write_text(line + "\n" + "".join(lines)[-12000:])
    texts = [text.strip() for text in lines if text.strip()]
    errors = [text for text in texts if re.search(r"Error: .", text)] or texts
    return base | {"error": f"exit status {process.returncode}: {errors[-1] if errors else ''}"[:300]}


def table(records: list[dict[str, Any]]) -> str:
    """Format the records as a Markdown table; spread is the slowest measured step over the fastest."""
    rows = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    for r in records:
        if "step_s_max" in r:
            r["spread"] = f"{r['step_s_max'] / r['step_s_min'] - 1:.1%}"
        cells = [r.get(name, "") for name in COLUMNS]
        if "error" in r:
            cells = [r["gpus"], r["program"], f"`{r['note']}`", r["error"]]
        rows.append("| " + " | ".join(f"{c:,}" if isinstance(c, int) else str(c) for c in cells) + " |")
    return "\n".join(rows) + "\n"


def page(records: list[dict[str, Any]], cases: list[str]) -> str:
    """Write the table with what it was measured on."""
    versions = {
        f"{name} {r[name]}" for r in records for name in ("jax", "torch", "deepspeed", "torchao") if r.get(name)
    }
    gpus = "no GPU"
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,power.limit", "--format=csv,noheader"]
        gpus = "; ".join(subprocess.run(query, capture_output=True, text=True).stdout.splitlines())
    return "\n".join(
        [
            f"# Benchmarks, {datetime.date.today()}", "", f"{gpus}. {', '.join(sorted(versions))}.", "",
            table(records), "```", *cases, "```", "",
        ]
    )  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("cases", type=Path)
    p.add_argument("out", type=Path)
    p.add_argument("--gpus", type=int, default=4, help="how many there are")
    p.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="that a case may take")
    args = p.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    lines = [line for line in args.cases.read_text().splitlines() if line.strip() and not line.startswith("#")]
    cases, records = list(lines), []
    while lines:
        alone = list(takewhile(lambda line: line.startswith("1 |"), lines[: args.gpus]))
        wave, lines = (alone, lines[len(alone) :]) if alone else (lines[:1], lines[1:])
        begin, done = time.time(), len(records)
        with ThreadPoolExecutor() as pool:
            jobs = [pool.submit(run_case, line, args.out, done + i, i, args.limit) for i, line in enumerate(wave)]
        records += [job.result() for job in jobs]
        for record in records[done:]:
            print(f"{time.time() - begin:5.0f} s  {json.dumps(record)}", flush=True)
            with (args.out / "cases.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        (args.out / "page.md").write_text(page(records, cases))


if __name__ == "__main__":
    main()
