"""Measures the rates of the GPUs at hand in about a minute, for `jzero.planner.step_time`.

Rates under a power cap fall within seconds, so products run for ten seconds and only the second half counts; what
follows is measured while the GPU is hot. At the end one real step tells by how much the walk is off.
"""

from __future__ import annotations

import datetime
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero.errors import ConfigError
from jzero.offload import transfers
from jzero.planner.calibration_step import DecoderShape, attention_kernel, measured_ratio
from jzero.planner.gpus import GPUS
from jzero.planner.rates import MEASURED, Rates
from jzero.planner.step_time import step_time

_CALLS = 5  # in flight before the host waits
_ARRAYS = 16  # moved by one program, so that its start does not count
_HEADS, _KV_HEADS = 32, 8
_OVERLAP = {"xla_gpu_enable_latency_hiding_scheduler": True}


@dataclass(frozen=True)
class Sizes:
    """What a calibration measures: the shapes of a layer, bytes of arrays and messages, and seconds."""

    shape: DecoderShape = field(default_factory=DecoderShape)
    attention_tokens: int = 16384
    lengths: tuple[int, int] = (1024, 16384)
    head_widths: tuple[int, ...] = (64, 128)
    array: int = 2**30
    message: int = 128 * 2**20
    hot: float = 10.0
    each: float = 1.0


SMALL = Sizes(shape=DecoderShape(width=2048, hidden=8192, rows=1), array=2**28)  # for GPUs of less than 40 GiB
_ENOUGH = 40 * 2**30


def calibrate(
    devices: list[jax.Device] | None = None, *, sizes: Sizes | None = None, log: Callable[[str], Any] = print
) -> Rates:
    """Measure the rates of the GPUs of this process.

    What is not measured stays as in `Rates.of`: float8 and float32 products, links between hosts, latencies, and the
    share by which collectives slow compute.

    Args:
        devices: default `jax.local_devices()`, all of one kind on one host.
        sizes: default: for the memory of the first device.
        log: called with a line after each measurement.

    Raises:
        ConfigError: the devices are of no kind that jzero knows.
    """
    devices = devices or jax.local_devices()
    kinds = {card.description: name for name, card in GPUS.items()}
    if devices[0].platform == "gpu" and devices[0].device_kind not in kinds:
        raise ConfigError(f"calibrate: {devices[0].device_kind!r} is unknown; allowed: {', '.join(kinds)}")
    rates = replace(Rates.of(kinds.get(devices[0].device_kind, "h100")), origin=MEASURED, source=_source(devices))
    sizes = sizes or _sizes(devices[0])
    with jax.default_device(devices[0]):
        rates = replace(rates, **_products(rates, sizes))
        log(f"products: {dict(rates.products)['f16'] / 1e12:.0f} TFLOP/s")
        rates = replace(rates, **_attention(rates, sizes, devices[0]))
        log(f"attention: forward {rates.attention_forward}, backward {rates.attention_backward}, FLOP/s by head width")
        rates = replace(rates, **_memory(rates, sizes))
        log(f"memory: {rates.elementwise / 1e12:.2f} TB/s")
    rates = replace(rates, **_host_memory(devices, sizes))
    log(f"host memory: read {rates.host_read}, update {rates.host_update}, bytes/s by GPUs")
    rates = _links(devices, rates, sizes)
    log(f"links: gather {rates.gather}, scatter {rates.scatter}, permute {rates.permute:.3g}, late {rates.late:.2f}")
    rates = replace(rates, scale=measured_ratio(devices, replace(rates, scale=1.0), sizes.shape, sizes.each))
    log(f"step: scale {rates.scale:.3f}")
    return rates


def _sizes(device: jax.Device) -> Sizes:
    memory = (device.memory_stats() or {}).get("bytes_limit", 0)
    return Sizes() if memory >= _ENOUGH * 0.7 else SMALL


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


def hot_seconds(f: Callable, *args: Any, seconds: float) -> float:
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


def _layer(shape: DecoderShape) -> tuple[Callable, Any, float]:
    """Return the twelve products of a layer, forward and backward, their operands and FLOPs."""
    key, tokens = jax.random.key(0), shape.rows * shape.sequence

    def normal(*dims: int) -> jax.Array:
        return jax.random.normal(key, dims, jnp.bfloat16)

    operands = [(normal(tokens, k), normal(k, n), normal(tokens, n)) for k, n in shape.matrices()]

    def products(operands: Any) -> list[Any]:
        return [(x @ w, g @ w.T, x.T @ g) for x, w, g in operands]

    return products, operands, 6.0 * tokens * sum(k * n for k, n in shape.matrices())


def _products(rates: Rates, sizes: Sizes) -> dict[str, Any]:
    products, operands, flops = _layer(sizes.shape)
    taken = hot_seconds(jax.jit(products), operands, seconds=sizes.hot)
    rate = flops / max(taken - 12 * (rates.product_start + rates.gap), taken / 2)
    return {"products": tuple({"f16": rate, **{k: v for k, v in rates.products if k != "f16"}}.items())}


def _attention(rates: Rates, sizes: Sizes, device: jax.Device) -> dict[str, Any]:
    """Measure cuDNN's attention at some head widths and two lengths, forward and backward."""
    kernel: Any = attention_kernel(device)
    tables: dict[bool, dict[int, float]] = {False: {}, True: {}}
    rows: dict[bool, list[float]] = {False: [], True: []}
    for width in sizes.head_widths:
        taken: dict[bool, list[float]] = {False: [], True: []}
        for S in sizes.lengths:
            B = max(1, sizes.attention_tokens // S)
            q = jax.random.normal(jax.random.key(1), (B, S, _HEADS, width), jnp.bfloat16)
            k = v = q[:, :, :_KV_HEADS]
            f = partial(jax.nn.dot_product_attention, is_causal=True, implementation=kernel)

            def total(q: jax.Array, k: jax.Array, v: jax.Array, f: Callable = f) -> jax.Array:
                return f(q, k, v).astype(jnp.float32).sum()

            forward = hot_seconds(jax.jit(f), q, k, v, seconds=sizes.each)
            both = hot_seconds(jax.jit(jax.grad(total, (0, 1, 2))), q, k, v, seconds=sizes.each)
            per_query = 4.0 * B * S * _HEADS * width
            taken[False].append(max(forward - rates.attention_start, 0.1 * forward) / per_query)
            taken[True].append(max(both - forward - rates.attention_start, 0.1 * forward) / (2.5 * per_query))
        for back, (short, long) in taken.items():
            tables[back][width], more = _rate_and_row(short, long, sizes.lengths)
            rows[back].append(more)
    return {
        "attention_forward": tuple(tables[False].items()),
        "attention_backward": tuple(tables[True].items()),
        "row_forward": statistics.median(rows[False]),
        "row_backward": statistics.median(rows[True]),
    }


def _rate_and_row(short: float, long: float, lengths: tuple[int, int]) -> tuple[float, float]:
    """Solve seconds per FLOP of a key = (keys + row) / rate, with a causal mask's mean of keys; row is at least 0."""
    keys = [(S + 1) / 2 for S in lengths]
    slope = max((long - short) / (keys[1] - keys[0]), 0.1 * long / keys[1])
    row = max(0.0, long / slope - keys[1])
    return (keys[1] + row) / long, row


def _memory(rates: Rates, sizes: Sizes) -> dict[str, Any]:
    """Measure an optimizer's update, a reduction over rows, and the transpose of attention's layout."""
    n = sizes.array // 4
    p, m, v = (jnp.full(n, value, jnp.float32) for value in (1.0, 0.1, 0.1))
    g = jnp.full(n, 0.1, jnp.bfloat16)

    def update(p: jax.Array, m: jax.Array, v: jax.Array, g: jax.Array) -> tuple[jax.Array, ...]:
        wide = g.astype(jnp.float32)
        m, v = 0.9 * m + 0.1 * wide, 0.95 * v + 0.05 * wide * wide
        return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.1 * p), m, v

    elementwise = (3 * 4 + 2 + 3 * 4) * n / hot_seconds(jax.jit(update), p, m, v, g, seconds=sizes.each)
    rows = jnp.full((sizes.array // 2 // sizes.shape.width, sizes.shape.width), 0.5, jnp.bfloat16)
    squares = jax.jit(lambda x: jnp.square(x.astype(jnp.float32)).sum(-1))
    reductions = rows.nbytes / hot_seconds(squares, rows, seconds=sizes.each)
    heads = rows.reshape(-1, sizes.lengths[0] // 16, 16, sizes.shape.width // 16)
    turn = jax.jit(lambda x: 2 * jnp.swapaxes(x, 1, 2))
    transposes = 2 * rows.nbytes / hot_seconds(turn, heads, seconds=sizes.each)
    many = rates.many * reductions / rates.reductions
    return {"elementwise": elementwise, "reductions": reductions, "transposes": transposes, "many": many}


# ---------------------------------------------------------------- all GPUs of a host


def _host_memory(devices: list[jax.Device], sizes: Sizes) -> dict[str, Any]:
    """Measure 1, 2, 4, ... GPUs at once: copies of host memory, and an update that reads and writes it in kernels."""
    read, update = dict[int, float](), dict[int, float]()
    for n in (1, *_groups(len(devices))):
        mesh = Mesh(np.array(devices[:n]), ("x",))
        there, here = (NamedSharding(mesh, P("x"), memory_kind=kind) for kind in (transfers.HOST, "device"))
        x = jax.device_put(jnp.ones(n * sizes.array // 4, jnp.float32), there)
        copied = jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device), out_shardings=here)
        read[n] = sizes.array / hot_seconds(copied, x, seconds=sizes.each)
        update[n] = sizes.array / hot_seconds(_updates(x, there), seconds=sizes.each)
    return {"host_read": tuple(read.items()), "host_update": tuple(update.items())}


def _updates(x: jax.Array, where: NamedSharding) -> Callable[[], jax.Array]:
    """Return a function that updates an array in host memory in place, as a step does."""
    halved = jax.jit(
        lambda x: transfers.as_stored(0.5 * transfers.on_device(x), x), donate_argnums=0, out_shardings=where
    )

    def once() -> jax.Array:
        nonlocal x
        x = halved(x)
        return x

    return once


def _links(devices: list[jax.Device], rates: Rates, sizes: Sizes) -> Rates:
    """Measure collectives of 2, 4, ... GPUs alone, and how late gathers of all begin beside products."""
    gather, scatter, permute = dict[int, float](), dict[int, float](), rates.permute
    for n in _groups(len(devices)):
        mesh = Mesh(np.array(devices[:n]), ("x",))
        parts, wholes = _arrays(mesh, sizes, P("x")), _arrays(mesh, sizes, P())
        sent = _ARRAYS * sizes.message * (n - 1) / n
        gather[n] = sent / hot_seconds(_mapped(_gather, mesh, P("x"), P()), parts, seconds=sizes.each)
        scatter[n] = sent / hot_seconds(_mapped(_scatter, mesh, P(), P("x")), wholes, seconds=sizes.each)
        ring = partial(_permute, [(i, (i + 1) % n) for i in range(n)])
        permute = _ARRAYS * sizes.message / hot_seconds(_mapped(ring, mesh, P(), P()), wholes, seconds=sizes.each)
    if not gather:
        return rates
    rates = replace(rates, gather=tuple(gather.items()), scatter=tuple(scatter.items()), permute=permute)
    return replace(rates, late=_late(mesh, rates, sizes))


def _groups(devices: int) -> Iterator[int]:
    n = 2
    while n <= devices:
        yield n
        n *= 2


def _arrays(mesh: Mesh, sizes: Sizes, spec: P) -> list[jax.Array]:
    make = jax.jit(
        lambda: [jnp.full(sizes.message // 2, i, jnp.bfloat16) for i in range(_ARRAYS)],
        out_shardings=NamedSharding(mesh, spec),
    )
    return make()


def _mapped(f: Callable, mesh: Mesh, given: Any, returned: Any, options: dict[str, Any] | None = None) -> Any:
    mapped = jax.shard_map(f, mesh=mesh, in_specs=given, out_specs=returned, check_vma=False)
    return jax.jit(mapped, compiler_options=options)


def _gather(arrays: list[jax.Array]) -> list[jax.Array]:
    return [lax.all_gather(x, "x", tiled=True) for x in arrays]


def _scatter(arrays: list[jax.Array]) -> list[jax.Array]:
    return [lax.psum_scatter(x, "x", tiled=True) for x in arrays]


def _permute(pairs: list[tuple[int, int]], arrays: list[jax.Array]) -> list[jax.Array]:
    return [lax.ppermute(x, "x", pairs) for x in arrays]


def _chain(gathered: bool, x: jax.Array, weights: list[jax.Array]) -> jax.Array:
    """Multiply by one matrix after the other, each gathered before: XLA gathers the next one beside a product."""
    for w in weights:
        x = x @ (lax.all_gather(w, "x", tiled=True) if gathered else w)
    return x


def _late(mesh: Mesh, rates: Rates, sizes: Sizes) -> float:
    """Measure for which share of the product beside it a gather waits; the walk tells what no and all would take."""
    shape = sizes.shape
    x = jnp.ones((shape.rows * shape.sequence, shape.width), jnp.bfloat16)
    pair = [(shape.width, shape.hidden), (shape.hidden, shape.width)]
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
    return share(seconds[1] - seconds[0], none, whole)


def share(measured: float, least: float, most: float) -> float:
    """Return where a measured value lies between two estimates, from 0 to 1.

    >>> share(3.0, 2.0, 4.0)
    0.5
    """
    return float(np.clip((measured - least) / max(most - least, 1e-9), 0.0, 1.0))
