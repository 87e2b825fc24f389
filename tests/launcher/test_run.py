"""Jobs of several processes on this machine: their arguments and environment, and that no process survives."""

import json
import os
import signal
import socket
import time

import pytest
from helpers.sampling import keep
from jobs import PATIENCE, QUICK, wait_for
from workers import CPU

pytestmark = pytest.mark.processes

NASTY = ['a "b" c', "it's", "$HOME `id` ; rm -rf x", "two\nlines", "", "*", "\\", "é ü"]


def test_arguments_and_environment_arrive(start, worker):
    done = start(*CPU, 2, "--export", "SEEN=a b;$c", worker, "show", *NASTY)
    assert done.wait() == 0, done.errors
    said = dict(line[1:].split("] ", 1) for line in done.output.splitlines())
    for rank in "01":
        arguments, env, seen = json.loads(said[rank])
        assert arguments == [f"--local_rank={rank}", "show", *NASTY]
        assert seen == "a b;$c"
        assert env == {
            "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_SIZE": "2", "CROSS_RANK": "0",
            "CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        }  # fmt: skip
    done.gone()


def test_output_is_whole(start, worker, tmp_path):
    done = start(*CPU, 2, "--enable_each_rank_log", tmp_path / "logs", worker, "lines")
    assert done.wait() == 0
    lines = done.output.splitlines()
    for rank in "01":
        mine = [line[4:] for line in lines if line.startswith(f"[{rank}] ")]
        assert mine == [*(f"{rank}:{i}" for i in range(3000)), "a", "b", "c"]
        (log,) = (tmp_path / "logs").glob(f"*_rank{rank}.log")
        assert log.read_text().count(f"{rank}:") == 3000
    assert done.errors.count("x") >= 400_000


def test_a_rank_that_raises(start, worker):
    job = start(*CPU, 3, worker, "raise")
    assert job.wait() == 1
    assert "rank 1 exited with code 1 first" in job.errors
    assert job.errors.rstrip().endswith("ValueError: a fault of rank 1")
    job.gone(1)


def test_a_rank_s_exit_code(start, worker):
    job = start(*CPU, 3, worker, "code")
    assert job.wait() == 7
    job.gone(1)


@pytest.mark.parametrize("what", keep(["", "children", "hidden", "deaf"], ["hidden"]))
def test_kill_a_rank(start, worker, what):
    job = start(*CPU, 3, worker, what).until(("ready", 3))
    assert len(job.processes("worker.py")) >= 3
    job.kill(job.rank(2))
    assert job.wait(10) == 128 + signal.SIGKILL
    job.gone(10 - job.took())
    assert "rank 2 was killed by signal 9 (SIGKILL) first" in job.errors


@pytest.mark.parametrize("what", keep(["children", "hidden", "deaf"], ["hidden", "deaf"]))
def test_kill_the_agent(start, worker, what, tmp_path):
    """Another one kills the processes that it left, and deletes its temporary directory."""
    (tmp_path / "tmp").mkdir()
    job = start(*CPU, 2, worker, what, env={"TMPDIR": str(tmp_path / "tmp")}).until(("ready", 2))
    (agent,) = job.agents()
    assert [*(tmp_path / "tmp").glob("jzero-*")] != []
    job.kill(agent)
    assert job.wait(10) not in (0, None)
    job.gone(10 - job.took())
    assert "lost localhost" in job.errors
    assert [*(tmp_path / "tmp").glob("jzero-*")] == []


@pytest.mark.parametrize("what", keep(["children", "hidden", "deaf"], ["children"]))
def test_kill_the_command(start, worker, what):
    job = start(*CPU, 2, worker, what).until(("ready", 2))
    job.kill(job.process.pid)
    job.wait()
    job.gone(10 - job.took())


@pytest.mark.slow
def test_a_command_that_is_stopped(start, worker):
    job = start(*CPU, 2, worker).until(("ready", 2))
    job.kill(job.process.pid, signal.SIGSTOP)
    try:
        wait_for(lambda: set(job.processes()) == {job.process.pid}, 20, lambda: str(job.processes()))
    finally:
        os.kill(job.process.pid, signal.SIGCONT)
    assert job.wait(10) != 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_go_through(start, worker, number):
    job = start(*CPU, 2, worker, "save").until(("ready", 2))
    job.kill(job.process.pid, number)
    assert job.wait(10) == 128 + number
    assert sorted(line[4:] for line in job.output.splitlines() if "saved" in line) == [
        f"saved 0 {number}",
        f"saved 1 {number}",
    ]
    job.gone(1)


@pytest.mark.slow
def test_saving_may_take_the_grace(start, worker):
    """One rank received SIGTERM and saved; the others may take longer than an agent waits for a silent command."""
    job = start(*CPU, 2, "--grace", 20, worker, "slow")
    assert job.wait() == 75
    assert "saved 1" in job.output


@pytest.mark.slow
def test_a_rank_that_fails_after_ctrl_c(start, worker):
    """Its code is reported, and the others, which may wait for it, do not have the whole grace."""
    job = start(*CPU, 2, "--grace", 60, worker, "fails").until(("ready", 2))
    job.kill(job.process.pid, signal.SIGINT)
    assert job.wait(30) == 128 + signal.SIGINT
    first = "rank 1 was the first to fail after signal 2 (SIGINT): it exited with code 3; the others have 8 s"
    assert first in job.errors
    assert "still running: rank 0 (rank 1 exited with code 3)" in job.errors
    assert "well" not in job.errors
    assert job.errors.endswith("jzero: killed: rank 0\n")
    job.gone(5)


def test_a_second_signal_ends_it(start, worker):
    job = start(*CPU, 2, worker, "deaf").until(("ready", 2))
    job.kill(job.process.pid, signal.SIGINT)
    with pytest.raises(Exception, match="timed out"):
        job.wait(2)
    job.kill(job.process.pid, signal.SIGINT)
    assert job.wait(5) == 128 + signal.SIGINT
    job.gone(5)


def test_grace_ends(start, worker):
    job = start(*CPU, 2, "--grace", 1, worker, "deaf").until(("ready", 2))
    job.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(8) == 128 + signal.SIGTERM
    job.gone(5)


def test_restarts(start, worker, tmp_path):
    job = start(*CPU, 2, "--max_restarts", 1, worker, "once")
    assert job.wait() == 0
    assert "restart 1 of 1" in job.errors
    (tmp_path / "tried").unlink()
    assert start(*CPU, 2, worker, "once").wait() == 3


SSH = """#!/bin/sh
# Other names for this machine. good2 is unreachable once, after the first failure; silent never answers.
for word; do host=$command command=$word; done
case $host in
    silent) sh -c 'sleep 1000; :' "$command" & wait ;;
    good2) if [ -e tried ] && ! [ -e away ]; then touch away; echo no route to host >&2; exit 255; fi ;;
esac
exec sh -c "$command"
"""


@pytest.fixture
def named_hosts(start, worker, tmp_path):
    """Start a job on hosts with these names, one process each."""

    def launch(*names):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / "ssh").write_text(SSH)
        (tmp_path / "bin" / "ssh").chmod(0o755)
        hostfile = tmp_path / "-".join(names)
        hostfile.write_text("".join(f"{name} slots=1\n" for name in names))
        path = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "RES_OPTIONS": "timeout:1 attempts:1"}
        return lambda *words: start("--platform", "cpu", "--hostfile", hostfile, *words, env=path)

    return launch


@pytest.mark.slow
def test_a_host_that_does_not_answer(named_hosts, worker):
    hosts = named_hosts("good1", "silent", "good2")
    all_of_them, others = hosts(worker, "show"), hosts("--min_nodes", 2, worker, "show")
    assert all_of_them.wait() == 2
    assert "no answer in 20 s" in " ".join(all_of_them.errors.split())
    assert all_of_them.output == ""
    assert others.wait() == 0
    assert "going on without silent" in others.errors
    assert others.output.count('"WORLD_SIZE": "2"') == 2
    for job in (all_of_them, others):
        job.gone(2)
        assert "Traceback" not in job.errors
        assert "Exception ignored" not in job.errors


@pytest.mark.parametrize(("restarts", "code"), keep([(1, 3), (2, 0)], [(1, 3)]))
def test_a_restart_for_which_a_host_is_away(named_hosts, worker, restarts, code):
    """It counts as a restart, the next one waits for the host, and the exit code is the script's."""
    job = named_hosts("good1", "good2")("--max_restarts", restarts, worker, "once")
    assert job.wait() == code
    assert "no route to host" in job.errors
    assert job.errors.count("nothing was started") == 1
    assert f"restart {restarts} of {restarts}" in job.errors
    job.gone(2)


def test_ctrl_c_between_restarts(named_hosts, worker):
    job = named_hosts("good1", "good2")("--max_restarts", 2, worker, "once")
    wait_for(lambda: "no route to host" in job.errors, PATIENCE, lambda: job.errors)
    job.kill(job.process.pid, signal.SIGINT)
    assert job.wait(5) == 128 + signal.SIGINT
    job.gone(2)


def test_a_port_that_is_taken(start, worker):
    """A job whose --master_port is taken does not start."""
    with socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True) as taken:
        port = taken.getsockname()[1]
        second = start(*CPU, 2, "--master_port", port, worker, "show")
        assert second.wait() == 2
        assert f"port {port} at 127.0.0.1: Address already in use" in " ".join(second.errors.split())
        assert second.output == ""
        second.gone(1)


def test_programs_and_modules(start, tmp_path):
    (tmp_path / "one.py").write_text("import sys; print(__name__, sys.argv[1:-1])")
    module = start(*CPU, 1, "--module", "one", "x")
    assert module.wait() == 0
    assert module.output == "__main__ ['--local_rank=0', 'x']\n"
    (tmp_path / "source").write_text("export SEEN=sourced")
    own = ("--venv_script", "./source", "--no_python", "--no_local_rank")
    program = start(*CPU, 1, *own, "sh", "-c", "echo $SEEN $0 $JZERO_JOB_ID")
    assert program.wait() == 0
    assert program.output.startswith("sourced token-")


def test_pid_file(start, worker, tmp_path):
    job = start(*CPU, 1, "--save_pid", worker, env={"TMPDIR": str(tmp_path)}).until("ready")
    path = tmp_path / f"{job.process.pid}.jzero"
    assert path.read_text() == f"{job.process.pid}\n"
    job.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(10) == 143
    assert not path.exists()


TRAIN = """
import os, time
import jax, numpy as np, jzero
from models.mlp import MLP, cross_entropy

config = {"train_batch_size": 4, "optimizer": {"type": "Adam", "params": {"lr": 1e-3}}}
model = jzero.from_flax(lambda rngs: MLP(8, 8, 2, rngs=rngs), cross_entropy)
engine, *_ = jzero.initialize(model=model, config=config)
for i in range(10_000):
    loss = float(engine.train_batch((np.ones((4, 8), "float32"), np.zeros(4, "int32"))))
    if i == 5 and os.environ["RANK"] == "1":
        exec(os.environ.get("DO", ""))
    if i == 3:
        print("ready", flush=True)
"""


@pytest.mark.slow
def test_a_rank_that_hangs(start, tmp_path):
    (tmp_path / "worker.py").write_text(TRAIN)
    # The timeout includes compiling the first step, which is slow on a busy machine.
    job = start(*CPU, 2, "--hang_timeout", 25, "worker.py", env=QUICK).until(("ready", 2))
    job.kill(job.rank(1), signal.SIGSTOP)
    assert job.wait(90) == 124
    job.gone(5)
    assert "no step has finished for 25 s" in job.errors
    assert "look at rank 1 first" in job.errors
    assert "(stopped)" in job.errors
    assert "[0]   File" in job.errors  # rank 0's stack


@pytest.mark.slow
@pytest.mark.parametrize(("what", "code"), [("raise ValueError", 1), ("import sys; sys.exit(3)", 3), ("exit(3)", 3)])
def test_a_rank_that_leaves_among_collectives(start, tmp_path, what, code):
    """The others wait for it in a collective, and JAX's exit would wait for the others."""
    (tmp_path / "worker.py").write_text(TRAIN)
    job = start(*CPU, 2, "worker.py", env=QUICK | {"DO": what}).until(("ready", 2))
    assert job.wait(15) == code, job.errors
    job.gone(1)


def test_output_that_nobody_reads(start, worker, tmp_path):
    job = start(*CPU, 2, worker, "much", prefix=["sh", "-c", '"$@" | head -1; echo ended', "sh"])
    assert job.wait() == 0
    assert job.output.endswith("ended\n")
    assert "nobody reads the output any more" in job.errors
    job.gone(10)


@pytest.mark.slow
def test_a_reader_that_pauses(start, worker):
    """A reader that pauses for longer than COMMAND_SILENCE does not end the job."""
    pause = 'mkfifo pipe; "$@" > pipe & exec 3< pipe; sleep 12; touch read; cat <&3'
    job = start(*CPU, 2, worker, "much", prefix=["sh", "-c", pause, "sh"])
    assert job.wait() == 0
    assert job.output.count("x" * 100) == 2 * 3000, job.errors


def test_the_first_to_fail_is_named(start, tmp_path):
    """Even if its children keep its output open, and another rank fails because of it."""
    (tmp_path / "worker.py").write_text(
        "import os, subprocess, sys, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)', sys.argv[-1]])\n"
        "    open('failing', 'w').write(str(os.getpid()))\n"
        "    os.rename('failing', 'failed')\n"
        "    raise ValueError('the cause')\n"
        "while not os.path.exists('failed'):\n"
        "    time.sleep(0.01)\n"
        "while os.path.exists('/proc/' + open('failed').read()):\n"
        "    time.sleep(0.01)\n"
        "time.sleep(0.2)\n"
        "sys.exit(9)\n"
    )
    job = start(*CPU, 2, "worker.py")
    assert job.wait() == 1
    assert time.time() - (tmp_path / "failed").stat().st_mtime < 20
    assert "rank 1 exited with code 1 first" in job.errors
    assert "the cause" in job.errors.split("first")[-1]
    job.gone(5)


def test_interrupted_in_the_preflight(start, worker, tmp_path):
    (tmp_path / "slow").write_text("sleep 15")
    job = start(*CPU, 1, "--venv_script", "./slow", worker)
    wait_for(lambda: job.processes("/slow &&"), PATIENCE, lambda: str(job.processes()))
    job.kill(job.process.pid, signal.SIGTERM)
    assert job.wait(5) == 143
    job.gone(20)


def test_a_program_that_cannot_start(start, worker, tmp_path):
    (tmp_path / "file").write_text("")
    job = start(*CPU, 1, "--enable_each_rank_log", tmp_path / "file" / "logs", worker)
    assert job.wait() == 127
    assert "Not a directory" in job.errors


def test_interrupted_before_it_starts(start, worker):
    job = start(*CPU, 1, worker)
    job.kill(job.process.pid, signal.SIGTERM)
    assert job.wait() != 0
    job.gone()
