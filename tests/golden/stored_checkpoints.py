"""Checkpoints that must load for good: rows of `rows.py` after two steps, in one archive.

`python tests/golden/stored_checkpoints.py ARCHIVE`, run with the jzero of a commit, adds what that commit writes.
"""

import hashlib
import json
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import jax

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)

from golden import rows
from helpers.drawn import zeros
from helpers.reference import leaves

import jzero

# Layers in a stack; BatchNorm and a loss scale; histories of fp8; an average of the weights; the optimizer Muon.
NAMES = ("functions-zero3", "normed-fp16", "llama-fp8-delayed", "functions-ema", "functions-muon")


@cache
def engine(name: str, drawn: bool = False):
    """Make the engine of a row, with zeros for weights or drawn ones; the tests of reading and of writing share it."""
    setting = rows.setting(name)
    setting["config"] |= {"steps_per_print": 1000}
    step = jzero.make_train_step(**setting)
    return jzero.Engine(step, jax.random.key(0), params=None if drawn else zeros(step.state_shapes.params))


def contents(state) -> list[str]:
    """Return the digests of all arrays of a state, in whatever order and under whatever name it keeps them."""
    return sorted(hashlib.sha256(x.tobytes()).hexdigest()[:16] for x in leaves(state))


def losses(made, name: str) -> list[float]:
    return [float(made.train_batch(rows.batch(rows.ROWS[name][0]))) for _ in range(2)]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(sys.argv[1], "w", zipfile.ZIP_DEFLATED) as archive:
        for name in NAMES:
            made = engine(name, drawn=True)
            losses(made, name)
            made.save_checkpoint(f"{directory}/{name}").wait()
            facts = {"contents": contents(made.state), "next losses": losses(made, name)}
            Path(f"{directory}/{name}/expected.json").write_text(json.dumps(facts))
        for path in sorted(Path(directory).rglob("*")):
            archive.write(path, path.relative_to(directory))
