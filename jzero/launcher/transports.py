"""The commands that start a job on other hosts: ssh with an agent, or Slurm, Open MPI or Kubernetes."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import sys
from collections.abc import Callable

from jzero.distributed import connections
from jzero.errors import masked
from jzero.launcher import environment
from jzero.launcher.job import Job, unnamed

# Reads the agent's source from standard input, up to a zero byte, without buffering what follows it. The script's
# command line comes after it.
BOOT = (
    "exec('import os; s = b\"\"\\nwhile s[-1:] != bytes(1):\\n d = os.read(0, 65536); s += d or exit(1)'); "
    "exec(compile(s[:-1], 'jzero agent', 'exec'))"
)


def agent_command(job: Job, host: str, id: str = "") -> list[str]:
    """Return the command that starts an agent on a host, by ssh unless it is this machine.

    It begins with the job's id, so that another agent finds it among all processes (descendants.py), and ends with the
    script's command line, so that a user does.
    """
    o, boot = job.options, f"'jzero agent {id}'; {BOOT}" if id else BOOT
    agent = [sys.executable, "-uP", "-c", boot, *job.argv]  # -P: json.py beside the script must not shadow Python's
    source = f". {shlex.quote(os.path.join(job.cwd, o.venv_script))} && " if o.venv_script else ""
    line = f"cd {shlex.quote(job.cwd)} && {source}exec {shlex.join(agent)}"
    if o.no_ssh or job.is_here(host):
        return ["bash", "-c", line] if source else agent
    port = ["-p", str(o.ssh_port)] if o.ssh_port else []
    quiet = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=3"]
    return ["ssh", "-T", *quiet, *port, *shlex.split(o.launcher_args), "--", host, line]  # --: options end here


def srun_command(job: Job) -> list[str]:
    """Return the srun command. Slurm starts the processes, ends all when one fails, and sets place.py's variables."""
    per_host = job.per_host()
    any_hosts = list(job.hosts) == unnamed(len(job.hosts))
    named = [] if any_hosts and not job.options.hostfile else ["--nodelist", ",".join(job.hosts)]
    return [
        "srun", "--nodes", str(len(job.hosts)), "--ntasks", str(len(job.processes)),
        "--ntasks-per-node", str(per_host), *named, "--export=ALL", "--kill-on-bad-exit=1", "--label",
        *shlex.split(job.options.launcher_args), *job.argv,
    ]  # fmt: skip


def mpirun_command(job: Job) -> list[str]:
    """Return the mpirun command. Open MPI starts the processes and ends all when one fails."""
    hosts = ",".join(f"{host}:{len(job.of(host))}" for host in job.hosts)
    # Names only: others can read a command line, and values may be secret.
    exported = [word for name in handover_env(job) for word in ("-x", name)]
    command = ["mpirun", "-n", str(len(job.processes)), "--host", hosts, *exported]
    return [*command, *shlex.split(job.options.launcher_args), *job.argv]


def handover_env(job: Job) -> dict[str, str]:
    """Return the variables for srun or mpirun itself, without the ones it sets for each process."""
    env = {name: value for name, value in job.processes[0].env.items() if name not in environment.OWN}
    given = {"MASTER_ADDR": job.options.master_addr, "MASTER_PORT": str(job.options.master_port or "")}
    if job.options.launcher == "openmpi":  # under Slurm each process finds the first host itself
        given = {"MASTER_ADDR": job.address, "MASTER_PORT": str(job.port)}
    given |= {name: os.environ.get(name, "") for name in ("JZERO_GRACE", "JZERO_HANG_TIMEOUT")}
    given[connections.SECRET] = os.environ.get(connections.SECRET) or secrets.token_hex(32)
    return env | {name: value for name, value in given.items() if value}


HANDOVERS: dict[str, Callable[[Job], list[str]]] = {
    "slurm": srun_command,
    "openmpi": mpirun_command,
    "k8s": lambda job: ["kubectl", "apply", "-f", "-"],
}


def commands(job: Job) -> list[list[str]]:
    """Return the commands that this machine runs to start the job."""
    if handover := HANDOVERS.get(job.options.launcher):
        return [handover(job)]
    return [agent_command(job, host) for host in job.hosts_here]


def dry_run(job: Job) -> str:
    """Format the plan and its commands as JSON, with each list of scalars on one line; for Kubernetes, its YAML."""
    if job.options.launcher == "k8s":
        from jzero.launcher import kubernetes

        return kubernetes.to_yaml(kubernetes.jobset(job, masked(job.processes[0].env)))
    plan = {
        "hosts": job.hosts,
        "coordinator": f"{job.address}:{job.port}",
        "processes": [vars(process) | {"env": masked(process.env)} for process in job.processes],
        "commands": commands(job),
    }
    scalar = r'(?:"(?:[^"\\]|\\.)*"|-?\d+)'
    lists = re.compile(rf"\[\s+{scalar}(?:,\s+{scalar})*\s+\]")
    return lists.sub(lambda found: re.sub(r"\n\s*", " ", found[0]), json.dumps(plan, indent=2))
