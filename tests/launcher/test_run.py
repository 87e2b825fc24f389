"""Jobs of several processes on this machine: their arguments and environment, and that no process survives.

The last is that of the manual's batch script for Slurm. What the command does about an event is in test_attempt.py.
"""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.sampling import keep
from jobs import CPU, PATIENCE, QUICK, ROOT, stand_in, wait_for

from jzero import cli

pytestmark = pytest.mark.processes

NASTY = ['a "b" c', "it's", "$HOME `id` ; rm -rf x", "two\nlines", "", "*", "\\", "é ü"]
WAYS_TO_STAY = "children hidden deaf"


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


def test_a_job_that_succeeds(start, worker, tmp_path):
    """Arguments and environment arrive, the output is whole, and a detached child ends with the job."""
    what, logs = "show lines hidden", tmp_path / "logs"
    done = start(*CPU, 2, "--enable_each_rank_log", logs, "--export", "SEEN_KEY=a b;$c", worker, what, *NASTY).ended()
    done.gone(2)
    for rank in "01":
        first, *lines = [line[4:] for line in done.output.splitlines() if line.startswith(f"[{rank}] ")]
        arguments, env, seen = json.loads(first)
        assert arguments == [f"--local_rank={rank}", what, *NASTY]
        assert seen == "a b;$c"
        assert env == {
            "RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "LOCAL_SIZE": "2", "CROSS_RANK": "0",
            "CROSS_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        }  # fmt: skip
        assert lines == [*(f"{rank}:{i}" for i in range(3000)), "a", "b", "c"]
        (log,) = logs.glob(f"*_rank{rank}.log")
        assert log.read_text().count(f"{rank}:") == 3000
    assert done.errors.count("x") >= 400_000


def test_kill_a_rank(start, worker, tmp_path):
    """At once, though its children keep its output open; those that do not hear SIGTERM half a second later."""
    (tmp_path / "quick.py").write_text(MAIN.format(fault='fail.__kwdefaults__["grace"] = 0.5'))
    job = start(*CPU, 3, worker, WAYS_TO_STAY, main=["quick.py"]).until(("ready", 3))
    job.kill(job.rank(2))
    job.ended(128 + signal.SIGKILL, 10).gone(10 - job.took())
    assert "rank 2 was killed by signal 9 (SIGKILL) first" in job.errors


def test_kill_the_command(start, worker):
    """The job has a secret, in the environment of its processes alone."""
    job = start(*CPU, 2, worker, WAYS_TO_STAY).until(("ready", 2))
    environments = [Path(f"/proc/{job.rank(rank)}/environ").read_text() for rank in (0, 1)]
    (secret,) = {re.search(r"\0JZERO_SECRET=(\w{64})\0", text)[1] for text in environments}
    assert secret not in "".join(job.processes().values()) + job.output + job.errors
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


HIDDEN = [("agent", "STOP"), ("agent", "KILL"), ("guard", "KILL"), ("agent and guard", "STOP")]


@pytest.mark.parametrize(("who", "how"), keep(HIDDEN, HIDDEN[1:2]))
def test_no_child_hides(start, worker, tmp_path, who, how):
    """A restart begins without the orphans of the attempt before; the agent's folder is private, and goes."""
    job = start(*CPU, 1, "--max_restarts", 1, worker, "hidden", env={"TMPDIR": str(tmp_path)}).until(("ready", 1))
    (folder,) = tmp_path.glob("jzero-*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert f"\0JZERO_PROGRESS={folder}/0\0" in Path(f"/proc/{job.rank(0)}/environ").read_text()
    before = job.processes()
    assert [words for words in before.values() if "time.sleep(1000)" in words] != []
    agents, guards = job.agents_and_guards()
    for pid in agents * ("agent" in who) + guards * ("guard" in who):
        job.kill(pid, signal.Signals[f"SIG{how}"])
    job.until(("ready", 2))
    assert "lost localhost" in job.errors
    assert job.processes().keys() & before.keys() == {job.process.pid}
    job.kill(job.process.pid, signal.SIGTERM)
    job.ended(128 + signal.SIGTERM, 10).gone(5)
    assert [*tmp_path.glob("jzero-*")] == [] or who == "agent and guard"


def test_an_orphan_a_stopped_guard_and_a_second_signal(start, worker):
    job = start(*CPU, 1, worker, "hidden deaf").until("ready")
    (orphan,) = job.processes("time.sleep(1000)")
    # The agent is the parent of all orphans of its job; over days they would fill the table of processes.
    (agent,), (guard,) = job.agents_and_guards()
    assert f"PPid:\t{agent}\n" in Path(f"/proc/{orphan}/status").read_text()
    job.kill(orphan)
    wait_for(lambda: not Path(f"/proc/{orphan}").exists(), 30, lambda: "it is a zombie")
    job.kill(guard, signal.SIGSTOP)
    job.kill(job.process.pid, signal.SIGINT)
    with pytest.raises(Exception, match="timed out"):
        job.wait(1)
    job.kill(job.process.pid, signal.SIGINT)
    job.ended(128 + signal.SIGINT, 5).gone(5)


@pytest.mark.parametrize("number", keep([signal.SIGTERM, signal.SIGINT], [signal.SIGTERM]))
def test_signals_go_through(start, worker, tmp_path, number):
    """And the file with the command's pid goes."""
    job = start(*CPU, 2, "--save_pid", worker, "save", env={"TMPDIR": str(tmp_path)}).until(("ready", 2))
    file = tmp_path / f"{job.process.pid}.jzero"
    assert file.read_text() == f"{job.process.pid}\n"
    job.kill(job.process.pid, number)
    job.ended(128 + number, 10)
    assert not file.exists()
    saved = sorted(line[4:] for line in job.output.splitlines() if "saved" in line)
    assert saved == [f"saved 0 {number}", f"saved 1 {number}"]
    job.gone(1)


def test_interrupted_in_the_preflight(start, worker, tmp_path):
    (tmp_path / "sleeps").write_text("sleep 15")
    job = start(*CPU, 1, "--venv_script", "./sleeps", worker)
    wait_for(lambda: job.processes("/sleeps &&"), PATIENCE, lambda: str(job.processes()))
    job.kill(job.process.pid, signal.SIGTERM)
    job.ended(143, 5).gone(20)


# Other names for this machine; silent never answers.
SSH = """
for word; do host=$command command=$word; done
[ $host != silent ] || { sh -c 'sleep 1000; :' "$command" & wait; }
exec sh -c "$command"
"""


@pytest.mark.slow
def test_a_host_that_does_not_answer(start, worker, tmp_path):
    (tmp_path / "hosts").write_text("good1 slots=1\nsilent slots=1\ngood2 slots=1\n")
    env = {"PATH": stand_in(tmp_path / "bin", "ssh", SSH), "RES_OPTIONS": "timeout:1 attempts:1"}
    words = ["--platform", "cpu", "--hostfile", "hosts"]
    all_of_them = start(*words, worker, "show", env=env)
    others = start(*words, "--min_nodes", 2, worker, "show", env=env)
    assert "no answer in 20 s" in " ".join(all_of_them.ended(2).errors.split())
    assert all_of_them.output == ""
    assert "going on without silent" in others.ended().errors
    assert others.output.count('"WORLD_SIZE": "2"') == 2
    for job in (all_of_them, others):
        job.gone(2)
        assert "Traceback" not in job.errors
        assert "Exception ignored" not in job.errors


TRAIN = """
import os
import jzero, numpy as np
from helpers.regression import CONFIG, Regression

engine, *_ = jzero.initialize(model=Regression(), config=CONFIG)
for i in range(10_000):
    loss = float(engine.train_batch({"x": np.ones((8, 3), "float32"), "y": np.ones(8, "float32")}))
    if i == 5 and os.environ["RANK"] == "1":
        exec(os.environ.get("DO", ""))
    if i == 3:
        print("ready", flush=True)
"""


@pytest.mark.slow
def test_a_rank_that_hangs(start):
    # The timeout includes compiling the first step, which is slow on a busy machine.
    job = start(*CPU, 2, "--hang_timeout", 25, "worker.py", program=TRAIN, env=QUICK).until(("ready", 2))
    job.kill(job.rank(1), signal.SIGSTOP)
    job.ended(124, 90).gone(5)
    for words in ("no step has finished for 25 s", "look at rank 1 first", "(stopped)"):
        assert words in job.errors
    assert "[0]   File" in job.errors  # rank 0's stack


@pytest.mark.slow
@pytest.mark.parametrize(("what", "code"), [("raise ValueError", 1), ("exit(3)", 3)])
def test_a_rank_that_leaves_among_collectives(start, what, code):
    """The others wait for it in a collective, and JAX's exit would wait for the others."""
    job = start(*CPU, 2, "worker.py", program=TRAIN, env=QUICK | {"DO": what}).until(("ready", 2))
    job.ended(code, 15).gone(1)


def test_output_that_nobody_reads(start, worker):
    job = start(*CPU, 2, worker, "much", prefix=["sh", "-c", '"$@" | head -1; echo ended', "sh"]).ended()
    assert job.output.endswith("ended\n")
    assert "nobody reads the output any more" in job.errors
    job.gone(10)


@pytest.mark.slow
def test_a_reader_that_pauses(start, worker):
    """A reader that pauses for longer than COMMAND_SILENCE does not end the job."""
    pause = 'mkfifo pipe; "$@" > pipe & exec 3< pipe; sleep 12; touch read; cat <&3'
    job = start(*CPU, 2, worker, "much", prefix=["sh", "-c", pause, "sh"]).ended()
    assert job.output.count("x" * 100) == 2 * 3000, job.errors


def fail():
    raise UnicodeError("label empty")


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
    assert "jzero: the command itself failed: UnicodeError: label empty (test_run.py, line " in said
    assert "Traceback" not in said


@pytest.mark.parametrize("fault", ["interrupt = fails", pytest.param("tick = sleeps", marks=pytest.mark.slow)])
def test_a_launcher_that_is_stuck_ends_after_sigterm(start, worker, tmp_path, fault):
    """Its handler fails, or it never comes to it; the grace and 8 s later it is gone."""
    (tmp_path / "faulty.py").write_text(MAIN.format(fault=fault))
    job = start(*CPU, 2, "--grace", 1, worker, main=["faulty.py"])
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


SRUN = (  # the variables that it sets for its processes
    "SLURM_PROCID={r} SLURM_LOCALID={r} SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE='2' "
    "SLURM_STEP_NODELIST=localhost SLURM_JOB_ID=7{port}"
)
STAND_INS = {
    "openssl": 'echo "$@" | sha256sum | cut -c1-64',
    "scontrol": 'echo "scontrol $@"',
    # They show their own options, and run the command after them.
    "srun": 'echo "srun $@"\nuntil [ "$1" = python -o "$1" = apptainer ]; do shift; done\n{starts}',
    "apptainer": 'echo "apptainer $@"\nuntil [ "$1" = train.sif ]; do shift; done\nshift\nexec "$@"',
}


@pytest.mark.parametrize("container", ["", "Pyxis", "Apptainer"])
def test_the_script_for_slurm(tmp_path, container):
    """Its processes find each other; a job that has saved is queued again, in a container too."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    script = re.search(r'^```bash title="train.sbatch"\n(.*?)^```', page, re.M | re.S)[1]
    if container:
        script = re.sub(rf"^# (.* # {container})$", r"\1", script, flags=re.M)
    (tmp_path / "train.sbatch").write_text(script)
    meets = "import jax, jzero\njzero.init_distributed()\nassert jax.process_count() == 2\n"
    (tmp_path / "train.py").write_text(
        f"import os, sys\n{meets if not container else ''}"
        "line = f\"{len(os.environ['JZERO_SECRET'])} {os.environ['JZERO_RESUME']}\\n\"\n"
        "os.write(1, line.encode())  # at once, so that the lines of two processes stay whole\n"
        # As jzero after a save: JAX aborts a process whose process 0 ends first.
        f"{'jax.distributed.shutdown()' if not container else ''}\nsys.exit(75)\n"
    )
    shim = SRUN.format(r="{r}", port=os.getpid() % 1000 + 8000)
    starts = "\n".join([f'{shim.format(r=r)} "$@" &\nlast=$!' for r in (0, 1)] + ["wait $last"])
    for name, lines in STAND_INS.items():
        path = stand_in(tmp_path / "bin", name, lines.replace("{starts}", starts) + "\n")
    env = {
        "PATH": path.replace(":", f":{Path(sys.executable).parent}:", 1), "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu", "SLURM_JOB_ID": "12", "HOME": os.environ.get("HOME", "/"),
    }  # fmt: skip
    done = subprocess.run(
        ["bash", "train.sbatch"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=PATIENCE, check=False
    )
    assert done.returncode == 75, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines.count("64 auto") == 2, done.stdout + done.stderr
    assert "scontrol requeue 12" in lines  # the first process may end after the last one
    command = {
        "": "python -u train.py",
        "Pyxis": "--container-image=registry.example.com#train:1 "
        f"--container-mounts={tmp_path}:{tmp_path} --container-workdir={tmp_path} python -u train.py",
        "Apptainer": f"apptainer exec --nv --bind {tmp_path} --pwd {tmp_path} train.sif python -u train.py",
    }[container]
    assert lines[0] == f"srun --kill-on-bad-exit=1 --label {command}"
