"""Compiled programs are kept for the next start, if all processes see the same directory."""

import json
import os
import re
import stat
import time
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest
from jobs import CPU

from jzero.distributed import compilation_cache

PROGRAM = """
import json, os, sys
import jax, jax.numpy as jnp
import jzero
from helpers.regression import CONFIG, Regression
from jzero.run.clock import compilations

sys.argv = ["worker.py"]  # without what the tests add, another one in every start
os.environ["XDG_CACHE_HOME"] = "caches"
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jzero.init_distributed()
jax.default_backend = lambda: "gpu"  # JAX's cache works on CPUs too
step = jzero.make_train_step(Regression(), CONFIG)
state, metrics = step(step.init(jax.random.key(0)), {"x": jnp.ones((8, 3)), "y": jnp.ones(8)})
text = json.dumps([jax.config.jax_compilation_cache_dir, compilations.cached, float(metrics["loss"])])
jzero.log_dist(text, ranks=[-1])
"""


@pytest.fixture
def undecided(monkeypatch, tmp_path):
    """A process on GPUs for which nobody has chosen a directory."""
    former = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(compilation_cache, "_is_decided", False)
    yield tmp_path / "jzero" / "programs"
    jax.config.update("jax_compilation_cache_dir", former)


def test_old_programs_go(undecided):
    (undecided / "job" / "old-cache").mkdir(parents=True)
    for name, days in {"jit_step-1-cache": 31, "jit_step-2-cache": 29, "job/jit_step-3-cache": 99}.items():
        (undecided / name).touch()
        os.utime(undecided / name, (time.time() - days * 86400,) * 2)
    compilation_cache.turn_on(jax.devices())
    assert jax.config.jax_compilation_cache_dir == str(undecided)
    assert sorted(path.name for path in undecided.rglob("*")) == ["jit_step-2-cache", "job", "old-cache"]


def test_nobody_else_may_write_there(undecided, monkeypatch):
    compilation_cache.turn_on(jax.devices())
    assert [stat.S_IMODE(path.stat().st_mode) for path in (undecided.parent, undecided)] == [0o700, 0o700]
    assert compilation_cache._directory() is None  # JAX has one now
    jax.config.update("jax_compilation_cache_dir", None)
    assert compilation_cache._directory() == undecided
    undecided.chmod(0o770)
    assert compilation_cache._directory() is None
    undecided.chmod(0o700)
    other = undecided.stat().st_uid + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert compilation_cache._directory() is None


def test_a_directory_that_some_cannot_use(undecided, monkeypatch):
    """It cannot be written, other processes do not see it, or a file is in its place."""
    with monkeypatch.context() as patch:
        patch.setattr(compilation_cache, "gather_texts", lambda topic, text: [text, text.replace("True", "False")])
        assert compilation_cache.shared_directory() is None
    with monkeypatch.context() as patch:
        for name in ("touch", "unlink"):
            patch.setattr(Path, name, Mock(side_effect=PermissionError("read-only")))
        assert compilation_cache.shared_directory() is None
    assert compilation_cache.shared_directory() == undecided
    undecided.rmdir()
    undecided.touch()
    assert compilation_cache.shared_directory() is None


def test_a_plan_decides_nothing(undecided, monkeypatch):
    """Nor do CPUs, a part of the processes, and who wants no cache."""
    compilation_cache.turn_on([object()])
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        assert compilation_cache.shared_directory() is None
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    with monkeypatch.context() as patch:
        patch.setattr(jax, "default_backend", lambda: "cpu")
        compilation_cache.turn_on(jax.devices())
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    compilation_cache.turn_on(jax.devices())
    assert not undecided.exists()


@pytest.mark.slow
@pytest.mark.processes
def test_processes_use_a_directory_that_all_see(start, tmp_path):
    starts = []
    for _ in range(2):
        job = start(*CPU, 2, "worker.py", program=PROGRAM).ended()
        starts.append([json.loads(line) for line in re.findall(r"^\[\d\].*?(\[[n\"].*\])$", job.output, re.M)])
        assert len(starts[-1]) == 2, job.output
    assert len({loss for start in starts for *_, loss in start}) == 1
    (job,) = (tmp_path / "caches/jzero/programs").iterdir()  # of this command line
    assert all(directory == str(job) for start in starts for directory, *_ in start)
    # init and the step, on process 0; on CPUs JAX's keys differ among processes, unlike on GPUs
    assert max(cached for _, cached, _ in starts[1]) >= 2, starts
    assert all(path.name.endswith("-cache") for path in job.iterdir() if path.is_file())
