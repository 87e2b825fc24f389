"""The compiled H100 program multiplies the chosen weights in fp8 three times, and gathers one byte per element."""

import re
from collections import Counter
from math import prod

import jax
import jax.numpy as jnp
import pytest
from helpers.named_models import model_of
from helpers.programs import needs_gpu_programs, pairs, traced
from helpers.refusals import refuses

import jzero
from jzero.model import stack_loss
from jzero.planner import collectives, gpu_devices
from models.llama import LlamaConfig

pytestmark = needs_gpu_programs

LAYERS, WIDTH, ROWS, LENGTH, VOCAB, ZERO = 2, 128, 8, 128, 256, 2
SEPARATE = {f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in ("all_gather", "reduce_scatter")}
MODEL = model_of(LlamaConfig(LAYERS, WIDTH, 4, 4, 2 * WIDTH, vocab_size=VOCAB, attention="xla"))
BATCH = pairs(ROWS, LENGTH)
TOKENS = {"inputs": BATCH["inputs"]}
WEIGHTS = {"qkv": 3 * WIDTH * WIDTH, "out": WIDTH * WIDTH, "gate_up": 4 * WIDTH * WIDTH, "down": 2 * WIDTH * WIDTH}


def step_on(devices, batch=BATCH, *, stage=2, model=MODEL, unroll=True, **fp8):
    return traced(
        model, jzero.make_mesh(zero=len(devices), devices=devices), batch, SEPARATE, train_batch_size=ROWS,
        fp8={"enabled": True, "min_size": WIDTH, **fp8}, stack={"unroll": unroll},
        zero_optimization={"stage": stage, "stage3_param_persistence_threshold": 0},
    )  # fmt: skip


def compiled(**settings):
    step, trace = step_on(gpu_devices("h100", ZERO), **settings)
    return step, trace.lower().compile()


def products_by_target(text):
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
    assert step_on(gpu_devices("l40s", 1), TOKENS, model=Separate())[0].config.fp8.enabled  # Ada has it
    words = r"fp8.enabled = true on .*compute capability 8.0\): .*8.9 or higher"
    refuses(lambda: step_on(gpu_devices("a100", ZERO)), words)


def casts_of(text):
    return re.findall(r"= \(([^)]*)\) custom-call\(([^)]*)\).*fp8_cast_pair", text)


def sizes_searched(text):
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

    loss = stack_loss


def test_products_of_one_activation_share_its_cast():
    """And XLA does not join them to one product in bfloat16."""
    _, trace = step_on(gpu_devices("h100", 1), TOKENS, model=Separate(), unroll=False, recipe="delayed")
    text = trace.lower().compile().as_text()
    assert products_by_target(text)[0]["__cublas$lt$matmul$f8"] == 3 * 4  # of a layer
    assert len(casts_of(text)) == 2 + 4  # two activations, four gradients
