"""Files that say what a change must not change: their tests write them anew with `--update-golden`."""

import json
from pathlib import Path

import jax
import pytest

GOLDEN = Path(__file__).parent
VERSION = ".".join(jax.__version__.split(".")[:2])


def read(name: str):
    path = GOLDEN / name
    return json.loads(path.read_text()) if path.exists() else {}


def check(name: str, found, update: bool, hint: str = "") -> None:
    """Compare with the file; a difference names what is gone, new and other, after a hint how to see it."""
    known = read(name)
    if update:
        (GOLDEN / name).write_text(json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
    elif lines := difference(known, found):
        lines = [f"{name}, after a meant change: this test with --update-golden", *filter(None, [hint]), *lines]
        pytest.fail("\n".join(lines), pytrace=False)


def difference(known, found, where: str = "") -> list[str]:
    """List the paths at which two trees of JSON differ."""
    if isinstance(known, dict) and isinstance(found, dict):
        lines = []
        for key in sorted({*known, *found}):
            path = f"{where}/{key}"
            if key not in found:
                lines.append(f"{path}: gone")
            elif key not in known:
                lines.append(f"{path}: new")
            else:
                lines += difference(known[key], found[key], path)
        return lines
    return [] if known == found else [f"{where}: {known!r} -> {found!r}"]
