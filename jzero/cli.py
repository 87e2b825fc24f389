"""The command `jzero`: `jzero [run] [options] script ...`, `jzero report`, `jzero export DIR OUT`."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from jzero.errors import ConfigError
from jzero.launcher import options, runner, transports
from jzero.launcher.job import Job, make_job


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code; 2 where nothing was started because something does not fit."""
    argv = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    name, *rest = argv
    try:
        if name == "report":
            from jzero.launcher import report

            return report.main(rest)
        if name == "export":
            from jzero.weights.export import main as export

            return export(rest)
        return launch(rest if name == "run" else argv)
    except ConfigError as error:
        several = "several things do not fit:\n" if error.problems[1:] else ""
        print(f"jzero: {several}{error}", file=sys.stderr)
        return 2


def launch(argv: Sequence[str]) -> int:
    """Start a job and wait for its end."""
    job = make_job(options.parse(argv), os.environ, os.getcwd())
    if job.options.dry_run:
        print(transports.dry_run(job))
        return 0
    with runner.pid_file(job.options.save_pid):
        return hand_over(job) if job.options.launcher in transports.HANDOVERS else asyncio.run(runner.run(job))


def hand_over(job: Job) -> int:
    """Let another system run the job: srun and mpirun in this process's place, so that signals go to them."""
    (command,) = transports.commands(job)
    try:
        if job.options.launcher == "k8s":
            manifest = json.dumps(transports.jobset(job)).encode()
            return subprocess.run(command, input=manifest, check=False).returncode
        os.execvpe(command[0], command, os.environ | transports.handover_env(job))
    except FileNotFoundError:
        raise ConfigError(f"--launcher {job.options.launcher}: there is no {command[0]} on this machine") from None


if __name__ == "__main__":
    sys.exit(main())
