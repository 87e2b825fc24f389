"""Importing jzero does not start JAX's devices, so a process can still fork or configure them."""

import ast
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import jzero

ROOT = Path(__file__).parents[2]


def run(program, tmp_path):
    """Run a program as a script, without the JAX settings of pytest's process; return its output."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(program))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, script], env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_starts_no_backend(tmp_path):
    """And an engine needs no reader of DeepSpeed's files: a room that a run does not need makes its start longer."""
    program = """
        import sys
        import jzero

        jzero.initialize
        print({name.split(".")[1] for name in sys.modules if name.startswith("jzero.")})
        import jzero.config, jzero.planner, models.llama, models.mlp
        import jax
        from jax._src import xla_bridge

        assert not xla_bridge.backends_are_initialized()
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 3)  # an error once a backend has started
        print(jax.device_count(), xla_bridge.backends_are_initialized())
    """
    rooms, started = run(program, tmp_path).splitlines()
    assert "run" in ast.literal_eval(rooms)
    assert not ast.literal_eval(rooms) & {"deepspeed", "launcher", "recipes", "plots", "models"}
    assert started == "3 True"


def test_public_names():
    assert [name for name in jzero.__all__ if not hasattr(jzero, name)] == []
    assert sorted(jzero.__all__) == jzero.__all__


@pytest.mark.slow
@pytest.mark.processes
def test_a_child_process_trains(tmp_path):
    """Started in every way that Python has."""
    program = """
        import multiprocessing

        import jax
        import numpy as np

        import jzero
        from models.mlp import MLP, cross_entropy

        def train(loss):
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", 2)
            adam = {"type": "Adam", "params": {"lr": 1e-3}}
            config = {"train_batch_size": 4, "optimizer": adam, "zero_optimization": {"stage": 2}}
            step = jzero.make_train_step(jzero.from_flax(MLP, cross_entropy), config)
            batch = np.ones((4, 784), np.float32), np.zeros(4, np.int32)
            _, metrics = step(step.init(jax.random.key(0)), batch)
            loss.append(float(metrics["loss"]))

        if __name__ == "__main__":
            for method in ("spawn", "fork", "forkserver"):
                context = multiprocessing.get_context(method)
                with context.Manager() as manager:
                    loss = manager.list()
                    child = context.Process(target=train, args=(loss,))
                    child.start()
                    child.join(240)
                    print(method, child.exitcode, *loss)
    """
    found = [line.split() for line in run(program, tmp_path).splitlines()]
    assert [line[:2] for line in found] == [["spawn", "0"], ["fork", "0"], ["forkserver", "0"]]
    assert len({loss for *_, loss in found}) == 1
