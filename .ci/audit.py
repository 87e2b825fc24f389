"""Fails if a version in constraints.txt has a known vulnerability: `python .ci/audit.py`.

pip-audit asks PyPI. Without a network, or where the package index has no such data, nothing can be known: the script
prints that and succeeds, because a build must not depend on it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parent.parent / "constraints.txt"
COMMAND = (
    sys.executable, "-m", "pip_audit", "--disable-pip", "--no-deps", "--format=json", "--progress-spinner=off",
    "--timeout=10", f"--requirement={CONSTRAINTS}",
)  # fmt: skip


def main() -> int:
    try:
        done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=300, check=False)
        text, code = verdict(done.stdout, done.stderr)
    except subprocess.TimeoutExpired:
        text, code = verdict("", "no answer within 300 s")
    print(f"audit: {text}")
    return code


def verdict(output: str, errors: str) -> tuple[str, int]:
    """Read pip-audit's answer; return a text and an exit code.

    Its exit code is 1 both for vulnerabilities and for an index that does not answer, so it decides nothing.
    """
    try:
        packages = json.loads(output)["dependencies"]
    except (ValueError, KeyError):
        return f"no vulnerability data: {(errors.strip().splitlines() or ['no output'])[-1][:300]}", 0
    known = [package for package in packages if "vulns" in package]
    found = [
        f"{package['name']} {package['version']}: {vulnerability['id']}, fixed in "
        f"{', '.join(vulnerability['fix_versions']) or 'no version yet'}"
        for package in known
        for vulnerability in package["vulns"]
    ]
    if found:
        return "\n  ".join([f"{len(found)} known vulnerabilities:", *found]), 1
    if not known:
        return f"no vulnerability data: the index knows none of the {len(packages)} packages", 0
    return f"{len(known)} of {len(packages)} packages checked, no known vulnerability", 0


if __name__ == "__main__":
    sys.exit(main())
