"""The time of collectives in programs that are written by hand, against arithmetic."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers.hlo_programs import DONE, GATHER_S, MATMUL, PRODUCT_S, RATES, X, gather, program, seconds
from jax.sharding import Mesh

from jzero.planner import step_time


def test_a_collective_that_nothing_hides():
    t = step_time(program(gather(), DONE), RATES)
    assert t.exposed == {"all-gather": t.step_s}
    assert (t.step_s, t.exposed_s, t.compute_s, t.wire) == (pytest.approx(GATHER_S), t.step_s, 0, 6e6)


def test_a_collective_under_a_product_is_free_but_for_the_slowdown():
    products = [f"%p{i} = {MATMUL}" for i in range(3)]
    assert 3 * PRODUCT_S > GATHER_S
    assert seconds(gather(), *products, DONE) == pytest.approx(3 * PRODUCT_S)
    slowed = step_time(program(gather(), *products, DONE), replace(RATES, slow=0.5))
    assert slowed.exposed == {}
    assert slowed.step_s == pytest.approx(3 * PRODUCT_S + 0.5 * GATHER_S)
    # Late: it begins when a quarter of the first product is left.
    late = replace(RATES, late=0.75)
    assert seconds(gather(), products[0], DONE, rates=late) == pytest.approx(0.75 * PRODUCT_S + GATHER_S)


@pytest.mark.parametrize(("before", "after", "exposed"), [(1, 1, PRODUCT_S), (2, 1, 0.0), (0, 2, 2 * PRODUCT_S)])
def test_the_done_of_an_update_waits_for_the_collective(before, after, exposed):
    """The start, the update and the done call a computation with a reduce-scatter, which takes as long as two products.

    Those before the done hide it, one after it hides nothing.
    """
    wrapped = f"""%wrapped (q: bf16[2000,1000]) -> bf16[1000,1000] {{
  %q = bf16[2000,1000] parameter(0)
  ROOT %rs = {X} reduce-scatter(%q), replica_groups={{{{0,1}},{{2,3}}}}, dimensions={{0}}, to_apply=%add
}}
"""
    pair = "((bf16[2000,1000]), bf16[1000,1000])"
    start = f"%s = {pair} async-start(%g), calls=%wrapped", f"%u = {pair} async-update(%s), calls=%wrapped"
    first, second = ([f"%{name}{i} = {MATMUL}" for i in range(n)] for name, n in (("p", before), ("r", after)))
    lines = "%g = bf16[2000,1000] parameter(3)", *start, *first, f"%d = {X} async-done(%u), calls=%wrapped", *second
    t = step_time(program(*lines, others=wrapped), RATES)
    assert t.step_s == pytest.approx((before + after) * PRODUCT_S + exposed)  # 2 MB at 50 GB/s
    assert t.exposed_s == pytest.approx(exposed, abs=1e-12)


def test_collectives_wait_for_each_other():
    """Both are on one stream, so the second ends after the sum of their times."""
    second = gather(name="t"), "%e = bf16[4000,1000]{1,0} all-gather-done(%t)"
    assert seconds(gather(), *second, DONE) == pytest.approx(2 * GATHER_S)


HALF, QUARTER = "bf16[500,1000] reduce-scatter(%x), to_apply=%add", "bf16[250,1000] reduce-scatter(%x), to_apply=%add"
SUM, EXCHANGE = f"{X} all-reduce(%x), to_apply=%add", f"{X} all-to-all(%x), dimensions={{0}}"
PERMUTE, PAIRS, ALL = f"{X} collective-permute(%x)", "{{0,1},{2,3}}", "{{0,1,2,3}}"


@pytest.mark.parametrize(
    ("call", "groups", "of_a_host", "expected"),
    [
        (HALF, PAIRS, 4, 1e6 / 50e9),
        (QUARTER, "[1,4]<=[4]", 4, 1.5e6 / 100e9),
        (SUM, "{}", 4, 3e6 / 100e9),
        (EXCHANGE, ALL, 4, 1.5e6 / 200e9),
        (PERMUTE, "{{0,1},{1,0}}", 4, 2e6 / 80e9),
        (SUM, "{{0},{1},{2},{3}}", 4, 0.0),
        # Two GPUs on each of two hosts: two network cards of 10 GB/s carry each ring's bytes.
        (QUARTER, "{}", 2, 1.5e6 / 20e9),
        (SUM, "{}", 2, 3e6 / 20e9),
        # One GPU on each of two hosts: one card. On one host: NVLink.
        (HALF, "{{0,2},{1,3}}", 2, 1e6 / 10e9),
        (HALF, PAIRS, 2, 1e6 / 50e9),
        (PERMUTE, "{{0,1},{1,2}}", 2, 2e6 / 10e9),
        # Half of the parts go to the other host.
        (EXCHANGE, ALL, 2, 1e6 / 10e9),
    ],
)
def test_collectives_inside_a_host_and_between_hosts(call, groups, of_a_host, expected):
    attribute = "source_target_pairs" if call is PERMUTE else "replica_groups"
    t = step_time(program(f"%c = {call}, {attribute}={groups}"), RATES, gpus_per_node=of_a_host)
    hops = {} if of_a_host == 4 else {"abs": 60e-6}
    assert t.step_s == pytest.approx(expected, **hops)


def test_hops_of_a_ring_across_hosts():
    """1 byte to 64 hosts of 8: 448 hops of NVLink, 63 of the network."""
    line = "bf16[512]{0} all-gather(%y), replica_groups={}, dimensions={0}"
    t = step_time(program("%y = bf16[1]{0} parameter(3)", f"%c = {line}", devices=512), RATES)
    assert t.step_s == pytest.approx(448 * 1.9e-6 + 63 * 4.0e-6, rel=1e-3)


def test_a_mesh_tells_which_devices_share_a_host():
    """Positions 0 and 1 of this mesh are the devices 0 and 2, on different hosts of two."""
    mesh = Mesh(np.array(jax.devices())[[0, 2, 1, 3]], ("zero",))
    text = program(f"%c = {HALF}, replica_groups={PAIRS}")
    assert step_time(text, RATES, mesh=mesh, gpus_per_node=2).step_s == pytest.approx(1e6 / 10e9, abs=60e-6)
