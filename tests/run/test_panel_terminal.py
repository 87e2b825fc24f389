"""The live panel in a real terminal: what it shows, and what it leaves behind."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SCRIPT_OF_STEPS = """
    import jax, numpy as np
    jax.config.update("jax_platforms", "cpu")
    import jzero

    from helpers.regression import Regression

    config = {"train_batch_size": 8, "optimizer": {"type": "Adam"}, "steps_per_print": 2,
              "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}}}
    engine, *_ = jzero.initialize(model=Regression(), config=config)
    for i in range(3):
        engine.train_batch({"x": np.ones((8, 3), np.float32), "y": np.ones(8, np.float32)})
        print(f"line {i} of the script")
"""


def run_in_terminal(program, typed=b""):
    """Run a program in a pseudo-terminal where somebody types ahead; return what it writes there."""
    terminal, its_end = os.openpty()
    program = [sys.executable, "-c", textwrap.dedent(program)]
    env = os.environ | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24", "PYTHONPATH": f"{TESTS}:{TESTS.parent}"}
    child = subprocess.Popen(program, stdin=its_end, stdout=its_end, stderr=its_end, env=env)
    os.close(its_end)
    os.write(terminal, typed)
    written = b""
    while True:
        try:
            written += (part := os.read(terminal, 4096))
        except OSError:  # Linux: the other end is closed
            break
        if not part:
            break
    os.close(terminal)
    assert child.wait() == 0
    return written.decode()


@pytest.mark.processes
def test_a_terminal_shows_the_panel_and_is_clean_afterwards():
    written = run_in_terminal(SCRIPT_OF_STEPS)
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", written).replace("\r", "")
    assert "step 3 of 10 ─" in text
    assert all(f"line {i} of the script" in text for i in range(3))
    assert "step 2: loss " in text
    end = text[text.rindex("╰") :].splitlines()  # below the last panel there is the summary alone
    assert re.match(r"jzero: 3 steps in ", end[1])
    assert re.match(r"  24 samples; .*; last loss \d\.\d+; 0 skipped$", end[2])
    assert not any(border in line for line in end[3:] for border in "│╭")
    cursor = re.findall(r"\x1b\[\?25([hl])", written)
    assert cursor[-1] == "h"


PROMPTS = """
    import time
    from rich.text import Text
    from jzero.display.live import Terminal

    states = iter(range(1000))
    def open_terminal():
        return Terminal(lambda: Text(f"<state {next(states)}>"))
    shown = open_terminal()
    print(f"answer <{input('a question: ')}>")
    assert shown.is_left()
    shown.refresh()
    print("after it")
    shown.stop(keep=False)
    variable, shown = "of the script", open_terminal()
    breakpoint()
    shown.stop(keep=False)
    assert repr(input) == "<built-in function input>"
    print("end")
"""


@pytest.mark.processes
def test_a_prompt_takes_the_panel_away():
    """Otherwise the next state would be written over the question and what is typed."""
    written = run_in_terminal(PROMPTS, b"typed\np variable\nc\n")
    question = written.index("a question: ")
    assert "<state" in written[:question]
    assert "<state" not in written[question : written.index("after it")]
    assert "answer <typed>" in written
    prompt = written.index("(Pdb) ")
    assert "<state" not in written[prompt : written.rindex("end")]
    assert "'of the script'" in written[prompt:]
