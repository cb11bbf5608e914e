"""Calls of C++: lists as arrays, and threads for long calls, so that Ctrl-C stops them.

Python handles signals only between bytecodes of the main thread: a call there would hold them back.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Sequence

import numpy as np

from penstock.compat.threads import Thread


def run_stoppable(calls: Sequence[Callable[[], object]], stop: np.ndarray, *, name: str) -> None:
    """Make calls at the same time, each in a thread, and wait for them.

    Args:
        calls: Calls that return soon after `stop` has become 1, and hold what they use.
        stop: int32 (1,), whose address the calls have; becomes 1 if waiting is interrupted, by
            Ctrl-C or any other exception, which is raised once all calls have returned. So is what
            a call raises.
        name: Of the threads.
    """
    is_made: dict[int, bool] = {}  # of calls that have begun, and of those that never will
    errors: list[BaseException] = []

    def make(number: int) -> None:
        if not is_made.setdefault(number, True):
            return
        try:
            calls[number]()
        except BaseException as error:  # raised below, in the thread that waits
            errors.append(error)
            stop[0] = 1

    threads = [
        Thread(target=make, args=(number,), name=f"penstock-{name}-{number}")
        for number in range(len(calls))
    ]
    try:
        for thread in threads:  # an interrupt may come while the system is starting one
            thread.start()
        for thread in threads:
            thread.join()
    except BaseException:
        stop[0] = 1
        for number, thread in enumerate(threads):
            while is_made.setdefault(number, False) and thread.is_alive():
                with contextlib.suppress(BaseException):  # of a second interrupt
                    thread.join()
        raise
    if errors:
        raise errors.pop(0)


def flatten(
    rows: Collection[Sequence[int]], dtype: type[np.integer]
) -> tuple[np.ndarray, np.ndarray]:
    """Return where each list begins and the last one ends, and the lists' numbers in one array."""
    rows = list(rows)
    first = np.cumsum([0, *map(len, rows)], dtype=dtype)
    return first, np.fromiter(itertools.chain.from_iterable(rows), dtype)
