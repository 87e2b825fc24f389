"""The ledger: its records are what the run did; and the goodput of hand-made times."""

import errno
import json
import os
import threading

import jax
import numpy as np
import pytest
from helpers.refusals import refuses
from helpers.regression import CONFIG, Regression
from helpers.resuming import no_signal_handler  # noqa: F401

import jzero
from jzero import ledger
from jzero.distributed import last_words
from jzero.ledger import writer
from jzero.ledger.goodput import goodput
from jzero.ledger.read import chunks_of
from jzero.plots.history import read_run

ROWS = 44


def data():
    """Each row contains its own index."""
    x = np.random.default_rng(0).normal(size=(ROWS, 3)).astype(np.float32)
    return {"x": x, "y": x.sum(1), "row": np.arange(ROWS)}


def start(directory, devices=1, training_data=None, resume=None, **sections):
    config = CONFIG | {"checkpoint": {"dir": str(directory)}} | sections
    mesh = jzero.make_mesh(devices=jax.devices()[:devices])
    training_data = data() if training_data is None else training_data
    return jzero.initialize(model=Regression(), config=config, mesh=mesh, training_data=training_data, resume=resume)[0]


def train(engine, steps):
    """Return {step: (metrics, rows of its global batch)} as the engine returned and received them."""
    found, run, fed = {}, engine.step_fn.run, []
    engine.step_fn.run = lambda state, given, skip: fed.append(given.batch) or run(state, given, skip)
    try:
        for _ in range(steps):
            engine.train_batch()
            metrics = {name: float(x) for name, x in engine.metrics.items() if name not in ("loss_scale", "skipped")}
            found[engine.global_steps] = metrics, np.concatenate([np.asarray(part["row"]) for part in fed.pop()])
    finally:
        del engine.step_fn.run
    return found


def check_steps(run, expected):
    assert list(run.steps) == sorted(expected)
    for number, (metrics, rows) in expected.items():
        assert run.steps[number].metrics == metrics
        assert run.steps[number].samples == 8 * number
        np.testing.assert_array_equal(run.rows(number), rows)


def test_records_are_what_the_run_did(tmp_path):
    home, other = tmp_path / "runs", tmp_path / "other"
    engine = start(home, gradient_accumulation_steps=2)
    expected = train(engine, 4)
    engine.save_checkpoint().wait()
    engine.save_checkpoint(other, tag="mine").wait()
    ready = threading.Event()
    engine._observers.waiter.give(None, lambda values, end: ready.wait(60))  # what follows is on its way
    engine.eval_batch({name: x[:8] for name, x in data().items()})
    evaluated = {name: float(x) for name, x in engine.eval_metrics.items()}
    engine.eval_metrics["split"] = "valid"  # they are the script's
    ready.set()
    expected |= train(engine, 4)  # into the second epoch
    assert f"\n  {ledger.read(home).goodput}\n" in str(engine._observers.summary())
    engine._observers.close()
    run = ledger.read(home)
    check_steps(run, expected)
    assert not (other / "ledger.jsonl").exists()
    assert [one["kind"] for one in run.records][:2] == ["start", "state"]
    assert run.records[-1]["kind"] == "end"
    (evaluation,) = run.of("evaluation")
    assert (evaluation["step"], evaluation["metrics"]) == (4, evaluated)
    saves = run.of("save")
    assert [(s["tag"], s["directory"], s["step"], s["error"]) for s in saves] == [
        ("global_step4", str(home), 4, None), ("mine", str(other), 4, None),
    ]  # fmt: skip
    assert saves[0]["bytes"] == sum(x.nbytes for x in jax.tree.leaves(engine.state))
    assert all(s["began"] <= s["time"] and s["background"] > 0 and s["stall"] > 0 for s in saves)
    assert run.of("step")[0]["compile"] > 0
    assert all(s.get("compile", 0.0) <= s["time"] - s["began"] + 1e-3 for s in run.of("step"))  # rounded
    assert sum(run.goodput.lost.values()) + run.goodput.steps == pytest.approx(run.goodput.wall, abs=1e-3)


def test_resumes_on_other_meshes(tmp_path):
    """Steps that a resume or a load takes again count once; the rows are the same. The run before it is another one."""
    engine = start(tmp_path)
    train(engine, 7)
    engine._observers.close()
    engine = start(tmp_path)
    expected = train(engine, 3)
    engine.save_checkpoint().wait()
    lost = train(engine, 3)
    engine = start(tmp_path, 4, resume=tmp_path)
    assert engine.global_steps == 3
    expected |= train(engine, 2)
    engine.save_checkpoint().wait()
    lost |= train(engine, 2)
    engine.load_checkpoint()
    expected |= train(engine, 1)
    engine.save_checkpoint().wait()
    engine._observers.close()
    engine = start(tmp_path, resume=tmp_path)
    engine._observers.close()  # a start without a step: what it would repeat no longer counts
    run = ledger.read(tmp_path)
    check_steps(run, expected)
    assert sorted(lost) == [4, 5, 6, 7]
    assert [one["mesh"]["zero"] for one in run.of("start")] == [1, 4, 1]
    assert [one["step"] for one in run.of("state")] == [0, 3, 5, 6]
    assert run.goodput.lost["repeated steps"] > 0


def test_rows_of_data_without_a_length_in_three_calls(tmp_path):
    samples, expected = [{name: x[i] for name, x in data().items()} for i in range(ROWS)], {}
    engine = start(tmp_path, 2, training_data=lambda: iter(samples), dataloader_drop_last=True)
    for batch in engine.training_dataloader:
        engine.backward(engine(batch))
        engine.step()
        expected[engine.global_steps] = np.asarray(batch["row"])
    engine._observers.close()
    run = ledger.read(tmp_path)
    assert list(run.steps) == list(expected) == list(range(1, ROWS // 8 + 1))
    for number, seen in expected.items():
        np.testing.assert_array_equal(run.rows(number), seen)


def test_rows_that_a_ledger_does_not_know(tmp_path):
    engine = start(tmp_path)
    engine.train_batch({name: x[:8] for name, x in data().items()})
    engine.train_batch()
    engine.training_dataloader.seek({"epoch": 0, "samples": 24})
    engine.train_batch()
    engine._observers.close()
    run = ledger.read(tmp_path)
    for number, words in (
        (1, "step 1: its batch did not come from training_data"),
        (3, r"step 3: the loader went from \[0, 8\] to \[0, 32\]"),
        (9, r"rows\(9\): .* its steps: 1 to 3"),
    ):
        refuses(lambda number=number: run.rows(number), words)


def test_a_torn_line_is_skipped_and_continued(tmp_path):
    engine = start(tmp_path)
    expected = train(engine, 3)
    engine._observers.close()
    file = tmp_path / "ledger.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    steps = [i for i, line in enumerate(lines) if '"kind": "step"' in line]
    file.write_text("".join([*lines[: steps[2]], lines[steps[2]][:40]]))
    assert list(ledger.read(tmp_path).steps) == [1, 2]
    engine = start(tmp_path, resume=tmp_path)  # no checkpoint: from step 0, in the same run
    again = train(engine, 3)
    engine._observers.close()
    assert {number: metrics for number, (metrics, _) in again.items()} == {n: m for n, (m, _) in expected.items()}
    check_steps(ledger.read(tmp_path), expected)
    assert len(ledger.read(tmp_path).of("step")) == 5


def test_a_ledger_that_cannot_be_written_is_a_warning(tmp_path):
    """Such as a link, which is not followed."""
    theirs = tmp_path / "theirs"
    theirs.write_text("theirs")
    (tmp_path / "ledger.jsonl").symlink_to(theirs)
    with pytest.warns(RuntimeWarning, match=r"ledger.jsonl: no records of this run: "):
        engine = start(tmp_path)
    assert len(train(engine, 2)) == 2
    engine.save_checkpoint().wait()
    assert theirs.read_text() == "theirs"


def test_what_is_no_record_is_skipped_and_no_ledger_is_an_error(tmp_path):
    lines = ['{"kind": "later", "time": 1}', '{"kind": "step", "time": 1}', "[1]", "\x00", '{"kind": []}', "{}"]
    assert list(chunks_of(lines)) == [[]]
    refuses(lambda: ledger.read(tmp_path), r"ledger.jsonl: No such file .* names checkpoint.dir")
    assert str(goodput([])) == "goodput 0.0% of 0.0 s"
    for environment in ({last_words.OUTAGES: "[[1]]"}, {last_words.OUTAGES: "{"}):  # of another program
        assert last_words.read_outages(environment) == []


def test_a_full_disk_is_a_warning(tmp_path, monkeypatch):
    engine, write = start(tmp_path), os.write
    train(engine, 1)

    def full(file, line):
        if threading.current_thread().name == "jzero ledger":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, line)

    def rest():
        assert len(train(engine, 2)) == 2
        engine._observers.close()

    monkeypatch.setattr(writer.os, "write", full)
    with pytest.warns(RuntimeWarning, match=r"ledger.jsonl: no more records from this run: .*No space left"):
        rest()


def test_a_save_that_never_ends_delays_nothing(tmp_path, monkeypatch):
    """Records keep their order; the end does not wait for ever; a record that fails does not end the others."""
    monkeypatch.setattr(writer, "CLOSE_TIMEOUT", 0.3)
    file = writer.RecordWriter(tmp_path / "runs" / "ledger.jsonl")
    file.put({"n": 1})
    file.put_save(writer.Later(lambda: False, lambda: {"n": 2}))
    file.put({"n": object()})
    file.put_save(writer.Later(lambda: True, lambda: {}["loss"]))
    file.put_save(writer.Later(lambda: True, lambda: {"n": 3}))
    file.put({"n": 4})
    with pytest.warns(RuntimeWarning, match="a record is lost: TypeError: Object of type object is"):
        file.close()
    written = (tmp_path / "runs" / "ledger.jsonl").read_text().splitlines()
    assert [json.loads(line)["n"] for line in written] == [1, 3, 4]


def test_metrics_that_are_not_finite(tmp_path):
    """Standard JSON has no such numbers, so other programs refuse a line that contains them."""
    engine = start(tmp_path, jsonl_monitor={"enabled": True, "output_path": str(tmp_path), "job_name": "curves"})
    engine.train_batch({name: x[:8] * np.float32(np.nan) for name, x in data().items()})
    engine.train_batch()
    engine._observers.close()
    for name in ("ledger.jsonl", "curves/metrics.jsonl"):
        lines = (tmp_path / name).read_text().splitlines()
        assert '"nan"' in "".join(lines)
        assert all(json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert np.isnan(ledger.read(tmp_path).steps[1].metrics["loss"])
    for directory in (tmp_path, tmp_path / "curves"):
        assert np.isnan(read_run(directory).curves["loss"].value).tolist() == [True, False]


def record(kind, time, **fields):
    return {"kind": kind, "time": float(time), **fields}


def steps(first, begins, ends, **fields):
    """Step records; `fields` belong to the first."""
    numbers = range(first, first + len(ends))
    pairs = zip(numbers, begins, ends, strict=True)
    made = [record("step", b, step=n, samples=8 * n, rows=8, began=float(a), metrics={}) for n, a, b in pairs]
    made[0] |= fields
    return made


def started(began, time, new=False):
    return record("start", time, began=float(began), new=new)


def state(time, step, origin=None):
    return record("state", time, step=step, samples=8 * step, **{"from": origin})


def save(began, time, step):
    times = {"began": float(began), "stall": 1.0, "background": 1.0}
    return record("save", time, tag=f"global_step{step}", step=step, **times, bytes=9)


def failure(died, noticed, attempt):
    return record("failure", noticed, attempt=attempt, died=float(died), code=137, reason="killed")


def refused(began, **fields):
    """A start that a mistake ends 2 s later, without a state."""
    why = "ConfigError: the rank is 8, the checkpoint's is 4"
    return [started(began, began + 1) | fields, record("end", began + 2, step=0, reason=why)]


def begun(began):
    return [started(began, began + 1), state(began + 1, 0)]


FAILED = [failure(5, 5, "a 0"), failure(9, 10, "a 1")]
CLEAN = [*begun(0), *steps(1, [1, 2, 3], [2, 3, 4]), save(4.5, 5, 3), record("end", 7, step=3, reason="")]
AGAIN = [started(1000, 1001), state(1003, 3, "x"), *steps(4, [1003, 1004], [1004, 1005])]
ENDED = [*refused(40), started(102, 103), state(103, 1)]
CASES = {  # rule: (records, wall time, time of steps, the rest)
    "an attempt may repeat the failures before it; the time of one that wrote nothing is the restart's": (
        [*begun(0), *steps(1, [1, 2, 3], [2, 3, 4]), *FAILED, *begun(20), *steps(1, [21], [22]),
         *FAILED, failure(30, 90, "a 2"), started(100, 101), state(101, 1, "x"), *steps(2, [101], [102])],
        102, 1 + 1, {"start": 1 + 1 + 1, "repeated steps": 3 + 1 + 8, "restart": 15 + 10, "detect": 60},
    ),
    # Compiles from 2 to 12, runs until 16; the others take 2, 2, 3 and 3 s, so 1.5 of the first step are its own.
    "compilation, saves, data and the script are not steps": (
        [*begun(0), *steps(1, [2], [16], compile=10.0), *steps(2, [16], [18]),
         *steps(3, [19.5], [21.5], save=1.0, wait=0.5), save(18, 20, 2), *steps(4, [21], [24.5]),
         *steps(5, [27], [30], evaluation=0.5, compile_before=0.75), save(30, 33, 5),
         record("end", 34, step=5, reason="")],
        33, 12.5, {"start": 1, "script": 1 + 1.25, "compile": 10 + 0.75, "first step": 1.5, "save": 1 + 3, "data": 0.5,
                   "evaluation": 0.5},
    ),
    "a refused start counts as little": ([*CLEAN, *refused(500)], 5, 3, {"start": 1, "script": 0.5, "save": 0.5}),
    "as the time after a clean end": (
        [*refused(-90), *CLEAN, *refused(500), *refused(600), *AGAIN],
        10, 5, {"start": 2, "script": 0.5, "save": 0.5, "restore": 2},
    ),
    "that after SIGTERM counts": (
        [*begun(0), *steps(1, [1], [2]), record("end", 3, step=1, reason="SIGTERM"), *ENDED],
        103, 1, {"start": 1 + 1, "stopped": 100},
    ),
    "and after a kill": ([*begun(0), *steps(1, [1], [2]), *ENDED], 103, 1, {"start": 1 + 1, "stopped": 100}),
    "a start without a state counts if a launcher saw it fail": (
        [*refused(0, attempt="a 0"), failure(2, 4, "a 0"), *begun(7), *steps(1, [8], [9])],
        9, 1, {"start": 1 + 1, "repeated steps": 1, "detect": 2, "restart": 3},
    ),
    "clocks that differ give no negative time": (
        [*begun(10), *steps(1, [11], [12]), failure(5, 6, "a"), started(7, 8), state(9, 0)],
        2, 0, {"start": 1, "repeated steps": 1},
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", CASES)
def test_times_by_hand(rule):
    records, wall, of_steps, lost = CASES[rule]
    found = goodput(records)
    assert (found.wall, found.steps, found.lost) == (wall, of_steps, lost)
    assert found.share == of_steps / wall
