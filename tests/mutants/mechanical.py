"""Changes the library mechanically, one place at a time, and counts which changes the tests notice.

    COVERAGE_FILE=map python -m pytest -n 2 --cov=jzero --cov-branch --cov-context=test --cov-report=  # once
    python tests/mutants/mechanical.py --map map [--count 200] [--seed 0] [--out FILE]

A mutant is a line of the heart with another operator or constant, a condition turned round, or a statement left out. It
is killed when one of the default tests that run its line fails or takes ten times as long; those go first that run the
fewest lines. Each result is a line of FILE, so that a run which was stopped goes on. Compare two states of the tests
with one state of the library and one seed.
"""

import argparse
import ast
import json
import os
import random
import sqlite3
import subprocess
import sys
import tempfile
import time
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

from test_mutants import ROOT, copy

FILES = ("layout/*", "passes/*", "step/*", "pipeline/*", "optimizers/*", "loss_scale", "loss", "checkpoint/*")
# How many tests run before the next ones are asked; a mutant that all of them let live has survived.
PORTIONS = (6, 20, 50)
OTHER = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or,
    ast.Or: ast.And,
}  # fmt: skip


class Mutant(NamedTuple):
    """A changed file, and the lines of the statement that was changed."""

    description: str
    file: str
    text: str
    lines: tuple[int, int]


def mutated(node: ast.AST) -> list[ast.AST]:
    """Return the mutants of one node."""
    new = deepcopy(node)
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


def of_file(path: Path) -> list[Mutant]:
    """Return every mutant of a file; annotations stay as they are."""
    source = path.read_text()
    tree = ast.parse(source)
    left = {id(x) for n in ast.walk(tree) for x in annotations(n)}
    # The innermost statement of each node, by its first and last line; of a block, its head.
    found, statement = [], dict[int, tuple[int, int]]()
    for node in ast.walk(tree):  # outer ones first
        if isinstance(node, ast.stmt):
            body = getattr(node, "body", None)
            end = max(node.lineno, body[0].lineno - 1) if body else node.end_lineno or node.lineno
            statement |= dict.fromkeys(map(id, ast.walk(node)), (node.lineno, end))
        for new in [] if id(node) in left else mutated(node):
            text = replaced(source, node, ast.unparse(ast.fix_missing_locations(new)))
            file = str(path.relative_to(ROOT))
            what = f"{file}:{node.lineno}: {short(ast.unparse(node))} -> {short(ast.unparse(new))}"
            found.append(Mutant(what, file, text, statement[id(node)]))
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


def sample(count: int, seed: int) -> list[Mutant]:
    """Return some of all mutants of FILES."""
    paths = [path for pattern in FILES for path in sorted(ROOT.glob(f"jzero/{pattern}.py"))]
    return random.Random(seed).sample([mutant for path in paths for mutant in of_file(path)], count)


def tests_of(database: sqlite3.Connection, mutant: Mutant) -> list[str]:
    """Return the tests that run the lines of a mutant, those first that run the fewest lines of all files.

    Lines that only an import runs have those of their file. Stored programs, which notice every change, are not asked.
    """
    query = (
        "select distinct context, n from arc join file on file.id = file_id join counts using (context_id) "
        "join context on context.id = context_id "
        "where path like ? and (fromno between ? and ? or tono between ? and ?) "
        "and context like '%::%' and context not like 'tests/golden/%' order by n"
    )
    of_lines, of_file = (database.execute(query, (f"%/{mutant.file}", *x, *x)) for x in (mutant.lines, (0, 10_000)))
    return list(dict.fromkeys(context.split("|")[0] for context, _ in of_lines.fetchall() or of_file))


def run(mutant: Mutant, tests: list[str], limit: float) -> dict[str, Any]:
    """Run the tests on a copy of the library with one mutant."""
    began, by = time.monotonic(), ""
    with tempfile.TemporaryDirectory() as directory:
        copy(Path(directory))
        # Most programs of a mutant are those of the library.
        (ROOT / ".jax_cache").mkdir(exist_ok=True)
        (Path(directory) / ".jax_cache").symlink_to(ROOT / ".jax_cache")
        (Path(directory) / mutant.file).write_text(mutant.text)
        done = 0
        for count in PORTIONS:
            if tests[done:] and not by:
                by = failure(directory, tests[done : done + count], limit)
                done += count
    seconds = round(time.monotonic() - began, 1)
    return {"mutant": mutant.description, "killed": bool(by), "by": by, "tests": len(tests), "seconds": seconds}


def failure(directory: str, tests: list[str], limit: float) -> str:
    """Run tests of a copy; return the first that failed, "" if none did."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=line", *tests]
    # A process group of its own: a test that hangs has children.
    process = subprocess.Popen(
        command, cwd=directory, env={**os.environ, "PYTHONPATH": directory},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out = process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        process.wait()
        return "took too long"
    if process.returncode == 0:
        return ""
    return short(next((line for line in out.splitlines()[::-1] if line.startswith(("FAILED", "ERROR"))), out[-200:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--map", type=Path, required=True, help="which test runs which line: coverage's file")
    parser.add_argument("--limit", type=float, default=600, help="seconds for some tests of one mutant")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"))
    args = parser.parse_args()
    done = [json.loads(line) for line in args.out.read_text().splitlines()] if args.out.exists() else []
    known, database = {result["mutant"] for result in done}, sqlite3.connect(args.map)
    database.execute("create temp table counts as select context_id, count(*) as n from arc group by context_id")
    with args.out.open("a") as out:
        for mutant in sample(args.count, args.seed):
            if mutant.description not in known:
                done.append(run(mutant, tests_of(database, mutant), args.limit))
                print(json.dumps(done[-1]), file=out, flush=True)
    killed = sum(result["killed"] for result in done)
    print(f"{killed} of {len(done)} mutants killed ({killed / len(done):.1%})")


if __name__ == "__main__":
    main()
