"""The page of faults: each row names a test that is there, or provokes its fault here: one line, within a second."""

import re
import signal
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from helpers.steps import mesh, settings

import jzero
from jzero.config import Config
from jzero.data import DataLoader
from jzero.errors import CheckpointError
from jzero.launcher import options
from jzero.launcher.hostfile import read_hostfile
from jzero.launcher.job import make_job
from models.mlp import MLP, cross_entropy

ROOT = Path(__file__).parents[2]
PATIENCE = 20  # seconds on the wall clock of a busy machine


def load(config):
    return lambda folder: Config.load(config)


def load_text(text):
    return lambda folder: Config.load(written(folder / "config.json", text.encode()))


def hosts(text):
    return lambda folder: read_hostfile(written(folder / "hosts", text.encode()))


def command(*words, **env):
    parsed = [*words, "--no_python", "true"]
    return lambda folder: make_job(options.parse(parsed), {"PATH": "/bin:/usr/bin"} | env, str(folder))


def variables(content):
    """Plan a job in a folder with this `.jzero_env`."""
    return lambda folder: command("--platform=cpu")(written(folder / ".jzero_env", content).parent)


def written(path, content):
    path.write_bytes(content)
    return path


def batches_of_2_31(folder):
    model = jzero.from_flax(MLP, cross_entropy)
    step = jzero.make_train_step(model, settings(2**31 - 1), mesh=mesh(1))
    return DataLoader((np.zeros((16, 784), np.float32), np.zeros(16, np.int32)), step)


CIRCLE = {}
CIRCLE["a"] = CIRCLE
MEGABYTE = "k" * 10**6
DIGITS = "9" * 5000
# A fault of docs/faults.md: (what provokes it, parts of the error).
FAULTS = {
    "JSON nested 100,000 deep": (load_text('{"a":' * 10**5 + "1" + "}" * 10**5), "nested too deeply"),
    "a dict that contains itself": (load(CIRCLE), "nested deeper than 20"),
    "20,000 keys": (load({f"k{n}": n for n in range(20_000)}), "more than 1,000 keys"),
    "a file of 2 MB": (load_text('{"seed": 1}' + " " * 2 * 10**6), "more than 1,048,576 characters"),
    "an hjson string without an end": (load_text("{a: '''x"), "neither JSON nor hjson"),
    "a lone surrogate in a path": (load({"checkpoint": {"dir": "\ud800"}}), "checkpoint.dir", "lone surrogate"),
    "a NUL in a path": (load({"checkpoint": {"dir": "a\0b"}}), "checkpoint.dir", "a NUL"),
    "a NUL in the config's own path": (load("a\0b"), "no such file"),
    "a key of a megabyte": (load({MEGABYTE: 1}), "kkkk", "more) ...", "unknown key"),
    "an optimizer's name of a megabyte": (load({"optimizer": {"type": MEGABYTE}}), "optimizer.type"),
    "a list under a key that is a tuple": (load({"a": [{(1, 2): 3}]}), "a = <list>", "unknown key"),
    "a number of 5,000 digits": (load({"seed": int("9" * 4000) ** 2}), "seed = <int>", "up to 4294967295"),
    "a number of 5,000 digits in a file": (load_text(f'{{"seed": {DIGITS}}}'), "4300 digits"),
    "a regular expression of 5,000 parentheses": (load({"frozen_parameters": ["(" * 5000]}), "compile"),
    "a regular expression of a megabyte": (load({"frozen_parameters": ["a|" * 500_000]}), "100,000 char"),
    "XLA options whose names are not strings": (load({"compiler_options": {1: 2}}), "the name 1 must be"),
    "seed = 2**40 + 7, which JAX would read as 7": (load({"seed": 2**40 + 7}), "up to 4294967295"),
    "a warm-up of 10**30 steps": (load({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10**30}}}),
        "scheduler.params.warmup_num_steps", "up to 2147483647"),
    "a batch of 2**31 rows": (load({"train_batch_size": 2**31}), "train_batch_size", "up to 2147483647"),
    "a batch of 2**31 - 1 rows from 16": (batches_of_2_31, "train_batch_size", "at most 1048576"),
    "slots of 5,000 digits": (hosts(f"a slots={DIGITS}\n"), "line 1", "at most 1024 slots"),
    "slots in other digits than 0-9": (hosts("a slots=\u0668\n"), "HOST slots=N"),
    "--include with an id of 5,000 digits": (command("--platform=cpu", f"--include=localhost:{DIGITS}"), "0 to"),
    "--num_gpus 99999999999": (command("--platform=cpu", "--num_gpus=99999999999"), "at most 1024"),
    "a Slurm node list of ten million hosts": (
        command("--platform=cpu", SLURM_JOB_NODELIST="gpu[1-9999999]"), "1-9999999"),
    "a Slurm range of letters": (command("--platform=cpu", SLURM_JOB_NODELIST="gpu[a-b]"), "'a-b'"),
    "a `.jzero_env` that is not UTF-8": (variables(b"A=1\n\xff\xfe=2"), ".jzero_env: cannot be read", "NAME=VALUE"),
    "a NUL in `.jzero_env`": (variables(b"A=1\nB=2\0"), "line 2: 'B=2\\x00'", "NAME=VALUE"),
    "SLURM_GPUS_ON_NODE that is not a number": (
        command(SLURM_JOB_NODELIST="gpu1", SLURM_GPUS_ON_NODE="tesla:8"), "SLURM_GPUS_ON_NODE = 'tesla:8'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault(fault, tmp_path):
    provoke, *parts = FAULTS[fault]
    jax.random.key(0)  # starts JAX, so that no row pays for it
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"no answer within {PATIENCE} s"))
    signal.setitimer(signal.ITIMER_REAL, PATIENCE)
    started = time.thread_time()
    try:
        with pytest.raises((jzero.ConfigError, CheckpointError)) as error:
            provoke(tmp_path)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    took, text = time.thread_time() - started, str(error.value)
    assert [part for part in parts if part not in text] == [], text
    assert len(text.splitlines()) == 1
    assert len(text.encode()) < 3000
    assert took < 1


def test_the_page_names_each_fault_and_its_test():
    page = (ROOT / "docs" / "faults.md").read_text().replace(r"\*", "*")
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    rows = {fault: test.strip("`") for fault, _, test in rows if fault != "fault"}
    assert [fault for fault, test in rows.items() if test == "1 s"] == [*FAULTS]
    files = (ROOT / "tests").glob("*/test_*.py")
    defined = {name for file in files for name in re.findall(r"^def (test_\w+)\(", file.read_text(), re.M)}
    assert len(rows) > 80
    assert [test for test in rows.values() if test != "1 s" and test not in defined] == []


def test_messages_are_shortened_and_printable():
    first, *_, last = str(jzero.ConfigError("a" + " y" * 10**6, *["p"] * 100)).splitlines()
    assert (len(first) < 2100, last) == (True, "- and 81 more problems")
    assert str(CheckpointError("\ud800\r" + "z" * 10**6)).startswith(r"\ud800\rz")
