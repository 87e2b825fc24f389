"""Data of every kind, and loaders of them without a train step."""

import itertools
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jzero
from jzero.data import RepeatingLoader
from jzero.mesh import batch_spec

ROOT = Path(__file__).parents[2]
KINDS = ["arrays", "sequence", "source", "function", "iterable", "hugging face"]


class Sizes(SimpleNamespace):
    """The attributes of a TrainStep that a loader uses."""

    def __init__(self, micro, replicas, accum):
        mesh = jzero.make_mesh(devices=jax.devices()[:replicas])
        super().__init__(replicas=replicas, batch_sharding=NamedSharding(mesh, batch_spec(mesh)), micro=micro)
        self.accumulate(accum)

    def accumulate(self, accum):
        self.batch_sizes = SimpleNamespace(train=self.micro_size * accum)

    @property
    def micro_size(self):
        return self.micro * self.replicas


class Passes:
    """An iterable without a length."""

    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class Rows:
    """A custom source that records the indices it reads."""

    def __init__(self, n):
        self.n, self.read = n, []

    def __len__(self):
        return self.n

    def rows(self, indices):
        self.read += indices.tolist()
        return {"x": indices.astype(np.int32), "y": np.stack([indices, -indices], 1).astype(np.float32)}


def samples(n):
    return [{"x": np.int32(i), "y": np.float32([i, -i])} for i in range(n)]


def data(kind, n):
    if kind == "hugging face":
        datasets = pytest.importorskip("datasets")
        return datasets.Dataset.from_dict({"x": list(range(n)), "y": [[i, -i] for i in range(n)]})
    if kind == "arrays":
        return Rows(n).rows(np.arange(n))
    one = {"sequence": samples, "source": Rows, "function": lambda n: lambda: iter(samples(n))}
    return one.get(kind, lambda n: Passes(samples(n)))(n)


def numbers(batches):
    """The samples in the batches; checks that the two arrays of each belong together."""
    found = []
    for batch in batches:
        x, y = np.asarray(batch["x"]), np.asarray(batch["y"])
        np.testing.assert_array_equal(y, np.stack([x, -x], 1))
        found += x.tolist()
    return found


def take(loader, samples):
    """The next samples, across epochs."""
    return numbers(itertools.islice(RepeatingLoader(loader), samples // loader.step.micro_size))
