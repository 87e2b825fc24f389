"""The README and the pages: every block runs, the README keeps its limits, what is generated is current."""

import argparse
import ast
import collections
import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import jax
import pytest
from packaging.requirements import Requirement

import jzero
from jzero.config import aliases, keys, screen
from jzero.display.page import dark
from jzero.errors import install_command
from jzero.launcher import options

ROOT = Path(__file__).parents[2]
README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
TRANSLATIONS = {CHINESE: README} | {page: ROOT / "docs" / page.name for page in sorted((ROOT / "docs/zh").glob("*.md"))}
PAGES = [README, *sorted((ROOT / "docs").glob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
# Other libraries' code, or that needs a run of DeepSpeed (tests/deepspeed_runs has some): it must parse.
FOREIGN = ('title="DeepSpeed"', 'title="transformers"', 'title="jzero, after DeepSpeed"')

# Blocks that run where a library is installed.
WITH = {'title="jzero with PyTorch"': "torch", 'title="jzero with transformers"': "transformers"}


class Block(NamedTuple):
    language: str
    rest: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = re.finditer(r"^```(\w*) *([^\n]*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [Block(m[1], m[2], m[3], text.count("\n", 0, m.start()) + 2) for m in found]


# Pages with many programs to compile.
LONG = {
    "README", "checkpoints", "configuration", "context-parallelism", "data", "examples", "expert-parallelism",
    "finetuning", "fp8", "from-deepspeed", "functional-api", "getting-started", "gone-wrong", "models", "monitoring",
    "performance", "pipelines", "plan", "profiling", "weights",
}  # fmt: skip


def named(pages, long=()):
    return [pytest.param(page, id=page.name, marks=[pytest.mark.slow] * (page.stem in long)) for page in pages]


@pytest.fixture
def empty_directory(tmp_path, monkeypatch):
    """A working directory with nothing but the experiments, whose configs the pages name."""
    (tmp_path / "experiments").symlink_to(ROOT / "experiments")
    monkeypatch.chdir(tmp_path)


# ---- blocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", named((p for p in PAGES if any(b.language == "python" for b in blocks(p))), LONG))
def test_python_blocks_run(page, empty_directory, capsys, monkeypatch):
    """The blocks of a page are one program: a block may use names of the blocks before it."""
    monkeypatch.setattr(sys, "argv", ["train.py", "--deepspeed_config", "experiments/tutorial/ds_config.json"])
    if "jzero.models" in page.read_text(encoding="utf-8") and importlib.util.find_spec("jzero.models") is None:
        assert not os.environ.get("CI")
        pytest.skip("jzero is not installed: pip install -e .")
    torch = importlib.import_module("torch") if importlib.util.find_spec("torch") else None
    variables = {"__name__": "page", "argparse": argparse, "jax": jax, "torch": torch}
    for block in blocks(page):
        if block.language == "python":
            # The line of the page, for tracebacks.
            tree = ast.increment_lineno(ast.parse(block.text, str(page)), block.line - 1)
            needs = WITH.get(block.rest)
            if block.rest not in FOREIGN and (needs is None or importlib.util.find_spec(needs)):
                exec(compile(tree, str(page), "exec"), variables)
    assert "jzero" in variables


@pytest.mark.slow
def test_the_ported_script_runs_under_the_launcher(tmp_path):
    """The launcher gives every process --local_rank=K, which the script's parser must know."""
    pytest.importorskip("torch")
    script = "import argparse, jax, torch\n"
    for block in blocks(ROOT / "docs/from-deepspeed.md"):
        if block.rest == 'title="jzero with PyTorch"':
            script += block.text
            break
        if block.language == "python" and block.rest not in FOREIGN:  # what is above it, without its own training
            kept = ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef
            nodes = [n for n in ast.parse(block.text).body if isinstance(n, kept) or "dataset = " in block.text]
            script += "".join(f"{ast.unparse(n)}\n" for n in nodes)
    (tmp_path / "train.py").write_text(script)
    config = ROOT / "experiments/tutorial/ds_config.json"
    words = f"--platform=cpu --num_gpus=2 train.py --epochs 1 --deepspeed --deepspeed_config {config}"
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "JZERO_"))}
    done = subprocess.run(
        [sys.executable, "-m", "jzero", *words.split()], cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env=clean | {"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"^(?:\[\d\] )?accuracy \d+\.\d%$", done.stdout, re.MULTILINE)) == 2


def test_the_changed_lines_of_the_ported_programs():
    """A line changes if the program beside it lacks it; empty lines do not count."""
    page = ROOT / "docs/from-deepspeed.md"
    text = page.read_text(encoding="utf-8")
    programs = [(b.rest, [line for line in b.text.splitlines() if line.strip()]) for b in blocks(page)]
    found = []
    for (title, theirs), (_, ours) in itertools.pairwise(programs):
        if title == 'title="DeepSpeed"':
            found.append((len(theirs), (collections.Counter(theirs) - collections.Counter(ours)).total()))
    stated = [tuple(map(int, pair)) for pair in re.findall(r"Of DeepSpeed's (\d+) lines, (\d+) change", text)]
    assert stated == found[:2]


@pytest.mark.parametrize("page", named(p for p in PAGES if any(b.language in ("json", "bash") for b in blocks(p))))
def test_json_blocks_are_configs_and_commands_know_their_options(page, capsys):
    for block in blocks(page):
        if block.language == "json":
            jzero.Config.load(json.loads(block.text))
        # A script is no list of commands; tests/launcher/test_other_systems.py runs it.
        if block.language == "bash" and not block.text.startswith("#!"):
            for line in block.text.replace("\\\n", " ").splitlines():
                for command in re.split(r"&&", line):
                    check_command(shlex.split(command, comments=True))


def check_command(words: list[str]) -> None:
    if not words:
        return
    program, *rest = words
    match Path(program).name, rest:
        case "jzero", ["report", *_]:
            assert not {w for w in rest if w.startswith("--")} - {"--hostfile"}
        case "jzero", ["export" | "import" | "replay" | "plan" as name, *arguments]:
            options.parse_other(name, arguments)
        case "jzero", arguments:
            options.parse(arguments)
        case "python" | "python3", ["-m", "pip" | "venv" | "build", *_]:
            pass
        case "python", ["-m", "pytest", *arguments]:
            assert all((ROOT / word).exists() for word in arguments if word.startswith("tests"))
        case "python", ["-m", module, *arguments]:
            path = ROOT / module.replace(".", "/")
            source = (path / "__main__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
            assert all(f'"{word}"' in source for word in arguments if word.startswith("--")), words
        case "python", [script, *_] if (ROOT / script).exists():
            pass
        case "pip", ["install", *arguments]:
            check_install(arguments)
        case "git" | "ruff" | "mypy" | "mkdocs" | "pre-commit", _:
            pass
        case "export", [assignment]:
            assert "=" in assignment
        case "sbatch" | "srun" | "mpirun", _:
            pass
        case _:
            raise AssertionError(f"unknown command {shlex.join(words)}")


def check_install(arguments: list[str]) -> None:
    extras = re.search(r"\[([\w,-]*)\]$", arguments[-1])
    pyproject = (ROOT / "pyproject.toml").read_text()
    for extra in extras[1].split(",") if extras else ():
        assert re.search(rf"^{extra} = \[", pyproject, re.MULTILINE), f"no extra {extra}"
    assert "-c" not in arguments or (ROOT / arguments[arguments.index("-c") + 1]).exists()


def with_requirements(requirement: Requirement, found: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Add a package and all that pip brings for it to `found`: (name, extra), "" for no extra."""
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("", *requirement.extras):
        if (requirement.name, extra) not in found:
            found.add((requirement.name, extra))
            if requirement.name == "jzero":
                needed = own["optional-dependencies"][extra] if extra else own["dependencies"]
            else:
                needed = importlib.metadata.requires(requirement.name) or ()
            for more in map(Requirement, needed):
                if more.marker is None or more.marker.evaluate({"extra": extra}):
                    with_requirements(more, found)
    return found


@pytest.mark.parametrize("page", [README, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_only_the_environment_of_the_tests_has_a_plugin_of_jax(page):
    """JAX's CUDA plugin prints a traceback into every program of a machine without a GPU; conftest.py silences it."""
    commands = [
        shlex.split(command, comments=True)
        for block in blocks(page)
        for line in block.text.replace("\\\n", " ").splitlines()
        for command in (line.split("&&") if block.language == "bash" else ())
    ]
    plugins, programs = {}, set()
    for program, *rest in filter(None, commands):
        if Path(program).name == "pip":
            try:
                packages = with_requirements(Requirement(rest[-1].replace(".[", "jzero[")), set())
                entries = [importlib.metadata.distribution(name).entry_points for name, _ in packages]
            except importlib.metadata.PackageNotFoundError as missing:  # README's own environment has no documentation
                pytest.skip(f"needs {missing.name}")
            plugins[Path(program).parent] = [
                entry for points in entries for entry in points.select(group="jax_plugins")
            ]
        elif Path(program).name == "python" and "pytest" not in rest:
            programs.add(Path(program).parent)
    assert plugins.keys() >= programs
    assert [place for place in programs if plugins[place]] == []
    assert any(plugins.values())  # that of the tests


@pytest.mark.parametrize(
    "command", ["jzero --nodes 2 train.py", "python -m experiments.pretrain --stpes 3", "pip install -e '.[gpu]'"]
)
def test_a_wrong_command_is_found(command, capsys):
    with pytest.raises((AssertionError, SystemExit)):
        check_command(shlex.split(command))


# ---- the README -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [README, CHINESE])
def test_readme_is_short(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert [line for line in lines if len(line) > 120] == []


@pytest.mark.parametrize("page", named(TRANSLATIONS))
def test_a_chinese_page_mirrors_the_english_one(page):
    """The words are not compared. The blocks are those of the English page, which run."""

    def outline(page):
        text = page.read_text(encoding="utf-8").partition("<!-- Everything below is written by")[0]
        without_blocks = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        headings = [len(m) for m in re.findall(r"^(#+) ", without_blocks, re.M)]
        tables = [line.count("|") for line in text.splitlines() if line.startswith("|")]
        links = [TRANSLATIONS.get(path, path) / anchor for path, anchor in link_targets(page, without_blocks)]
        to_others = [link for link in links if link != TRANSLATIONS.get(page, page)]
        sections = re.split(r"^#+ ", without_blocks, flags=re.M)
        code = [sorted(re.findall(r"`[^`]+`", part)) for part in sections]  # the language chooses the order of names
        return headings, tables, to_others, code, [b[:3] for b in blocks(page) if text.count("\n") >= b.line]

    assert len(TRANSLATIONS) == 6
    for mine, of_english in zip(outline(page), outline(TRANSLATIONS[page]), strict=True):
        assert mine == of_english


def link_targets(page, text):
    """Return the file and "#anchor" of each link; the page itself for an anchor alone, an address as it is."""
    found = [link.partition("#") for link in re.findall(r"\]\(([^)]*)\)", text)]
    return [
        (Path(path) if path.startswith("https:") else (page.parent / path).resolve() if path else page, sharp + anchor)
        for path, sharp, anchor in found
    ]


@pytest.mark.parametrize("page", named([*PAGES, *TRANSLATIONS]))
def test_links_lead_to_files(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text):
        assert link.startswith("https://") or (page.parent / link).exists(), link


# ---- what is generated ----------------------------------------------------------------------------------------------


def load_script(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("name", "cell"),
    [("configuration", "`watchdog.floor`"), ("faults", "the command is killed"), ("recipes", "qwen3-14b-pretrain")],
)
def test_a_generated_page_is_current(monkeypatch, name, cell):
    script, text = load_script(name, monkeypatch), (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    page = functools.partial(script.generated_part.replaced, script.__file__)
    assert page(text, script.generated()) == text, f"run python docs/{name}.py"
    assert page(text.replace(cell, "`other`"), script.generated()) == text
    with pytest.raises(ValueError, match="lacks the line"):
        page(text.replace("<!--", ""), script.generated())


def test_every_key_is_on_the_configuration_page():
    settings = [key for key, field in screen.FIELDS.items() if field.metadata]
    text = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert len(settings) > 40
    assert [key for key in (*settings, *keys.KEYS, *aliases.RENAMED) if f"`{key}`" not in text] == []


def test_the_api_page_lists_every_argument_of_initialize():
    args = jzero.initialize.__doc__.partition("Args:")[2].partition("Returns:")[0]
    listed = re.findall(r"^ {6}(\w[\w, ]*):", args, re.MULTILINE)
    parameters = inspect.signature(jzero.initialize).parameters.values()
    assert listed == [one.name for one in parameters if one.kind is not one.VAR_POSITIONAL]


def test_pictures_and_pages_turn_dark_by_one_rule():
    pictures = sorted((ROOT / "docs/images").glob("*.svg"))
    assert len(pictures) >= 6
    assert [path.name for path in pictures if dark(":root") not in path.read_text(encoding="utf-8")] == []
    rule = re.search(r"filter: .*?;", dark(":root"))[0]
    assert rule in (ROOT / "docs/wide.css").read_text()


def test_the_site_refers_to_nothing_that_is_elsewhere():
    """The offline plugin would load its script for the search from another host."""
    text = (ROOT / "mkdocs.yml").read_text()
    assert re.search(r"^plugins:\n  - search\n  - offline\b", text, re.MULTILINE)
    (script,) = re.search(r"^  polyfills: \[(.*?)\]", text, re.MULTILINE)[1].split(", ")
    assert "iframe-worker" in script  # by this name the plugin knows it
    assert (ROOT / "docs" / script).exists()
    assert "http" not in text


def test_how_to_install_an_extra(tmp_path, monkeypatch):
    """No index has jzero: a clone installs its own extra; elsewhere, the slow test below, the extra's packages do."""
    assert install_command("plot") == f"pip install -e '{ROOT}[plot]'"
    monkeypatch.setattr(jzero.errors, "__file__", str(tmp_path / "site-packages" / "jzero" / "errors.py"))
    assert install_command("plot") == "pip install 'matplotlib>=3.9'"

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", absent)
    assert install_command("plot") == "pip install -e 'CLONE[plot]'"


def test_no_text_names_jzero_as_if_an_index_had_it():
    places = [ROOT / "README.md", ROOT / "README.zh-CN.md", ROOT / "pyproject.toml"]
    for room in ("docs", "experiments", "jzero", "models"):
        places += [p for p in (ROOT / room).rglob("*") if p.suffix in (".py", ".md", ".ipynb")]
    wrong = re.compile(r"pip install '?jzero\b|'jzero\[")
    assert [p for p in places if wrong.search(p.read_text(encoding="utf-8"))] == []


@pytest.mark.slow
def test_the_wheel_holds_the_library_and_the_models(tmp_path):
    source = tmp_path / "source"  # setuptools would put what an earlier build left behind into the wheel
    for package in ("jzero", "models"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "setup.py", "README.md"):
        shutil.copy(ROOT / file, source)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", tmp_path, source], check=True, timeout=300
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "jzero").rglob("*.py")}
    models = {f"jzero/models/{path.name}" for path in (ROOT / "models").glob("*.py")}
    assert names == ours | models | {"jzero/py.typed", "jzero/recipes/recipes.json"}
    assert jzero.__version__ in wheel.name

    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra in ("cuda12", "flash", "plan", "plot", "tensorboard"):
        code = f"from jzero.errors import install_command; print(install_command({extra!r}))"
        said = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path / "site")},
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        pip, install, *packages = shlex.split(said)
        assert (pip, install) == ("pip", "install")
        assert [Requirement(x) for x in packages] == [Requirement(x.partition(";")[0]) for x in named[extra]]
