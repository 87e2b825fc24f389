"""The rates at which a kind of GPU and its links run a training step: measured, or from its data sheet."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from jzero.errors import ConfigError
from jzero.planner.gpus import GPU, gpu

MEASURED: Literal["measured"] = "measured"
DATA_SHEET: Literal["data sheet"] = "data sheet"
UNCERTAINTY_F8 = 0.10  # of a step that multiplies in fp8: nine took 3 to 11 % longer (2026-11-28-two-h200.md)
_SHARE = 0.70  # of a data sheet's FLOP/s that products sustain in a step (0.69 on the H200, 0.70 on the H100)

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Number = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Table = Annotated[tuple[tuple[int, Rate], ...], Field(min_length=1)]


@dataclass(frozen=True)
class Rates:
    """The constants of one kind of GPU and its links, as they are *inside* training steps.

    Attributes:
        kind: the GPU's name.
        origin: `MEASURED` or `DATA_SHEET`.
        source: when and where they were measured, with the power cap, or how they follow from the data sheet.
        products: FLOP/s of matrix products, sustained, by operands: "f8", "f16" (and bf16), "tf32", "f32".
        product_start: seconds per product: prologue, epilogue, tail.
        wide_result: share of a float32 result's traffic that the product does not hide.
        attention_forward, attention_backward: (head width, FLOP/s) of cuDNN's attention over long rows, by the FLOPs
            that a causal mask leaves.
        row_forward, row_backward: how many keys more each query of attention costs: its reading and writing, which do
            not grow with the keys.
        attention_start: seconds per attention kernel.
        elementwise, reductions, transposes: bytes/s read and written.
        many: bytes/s of one reduction over many arrays.
        shortest, gap: seconds of the shortest kernel, and between two kernels.
        gather, scatter: (GPUs in the group, bytes/s that each sends) inside a host, of all-gather and of reduce-scatter
            and all-reduce.
        permute: bytes/s that each GPU sends to another of its host.
        latency: seconds per collective.
        slow: share by which compute slows while a collective runs beside it, which takes SMs and power.
        late: share of the kernel that follows a collective's start that the collective waits for: it holds the SMs.
        hosts: bytes/s per GPU across hosts. Assumed: 400 Gbit/s InfiniBand per GPU (50 GB/s), 0.9 of it used.
        host_read: (GPUs of a host, bytes/s that each moves between its host's memory and itself), one way.
        host_update: the same for kernels that read and write host memory at once: bytes/s each way.
        step: seconds between steps. trip: seconds per trip of a loop.
        scale: the ratio of a real step to the walk, from a calibration.
    """

    kind: str
    origin: Literal["measured", "data sheet"]
    source: str
    products: Annotated[tuple[tuple[str, Rate], ...], Field(min_length=1)]
    attention_forward: Table
    attention_backward: Table
    elementwise: Number
    reductions: Number
    transposes: Number
    many: Number
    gather: Table
    scatter: Table
    permute: Number
    host_read: Table
    host_update: Table
    hosts: Number = 45e9
    product_start: Number = 4e-6
    wide_result: Number = 0.5
    row_forward: Number = 500.0
    row_backward: Number = 500.0
    attention_start: Number = 20e-6
    shortest: Number = 2.0e-6
    gap: Number = 1.5e-6
    latency: Number = 30e-6
    slow: Number = 0.30
    late: Number = 0.95
    step: Number = 3.5e-3
    trip: Number = 5e-6
    scale: Number = 1.0

    @property
    def uncertainty(self) -> float:
        """Return the share of a step's time by which an estimate may be off."""
        return 0.04 if self.origin == MEASURED else 0.10

    @classmethod
    def of(cls, name: str) -> Rates:
        """Return the rates of a GPU of `jzero.planner.GPUS`: the measured ones, or those of its data sheet.

        Raises:
            ConfigError: the name is not in the table.

        >>> Rates.of("h200").uncertainty, Rates.of("a100").uncertainty
        (0.04, 0.1)
        """
        return _MEASURED.get(name) or from_data_sheet(name, gpu(name))

    @classmethod
    def load(cls, path: str | Path) -> Rates:
        """Read the file that `save` or `jzero calibrate` wrote.

        Raises:
            ConfigError: no such file, not JSON, or a field that is missing, unknown or out of range.
        """
        given = f"rates = {str(path)!r}"
        try:
            text = Path(path).read_text()
            values = json.loads(text)
        except OSError as error:
            raise ConfigError(f"{given}: {error.strerror}; `jzero calibrate --out FILE` writes it") from error
        except ValueError as error:
            raise ConfigError(f"{given}: not JSON: {error}") from error
        names, there = {f.name for f in fields(cls)}, set(values) if isinstance(values, dict) else set()
        if names != there:
            raise ConfigError(
                f"{given}: missing {sorted(names - there)}, unknown {sorted(there - names)}; "
                "write the file with `jzero calibrate --out FILE`"
            )
        try:
            return TypeAdapter(cls).validate_json(text, strict=True)
        except ValidationError as error:
            problem = error.errors()[0]
            name, why = problem["loc"][0], problem["msg"].removeprefix("Input ")
            raise ConfigError(f"{path}: {name} = {values[name]!r}: {why}") from None

    def save(self, path: str | Path) -> None:
        """Write the rates as JSON, which `load` reads."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n")


H200 = Rates(
    kind="h200",
    origin=MEASURED,
    source="2026-11-25, two H200s at 700 W, NVLink 18, jax 0.11.2, jzero calibrate; f8 2026-11-22 alone; four GPUs "
    "2026-11-22; tf32, f32: data sheet x 0.70; latencies and slow: fitted to steps of 2026-11-22",
    products=(("f8", 1393e12), ("f16", 678e12), ("tf32", 346e12), ("f32", 46.8e12)),
    attention_forward=((64, 447e12), (128, 579e12)),
    attention_backward=((64, 488e12), (128, 612e12)),
    row_forward=354.0,
    row_backward=759.0,
    elementwise=3.87e12,
    reductions=3.89e12,
    transposes=3.56e12,
    many=1.33e12,
    gather=((2, 220e9), (4, 200e9)),
    scatter=((2, 207e9), (4, 222e9)),
    permute=281e9,
    host_read=((1, 55.0e9), (2, 54.7e9)),
    host_update=((1, 41.9e9), (2, 38.5e9)),
    late=0.20,
    scale=0.982,
)
H100 = replace(
    H200,
    kind="h100",
    source="2026-11-25, two H100 80GB HBM3 at 700 W, NVLink 18, jax 0.11.2, jzero calibrate; tf32, f32, f8: data sheet "
    "x 0.70; latencies and slow as on the H200",
    products=(("f8", 1385e12), ("f16", 692e12), ("tf32", 346e12), ("f32", 46.8e12)),
    attention_forward=((64, 441e12), (128, 606e12)),
    attention_backward=((64, 502e12), (128, 584e12)),
    row_forward=340.0,
    row_backward=891.0,
    elementwise=2.89e12,
    reductions=2.77e12,
    transposes=2.72e12,
    many=0.95e12,
    gather=((2, 221e9),),
    scatter=((2, 206e9),),
    permute=280e9,
    host_read=((1, 54.6e9), (2, 53.1e9)),
    host_update=((1, 41.7e9), (2, 34.5e9)),
    late=0.69,
    scale=0.980,
)
_MEASURED = {rates.kind: rates for rates in (H200, H100)}


def from_data_sheet(name: str, card: GPU) -> Rates:
    """Estimate the rates of a GPU that nobody measured.

    Products take 0.70 of the data sheet's FLOP/s. Attention, kernels bound by memory and links take the share of their
    data sheets that the H200 reaches; a GPU without NVLink sends over PCIe.
    """
    peak, tf32 = (1e12 * tflops for tflops in card.tflops)
    products = {"f16": peak, "tf32": tf32, "f32": 2e9 * card.cores * card.fpus_per_core * card.clock}
    if card.compute_capability >= (8, 9):
        products["f8"] = 2 * peak
    known = gpu(H200.kind)
    link = _nvlink(card) / _nvlink(known) if card.nvlinks else _SHARE * _pcie(card) / H200.permute
    scaled: dict[str, Any] = {
        name: _times(factor, getattr(H200, name))
        for factor, names in (
            (peak / (1e12 * known.tflops[0]), ("attention_forward", "attention_backward")),
            (card.memory_bandwidth / known.memory_bandwidth, ("elementwise", "reductions", "transposes", "many")),
            (link, ("gather", "scatter", "permute")),
            (_pcie(card) / _pcie(known), ("host_read", "host_update")),
        )
        for name in names
    }
    return replace(
        H200,
        kind=name,
        origin=DATA_SHEET,
        source="data sheet: matmuls x 0.70; other rates scaled by the H200's measured share",
        products=tuple((kind, _SHARE * rate) for kind, rate in products.items()),
        late=H100.late,
        scale=1.0,
        **scaled,
    )


def at_most(table: Table, n: int) -> float:
    """Return the rate of the largest measured group of at most n GPUs, or of the smallest."""
    known = [rate for size, rate in sorted(table) if size <= n]
    return known[-1] if known else min(table)[1]


def _nvlink(card: GPU) -> float:
    """Return the bytes/s of all links in one direction: 25 GB/s each, 50 from Blackwell on."""
    return card.nvlinks * (50e9 if card.compute_capability >= (10, 0) else 25e9)


def _pcie(card: GPU) -> float:
    """Return the bytes/s of 16 lanes in one direction: PCIe 5 from Hopper on, 4 on Ampere and Ada, 3 before."""
    major = card.compute_capability[0]
    return 64e9 if major >= 9 else 32e9 if major == 8 else 16e9


def _times(factor: float, rate: Table | float) -> Table | float:
    return factor * rate if isinstance(rate, float) else tuple((key, factor * value) for key, value in rate)
