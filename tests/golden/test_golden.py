"""What users and files depend on: programs, names, the config's schema, checkpoints, reports, ledger, plans.

Each row of `rows.py` lowers to the program of the commit that wrote `programs.json`, on both versions of JAX: a move or
a rename changes no row. A change that is meant to says in its commit which rows, and why.
"""

import dataclasses
import hashlib
import inspect
import json
import math
import re
import zipfile

import jax
import numpy as np
import pytest
from golden import rows, snapshots, stored_checkpoints
from golden.snapshots import GOLDEN, VERSION
from golden.stored_checkpoints import NAMES
from helpers.cuda import on_gpu
from helpers.sampling import keep

import jzero

MODULES = ("jzero", "jzero.checkpoint", "jzero.data", "jzero.optimizers", "jzero.planner", "jzero.weights")
PLANS = [
    "functions-zero0", "nnx-zero1", "linen-zero2", "llama-zero3", "mixture-expert2-zero3", "llama-tensor2-zero3",
    "llama-context2-zero1", "llama-pipe2-zero3", "llama-fp8", "llama-offload-both",
]  # fmt: skip
PROGRAMS = "programs.json"
# CI compares all rows with the newer version of JAX, and these with both.
DEFAULT = ["normed-zero2", "functions-zero_bubble-zero3", "llama-tensor2-zero3"]
ARCHIVES = pytest.mark.parametrize("archive", sorted(path.name for path in GOLDEN.glob("*.zip")))


@pytest.fixture
def update(pytestconfig):
    return pytestconfig.getoption("--update-golden")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in DEFAULT)) for name in rows.ROWS]
)
def test_a_step_is_the_same_program(name, update):
    found = hashlib.sha256(rows.program(name).encode()).hexdigest()[:16]
    known = snapshots.read(PROGRAMS)
    if VERSION not in known and not update:
        pytest.skip(f"no programs of jax {VERSION}")
    hint = f"python tests/golden/rows.py DIRECTORY {name} writes the program"
    snapshots.check(PROGRAMS, known | {VERSION: known.get(VERSION, {}) | {name: found}}, update, hint)


LOADED = [*((name, True) for name in NAMES), (NAMES[2], False)]


@ARCHIVES
@pytest.mark.parametrize(("name", "continues"), keep(LOADED, [*LOADED[:2], LOADED[-1]]))
def test_an_earlier_checkpoint_loads_and_continues(archive, name, continues, tmp_path):
    """Those that earlier commits wrote load bit for bit, and the next steps have the same losses.

    bfloat16 and fp8 may round otherwise in another version of XLA.
    """
    zipfile.ZipFile(GOLDEN / archive).extractall(tmp_path)
    engine = stored_checkpoints.engine(name)
    engine.load_checkpoint(str(tmp_path / name))
    expected = json.loads((tmp_path / name / "expected.json").read_text())
    assert stored_checkpoints.contents(engine.state) == expected["contents"]
    rel = 1e-6 if name == "functions-zero3" else 1e-3
    assert not continues or stored_checkpoints.losses(engine, name) == pytest.approx(expected["next losses"], rel=rel)


def signatures(value) -> str | dict[str, str]:
    """Return a function's signature, or those of a class's public methods."""
    if not inspect.isclass(value):
        return signature(value) if callable(value) else type(value).__name__
    if issubclass(value, Exception) or hasattr(value, "_fields") or hasattr(value, "model_fields"):
        return {"bases": ", ".join(base.__name__ for base in value.__bases__)}
    members = {name: member for name, member in inspect.getmembers(value) if not name.startswith("_")}
    found = {name: "property" for name, member in members.items() if isinstance(member, property)}
    found |= {name: signature(member) for name, member in members.items() if inspect.isroutine(member)}
    if dataclasses.is_dataclass(value):
        found["fields"] = ", ".join(field.name for field in dataclasses.fields(value))
    return found


def signature(function) -> str:
    """Return the arguments and their defaults, without annotations."""
    found = inspect.signature(function)
    arguments = [argument.replace(annotation=argument.empty) for argument in found.parameters.values()]
    return re.sub(r" at 0x[0-9a-f]+", "", str(found.replace(parameters=arguments, return_annotation=found.empty)))


def test_public_names(update):
    found = {}
    for module in MODULES:
        library = __import__(module, fromlist=["_"])
        found[module] = {name: signatures(getattr(library, name)) for name in library.__all__}
    found["jzero.Engine"] = found["jzero"].pop("Engine")
    snapshots.check("names.json", found, update)


@pytest.mark.filterwarnings("ignore:Pydantic serializer")
def test_config_schema(update):
    snapshots.check("config.json", jzero.Config.model_json_schema(), update)


@pytest.mark.parametrize("name", NAMES)
def test_leaves_of_a_checkpoint(name, update, tmp_path):
    stored_checkpoints.engine(name).save_checkpoint(str(tmp_path), tag="first").wait()
    metadata = json.loads((tmp_path / "first" / "state" / "_METADATA").read_text())
    found = sorted(metadata["tree_metadata"])
    snapshots.check("leaves.json", {**snapshots.read("leaves.json"), name: found}, update)


def test_one_run(update, tmp_path, capsys):
    """The report of a model; the lines on the screen, with # for each number, and the ledger of a run of four steps."""
    report = jzero.report(jzero.make_train_step(**rows.setting("llama-zero2-bf16")))
    setting = rows.setting("functions-zero2") | {"mesh": jzero.make_mesh(devices=jax.devices()[:1])}  # a small step
    setting["config"] |= {"checkpoint": {"dir": str(tmp_path)}, "steps_per_print": 2}
    engine, batch = jzero.initialize(**setting)[0], rows.batch("functions") | {"tokens": np.ones((rows.BATCH, 8), int)}
    assert capsys.readouterr().out == f"{jzero.report(engine)}\n"
    for _ in range(4):
        engine.train_batch(batch)
    engine.eval_batch(batch)
    engine.save_checkpoint(str(tmp_path)).wait()
    engine._observers.close()
    screen = capsys.readouterr()
    ledger = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    found = {
        "report": report.splitlines(),
        "screen": [line for line in blank(screen.out + screen.err, tmp_path) if not is_timing(line)],
        "ledger": sorted({json.dumps(types(record)) for record in ledger}),
    }
    snapshots.check("run.json", found, update)


def blank(text: str, directory) -> list[str]:
    text = re.sub(r"\d[\d,]*(\.\d+)?(e[+-]?\d+)?", "#", text.replace(str(directory), "DIRECTORY"))
    return re.sub(r" +", " ", text).splitlines()


def types(record: dict) -> dict[str, str]:
    """Return the types of a record's fields, but for the seconds that a fast machine leaves out."""
    seconds = ("compile", "compile_before", "save", "evaluation", "wait")
    return {key: type(x).__name__ for key, x in record.items() if key not in seconds}


def is_timing(line: str) -> bool:
    """Return whether only a slow machine prints this line."""
    return bool(re.match(r"jzero: .*, # s$|jzero: .*: done after # s$", line))


@pytest.mark.slow
@on_gpu
@pytest.mark.parametrize("name", PLANS)
def test_plans(name, update):
    setting = rows.setting(name)
    degrees = dict(setting.pop("mesh").shape)
    setting["config"] |= {"mesh": degrees}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows.batch(rows.ROWS[name][0]))
    devices = math.prod(degrees.values())
    record = jzero.plan(setting["model"], setting["config"], shapes, gpu="h100", gpus_per_node=devices).record()
    for key in ("versions", "compile_s"):
        del record[key]
    found = json.loads(without_places(json.dumps(rounded(record), default=str)))
    file = f"plans-{VERSION}.json"
    known = snapshots.read(file)
    if not known and not update:
        pytest.skip(f"no plans of jax {VERSION}")
    snapshots.check(file, {**known, name: found}, update)


def without_places(text: str) -> str:
    """Leave out addresses, numbers of lines, and those that XLA appends to operations: edits elsewhere change them."""
    text = re.sub(r" at 0x[0-9a-f]+|(?<=\.py):\d+", "", text)
    return re.sub(r'("(?:op_name|line)": "[^"]*[a-z])\.\d+(?=")', r"\1", text)


def rounded(tree):
    return jax.tree.map(lambda x: float(f"{x:.4g}") if isinstance(x, float) else x, tree)
