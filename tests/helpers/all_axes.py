"""Print as JSON how a schedule on 64 simulated devices, all six axes 2, differs from one device."""

import json
import sys
import tempfile

import jax

if __name__ == "__main__":  # before JAX starts
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 64)
    jax.config.update("jax_disable_most_optimizations", True)

import numpy as np
from helpers.mixture_models import CHUNKED, CLIPPED, LAYOUTS, QUIET, batches, initial, make_engine, model, reference
from helpers.oracle import greedy, largest_error

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
    known = reference(QUIET, CLIPPED)
    expected = greedy(model(QUIET), initial(QUIET), prompts, np.zeros(len(prompts), int), NEW)
    return {
        "devices": len(engine.mesh.devices.flat),
        "losses": np.abs(np.array(losses) / known.losses - 1).max(),
        "parameters": float(largest_error(engine.state.params, known.params)),
        "loss after loading": abs(float(one.train_batch(batches()[2])) / known.losses[2] - 1),
        "parameters after loading": float(largest_error(one.state.params, known.params)),
        "other tokens": int((texts != expected).sum()),
    }


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1])))
