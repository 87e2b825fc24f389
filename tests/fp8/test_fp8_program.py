"""The compiled H100 program multiplies the chosen weights in fp8 three times, and gathers one byte per element."""

import dataclasses
import re
from collections import Counter
from math import prod

import jax
import jax.numpy as jnp
import pytest
from helpers.cuda import needs_cuda_compiler

import jzero
from jzero.errors import ConfigError
from jzero.planner import Rates, collectives, gpu_devices, matmuls, state_bytes, step_time
from models.llama import Llama, LlamaConfig

pytestmark = [pytest.mark.gpu_compile, needs_cuda_compiler, pytest.mark.usefixtures("no_compilation_cache")]

LAYERS, WIDTH, ROWS, LENGTH, VOCAB, ZERO = 2, 128, 8, 128, 256, 2
SEPARATE = {f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in ("all_gather", "reduce_scatter")}
MODEL = jzero.from_flax(
    lambda rngs: Llama(LlamaConfig(LAYERS, WIDTH, 4, 4, 2 * WIDTH, vocab_size=VOCAB, attention="xla"), rngs=rngs)
)
WEIGHTS = {"qkv": 3 * WIDTH * WIDTH, "out": WIDTH * WIDTH, "gate_up": 4 * WIDTH * WIDTH, "down": 2 * WIDTH * WIDTH}


def step_on(devices, *, stage=2, model=MODEL, **fp8):
    config = {
        "train_batch_size": ROWS, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "bf16": {"enabled": True},
        "fp8": {"enabled": True, "min_size": WIDTH, **fp8}, "stack": {"unroll": True},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "compiler_options": {"xla_gpu_autotune_level": 0} | SEPARATE,
    }  # fmt: skip
    return jzero.make_train_step(model, config, mesh=jzero.make_mesh(zero=len(devices), devices=devices))


def compiled(**settings):
    step, tokens = step_on(gpu_devices("h100", ZERO), **settings), jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    return step, step.lower({"inputs": tokens, "labels": tokens}).compile()


def products_by_target(text):
    """How often each cuBLAS function is called, and what dtypes it multiplies for a weight of the stack."""
    dtypes = dict(re.findall(r"^\s*(?:ROOT )?(%[\w.-]+) = \(?(\w+)\[", text, re.M))
    calls = re.findall(r'custom-call\(([^)]*)\).*custom_call_target="(__cublas\$lt\$matmul[^"]*)"(.*)', text)
    found = Counter(target for _, target, _ in calls)
    of_stack = [
        tuple(dtypes[name] for name in operands.split(", ")[:2])
        for operands, _, rest in calls
        if re.search(r'op_name="[^"]*stack[^"]*/(qkv|out|gate_up|down)/', rest)
    ]
    return found, of_stack


def agreed_maxima(text):
    """The numbers in each all-reduce of maxima."""
    maximum = set(re.findall(r"^(%[\w.-]+) \([^\n]*\{\n(?:(?!\}).*\n)*?.* ROOT?[^\n]* maximum\(", text, re.M))
    reduced = re.findall(r"= f32\[(\d+)\]\S* all-reduce(?:-start)?\(.*to_apply=(%[\w.-]+)", text)
    return [int(size) for size, region in reduced if region in maximum]


MIXED = {("f8e4m3fn", "f8e4m3fn"), ("f8e5m2", "f8e4m3fn"), ("f8e4m3fn", "f8e5m2")}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "fp8_format"), [(2, "hybrid"), (3, "hybrid"), (2, "e4m3")])
def test_three_products_of_each_weight_and_one_byte_gathered(stage, fp8_format):
    step, program = compiled(stage=stage, format=fp8_format)
    found, of_stack = products_by_target(program.as_text())
    assert found["__cublas$lt$matmul$f8"] == 3 * len(WEIGHTS) * LAYERS
    assert set(of_stack) <= (MIXED if fp8_format == "hybrid" else {("f8e4m3fn", "f8e4m3fn")})
    attention, head = 2 + 4, 3  # batched products of scores and values; XLA calls the score's gradient's apart
    assert found["__cublas$lt$matmul"] == attention * LAYERS + head
    moved = Counter()
    for row in collectives(program, step.mesh):
        moved[row.kind, row.dtype, row.bytes] += row.operands * row.times
    passes = 2 if stage == 3 else 1  # stage 3 gathers each weight again, and keeps none
    gathered = {key[1:]: n for key, n in moved.items() if key[0] == "all-gather" and key[2] > 2 * WIDTH}
    ends = {("bf16", 2 * VOCAB * WIDTH): 2}
    assert gathered == ends | {("f8e4m3fn", size): passes * LAYERS for size in WEIGHTS.values()}
    scattered = {size: n for (kind, dtype, size), n in moved.items() if kind == "reduce-scatter" and dtype == "bf16"}
    assert all(scattered[2 * size] >= LAYERS for size in WEIGHTS.values())  # gradients stay bfloat16
    sizes = agreed_maxima(program.as_text())
    assert sum(sizes) == len(WEIGHTS) * LAYERS
    assert len(sizes) <= LAYERS  # the maxima of a layer's weights together


def test_gpus_without_fp8_are_refused():
    assert step_on(gpu_devices("l40s", ZERO)).config.fp8.enabled  # Ada has it
    with pytest.raises(ConfigError, match=r"fp8.enabled = true on .*compute capability 8.0\): .*8.9 or higher"):
        step_on(gpu_devices("a100", ZERO))


@pytest.mark.slow
def test_a_plan_counts_one_byte_and_the_rate_of_fp8():
    """The parameters of stage 2 are what it gathers; a product in fp8 takes the time of its rate."""
    (step, fp8), (plain, bf16) = compiled(), compiled(enabled=False)
    for each, program in ((step, fp8), (plain, bf16)):
        gathered = sum(
            r.bytes * r.operands * r.times for r in collectives(program, each.mesh) if r.kind == "all-gather"
        )
        assert state_bytes(each).parameters == gathered
    saved = LAYERS * sum(WEIGHTS.values())  # a byte each
    assert state_bytes(plain).parameters - state_bytes(step).parameters == saved
    flops = LAYERS * 3 * 2 * sum(WEIGHTS.values()) * ROWS * LENGTH // ZERO
    rates = dataclasses.replace(  # so slow that a product takes the time of its FLOPs
        Rates.of("h100"), products=(("f8", 2e9), ("f16", 1e9), ("tf32", 1e9), ("f32", 1e9)), scale=1.0
    )
    times = [step_time(program, rates).by["products"] for program in (fp8, bf16)]
    exact = (1 + 2 * 1.08) / 3  # two of three products sum exactly
    assert times[1] - times[0] == pytest.approx(flops / 1e9 - exact * flops / 2e9)


def test_as_many_flops_are_counted_as_in_bf16():
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    steps = step_on(gpu_devices("h100", ZERO)), step_on(gpu_devices("h100", ZERO), enabled=False)
    fp8, bf16 = (matmuls(step.trace({"inputs": tokens, "labels": tokens})) for step in steps)
    assert (fp8.count, fp8.flops, fp8.float32) == (bf16.count, bf16.flops, 0)
    assert Counter((p.scopes, p.part, p.flops) for p in fp8.all) == Counter(
        (p.scopes, p.part, p.flops) for p in bf16.all
    )


def casts_of(text):
    """The operands and results of each kernel that casts."""
    return re.findall(r"= \(([^)]*)\) custom-call\(([^)]*)\).*fp8_cast_pair", text)


def sizes_searched(text):
    """Return the number of elements of each array whose maximum is found for the stack's products."""
    shapes = dict(re.findall(r"^\s*(?:ROOT )?(%[\w.-]+) = \w+\[([\d,]*)\]", text, re.M))
    operands = re.findall(
        r" reduce\((%[\w.-]+), .*op_name=\"[^\"]*stack[^\"]*/(?:qkv|out|gate_up|down)/.*reduce_max", text
    )
    return [prod(int(n) for n in shapes[name].split(",") if n) for name in operands]


@pytest.mark.slow
def test_no_pass_finds_a_maximum_first():
    """The kernels that cast find the maxima, and the devices agree on them at the end of the step."""
    text = compiled(recipe="delayed")[1].as_text()
    found, of_stack = products_by_target(text)
    assert found["__cublas$lt$matmul$f8"] == 3 * len(WEIGHTS) * LAYERS
    assert set(of_stack) <= MIXED
    casts = casts_of(text)
    assert len(casts) == 2 * len(WEIGHTS) * LAYERS  # of activations and of gradients
    assert all(re.search(r"f32\[\d+,\d+\]", results) for results, _ in casts)
    whole = ROWS // ZERO * LENGTH * WIDTH  # elements of the smallest activation
    assert max(sizes_searched(text)) <= whole / 1024  # tiles
    assert max(sizes_searched(compiled()[1].as_text())) >= whole
    assert not agreed_maxima(text)
    # One kernel for each layer of a weight reads its masters, casts them, and finds their maximum.
    kernels = re.findall(
        r"= \((s32\[[^\n]*|f8e4m3fn\[[^\n]*)\) fusion\([^\n]*shard_map/(?:reduce_max|convert_element_type)", text
    )
    assert sorted(results.count("f8e4m3fn[") for results in kernels) == [1] * len(WEIGHTS) * LAYERS
    assert all(results.count("s32[") == 1 for results in kernels)


class Separate:
    """Attention with its three projections apart, as most models have them."""

    def init(self, rng):
        names, shape = ("q", "k", "v", "o"), (LAYERS, WIDTH, WIDTH)
        keys = dict(zip(names, jax.random.split(rng, 4), strict=True))
        stack = {name: 0.1 * jax.random.normal(key, shape) for name, key in keys.items()}
        return {"ends": {"w": jax.random.normal(rng, (VOCAB, WIDTH))}, "stack": stack}

    def prefix(self, ends, batch, rng):
        return ends["w"][batch["inputs"]]

    def block(self, w, x, rng):
        h = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        q, k, v = h @ w["q"], h @ w["k"], h @ w["v"]
        weights = jax.nn.softmax(q @ k.swapaxes(1, 2))
        return x + (weights @ v) @ w["o"]

    def suffix(self, ends, x, batch, rng):
        return jnp.square((x @ ends["w"].T).astype(jnp.float32)).mean()

    def loss(self, params, batch, rng):
        return jzero.stack_loss(self, params, batch, rng)


@pytest.mark.parametrize("recipe", [pytest.param("current", marks=pytest.mark.slow), "delayed"])
def test_products_of_one_activation_share_its_cast(recipe):
    """And XLA does not join them to one product in bfloat16."""
    step = step_on(gpu_devices("h100", 1), model=Separate(), recipe=recipe)
    text = step.lower({"inputs": jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)}).compile().as_text()
    assert products_by_target(text)[0]["__cublas$lt$matmul$f8"] == 3 * 4 * LAYERS
    assert len(casts_of(text)) == (2 + 4) * LAYERS  # two activations, four gradients
