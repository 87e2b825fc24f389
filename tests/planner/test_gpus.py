"""Programs compiled for GPUs that this machine does not have."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from helpers.cuda import needs_cuda_compiler
from helpers.refusals import refuses
from helpers.sampling import keep
from jax.experimental import topologies

from jzero.planner import GPUS, gpu_devices, memory

pytestmark = pytest.mark.usefixtures("no_compilation_cache")


@pytest.mark.gpu_compile
@needs_cuda_compiler
@pytest.mark.parametrize("name", keep(GPUS, ["h100"]))
def test_every_gpu_compiles(name):
    (device,) = gpu_devices(name, 1)
    assert device.device_kind == GPUS[name].description
    x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device))
    compiled = jax.jit(lambda x: jnp.sin(x @ x), donate_argnums=0).lower(x).compile()
    size = 128 * 128 * 2
    assert (memory(compiled).arguments, memory(compiled).outputs, memory(compiled).aliased) == (size, size, size)


@needs_cuda_compiler
def test_two_hosts():
    devices = gpu_devices("h100", 16)
    assert [d.process_index for d in devices] == [0] * 8 + [1] * 8
    assert [d.id for d in devices] == list(range(16))
    assert gpu_devices("h100", 16) == devices
    assert [d.process_index for d in gpu_devices("h100", 4, per_host=2)] == [0, 0, 1, 1]


def test_mistakes():
    for given, words in ((("h1000", 8), "h100, h200, b200"), (("h100", 12), "multiple of 8"), (("h100", 0), "count")):
        refuses(lambda given=given: gpu_devices(*given), words)


@pytest.mark.parametrize(("installed", "fix"), [(None, r"pip install -e '/.*\[plan\]'"), (True, "JAX_PLATFORMS=cpu")])
def test_missing_compiler_says_the_fix(monkeypatch, installed, fix):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed)
    refuses(lambda: gpu_devices("h100", 7), fix)
