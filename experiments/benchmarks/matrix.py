"""Run benchmark cases one after another, each in a process of its own, and write them as a dated table.

    python -m experiments.benchmarks.matrix cases.txt OUT [GPUS]

`cases.txt`: one case a line, `gpus | options of experiments.benchmarks.llama`. Consecutive cases on one GPU run side by
side, each on one of the GPUS (default 4). OUT gets `cases.jsonl`, the logs of failed cases, and `table.md`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import takewhile
from pathlib import Path

COLUMNS = {
    "gpus": "GPUs", "preset": "model", "stage": "ZeRO", "micro_batch": "micro-batch", "remat": "remat", "tag": "note",
    "tokens_s_gpu": "tokens/s/GPU", "free_tokens_s_gpu": "unsynchronised", "spread": "spread",
    "model_tflops": "model TFLOP/s", "peak_gib": "peak GiB", "planned_gib": "planned GiB", "compile_s": "compile s",
    "last_loss": "loss",
}  # fmt: skip


def run_case(line: str, out: Path, index: int, first_gpu: int) -> dict:
    """Run one case and return its record; a failed case leaves its log and a record with its last error line."""
    gpus, options = (part.strip() for part in line.split("|", 1))
    visible = ",".join(map(str, range(first_gpu, first_gpu + int(gpus))))
    # JAX preallocates 75 % of the GPU by default; the largest cases need nearly all of it.
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": visible, "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95"}
    command = [sys.executable, "-m", "experiments.benchmarks.llama", *options.split()]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = [text for text in done.stdout.splitlines() if text.startswith("{")]
    if done.returncode == 0 and lines:
        return json.loads(lines[-1])
    (out / f"case{index}.log").write_text(f"{line}\n{done.stdout[-4000:]}\n{done.stderr[-8000:]}")
    last = next((text for text in reversed(done.stderr.splitlines()) if "Error" in text), "no output")
    return {"gpus": int(gpus), "tag": options, "error": last[:300]}


def table(records: list[dict]) -> str:
    """Format the records as a Markdown table; spread is the slowest of the ten steps over the fastest."""
    rows = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + "---|" * len(COLUMNS)]
    for r in records:
        if "step_s_max" in r:
            r["spread"] = f"{r['step_s_max'] / r['step_s_min'] - 1:.1%}"
        cells = [r.get(name, "") for name in COLUMNS] if "error" not in r else [r["gpus"], r["tag"], r["error"]]
        rows.append("| " + " | ".join(f"{c:,}" if isinstance(c, int) else str(c) for c in cells) + " |")
    return "\n".join(rows) + "\n"


def main(cases: str, out: str, gpus: str = "4") -> None:
    directory, records = Path(out), []
    directory.mkdir(parents=True, exist_ok=True)
    lines = [line for line in Path(cases).read_text().splitlines() if line.strip() and not line.startswith("#")]
    while lines:
        alone = list(takewhile(lambda line: line.startswith("1 |"), lines[: int(gpus)]))
        wave, lines = (alone, lines[len(alone) :]) if alone else (lines[:1], lines[1:])
        start, done = time.time(), len(records)
        with ThreadPoolExecutor() as pool:
            jobs = [pool.submit(run_case, line, directory, done + i, i) for i, line in enumerate(wave)]
        records += [job.result() for job in jobs]
        for record in records[done:]:
            print(f"{time.time() - start:5.0f} s  {json.dumps(record)}", flush=True)
            with (directory / "cases.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        (directory / "table.md").write_text(table(records))


if __name__ == "__main__":
    main(*sys.argv[1:])
