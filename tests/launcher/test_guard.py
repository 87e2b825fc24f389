"""The command ends with every process, whatever happens to itself: strange names, exceptions, being stuck."""

import signal

import pytest
from planning import A
from workers import CPU, WORKER

from jzero.distributed.place import host_fault

MAIN = """
import sys, time
from jzero import cli
from jzero.launcher import attempt, connecting, failure, job

def fails(*_):
    raise UnicodeError("label empty")

def sleeps(*_):
    print("stuck", flush=True)
    time.sleep(1000)

{fault}
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.fixture
def faulty(start, tmp_path):
    """Start a job whose command has a fault."""

    def faulty(fault, *words):
        (tmp_path / "faulty.py").write_text(MAIN.format(fault=fault))
        return start(*CPU, 2, *words, "worker.py", main=["faulty.py"], program=WORKER)

    return faulty


NAMES = {
    "worker..1": "must have 1 to 63 characters between its dots",
    f"{'a' * 64}.com": "must have 1 to 63 characters between its dots",
    "-oProxyCommand=sh": "cannot begin with -",
    "root@-v": "cannot begin with -",
    "a\x00b": "must have 1 to 253 characters, without spaces and control characters",
    "a." * 127: "must have 1 to 253 characters, without spaces and control characters",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_host_name_that_cannot_be_encoded(here, name):
    """It is refused in one line wherever it is written."""
    path, why = here.hosts("localhost slots=1", f"{name} slots=1"), f"a host's name {NAMES[name]}"
    cpu = ["--platform", "cpu"]
    messages = [here.refused(*cpu, "-H", path, "train.py")]
    good = here.write("good", f"{A} slots=1", "localhost slots=1")
    messages += [here.refused(*cpu, "-H", good, f"{option}={name}", "train.py") for option in ("-i", "--master_addr")]
    if "\x00" not in name:  # no environment holds it
        here.setenv("SLURM_JOB_NODELIST", name)
        messages.append(here.refused(*cpu, "--num_gpus", 1, "train.py"))
    for message in messages:
        assert why in message
        assert message.count("\n") == 1


@pytest.mark.parametrize("name", ["worker-1", "root@gpu.example.com", "10.0.0.1", "fe80::1%eth0", "a.b.", "é", "a_b"])
def test_a_host_name_that_is_allowed(name):
    assert host_fault(name) == ""


@pytest.mark.processes
@pytest.mark.parametrize("fault", ["connecting.Link.to = fails", "failure.Progress.note = fails"])
def test_an_unexpected_error_in_the_launcher(faulty, fault):
    """It ends the job at once, with its type and text in one line."""
    job = faulty(fault).ended(1)
    assert "jzero: the command itself failed: UnicodeError: label empty (faulty.py, line 7)" in job.errors
    assert "Traceback" not in job.errors
    job.gone(5)


@pytest.mark.processes
@pytest.mark.parametrize(
    "fault",
    ["attempt.Attempt.interrupt = fails", pytest.param("attempt.Attempt.tick = sleeps", marks=pytest.mark.slow)],
)
def test_a_launcher_that_is_stuck_ends_after_sigterm(faulty, fault):
    """Its handler fails, or it never comes to it; the grace and 8 s later it is gone."""
    job = faulty(fault, "--grace", 1).until("stuck" if "sleeps" in fault else ("ready", 2))
    job.kill(job.process.pid, signal.SIGTERM)
    code = job.wait(20)
    job.gone(10)
    if "sleeps" in fault:
        assert code == 128 + signal.SIGTERM
        assert "the command itself was stuck" in job.errors
        assert job.took() < 19
    else:
        assert code == 1
        assert "UnicodeError: label empty" in job.errors
