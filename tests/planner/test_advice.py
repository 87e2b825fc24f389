"""Each warning about a plan, and a plan with `tensor`, by axis and by line of the model.

The model of the latter is a feed-forward layer on [rows, sequence, width], so that Megatron's two collectives are
counted by hand.
"""

import inspect
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler
from helpers.steps import settings

import jzero
from jzero.display.text_table import size_text
from jzero.planner import GPUS, described_gpus, matmuls
from jzero.planner.advice import MANY, WIDE, across_hosts, advice
from jzero.planner.collectives import Collective, Collectives
from jzero.planner.nearest import too_large
from jzero.planner.state_bytes import state_bytes
from jzero.planner.traced_operations import TracedCollective, moves
from jzero.step.batch import Amount

TOKENS = Amount(2, 2 * 4096)
CLEAN = """
  %rs = ((bf16[8]{0}), (bf16[4]{0})) reduce-scatter-start(%x), backend_config={"is_sync":false}
  %fmha = bf16[2,4096,8,64]{3,2,1,0} custom-call(%q), custom_call_target="__cudnn$fmhaSoftmax"
"""
SCORES = "  %s = bf16[2,8,4096,4096]{3,2,1,0} custom-call(%q)\n"
FP32, SYNCHRONOUS = {"bf16": {"enabled": False}}, "1 reduce-scatter operations of the program are synchronous"


class Net:
    """One product, in float32 if `wide`."""

    def __init__(self, wide=False):
        self.wide = wide

    def init(self, rng):
        return {"w": jnp.zeros((8, 8))}

    def loss(self, params, batch, rng):
        x = batch["x"].astype(jnp.float32 if self.wide else params["w"].dtype)
        return jnp.mean(x @ params["w"])


def warn(text=CLEAN, rows=(), gpu="h100", net=None, **config):
    config = settings(2, bf16={"enabled": True, "auto_cast": False}) | config
    mesh = jzero.make_mesh(config, devices=described_gpus("h100", 2))
    step = jzero.make_train_step(net or Net(), config, mesh=mesh)
    found = matmuls(step.trace({"x": jax.ShapeDtypeStruct((2, 8), np.float32)}))
    return advice(step, GPUS[gpu], text, Collectives(tuple(rows)), found, TOKENS)


def collective(kind, dtype="bf16", size=2**20, loops=()):
    return Collective(kind, dtype, 1, size, ("zero",), 2, loops)


WIDE_GATHER = [collective("all-gather", "f32", 2 * WIDE)]


@pytest.mark.parametrize(
    ("words", "changes"),
    [
        (SYNCHRONOUS, {"text": CLEAN.replace("false", "true")}),
        (SYNCHRONOUS, {"text": CLEAN + "  %r = f32[4] reduce-scatter(%x)"}),
        ("all-gathers of a step move 32.0 MiB in float32", {"rows": WIDE_GATHER}),
        ("are reduced in float32", {"rows": [collective("reduce-scatter", "f32", 2 * WIDE)]}),
        (f"{MANY + 1} all-reduce operations", {"rows": [collective("all-reduce", size=9, loops=(MANY + 1,))]}),
        ("XLA recomputes 2 operations", {"text": CLEAN + "  %a.remat = f32[] f(%x)\n  %b.2.remat3 = f32[] f(%x)\n"}),
        ("of the matmuls' FLOPs run in float32, most of them at Net.loss", {"net": Net(wide=True)}),
        # Everything is float32, and that is said once.
        ('the step computes in float32, at a fraction of the speed and with twice the activations; fix: "bf16": {"ena',
            FP32 | {"rows": WIDE_GATHER}),
        ('fix: "fp16"', FP32 | {"gpu": "t4"}),
        ('zero_optimization.stage = 3 shards nothing: mesh.zero = 1; fix: "mesh": {"data": 1, "zero": 2}',
            {"zero_optimization": {"stage": 3}, "mesh": {"data": 2, "zero": 1}}),
        ('shards nothing: zero_optimization.mics_shard_size = 1; fix: "zero_optimization": {"mics_shard_size": 2}',
            {"zero_optimization": {"stage": 3, "mics_shard_size": 1}}),
        ("scores of 4096 x 4096", {"text": SCORES}),
    ],
)  # fmt: skip
def test_a_warning_and_its_fix(words, changes):
    (line,) = warn(**changes)
    assert words in line
    assert "; fix: " in line
    assert "\n" not in line


def test_what_is_meant_to_be_so():
    clean = [collective("all-gather"), collective("reduce-scatter"), collective("all-reduce", "f32", 4)]
    assert warn(rows=clean, mesh={"data": 2, "zero": 1}) == ()  # stage 0
    assert warn(text=SCORES, gpu="t4") == ()  # has no cuDNN attention
    assert warn(text=SCORES + ' custom_call_target="flash_mha_fwd"') == ()


def told_too_large(gpus, most, rows=4, stage=0, **mesh):
    """The line about a plan of a step that needs its state alone."""
    config = settings(rows, stage, optimizer={"type": "AdamW", "params": {}}, mesh=mesh)
    mesh = jzero.make_mesh(config, devices=described_gpus("h100", gpus))
    step = jzero.make_train_step(Net(), config, mesh=mesh)
    size = state_bytes(step).total
    memory = SimpleNamespace(
        usable=SimpleNamespace(most=most(size)), peak_bytes=size, largest="masters", parts={"masters": 256},
        verdict="no",
    )  # fmt: skip
    return too_large(SimpleNamespace(step=step, gpu=GPUS["h100"], gpus=gpus, gpus_per_node=4, memory=memory))


def test_a_step_too_large_whose_stage_shards_nothing():
    """Masters and moments of 64 parameters, 768 bytes, are a quarter on each of four GPUs that shard."""
    line = told_too_large(4, lambda size: size - 256, stage=1, data=4, zero=1)
    assert 'ZeRO-1 on 4 of these GPUs with "mesh": {"data": 1, "zero": 4} would fit, by the formula' in line


def test_a_step_too_large_for_all_gpus_that_its_batch_divides_over():
    """Numbers of GPUs that the config excludes were not tried, which the line says."""
    assert told_too_large(2, lambda size: 0).endswith(
        "no ZeRO stage on 2 or 4 of these GPUs would fit, by the formula; not tried: 8, 16, 32, 64, 128, which the "
        "config's batch sizes or mesh exclude"
    )
    single = told_too_large(2, lambda size: 0, rows=128)
    assert single.endswith("no ZeRO stage on 2, 4, 8, 16, 32, 64 or 128 of these GPUs would fit, by the formula")


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
    return f"test_advice.py:{number}"


@pytest.mark.gpu_compile
@needs_cuda_compiler
def test_by_axis_and_line():
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
    assert line("down") in text


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
    for text in lines:
        words = f"mesh.{axis} = {mesh[axis]}: devices of several hosts act as one; each moves {size_text(crossing)} per"
        assert text.startswith(words)
