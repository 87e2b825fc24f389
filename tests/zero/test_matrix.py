"""The command that runs jzero beside its peers: records, failed cases and the page; every program on CPUs."""

import importlib.util
import json
import sys

import pytest

from experiments.benchmarks import matrix

TINY = "--preset tiny --sequence 32 --steps 2"
TORCH = f"OMP_NUM_THREADS=1 {TINY} --attention math --eager"
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="the peers are PyTorch's; CI installs it, jzero does not need it"
)


def run(cases, tmp_path, monkeypatch, gpus):
    file, out = tmp_path / "cases.txt", tmp_path / "out"
    file.write_text("# a comment\n" + "\n".join(cases))
    monkeypatch.setattr(sys, "argv", ["matrix", str(file), str(out), "--gpus", str(gpus), "--limit", "500"])
    matrix.main()
    return [json.loads(line) for line in (out / "cases.jsonl").read_text().splitlines()], (out / "page.md").read_text()


@pytest.mark.slow
def test_a_case_and_one_that_fails(tmp_path, monkeypatch):
    jzeros = f"JAX_PLATFORMS=cpu {TINY} --attention xla --micro-batch 1"
    (good, bad), page = run([f"1 | jzero | {jzeros}", f"1 | jzero | {jzeros} --pipe 7"], tmp_path, monkeypatch, 1)
    assert (good["program"], good["gpus"], good["note"], good["stage"]) == ("jzero", 1, jzeros, 3)
    assert good["start_s"] > 0
    assert good["tokens_s_gpu"] == pytest.approx(32 / good["step_s"], rel=1e-2)  # step_s has five decimals
    assert "pipe" in bad["error"]
    assert "pipe" in (tmp_path / "out" / "case1.log").read_text()
    assert page.count("\n| 1 | jzero |") == 2
    assert f"{good['tokens_s_gpu']:,}" in page
    assert bad["error"] in page


def test_a_case_that_hangs_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(matrix, "command", lambda *_: [sys.executable, "-c", "import time; time.sleep(600)"])
    record = matrix.run_case("1 | jzero |", tmp_path, 0, 0, limit_s=1.0)
    assert record["error"] == "exit status -9: "


@pytest.mark.slow
@needs_torch
def test_the_peers_in_pytorch(tmp_path, monkeypatch):
    cases = [
        f"2 | torch | {TORCH} --stage 2",
        f"2 | torch | {TORCH} --parallel tensor",
        f"2 | torch-pipelines | {TORCH} --accum 4 --schedule interleaved --chunks 2",
    ]
    records, _ = run(cases, tmp_path, monkeypatch, 2)
    for record in records:
        assert "error" not in record, record
        assert record["losses"][0] == pytest.approx(5.55, abs=0.15)  # ln 256
