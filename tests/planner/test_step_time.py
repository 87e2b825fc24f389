"""The time of programs that are written by hand, against arithmetic, and properties of compiled ones."""

import re
from dataclasses import replace

import jax
import numpy as np
import pytest
from helpers.hlo_programs import DONE, GATHER_S, MATMUL, PRODUCT_S, RATES, X, attention, computation, gather, program
from helpers.refusals import refuses
from jax.sharding import Mesh

from jzero.planner import UnreadableProgram, step_time

QUANTIZED = "%q = f8e4m3fn[1000,1000]{1,0} parameter(3)"
OF_QUANTIZED = MATMUL.replace("(%x, %x)", "(%q, %q)")


def seconds(*lines, rates=RATES):
    return step_time(program(*lines), rates).step_s


def test_product():
    t = step_time(program(f"%a = {MATMUL}"), RATES)
    assert (t.step_s, t.flops, t.bytes) == (pytest.approx(PRODUCT_S), 2e9, 3 * 2e6)
    assert t.by == {"products": t.step_s}
    assert re.match(r"StepTime\([\d.]+ ms \+- 4%: 0.00 TFLOP", repr(t))
    ((row, times),) = t.timeline.items()
    assert (row, list(times)) == (("compute", "products"), pytest.approx([t.step_s / 100] * 100))
    in_f8 = step_time(program(QUANTIZED, f"%a = {OF_QUANTIZED}"), RATES)
    assert (t.uncertainty, in_f8.uncertainty) == (0.04, 0.10)


@pytest.mark.parametrize(
    ("dtype", "attributes", "rate"),
    [
        ("f16", "", 100e12),
        ("f8e4m3fn", "", 200e12),
        ("f8e4m3fn", 'operand_precision":["HIGHEST","HIGHEST"]', 200e12 / 1.08),
        ("f32", "", 50e12),  # XLA's default for float32 is TF32
        ("f32", '"algorithm":"ALG_DOT_F32_F32_F32"', 10e12),
        ("f32", '"algorithm":"ALG_DOT_BF16_BF16_F32"', 100e12),
        ("f32", '"algorithm":"ALG_DOT_BF16_BF16_F32_X3"', 100e12 / 3),
    ],
)
def test_products_by_precision(dtype, attributes, rate):
    call = OF_QUANTIZED.replace('{"beta"', f'{{{attributes}, "beta"')
    assert seconds(f"%q = {dtype}[1000,1000]{{1,0}} parameter(3)", f"%a = {call}") == pytest.approx(2e9 / rate)


def test_a_product_that_adds_reads_its_result():
    wide = MATMUL.replace("(bf16[1000,1000]", "(f32[1000,1000]")
    for call, times in ((wide, 1), (wide.replace('"beta":0', '"beta":1'), 2)):
        found = seconds(f"%a = {call}", rates=replace(RATES, wide_result=0.5))
        assert found == pytest.approx(PRODUCT_S + 0.5 * times * 4e6 / 1e12)


@pytest.mark.parametrize(
    ("scopes", "parts", "time"),
    [
        ("", 1, PRODUCT_S),
        ("transpose(jvp(one_row_of_4))/", 4, PRODUCT_S / 4),
        ("one_row_of_16/", 16, (2 * 2e6 / 16 + 2e6) / 1e12),  # memory bounds it
    ],
)
def test_a_grouped_product_leaves_out_padding(scopes, parts, time):
    kernel = f'{X} custom-call(%v, %x, %x), custom_call_target="mosaic_gpu_v2"'
    t = step_time(program(f'%a = {kernel}, metadata={{op_name="jit(f)/{scopes}ragged_dot/grouped_dot/k"}}'), RATES)
    assert (t.step_s, t.flops) == (pytest.approx(time), 2e9 / parts)


@pytest.mark.parametrize(("slots", "moved"), [(1, 4 * 2e6), (5, 4 * 2e6)])
def test_a_kernel_in_a_slot_moves_one_of_them(slots, moved):
    """It reads two arrays and one slot, and writes a result and a slot."""
    buffers = f"bf16[{slots},1000,1,1000]{{3,2,1,0}}"
    call = f'({X}, {buffers}) custom-call(%x, %r, %u), custom_call_target="__gpu$xla.gpu.triton"'
    lines = [f"%r = {buffers} parameter(3)", f"%u = {buffers} parameter(4)"]
    lines.append(f'%a = {call}, metadata={{op_name="jit(f)/map_parts_in_slot/pallas_call"}}')
    assert step_time(program(*lines), RATES).bytes == moved


W, ROW = "f32[1000,1000]{1,0}", "f32[1,1000]{1,0}"


def test_a_product_inside_a_fusion():
    given = f"%a = {X} parameter(0)", f"%b = {X} parameter(1)"
    dot = f"ROOT %d = {W} dot(%a, %b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}"
    cast = f"%f = {W} fusion(%a, %b), kind=kCustom, calls=%inner", f"ROOT %c = {X} convert(%f)"
    others = computation("inner", *given, dot) + computation("gemm", *given, *cast)
    line = f"%a = {X} fusion(%x, %x), kind=kCustom, calls=%gemm"
    t = step_time(program(line, others=others), replace(RATES, wide_result=0.5))  # it writes bf16
    assert (t.by, t.flops) == ({"products": pytest.approx(PRODUCT_S)}, 2e9)


def test_attention():
    """Each query costs as much as some keys more, whatever the mask; the backward pass has its own number."""
    rates = replace(RATES, row_forward=100.0, row_backward=1000.0)
    shape, queries = (2, 8, 512, 512), 4 * 2 * 8 * 512 * 64  # FLOPs of one key for all: 2 products of 2 * B * N * T * H
    for mask, keys in (("NO_MASK", 512), ("CAUSAL", 513 / 2)):  # each query sees the keys up to itself
        ahead, back = attention(shape, mask), attention(shape, mask, "__cudnn$fmhaSoftmaxBackward")
        assert seconds(ahead) == pytest.approx(queries * keys / 40e12)
        assert seconds(ahead, rates=rates) == pytest.approx(queries * (keys + 100) / 40e12)
        assert seconds(back, rates=rates) == pytest.approx(2.5 * queries * (keys + 1000) / 20e12)
    wide = attention(shape, "NO_MASK", width=96)  # between 64 and 128
    assert seconds(wide) == pytest.approx(1.5 * queries * 512 / 60e12)
    assert step_time(program(wide), RATES).by.keys() == {"attention"}


def test_convolution_and_its_gradients():
    """All three multiply 2 * (outputs) * (kernel's height, width and inputs)."""
    flops = 2 * (8 * 14 * 14 * 32) * (3 * 3 * 16)
    x, w, y = "bf16[8,28,28,16]{3,2,1,0}", "bf16[32,3,3,16]{3,2,1,0}", "bf16[8,14,14,32]{3,2,1,0}"
    end = 'window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv'
    given = [f"%i = {x} parameter(3)", f"%k = {w} parameter(4)", f"%o = {y} parameter(5)"]
    for result, operands, kind in (
        (y, "%i, %k", "Forward"),
        (x, "%o, %k", "BackwardInput"),
        (w, "%i, %o", "BackwardFilter"),
    ):
        call = f'%c = ({result}, u8[0]{{0}}) custom-call({operands}), {end}{kind}"'
        t = step_time(program(*given, call), replace(RATES, elementwise=1e15))
        assert (t.flops, t.step_s) == (flops, pytest.approx(flops / 100e12))


P0, ZERO = f"%p = {W} parameter(0)", "%z = f32[] constant(0)"
PUT = [P0, f"%u = {ROW} parameter(1)", "%i = s32[] parameter(2)"]
HOST = "f32[1000,1000]{1,0:S(5)}"


@pytest.mark.parametrize(
    ("inside", "line", "category", "expected"),
    [
        ([P0, f"ROOT %m = {W} multiply(%p, %p)"], f"{W} fusion(%w), kind=kLoop", "elementwise", 8e6 / 1e12),
        ([P0, ZERO, "ROOT %r = f32[1000]{0} reduce(%p, %z), dimensions={1}, to_apply=%add"],
            "f32[1000]{0} fusion(%w), kind=kInput", "reductions", (4e6 + 4e3) / 0.5e12),
        # Of an array that is sliced or updated only the part moves, and 4 bytes of the index.
        ([P0, "%i = s32[] parameter(1)", f"ROOT %s = {ROW} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={{1,1000}}"],
            f"{ROW} fusion(%w, %i), kind=kLoop", "elementwise", (8e3 + 4) / 1e12),
        ([*PUT, f"ROOT %s = {W} dynamic-update-slice(%p, %u, %i, %i)"],
            f"{W} fusion(%w, %u, %i), kind=kLoop", "elementwise", (8e3 + 4) / 1e12),
        # What is computed is no buffer that can be updated in place.
        ([*PUT, f"%m = {W} multiply(%p, %p)", f"ROOT %s = {W} dynamic-update-slice(%m, %u, %i, %i)"],
            f"{W} fusion(%w, %u, %i), kind=kLoop", "elementwise", (8e6 + 4e3 + 4) / 1e12),
        # Slices of what is computed of an array element by element count as slices of the array.
        (
            [
                P0, f"%m = {W} abs(%p)", f"%n = {W} multiply(%m, %p)",
                "%b = s32[1000,1000]{1,0} bitcast-convert(%n)", "%z = s32[] constant(0)",
                "%s = s32[10,1000]{1,0} slice(%b), slice={[0:10], [0:1000]}",
                "%t = s32[20,1000]{1,0} slice(%b), slice={[10:30], [0:1000]}",
                "%q = s32[10]{0} reduce(%s, %z), dimensions={1}, to_apply=%add",
                "%r = s32[20]{0} reduce(%t, %z), dimensions={1}, to_apply=%add",
                "ROOT %y = (s32[10]{0}, s32[20]{0}) tuple(%q, %r)",
            ],
            "(s32[10]{0}, s32[20]{0}) fusion(%w), kind=kInput", "reductions", (30 * 4e3 + 30 * 4) / 0.5e12,
        ),
        (
            [
                P0, ZERO, f"%m = {W} abs(%p)", "%s = f32[10,1000]{1,0} slice(%m), slice={[0:10], [0:1000]}",
                "%r = f32[1000]{0} reduce(%m, %z), dimensions={1}, to_apply=%add",
                "ROOT %y = (f32[1000]{0}, f32[10,1000]{1,0}) tuple(%r, %s)",
            ],
            "(f32[1000]{0}, f32[10,1000]{1,0}) fusion(%w), kind=kInput", "reductions", (4e6 + 4e3 + 4e4) / 0.5e12,
        ),
        ([], "f32[1000,1000]{0,1} copy(%w)", "copies", 8e6 / 1e12),
        ([], f"{W} transpose(%w), dimensions={{1,0}}", "transposes", 8e6 / 0.25e12),
        ([], f"{HOST} copy(%w)", "host memory", 4e6 / 8e9),
        # A kernel that reads and writes host memory.
        ([f"%p = {HOST} parameter(0)", f"ROOT %m = {HOST} multiply(%p, %p)"],
            f"{HOST} fusion(%h), kind=kLoop", "host memory", 4e6 / 5e9),
    ],
)  # fmt: skip
def test_what_memory_bounds(inside, line, category, expected):
    given = "%i = s32[] constant(3)", f"%u = {ROW} parameter(3)", f"%h = {HOST} parameter(4)"
    call = f"%a = {line}, calls=%inside" if inside else f"%a = {line}"
    others = computation("inside", *inside) if inside else ""
    t = step_time(program(*given, call, others=others), replace(RATES, shortest=1e-12))
    assert t.by == {category: pytest.approx(expected, rel=1e-9)}


def test_asynchronous_copies_run_beside_compute():
    """4 MB from the host take 500 us, products 20 us each; what is left at the end is waited for."""
    given = [f"%h = {HOST} parameter(3)", f"%s = ({W}, {HOST}, u32[]) copy-start(%h)"]
    done = f"%d = {W} copy-done(%s)"
    text = program(*given, f"%a = {MATMUL}", done)
    t = step_time(text, RATES)
    assert (t.step_s, t.compute_s) == (pytest.approx(4e6 / 8e9), pytest.approx(PRODUCT_S))
    assert t.exposed == {"host memory": pytest.approx(4e6 / 8e9 - PRODUCT_S)}
    assert step_time(text, RATES, gpus_per_node=1).step_s == pytest.approx(4e6 / 10e9)  # one GPU of each host
    hidden = [f"%a{i} = {MATMUL}" for i in range(30)]
    assert seconds(*given, *hidden, done) == pytest.approx(30 * PRODUCT_S)


def test_state_in_host_memory_that_the_program_does_not_show():
    t = step_time(program(f"%a = {MATMUL}"), RATES, host_bytes=10**9, host_reads=4 * 10**8)
    assert t.by["host memory"] == pytest.approx(1e9 / 5e9 + 0.4e9 / 8e9)
    shown = program(f"%h = {HOST} copy(%w)")
    assert step_time(shown, RATES, host_bytes=10**9).step_s == step_time(shown, RATES).step_s


GIVEN = f"%x = {X} parameter(0)"
BODY = (
    computation("body", GIVEN, gather(), f"%p = {MATMUL}", DONE, f"ROOT %o = {X} bitcast(%x)")
    + computation("condition", GIVEN, "ROOT %t = pred[] constant(true)")
    + computation("empty", f"ROOT {GIVEN}")
)
LOOP = f"%l = {X} while(%x), condition=%condition, body=%body, backend_config="
INDEX = "%i = s32[] constant(3)"


@pytest.mark.parametrize("trips", [1, 3000])
def test_loop(trips):
    count = f'{{"known_trip_count":{{"n":"{trips}"}}}}'
    t = step_time(program(LOOP + count, others=BODY), replace(RATES, trip=1e-6))
    assert t.step_s == pytest.approx(trips * (max(PRODUCT_S, GATHER_S) + 1e-6))
    assert t.exposed_s == pytest.approx(trips * (GATHER_S - PRODUCT_S))
    assert t.flops == trips * 2e9
    assert sum(v for (stream, _), v in t.timeline.items() if stream == "compute") == pytest.approx(t.step_s / 100)


def test_a_loop_that_takes_no_time():
    """Each GPU gathers from itself alone; the gather after the loop has the same label."""
    alone = BODY.replace("{{0,1,2,3}}", "{{0},{1},{2},{3}}").replace(f"%p = {MATMUL}", "")
    loop = LOOP + '{"known_trip_count":{"n":"3"}}'
    t = step_time(program(loop, gather(), DONE, others=alone), RATES)
    found = {stream: v.sum() for (stream, _), v in t.timeline.items()}
    assert found == {"communication": pytest.approx(GATHER_S), "compute": pytest.approx(GATHER_S)}


def test_the_slowest_branch_counts():
    line = f"%l = {X} conditional(%i, %x, %x), branch_computations={{%body, %empty}}"
    t = step_time(program(INDEX, line, others=BODY), RATES)
    assert (t.step_s, t.flops) == (pytest.approx(max(PRODUCT_S, GATHER_S)), 2e9)
    assert step_time(program(INDEX, line.replace("%body", "%empty"), others=BODY), RATES).step_s == 0


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([LOOP + "{}"], "%l .while.*trips"),
        ([INDEX, f"%l = {X} conditional(%i, %x, %x)"], "%l .conditional.*without branches"),
        ([f'%c = {X} custom-call(%x), custom_call_target="triton_kernel_call"'], "%c .custom-call triton_kernel_call"),
        ([f"%c = {X} all-reduce(%x), replica_groups=<new>, to_apply=%add"], "%c .all-reduce.*unknown form"),
        ([f"%c = {X} cholesky(%x), lower=true"], "%c .cholesky"),
        ([QUANTIZED.replace("f8e4m3fn", "f64"), f"%a = {OF_QUANTIZED}"], "matmul of f64"),
        ([f"%a = {MATMUL.replace('lhs_contracting', 'lhs_other')}"], "%a .*lhs_contracting_dimensions"),
        ([attention((1, 1, 64, 64), "CAUSAL").replace("mask_type", "other")], "%a .*mask_type"),
    ],
)
def test_what_it_cannot_read_is_refused(lines, named):
    with pytest.raises(UnreadableProgram, match=named):
        step_time(program(*lines, others=BODY), RATES)


def test_mistakes():
    text = program(f"%a = {MATMUL}")
    refuses(lambda: step_time(text, RATES, gpus_per_node=0), "gpus_per_node")
    refuses(lambda: step_time(text, RATES, mesh=Mesh(np.array(jax.devices()), ("zero",))), "mesh has 8 devices")
    with pytest.raises(ValueError, match="no schedule"):
        step_time(text.replace("is_scheduled=true, ", ""), RATES)


def test_collectives_that_nothing_hides():
    t = step_time(program(gather(), DONE), RATES)
    assert t.exposed == {"all-gather": t.step_s}
    assert (t.step_s, t.exposed_s, t.compute_s, t.wire) == (pytest.approx(GATHER_S), t.step_s, 0, 6e6)
    # Both are on one stream, so the second ends after the sum of their times.
    second = gather(name="t"), "%e = bf16[4000,1000]{1,0} all-gather-done(%t)"
    assert seconds(gather(), *second, DONE) == pytest.approx(2 * GATHER_S)


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
    scatter = f"ROOT %rs = {X} reduce-scatter(%q), replica_groups={PAIRS}, dimensions={{0}}, to_apply=%add"
    wrapped = computation("wrapped", "%q = bf16[2000,1000] parameter(0)", scatter)
    pair = "((bf16[2000,1000]), bf16[1000,1000])"
    start = f"%s = {pair} async-start(%g), calls=%wrapped", f"%u = {pair} async-update(%s), calls=%wrapped"
    first, second = ([f"%{name}{i} = {MATMUL}" for i in range(n)] for name, n in (("p", before), ("r", after)))
    lines = "%g = bf16[2000,1000] parameter(3)", *start, *first, f"%d = {X} async-done(%u), calls=%wrapped", *second
    t = step_time(program(*lines, others=wrapped), RATES)
    assert t.step_s == pytest.approx((before + after) * PRODUCT_S + exposed)  # 2 MB at 50 GB/s
    assert t.exposed_s == pytest.approx(exposed, abs=1e-12)


HALF, QUARTER = "bf16[500,1000] reduce-scatter(%x), to_apply=%add", "bf16[250,1000] reduce-scatter(%x), to_apply=%add"
SUM, EXCHANGE = f"{X} all-reduce(%x), to_apply=%add", f"{X} all-to-all(%x), dimensions={{0}}"
PERMUTE, PAIRS, ALL = f"{X} collective-permute(%x)", "{{0,1},{2,3}}", "{{0,1,2,3}}"


@pytest.mark.parametrize(
    ("call", "groups", "of_a_host", "expected"),
    [
        (QUARTER, "[1,4]<=[4]", 4, 1.5e6 / 100e9),
        (SUM, "{}", 4, 3e6 / 100e9),
        (EXCHANGE, ALL, 4, 1.5e6 / 200e9),
        (PERMUTE, "{{0,1},{1,0}}", 4, 2e6 / 80e9),
        (SUM, "{{0},{1},{2},{3}}", 4, 0.0),
        # Two GPUs on each of two hosts: two network cards of 10 GB/s carry each ring's bytes.
        (QUARTER, "{}", 2, 1.5e6 / 20e9),
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
