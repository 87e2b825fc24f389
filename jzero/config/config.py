"""`Config`: reads a source, screens its keys, validates the fields, checks them against each other, computes sizes.

A config passes the other files of this package in this order: `screen` (keys that are not
fields, with `keys` and `aliases`), `sections` (the fields; also `fields`, `precisions`, `observed`), `checks`, `sizes`.
"""

import base64
import json
import os
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Self

import hjson
from pydantic import PrivateAttr

from jzero.config import sizes
from jzero.config.checks import contradictions
from jzero.config.keys import Ignored, Replaced
from jzero.config.screen import screen
from jzero.config.sections import Settings
from jzero.errors import ConfigError
from jzero.values.kinds import Dtype, as_json

LARGEST = 2**20  # characters of a file; configs have a few thousand
ACCEPTED = "a path to a JSON or hjson file, a dict, a urlsafe-base64 string of JSON, or a Config"


def read_config(source: object) -> dict[str, Any]:
    """Read the config as a dict, without checking its values.

    Raises:
      ConfigError: no such file, text that is neither JSON nor hjson, a key given twice.
    """
    if isinstance(source, Mapping):
        return {str(key): value for key, value in source.items()}
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"config = {as_json(source)}: must be {ACCEPTED}; got {type(source).__name__}")
    path = Path(source)
    name = as_json(str(path), 400)
    if os.path.isfile(path):
        try:
            with path.open(encoding="utf-8") as file:
                return _parse(file.read(LARGEST + 1), str(path))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"config = {name}: cannot be read as text ({error})") from None
    if isinstance(source, str) and (text := _base64(source)):
        return _parse(text, "the base64 config")
    if isinstance(source, str) and source.lstrip().startswith("{"):
        raise ConfigError(f"config = {as_json(source)}: is JSON text, not a path; pass json.loads(text)")
    what = "is a directory" if os.path.isdir(path) else "no such file"
    raise ConfigError(f"config = {name}: {what}; must be {ACCEPTED}")


def _base64(source: str) -> str | None:
    """Decode a base64 string to the text of a JSON object; None if it is not one."""
    try:
        text = base64.b64decode(source + "=" * (-len(source) % 4), altchars=b"-_", validate=True).decode()
    except ValueError:
        return None
    return text if text.lstrip().startswith("{") else None


def _load(text: str, name: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_Pairs)
    except ValueError as not_json:
        try:
            return hjson.loads(text, object_pairs_hook=_Pairs)
        except (ValueError, IndexError, OverflowError) as not_hjson:  # its faults: text without an end, 1e400
            both = f"as JSON: {not_json}; as hjson: {not_hjson}"
            raise ConfigError(f"{name}: is neither JSON nor hjson; {both}") from None


class _Pairs(list[tuple[str, object]]):
    """A JSON object as pairs: a dict would keep the last of two equal keys without an error."""


def _parse(text: str, name: str) -> dict[str, Any]:
    if len(text) > LARGEST:
        raise ConfigError(f"{name}: has more than {LARGEST:,} characters: too large for a config")
    twice: list[str] = []
    try:
        tree = _load(text, name)
        if not isinstance(tree, _Pairs):
            raise ConfigError(f"{name} = {as_json(tree)}: must be a JSON object {{...}} of config keys")
        data = _distinct(tree, "", twice)
    except RecursionError:
        raise ConfigError(f"{name}: is nested too deeply; a config has up to seven levels of {{...}}") from None
    if twice:
        raise ConfigError(*[f"{key}: given twice in {name}; keep one of the two" for key in twice])
    return data


def _distinct(node: object, path: str, twice: list[str]) -> Any:
    """Turn pairs into dicts; dotted keys that occur twice go to `twice`."""
    if isinstance(node, _Pairs):
        data: dict[str, Any] = {}
        for key, value in node:
            if key in data:
                twice.append(f"{path}{key}")
            data[key] = _distinct(value, f"{path}{key}.", twice)
        return data
    return [_distinct(item, path, twice) for item in node] if isinstance(node, list) else node


class Config(Settings):
    """A whole config. `Config.load` reads it; the keywords of the constructor are its keys."""

    _replaced: tuple[Replaced, ...] = PrivateAttr(())
    _ignored: tuple[Ignored, ...] = PrivateAttr(())
    _autos: tuple[str, ...] = PrivateAttr(())

    def __init__(self, /, **given: Any):
        found = screen(given)
        # Bad values have left their keys to the defaults, so that the user sees the contradictions between the good
        # ones at once too; `contradictions` skips the checks that read a bad one.
        super().__init__(**found.data)
        if problems := [*found.noted(str), *contradictions(self, found.wrong)]:
            raise ConfigError(*dict.fromkeys(problems))
        self._replaced, self._ignored = found.noted(Replaced), found.noted(Ignored)
        self._autos = tuple(found.autos)

    @classmethod
    def load(cls, source: str | os.PathLike[str] | Mapping[str, Any] | Self) -> Self:
        """Read a config.

        Args:
          source: path to a JSON or hjson file, dict, urlsafe-base64 string of JSON, or a Config, returned unchanged.

        Returns:
          The frozen config.

        Raises:
          ConfigError: with every problem of the config in `.problems`.
        """
        return source if isinstance(source, cls) else cls(**read_config(source))

    @property
    def autos(self) -> tuple[str, ...]:
        """The keys given as "auto", and the micro-batch if "auto" decides it.

        They take the Hugging Face Trainer's default (`values.parameters`), or jzero's where that has none. The model
        and the devices decide `bf16.enabled` and `fp16.enabled`, see `jzero.precision`.
        """
        return self._autos

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """The given keys that have no meaning under JAX, each with its replacement, also those given as "auto"."""
        return self._replaced

    @property
    def ignored(self) -> tuple[Ignored, ...]:
        """The given keys that do nothing, each with what to write instead."""
        return self._ignored

    @property
    def precision(self) -> Dtype:
        """The compute dtype."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    @property
    def precision_text(self) -> str:
        """The compute dtype, and fp8 where weights are multiplied in it."""
        return f"{self.precision} and fp8" if self.fp8.enabled else self.precision

    def batch(self, replicas: int, former: Mapping[str, Any] | None = None) -> sizes.BatchSizes:
        """Resolve the three batch sizes and infer the missing ones.

        Args:
          replicas: the groups of devices that get rows of their own, see `mesh.replicas`.
          former: the sizes of the run that resumes (`batch` in a checkpoint's notes). Its global batch stays, by
            accumulation, unless the config has changed: to another global batch, or to other sizes on the same number
            of replicas. Its micro-batch stays too, unless the config gives one, or an accumulation that divides the
            global batch.

        Returns:
          Global batch, micro-batch per replica, accumulation steps, and the sizes that were inferred.

        Raises:
          ConfigError: no size at all, or a global batch that is not the product; the message gives the nearest valid
            sizes.

        >>> Config.load({"train_batch_size": 32, "gradient_accumulation_steps": 2}).batch(4)
        BatchSizes(train=32, micro=4, accum=2, inferred='train_micro_batch_size_per_gpu = 4')
        """
        return sizes.batch(self, replicas, former, self.autos)

    def mesh_degrees(self, num_devices: int) -> dict[str, int]:
        """Resolve the number of devices along each mesh axis, outermost first.

        Raises:
          ConfigError: the product of the degrees does not fit `num_devices`; the message gives degrees that do.

        >>> Config.load({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}).mesh_degrees(16)
        {'pipe': 1, 'data': 4, 'zero': 4, 'expert': 1, 'context': 1, 'tensor': 1}
        """
        return sizes.mesh_degrees(self, num_devices)


def without_curriculum(config: Config) -> Config:
    """Return a config that has no curriculum.

    Raises:
      ConfigError: it has one, which only the engine follows.
    """
    for path in config.curricula:
        raise ConfigError(
            f"{path}: the engine of jzero.initialize cuts the batches, and a train step does not; turn it off here and "
            "pass batches of the lengths that you want"
        )
    return config


# ---- the keys that name files to write, and those that send data: all that an untrusted config can reach ------------


# The keys of a path, joined -> whether a run with this config writes there. SECURITY.md has the same rows.
OUTPUTS: dict[tuple[str, ...], Callable[[Config], object]] = {
    ("checkpoint.dir",): attrgetter("checkpoint.dir"),
    ("non_finite.output_path",): lambda config: config.non_finite.action == "stop",
    ("flops_profiler.output_file",): lambda c: c.flops_profiler.enabled and c.flops_profiler.output_file,
    ("profiler.output_path",): attrgetter("profiler.steps"),
    **{
        (f"{section}.output_path", f"{section}.job_name"): attrgetter(f"{section}.enabled")
        for section in ("csv_monitor", "jsonl_monitor", "tensorboard")
    },
}


def outputs(config: Config) -> dict[str, Path]:
    """Return {key, or keys: path} of the places that a run with this config writes to.

    >>> outputs(Config.load({"csv_monitor": {"enabled": True, "output_path": "runs", "job_name": "first"}}))
    {'csv_monitor.output_path, csv_monitor.job_name': PosixPath('runs/first')}
    """
    used = [keys for keys, is_used in OUTPUTS.items() if is_used(config)]
    return {", ".join(keys): Path(*(attrgetter(key)(config) for key in keys)) for keys in used}
