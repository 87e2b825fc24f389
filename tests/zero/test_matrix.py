"""The command that runs jzero beside its peers: records, failed cases and the page; every program on CPUs."""

import importlib.util
import json
import sys

import pytest

from experiments.benchmarks import matrix

TINY = "--preset tiny --sequence 32 --steps 2"
JZERO = f"JAX_PLATFORMS=cpu {TINY} --attention xla --micro-batch 1"
TORCH = f"OMP_NUM_THREADS=1 {TINY} --attention math --eager"
needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the peers are PyTorch's")


def run(cases, tmp_path, monkeypatch, gpus):
    file, out = tmp_path / "cases.txt", tmp_path / "out"
    file.write_text("# a comment\n" + "\n".join(cases))
    monkeypatch.setattr(sys, "argv", ["matrix", str(file), str(out), "--gpus", str(gpus), "--limit", "500"])
    matrix.main()
    return [json.loads(line) for line in (out / "cases.jsonl").read_text().splitlines()], (out / "page.md").read_text()


@pytest.mark.slow
def test_a_case_and_one_that_fails(tmp_path, monkeypatch):
    (good, bad), page = run([f"1 | jzero | {JZERO}", f"1 | jzero | {JZERO} --pipe 7"], tmp_path, monkeypatch, 1)
    assert (good["program"], good["gpus"], good["note"], good["stage"]) == ("jzero", 1, JZERO, 3)
    assert good["start_s"] > 0
    assert good["tokens_s_gpu"] == pytest.approx(32 / good["step_s"], rel=1e-2)  # step_s has five decimals
    for text in (bad["error"], (tmp_path / "out" / "case1.log").read_text()):
        assert "pipe" in text
    for part in (f"{good['tokens_s_gpu']:,}", bad["error"]):
        assert part in page


@pytest.mark.slow
@needs_torch
def test_the_peers_in_pytorch(tmp_path, monkeypatch):
    cases = [f"2 | torch | {TORCH} {more}" for more in ("--stage 2", "--parallel tensor")]
    cases.append(f"2 | torch-pipelines | {TORCH} --accum 4 --schedule interleaved --chunks 2")
    for record in run(cases, tmp_path, monkeypatch, 2)[0]:
        assert "error" not in record, record
        assert record["losses"][0] == pytest.approx(5.55, abs=0.15)  # ln 256
