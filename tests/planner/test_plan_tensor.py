"""A plan with `tensor`: collectives and parameters by axis, and what a layer moves, at its line of the model.

The model is a feed-forward layer on [rows, sequence, width], so that Megatron's two collectives are counted by hand.
"""

import inspect
import json
import re

import jax
import jax.numpy as jnp
import pytest
from helpers.cuda import needs_cuda_compiler

import jzero
from jzero.display.text_table import size_text
from jzero.planner.traced_operations import TracedCollective

pytestmark = [pytest.mark.gpu_compile, needs_cuda_compiler]

ROWS, SEQUENCE, WIDTH, BF16 = 8, 16, 64, 2
TENSOR = ZERO = 2


class FeedForward:
    def __init__(self):
        self.divided = {"tensor": {"up": 1, "down": 0}}

    def init(self, rng):
        up, down = jax.random.split(rng)
        weights = {"up": jax.random.normal(up, (WIDTH, 4 * WIDTH)), "down": jax.random.normal(down, (4 * WIDTH, WIDTH))}
        return weights | {"bias": jnp.zeros(WIDTH)}

    def loss(self, params, batch, rng):
        hidden = jnp.tanh(batch["x"] @ params["up"])
        y = hidden @ params["down"] + params["bias"]
        return (y**2).mean()


def line(text):
    lines, first = inspect.getsourcelines(FeedForward.loss)
    (number,) = (first + i for i, line in enumerate(lines) if text in line)
    return f"test_plan_tensor.py:{number}"


def test_by_axis_and_line(tmp_path):
    config = {
        "train_batch_size": ROWS, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}, "mesh": {"tensor": TENSOR},
    }  # fmt: skip
    shapes = {"x": jax.ShapeDtypeStruct((ROWS, SEQUENCE, WIDTH), jnp.bfloat16)}
    plan = jzero.plan(FeedForward(), config, shapes, gpu="h100", gpus_per_node=TENSOR * ZERO)
    activation = ROWS // ZERO * SEQUENCE * WIDTH * BF16
    # The input is the same on all devices of a group: nothing is gathered. The sum of `down` needs one reduce-scatter,
    # and its gradient one all-gather; the bias is added to a part of the sequence, so its gradient is summed.
    scatter = TracedCollective("reduce-scatter", ("tensor",), activation, "forward", "loss", line("down"))
    gather = TracedCollective("all-gather", ("tensor",), activation, "backward", "loss", line("down"))
    bias = TracedCollective("all-reduce", ("tensor",), WIDTH * BF16 // ZERO, "backward", "reduce_gradients", "")
    assert {scatter, gather, bias} <= set(plan.moves.all)
    # The rest are scalars: the loss, and one sum of squares for each of the two divided parameters.
    assert all(move.bytes <= 2 * 4 for move in set(plan.moves.all) - {scatter, gather, bias})
    assert plan.moves.whole == ()

    elements = 2 * 4 * WIDTH * WIDTH
    held = elements // (TENSOR * ZERO) + WIDTH // ZERO
    assert plan.memory.parts["masters"] == 4 * held
    assert plan.memory.parts["optimizer state"] == 8 * held + 2 * 4  # AdamW's and the schedule's counters
    record = json.loads(json.dumps(plan.record()))
    assert record["moves"][0] | {"axes": ("tensor",)} in [vars(scatter), vars(gather)]
    assert record["whole_arrays"] == []

    text = str(plan)
    rows = [re.split(r"\s{2,}", row.strip()) for row in text.splitlines()]
    by_axis = {row[0]: row[1:3] for row in rows if len(row) == 5}
    assert by_axis["tensor"] == ["2", f"{elements / (elements + WIDTH):.1%}"]
    assert by_axis["zero"] == ["2", "100.0%"]
    launches, size = next(row[3:] for row in rows if row[0] == "tensor")
    assert int(launches) >= 3
    assert size.endswith("KiB")
    assert line("down") in text
    pytest.importorskip("matplotlib")
    plan.html(tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert line("down") in page
    assert "By axis" in page


def planned(nodes, of_node, **mesh):
    config = {
        "train_batch_size": ROWS, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": True},
        "mesh": {"zero": 1, **mesh},
    }  # fmt: skip
    shapes = {"x": jax.ShapeDtypeStruct((ROWS, SEQUENCE, WIDTH), jnp.bfloat16)}
    return jzero.plan(FeedForward(), config, shapes, gpu="h100", nodes=nodes, gpus_per_node=of_node)


@pytest.mark.slow
def test_a_group_across_hosts_has_its_price():
    (found,) = [line for line in planned(2, 2, tensor=4).warnings if line.startswith("mesh.tensor = 4: devices of sev")]
    size = re.search(r"move ([\d.]+) KiB a step", found)[1]
    # the two collectives of the layer, see above, and the bias
    assert float(size) == pytest.approx((2 * ROWS * SEQUENCE * WIDTH * BF16 + WIDTH * BF16) / 2**10, rel=0.01)
    assert not any("several hosts" in line for line in planned(1, 4, tensor=4).warnings)


def test_only_the_axis_across_hosts_has_a_price():
    """`tensor`, the inner axis, stays within the hosts."""
    plan = planned(2, 2, context=2, tensor=2)
    (found,) = [line for line in plan.warnings if "several hosts" in line]
    crossing = sum(move.total for move in plan.moves.all if "context" in move.axes)
    assert 0 < crossing < sum(move.total for move in plan.moves.all)
    assert found.startswith(
        f"mesh.context = 2: devices of several hosts act as one; each moves {size_text(crossing)} per"
    )
