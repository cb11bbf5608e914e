"""Work that runs one step ahead of its consumer, in a thread that ends with the iteration."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetched(Iterator[Item], Generic[Item]):
    """The results of some jobs, in their order, of which the next ones are computed in advance.

    Jobs are drawn by the thread that iterates, and run by one other thread, one after the other.
    What a job raises is raised where its result would have been returned, and ends the iteration.
    If the iteration is abandoned, at most the job that is running comes to its end.

    Args:
        jobs: what to compute.
        ahead: how many jobs may run, or wait, ahead of the one whose result is wanted.
        waited: is told how many seconds each result was waited for.
    """

    def __init__(
        self, jobs: Iterator[Callable[[], Item]], *, ahead: int, waited: Callable[[float], None]
    ) -> None:
        self._jobs, self._ahead, self._waited = jobs, ahead, waited
        self._pending: deque[Future[Item]] = deque()
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="penstock-loader")
        self._stop = weakref.finalize(self, self._threads.shutdown, wait=False, cancel_futures=True)
        self._refill()

    def __next__(self) -> Item:
        self._refill()
        if not self._pending:
            self._stop()
            raise StopIteration
        try:
            start = time.perf_counter()
            result = self._pending.popleft().result()
            self._waited(time.perf_counter() - start)
            self._refill()
        except BaseException:
            self._pending.clear()
            self._jobs = iter(())
            self._stop()
            raise
        return result

    def _refill(self) -> None:
        """Have as many jobs under way as may be."""
        while len(self._pending) < self._ahead and (job := next(self._jobs, None)) is not None:
            self._pending.append(self._threads.submit(job))
