"""Check a packing, independently of the packer: one sweep over time, no heuristics shared."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from penstock.errors import PlanError
from penstock.planner.packing._types import BufferLike, Packing, as_buffers


def check_packing(
    buffers: Sequence[BufferLike], packing: Packing, capacity: int | None = None
) -> None:
    """Raise where a packing breaks a rule; return None where it keeps them all.

    The rules, in the order in which they are checked: `count` (one offset a buffer), `offset` (not
    below zero), `alignment`, `fixed offset`, `overlap` (two buffers that are live at the same time
    share no byte), `height` (as stated), `capacity`, `lower bound` (not above the height, and
    `optimal` exactly where they are equal).

    Example:
        >>> check_packing([(0, 2, 4), (1, 3, 4)], pack([(0, 2, 4), (1, 3, 4)]))

    Args:
        buffers: The buffers that were packed: `(lower, upper, size)` each, or `Buffer` objects.
        packing: The result of `pack`.
        capacity: Height that the packing must not exceed; None: any.

    Raises:
        PlanError: A rule is broken; `rule` is its name and the message says where.
    """
    given = as_buffers(buffers)
    offsets = packing.offsets
    if len(offsets) != len(given):
        raise PlanError(f"{len(offsets)} offsets for {len(given)} buffers", rule="count")
    for index, (buffer, offset) in enumerate(zip(given, offsets, strict=True)):
        if offset < 0:
            raise PlanError(f"buffer {index} lies at {offset}", rule="offset")
        if offset % buffer.alignment:
            raise PlanError(
                f"buffer {index} lies at {offset}, not a multiple of {buffer.alignment}",
                rule="alignment",
            )
        if buffer.offset is not None and buffer.offset != offset:
            raise PlanError(
                f"buffer {index} lies at {offset}, not at {buffer.offset}", rule="fixed offset"
            )
    spans = [
        (span, offset, offset + buffer.size, index)
        for index, (buffer, offset) in enumerate(zip(given, offsets, strict=True))
        for span in buffer.spans
        if buffer.size
    ]
    check_overlap(spans)
    height = max((end for _, _, end, _ in spans), default=0)
    if packing.height != height:
        raise PlanError(f"the height is {height}, not {packing.height}", rule="height")
    if capacity is not None and height > capacity:
        raise PlanError(f"the height {height} exceeds the capacity {capacity}", rule="capacity")
    if packing.lower_bound > height or packing.optimal != (packing.lower_bound == height):
        raise PlanError(
            f"lower bound {packing.lower_bound}, height {height}, optimal {packing.optimal}",
            rule="lower bound",
        )


def check_overlap(spans: list[tuple[tuple[int, int], int, int, int]]) -> None:
    """Sweep over time with the live address ranges sorted; neighbours must not overlap."""
    events = []
    for (lower, upper), start, end, index in spans:
        events.append((lower, 1, start, end, index))
        events.append((upper, 0, start, end, index))  # ends come before beginnings
    live: list[tuple[int, int, int]] = []
    for time, begins, start, end, index in sorted(events):
        place = bisect.bisect_left(live, (start, end, index))
        if not begins:
            del live[place]
            continue
        for neighbour in live[max(place - 1, 0) : place + 1]:
            if neighbour[0] < end and start < neighbour[1]:
                raise PlanError(
                    f"at time {time} buffer {index} at [{start}, {end}) and buffer "
                    f"{neighbour[2]} at [{neighbour[0]}, {neighbour[1]}) overlap",
                    rule="overlap",
                )
        live.insert(place, (start, end, index))
