"""Compiled programs are kept for the next start, if all processes see the same directory."""

import os
import shutil
import stat
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import jax
import pytest
from helpers.regression import CONFIG, Regression

import jzero
from jzero.distributed import compilation_cache


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
    jzero.make_train_step(Regression(), CONFIG)
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
    with monkeypatch.context() as patch:  # several processes have one of their command line
        patch.setattr(compilation_cache, "gather_texts", lambda topic, text: [text] * 2)
        patch.setattr(jax, "process_count", lambda: 2)
        own = compilation_cache.shared_directory()
        monkeypatch.setattr(sys, "argv", ["another"])
        assert own.parent == undecided == compilation_cache.shared_directory().parent
        assert own != compilation_cache.shared_directory()
    shutil.rmtree(undecided)
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
