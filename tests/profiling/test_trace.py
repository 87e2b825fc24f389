"""The trace of chosen steps, beside the other profiles of a run."""

import re

import jax
import pytest
from helpers.engines import build, rows

import jzero
from jzero.config.observed import ProfilerConfig
from jzero.profiling.profiles import Trace


def annotated(directory):
    """The numbers of the steps in the files of a directory."""
    (file,) = directory.rglob("*.xplane.pb")
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    events = [dict(e.stats) for plane in planes for line in plane.lines for e in line.events if e.name == "step"]
    return sorted(int(stats["step_num"]) for stats in events)


def test_chosen_steps_are_traced_and_others_are_profiled_later(tmp_path, capsys):
    """The device line of the breakdown, due at step 2, comes at step 4."""
    more = {
        "wall_clock_breakdown": True, "steps_per_print": 2, "flops_profiler": {"enabled": True, "profile_step": 5},
        "profiler": {"steps": [2, 3], "output_path": str(tmp_path / "trace")},
    }  # fmt: skip
    made = build(more=more)[0]
    capsys.readouterr()
    printed = {}
    for step in range(1, 7):
        made.train_batch(rows(step))
        printed[step] = capsys.readouterr().out
    assert annotated(tmp_path / "trace") == [2, 3]
    assert f"steps 2 to 3: traced to {tmp_path / 'trace'}; open it" in printed[3]
    found = {
        word: [step for step, out in printed.items() if word in out] for word in ("traced", "profiled", "FLOPs of")
    }
    assert found == {"traced": [3], "profiled": [4], "FLOPs of": [5]}


@pytest.mark.slow
def test_a_script_that_profiles_keeps_its_profile(tmp_path, capsys):
    made = build(more={"profiler": {"steps": [1, 1], "output_path": str(tmp_path / "ours")}})[0]
    with jax.profiler.trace(str(tmp_path / "script")):
        made.train_batch(rows(0))
        made.train_batch(rows(1))
    (line,) = re.findall(r"^step 1: .*", capsys.readouterr().out, re.M)
    assert line.startswith("step 1: no trace: ")
    assert annotated(tmp_path / "script") == [1, 2]


@pytest.mark.parametrize(
    ("steps", "why"), [([3, 2], "the last is before the first"), ([0, 2], "write"), (7, "write"), ([1], "write")]
)
def test_steps_are_a_first_and_a_last(steps, why):
    with pytest.raises(
        jzero.ConfigError, match=r"profiler.steps = .*must be a list of the first and the last step"
    ) as e:
        jzero.Config.load({"train_batch_size": 8, "profiler": {"steps": steps}})
    assert why == "write" or why in str(e.value)


@pytest.mark.parametrize(
    ("process", "processes", "every", "directory"),
    [(0, 2, False, "runs"), (1, 2, False, ""), (1, 2, True, "runs/process_1"), (0, 1, True, "runs")],
)
def test_processes_of_one_host_write_no_file_of_each_other(process, processes, every, directory, monkeypatch):
    """XProf names the file after the host."""
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    section = ProfilerConfig(steps=[1, 2], output_path="runs", all_processes=every)
    assert Trace(section).directory == directory
