"""Choose the environment variables that jzero passes to processes on other hosts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from jzero.errors import ConfigError
from jzero.values.masking import mask

PREFIXES = ("NCCL", "PYTHON", "MV2", "UCX", "MLFLOW", "JAX_", "JZERO_", "XLA_", "TF_", "CUDA_", "HF_", "WANDB_")
NAMES = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
# jzero sets these for each process, from its rank and its host.
OWN = (
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT",
    "CUDA_VISIBLE_DEVICES", "JZERO_ATTEMPT", "JZERO_GRACE", "JZERO_HANG_TIMEOUT", "JZERO_JOB_ID",
    "JZERO_MEETING", "JZERO_OUTAGES", "JZERO_PROGRESS", "JZERO_SECRET",
)  # fmt: skip


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
        if not re.fullmatch(r"\w+", name):
            problems.append(f"--export = {mask(item, item)!r}: must be NAME or NAME=VALUE")
        elif name in OWN:
            problems.append(f"--export = {mask(item, item)!r}: {_own(name)}")
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
        if not given or not re.fullmatch(r"\w+", name.strip()) or "\0" in value:
            problems.append(f"{path}, line {number}: {mask(line, line)!r}: must be NAME=VALUE, or a comment after #")
        elif name.strip() in OWN:
            problems.append(f"{path}, line {number}: {mask(line, line)!r}: {_own(name.strip())}")
        else:
            found[name.strip()] = value
    return found


def _own(name: str) -> str:
    options = {"CUDA_VISIBLE_DEVICES": "--include", "MASTER_ADDR": "--master_addr", "MASTER_PORT": "--master_port"}
    options |= {"JZERO_SECRET": "`export JZERO_SECRET` before the command"}
    hint = f", and use {options[name]}" if name in options else ""
    return f"jzero sets {name} for each process; leave it out{hint}"
