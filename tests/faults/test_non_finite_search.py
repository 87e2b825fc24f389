"""Steps that are not finite: the place is found, and the step is repeated on one device.

The oracle is the fault: each test plants one, so it knows where.
"""

import re
import shlex
from collections import OrderedDict, defaultdict, namedtuple
from functools import lru_cache
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers.drawn import random_params
from helpers.engines import ACCUM, LINE, MICRO
from helpers.planted_faults import LAYERS, WIDTH, Net, config, put, rows, train
from helpers.reference import assert_bitwise
from helpers.refusals import refuses
from helpers.sampling import keep
from helpers.steps import mesh

import jzero
from jzero import checkpoint, ledger
from jzero.cli import main
from jzero.loss_scale import NonFiniteError
from jzero.run.diagnosis import replay, watch

GROUPS = "stage 3 in groups"  # parts on some devices, copies on others: the layout of most default runs
LAYOUTS = {  # stage, pipe, data, zero, whether the layers are unrolled
    "stage 0": (0, 1, 4, 1, True),
    "stage 3": (3, 1, 1, 4, True),
    GROUPS: (3, 1, 2, 2, False),
    "pipeline": (1, 2, 1, 2, False),
}
TWO = MICRO * ACCUM * 2  # rows of a global batch on two replicas


@pytest.fixture(autouse=True)
def own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@lru_cache
def step_of(layout):
    stage, pipe, data, zero, unroll = LAYOUTS[layout]
    mesh = jzero.make_mesh(pipe=pipe, data=data, zero=zero, devices=jax.devices()[: pipe * data * zero])
    return jzero.make_train_step(Net(), config(stage, stack={"unroll": unroll}), mesh=mesh)


def new_params():
    """The parameters of a new network; to draw them with JAX takes longer to compile than a step."""
    params = random_params(Net())
    return params | {"stack": params["stack"] | {name: np.zeros(LAYERS, np.float32) for name in ("gain", "root")}}


def engine_of(layout):
    return jzero.Engine(step_of(layout), jax.random.key(0), params=new_params())


def replicas_of(layout):
    return LAYOUTS[layout][2] * LAYOUTS[layout][3]


def batch_of(layout, seed=0):
    return rows(seed, MICRO * ACCUM * replicas_of(layout))


def change(engine, leaf, f):
    """Replace a stacked parameter by f of it, in its own sharding."""
    stack, old = engine.state.params["stack"], engine.state.params["stack"][leaf]
    stack[leaf] = jax.device_put(f(np.array(old)), old.sharding)


def says(engine, batches, *words):
    """Train on these batches until an error, which has these words; return its text."""
    with pytest.raises(NonFiniteError) as error:
        train(engine, *batches)
    assert [part for part in words if part not in str(error.value)] == [], str(error.value)
    return str(error.value)


def found_by(engine, bad, good, plant):
    """Train on a good batch, plant a fault, train on the bad batch and a good one; return what the error says."""
    engine.train_batch(good)
    change(engine, *plant)
    before = jax.device_get((engine.state.params, engine.state.opt_state))
    text = says(engine, [bad, good])
    assert_bitwise(before, (engine.state.params, engine.state.opt_state))
    assert engine.global_steps == int(engine.state.step) == 1
    return text


def two_replicas(model=None, settings=None):
    params = None if model is LINE else new_params()
    return jzero.initialize(model=model or Net(), config=settings or config(1), mesh=mesh(2), params=params)[0]


@pytest.mark.parametrize("layout", keep(LAYOUTS, [GROUPS]))
def test_a_bad_sample_of_the_training_data_has_its_index(layout):
    data = rows(0, 10 * MICRO * ACCUM * replicas_of(layout))
    data["x"][77] = np.nan
    loader = jzero.data.DataLoader(data, step_of(layout))
    engine = jzero.Engine(loader.step, jax.random.key(0), loader, params=new_params())
    text = says(engine, [None] * 11, "the batch itself is not finite: x")
    assert re.search(r"row \d+ of the global batch, sample 77 of training_data", text)
    number = int(re.match(r"step (\d+)", text)[1])
    assert engine.global_steps == number - 1
    assert loader.position["samples"] == (number - 1) * engine.train_batch_size()


def test_one_micro_batch():
    """Micro-batches of a loader come one after the other: micro-batch 1 has the rows 8 to 15."""
    engine, size = engine_of(GROUPS), MICRO * replicas_of(GROUPS)
    parts = [rows(i, size) for i in range(3 * ACCUM)]
    parts[ACCUM + 1]["y"][:] = np.inf
    says(
        engine, [iter(parts[i : i + ACCUM]) for i in range(0, 3 * ACCUM, ACCUM)], "step 2: the loss is inf",
        "first in the forward pass: the loss (",  # all layers are finite; the labels are not
        "in micro-batch 1 of 3, on replicas 0, 1, 2, 3: rows 8, 9, 10, 11 (and maybe more) of",
        "the batch itself is not finite: y",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "same", "where"),
    keep([("stage 0", [0, 1, 2], "replica 3:"), (GROUPS, [1], "replicas 2, 3:")], [(GROUPS, [1], "replicas 2, 3:")]),
)
def test_one_replica_whose_copy_is_bad(layout, same, where):
    """`same`: the devices with the same part."""
    engine = engine_of(layout)
    w = engine.state.params["stack"]["w"]
    parts = [np.array(shard.data) for shard in w.addressable_shards]
    parts[3][1] = np.nan  # layer 1 on the last device
    copies = [jax.device_put(part, shard.device) for part, shard in zip(parts, w.addressable_shards, strict=True)]
    engine.state.params["stack"]["w"] = jax.make_array_from_single_device_arrays(w.shape, w.sharding, copies)
    bad = "parameter stack/w, layer 1, is not finite on device 3 (process 0); the same part is finite on "
    says(
        engine, [batch_of(layout), batch_of(layout, 1)], "first in the forward pass: layer 1 of 4", f"on {where}",
        bad + ", ".join(f"device {n} (process 0)" for n in same),
    )  # fmt: skip


@pytest.mark.parametrize("layout", keep(LAYOUTS, [GROUPS]))
def test_a_backward_pass_that_fails_after_a_finite_forward_pass(layout):
    engine, bad, good = engine_of(layout), batch_of(layout), batch_of(layout, 1)
    for batch in (bad, good):
        batch["x"][:, -1] = 1.0
    bad["x"][9, -1] = 0.0  # the derivative of a root at 0
    text = found_by(engine, bad, good, ("root", lambda root: put(0 * root, 0, 1.0)))
    assert "the forward pass is finite; first in the backward pass: layer 0 of 4" in text
    assert "step 2: the gradient is not finite" in text
    assert ": row 9 of the global batch" in text


def test_a_fault_that_does_not_repeat(tmp_path):
    """Once it is found, the state can be saved, loaded and trained."""
    engine = engine_of(GROUPS)
    engine.train_batch(batch_of(GROUPS))
    watch = engine._checks._finite
    watch._frozen = jax.device_put(np.True_, watch._frozen.sharding)  # as if a device had failed once
    says(engine, [batch_of(GROUPS, 1), batch_of(GROUPS, 2)], "repeated, the step is finite")
    engine.save_checkpoint(tmp_path).wait()
    engine.load_checkpoint(tmp_path)
    engine.train_batch(batch_of(GROUPS, 1))
    assert (engine.global_steps, engine.skipped_steps) == (2, 0)


@pytest.mark.slow
def test_fp16_stops_only_where_no_lower_scale_helps():
    scaled = {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}
    engine, good, bad = two_replicas(settings=config(1, fp16=scaled)), rows(0, TWO), rows(1, TWO)
    bad["x"][4] = np.nan
    train(engine, *[good] * 16)  # overflows, while the scale comes down
    assert 3 < engine.skipped_steps < 16
    skipped, scale = engine.skipped_steps, engine.loss_scale
    says(engine, [bad, good], "row 4 of the global batch")
    assert (engine.global_steps, engine.skipped_steps, engine.loss_scale) == (16, skipped, scale)


@pytest.mark.parametrize("layout", keep(LAYOUTS, ["pipeline"]))
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
    where = "in micro-batch 1 of 3" if together else "in micro-batch 1 of 3, on replica 1"
    place = "first in the backward pass: the model; gradients that are not finite: w\n"
    text = says(engine, [{"x": bad.ravel()}] * 2, place, f"  {where}; no single row fails alone")
    check_replay(tmp_path / "saved" / "step1", model, text)


@pytest.mark.parametrize("fault", keep(["the save", "another process"], ["another process"]))
def test_a_fault_beside_the_search_does_not_hide_the_finding(fault, tmp_path, monkeypatch):
    if fault == "the save":
        monkeypatch.setattr(watch, "save_replay", Mock(side_effect=RuntimeError("no memory")))
    else:
        monkeypatch.setattr(watch, "share_problem", lambda topic, problem, timeout: problem or "no memory")
    settings = config(0, checkpoint={"dir": str(tmp_path / "run")})
    engine = jzero.initialize(model=Net(), config=settings, mesh=mesh(1), params=new_params())[0]
    change(engine, "w", lambda w: put(w, (2, 0, 0), np.nan))
    said = {"the save": "nothing is saved for a replay", "another process": "the search failed"}[fault]
    place, batches = "first in the forward pass: layer 2 of 4", [rows(seed, MICRO * ACCUM) for seed in range(2)]
    text = says(engine, batches, place, f"\n  {said}: no memory")
    assert not (tmp_path / "saved").exists()
    engine._observers.close()
    run = ledger.read(tmp_path / "run")
    (notice,) = run.of("notice")
    assert (notice["step"], notice["what"], notice["text"]) == (1, "not finite", text.rpartition("\n")[0])
    assert not run.steps


def test_what_a_replay_refuses(tmp_path):
    refuses(lambda: replay.main(str(tmp_path), "nothing"), "model")
    engine = engine_of(GROUPS)
    change(engine, "w", lambda w: put(w, (2, 0, 0), np.nan))
    engine.train_batch(batch_of(GROUPS))
    with pytest.raises(NonFiniteError, match="step 1: the loss is nan"):
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
        batch, extra = defaultdict(list, z=inner, b=np.full(2, 5, np.float32)), OrderedDict(scale=np.float32(2))
        engine.train_batch(batch, extra=extra)
        with pytest.raises(NonFiniteError) as error:
            engine.train_batch(batch, extra=extra)
        return str(error.value)

    refusal = "ConfigError: the batch contains a Wrapped; a replay takes dicts"
    assert refusal in said(namedtuple("Wrapped", "inner")(inner))
    text = said([inner])
    assert "the batch itself is not finite: z/0/x" in text
    check_replay(tmp_path / "saved" / "step1", Nested(), text)
