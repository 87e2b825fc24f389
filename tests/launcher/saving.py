"""Jobs of two processes that train and save, and the losses that an uninterrupted one has."""

import re
import sys

import pytest
from jobs import QUICK, ROOT, Command
from workers import CPU

sys.path.append(str(ROOT / "tests"))


STEPS = 12

WORKER = f"""
import json, os, shutil, signal, sys, time
sys.path += [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import jax, numpy as np
import jzero, layouts as runs
from jzero.checkpoint import async_save, reader

rank, (what, layout, directory) = jzero.get_rank(), sys.argv[2:5]
jax.config.update("jax_num_cpu_devices", 4 // jzero.get_world_size())
layout = runs.SHARED[layout]

def slow(module, name, words, at):
    # the at-th call prints `words` and blocks, unless the job was started again
    fast, calls = getattr(module, name), []
    def f(*args, **keywords):
        calls.append(name)
        if not os.path.exists("started again") and os.environ["SLOW"] == name and len(calls) == at:
            print(words + "\\n", end="", flush=True)  # one write, so that other ranks' lines do not split it
            time.sleep(1000)
        return fast(*args, **keywords)
    setattr(module, name, f)

def tried(name, f):
    # one write that begins a line, so that the lines of other threads and of gloo neither split it nor precede it
    try:
        print(f"\\n{{name}}: {{f()}}\\n", end="", flush=True)
    except (jzero.ConfigError, jzero.CheckpointError) as error:
        print(f"\\n{{name}}: {{type(error).__name__}}: {{error}}\\n", end="", flush=True)

def train(engine):
    while engine.global_steps < {STEPS}:
        loss = float(engine.train_batch())
        print(f"step {{engine.global_steps}} {{loss.hex()}}\\n", end="", flush=True)
        if engine.global_steps % 2 == 0:
            engine.save_checkpoint()
        time.sleep(float(os.environ.get("PACE", 0)))
    jzero.checkpoint.wait()
"""
TRAIN = """
if "SLOW" in os.environ:
    slow(async_save, "_check_shared", "writing", 2)
    slow(async_save, "commit", "committing", 2)
    slow(reader, "read_arrays", "reading", 1)
section = {"dir": directory, "max_to_keep": 3}
engine = runs.build(layout, resume="auto", training_data=runs.data(), checkpoint=section)
train(engine)
"""


@pytest.fixture
def job(start):
    """Start a worker with a program: `job(program, ..., options=[...])`."""

    def job(program, *arguments, options=(), processes=2, **env):
        return start(*CPU, processes, *options, "worker.py", *arguments, program=WORKER + program, env=QUICK | env)

    return job


def losses(output, rank=0):
    """step -> loss; a step that ran twice must give the same loss."""
    found = {}
    for step, loss in re.findall(rf"^\[{rank}\] step (\d+) (\S+)$", output, re.M):
        assert found.setdefault(int(step), loss) == loss, f"step {step} gave {found[int(step)]} and {loss}"
    return found


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The losses of an uninterrupted run, by layout."""
    made = {}

    def run(layout):
        if layout not in made:
            path = tmp_path_factory.mktemp("straight")
            (path / "worker.py").write_text(WORKER + TRAIN)
            done = Command(*CPU, 2, "worker.py", "train", layout, path / "runs", cwd=path, env=QUICK)
            made[layout] = losses(done.ended().output)
            assert list(made[layout]) == list(range(1, STEPS + 1))
        return made[layout]

    return run
