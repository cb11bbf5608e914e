"""The thread that hears of dead handles."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

from penstock.activations._record import HandleWatch


class Reaper:
    """Queue of dead handles, and a thread that has them collected while the engine is not called.

    Args:
        lock: The engine's.
        collect: Called with the lock held, to go through `dead`.
    """

    def __init__(self, lock: threading.Lock, collect: Callable[[], None]) -> None:
        self._lock = lock
        self._collect = collect
        self._stop: list[bool] = [True]
        self._thread: threading.Thread | None = None
        self._queue: queue.SimpleQueue[HandleWatch | None] = queue.SimpleQueue()  # None: wake up

    @property
    def on_death(self) -> Callable[[HandleWatch], object]:
        """Callback of a watch; written in C, and it never waits."""
        return self._queue.put

    def dead(self) -> Iterator[HandleWatch]:
        """Yield the watches of the handles that have died since; with the lock held."""
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
                    self._collect()
