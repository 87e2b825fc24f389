"""Train steps compiled for H100s that are not there, and the collectives of their programs, counted."""

from collections import Counter
from math import prod

import jax
import jax.numpy as jnp
import pytest
from helpers.cuda import needs_cuda_compiler

import jzero
from jzero.planner import collectives, gpu_devices

needs_gpu_programs = [pytest.mark.gpu_compile, needs_cuda_compiler, pytest.mark.usefixtures("no_compilation_cache")]
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "collective_permute")
SEPARATE = {f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in KINDS}  # one operation per array
WITH_CUBLAS = SEPARATE | {"xla_gpu_enable_triton_gemm": False}  # whose matrix products need no compiling
SIZE = {"bf16": 2, "f32": 4, "f16": 2}
SMALL = 128  # bytes: numbers of the loss, of the norm, counts


def h100s(per_host=8, **degrees):
    degrees = {"zero": 1, **degrees}
    return jzero.make_mesh(**degrees, devices=gpu_devices("h100", prod(degrees.values()), per_host=per_host))


def pairs(rows, length):
    tokens = jax.ShapeDtypeStruct((rows, length), jnp.int32)
    return {"inputs": tokens, "labels": tokens}


def traced(model, mesh, batch, options=SEPARATE, /, **config):
    """A step, in bf16 and of SGD where the config says nothing else, and its trace."""
    config = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "bf16": {"enabled": True}, **config}
    config["compiler_options"] = {"xla_gpu_autotune_level": 0} | options
    step = jzero.make_train_step(model, config, mesh=mesh)
    return step, step.trace(batch)


def collectives_of(step, trace):
    program = collectives(trace.lower().compile(), step.mesh)
    assert not program.unknown_trips
    assert len(program.select(in_branch=True)) == 0
    return program


def counted(program, *fields, smallest=0):
    """Arrays moved in a step by these fields of their rows, a row's own bytes being more than `smallest`."""
    moved = Counter()
    for row in program:
        if row.bytes > smallest:
            moved[tuple(getattr(row, field) for field in fields)] += row.operands * row.times
    return moved


def one_by_one(program, key):
    """Arrays moved in a step by `key(row)`; None counts nothing."""
    moved = Counter()
    for row in program:
        assert row.operands == 1, f"combined, so its parts cannot be told apart: {row}"
        moved[key(row)] += row.times
    moved.pop(None, None)
    return moved


def of_every_leaf(kind, axes, step, chosen=lambda layout: True):
    """One collective in bf16 of each parameter a step, of each layer's for itself: (kind, axes, bytes) -> times."""
    found = Counter()
    for layout in filter(chosen, jax.tree.leaves(step.layouts)):
        layers = layout.shape[0] if layout.stacked else 1
        found[kind, axes, prod(layout.shape[layout.stacked :]) * SIZE["bf16"]] += layers
    return found
