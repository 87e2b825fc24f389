"""The exceptions, and how to write names, other exceptions, secrets and missing extras into messages.

Messages quote what users, files and other processes give: megabytes, control characters, lone surrogates. The
exceptions themselves shorten and escape it, so that no caller has to.
"""

import importlib.metadata
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

A = TypeVar("A")
B = TypeVar("B")
MOST_PROBLEMS = 20
_WORD, _LINE = 500, 2000  # characters of a word and of a line; a path has up to 255 between two slashes
_UNPRINTABLE = re.compile(r"[^\S \n]|[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


def shorten(text: str, most: int) -> str:
    """Cut the middle out of a text of more than `most` characters.

    >>> shorten("0123456789" * 2, 12)
    '01234567... (8 more) ...6789'
    """
    last = most // 3
    return text if len(text) <= most else f"{text[: most - last]}... ({len(text) - most} more) ...{text[-last:]}"


def escaped(text: object) -> str:
    """Escape control characters (not line ends) and lone surrogates: a name may contain what commands a terminal.

    >>> escaped("a\\x1b[2J")
    'a\\\\x1b[2J'
    """
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], str(text))


def printable(text: str) -> str:
    """Escape as `escaped` does, and shorten long words and lines.

    >>> printable("a\\x1b[2J, " + 1000 * "b")[:16]
    'a\\\\x1b[2J, bbbbbb'
    """
    text = re.sub(rf"\S{{{_WORD + 1},}}", lambda found: shorten(found[0], _WORD), escaped(text))
    return "\n".join(shorten(line, _LINE) for line in text.split("\n"))


class ConfigError(ValueError):
    """An invalid or unsupported config, model or call.

    Each problem names the key, its value, the allowed values and the fix. All problems of a config are reported
    together, the first MOST_PROBLEMS in the message.

    >>> print(ConfigError("steps = -1: must be positive", "size = 0: must be positive"))
    - steps = -1: must be positive
    - size = 0: must be positive
    """

    def __init__(self, *problems: str):
        self.problems = tuple(map(printable, problems))
        shown, more = self.problems[:MOST_PROBLEMS], len(problems) - MOST_PROBLEMS
        lines = shown if len(problems) == 1 else [f"- {problem}" for problem in shown]
        super().__init__("\n".join([*lines, *([f"- and {more} more problems"] if more > 0 else [])]))


def refuse_keywords(call: str, given: Mapping[str, Any], instead: Mapping[str, str]) -> None:
    """Raise a ConfigError with what to write instead of each given keyword; None is DeepSpeed's default, not given.

    >>> refuse_keywords("step", {"lr_kwargs": None}, {"lr_kwargs": "leave it out"})
    >>> refuse_keywords("step", {"lr_kwargs": {}}, {"lr_kwargs": "leave it out"})
    Traceback (most recent call last):
        ...
    jzero.errors.ConfigError: step(lr_kwargs=...): leave it out
    """
    refused = [name for name, x in given.items() if x is not None or name not in instead]
    if problems := [f"{call}({name}=...): {instead.get(name, 'unknown argument')}" for name in refused]:
        raise ConfigError(*problems)


class OutOfMemoryError(ConfigError):
    """A step needs more memory than its device has; the message has its parts, and configurations that fit."""


def both(first: Callable[[], A], second: Callable[[], B]) -> tuple[A, B]:
    """Return what two calls return.

    Raises:
      ConfigError: with the problems of both.
    """
    results: list[Any] = []
    errors: list[ConfigError] = []
    for call in (first, second):
        try:
            results.append(call())
        except ConfigError as error:
            errors.append(error)
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise ConfigError(*(problem for error in errors for problem in error.problems))
    return results[0], results[1]


class PassingError(ConfigError):
    """A ConfigError whose cause may pass, so that another start may succeed, such as a file system that failed."""


class LostProcessError(PassingError):
    """Another process failed, or did not come in time; its own error has the cause."""


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, is incomplete, or differs from the state that was saved."""

    def __init__(self, problem: str):
        super().__init__(printable(problem))


def one_line(text: str) -> str:
    """Escape all control characters of a name, line ends included.

    >>> one_line("a\\nb")
    'a\\\\nb'
    """
    return printable(text).replace("\n", "\\n")


def install_command(extra: str) -> str:
    """Return the command that installs an extra of jzero, which is on no index of packages.

    A clone installs its own extra. Elsewhere, as from a wheel, pip gets the packages that the extra names.
    """
    root = Path(__file__).parent.parent
    if not (root / "constraints.txt").exists():  # no clone
        try:
            requirements = importlib.metadata.requires("jzero") or ()
        except importlib.metadata.PackageNotFoundError:  # a copy of the files
            root = Path("CLONE")
        else:
            named = [line for line in requirements if re.search(rf"extra == .{extra}\W", line)]
            return shlex.join(["pip", "install", *(line.partition(";")[0] for line in named)])
    return f"pip install -e {shlex.quote(f'{root}[{extra}]')}"


def no_such_directory(path: Path, what: str = "directory") -> str:
    """Say that a path does not exist, and how to get it if it may be a name of Hugging Face.

    >>> print(no_such_directory(Path("a/b")))
    a/b: no such directory; a model of Hugging Face must be downloaded first: hf download a/b --local-dir b
    """
    may_be_name = len(path.parts) in (1, 2) and path.parts[0] not in ("/", "..") and path.suffix != ".json"
    download = shlex.join(["hf", "download", str(path), "--local-dir", path.name])
    if may_be_name:
        return f"{path}: no such directory; a model of Hugging Face must be downloaded first: {download}"
    return f"{path}: no such {what}"


def some_of(names: Iterable[object], most: int = 8) -> str:
    """Join the first names as prose, with the number of the others.

    >>> some_of(range(10), most=3)
    '0, 1, 2 and 7 more'
    """
    listed = [str(name) for name in names]
    return ", ".join(listed[:most]) + (f" and {len(listed) - most} more" if len(listed) > most else "")


def numbered(error: ConfigError) -> str:
    """Return the message, after the number of problems if there are several.

    >>> print(numbered(ConfigError("steps = -1: must be positive", "size = 0: must be positive")))
    2 problems:
    - steps = -1: must be positive
    - size = 0: must be positive
    """
    return f"{len(error.problems)} problems:\n{error}" if error.problems[1:] else str(error)


def in_a_line(error: BaseException) -> str:
    """Return an exception's message in one line, without the specifications that TensorStore appends.

    The type comes first, unless it tells nothing more: that of a RuntimeError, for example.
    """
    error = _cause(error)
    line, plain = _first_line(error), type(error) is ValueError or isinstance(error, OSError | RuntimeError)
    return line if line and plain else with_type(error)


def with_type(error: BaseException) -> str:
    """Return the type and the message of an exception in one line, as `in_a_line` shortens it.

    >>> with_type(KeyError("loss")), with_type(RuntimeError("no memory")), with_type(ValueError())
    ("KeyError: 'loss'", 'RuntimeError: no memory', 'ValueError')
    """
    error = _cause(error)
    return f"{type(error).__name__}: {_first_line(error)}".removesuffix(": ")


def _cause(error: BaseException) -> BaseException:
    """Return the cause of what Orbax raises, which repeats the whole specification."""
    return error.__cause__ if type(error) is Exception and isinstance(error.__cause__, Exception) else error


def _first_line(error: BaseException) -> str:
    line = re.split(r" \[[\w ]+='", (str(error).strip().splitlines() or [""])[0])[0]
    if len(line) > 500:  # the reason comes last, after paths
        line = f"{line[:240]} ... {line[-240:]}"
    return escaped(line)


SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL")
MASK = "***"


def is_secret(name: str) -> bool:
    """Return whether a name suggests a secret.

    >>> is_secret("WANDB_API_KEY"), is_secret("comet.api_key"), is_secret("NCCL_DEBUG")
    (True, True, False)
    """
    return any(word in name.upper() for word in SECRET)


def mask(name: str, value: Any) -> Any:
    """Return the value as it may be printed: texts under a secret's name are masked, at any depth.

    >>> mask("wandb", [{"api_key": "hf_1", "mode": "offline"}])
    [{'api_key': '***', 'mode': 'offline'}]
    """
    if isinstance(value, Mapping):
        return {key: mask(str(key), child) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return [mask(name, child) for child in value]
    return MASK if value and isinstance(value, str) and is_secret(name) else value


def masked(env: Mapping[str, str]) -> dict[str, str]:
    """Mask the secrets among variables.

    >>> masked({"HF_TOKEN": "hf_1", "NCCL_DEBUG": "INFO"})
    {'HF_TOKEN': '***', 'NCCL_DEBUG': 'INFO'}
    """
    return {name: mask(name, value) for name, value in env.items()}
