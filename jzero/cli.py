"""The command `jzero`: `jzero [run] [options] script ...`, and the other commands of `options.COMMANDS`.

Help and `--dry_run` work without JAX, NumPy or any other third-party module but PyYAML, for Kubernetes: each command
imports its modules after it has parsed its options.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jzero.errors import ConfigError, escaped, numbered, one_line, printable
from jzero.files import create
from jzero.launcher import options, transports
from jzero.launcher.job import Job, make_job
from jzero.values.kinds import closest


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code; 2 after a ConfigError, or a path that cannot be used."""
    argv = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    name, *rest = argv
    try:
        if name == "--version" or argv[:2] == ["run", "--version"]:
            print(f"jzero {sys.modules['jzero'].__version__}")  # imports point the other way
            return 0
        if name in OTHERS:
            return OTHERS[name](options.parse_other(name, rest))
        check_name(name)
        return launch(rest if name == "run" else argv)
    except ConfigError as error:
        print(f"jzero: {numbered(error)}", file=sys.stderr)
        return 2
    except OSError as error:
        if error.filename is None:
            raise
        print(f"jzero: {printable(str(error.filename))}: {error.strerror}", file=sys.stderr)
        return 2


def check_name(name: str) -> None:
    """Raise a ConfigError for a first word that is no script here and resembles a command."""
    if name in options.COMMANDS or name.startswith("-") or "." in name or Path(name).exists():
        return
    if close := closest(name, options.COMMANDS):
        raise ConfigError(f"{name}: no such script; did you mean `jzero {close}`?")


def launch(argv: Sequence[str]) -> int:
    """Start a job and wait for its end; with --dry_run, print it."""
    job = make_job(options.parse(argv), os.environ, os.getcwd())
    if job.options.dry_run:
        print(transports.dry_run(job))
        return 0
    from jzero.launcher import restarts

    with pid_file() if job.options.save_pid else contextlib.nullcontext():
        if job.options.launcher in transports.HANDOVERS:
            return hand_over(job)
        return restarts.run(job)


@contextlib.contextmanager
def pid_file() -> Iterator[None]:
    """Keep this command's pid in `/tmp/PID.jzero` while it runs.

    Raises:
      ConfigError: the file cannot be written.
    """
    # A name that others can guess, so that a script finds it; `create` follows no link that waits there.
    path = Path(os.environ.get("TMPDIR", "/tmp"), f"{os.getpid()}.jzero")  # noqa: S108
    try:
        with create(path) as file:
            file.write(f"{os.getpid()}\n")
    except OSError as error:
        raise ConfigError(f"--save_pid: {path}: {error.strerror}: remove it, or set TMPDIR") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def hand_over(job: Job) -> int:
    """Let another system run the job. srun and mpirun replace this process, so that they receive its signals."""
    (command,) = transports.commands(job)
    try:
        if job.options.launcher == "k8s":
            from jzero.launcher import kubernetes

            manifest = kubernetes.to_yaml(kubernetes.jobset(job, job.processes[0].env))
            return subprocess.run(command, input=manifest.encode(), check=False).returncode
        os.execvpe(command[0], command, os.environ | transports.handover_env(job))
    except FileNotFoundError:
        raise ConfigError(f"--launcher {job.options.launcher}: there is no {command[0]} on this machine") from None


def report(args: Namespace) -> int:
    """Print the table of hosts; return 1 if something is wrong."""
    from jzero.launcher import machine_check

    return machine_check.main(args)


def plan(args: Namespace) -> int:
    """Plan a config for GPUs that need not be there, and print memory, collectives and time."""
    # JAX's CUDA plugin logs about the missing driver, and no log level reaches these lines.
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        if args.config is None:
            from jzero.recipes.recipe_table import first_plan

            commands = first_plan(args.model, args.gpu, args.adapters)
            raise ConfigError(f"CONFIG is missing; these commands plan one: {commands}")
        from jzero.planner import plan_command

        plan_command.start_jax(args)
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
    return plan_command.main(args)


def export(args: Namespace) -> int:
    """Write a checkpoint's parameters as safetensors, and print the files."""
    from jzero import weights

    given = vars(args)
    checkpoint, out = given.pop("checkpoint"), given.pop("out")
    files = weights.export(checkpoint, out, **given)
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    print(f"{out}: {sum(map(len, files.values()))} tensors, {total / 1e9:.3g} GB, in {', '.join(files)}")
    if not args.adapters and not (Path(out) / "config.json").exists():
        print("tensors have the names of the leaves: the checkpoint contains no weights_layout")
    return 0


def calibrate(args: Namespace) -> int:
    """Measure the rates of the GPUs at hand, and write them for `jzero.planner.Rates.load`."""
    from jzero.planner import calibrate

    rates = calibrate.calibrate()
    rates.save(args.out)
    print(f"{args.out}: {rates.source}")
    return 0


def plot(args: Namespace) -> int:
    """Write the plots of runs, and print the files and each run's goodput."""
    from jzero.plots.run_plots import read

    plots = read(*args.runs, metrics=args.metric, x=args.x, smooth=args.smooth)
    for file in plots.write(args.out):
        print(escaped(file))
    for history in plots.histories:
        if history.goodput:
            print(f"{one_line(history.name)}: {history.goodput}")
    return 0


def import_run(args: Namespace) -> int:
    """Convert a DeepSpeed checkpoint to jzero's format, or compare the names of tensors."""
    from jzero.run import import_deepspeed

    return import_deepspeed.main(args)


def replay(args: Namespace) -> int:
    """Repeat a saved step that was not finite on one device, and print what is found."""
    from jzero.run.diagnosis import replay

    return replay.main(args.directory, args.model)


def run_demo(args: Namespace) -> int:
    """Train a small model, and print what it learns."""
    from jzero.recipes import demo

    demo.train_demo(args.steps)
    return 0


def run_finetune(args: Namespace) -> int:
    """Tune a model on a file."""
    from jzero.recipes.finetune import finetune

    finetune(**vars(args))
    return 0


def list_recipes(args: Namespace) -> int:
    """Print the recipes, or the config of one."""
    from jzero.recipes.recipe_table import recipes_text

    print(recipes_text(args.name, args.price))
    return 0


OTHERS: dict[str, Callable[[Namespace], int]] = {
    "demo": run_demo, "finetune": run_finetune, "recipes": list_recipes, "report": report, "plan": plan,
    "calibrate": calibrate, "plot": plot, "export": export, "import": import_run, "replay": replay,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
