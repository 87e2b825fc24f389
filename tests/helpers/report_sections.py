"""Sections of the run report."""

import re


def section(text, title):
    """A section's lines with their folds undone; [] if it is not there."""
    found = re.search(rf"^{title}\n(.*?)(?:\n\n|\Z)", text, re.M | re.S)
    return re.sub(r"\n    +", " ", found[1]).splitlines() if found else []
