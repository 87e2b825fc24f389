"""The command that runs jzero beside its peers: records, failed cases and the page; every program on CPUs."""

import json
import sys

import pytest

from experiments.benchmarks import matrix

TINY = "--preset tiny --sequence 32 --steps 2"
JZERO = f"JAX_PLATFORMS=cpu {TINY} --attention xla --micro-batch 1"


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
