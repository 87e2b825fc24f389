"""The launcher's command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from jzero._compat import option_names
from jzero.values.kinds import closest

LAUNCHERS = ("ssh", "slurm", "openmpi", "k8s")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        known = option_names(self)
        for word in message.split() if "unrecognized" in message else ():
            if word.startswith("--") and (close := closest(word, known)):
                message += f"; did you mean {close}?"
        super().error(message)


def parser() -> argparse.ArgumentParser:
    """Make the parser of `jzero [options] script [the script's options]`, which reads the options before the script."""
    p = _Parser(
        prog="jzero",
        description="Start a script once per GPU, on one host or many, and stop all processes when one dies.",
        epilog="Other commands: `jzero report` lists versions, devices and faults of this machine or of all hosts of a "
        "hostfile; `jzero export DIR OUT` writes a checkpoint's weights as safetensors; `jzero plot RUN ...` draws the "
        "curves and the goodput of runs; `jzero plan CONFIG` compiles a step for GPUs that need not be there; "
        "`jzero calibrate` measures the rates of this machine's GPUs for plans.",
        allow_abbrev=False,
    )
    hosts = p.add_argument_group("hosts and devices")
    hosts.add_argument(
        "-H", "--hostfile", metavar="FILE", help="lines `host slots=N` (default: /job/hostfile, if it exists)"
    )
    hosts.add_argument("-i", "--include", default="", metavar="HOST[:ID,ID][@...]", help="use only these")
    hosts.add_argument("-e", "--exclude", default="", metavar="HOST[:ID,ID][@...]", help="use all but these")
    hosts.add_argument("--num_nodes", type=int, default=-1, metavar="N", help="use the first N hosts")
    hosts.add_argument(
        "--num_gpus", "--num_accelerators", type=int, default=-1, metavar="N", help="use devices 0 to N-1 of every host"
    )
    hosts.add_argument("--one_process_per_node", action="store_true", help="one process per host, with all its devices")
    hosts.add_argument("--platform", choices=["gpu", "cpu"], default="gpu", help="cpu: N processes without GPUs")

    network = p.add_argument_group("how processes find each other")
    network.add_argument(
        "--master_addr", default="", metavar="HOST", help="the coordinator's host (default: found by asking the hosts)"
    )
    network.add_argument(
        "--master_port",
        type=int,
        metavar="PORT",
        help="the coordinator's port (default: a free one; 29500 with --no_ssh)",
    )
    network.add_argument(
        "--launcher", choices=LAUNCHERS, default="ssh", help="the system that starts processes on other hosts"
    )
    network.add_argument(
        "--launcher_args",
        default="",
        metavar="ARGS",
        help="options for ssh, srun, mpirun or the JobSet, as in --launcher_args='-A'",
    )
    network.add_argument("--ssh_port", type=int, metavar="PORT")
    network.add_argument(
        "--force_multi", action="store_true", help="use ssh for a single host too, and for this machine"
    )
    network.add_argument(
        "--no_ssh", action="store_true", help="start only this host's processes; run the command on every host"
    )
    network.add_argument(
        "--node_rank", type=int, default=-1, metavar="R", help="with --no_ssh: this host's number, from 0"
    )

    script = p.add_argument_group("the script")
    script.add_argument("--module", action="store_true", help="the script is a module, as in `python -m`")
    script.add_argument("--no_python", action="store_true", help="the script is a program, not a Python file")
    script.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank=K to the script")
    script.add_argument(
        "--export", action="append", default=[], metavar="NAME[=VALUE]", help="pass a variable to all processes"
    )
    script.add_argument("--venv_script", metavar="FILE", help="source this file on every host first")

    failures = p.add_argument_group("failures and output")
    failures.add_argument(
        "--max_restarts", type=int, default=0, metavar="N", help="restart up to N times after a failure"
    )
    failures.add_argument(
        "--min_nodes", type=int, default=-1, metavar="N",
        help="start and restart without hosts that do not answer or have a fault, if N are left "
        "(default: all hosts are needed)",
    )  # fmt: skip
    failures.add_argument(
        "--resume",
        action="store_true",
        help="initialize resumes from the newest checkpoint in the config's checkpoint.dir",
    )
    failures.add_argument(
        "--hang_timeout", type=float, default=1800, metavar="SECONDS",
        help="print all stacks and end the job when no step finishes for SECONDS; 0: never (default: 1800)",
    )  # fmt: skip
    failures.add_argument(
        "--grace", type=float, default=30, metavar="SECONDS",
        help="time for scripts to end after Ctrl-C, or to save and end after SIGTERM (default: 30)",
    )  # fmt: skip
    failures.add_argument(
        "--enable_each_rank_log", metavar="DIR", help="also write the output of each rank to a file in DIR"
    )
    failures.add_argument("--save_pid", action="store_true", help="write this command's pid to /tmp/PID.jzero")
    failures.add_argument("--dry_run", action="store_true", help="start nothing; print the plan as JSON")

    p.add_argument("script", help="the script, module or program")
    p.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="its own options")
    return p


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; warn about launcher options after the script, which go to the script."""
    p = parser()
    options = p.parse_args(argv)
    known = {name for name in option_names(p) if name.startswith("--")} - {"--help"}
    for word in options.script_args:
        if word.partition("=")[0] in known:
            print(
                f"jzero: {word} after {options.script} goes to the script; to pass it to jzero, write it before "
                f"{options.script}",
                file=sys.stderr,
            )
    return options
