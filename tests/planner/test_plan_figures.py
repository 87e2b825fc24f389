"""The chart of a step's time: the area of each category is its milliseconds in the table."""

from types import SimpleNamespace

import numpy as np
import pytest
from helpers.hlo_programs import DONE, GATHER_S, MATMUL, PRODUCT_S, RATES, X, attention, computation, gather, program

from jzero.planner import step_time
from jzero.planner.gpus import Cluster
from jzero.planner.plan_display import time_rows, timeline_figure
from jzero.planner.plan_facts import PlannedTime
from jzero.step.batch import Amount

pytest.importorskip("matplotlib")
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
    """Sum the area of the polygons of each category."""
    found = {}
    for polygons in figure.axes[0].collections:
        corners = (path.vertices.T for path in polygons.get_paths())
        found[polygons.get_gid()] = sum(abs(x @ np.roll(y, 1) - y @ np.roll(x, 1)) / 2 for x, y in corners)
    return found


def test_the_area_of_each_category_is_its_time_in_the_table():
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
