"""Jobs over ssh on two hosts on one machine: network namespaces with their own addresses, names, processes and sshd."""

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from helpers.sampling import some
from jobs import CPU, MEET, QUICK, ROOT, Command, heard_at, wait_for

PROGRAMS = ("ip", "unshare", "ssh", "ssh-keygen", "/usr/sbin/sshd")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(os.geteuid() > 0 or not all(map(shutil.which, PROGRAMS)), reason=f"needs root and {PROGRAMS}"),
]


def sh(*words):
    subprocess.run([str(word) for word in words], check=True, capture_output=True, stdin=subprocess.DEVNULL)


class Hosts:
    """Hosts a and b; commands run on a. `options` are for ssh."""

    def __init__(self, folder: Path, number: int):
        self.folder, self.servers = folder, []
        self.names = {h: f"jz{number}{h}" for h in "ab"}  # of both the namespaces and the hosts
        self.addresses = {"a": f"10.{100 + number}.0.1", "b": f"10.{100 + number}.0.2"}
        self.options = f"-F {folder}/config"
        folder.chmod(0o700)
        Path("/run/sshd").mkdir(exist_ok=True)
        for key in ("host", "user"):
            sh("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key)
        options = (f"IdentityFile {folder}/user", "StrictHostKeyChecking no", "UserKnownHostsFile /dev/null")
        (folder / "config").write_text("\n ".join(["Host *", *options, "LogLevel ERROR\n"]))
        self.remove()
        for name in self.names.values():
            sh("ip", "netns", "add", name)
            sh("ip", "netns", "exec", name, "ip", "link", "set", "lo", "up")
            etc = Path("/etc/netns", name)
            etc.mkdir(parents=True, exist_ok=True)
            lines = [f"{self.addresses[h]} {self.names[h]}\n" for h in "ab"]
            (etc / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        a, b = self.names.values()
        sh("ip", "link", "add", "net", "netns", a, "type", "veth", "peer", "name", "net", "netns", b)
        for host, name in self.names.items():
            sh("ip", "netns", "exec", name, "ip", "addr", "add", f"{self.addresses[host]}/24", "dev", "net")
            sh("ip", "netns", "exec", name, "ip", "link", "set", "net", "up")
            self.serve(host)

    def serve(self, host):
        """Start the host's sshd, whose shells have an empty home.

        Root's own .bashrc may do anything: pyenv's writes a lock, which a shell that is killed leaves to all others.
        """
        config = self.folder / f"sshd_{host}"
        (self.folder / "home").mkdir(exist_ok=True)
        config.write_text(
            f"HostKey {self.folder}/host\nAuthorizedKeysFile {self.folder}/user.pub\nStrictModes no\n"
            f"PermitRootLogin yes\nUsePAM no\nPasswordAuthentication no\nSetEnv HOME={self.folder}/home\n"
        )
        inner = f"hostname {self.names[host]}; exec /usr/sbin/sshd -D -f {config}"
        isolated = ["unshare", "--uts", "--pid", "--fork", "--mount", "--mount-proc", "sh", "-c", inner]
        nowhere = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        command = ["ip", "netns", "exec", self.names[host], *isolated]
        self.servers.append(subprocess.Popen(command, start_new_session=True, **nowhere))
        self.wait_for(host)

    def wait_for(self, host):
        end = time.monotonic() + 30
        ssh = ["ssh", *self.options.split(), self.names[host], "true"]
        while subprocess.run([*self.on("a"), *ssh], capture_output=True).returncode:
            assert time.monotonic() < end, f"sshd on {host} does not answer"
            time.sleep(0.1)

    def on(self, host):
        """A command prefix that runs a command in this host's network and under its name."""
        name = self.names[host]
        return ["ip", "netns", "exec", name, "unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh"]

    def link(self, state):
        """Set b's network "up" or "down".

        Up: wait until a finds b again. While b was gone, connections that retry may have left a search for its address
        that is about to fail, and a new connection would fail with it ("No route to host").
        """
        sh("ip", "netns", "exec", self.names["b"], "ip", "link", "set", "net", state)
        if state == "up":
            self.wait_for("b")

    def remove(self):
        for server in self.servers:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()
        for name in self.names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
            shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    made = Hosts(tmp_path_factory.mktemp("hosts"), int(os.environ.get("PYTEST_XDIST_WORKER", "gw99")[2:]))
    yield made
    made.remove()


@pytest.fixture
def launch(start, hosts, worker, tmp_path):
    """Start a job on both hosts, two processes each."""

    def launch(*arguments, on="a", slots=2, **keywords):
        (tmp_path / "hostfile").write_text("".join(f"{name} slots={slots}\n" for name in hosts.names.values()))
        common = ("--hostfile", "hostfile", "--platform", "cpu", "--launcher_args", hosts.options)
        return start(*common, *arguments, prefix=hosts.on(on), **keywords)

    return launch


def test_kill_the_command(launch):
    job = launch("worker.py", "children").until(("ready", 4))
    (command,) = [pid for pid, words in job.processes("-m jzero").items() if words.split()[0].endswith("python")]
    job.kill(command)  # without the prefix that runs it on a host
    job.gone(10)


@pytest.mark.slow
def test_two_hosts(launch, hosts, tmp_path):
    """They listen at the address of the first one alone."""
    job = launch("worker.py", slots=1, program=MEET)
    assert heard_at(job, tmp_path) == ({hosts.addresses["a"]}, {hosts.addresses["a"]})
    assert job.output.count("joined None") == 2


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
    one = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4", "PACE": "0"}
    done = Command(cwd=path, env=QUICK | one, main=["worker.py"]).ended()
    return dict(re.findall(r"^step (\d+) (\S+),", done.output, re.M))


@pytest.mark.parametrize("on", some(["a", "b"], ["a"]))
def test_a_job_goes_on_without_a_lost_host(launch, hosts, straight, on):
    """Both sides notice that the network has ended; the job resumes with its batch, even without the first host."""
    exported = ["--export", f"PYTHONPATH={ROOT}:{ROOT}/tests", "--export", "PACE=0.5"]
    words = ["--max_restarts", 1, "--min_nodes", 1, "--resume", *exported, "worker.py"]
    job = launch(*words, on=on, env=QUICK, program=GOES_ON)
    job.until("step 4")
    lost = hosts.names["b" if on == "a" else "a"]
    ranks = job.processes("--local_rank=").keys()
    assert ranks
    hosts.link("down")
    try:
        # COMMAND_SILENCE, and what a busy machine takes.
        wait_for(lambda: f"lost {lost}" in job.errors and not ranks & job.processes().keys(), 35, lambda: job.errors)
        job.ended(seconds=150).gone(15)
    finally:
        hosts.link("up")
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
def test_without_ssh(start, hosts):
    """One command per host; when a rank dies, its own command and the other one end."""
    program = "import time, jzero\njzero.init_distributed()\nprint('ready', flush=True)\ntime.sleep(1000)\n"
    words = ["--no_ssh", "--num_nodes", 2, *CPU, 1, "--master_addr", hosts.names["a"], "--node_rank"]
    jobs = [start(*words, rank, "worker.py", program=program, prefix=hosts.on("ab"[rank])) for rank in (0, 1)]
    for job in jobs:
        job.until("ready")
    jobs[1].kill(jobs[1].rank(0))
    jobs[1].ended(137, 10)
    assert jobs[0].wait(20) != 0
    for job in jobs:
        job.gone(2)
