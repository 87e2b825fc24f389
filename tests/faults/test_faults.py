"""Rows that provoke their fault: one line within the bound, which names what is wrong. The others: the test exists."""

import re
import signal
import time
from pathlib import Path

import jax
import pytest
import table

import jzero
from jzero.errors import CheckpointError

ROOT = Path(__file__).parents[2]
ROWS = [fault for faults in table.TABLE.values() for fault in faults]
PATIENCE = 20  # seconds on the wall clock of a busy machine


@pytest.fixture(scope="module", autouse=True)
def warm():
    """Start JAX, so that no row pays for it."""
    jax.random.key(0)


@pytest.mark.parametrize("row", [pytest.param(row, id=row.fault) for row in ROWS if row.provoke])
def test_fault(row, tmp_path):
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"no answer within {PATIENCE} s"))
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    started = time.thread_time()
    try:
        with pytest.raises((jzero.ConfigError, CheckpointError)) as error:
            row.provoke(tmp_path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    took, text = time.thread_time() - started, str(error.value)
    assert [part for part in row.parts if part not in text] == [], text
    assert len(text.splitlines()) == 1
    assert len(text.encode()) < 3000
    assert took < 1


def test_the_other_faults_are_tested():
    files = (ROOT / "tests").glob("*/test_*.py")
    defined = {name for file in files for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.M)}
    assert [row.test for row in ROWS if not row.provoke and row.test not in defined] == []


def test_messages_are_shortened_and_printable():
    error = jzero.ConfigError("a\x1b[2J" + "\udc80" + "x" * 10**6 + " y" * 10**6, *["p"] * 100)
    first, *_, last = str(error).splitlines()
    assert len(str(error).splitlines()) == 21
    assert len(first) < 2100
    assert first.startswith(r"- a\x1b[2J\udc80x")
    assert last == "- and 81 more problems"
    assert str(CheckpointError("\ud800\r" + "z" * 10**6)).startswith(r"\ud800\rz")
