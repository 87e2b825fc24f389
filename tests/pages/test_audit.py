"""The audit fails on known vulnerabilities alone, not on an index that has no data."""

import importlib.util
import json
from pathlib import Path

import pytest

CLEAN = {"name": "numpy", "version": "2.0", "vulns": []}
SKIPPED = {"name": "jax", "skip_reason": "Dependency not found on PyPI"}
BAD = {
    "name": "x",
    "version": "1",
    "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}, {"id": "P-2", "fix_versions": []}],
}


@pytest.fixture(scope="module")
def audit():
    spec = importlib.util.spec_from_file_location("audit", Path(__file__).parents[2] / ".ci/audit.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("packages", "text", "code"),
    [
        ([CLEAN, SKIPPED], "1 of 2 packages checked, no known", 0),
        ([SKIPPED, SKIPPED], "no vulnerability data: the index knows none of the 2", 0),
        ([CLEAN, BAD], "2 known vulnerabilities:\n  x 1: CVE-1, fixed in 2\n  x 1: P-2, fixed in no version yet", 1),
    ],
)
def test_verdict(audit, packages, text, code):
    found = audit.verdict(json.dumps({"dependencies": packages}), "noise")
    assert found[0].startswith(text)
    assert found[1] == code


@pytest.mark.parametrize(("output", "errors"), [("", "noise\nConnectionError: x"), ("{}", "ConnectionError: x")])
def test_no_network(audit, output, errors):
    assert audit.verdict(output, errors) == ("no vulnerability data: ConnectionError: x", 0)
