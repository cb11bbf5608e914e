"""Offset assignment: an arena for the values that do not leave a generated program.

In the arena a value has its bytes in its live range: from the kernel that writes it to the last one
that reads it. So the arena is as large as the largest set of values alive together, or hardly more.
Values with a live range that ends before a result is first written lie in the result's memory;
and a value that is computed from one of the same row alone is written in its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, slots=True)
class ArenaValue:
    """A value's live range, from the first kernel that needs it to the last, and its size."""

    value: int
    first: int
    last: int
    num_bytes: int


_Placed = tuple[int, int, ArenaValue]
"""Begin and end of a value's bytes, and the value."""


def assign_offsets(values: Iterable[ArenaValue]) -> tuple[dict[int, int], int]:
    """Assign an offset to each value such that values alive together do not overlap.

    Returns:
        Offsets in bytes by value, multiples of `ALIGNMENT`, and the bytes of the arena.
    """
    placed: list[_Placed] = []
    for value in _sort_by_size(values):
        begin = _find_lowest_gap(placed, value)
        placed.append((begin, begin + _align(value.num_bytes), value))
    offsets = {value.value: begin for begin, _, value in placed}
    return offsets, max((end for _, end, _ in placed), default=0)


def place_in_results(
    values: Iterable[ArenaValue], results: Iterable[ArenaValue]
) -> tuple[dict[int, tuple[int, int]], list[ArenaValue]]:
    """Place values in the memory of results that are not written yet.

    Args:
        values: Values that need memory in their live ranges.
        results: Results, which have memory anyway: until the kernel that first needs it, other
            values may lie there.

    Returns:
        The result and the offset in its memory, by value, for those that found one; and the rest.
    """
    # A result that is needed soonest is of use to the fewest, so it is taken first.
    ordered = sorted(results, key=lambda result: (result.first, result.num_bytes, result.value))
    placed: dict[int, list[_Placed]] = {result.value: [] for result in ordered}
    found: dict[int, tuple[int, int]] = {}
    rest = []
    for value in _sort_by_size(values):
        for result in ordered:
            if value.last >= result.first:
                continue
            begin = _find_lowest_gap(placed[result.value], value)
            if begin + value.num_bytes <= result.num_bytes:
                placed[result.value].append((begin, begin + _align(value.num_bytes), value))
                found[value.value] = (result.value, begin)
                break
        else:
            rest.append(value)
    return found, rest


def _sort_by_size(values: Iterable[ArenaValue]) -> list[ArenaValue]:
    """Sort values, the largest first: small ones fit into what is left between large ones."""
    return sorted(values, key=lambda each: (-each.num_bytes, each.first, each.value))


def _find_lowest_gap(placed: Iterable[_Placed], value: ArenaValue) -> int:
    """Return the lowest offset at which a value is clear of those that are alive with it."""
    length, begin = _align(value.num_bytes), 0
    for other_begin, other_end, other in sorted(placed, key=lambda place: place[:2]):
        is_disjoint = other.last < value.first or value.last < other.first
        if is_disjoint or other_end <= begin:
            continue
        if begin + length <= other_begin:
            break
        begin = other_end
    return begin


def _align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
