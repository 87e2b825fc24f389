"""A small state of many kinds of leaves to save, and how to compare it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jzero
from jzero.checkpoint import async_save, checksums, restore, save

ROWS = 24


def state(seed=0):
    """Leaves of many kinds: some sharded, one of zeros only."""
    split, whole = (NamedSharding(jzero.make_mesh(zero=8), spec) for spec in (PartitionSpec("zero"), PartitionSpec()))
    w = np.random.default_rng(seed).normal(size=(ROWS, 16)).astype(np.float32)
    return {
        "params": {"w": jax.device_put(w, split), "half": jax.device_put(w.astype(jnp.bfloat16), whole)},
        "zeros": jax.device_put(np.zeros((ROWS, 8), np.float32), split),
        "step": jax.device_put(np.int32(7 + seed), whole),
        "flags": jax.device_put(w[0] > 0, whole),
        "bytes": jax.device_put(np.arange(5, dtype=np.int8), whole),
        "rng": jax.device_put(jax.random.key(seed + 1), whole),
    }


def names(path):
    """What a directory contains, but hidden files."""
    return {file.name for file in path.glob("[!.]*")}


def shardings(of):
    return jax.tree.map(lambda x: x.sharding, of)


def plain(tree):
    return jax.tree.map(lambda x: np.asarray(jax.random.key_data(x) if checksums.is_key(x) else x), tree)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, plain(a), plain(b))


def assert_read(path, of, **how):
    """A checkpoint in this directory, default the one that `latest` names, is this state."""
    assert_same(restore(path, shardings(of), **how), of)


def assert_saves(path, tag="a"):
    """A save is complete, and can be read."""
    save(state(), path, tag).wait()
    assert_read(path, state())


@pytest.fixture(autouse=True)
def nothing_left_over():
    yield
    async_save.wait_ignoring_errors()
    async_save._last = None
