"""The command that runs jzero beside its peers: records, failed cases and the page."""

import json
import sys

import pytest

from experiments.benchmarks import matrix

JZERO = "JAX_PLATFORMS=cpu --preset tiny --sequence 32 --steps 2 --attention xla --micro-batch 1"


@pytest.mark.slow
def test_a_case_and_one_that_fails(tmp_path, monkeypatch):
    file, out = tmp_path / "cases.txt", tmp_path / "out"
    file.write_text(f"# a comment\n1 | jzero | {JZERO}\n1 | jzero | {JZERO} --pipe 7")
    monkeypatch.setattr(sys, "argv", ["matrix", str(file), str(out), "--gpus", "1", "--limit", "500"])
    matrix.main()
    good, bad = (json.loads(line) for line in (out / "cases.jsonl").read_text().splitlines())
    assert (good["program"], good["gpus"], good["note"], good["stage"]) == ("jzero", 1, JZERO, 3)
    assert good["start_s"] > 0
    assert good["tokens_s_gpu"] == pytest.approx(32 / good["step_s"], rel=1e-2)  # step_s has five decimals
    for text in (bad["error"], (out / "case1.log").read_text()):
        assert "pipe" in text
    for part in (f"{good['tokens_s_gpu']:,}", bad["error"]):
        assert part in (out / "page.md").read_text()
