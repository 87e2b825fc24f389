"""Measures the rates of the GPUs at hand in about a minute, for `jzero.planner.step_time`.

Rates under a power cap fall within seconds, so products run for ten seconds and only the second half counts; what
follows is measured while the GPU is hot. At the end one real step tells by how much the walk is off.
"""

from __future__ import annotations

import datetime
import importlib
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.errors import ConfigError
from jzero.layout import offload
from jzero.mesh import make_mesh
from jzero.planner.gpus import gpu_key
from jzero.planner.named_models import named_model
from jzero.planner.rates import MEASURED, Rates
from jzero.planner.step_time import step_time
from jzero.step.train_step import make_train_step

_WARM = 4  # steps
_CALLS = 5  # in flight before the host waits
_ARRAYS = 16  # moved by one program, so that its start does not count
_HEADS, _KV_HEADS = 32, 8
_OVERLAP = {"xla_gpu_enable_latency_hiding_scheduler": True}
_ENOUGH = 0.7 * 40 * 2**30  # bytes that XLA has of such a GPU


@dataclass(frozen=True)
class Sizes:
    """The Llama whose layers and step a calibration measures, bytes of arrays and messages, and seconds.

    Attributes:
      preset, layers: of jzero.models.llama; rows, sequence: of a batch of one GPU.
    """

    preset: str = "8b"
    layers: int = 4
    rows: int = 2
    sequence: int = 4096
    attention_tokens: int = 16384
    lengths: tuple[int, int] = (1024, 16384)
    head_widths: tuple[int, ...] = (64, 128)
    array: int = 2**30
    message: int = 128 * 2**20
    hot: float = 10.0
    each: float = 1.0

    @property
    def shape(self) -> Any:
        """The shape of the Llama, a LlamaConfig."""
        return importlib.import_module("jzero.models.llama").preset(self.preset, num_layers=self.layers)


SMALL_GPU = Sizes(preset="1b", rows=1, array=2**28)  # for GPUs of less than 40 GiB


def measured_ratio(devices: list[jax.Device], rates: Rates, sizes: Sizes) -> float:
    """Return the measured time of a step on the devices, at ZeRO stage 3 if they are several, over its estimate.

    A CPU's program has no schedule to walk; its ratio is 1.
    """
    config = {
        "train_micro_batch_size_per_gpu": sizes.rows,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3 if len(devices) > 1 else 0},
    }
    model, shapes = named_model(f"llama:{sizes.preset}", sizes.sequence, (f"num_layers={sizes.layers}",))
    step = make_train_step(model, config, mesh=make_mesh(config, devices=devices))
    random = np.random.default_rng(0)
    tokens = jax.tree.map(
        lambda x: random.integers(0, sizes.shape.vocab_size, x.shape, x.dtype), shapes(step.batch_sizes.train)
    )
    batch, state = step.place(tokens), step.init(jax.random.key(0))
    times, begin = list[float](), time.perf_counter()
    while len(times) < 2 * _WARM or time.perf_counter() - begin < 5 * sizes.each:
        start = time.perf_counter()
        state, _ = step(state, batch)
        jax.block_until_ready(state)
        times.append(time.perf_counter() - start)
    if devices[0].platform != "gpu":
        return 1.0
    return statistics.median(times[_WARM:]) / step_time(step.lower(batch).compile(), rates, mesh=step.mesh).step_s


def calibrate(
    devices: list[jax.Device] | None = None, *, sizes: Sizes | None = None, log: Callable[[str], object] = print
) -> Rates:
    """Measure the rates of the GPUs of this process.

    What is not measured stays as in `Rates.of`: float8 and float32 products, links between hosts, latencies, and the
    share by which collectives slow compute.

    Args:
        devices: default `jax.local_devices()`, all of one kind on one host.
        sizes: default: for the memory of the first device.
        log: called with a line after each measurement.

    Raises:
        ConfigError: the devices are no GPUs, or of no kind that jzero knows.
    """
    devices = devices or jax.local_devices()
    if devices[0].platform != "gpu":
        there = f"{len(devices)} x {devices[0].device_kind}"
        raise ConfigError(
            f"calibrate: the devices are {there}, no GPUs; run it on the machine whose GPUs you plan for, with a jax "
            "that finds them"
        )
    memory = (devices[0].memory_stats() or {}).get("bytes_limit", 0)
    return measured(Rates.of(gpu_key(devices[0])), devices, sizes or (SMALL_GPU if memory < _ENOUGH else Sizes()), log)


def measured(rates: Rates, devices: list[jax.Device], sizes: Sizes, log: Callable[[str], object]) -> Rates:
    """Replace the rates that can be measured; arguments as for `calibrate`."""
    rates = replace(rates, origin=MEASURED, source=_source(devices))
    with jax.default_device(devices[0]):
        rates = _products(rates, sizes)
        log(f"matmuls: {dict(rates.products)['f16'] / 1e12:.0f} TFLOP/s")
        rates = _attention(rates, sizes, devices[0])
        log(f"attention: forward {rates.attention_forward}, backward {rates.attention_backward}, FLOP/s by head width")
        rates = _memory(rates, sizes)
        log(f"memory: {rates.elementwise / 1e12:.2f} TB/s")
    rates = _host_memory(devices, rates, sizes)
    log(f"host memory: read {rates.host_read}, update {rates.host_update}, bytes/s by GPUs")
    rates = _links(devices, rates, sizes)
    log(f"links: gather {rates.gather}, scatter {rates.scatter}, permute {rates.permute:.3g}, late {rates.late:.2f}")
    rates = replace(rates, scale=measured_ratio(devices, replace(rates, scale=1.0), sizes))
    log(f"step: scale {rates.scale:.3f}")
    return rates


def _source(devices: list[jax.Device]) -> str:
    """Describe when and on what the rates are measured; the power cap is nvidia-smi's, if there is one."""
    query = ["nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader"]
    try:
        caps = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        caps = ""
    cap = caps.split("\n")[0].strip() or "unknown"
    where = f"{len(devices)} x {devices[0].device_kind}, power cap {cap}, jax {jax.__version__}"
    today = datetime.datetime.now(datetime.UTC).date()
    return f"{today}, {where}, jzero calibrate; not measured: f8, f32, latencies, hosts, slow"


def hot_seconds(f: Callable, *args: object, seconds: float) -> float:
    """Return the median seconds of a call in the second half of the time, several calls in flight."""
    jax.block_until_ready(f(*args))
    begin, times = time.perf_counter(), list[float]()
    while len(times) < 2 or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        for _ in range(_CALLS):
            out = f(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / _CALLS)
    return statistics.median(times[len(times) // 2 :])


# ---------------------------------------------------------------- one GPU


def _products(rates: Rates, sizes: Sizes) -> Rates:
    """Measure the twelve products of a layer, forward and backward."""
    key, shape = jax.random.key(0), sizes.shape
    d, ff, width = shape.d_model, shape.d_ff, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    matrices = (d, width), (d, d), (d, 2 * ff), (ff, d)  # inputs and outputs of qkv, output, gate and up, down
    tokens, normal = sizes.rows * sizes.sequence, partial(jax.random.normal, dtype=jnp.bfloat16)
    operands = [(normal(key, (tokens, k)), normal(key, (k, n)), normal(key, (tokens, n))) for k, n in matrices]
    products = jax.jit(lambda operands: [(x @ w, g @ w.T, x.T @ g) for x, w, g in operands])
    flops = 6.0 * tokens * sum(k * n for k, n in matrices)
    taken = hot_seconds(products, operands, seconds=sizes.hot)
    rate = flops / max(taken - 12 * (rates.product_start + rates.gap), taken / 2)
    return replace(rates, products=tuple({"f16": rate, **{k: v for k, v in rates.products if k != "f16"}}.items()))


def _attention(rates: Rates, sizes: Sizes, device: jax.Device) -> Rates:
    """Measure attention at some head widths and two lengths, forward and backward."""
    newer = device.platform == "gpu" and float(device.compute_capability) >= 8.0  # Ampere, which cuDNN's kernel needs
    kernel: Literal["cudnn", "xla"] = "cudnn" if newer else "xla"
    found = list[list[tuple[float, float]]]()
    for width in sizes.head_widths:
        short, long = (_attention_seconds(rates, sizes, kernel, width, length) for length in sizes.lengths)
        found.append([_rate_and_row(*both, sizes.lengths) for both in zip(short, long, strict=True)])
    forward, backward = zip(*found, strict=True)
    return replace(
        rates,
        attention_forward=tuple(zip(sizes.head_widths, (rate for rate, _ in forward), strict=True)),
        attention_backward=tuple(zip(sizes.head_widths, (rate for rate, _ in backward), strict=True)),
        row_forward=statistics.median(row for _, row in forward),
        row_backward=statistics.median(row for _, row in backward),
    )


def _attention_seconds(
    rates: Rates, sizes: Sizes, kernel: Literal["cudnn", "xla"], width: int, S: int
) -> tuple[float, float]:
    """Return the seconds per FLOP of one key for all queries, forward and backward, at a length S of the rows."""
    B = max(1, sizes.attention_tokens // S)
    q = jax.random.normal(jax.random.key(1), (B, S, _HEADS, width), jnp.bfloat16)
    k = v = q[:, :, :_KV_HEADS]
    f = partial(jax.nn.dot_product_attention, is_causal=True, implementation=kernel)

    def total(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return f(q, k, v).astype(jnp.float32).sum()

    forward = hot_seconds(jax.jit(f), q, k, v, seconds=sizes.each)
    both = hot_seconds(jax.jit(jax.grad(total, (0, 1, 2))), q, k, v, seconds=sizes.each)
    alone, back = (max(s - rates.attention_start, 0.1 * forward) for s in (forward, both - forward))
    per_query = 4.0 * B * S * _HEADS * width
    return alone / per_query, back / (2.5 * per_query)


def _rate_and_row(short: float, long: float, lengths: tuple[int, int]) -> tuple[float, float]:
    """Solve seconds per FLOP of a key = (keys + row) / rate, with a causal mask's mean of keys; row is at least 0."""
    keys = [(S + 1) / 2 for S in lengths]
    slope = max((long - short) / (keys[1] - keys[0]), 0.1 * long / keys[1])
    row = max(0.0, long / slope - keys[1])
    return (keys[1] + row) / long, row


def _memory(rates: Rates, sizes: Sizes) -> Rates:
    """Measure an optimizer's update, a reduction over rows, and the transpose of attention's layout."""
    n = sizes.array // 4
    p, m, v = (jnp.full(n, value, jnp.float32) for value in (1.0, 0.1, 0.1))
    g = jnp.full(n, 0.1, jnp.bfloat16)

    def update(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        wide = g.astype(jnp.float32)
        m, v = 0.9 * m + 0.1 * wide, 0.95 * v + 0.05 * wide * wide
        return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), m, v

    elementwise = (3 * 4 + 2 + 3 * 4) * n / hot_seconds(jax.jit(update), p, m, v, g, seconds=sizes.each)
    width = sizes.shape.d_model
    rows = jnp.full((sizes.array // 2 // width, width), 0.5, jnp.bfloat16)
    squares = jax.jit(lambda x: jnp.square(x.astype(jnp.float32)).sum(-1))
    reductions = rows.nbytes / hot_seconds(squares, rows, seconds=sizes.each)
    heads = rows.reshape(-1, sizes.lengths[0] // 16, 16, width // 16)
    turn = jax.jit(lambda x: 2 * jnp.swapaxes(x, 1, 2))
    transposes = 2 * rows.nbytes / hot_seconds(turn, heads, seconds=sizes.each)
    many = rates.many * reductions / rates.reductions
    return replace(rates, elementwise=elementwise, reductions=reductions, transposes=transposes, many=many)


# ---------------------------------------------------------------- all GPUs of a host


def _host_memory(devices: list[jax.Device], rates: Rates, sizes: Sizes) -> Rates:
    """Measure 1, 2, 4, ... GPUs at once: copies of host memory, and an update that reads and writes it in kernels."""
    read, update = dict[int, float](), dict[int, float]()
    for n in (2**i for i in range(len(devices).bit_length())):
        mesh = Mesh(np.array(devices[:n]), ("x",))
        there, here = (NamedSharding(mesh, P("x"), memory_kind=kind) for kind in (offload.HOST, "device"))
        x = jax.device_put(jnp.ones(n * sizes.array // 4, jnp.float32), there)
        copied = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device), out_shardings=here)
        read[n] = sizes.array / hot_seconds(copied, x, seconds=sizes.each)
        update[n] = sizes.array / hot_seconds(_updates(x, there), seconds=sizes.each)
    return replace(rates, host_read=tuple(read.items()), host_update=tuple(update.items()))


def _updates(x: jax.Array, where: NamedSharding) -> Callable[[], jax.Array]:
    """Return a function that updates an array in host memory in place, as a step does."""
    halved = jax.jit(lambda x: offload.as_stored(0.5 * offload.on_device(x), x), donate_argnums=0, out_shardings=where)

    def once() -> jax.Array:
        nonlocal x
        x = halved(x)
        return x

    return once


def _links(devices: list[jax.Device], rates: Rates, sizes: Sizes) -> Rates:
    """Measure collectives of 2, 4, ... GPUs alone, and how late gathers of all begin beside products."""
    gather, scatter, permute = dict[int, float](), dict[int, float](), rates.permute
    for n in (2**i for i in range(1, len(devices).bit_length())):
        mesh = Mesh(np.array(devices[:n]), ("x",))
        parts, wholes = _arrays(mesh, sizes, P("x")), _arrays(mesh, sizes, P())
        ring, sent = [(i, (i + 1) % n) for i in range(n)], _ARRAYS * sizes.message * (n - 1) / n
        gathers = _mapped(_each(partial(lax.all_gather, axis_name="x", tiled=True)), mesh, P("x"), P())
        scatters = _mapped(_each(partial(lax.psum_scatter, axis_name="x", tiled=True)), mesh, P(), P("x"))
        permutes = _mapped(_each(partial(lax.ppermute, axis_name="x", perm=ring)), mesh, P(), P())
        gather[n] = sent / hot_seconds(gathers, parts, seconds=sizes.each)
        scatter[n] = sent / hot_seconds(scatters, wholes, seconds=sizes.each)
        permute = _ARRAYS * sizes.message / hot_seconds(permutes, wholes, seconds=sizes.each)
    if not gather:
        return rates
    rates = replace(rates, gather=tuple(gather.items()), scatter=tuple(scatter.items()), permute=permute)
    return replace(rates, late=_late(mesh, rates, sizes))


def _arrays(mesh: Mesh, sizes: Sizes, spec: P) -> list[jax.Array]:
    make = jax.jit(
        lambda: [jnp.full(sizes.message // 2, i, jnp.bfloat16) for i in range(_ARRAYS)],
        out_shardings=NamedSharding(mesh, spec),
    )
    return make()


def _mapped(
    f: Callable, mesh: Mesh, given: P | tuple[P, P], returned: P, options: dict[str, bool] | None = None
) -> jax.stages.Wrapped:
    mapped = jax.shard_map(f, mesh=mesh, in_specs=given, out_specs=returned, check_vma=False)
    return jax.jit(mapped, compiler_options=options)


def _each(f: Callable) -> Callable:
    return lambda arrays: [f(x) for x in arrays]


def _chain(gathered: bool, x: jax.Array, weights: list[jax.Array]) -> jax.Array:
    """Multiply by one matrix after the other, each gathered before: XLA gathers the next one beside a product."""
    for w in weights:
        x = x @ (lax.all_gather(w, "x", tiled=True) if gathered else w)
    return x


def _late(mesh: Mesh, rates: Rates, sizes: Sizes) -> float:
    """Measure for which share of the product beside it a gather waits; the walk tells what no and all would take."""
    shape = sizes.shape
    x = jnp.ones((sizes.rows * sizes.sequence, shape.d_model), jnp.bfloat16)
    pair = [(shape.d_model, shape.d_ff), (shape.d_ff, shape.d_model)]
    weights = [jnp.zeros(dims, jnp.bfloat16) for dims in _ARRAYS // 2 * pair]
    on_gpu, compiled, seconds = mesh.devices.flat[0].platform == "gpu", [], []
    for spec in (P(), P("x")):
        f = _mapped(partial(_chain, spec != P()), mesh, (P(), spec), P(), _OVERLAP if on_gpu else None)
        given = jax.device_put((x, weights), (NamedSharding(mesh, P()), NamedSharding(mesh, spec)))
        compiled.append(f.lower(*given).compile())
        seconds.append(hot_seconds(compiled[-1], *given, seconds=3 * sizes.each))
    if not on_gpu:
        return rates.late  # a CPU's program has one stream
    none, whole = (
        step_time(compiled[1], replace(rates, late=late)).step_s - step_time(compiled[0], rates).step_s
        for late in (0.0, 1.0)
    )
    return float(np.clip((seconds[1] - seconds[0] - none) / max(whole - none, 1e-9), 0.0, 1.0))
