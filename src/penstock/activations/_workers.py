"""The engine's threads: those that carry records, and the one that hears of dead handles."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from penstock.activations._record import HandleWatch, Record
from penstock.memory import interruptible


class Changed:
    """A condition on the engine's lock that an exception out of a signal handler leaves intact.

    lock: C's, so that `with lock:` is never left between taking it and the block.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock
        self._waiting: deque[Any] = deque()

    def wait(self) -> None:
        """Let go of the lock, sleep until the next `notify_all`, and take it again."""
        turn = threading.Lock()
        turn.acquire()
        self._waiting.append(turn)
        self.lock.release()
        try:
            _sleep(turn)
        finally:
            self.lock.acquire()

    def notify_all(self) -> None:
        """Wake all that wait; with the lock held."""
        while self._waiting:
            self._waiting.popleft().release()


@interruptible
def _sleep(turn: Any) -> None:
    turn.acquire()


class Workers:
    """A queue of records and the threads that work on it, all under the engine's lock.

    carry: called with the lock held; releases it while bytes move. Whether a queued record still
    wants the transfer is for `carry` to see: nothing is taken out of the queue.
    fail: called with the lock held and what `carry` has raised, which it should not.
    rest: called with the lock held before a thread goes to sleep.
    """

    def __init__(
        self,
        changed: Changed,
        carry: Callable[[Record], None],
        fail: Callable[[Record, BaseException], None],
        rest: Callable[[], None],
        *,
        name: str,
        num_threads: int,
    ) -> None:
        self.queue: deque[Record] = deque()
        self._changed = changed
        self._carry = carry
        self._fail = fail
        self._rest = rest
        self._name = name
        self._num_threads = num_threads
        self._threads: list[threading.Thread] = []  # also told to stop: it may be in a transfer
        self._stop: list[bool] = [True]  # one flag per set of threads, shared with them

    def put(self, record: Record) -> None:
        """Queue a record, starting the threads if there are none."""
        self.queue.append(record)
        if self._stop[0]:
            stop = [False]
            threads = [
                threading.Thread(
                    target=self._loop,
                    args=(stop,),
                    name=f"penstock-{self._name}-{index}",
                    daemon=True,
                )
                for index in range(self._num_threads)
            ]
            for thread in threads:
                thread.start()
            # Last: after an interrupt before it those that have started end, and others come.
            living = [thread for thread in self._threads if thread.is_alive()]
            self._threads, self._stop = living + threads, stop
        self._changed.notify_all()

    def stop(self) -> list[threading.Thread]:
        """Tell the threads to end after the transfer they are in.

        Returns all that have not ended, to be joined: those that were told before, too.
        """
        self._stop[0] = True
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._changed.notify_all()
        return list(self._threads)

    def _loop(self, stop: list[bool]) -> None:
        with self._changed.lock:
            while self._stop is stop and not stop[0]:
                if self.queue:
                    record = self.queue.popleft()
                    try:
                        self._carry(record)
                    except BaseException as error:  # the thread must live: others wait for it
                        self._fail(record, error)
                    del record
                else:
                    self._rest()  # which may queue something, or tell us to stop
                    if not self.queue and not stop[0]:
                        self._changed.wait()


class Reaper:
    """Hears of handles that die, and has them buried when nobody else calls the engine.

    bury: called with the lock held, to go through `dead`.
    """

    def __init__(self, lock: threading.Lock, bury: Callable[[], None]) -> None:
        self._lock = lock
        self._bury = bury
        self._stop: list[bool] = [True]
        self._thread: threading.Thread | None = None
        self._queue: queue.SimpleQueue[HandleWatch | None] = queue.SimpleQueue()  # None: look up

    @property
    def on_death(self) -> Callable[[HandleWatch], object]:
        """What a watch calls; written in C, and it never waits."""
        return self._queue.put

    def dead(self) -> Iterator[HandleWatch]:
        """The watches of the handles that have died since; with the lock held."""
        while not self._queue.empty():
            try:
                watch = self._queue.get_nowait()
            except queue.Empty:  # the thread, which takes them without the lock, was faster
                break
            if watch is not None:
                yield watch
        if self._stop[0]:
            self._queue.put(None)  # for the thread that is to end, if it has not

    def start(self) -> None:
        """Start the thread, if there is none; each has a queue of its own."""
        if self._stop[0]:
            self._stop, self._queue, self._thread = [False], queue.SimpleQueue(), None
        if self._thread is None or not self._thread.is_alive():  # an interrupt came before it ran
            self._thread = threading.Thread(
                target=self._loop,
                args=(self._stop, self._queue),
                name="penstock-reaper",
                daemon=True,
            )
            self._thread.start()

    def stop(self) -> None:
        """Let the thread end; no handle may be alive."""
        self._stop[0] = True
        self._queue.put(None)

    def _loop(self, stop: list[bool], dead: queue.SimpleQueue[HandleWatch | None]) -> None:
        while not stop[0]:
            watch = dead.get()
            with self._lock:
                if watch is not None:
                    dead.put(watch)
                del watch
                if not stop[0]:
                    self._bury()
