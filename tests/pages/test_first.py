"""The rows of `experiments/benchmarks`: each trains, in small, by every runner."""

import json
import math

import pytest
from helpers.sampling import some

from experiments.benchmarks import first, gpu, mixtures

ROWS = [(first, name, runner) for name in first.CASES for runner in ("jzero", "flax", "torch")]
ROWS += [(mixtures, name, runner) for name in mixtures.CASES for runner in ("jzero", "torch")]


@pytest.mark.parametrize(("module", "name", "runner"), some(ROWS, [(mixtures, "qwen3-moe", "jzero")]))
def test_a_row_trains(module, name, runner, monkeypatch, capsys):
    """The first loss is that of words drawn at random, and the same batch is learned."""
    if runner == "torch":
        pytest.importorskip("torch")
    monkeypatch.setattr(gpu, "WARM_UP", 0)
    for each in (first, mixtures):
        monkeypatch.setattr(each, "steps", lambda run, wait: 2)
    if module is first:
        case = first.CASES[name].tiny()
        found, vocab = first.one(case, runner), case.size.vocab
    else:
        mixtures.main(["--case", name, "--runner", runner, "--tiny"])
        found, vocab = json.loads(capsys.readouterr().out), 128
    start, end = found["losses"]
    assert start == pytest.approx(math.log(vocab), abs=0.8 if module is first else 0.3)
    assert end < start - (0.01 if module is first else 0.1)
    assert found["step_s_min"] <= found["step_s"] <= found["step_s_max"]
