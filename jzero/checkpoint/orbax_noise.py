"""Silences messages of Orbax and TensorStore that repeat an error which jzero raises or prints in one line."""

import functools
import logging
import re
import sys

ORBAX_FILE = "orbax/checkpoint/"
ORBAX_TASK = re.compile("(Task|Future) .*(orbax|tensorstore)", re.DOTALL)


@functools.cache
def silence_orbax() -> None:
    """Drop the tracebacks that follow a failed read or write, in this process from now on.

    Orbax closes its event loop at the first error. Every other file operation in flight then fails with "Event loop is
    closed", and Python reports each abandoned task and coroutine: hundreds of tracebacks for one damaged file. When a
    save fails, every thread of Orbax logs a traceback, over 100 lines, before the caller gets the same exception.
    """
    before = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        error = unraisable.exc_value
        late = type(error) is RuntimeError and str(error) == "Event loop is closed"
        abandoned = type(error) is Exception and isinstance(error.__cause__, GeneratorExit)
        if not late and not abandoned:
            before(unraisable)

    sys.unraisablehook = hook
    logging.getLogger("absl").addFilter(lambda record: not (record.exc_info and ORBAX_FILE in record.pathname))
    logging.getLogger("asyncio").addFilter(lambda record: not ORBAX_TASK.match(record.getMessage()))
