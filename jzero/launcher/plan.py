"""The command `jzero plan`: its options. `jzero.planner.planning` does the work, after JAX is imported."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence


def main(argv: Sequence[str]) -> int:
    """Plan a config for GPUs that need not be there, and print memory, collectives and time; 2 if it cannot fit."""
    p = argparse.ArgumentParser(
        prog="jzero plan",
        description="Compile the train step of a config for GPUs that need not be there; print its memory, collectives "
        "and time.",
    )
    p.add_argument("config", metavar="CONFIG", help="a config file")
    p.add_argument(
        "--model", default="llama:8b", metavar="NAME",
        help="llama:PRESET, gpt2:PRESET, moe:PRESET, or package.module:function, which returns a model, or it and a "
        "function from the global batch size to the batch's shapes (default llama:8b)",
    )  # fmt: skip
    p.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="change a preset's shape: num_layers=16"
    )
    p.add_argument("--seq", type=int, default=4096, metavar="TOKENS", help="tokens of a row (default 4096)")
    p.add_argument("--gpu", default="h200", metavar="KIND", help="h100, h200, b200, ... (default h200)")
    p.add_argument("--nodes", type=int, default=1, help="default 1")
    p.add_argument("--gpus_per_node", type=int, default=8, help="default 8")
    p.add_argument("--rates", metavar="FILE", help="what `jzero calibrate` measured on such GPUs")
    p.add_argument("--tokens", type=float, metavar="N", help="of the whole run, as 15e12: days, GPU-hours, energy")
    p.add_argument("--price", type=float, metavar="P", help="of one GPU for one hour: the cost of --tokens")
    p.add_argument("--json", nargs="?", const="-", metavar="FILE", help="JSON instead of tables, or into a file")
    p.add_argument("--html", metavar="FILE", help="write one page")
    p.add_argument("--formula", action="store_true", help="only the bytes of the model state, without compiling")
    s = p.add_argument_group("search", 'the keys that the config leaves open, or that are "auto", are chosen')
    s.add_argument("--search", action="store_true", help="find the fastest configuration that fits")
    s.add_argument("--fit", action="store_true", help="find the smallest cluster that fits, of --gpus_per_node a host")
    s.add_argument("--frontier", metavar="FILE", help="search, and draw memory against speed: .svg, .png, .pdf")
    s.add_argument("--minutes", type=float, metavar="M", help="of a search, at most (default 10)")
    s.add_argument("--out", metavar="FILE", help="the config found (default best.json)")
    args = p.parse_args(argv)
    with _quiet():
        from jzero.planner import planning

        planning.start(args)
    return planning.main(args)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Send what JAX's CUDA plugin logs about the missing driver to nowhere: no log level reaches these lines."""
    sys.stderr.flush()
    saved, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(nowhere)
