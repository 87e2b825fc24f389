"""Plans, against XLA's figures, hand counts, the model's FLOPs, DeepSpeed's estimates and the ZeRO paper's table."""

import importlib
import json
import re
import sys
from functools import partial
from html import escape
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.cuda import needs_cuda_compiler
from helpers.engines import FEATURES, Net, rows
from helpers.hlo_programs import DONE, GATHER_S, MATMUL, PRODUCT_S, RATES, X, attention, computation, gather, program
from helpers.named_models import model_of
from helpers.refusals import refuses

import jzero
from jzero.planner import GPUS, bytes_by_stage, described_gpus, live, memory, step_time
from jzero.planner.gpus import Cluster
from jzero.planner.memory import CUDA_ROOM, FRACTION, NCCL_ROOM
from jzero.planner.plan import useful_flops
from jzero.planner.plan_display import time_rows, timeline_figure
from jzero.planner.plan_facts import SCHEMA, PlannedTime, schedule_of
from jzero.planner.state_bytes import deepspeed_estimate, zero2, zero3
from jzero.step.batch import Amount
from models.llama import preset

SHAPE = preset("tiny", num_layers=1, d_model=256, d_ff=512, vocab_size=1536)
ROWS, LENGTH = 1, 512
CONFIG = {
    "train_micro_batch_size_per_gpu": ROWS,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "bf16": {"enabled": True},
}
STATS = []  # what the compiler says of the fixture's program


def tokens(rows):
    return {name: jax.ShapeDtypeStruct((rows, LENGTH), np.int32) for name in ("inputs", "labels")}


@pytest.fixture(scope="module")
def plan():
    def read(compiled, step):
        STATS.append(compiled.memory_analysis())
        return memory(compiled, step)

    zero = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("jzero.planner.plan_facts"), "memory", read)
        return jzero.plan(model_of(SHAPE), CONFIG | zero, tokens, gpu="h200", gpus_per_node=4)


@pytest.mark.gpu_compile
@needs_cuda_compiler
class TestPlan:
    def test_parts_add_up_to_the_compilers_peak(self, plan):
        """Oracle: XLA's own figures, and the ZeRO formula: 12 bytes a parameter over 4 GPUs."""
        stats = STATS[-1]
        peak = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
        assert plan.memory.peak_bytes == sum(plan.memory.parts.values()) == peak + stats.temp_size_in_bytes
        size = sum(x.size for x in jax.tree.leaves(plan.step.state_shapes.params))
        assert plan.memory.parts["masters"] == size  # 4 bytes / 4
        assert plan.memory.parts["optimizer state"] == pytest.approx(2 * size, abs=16)
        assert plan.memory.parts["compute parameters"] == size / 2
        assert plan.memory.host_bytes == 0
        assert plan.memory.fits

    def test_the_buffers_at_the_peak_are_those_of_xlas_block(self, plan):
        """XLA's own figure for its block is the oracle; in 20 MB the gaps between buffers are 9 %."""
        assert plan.memory.live.peak_bytes == pytest.approx(plan.memory.xla.temps, rel=0.1)
        assert sum(b.bytes for b in plan.memory.live.buffers) >= plan.memory.live.peak_bytes
        logits = [b for b in plan.memory.live.buffers if b.shape == f"bf16[{ROWS * LENGTH},1536]"]
        assert logits
        assert "head" in logits[0].op_name

    def test_the_speed_is_of_the_models_flops(self, plan):
        assert "__cudnn$fmha" in plan.text  # attention "auto" on an H200
        flops = SHAPE.flops_per_token(LENGTH) * ROWS * LENGTH
        assert plan.time.useful_flops == pytest.approx(flops, rel=0.01)
        assert plan.time.tokens_per_s_gpu == pytest.approx(ROWS * LENGTH / plan.time.step_s)
        assert plan.time.mfu == pytest.approx(flops / plan.time.step_s / 989.4e12, rel=0.01)
        budget = plan.time.budget(4 * LENGTH * 1000, price=2.5)
        hours = 1000 * plan.time.step_s / 3600
        assert budget.steps == 1000
        assert [budget.days, budget.gpu_hours, budget.kwh, budget.cost] == pytest.approx(
            [hours / 24, 4 * hours, 4 * hours * 0.7, 4 * hours * 2.5]
        )
        refuses(lambda: plan.time.budget(-1), "tokens = -1")

    def test_the_record_has_the_keys_of_its_page(self, plan):
        record = json.loads(json.dumps(plan.record(1e9, 2.0)))
        page = (Path(__file__).parents[2] / "docs/plan.md").read_text().partition("## JSON")[2]
        documented = [
            (re.findall(r"`(\w+)`", left), right) for left, right in re.findall(r"^\| (`.*?) \| (.*) \|$", page, re.M)
        ]
        assert sorted(record) == sorted(key for keys, _ in documented for key in keys)
        for (key, *others), text in documented:
            if isinstance(record[key], dict):
                assert not others
                assert [name for name in record[key] if f"`{name}`" not in text] == []
        assert record["schema"] == SCHEMA == 1
        assert record["layout"]["mesh"] == {"pipe": 1, "data": 1, "zero": 4, "expert": 1, "context": 1, "tensor": 1}
        assert {row["dtype"] for row in record["collectives"] if row["kind"] == "all-gather"} == {"bf16"}
        assert {p["name"]: p["spec"] for p in record["parameters"]}["ends/embed"] == ["zero"]

    def test_page(self, plan, tmp_path, monkeypatch):
        plan.html(tmp_path / "plan.html", tokens=1e9)
        page = (tmp_path / "plan.html").read_text()
        assert page.count("<svg") == 2
        assert "GPU-hours" in page
        assert "By axis" in page
        assert not re.search(r'(src|href)="http', page)
        assert "<h2>Time of a step</h2>" in plan._repr_html_()
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
        assert plan._repr_html_() == f'<pre style="font-size:90%">{escape(str(plan))}</pre>'

    def test_mistakes(self, plan):
        mesh = jzero.make_mesh(devices=jax.devices())
        step = jzero.make_train_step(Flat(1024), {"train_batch_size": 8}, optimizer=optax.sgd(0.1), mesh=mesh)
        refuses(lambda: jzero.plan(step, None, tokens), "optimizer: the step was made with one of your own")
        refuses(lambda: jzero.plan(plan.step, None, tokens(3), gpus_per_node=4), "train_batch_size 4")


def test_a_pipeline_counts_no_idle_ticks():
    """Nothing is compiled, so that the GPUs need only a description."""
    config = CONFIG | {"mesh": {"pipe": 2}, "gradient_accumulation_steps": 3}
    mesh = jzero.make_mesh(config, devices=described_gpus("h200", 4, per_host=4))
    step = jzero.make_train_step(Net(), config, mesh=mesh)
    batch = rows(0, step.batch_sizes.train)
    products = 3 * 3  # of two layers and `out`: forward, the gradients of weights and of inputs
    flops = products * 2 * FEATURES**2 * ROWS * 3 * 2 / 4  # micro-batches x replicas / GPUs
    assert useful_flops(step, step.trace(batch), batch) == pytest.approx(flops, rel=0.01)
    assert schedule_of(step).ticks == 5
    assert deepspeed_estimate(step) is None  # of stage 0


# The ZeRO paper, arXiv:1910.02054, table 1: GB of model state per device, by GPUs: P_os, P_os+g, P_os+g+p.
PAPER = {
    7.5e9: {1: (120, 120, 120), 4: (52.5, 41.3, 30), 64: (31.4, 16.6, 1.88), 1024: (30.1, 15.1, 0.12)},
    1e12: {1024: (4011, 2013, 15.6)},
}


class Flat:
    def __init__(self, size):
        self.shape = (1024, -(-int(size) // 1024))

    def init(self, rng):
        return {"w": jnp.zeros(self.shape, jnp.float32)}

    def loss(self, params, batch, rng):
        return jnp.sum(params["w"]) * jnp.mean(batch)


@pytest.mark.parametrize("size", PAPER)
def test_the_table_of_the_zero_paper(size):
    for gpus, figures in PAPER[size].items():
        found = bytes_by_stage(Flat(size), CONFIG, devices=described_gpus("h100", gpus, per_host=min(gpus, 8)))
        assert [found[stage].total / 1e9 for stage in (1, 2, 3)] == pytest.approx(figures, rel=0.006, abs=0.006), gpus
        assert all(one.total == pytest.approx(one.formula, abs=8) for one in found.values())  # and two counters


def test_deepspeeds_estimate():
    """The numbers of estimate_zero{2,3}_model_states_mem_needs of deepspeed 0.18.2."""
    of_3 = partial(zero3, 7_000_000_000, 200_000_000, 8)
    assert [zero2(7_000_000_000, 8), zero2(7_000_000_000, 8, offload=True)] == [29_750_000_000, 14_000_000_000]
    assert [of_3(), of_3(offload=True)] == [16_550_000_000, 2_550_000_000]
    assert of_3(offload=True, offload_params=True) == 800_000_000


def test_the_formula_takes_offload():
    """Oracle: 12 bytes a parameter leave the GPU for the host."""
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
    found = bytes_by_stage(Flat(2**20), CONFIG | {"zero_optimization": zero}, devices=described_gpus("h200", 2))[1]
    assert found.host == pytest.approx(12 * 2**20 / 2, rel=0.02)
    assert found.persistent == pytest.approx(0, abs=found.host / 50)  # counters


def test_xlas_limit_is_what_the_run_will_have(monkeypatch):
    """XLA takes 80 % of the described memory for its limit; on a GPU it takes the pool (measured on H100s)."""
    h100, size = GPUS["h100"], 84_942_979_072

    def limit():
        return 0.8 * int(re.search(r"device_memory_size: (\d+)", h100.text_proto(h100.usable(2).limit))[1])

    monkeypatch.delenv(FRACTION, raising=False)
    assert h100.usable(2).preallocated == int(0.75 * size)
    assert [h100.usable(gpus).most for gpus in (2, 1)] == [size - NCCL_ROOM - CUDA_ROOM, size - CUDA_ROOM]
    assert limit() == pytest.approx(size - NCCL_ROOM - CUDA_ROOM)
    monkeypatch.setenv(FRACTION, "0.5")
    assert h100.usable(2).preallocated == h100.usable(2).limit == int(size / 2)
    assert limit() == pytest.approx(size / 2)


STATE = "(f32[256], f32[4,256])"
PASS = computation(
    "body", f"%p = {STATE} parameter(0)", "%x = f32[256] get-tuple-element(%p), index=0",
    "%all = f32[4,256] get-tuple-element(%p), index=1",
    '%wide = f32[1024] custom-call(%x), custom_call_target="f", metadata={op_name="jit(step)/jvp(net)/one_row_of_4/b"}',
    '%y = f32[256] custom-call(%wide), custom_call_target="f"', f"ROOT %t = {STATE} tuple(%y, %all)",
)  # fmt: skip
SCHEDULED = program(
    '%first = f32[256] custom-call(%x), custom_call_target="f"',
    '%stash = f32[4,256] custom-call(%x), custom_call_target="f", metadata={op_name="jit(step)/stash"}',
    '%dead = f32[2048] custom-call(%x), custom_call_target="f"',
    f"%t = {STATE} tuple(%first, %stash)",
    f"%loop = {STATE} while(%t), condition=%condition, body=%body",
    "%out = f32[256] get-tuple-element(%loop), index=0",
    'ROOT %r = f32[256] custom-call(%out), custom_call_target="f"',
    others=PASS + computation("condition", f"%p = {STATE} parameter(0)", "ROOT %c = pred[] constant(true)"),
)


def test_live_buffers_by_hand():
    """At %dead: first 1 KiB, stash 4 KiB, dead 8 KiB. In the loop: first, stash, wide 4 KiB; %y lies in its state."""
    found, inside = live(SCHEDULED), live(SCHEDULED.replace("f32[2048]", "f32[16]"))
    assert (found.peak_bytes, found.at) == (13 * 1024, "custom-call")
    assert (inside.peak_bytes, inside.at) == (9 * 1024, "net/b")
    assert [(b.shape, b.op_name) for b in inside.buffers][:2] == [("f32[4,256]", "stash"), ("f32[1024]", "net/b")]
    with pytest.raises(ValueError, match="no schedule"):
        live(SCHEDULED.replace(", is_scheduled=true", ""))


LAYERS, ACCUMULATION, REDUCTIONS = 80, 16, 400
HOST = "f32[100,1000]{1,0:S(5)}"


def loop(name, body, trips):
    count = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    return f"%{name} = {X} while(%x), condition=%condition, body=%{body}, {count}"


# In each layer a gather takes longer than the product beside it, and attention a fifth of the time: less than half of
# any interval. The copy from the host runs beside compute.
GIVEN, KERNEL = f"%x = {X} parameter(0)", attention((2, 8, 512, 512), "CAUSAL").replace("%a", "%k").replace("%v", "%x")
LAYER = [
    GIVEN, f"%h = {HOST} constant(0)", f"%cs = (f32[100,1000]{{1,0}}, {HOST}, u32[]) copy-start(%h)", gather(),
    f"%p = {MATMUL}", DONE, KERNEL,
    "%rs = bf16[250,1000] reduce-scatter(%x), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add",
    "%cd = f32[100,1000]{1,0} copy-done(%cs)", f"ROOT %o = {X} bitcast(%x)",
]  # fmt: skip
LOOPS = (
    computation("condition", GIVEN, "ROOT %t = pred[] constant(true)")
    + computation("layer", *LAYER)
    + computation("micro", GIVEN, f"ROOT {loop('l', 'layer', LAYERS)}")
    + computation("last", GIVEN, f"ROOT %r = {X} all-reduce(%x), replica_groups={{}}, to_apply=%add")
)


def areas(figure):
    found = {}
    for polygons in figure.axes[0].collections:
        corners = (path.vertices.T for path in polygons.get_paths())
        found[polygons.get_gid()] = sum(abs(x @ np.roll(y, 1) - y @ np.roll(x, 1)) / 2 for x, y in corners)
    return found


def test_the_area_of_each_category_is_its_time_in_the_table():
    pytest.importorskip("matplotlib")
    step = step_time(program(loop("a", "micro", ACCUMULATION), loop("b", "last", REDUCTIONS), others=LOOPS), RATES)
    time = PlannedTime(step, Amount(1, None), None, Cluster("h100", 1, 4), True, "measured")
    table = {}
    for name, cell in time_rows(SimpleNamespace(time=time)):
        if cell.endswith(" ms"):
            name = name.strip()
            table[name if ": " in name else f"compute: {name}"] = float(cell.removesuffix(" ms").replace(",", ""))
    figure = timeline_figure(step)
    drawn = areas(figure)
    row = sum(area for name, area in drawn.items() if name.startswith("compute: "))  # a row is as long as the step
    assert {name: 1e3 * step.step_s * area / row for name, area in drawn.items()} == pytest.approx(table, rel=0.02)
    # By hand, as the program has them.
    layers = ACCUMULATION * LAYERS
    expected = {
        "compute: products": layers * PRODUCT_S,
        "compute: attention": layers * 4 * 2 * 8 * (512 * 513 / 2) * 64 / 40e12,
        "communication: all-gather": layers * GATHER_S,
        "communication: reduce-scatter": layers * 1.5e6 / 100e9,
        "communication: all-reduce": REDUCTIONS * 3e6 / 100e9,
        "copies: host memory": layers * 4e5 / 8e9,
    }
    assert {n: table[n] for n in expected} == pytest.approx({n: 1e3 * s for n, s in expected.items()}, rel=0.01)
    shown = {text.get_text() for text in figure.legends[0].get_texts()}
    assert shown == {f"{name.partition(': ')[2]}: {ms:,.1f} ms" for name, ms in table.items()}
