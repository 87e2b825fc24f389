"""FLOPs by module, against counts by hand from the shapes of the models."""

import contextlib
import dataclasses
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from helpers.engines import build, rows
from helpers.sampling import keep, some

import jzero
from jzero.adapters import nnx_model
from jzero.planner.traced_operations import Walk
from jzero.profiling import Module, StepFlops, profiles, step_flops
from models.attention import attend
from models.llama import Llama, LlamaConfig
from models.mlp import MLP, cross_entropy
from models.moe import MixtureConfig

MICRO, S = 2, 16
C = LlamaConfig(2, 32, 4, 2, 64, vocab_size=96, attention="xla")
L, D, F, V = C.num_layers, C.d_model, C.d_ff, C.vocab_rows
Q, KV, HEAD = C.num_heads * C.head_dim, C.num_kv_heads * C.head_dim, C.head_dim


def flops_of(model, batch, devices=8, **config):
    config = {"train_micro_batch_size_per_gpu": MICRO, "optimizer": {"type": "AdamW"}, **config}
    mesh = jzero.make_mesh(jzero.Config.load(config), devices=jax.devices()[:devices])
    step = jzero.make_train_step(model, config, mesh=mesh)
    shapes = {name: jax.ShapeDtypeStruct((step.batch_sizes.train, *x.shape), x.dtype) for name, x in batch.items()}
    found = step_flops(step, step.trace(shapes))
    return found, {"/".join(m.path): m for m in found.modules}


def llama(**config):
    tokens = jax.ShapeDtypeStruct((S,), jnp.int32)
    return flops_of(jzero.from_flax(lambda rngs: Llama(C, rngs=rngs)), {"inputs": tokens, "labels": tokens}, **config)


def layer(tokens):
    """{module: forward FLOPs of one layer}, by hand; attention computes all S x S scores."""
    return {
        "stack/attention/qkv": 2 * tokens * D * (Q + 2 * KV),
        "stack/attention/out": 2 * tokens * Q * D,
        "scores": 2 * (2 * tokens * S * Q),
        "stack/mlp/gate_up": 2 * tokens * D * 2 * F,
        "stack/mlp/down": 2 * tokens * F * D,
    }


CASES = [
    (stage, unroll, accum, policy)
    for stage, unroll, accum in ((0, True, 1), (3, False, 3), (0, False, 2), (3, True, 1))
    for policy in ("none", "full", "matmuls")
]
CHOSEN = [(3, False, 3, "full"), (3, True, 1, "matmuls")]


@pytest.mark.parametrize(("stage", "unroll", "accum", "policy"), keep(CASES, CHOSEN))
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


@pytest.mark.parametrize("schedule", keep(["1f1b", "zero_bubble"], ["1f1b"]))
def test_a_pipeline_runs_its_idle_ticks(schedule):
    """Two stages of one layer: five forward ticks for four micro-batches, and each stage computes half of the head."""
    whole, found = llama(mesh={"pipe": 2}, gradient_accumulation_steps=4, pipeline={"schedule": schedule})
    one = layer(MICRO * S)
    assert found["stack"].forward == 5 * sum(one.values())
    # In zero_bubble the gradients of weights are put off, to four ticks in which all stages compute some.
    backward = {"1f1b": 5 + 5, "zero_bubble": 5 + 4}[schedule]
    assert found["stack/mlp/down"].backward == backward * one["stack/mlp/down"]
    assert found["suffix/head"].forward == 4 * 2 * MICRO * S * D * V / 2
    assert found["suffix/head"].backward == 2 * found["suffix/head"].forward
    assert whole.stages == 2


def test_an_mlp():
    model = jzero.from_flax(lambda rngs: MLP(12, 8, 4, rngs=rngs), lambda m, b: cross_entropy(m, (b["x"], b["y"])))
    batch = {"x": jax.ShapeDtypeStruct((12,), jnp.float32), "y": jax.ShapeDtypeStruct((), jnp.int32)}
    _, found = flops_of(model, batch, zero_optimization={"stage": 3, "stage3_param_persistence_threshold": 0})
    first, second = found["loss/fc1"], found["loss/fc2"]
    assert (first.forward, first.backward) == (2 * MICRO * 12 * 8,) * 2  # the images have no gradient
    assert (second.forward, second.backward) == (2 * MICRO * 8 * 4, 2 * 2 * MICRO * 8 * 4)
    assert (first.params, second.params) == (12 * 8 + 8, 8 * 4 + 4)
    # Operands and results in float32: x, w, y forward; both gradients of fc2 and one of fc1 move the same.
    product = {"fc1": 4 * (MICRO * 12 + 12 * 8 + MICRO * 8), "fc2": 4 * (MICRO * 8 + 8 * 4 + MICRO * 4)}
    assert (first.bytes, second.bytes) == (2 * product["fc1"], 3 * product["fc2"])


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
    def square(module, batch):
        return (module(batch["x"]) ** 2).mean()

    _, found = flops_of(jzero.from_flax(Parts, square), {"x": jax.ShapeDtypeStruct((4,), jnp.float32)})
    names = ["loss/layers/0", "loss/layers/1", "loss/end/layers/2"]
    assert [found[name].forward for name in names] == [2 * MICRO * 4 * 4] * 3
    assert [found[name].params for name in (*names, "loss/end")] == [20, 20, 20, 28]
    model = jzero.from_flax(Linen(), square, example_batch={"x": jnp.ones((1, 12))})
    _, found = flops_of(model, {"x": jax.ShapeDtypeStruct((12,), jnp.float32)})
    assert found["loss/Linen/out"].backward == 2 * found["loss/Linen/out"].forward == 2 * 2 * MICRO * 8 * 4
    assert (found["loss/Linen/hidden"].params, found["loss/Linen/out"].params) == (12 * 8 + 8, 8 * 4 + 4)


@pytest.mark.parametrize(("mesh", "policy"), [({"expert": 4}, "full"), ({"expert": 2, "tensor": 2}, "none")])
def test_padding_of_experts_is_not_counted(mesh, policy):
    """Rows are padded to the worst case along `expert`; a token is multiplied with its own experts alone."""
    shape = dataclasses.replace(C, mixture=MixtureConfig(4, 2, F))
    model = jzero.from_flax(lambda rngs: Llama(shape, rngs=rngs))
    tokens = jax.ShapeDtypeStruct((S,), jnp.int32)
    _, found = flops_of(
        model, {"inputs": tokens, "labels": tokens}, devices=4, mesh={"zero": 1, **mesh},
        expert_parallel={"dimensions": {"mlp/(gate_up|down)": 0}}, activation_checkpointing={"policy": policy},
    )  # fmt: skip
    tensor = mesh.get("tensor", 1)  # its devices gather the tokens, and each has a part of the experts' width
    router, experts, sum_of_outputs = MICRO * S * D * 4 / tensor, MICRO * S * 2 * D * 3 * F / tensor, MICRO * S * 2 * D
    mlp, weights = found["stack/mlp"], 2 * L * (router + experts)
    assert (mlp.forward, mlp.backward) == (weights + 2 * L * sum_of_outputs, 2 * weights)
    assert mlp.recomputed == (weights if policy == "full" else 0)
    assert not [name for name in found if "row" in name]


def test_unequal_stages_take_one_branch_each():
    layers = [lambda x: x, jzero.LayerSpec(nnx.Linear, 8, 16), nnx.relu, jzero.LayerSpec(nnx.Linear, 16, 4)]
    model = jzero.PipelineModule(layers, num_stages=2, loss_fn=lambda y, labels: ((y - labels) ** 2).mean())
    config = {"train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": 3, "optimizer": {"type": "SGD"}}
    step = jzero.make_train_step(model, config, mesh=jzero.make_mesh(pipe=2))
    n = step.batch_sizes.train
    found = step_flops(step, step.trace(tuple(jax.ShapeDtypeStruct((n, w), jnp.float32) for w in (8, 4))))
    # A device's mean over the two stages, in each of four ticks.
    assert found.whole.forward == 4 * (2 * MICRO * 8 * 16 + 2 * MICRO * 16 * 4) / 2
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


@pytest.mark.parametrize("mesh", some([{}, {"pipe": 2}], [{}]), ids=["stage 3", "pipeline"])
def test_names_change_no_program(mesh, monkeypatch):
    def text():
        config = {
            "train_micro_batch_size_per_gpu": MICRO, "gradient_accumulation_steps": 2, "mesh": mesh,
            "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        }  # fmt: skip
        step = jzero.make_train_step(jzero.from_flax(lambda rngs: Llama(C, rngs=rngs)), config)
        tokens = jax.ShapeDtypeStruct((step.batch_sizes.train, S), jnp.int32)
        lowered = step.lower({"inputs": tokens, "labels": tokens})
        return lowered.as_text(), lowered.as_text(debug_info=True)

    program, with_names = text()
    monkeypatch.setattr(jax, "named_scope", lambda name: contextlib.nullcontext())
    monkeypatch.setattr(nnx_model, "name_parts", lambda module: None)
    assert text()[0] == program
    assert ("attention/qkv" in with_names, "attention/qkv" in text()[1]) == (True, False)


def test_modules_of_any_class_compute_the_same():
    """Naming a part changes its class: its own keywords stay, and a class that allows no other goes without a name."""

    class Listing(nnx.Module, pytree=False):
        def __init__(self, rngs):
            self.fc = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            self.seen = [x]  # as a pytree, Flax would refuse it
            return self.fc(x)

    class Registered(nnx.Module):
        def __init_subclass__(cls, *, key, **more):
            super().__init_subclass__(**more)

    class Part(Registered, key="part"):
        def __init__(self, rngs):
            self.fc = nnx.Linear(4, 4, rngs=rngs)

        def __call__(self, x):
            return self.fc(x)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = Listing(rngs), Part(rngs)

        def __call__(self, x):
            return self.second(self.first(x))

    x = jnp.ones((2, 4))
    model = jzero.from_flax(lambda rngs: Net(rngs), lambda module, batch: jnp.mean(module(batch) ** 2))
    params = model.init(jax.random.key(0))
    first, second = params["first"]["fc"], params["second"]["fc"]
    y = (x @ first["kernel"] + first["bias"]) @ second["kernel"] + second["bias"]
    np.testing.assert_allclose(model.loss(params, x, jax.random.key(0)), jnp.mean(y**2), rtol=1e-6)


# ------------------------------------------------------------------------------------------- what is printed


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
    assert (
        some_flops().totals(0.01, "Some GPU")[1].endswith("300.0 TFLOP/s per device; the peak of Some GPU is unknown")
    )
    again = some_flops(modules=(Module((), 10, 1e12, 2e12, 1e12),)).totals(0.01, "NVIDIA H200")
    assert again[1].endswith("(MFU); with what is recomputed 400.0, 40.4 %")
    assert len(some_flops().totals(0.01, "cpu")) == 1


def test_what_a_table_shows(monkeypatch):
    """Plain for a file, also if the output is a terminal."""
    found = some_flops()
    names = [line.split()[0] for line in found.table("title").splitlines()[2:]]
    assert names == ["the", "stack", "head"]
    assert len(found.table("title", depth=0).splitlines()) == 3
    assert [line.split()[0] for line in found.table("title", top=1).splitlines()[2:]] == ["the", "stack"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert "\x1b" in found.table("title")
    assert "\x1b" not in found.table("title", plain=True)


def test_the_engine_writes_a_table_once(capsys, tmp_path):
    file = tmp_path / "new" / "flops.txt"
    made = build(more={"flops_profiler": {"enabled": True, "profile_step": 1, "output_file": str(file)}})[0]
    capsys.readouterr()
    printed = []
    for seed in range(3):
        made.train_batch(rows(seed))
        printed.append(capsys.readouterr().out)
    written = f"FLOPs of step 2: matmuls on one of 4 devices: written to {file}\n"
    assert printed == ["", written, ""]  # the first step compiles
    text = file.read_text()
    assert re.search(r"^  stack +128 ", text, re.M)  # two layers of 8 x 8
    assert "TFLOP/s" not in text  # CPUs have no rate


@pytest.mark.slow
def test_a_run_that_resumes_after_the_step_has_its_table(capsys, tmp_path):
    before = build()[0]
    for seed in range(3):
        before.train_batch(rows(seed))
    before.save_checkpoint(tmp_path).wait()
    made = build(more={"flops_profiler": {"enabled": True, "profile_step": 2}}, resume=tmp_path)[0]
    capsys.readouterr()
    printed = []
    for seed in range(4):
        made.train_batch(rows(seed))
        printed.append(capsys.readouterr().out.partition(":")[0])
    assert printed == ["", "FLOPs of step 5", "", ""]


def test_what_the_config_says():
    config = jzero.Config.load(
        {"train_batch_size": 8, "flops_profiler": {"enabled": True, "recompute_fwd_factor": 0.0}}
    )
    assert [(r.key, r.by) for r in config.replaced] == [
        ("flops_profiler.recompute_fwd_factor", "the compiled step, which shows what is recomputed")
    ]
    with pytest.raises(jzero.ConfigError, match="module_depth = -2: must be an integer >= -1"):
        jzero.Config.load({"train_batch_size": 8, "flops_profiler": {"module_depth": -2}})


def test_a_program_that_no_one_can_read_trains_on(capsys, monkeypatch):
    def fail(*_):
        raise ValueError("a new form\nof two lines")

    monkeypatch.setattr(profiles, "step_flops", fail)
    monkeypatch.setattr(profiles, "collectives", fail)
    made = build(more={"flops_profiler": {"enabled": True}, "comms_logger": {"enabled": True}})[0]
    for seed in range(2):
        made.train_batch(rows(seed))
    lines = capsys.readouterr().out.splitlines()
    tables = [line for line in lines if "no table" in line]
    assert [line.split(":")[0] for line in tables] == ["comms_logger", "flops_profiler"]
    assert made.global_steps == 2
