"""Past defects, one patch each: put back into a copy of the library, a test must fail.

A patch reads as `git diff` writes it, below two lines:

    Defect: what users saw, in one line
    Test: tests/test_x.py::test_y

It takes the mend back; the named test caught the defect, and must catch it again.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PATCHES = sorted(HERE.glob("*.patch"))


def header(patch):
    """Return the values of the lines "Defect: ..." and "Test: ..." above the difference."""
    return dict(re.findall(r"^(Defect|Test): (.+)$", patch.read_text().partition("\ndiff ")[0], re.M))


def copy(directory):
    """Copy what the tests read and a mutant may change; link the pages."""
    for name in ("jzero", "models", "tests", "experiments"):
        if (ROOT / name).is_dir():
            ignore = shutil.ignore_patterns("__pycache__", "mutants")
            shutil.copytree(ROOT / name, directory / name, ignore=ignore, symlinks=True)
    for name in ("pyproject.toml", "conftest.py", "README.md", "docs", "CHANGELOG.md"):
        (directory / name).symlink_to(ROOT / name)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_each_patch_names_a_test_and_applies(patch):
    """A change of the mended lines changes the patch with them."""
    assert header(patch).keys() == {"Defect", "Test"}
    assert (ROOT / header(patch)["Test"].partition("::")[0]).is_file()
    done = subprocess.run(["git", "apply", "--check", patch], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.stem)
def test_a_past_defect_is_caught(patch, tmp_path):
    """The named test fails with the defect, and by an assertion or an error of the test itself, not for its absence."""
    copy(tmp_path)
    # Outside of a repository `git apply` changes files; within one it leaves those out that git does not know.
    env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path.parent), "PYTHONPATH": str(tmp_path)}
    subprocess.run(["git", "apply", "--whitespace=nowarn", patch], cwd=tmp_path, env=env, check=True)
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    command.append(header(patch)["Test"])
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-1000:]
    assert re.search(r"^FAILED |^ERROR |\d+ failed", done.stdout, re.M), done.stdout[-3000:]
