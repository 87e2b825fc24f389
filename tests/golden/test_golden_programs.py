"""Each row of `rows.py` lowers to the program of the commit that wrote `programs.json`, on both versions of JAX.

A move or a rename changes no row. A change that is meant to says in its commit which rows, and why.
"""

import hashlib

import jax
import pytest
from golden import rows, snapshots

VERSION = ".".join(jax.__version__.split(".")[:2])
FILE = "programs.json"
# CI compares all rows with the newer version of JAX, and these with both.
DEFAULT = ["normed-zero2", "functions-zero_bubble-zero3", "llama-tensor2-zero3"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in DEFAULT)) for name in rows.ROWS]
)
def test_a_step_is_the_same_program(name, update):
    found = hashlib.sha256(rows.program(name).encode()).hexdigest()[:16]
    known = snapshots.read(FILE)
    if update:
        snapshots.write(FILE, {**known, VERSION: {**known.get(VERSION, {}), name: found}})
    elif VERSION not in known:
        pytest.skip(f"no programs of jax {VERSION}")
    else:
        assert found == known[VERSION][name], f"python tests/golden/rows.py DIRECTORY {name} writes the program"


def test_the_file_has_these_rows(update):
    if not update:
        assert all(hashes.keys() == rows.ROWS.keys() for hashes in snapshots.read(FILE).values())
