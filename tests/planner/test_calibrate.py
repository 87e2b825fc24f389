"""A calibration of tiny sizes on the CPU: what it measures is written, and within what a clock can show."""

import time

import jax
import pytest

from jzero import cli
from jzero.planner import Rates
from jzero.planner.calibrate import Sizes, _rate_and_row, hot_seconds, measured

TINY = Sizes(
    preset="tiny", layers=2, rows=1, sequence=64, attention_tokens=64,
    lengths=(32, 64), head_widths=(64,), array=2**16, message=2**12, hot=0.01, each=0.01,
)  # fmt: skip


@pytest.mark.slow
def test_calibrate(tmp_path):
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
    rates.save(tmp_path / "rates.json")
    assert Rates.load(tmp_path / "rates.json") == rates
    assert len(lines) == 6


def test_the_hot_half_counts():
    """The first calls are fast, as before a GPU is hot; the median is that of the slow ones."""
    begin = time.perf_counter()

    def f():
        time.sleep(0.001 if time.perf_counter() - begin < 0.1 else 0.01)

    assert hot_seconds(f, seconds=0.5) >= 0.01


@pytest.mark.parametrize("row", [0.0, 200.0, 1000.0])
def test_rate_and_row(row):
    short, long = (((S + 1) / 2 + row) / 300e12 for S in (1024, 16384))
    assert _rate_and_row(short, long, (1024, 16384)) == pytest.approx((300e12, row), rel=1e-9, abs=1e-6)


def test_command(monkeypatch, tmp_path, capsys):
    from jzero.planner import calibrate as module

    monkeypatch.setattr(module, "calibrate", lambda: Rates.of("a100"))
    assert cli.main(["calibrate", "--out", str(tmp_path / "rates.json")]) == 0
    assert Rates.load(tmp_path / "rates.json") == Rates.of("a100")
    assert "rates.json" in capsys.readouterr().out


def test_devices_that_are_no_gpus_are_refused_before_anything_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("jzero.planner.calibrate.hot_seconds", lambda *args, **kwargs: pytest.fail("measured"))
    assert cli.main(["calibrate", "--out", str(tmp_path / "rates.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "calibrate: the devices are 8 x cpu, no GPUs; run it on the machine whose GPUs you plan for" in line
    assert not list(tmp_path.iterdir())
