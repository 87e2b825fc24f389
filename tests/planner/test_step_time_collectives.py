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


def test_a_wrapped_collective_is_asynchronous():
    """The start, the update and the done call a computation with a reduce-scatter."""
    wrapped = f"""%wrapped (q: bf16[1000,1000]) -> bf16[500,1000] {{
  %q = {X} parameter(0)
  ROOT %rs = bf16[500,1000] reduce-scatter(%q), replica_groups={{{{0,1}},{{2,3}}}}, dimensions={{0}}, to_apply=%add
}}
"""
    pair = "((bf16[1000,1000]), bf16[500,1000])"
    start = f"%s = {pair} async-start(%x), calls=%wrapped", f"%u = {pair} async-update(%s), calls=%wrapped"
    lines = *start, f"%p = {MATMUL}", "%d = bf16[500,1000] async-done(%u), calls=%wrapped", f"%r = {MATMUL}"
    t = step_time(program(*lines, others=wrapped), RATES)
    assert t.step_s == pytest.approx(2 * PRODUCT_S)  # 1 MB at 50 GB/s takes as long as one product
    assert t.exposed_s == pytest.approx(0, abs=1e-12)


def test_the_done_of_an_update_waits_for_the_collective():
    """Two products as long as a collective: one before the done hides a half of it, one after it nothing."""
    wrapped = f"""%wrapped (q: bf16[2000,1000]) -> bf16[1000,1000] {{
  %q = bf16[2000,1000] parameter(0)
  ROOT %rs = {X} reduce-scatter(%q), replica_groups={{{{0,1}},{{2,3}}}}, dimensions={{0}}, to_apply=%add
}}
"""
    pair = "((bf16[2000,1000]), bf16[1000,1000])"
    given = "%g = bf16[2000,1000] parameter(3)"
    start = f"%s = {pair} async-start(%g), calls=%wrapped", f"%u = {pair} async-update(%s), calls=%wrapped"
    lines = given, *start, f"%p = {MATMUL}", f"%d = {X} async-done(%u), calls=%wrapped", f"%r = {MATMUL}"
    t = step_time(program(*lines, others=wrapped), RATES)
    assert t.step_s == pytest.approx(3 * PRODUCT_S)  # 2 MB at 50 GB/s take as long as two products
    assert t.exposed_s == pytest.approx(PRODUCT_S)


def test_collectives_wait_for_each_other():
    """Both are on one stream, so the second ends after the sum of their times."""
    second = gather(name="t"), "%e = bf16[4000,1000]{1,0} all-gather-done(%t)"
    assert seconds(gather(), *second, DONE) == pytest.approx(2 * GATHER_S)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"bf16[500,1000] reduce-scatter({X} %x), replica_groups={{{{0,1}},{{2,3}}}}, to_apply=%add", 1e6 / 50e9),
        (f"bf16[250,1000] reduce-scatter({X} %x), replica_groups=[1,4]<=[4], to_apply=%add", 1.5e6 / 100e9),
        (f"{X} all-reduce(%x), replica_groups={{}}, to_apply=%add", 3e6 / 100e9),
        (f"{X} all-to-all(%x), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}", 1.5e6 / 200e9),
        (f"{X} collective-permute(%x), source_target_pairs={{{{0,1}},{{1,0}}}}", 2e6 / 80e9),
        (f"{X} all-reduce(%x), replica_groups={{{{0}},{{1}},{{2}},{{3}}}}, to_apply=%add", 0.0),
    ],
)
def test_collectives_inside_a_host(line, expected):
    assert seconds(f"%c = {line}") == pytest.approx(expected)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # Two GPUs on each of two hosts: two network cards of 10 GB/s carry each ring's bytes.
        (f"bf16[250,1000] reduce-scatter({X} %x), replica_groups={{}}, to_apply=%add", 1.5e6 / 20e9),
        (f"{X} all-reduce(%x), replica_groups={{}}, to_apply=%add", 3e6 / 20e9),
        # One GPU on each of two hosts: one card.
        (f"bf16[500,1000] reduce-scatter({X} %x), replica_groups={{{{0,2}},{{1,3}}}}, to_apply=%add", 1e6 / 10e9),
        # On one host: NVLink.
        (f"bf16[500,1000] reduce-scatter({X} %x), replica_groups={{{{0,1}},{{2,3}}}}, to_apply=%add", 1e6 / 50e9),
        (f"{X} collective-permute(%x), source_target_pairs={{{{0,1}},{{1,2}}}}", 2e6 / 10e9),
        # Half of the parts go to the other host.
        (f"{X} all-to-all(%x), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}", 1e6 / 10e9),
    ],
)
def test_collectives_between_hosts(line, expected):
    t = step_time(program(f"%c = {line}"), RATES, gpus_per_node=2)
    assert t.step_s == pytest.approx(expected, abs=60e-6)  # and hops


def test_hops_of_a_ring_across_hosts():
    """1 byte to 64 hosts of 8: 448 hops of NVLink, 63 of the network."""
    line = "bf16[512]{0} all-gather(%y), replica_groups={}, dimensions={0}"
    t = step_time(program("%y = bf16[1]{0} parameter(3)", f"%c = {line}", devices=512), RATES)
    assert t.step_s == pytest.approx(448 * 1.9e-6 + 63 * 4.0e-6, rel=1e-3)


def test_a_mesh_tells_which_devices_share_a_host():
    """Positions 0 and 1 of this mesh are the devices 0 and 2, on different hosts of two."""
    line = f"%c = bf16[500,1000] reduce-scatter({X} %x), replica_groups={{{{0,1}},{{2,3}}}}, to_apply=%add"
    mesh = Mesh(np.array(jax.devices())[[0, 2, 1, 3]], ("zero",))
    assert step_time(program(line), RATES, gpus_per_node=2).step_s == pytest.approx(1e6 / 50e9)
    assert step_time(program(line), RATES, mesh=mesh, gpus_per_node=2).step_s == pytest.approx(1e6 / 10e9, abs=60e-6)
