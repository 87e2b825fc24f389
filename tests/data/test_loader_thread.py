"""The thread that reads ahead: errors, ends, and what it leaves."""

import gc
import os
import subprocess
import sys
import threading
import time

import pytest
from helpers.loaders import ROOT, Rows, Sizes, numbers, samples
from helpers.refusals import refuses

from jzero.data import DataLoader, RepeatingLoader
from jzero.data.stream import Prefetcher


class Broken(list):
    def __getitem__(self, i):
        try:
            return list.__getitem__(self, i)
        except IndexError as error:
            raise OSError("the disk is gone") from error

    def __len__(self):
        return 40


def test_an_error_in_reading_reaches_the_consumer():
    loader = DataLoader(Broken(samples(20)), Sizes(4, 1, 1), shuffle=False)
    batches = iter(loader)
    assert numbers(next(batches) for _ in range(5)) == list(range(20))
    with pytest.raises(OSError, match="the disk is gone") as error:
        next(batches)
    assert isinstance(error.value.__cause__, IndexError)
    assert "while reading sample 20 of training_data" in error.value.__notes__
    assert loader.position == {"epoch": 0, "samples": 20}
    with pytest.raises(OSError, match="the disk is gone"):
        next(iter(RepeatingLoader(loader)))

    def generator():
        yield 1.0
        raise OSError("the line is cut")

    with pytest.raises(OSError, match="the line is cut") as error:
        next(iter(DataLoader(generator, Sizes(2, 1, 1))))
    assert "while reading sample 1 of training_data" in error.value.__notes__


@pytest.mark.parametrize(
    ("kind", "error"),
    [("source", SystemExit(3)), ("function", KeyboardInterrupt()), ("source", GeneratorExit(4))],
)
def test_what_ends_the_thread_reaches_the_consumer(kind, error):
    """A `sys.exit` in a source ends the training loop as itself, and does not leave it waiting."""

    def leave(*_):
        raise error

    source = Rows(40)
    source.rows, caught = leave, []

    def consume():
        try:
            next(iter(DataLoader(source if kind == "source" else leave, Sizes(4, 1, 1))))
        except BaseException as found:
            caught.append(found)

    consumer = threading.Thread(target=consume, daemon=True)  # so that a failure of this test does not hang it
    consumer.start()
    consumer.join(20)
    (found,) = caught
    assert (type(found), found.args) == (type(error), error.args)


def test_the_thread_ends_with_the_loader():
    before = set(threading.enumerate())
    loader = DataLoader(Rows(100), Sizes(2, 1, 1))
    batches = iter(loader)
    next(batches)
    its = set(threading.enumerate()) - before
    assert its
    del loader, batches
    gc.collect()
    assert not its & set(threading.enumerate())


@pytest.mark.slow
def test_a_program_ends_while_the_thread_reads():
    """It exits with its own error only; a thread inside C++ at exit would abort it."""
    program = """
import jax, numpy as np
from types import SimpleNamespace
import jzero
from jax.sharding import NamedSharding, PartitionSpec

sharding = NamedSharding(jzero.make_mesh(devices=jax.devices()[:1]), PartitionSpec())
step = SimpleNamespace(batch_sharding=sharding, micro_size=4096, batch_sizes=SimpleNamespace(train=4096))
loader = jzero.data.DataLoader(np.zeros(2**20 + 1, "int8"), step)
next(iter(loader))
raise RuntimeError("of its own")
"""
    env, command = os.environ | {"JAX_PLATFORMS": "cpu"}, [sys.executable, "-c", program]
    done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("Traceback") == 1, done.stderr


def test_an_iterator_is_read_once():
    loader = DataLoader(iter(samples(11)), Sizes(2, 1, 2))
    loader.seek({"epoch": 0, "samples": 4})
    assert numbers(loader) == [*range(4, 11), 0]
    assert numbers(loader) == []
    with pytest.raises(StopIteration):
        next(RepeatingLoader(loader))
    loader.seek({"epoch": 0, "samples": 0})
    refuses(lambda: next(iter(loader)), r"an iterator, which can be read only once: .*pass a function")


def test_the_end_does_not_wait_for_what_is_ahead():
    """Nor for more than the element that is being read."""
    started, slow = threading.Event(), threading.Event()

    def elements():
        for number in range(100):
            started.set()
            slow.wait(0.2)
            yield number

    ahead = Prefetcher(elements())
    assert next(ahead) == 0
    began = time.monotonic()
    ahead.close()
    assert time.monotonic() - began < 5
    assert not [thread for thread in threading.enumerate() if thread.name == "jzero data" and thread.is_alive()]
