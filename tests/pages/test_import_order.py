"""Imports between jzero's modules point one way, from the rooms that know much to those that know little.

The source is read, so that imports inside functions and under TYPE_CHECKING count too.
"""

import ast
import functools
import graphlib
import re

import test_house
from test_house import LIBRARY, imported, sources

# A module may import from its own line and from those above it.
LINES = re.findall(r"^\d+\. (`.*)$", (LIBRARY / "README.md").read_text().partition("## Import order")[2], re.M)
RANK = {f"jzero.{room}": rank for rank, line in enumerate(LINES) for room in re.findall(r"`(\w+)`", line)}


@functools.cache
def imports_alone():
    """Return `sources()` with the imports of each module as its tree: a walk over whole trees takes long."""
    kinds = ast.Import, ast.ImportFrom
    return {
        name: (path, text, ast.Module([node for node in ast.walk(tree) if isinstance(node, kinds)], []))
        for name, (path, text, tree) in sources().items()
    }


def test_imports_point_one_way(monkeypatch):
    monkeypatch.setattr(test_house, "sources", imports_alone)
    arrows = test_house.rooms()
    assert arrows.keys() == RANK.keys()
    assert {"jzero.step", "jzero.data"} <= arrows["jzero.run"]
    pairs = [(name, other) for name, others in arrows.items() for other in others]
    assert [f"{name} -> {other}" for name, other in pairs if RANK[other] > RANK[name]] == []
    modules = {name: imported(name, path, tree) for name, (path, _, tree) in imports_alone().items()}
    graphlib.TopologicalSorter(modules).prepare()  # its CycleError has the modules of a circle


def names_of_the_package(node):
    """What an import takes from `jzero/__init__.py`, which imports all modules."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name == "jzero"]
    if isinstance(node, ast.ImportFrom) and node.module == "jzero":
        return [alias.name for alias in node.names if f"jzero.{alias.name}" not in sources()]
    return []


def test_no_module_imports_the_package():
    trees = {name: tree for name, (*_, tree) in imports_alone().items() if name not in ("jzero", "jzero.__main__")}
    found = {name: [x for node in ast.walk(tree) for x in names_of_the_package(node)] for name, tree in trees.items()}
    assert {name: names for name, names in found.items() if names} == {}


def private_names(tree):
    """The private names of other packages in a module: imports, and attributes of imported modules.

    jax.extend, jax.interpreters and jax.lib count: JAX promises no compatibility for them.
    """
    found, taken, nodes = set(), set(), list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            taken |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            taken |= {alias.asname or alias.name for alias in node.names if not node.module.startswith("jzero")}
    for node in nodes:
        words = []
        while isinstance(node, ast.Attribute):
            words.append(node.attr)
            node = node.value
        if words and isinstance(node, ast.Name) and node.id in taken:
            found.add(".".join([node.id, *reversed(words)]))
    return {name for name in found if is_private(name)} - {"os._exit"}  # documented, in spite of its name


def is_private(name):
    words = name.split(".")
    unstable = words[0] == "jax" and words[1:2] in (["extend"], ["interpreters"], ["lib"])
    return words[0] != "jzero" and (unstable or any(w.startswith("_") and not w.endswith("__") for w in words))


def test_private_names_are_in_two_files_alone():
    found = {name: names for name, (_, _, tree) in sources().items() if (names := private_names(tree))}
    assert found.keys() == {"jzero._compat", "jzero._compat.kernels"}
