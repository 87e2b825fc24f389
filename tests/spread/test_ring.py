"""cuDNN's attention on a group, played by plain JAX: XLA's values and gradients, and what is moved."""

from collections import Counter
from math import prod

import jax
import numpy as np
import pytest
from helpers import attention_kernels
from helpers.cuda import needs_cuda_compiler
from helpers.sampling import keep
from helpers.spreading import on_shards, total
from jax._src.cudnn import fused_attention_stablehlo as cudnn

pytestmark = needs_cuda_compiler  # with which cuDNN comes, whose version JAX asks for
LENGTH, WIDTH = 16, 8
FORWARD, BACKWARD = "dot_product_attention_fwd_wrapper", "dot_product_attention_bwd_wrapper"


@pytest.fixture(autouse=True, scope="module")
def on_cpus():
    attention_kernels.install()


def attend(causal=True, implementation="cudnn", window=None):
    @jax.jit
    def f(q, k, v, *bias):
        return jax.nn.dot_product_attention(
            q, k, v, *bias, is_causal=causal, implementation=implementation, local_window_size=window
        )

    return f


# What two axes divide: rows 0, the sequence 1, heads 2; and how many devices they have.
FORMS = {
    "two": (1, None, 2, 1), "alone": (1, None, 4, 1), "rows": (1, 0, 4, 2), "long": (1, 1, 4, 2), "heads": (1, 2, 4, 2),
    "rows alone": (0, None, 2, 1), "heads alone": (None, 2, 1, 2), "no sequence": (0, 2, 2, 2), "all": (1, 2, 2, 2),
}  # fmt: skip


def operands(heads, kv_heads, form, length=LENGTH, kv_length=LENGTH, bias=None):
    rng = np.random.default_rng(0)
    shapes = [(2, length, heads, WIDTH), *[(2, kv_length, kv_heads, WIDTH)] * 2]
    shapes += [(1, bias, length, kv_length)] if bias else []
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    of_keys = tuple(None if at == 2 and kv_heads % 2 else at for at in form[:2])
    forms = [(form[:2], False), (of_keys, False), (of_keys, False), ((None, None), False)]
    return arrays, forms[: len(arrays)], {"a": form[2], "b": form[3]}


def compare(f, plain, arrays, forms, degrees):
    results, gradients, group = on_shards(f, arrays, forms, degrees=degrees)
    expected = plain(*arrays), *jax.grad(lambda *xs: total(plain(*xs)), argnums=range(len(arrays)))(*arrays)
    for found, x in zip((results, *gradients), expected, strict=True):
        assert np.abs(found - x).max() < 1e-6 * np.abs(x).max()
    moves = [move for move in group.traced.moves if move.primitive in (FORWARD, BACKWARD)]
    return moves, {fallback.primitive for fallback in group.traced.fallbacks}


CASES = [  # heads, key-value heads, form, causal, heads of the bias
    (1, 1, "two", True, None),
    (2, 2, "heads", False, None),
    (6, 2, "heads", True, None),
    (2, 1, "alone", False, None),
    (6, 3, "rows", True, None),
    (4, 1, "long", True, None),
    (8, 2, "rows", True, None),  # two devices attend to the same key-value head
    (4, 4, "heads alone", True, 1),
    (4, 2, "rows alone", True, 4),
    (4, 1, "no sequence", True, 4),
    (4, 2, "all", False, 1),
]


@pytest.mark.parametrize(("heads", "kv_heads", "form", "causal", "bias"), keep(CASES, [CASES[i] for i in (2, 3, 6)]))
def test_one_device_computes_the_same(heads, kv_heads, form, causal, bias):
    at, devices = FORMS[form][:2], FORMS[form][2:]
    arrays = operands(heads, kv_heads, FORMS[form], bias=bias)
    moves, whole = compare(attend(causal), attend(causal, "xla"), *arrays)
    assert not whole
    ring = heads % prod(n for d, n in zip(at, devices, strict=True) if d == 1) > 0
    assert {move.primitive for move in moves if move.kind == "collective-permute"} == (
        {FORWARD, BACKWARD} if ring else set()
    )
    if ring:
        assert {move.kind for move in moves} <= {"collective-permute", "all-to-all"}  # no device has all keys


def test_heads_before_sequence():
    """Of four devices with two heads two share the heads, and two pairs make a ring."""
    moves, _ = compare(attend(), attend(implementation="xla"), *operands(2, 2, FORMS["alone"]))
    found = Counter((move.kind, move.shape) for move in moves if move.primitive == BACKWARD)
    part, half, keys = (2, LENGTH // 4, 2, WIDTH), (2, LENGTH // 4, 1, WIDTH), (2, LENGTH // 2, 1, WIDTH)
    assert found == {
        ("all-to-all", part): 5,  # queries, keys, values, the output and its gradient come
        ("all-to-all", (2, 2, LENGTH // 4)): 1,  # their sums
        ("all-to-all", keys): 3,  # three gradients go
        ("collective-permute", half): 8,  # of two halves one stays where it is
        ("collective-permute", (2, 1, LENGTH // 4)): 1,
        ("collective-permute", keys): 4,  # keys, values and their gradients, around the ring
    }  # fmt: skip


def test_keys_of_another_length():
    moves, whole = compare(attend(False), attend(False, "xla"), *operands(1, 1, FORMS["alone"], kv_length=2 * LENGTH))
    assert not whole
    assert {move.kind for move in moves} == {"collective-permute"}


def test_heads_before_the_sequence_in_memory():
    """cuDNN's other layout, [rows, heads, sequence, width]."""

    @jax.jit
    def f(q, k, v):
        return cudnn.dot_product_attention(q, k, v, scale=0.5, mask_type=cudnn.MaskType.CAUSAL, qkv_layout="BNTH")

    def plain(q, k, v):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return jax.nn.dot_product_attention(q, k, v, scale=0.5, is_causal=True, implementation="xla").swapaxes(1, 2)

    arrays, _, degrees = operands(6, 2, FORMS["alone"])
    moves, whole = compare(f, plain, [x.swapaxes(1, 2) for x in arrays], [((2, None), False)] * 3, degrees)
    assert not whole
    assert {move.kind for move in moves} == {"collective-permute", "all-to-all"}


WHOLE = {  # changes of `attend`, and operands: what allows no ring runs on whole arrays
    "window": ({"window": (4, 0)}, (1, 1, FORMS["alone"])),
    "odd": ({}, (1, 1, FORMS["alone"], 12, 12)),  # no two halves of 3 tokens
    "keys": ({}, (1, 1, FORMS["alone"], LENGTH, 2 * LENGTH)),
    "bias": ({}, (6, 2, (1, None, 4, 2), LENGTH, LENGTH, 1)),
    "heads": ({}, (6, 3, FORMS["heads"])),  # three heads of a device need one and a half of keys
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_allows_no_ring_runs_on_whole_arrays(case):
    more, of = WHOLE[case]
    moves, whole = compare(attend(**more), attend(implementation="xla", **more), *operands(*of))
    assert whole == {FORWARD, BACKWARD}
    if case not in ("bias", "heads"):
        assert {move.kind for move in moves} == {"all-gather", "all-reduce"}  # of the output's gradient, in shares
