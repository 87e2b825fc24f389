"""The list of collectives against programs whose collectives are known from their source."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler
from helpers.hlo_programs import program
from helpers.refusals import refuses
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero.planner import collectives, gpu_devices

pytestmark = pytest.mark.usefixtures("no_compilation_cache")
WHOLE = P()
h100 = pytest.param("h100", marks=[pytest.mark.gpu_compile, needs_cuda_compiler])


def mesh_of(kind):
    devices = jax.devices() if kind == "cpu" else gpu_devices(kind, 8)
    return Mesh(np.array(devices).reshape(2, 4), ("data", "zero"))


def collectives_of(mesh, f, *shapes, in_specs=WHOLE, out_specs=WHOLE):
    mapped = jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return collectives(jax.jit(mapped).lower(*shapes).compile(), mesh)


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def facts(rows):
    return sorted((r.kind, r.dtype, r.operands, r.bytes, r.axes, r.group_size, r.loops, r.in_branch) for r in rows)


@pytest.mark.parametrize("kind", ["cpu", h100])
def test_loops(kind):
    def f(w):  # (16, 8) on every device
        gathered = lax.all_gather(w, "zero", tiled=True)  # 64 x 8

        def outer(w, _):
            def inner(w, _):
                return lax.psum_scatter(jnp.sin(lax.all_gather(w, "zero", tiled=True)), "zero", tiled=True), None

            w = lax.ppermute(w, "data", [(0, 1), (1, 0)])
            return lax.scan(inner, w, None, length=3)[0], None

        w, _ = lax.scan(outer, w, None, length=5)
        return w, lax.psum((gathered * jnp.sum(w)).sum(), ("data", "zero"))

    mesh = mesh_of(kind)
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
    refuses(lambda: found.select(kind="allreduce"), "all-reduce")
    refuses(lambda: found.select(dtype="bfloat16"), "bf16")


def branch(x, _):
    return lax.cond(x[0, 0] > 0, lambda x: lax.psum(jnp.sin(x), "zero"), lambda x: x, x), None


def total(x):
    return lax.psum(jnp.sin(x), "zero")


SIZE = 64 * 8 * 4


@pytest.mark.parametrize(
    ("f", "out_specs", "kind", "operands", "size", "loops"),
    [
        (lambda x: lax.all_to_all(x, "zero", 0, 1, tiled=True), P("zero"), "all-to-all", 1, SIZE, ()),
        (lambda x: lax.psum((jnp.sin(x), x[0]), "zero"), WHOLE, "all-reduce", 2, SIZE + 8 * 4, ()),
        (lambda x: lax.fori_loop(2, 9, lambda i, x: total(x), x), WHOLE, "all-reduce", 1, SIZE, (7,)),
        (lambda x: lax.scan(branch, x, None, length=4)[0], WHOLE, "all-reduce", 1, SIZE, (4,)),
        (lambda x: lax.while_loop(lambda x: x[0, 0] < 10, total, x), WHOLE, "all-reduce", 1, SIZE, (None,)),
    ],
    ids=["all-to-all", "variadic", "constant-while", "branch", "unknown-trips"],
)
def test_one_operation(request, f, out_specs, kind, operands, size, loops):
    found = collectives_of(mesh_of("cpu"), f, f32(64, 8), out_specs=out_specs)
    in_branch = request.node.callspec.id == "branch"
    assert facts(found) == [(kind, "f32", operands, size, ("zero",), 4, loops, in_branch)]
    assert len(found.select(in_branch=in_branch)) == 1
    assert len(found.select(in_branch=not in_branch)) == 0
    assert found.unknown_trips == ("unknown" in str(found)) == (loops == (None,))
    assert found.launches == (sum(loops) if loops and loops[0] else 1)


def module(*lines, others=""):
    """HLO text for 8 devices with a parameter %p."""
    return program("%p = f32[8]{0:T(256)} parameter(3)", *lines, others=others, devices=8)


def all_reduce(groups):
    attributes = f"channel_id=1, replica_groups={groups}, use_global_device_ids=true, to_apply=%add"
    return module(f"ROOT %r = f32[8]{{0}} all-reduce(%p), {attributes}")


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        ("{}", ("pipe", "data", "zero"), 8),
        ("{{0,1,2,3},{4,5,6,7}}", ("data", "zero"), 4),
        ("[2,4]<=[8]", ("data", "zero"), 4),
        ("[4,2]<=[2,2,2]T(0,2,1)", ("data",), 2),
        ("mesh['data'=2,'zero'=4] {'data','zero'}", ("pipe", "data", "zero"), 8),
        ("mesh['a'=2,'b'=4] {'b'}", ("data", "zero"), 4),
        ("mesh['a'=8] {'a':(2)2}", ("data",), 2),
        ("mesh['a'=8] {'a':(1)2,'a':(4)2}", ("pipe", "zero"), 4),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}", ("zero",), 2),
        ("mesh['a'=2,'b'=4], device_ids=(0,4,1,5,2,6,3,7) {'b':(2)2}", ("pipe",), 2),
    ],
)
def test_group_forms(groups, axes, size):
    cube = Mesh(np.array(jax.devices()).reshape(2, 2, 2), ("pipe", "data", "zero"))
    (row,) = collectives(all_reduce(groups), cube)
    assert (row.axes, row.group_size, row.bytes) == (axes, size, 32)


def test_table_and_mistakes():
    text = all_reduce("{{0,1,2,3},{4,5,6,7}}").replace("f32[8]{0", "f32[1024,256]{1,0")
    assert str(collectives(text, mesh_of("cpu"))).splitlines()[1:] == [
        "1  all-reduce  f32           1  1.000  zero      4  -      -         1.000",
        "1 launches, 1 operands, 1.000 MiB per run",
    ]
    refuses(lambda: collectives(text).select(axes="zero"), "without a mesh")
    refuses(lambda: collectives(text, Mesh(np.array(jax.devices()[:4]), ("zero",))), "8")
    with pytest.raises(ValueError, match="an unknown form"):
        collectives(all_reduce("<new>"))


WRAPPED = """%wrapped (q: f32[8]) -> f32[1] {
  %q = f32[8]{0} parameter(0)
  ROOT %rs = f32[1]{0} reduce-scatter(%q), replica_groups={}, dimensions={0}, to_apply=%add, metadata={op_name="here"}
}, execution_thread="parallel"
"""
PAIR = "((f32[8]{0}), f32[1]{0})"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["%s = (f32[8]{0}, f32[64]{0}) all-gather-start(%p), replica_groups={}, dimensions={0}",
          "ROOT %d = f32[64]{0} all-gather-done(%s)"], ("all-gather", 1, 256)),
        (["%s = ((f32[8]{0}, f32[8]{0}), (f32[64]{0}, /*index=1*/f32[64]{0}))"
          " all-gather-start(%p, /*index=1*/%p), replica_groups={}, dimensions={0}",
          "ROOT %d = (f32[64]{0}, f32[64]{0}) all-gather-done(%s)"], ("all-gather", 2, 512)),
        (["%s = ((f32[8]{0}), f32[1]{0}, u32[]) reduce-scatter-start(%p), replica_groups={}, to_apply=%add",
          "ROOT %d = f32[1]{0} reduce-scatter-done(%s)"], ("reduce-scatter", 1, 32)),
        ([f"%s = {PAIR} async-start(%p), calls=%wrapped", f"%u = {PAIR} async-update(%s), calls=%wrapped",
          "ROOT %d = f32[1]{0} async-done(%u), calls=%wrapped"], ("reduce-scatter", 1, 32)),
        ([f"%s = {PAIR} fusion-start(%p), kind=kCustom, calls=%wrapped", "ROOT %d = f32[1]{0} fusion-done(%s)"],
            ("reduce-scatter", 1, 32)),
        (["ROOT %d = f32[1]{0} call(%p), to_apply=%wrapped"], ("reduce-scatter", 1, 32)),
        (["ROOT %d = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,2},{2,3}}"],
            ("collective-permute", 1, 32)),
    ],
)  # fmt: skip
def test_synchronous_and_asynchronous_forms(lines, expected):
    is_wrapped = "%wrapped" in lines[0]
    (row,) = collectives(module(*lines, others=WRAPPED if is_wrapped else ""))
    assert (row.kind, row.operands, row.bytes) == expected
    assert row.group_size == (4 if row.kind == "collective-permute" else 8)
    assert (row.axes, row.op_name) == (None, "here" if is_wrapped else "")


def test_a_computation_reached_twice_counts_twice_and_an_operation_of_two_dtypes_is_two_rows():
    twice = (f"%{name} = f32[1]{{0}} call(%p), to_apply=%wrapped" for name in "ab")
    assert collectives(module(*twice, others=WRAPPED)).launches == 2
    gather = "%g = (f32[64]{0}, bf16[32]{0}) all-gather(%p, %h), replica_groups={}, dimensions={0}"
    rows = collectives(module("%h = bf16[4]{0} convert(%p)", gather))
    assert [(r.dtype, r.operands, r.bytes) for r in rows] == [("f32", 1, 256), ("bf16", 1, 64)]
