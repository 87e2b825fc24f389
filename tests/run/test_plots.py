"""Plots: the lines of the figures have the records' numbers, and the page refers to nothing else."""

import base64
import json
import sys
from itertools import accumulate

import numpy as np
import pytest
from helpers.html_pages import Page
from helpers.refusals import refuses
from test_ledger import record, state

from jzero import cli, plots
from jzero.plots import history, run_plots


def steps(first, losses, begin, **fields):
    """Steps of 2 s, one after the other; `fields` belong to the first."""
    made = []
    for i, loss in enumerate(losses):
        counts = {"step": first + i, "samples": 8 * (first + i), "rows": 8, "began": begin + 2 * i}
        made.append(record("step", begin + 2 * i + 2, **counts, metrics={"loss": loss, "lr": 0.5}))
    made[0] |= fields
    return made


RECORDS = [
    record("start", 1010.0, began=1000.0, new=True, mesh={"zero": 2, "data": 1}, devices=2, device="cpu"),
    state(1010.0, 0),
    *steps(1, [9.0, 8.0, 99.0, 98.0], 1010.0, peak=2**30),
    record("evaluation", 1019.0, step=2, samples=16, began=1018.0, metrics={"loss": 7.5}),
    record("failure", 1021.0, attempt="a 0", died=1020.0, code=137, reason="rank 0 <was> killed"),
    record("start", 1030.0, began=1025.0, new=False, mesh={"zero": 4, "data": 1}, devices=4, device="cpu"),
    state(1031.0, 2, "/runs/global_step2"),
    *steps(3, [7.0, 6.0, 5.0], 1031.0, peak=2**31),
]


def written(directory, records):
    directory.mkdir(exist_ok=True, parents=True)
    (directory / "ledger.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    return directory


@pytest.fixture
def runs(tmp_path):
    """A run with a restart, and one of jsonl_monitor with a resume."""
    written(tmp_path / "first", RECORDS)
    (tmp_path / "curves").mkdir()
    lines = [(1, 4.0), (2, 3.0), (3, 50.0), (2, 2.5), (3, 2.0)]
    text = [json.dumps({"step": n, "samples": 8 * n, "Train/Samples/train_loss": x}) for n, x in lines]
    (tmp_path / "curves" / "metrics.jsonl").write_text("\n".join([*text, '{"step": 4, "samp']))
    return [tmp_path / "first", tmp_path / "curves"]


def lines(figure):
    (axes,) = figure.axes
    return {line.get_label(): tuple(map(list, line.get_data())) for line in axes.lines}


def test_lines_are_the_records(runs):
    histories = history.read_all(runs)
    assert run_plots.names(histories) == ["loss", "lr", "samples/s", "peak memory (GiB)", "goodput"]
    drawn = lines(run_plots.draw_curve(histories, "loss"))
    assert drawn["first"] == ([1, 2, 3, 4, 5], [9.0, 8.0, 7.0, 6.0, 5.0])
    assert drawn["curves"] == ([1, 2, 3], [4.0, 2.5, 2.0])
    assert drawn["first, evaluation"] == ([2], [7.5])
    assert drawn["_restart"][0] == [2]
    assert lines(run_plots.draw_curve(histories, "loss", x="samples"))["curves"][0] == [8, 16, 24]
    hours = lines(run_plots.draw_curve(histories[:1], "loss", x="time"))["first"][0]
    assert hours == pytest.approx([seconds / 3600 for seconds in (12, 14, 33, 35, 37)])
    assert lines(run_plots.draw_curve(histories, "peak memory (GiB)"))["first"] == ([1, 3], [1.0, 2.0])
    speed = lines(run_plots.draw_curve(histories, "samples/s"))["first"]
    assert speed == ([2, 4, 5], [4.0, 4.0, 4.0])  # 8 samples in 2 s
    refuses(lambda: run_plots.draw_curve(histories, "loss", x="time"), "x = 'time': curves: only a ledger has times")
    # Smoothed, the values stay visible: y_t = sum of 0.5^(t-i) x_i / sum of 0.5^(t-i)
    drawn = lines(run_plots.draw_curve(histories[1:], "loss", smooth=0.5))
    assert drawn["_curves, not smoothed"] == ([1, 2, 3], [4.0, 2.5, 2.0])
    expected = [4.0, (0.5 * 4 + 2.5) / 1.5, (0.25 * 4 + 0.5 * 2.5 + 2.0) / 1.75]
    assert drawn["curves"][1] == pytest.approx(expected)


def test_tokens_where_every_step_knows_them(tmp_path):
    records = [one | {"tokens": 100 * one["step"]} if one["kind"] == "step" else one for one in RECORDS]
    (drawn,) = plots.read(written(tmp_path, records)).histories
    found = [(point.step, point.value) for point in drawn.curves["tokens/s"].points()]
    assert found == [(2, 100.0), (4, 200.0), (5, 250.0)]
    assert drawn.speed == {"samples/s": 4.0, "tokens/s": (200 + 400 + 500) / 6}


def test_a_speed_has_five_steps_or_half_a_second(tmp_path):
    """A thread that reads the results of two steps at once gives the second no time."""

    def speeds(*seconds):
        """The curve of a run whose steps of 8 samples take so long each, after a first one."""
        made = [*RECORDS[:2], *steps(1, [1.0] * (len(seconds) + 1), 1010.0)]
        for one, time in zip(made[2:], accumulate([1010.0, *seconds]), strict=True):
            one |= {"time": time, "began": time}
        (found,) = history.read_all([written(tmp_path, made)])
        return [(point.step, point.value) for point in found.curves["samples/s"].points()]

    uneven = speeds(0.0806, 0.0006, 0.04, 0.04, 0.0388, 0.04, 0.04, 0.0794, 0.0006, 0.04, 0.04)
    assert uneven == [(6, pytest.approx(8 / 0.04)), (12, pytest.approx(8 / 0.04))]  # the last one joins the five before
    assert speeds(0.5, 0.0, 0.5, 0.1) == [(2, 16.0), (5, pytest.approx(24 / 0.6))]


def test_the_page_stands_alone(runs, tmp_path):
    files = plots.read(*runs).write(tmp_path / "out")
    names = ["loss.png", "lr.png", "samples_s.png", "peak_memory_GiB.png", "goodput.png", "index.html"]
    assert files == [tmp_path / "out" / name for name in names]
    text = files[-1].read_text()
    page = Page(text)
    assert "http" not in text.replace("data:", "")
    assert not {"script", "link", "iframe"} & set(page.tags)
    heads = "data:image/png;base64,"
    assert [base64.b64decode(a.removeprefix(heads)) for a in page.addresses] == [f.read_bytes() for f in files[:-1]]
    assert Page(plots.read(runs[0], metrics=["loss"])._repr_html_()).tags.count("img") == 1  # in a notebook
    cells = page.texts[page.texts.index("first", page.texts.index("devices")) :]
    assert cells[:9] == ["first", "5", "40", "5.0000", "4 samples/s", "27.0%", "37.0 s", "1", "4 cpu (zero 4)"]
    assert cells[9:18] == ["curves", "3", "24", "2.0000", "–", "–", "–", "–", "–"]
    assert "first, after 31.0 s, from step 2: rank 0 <was> killed" in page.texts


def test_the_command(runs, tmp_path, capsys):
    """Runs of one name have their paths; one that is given twice is there once."""
    out, first = tmp_path / "out", str(runs[0] / "ledger.jsonl")
    other = str(written(tmp_path / "other" / "first", RECORDS))
    words = ["plot", first, other, first, "--out", str(out), "--metric", "loss", "--x", "time"]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[:2] == [str(out / "loss.png"), str(out / "index.html")]
    for run in (first, other):
        assert said.count(f"{run}: goodput 27.0% of 37.0 s; lost: start 40.5%, repeated steps 13.5%") == 1
    assert said.count("goodput") == 2


def test_errors_name_the_fix(runs, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    written(tmp_path / "empty", RECORDS[:1])
    for words, error in (
        (["nowhere"], "nowhere: no such directory or file"),
        (["."], ".: has no records of a run (ledger.jsonl or metrics.jsonl): set checkpoint.dir in"),
        (["empty"], "empty: its records contain no step with a loss yet"),
        (["first", "--metric", "acc"], "metric acc: the runs have loss, lr, samples/s, peak memory (GiB), goodput"),
        (["first", "--smooth", "1"], "smooth = 1.0: must be from 0 to below 1, such as 0.9"),
    ):
        assert cli.main(["plot", *words]) == 2
        assert error in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    refuses(lambda: run_plots.draw_curve(history.read_all(runs), "loss"), "plots need matplotlib: pip install -e ")
    assert not (tmp_path / "plots").exists()


def work(directory, monkeypatch, steps):
    """Count the lines of jzero, and the numbers that NumPy joins, to read a run with many restarts."""
    many_starts = written(directory, starts_of_ten_steps(steps, 12))  # two more than the next start resumes from
    count, join = 0, np.concatenate

    def concatenate(arrays, *others):
        nonlocal count
        count += sum(map(np.size, arrays))
        return join(arrays, *others)

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace if "jzero" in frame.f_code.co_filename else None

    monkeypatch.setattr(np, "concatenate", concatenate)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = history.read_run(many_starts)
    finally:
        sys.settrace(before)
        monkeypatch.undo()
    assert found.last.step == steps + 2
    assert len(found.restarts) == steps // 10 - 1
    return count


def starts_of_ten_steps(total, taken):
    """The records of a run that begins again every ten steps, after it has taken so many."""
    made = RECORDS[:2]
    for first in range(1, total, 10):
        begin = 1010.0 + 40 * first
        restart = [record("start", begin, began=begin, new=False, attempt=str(first)), state(begin, first - 1, "/x")]
        made = [*made, *(restart if first > 1 else []), *steps(first, [1.0] * taken, begin)]
    return made


def test_the_work_of_reading_grows_as_the_steps_do(tmp_path, monkeypatch):
    """In operations, not seconds: twenty times the steps take twenty times the work, not four hundred times."""
    few, many = (work(tmp_path / str(n), monkeypatch, n) for n in (100, 2000))
    assert 15 * few < many < 25 * few


def test_a_picture_of_a_million_steps_is_thin_and_keeps_the_spikes():
    step = np.arange(1, 1_000_001)
    value = np.sin(step / 1e5)
    value[123_456], value[777_777], value[[400_000, 900_000]] = 9.0, -9.0, np.nan
    made = history.History("run", {"loss": history.Curve(step, 8 * step, step / 10, value)})
    drawn = lines(run_plots.draw_curve([made], "loss"))
    x, y = map(np.array, drawn["run"])
    assert len(x) <= 4 * 1080
    assert np.all(np.diff(x) >= 0)
    assert [x[y == spike] for spike in (9.0, -9.0)] == pytest.approx([123_457, 777_778], abs=1e6 / 1080)  # a column
    assert drawn["run, not finite"][0] == [400_001, 900_001]
