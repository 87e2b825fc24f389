"""The time of programs that are written by hand, against arithmetic, and properties of compiled ones."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler
from helpers.hlo_programs import DONE, GATHER_S, MATMUL, PRODUCT_S, RATES, X, attention, gather, program, seconds
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero.errors import ConfigError
from jzero.planner import Rates, UnreadableProgram, gpu_devices, step_time


def test_product():
    t = step_time(program(f"%a = {MATMUL}"), RATES)
    assert (t.step_s, t.flops, t.bytes) == (pytest.approx(2e9 / 100e12), 2e9, 3 * 2e6)
    assert t.by == {"products": t.step_s}
    assert {key: list(seconds) for key, seconds in t.timeline.items()} == {
        ("compute", "products"): pytest.approx([t.step_s / 100] * 100)
    }


@pytest.mark.parametrize(
    ("dtype", "attributes", "rate"),
    [
        ("f16", "", 100e12),
        ("f8e4m3fn", "", 200e12),
        ("f8e4m3fn", 'operand_precision":["HIGHEST","HIGHEST"]', 200e12 / 1.08),
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


def test_products_in_fp8_make_an_estimate_less_certain():
    in_f8 = program("%q = f8e4m3fn[1000,1000]{1,0} parameter(3)", f"%a = {MATMUL.replace('(%x, %x)', '(%q, %q)')}")
    assert [step_time(text, RATES).uncertainty for text in (program(f"%a = {MATMUL}"), in_f8)] == [0.04, 0.10]


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
%largest (p: f32[1000,1000]) -> (s32[10], s32[20]) {
  %p = f32[1000,1000]{1,0} parameter(0)
  %m = f32[1000,1000]{1,0} abs(%p)
  %n = f32[1000,1000]{1,0} multiply(%m, %p)
  %b = s32[1000,1000]{1,0} bitcast-convert(%n)
  %s = s32[10,1000]{1,0} slice(%b), slice={[0:10], [0:1000]}
  %t = s32[20,1000]{1,0} slice(%b), slice={[10:30], [0:1000]}
  %z = s32[] constant(0)
  %q = s32[10]{0} reduce(%s, %z), dimensions={1}, to_apply=%add
  %r = s32[20]{0} reduce(%t, %z), dimensions={1}, to_apply=%add
  ROOT %y = (s32[10]{0}, s32[20]{0}) tuple(%q, %r)
}
%wider (p: u8[1000,1000,4]) -> u32[10,1000] {
  %p = u8[1000,1000,4]{2,1,0} parameter(0)
  %b = u32[1000,1000]{1,0} bitcast-convert(%p)
  ROOT %s = u32[10,1000]{1,0} slice(%b), slice={[0:10], [0:1000]}
}
%both (p: f32[1000,1000]) -> (f32[1000], f32[10,1000]) {
  %p = f32[1000,1000]{1,0} parameter(0)
  %m = f32[1000,1000]{1,0} abs(%p)
  %s = f32[10,1000]{1,0} slice(%m), slice={[0:10], [0:1000]}
  %z = f32[] constant(0)
  %r = f32[1000]{0} reduce(%m, %z), dimensions={1}, to_apply=%add
  ROOT %y = (f32[1000]{0}, f32[10,1000]{1,0}) tuple(%r, %s)
}
%scaled_put (p: f32[1000,1000], u: f32[1,1000], i: s32[]) -> f32[1000,1000] {
  %p = f32[1000,1000]{1,0} parameter(0)
  %u = f32[1,1000]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %m = f32[1000,1000]{1,0} multiply(%p, %p)
  ROOT %s = f32[1000,1000]{1,0} dynamic-update-slice(%m, %u, %i, %i)
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
        # Slices of what is computed of an array element by element count as slices of the array.
        (
            ["%a = (s32[10]{0}, s32[20]{0}) fusion(%w), kind=kInput, calls=%largest"],
            "reductions",
            (30 * 4e3 + 30 * 4) / 0.5e12,
        ),
        (
            ["%q = u8[1000,1000,4]{2,1,0} parameter(3)", "%a = u32[10,1000]{1,0} fusion(%q), kind=kLoop, calls=%wider"],
            "elementwise",
            2 * 10 * 4e3 / 1e12,
        ),
        (
            ["%a = (f32[1000]{0}, f32[10,1000]{1,0}) fusion(%w), kind=kInput, calls=%both"],
            "reductions",
            (4e6 + 4e3 + 10 * 4e3) / 0.5e12,
        ),
        # What is computed is no buffer that can be updated in place.
        (
            [
                INDEX,
                "%u = f32[1,1000]{1,0} parameter(3)",
                "%a = f32[1000,1000]{1,0} fusion(%w, %u, %i), calls=%scaled_put",
            ],
            "elementwise",
            8e6 / 1e12,
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
        ([f"%c = {X} strange-start(%x)"], "%c .strange-start"),
        ([f"%c = {X} cholesky(%x), lower=true"], "%c .cholesky"),
        (["%q = f64[1000,1000]{1,0} parameter(3)", "%a = " + MATMUL.replace("(%x, %x)", "(%q, %q)")], "matmul of f64"),
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
