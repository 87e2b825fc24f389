"""A run of DeepSpeed goes on in jzero: the next losses are those of DeepSpeed's own continuation.

`make_checkpoints.py` has trained 20 steps with DeepSpeed 0.19.8 on two or four CPU processes, saved, and gone on for 20
steps; `checkpoints.tar.xz` has the checkpoints and the losses. So these tests run without DeepSpeed. CI makes some of
the checkpoints anew where DeepSpeed installs.
"""

from itertools import product

import numpy as np
import pytest
from helpers.sampling import keep
from make_checkpoints import CASES
from stored_runs import BOUND, about, continued, make_engine

# case of make_checkpoints.py, its directory, our stage, devices and pipeline stages; every stage of DeepSpeed's, both
# kinds of directory, every optimizer and kind of model, and groups in bf16, whose masters are in files of their own
RUNS = [
    ("mlp-1-bf16", "universal", 3, 2, 1), ("mlp-1-sgd", "ckpt", 0, 1, 1), ("mlp-2-adagrad", "ckpt", 1, 1, 1),
    ("mlp-0-lamb", "ckpt", 0, 1, 1), ("mlp-3-lion", "ckpt", 1, 1, 1), ("mlp-0-muon", "ckpt", 0, 1, 1),
    ("mlp-0-bf16-fused", "ckpt", 3, 2, 1), ("mlp-0-bf16-groups", "ckpt", 0, 1, 1), ("pipe-1-fp32", "ckpt", 1, 2, 2),
    ("llama-3-bf16", "ckpt", 0, 1, 1),
]  # fmt: skip
FP16 = [("mlp-0-fp16", "ckpt", 1, 1, 1), ("mlp-3-fp16", "ckpt", 1, 1, 1)]
# The other stages, precisions, models and kinds of checkpoint. CI makes some of them again.
MORE = [
    (case, folder, i % 4, (1, 2, 8)[i % 3], 2 if kind != "mlp" and i % 3 else 1)
    for i, (case, folder) in enumerate(product(sorted(CASES.keys() - {"mlp-0-frozen"}), ("ckpt", "universal")))
    for kind, *_, universal in [CASES[case]]
    if (folder == "ckpt" or universal) and (case, folder) not in {run[:2] for run in (*RUNS, *FP16)}
]


@pytest.mark.parametrize(("case", "folder", "stage", "devices", "pipe"), keep([*RUNS, *FP16, *MORE], [*RUNS, *FP16]))
def test_the_next_losses_are_deepspeeds(runs_of_deepspeed, case, folder, stage, devices, pipe):
    """The loss scale of fp16 grows at its 19th and 38th step. With ZeRO, DeepSpeed divides by the new scale there."""
    directory, (kind, _, precision, *_) = runs_of_deepspeed / case, case.split("-")
    if not (directory / folder).exists():
        pytest.skip("not among the cases that were made")
    engine = make_engine(directory, kind, stage, devices, pipe)
    path, client = engine.load_checkpoint(directory / folder)
    assert path.endswith("global_step20")
    assert client == {"epoch": 3, "note": "twenty"}
    assert (engine.global_steps, engine.global_samples) == (20, 160)
    if precision == "fp16":
        assert float(engine.state.loss_scale.scale) == 2.0**9
    losses, n = continued(engine, kind), 18 if precision == "fp16" else None
    np.testing.assert_allclose(losses[:n], about(directory)["after"][:n], rtol=BOUND.get(precision, 1e-5))
    if precision == "fp16":
        assert float(engine.state.loss_scale.scale) == about(directory)["scale"] == 2.0**10
    ours, theirs = engine.get_lr(), about(directory)["lr"]
    some = slice(1 if case.endswith(("groups", "muon")) else None)  # jzero's config says the groups in another way
    np.testing.assert_allclose(ours[some], theirs[some], rtol=1e-6)
