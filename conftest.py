"""Eight simulated CPU devices for every test and doctest, set before JAX starts."""

import os
import pathlib
import subprocess

import hypothesis
import jax
import pytest

if not os.environ.get("CI"):  # where Hypothesis has a profile of its own, without deadlines too
    hypothesis.settings.register_profile("patient", deadline=None)  # a busy machine is no failure
    hypothesis.settings.load_profile("patient")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(__file__).parent / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


@pytest.fixture(scope="module")
def no_compilation_cache():
    """What is compiled for a GPU that is not there cannot be read back from JAX's persistent cache.

    JAX asks once in a process whether there is one, so switching it off, as a plan does, is too late in tests.
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    seconds = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    yield
    jax.config.update(name, seconds)
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 1 MiB: room for several small checkpoints, whose size varies with the order of their writes."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", path]
    if os.geteuid() or subprocess.run(mount, check=False).returncode:
        pytest.skip("mounting needs root")
    yield path
    from jzero.checkpoint import writer

    writer.settle()
    subprocess.run(["umount", "-l", path], check=True)
