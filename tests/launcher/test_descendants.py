"""Orphans of a job that left their session and environment end with it, whichever process is stopped or killed."""

import signal
from pathlib import Path

import pytest
from helpers.sampling import keep
from jobs import wait_for
from workers import CPU

pytestmark = pytest.mark.processes

HIDDEN = [("agent", "STOP"), ("agent", "KILL"), ("guard", "KILL"), ("agent and guard", "STOP")]


@pytest.mark.parametrize(("who", "how"), keep(HIDDEN, HIDDEN[1:3]))
def test_no_child_hides(start, worker, who, how):
    """A restart begins without the orphans of the attempt before, whatever their session and environment."""
    job = start(*CPU, 1, "--max_restarts", 1, worker, "hidden").until(("ready", 1))
    before = job.processes()
    assert [words for words in before.values() if "time.sleep(1000)" in words] != []
    for pid in job.agents() * ("agent" in who) + job.guards() * ("guard" in who):
        job.kill(pid, signal.Signals[f"SIG{how}"])
    job.until(("ready", 2))
    assert "lost localhost" in job.errors
    assert job.processes().keys() & before.keys() == {job.process.pid}
    job.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(10) == 128 + signal.SIGTERM
    job.gone(5)


@pytest.mark.slow
def test_kill_the_command_of_a_stopped_agent(start, worker):
    job = start(*CPU, 1, worker, "hidden").until("ready")
    job.kill(*job.agents(), signal.SIGSTOP)
    job.kill(job.process.pid)
    job.wait()
    job.gone(15)


def test_a_stopped_guard_ends_with_its_job(start, worker):
    job = start(*CPU, 1, worker, "hidden").until("ready")
    job.kill(*job.guards(), signal.SIGSTOP)
    job.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(10) == 128 + signal.SIGTERM
    job.gone(5)


def test_an_orphan_that_ends_is_collected(start, worker):
    """An agent is the parent of all orphans of its job; over days they would fill the table of processes."""
    job = start(*CPU, 1, worker, "hidden").until("ready")
    (orphan,) = job.processes("time.sleep(1000)")
    (agent,) = job.agents()
    assert f"PPid:\t{agent}\n" in Path(f"/proc/{orphan}/status").read_text()
    job.kill(orphan)
    wait_for(lambda: not Path(f"/proc/{orphan}").exists(), 30, lambda: "it is a zombie")


def test_a_detached_child_ends_with_a_job_that_succeeds(start, worker):
    job = start(*CPU, 2, "--export", "SEEN=ends", worker, "hidden")
    assert job.wait() == 0
    job.gone(2)
