"""The program that compares losses in fp8 and bf16, and its table of what several runs printed."""

import json
import re

import pytest

from experiments.benchmarks import fp8_losses


@pytest.mark.slow
def test_a_run_and_its_table(capsys, tmp_path):
    options = ["--preset", "tiny", "--steps", "2", "--seeds", "1", "--sequence", "32", "--min-size", "64"]
    fp8_losses.main([*options, "--runs", "bf16", "fp8 hybrid"])
    printed = capsys.readouterr().out
    assert [json.loads(line)["run"] for line in printed.splitlines()[:2]] == ["bf16", "fp8 hybrid"]
    (tmp_path / "a").write_text(printed + '{"run": "bf16", "seed": 1, "los')  # torn by a kill
    fp8_losses.main(["--read", f"{tmp_path}/a"])
    assert capsys.readouterr().out == printed.partition("]}\n")[2].partition("]}\n")[2]
    with pytest.raises(SystemExit, match="bf16, seed 0: an earlier line has it"):
        fp8_losses.main(["--read", f"{tmp_path}/a", f"{tmp_path}/a"])


def test_differences_by_hand():
    runs = [("a", 0, 1.0, 2.0), ("b", 0, 1.1, 2.0), ("a", 1, 1.0, 1.0), ("b", 1, 1.0, 0.9), ("a", 2, 5.0, 5.0)]
    lines = [{"run": run, "seed": seed, "settings": "", "losses": losses} for run, seed, *losses in runs]
    text = fp8_losses.table(lines)
    assert "2 seeds" in text
    assert "| 1 to 2 | 1.2500 | 1.2500 |" in text
    assert re.search(r"b: mean of the last 50 -0.83 % of a's, standard error 4.17, by seed \+3.33 -5.00\n", text)
    assert "root mean square 7.07 %, largest of a seed 10.0 % (median), of all 10.0 %; " in text
    assert text.endswith("mean of ten steps over the seeds +0.00 to +0.00 %")
