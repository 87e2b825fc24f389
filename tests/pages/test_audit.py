"""The audit fails on known vulnerabilities alone, not on an index that has no data."""

import importlib.util
import json
from pathlib import Path

import pytest

CLEAN = {"name": "numpy", "version": "2.0", "vulns": []}
SKIPPED = {"name": "jax", "skip_reason": "Dependency not found on PyPI"}
BAD = {
    "name": "x", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}, {"id": "P-2", "fix_versions": []}],
}  # fmt: skip


def packages(*found):
    return json.dumps({"dependencies": found}), "noise"


@pytest.mark.parametrize(
    ("answer", "text", "code"),
    [
        (packages(CLEAN, SKIPPED), "1 of 2 packages checked, no known", 0),
        (packages(SKIPPED, SKIPPED), "no vulnerability data: the index knows none of the 2", 0),
        (
            packages(CLEAN, BAD),
            "2 known vulnerabilities:\n  x 1: CVE-1, fixed in 2\n  x 1: P-2, fixed in no version",
            1,
        ),
        (("", "noise\nConnectionError: x"), "no vulnerability data: ConnectionError: x", 0),
    ],
)
def test_verdict(answer, text, code):
    spec = importlib.util.spec_from_file_location("audit", Path(__file__).parents[2] / ".ci/audit.py")
    audit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(audit)
    found = audit.verdict(*answer)
    assert found[0].startswith(text)
    assert found[1] == code
