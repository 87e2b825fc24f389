"""The rates of GPUs: from data sheets, and in files."""

import pytest
from helpers.hlo_programs import RATES

from jzero.errors import ConfigError
from jzero.planner import Rates


def test_rates_from_a_data_sheet():
    a100 = Rates.of("a100")
    assert dict(a100.products) == pytest.approx(
        {"f16": 0.7 * 312e12, "tf32": 0.7 * 156e12, "f32": 0.7 * 2 * 108 * 64 * 1.41e9}
    )
    assert a100.uncertainty == 0.10
    with pytest.raises(ConfigError, match="h100"):
        Rates.of("h1000")


def test_rates_in_a_file(tmp_path):
    path = tmp_path / "rates.json"
    RATES.save(path)
    assert Rates.load(path) == RATES
    text = path.read_text()
    for old, new, match in (
        ('"slow"', '"slwo"', "slow.*slwo"),
        ('"permute": 80000000000.0', '"permute": "fast"', "permute = 'fast'"),
        ('"permute": 80000000000.0', '"permute": NaN', "permute = nan"),
        ('"origin": "measured"', '"origin": "guessed"', "origin = 'guessed'"),
        ('"gather": [', '"gather": [3, ', "gather"),
        ("{", "", "not JSON"),
    ):
        path.write_text(text.replace(old, new, 1))
        with pytest.raises(ConfigError, match=match):
            Rates.load(path)
    with pytest.raises(ConfigError, match="calibrate"):
        Rates.load(tmp_path / "absent.json")
