"""Imports between jzero's modules point one way, from the rooms that know much to those that know little.

The source is read, so that imports inside functions and under TYPE_CHECKING count too.
"""

import ast
import graphlib
import re

from test_house import LIBRARY, imported, rooms, sources

# A module may import from its own line and from those above it.
LINES = re.findall(r"^\d+\. (`.*)$", (LIBRARY / "README.md").read_text().partition("## Import order")[2], re.M)
RANK = {f"jzero.{room}": rank for rank, line in enumerate(LINES) for room in re.findall(r"`(\w+)`", line)}


def test_imports_point_one_way():
    arrows = rooms()
    assert arrows.keys() == RANK.keys()
    assert {"jzero.step", "jzero.data"} <= arrows["jzero.run"]
    pairs = [(name, other) for name, others in arrows.items() for other in others]
    assert [f"{name} -> {other}" for name, other in pairs if RANK[other] > RANK[name]] == []
    # Its CycleError has the modules of a circle.
    graphlib.TopologicalSorter({name: imported(name) for name in sources()}).prepare()


def test_no_module_imports_the_package():
    """`jzero/__init__.py` imports all modules."""
    assert [name for name in sources() if "jzero" in imported(name)] == []


UNSTABLE = ("extend", "interpreters", "lib")  # of jax, which promises no compatibility for them


def private_names(tree):
    """The private names of other packages in a module: imports, and attributes of imported modules."""
    found, taken, nodes = set(), set(), list(ast.walk(tree))
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
            taken |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
            taken |= {alias.asname or alias.name for alias in node.names if not node.module.startswith("jzero")}
    for node in nodes:
        if isinstance(node, ast.Attribute) and (node.attr.startswith("_") or node.attr in UNSTABLE):
            text = ast.unparse(node)
            found |= {text} if re.fullmatch(r"[\w.]+", text) and text.partition(".")[0] in taken else set()
    return {name for name in found if is_private(name)} - {"os._exit"}  # documented, in spite of its name


def is_private(name):
    words = name.split(".")
    unstable = words[0] == "jax" and words[1:] and words[1] in UNSTABLE
    return words[0] != "jzero" and (unstable or any(w.startswith("_") and not w.endswith("__") for w in words))


def test_private_names_are_in_two_files_alone():
    found = {name: names for name, (_, _, tree) in sources().items() if (names := private_names(tree))}
    assert found.keys() == {"jzero._compat", "jzero._compat.kernels"}
