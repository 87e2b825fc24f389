"""The command `jzero`: `jzero [run] [options] script ...`, `jzero report`, `jzero export DIR OUT`, `jzero replay DIR`,
`jzero plot RUN ...`, `jzero plan CONFIG`, `jzero calibrate`.

Help and `--dry_run` work without JAX, NumPy or any other third-party module: each command imports its modules after it
has parsed its options.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from jzero.errors import ConfigError, numbered
from jzero.launcher import options, transports
from jzero.launcher.job import Job, make_job
from jzero.values.kinds import closest

COMMANDS = ("run", "report", "export", "replay", "plot", "plan", "calibrate")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; 2 after a ConfigError."""
    argv = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    name, *rest = argv
    try:
        if name == "report":
            from jzero.launcher import machine_check

            return machine_check.main(rest)
        if name == "export":
            return export(rest)
        if name == "replay":
            return replay(rest)
        if name == "plot":
            from jzero.plots import command

            return command.main(rest)
        if name == "plan":
            from jzero.launcher import plan

            return plan.main(rest)
        if name == "calibrate":
            return calibrate(rest)
        check_name(name)
        return launch(rest if name == "run" else argv)
    except ConfigError as error:
        print(f"jzero: {numbered(error)}", file=sys.stderr)
        return 2


def check_name(name: str) -> None:
    """Raise a ConfigError for a first word that is no script here and resembles a command."""
    if name in COMMANDS or name.startswith("-") or "." in name or Path(name).exists():
        return
    if close := closest(name, COMMANDS):
        raise ConfigError(f"{name}: no such script; did you mean `jzero {close}`?")


def launch(argv: Sequence[str]) -> int:
    """Start a job and wait for its end; with --dry_run, print it."""
    job = make_job(options.parse(argv), os.environ, os.getcwd())
    if job.options.dry_run:
        print(transports.dry_run(job))
        return 0
    from jzero.launcher import guard, restarts
    from jzero.launcher.pid_file import pid_file

    with pid_file(job.options.save_pid):
        if job.options.launcher in transports.HANDOVERS:
            return hand_over(job)
        return guard.run(lambda signals: restarts.run(job, signals), job.options.grace)


def hand_over(job: Job) -> int:
    """Let another system run the job. srun and mpirun replace this process, so that they receive its signals."""
    (command,) = transports.commands(job)
    try:
        if job.options.launcher == "k8s":
            manifest = json.dumps(transports.jobset(job, job.processes[0].env)).encode()
            return subprocess.run(command, input=manifest, check=False).returncode
        os.execvpe(command[0], command, os.environ | transports.handover_env(job))
    except FileNotFoundError:
        raise ConfigError(f"--launcher {job.options.launcher}: there is no {command[0]} on this machine") from None


def export(argv: Sequence[str]) -> int:
    """Write a checkpoint's parameters as safetensors, and print the files."""
    p = argparse.ArgumentParser(
        prog="jzero export",
        description="Write a checkpoint's parameters as safetensors, in the layout of `transformers` if the model "
        "defines one (weights_layout).",
    )
    p.add_argument("checkpoint", metavar="DIR", help="save_checkpoint's directory")
    p.add_argument("out", metavar="OUT", help="a new or empty directory")
    p.add_argument("--tag", help="the checkpoint in DIR (default: the latest)")
    p.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], help="default: as stored")
    p.add_argument(
        "--max_shard_size", default="5GB", metavar="SIZE", help="of one file, as 5GB or 500MB (default: 5GB)"
    )
    p.add_argument(
        "--adapters", action="store_true", help="the adapters alone, for `peft` (default: merged into the weights)"
    )
    a = p.parse_args(argv)
    from jzero import weights

    files = weights.export(
        a.checkpoint, a.out, tag=a.tag, dtype=a.dtype, max_shard_size=a.max_shard_size, adapters=a.adapters
    )
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    print(f"{a.out}: {sum(map(len, files.values()))} tensors, {total / 1e9:.3g} GB, in {', '.join(files)}")
    if not a.adapters and not (Path(a.out) / "config.json").exists():
        print("tensors have the names of the leaves: the checkpoint contains no weights_layout")
    return 0


def calibrate(argv: Sequence[str]) -> int:
    """Measure the rates of the GPUs at hand, and write them for `jzero.planner.Rates.load`."""
    p = argparse.ArgumentParser(
        prog="jzero calibrate",
        description="Measure the rates of this machine's GPUs and their links in about a minute: products, attention, "
        "memory, collectives and one real step. Plans take the file.",
    )
    p.add_argument("--out", default="rates.json", metavar="FILE", help="default: rates.json")
    a = p.parse_args(argv)
    from jzero.planner import calibrate

    rates = calibrate.calibrate()
    rates.save(a.out)
    print(f"{a.out}: {rates.source}")
    return 0


def replay(argv: Sequence[str]) -> int:
    """Repeat a saved step that was not finite on one device, and print what is found."""
    p = argparse.ArgumentParser(
        prog="jzero replay",
        description="Repeat a step that was not finite on one device, and find where it begins. The exit code is 1 if "
        "the step is finite here.",
    )
    p.add_argument("directory", metavar="DIR", help="non_finite.output_path/stepN of the run")
    p.add_argument("--model", required=True, metavar="MODULE:FUNCTION", help="the function returns the run's model")
    a = p.parse_args(argv)
    from jzero.diagnosis import replay

    return replay.main(a.directory, a.model)


if __name__ == "__main__":
    sys.exit(main())
