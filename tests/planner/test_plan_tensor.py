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
from helpers.steps import settings

import jzero
from jzero.display.text_table import size_text
from jzero.planner import described_gpus
from jzero.planner.advice import across_hosts
from jzero.planner.traced_operations import TracedCollective, moves

ROWS, SEQUENCE, WIDTH, BF16 = 8, 16, 64, 2
TENSOR = ZERO = 2
SHAPES = {"x": jax.ShapeDtypeStruct((ROWS, SEQUENCE, WIDTH), jnp.bfloat16)}


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


def config(stage=0, **mesh):
    adamw = {"type": "AdamW", "params": {"lr": 1e-3}}
    return settings(ROWS, stage, optimizer=adamw, bf16={"enabled": True}, mesh=mesh)


def line(text):
    lines, first = inspect.getsourcelines(FeedForward.loss)
    (number,) = (first + i for i, line in enumerate(lines) if text in line)
    return f"test_plan_tensor.py:{number}"


@pytest.mark.gpu_compile
@needs_cuda_compiler
def test_by_axis_and_line(tmp_path):
    plan = jzero.plan(FeedForward(), config(3, tensor=TENSOR), SHAPES, gpu="h100", nodes=TENSOR * ZERO, gpus_per_node=1)
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
    assert any(line.startswith("mesh.tensor = 2: devices of several hosts act as one") for line in plan.warnings)

    elements = 2 * 4 * WIDTH * WIDTH
    held = elements // (TENSOR * ZERO) + WIDTH // ZERO
    assert plan.memory.parts["masters"] == 4 * held
    assert plan.memory.parts["optimizer state"] == 8 * held + 2 * 4  # AdamW's and the schedule's counters
    record = json.loads(json.dumps(plan.record()))
    assert record["moves"][0] | {"axes": ("tensor",)} in [vars(scatter), vars(gather)]
    assert record["whole_arrays"] == []

    text = str(plan)
    rows = [re.split(r"\s{2,}", row.strip()) for row in text.splitlines()]
    by_axis = {row[0]: row[1:] for row in rows if len(row) == 5}
    share, launches, size = by_axis["tensor"][1:]
    assert (by_axis["tensor"][0], share) == ("2", f"{elements / (elements + WIDTH):.1%}")
    assert int(launches) >= 3
    assert size.endswith("KiB")
    assert by_axis["zero"][:2] == ["2", "100.0%"]
    pytest.importorskip("matplotlib")
    plan.html(tmp_path / "plan.html")
    for shown in (text, page := (tmp_path / "plan.html").read_text()):
        assert line("down") in shown
    assert "By axis" in page


@pytest.mark.parametrize(
    ("nodes", "of_node", "mesh", "axis"),
    [(2, 2, {"tensor": 4}, "tensor"), (1, 4, {"tensor": 4}, None), (2, 2, {"context": 2, "tensor": 2}, "context")],
)
def test_only_an_axis_across_hosts_has_a_price(nodes, of_node, mesh, axis):
    """`tensor`, the inner axis, stays within the hosts where it can."""
    made = jzero.make_mesh(zero=1, **mesh, devices=described_gpus("h100", nodes * of_node, per_host=of_node))
    found = moves(jzero.make_train_step(FeedForward(), config(zero=1, **mesh), mesh=made).trace(SHAPES), made)
    lines, crossing = [*across_hosts(found, made)], sum(move.total for move in found.all if axis in move.axes)
    assert bool(lines) == bool(crossing) == (axis is not None)
    if axis == "tensor":  # the two collectives of the layer, see above, and the bias
        assert crossing == pytest.approx(2 * ROWS * SEQUENCE * WIDTH * BF16 + WIDTH * BF16, rel=0.01)
    elif axis:
        assert crossing < sum(move.total for move in found.all)
    for text in lines:
        words = f"mesh.{axis} = {mesh[axis]}: devices of several hosts act as one; each moves {size_text(crossing)} per"
        assert text.startswith(words)
