"""The packer without a compiler: best fit along several orders, in Python."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

from penstock.planner.packing._native import EngineResult
from penstock.planner.packing._types import Buffer

_ORDERS: tuple[Callable[[Buffer], tuple[int, int]], ...] = (
    lambda buffer: (-buffer.size, buffer.lower - buffer.upper),
    lambda buffer: (buffer.lower - buffer.upper, -buffer.size),
    lambda buffer: ((buffer.lower - buffer.upper) * buffer.size, -buffer.size),
    lambda buffer: (buffer.lower, -buffer.size),
)


def live_bytes(buffers: Iterable[Buffer]) -> int:
    """Return the largest number of bytes that are live at one time."""
    events = []
    for buffer in buffers:
        for lower, upper in buffer.spans:
            events += [(lower, buffer.size), (upper, -buffer.size)]
    return max(itertools.accumulate(size for _, size in sorted(events)), default=0)


def pack_fallback(
    buffers: list[Buffer], *, capacity: int | None, time_limit: float
) -> EngineResult:
    """Pack by the best of several orders; the first is finished whatever the time limit."""
    start = time.monotonic()
    fixed_end = max((b.offset + b.size for b in buffers if b.offset is not None), default=0)
    lower_bound = max(live_bytes(buffers), fixed_end)
    goal = lower_bound if capacity is None else max(capacity, lower_bound)
    best: tuple[int, list[int]] | None = None
    for key in _ORDERS:
        if best is not None and (best[0] <= goal or time.monotonic() - start > time_limit):
            break
        offsets = _fit_along(buffers, sorted(range(len(buffers)), key=lambda i: key(buffers[i])))
        height = max(o + b.size for o, b in zip(offsets, buffers, strict=True))
        if best is None or height < best[0]:
            best = height, offsets
    assert best is not None
    return EngineResult(
        offsets=tuple(best[1]),
        height=best[0],
        lower_bound=lower_bound,
        impossible=capacity is not None and lower_bound > capacity,
        searched=False,
        num_nodes=0,
        num_parts=1,
    )


def _fit_along(buffers: list[Buffer], order: list[int]) -> list[int]:
    """Place each buffer in its turn into the tightest free piece among those live with it."""
    offsets = [buffer.offset for buffer in buffers]
    placed = [index for index in order if offsets[index] is not None]
    for index in order:
        if offsets[index] is not None:
            continue
        buffer = buffers[index]
        taken = sorted(
            (offset, offset + buffers[other].size)
            for other in placed
            if (offset := offsets[other]) is not None and _overlap(buffer, buffers[other])
        )
        offsets[index] = _place(taken, buffer)
        placed.append(index)
    return [offset or 0 for offset in offsets]


def _place(taken: list[tuple[int, int]], buffer: Buffer) -> int:
    best, least, start = None, 0, 0
    for begin, end in taken:
        offset = -(-start // buffer.alignment) * buffer.alignment
        free = begin - offset
        if free >= buffer.size and (best is None or free < least):
            best, least = offset, free
        start = max(start, end)
    return -(-start // buffer.alignment) * buffer.alignment if best is None else best


def _overlap(one: Buffer, other: Buffer) -> bool:
    if one.lower >= other.upper or other.lower >= one.upper:
        return False
    if not one.gaps and not other.gaps:
        return True
    return any(
        lower < other_upper and other_lower < upper
        for lower, upper in one.spans
        for other_lower, other_upper in other.spans
    )
