"""ZeRO++: the arithmetic beside NumPy's, losses beside the plain optax loop, hpZ bit for bit beside stage 3."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.oracle import train
from helpers.reference import Layout, assert_bitwise, batches, model, reference
from helpers.sampling import keep, sample, some
from jax.sharding import Mesh, PartitionSpec

import jzero
from jzero.layout import zeropp
from jzero.layout.zeropp import dequantize, quantize
from jzero.planner.state_bytes import state_bytes

QWZ, QGZ = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}


def hpz(n):
    return {"zero_hpz_partition_size": n}


def block_of(n):
    return max(size for size in range(16, 65, 2) if n % size == 0)


def rounded(x, bits):
    """What is left of x [..., n] after quantisation; the codes; the scales."""
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, block_of(x.shape[-1]))
    scales = np.abs(blocks).max(-1, keepdims=True) / np.float32({8: 127, 4: 7}[bits])
    codes = np.round(blocks / np.where(scales == 0, 1, scales))
    return (codes * scales).reshape(x.shape), codes.reshape(x.shape), scales[..., 0]


@partial(jax.jit, static_argnums=1)
def there_and_back(x, bits):
    """The codes, the scales, and what is left of x."""
    codes, scales = quantize(x, bits)
    return codes, scales, dequantize(codes, scales, bits)


@pytest.mark.parametrize(("n", "bits"), sample(product([16, 1000, 1024], [8, 4]), strength=1))
def test_blocks_are_rounded_to_the_nearest_code(bits, n):
    x = np.random.default_rng(0).normal(size=(3, n)).astype(np.float32) * np.array([[1e-3], [1], [1e4]], np.float32)
    x[1, : block_of(n)] = 0
    codes, scales, found = there_and_back(x, bits)
    expected, expected_codes, expected_scales = rounded(x, bits)
    np.testing.assert_allclose(scales, expected_scales, rtol=1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert (np.abs(found - x) <= np.repeat(expected_scales, block_of(n), -1) / 2 * (1 + 1e-5)).all()
    assert codes.nbytes == x.size * bits // 8
    if bits == 8:
        np.testing.assert_array_equal(codes, expected_codes)
    else:  # the first half of a block in the low bits, the second in the high ones
        halves = np.asarray(codes).reshape(*scales.shape, -1)
        both = np.concatenate([halves % 16, halves // 16], -1).reshape(x.shape)
        np.testing.assert_array_equal(both.astype(int) - 8, expected_codes)
    for bad in (np.inf, -np.inf, np.nan):  # a block with one such number has none that is finite
        odd = np.ones((2, 64), np.float32)
        odd[0, 5] = bad
        found = np.asarray(there_and_back(odd, bits)[2])
        assert not np.isfinite(found[0]).any()
        np.testing.assert_allclose(found[1], 1, rtol=1e-6)
    np.testing.assert_array_equal(there_and_back(np.full((2, 64), 1e-45, np.float32), bits)[2], 0)  # scales underflow


@pytest.mark.parametrize(("node", "dim"), sample(product([1, 2, 4, 8], [0, 1]), strength=1))
def test_gradients_are_rounded_summed_inside_nodes_and_again_across(dim, node):
    gradients = np.random.default_rng(0).normal(size=(8, 16, 24)).astype(np.float32)  # of each device
    parts = np.stack([np.stack(np.split(g, 8, dim)).reshape(8, -1) for g in gradients])  # [source, target, elements]
    if node > 1:
        parts = rounded(parts, 4)[0].reshape(8 // node, node, 8, -1).sum(1)
    slack = np.full(parts.shape[1:], 1e-5)
    if node < 8:
        # Sums of two codes may lie half-way between codes: 3 s + 3 t where the largest is 6 s + 6 t.
        step = np.repeat(rounded(parts, 4)[2], block_of(parts.shape[-1]), -1)
        slack += np.where(np.abs(np.abs(parts / step) % 1 - 0.5) < 1e-5, step, 0).sum(0) * 1.01
        parts = rounded(parts, 4)[0]
    plus, split = zeropp.ZeroPlusPlus(gradients=True, node=node), PartitionSpec("zero")
    run = jax.shard_map(
        lambda g: zeropp.reduce_scatter(g[0], dim, plus).reshape(1, -1),
        mesh=Mesh(np.array(jax.devices()), "zero"), in_specs=split, out_specs=split, check_vma=False,
    )  # fmt: skip
    assert (np.abs(jax.jit(run)(gradients) - parts.sum(0)) <= slack).all()
    assert (slack < 2e-5).mean() > 0.9


@pytest.mark.parametrize(("per_host", "zero", "expected"), [(8, 8, 8), (4, 8, 4), (2, 4, 2), (1, 8, 1), (3, 4, 1)])
def test_a_node_is_what_one_host_holds_of_a_zero_group(per_host, zero, expected):
    devices = np.array([SimpleNamespace(process_index=i // per_host) for i in range(8)]).reshape(-1, zero)
    arranged = SimpleNamespace(axis_names=("data", "zero"), shape={"zero": zero}, devices=devices)
    assert zeropp.devices_per_host(arranged) == expected


def step_of(plus, layout, mesh=None, **more):
    section = {"stage": 3, "stage3_param_persistence_threshold": 0, **plus}
    return jzero.make_train_step(
        model("decoder"), layout.config(zero_optimization=section, **more), mesh=mesh or layout.mesh
    )


def run(step, steps=10):
    seen, state = train(step, None, batches("decoder")[:steps])
    return state, [*seen[:, 0]]


ALL = {**QWZ, **QGZ, **hpz(4)}
NEAR = [
    *((plus, Layout(3, 8, 2, unroll=False), {}) for plus in (QWZ, QGZ)),
    (ALL, Layout(3, 8, 1, "full"), {}),
    ({**ALL, **hpz(2)}, Layout(3, 4, 4), {"pipe": 2}),
]


@pytest.mark.parametrize(("plus", "layout", "degrees"), keep(NEAR, NEAR[2:3]), ids=str)
def test_losses_stay_near_those_of_the_plain_loop(plus, layout, degrees):
    """Nearer than the exact losses of neighbouring steps are to each other."""
    losses = run(step_of(plus, layout, jzero.make_mesh(**degrees), gradient_clipping=0.53))[1]
    exact = reference("decoder").losses
    assert 1e-6 < np.abs(np.array(losses) - exact).max() < np.abs(np.diff(exact)).mean() / 2


HPZ = [
    (Layout(3, 8, 2, unroll=False), {}, {}, 4),
    (Layout(3, 8, 1), {}, {"frozen_parameters": ["^stack/w"]}, 2),
    (Layout(3, 4, 1, "full", precision="bf16", data=2), {"data": 2}, {}, 2),
    (Layout(3, 4, 4), {"pipe": 2}, {}, 2),
]


@pytest.mark.parametrize(("layout", "degrees", "more", "n"), some(HPZ, HPZ[:1]), ids=str)
def test_hpz_is_stage_3_bit_for_bit(layout, degrees, more, n):
    mesh = jzero.make_mesh(**degrees)
    plain, step = (step_of(plus, layout, mesh, **more) for plus in ({}, hpz(n)))
    (expected, losses), (state, found) = run(plain, 3), run(step, 3)
    assert found == losses
    batch = batches("decoder")[3]
    assert float(step.evaluate(state, batch)) == float(plain.evaluate(expected, batch))
    assert_bitwise(state, expected)


@pytest.mark.parametrize("frozen", [(), ("^stack/w",)])
def test_the_second_copy_costs_2_over_n_bytes(frozen):
    """bf16: gradients 2/N of what is trained; weights 2/n of everything, beside the masters or the frozen shards."""
    layout = Layout(3, 8, 1, unroll=False, precision="bf16")
    bytes_ = state_bytes(step_of(hpz(4), layout, frozen_parameters=list(frozen)))
    sizes = {"ends/embed": 1024, "ends/head": 1024, "stack/w": 512, "stack/b": 32}
    trained = sum(size for name, size in sizes.items() if not frozen or name != "stack/w")
    assert bytes_.parameters == 2 * sum(sizes.values()) / 4
    assert bytes_.gradients == 2 * trained / 8
    assert bytes_.masters == (4 * trained + 2 * (sum(sizes.values()) - trained)) / 8
    plain = state_bytes(step_of({}, layout, frozen_parameters=list(frozen)))
    assert plain.parameters == 2 * trained / 8


class Narrow(type(model("decoder"))):
    """The decoder with a matrix that has no blocks, and a vector that would have some."""

    def init(self, rng):
        params = super().init(rng)
        return {**params, "ends": {**params["ends"], "scale": jnp.ones((8, 1)), "vector": jnp.ones(256)}}


def test_the_report_says_what_moves_and_what_stays_exact():
    section, layout = {"stage": 3, "stage3_param_persistence_threshold": 0, **ALL}, Layout(3, 8, 1)
    step = jzero.make_train_step(Narrow(), layout.config(zero_optimization=section), mesh=layout.mesh)
    found = {name: layout.rule.plus.weights for name, layout in step.layouts["ends"].items()}
    assert found == {"embed": True, "head": True, "scale": False, "vector": False}
    text = " ".join(jzero.report(step).split())
    moves = "partitioned among groups of 4 (hpZ); matrices gathered as int8 (qwZ); their gradients reduced as 4-bit"
    for part in (moves, "not quantized, no blocks of 16 to 64 elements: ends/scale"):
        assert part in text
    assert "not quantized" not in jzero.report(step_of(ALL, layout))


@pytest.mark.parametrize("n", [0, 1, "auto", 8])
def test_groups_of_one_and_one_group_of_all_ask_for_nothing(n):
    for stage in (0, 3) if n != 8 else (3,):
        config = jzero.Config.load({"zero_optimization": {"stage": stage, "zero_hpz_partition_size": n}})
        assert zeropp.read_zeropp(config.zero_optimization, Layout(3, 8, 1).mesh) == zeropp.ZeroPlusPlus()
