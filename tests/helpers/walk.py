"""Print the files of the library that one steady `engine.train_batch()` enters, its calls, and the files in its trace.

With all default observers, on two devices; a line of JSON.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, os.getcwd())
import jzero
from models.mlp import MLP, cross_entropy

LIBRARY = str(Path(jzero.__file__).parent)


def walked(work):
    """Return the library's files that `work()` enters, in order, and the number of calls of their functions."""
    calls = []

    def hook(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(LIBRARY):
            calls.append(frame.f_code.co_filename.removeprefix(LIBRARY + "/"))

    sys.setprofile(hook)
    try:
        work()
    finally:
        sys.setprofile(None)
    return list(dict.fromkeys(calls)), len(calls)


def main():
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    config = {
        "train_batch_size": 32, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    }  # fmt: skip
    data = np.ones((640, 64), np.float32), np.zeros(640, np.int32)
    model = jzero.from_flax(lambda rngs: MLP(64, 64, 10, rngs=rngs), cross_entropy)
    with contextlib.redirect_stdout(sys.stderr):
        engine, *_ = jzero.initialize(model=model, config=config, training_data=data)
        for _ in range(4):
            engine.train_batch()
        files, calls = walked(engine.train_batch)
        shapes = jax.ShapeDtypeStruct((32, 64), np.float32), jax.ShapeDtypeStruct((32,), np.int32)
        step = jzero.make_train_step(model, config)
        traced, _ = walked(lambda: step.lower(shapes))
    print(json.dumps([files, calls, traced]))


if __name__ == "__main__":
    main()
