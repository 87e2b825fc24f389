"""The loader: an order independent of the layout, its position, the rows of a process, the thread that reads ahead."""

import gc
import itertools
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from helpers.loaders import KINDS, ROOT, Rows, Sizes, data, numbers, samples, take
from helpers.refusals import refuses
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import jzero
from jzero.data import DataLoader, RepeatingLoader
from jzero.data.order import Position, shuffled
from jzero.data.sources import as_source
from jzero.data.stream import StreamSpec, micro_batches
from jzero.mesh import batch_spec
from jzero.step.batch import rows_of_this_process


def test_the_order_is_the_seeds_and_not_the_layouts():
    """Every division of a global batch gives the same stream, over two epochs."""

    def stream(*sizes, **options):
        return take(DataLoader(data("arrays", 100), Sizes(*sizes or (4, 1, 1)), **options), 200)

    assert stream(seed=1) == stream(1, 2, 2, seed=1) == stream(1, 4, 1, seed=1) != stream(seed=2)
    assert stream(shuffle=False) == [*range(100), *range(100)]
    assert stream(seed=1)[:100] != stream(seed=0)[100:]  # would be equal if the epoch were added to the seed


@settings(max_examples=20, deadline=None)
@given(length=st.integers(1, 3000), small=st.booleans(), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_a_shuffle_is_a_permutation(length, small, seed, epoch):
    """Both by a stored permutation and by index_shuffle, which serves large data."""
    found = shuffled(np.arange(length), length, seed, epoch, small=length if small else 0)
    assert sorted(found.tolist()) == list(range(length))


def test_every_place_is_as_likely():
    counts = np.zeros((6, 6))
    for epoch in range(3000):
        counts[np.arange(6), shuffled(np.arange(6), 6, 0, epoch)] += 1
    assert abs(counts - 500).max() < 100  # five standard deviations


def test_a_shuffle_of_10_to_the_9_is_quick():
    chosen = shuffled(np.arange(10**9 - 64, 10**9), 10**9, 0, 0)  # no array of 8 GB
    assert len(set(chosen.tolist())) == 64
    assert 0 <= chosen.min() < chosen.max() < 10**9


@settings(max_examples=50, deadline=None)
@given(
    length=st.integers(1, 60), micro=st.integers(1, 5), accum=st.integers(1, 4),
    other=st.tuples(st.integers(1, 5), st.integers(1, 4)), taken=st.integers(0, 40),
    drop_last=st.booleans(), sized=st.booleans(),
)  # fmt: skip
def test_seek_goes_on_exactly(length, micro, accum, other, taken, drop_last, sized):
    """From any position: the same layout agrees to the end of the next epoch, another layout to the end of this one."""
    source = as_source(np.arange(length) if sized else lambda: iter(range(length)))

    def stream(micro, accum, start=None):
        spec = StreamSpec(source, 3, drop_last, micro, micro * accum, np.arange(micro), lambda rows: rows.tolist())
        return micro_batches(spec, start or Position())

    if drop_last and length < max(micro * accum, other[0] * other[1]):
        return
    straight = stream(micro, accum)
    at = [Position(), *(at for _, at in itertools.islice(straight, taken))][-1]
    at = Position.from_json(at.to_json())
    rest = [batch for batch, _ in itertools.islice(straight, 2 * (length // micro + accum))]
    again = [batch for batch, _ in itertools.islice(stream(micro, accum, at), len(rest))]
    assert again == rest

    def order(epoch):
        return shuffled(np.arange(length), length, 3, epoch).tolist() if sized else list(range(length))

    (micro, accum), first = other, order(at.epoch)
    left, size = first[at.samples :], micro * accum
    if at.begun == 0:  # between steps: the rest is whole global batches, then the next epoch
        short = -len(left) % size
        left = left[: len(left) // size * size] if drop_last else left + [first[i % length] for i in range(short)]
        left += order(at.epoch + 1)[:size]
    elif drop_last:
        return
    batches = itertools.islice(stream(micro, accum, at), -(-len(left) // micro))
    assert [row for batch, _ in batches for row in batch][: len(left)] == left


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_the_same(kind):
    """Unshuffled, over two epochs, and from a position in the second epoch on another layout."""
    loader = DataLoader(data(kind, 50), Sizes(2, 4, 2), shuffle=False)
    expected = [*range(50), *range(14)]
    assert [numbers(loader), numbers(loader)] == [expected] * 2
    assert loader.position == {"epoch": 2, "samples": 0}
    loader.seek({"epoch": 1, "samples": 32})
    assert numbers(loader) == expected[32:]
    smaller = DataLoader(data(kind, 50), Sizes(1, 2, 3), shuffle=False)
    smaller.seek({"epoch": 1, "samples": 32})
    assert numbers(smaller) == [*range(32, 50)]
    assert numbers(smaller) == [*range(50), *range(4)]
    batch = next(iter(loader))
    assert {name: x.shape for name, x in batch.items()} == {"x": (8,), "y": (8, 2)}
    assert all(x.sharding == loader.step.batch_sharding for x in batch.values())


def test_iterating_again_is_the_next_epoch():
    loader = DataLoader(Rows(16), Sizes(4, 1, 1), seed=1)
    whole = [numbers(loader) for _ in range(4)]
    loader.seek({"epoch": 1, "samples": 8})
    assert numbers(loader) == whole[1][8:]
    for _ in loader:
        assert loader.position == {"epoch": 2, "samples": 4}
        break
    assert numbers(loader) == whole[3]  # not the rest of the interrupted epoch
    running = RepeatingLoader(loader)
    assert loader.position == {"epoch": 4, "samples": 0}
    next(running)
    loader.seek({"epoch": 0, "samples": 12})
    assert numbers([next(running), next(running)]) == whole[0][12:] + whole[1][:4]


@pytest.mark.parametrize("kind", ["arrays", "iterable"])
def test_the_global_batch_changes_under_way(kind):
    """The rest of the epoch and every later epoch are whole global batches of the new size."""
    sizes = Sizes(2, 1, 5)
    loader = DataLoader(data(kind, 23), sizes, shuffle=False)
    batches = iter(loader)
    given = numbers(next(batches) for _ in range(5))
    sizes.accumulate(4)
    assert len(loader) == 12 if kind == "arrays" else True
    assert given + numbers(batches) == [*range(23), *range(3)]  # 10 + 2 x 8
    assert numbers(loader) == [*range(23), 0]
    sizes.accumulate(2)
    loader = DataLoader(data(kind, 23), sizes, shuffle=False, drop_last=True)
    given = numbers(itertools.islice(loader, 8))
    sizes.accumulate(5)
    loader.seek(loader.position)  # the rest does not fill a batch of the new size, so the next epoch starts
    assert given + numbers(loader) == [*range(16), *range(20)]
    assert loader.position == {"epoch": 2, "samples": 0}


@pytest.mark.parametrize(("pipe", "local"), [(1, 2), (2, 4)])
def test_a_process_reads_its_own_rows_alone(pipe, local):
    """Simulates processes of `local` devices each on a mesh of 8; together their rows are the batch."""
    mesh = jzero.make_mesh(pipe=pipe, data=2)
    sharding = NamedSharding(mesh, batch_spec(mesh))
    micro, train = 8, 16

    def rows_of(process):
        here = jax.devices()[process * local : (process + 1) * local]
        every = sharding.devices_indices_map((micro,))
        part = SimpleNamespace(addressable_devices_indices_map=lambda shape: {d: every[d] for d in here})
        return rows_of_this_process(part, micro)

    def stream(source, mine):
        spec = StreamSpec(source, 1, False, micro, train, mine, lambda rows: rows["x"].tolist())
        return [batch for batch, _ in itertools.islice(micro_batches(spec, Position()), 4)]

    whole, everything = stream(Rows(30), np.arange(micro)), as_source(lambda: iter(samples(30)))
    walked = stream(everything, np.arange(micro))
    held = {}
    for process in range(8 // local):
        source, mine = Rows(30), rows_of(process)
        assert len(mine) == min(micro, micro * pipe * local // 8)
        parts = stream(source, mine)
        assert source.read == [*itertools.chain(*parts)]
        for row, *values in zip(mine.tolist(), *parts, strict=True):
            assert held.setdefault(row, values) == values
        of_all = stream(everything, mine)
        assert of_all == [[batch[i] for i in mine] for batch in walked]
    assert [list(batch) for batch in zip(*[held[row] for row in range(micro)], strict=True)] == whole


class Broken(list):
    def __getitem__(self, i):
        if i >= 20:
            raise OSError("the disk is gone") from IndexError(i)
        return super().__getitem__(i)

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


@pytest.mark.parametrize(("kind", "error"), [("source", SystemExit(3)), ("function", KeyboardInterrupt())])
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
