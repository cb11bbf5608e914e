"""The one place where saved bytes are accounted for and moved.

One lock guards all records. Transfers run without it, in worker threads: writers take the oldest
saved storage first, readers what the backward pass needs next; what it needs *now* is read by the
thread that needs it. A record changes state only here:

    in memory --queue--> STORE_QUEUED --> STORING --> copied --release--> only the copy
                              |               |                              |
                              +---------------+---- restore: forwarded       +-- restore: read

Every wait has a way out: it is for transfers under way, never for a backward pass. Bytes leave
memory only when the whole copy exists.
"""

from __future__ import annotations

import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable

import torch

from penstock.activations._account import DeviceAccount
from penstock.activations._deferred import DeferredSaves
from penstock.activations._policy import Policy
from penstock.activations._record import Activity, Record, SavedHandle
from penstock.activations._roster import Roster
from penstock.activations._routes import Declined, Route
from penstock.activations._steps import StepKeeper
from penstock.activations._workers import Reaper, Workers
from penstock.errors import CapacityError, PenstockError, StoreError
from penstock.memory import Ledger

logger = logging.getLogger(__name__)

_NUM_WRITERS = 2
_NUM_READERS = 2
_MAX_LOOK_AHEAD = 256  # records that one prefetch looks at


class Engine:
    """Records, queues and budgets of one `Offload`.

    device_memory: budget in bytes for saved storages on the device tier, or None.
    in_flight_bytes: how many bytes may wait for their write before saving blocks, where there is
    no budget. window_bytes: how far reads run ahead of the backward pass.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        policy: Policy,
        device_memory: int | None,
        in_flight_bytes: int,
        window_bytes: int,
    ) -> None:
        self.ledger = ledger
        self.policy = policy
        self.steps = StepKeeper(ledger, policy)
        self.totals = self.steps.totals
        self.disowned = False  # in a forked child: threads, locks and file are the parent's
        self.error: PenstockError | None = None  # why nothing is offloaded any more
        self._device_memory = device_memory
        self._in_flight_bytes = in_flight_bytes
        self._window_bytes = window_bytes
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._writers = Workers(
            self._changed, self._store, self._bury, name="write", num_threads=_NUM_WRITERS
        )
        self._readers = Workers(
            self._changed, self._load_ahead, self._bury, name="read", num_threads=_NUM_READERS
        )
        self._records = Roster()
        self._account = DeviceAccount(ledger)
        self._reaper = Reaper(self._lock, self._bury)
        self._suspect = False  # an exception came out of nowhere: the sums may be wrong
        self._unsaid: PenstockError | None = None
        self._deferred = DeferredSaves()
        self._backlog_bytes = 0  # in STORE_QUEUED and STORING
        self._num_loading = 0
        self._busy: dict[int, Record] = {}  # in a transfer, dead or alive
        self._parked = False  # outside `with`: threads end with the last record

    # ------------------------------------------------------------------ saving

    def save(self, tensor: torch.Tensor, route: Route | None, *, offloadable: bool) -> SavedHandle:
        """Register `tensor`, which autograd saves, and start its way out if the policy says so."""
        try:
            with self._lock:
                handle = self._save(tensor, route, offloadable)
        except BaseException:
            self._suspect = True
            raise
        self._say()
        return handle

    def _save(self, tensor: torch.Tensor, route: Route | None, offloadable: bool) -> SavedHandle:
        in_backward = torch._C._current_graph_task_id() != -1
        storage = tensor.untyped_storage()
        self._bury()
        record = self._records.find(storage, tensor)
        if record is None:
            self.steps.begin_if_due(in_backward=in_backward, num_live=len(self._records))
            num_bytes = storage.nbytes()
            leaves = offloadable and not self.error and self.policy.wants(num_bytes, in_backward)
            self._admit(num_bytes, leaves)
            record = self._register(tensor, storage, route, offloadable)
            if leaves:
                self.steps.leaving_bytes += num_bytes
                send = self._queue_store if tensor.requires_grad else self._deferred.add
                send(record)
        self._deferred.note_save()
        self._queue_deferred()
        return SavedHandle(record, tensor, self._reaper.on_death)

    def _queue_deferred(self, *, everything: bool = False) -> None:
        """Send what was deferred and is due, or all of it."""
        for record in self._deferred.due(everything=everything):
            if self._may_spill(record) and not self.error:
                self._queue_store(record)

    def _register(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        route: Route | None,
        offloadable: bool,
    ) -> Record:
        num_bytes = storage.nbytes()
        entry = self.steps.note_saved(num_bytes, offloadable=offloadable)
        record = Record(tensor, storage, route=route, offloadable=offloadable, entry=entry)
        if offloadable and route is not None:
            record.ready = route.mark(record.device)
        if self._records.add(record):  # else: changed in place since, and saved again
            self.totals.saved_bytes += num_bytes
            self.totals.num_saved += 1
        self._account.add(record)
        self._reaper.start()
        return record

    def _admit(self, num_bytes: int, leaves: bool) -> None:
        """Wait until a storage of `num_bytes` may become resident."""
        if self._device_memory is not None:
            self._make_room(num_bytes)
            if self.error is not None and self._over_budget(num_bytes):
                raise self._cannot_hold_budget(num_bytes)
        elif leaves and self.policy.learning:
            self._wait_while(
                lambda: 0 < self._backlog_bytes > self._in_flight_bytes - num_bytes, "write"
            )

    def _over_budget(self, num_bytes: int) -> bool:
        limit = self._device_memory
        return limit is not None and 0 < self._account.resident_bytes > limit - num_bytes

    def _make_room(self, num_bytes: int) -> None:
        """Bring the resident bytes down until `num_bytes` more keep within the device budget.

        Drops what was read too early, waits for transfers under way, sends what had been kept.
        Returns with the budget still exceeded where nothing more can leave.
        """
        while self._over_budget(num_bytes):
            if self._drop_prefetched():
                continue
            if self._backlog_bytes or self._num_loading:
                before = self._progress()
                self._wait_while(lambda before=before: before == self._progress(), "device budget")
            elif not self._spill_oldest():
                return

    def _progress(self) -> tuple[int, int, int]:
        return self._account.resident_bytes, self._backlog_bytes, self._num_loading

    def _cannot_hold_budget(self, num_bytes: int) -> CapacityError:
        return CapacityError(
            f"device_memory={self._device_memory}: {self._account.resident_bytes} bytes of saved "
            f"activations and {num_bytes} more do not fit, and the store takes no more of them "
            f"({self.error}). Free or enlarge the store, or raise device_memory."
        )

    def _spill_oldest(self) -> bool:
        """Queue the write of the oldest kept storage that no backward pass has asked for."""
        if not self.error:
            for record in self._records:
                if self._may_spill(record):
                    self._queue_store(record)
                    return True
        return False

    def _may_spill(self, record: Record) -> bool:
        """Whether the record is kept in memory only, and no backward pass has asked for it."""
        return (
            record.offloadable
            and record.storage is not None
            and record.copy is None
            and record.activity is Activity.IDLE
            and not record.is_asked_for()
        )

    def _queue_store(self, record: Record) -> None:
        record.activity = Activity.STORE_QUEUED
        self._backlog_bytes += record.num_bytes
        self._writers.put(record)

    # --------------------------------------------------------------- restoring

    def restore(self, handle: SavedHandle) -> torch.Tensor:
        """The tensor that `handle` stands for, from wherever its bytes are.

        Raises:
            RuntimeError: it was changed in place since it was saved (as stock autograd).
            StoreError: its bytes could not be read back.
        """
        handle.check_version()
        if self.disowned:
            return handle.view_in_child()
        in_backward = torch._C._current_graph_task_id() != -1
        record = handle.record
        try:
            with self._lock:
                self._bury()
                self.steps.note_used(record.entry, in_backward=in_backward)
                self._queue_deferred(everything=in_backward)
                storage = self._bring_back(record)
                shift, ready = record.shift, record.ready
                self._serve(record, handle)
                if in_backward:
                    self._prefetch(record)
        except BaseException:
            self._suspect = True
            raise
        self._say()
        if ready is not None and record.route is not None:
            record.route.settle(ready)
        return handle.view(storage, shift)

    def _bring_back(self, record: Record) -> torch.UntypedStorage:
        """The record's storage: as it is, from who else holds it, or read."""
        held = record.storage  # so that it is there when a write that we wait for has begun
        if record.activity is Activity.STORE_QUEUED:
            if self.policy.insists and not self.steps.most_has_left():
                self._wait_while(lambda: record.activity is Activity.STORE_QUEUED, "write")
            else:
                self._cancel_store(record)
        while record.storage is None:
            if record.activity is Activity.LOADING:
                self._wait_while(lambda: record.activity is Activity.LOADING, "read")
            elif (storage := record.promote()) is not None:
                self._cancel_load(record)
                record.storage = storage
                self._account.add(record)
            else:
                self._read_now(record)
        del held
        if record.started and not record.returned:
            record.returned = True
            self.totals.forwarded_bytes += record.num_bytes
        return record.storage

    def _read_now(self, record: Record) -> None:
        """Read the record in this thread: the computation stands still until it is there."""
        start = time.perf_counter_ns()
        reserved = record.activity is Activity.LOAD_QUEUED
        try:
            record.activity = Activity.LOADING  # nobody else starts this read
            if not reserved:
                self._make_room(record.num_bytes)
                self._account.add(record)
            self._prefetch(record)
        except BaseException:
            record.activity = Activity.IDLE
            self._account.remove(record)
            raise
        try:
            self._load(record)
        finally:
            self.steps.note_stall("read", start)

    def _load(self, record: Record) -> None:
        """Run the record's read without the lock; its bytes are counted already."""
        assert record.route is not None and record.copy is not None
        route, copy, device = record.route, record.copy, record.device
        self._busy[record.number] = record
        self._num_loading += 1
        self.steps.reads.begin()
        self._lock.release()
        loaded = None
        try:
            loaded = route.load(copy, device)
        finally:
            self._lock.acquire()
            self._busy.pop(record.number, None)
            self._num_loading -= 1
            self.steps.reads.end(record.num_bytes if loaded else 0)
            record.activity = Activity.IDLE
            if loaded is not None:
                record.storage, record.shift, record.ready = loaded
                record.weak = weakref.ref(record.storage)
                record.epoch += 1
                record.returned = True  # it came back by being read
                self.totals.bytes_read += record.num_bytes
            else:
                self._account.set_prefetched(record, False)
                self._account.remove(record)
            if record.dead:
                self._free(record)
            self._bury()
            self._changed.notify_all()

    def _serve(self, record: Record, handle: SavedHandle) -> None:
        """Note that `handle` was unpacked; the storage goes once every living handle was."""
        self._account.set_prefetched(record, False)
        handle.watch.epoch = record.epoch
        self._drop_if_served(record)

    def _drop_if_served(self, record: Record) -> None:
        if record.copy is not None and record.activity is Activity.IDLE and record.is_served():
            self._drop(record)

    def _drop(self, record: Record) -> None:
        """Give up the strong reference to a storage that has a copy.

        Autograd may still be using the tensor: its bytes stay counted until it is gone.
        """
        if record.storage is None:
            return
        if record.prefetched and record.route is not None:  # nobody has waited for its read
            record.route.settle(record.ready)
        self._account.set_prefetched(record, False)
        record.storage = None
        record.epoch += 1
        self._account.release(record)

    # ------------------------------------------------------------- prefetching

    def _prefetch(self, record: Record) -> None:
        """Queue reads of what was saved before `record`, within the byte window and the budget."""
        for older in self._records.older_than(record, _MAX_LOOK_AHEAD):
            if older.storage is not None or older.activity is not Activity.IDLE:
                continue
            if older.weak() is not None:
                continue  # it is in memory without our doing
            if not self._may_read_ahead(older.num_bytes):
                return
            older.activity = Activity.LOAD_QUEUED
            self._account.set_prefetched(older, True)
            self._account.add(older)
            self._readers.put(older)

    def _may_read_ahead(self, num_bytes: int) -> bool:
        """Whether reads may run further ahead: by the window, and into what kept storages left."""
        ahead_bytes, resident_bytes = self._account.ahead_bytes, self._account.resident_bytes
        if self._device_memory is not None and resident_bytes + num_bytes > self._device_memory:
            return False
        if not ahead_bytes or ahead_bytes + num_bytes <= self._window_bytes:
            return True
        return resident_bytes + num_bytes <= self.policy.kept_bytes + self._window_bytes

    def _load_ahead(self, record: Record) -> None:
        """A reader's turn with a queued record."""
        if record.activity is not Activity.LOAD_QUEUED:
            return
        record.activity = Activity.LOADING
        try:
            self._load(record)
        except Exception as error:
            # Whoever needs the bytes reads them again, and gets the error himself.
            logger.info("reading ahead failed: %s", error)

    def _drop_prefetched(self) -> bool:
        """Drop or cancel the prefetched storage that is needed last; False if there is none."""
        if self._account.ahead_bytes:
            for record in self._records:
                if record.prefetched and record.activity is Activity.LOAD_QUEUED:
                    self._cancel_load(record)
                    return True
                if record.prefetched and record.storage is not None:
                    self._drop(record)
                    return True
        return False

    def _cancel_load(self, record: Record) -> None:
        if record.activity is Activity.LOAD_QUEUED:
            record.activity = Activity.IDLE
            self._account.set_prefetched(record, False)
            self._account.remove(record)

    # ----------------------------------------------------------------- storing

    def _store(self, record: Record) -> None:
        """A writer's turn: copy the record out, then release its storage."""
        if record.activity is not Activity.STORE_QUEUED:
            return
        assert record.route is not None and record.storage is not None
        record.activity = Activity.STORING
        self._busy[record.number] = record
        if not record.started:
            record.started = True
            self.steps.note_started(record.num_bytes)
        self.steps.writes.begin()
        route, storage, ready = record.route, record.storage, record.ready
        self._lock.release()
        copy, error = None, None
        try:
            copy = route.store(storage, ready)
        except Exception as caught:
            error = caught
        finally:
            del storage
            self._lock.acquire()
        self._busy.pop(record.number, None)
        self.steps.writes.end(record.num_bytes if copy is not None else 0)
        record.activity = Activity.IDLE
        self._backlog_bytes -= record.num_bytes
        if error is None:
            record.copy, record.ready = copy, None
            self.totals.bytes_written += record.num_bytes
            self._release(record)
        elif isinstance(error, Declined):
            record.offloadable = False
        else:
            self._give_up(error)
        if record.dead:
            self._free(record)
        self._bury()
        self._changed.notify_all()

    def _release(self, record: Record) -> None:
        """The copy is complete: let the storage go, unless a backward pass has asked for it."""
        if record.is_asked_for():
            self._drop_if_served(record)
        else:
            record.storage = None
            record.entry.left = True
            self._account.remove(record)

    def _give_up(self, error: Exception) -> None:
        """A write failed: keep everything from now on. The source is there, nothing is lost."""
        if self.error is not None:
            return
        if not isinstance(error, PenstockError):
            error = StoreError(f"the store failed: {error!r}")
        self.error = error
        self._cancel_queued()
        self._unsaid = error

    def _say(self) -> None:
        """Warn of a write that has failed, in the thread that trains and without the lock."""
        if self._unsaid is not None:
            error, self._unsaid = self._unsaid, None
            warnings.warn(
                f"penstock.offload: {error}. Saved activations stay in memory from now on.",
                RuntimeWarning,
                stacklevel=4,
            )

    def _cancel_queued(self) -> None:
        for record in self._writers.queue:
            if record.activity is Activity.STORE_QUEUED:
                self._cancel_store(record)
        self._writers.queue.clear()

    def _cancel_store(self, record: Record) -> None:
        record.activity = Activity.IDLE
        self._backlog_bytes -= record.num_bytes
        self._changed.notify_all()

    # ------------------------------------------------------- handles and death

    def _bury(self) -> None:
        """Take note of the handles that have died, and free what nobody needs any more."""
        if self._suspect:
            self._audit()
        for watch in self._reaper.dead():
            record = watch.record
            record.watches.pop(id(watch), None)
            if not record.watches:
                self._destroy(record)
            elif record.is_asked_for():
                self._drop_if_served(record)
        self._account.sweep()

    def _audit(self) -> None:
        """Make the sums right again after an exception in the middle of this class."""
        self._suspect = False
        for record in list(self._records):
            for key, watch in list(record.watches.items()):
                if watch() is None:
                    record.watches.pop(key, None)
            if not record.watches:
                self._destroy(record)
        records = [*self._records, *(record for record in self._busy.values() if record.dead)]
        self._backlog_bytes = sum(
            record.num_bytes
            for record in records
            if record.activity in (Activity.STORE_QUEUED, Activity.STORING)
        )
        self._account.recount(records)

    def _destroy(self, record: Record) -> None:
        if record.dead:
            return
        record.dead = True
        self._records.remove(record)
        if record.activity is Activity.STORE_QUEUED:
            self._cancel_store(record)
        self._cancel_load(record)
        if record.activity is Activity.IDLE:  # else _store or _load does this when it ends
            self._free(record)
        self.steps.note_released()
        if self._parked and not self._records:
            self._stop_threads()
        self._changed.notify_all()

    def _free(self, record: Record) -> None:
        """Free a dead record's bytes in every tier."""
        if record.prefetched and record.route is not None:  # nobody has waited for its read
            record.route.settle(record.ready)
        self._account.set_prefetched(record, False)
        record.storage = None
        self._account.remove(record)
        copy, record.copy = record.copy, None
        if copy is not None and record.route is not None:
            record.route.discard(copy)

    # ---------------------------------------------------------------- lifetime

    def _wait_while(self, condition: Callable[[], bool], reason: str) -> None:
        if not condition():
            return
        start = time.perf_counter_ns()
        try:
            while condition():
                self._changed.wait()
                self._bury()
        finally:
            self.steps.note_stall(reason, start)

    def settle(self) -> None:
        """Take note of everything that has ended, the last step included."""
        if self.disowned:
            return
        with self._lock:
            self._bury()
            if not self._records:
                self.steps.end()

    def resume(self) -> None:
        """The context is entered: threads may stay."""
        if self.disowned:
            return
        with self._lock:
            self._parked = False

    def park(self) -> None:
        """The context was left: threads end as soon as no saved tensor is alive."""
        if self.disowned:
            return
        with self._lock:
            self._bury()
            self._parked = True
            if not self._records:
                self._stop_threads()

    def close(self) -> bool:
        """End the threads and wait for them; False if saved tensors are still alive."""
        if self.disowned:
            return True
        with self._lock:
            self._suspect = True  # the reaper may have a death in its hands
            self._bury()
            self._parked = True
            self._cancel_queued()
            for record in self._readers.queue:
                self._cancel_load(record)
            self._readers.queue.clear()
            idle = not self._records
            threads = self._writers.stop() + self._readers.stop()
            if idle:
                self._reaper.stop()
        for thread in threads:
            thread.join()
        return idle

    def _stop_threads(self) -> None:
        self._reaper.stop()
        self._writers.stop()
        self._readers.stop()

    def disown(self) -> None:
        """In a forked child: the lock may be held by a thread that is not there."""
        self.disowned = True
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
