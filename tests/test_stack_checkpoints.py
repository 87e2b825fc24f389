"""A checkpoint is the same with and without `stack=`: in files, in a resumed run, in exports."""

import json

import jax
import numpy as np
import pytest
from helpers.sampling import keep
from helpers.stack_models import BATCHES, ROWS, SmallGPT, SmallScannedGPT, loss_fn
from safetensors.numpy import load_file

import jzero
from jzero.tree import named

MESHES = {"zero": {}, "pipe": {"pipe": 2, "data": 2, "zero": 2}}


def engine(stack, mesh, module=SmallGPT, **more):
    config = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 1 if mesh == "pipe" else 3, "stage3_param_persistence_threshold": 0},
        "mesh": MESHES[mesh],
        "ema": {"decay": 0.9},
        **more,
    }
    return jzero.initialize(model=jzero.from_flax(module, loss_fn, stack=stack), config=config)[0]


def plain_state(engine):
    """The parameters and the moments by the names of the module."""
    found = {}
    for name, x in named(jax.device_get((engine.state.params, engine.state.opt_state))).items():
        parts = (name,) if engine.state.names is None else engine.state.names.of(name, x.shape)
        found |= zip(parts, x if len(parts) > 1 else [x], strict=True)
    return found


@pytest.mark.parametrize(
    ("module", "first", "second"),
    keep(
        [
            (module, first, second)
            for module in (SmallGPT, SmallScannedGPT)
            for first, second in [
                ((None, "zero"), ("blocks", "pipe")),
                (("blocks", "pipe"), (None, "zero")),
                (("blocks", "zero"), ("blocks", "pipe")),
            ]
        ],
        [(SmallGPT, (None, "zero"), ("blocks", "pipe")), (SmallGPT, ("blocks", "pipe"), (None, "zero"))],
    ),
)
def test_a_run_resumes_with_and_without_a_stack(tmp_path, module, first, second):
    one, other = engine(*first, module), engine(*second, module)
    one.train_batch(BATCHES[0])
    one.save_checkpoint(tmp_path).wait()
    other.load_checkpoint(tmp_path)
    before, after = plain_state(one), plain_state(other)
    assert before.keys() == after.keys()
    for name, x in before.items():
        np.testing.assert_array_equal(after[name], x, err_msg=name)
    losses = [float(run.train_batch(BATCHES[1])) for run in (one, other)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_the_files_are_the_same(tmp_path):
    for name, stack in (("plain", None), ("stacked", "blocks")):
        run = engine(stack, "zero")
        run.save_checkpoint(tmp_path / name, tag="t").wait()
    notes = [json.loads((tmp_path / name / "t" / "notes.json").read_text())["notes"] for name in ("plain", "stacked")]
    assert notes[0]["leaves"] == notes[1]["leaves"]  # names, shapes, dtypes and checksums
    exported = [jzero.weights.export(tmp_path / name, tmp_path / "out" / name) for name in ("plain", "stacked")]
    assert exported[0] == exported[1]
    step = run.step_fn
    state = jzero.checkpoint.restore(tmp_path / "plain", step.state_shardings, shapes=step.state_shapes)
    for name, x in named(run.state.params).items():
        np.testing.assert_array_equal(named(state.params)[name], x, err_msg=name)


def test_weights_go_out_and_in_under_the_names_of_the_module(tmp_path):
    stacked, plain = engine("blocks", "pipe"), engine(None, "zero")
    stacked.save_16bit_model(tmp_path)
    plain.load_weights(tmp_path)
    plain.save_16bit_model(tmp_path, "again.safetensors")
    files = [load_file(tmp_path / name) for name in ("model.safetensors", "again.safetensors")]
    assert files[0].keys() == files[1].keys()
    for name, x in files[0].items():
        np.testing.assert_array_equal(files[1][name], x, err_msg=name)
    stacked.load_weights(tmp_path / "again.safetensors")
    for name, x in plain_state(plain).items():
        np.testing.assert_array_equal(plain_state(stacked)[name], x, err_msg=name)
