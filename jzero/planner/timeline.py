"""Shortens a timeline of many kernels to as many segments as a chart shows."""

from __future__ import annotations

from collections import Counter

COMPUTE, COMMUNICATION, COPIES = "compute", "communication", "copies"  # the streams
_MOST = 400  # segments per stream

Segment = tuple[str, str, float, float]  # stream, label, start_s, end_s


def coarse(segments: list[Segment], most: int = _MOST) -> list[Segment]:
    """Merge segments to at most `most` per stream; an interval has the label that fills most of it.

    >>> coarse([("compute", "a", 0.0, 1.0), ("compute", "a", 1.0, 2.0), ("compute", "b", 2.0, 3.0)])
    [('compute', 'a', 0.0, 2.0), ('compute', 'b', 2.0, 3.0)]
    """
    found = []
    for stream in (COMPUTE, COMMUNICATION, COPIES):
        own = _merged([s for s in segments if s[0] == stream and s[3] > s[2]])
        found += own if len(own) <= most else _merged(_sampled(own, most))
    return found


def repeated(segments: list[Segment], start: float, end: float, times: int) -> list[Segment]:
    """Repeat the segments of one trip from `start` to `end`, coarser if there are many."""
    if times * len(segments) > 64 * _MOST:
        segments = coarse(segments, max(2, _MOST // times))
    length = end - start
    return [(s, label, a + i * length, b + i * length) for i in range(times) for s, label, a, b in segments]


def _merged(segments: list[Segment]) -> list[Segment]:
    """Join neighbours of one label."""
    found: list[Segment] = []
    for segment in segments:
        last = found[-1] if found else None
        if last and last[1] == segment[1] and segment[2] - last[3] < 1e-9:
            found[-1] = (*last[:3], segment[3])
        else:
            found.append(segment)
    return found


def _sampled(segments: list[Segment], most: int) -> list[Segment]:
    """Cut the time into `most` intervals, each with the label that fills most of it; "" is idle."""
    first, last = segments[0][2], max(s[3] for s in segments)
    width = (last - first) / most
    shares: list[Counter[str]] = [Counter({"": width}) for _ in range(most)]
    for _, label, start, end in segments:
        i = min(most - 1, int((start - first) / width))
        while i < most and first + i * width < end:
            part = min(end, first + (i + 1) * width) - max(start, first + i * width)
            shares[i].update({label: part, "": -part})
            i += 1
    labels = [max(share, key=lambda name: share[name]) for share in shares]
    stream = segments[0][0]
    return [(stream, label, first + i * width, first + (i + 1) * width) for i, label in enumerate(labels) if label]
