"""Jobs that run ahead of their consumer, in a thread that ends with the iteration."""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

Item = TypeVar("Item")


class PrefetchIterator(Iterator[Item], Generic[Item]):
    """An iterator over the results of jobs, in their order, which computes the next ones ahead.

    Jobs are drawn by the thread that iterates, and run by one other thread, one after the other.
    The error of a job is raised in place of its result, and ends the iteration. If the iteration is
    abandoned, at most the job that is running is completed.

    Args:
        jobs: Functions that compute the results.
        ahead: Number of jobs that may run, or wait, ahead of the next result.
        count_wait: Function that takes the seconds that each result was waited for.
    """

    def __init__(
        self, jobs: Iterator[Callable[[], Item]], *, ahead: int, count_wait: Callable[[float], None]
    ) -> None:
        self._jobs, self._ahead, self._count_wait = jobs, ahead, count_wait
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
            self._count_wait(time.perf_counter() - start)
            self._refill()
        except BaseException:
            self._pending.clear()
            self._jobs = iter(())
            self._stop()
            raise
        return result

    def _refill(self) -> None:
        """Submit jobs until `ahead` of them are under way."""
        while len(self._pending) < self._ahead and (job := next(self._jobs, None)) is not None:
            self._pending.append(self._threads.submit(job))
