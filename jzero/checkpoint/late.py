"""What Orbax and TensorStore still say after a file could not be read or written, of which the error tells all."""

import functools
import logging
import re
import sys
from typing import Any

OF_TASKS = re.compile("(Task|Future) .*(orbax|tensorstore)", re.DOTALL)


@functools.cache
def drop_late_answers() -> None:
    """Print no traceback for each, in this process from now on.

    Orbax closes its event loop at the first error. TensorStore then answers to it what else was under way, and tasks
    and coroutines that were abandoned complain of that.
    """
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        late = type(error) is RuntimeError and str(error) == "Event loop is closed"
        abandoned = type(error) is Exception and isinstance(error.__cause__, GeneratorExit)
        if not late and not abandoned:
            before(unraisable)

    sys.unraisablehook = hook
    logging.getLogger("asyncio").addFilter(lambda record: not OF_TASKS.match(record.getMessage()))
