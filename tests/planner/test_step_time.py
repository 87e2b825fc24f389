"""The time of programs that are written by hand, against arithmetic, and properties of compiled ones."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero.errors import ConfigError
from jzero.planner import Rates, UnreadableProgram, gpu_devices, step_time

# Round numbers, so that the arithmetic below can be done by hand.
RATES = Rates(
    kind="test", origin="measured", source="made up",
    products=(("f16", 100e12), ("f8", 200e12), ("tf32", 50e12), ("f32", 10e12)),
    attention_forward=((64, 40e12), (128, 80e12)), attention_backward=((64, 20e12), (128, 40e12)),
    elementwise=1e12, reductions=0.5e12, transposes=0.25e12, many=0.1e12,
    gather=((2, 100e9), (4, 200e9)), scatter=((2, 50e9), (4, 100e9)), permute=80e9, hosts=10e9,
    host_read=((1, 10e9), (4, 8e9)), host_update=((1, 7e9), (4, 5e9)),
    product_start=0.0, wide_result=0.0, row_forward=0.0, row_backward=0.0, attention_start=0.0, shortest=0.0, gap=0.0,
    latency=0.0, slow=0.0, late=0.0, step=0.0, trip=0.0,
)  # fmt: skip

MATMUL = (
    '(bf16[1000,1000]{1,0}, s8[4]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul", backend_config='
    '{"gemm_backend_config":{"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
)
PRODUCT_S = 2 * 1000**3 / 100e12


def program(*lines, others="", devices=4):
    """Return a scheduled module whose entry has x: bf16[1000, 1000], w: f32[1000, 1000] and v: bf16[1000000]."""
    body = "\n  ".join(lines)
    return f"""HloModule m, is_scheduled=true, num_partitions={devices}

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

{others}
ENTRY %main (x: bf16[1000,1000], w: f32[1000,1000], v: bf16[1000000]) -> bf16[1000,1000] {{
  %x = bf16[1000,1000]{{1,0}} parameter(0)
  %w = f32[1000,1000]{{1,0}} parameter(1)
  %v = bf16[1000000]{{0}} parameter(2)
  {body}
}}
"""


def seconds(*lines, rates=RATES, **kwargs):
    return step_time(program(*lines, **kwargs), rates).step_s


def test_product():
    t = step_time(program(f"%a = {MATMUL}"), RATES)
    assert (t.step_s, t.flops, t.bytes) == (pytest.approx(2e9 / 100e12), 2e9, 3 * 2e6)
    assert t.by == {"products": t.step_s}
    assert t.timeline == [("compute", "products", 0.0, t.step_s)]


@pytest.mark.parametrize(
    ("dtype", "attributes", "rate"),
    [
        ("f16", "", 100e12),
        ("f8e4m3fn", "", 200e12),
        ("f32", "", 50e12),  # XLA's default for float32 is TF32
        ("f32", 'operand_precision":["HIGHEST","HIGHEST"]', 10e12),
        ("f32", '"algorithm":"ALG_DOT_F32_F32_F32"', 10e12),
        ("f32", '"algorithm":"ALG_DOT_BF16_BF16_F32"', 100e12),
        ("f32", '"algorithm":"ALG_DOT_BF16_BF16_F32_X3"', 100e12 / 3),
        ("f32", '"algorithm":"ALG_DOT_TF32_TF32_F32_X3"', 50e12 / 3),
    ],
)
def test_products_by_precision(dtype, attributes, rate):
    call = MATMUL.replace("(%x, %x)", "(%q, %q)").replace('{"beta"', f'{{{attributes}, "beta"')
    assert seconds(f"%q = {dtype}[1000,1000]{{1,0}} parameter(3)", f"%a = {call}") == pytest.approx(2e9 / rate)


def test_a_small_product_takes_as_long_as_its_weights():
    """One row times a 1000 x 1000 matrix: memory bounds it."""
    row = MATMUL.replace("(%x, %x)", "(%r, %x)").replace("(bf16[1000,1000]", "(bf16[1,1000]")
    traffic = 2e6 + 2 * 2e3
    assert seconds("%r = bf16[1,1000]{1,0} parameter(3)", f"%a = {row}") == pytest.approx(traffic / 1e12)


def test_a_product_that_adds_reads_its_result():
    rates = replace(RATES, wide_result=0.5)
    wide = MATMUL.replace("(bf16[1000,1000]", "(f32[1000,1000]")
    assert seconds(f"%a = {wide}", rates=rates) == pytest.approx(PRODUCT_S + 0.5 * 4e6 / 1e12)
    adding = wide.replace('"beta":0', '"beta":1')
    assert seconds(f"%a = {adding}", rates=rates) == pytest.approx(PRODUCT_S + 0.5 * 2 * 4e6 / 1e12)


TRITON = """
%inner (a: bf16[1000,1000], b: bf16[1000,1000]) -> f32[1000,1000] {
  %a = bf16[1000,1000]{1,0} parameter(0)
  %b = bf16[1000,1000]{1,0} parameter(1)
  ROOT %d = f32[1000,1000]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
%gemm (a: bf16[1000,1000], b: bf16[1000,1000]) -> bf16[1000,1000] {
  %a = bf16[1000,1000]{1,0} parameter(0)
  %b = bf16[1000,1000]{1,0} parameter(1)
  %f = f32[1000,1000]{1,0} fusion(%a, %b), kind=kCustom, calls=%inner
  ROOT %c = bf16[1000,1000]{1,0} convert(%f)
}
"""


def test_a_product_inside_a_fusion():
    line = "%a = bf16[1000,1000]{1,0} fusion(%x, %x), kind=kCustom, calls=%gemm"
    t = step_time(program(line, others=TRITON), replace(RATES, wide_result=0.5))  # it writes bf16
    assert (t.by, t.flops) == ({"products": pytest.approx(PRODUCT_S)}, 2e9)


def attention(shape, mask, target="__cudnn$fmhaSoftmax", width=64):
    B, N, T, S = shape
    layout = f"bf16[{B},{T},{N},{width}]{{3,2,1,0}}"
    return (
        f"%a = (bf16[{B},{N},{T},{width}]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%v, %v, %v), "
        f'custom_call_target="{target}", '
        f"operand_layout_constraints={{{layout}, {layout}, {layout}}}, "
        f'backend_config={{"cudnn_fmha_backend_config": {{"intermediate_tensor_shape": {{"element_type": "BF16", '
        f'"dimensions": ["{B}", "{N}", "{T}", "{S}"]}}, "mask_type": "{mask}", "sliding_window_length": 0}}}}'
    )


def test_attention():
    whole = 4 * 2 * 8 * 512 * 512 * 64  # two products of 2 * B * N * T * S * H
    causal = 4 * 2 * 8 * (512 * 513 / 2) * 64  # each query sees the keys up to itself
    assert seconds(attention((2, 8, 512, 512), "NO_MASK")) == pytest.approx(whole / 40e12)
    assert seconds(attention((2, 8, 512, 512), "CAUSAL")) == pytest.approx(causal / 40e12)
    back = attention((2, 8, 512, 512), "CAUSAL", "__cudnn$fmhaSoftmaxBackward")
    assert seconds(back) == pytest.approx(2.5 * causal / 20e12)
    wide = attention((2, 8, 512, 512), "NO_MASK", width=96)  # between 64 and 128
    assert seconds(wide) == pytest.approx(1.5 * whole / 60e12)
    assert step_time(program(attention((2, 8, 512, 512), "NO_MASK")), RATES).by.keys() == {"attention"}


def test_reading_and_writing_the_rows_of_attention():
    """Each query costs as much as some keys more, whatever the mask; the backward pass has its own number."""
    rates = replace(RATES, row_forward=100.0, row_backward=1000.0)
    queries = 4 * 2 * 8 * 512 * 64  # FLOPs of one key for all
    for mask, keys in (("NO_MASK", 512), ("CAUSAL", 513 / 2)):
        ahead = attention((2, 8, 512, 512), mask)
        assert seconds(ahead, rates=rates) == pytest.approx(queries * (keys + 100) / 40e12)
        back = attention((2, 8, 512, 512), mask, "__cudnn$fmhaSoftmaxBackward")
        assert seconds(back, rates=rates) == pytest.approx(2.5 * queries * (keys + 1000) / 20e12)


def test_convolution_and_its_gradients():
    """All three multiply 2 * (outputs) * (kernel's height, width and inputs)."""
    flops = 2 * (8 * 14 * 14 * 32) * (3 * 3 * 16)
    x, w, y = "bf16[8,28,28,16]{3,2,1,0}", "bf16[32,3,3,16]{3,2,1,0}", "bf16[8,14,14,32]{3,2,1,0}"
    end = 'window={size=3x3 stride=2x2}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv'
    given = [f"%i = {x} parameter(3)", f"%k = {w} parameter(4)", f"%o = {y} parameter(5)"]
    for call in (
        f'%c = ({y}, u8[0]{{0}}) custom-call(%i, %k), {end}Forward"',
        f'%c = ({x}, u8[0]{{0}}) custom-call(%o, %k), {end}BackwardInput"',
        f'%c = ({w}, u8[0]{{0}}) custom-call(%i, %o), {end}BackwardFilter"',
    ):
        t = step_time(program(*given, call), replace(RATES, elementwise=1e15))
        assert (t.flops, t.step_s) == (flops, pytest.approx(flops / 100e12))


FUSIONS = """
%scale (p: f32[1000,1000]) -> f32[1000,1000] {
  %p = f32[1000,1000]{1,0} parameter(0)
  ROOT %m = f32[1000,1000]{1,0} multiply(%p, %p)
}
%hosted (p: f32[1000,1000]) -> f32[1000,1000] {
  %p = f32[1000,1000]{1,0:S(5)} parameter(0)
  ROOT %m = f32[1000,1000]{1,0:S(5)} multiply(%p, %p)
}
%sum (p: f32[1000,1000]) -> f32[1000] {
  %p = f32[1000,1000]{1,0} parameter(0)
  %z = f32[] constant(0)
  ROOT %r = f32[1000]{0} reduce(%p, %z), dimensions={1}, to_apply=%add
}
%row (p: f32[1000,1000], i: s32[]) -> f32[1,1000] {
  %p = f32[1000,1000]{1,0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %s = f32[1,1000]{1,0} dynamic-slice(%p, %i, %i), dynamic_slice_sizes={1,1000}
}
%put (p: f32[1000,1000], u: f32[1,1000], i: s32[]) -> f32[1000,1000] {
  %p = f32[1000,1000]{1,0} parameter(0)
  %u = f32[1,1000]{1,0} parameter(1)
  %i = s32[] parameter(2)
  ROOT %s = f32[1000,1000]{1,0} dynamic-update-slice(%p, %u, %i, %i)
}
"""
INDEX = "%i = s32[] constant(3)"


@pytest.mark.parametrize(
    ("lines", "category", "expected"),
    [
        (["%a = f32[1000,1000]{1,0} fusion(%w), kind=kLoop, calls=%scale"], "elementwise", 8e6 / 1e12),
        (["%a = f32[1000]{0} fusion(%w), kind=kInput, calls=%sum"], "reductions", (4e6 + 4e3) / 0.5e12),
        # Of an array that is sliced or updated only the part moves.
        ([INDEX, "%a = f32[1,1000]{1,0} fusion(%w, %i), kind=kLoop, calls=%row"], "elementwise", 8e3 / 1e12),
        (
            [INDEX, "%u = f32[1,1000]{1,0} parameter(3)", "%a = f32[1000,1000]{1,0} fusion(%w, %u, %i), calls=%put"],
            "elementwise",
            8e3 / 1e12,
        ),
        (["%a = f32[1000,1000]{0,1} copy(%w)"], "copies", 8e6 / 1e12),
        (["%a = f32[1000,1000]{1,0} transpose(%w), dimensions={1,0}"], "transposes", 8e6 / 0.25e12),
        (["%a = f32[1000,1000]{1,0:S(5)} copy(%w)"], "host memory", 4e6 / 8e9),
        # A kernel that reads and writes host memory.
        (
            ["%h = f32[1000,1000]{1,0:S(5)} parameter(3)", "%a = f32[1000,1000]{1,0:S(5)} fusion(%h), calls=%hosted"],
            "host memory",
            4e6 / 5e9,
        ),
    ],
)
def test_what_memory_bounds(lines, category, expected):
    t = step_time(program(*lines, others=FUSIONS), replace(RATES, shortest=1e-12))
    assert t.by == {category: pytest.approx(expected, rel=1e-2 if "s32[]" in lines[0] else 1e-9)}


def test_asynchronous_copies_run_beside_compute():
    """4 MB from the host take 500 us, products 20 us each; what is left at the end is waited for."""
    start = "%s = (f32[1000,1000]{1,0}, f32[1000,1000]{1,0:S(5)}, u32[]) copy-start(%h)"
    given = ["%h = f32[1000,1000]{1,0:S(5)} parameter(3)", start]
    done = "%d = f32[1000,1000]{1,0} copy-done(%s)"
    t = step_time(program(*given, f"%a = {MATMUL}", done), RATES)
    assert (t.step_s, t.compute_s) == (pytest.approx(4e6 / 8e9), pytest.approx(PRODUCT_S))
    assert t.exposed == {"host memory": pytest.approx(4e6 / 8e9 - PRODUCT_S)}
    alone = step_time(program(*given, f"%a = {MATMUL}", done), RATES, gpus_per_node=1)  # one GPU of each host
    assert alone.step_s == pytest.approx(4e6 / 10e9)
    hidden = [f"%a{i} = {MATMUL}" for i in range(30)]
    assert seconds(*given, *hidden, done) == pytest.approx(30 * PRODUCT_S)


def test_state_in_host_memory_that_the_program_does_not_show():
    text = program(f"%a = {MATMUL}")
    t = step_time(text, RATES, host_bytes=10**9, host_reads=4 * 10**8)
    assert t.by["host memory"] == pytest.approx(1e9 / 5e9 + 0.4e9 / 8e9)
    shown = program("%h = f32[1000,1000]{1,0:S(5)} copy(%w)")
    assert step_time(shown, RATES, host_bytes=10**9).step_s == step_time(shown, RATES).step_s


# ---------------------------------------------------------------- collectives

X = "bf16[1000,1000]{1,0}"


def gather(groups="{{0,1,2,3}}", name="s"):
    """Start to gather 1000 x 1000 bf16 from each of a group."""
    shapes = "(bf16[1000,1000]{1,0}, bf16[4000,1000]{1,0})"
    return f"%{name} = {shapes} all-gather-start(%x), replica_groups={groups}, dimensions={{0}}"


DONE = "%d = bf16[4000,1000]{1,0} all-gather-done(%s)"
GATHER_S = 3 * 2e6 / 200e9  # each GPU sends three parts of 2 MB


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


# ---------------------------------------------------------------- control flow

BODY = f"""
%body (x: bf16[1000,1000]) -> bf16[1000,1000] {{
  %x = {X} parameter(0)
  {gather()}
  %p = {MATMUL}
  {DONE}
  ROOT %o = {X} bitcast(%x)
}}
%condition (x: bf16[1000,1000]) -> pred[] {{
  %x = {X} parameter(0)
  ROOT %t = pred[] constant(true)
}}
%empty (x: bf16[1000,1000]) -> bf16[1000,1000] {{
  ROOT %x = {X} parameter(0)
}}
"""
LOOP = f"%l = {X} while(%x), condition=%condition, body=%body, backend_config="


@pytest.mark.parametrize("trips", [1, 2, 7, 3000])
def test_loop(trips):
    count = f'{{"known_trip_count":{{"n":"{trips}"}}}}'
    t = step_time(program(LOOP + count, others=BODY), replace(RATES, trip=1e-6))
    assert t.step_s == pytest.approx(trips * (max(PRODUCT_S, GATHER_S) + 1e-6))
    assert t.exposed_s == pytest.approx(trips * (GATHER_S - PRODUCT_S))
    assert t.flops == trips * 2e9
    assert len(t.timeline) <= 800
    assert max(end for *_, end in t.timeline) == pytest.approx(t.step_s, rel=1e-2)


def test_the_slowest_branch_counts():
    line = f"%l = {X} conditional(%i, %x, %x), branch_computations={{%body, %empty}}"
    t = step_time(program(INDEX, line, others=BODY), RATES)
    assert (t.step_s, t.flops) == (pytest.approx(max(PRODUCT_S, GATHER_S)), 2e9)
    assert step_time(program(INDEX, line.replace("%body", "%empty"), others=BODY), RATES).step_s == 0


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        ([LOOP + "{}"], "%l .while.*trips"),
        ([f'%c = {X} custom-call(%x), custom_call_target="triton_kernel_call"'], "%c .custom-call triton_kernel_call"),
        ([f"%c = {X} all-reduce(%x), replica_groups=<new>, to_apply=%add"], "%c .all-reduce.*unknown form"),
        ([f"%c = {X} strange-start(%x)"], "%c .strange-start"),
        ([f"%c = {X} cholesky(%x), lower=true"], "%c .cholesky"),
        (["%q = f64[1000,1000]{1,0} parameter(3)", "%a = " + MATMUL.replace("(%x, %x)", "(%q, %q)")], "product of f64"),
        ([f"%a = {MATMUL.replace('lhs_contracting', 'lhs_other')}"], "%a .*lhs_contracting_dimensions"),
        ([attention((1, 1, 64, 64), "CAUSAL").replace("mask_type", "other")], "%a .*mask_type"),
    ],
)
def test_what_it_cannot_read_is_refused(lines, named):
    with pytest.raises(UnreadableProgram, match=named):
        step_time(program(*lines, others=BODY), RATES)


def test_mistakes():
    text = program(f"%a = {MATMUL}")
    with pytest.raises(ConfigError, match="gpus_per_node"):
        step_time(text, RATES, gpus_per_node=0)
    with pytest.raises(ConfigError, match="mesh has 8 devices"):
        step_time(text, RATES, mesh=Mesh(np.array(jax.devices()), ("zero",)))
    with pytest.raises(ValueError, match="no schedule"):
        step_time(text.replace("is_scheduled=true, ", ""), RATES)


# ---------------------------------------------------------------- compiled programs


@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.usefixtures("no_compilation_cache")
def test_compiled_layers():
    """A scanned stack of ZeRO-3 layers: the products and bytes of the source, and more layers take longer."""
    mesh = Mesh(np.array(gpu_devices("h100", 4)), ("zero",))
    width, rows = 2048, 4096

    def compiled(layers):
        def f(x, w):
            def body(x, w):
                return jnp.tanh(x @ lax.all_gather(w, "zero", tiled=True)), None

            return lax.scan(body, x, w)[0]

        mapped = jax.shard_map(
            f, mesh=mesh, in_specs=(P("zero"), P(None, "zero")), out_specs=P("zero"), check_vma=False
        )
        shapes = (4 * rows, width), (layers, width, width)
        return jax.jit(mapped).lower(*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)).compile()

    few, many = (step_time(compiled(layers), Rates.of("h100"), mesh=mesh) for layers in (2, 8))
    for t, layers in ((few, 2), (many, 8)):
        assert t.flops == layers * 2 * rows * width * width
        assert t.wire == layers * width * width * 2 * 3 / 4
        assert t.step_s == pytest.approx(t.compute_s + t.exposed_s)
        assert 0 <= t.exposed_s < t.step_s
    assert many.step_s > few.step_s
    assert re.match(r"StepTime\([\d.]+ ms \+- 4%: 0.27 TFLOP", repr(many))
