"""Where the values live that nobody outside a generated program sees: one arena, planned offsets.

A value takes its bytes from the kernel that writes it to the last one that reads it, so the arena is
as large as the largest set of values alive together, or hardly more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

ALIGNMENT = 64


@dataclasses.dataclass(frozen=True, slots=True)
class Lifetime:
    """A value's kernels, from the first that needs its bytes to the last, and how many bytes."""

    value: int
    first: int
    last: int
    num_bytes: int


def pack(lifetimes: Iterable[Lifetime]) -> tuple[dict[int, int], int]:
    """An offset for each value such that values alive together do not overlap.

    Returns:
        Offsets in bytes by value, multiples of `ALIGNMENT`, and the bytes of the arena.
    """
    placed: list[tuple[int, int, Lifetime]] = []  # begin, end
    # The largest first: the small ones fit into what is left between them.
    for lifetime in sorted(lifetimes, key=lambda life: (-life.num_bytes, life.first, life.value)):
        length = -(-lifetime.num_bytes // ALIGNMENT) * ALIGNMENT
        begin = 0
        for other_begin, other_end, other in sorted(placed, key=lambda place: place[:2]):
            is_apart = other.last < lifetime.first or lifetime.last < other.first
            if is_apart or other_end <= begin:
                continue
            if begin + length <= other_begin:
                break
            begin = other_end
        placed.append((begin, begin + length, lifetime))
    offsets = {lifetime.value: begin for begin, _, lifetime in placed}
    return offsets, max((end for _, end, _ in placed), default=0)
