"""What people run first: every row of `experiments/benchmarks/first.py` trains, in small, by every runner."""

import json
import math

import jax
import pytest
from helpers.sampling import keep

from experiments.benchmarks import first, gpu

ROWS = [(name, runner) for name in first.CASES for runner in ("jzero", "flax", "torch")]


@pytest.mark.parametrize(("name", "runner"), keep(ROWS, [("gpt2-dropout", "jzero"), ("vit", "torch")]))
def test_a_row_trains(name, runner, monkeypatch):
    """The first loss is that of words drawn at random, and the same batch is learned."""
    if runner == "torch":
        pytest.importorskip("torch")
    monkeypatch.setattr(gpu, "WARM_UP", 0)
    monkeypatch.setattr(first, "steps", lambda run, wait: 2)
    case = first.CASES[name].tiny()
    found = first.one(case, runner)
    start, end = found["losses"]
    assert start == pytest.approx(math.log(case.size.vocab), abs=0.8)
    assert end < start - 0.01
    assert found["step_s_min"] <= found["step_s"] <= found["step_s_max"]


@pytest.mark.parametrize("name", keep(list(first.CASES), ["gpt2-dropout"]))
def test_plain_flax_multiplies_in_bfloat16(name):
    """A single layer that computes in float32 makes all after it do so: the row would compare two dtypes."""
    case = first.CASES[name].tiny()
    start, step = first.flax_step(case)
    trace = jax.make_jaxpr(step)(*jax.eval_shape(start), first.batch_of(case))
    found = {str(x.aval.dtype) for eqn in matmuls(trace.jaxpr) for x in eqn.invars}
    assert found == {"bfloat16"}


def matmuls(jaxpr):
    """Those with weights, and convolutions; attention's have batch dimensions."""
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "conv_general_dilated" or (name == "dot_general" and eqn.params["dimension_numbers"][1] == ((), ())):
            yield eqn
        for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from matmuls(inner)


def test_lines_are_measured_once(tmp_path, monkeypatch, capsys):
    """A second command goes on where the first ended; the table has the best of PyTorch by jzero."""
    took, ran = {"jzero": 0.1, "torch": 0.12, "torch-tuned": 0.11}, []

    def line(name, runner, options, seconds):
        ran.append((name, runner))
        found = {"step_s": took[runner], "peak_gib": 2.5} if runner in took else {"failed": "exit status 1"}
        return {"case": name, "runner": runner, **found}

    monkeypatch.setattr(first, "line", line)
    out = tmp_path / "first.jsonl"
    command = ["--case", "vit", "--out", str(out)]
    first.main([*command, "--minutes", "0"])
    assert ran == []
    first.main([*command, "--runner", "jzero"])
    first.main(command)
    assert ran == [("vit", runner) for runner in first.RUNNERS]
    assert len(out.read_text().splitlines()) == 4
    row = "| vit | 100.0 (2.5) | exit status 1 | 120.0 (2.5) | 110.0 (2.5) | 1.100 |"
    assert row in capsys.readouterr().out.splitlines()


def test_a_line_that_fails_says_why(monkeypatch):
    """It has a process of its own, so the others are measured."""
    monkeypatch.setattr(first.sys, "executable", "false")
    assert first.line("vit", "jzero", [], 60) == {"case": "vit", "runner": "jzero", "failed": "exit status 1"}


@pytest.mark.slow
def test_the_command(tmp_path):
    found = first.line("unet", "jzero", ["--tiny"], 300)
    assert found["runner"] == "jzero"
    assert json.loads(json.dumps(found))["losses"][1] < found["losses"][0]
