"""Changes the library mechanically, one place at a time, and counts which changes the tests notice.

    python tests/mutants/mechanical.py [--count 200] [--seed 0] [--out FILE]

A mutant is a line of the heart with another operator or constant, a condition turned round, or a statement left out. It
is killed when the default tests of its folders fail or take ten times as long. Each result is a line of FILE, so that a
run which was stopped goes on. Compare two states of the tests with one state of the library and one seed.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Files of the library, and the folders of tests whose subject they are, the quickest first.
TESTS = {
    "jzero/layout/*.py": "zero parallel collectives",
    "jzero/passes/*.py": "step parallel zero",
    "jzero/step/*.py": "step run",
    "jzero/pipeline/*.py": "pipeline",
    "jzero/optimizers/*.py": "optimizers",
    "jzero/loss_scale.py": "step",
    "jzero/loss.py": "step model",
    "jzero/checkpoint/*.py": "checkpoint",
}
OTHER = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or,
    ast.Or: ast.And,
}  # fmt: skip


def mutated(node: ast.AST) -> list[ast.AST]:
    """Return the mutants of one node."""
    new = copy.deepcopy(node)
    match new:
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in OTHER:
            new.op = OTHER[type(op)]()
        case ast.Compare(ops=[op]) if type(op) in OTHER:
            new.ops = [OTHER[type(op)]()]
        case ast.Constant(value=bool()):
            new.value = not new.value
        case ast.Constant(value=int() | float()):
            new.value += 1
        case ast.If() | ast.IfExp():
            new.test = ast.UnaryOp(ast.Not(), new.test)
        case ast.UnaryOp(op=ast.Not()):
            new = new.operand
        case ast.Expr(value=ast.Call()) | ast.AugAssign():
            new = ast.Pass()
        case _:
            return []
    return [new]


def of_file(path: Path) -> list[tuple[str, str]]:
    """Return (description, source) of every mutant of a file; annotations and defaults of types stay as they are."""
    source = path.read_text()
    tree = ast.parse(source)
    left = {id(x) for n in ast.walk(tree) for x in annotations(n)}
    found = []
    for node in ast.walk(tree):
        for new in [] if id(node) in left else mutated(node):
            text = replaced(source, node, ast.unparse(ast.fix_missing_locations(new)))
            where = f"{path.relative_to(ROOT)}:{node.lineno}"
            found.append((f"{where}: {short(ast.unparse(node))} -> {short(ast.unparse(new))}", text))
    return found


def annotations(node: ast.AST) -> list[ast.AST]:
    """Return what is below a node's annotations."""
    roots = [getattr(node, name, None) for name in ("annotation", "returns")]
    return [below for root in roots if root is not None for below in ast.walk(root)]


def replaced(source: str, node: ast.AST, text: str) -> str:
    """Return the source with a node's text exchanged; the text of a block is indented as the block was."""
    lines = source.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    text = text if isinstance(node, ast.stmt) else f"({text})"
    text = text.replace("\n", "\n" + " " * node.col_offset)
    return (source.encode()[:begin] + text.encode() + source.encode()[end:]).decode()


def short(text: str) -> str:
    return text if len(text := " ".join(text.split())) < 60 else text[:57] + "..."


def sample(count: int, seed: int) -> list[tuple[str, str, str, str]]:
    """Return `count` mutants as (description, file, source, folders of tests), as many of each row as it has lines."""
    every = [
        (description, str(path.relative_to(ROOT)), text, folders)
        for pattern, folders in TESTS.items()
        for path in sorted(ROOT.glob(pattern))
        for description, text in of_file(path)
    ]
    return random.Random(seed).sample(every, count)


def tests_of(file: str, folders: str) -> list[str]:
    """Return the files of tests in these folders, those first that say the most about the file of the library."""
    files = [path for folder in folders.split() for path in sorted((ROOT / "tests" / folder).glob("test_*.py"))]
    name = re.compile(rf"\b_*{Path(file).stem}\b")
    files.sort(key=lambda path: -len(name.findall(path.stem.removeprefix("test_") + path.read_text())))
    return [str(path.relative_to(ROOT)) for path in files]


def run(mutant: tuple[str, str, str, str], limit: float) -> dict:
    """Run the tests on a copy of the library with one mutant."""
    description, file, text, folders = mutant
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        for name in ("jzero", "models", "tests", "experiments", "docs"):
            shutil.copytree(ROOT / name, Path(directory) / name, symlinks=True)
        for name in ("pyproject.toml", "conftest.py", "README.md", "CHANGELOG.md"):
            shutil.copy(ROOT / name, directory)
        # Most programs of a mutant are those of the library.
        (ROOT / ".jax_cache").mkdir(exist_ok=True)
        (Path(directory) / ".jax_cache").symlink_to(ROOT / ".jax_cache")
        (Path(directory) / file).write_text(text)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
        command += tests_of(file, folders)
        # A process group of its own: a test that hangs has children.
        process = subprocess.Popen(
            command, cwd=directory, env={**os.environ, "PYTHONPATH": directory},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            out = process.communicate(timeout=limit)[0]
            by = next((line for line in out.splitlines()[::-1] if line.startswith(("FAILED", "ERROR"))), "")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
            by = "took too long"
    killed = process.returncode != 0
    return {"mutant": description, "killed": killed, "by": short(by), "seconds": round(time.monotonic() - began, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1200, help="seconds for the tests of one mutant")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    args = parser.parse_args()
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    known = {result["mutant"] for result in done}
    with args.out.open("a") as out:
        for mutant in sample(args.count, args.seed):
            if mutant[0] not in known:
                done.append(run(mutant, args.limit))
                print(json.dumps(done[-1]), file=out, flush=True)
    killed = sum(result["killed"] for result in done)
    print(f"{killed} of {len(done)} mutants killed ({killed / len(done):.1%})")


if __name__ == "__main__":
    main()
