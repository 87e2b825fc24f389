"""The names of the pipeline schedules, and the number of chunks that each allows.

They are part of the config, which is checked before a pipeline exists; `jzero.pipeline.schedules` makes the tables.
"""

from collections.abc import Iterator
from typing import Literal, get_args

ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
SCHEDULE_NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)


def chunk_problems(schedule: str, chunks: int) -> Iterator[str]:
    """Yield a problem if the schedule does not have this number of chunks per stage."""
    if schedule in ("gpipe", "1f1b") and chunks > 1:
        yield (
            f'pipeline.chunks = {chunks}: schedule "{schedule}" has one chunk per stage; set pipeline.schedule to '
            '"interleaved" or "zero_bubble", or chunks to 1 (gradient_accumulation_steps are the micro-batches)'
        )
