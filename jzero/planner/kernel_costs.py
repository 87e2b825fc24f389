"""Prices one instruction of a GPU program on the compute stream: its seconds, FLOPs and bytes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jzero.planner.hlo import Array, Computation, HloModule, Instruction, UnreadableProgram, root_instructions
from jzero.planner.rates import Rates, at_most
from jzero.planner.traced_operations import occupied

PRODUCTS, ATTENTION, ELEMENTWISE, REDUCTIONS = "products", "attention", "elementwise", "reductions"
TRANSPOSES, COPIES, HOST = "transposes", "copies", "host memory"

_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "opt-barrier", "optimization-barrier", "iota", "add-dependency",
}  # fmt: skip
_PRODUCTS = ("dot", "scaled-dot", "convolution")
_UNREADABLE = {"cholesky", "triangular-solve", "fft", "infeed", "outfeed", "send", "recv", "domain"}
_FREE_CALLS = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "AllocateBuffer", "LayoutConstraint"}
# FlashAttention-3's rates over cuDNN's, heads of 128: measured on an H200, 2 x 4,096 tokens, 32 heads and 8 of keys.
_FLASH = {"flash_mha_fwd": 1.10, "flash_mha_bwd": 1.23}
# An fp8 product that sums exactly takes about so much longer than one that sums fast: on H200s 7.2B steps took 14.7 ms
# more once two of three products, 164 ms, summed exactly (2026-11-26-fp8-h200.md).
_EXACT_F8 = 1.08
_BY_BYTES = ("__cub$", "__gpu$TopK", "__cudnn$norm", "cu_threefry2x32", "MoveToHost", "MoveToDevice")
_OWN = "/map_parts", "/softmax_rows", "/softmax_sums", "/softmax_gradient"  # of jzero.kernels, in one pass
_IN_SLOT = "/map_parts_in_slot"  # reads and writes one slot of arrays of four dimensions


_VIEWS = ("bitcast", "reshape")
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}  # which operand is written into the first
_ELEMENTWISE = (
    "abs", "add", "and", "bitcast-convert", "clamp", "compare", "convert", "divide", "exponential", "is-finite",
    "maximum", "minimum", "multiply", "negate", "not", "or", "power", "rsqrt", "select", "sqrt", "subtract", "tanh",
    "xor",
)  # fmt: skip
_THROUGH = _VIEWS + _ELEMENTWISE


@dataclass(frozen=True)
class Cost:
    """The price of an instruction on the compute stream; `bytes` are those read and written in device memory."""

    category: str
    seconds: float
    flops: float = 0.0
    bytes: float = 0.0


class Kernels:
    """The costs of a module's instructions at some rates; `in_f8`: whether one so far is a product in fp8."""

    def __init__(self, module: HloModule, rates: Rates, gpus_per_node: int = 8):
        self.module, self.rates = module, rates
        self.host_read, self.host_update = (
            at_most(table, min(gpus_per_node, module.devices)) for table in (rates.host_read, rates.host_update)
        )
        self.products, self.in_f8 = dict(rates.products), False

    def cost(self, op: Instruction, scope: Computation) -> Cost | None:
        """Price one instruction; None if it is free.

        Raises:
            UnreadableProgram: it may take long, and nothing tells how long.
        """
        if op.opcode in _FREE or op.opcode.endswith(("-done", "-update")):
            return None
        if op.opcode in _UNREADABLE:
            raise UnreadableProgram(op, "no rate is known for this operation")
        if op.opcode == "custom-call":
            return self._custom_call(op, scope)
        if op.opcode in ("fusion", "fusion-start"):
            return self._fusion(op, scope)
        if op.opcode in _PRODUCTS:
            return self._product(op, op, scope, _bytes(op.operands, scope) + op.bytes)
        category = {"copy": COPIES, "copy-start": COPIES, "transpose": TRANSPOSES, "reduce": REDUCTIONS}
        return self._moved(category.get(op.opcode, ELEMENTWISE), of_operation(op, scope))

    # ---------------------------------------------------------------- what memory bounds

    def _moved(self, category: str, traffic: Traffic, rate: float = 0.0) -> Cost:
        """Price a kernel that memory bounds: the device's, or the host's over PCIe."""
        rates, size = self.rates, traffic.read + traffic.written
        by = {REDUCTIONS: rates.reductions, TRANSPOSES: rates.transposes}
        seconds = max(size / (rate or by.get(category, rates.elementwise)), rates.shortest)
        if both := traffic.host_read + traffic.host_written:
            one_way = max(traffic.host_read, traffic.host_written) / self.host_read
            return Cost(HOST, max(seconds, one_way, both / 2 / self.host_update), 0.0, size - both)
        return Cost(category, seconds, 0.0, size)

    def _fusion(self, op: Instruction, scope: Computation) -> Cost | None:
        (name,) = op.called()
        inner = self.module.computations[name]
        for call in inner.values():  # a library's product or attention with the slices around it
            if call.opcode == "custom-call" and call.target not in _FREE_CALLS:
                return self._custom_call(call, inner)
        traffic = of_fusion(op, inner)
        size = traffic.read + traffic.written
        if products := [(i, where) for i, where, *_ in self.module.walk(name) if i.opcode in _PRODUCTS]:
            costs = [self._product(op, product, where, size) for product, where in products]
            seconds, flops = sum(cost.seconds for cost in costs), sum(cost.flops for cost in costs)
            return Cost(PRODUCTS, seconds, flops, size)
        inside = Counter(i.opcode for i in inner.values())
        if unreadable := inside.keys() & _UNREADABLE:
            raise UnreadableProgram(op, f"no rate is known for the {min(unreadable)} inside")
        big = sum(scope[x].bytes > 2**20 for x in op.operands)
        if inside["reduce"] and inside["concatenate"] and big >= 4 and traffic.written < traffic.read / 64:
            return self._moved(REDUCTIONS, traffic, self.rates.many)
        if inside["transpose"] or (inside["concatenate"] and _turned(op, scope)):
            return self._moved(TRANSPOSES, traffic)
        return self._moved(REDUCTIONS if inside["reduce"] else ELEMENTWISE, traffic)

    # ---------------------------------------------------------------- products

    def _product(self, op: Instruction, product: Instruction, scope: Computation, size: float) -> Cost:
        """Price a plain `dot` or `convolution`, alone or in a fusion `op` that moves `size` bytes."""
        left = scope[product.operands[0]].arrays[0]
        if product.opcode == "convolution":
            flops = _convolution(product, product.arrays[0], scope[product.operands[1]].arrays[0])
        else:
            contracted = product.numbers(r"lhs_contracting_dims=\{([\d,]*)\}")
            flops = 2.0 * math.prod(product.arrays[0].dims) * math.prod(left.dims[d] for d in contracted)
        return self._priced(op, product, left.dtype, flops, size)

    def _priced(
        self, op: Instruction, product: Instruction, dtype: str, flops: float, size: float, beta: bool = False
    ) -> Cost:
        """Price a product of `flops` that moves `size` bytes, at the rate of its precision or of the memory.

        Args:
            op: the product, or the fusion around it, whose result is written; `beta`: and read before.
        """
        rates = self.rates
        kind, factor = _precision(product, dtype)
        self.in_f8 |= kind == "f8"
        if kind not in self.products:
            raise UnreadableProgram(
                op, f"a matmul of {dtype}, and the rates of {rates.kind} have {sorted(self.products)}"
            )
        seconds = max(factor * flops / self.products[kind], size / rates.elementwise)
        if op.arrays[0].dtype == "f32":
            seconds += rates.wide_result * op.arrays[0].bytes * (1 + beta) / rates.elementwise
        return Cost(PRODUCTS, seconds + rates.product_start, flops, size)

    def _custom_call(self, op: Instruction, scope: Computation) -> Cost | None:
        target = op.target
        if target in _FREE_CALLS:
            return None
        for library, price in (
            ("__cublas$", self._cublas), ("__cudnn$conv", self._cudnn_convolution), ("__cudnn$fmha", self._attention),
            (tuple(_FLASH), self._flash_attention),
        ):  # fmt: skip
            if target.startswith(library):
                return price(op, scope)
        if "/grouped_dot/" in op.op_name:
            return self._grouped(op, scope)
        if "/fp8_cast" in op.op_name:  # of jzero.kernels.fp8: a cast and its transposed copy
            return self._moved(TRANSPOSES, of_operation(op, scope))
        if _IN_SLOT in op.op_name:
            return self._moved(ELEMENTWISE, of_slots(op, scope))
        if target.startswith(_BY_BYTES) or any(kernel in op.op_name for kernel in _OWN):
            return self._moved(ELEMENTWISE, of_operation(op, scope))
        raise UnreadableProgram(op, "a custom call that may be heavy, and that this reader does not know")

    def _cublas(self, op: Instruction, scope: Computation) -> Cost:
        left, result = scope[op.operands[0]].arrays[0], op.arrays[0]
        contracted = op.numbers(r'"lhs_contracting_dimensions":\s*\[(.*?)\]')
        if "lhs_contracting_dimensions" not in op.attributes:
            raise UnreadableProgram(op, "a matmul without lhs_contracting_dimensions")
        beta = float(op.attribute(r'"beta":\s*([\d.eE+-]+)') or 0) != 0
        flops = 2.0 * math.prod(result.dims) * math.prod(left.dims[d] for d in contracted)
        size = _bytes(op.operands[:2], scope) + result.bytes * (1 + beta)
        return self._priced(op, op, left.dtype, flops, size, beta)

    def _grouped(self, op: Instruction, scope: Computation) -> Cost:
        """Price a kernel of `jzero.moe` as a dense product of the rows that are not padding, on average."""
        operands, result = [scope[name].arrays[0] for name in op.operands[-2:]], op.arrays[0]
        rows, share = operands[0], occupied(op.op_name)
        flops = 2.0 * math.prod(rows.dims) * result.dims[-1] * share
        size = sum(x.bytes * (share if len(x.dims) == 2 else 1.0) for x in operands)  # others are matrices
        return self._priced(op, op, rows.dtype, flops, size + result.bytes)

    def _cudnn_convolution(self, op: Instruction, scope: Computation) -> Cost:
        """Price a convolution: both gradients multiply as often as the forward pass."""
        first, second = (scope[name].arrays[0] for name in op.operands[:2])
        output, kernel = op.arrays[0], second
        if "BackwardInput" in op.target:
            output = first
        elif "BackwardFilter" in op.target:
            output, kernel = second, op.arrays[0]
        size = _bytes(op.operands, scope) + op.arrays[0].bytes
        return self._priced(op, op, first.dtype, _convolution(op, output, kernel), size)

    def _attention(self, op: Instruction, scope: Computation) -> Cost:
        """Price cuDNN's attention; a causal mask leaves half of the pairs of query and key."""
        shape = op.numbers(r'"intermediate_tensor_shape":\s*\{.*?"dimensions":\s*\[(.*?)\]')
        layout = op.numbers(r"operand_layout_constraints=\{\w+\[([\d,]*)\]")
        mask = op.attribute(r'"mask_type":\s*"(\w+)"')
        if len(shape) != 4 or not layout or not mask:
            raise UnreadableProgram(op, "attention without intermediate_tensor_shape, mask_type or operand layouts")
        batch, heads, queries, keys = shape
        width, pairs = layout[-1], float(queries * keys)
        window = int(op.attribute(r'"sliding_window_length":\s*"?(\d+)') or 0)
        if "CAUSAL" in mask:
            pairs -= queries * (queries - 1) / 2 if queries == keys else pairs / 2
            pairs = min(pairs, float(queries * window)) if window else pairs
        faster = 2.0 if scope[op.operands[0]].arrays[0].dtype.startswith("f8") else 1.0  # as its data sheet's products
        return self._attention_cost(op, scope, (batch * heads, queries, width), pairs, faster)

    def _flash_attention(self, op: Instruction, scope: Computation) -> Cost:
        """Price causal attention by FlashAttention-3, whose first operand is [batch, queries, heads, width]."""
        batch, queries, heads, width = scope[op.operands[0]].arrays[0].dims
        pairs = queries * (queries + 1) / 2
        return self._attention_cost(op, scope, (batch * heads, queries, width), pairs, _FLASH[op.target])

    def _attention_cost(
        self, op: Instruction, scope: Computation, shape: tuple[int, int, int], pairs: float, faster: float
    ) -> Cost:
        """Price the `pairs` of query and key of each head, `faster` than the rates have it.

        Args:
            shape: heads of all rows, queries, width of a head.
        """
        rates, (heads, queries, width) = self.rates, shape
        back = op.target.endswith("_bwd") or "Backward" in op.target
        row = rates.row_backward if back else rates.row_forward
        flops = 4.0 * heads * pairs * width * (2.5 if back else 1.0)
        table = rates.attention_backward if back else rates.attention_forward
        widths, by_width = zip(*sorted(table), strict=True)
        rate = faster * float(np.interp(width, (0, *widths), (0.0, *by_width)))  # below the narrowest, falls with it
        seconds = flops * (1 + row * queries / pairs) / rate + rates.attention_start
        return Cost(ATTENTION, seconds, flops, _bytes(op.operands, scope) + op.bytes)


def _precision(product: Instruction, dtype: str) -> tuple[str, float]:
    """Return (the key of `Rates.products`, how many times as long as a plain product at that rate it takes)."""
    highest = "highest" in product.attributes.lower()
    algorithm = product.attribute(r'algorithm"?[:=]\s*"?(\w+)').lower()
    if dtype.startswith(("f8", "f4")):
        return "f8", _EXACT_F8 if highest else 1.0
    if dtype in ("bf16", "f16"):
        return "f16", 1.0
    if dtype != "f32":
        return dtype, 1.0
    for name, found in (
        ("x9", ("f16", 9.0)), ("x6", ("f16", 6.0)), ("bf16_f32_x3", ("f16", 3.0)), ("tf32_f32_x3", ("tf32", 3.0)),
        ("bf16", ("f16", 1.0)), ("dot_f32", ("f32", 1.0)),
    ):  # fmt: skip
        if name in algorithm:
            return found
    return ("f32" if highest else "tf32"), 1.0


def _convolution(op: Instruction, output: Array, kernel: Array) -> float:
    """Count the FLOPs of a convolution from the labels of the kernel's dimensions, as in ``b01f_01io->b01f``."""
    labels = op.attribute(r"dim_labels=\w+_(\w+)->")
    if "o" not in labels:
        raise UnreadableProgram(op, "a convolution without dim_labels")
    return 2.0 * math.prod(output.dims) * math.prod(kernel.dims) / kernel.dims[labels.index("o")]


def _bytes(names: tuple[str, ...], scope: Computation) -> int:
    return sum(scope[name].bytes for name in names)


def _turned(op: Instruction, scope: Computation) -> bool:
    """Return whether an operand has attention's layout, [B, H, S, C] beside a result of [B, S, H, C]."""
    arrays = [a for name in op.operands for a in scope[name].arrays[:1] if len(a.dims) == 4]
    result = op.arrays[0].dims if op.arrays else ()
    return any(
        a.layout == "3,1,2,0" or (len(result) == 4 and a.bytes > 2**20 and a.dims[1] != result[1]) for a in arrays
    )


class Traffic(NamedTuple):
    """Bytes read and written, and those of them that lie in host memory."""

    read: float
    written: float
    host_read: float = 0.0
    host_written: float = 0.0


def of_operation(op: Instruction, scope: Computation) -> Traffic:
    """Count the bytes of an operation outside fusions."""
    operands = [scope[name] for name in op.operands]
    read, written = float(sum(i.bytes for i in operands)), float(op.bytes)
    if op.opcode == "copy-start":  # its result is the copy, the original and a context
        read = written = op.arrays[0].bytes
    elif op.opcode in _UPDATES:
        read = written = operands[_UPDATES[op.opcode]].bytes
    elif op.opcode in ("slice", "dynamic-slice", "gather"):
        read = written
    elif op.opcode == "sort":
        read, written = _passes(op) * read, _passes(op) * written
    from_host = bool(operands) and operands[0].on_host
    return Traffic(read, written, read * from_host, written * any(array.on_host for array in op.arrays[:1]))


def of_slots(op: Instruction, scope: Computation) -> Traffic:
    """Count the bytes of a kernel that touches one slot of buffers on the device; those it returns are not read."""

    def touched(arrays: Iterable[Array]) -> list[float]:
        return [x.bytes / (x.dims[0] if len(x.dims) == 4 else 1) for x in arrays]

    read, written = touched(x for name in op.operands for x in scope[name].arrays), touched(op.arrays)
    return Traffic(
        sum(read) - sum(y for y, x in zip(written, op.arrays, strict=True) if len(x.dims) == 4), sum(written)
    )


def of_fusion(op: Instruction, inner: Computation) -> Traffic:
    """Count the bytes of a fusion, of a sliced or updated array only what is touched; `inner` is its computation."""
    users: dict[str, list[Instruction]] = {}
    for i in inner.values():
        for name in i.operands:
            users.setdefault(name, []).append(i)
    reads = [(i, _read(i.name, inner, users)) for i in inner.values() if i.opcode == "parameter"]
    made = root_instructions(inner)
    writes = [(i, _written(i, inner)) for i in made]
    outside = op.arrays if op.opcode == "fusion" and len(op.arrays) == len(made) else [None] * len(made)
    hosted = [i.on_host or bool(whole and whole.on_host) for i, whole in zip(made, outside, strict=True)]
    passes = max(1, sum(_passes(i) for i in inner.values() if i.opcode == "sort"))
    return Traffic(
        passes * sum(size for _, size in reads),
        passes * sum(size for _, size in writes),
        sum(size for i, size in reads if i.on_host),
        sum(size for (_, size), there in zip(writes, hosted, strict=True) if there),
    )


def _read(name: str, inner: Computation, users: dict[str, list[Instruction]]) -> float:
    """Count the bytes that a fusion reads of a parameter; of slices of it, or of an elementwise result, only theirs."""
    whole = inner[name]
    shares: dict[str, float] = {}  # of the array, by the instruction that takes them
    waiting, seen, same = [name], {name}, {name}  # same: views of the parameter, which can be updated in place
    while waiting:
        at = waiting.pop()
        size = max(1, inner[at].elements)
        for user in users.get(at, []):
            first = user.operands[0] == at
            if first and user.opcode in ("slice", "dynamic-slice", "gather"):
                shares[user.name] = user.elements / size
            elif first and at in same and user.opcode == "scatter":
                shares[user.name] = inner[user.operands[-1]].elements / size
            elif first and at in same and user.opcode == "dynamic-update-slice":
                continue
            elif user.opcode in _THROUGH and not user.root:
                if at in same and user.opcode in _VIEWS:
                    same.add(user.name)
                if user.name not in seen:
                    seen.add(user.name)
                    waiting.append(user.name)
            else:
                return whole.bytes
    return whole.bytes * min(1.0, sum(shares.values()))


def _written(i: Instruction, inner: Computation) -> float:
    i = _origin(i, inner)
    in_place = i.opcode in _UPDATES and _origin(inner[i.operands[0]], inner).opcode == "parameter"
    return inner[i.operands[_UPDATES[i.opcode]]].bytes if in_place else i.bytes


def _origin(i: Instruction, inner: Computation) -> Instruction:
    """Return what a view is of."""
    while i.opcode in _VIEWS:
        i = inner[i.operands[0]]
    return i


def _passes(sort: Instruction) -> int:
    """Count the passes of a sort over its arrays: one for each doubling of the sorted length."""
    (dimension,) = sort.numbers(r"dimensions=\{(\d+)\}")
    return max(1, math.ceil(math.log2(max(1, sort.arrays[0].dims[dimension]))))
