"""Each row of `rows.py` lowers to the program of the commit that wrote `programs.json`, on both versions of JAX.

A move or a rename changes no row. A change that is meant to says in its commit which rows, and why.
"""

import hashlib

import pytest
from golden import rows, snapshots
from golden.snapshots import VERSION

FILE = "programs.json"
# CI compares all rows with the newer version of JAX, and these with both.
DEFAULT = ["normed-zero2", "functions-zero_bubble-zero3", "llama-tensor2-zero3"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in DEFAULT)) for name in rows.ROWS]
)
def test_a_step_is_the_same_program(name, update):
    """`python tests/golden/rows.py DIRECTORY NAME` writes the program of a row."""
    found = hashlib.sha256(rows.program(name).encode()).hexdigest()[:16]
    known = snapshots.read(FILE)
    if VERSION not in known and not update:
        pytest.skip(f"no programs of jax {VERSION}")
    snapshots.check(FILE, known | {VERSION: known.get(VERSION, {}) | {name: found}}, update)


def test_the_file_has_these_rows(update):
    if not update:
        assert all(hashes.keys() == rows.ROWS.keys() for hashes in snapshots.read(FILE).values())
