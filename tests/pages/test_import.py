"""Importing jzero does not start JAX's devices, so a process can still fork or configure them."""

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


PROGRAM = """
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


def test_import_starts_no_backend():
    """And an engine needs no reader of DeepSpeed's files: a room that a run does not need makes its start longer."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("JAX_", "XLA_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rooms, started = done.stdout.splitlines()
    assert "run" in ast.literal_eval(rooms)
    assert not ast.literal_eval(rooms) & {"deepspeed", "launcher", "recipes", "plots", "models"}
    assert started == "3 True"
