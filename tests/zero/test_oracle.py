"""Every layout against the plain single-device optax loop."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import reference
from helpers.reference import Layout, batches, cases, check_against_reference, prepare
from helpers.sampling import keep, sample, some
from jax.sharding import PartitionSpec as P

import jzero
from jzero.layout.zero import naive_gradient

# Every pair of settings on the small model, by default each setting once; the Llama compiles for longer.
PAIRS = [case.values[0] for case in sample(reference.LLAMA_LAYOUTS + reference.DECODER_LAYOUTS) if not case.marks]
FP16 = [layout for layout in reference.DECODER_LAYOUTS if layout not in PAIRS]


@cases(some(reference.LLAMA_LAYOUTS + reference.HSDP_LAYOUTS, [Layout(3, 8, 1)]))
def test_llama(layout):
    check_against_reference("tied" if (layout.stage + layout.zero // 2) % 2 else "untied", layout)


@cases(sample([*PAIRS, *FP16], strength=1))
def test_decoder(layout):
    check_against_reference("decoder", layout)


@cases(keep(reference.MLP_LAYOUTS, []))  # model/test_from_flax trains models without a stack by default
def test_mlp(layout):
    check_against_reference("mlp", layout)


@pytest.mark.parametrize(("threshold", "unroll", "accum"), keep([(100, True, 4), (600, False, 1)], [(600, False, 1)]))
def test_leaves_under_the_persistence_threshold_stay_replicated(threshold, unroll, accum):
    """The leaves have 16, 256 and 1,024 elements."""
    layout = Layout(3, 8, accum, "none", unroll)
    section = {"stage": 3, "stage3_param_persistence_threshold": threshold}
    check_against_reference("decoder", layout, zero_optimization=section)
    for leaf in jax.tree.leaves(prepare("decoder", layout, zero_optimization=section)[0].layouts):
        assert (leaf.dim is None) == (np.prod(leaf.shape[leaf.stacked :]) < threshold), leaf


@pytest.mark.parametrize(("more", "dtype"), [({}, "bf16"), ({"communication_data_type": "fp32"}, "f32")])
def test_the_dtype_of_the_reduction(more, dtype):
    step, _ = prepare("decoder", Layout(2, 8, 1, unroll=False, precision="bf16"), **more)
    text = step.lower(batches("decoder")[0]).as_text()
    assert set(re.findall(r"stablehlo.reduce_scatter.*?-> tensor<[\dx]*x(\w+)>", text, re.DOTALL)) == {dtype}


@pytest.mark.parametrize("stage", keep([1, 2, 3], [3]))
def test_the_dtype_of_the_reduction_is_not_the_weights(stage):
    """A narrow reduction rounds gradients only: the first loss, before any, is that of wide weights."""
    step, state = prepare("decoder", Layout(stage, 8, 1), communication_data_type="bf16")
    _, metrics = step(state, batches("decoder")[0])
    assert float(metrics["loss"]) == pytest.approx(reference.reference("decoder").losses[0], rel=1e-6)


@pytest.mark.parametrize("stage", range(4))
def test_the_plainest_gradient_of_a_stage(stage):
    """Of four devices with three micro-batches of two rows."""

    def loss(w, x):
        return (jnp.tanh(x @ w) ** 2).sum()

    drawn = zip((0, 1), ((8, 6), (4 * 3, 2, 8)), strict=True)
    w, x = (np.random.default_rng(seed).normal(size=shape).astype(np.float32) for seed, shape in drawn)
    spec = P("zero") if stage else P()
    run = jax.shard_map(
        lambda w, xs: naive_gradient(stage, loss, w, list(xs)), mesh=jzero.make_mesh(devices=jax.devices()[:4]),
        in_specs=(spec, P("zero")), out_specs=spec, check_vma=False,
    )  # fmt: skip
    np.testing.assert_allclose(jax.jit(run)(w, x), jax.jit(jax.grad(loss))(w, x.reshape(-1, 8)), rtol=1e-5, atol=1e-6)
