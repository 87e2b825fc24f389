"""The commands that start a job on other hosts: ssh with an agent, or Slurm, Open MPI or Kubernetes."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

from jzero.distributed import handshake
from jzero.errors import ConfigError
from jzero.launcher import environment
from jzero.launcher.job import Job
from jzero.values.masking import masked

# Reads the agent's source from standard input, up to a zero byte, without buffering what follows it. The script's
# command line comes after it.
BOOT = (
    "exec('import os; s = b\"\"\\nwhile s[-1:] != bytes(1):\\n d = os.read(0, 65536); s += d or exit(1)'); "
    "exec(compile(s[:-1], 'jzero agent', 'exec'))"
)


def agent_command(job: Job, host: str) -> list[str]:
    """Return the command that starts an agent on a host, by ssh unless it is this machine."""
    o = job.options
    agent = [sys.executable, "-uP", "-c", BOOT, *job.argv]  # -P: json.py beside the script must not shadow Python's
    source = f". {shlex.quote(os.path.join(job.cwd, o.venv_script))} && " if o.venv_script else ""
    line = f"cd {shlex.quote(job.cwd)} && {source}exec {shlex.join(agent)}"
    if o.no_ssh or job.is_here(host):
        return ["bash", "-c", line] if source else agent
    port = ["-p", str(o.ssh_port)] if o.ssh_port else []
    quiet = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=3"]
    return ["ssh", "-T", *quiet, *port, *shlex.split(o.launcher_args), "--", host, line]  # --: options end here


def srun_command(job: Job) -> list[str]:
    """Return the srun command. Slurm starts the processes, ends all when one fails, and sets place.py's variables."""
    per_host = _per_host(job)
    unnamed = list(job.hosts) == [f"node{n}" for n in range(len(job.hosts))]
    named = [] if unnamed and not job.options.hostfile else ["--nodelist", ",".join(job.hosts)]
    return [
        "srun", "--nodes", str(len(job.hosts)), "--ntasks", str(len(job.processes)),
        "--ntasks-per-node", str(per_host), *named, "--export=ALL", "--kill-on-bad-exit=1", "--label",
        *shlex.split(job.options.launcher_args), *job.argv,
    ]  # fmt: skip


def mpirun_command(job: Job) -> list[str]:
    """Return the mpirun command. Open MPI starts the processes and ends all when one fails."""
    hosts = ",".join(f"{host}:{len(job.of(host))}" for host in job.hosts)
    exported = [
        word for name in handover_env(job) for word in ("-x", name)
    ]  # names only: others can read a command line, and values may be secret
    command = ["mpirun", "-n", str(len(job.processes)), "--host", hosts, *exported]
    return [*command, *shlex.split(job.options.launcher_args), *job.argv]


def handover_env(job: Job) -> dict[str, str]:
    """Return the variables for srun or mpirun itself, without the ones it sets for each process."""
    env = {name: value for name, value in job.processes[0].env.items() if name not in environment.OWN}
    given = {"MASTER_ADDR": job.options.master_addr, "MASTER_PORT": str(job.options.master_port or "")}
    if job.options.launcher == "openmpi":  # under Slurm each process finds the first host itself
        given = {"MASTER_ADDR": job.address, "MASTER_PORT": str(job.port)}
    given |= {name: os.environ.get(name, "") for name in ("JZERO_GRACE", "JZERO_HANG_TIMEOUT")}
    given[handshake.VARIABLE] = os.environ.get(handshake.VARIABLE) or secrets.token_hex(32)
    return env | {name: value for name, value in given.items() if value}


def kubectl_command(job: Job) -> list[str]:
    return ["kubectl", "apply", "-f", "-"]


def jobset(job: Job, env: Mapping[str, str]) -> dict[str, Any]:
    """Make the JobSet (jobset.sigs.k8s.io) of a job: one pod per host, in which `jzero --no_ssh` starts the processes.

    `--launcher_args` has the form "image=IMAGE [name=NAME] [namespace=NAMESPACE]". The pods get the variables of `env`
    that `--export` names.
    """
    given = dict(word.partition("=")[::2] for word in shlex.split(job.options.launcher_args))
    if unknown := given.keys() - {"image", "name", "namespace"}:
        raise ConfigError(
            f"--launcher_args = {job.options.launcher_args!r}: {sorted(unknown)}: allowed are image, name, namespace"
        )
    if not given.get("image"):
        raise ConfigError(
            '--launcher k8s: needs an image that contains jzero and the script: --launcher_args "image=IMAGE"'
        )
    name, o, per_host = given.get("name", "jzero"), job.options, _per_host(job, devices=True)
    flags = [
        f"--{flag}"
        for flag in ("one_process_per_node", "module", "no_python", "no_local_rank", "resume")
        if getattr(o, flag)
    ]
    files = ("venv_script", "enable_each_rank_log")
    flags += [f"--{flag}={_literal(value)}" for flag in files if (value := getattr(o, flag))]
    args = [
        "-m", "jzero", "--no_ssh", "--node_rank", "$(JOB_COMPLETION_INDEX)", "--num_nodes", str(len(job.hosts)),
        "--num_gpus", str(per_host), "--platform", o.platform, "--master_addr", f"{name}-node-0-0.{name}",
        "--master_port", str(job.port), "--hang_timeout", f"{o.hang_timeout:g}", "--grace", f"{o.grace:g}", *flags,
        *map(_literal, (o.script, *o.script_args)),
    ]  # fmt: skip
    container: dict[str, Any] = {"name": "jzero", "image": given["image"], "command": ["python"], "args": args}
    container["workingDir"] = job.cwd
    exported = dict.fromkeys(item.partition("=")[0] for item in o.export)
    container["env"] = [{"name": name, "value": _literal(env[name])} for name in exported]
    if o.platform == "gpu":
        container["resources"] = {"limits": {"nvidia.com/gpu": per_host}}
    pods = {
        "parallelism": len(job.hosts), "completions": len(job.hosts), "completionMode": "Indexed", "backoffLimit": 0,
        "template": {"spec": {
            "restartPolicy": "Never", "terminationGracePeriodSeconds": int(o.grace) + 10, "containers": [container],
        }},
    }  # fmt: skip
    meta = {"name": name} | ({"namespace": given["namespace"]} if "namespace" in given else {})
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": meta,
        "spec": {
            "failurePolicy": {"maxRestarts": o.max_restarts},
            "network": {"enableDNSHostnames": True},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": pods}}],
        },
    }


def _literal(word: str) -> str:
    """Escape a word, because Kubernetes expands $(NAME), and $$ to $."""
    return word.replace("$", "$$")


def _per_host(job: Job, devices: bool = False) -> int:
    counts = {len(ids) if devices else len(job.of(host)) for host, ids in job.hosts.items()}
    if len(counts) > 1:
        each = ", ".join(f"{host} {len(ids)}" for host, ids in job.hosts.items())
        raise ConfigError(f"--launcher {job.options.launcher}: needs the same number of devices on every host: {each}")
    return counts.pop()


HANDOVERS: dict[str, Callable[[Job], list[str]]] = {
    "slurm": srun_command,
    "openmpi": mpirun_command,
    "k8s": kubectl_command,
}


def commands(job: Job) -> list[list[str]]:
    """Return the commands that this machine runs to start the job."""
    handover = HANDOVERS.get(job.options.launcher)
    if handover:
        return [handover(job)]
    here = [list(job.hosts)[job.options.node_rank]] if job.options.no_ssh else list(job.hosts)
    return [agent_command(job, host) for host in here]


def dry_run(job: Job) -> str:
    """Format the plan and its commands as JSON, with each list of scalars on one line."""
    plan = job.as_json(commands(job))
    if job.options.launcher == "k8s":
        plan["manifest"] = jobset(job, masked(job.processes[0].env))
    scalar = r'(?:"(?:[^"\\]|\\.)*"|-?\d+)'
    lists = re.compile(rf"\[\s+{scalar}(?:,\s+{scalar})*\s+\]")
    return lists.sub(lambda found: re.sub(r"\n\s*", " ", found[0]), json.dumps(plan, indent=2))
