"""Which checkpoint a run resumes from, and what it prints about it."""

import json
import math
import os
import shutil
import zlib
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from helpers.checkpoints import names
from helpers.engines import engine as small_engine
from helpers.engines import parts
from helpers.refusals import refuses
from helpers.resuming import no_signal_handler  # noqa: F401
from helpers.sampling import keep
from helpers.stored_cases import check_cases
from layouts import LAYOUTS, assert_same, batch, build, data

import jzero
from jzero.checkpoint.directory import _seal
from jzero.run.restore import describe_other_data

ONE = LAYOUTS["one"]


@cache
def step():
    return build(ONE).step_fn


def resumed(path=None, training_data=None):
    """An engine of one step for all, which is compiled once."""
    loader = None if training_data is None else jzero.data.DataLoader(training_data, step())
    return jzero.Engine(step(), jax.random.key(0), loader, resume=path)


@pytest.fixture(scope="module")
def engine():
    """An engine after its first step, which no test trains."""
    made = resumed()
    made.train_batch(batch(0))
    return made


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with the checkpoints of three steps."""
    path, made = tmp_path_factory.mktemp("saved"), resumed()
    for step in range(3):
        made.train_batch(batch(step))
        made.save_checkpoint(path, client_state={"best": 2})
    jzero.checkpoint.wait()
    return path


@pytest.fixture
def runs(saved, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(saved, tmp_path / "runs", ignore=shutil.ignore_patterns(".lock*"))


def test_the_newest_that_can_be_read(runs, tmp_path, capfd):
    resumed(tmp_path / "new")
    assert f"no checkpoint in {tmp_path}/new yet: starting at step 0" in capfd.readouterr().out
    shutil.copytree(runs / "global_step3", runs / "global_step4")
    (runs / "global_step3" / "notes.json").write_text("{")
    (runs / "global_step4" / "state" / "manifest.ocdbt").write_bytes(b"")
    (runs / "global_step9.saving").mkdir()

    def check(*faults):
        assert resumed(runs).global_steps == 2
        out, said = capfd.readouterr()
        assert f"resumed from {runs}/global_step2: step 2" in out
        assert [words for words in faults if words not in said] == []
        assert said.count("skipped: ") == 3

    damaged = f"skipped: checkpoint {runs}/global_step3 is damaged: notes.json"
    check("global_step9.saving was not finished", f"skipped: reading {runs}/global_step4: ", damaged)
    (runs / "global_step4" / "notes.json").unlink()  # a known fault is said too, though it is not tried
    shutil.rmtree(runs / "global_step3")
    check("global_step3 does not exist, and latest names it", "global_step4 is not complete: notes.json")
    (runs / "latest").write_text("global_step1")
    resumed(runs)
    assert "global_step2: step 2 (latest names global_step1)" in capfd.readouterr().out

    for tag in ("global_step1", "global_step2"):
        (runs / tag / "notes.json").unlink()
    with pytest.raises(jzero.CheckpointError, match=r"none of the 3 checkpoints in .* can be read"):
        resumed(runs)
    for path in runs.glob("global_step*"):
        shutil.rmtree(path)
    with pytest.raises(jzero.CheckpointError, match="global_step1 does not exist, and latest names it"):
        resumed(runs)


def test_what_others_left_is_neither_taken_nor_removed(engine, tmp_path):
    """A directory of DeepSpeed's checkpoints, and other jobs' files."""
    others = ["global_step1/mp_rank_00_model_states.pt", "x.saving/theirs", "y.replaced/theirs", "z/theirs"]
    others += ["global_step0/theirs", "w/notes.json"]
    for file in map(tmp_path.joinpath, others):
        file.parent.mkdir()
        file.write_text("{}")
    for name in ("z", "global_step0"):
        (tmp_path / name / "state").mkdir()
    (tmp_path / "latest").write_text("global_step1")
    with pytest.raises(jzero.CheckpointError, match="global_step1 is not a jzero checkpoint, and latest names it"):
        resumed(tmp_path)
    for tag, place in (("global_step1",) * 2, ("x", r"x\.saving"), ("y", r"y\.replaced"), ("z", "z"), ("w", "w")):
        words = f"{place} exists and is not a jzero checkpoint: choose another"
        refuses(lambda tag=tag: engine.save_checkpoint(tmp_path, tag), words)
    refuses(lambda: engine.load_checkpoint(tmp_path, "y"), r"checkpoint .*/y does not exist")
    (tmp_path / "empty").mkdir()
    engine.save_checkpoint(tmp_path, tag="empty").wait()
    jzero.checkpoint.save(engine.state, tmp_path, "global_step1000", max_to_keep=1).wait()
    shutil.rmtree(tmp_path / "global_step1000")
    (tmp_path / "notes.json").write_text("[]")
    assert all((tmp_path / file).exists() for file in others)
    (tmp_path / "latest").write_text("global_step1")
    shutil.rmtree(tmp_path / "w")
    assert resumed(tmp_path).global_steps == 1


def test_a_damaged_latest(engine, runs, capfd):
    """A resume takes the newest whole checkpoint; a load is an error in one line."""
    engine.save_checkpoint(runs.parent / "other").wait()
    texts = {
        bytes(20): "damaged: it contains '\\x00", b"g" * 10**6: "damaged: it contains 'ggg", b"": "empty",
        b"../other/global_step1": "damaged: it contains '../other/", b"global_step1\nx": "damaged",
        b"global_step1.saving": "damaged: it contains 'global_step1.saving'", b"global_\xff": "damaged",
    }  # fmt: skip
    latest = runs / "latest"
    faults = [(lambda text=text: latest.write_bytes(text), words) for text, words in texts.items()]
    faults += [(latest.mkdir, "is not a file"), (lambda: os.mkfifo(latest), "is not a file")]
    for make, words in faults:
        latest.rmdir() if latest.is_dir() else latest.unlink()
        make()
        text = refuses(lambda: engine.load_checkpoint(runs), "has no default")
        assert words in text
        assert f"{runs} has no default checkpoint (its " in text
        assert "choose a tag: global_step3, global_step2, global_step1" in text
        capfd.readouterr()
        assert resumed(runs).global_steps == 3
        (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("jzero: ")]
        assert line.startswith(f"jzero: skipped: {runs}: its ")
        assert words in line
        for problem in (line, text):
            assert problem.isprintable()
            assert len(problem) < 2 * len(str(runs)) + 200
    engine.save_checkpoint(runs, "global_step3").wait()  # replaces the pipe
    assert latest.read_text() == "global_step3"


def test_what_is_no_directory(engine):
    for place, words in {
        "~nobody-here/runs": "there is no such user",
        "runs\0": "NUL",
        "gs://bucket/runs": "bucket/runs': must be a directory on a file system that all hosts",
    }.items():
        refuses(partial(build, ONE, resume=place), words)
        refuses(partial(build, ONE, checkpoint={"dir": place}), words)
        refuses(partial(engine.save_checkpoint, place), words)


@pytest.mark.slow
def test_any_kind_of_random_key(tmp_path):
    def built(seed, kind, **more):
        return build(LAYOUTS["stage1"], noise=True, rng=jax.random.key(seed, impl=kind), **more)

    straight, stopped = (built(3, "rbg") for _ in range(2))
    for step in range(2):
        straight.train_batch(batch(step))
        stopped.train_batch(batch(step))
    stopped.save_checkpoint(tmp_path)
    for kind in ("rbg", "threefry2x32"):
        later = built(4, kind, resume=tmp_path)
        assert_same(later.state, stopped.state)
        assert str(jax.random.key_impl(later.state.rng)) == "rbg"
    assert float(later.train_batch(batch(2))) == float(straight.train_batch(batch(2)))


def test_no_run_starts_from_scratch_in_silence(runs):
    words = r"is itself a checkpoint; use its parent, .*/runs$"
    refuses(lambda: build(ONE, resume=runs / "global_step1"), words)
    adagrad = {"type": "Adagrad", "params": {"lr": 0.1}}
    words = "another model or optimizer: missing opt_state"
    refuses(lambda: build(ONE, resume=runs, optimizer=adagrad), words)
    for path in runs.glob("*/state"):
        shutil.rmtree(path)
    with pytest.raises(jzero.CheckpointError, match="is not complete: it has no state"):
        build(ONE, resume=runs)


@pytest.fixture(scope="module")
def fed(tmp_path_factory):
    """A directory with two checkpoints of a run with training data."""
    path, made = tmp_path_factory.mktemp("fed"), resumed(training_data=data())
    made.train_batch()
    for tag in ("global_step1", "global_step2"):
        made.save_checkpoint(path, tag).wait()
    return path


def test_other_data_are_said(fed, capfd, pytestconfig):
    """Data without a length are in their own order."""

    def outcome(case):
        return describe_other_data(SimpleNamespace(**case["loader"]) if case["loader"] else None, case["notes"], 3)

    check_cases(Path(__file__).with_name("other_data.jsonl"), outcome, pytestconfig)
    build(ONE, training_data=data(101), resume=fed, seed=3)
    words = "or in another order from here on: samples was 100, is 101, seed was 0, is 3"
    assert words in capfd.readouterr().err


def test_the_directory_of_the_config(saved, tmp_path, monkeypatch, capfd):
    section = {"checkpoint": {"dir": str(tmp_path / "runs"), "max_to_keep": 1}}
    engine = build(ONE, resume="auto", **section)
    for tag in ("global_step1", "global_step2"):
        engine.load_checkpoint(saved, tag)
        engine.save_checkpoint()
    engine.save_checkpoint(tag="mine").wait()
    assert names(tmp_path / "runs") == {"global_step2", "latest", "ledger.jsonl", "mine"}
    monkeypatch.setenv("JZERO_RESUME", "auto")  # by `jzero --resume`
    again = build(ONE, **section)
    assert again.global_steps == 2
    words = "this run was resumed at step 2 and would start at step 0 again"
    refuses(lambda: again.load_weights(tmp_path), words)
    assert build(ONE, resume=False, **section).global_steps == 0
    words = f"starting at step 0, though {tmp_path}/runs holds mine, global_step2: jzero --resume, or"
    assert words in capfd.readouterr().err
    assert engine.load_checkpoint()[0] == str(tmp_path / "runs" / "mine")


def test_a_refused_call_changes_nothing(tmp_path):
    e = small_engine()
    e.client_state = {"best": 1}
    words = r"client_state is not JSON: <object object at .*> has type object"
    refuses(lambda: e.save_checkpoint(tmp_path, client_state={"x": object()}), words)
    assert e.client_state == {"best": 1}  # which a save on SIGTERM writes
    jzero.checkpoint.wait()  # a refused save is none that failed
    e.backward(e(parts(0)[0]))
    refuses(lambda: e.save_checkpoint(tmp_path), "1 micro-batches wait for step")
    refuses(lambda: e.load_checkpoint(tmp_path), "1 micro-batches wait for step")


@pytest.mark.slow
def test_a_functional_checkpoint_in_an_engine_and_back(tmp_path):
    engine = build(LAYOUTS["stage2"])
    engine.train_batch(batch(0))
    own = {"batch": 64, "client": "me"}  # what these words mean to whoever saves so
    jzero.checkpoint.save(engine.state, tmp_path / "functional", notes=own)
    loaded = build(LAYOUTS["stage3"], resume=tmp_path / "functional")
    assert_same(loaded.state, engine.state)
    assert (loaded.global_steps, loaded.client_state) == (1, {})
    fp16 = {"fp16": {"enabled": True}}
    half = build(LAYOUTS["stage3"], resume=tmp_path / "functional", **fp16)
    assert (half.loss_scale, half.global_steps) == (2.0**16, 1)  # its own: that was of no scaler
    jzero.checkpoint.save(half.state, tmp_path / "half")
    assert_same(build(LAYOUTS["stage1"], resume=tmp_path / "half", **fp16).state, half.state)
    engine.save_checkpoint(tmp_path / "engine")
    assert_same(jzero.checkpoint.restore(tmp_path / "engine", loaded.step_fn.state_shardings), engine.state)


NEWEST = {
    "no time": ("saved", ...), "NaN": ("saved", math.nan), "a time after all others": ("saved", 1e300),
    "a time that is a text": ("saved", "now"), "leaves in a list": ("leaves", []),
    "a leaf without a shape": ("leaves/step", ["int32"]), "a shape of texts": ("leaves/step", ["int32", ["x"], 1]),
    "no such dtype": ("leaves/step", ["float99", [], 1]), "without": ("without", {"x": ["float99", [], 1]}),
    "no such key": ("keys", {"step": "nothing"}), "no notes": ("notes", None),
    "a negative counter": ("notes/engine/global_steps", -1), "no rows": ("notes/batch/micro", 0),
    "a position": ("notes/data", {"epoch": "0"}), "an order": ("notes/order", [1]), "a rate": ("notes/lr", 10**400),
    "client": ("notes/client", 3), "depth": ("notes/client", "deep"), "a fifo": ("", None),
}  # fmt: skip


@pytest.mark.parametrize("fault", keep(NEWEST, ["no time", "a leaf without a shape", "no notes", "a position"]))
def test_crafted_notes_hide_no_other_checkpoint(fed, tmp_path, capfd, fault):
    """Their checksum is right, so their contents are what is wrong."""
    runs = shutil.copytree(fed, tmp_path / "runs", ignore=shutil.ignore_patterns(".lock*"))
    file = runs / "global_step2" / "notes.json"
    place, value = NEWEST[fault]
    notes = json.loads(file.read_text())["notes"]
    *path, last = place.split("/")
    node = notes
    for name in path:
        node = node[name]
    node[last] = value
    if value is ...:
        del node[last]
    text = _seal(notes)
    if fault == "depth":
        inner = json.dumps(notes).replace('"deep"', "[" * 10**5 + "]" * 10**5)
        text = json.dumps({"crc32": zlib.crc32(inner.encode()), "notes": 0}).replace("0}", inner + "}") + "\n"
    file.unlink()
    file.write_text(text) if place else os.mkfifo(file)
    again = resumed(runs, data())
    out, err = capfd.readouterr()
    assert f"resumed from {runs}/global_step1" in out
    (line,) = [line for line in err.splitlines() if "skipped" in line]
    assert f"checkpoint {runs}/global_step2" in line
    again.save_checkpoint(runs, "global_step2").wait()  # replaces it, and is the newest
    resumed(runs, data())
    assert f"resumed from {runs}/global_step2" in capfd.readouterr().out


STATELESS = {
    "train_batch": batch(0), "eval_batch": batch(0), "__call__": {name: x[:8] for name, x in batch(0).items()},
    "save_checkpoint": "/none", "save_16bit_model": "/none", "save_adapters": "/none",
}  # fmt: skip


def test_calls_after_a_refused_load(tmp_path):
    engine = build(ONE, ema={"decay": 0.9}, scheduler={"type": "WarmupLR"})
    engine.save_checkpoint(tmp_path).wait()
    shutil.rmtree(tmp_path / "global_step0" / "state" / "d")
    with pytest.raises(jzero.CheckpointError):
        engine.load_checkpoint(tmp_path)
    calls = [partial(getattr(engine, name), argument) for name, argument in STATELESS.items()]
    calls += [partial(engine.save_16bit_model, "/none", ema=True), engine.get_lr]
    calls += [partial(getattr, engine, name) for name in ("skipped_steps", "loss_scale")]
    for call in (*calls, lambda: engine.lr_scheduler.last_batch_iteration):
        refuses(call, "there is no state: reading a checkpoint into its place failed")
