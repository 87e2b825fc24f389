"""Choose the environment variables that jzero passes to processes on other hosts."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from jzero.errors import ConfigError, mask

PREFIXES = ("NCCL", "PYTHON", "MV2", "UCX", "MLFLOW", "JAX_", "JZERO_", "XLA_", "TF_", "CUDA_", "HF_", "WANDB_")
NAMES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
# jzero sets these for each process, from its rank, its host and its attempt; an option or a hint that replaces them.
OWN = dict.fromkeys(
    (
        "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "JZERO_ATTEMPT", "JZERO_GRACE",
        "JZERO_HANG_TIMEOUT", "JZERO_JOB_ID", "JZERO_MEETING", "JZERO_OUTAGES", "JZERO_PROGRESS",
    ), ""
) | {
    "CUDA_VISIBLE_DEVICES": "--include", "MASTER_ADDR": "--master_addr", "MASTER_PORT": "--master_port",
    "JZERO_SECRET": "`export JZERO_SECRET` before the command",
}  # fmt: skip


def of_attempt(options: argparse.Namespace, id: str, secret: str, address: str, port: int, bind: str) -> dict[str, str]:
    """Return the variables that all processes of an attempt get once the hosts have answered.

    Args:
      id: the attempt's.
      secret: the job's; "": none.
      address, port: the coordinator's.
      bind: the address on which it listens; "": process 0 decides.
    """
    values = {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "JZERO_BIND_ADDRESS": bind,
        "JZERO_GRACE": f"{options.grace:g}",
        "JZERO_HANG_TIMEOUT": f"{options.hang_timeout:g}",
        "JZERO_JOB_ID": id,
        "JZERO_MEETING": "" if options.no_ssh else id,  # the rendezvous turns other jobs' processes away
        "JZERO_SECRET": secret,
    }
    return {name: value for name, value in values.items() if value}


def propagated(env: Mapping[str, str], cwd: str, home: str, export: Iterable[str] = ()) -> dict[str, str]:
    """Collect the variables for every process: chosen names of `env`, then files, then `--export`; the last value wins.

    The files are `.deepspeed_env` (or the name in `DS_ENV_FILE`) and then `.jzero_env`, each in `home` and then in
    `cwd`. They contain lines NAME=VALUE, empty lines and # comments. `cwd` comes first in PYTHONPATH.

    Raises:
      ConfigError: malformed lines, all at once; an `--export` of a variable that is not set.
    """
    chosen = {k: v for k, v in env.items() if (k in NAMES or k.startswith(PREFIXES)) and k not in OWN}
    problems: list[str] = []
    for name in (env.get("DS_ENV_FILE", ".deepspeed_env"), ".jzero_env"):
        for path in dict.fromkeys(Path(folder, name) for folder in (home, cwd)):
            if path.is_file():
                chosen |= _read(path, problems)
    for item in export:
        name, given, value = item.partition("=")
        if why := _refusal(name, "NAME or NAME=VALUE"):
            problems.append(f"--export = {mask(item, item)!r}: {why}")
        elif given or name in env:
            chosen[name] = value if given else env[name]
        else:
            problems.append(f"--export = {item!r}: {name} is not set here; write {name}=VALUE")
    if problems:
        raise ConfigError(*problems)
    chosen["PYTHONPATH"] = ":".join(dict.fromkeys(filter(None, [cwd, *chosen.get("PYTHONPATH", "").split(":")])))
    return chosen


def _read(path: Path, problems: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        problems.append(f"{path}: cannot be read: {error}; it must be a text file with lines NAME=VALUE")
        return found
    for number, line in enumerate(lines, 1):
        line = line.strip().removeprefix("export ")
        if not line or line.startswith("#"):
            continue
        name, given, value = line.partition("=")
        name = name.strip() if given and "\0" not in value else ""
        if why := _refusal(name, "NAME=VALUE, or a comment after #"):
            problems.append(f"{path}, line {number}: {mask(line, line)!r}: {why}")
        else:
            found[name] = value
    return found


def _refusal(name: str, form: str) -> str:
    """Return why a variable cannot be set; "" if it can."""
    if not re.fullmatch(r"\w+", name):
        return f"must be {form}"
    hint = f", and use {OWN[name]}" if OWN.get(name) else ""
    return f"jzero sets {name} for each process; leave it out{hint}" if name in OWN else ""
