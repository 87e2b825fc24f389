"""The last words of a process and of a job: one line for a user's mistake and for Ctrl-C, and no noise of libraries."""

import contextlib
import os
import re
import subprocess
import sys

import jax.numpy as jnp
import pytest
from jobs import ROOT, stand_in
from test_attempt import Driven
from workers import CPU

import jzero
from jzero import cli
from jzero.distributed import last_words
from jzero.distributed.last_words import CONFIG, UNAVAILABLE
from jzero.errors import ConfigError
from jzero.launcher import machine_check
from jzero.launcher.output import is_noise
from jzero.loss_scale import NonFiniteError

HEADER = "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR"
NOISE = [
    HEADER,
    "I0000 00:00:1795431811.963961   25986 cudart_stub.cc:31] Could not find cuda drivers on your machine.",
    "W0000 00:00:1795431811.963961   25986 cudart_stub.cc:31] Could not find cuda drivers on your machine.",
    "I1123 11:01:46.123456 77 nccl.cc:9] communicator",
    "2026-11-23 11:01:46.123456: I external/xla/xla/service/service.cc:168] XLA service initialized",
    "[Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1",
]
MEANINGFUL = [
    "",
    "ValueError: bad",
    "WARNING: the loss is not finite",
    "I0000 rows read",
    "W0000 00:00:1795431811.963961   25986 bfc_allocator.cc:501] Allocator ran out of memory",
    "E0000 00:00:1795431811.963961   25986 rendezvous.cc:31] This thread has been waiting for 10 seconds",
    "F0000 00:00:1795431811.963961   25986 array.cc:31] Check failed: rank < 4",
    "RuntimeError: [Gloo] connection reset",
]


def test_noise():
    assert [line for line in [*NOISE, *MEANINGFUL] if not is_noise(line)] == MEANINGFUL


HELPER = """
import jzero
def check(size):
    return jzero.Config.load({"train_batch_size": size, **({"seed": -1} if size < -1 else {})})
"""
SCRIPT = """
import os, signal, sys
import jax, jzero
from helper import check
from jzero.distributed import last_words

jzero.init_distributed()
what = sys.argv[1]
if what == "hook":
    last_words._installed, sys.excepthook = False, lambda kind, error, trace: print("seen", kind.__name__)
    last_words.install()
if what in ("one", "hook"):
    check(-1)
last_words.record_step(7)
if what == "several":
    check(-2)
if what == "lost":
    raise jzero.errors.LostProcessError("process 1 was lost")
if what == "compile":
    @jax.jit
    def f(x):
        os.kill(os.getpid(), signal.SIGINT)
        return x + 1
    f(1.0)
raise ValueError("bad")
"""
BATCH = "train_batch_size = -%d: must be a positive integer up to 2147483647 or null; or leave it out"
SEED = "seed = -1: must be a non-negative integer up to 4294967295; or leave it out for the default 0"


def run(*words, env=os.environ, **more):
    env = env | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=180, check=False, **more)


# A process for each word, forked from one that has imported JAX, which takes seconds.
FORKS = """
import os, runpy, sys
import jax, jzero
for word in sys.argv[1:]:
    if pid := os.fork():  # before JAX has threads
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
        continue
    for descriptor, kind in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{word}.{kind}", os.O_WRONLY | os.O_CREAT), descriptor)
    what, _, traceback = word.partition("-")
    if traceback:
        os.environ["JZERO_TRACEBACK"] = "1"
    sys.argv[1:] = [what]
    runpy.run_path("train.py", run_name="__main__")
    break
"""
WORDS = ("one", "several", "lost", "compile", "hook", "other", "one-traceback")


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """word -> the exit code of the script with this argument, its output, and its lines on stderr without noise."""
    folder = tmp_path_factory.mktemp("ended")
    for name, text in (("train", SCRIPT), ("helper", HELPER), ("forks", FORKS)):
        (folder / f"{name}.py").write_text(text)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JZERO_")}
    codes = map(int, run("forks.py", *WORDS, env=clean, cwd=folder).stdout.split())
    out, err = ([(folder / f"{word}.{kind}").read_text() for word in WORDS] for kind in ("out", "err"))
    lines = [[line for line in text.splitlines() if not is_noise(line)] for text in err]
    return dict(zip(WORDS, zip(codes, out, lines, strict=True), strict=True))


@pytest.mark.parametrize(
    ("what", "code", "out", "lines"),
    [
        ("one", CONFIG, "", [f"jzero: helper.py:4: {BATCH % 1}"]),
        ("several", CONFIG, "", ["jzero: helper.py:4: after step 7: 2 problems:", f"- {BATCH % 2}", f"- {SEED}"]),
        ("lost", UNAVAILABLE, "", ["jzero: train.py:18: after step 7: process 1 was lost"]),
        ("compile", -2, "", ["jzero: train.py:22: after step 7: interrupted (JZERO_TRACEBACK=1 prints the traceback)"]),
        ("hook", CONFIG, "seen ConfigError\n", [f"jzero: helper.py:4: {BATCH % 1}"]),
    ],
)
def test_a_mistake_and_ctrl_c_are_one_line(ended, what, code, out, lines):
    """With the innermost line of the user's own code, not those of jzero, JAX and Python; a hook is called."""
    assert ended[what] == (code, out, lines)


@pytest.mark.parametrize(
    ("what", "code", "last"),
    [
        ("one-traceback", CONFIG, [f"jzero: helper.py:4: {BATCH % 1}"]),
        ("other", 1, ["ValueError: bad", "jzero: after step 7: ValueError: bad"]),
    ],
)
def test_tracebacks_that_are_wanted(ended, what, code, last):
    found, _, lines = ended[what]
    assert found == code
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-len(last) :] == last


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NonFiniteError("step 13: the loss is nan\n  first in layer 1"), "NonFiniteError: step 13: the loss is nan"),
        (ConfigError("rank = 8: must be 4"), "ConfigError: rank = 8: must be 4"),
        (RuntimeError("no memory"), "RuntimeError: no memory"),
    ],
)
def test_the_type_of_an_error_comes_once(monkeypatch, capsys, error, words):
    monkeypatch.setattr(last_words, "_step", 14)
    monkeypatch.setattr(last_words, "_ended_by", "")
    with contextlib.suppress(SystemExit):
        last_words._end(lambda *error: None, type(error), error, None)
    assert last_words.ended_by() == words
    shown = str(error) if isinstance(error, ConfigError) else words
    assert capsys.readouterr().err == f"jzero: after step 14: {shown}\n"


LEAVE_OUT = "leave it out: jzero puts batches on the devices"


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        (lambda: jnp.ones(1).to("cuda"), LEAVE_OUT),
        (lambda: jnp.ones(1).cuda(), LEAVE_OUT),
        (lambda: {"x": jnp.ones(1)}.to("cuda"), LEAVE_OUT),
        (lambda: jnp.ones(1).numpy(), "write np.asarray(x)"),
        (lambda: jnp.ones(1).detach(), "write np.asarray(x)"),
        (lambda: jnp.ones(1).backward(), "write engine.backward(loss), with the loss as the engine returned it"),
        (lambda: jnp.ones(1).nonsense(), None),
        (lambda: jzero.to("cuda"), None),
        (lambda: ConfigError.numpy(), None),
    ],
)
def test_a_habit_of_pytorch_on_an_array_names_the_fix(monkeypatch, capsys, call, fix):
    """JAX's arrays and Python's containers cannot say it themselves."""
    monkeypatch.setattr(last_words, "_step", 0)
    with pytest.raises(AttributeError) as error:
        call()
    last_words._end(lambda *error: None, error.type, error.value, error.tb)
    shown = re.sub(r":\d+:", ":", capsys.readouterr().err)
    assert shown == (f"jzero: test_last_words.py: AttributeError: {error.value}; {fix}\n" if fix else "")


def test_the_step_of_an_earlier_engine_is_not_named(monkeypatch):
    monkeypatch.setattr(last_words, "_step", 14)
    with pytest.raises(ConfigError):
        jzero.initialize(model=lambda: 0, config={"train_batch_size": -1})
    assert last_words._step == 0


def test_a_job_s_last_lines_are_meaningful():
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


CRASH = f"""
import os
from jzero.launcher.output import quiet_stderr
with quiet_stderr():
    os.write(2, b"{HEADER}\\nfirst\\n")
os.write(2, b"second\\n")
with quiet_stderr():
    os.write(2, b"the last words\\n")
    os.abort()
"""


def test_a_crash_without_noise():
    """`jzero report` drops noise from its stderr, and nothing else, even if JAX ends the process."""
    done = run("-c", CRASH)
    assert done.returncode == -6
    assert done.stderr == "first\nsecond\nthe last words\n"


def test_a_report_without_noise(capfd, monkeypatch, tmp_path):
    """JAX prints noise when a CUDA plugin is installed and there is no driver."""
    check = machine_check.check_jax_here
    monkeypatch.setattr(machine_check, "check_jax_here", lambda: os.write(2, f"{HEADER}\n".encode()) and check())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["report"]) == 0
    out, err = capfd.readouterr()
    assert "JAX sees 8 x cpu (cpu)" in out
    assert err == ""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setenv("PATH", stand_in(tmp_path, "ssh", "echo no route >&2; exit 255"))
    (tmp_path / "hosts").write_text("localhost slots=1\nnowhere slots=2\n")
    assert cli.main(["report", "--hostfile", str(tmp_path / "hosts")]) == 1
    here, nowhere = [line for line in capfd.readouterr().out.splitlines() if re.match(r"\| (localhost|nowhere) ", line)]
    assert "| 0 GPUs, 1 are wanted: " in here.replace("  ", " ")
    assert "| no route (exit code 255)" in nowhere
