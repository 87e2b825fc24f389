"""A griffe extension: shows the doctests of docstrings as code, wherever in the docstring they stand."""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1\S.*|\n\1 +\S.*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """Each doctest, up to the next empty line, as a fenced block.

    >>> print(fenced("Add.\\n\\n>>> 1 + 1\\n2"))
    Add.
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    return DOCTEST.sub(lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", text)
