"""`Config`: reads a source, screens its keys, validates the fields, checks them against each other, computes sizes.

A config passes the other files of this package in this order: `source` (file to dict), `screen` (keys that are not
fields, with `keys` and `suggest`), `sections` (the fields, with `fields` and `observed`), `checks`, `sizes`.
"""

import os
from collections.abc import Mapping
from typing import Any, Self

from pydantic import PrivateAttr, ValidationError

from jzero.config import sizes
from jzero.config.checks import contradictions
from jzero.config.ignored import Ignored
from jzero.config.keys import REPLACED, Replaced
from jzero.config.screen import check_extent, explain, meant, plain, pop, screen
from jzero.config.sections import Settings
from jzero.config.source import read
from jzero.errors import ConfigError
from jzero.values import trainer
from jzero.values.kinds import Dtype


class Config(Settings):
    """A whole config. `Config.load` reads it; the keywords of the constructor are its keys."""

    _replaced: tuple[Replaced, ...] = PrivateAttr(())
    _ignored: tuple[Ignored, ...] = PrivateAttr(())
    _autos: tuple[str, ...] = PrivateAttr(())

    def __init__(self, /, **given: Any):
        check_extent(given)
        autos: list[str] = []
        data = plain(given, autos)
        found = screen(data, autos)
        if set(autos) & {sizes.TRAIN, sizes.MICRO} and not {sizes.TRAIN, sizes.MICRO} & set(data):
            data[sizes.MICRO] = trainer.MICRO_BATCH
        wrong: set[str] = set()
        # pydantic builds nothing from bad values, but the user should see every problem at once, contradictions between
        # the good values included. So each round drops the bad values and validates again, and `contradictions` skips
        # the checks that read one of them.
        while True:
            try:
                super().__init__(**data)
                break
            except ValidationError as error:
                details = {".".join(map(str, detail["loc"])): detail for detail in error.errors()}
                for path, detail in details.items():
                    if detail["type"] == "extra_forbidden":
                        wrong |= meant(path)
                for path, detail in details.items():
                    if detail["type"] == "missing":  # a required key: without it the section cannot be built
                        pop(data, *detail["loc"][:-1])
                    else:
                        pop(data, *detail["loc"])
                    if detail["type"] != "missing" or path not in wrong:
                        explain(path, detail, found)
                    wrong.add(path)
        if problems := [*found.problems, *contradictions(self, wrong)]:
            raise ConfigError(*dict.fromkeys(problems))
        found.replaced.extend(Replaced(key, "auto", REPLACED[key].by) for key in autos if key in REPLACED)
        self._replaced, self._ignored, self._autos = tuple(found.replaced), tuple(found.ignored), tuple(autos)

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
        return source if isinstance(source, cls) else cls(**read(source))

    @property
    def autos(self) -> tuple[str, ...]:
        """The keys given as "auto".

        They take the Hugging Face Trainer's default (`jzero.values.trainer`), or jzero's where that has none. The model
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
          replicas: data-parallel replicas, |data| × |zero|.
          former: the sizes of the run that resumes (`batch` in a checkpoint's notes). Its global batch stays, by
            accumulation, unless the config has changed: to another global batch, or to other sizes on the same number
            of replicas. Its micro-batch stays too unless the config gives one.

        Returns:
          Global batch, micro-batch per replica, accumulation steps, and the sizes that were inferred.

        Raises:
          ConfigError: no size at all, or a global batch that is not the product; the message gives the nearest valid
            sizes.

        >>> Config.load({"train_batch_size": 32, "gradient_accumulation_steps": 2}).batch(4)
        BatchSizes(train=32, micro=4, accum=2, inferred='train_micro_batch_size_per_gpu = 4')
        """
        return sizes.batch(self, replicas, former)

    def mesh_degrees(self, num_devices: int) -> dict[str, int]:
        """Resolve the number of devices along each mesh axis, outermost first.

        Raises:
          ConfigError: the product of the degrees does not fit `num_devices`; the message gives degrees that do.

        >>> Config.load({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}).mesh_degrees(16)
        {'pipe': 1, 'data': 4, 'zero': 4, 'expert': 1, 'context': 1, 'tensor': 1}
        """
        return sizes.mesh_degrees(self, num_devices)
