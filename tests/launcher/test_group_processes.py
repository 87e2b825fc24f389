"""Devices of several processes that act as one: each passes its rows, and the numbers are those of one device."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.tensor_models import reference
from jobs import QUICK, Command

pytestmark = pytest.mark.processes

PROGRAM = """
import json, sys
sys.path.insert(0, {tests!r})
import jax, numpy as np
import jzero

jzero.init_distributed()
from helpers.tensor_models import batches, initial, make_step
from jzero.step.batch import rows_of_this_process

step = make_step({model!r}, **{layout!r})
state, seen = step.init(jax.random.key(0), initial({model!r})), []
for i, batch in enumerate(batches()):
    mine = rows_of_this_process(step.batch_sharding, len(batch["inputs"]))
    state, metrics = step(state, {{name: x[mine] for name, x in batch.items()}} if i else batch)
    seen.append((float(metrics["loss"]), float(metrics["grad_norm"])))
jzero.log_dist(json.dumps([len(mine), seen]), ranks=[-1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "processes", "layout", "rows"),
    [
        pytest.param("nnx", 2, {"tensor": 2, "stage": 3}, 16, id="tensor"),
        pytest.param(
            "llama", 4, {"zero": 2, "context": 2, "stage": 3, "accum": 2}, 8, id="context", marks=pytest.mark.slow
        ),
        pytest.param(
            "llama", 4, {"pipe": 2, "tensor": 2, "accum": 2}, 16, id="pipeline of groups", marks=pytest.mark.slow
        ),
    ],
)
def test_one_device_computes_the_same(tmp_path, model, processes, layout, rows):
    tests = str(Path(__file__).parents[1])
    program = PROGRAM.format(tests=tests, model=model, layout=layout)
    (tmp_path / "worker.py").write_text(program)
    job = Command("--platform", "cpu", "--num_gpus", processes, "worker.py", cwd=tmp_path, env=QUICK)
    try:
        assert job.wait() == 0, job.errors
    finally:
        job.end()
    lines = [json.loads(line) for line in re.findall(r"^\[\d\].*?(\[\d+, \[\[.*)$", job.output, re.M)]
    assert [mine for mine, _ in lines] == [rows] * processes
    for _, seen in lines:
        np.testing.assert_allclose(seen, reference(model)[0], rtol=1e-6)
