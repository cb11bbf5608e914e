"""Threads that work is handed to, which is done without them once Python starts no more."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class WorkerThreads(ThreadPoolExecutor):
    """An executor that outlives the main thread.

    Python takes no new work for threads of an executor once its main thread has ended, while other
    threads go on, and functions of `atexit` run: the caller does the work itself then.
    """

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Have a function called by a thread, or call it now where no thread takes it.

        Raises:
            RuntimeError: This executor was shut down.
        """
        try:
            return super().submit(function, *args, **kwargs)
        except RuntimeError:
            if self._shutdown:
                raise
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):  # an interrupt is the caller's
                raise
        return future
