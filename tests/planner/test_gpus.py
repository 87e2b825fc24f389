"""GPUs that this machine does not have: programs compiled for them, and their rates, measured here in tiny sizes."""

import importlib.util
import time

import jax
import jax.numpy as jnp
import pytest
from helpers.cuda import on_gpu
from helpers.hlo_programs import RATES
from helpers.refusals import refuses
from helpers.sampling import keep
from jax.experimental import topologies

from jzero import cli
from jzero.planner import GPUS, Rates, calibrate, gpu_devices, memory
from jzero.planner.calibrate import Sizes, _rate_and_row, hot_seconds, measured


@on_gpu
@pytest.mark.parametrize("name", keep(GPUS, ["h100"]))
def test_every_gpu_compiles(name):
    (device,) = gpu_devices(name, 1)
    assert device.device_kind == GPUS[name].description
    x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16, sharding=jax.sharding.SingleDeviceSharding(device))
    compiled = jax.jit(lambda x: jnp.sin(x @ x), donate_argnums=0).lower(x).compile()
    size = 128 * 128 * 2
    assert (memory(compiled).arguments, memory(compiled).outputs, memory(compiled).aliased) == (size, size, size)


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


TINY = Sizes(
    preset="tiny", layers=2, rows=1, sequence=64, attention_tokens=64,
    lengths=(32, 64), head_widths=(64,), array=2**16, message=2**12, hot=0.01, each=0.01,
)  # fmt: skip


def test_rates_from_a_data_sheet():
    a100 = Rates.of("a100")
    assert dict(a100.products) == pytest.approx(
        {"f16": 0.7 * 312e12, "tf32": 0.7 * 156e12, "f32": 0.7 * 2 * 108 * 64 * 1.41e9}
    )
    assert a100.uncertainty == 0.10
    refuses(lambda: Rates.of("h1000"), "h100")


def test_rates_in_a_file(tmp_path):
    path = tmp_path / "rates.json"
    RATES.save(path)
    assert Rates.load(path) == RATES
    text = path.read_text()
    for old, new, match in (
        ('"slow"', '"slwo"', "slow.*slwo"),
        ('"permute": 80000000000.0', '"permute": NaN', "permute = nan"),
        ('"origin": "measured"', '"origin": "guessed"', "origin = 'guessed'"),
        ('"gather": [', '"gather": [3, ', "gather"),
        ("{", "", "not JSON"),
    ):
        path.write_text(text.replace(old, new, 1))
        refuses(lambda: Rates.load(path), match)
    refuses(lambda: Rates.load(tmp_path / "absent.json"), "calibrate")


@pytest.mark.slow
def test_calibrate():
    lines = []
    before = Rates.of("h100")
    rates = measured(before, jax.devices()[:2], TINY, lines.append)
    fields = ("products", "attention_forward", "attention_backward", "elementwise", "reductions", "transposes")
    for name in (*fields, "host_read", "host_update", "gather", "scatter", "permute"):
        assert getattr(rates, name) != getattr(before, name), name
    assert [n for n, _ in rates.gather] == [n for n, _ in rates.scatter] == [2]
    assert [n for n, _ in rates.host_read] == [n for n, _ in rates.host_update] == [1, 2]
    assert 0 <= rates.late <= 1
    assert (rates.uncertainty, rates.scale, rates.hosts) == (0.04, 1.0, before.hosts)
    assert jax.__version__ in rates.source
    assert len(lines) == 6


def test_the_hot_half_counts():
    """The first calls are fast, as before a GPU is hot; the median is that of the slow ones."""
    begin = time.perf_counter()

    def f():
        time.sleep(0.001 if time.perf_counter() - begin < 0.1 else 0.01)

    assert hot_seconds(f, seconds=0.5) >= 0.01


@pytest.mark.parametrize("row", [0.0, 200.0])
def test_rate_and_row(row):
    short, long = (((S + 1) / 2 + row) / 300e12 for S in (1024, 16384))
    assert _rate_and_row(short, long, (1024, 16384)) == pytest.approx((300e12, row), rel=1e-9, abs=1e-6)


def test_calibrate_command(monkeypatch, tmp_path, capsys):
    path = tmp_path / "rates.json"
    monkeypatch.setattr(calibrate, "hot_seconds", lambda *args, **kwargs: pytest.fail("measured"))
    assert cli.main(["calibrate", "--out", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "calibrate: the devices are 8 x cpu, no GPUs; run it on the machine whose GPUs you plan for" in line
    assert not path.exists()
    monkeypatch.setattr(calibrate, "calibrate", lambda: Rates.of("a100"))
    assert cli.main(["calibrate", "--out", str(path)]) == 0
    assert Rates.load(path) == Rates.of("a100")
    assert "rates.json" in capsys.readouterr().out
