"""The command ends with every process, whatever happens to itself: strange names, exceptions, being stuck."""

import signal

import pytest
from planning import A
from workers import CPU, WORKER

from jzero import cli
from jzero.distributed.place import host_fault

NAMES = {
    "worker..1": "must have 1 to 63 characters between its dots",
    f"{'a' * 64}.com": "must have 1 to 63 characters between its dots",
    "root@-v": "cannot begin with -",
    "a\x00b": "must have 1 to 253 characters, without spaces and control characters",
    "a." * 127: "must have 1 to 253 characters, without spaces and control characters",
}


def test_a_host_name_that_cannot_be_encoded(here):
    """It is refused in one line wherever it is written."""
    cpu = ["--platform", "cpu"]
    good = here.write("good", f"{A} slots=1", "localhost slots=1")
    for name, why in NAMES.items():
        path = here.hosts("localhost slots=1", f"{name} slots=1")
        options = [["-H", path], *(["-H", good, f"{option}={name}"] for option in ("-i", "--master_addr"))]
        if "\x00" not in name:  # no environment holds it
            here.setenv("SLURM_JOB_NODELIST", name)
            options.append(["--num_gpus", 1])
        for words in options:
            message = here.refused(*cpu, *words, "train.py")
            assert f"a host's name {why}" in message
            assert message.count("\n") == 1


def fail():
    raise UnicodeError("label empty")


def test_a_host_name_that_is_allowed():
    for name in (
        "worker-1",
        "root@gpu.example.com",
        "10.0.0.1",
        "fe80::1%eth0",
        "a.b.",
        "é",
        "a_b",
    ):
        assert host_fault(name) == ""


@pytest.mark.parametrize("fault", ["connecting.Link.to", "failure.Progress.note"])
def test_an_unexpected_error_in_the_launcher(here, monkeypatch, fault):
    """It ends the job at once, with its type and text in one line."""
    monkeypatch.setattr(f"jzero.launcher.{fault}", lambda *_: fail())
    stop = signal.getsignal(signal.SIGTSTP)
    try:
        assert cli.main([*CPU, "2", "--no_python", "--no_local_rank", "sleep", "1000"]) == 1
    finally:
        signal.signal(signal.SIGTSTP, stop)
    said = here.capsys.readouterr().err
    assert "jzero: the command itself failed: UnicodeError: label empty (test_guard.py, line " in said
    assert "Traceback" not in said


MAIN = """
import sys, time
from jzero import cli
from jzero.launcher import attempt

def fails(*_):
    raise UnicodeError("label empty")

def sleeps(*_):
    print("stuck", flush=True)
    time.sleep(1000)

attempt.Attempt.{fault}
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.processes
@pytest.mark.parametrize("fault", ["interrupt = fails", pytest.param("tick = sleeps", marks=pytest.mark.slow)])
def test_a_launcher_that_is_stuck_ends_after_sigterm(start, tmp_path, fault):
    """Its handler fails, or it never comes to it; the grace and 8 s later it is gone."""
    (tmp_path / "faulty.py").write_text(MAIN.format(fault=fault))
    job = start(*CPU, 2, "--grace", 1, "worker.py", main=["faulty.py"], program=WORKER)
    job.until("stuck" if "sleeps" in fault else ("ready", 2))
    job.kill(job.process.pid, signal.SIGTERM)
    code = job.wait(20)
    job.gone(10)
    if "sleeps" in fault:
        assert code == 128 + signal.SIGTERM
        assert "the command itself was stuck" in job.errors
        assert job.took() < 19
    else:
        assert code == 1
        assert "UnicodeError: label empty (faulty.py, line 7)" in job.errors
