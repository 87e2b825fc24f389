"""A ratchet on the size of the library: each figure may fall and not rise.

A change that adds code removes other code, or raises a limit and says why in its commit. A change that removes code
lowers the limits.
"""

import ast
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIBRARY = ROOT / "jzero"
HEART = ("layout", "passes", "step")
LIMITS = {
    "lines": 50755,
    "files": 274,
    "statements": 29886,
    "Any": 1144,
    "rooms": 40,
    "floors": 16,
    "arrows": 259,
    "functions over 60 lines": 2,
    "functions with more than 7 arguments": 10,
    "public names defined twice": 9,
    "file names used twice": 0,
    "files missing in jzero/README.md": 0,
    "lines of it over 120 characters": 0,
    "lines of layout, passes and step": 4175,
    "docstrings that begin with What, How, Where or Whether": 0,
    "lines of tests": 33000,
}
WALK = {"files of a step on the host": 19, "calls of it": 91, "files in its trace": 21}


@lru_cache
def sources() -> dict[str, tuple[Path, str, ast.Module]]:
    """Return the path, text and tree of each module, by its dotted name."""
    found = {}
    for path in sorted(LIBRARY.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = path, path.read_text(), ast.parse(path.read_text())
    return found


@lru_cache
def imported(name: str) -> set[str]:
    """Return the names that a module imports from the library, also inside of functions."""
    path, _, tree = sources()[name]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
            base = ".".join([*package[: len(package) - node.level + 1], node.module or ""]).strip(".")
            base = base if node.level else node.module or ""
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in sources() else base for alias in node.names}
    return found & sources().keys()


def room(module: str) -> str:
    """Return the folder, or the file, of the first level."""
    return ".".join(module.split(".")[:2])


def rooms() -> dict[str, set[str]]:
    """Return each room's imports from other rooms."""
    arrows = defaultdict(set)
    for name in sources():
        if name not in ("jzero", "jzero.__main__"):
            arrows[room(name)] |= set()
            if name != "jzero.cli":
                arrows[room(name)] |= {room(module) for module in imported(name)} - {room(name), "jzero"}
    return arrows


def floors() -> int:
    """Return the length of the longest chain of imports between rooms."""
    arrows = rooms()

    @lru_cache
    def floor(name: str) -> int:
        return 1 + max(map(floor, arrows[name]), default=0)

    return max(map(floor, arrows))


@lru_cache
def figures() -> dict[str, int]:
    texts = [text for _, text, _ in sources().values()]
    nodes = [node for _, _, tree in sources().values() for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    public = Counter(
        node.name
        for _, _, tree in sources().values()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and node.name not in ("main", "parse", "read")
    )
    names = Counter(path.name for path, _, _ in sources().values() if not path.name.startswith("__"))
    readme = (LIBRARY / "README.md").read_text()
    docstrings = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    return {
        "lines": sum(text.count("\n") for text in texts),
        "files": len(texts),
        "statements": sum(isinstance(node, ast.stmt) for node in nodes),
        "Any": sum(len(re.findall(r"\bAny\b", text)) for text in texts),
        "rooms": len(rooms()),
        "floors": floors(),
        "arrows": sum(map(len, rooms().values())),
        "functions over 60 lines": sum(node.end_lineno - node.lineno >= 60 for node in functions),
        "functions with more than 7 arguments": sum(arguments(node) > 7 for node in functions),
        "public names defined twice": sum(n > 1 for n in public.values()),
        "file names used twice": sum(n > 1 for n in names.values()),
        "files missing in jzero/README.md": sum(not re.search(rf"\b{re.escape(n[:-3])}\b", readme) for n in names),
        "lines of it over 120 characters": sum(len(line) > 120 for line in readme.splitlines()),
        "lines of layout, passes and step": sum(
            text.count("\n") for name, (_, text, _) in sources().items() if room(name).partition(".")[2] in HEART
        ),
        "docstrings that begin with What, How, Where or Whether": sum(
            bool(re.match(r"(What|How|Where|Whether)\b", text)) for text in docstrings
        ),
        "lines of tests": sum(path.read_text().count("\n") for path in (ROOT / "tests").rglob("*.py")),
    }


def arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    names = [x.arg for x in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


@pytest.mark.parametrize("name", LIMITS)
def test_a_figure_does_not_rise(name):
    assert figures()[name] <= LIMITS[name], "remove code, or raise the limit and say why in the commit"


def test_limits_follow_what_fell():
    loose = {name: (found, LIMITS[name]) for name, found in figures().items() if found < 0.98 * LIMITS[name] - 1}
    assert not loose, f"lower these limits (found, limit): {loose}"


def test_a_steady_step_enters_few_files():
    """jzero/README.md lists them. In a process of its own, in which no other test has left a listener."""
    run = subprocess.run(
        [sys.executable, Path(__file__).parent / "helpers/walk.py"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    files, calls, traced = json.loads(run.stdout.splitlines()[0])
    found = dict(zip(WALK, (len(files), calls, len(traced)), strict=True))
    assert all(found[name] <= WALK[name] for name in WALK), (found, files, traced)
    assert all(found[name] > 0.9 * WALK[name] - 1 for name in WALK), f"lower these limits: {found}"
