"""A run of DeepSpeed goes on in jzero: the next losses are those of DeepSpeed's own continuation.

`make_checkpoints.py` has trained 20 steps with DeepSpeed 0.19.8 on two or four CPU processes, saved, and gone on for 20
steps; `checkpoints.tar.xz` has the checkpoints and the losses. So these tests run without DeepSpeed. CI makes some of
the checkpoints anew where DeepSpeed installs.
"""

import numpy as np
import pytest
from helpers.sampling import keep
from stored_runs import BOUND, about, continued, make_engine

# case of make_checkpoints.py, its directory, our stage, devices and pipeline stages; every stage of DeepSpeed's, both
# kinds of directory, every optimizer and kind of model, and groups in bf16, whose masters are in files of their own
RUNS = [
    ("mlp-0-fp32", "ckpt", 3, 2, 1),
    ("mlp-1-bf16", "universal", 3, 8, 1),
    ("mlp-2-fp32", "ckpt", 3, 8, 1),
    ("mlp-3-bf16", "ckpt", 2, 2, 1),
    ("mlp-1-sgd", "ckpt", 2, 2, 1),
    ("mlp-2-adagrad", "ckpt", 3, 2, 1),
    ("mlp-2-muon", "ckpt", 1, 2, 1),
    ("mlp-0-bf16-groups", "ckpt", 3, 2, 1),
    ("pipe-1-fp32", "ckpt", 1, 2, 2),
    ("llama-3-bf16", "ckpt", 3, 2, 1),
]
MORE = [
    ("mlp-1-fp32", "universal", 2, 8, 1),
    ("mlp-3-fp32", "ckpt", 1, 2, 1),
    ("mlp-0-bf16", "ckpt", 1, 2, 1),
    ("mlp-2-bf16", "ckpt", 0, 2, 1),
    ("mlp-3-muon", "ckpt", 2, 2, 1),
    ("mlp-0-groups", "ckpt", 1, 2, 1),
    ("llama-2-fp32", "universal", 1, 2, 2),
    ("mlp-1-fp32", "ckpt", 0, 1, 1),
    ("mlp-3-fp32", "universal", 3, 2, 1),
    ("mlp-1-bf16", "ckpt", 2, 1, 1),
    ("pipe-1-fp32", "universal", 0, 1, 1),
    ("llama-2-fp32", "ckpt", 3, 8, 1),
    ("llama-3-fp32", "ckpt", 1, 4, 2),
]


@pytest.mark.parametrize(("case", "folder", "stage", "devices", "pipe"), keep([*RUNS, *MORE], RUNS))
def test_the_next_losses_are_deepspeeds(runs_of_deepspeed, case, folder, stage, devices, pipe):
    directory, (kind, _, precision, *_) = runs_of_deepspeed / case, case.split("-")
    if not directory.exists():
        pytest.skip("not among the cases that were made")
    engine = make_engine(directory, kind, stage, devices, pipe)
    path, client = engine.load_checkpoint(directory / folder)
    assert path.endswith("global_step20")
    assert client == {"epoch": 3, "note": "twenty"}
    assert (engine.global_steps, engine.global_samples) == (20, 160)
    np.testing.assert_allclose(continued(engine, kind), about(directory)["after"], rtol=BOUND.get(precision, 1e-5))
    ours, theirs = engine.get_lr(), about(directory)["lr"]
    some = slice(1 if case.endswith(("groups", "muon")) else None)  # jzero's config says the groups in another way
    np.testing.assert_allclose(ours[some], theirs[some], rtol=1e-6)


@pytest.mark.parametrize("case", keep(["mlp-1-fp16", "mlp-2-fp16", "mlp-3-fp16"], ["mlp-3-fp16"]))
def test_the_loss_scale_goes_on(runs_of_deepspeed, case):
    """The scale grows at its 19th and 38th step. In that step DeepSpeed 0.19.8 divides by the new scale already."""
    directory = runs_of_deepspeed / case
    engine = make_engine(directory, "mlp", 1, 2)
    engine.load_checkpoint(directory / "ckpt")
    assert float(engine.state.loss_scale.scale) == 2.0**9
    losses = continued(engine, "mlp")
    np.testing.assert_allclose(losses[:18], about(directory)["after"][:18], rtol=BOUND["fp16"])
    assert float(engine.state.loss_scale.scale) == about(directory)["scale"] == 2.0**10
