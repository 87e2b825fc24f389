"""The audit fails on known vulnerabilities alone, not on an index that has no data."""

import json
import runpy
from pathlib import Path

SKIPPED = {"name": "jax", "skip_reason": "Dependency not found on PyPI"}
BAD = {"name": "x", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}


def test_verdict():
    verdict = runpy.run_path(str(Path(__file__).parents[2] / ".ci/audit.py"))["verdict"]
    for found, text, code in (
        ([BAD | {"vulns": []}, SKIPPED], "1 of 2 packages checked, no known", 0),
        ([SKIPPED, SKIPPED], "no vulnerability data: the index knows none of the 2", 0),
        ([SKIPPED, BAD], "1 known vulnerabilities:\n  x 1: CVE-1, fixed in 2", 1),
    ):
        said = verdict(json.dumps({"dependencies": found}), "noise")
        assert (said[0].startswith(text), said[1]) == (True, code)
    assert verdict("", "noise\nConnectionError: x") == ("no vulnerability data: ConnectionError: x", 0)
