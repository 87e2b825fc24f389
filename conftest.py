"""Eight simulated CPU devices for every test and doctest, set before JAX starts."""

import atexit
import contextlib
import gc
import os
import pathlib
import subprocess
import sys
from importlib.metadata import version

import hypothesis
import pytest

gc.disable()  # until all modules are imported and all tests collected


@contextlib.contextmanager
def quiet():
    """Send what libraries write to file descriptor 2 to nowhere."""
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)


# The tests spend half of their time in XLA's emitters of fused loops for CPUs. Those before them compile three times as
# fast. From 0.11 on, XLA has no others and refuses the flag. There YNN is off: with it, XLA sums some bfloat16 matmuls
# in bfloat16 (tests/fusion/test_fused.py).
has_others = tuple(map(int, version("jaxlib").split(".")[:2])) < (0, 11)
others = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
os.environ.setdefault("XLA_FLAGS", others if has_others else "--xla_cpu_experimental_ynn_fusion_type=")

# Hundreds of processes import jzero: they keep its bytecode, also where the shell's Python does not.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# LLVM's; the tests spend their time on compiling, and so do the processes that they start, which inherit this.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# JAX's CUDA plugin logs that there is no driver, before any setting of a log level counts. From a worker of xdist these
# lines would come after pytest's last one.
with quiet():
    import jax

if not os.environ.get("CI"):  # where Hypothesis has a profile of its own, without deadlines too
    hypothesis.settings.register_profile("patient", deadline=None)  # a busy machine is no failure
    hypothesis.settings.load_profile("patient")
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(__file__).resolve().parent / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)  # tests share many small programs


def pytest_addoption(parser):
    parser.addoption("--matrix-part", metavar="K/N", help="of the tests marked `matrix` run numbers K, K + N, ...")
    parser.addoption("--long-part", metavar="K/N", help="the same of the other slow tests, but those of the pages")
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write the stored outcomes of the chosen tests anew, after a meant change; without -n",
    )


def pytest_collection_modifyitems(config, items):
    """Leave out long tests and cases of full matrices that are in no chosen part; CI's parts follow from the commit."""
    matrix = [item for item in items if item.get_closest_marker("matrix")]
    slow = [item for item in items if item.get_closest_marker("slow") and not item.get_closest_marker("matrix")]
    long = [item for item in slow if item.path.name != "test_docs.py"]  # every code block runs in each CI
    for option, of in (("--matrix-part", matrix), ("--long-part", long)):
        if not (part := config.getoption(option)):
            continue
        first, _, step = (int(n) if n.isdecimal() else -1 for n in part.partition("/"))
        if not 0 <= first < step:
            raise pytest.UsageError(f"{option} {part}: must be K/N with 0 <= K < N, as 0/6")
        left_out = set(of) - set(of[first::step])
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    """Keep Python's collector from walking over all modules and tests again and again: a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


def pytest_unconfigure():
    """Keep the summary of the last engine of the tests from coming after pytest's last line."""
    from jzero.run.observers import print_last

    atexit.unregister(print_last)


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Give each worker of `-n` a half of the files, so that a module's fixtures and compiled steps are made once.

    A worker that has finished its half takes over from the other one's end.
    """
    if getattr(config.option, "dist", "no") == "load":
        config.option.dist = "worksteal"


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
    from jzero.checkpoint.async_save import wait_ignoring_errors

    wait_ignoring_errors()
    subprocess.run(["umount", "-l", path], check=True)
