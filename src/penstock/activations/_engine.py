"""Records of saved storages, from saving to death, under one lock.

The lock guards all records and everything that moves them. Transfers run without it, in worker
threads (`_transfers`): writers take the oldest saved storage first, readers what the backward pass
needs next; what it needs *now* is read by the thread that needs it. Every wait has a way out: it is
for transfers under way, never for a backward pass.
"""

from __future__ import annotations

import _thread
import logging
import threading
import time
import warnings
from collections.abc import Callable

import torch

from penstock.activations._account import DeviceAccount
from penstock.activations._budget import DeviceBudget
from penstock.activations._chunks import Chunk, SmallHandle, SmallSaves, unpack
from penstock.activations._policy import Limits, Policy
from penstock.activations._record import (
    Activity,
    DeferredSaves,
    HandleWatch,
    Record,
    RecordTable,
    SavedHandle,
)
from penstock.activations._routes import Route
from penstock.activations._steps import StepTracker
from penstock.activations._transfers import Callbacks, Changed, Reaper, RecordReads, RecordWrites
from penstock.compat.autograd import current_graph_task_id
from penstock.errors import PenstockError, StoreError, stacklevel_of_user
from penstock.memory import Ledger, deferred_signals, interruptible, uninterrupted

_logger = logging.getLogger(__name__)


class Engine:
    """Records, transfers and budget of one `Offload`.

    Args:
        ledger: Account of bytes and times.
        policy: Decides what leaves.
        limits: On bytes in memory and under way.

    Attributes:
        disowned: Whether this is a forked child: threads, locks and file are the parent's.
        small: Storages too small to move by themselves.
        file_route: Route of packed chunks; None where they stay.
    """

    def __init__(self, ledger: Ledger, policy: Policy, limits: Limits) -> None:
        self.limits = limits
        self.policy = policy
        self.steps = StepTracker(ledger, policy)
        self.totals = self.steps.totals
        self.disowned = False
        self.small = SmallSaves(self.open_chunk, self.use_chunk, self.reload_small)
        self.file_route: Route | None = None
        self._lock = threading.Lock()
        self._changed = Changed(self._lock)
        self._records = RecordTable()
        self._account = DeviceAccount(ledger)
        self._reaper = Reaper(self._lock, self._collect)
        self._busy: dict[int, Record] = {}  # in a transfer, dead or alive
        callbacks = Callbacks(self._changed, self._collect, self._fail)
        parts = callbacks, self.steps, self._account, self._busy
        self._writes = RecordWrites(*parts)
        self._reads = RecordReads(*parts, self._records, limits)
        self._budget = DeviceBudget(
            limits, self._account, self._writes, self._reads, self._wait_while
        )
        self._deferred = DeferredSaves()
        self._needs_audit = False  # an exception came out of nowhere: the sums may be wrong
        self._reported: PenstockError | None = None  # the error of the last warning
        self._parked = False  # outside `with`: threads end with the last record
        self._on_end: Callable[[], None] | None = None  # of an `Offload` that is gone

    @property
    def reason(self) -> str:
        """Reason for the policy's choice, and for what stayed in spite of it."""
        return self._budget.explain(self.policy.reason)

    # ------------------------------------------------------------------ saving

    @uninterrupted
    def save(self, tensor: torch.Tensor, route: Route | None, *, offloadable: bool) -> SavedHandle:
        """Register `tensor`, which autograd saves, and start its way out if the policy says so."""
        try:
            with self._lock:
                handle = self._save(tensor, route, offloadable)
        except BaseException:
            self._needs_audit = True
            raise
        self._warn_of_failure()
        return handle

    def _save(self, tensor: torch.Tensor, route: Route | None, offloadable: bool) -> SavedHandle:
        in_backward = current_graph_task_id() != -1
        storage = tensor.untyped_storage()
        num_bytes = storage.nbytes()
        self._collect()
        self._queue_deferred(storage._cdata)
        record = self._records.find(storage, tensor)
        leaves = False
        if record is None:
            self._begin_step_if_due(in_backward)
            if offloadable and not self._writes.error:
                leaves = self.policy.should_offload(num_bytes, in_backward) and (
                    num_bytes >= self.limits.min_bytes or self.policy.has_amount
                )
            self._budget.admit(num_bytes, limits_backlog=leaves and self.policy.limits_backlog)
            # Which may have waited without the lock, while another thread saved the same storage.
            record = self._records.find(storage, tensor)
        if record is None:
            record = self._register(tensor, storage, route, offloadable)
            record.leaves = leaves
            if leaves:
                self.steps.leaving_bytes += num_bytes
            if offloadable and self._deferred.concern(tensor, num_bytes):
                self._deferred.add(record)
            elif leaves:
                self._writes.put(record)
            if offloadable and not leaves:
                self._budget.kept[record.number] = record
        return SavedHandle(record, tensor, self._reaper.on_death)

    def _begin_step_if_due(self, in_backward: bool) -> None:
        if self.steps.begin_if_due(in_backward=in_backward, num_live=len(self._records)):
            deferred_signals.renew()

    def _queue_deferred(self, key: int | None = None) -> None:
        """Queue the writes that were deferred and are due, but for the storage `key`."""
        for record in self._deferred.take_due(key):
            if record.route is not None and record.ready is not None:
                record.ready = record.route.mark_again(record.ready)
            if record.leaves and record.is_kept() and not self._writes.error:
                self._writes.put(record)

    def _register(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        route: Route | None,
        offloadable: bool,
    ) -> Record:
        num_bytes = storage.nbytes()
        entry = self.steps.note_saved(num_bytes, offloadable=offloadable)
        record = Record(tensor, storage, route, offloadable, entry)
        if offloadable and route is not None:
            record.ready = route.mark(record.device)
        self._records.add(record)
        self.totals.saved_bytes += num_bytes
        self.totals.num_saved += 1
        self._account.add(record)
        self._reaper.start()
        return record

    # ------------------------------------------------------------ small storages

    @uninterrupted
    def open_chunk(self, tensor: torch.Tensor, last: Chunk | None) -> Chunk:
        """Return a chunk for `tensor` and what this thread saves next; its `last` one is full."""
        in_backward = current_graph_task_id() != -1
        with self._lock:
            self._collect()
            self._queue_deferred()
            if last is not None:
                self._close_chunk(last)
            self._begin_step_if_due(in_backward)
            self._budget.admit(self.limits.chunk_bytes, limits_backlog=False)
            route = self.file_route if tensor.is_cpu and self.limits.has_budget else None
            may_leave, empty = route is not None, torch.UntypedStorage(0)
            entry = self.steps.note_saved(0, offloadable=may_leave)
            record = Record(tensor, empty, route, may_leave, entry)
            record.storage, record.unpacked, record.filled = None, True, False
            self._records.add(record)
            self._budget.reserve(record)
            self._reaper.start()
            chunk = Chunk(record, self.limits.chunk_bytes, may_leave=may_leave)
            HandleWatch.add(chunk, record, self._reaper.on_death)
        return chunk

    def _count_small(self, record: Record) -> None:
        """Take what was saved in a chunk so far into the sums."""
        num_small = len(record.small_keys)
        if num_small == record.num_small_counted:
            return
        self.totals.saved_bytes += record.small_bytes - record.num_bytes
        self.totals.num_saved += num_small - record.num_small_counted
        self._account.remove(record)
        record.num_bytes = record.entry.num_bytes = record.small_bytes
        record.num_small_counted = num_small
        self._account.add(record)  # also of a dead one: it has been there, for the peak
        if not record.unpacked or record.dead:
            self._account.remove(record)

    def _close_chunk(self, chunk: Chunk) -> None:
        """End saving in a chunk: it may leave, when its last operator has run."""
        record = chunk.record
        self._budget.end_reservation(record)
        self._count_small(record)
        if record.offloadable and not record.filled and record.number not in self._budget.kept:
            self._budget.kept[record.number] = record
            self._deferred.add(record)

    @uninterrupted
    def use_chunk(self, chunk: Chunk) -> None:
        """Note that something of a chunk is needed: it is complete, and stays."""
        in_backward = current_graph_task_id() != -1
        with self._lock:
            self._collect()
            self._queue_deferred()
            self._close_chunk(chunk)
            chunk.used = True
            self.steps.note_used(chunk.record.entry, in_backward=in_backward)
            chunk.record.mark_served()
            if in_backward:
                self._reads.prefetch(chunk.record)

    @uninterrupted
    def reload_small(self, handle: SmallHandle) -> torch.Tensor:
        """Return the tensor of a handle whose chunk was packed; all of the chunk comes back."""
        record = handle.chunk.record
        in_backward = current_graph_task_id() != -1
        if self.disowned:
            record.require_storage()
        with self._lock:
            self._collect()
            self.steps.note_used(record.entry, in_backward=in_backward)
            if handle.alias is None:
                unpack(handle.chunk, self._reload(record), record.shift)
                self._account.set_prefetched(record, False)
                record.unpacked, record.storage = True, None
                record.epoch += 1
                record.mark_served()
                if in_backward:
                    self._reads.prefetch(record)
            assert handle.alias is not None
            return handle.alias

    # --------------------------------------------------------------- restoring

    @uninterrupted
    def restore(self, handle: SavedHandle) -> torch.Tensor:
        """Return the tensor that `handle` stands for, from wherever its bytes are.

        Raises:
            RuntimeError: It was changed in place since it was saved (as stock autograd).
            StoreError: Its bytes could not be read back.
        """
        handle.check_version()
        if self.disowned:
            return handle.restore(handle.record.require_storage(), handle.record.shift)
        in_backward = current_graph_task_id() != -1
        record = handle.record
        try:
            with self._lock:
                self._collect()
                self.steps.note_used(record.entry, in_backward=in_backward)
                self._queue_deferred()
                storage = self._reload(record)
                shift, ready = record.shift, record.ready
                self._account.serve(record, handle.watch)
                if in_backward:
                    self._reads.prefetch(record)
        except BaseException:
            self._needs_audit = True
            raise
        self._warn_of_failure()
        if ready is not None and record.route is not None:
            record.route.settle(ready, storage)
        return handle.restore(storage, shift)

    def _reload(self, record: Record) -> torch.UntypedStorage:
        """Return the record's storage: forwarded as it is or as another holds it, or read."""
        held = record.storage  # so that it is there when a write that we wait for has begun
        if record.activity is Activity.STORE_QUEUED:
            if self.policy.waits_for_writes and not self.steps.have_most_writes_started():
                self._wait_while(lambda: record.activity is Activity.STORE_QUEUED, "write")
            else:
                self._writes.cancel(record)
        while record.storage is None:
            if record.activity is Activity.LOADING:
                self._wait_while(lambda: record.activity is Activity.LOADING, "read")
            elif (storage := record.promote()) is not None:
                self._reads.cancel(record)
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
        """Read a record: the computation stands still until it is there."""
        start = time.perf_counter_ns()
        reserved = record.activity is Activity.LOAD_QUEUED
        try:
            record.activity = Activity.LOADING  # no other thread starts this read
            if not reserved:
                self._budget.make_room(record.num_bytes)
                self._account.add(record)
            self._reads.prefetch(record)
        except BaseException:
            record.activity = Activity.IDLE
            self._account.remove(record)
            self._changed.notify_all()
            raise
        try:
            self._reads.read_now(record)
        finally:
            self.steps.note_stall("read", start)

    # ----------------------------------------------------------------- failures

    def _fail(self, record: Record, error: BaseException) -> None:
        """Take an error of a thread's own code: count anew, and keep everything from now on."""
        _logger.error("an error in a thread of penstock.offload", exc_info=error)
        self._busy.pop(record.number, None)
        record.activity = Activity.IDLE
        record.error = error
        self._needs_audit = True
        self._writes.give_up(StoreError(f"a transfer failed: {error!r}"))
        self._changed.notify_all()

    def _warn_of_failure(self) -> None:
        """Warn of a write that has failed, in the thread that trains and without the lock."""
        error = self._writes.error
        if error is not self._reported:
            self._reported = error
            warnings.warn(
                f"penstock.offload: {error}. Saved activations stay in memory from now on.",
                RuntimeWarning,
                stacklevel=stacklevel_of_user(),
            )

    # -------------------------------------------------------- finalized handles

    def _collect(self) -> None:
        """Note the handles that have died, and free what no living handle needs."""
        if self._needs_audit:
            self._audit()
        for watch in self._reaper.dead():
            record = watch.record
            record.watches.pop(id(watch), None)
            if not record.watches:
                self._destroy(record)
            elif record.is_asked_for():
                self._account.drop_if_served(record)
        self._account.sweep()

    def _audit(self) -> None:
        """Make the sums right again after an exception in the middle of this class."""
        self._needs_audit = False
        for record in list(self._records):
            for key, watch in list(record.watches.items()):
                if watch() is None:
                    record.watches.pop(key, None)
            if not record.watches:
                self._destroy(record)
        records = [*self._records, *(record for record in self._busy.values() if record.dead)]
        self._writes.recount(records)
        self._account.recount(records)
        self._reads.resume()

    def _destroy(self, record: Record) -> None:
        if record.dead:
            return
        record.dead = True
        self._records.remove(record)
        self._budget.forget(record)
        if record.small_bytes:
            self._count_small(record)
        if record.activity is Activity.STORE_QUEUED:
            self._writes.cancel(record)
        self._reads.cancel(record)
        if record.activity is Activity.IDLE:  # else its transfer does this when it ends
            self._account.free(record)
        self.steps.note_released()
        if self._parked and not self._records:
            self._stop_threads()
        self._changed.notify_all()

    # ---------------------------------------------------------------- lifetime

    def _wait_while(self, condition: Callable[[], bool], reason: str) -> None:
        if not condition():
            return
        start = time.perf_counter_ns()
        try:
            while condition():
                self._changed.wait()
                self._collect()
        finally:
            self.steps.note_stall(reason, start)

    @uninterrupted
    def settle(self) -> None:
        """Note everything that has ended, the last step included."""
        if self.disowned:
            return
        with self._lock:
            self._collect()
            self._account.sweep(None)
            for chunk in self.small.open_chunks():
                self._count_small(chunk.record)
            if not self._records:
                self.steps.end()

    @uninterrupted
    def resume(self) -> None:
        """Enter the context: threads may stay."""
        if self.disowned:
            return
        with self._lock:
            self._parked = False
            # The last graph of an earlier block may have died since, and ended the watch.
            deferred_signals.watch(self)

    @uninterrupted
    def park(self) -> None:
        """Leave the context: threads end as soon as no saved tensor is alive."""
        if self.disowned:
            return
        with self._lock:
            self._collect()
            self._parked = True
            if not self._records:
                self._stop_threads()

    @uninterrupted
    def close(self) -> bool:
        """End the threads and wait for them; False if saved tensors are still alive."""
        if self.disowned:
            return True
        with self._lock:
            self._needs_audit = True  # the reaper may be about to queue a death
            self._collect()
            self._parked = True
            self._writes.cancel_all()
            self._reads.cancel_all()
            idle = not self._records
            threads = self._writes.workers.stop() + self._reads.stop()
            if idle:
                self._reaper.stop()
            deferred_signals.unwatch(self)  # last: from here on an exception may come
        _join(threads)
        return idle

    def abandon(self, on_end: Callable[[], None]) -> None:
        """End everything, and call `on_end` when no saved tensor is alive; for finalizers.

        They may run anywhere, also where this very thread holds a lock: a new one does the work,
        started by C without a lock of Python's.
        """
        if not self.disowned:
            _thread.start_new_thread(self._end, (on_end,))

    def _end(self, on_end: Callable[[], None]) -> None:
        with self._lock:
            self._on_end = on_end
        if self.close():
            self._run_on_end([])

    def _run_on_end(self, threads: list[threading.Thread]) -> None:
        """Call `on_end` once, after the transfers of dead records that `threads` are in."""
        _join(threads)
        with self._lock:
            on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def _stop_threads(self) -> None:
        self._reaper.stop()
        threads = self._writes.workers.stop() + self._reads.stop()
        if self._on_end is not None:
            _thread.start_new_thread(self._run_on_end, (threads,))
        deferred_signals.unwatch(self)  # last: from here on an exception may come

    def disown(self) -> None:
        """Give up threads and file in a forked child, where a missing thread may hold the lock."""
        self.disowned = True
        self.small.filling.clear()  # so that nothing is noted any more
        self._changed.renew()
        self._lock = self._changed.lock


@interruptible
def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()
