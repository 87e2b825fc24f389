"""The last words of a process and of a job: one line for a user's mistake and for Ctrl-C, and no noise of libraries."""

import os
import platform
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers.stored_cases import check_cases
from jobs import CPU, stand_in
from test_attempt import Driven

import jzero
from jzero import cli
from jzero.distributed import last_words
from jzero.distributed.last_words import CONFIG, UNAVAILABLE
from jzero.errors import ConfigError, LostProcessError
from jzero.launcher import machine_check
from jzero.launcher.output import is_noise
from jzero.loss_scale import NonFiniteError

HEADER = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
BATCH = "train_batch_size = -1: must be a positive integer up to 2147483647 or null; or leave it out"
SEED = "seed = -1: must be a non-negative integer up to 4294967295; or leave it out for the default 0"
HELPER = """
import jzero
def check(**config):
    return jzero.Config.load({"train_batch_size": -1, **config})
"""
helper = {}
exec(compile(HELPER, "helper.py", "exec"), helper)


def fail(error):
    raise error


@pytest.fixture
def end(monkeypatch, capsys):
    """Raise an exception in a process after some steps; return its exit code and output."""
    monkeypatch.setattr(last_words, "_ended_by", "")

    def end(call, step=7, before=sys.__excepthook__):
        monkeypatch.setattr(last_words, "_step", step)
        with pytest.raises(BaseException) as error:
            call()
        code = None
        try:
            last_words._end(before, error.type, error.value, error.tb)
        except SystemExit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        return code, out + re.sub(r"test_last_words.py:\d+", "here", err)

    return end


NAN = "step 13: the loss is nan"


@pytest.mark.parametrize(
    ("call", "code", "said", "ended_by"),
    [
        (helper["check"], CONFIG, f"helper.py:4: after step 7: {BATCH}", f"ConfigError: {BATCH}"),
        (lambda: helper["check"](seed=-1), CONFIG,
         f"helper.py:4: after step 7: 2 problems:\n- {BATCH}\n- {SEED}", "ConfigError: "),
        (lambda: fail(LostProcessError("lost")), UNAVAILABLE, "here: after step 7: lost", "LostProcessError: lost"),
        (lambda: jax.jit(lambda x: fail(KeyboardInterrupt()))(1.0), None,
         "here: after step 7: interrupted (JZERO_TRACEBACK=1 prints the traceback)", "KeyboardInterrupt"),
        (lambda: fail(NonFiniteError(f"{NAN}\n  first in layer 1")), None, f"after step 7: NonFiniteError: {NAN}",
         f"NonFiniteError: {NAN}"),
    ],
)  # fmt: skip
def test_a_mistake_and_ctrl_c_are_one_line(end, call, code, said, ended_by):
    """With the innermost line of the user's own code, not those of jzero, JAX and Python."""
    assert end(call, before=lambda *_: None) == (code, f"jzero: {said}\n")
    assert last_words.ended_by().startswith(ended_by)


def test_tracebacks_that_are_wanted(end, monkeypatch):
    """And those of other exceptions; a hook of the script sees all."""
    code, said = end(lambda: fail(ValueError("bad")))
    assert code is None
    assert said.startswith("Traceback (most recent call last):\n")
    assert said.endswith("ValueError: bad\njzero: after step 7: ValueError: bad\n")
    last = f"jzero: helper.py:4: {BATCH}\n"
    assert end(helper["check"], 0) == (CONFIG, last)
    hook = end(helper["check"], 0, lambda kind, *_: print("seen", kind.__name__))
    assert hook == (CONFIG, f"seen ConfigError\n{last}")
    monkeypatch.setenv("JZERO_TRACEBACK", "1")
    code, said = end(helper["check"], 0)
    assert code == CONFIG
    assert said.startswith("Traceback (most recent call last):\n")
    assert said.endswith(last)


LEAVE_OUT = "leave it out: jzero puts batches on the devices"


def test_a_habit_of_pytorch_on_an_array_names_the_fix(end):
    """JAX's arrays and Python's containers cannot say it themselves."""
    for call, fix in (
        (lambda: jnp.ones(1).to("cuda"), LEAVE_OUT),
        (lambda: {"x": jnp.ones(1)}.cuda(), LEAVE_OUT),
        (lambda: jnp.ones(1).numpy(), "write np.asarray(x)"),
        (lambda: jnp.ones(1).nonsense(), None),
        (lambda: jzero.to("cuda"), None),
    ):
        _, said = end(call, 0, lambda *_: None)
        assert re.fullmatch(rf"jzero: here: AttributeError: .*; {re.escape(fix)}\n" if fix else "", said)


def test_the_step_of_an_earlier_engine_is_not_named(monkeypatch):
    monkeypatch.setattr(last_words, "_step", 14)
    with pytest.raises(ConfigError):
        jzero.initialize(model=lambda: 0, config={"train_batch_size": -1})
    assert last_words._step == 0


def test_a_job_s_last_lines_are_meaningful(pytestconfig):
    check_cases(Path(__file__).with_name("noise.jsonl"), is_noise, pytestconfig)
    job = Driven(1)
    for line in ("the cause", *[HEADER] * 30):
        job.attempt.receive("out", [0, 2, line])
    job.ends(0, 3)
    assert job.printed == ["the cause", *[HEADER] * 30]
    assert job.attempt.failure.what.endswith("its last lines:\n    the cause")


WORKER = """
from jzero.distributed import last_words
from jzero.errors import ConfigError
last_words.install()
raise ConfigError("a is wrong", "b is wrong")
"""


@pytest.mark.processes
def test_a_job_repeats_a_mistake_once(start):
    job = start(*CPU, 2, "worker.py", program=WORKER).ended(CONFIG)
    assert "Traceback" not in job.errors
    assert job.errors.count("a is wrong") <= 3  # of each rank, unless it was ended before, and of the job
    head, _, last = job.errors.rpartition("jzero: rank ")
    problem = "worker.py:5: 2 problems:\n- a is wrong\n- b is wrong\n"
    assert re.fullmatch(rf"\d exited with code 78 first, after \d+ s: {problem}", last)
    assert f"[{last[0]}] jzero: worker.py:5: 2 problems:\n" in head


def test_a_report_without_noise(capfd, monkeypatch, tmp_path):
    """JAX prints noise when a CUDA plugin is installed and there is no driver."""
    check = machine_check.check_jax_here
    monkeypatch.setattr(machine_check, "check_jax_here", lambda: os.write(2, f"{HEADER}\nfirst\n".encode()) and check())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["report"]) == 0
    out, err = capfd.readouterr()
    assert "JAX sees 8 x cpu (cpu)" in out
    assert err == "first\n"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", stand_in(tmp_path, "ssh", "echo '[preauth] no route' >&2; exit 255"))
    (tmp_path / "hosts").write_text("localhost slots=1\nnowhere slots=2\n")
    assert cli.main(["report", "--hostfile", str(tmp_path / "hosts")]) == 1
    here, nowhere = [line for line in capfd.readouterr().out.splitlines() if re.match(r"\| (localhost|nowhere) ", line)]
    assert f"| {platform.python_version()} " in here
    assert "| 0 GPUs, 1 are wanted: " in here.replace("  ", " ")
    assert "| [preauth] no route (exit code 255)" in nowhere  # which is no markup
