"""C++ that runs for long, in threads of its own, so that Ctrl-C stops it.

Python handles signals only between bytecodes of the main thread: a call there would hold them back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np


def run_stoppable(calls: Sequence[Callable[[], object]], stop: np.ndarray, *, name: str) -> None:
    """Make calls at the same time, each in a thread, and wait for them.

    Args:
        calls: They return soon after `stop` has become 1.
        stop: int32 (1,), of which the calls know the address; becomes 1 if waiting is interrupted,
            by Ctrl-C or any other exception, which is raised once all calls have returned.
        name: Of the threads.
    """
    threads = [
        threading.Thread(target=call, name=f"penstock-{name}-{number}")
        for number, call in enumerate(calls)
    ]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        stop[0] = 1
        for thread in threads:
            thread.join()
        raise
