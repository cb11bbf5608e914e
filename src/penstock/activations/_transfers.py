"""Transfers of records, by threads: writes in the order of saving, reads in the order of need.

Another thread, the reaper, hears of dead handles.

A record's `activity` changes only here, under the engine's lock:

    in memory --queue--> STORE_QUEUED --> STORING --> copied --release--> only the copy
                              |               |                              |
                              +---------------+---- restore: forwarded       +-- restore: read

Bytes move without the lock. They leave memory only when the whole copy exists.
"""

from __future__ import annotations

import dataclasses
import logging
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from penstock.activations._account import DeviceAccount
from penstock.activations._policy import Limits
from penstock.activations._record import Activity, HandleWatch, Record, RecordTable
from penstock.activations._routes import Declined
from penstock.activations._steps import StepTracker
from penstock.compat.threads import Thread
from penstock.errors import PenstockError, StoreError
from penstock.memory import interruptible

_logger = logging.getLogger(__name__)

_NUM_WRITERS = 2
_NUM_READERS = 2
_MAX_LOOK_AHEAD = 256  # records that one prefetch looks at


class Changed:
    """Condition on the engine's lock that an exception out of a signal handler leaves intact.

    Args:
        lock: C's, so that `with lock:` is never left between taking it and the block.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self.lock = lock
        self._waiting: deque[Any] = deque()

    def wait(self) -> None:
        """Release the lock, sleep until a notification, and take it again."""
        turn = threading.Lock()
        turn.acquire()
        self._waiting.append(turn)
        self.lock.release()
        try:
            _sleep(turn)
        finally:
            self.lock.acquire()

    def renew(self) -> None:
        """Replace the lock in a forked child: a thread that is not there may hold it."""
        self.lock = threading.Lock()
        self._waiting.clear()

    def notify(self) -> None:
        """Wake one thread, if any waits; with the lock held, and where only workers wait."""
        if self._waiting:
            self._waiting.pop().release()

    def notify_all(self) -> None:
        """Wake all that wait; with the lock held."""
        while self._waiting:
            self._waiting.popleft().release()


@interruptible
def _sleep(turn: Any) -> None:
    turn.acquire()


@dataclasses.dataclass(frozen=True)
class Callbacks:
    """Functions of the engine for its transfers, which call them with its lock held."""

    changed: Changed
    """Condition on the engine's lock."""
    collect: Callable[[], None]
    """Note dead handles, and free what no handle needs; before a thread goes to sleep, too."""
    fail: Callable[[Record, BaseException], None]
    """Take an error of a thread's own code, which should not be."""


class Workers:
    """Queue of records and the threads that work on it, all under the engine's lock.

    Args:
        callbacks: The engine's.
        move: Called with the lock held; releases it while bytes move. It has to look whether a
            queued record still needs the transfer: nothing is taken out of the queue.
        name: Part of the threads' names.
        num_threads: How many there are.
    """

    def __init__(
        self, callbacks: Callbacks, move: Callable[[Record], None], *, name: str, num_threads: int
    ) -> None:
        self.queue: deque[Record] = deque()
        self._lock = callbacks.changed.lock
        # Not the engine's condition: each of its changes would wake every idle thread.
        self._has_work = Changed(self._lock)
        self._callbacks = callbacks
        self._move = move
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
                Thread(
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
        self._has_work.notify()

    def resume(self) -> None:
        """Wake the threads for what is queued, as `put` may have been interrupted before it did."""
        if self.queue:
            self._has_work.notify_all()

    def stop(self) -> list[threading.Thread]:
        """Tell the threads to end after the transfer they are in.

        Returns:
            All that have not ended, to be joined: those that were told before, too.
        """
        self._stop[0] = True
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._has_work.notify_all()
        return list(self._threads)

    def _loop(self, stop: list[bool]) -> None:
        with self._lock:
            while self._stop is stop and not stop[0]:
                if self.queue:
                    record = self.queue.popleft()
                    try:
                        self._move(record)
                    except BaseException as error:  # the thread must live: others wait for it
                        self._callbacks.fail(record, error)
                    del record
                else:
                    self._callbacks.collect()  # which may queue something, or stop this thread
                    if not self.queue and not stop[0]:
                        self._has_work.wait()


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
            self._thread = Thread(
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


class RecordWrites:
    """Records on their way out.

    Attributes:
        backlog_bytes: Bytes of records that are queued or being written.
        error: The reason for which nothing is offloaded any more; None as long as writes succeed.
        refused: Living records that their route had no room for, by number.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        steps: StepTracker,
        account: DeviceAccount,
        busy: dict[int, Record],
    ) -> None:
        self.backlog_bytes = 0
        self.error: PenstockError | None = None
        self.refused: dict[int, Record] = {}
        self.refusal: Declined | None = None  # the last one
        self._changed, self._collect = callbacks.changed, callbacks.collect
        self._steps, self._account, self._busy = steps, account, busy
        self.workers = Workers(callbacks, self._write, name="write", num_threads=_NUM_WRITERS)

    def put(self, record: Record) -> None:
        """Queue the write of a record."""
        record.activity = Activity.STORE_QUEUED
        self.backlog_bytes += record.num_bytes
        self.workers.put(record)

    def cancel(self, record: Record) -> None:
        """Take back a write that has not begun; the queue keeps the record and passes it over."""
        record.activity = Activity.IDLE
        self.backlog_bytes -= record.num_bytes
        self._changed.notify_all()

    def cancel_all(self) -> None:
        """Take back all writes that have not begun."""
        for record in self.workers.queue:
            if record.activity is Activity.STORE_QUEUED:
                self.cancel(record)
        self.workers.queue.clear()

    def recount(self, records: Iterable[Record]) -> None:
        """Compute the backlog anew from the records, and go on with what is queued."""
        waiting = (Activity.STORE_QUEUED, Activity.STORING)
        self.backlog_bytes = sum(each.num_bytes for each in records if each.activity in waiting)
        self.workers.resume()

    def give_up(self, error: Exception) -> bool:
        """Keep everything from now on, as a write failed; its source is there, nothing is lost.

        Returns:
            Whether this is the first failure.
        """
        if self.error is not None:
            return False
        if not isinstance(error, PenstockError):
            error = StoreError(f"the store failed: {error!r}")
        self.error = error
        self.cancel_all()
        return True

    def _write(self, record: Record) -> None:
        """Copy a record out, then release its storage."""
        if record.activity is not Activity.STORE_QUEUED:
            return
        assert record.route is not None and record.storage is not None
        record.activity = Activity.STORING
        self._busy[record.number] = record
        if not record.started:
            record.started = True
            self._steps.note_started(record.num_bytes, record.num_storages)
        self._steps.writes.begin()
        route, storage, ready = record.route, record.storage, record.ready
        self._changed.lock.release()
        copy, error = None, None
        try:
            copy = route.store(storage, ready)
        except Exception as caught:
            error = caught
        finally:
            del storage
            self._changed.lock.acquire()
        self._busy.pop(record.number, None)
        self._steps.writes.end(record.num_bytes if copy is not None else 0)
        record.activity = Activity.IDLE
        self.backlog_bytes -= record.num_bytes
        if error is None:
            record.copy, record.ready = copy, None
            self._steps.totals.bytes_written += record.num_bytes
            self._release(record)
        elif isinstance(error, Declined):
            self._refuse(record, error)
        else:
            self.give_up(error)
        if record.dead:
            self._account.free(record)
        self._collect()
        self._changed.notify_all()

    def _refuse(self, record: Record, refusal: Declined) -> None:
        """Keep a record that its route has no room for."""
        self._steps.note_refused(record.num_bytes, record.num_storages, forwarded=record.returned)
        record.offloadable, record.started, self.refusal = False, False, refusal
        if not record.dead:
            self.refused[record.number] = record

    def _release(self, record: Record) -> None:
        """Release the storage of a complete copy, unless a backward pass has asked for it."""
        if record.is_asked_for():
            self._account.drop_if_served(record)
        else:
            record.storage = None
            record.entry.left = True
            self._account.remove(record)


class RecordReads:
    """Records on their way back.

    Attributes:
        num_loading: Reads under way.
    """

    def __init__(
        self,
        callbacks: Callbacks,
        steps: StepTracker,
        account: DeviceAccount,
        busy: dict[int, Record],
        records: RecordTable,
        limits: Limits,
    ) -> None:
        self.num_loading = 0
        self._changed, self._collect = callbacks.changed, callbacks.collect
        self._steps, self._account, self._busy = steps, account, busy
        self._records, self._limits = records, limits
        self.workers = Workers(callbacks, self._read, name="read", num_threads=_NUM_READERS)
        self.workers_now = Workers(callbacks, self._read, name="read-now", num_threads=1)

    def prefetch(self, record: Record) -> None:
        """Queue reads of what was saved before `record`, within the byte window and the budget."""
        for older in self._records.older_than(record, _MAX_LOOK_AHEAD):
            if older.copy is None or older.storage is not None or older.unpacked:
                continue
            if older.activity is not Activity.IDLE:
                continue
            if older.weak() is not None:
                continue  # something else keeps it in memory
            if not self._may_read_ahead(older.num_bytes):
                return
            older.activity = Activity.LOAD_QUEUED
            self._account.set_prefetched(older, True)
            self._account.add(older)
            self.workers.put(older)

    def _may_read_ahead(self, num_bytes: int) -> bool:
        """Return whether reads may run further ahead: the window, and what kept storages left."""
        ahead_bytes, resident_bytes = self._account.ahead_bytes, self._account.resident_bytes
        limit, window_bytes = self._limits.device_memory, self._limits.ahead_bytes
        if limit is not None and resident_bytes + num_bytes > limit:
            return False
        if not ahead_bytes or ahead_bytes + num_bytes <= window_bytes:
            return True
        return resident_bytes + num_bytes <= self._steps.policy.kept_bytes + window_bytes

    def read_now(self, record: Record) -> None:
        """Read a record, whose bytes are counted already, and return when it is there.

        The main thread has another one read, as signals come to the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            self._load(record)
            return
        record.activity = Activity.LOAD_QUEUED
        self._account.set_prefetched(record, True)
        self.workers_now.put(record)
        while record.activity in (Activity.LOAD_QUEUED, Activity.LOADING):
            self._changed.wait()
            self._collect()
        error, record.error = record.error, None
        if error is not None and record.storage is None:
            raise error

    def cancel(self, record: Record) -> None:
        """Take back a read that has not begun, if there is one."""
        if record.activity is Activity.LOAD_QUEUED:
            record.activity = Activity.IDLE
            self._account.set_prefetched(record, False)
            self._account.remove(record)
            self._changed.notify_all()

    def cancel_all(self) -> None:
        """Take back all reads that have not begun."""
        for workers in (self.workers, self.workers_now):
            for record in workers.queue:
                self.cancel(record)
            workers.queue.clear()

    def resume(self) -> None:
        """Go on with what is queued, as `Workers.resume` does."""
        self.workers.resume()
        self.workers_now.resume()

    def stop(self) -> list[threading.Thread]:
        """Tell the threads to end, as `Workers.stop` does."""
        return self.workers.stop() + self.workers_now.stop()

    def drop_prefetched(self) -> bool:
        """Drop or cancel the prefetched storage that is needed last; False if there is none."""
        while self._account.ahead:
            record = self._account.ahead[min(self._account.ahead)]
            if record.activity is Activity.LOAD_QUEUED:
                self.cancel(record)
                return True
            if record.storage is not None:
                self._account.drop(record)
                return True
            if record.activity is Activity.LOADING:
                return False
            self._account.set_prefetched(record, False)
        return False

    def _read(self, record: Record) -> None:
        """Read a queued record."""
        if record.activity is not Activity.LOAD_QUEUED:
            return
        record.activity = Activity.LOADING
        record.error = None
        try:
            self._load(record)
        except Exception as error:
            # The thread that needs the bytes gets it; where none waits yet, it reads again.
            record.error = error
            _logger.info("reading failed: %s", error)

    def _load(self, record: Record) -> None:
        assert record.route is not None and record.copy is not None
        route, copy, device = record.route, record.copy, record.device
        self._busy[record.number] = record
        self.num_loading += 1
        self._steps.reads.begin()
        self._changed.lock.release()
        loaded = None
        try:
            loaded = route.load(copy, device)
        finally:
            self._changed.lock.acquire()
            self._busy.pop(record.number, None)
            self.num_loading -= 1
            self._steps.reads.end(record.num_bytes if loaded else 0)
            record.activity = Activity.IDLE
            if loaded is not None:
                record.storage, record.shift, record.ready = loaded
                record.weak = weakref.ref(record.storage)
                record.epoch += 1
                record.returned = True  # it came back by being read
                self._steps.totals.bytes_read += record.num_bytes
            else:
                self._account.set_prefetched(record, False)
                self._account.remove(record)
            if record.dead:
                self._account.free(record)
            self._collect()
            self._changed.notify_all()
