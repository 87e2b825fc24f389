"""FLOPs by module, against counts by hand from the shapes of the models."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers.named_models import model_of
from helpers.plain_flax import mean_square

import jzero
from jzero.planner.traced_operations import Walk
from jzero.profiling import Module, StepFlops, step_flops
from models.attention import attend
from models.llama import LlamaConfig
from models.moe import MixtureConfig

MICRO, S = 2, 16
C = LlamaConfig(2, 32, 4, 2, 64, vocab_size=96, attention="xla")
L, D, F, V = C.num_layers, C.d_model, C.d_ff, C.vocab_rows
Q, KV = C.num_heads * C.head_dim, C.num_kv_heads * C.head_dim


def flops_of(model, batch, devices=8, **config):
    config = {"train_micro_batch_size_per_gpu": MICRO, "optimizer": {"type": "AdamW"}, **config}
    mesh = jzero.make_mesh(jzero.Config.load(config), devices=jax.devices()[:devices])
    step = jzero.make_train_step(model, config, mesh=mesh)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct((step.batch_sizes.train, *x.shape), x.dtype), batch)
    found = step_flops(step, step.trace(shapes))
    return found, {"/".join(m.path): m for m in found.modules}


def llama(shape=C, **config):
    tokens = jax.ShapeDtypeStruct((S,), jnp.int32)
    return flops_of(model_of(shape), {"inputs": tokens, "labels": tokens}, **config)


def layer(tokens):
    """{module: forward FLOPs of one layer}, by hand; attention computes all S x S scores."""
    return {
        "stack/attention/qkv": 2 * tokens * D * (Q + 2 * KV),
        "stack/attention/out": 2 * tokens * Q * D,
        "scores": 2 * (2 * tokens * S * Q),
        "stack/mlp/gate_up": 2 * tokens * D * 2 * F,
        "stack/mlp/down": 2 * tokens * F * D,
    }


@pytest.mark.parametrize(("stage", "unroll", "accum", "policy"), [(3, False, 3, "full"), (0, True, 1, "matmuls")])
def test_llama(stage, unroll, accum, policy):
    whole, found = llama(
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
        stack={"unroll": unroll}, gradient_accumulation_steps=accum, activation_checkpointing={"policy": policy},
    )  # fmt: skip
    one = {name: L * accum * flops for name, flops in layer(MICRO * S).items()}
    again = dict.fromkeys(one, 0)
    if policy == "full":  # all but the last product, whose result the backward pass does not need
        again = one | {"stack/mlp/down": 0}
    if policy == "matmuls":  # what is no product with a weight
        again["scores"] = one["scores"]
    for name in one.keys() - {"scores"}:
        m = found[name]
        assert (m.forward, m.backward, m.recomputed) == (one[name], 2 * one[name], again[name])
    attention = [name for name in one if "mlp" not in name]
    for name, inside in (("stack/attention", attention), ("stack", list(one))):
        m = found[name]
        sums = sum(one[n] for n in inside), 2 * sum(one[n] for n in inside), sum(again[n] for n in inside)
        assert (m.forward, m.backward, m.recomputed) == sums
    head = accum * 2 * MICRO * S * D * V
    assert (found["suffix/head"].forward, found["suffix/head"].backward) == (head, 2 * head)
    total = sum(one.values()) + head
    assert (whole.whole.forward, whole.whole.backward) == (total, 2 * total)
    assert (whole.devices, whole.optimizer, whole.notes) == (8, 0, ())
    by_hand = {
        "prefix/embed": V * D, "suffix/head": D * V, "suffix/norm": D,
        "stack/attention": L * D * (Q + 2 * KV + Q), "stack/attention/qkv": L * D * (Q + 2 * KV),
        "stack/attention_norm": L * D, "stack/mlp": L * 3 * D * F, "stack/mlp/down": L * F * D,
        "": 2 * V * D + D + L * (D * (2 * Q + 2 * KV) + 3 * D * F + 2 * D),
    }  # fmt: skip
    assert {name: found[name].params for name in by_hand} == by_hand


class Parts(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(2)])
        self.end = nnx.Sequential(nnx.BatchNorm(4, rngs=rngs), nnx.relu, nnx.Linear(4, 4, rngs=rngs))

    def __call__(self, x):
        assert all(isinstance(layer, nnx.Linear) and type(layer).__name__ == "Linear" for layer in self.layers)
        for layer in self.layers:
            x = layer(x)
        return self.end(x)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(4, name="out")(linen.relu(linen.Dense(8, name="hidden")(x)))


def test_modules_have_the_names_of_their_attributes():
    _, found = flops_of(jzero.from_flax(Parts, mean_square), jax.ShapeDtypeStruct((4,), jnp.float32))
    names = ["loss/layers/0", "loss/layers/1", "loss/end/layers/2"]
    assert [found[name].forward for name in names] == [2 * MICRO * 4 * 4] * 3
    assert [found[name].params for name in (*names, "loss/end")] == [20, 20, 20, 28]
    model = jzero.from_flax(Linen(), mean_square, example_batch=jnp.ones((1, 12)))
    _, found = flops_of(model, jax.ShapeDtypeStruct((12,), jnp.float32))
    first, second = found["loss/Linen/hidden"], found["loss/Linen/out"]
    assert (first.forward, first.backward) == (2 * MICRO * 12 * 8,) * 2  # the batch has no gradient
    assert (second.forward, second.backward) == (2 * MICRO * 8 * 4, 2 * 2 * MICRO * 8 * 4)
    assert (first.params, second.params) == (12 * 8 + 8, 8 * 4 + 4)
    # Operands and results in float32: those of both gradients of the second layer are as large as forward.
    sizes = MICRO * 12 + 12 * 8 + MICRO * 8, MICRO * 8 + 8 * 4 + MICRO * 4
    assert (first.bytes, second.bytes) == (2 * 4 * sizes[0], 3 * 4 * sizes[1])


def test_padding_of_experts_is_not_counted():
    """Rows are padded to the worst case along `expert`; a token is multiplied with its own experts alone."""
    _, found = llama(
        dataclasses.replace(C, num_layers=1, mixture=MixtureConfig(4, 2, F)),
        devices=4, mesh={"zero": 1, "expert": 2, "tensor": 2},
        expert_parallel={"dimensions": {"mlp/(gate_up|down)": 0}}, activation_checkpointing={"policy": "full"},
    )  # fmt: skip
    # The devices of tensor gather the tokens, and each has a part of the experts' width.
    router, experts, sum_of_outputs = MICRO * S * D * 4 / 2, MICRO * S * 2 * D * 3 * F / 2, MICRO * S * 2 * D
    mlp, weights = found["stack/mlp"], 2 * (router + experts)
    assert (mlp.forward, mlp.backward) == (weights + 2 * sum_of_outputs, 2 * weights)
    assert mlp.recomputed == weights
    assert not [name for name in found if "row" in name]


def test_unequal_stages_take_one_branch_each():
    layers = [lambda x: x, jzero.LayerSpec(nnx.Linear, 8, 16), nnx.relu, jzero.LayerSpec(nnx.Linear, 16, 4)]
    model = jzero.PipelineModule(layers, num_stages=2, loss_fn=lambda y, labels: ((y - labels) ** 2).mean())
    pair = tuple(jax.ShapeDtypeStruct((width,), jnp.float32) for width in (8, 4))
    found, _ = flops_of(model, pair, gradient_accumulation_steps=3, mesh={"pipe": 2})
    # A device's mean over the two stages, in each of four ticks.
    assert found.whole.forward == 4 * (2 * MICRO * 8 * 16 + 2 * MICRO * 16 * 4) / 2
    assert found.stages == 2
    assert "a condition counts as the mean of its branches" in found.notes


@pytest.mark.parametrize(("window", "pairs"), [(None, S * (S + 1) // 2), (3, 1 + 2 + 3 * (S - 2))])
def test_attention_of_cudnn_counts_visible_pairs(window, pairs):
    q, k = jnp.zeros((MICRO, S, 4, 64), jnp.bfloat16), jnp.zeros((MICRO, S, 2, 64), jnp.bfloat16)

    def total(q, k, v):
        return attend(q, k, v, choice="cudnn", causal=True, window=window).astype(jnp.float32).sum()

    found = Walk(jax.jit(jax.grad(total, (0, 1, 2))).trace(q, k, k)).found
    product = 2 * MICRO * 4 * 64 * pairs
    assert [(p.part, p.flops) for p in found] == [
        ("forward", 2 * product), ("backward", 4 * product), ("recomputed", product),
    ]  # fmt: skip


class Part(nnx.Module):
    def __init__(self, rngs):
        self.fc = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.fc(x)


class Listing(Part, pytree=False):
    def __call__(self, x):
        self.seen = [x]  # as a pytree, Flax would refuse it
        return self.fc(x)


class Registered(Part):
    def __init_subclass__(cls, *, key, **more):
        super().__init_subclass__(**more)


class Keyed(Registered, key="part"):
    pass


@pytest.mark.parametrize("part", [Listing, Keyed])
def test_modules_of_any_class_compute_the_same(part):
    """Naming a part changes its class: its own keywords stay, and a class that allows no other goes without a name."""
    model = jzero.from_flax(lambda rngs: nnx.Sequential(part(rngs)), mean_square)
    params, x = model.init(jax.random.key(0)), jnp.ones((2, 4))
    (linear,) = (fc for layer in params["layers"].values() for fc in layer.values())
    expected = jnp.mean((x @ linear["kernel"] + linear["bias"]) ** 2)
    np.testing.assert_allclose(model.loss(params, x, jax.random.key(0)), expected, rtol=1e-6)


def some_flops(**changes):
    modules = (Module((), 10, 1e12, 2e12, 0, 1e9), Module(("stack",), 9, 0.9e12, 1.8e12), Module(("head",), 1, 1e11))
    return dataclasses.replace(StepFlops(modules, 2, 0, "bfloat16", 1, ()), **changes)


def test_the_rate_is_the_products_over_the_time():
    """Peaks of an H200 without sparsity: 989.4 TFLOP/s in 16 bits, 494.7 in TF32."""
    lines = some_flops().totals(0.01, "NVIDIA H200")
    assert lines == [
        "3 TFLOP per device and step, 6 TFLOP in all",
        "the step took 10.0 ms: 300.0 TFLOP/s per device, 30.3 % of the 989.4 of NVIDIA H200 in bfloat16 (MFU)",
    ]
    assert "60.6 % of the 494.7 of NVIDIA H200 in TF32" in some_flops(dtype="float32").totals(0.01, "NVIDIA H200")[1]
    assert some_flops().totals(0.01, "Some GPU")[1].endswith("per device; the peak of Some GPU is unknown")
    again = some_flops(modules=(Module((), 10, 1e12, 2e12, 1e12),)).totals(0.01, "NVIDIA H200")
    assert again[1].endswith("(MFU); with what is recomputed 400.0, 40.4 %")
    assert len(some_flops().totals(0.01, "cpu")) == 1


def test_what_a_table_shows():
    found = some_flops()
    for options, names in (({}, ["the", "stack", "head"]), ({"depth": 0}, ["the"]), ({"top": 1}, ["the", "stack"])):
        assert [line.split()[0] for line in found.table("title", **options).splitlines()[2:]] == names
