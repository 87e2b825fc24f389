"""`jzero demo` learns, and shows its samples and its curve."""

import numpy as np
import pytest

from jzero import cli
from jzero.recipes.demo import PROMPTS, train_demo


@pytest.mark.slow
def test_the_demo_learns(capsys):
    """A byte at random costs log 256 = 5.5 nats; knowing how often each byte comes about 3.1."""
    found = train_demo(steps=60)
    printed = capsys.readouterr().out
    assert len(found.losses) == 60
    assert found.losses[0] == pytest.approx(np.log(256), abs=0.6)
    assert np.mean(found.losses[-10:]) < 2.7
    assert found.held_out < 2.7
    for prompt, sample in zip(PROMPTS, found.samples, strict=True):
        assert sample.startswith(prompt)
        assert len(sample) == len(prompt) + 160
        assert sample in printed
    assert "1 .. 60 steps" in printed


def test_a_mistake_is_one_line(capsys):
    assert cli.main(["demo", "--steps", "0"]) == 2
    assert capsys.readouterr().err == "jzero: --steps 0: must be at least 1\n"
