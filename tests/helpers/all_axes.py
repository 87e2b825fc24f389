"""One schedule on the mesh pipe 2 x data 2 x zero 2 x expert 2 x context 2 x tensor 2, beside one device.

`python -m helpers.all_axes NAME` simulates 64 devices, and prints what it finds as JSON.
"""

import json
import sys
import tempfile

import jax

if __name__ == "__main__":  # before JAX starts
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 64)
    jax.config.update("jax_disable_most_optimizations", True)

import numpy as np
from helpers.group_layouts import CHUNKED, LAYOUTS, QUIET, make_engine, plain
from helpers.mixture_models import batches, initial, model
from helpers.oracle import largest_error

from jzero.mesh import AXES

CASES = {
    "1f1b": (3, {}), "gpipe": (0, {"schedule": "gpipe"}), "interleaved": (2, CHUNKED),
    "zero_bubble": (1, {"schedule": "zero_bubble"}),
}  # fmt: skip
NEW = 4


def run(name):
    """Train three steps, with a detour: after the second, what is saved continues on one device too."""
    stage, pipeline = CASES[name]
    LAYOUTS[name] = dict.fromkeys(AXES, 2), stage, pipeline, {}
    engine, losses, prompts = make_engine(name), [], batches()[0]["inputs"]
    texts = engine.generate(prompts, NEW, numpy=True)
    for batch in batches():
        if engine.global_steps == 2:
            with tempfile.TemporaryDirectory() as directory:
                engine.save_checkpoint(directory)
                one = make_engine("one")
                one.load_checkpoint(directory)
        losses.append(float(engine.train_batch(batch)))
    known, params = plain()
    return {
        "devices": len(engine.mesh.devices.flat),
        "losses": np.abs(np.array(losses) / known - 1).max(),
        "parameters": float(largest_error(engine.state.params, params)),
        "loss after loading": abs(float(one.train_batch(batches()[2])) / known[2] - 1),
        "parameters after loading": float(largest_error(one.state.params, params)),
        "other tokens": int((texts != continued(prompts)).sum()),
    }


def continued(tokens):
    """Continue rows with the most probable tokens, by the plain module on the whole rows."""
    net = jax.jit(lambda params, tokens: model(QUIET).module(params)(tokens))
    rows, length = tokens.shape
    full = np.zeros((rows, length + NEW), np.int32)
    full[:, :length] = tokens
    for end in range(length, length + NEW):
        full[:, end] = np.asarray(net(initial(QUIET), full)[:, end - 1].argmax(-1))
    return full


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
