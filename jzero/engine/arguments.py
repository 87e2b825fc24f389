"""DeepSpeed's command-line options for scripts, and the config that they name."""

from __future__ import annotations

import argparse
from typing import Any

from jzero.errors import ConfigError


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add DeepSpeed's options to a script's parser; `jzero.initialize(args=args)` reads them.

    --deepspeed is for scripts that look at it; jzero does not.

    >>> args = add_config_arguments(argparse.ArgumentParser()).parse_args(["--deepspeed_config", "ds.json"])
    >>> args.deepspeed, args.deepspeed_config
    (False, 'ds.json')
    """
    group = parser.add_argument_group("jzero", "DeepSpeed's names")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use; jzero needs no switch")
    group.add_argument("--deepspeed_config", metavar="FILE", help="the config, a JSON file")
    return parser


def choose_config(args: Any, config: Any) -> Any:
    """Return the config that was given: as `config`, or as the option in `args`.

    Raises:
      ConfigError: neither or both are given.
    """
    option = getattr(args, "deepspeed_config", None)
    if option is None and config is None:
        raise ConfigError("config: none given; pass config=..., or args=args of a script with --deepspeed_config FILE")
    if option is not None and config is not None:
        raise ConfigError(f"config: --deepspeed_config = {option!r} and config = {config!r} are both given: drop one")
    return config if option is None else option
