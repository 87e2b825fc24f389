"""A checkpoint is the same with and without `stack=` and on groups of devices: in files, resumed runs and exports."""

import json

import jax
import numpy as np
import pytest
from helpers.sampling import some
from helpers.stack_models import BATCHES, ROWS, SmallGPT, SmallScannedGPT, loss_fn
from helpers.steps import settings
from safetensors.numpy import load_file

import jzero
from jzero.tree import named

MESHES = {"zero": {}, "pipe": {"pipe": 2, "data": 2, "zero": 2}}
ADAM = {"type": "Adam", "params": {"lr": 1e-2}}


def engine(stack, mesh, module=SmallGPT, optimizer=ADAM):
    stage, more = 1 if mesh == "pipe" else 3, {"optimizer": optimizer, "ema": {"decay": 0.9}, "mesh": MESHES[mesh]}
    model = jzero.from_flax(module, loss_fn, stack=stack)
    return jzero.initialize(model=model, config=settings(ROWS, stage, 2, **more))[0]


def plain_state(engine):
    """The parameters and the moments by the names of the module."""
    found = {}
    for name, x in named(jax.device_get((engine.state.params, engine.state.opt_state))).items():
        parts = (name,) if engine.state.names is None else engine.state.names.of(name, x.shape)
        found |= zip(parts, x if len(parts) > 1 else [x], strict=True)
    return found


def moved(one, other, directory):
    """Train one engine, load its checkpoint into the other, and return that one's state, which is the same."""
    one.train_batch(BATCHES[0])
    one.save_checkpoint(directory).wait()
    other.load_checkpoint(directory)
    before, after = plain_state(one), plain_state(other)
    assert before.keys() == after.keys()
    for name, x in before.items():
        np.testing.assert_array_equal(after[name], x, err_msg=name)
    return after


ONE, PIPE = (None, "zero"), ("blocks", "pipe")
CASES = [(ONE, PIPE, SmallGPT), (PIPE, ONE, SmallScannedGPT), (("blocks", "zero"), PIPE, SmallGPT)]


@pytest.mark.parametrize(("first", "second", "module"), some(CASES, CASES[:2]))
def test_a_run_resumes_with_and_without_a_stack(tmp_path, module, first, second):
    one, other = engine(*first, module), engine(*second, module)
    after = moved(one, other, tmp_path)
    assert int(other.state.step) == 1
    assert not all((x == 0).all() for name, x in after.items() if "/mu/" in name)


@pytest.mark.slow
def test_the_files_are_the_same(tmp_path):
    both = {"plain": engine(*ONE), "stacked": engine(*PIPE)}
    for name, run in both.items():
        run.save_checkpoint(tmp_path / name, tag="t").wait()
        run.save_16bit_model(tmp_path, f"{name}.safetensors")
    notes = [json.loads((tmp_path / name / "t" / "notes.json").read_text())["notes"] for name in both]
    assert notes[0]["leaves"] == notes[1]["leaves"]  # names, shapes, dtypes and checksums
    exported = [jzero.weights.export(tmp_path / name, tmp_path / "out" / name) for name in both]
    assert exported[0] == exported[1]
    files = [load_file(tmp_path / f"{name}.safetensors") for name in both]
    jax.tree.map(np.testing.assert_array_equal, *files)
    both["stacked"].load_weights(tmp_path / "plain.safetensors")
    for name, x in plain_state(both["stacked"]).items():
        if name.startswith("0/"):
            np.testing.assert_array_equal(x, files[0][name.removeprefix("0/").replace("/", ".")].astype(x.dtype))
