"""The time of programs that are written by hand, against arithmetic, and properties of compiled ones."""

import re
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cuda import needs_cuda_compiler
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jzero.errors import ConfigError
from jzero.planner import Rates, UnreadableProgram, gpu_devices, step_time

# Round numbers, so that the arithmetic below can be done by hand.
RATES = Rates(
    kind="test", origin="measured", source="made up",
    products=(("f16", 100e12), ("f8", 200e12), ("tf32", 50e12), ("f32", 10e12)),
    attention_forward=((64, 40e12), (128, 80e12)), attention_backward=((64, 20e12), (128, 40e12)),
    elementwise=1e12, reductions=0.5e12, transposes=0.25e12, many=0.1e12,
    gather=((2, 100e9), (4, 200e9)), scatter=((2, 50e9), (4, 100e9)), permute=80e9, host_memory=10e9, hosts=10e9,
    product_start=0.0, wide_result=0.0, attention_diagonal=0.0, attention_start=0.0, shortest=0.0, gap=0.0,
    latency=0.0, slow=0.0, late=0.0, step=0.0, trip=0.0,
)  # fmt: skip

MATMUL = (
    '(bf16[1000,1000]{1,0}, s8[4]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul", backend_config='
    '{"gemm_backend_config":{"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
)
PRODUCT_S = 2 * 1000**3 / 100e12


def program(*lines, others="", devices=4):
    """Return a scheduled module whose entry has x: bf16[1000, 1000], w: f32[1000, 1000] and v: bf16[1000000]."""
    body = "\n  ".join(lines)
    return f"""HloModule m, is_scheduled=true, num_partitions={devices}

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}

{others}
ENTRY %main (x: bf16[1000,1000], w: f32[1000,1000], v: bf16[1000000]) -> bf16[1000,1000] {{
  %x = bf16[1000,1000]{{1,0}} parameter(0)
  %w = f32[1000,1000]{{1,0}} parameter(1)
  %v = bf16[1000000]{{0}} parameter(2)
  {body}
}}
"""


def seconds(*lines, rates=RATES, **kwargs):
    return step_time(program(*lines, **kwargs), rates).step_s


def test_product():
    t = step_time(program(f"%a = {MATMUL}"), RATES)
    assert (t.step_s, t.flops, t.bytes) == (pytest.approx(2e9 / 100e12), 2e9, 3 * 2e6)
    assert t.by == {"products": t.step_s}
    assert t.timeline == [("compute", "products", 0.0, t.step_s)]
