"""The list of packages; everything else is in pyproject.toml."""

from setuptools import find_packages, setup

# `models/` lies at the top of the repository, where it is read and copied, and is installed as `jzero.models`.
setup(
    packages=[*find_packages(include=["jzero*"]), "jzero.models"],
    package_dir={"jzero.models": "models"},
    package_data={"jzero": ["py.typed"], "jzero.recipes": ["recipes.json"]},
)
