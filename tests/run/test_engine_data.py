"""The engine's training data: loaders, positions, what it refuses."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engines import ACCUM, FEATURES, TRAIN, UNIT, build, parts, rows
from helpers.refusals import refuses

import jzero


def numbered(n):
    samples = rows(0, n)
    samples["y"][:, 0] = np.arange(n)
    return samples


def numbers(micro_batches):
    return np.concatenate([np.asarray(b["y"][:, 0]) for b in micro_batches]).astype(int).tolist()


def test_training_data():
    """An epoch is whole global batches: of 5 micro-batches of samples and 2 of accumulation, 6."""
    e, _, loader, _ = build(training_data=numbered(5 * UNIT), more={"gradient_accumulation_steps": 2})
    assert len(loader) == 6
    assert e.training_dataloader is loader
    for _ in range(6):  # two epochs
        e.train_batch()
    assert e.global_samples == 12 * UNIT
    assert loader.position == {"epoch": 2, "samples": 0}
    batches = [list(loader) for _ in range(2)]
    epochs = [numbers(micro_batches) for micro_batches in batches]
    assert all(sorted(epoch[: 5 * UNIT]) == list(range(5 * UNIT)) for epoch in epochs)
    assert all(epoch[5 * UNIT :] == epoch[:UNIT] for epoch in epochs)
    assert epochs[0] != epochs[1]
    placed = e.step_fn.place_micro_batch(batches[0][0])  # what the loader gives is not copied
    assert all(a is b for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(batches[0][0]), strict=True))


def test_the_position_is_the_engines():
    """Two runs over the same data: the second one goes on where the first was, in other global batches."""
    samples = numbered(7 * UNIT)
    straight, _, loader, _ = build(training_data=samples)
    assert loader.position == {"epoch": 0, "samples": 0}
    losses = [float(straight.train_batch())]
    saved = loader.position
    assert saved == {"epoch": 0, "samples": TRAIN}
    straight.set_train_batch_size(2 * UNIT)
    losses += [float(straight.train_batch()) for _ in range(4)]
    assert loader.position == {"epoch": 1, "samples": 4 * UNIT}  # 3 + 2 x 2 micro-batches, then the next epoch
    more = {"gradient_accumulation_steps": 2}
    again, _, loader, _ = build(training_data=samples, more=more)
    first = again.train_batch()
    again.training_dataloader.seek({"epoch": 0, "samples": 0})
    fresh, _, other, _ = build(training_data=samples, more=more)
    assert float(first) == float(fresh.train_batch())
    again.state, fresh.state = (jax.tree.map(jnp.copy, fresh.state) for _ in range(2))
    for loader in (again.training_dataloader, other):
        loader.seek(saved)
    assert [float(again.train_batch()) for _ in range(4)] == [float(fresh.train_batch()) for _ in range(4)]
    assert other.position == straight.training_dataloader.position
    assert len(set(losses)) == 5


def test_training_data_as_samples():
    whole, one = rows(0, UNIT + 1), {"gradient_accumulation_steps": 1}
    samples = [jax.tree.map(lambda x, i=i: x[i], whole) for i in range(UNIT + 1)]
    _, _, loader, _ = build(training_data=samples, more=one)
    assert [b["x"].shape for b in loader] == [(UNIT, FEATURES)] * 2  # the last one filled up
    _, _, loader, _ = build(training_data=samples, more={"dataloader_drop_last": True, **one})
    assert len(loader) == len(list(loader)) == 1


def test_training_data_that_ends():
    """An iterator of samples, which no epoch follows; a user's own iterator of micro-batches stays possible."""
    whole = rows(0, TRAIN + 1)
    e, *_ = build(training_data=(jax.tree.map(lambda x, i=i: x[i], whole) for i in range(TRAIN + 1)))
    assert list(itertools.islice(jzero.RepeatingLoader([1, 2, 3]), 7)) == [1, 2, 3, 1, 2, 3, 1]
    e.train_batch(jzero.RepeatingLoader(parts(0, 2)))
    assert e.micro_steps == ACCUM
    e.train_batch()
    e.train_batch()
    refuses(e.train_batch, r"ended after 0 of 3 micro-batches.*give a function that makes one")
    assert e.global_steps == 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (rows(0, UNIT - 1), "7 samples do not fill one global batch of 24"),
        ({**rows(0), "y": np.zeros((3, 2))}, "have .3, 24. samples"),
        (rows(0, 0), "training_data contains no samples"),
        ([], "training_data contains no samples"),
    ],
)
def test_bad_training_data(data, words):
    refuses(lambda: build(training_data=data, more={"dataloader_drop_last": True}), words)
