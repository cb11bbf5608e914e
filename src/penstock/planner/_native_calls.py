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
        calls: Calls that return soon after `stop` has become 1.
        stop: int32 (1,), whose address the calls have; becomes 1 if waiting is interrupted, by
            Ctrl-C or any other exception, which is raised once all calls have returned.
        name: Of the threads.
    """
    threads = [
        Thread(target=call, name=f"penstock-{name}-{number}") for number, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        stop[0] = 1
        for thread in threads:
            while thread.is_alive():  # it uses the caller's memory: no second interrupt ends this
                with contextlib.suppress(BaseException):
                    thread.join()
        raise


def flatten(
    rows: Collection[Sequence[int]], dtype: type[np.integer]
) -> tuple[np.ndarray, np.ndarray]:
    """Return where each list begins and the last one ends, and the lists' numbers in one array."""
    rows = list(rows)
    first = np.cumsum([0, *map(len, rows)], dtype=dtype)
    return first, np.fromiter(itertools.chain.from_iterable(rows), dtype)
