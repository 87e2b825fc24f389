"""Jobs over ssh on two hosts, each with its own address, name, process table and sshd."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from helpers.sampling import some
from hosts import NEEDS, can_run
from jobs import CPU, QUICK, ROOT

pytestmark = [pytest.mark.processes, pytest.mark.skipif(not can_run(), reason=NEEDS)]


def test_kill_the_command(launch):
    job = launch("worker.py", "children").until(("ready", 4))
    job.kill(command_of(job))
    job.gone(10)


@pytest.mark.slow
def test_the_network_ends(launch, hosts):
    job = launch("worker.py", "children").until(("ready", 4))
    hosts.link("down")
    try:
        assert job.wait(30) != 0
        job.gone(5)
    finally:
        hosts.link("up")
    assert f"lost {hosts.names['b']}" in job.errors


GOES_ON = """
import os, time
import jax, jzero, layouts
from jzero.distributed import joining
mesh = {"mesh": {}, "train_batch_size": None, "gradient_accumulation_steps": 2, "checkpoint": {"dir": "runs"}}
engine = jzero.initialize(model=layouts.Net(), config=layouts.settings(layouts.SHARED["stage3 x 2"], **mesh))[0]
if jax.process_count() == 4:
    for mesh in (engine.mesh, jzero.make_mesh(pipe=2, data=2, zero=1)):
        jzero.log_dist(f"hosts {[joining.hosts()[d.process_index] for d in mesh.devices.flat]}")
while engine.global_steps < 10:
    loss = float(engine.train_batch(layouts.batch(engine.global_steps)))
    jzero.log_dist(f"step {engine.global_steps} {loss:.9g}, {engine.get_batch_info()}")
    engine.save_checkpoint().wait()
    time.sleep(float(os.environ["PACE"]))
"""


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """step -> loss of GOES_ON in one process with four devices."""
    path = tmp_path_factory.mktemp("alone")
    (path / "worker.py").write_text(GOES_ON)
    one = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "PYTHONPATH": f"{ROOT}:{ROOT}/tests", "PACE": "0"}
    command, env = [sys.executable, "worker.py"], os.environ | QUICK | one
    done = subprocess.run(command, cwd=path, env=env, capture_output=True, text=True, check=True)
    return dict(re.findall(r"^step (\d+) (\S+),", done.stdout, re.M))


@pytest.mark.parametrize("on", some(["a", "b"], ["a"]))
def test_a_job_goes_on_without_a_lost_host(launch, hosts, tmp_path, straight, on):
    """It resumes from its checkpoint with the same global batch, even if the first host is lost."""
    exported = ["--export", f"PYTHONPATH={ROOT}:{ROOT}/tests", "--export", "PACE=0.5"]
    words = ["--max_restarts", 1, "--min_nodes", 1, "--resume", *exported, "worker.py"]
    job = launch(*words, on=on, env=QUICK, program=GOES_ON)
    job.until("step 4")
    lost = hosts.names["b" if on == "a" else "a"]
    hosts.link("down")
    try:
        job.ended(seconds=150).gone(15)
    finally:
        hosts.link("up")
    assert f"lost {lost}" in job.errors
    assert f"going on without {lost}" in job.errors
    assert job.errors.count("restart 1 of 1") == 1
    # `zero` stays within a host; `pipe` spans hosts
    assert re.findall(r"^\[0\] hosts (.*)$", job.output, re.M) == ["[0, 0, 1, 1]"] * 2
    said = re.findall(r"^\[\d\] step (\d+) (\S+), (.*)$", job.output, re.M)
    assert {sizes for _, _, sizes in said} == {"(32, 4, 2)", "(32, 4, 4)"}
    again = job.output.partition("resumed from")[2]
    assert all(sizes == "(32, 4, 4)" for sizes in re.findall(r"step \d+ \S+, (.*)$", again, re.M))
    assert {int(n) for n, *_ in said} == set(range(1, 11))
    np.testing.assert_allclose([float(x) for _, x, _ in said], [float(straight[n]) for n, *_ in said], rtol=1e-6)


@pytest.mark.slow
def test_a_host_that_is_not_there(launch, hosts, tmp_path):
    (tmp_path / "three").write_text(f"{hosts.names['a']} slots=1\n{hosts.names['b']} slots=1\nnowhere slots=1\n")
    job = launch("--hostfile", "three", "worker.py", "show").ended(2)
    assert "nowhere" in job.errors
    assert "resolve" in job.errors
    job.gone(1)


@pytest.mark.slow
def test_without_ssh(launch, start, hosts, tmp_path):
    """One command per host; when a rank dies, its own command and the other one end."""
    waits = "import time\nprint('ready', flush=True)\ntime.sleep(1000)\n"
    (tmp_path / "worker.py").write_text(f"import jzero\njzero.init_distributed()\n{waits}")
    words = ["--no_ssh", "--num_nodes", 2, *CPU, 1, "--master_addr", hosts.names["a"], "--node_rank"]
    jobs = [start(*words, rank, "worker.py", prefix=hosts.on("ab"[rank])) for rank in (0, 1)]
    for job in jobs:
        job.until("ready")
    jobs[1].kill(jobs[1].rank(0))
    jobs[1].ended(137, 10)
    assert jobs[0].wait(20) != 0
    for job in jobs:
        job.gone(2)


def command_of(job):
    """The pid of the command itself, without the prefix that runs it on a host."""
    (pid,) = [pid for pid, words in job.processes("-m jzero").items() if words.split()[0].endswith("python")]
    return pid
