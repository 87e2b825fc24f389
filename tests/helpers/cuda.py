"""XLA's compiler for GPUs, which the extra `plan` installs; some tests need it."""

import importlib.util

import pytest

has_cuda_compiler = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
needs_cuda_compiler = pytest.mark.skipif(not has_cuda_compiler, reason="needs the extra plan")


def on_gpu(test):
    """Mark a test that compiles for a GPU that is not there."""
    return pytest.mark.gpu_compile(needs_cuda_compiler(pytest.mark.usefixtures("no_compilation_cache")(test)))
