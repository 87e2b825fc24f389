"""Scheduled HLO programs written by hand, and round rates, so that their time is arithmetic."""

from jzero.planner import Rates

# Round numbers, so that the arithmetic below can be done by hand.
RATES = Rates(
    kind="test", origin="measured", source="made up",
    products=(("f16", 100e12), ("f8", 200e12), ("tf32", 50e12), ("f32", 10e12)),
    attention_forward=((64, 40e12), (128, 80e12)), attention_backward=((64, 20e12), (128, 40e12)),
    elementwise=1e12, reductions=0.5e12, transposes=0.25e12, many=0.1e12,
    gather=((2, 100e9), (4, 200e9)), scatter=((2, 50e9), (4, 100e9)), permute=80e9, hosts=10e9,
    host_read=((1, 10e9), (4, 8e9)), host_update=((1, 7e9), (4, 5e9)),
    product_start=0.0, wide_result=0.0, row_forward=0.0, row_backward=0.0, attention_start=0.0, shortest=0.0, gap=0.0,
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


def computation(name, *lines):
    return f"%{name} (p: f32[1]) -> f32[1] {{\n  " + "\n  ".join(lines) + "\n}\n"


X = "bf16[1000,1000]{1,0}"


def gather(groups="{{0,1,2,3}}", name="s"):
    """Start to gather 1000 x 1000 bf16 from each of a group."""
    shapes = "(bf16[1000,1000]{1,0}, bf16[4000,1000]{1,0})"
    return f"%{name} = {shapes} all-gather-start(%x), replica_groups={groups}, dimensions={{0}}"


DONE = "%d = bf16[4000,1000]{1,0} all-gather-done(%s)"
GATHER_S = 3 * 2e6 / 200e9  # each GPU sends three parts of 2 MB


def attention(shape, mask, target="__cudnn$fmhaSoftmax", width=64):
    """Call cuDNN's attention of shape (batch, heads, queries, keys)."""
    B, N, T, S = shape
    layout = f"bf16[{B},{T},{N},{width}]{{3,2,1,0}}"
    return (
        f"%a = (bf16[{B},{N},{T},{width}]{{3,1,2,0}}, u8[0]{{0}}) custom-call(%v, %v, %v), "
        f'custom_call_target="{target}", '
        f"operand_layout_constraints={{{layout}, {layout}, {layout}}}, "
        f'backend_config={{"cudnn_fmha_backend_config": {{"intermediate_tensor_shape": {{"element_type": "BF16", '
        f'"dimensions": ["{B}", "{N}", "{T}", "{S}"]}}, "mask_type": "{mask}", "sliding_window_length": 0}}}}'
    )
