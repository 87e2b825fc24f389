"""The command line of the launcher."""

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
    """`jzero [options] script [options of the script]`: what stands before the script is the launcher's."""
    p = _Parser(
        prog="jzero",
        description="Start a script once per GPU, on one host or many, and stop all of it when one process dies.",
        epilog="Also: `jzero report`: versions, devices and what is wrong, here or on all hosts of a hostfile; "
        "`jzero export DIR OUT`: a checkpoint's weights as safetensors.",
        allow_abbrev=False,
    )
    which = p.add_argument_group("hosts and devices")
    which.add_argument("-H", "--hostfile", metavar="FILE", help="lines `host slots=N` (default: /job/hostfile, if any)")
    which.add_argument("-i", "--include", default="", metavar="HOST[:ID,ID][@...]", help="only these")
    which.add_argument("-e", "--exclude", default="", metavar="HOST[:ID,ID][@...]", help="all but these")
    which.add_argument("--num_nodes", type=int, default=-1, metavar="N", help="the first N hosts")
    which.add_argument(
        "--num_gpus", "--num_accelerators", type=int, default=-1, metavar="N", help="devices 0 to N-1 of every host"
    )
    which.add_argument("--one_process_per_node", action="store_true", help="one process per host, with all its devices")
    which.add_argument("--platform", choices=["gpu", "cpu"], default="gpu", help="cpu: N processes without GPUs")

    how = p.add_argument_group("how they find each other")
    how.add_argument("--master_addr", default="", metavar="HOST", help="where the coordinator listens (default: found)")
    how.add_argument(
        "--master_port", type=int, metavar="PORT", help="its port (default: a free one; 29500 with --no_ssh)"
    )
    how.add_argument("--launcher", choices=LAUNCHERS, default="ssh", help="what starts processes on other hosts")
    how.add_argument(
        "--launcher_args", default="", metavar="ARGS", help="for ssh, srun, mpirun, JobSet, as in --launcher_args='-A'"
    )
    how.add_argument("--ssh_port", type=int, metavar="PORT")
    how.add_argument("--force_multi", action="store_true", help="ssh for one host too, this one included")
    how.add_argument("--no_ssh", action="store_true", help="start this host's part only; call it once on every host")
    how.add_argument("--node_rank", type=int, default=-1, metavar="R", help="with --no_ssh: this host's number, from 0")

    what = p.add_argument_group("what is started")
    what.add_argument("--module", action="store_true", help="the script is a module, as in `python -m`")
    what.add_argument("--no_python", action="store_true", help="the script is a program, not Python")
    what.add_argument("--no_local_rank", action="store_true", help="do not pass --local_rank=K to the script")
    what.add_argument("--export", action="append", default=[], metavar="NAME[=VALUE]", help="a variable for all")
    what.add_argument("--venv_script", metavar="FILE", help="sourced on every host first")

    while_ = p.add_argument_group("while it runs")
    while_.add_argument("--max_restarts", type=int, default=0, metavar="N", help="start again after a failure")
    while_.add_argument(
        "--min_nodes", type=int, default=-1, metavar="N",
        help="start, also after a failure, without hosts that do not answer or do not fit, if N are left "
        "(default: all are needed)",
    )  # fmt: skip
    while_.add_argument(
        "--resume",
        action="store_true",
        help="initialize goes on from the newest checkpoint in the config's checkpoint.dir",
    )
    while_.add_argument(
        "--hang_timeout", type=float, default=1800, metavar="SECONDS",
        help="end the job, with all stacks, when no step has finished for so long; 0: never (default: 1800)",
    )  # fmt: skip
    while_.add_argument(
        "--grace", type=float, default=30, metavar="SECONDS",
        help="for scripts to end after Ctrl-C, or to save and end after SIGTERM",
    )  # fmt: skip
    while_.add_argument("--enable_each_rank_log", metavar="DIR", help="also write each rank's output to a file there")
    while_.add_argument("--save_pid", action="store_true", help="write this command's pid to /tmp/PID.jzero")
    while_.add_argument("--dry_run", action="store_true", help="start nothing; print what would be, as JSON")

    p.add_argument("script", help="the script, module or program")
    p.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="its own options")
    return p


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; warns of launcher options that stand after the script, where they are the script's."""
    p = parser()
    options = p.parse_args(argv)
    known = {name for name in option_names(p) if name.startswith("--")} - {"--help"}
    for word in options.script_args:
        if word.partition("=")[0] in known:
            print(
                f"jzero: {word} after {options.script} goes to the script; if it is meant for jzero, write it before "
                f"{options.script}",
                file=sys.stderr,
            )
    return options
