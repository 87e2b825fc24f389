"""A step that was not finite, repeated on one device. The oracle is the fault: each test plants one."""

import re
import shlex
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.planted_faults import (
    ACCUM,
    GROUPS,
    LAYOUTS,
    MICRO,
    WIDTH,
    Net,
    batch_of,
    change,
    config,
    engine_of,
    found_by,
    new_params,
    put,
    rows,
)
from helpers.refusals import refuses
from helpers.sampling import keep
from helpers.steps import mesh

import jzero
from jzero import checkpoint, ledger
from jzero.cli import main
from jzero.loss_scale import NonFiniteError
from jzero.run.diagnosis import replay, watch


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("layout", keep(LAYOUTS, [GROUPS]))
def test_one_sample_that_overflows_in_one_layer(layout, tmp_path, monkeypatch, capsys):
    """A replay on one device, by the command that the run prints, finds the same."""
    (here := tmp_path / "it's $HERE; true").mkdir()
    monkeypatch.chdir(here)
    engine, bad = engine_of(layout), batch_of(layout)
    bad["x"][11, 0] = 200  # finite; exp(200) is not
    text = found_by(engine, bad, batch_of(layout, 1), ("gain", lambda gain: put(0 * gain, 1, 1.0)))
    assert "first in the forward pass: layer 1 of 4" in text
    assert "all parameters are finite" in text
    # every replica has 6 consecutive rows, and a micro-batch is 2 of them
    assert "in micro-batch 2 of 3, on replica 1: row 11 of the global batch" in text
    assert "batch itself" not in text
    saved = here / "saved" / "step2"
    for printed in (text, (saved / "README.md").read_text()):  # a shell reads the command as it is meant
        command = re.search("jzero replay .*", printed)[0]
        assert shlex.split(command) == ["jzero", "replay", str(saved), "--model", "package.module:function"]
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "my_model.py").write_text("from helpers.planted_faults import Net as make_model\n")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    assert main(["replay", str(saved), "--model", "my_model:make_model"]) == 0
    found = capsys.readouterr().out.strip()
    assert "row 11 of the global batch" in found
    assert found.splitlines() == text.splitlines()[: found.count("\n") + 1]


def error_of(engine, batch, **arguments):
    with pytest.raises(NonFiniteError) as error:
        engine.train_batch(batch, **arguments)
    return str(error.value)


def check_replay(saved, model, text):
    found = str(jzero.replay(saved, model)).splitlines()
    assert found == text.splitlines()[: len(found)]


class Balanced:
    """Its gradient is not finite where the rows add up to 0, on one replica or, `together`, on all."""

    def __init__(self, together):
        self.together = together

    def init(self, rng):
        return {"w": jnp.ones(())}

    def loss(self, params, batch, rng):
        x = jzero.all_gather(batch["x"]) if self.together else batch["x"]
        return jnp.sqrt(jnp.abs(params["w"] * x.mean()))


@pytest.mark.parametrize("together", keep([False, True], [True]))
def test_a_replay_of_rows_that_fail_only_together(together, tmp_path):
    model = Balanced(together)
    engine = jzero.initialize(model=model, config=config(0), mesh=mesh(2))[0]
    bad = np.ones((2, ACCUM, MICRO), np.float32)  # replica, micro-batch, row
    bad[:, 1] = [[1, 1], [-1, -1]] if together else [[1, 1], [1, -1]]
    engine.train_batch({"x": bad.ravel()})
    text = error_of(engine, {"x": bad.ravel()})
    where = "in micro-batch 1 of 3" if together else "in micro-batch 1 of 3, on replica 1"
    assert "first in the backward pass: the model; gradients that are not finite: w\n" in text
    assert f"  {where}; no single row fails alone" in text
    check_replay(tmp_path / "saved" / "step1", model, text)


@pytest.mark.parametrize("fault", keep(["the save", "another process"], ["another process"]))
def test_a_fault_beside_the_search_does_not_hide_the_finding(fault, tmp_path, monkeypatch):
    def no_memory(*_):
        raise RuntimeError("no memory")

    if fault == "the save":
        monkeypatch.setattr(watch, "save_replay", no_memory)
    else:
        monkeypatch.setattr(watch, "share_problem", lambda topic, problem, timeout: problem or "no memory")
    settings = config(0, checkpoint={"dir": str(tmp_path / "run")})
    engine = jzero.initialize(model=Net(), config=settings, mesh=mesh(1), params=new_params())[0]
    change(engine, "w", lambda w: put(w, (2, 0, 0), np.nan))
    engine.train_batch(rows(0, MICRO * ACCUM))
    text = error_of(engine, rows(1, MICRO * ACCUM))
    assert "first in the forward pass: layer 2 of 4" in text
    said = {"the save": "nothing is saved for a replay", "another process": "the search failed"}[fault]
    assert f"\n  {said}: no memory" in text
    assert not (tmp_path / "saved").exists()
    engine._observers.close()
    run = ledger.read(tmp_path / "run")
    assert [one["text"] in text for one in run.of("notice")] == [True]
    assert not run.steps


def test_what_a_replay_refuses(tmp_path):
    refuses(lambda: replay.main(str(tmp_path), "nothing"), "model")
    engine = engine_of(GROUPS)
    change(engine, "w", lambda w: put(w, (2, 0, 0), np.nan))
    engine.train_batch(batch_of(GROUPS))
    with pytest.raises(NonFiniteError):
        engine.save_checkpoint(tmp_path / "run")
    other = jzero.from_flax(lambda rngs: nnx.Linear(WIDTH, 1, rngs=rngs), lambda model, batch: model(batch["x"]).mean())
    engine.save_checkpoint(tmp_path / "run", tag="whole").wait()
    notes = {"step": 2, "micro_batch": 0}
    earlier = checkpoint.save({"w": jnp.ones(2)}, tmp_path / "saved", "step2", notes=notes).wait()
    for saved, model, words in (
        (tmp_path / "saved" / "step1", other, "another model: missing params/bias"),
        (tmp_path / "run" / "whole", Net(), "a checkpoint, not a saved step"),
        (earlier, Net(), "another version of jzero saved this step; let the run save it again"),
    ):
        refuses(lambda saved=saved, model=model: jzero.replay(saved, model), words)


class Nested:
    """Its batch has other mappings, and so has its extra."""

    def init(self, rng):
        return {"w": jnp.ones(())}

    def loss(self, params, batch, rng, extra):
        (inner,) = batch["z"]
        return (params["w"] * inner["x"] - 10 * inner["a"]).mean() / batch["b"].mean() * extra["scale"]


def test_other_mappings_are_saved_as_dicts_and_other_containers_named(tmp_path):
    """JAX lists the leaves of an OrderedDict in its own order, those of a dict by name."""
    engine = jzero.initialize(model=Nested(), config=config(0, gradient_accumulation_steps=1), mesh=mesh(1))[0]
    inner = OrderedDict(x=np.array([3, np.inf], np.float32), a=np.ones(2, np.float32))

    def said(inner):
        batch = defaultdict(list, z=inner, b=np.full(2, 5, np.float32))
        engine.train_batch(batch, extra=OrderedDict(scale=np.float32(2)))
        return error_of(engine, batch, extra=OrderedDict(scale=np.float32(2)))

    refusal = "ConfigError: the batch contains a Wrapped; a replay takes dicts"
    assert refusal in said(namedtuple("Wrapped", "inner")(inner))
    text = said([inner])
    assert "the batch itself is not finite: z/0/x" in text
    check_replay(tmp_path / "saved" / "step1", Nested(), text)
