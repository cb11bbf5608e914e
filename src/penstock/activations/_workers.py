"""Threads that carry records along one direction, started when there is work."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from penstock.activations._record import Record


class Workers:
    """A queue of records and the threads that work on it, all under the engine's lock.

    carry: called with the lock held; releases it while bytes move, raises nothing. Whether a
    queued record still wants the transfer is for `carry` to see: nothing is taken out of the queue.
    rest: called with the lock held before a thread goes to sleep.
    """

    def __init__(
        self,
        changed: threading.Condition,
        carry: Callable[[Record], None],
        rest: Callable[[], None],
        *,
        name: str,
        num_threads: int,
    ) -> None:
        self.queue: deque[Record] = deque()
        self._changed = changed
        self._carry = carry
        self._rest = rest
        self._name = name
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []
        self._stop: list[bool] = [True]  # one flag per set of threads, shared with them

    def put(self, record: Record) -> None:
        """Queue a record, starting the threads if there are none."""
        self.queue.append(record)
        if self._stop[0]:
            self._stop = [False]
            self._threads = [
                threading.Thread(
                    target=self._loop,
                    args=(self._stop,),
                    name=f"penstock-{self._name}-{index}",
                    daemon=True,
                )
                for index in range(self._num_threads)
            ]
            for thread in self._threads:
                thread.start()
        self._changed.notify_all()

    def stop(self) -> list[threading.Thread]:
        """Tell the threads to end after the transfer they are in; returns them, to be joined."""
        self._stop[0] = True
        threads, self._threads = self._threads, []
        self._changed.notify_all()
        return threads

    def _loop(self, stop: list[bool]) -> None:
        with self._changed:
            while not stop[0]:
                if self.queue:
                    self._carry(self.queue.popleft())
                else:
                    self._rest()
                    self._changed.wait()
