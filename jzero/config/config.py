"""`Config`: the sections, read from a source, screened, checked against each other, and asked for sizes.

The other files of this package, in the order in which a config passes them: `source` (file to dict), `screen` (keys
that are no fields, with `keys` and `suggest`), `sections` (the fields, with `jzero.values.kinds`), `checks`, `sizes`.
"""

import os
from collections.abc import Mapping
from typing import Any, Self

from pydantic import PrivateAttr, ValidationError

from jzero.config import sizes
from jzero.config.checks import contradictions
from jzero.config.keys import Replaced
from jzero.config.screen import MISSING, explain, plain, pop, screen
from jzero.config.sections import Settings
from jzero.config.source import read
from jzero.errors import ConfigError
from jzero.values.kinds import Dtype


class Config(Settings):
    """A whole config. `Config.load` reads it; the keywords of the constructor are its keys."""

    _replaced: tuple[Replaced, ...] = PrivateAttr(())
    _autos: tuple[str, ...] = PrivateAttr(())

    def __init__(self, /, **given: Any):
        autos: list[str] = []
        data = plain(given, autos)
        replaced, problems = screen(data)
        wrong: set[str] = set()
        while True:  # what is wrong is reported and left out, so that the rest is still checked against itself
            try:
                super().__init__(**data)
                break
            except ValidationError as error:
                for detail in error.errors():
                    path = ".".join(map(str, detail["loc"]))
                    value = pop(data, *detail["loc"])
                    wrong.add(path)
                    problems.append(explain(path, value, detail))
                    if value is MISSING:  # a required key is missing: its section goes
                        pop(data, *detail["loc"][:-1])
        problems.extend(contradictions(self, wrong))
        if problems:
            raise ConfigError(*dict.fromkeys(problems))
        self._replaced, self._autos = replaced, tuple(autos)

    @classmethod
    def load(cls, source: str | os.PathLike[str] | Mapping[str, Any] | Self) -> Self:
        """Read a config from a JSON or hjson file, a dict, a urlsafe-base64 string of JSON, or another Config.

        Raises:
          ConfigError: with every problem of the config in `.problems`.
        """
        return source if isinstance(source, cls) else cls(**read(source))

    @property
    def autos(self) -> tuple[str, ...]:
        """The keys given as "auto", which have their defaults."""
        return self._autos

    @property
    def replaced(self) -> tuple[Replaced, ...]:
        """The keys the user gave that have no meaning under JAX, each with what replaces it."""
        return self._replaced

    @property
    def precision(self) -> Dtype:
        """The compute dtype."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    def batch(self, replicas: int, former: Mapping[str, Any] | None = None) -> sizes.BatchSizes:
        """The three batch sizes on `replicas` data-parallel replicas (|data| × |zero|), inferring what is not given.

        `former`: those of a run that goes on (`batch` in a checkpoint's notes). Its global batch is kept, by
        accumulation, with its micro-batch if the config names none, unless the config names another global batch or,
        on as many replicas, other sizes than it did.

        >>> Config.load({"train_batch_size": 32, "gradient_accumulation_steps": 2}).batch(4)
        BatchSizes(train=32, micro=4, accum=2, inferred='train_micro_batch_size_per_gpu = 4')
        """
        return sizes.batch(self, replicas, former)

    def mesh_degrees(self, num_devices: int) -> dict[str, int]:
        """Devices along each mesh axis, outermost first, on `num_devices` devices.

        >>> Config.load({"zero_optimization": {"stage": 3, "mics_shard_size": 4}}).mesh_degrees(16)
        {'pipe': 1, 'data': 4, 'zero': 4, 'tensor': 1}
        """
        return sizes.mesh_degrees(self, num_devices)
