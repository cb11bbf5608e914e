"""Times of calls, and lines through two of them."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Line:
    """A quantity that grows by the row.

    Attributes:
        chunk: What it is beside its rows.
        row: What a row adds.
    """

    chunk: float
    row: float

    @classmethod
    def through(cls, few: tuple[int, float], many: tuple[int, float]) -> Line:
        """Return the line through two points (rows, quantity), with no negative part."""
        (r1, t1), (r2, t2) = few, many
        if r1 == r2 or t2 <= t1:
            return cls(0.0, t2 / r2)
        row = (t2 - t1) / (r2 - r1)
        return cls(max(0.0, t1 - r1 * row), row if t1 >= r1 * row else t2 / r2)

    def at(self, rows: int) -> float:
        """Return the quantity of some rows."""
        return self.chunk + rows * self.row


def time_best(call: Callable[[], object], repetitions: int, *, seconds: float = 0.0) -> float:
    """Return the least time of a call, after one that is not timed.

    Args:
        call: What is timed.
        repetitions: Number of times, at least 1.
        seconds: Together they take at least so long: what disturbs a short call lasts longer.
    """
    call()
    times = [time_call(call) for _ in range(repetitions)]
    while sum(times) < seconds:
        times.append(time_call(call))
    return min(times)


def time_call(call: Callable[[], object]) -> float:
    """Return the time of a call, in seconds."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
