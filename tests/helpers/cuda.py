"""XLA's compiler for GPUs, which the extra `plan` installs; some tests need it."""

import importlib.util

import pytest

has_cuda_compiler = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
needs_cuda_compiler = pytest.mark.skipif(not has_cuda_compiler, reason="needs the extra plan")
