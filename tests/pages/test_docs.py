"""The README and the pages: every block runs, the README keeps its limits, what is generated is current."""

import argparse
import ast
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import json
import os
import re
import runpy
import shlex
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

import jzero
from jzero.errors import install_command
from jzero.launcher import options
from jzero.recipes import recipe_table

ROOT = Path(__file__).parents[2]
README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
TRANSLATIONS = {CHINESE: README} | {page: ROOT / "docs" / page.name for page in sorted((ROOT / "docs/zh").glob("*.md"))}
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
# Other libraries' code, or that needs a run of DeepSpeed (tests/deepspeed_runs has some): it must parse.
FOREIGN = ('title="DeepSpeed"', 'title="transformers"', 'title="jzero, after DeepSpeed"')
# Blocks that run where a library is installed.
WITH = {'title="jzero with PyTorch"': "torch", 'title="jzero with transformers"': "transformers"}
# Pages with many programs to compile.
LONG = {
    "README", "checkpoints", "context-parallelism", "data", "examples", "expert-parallelism",
    "finetuning", "fp8", "from-deepspeed", "functional-api", "getting-started", "gone-wrong", "models", "monitoring",
    "performance", "pipelines", "plan", "profiling", "tensor-parallelism", "weights", "zero",
}  # fmt: skip
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


class Block(NamedTuple):
    language: str
    rest: str
    text: str
    line: int


@functools.cache
def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*) *([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [Block(m[1], m[2], m[3], text.count("\n", 0, m.start()) + 2) for m in found]


def commands(page: Path) -> list[list[str]]:
    """The words of each command; a script is no list of commands, and launcher/test_run.py runs it."""
    found = [b.text.replace("\\\n", " ") for b in blocks(page) if b.language == "bash" and not b.text.startswith("#!")]
    parts = (part for text in found for line in text.splitlines() for part in line.split("&&"))
    return list(filter(None, (shlex.split(part, comments=True) for part in parts)))


def named(pages, *languages, long=()):
    """The pages with a block of one of the languages, or all."""
    return [
        pytest.param(page, id=page.name, marks=[pytest.mark.slow] * (page.stem in long))
        for page in pages
        if not languages or any(block.language in languages for block in blocks(page))
    ]


# ---- blocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", named(PAGES, "python", long=LONG))
def test_python_blocks_run(page, tmp_path, capsys, monkeypatch):
    """The blocks of a page are one program: a block may use names of the blocks before it.

    The directory has nothing but the experiments, whose configs the pages name. The launcher gives every process
    --local_rank=K, which a script's parser must know.
    """
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)
    words = "train.py --local_rank=0 --deepspeed_config experiments/tutorial/ds_config.json"
    monkeypatch.setattr(sys, "argv", words.split())
    text = page.read_text(encoding="utf-8")
    if "jzero.models" in text and importlib.util.find_spec("jzero.models") is None:
        assert not os.environ.get("CI")
        pytest.skip("jzero is not installed: pip install -e .")
    programs = [block for block in blocks(page) if block.language == "python"]
    has_torch = any("torch" in block.text for block in programs) and importlib.util.find_spec("torch")
    torch = importlib.import_module("torch") if has_torch else None
    variables = {"__name__": "page", "argparse": argparse, "jax": jax, "torch": torch}
    for block in programs:
        # The line of the page, for tracebacks.
        tree = ast.increment_lineno(ast.parse(block.text, str(page)), block.line - 1)
        needs = WITH.get(block.rest)
        if block.rest not in FOREIGN and (needs is None or importlib.util.find_spec(needs)):
            exec(compile(tree, str(page), "exec"), variables)
    assert "jzero" in variables


@pytest.mark.parametrize("page", named(PAGES, "json", "bash"))
def test_json_blocks_are_configs_and_commands_know_their_options(page, capsys):
    for block in blocks(page):
        if block.language == "json":
            jzero.Config.load(json.loads(block.text))
    for command in commands(page):
        check_command(*command)


def check_command(program: str, *rest: str) -> None:
    match Path(program).name, rest:
        case "jzero", ["report", *_]:
            assert not {w for w in rest if w.startswith("--")} - {"--hostfile"}
        case "jzero", ["export" | "import" | "replay" | "plan" as name, *arguments]:
            options.parse_other(name, arguments)
        case "jzero", arguments:
            options.parse(list(arguments))
        case "python" | "python3", ["-m", "pip" | "venv" | "build", *_]:
            pass
        case "python", ["-m", "pytest", *arguments]:
            assert all((ROOT / word).exists() for word in arguments if word.startswith("tests"))
        case "python", ["-m", module, *arguments]:
            path = ROOT / module.replace(".", "/")
            source = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
            assert all(f'"{word}"' in source for word in arguments if word.startswith("--")), arguments
        case "python", [script, *_] if (ROOT / script).exists():
            pass
        case "pip", ["install", *arguments]:
            extras = re.search(r"\[([\w,-]*)\]$", arguments[-1])
            assert set(extras[1].split(",") if extras else ()) <= PYPROJECT["optional-dependencies"].keys()
            assert "-c" not in arguments or (ROOT / arguments[arguments.index("-c") + 1]).exists()
        case "export", [assignment]:
            assert "=" in assignment
        case "git" | "ruff" | "mypy" | "mkdocs" | "pre-commit" | "sbatch" | "srun" | "mpirun", _:
            pass
        case _:
            raise AssertionError(f"unknown command {program} {shlex.join(rest)}")


# ---- the README -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [README, CHINESE])
def test_readme_is_short(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


def without_blocks(text):
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


def link_targets(page, text):
    """Return the file and "#anchor" of each link; the page itself for an anchor alone, an address as it is."""
    found = [link.partition("#") for link in re.findall(r"\]\(([^)]*)\)", text)]
    return [
        (Path(path) if path.startswith("https:") else (page.parent / path).resolve() if path else page, sharp + anchor)
        for path, sharp, anchor in found
    ]


@pytest.mark.parametrize("page", named(TRANSLATIONS))
def test_a_chinese_page_mirrors_the_english_one(page):
    """The words are not compared. The blocks are those of the English page, which run."""

    def outline(page):
        text = page.read_text(encoding="utf-8").partition("<!-- Everything below is written by")[0]
        prose = without_blocks(text)
        headings = [len(m) for m in re.findall(r"^(#+) ", prose, re.M)]
        tables = [line.count("|") for line in text.splitlines() if line.startswith("|")]
        links = [TRANSLATIONS.get(path, path) / anchor for path, anchor in link_targets(page, prose)]
        to_others = [link for link in links if link != TRANSLATIONS.get(page, page)]
        # the language chooses the order of names
        code = [sorted(re.findall(r"`[^`]+`", part)) for part in re.split(r"^#+ ", prose, flags=re.M)]
        return headings, tables, to_others, code, [b[:3] for b in blocks(page) if text.count("\n") >= b.line]

    assert len(TRANSLATIONS) == 6
    for mine, of_english in zip(outline(page), outline(TRANSLATIONS[page]), strict=True):
        assert mine == of_english


@pytest.mark.parametrize("page", named([*PAGES, *TRANSLATIONS]))
def test_links_lead_to_files(page):
    text = without_blocks(page.read_text(encoding="utf-8"))
    files = [path for path, _ in link_targets(page, text) if not str(path).startswith("https:")]
    assert [path for path in files if not path.exists()] == []


# ---- what is generated ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "cell"), [("configuration", "`watchdog.floor`"), ("recipes", "qwen3-14b-pretrain")])
def test_a_generated_page_is_current(monkeypatch, name, cell):
    monkeypatch.setattr(recipe_table, "find_model", functools.cache(recipe_table.find_model))  # recipes share models
    monkeypatch.syspath_prepend(ROOT / "docs")
    script = runpy.run_path(str(ROOT / "docs" / f"{name}.py"))
    text, lines = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8"), list(script["generated"]())
    page = functools.partial(script["generated_part"].replaced, script["__file__"])
    assert page(text, lines) == text, f"run python docs/{name}.py"
    assert page(text.replace(cell, "`other`"), lines) == text
    with pytest.raises(ValueError, match="lacks the line"):
        page(text.replace("<!--", ""), lines)


def test_the_api_page_lists_every_argument_of_initialize():
    args = jzero.initialize.__doc__.partition("Args:")[2].partition("Returns:")[0]
    listed = re.findall(r"^ {6}(\w[\w, ]*):", args, re.MULTILINE)
    parameters = inspect.signature(jzero.initialize).parameters.values()
    assert listed == [one.name for one in parameters if one.kind is not one.VAR_POSITIONAL]


def test_how_to_install_an_extra(tmp_path, monkeypatch):
    """No index has jzero: a clone installs its own extra; elsewhere (test_wheel.py) its packages do."""
    assert install_command("plot") == f"pip install -e '{ROOT}[plot]'"
    monkeypatch.setattr(jzero.errors, "__file__", str(tmp_path / "site-packages" / "jzero" / "errors.py"))
    assert install_command("plot") == "pip install 'matplotlib>=3.9'"


def test_no_text_names_jzero_as_if_an_index_had_it():
    places = [README, CHINESE, ROOT / "pyproject.toml"]
    for folder in ("docs", "experiments", "jzero", "models"):
        places += [p for p in (ROOT / folder).rglob("*") if p.suffix in (".py", ".md", ".ipynb")]
    wrong = re.compile(r"pip install '?jzero\b|'jzero\[")
    assert [p for p in places if wrong.search(p.read_text(encoding="utf-8"))] == []
