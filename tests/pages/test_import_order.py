"""Imports between jzero's modules point one way, from the rooms that know much to those that know little.

The source is read, not run, so that imports inside functions and under TYPE_CHECKING count too.
"""

import ast
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "jzero"

# A module may import from its own line and from those above it.
ORDER = """
errors files tree stored_names _compat
loss loss_scale values kernels
model precision tiling
optimizers tracing
config
distributed
display mesh
layout pictures spread
passes moe adapters checkpoint
pipeline
step
data planner weights
attention_kernels deepspeed profiling
events ledger
plots run
recipes
launcher cli
__init__ __main__
"""
RANK = {room: rank for rank, line in enumerate(ORDER.split("\n")) for room in line.split()}


def modules():
    """Dotted name inside jzero -> its file; a package has the name of its directory, jzero itself "__init__"."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)] = path
    return found


@lru_cache(None)
def nodes(source):
    return list(ast.walk(ast.parse(source)))


def imports(source, name, is_package, known):
    """The modules inside jzero that a module's source imports.

    `from jzero.data import order` imports jzero.data.order; `from jzero.data import DataLoader` imports jzero.data.
    """
    found = set()
    here = ["jzero", *name.split(".")] if name != "__init__" else ["jzero"]
    for node in nodes(source):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + is_package] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            targets = [f"{start}.{alias.name}" for alias in node.names]
        else:
            continue
        for words in (target.split(".") for target in targets):
            if words[0] == "jzero":
                inside = ".".join(words[1:]) or "__init__"
                found.add(inside if inside in known else ".".join(words[1:-1]) or "__init__")
    return {other for other in found if room(other) != "models"} - {name}  # models/ is beside the library


@pytest.fixture(scope="module")
def graph():
    """module -> the modules that it imports."""
    known = modules()
    return {name: imports(p.read_text(), name, p.name == "__init__.py", known) for name, p in known.items()}


def room(name):
    return name.partition(".")[0]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import jzero.mesh, os", {"mesh"}),
        ("from jzero.mesh import make_mesh as m", {"mesh"}),
        ("from jzero import mesh, data", {"mesh", "data"}),
        ("from jzero import Config", {"__init__"}),
        ("from jzero.data import order, Loader", {"data.order", "data"}),
        ("def f():\n    from . import order\n    from ..mesh import x", {"data.order", "mesh"}),
        ("if TYPE_CHECKING:\n    import jzero", {"__init__"}),
        ("from flax import nnx\nimport jzeroes.mesh", set()),
    ],
)
def test_reader_of_imports(source, found):
    assert imports(source, "data.loader", False, {"mesh", "data", "data.order", "__init__"}) == found


def test_imports_point_one_way(graph):
    assert {room(name) for name in graph} - RANK.keys() == set()  # every room has a rank
    pairs = {(name, other) for name in graph for other in graph[name]}
    assert sorted(f"{name} -> {other}" for name, other in pairs if RANK[room(other)] > RANK[room(name)]) == []


def circles(graph):
    """The largest groups of modules that all reach each other.

    >>> circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()})
    [['b', 'c']]
    """
    reached = {name: set(others) for name, others in graph.items()}
    for middle in graph:  # Warshall's transitive closure
        for name in graph:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    groups = {frozenset(other for other in reached[name] if name in reached[other]) for name in graph}
    return sorted(sorted(group) for group in groups if group)


def test_no_circle(graph):
    assert circles(graph) == []


# ---------------------------------------------------------------- private names of other projects

PUBLIC = {"os._exit"}  # documented, in spite of its name


def private_names(source):
    """The private names of other packages in a module's source: imports, and attributes of imported modules.

    jax.extend, jax.interpreters and jax.lib count: JAX promises no compatibility for them.
    """
    found, imported = set(), set()
    for node in nodes(source):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            imported |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {alias.asname or alias.name for alias in node.names if not node.module.startswith("jzero")}
    for node in nodes(source):
        words = []
        while isinstance(node, ast.Attribute):
            words.append(node.attr)
            node = node.value
        if words and isinstance(node, ast.Name) and node.id in imported:
            found.add(".".join([node.id, *reversed(words)]))
    return {name for name in found if is_private(name)} - PUBLIC


def is_private(name):
    words = name.split(".")
    unstable = words[0] == "jax" and words[1:2] in (["extend"], ["interpreters"], ["lib"])
    return words[0] != "jzero" and (unstable or any(w.startswith("_") and not w.endswith("__") for w in words))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("from jax._src import xla_bridge", {"jax._src.xla_bridge"}),
        ("def f():\n    import jax._src.core as core", {"jax._src.core"}),
        ("import threading\nthreading._register_atexit(f)", {"threading._register_atexit"}),
        ("import jax\njax._src.core.x", {"jax._src", "jax._src.core", "jax._src.core.x"}),
        ("from jax.extend.core import Literal", {"jax.extend.core.Literal"}),
        ("from concurrent.futures import thread\nthread._shutdown", {"thread._shutdown"}),
        ("from __future__ import annotations\nimport os\nos._exit(1)\nself._x\nfrom jzero import _compat", set()),
    ],
)
def test_reader_of_private_names(source, found):
    assert private_names(source) == found


def test_private_names_are_in_compat_alone():
    found = {name: private_names(path.read_text()) for name, path in modules().items() if name != "_compat"}
    assert {name: names for name, names in found.items() if names} == {}
