"""The list of collectives against programs whose collectives are known from their source."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero.errors import ConfigError
from jzero.planner import collectives, gpu_devices

pytestmark = pytest.mark.usefixtures("no_compilation_cache")
h100 = pytest.param("h100", marks=[pytest.mark.gpu_compile, needs_cuda_compiler])
REPLICATED = P()
SEPARATE = {
    f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in ("all_gather", "reduce_scatter", "all_reduce")
}  # one operation per array


@pytest.fixture(params=["cpu", h100])
def mesh(request):
    return mesh_of(request.param)


@pytest.fixture(params=[h100])
def gpu_mesh(request):
    return mesh_of(request.param)


def mesh_of(kind):
    devices = jax.devices() if kind == "cpu" else gpu_devices(kind, 8)
    return Mesh(np.array(devices).reshape(2, 4), ("data", "zero"))


def collectives_of(mesh, f, *shapes, in_specs=REPLICATED, out_specs=REPLICATED, options=None):
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    compiled = jax.jit(mapped, compiler_options=options).lower(*shapes).compile()
    return collectives(compiled, mesh)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def facts(rows):
    return sorted((r.kind, r.dtype, r.operands, r.bytes, r.axes, r.group_size, r.loops, r.in_branch) for r in rows)


def test_loops(mesh):
    def f(w):  # (16, 8) on every device
        gathered = lax.all_gather(w, "zero", tiled=True)  # 64 x 8

        def outer(w, _):
            def inner(w, _):
                return lax.psum_scatter(jnp.sin(lax.all_gather(w, "zero", tiled=True)), "zero", tiled=True), None

            w = lax.ppermute(w, "data", [(0, 1), (1, 0)])
            return lax.scan(inner, w, None, length=3)[0], None

        w, _ = lax.scan(outer, w, None, length=5)
        return w, lax.psum((gathered * jnp.sum(w)).sum(), ("data", "zero"))

    found = collectives_of(mesh, f, f32(64, 8), in_specs=P("zero"), out_specs=(P("zero"), P()))
    assert facts(found) == sorted(
        [
            ("all-gather", "f32", 1, 64 * 8 * 4, ("zero",), 4, (), False),
            ("collective-permute", "f32", 1, 16 * 8 * 4, ("data",), 2, (5,), False),
            ("all-gather", "f32", 1, 64 * 8 * 4, ("zero",), 4, (5, 3), False),
            ("reduce-scatter", "f32", 1, 64 * 8 * 4, ("zero",), 4, (5, 3), False),
            ("all-reduce", "f32", 1, 4, ("data", "zero"), 8, (), False),
        ]
    )
    assert found.launches == found.operands == 1 + 5 + 15 + 15 + 1
    assert found.bytes == 2048 + 5 * 512 + 15 * 2048 + 15 * 2048 + 4
    assert not found.unknown_trips
    assert all("shard_map" in row.op_name for row in found)

    assert len(found.select(kind="all-gather")) == 2
    assert len(found.select(kind="all-gather", in_loop=True)) == len(found.select(axes="zero", loops=())) == 1
    assert found.select(axes=("zero", "data"))[0].kind == "all-reduce"
    assert found.select(loops=(5, 3)).bytes == 30 * 2048
    assert len(found.select(dtype="bf16")) == 0


def test_bf16_gather_keeps_its_dtype_on_gpu(gpu_mesh):
    def f(w):
        gathered = lax.all_gather(w.astype(jnp.bfloat16), "zero", tiled=True)
        return lax.psum_scatter(jnp.sin(gathered), "zero", tiled=True)

    found = collectives_of(gpu_mesh, f, f32(64, 8), in_specs=P("zero"), out_specs=P("zero"))
    assert [(r.kind, r.dtype, r.bytes) for r in found] == [
        ("all-gather", "bf16", 1024),
        ("reduce-scatter", "bf16", 1024),
    ]


def test_branch(mesh):
    def f(x):
        def body(x, _):
            return lax.cond(x[0, 0] > 0, lambda x: lax.psum(jnp.sin(x), "data"), lambda x: x, x), None

        return lax.scan(body, x, None, length=4)[0]

    found = collectives_of(mesh, f, f32(16, 8))
    assert facts(found) == [("all-reduce", "f32", 1, 512, ("data",), 2, (4,), True)]
    assert len(found.select(in_branch=False)) == 0


def test_all_to_all_is_one_operand(mesh):
    found = collectives_of(mesh, lambda x: lax.all_to_all(x, "zero", 0, 1, tiled=True), f32(64, 8), out_specs=P("zero"))
    assert facts(found) == [("all-to-all", "f32", 1, 64 * 8 * 4, ("zero",), 4, (), False)]


def test_variadic_all_reduce():
    found = collectives_of(mesh_of("cpu"), lambda x, y: lax.psum((jnp.sin(x), jnp.sin(y)), "zero"), f32(8), f32(4, 4))
    assert facts(found) == [("all-reduce", "f32", 2, 8 * 4 + 16 * 4, ("zero",), 4, (), False)]


@pytest.mark.parametrize(("options", "operations"), [(None, [2]), (SEPARATE, [1, 1])])
@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter"])
def test_combined_operations(gpu_mesh, kind, options, operations):
    """Combining changes the number of operations but not the operands or the bytes."""

    def f(x, y):
        gathered = [lax.all_gather(leaf, "zero", tiled=True) for leaf in (x, y)]
        return [lax.psum_scatter(jnp.sin(leaf), "zero", tiled=True) for leaf in gathered]

    found = collectives_of(
        gpu_mesh, f, bf16(512, 64), bf16(256, 64), in_specs=P("zero"), out_specs=P("zero"), options=options
    ).select(kind=kind)
    assert [row.operands for row in found] == operations
    assert (found.operands, found.bytes) == (2, (512 + 256) * 64 * 2)


def test_unknown_trip_count_is_flagged(mesh):
    def f(x):
        return lax.while_loop(lambda x: x[0] < 10, lambda x: lax.psum(jnp.sin(x), "zero"), x)

    found = collectives_of(mesh, f, f32(8))
    assert [(row.loops, row.times) for row in found] == [((None,), 1)]
    assert found.unknown_trips
    assert "unknown" in str(found)


def test_constant_while_loop_has_a_trip_count(mesh):
    def f(x):
        return lax.fori_loop(2, 9, lambda i, x: lax.psum(jnp.sin(x), "zero"), x)

    assert [row.loops for row in collectives_of(mesh, f, f32(8))] == [(7,)]


def test_devices_in_another_order(mesh):
    """Groups are positions in the mesh, not device ids."""
    shuffled = Mesh(mesh.devices.reshape(-1)[[3, 1, 7, 0, 2, 6, 4, 5]].reshape(2, 2, 2), ("pipe", "data", "zero"))

    def f(x):
        x = lax.psum(jnp.sin(lax.psum(jnp.sin(x), "data")), ("pipe", "zero"))
        return lax.ppermute(x, "pipe", [(0, 1)])

    rows = collectives_of(shuffled, f, f32(8))
    assert [(row.axes, row.group_size) for row in rows] == [(("data",), 2), (("pipe", "zero"), 4), (("pipe",), 2)]


def test_table(mesh):
    found = collectives_of(mesh, lambda x: lax.psum(x, "zero"), f32(1024, 256))
    assert str(found).splitlines() == [
        "n  kind        dtype  operands    MiB  axes  group  loops  branch  MiB/run",
        "1  all-reduce  f32           1  1.000  zero      4  -      -         1.000",
        "1 launches, 1 operands, 1.000 MiB per run",
    ]


def test_mistakes(mesh):
    found = collectives_of(mesh, lambda x: lax.psum(x, "zero"), f32(8))
    with pytest.raises(ConfigError, match="all-reduce"):
        found.select(kind="allreduce")
    with pytest.raises(ConfigError, match="bf16"):
        found.select(dtype="bfloat16")
    text = module("%r = f32[8]{0} all-reduce(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add")
    with pytest.raises(ConfigError, match="without a mesh"):
        collectives(text).select(axes="zero")
    with pytest.raises(ConfigError, match="8"):
        collectives(text, Mesh(mesh.devices[0], ("zero",)))
    with pytest.raises(ValueError, match="an unknown form"):
        collectives(text.replace("{{0,1},{2,3},{4,5},{6,7}}", "<new>"))


def module(body, others=""):
    """HLO text for 8 devices whose entry has one f32[8] parameter %p."""
    return f"""HloModule m, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

{others}
ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0:T(256)}} parameter(0)
  {body}
}}
"""


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("{}", ("pipe", "data", "zero"), 8),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("zero",), 2),
        ("{{0,1,2,3},{4,5,6,7}}", ("data", "zero"), 4),
        ("[2,4]<=[8]", ("data", "zero"), 4),
        ("[4,2]<=[2,4]T(1,0)", ("pipe",), 2),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("data",), 2),
        ("mesh['data'=2,'zero'=4] {'data','zero'}", ("pipe", "data", "zero"), 8),
        ("mesh['a'=2,'b'=4] {'a'}", ("pipe",), 2),
        ("mesh['a'=2,'b'=4] {'b'}", ("data", "zero"), 4),
        ("mesh['a'=8] {'a':(1)2}", ("pipe",), 2),
        ("mesh['a'=8] {'a':(2)2}", ("data",), 2),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ("pipe", "zero"), 4),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ("zero",), 2),
        ("mesh['a'=2,'b'=4], device_ids=(0,4,1,5,2,6,3,7) {'b':(2)2}", ("pipe",), 2),
    ],
)
def test_group_forms(groups, axes, size):
    cube = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("pipe", "data", "zero"))
    attributes = f"channel_id=1, replica_groups={groups}, use_global_device_ids=true, to_apply=%add"
    (row,) = collectives(module(f"ROOT %r = f32[8]{{0}} all-reduce(%p), {attributes}"), cube)
    assert (row.axes, row.group_size, row.bytes) == (axes, size, 32)


WRAPPED = """%wrapped (q: f32[8]) -> f32[1] {
  %q = f32[8]{0} parameter(0)
  ROOT %rs = f32[1]{0} reduce-scatter(%q), replica_groups={}, dimensions={0}, to_apply=%add, metadata={op_name="here"}
}, execution_thread="parallel"
"""


@pytest.mark.parametrize(
    ("body", "others", "expected"),
    [
        (
            "%s = (f32[8]{0}, f32[64]{0}) all-gather-start(%p), replica_groups={}, dimensions={0}\n"
            "  ROOT %d = f32[64]{0} all-gather-done(%s)",
            "",
            ("all-gather", 1, 256),
        ),
        (
            "%s = ((f32[8]{0}, f32[8]{0}), (f32[64]{0}, /*index=1*/f32[64]{0}))"
            " all-gather-start(%p, /*index=1*/%p), replica_groups={}, dimensions={0}\n"
            "  ROOT %d = (f32[64]{0}, f32[64]{0}) all-gather-done(%s)",
            "",
            ("all-gather", 2, 512),
        ),
        (
            "%s = ((f32[8]{0}), f32[1]{0}, u32[]) reduce-scatter-start(%p), replica_groups={}, to_apply=%add\n"
            "  ROOT %d = f32[1]{0} reduce-scatter-done(%s)",
            "",
            ("reduce-scatter", 1, 32),
        ),
        (
            "%s = ((f32[8]{0}), f32[1]{0}) async-start(%p), calls=%wrapped\n"
            "  %u = ((f32[8]{0}), f32[1]{0}) async-update(%s), calls=%wrapped\n"
            "  ROOT %d = f32[1]{0} async-done(%u), calls=%wrapped",
            WRAPPED,
            ("reduce-scatter", 1, 32),
        ),
        (
            "%s = ((f32[8]{0}), f32[1]{0}) fusion-start(%p), kind=kCustom, calls=%wrapped\n"
            "  ROOT %d = f32[1]{0} fusion-done(%s)",
            WRAPPED,
            ("reduce-scatter", 1, 32),
        ),
        ("ROOT %d = f32[1]{0} call(%p), to_apply=%wrapped", WRAPPED, ("reduce-scatter", 1, 32)),
        (
            "ROOT %d = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3}}",
            "",
            ("collective-permute", 1, 32),
        ),
    ],
)
def test_synchronous_and_asynchronous_forms(body, others, expected):
    (row,) = collectives(module(body, others))
    assert (row.kind, row.operands, row.bytes) == expected
    assert row.group_size == (4 if row.kind == "collective-permute" else 8)
    assert row.axes is None
    assert row.op_name == ("here" if others else "")


def test_computation_reached_twice_counts_twice():
    twice = "%a = f32[1]{0} call(%p), to_apply=%wrapped\n  ROOT %b = f32[1]{0} call(%p), to_apply=%wrapped"
    assert collectives(module(twice, WRAPPED)).launches == 2


def test_operation_of_two_dtypes_is_two_rows():
    body = (
        "%h = bf16[4]{0} convert(%p)\n"
        "  ROOT %g = (f32[64]{0}, bf16[32]{0}) all-gather(%p, %h), replica_groups={}, dimensions={0}"
    )
    assert [(r.dtype, r.operands, r.bytes) for r in collectives(module(body))] == [("f32", 1, 256), ("bf16", 1, 64)]
