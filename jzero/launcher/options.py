"""The options of all commands, as tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

from jzero._compat import option_names
from jzero.values.kinds import closest

LAUNCHERS = ("ssh", "slurm", "openmpi", "k8s")
COMMANDS = {
    "demo": "train a small model in a minute, on text that every Python has",
    "run": "start a script once per GPU, on one host or many; the command if none is named",
    "finetune": "tune a model on a file: texts, completions, conversations or preferences",
    "recipes": "list configs of published models for H100s and H200s, with their plans",
    "report": "list versions, devices and faults of this machine, or of all hosts of a hostfile",
    "plan": "compile a step for GPUs that need not be there: its memory, collectives and time",
    "calibrate": "measure the rates of this machine's GPUs for plans",
    "plot": "draw the curves and the goodput of runs",
    "export": "write a checkpoint's weights as safetensors",
    "import": "write a DeepSpeed checkpoint as one of jzero's",
    "replay": "repeat a saved step that was not finite on one device, and find where it begins",
}

Option = tuple[tuple[str, ...], dict[str, Any]]


def option(usage: str, text: str | None = None, **settings: Any) -> Option:
    """Return the arguments of a call of `add_argument`; without a value and settings the option is a flag.

    >>> option("-H --hostfile FILE", "the hosts")
    (('-H', '--hostfile'), {'metavar': 'FILE', 'help': 'the hosts'})
    >>> option("--fit", "find the smallest cluster")
    (('--fit',), {'action': 'store_true', 'help': 'find the smallest cluster'})
    """
    first, *words = usage.split()
    names = (first, *(word for word in words if word.startswith("-")))
    value = [word for word in words if word not in names]
    kind = {"metavar": value[0]} if value else {} if settings else {"action": "store_true"}
    return names, kind | settings | {"help": text}


class Command(NamedTuple):
    """A command besides `run`: its description, its options and, in a group of their own, those of a search."""

    description: str
    options: Sequence[Option]
    search: Sequence[Option] = ()


RUN = {
    "hosts and devices": [
        option("-H --hostfile FILE", "lines `host slots=N` (default: /job/hostfile, if it exists)"),
        option("-i --include HOST[:ID,ID][@...]", "use only these", default=""),
        option("-e --exclude HOST[:ID,ID][@...]", "use all but these", default=""),
        option("--num_nodes N", "use the first N hosts", type=int, default=-1),
        option("--num_gpus --num_accelerators N", "use devices 0 to N-1 of every host", type=int, default=-1),
        option("--one_process_per_node", "one process per host, with all its devices"),
        option("--platform", "cpu: N processes without GPUs", choices=["gpu", "cpu"], default="gpu"),
    ],
    "how processes find each other": [
        option("--master_addr HOST", "the coordinator's host (default: found by asking the hosts)", default=""),
        option("--master_port PORT", "the coordinator's port (default: a free one; 29500 with --no_ssh)", type=int),
        option("--launcher", "the system that starts processes on other hosts", choices=LAUNCHERS, default="ssh"),
        option(
            "--launcher_args ARGS",
            "options for ssh, srun, mpirun or the JobSet, as in --launcher_args='-A'",
            default="",
        ),
        option("--ssh_port PORT", type=int),
        option("--force_multi", "use ssh for a single host too, and for this machine"),
        option("--no_ssh", "start only this host's processes; run the command on every host"),
        option("--node_rank R", "with --no_ssh: this host's number, from 0", type=int, default=-1),
    ],
    "the script": [
        option("--module", "the script is a module, as in `python -m`"),
        option("--no_python", "the script is a program, not a Python file"),
        option("--no_local_rank", "do not pass --local_rank=K to the script"),
        option("--export NAME[=VALUE]", "pass a variable to all processes", action="append", default=[]),
        option("--venv_script FILE", "source this file on every host first"),
    ],
    "failures and output": [
        option("--max_restarts N", "restart up to N times after a failure", type=int, default=0),
        option(
            "--min_nodes N",
            "start and restart without hosts that do not answer or have a fault, if N are left "
            "(default: all hosts are needed)",
            type=int,
            default=-1,
        ),
        option("--resume", "initialize resumes from the newest checkpoint in the config's checkpoint.dir"),
        option(
            "--hang_timeout SECONDS",
            "print all stacks and end the job when no step finishes for SECONDS; 0: never (default: 1800)",
            type=float,
            default=1800,
        ),
        option(
            "--grace SECONDS",
            "time for scripts to end after Ctrl-C, or to save and end after SIGTERM (default: 30)",
            type=float,
            default=30,
        ),
        option("--enable_each_rank_log DIR", "also write the output of each rank to a file in DIR"),
        option("--save_pid", "write this command's pid to /tmp/PID.jzero"),
        option("--dry_run", "start nothing; print the plan as JSON, or the JobSet as YAML"),
    ],
}
FINETUNE = [  # of jzero.recipes.choices.Options, which has the defaults
    option("--out DIR", "a new or empty directory, or with --resume that of the run (default finetuned)"),
    option("--recipe NAME", "of `jzero recipes`: gives method, batch, lr, ZeRO stage, ... unless an option does"),
    option("--method", "default: lora for downloads, full for presets", choices=["full", "lora", "qlora"]),
    option("--tokenizer DIR", "default: the model's; of a preset: bytes"),
    option("--length TOKENS", "of a row (default: as the longest sample, at most 2048)", type=int),
    option("--batch ROWS", "of a step (default 16, or fewer for few rows)", type=int),
    option("--micro_batch ROWS", "of a device at a time (default: the fastest that fits)", type=int),
    option("--recompute", "in the backward pass (default: the least that fits)", choices=["none", "matmuls", "full"]),
    option("--epochs N", "default 3", type=float),
    option("--steps N", "instead of --epochs", type=int),
    option("--lr RATE", "default 2e-5 for full, 2e-4 for lora, 1e-3 for presets; a tenth for preferences", type=float),
    option("--rank N", "of the adapters (default 16)", type=int),
    option("--quantize", "of the frozen matrices under qlora (default nf4)", choices=["nf4", "int8"]),
    option(
        "--beta B", "of preferences: how dear it is to leave the model before the training (default 0.1)", type=float
    ),
    option("--pack", "several samples a row, which attention keeps apart (default, unless rows get few)"),
    option("--no_pack", "one sample a row", dest="pack", action="store_false"),
    option("--held_out SHARE", "of the rows, for evaluations; 0: none (default 0.05)", type=float),
    option("--evaluations N", "in the run (default 10)", type=int),
    option("--patience N", "stop after N evaluations without a better loss", type=int),
    option("--memory SIZE", "of a device to use, as 40GB (default: all that it has)"),
    option("--config FILE", "sections of a config that replace the chosen ones"),
    option("--seed N", "default 0", type=int),
    option("--resume", "continue the run in --out from its newest checkpoint, with the same options"),
]
MODEL = "a directory of transformers; a hub id in the local cache; a shape by name: qwen3-8b, llama:tiny, ..."
OTHERS = {
    "finetune": Command(
        "Tune a model on a file, and write a directory that transformers and vLLM load. Every choice is printed with "
        "the option that changes it.",
        [
            option("model MODEL", MODEL),
            option(
                "data DATA",
                "JSONL (text; prompt, completion; messages; prompt, chosen, rejected), a text file, "
                "Parquet, or a directory of datasets",
            ),
            *((names, {"default": argparse.SUPPRESS, **settings}) for names, settings in FINETUNE),
        ],
    ),
    "demo": Command(
        "Train a byte-level Llama of 0.5 M parameters on Python's documentation; print its curve and three samples.",
        [option("--steps N", "default 140, under a minute on two cores", type=int, default=140)],
    ),
    "recipes": Command(
        "List configs of published models on H100s and H200s: planned speed and memory, days and cost. With a name, "
        "print the config.",
        [
            option("name NAME", "of the recipe whose config is printed", nargs="?"),
            option("--price P", "dollars of a GPU for an hour (default 2.5)", type=float),
        ],
    ),
    "report": Command(
        "`jzero report`: versions and devices of every host, what JAX finds on this one, and what is wrong.",
        [
            option("-H --hostfile FILE", "lines `host slots=N`: check all of these hosts"),
            option("--ssh_port PORT", "of sshd on all hosts; default: as in ~/.ssh/config, or 22"),
            option("--launcher_args ARGS", "options for ssh", default=""),
        ],
    ),
    "plan": Command(
        "Compile the train step of a config for GPUs that need not be there; print its memory, collectives and time.",
        [
            option("config CONFIG", "a config file", nargs="?"),
            option(
                "--model NAME",
                f"{MODEL}; package.module:function, which returns a model, alone or with a function from the global "
                "batch size to the batch's shapes (default llama:8b)",
                default="llama:8b",
            ),
            option("--set FIELD=VALUE", "change a preset's shape: num_layers=16", action="append", default=[]),
            option("--adapters", "train adapters, as jzero finetune --method does", choices=["lora", "qlora"]),
            option("--rank N", "of the adapters (default 16)", type=int),
            option("--seq TOKENS", "tokens of a row (default 4096)", type=int, default=4096),
            option("--gpu KIND", "h100, h200, b200, ... (default h200)", default="h200"),
            option("--nodes", "default 1", type=int, default=1),
            option("--gpus_per_node", "default 8", type=int, default=8),
            option("--rates FILE", "what `jzero calibrate` measured on such GPUs"),
            option("--tokens N", "of the whole run, as 15e12: days, GPU-hours, energy", type=float),
            option("--price P", "of one GPU for one hour: the cost of --tokens", type=float),
            option("--json FILE", "JSON instead of tables, or into a file", nargs="?", const="-"),
            option("--html FILE", "write one page"),
            option("--formula", "only the bytes of the model state, without compiling"),
        ],
        [
            option("--search", "find the fastest configuration that fits"),
            option("--fit", "find the smallest cluster that fits, of --gpus_per_node a host"),
            option("--frontier FILE", "search, and draw memory against speed: .svg, .png, .pdf"),
            option("--minutes M", "of a search, at most (default 10)", type=float),
            option("--out FILE", "the config found (default best.json)"),
        ],
    ),
    "calibrate": Command(
        "Measure the rates of this machine's GPUs and their links in about a minute: matmuls, attention, "
        "memory, collectives and one real step. Plans take the file.",
        [option("--out FILE", "default: rates.json", default="rates.json")],
    ),
    "plot": Command(
        "Draw loss, metrics, speed, memory and goodput of runs: PNG files, and one page (index.html).",
        [
            option("runs RUN", "a checkpoint directory (with a ledger), or one of jsonl_monitor", nargs="+"),
            option("--out DIR", "default: plots", default="plots"),
            option("--metric NAME", "draw this one; may be repeated", action="append", default=[]),
            option("--x", "the horizontal axis", choices=["step", "samples", "time"], default="step"),
            option("--smooth W", "weight of the past in a moving average, as 0.9", type=float, default=0.0),
        ],
    ),
    "export": Command(
        "Write a checkpoint's parameters as safetensors, in the layout of `transformers` if the model "
        "defines one (weights_layout).",
        [
            option("checkpoint DIR", "save_checkpoint's directory"),
            option("out OUT", "a new or empty directory"),
            option("--tag TAG", "the checkpoint in DIR (default: the latest)"),
            option("--dtype", "default: as stored", choices=["float32", "bfloat16", "float16"]),
            option("--max_shard_size SIZE", "of one file, as 5GB or 500MB (default: 5GB)", default="5GB"),
            option("--adapters", "the adapters alone, for `peft` (default: merged into the weights)"),
        ],
    ),
    "import": Command(
        "Write a DeepSpeed checkpoint as one of jzero's, with all of its state in this machine's memory. "
        "engine.load_checkpoint(DIR) reads it too, each device its own part.",
        [
            option("directory DIR", "DeepSpeed's save_checkpoint's directory"),
            option("out OUT", "the directory of the new checkpoint", nargs="?"),
            option("--model NAME", f"{MODEL}; package.module:function", required=True),
            option("--config FILE", "default: the checkpoint's own"),
            option("--tag TAG", "the checkpoint in DIR (default: the latest)"),
            option("--names", "print the names and shapes of both sides, and propose"),
            option("--rename FILE", "JSON: {regular expression: replacement} for the model's names"),
        ],
    ),
    "replay": Command(
        "Repeat a step that was not finite on one device, and find where it begins. The exit code is 1 if "
        "the step is finite here.",
        [
            option("directory DIR", "non_finite.output_path/stepN of the run"),
            option("--model MODULE:FUNCTION", "the function returns the run's model", required=True),
        ],
    ),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        known = option_names(self)
        for word in message.split() if "unrecognized" in message else ():
            if word.startswith("--") and (close := closest(word, known)):
                message += f"; did you mean {close}?"
        self.exit(2, f"{self.prog}: error: {message}; `{self.prog} --help` lists the options\n")


def parser() -> argparse.ArgumentParser:
    """Make the parser of `jzero [options] script [the script's options]`, which reads the options before the script."""
    commands = "\n".join(f"  {name:<11}{text}" for name, text in COMMANDS.items())
    p = _Parser(
        prog="jzero",
        usage="jzero [run] [options] script [its options]\n       jzero COMMAND --help\n       jzero --version",
        description=f"commands:\n{commands}\n\n`jzero run` stops all processes when one dies. Its options:",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for title, group in RUN.items():
        _add(p.add_argument_group(title).add_argument, group)
    p.add_argument("script", help="the script, module or program")
    p.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="its own options")
    return p


def parse_other(name: str, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of a command in OTHERS."""
    command = OTHERS[name]
    p = _Parser(prog=f"jzero {name}", description=command.description, allow_abbrev=False)
    _add(p.add_argument, command.options)
    if command.search:
        title = 'the keys that the config leaves open, or that are "auto", are chosen'
        _add(p.add_argument_group("search", title).add_argument, command.search)
    return p.parse_args(argv)


def _add(add_argument: Callable[..., object], options: Sequence[Option]) -> None:
    for names, settings in options:
        add_argument(*names, **settings)


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
