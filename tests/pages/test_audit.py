"""The audit fails on known vulnerabilities alone, not on an index that has no data."""

import json
import runpy
from pathlib import Path

import pytest

CLEAN = {"name": "numpy", "version": "2.0", "vulns": []}
SKIPPED = {"name": "jax", "skip_reason": "Dependency not found on PyPI"}
BAD = {
    "name": "x", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}, {"id": "P-2", "fix_versions": []}],
}  # fmt: skip
FOUND = "  x 1: CVE-1, fixed in 2\n  x 1: P-2, fixed in no version"


def packages(*found):
    return json.dumps({"dependencies": found}), "noise"


@pytest.mark.parametrize(
    ("answer", "text", "code"),
    [
        (packages(CLEAN, SKIPPED), "1 of 2 packages checked, no known", 0),
        (packages(SKIPPED, SKIPPED), "no vulnerability data: the index knows none of the 2", 0),
        (packages(CLEAN, BAD), f"2 known vulnerabilities:\n{FOUND}", 1),
        (("", "noise\nConnectionError: x"), "no vulnerability data: ConnectionError: x", 0),
    ],
)
def test_verdict(answer, text, code):
    said, found = runpy.run_path(str(Path(__file__).parents[2] / ".ci/audit.py"))["verdict"](*answer)
    assert said.startswith(text)
    assert found == code
