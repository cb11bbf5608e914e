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

import _thread
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
from penstock.activations._record import (
    Activity,
    HandleWatch,
    Record,
    SavedHandle,
    not_in_child,
)
from penstock.activations._roster import Roster
from penstock.activations._routes import Declined, Route
from penstock.activations._small import (
    CHUNK_BYTES,
    Chunk,
    SmallHandle,
    SmallSaves,
    pack,
    unpack,
)
from penstock.activations._steps import StepKeeper
from penstock.activations._workers import Changed, Reaper, Workers
from penstock.errors import CapacityError, PenstockError, StoreError, stacklevel_of_user
from penstock.memory import Ledger, deferred_signals, interruptible, uninterrupted

logger = logging.getLogger(__name__)

_NUM_WRITERS = 2
_NUM_READERS = 2
_MAX_LOOK_AHEAD = 256  # records that one prefetch looks at


class Engine:
    """Records, queues and budgets of one `Offload`.

    device_memory: budget in bytes for saved storages on the device tier, or None.
    in_flight_bytes: how many bytes may wait for their write before saving blocks, where there is
    no budget. min_bytes: what is smaller leaves only where the budget demands it.
    window_bytes: how far reads run ahead of the backward pass.
    """

    def __init__(
        self,
        *,
        ledger: Ledger,
        policy: Policy,
        device_memory: int | None,
        min_bytes: int,
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
        self._min_bytes = min_bytes
        self.has_budget = device_memory is not None
        chunk_bytes = CHUNK_BYTES if device_memory is None else min(CHUNK_BYTES, device_memory // 4)
        self._chunk_bytes = chunk_bytes
        self.small_bytes = min(min_bytes, chunk_bytes)  # what is smaller goes to chunks
        self.small = SmallSaves(self.open_chunk, self.use_chunk, self.bring_back_small)
        self.file_route: Route | None = None  # by which packed chunks leave
        self._reserved_bytes = 0  # for chunks that are being filled
        self._spillable: dict[int, Record] = {}  # what is kept, by number
        self._in_flight_bytes = in_flight_bytes
        self._window_bytes = window_bytes
        self._lock = threading.Lock()
        self._changed = Changed(self._lock)
        self._writers = self._workers("write", self._store, _NUM_WRITERS)
        self._readers = self._workers("read", self._load_queued, _NUM_READERS)
        self._reader_now = self._workers("read-now", self._load_queued, 1)
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
        self._on_end: Callable[[], None] | None = None  # of an `Offload` that is gone

    def _workers(self, name: str, carry: Callable[[Record], None], num_threads: int) -> Workers:
        return Workers(
            self._changed, carry, self._fail, self._bury, name=name, num_threads=num_threads
        )

    # ------------------------------------------------------------------ saving

    @uninterrupted
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
        num_bytes = storage.nbytes()
        self._bury()
        self._queue_deferred()
        record = self._records.find(storage, tensor)
        leaves = False
        if record is None:
            if self.steps.begin_if_due(in_backward=in_backward, num_live=len(self._records)):
                deferred_signals.renew()
            leaves = offloadable and not self.error and self._wants(num_bytes, in_backward)
            self._admit(num_bytes, leaves)
            # Which may have waited without the lock, while another thread saved the same storage.
            record = self._records.find(storage, tensor)
        if record is None:
            record = self._register(tensor, storage, route, offloadable)
            record.leaves = leaves
            if leaves:
                self.steps.leaving_bytes += num_bytes
            if offloadable and not tensor.requires_grad:
                self._deferred.add(record)
            elif leaves:
                self._queue_store(record)
            if offloadable and not leaves:
                self._spillable[record.number] = record
        return SavedHandle(record, tensor, self._reaper.on_death)

    def _wants(self, num_bytes: int, in_backward: bool) -> bool:
        wanted = self.policy.wants(num_bytes, in_backward)
        return wanted and (num_bytes >= self._min_bytes or self.policy.planned)

    def _queue_deferred(self) -> None:
        """Send what was deferred and is due."""
        for record in self._deferred.due():
            if record.route is not None and record.ready is not None:
                record.ready = record.route.mark_again(record.ready)
            if record.leaves and self._may_spill(record) and not self.error:
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
        held_bytes = self._account.resident_bytes + self._reserved_bytes
        return limit is not None and 0 < held_bytes > limit - num_bytes

    def _make_room(self, num_bytes: int) -> None:
        """Bring the resident bytes down until `num_bytes` more keep within the device budget.

        Drops what was read too early, waits for transfers under way, sends what had been kept.
        Returns with the budget still exceeded where nothing more can leave.
        """
        if self._over_budget(num_bytes):
            self._account.sweep(None)
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
        if self.error:
            return False
        found, over = None, []
        for number, record in self._spillable.items():
            if self._may_spill(record):
                over.append(number)
                if not record.unpacked or self._pack(record):
                    found = record
                    break
            elif record.filled and record.activity is Activity.IDLE:
                over.append(number)  # dead, asked for, declined: not again
        for number in over:
            del self._spillable[number]
        if found is not None:
            self._queue_store(found)
        return found is not None

    def _may_spill(self, record: Record) -> bool:
        """Whether the record is kept in memory only, and no backward pass has asked for it."""
        return (
            record.offloadable
            and record.filled
            and (record.storage is not None or record.unpacked)
            and record.copy is None
            and not record.dead
            and record.activity is Activity.IDLE
            and not record.is_asked_for()
        )

    def _queue_store(self, record: Record) -> None:
        record.activity = Activity.STORE_QUEUED
        self._backlog_bytes += record.num_bytes
        self._writers.put(record)

    # ------------------------------------------------------------ small storages

    @uninterrupted
    def open_chunk(self, tensor: torch.Tensor, last: Chunk | None) -> Chunk:
        """A chunk for what this thread saves next, `tensor` first; its `last` one is full."""
        in_backward = torch._C._current_graph_task_id() != -1
        with self._lock:
            self._bury()
            self._queue_deferred()
            if last is not None:
                self._close_chunk(last)
            if self.steps.begin_if_due(in_backward=in_backward, num_live=len(self._records)):
                deferred_signals.renew()
            self._admit(self._chunk_bytes, leaves=False)
            route = self.file_route if tensor.is_cpu and self.has_budget else None
            nothing = torch.UntypedStorage(0)
            entry = self.steps.note_saved(0, offloadable=route is not None)
            record = Record(
                tensor, nothing, route=route, offloadable=route is not None, entry=entry
            )
            record.storage, record.unpacked, record.filled = None, True, False
            self._records.add(record)
            self._reserved_bytes += self._chunk_bytes
            record.reserved = True
            self._reaper.start()
            chunk = Chunk(record, self._chunk_bytes, may_leave=route is not None)
            watch = HandleWatch(chunk, self._reaper.on_death)
            watch.record, watch.epoch = record, -1
            record.watches[id(watch)] = watch
        return chunk

    def _count_small(self, record: Record, *, still_open: bool) -> None:
        """Take a chunk's bytes into the sums: so far, or for good."""
        num_bytes, num_small = record.small_bytes, record.num_small
        if record.reserved and not still_open:
            record.reserved = False
            self._reserved_bytes -= self._chunk_bytes
        if num_small == record.num_small_counted:
            return
        self.totals.saved_bytes += num_bytes - record.num_bytes
        self.totals.num_saved += num_small - record.num_small_counted
        self._account.remove(record)
        record.num_bytes = record.entry.num_bytes = num_bytes
        record.num_small_counted = num_small
        if record.unpacked and not record.dead:
            self._account.add(record)
        else:
            self._account.add(record)
            self._account.remove(record)

    def _close_chunk(self, chunk: Chunk) -> None:
        """No more is saved in a chunk: it may leave, when its last operator has run."""
        record = chunk.record
        self._count_small(record, still_open=False)
        if record.offloadable and not record.filled and record.number not in self._spillable:
            self._spillable[record.number] = record
            self._deferred.add(record)

    @uninterrupted
    def use_chunk(self, chunk: Chunk) -> None:
        """Something of a chunk is needed: it is complete, and stays."""
        in_backward = torch._C._current_graph_task_id() != -1
        with self._lock:
            self._bury()
            self._queue_deferred()
            self._close_chunk(chunk)
            chunk.used = True
            self.steps.note_used(chunk.record.entry, in_backward=in_backward)
            for watch in chunk.record.watches.values():
                watch.epoch = chunk.record.epoch
            if in_backward:
                self._prefetch(chunk.record)

    def _pack(self, record: Record) -> bool:
        """Bring a chunk into one storage, which can leave; False if there is nothing in it."""
        chunk = next((found for watch in record.watches.values() if (found := watch())), None)
        storage = None if chunk is None else pack(chunk)
        if storage is None:
            return False
        self._account.remove(record)
        record.num_bytes = storage.nbytes()
        record.storage, record.unpacked, record.shift = storage, False, 0
        record.weak = weakref.ref(storage)
        self._account.add(record)
        return True

    @uninterrupted
    def bring_back_small(self, handle: SmallHandle) -> torch.Tensor:
        """The tensor of a handle whose chunk was packed, with all others of the chunk."""
        record = handle.chunk.record
        in_backward = torch._C._current_graph_task_id() != -1
        if self.disowned and record.storage is None:
            raise not_in_child()
        with self._lock:
            self._bury()
            self.steps.note_used(record.entry, in_backward=in_backward)
            if handle.alias is None:
                storage = self._bring_back(record)
                unpack(handle.chunk, storage, record.shift)
                self._account.set_prefetched(record, False)
                record.unpacked, record.storage = True, None
                record.epoch += 1
                for watch in record.watches.values():
                    watch.epoch = record.epoch
                if in_backward:
                    self._prefetch(record)
            assert handle.alias is not None
            return handle.alias

    # --------------------------------------------------------------- restoring

    @uninterrupted
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
                self._queue_deferred()
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
            record.route.settle(ready, storage)
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
            if threading.current_thread() is threading.main_thread():
                self._load_elsewhere(record)
            else:
                self._load(record)
        finally:
            self.steps.note_stall("read", start)

    def _load_elsewhere(self, record: Record) -> None:
        """Have another thread read, as signals come to this one, and wait for it."""
        record.activity = Activity.LOAD_QUEUED
        self._account.set_prefetched(record, True)
        self._reader_now.put(record)
        while record.activity in (Activity.LOAD_QUEUED, Activity.LOADING):
            self._changed.wait()
            self._bury()
        error, record.error = record.error, None
        if error is not None and record.storage is None:
            raise error

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
        if record.storage is None or record.unpacked:
            return
        if record.prefetched and record.route is not None:  # nobody has waited for its read
            record.route.settle(record.ready, record.storage)
        self._account.set_prefetched(record, False)
        record.storage = None
        record.epoch += 1
        self._account.release(record)

    # ------------------------------------------------------------- prefetching

    def _prefetch(self, record: Record) -> None:
        """Queue reads of what was saved before `record`, within the byte window and the budget."""
        for older in self._records.older_than(record, _MAX_LOOK_AHEAD):
            if older.copy is None or older.storage is not None or older.unpacked:
                continue
            if older.activity is not Activity.IDLE:
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

    def _load_queued(self, record: Record) -> None:
        """A reader's turn with a queued record."""
        if record.activity is not Activity.LOAD_QUEUED:
            return
        record.activity = Activity.LOADING
        record.error = None
        try:
            self._load(record)
        except Exception as error:
            # The thread that needs the bytes gets it; where none waits yet, it reads again.
            record.error = error
            logger.info("reading failed: %s", error)

    def _drop_prefetched(self) -> bool:
        """Drop or cancel the prefetched storage that is needed last; False if there is none."""
        while self._account.ahead:
            record = self._account.ahead[min(self._account.ahead)]
            if record.activity is Activity.LOAD_QUEUED:
                self._cancel_load(record)
                return True
            if record.storage is not None:
                self._drop(record)
                return True
            if record.activity is Activity.LOADING:
                return False
            self._account.set_prefetched(record, False)
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

    def _fail(self, record: Record, error: BaseException) -> None:
        """A worker has failed in its own code: count anew, and keep everything from now on."""
        logger.error("an error in a thread of penstock.offload", exc_info=error)
        self._busy.pop(record.number, None)
        record.activity = Activity.IDLE
        record.error = error
        self._suspect = True
        self._give_up(StoreError(f"a transfer failed: {error!r}"))
        self._changed.notify_all()

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
                stacklevel=stacklevel_of_user(),
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
        self._spillable.pop(record.number, None)
        if record.small_bytes:
            self._count_small(record, still_open=False)
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
            record.route.settle(record.ready, record.storage)
        self._account.set_prefetched(record, False)
        record.storage = None
        self._account.remove(record)
        self._account.end_use(record)
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

    @uninterrupted
    def settle(self) -> None:
        """Take note of everything that has ended, the last step included."""
        if self.disowned:
            return
        with self._lock:
            self._bury()
            self._account.sweep(None)
            for chunk in self.small.open_chunks():
                self._count_small(chunk.record, still_open=True)
            if not self._records:
                self.steps.end()

    @uninterrupted
    def resume(self) -> None:
        """The context is entered: threads may stay."""
        if self.disowned:
            return
        with self._lock:
            self._parked = False
            # The last graph of an earlier block may have died since, and ended the watch.
            deferred_signals.watch(self)

    @uninterrupted
    def park(self) -> None:
        """The context was left: threads end as soon as no saved tensor is alive."""
        if self.disowned:
            return
        with self._lock:
            self._bury()
            self._parked = True
            if not self._records:
                self._stop_threads()

    @uninterrupted
    def close(self) -> bool:
        """End the threads and wait for them; False if saved tensors are still alive."""
        if self.disowned:
            return True
        with self._lock:
            self._suspect = True  # the reaper may have a death in its hands
            self._bury()
            self._parked = True
            self._cancel_queued()
            for readers in (self._readers, self._reader_now):
                for record in readers.queue:
                    self._cancel_load(record)
                readers.queue.clear()
            idle = not self._records
            threads = self._stop_workers()
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

    def _stop_workers(self) -> list[threading.Thread]:
        workers = (self._writers, self._readers, self._reader_now)
        return [thread for each in workers for thread in each.stop()]

    def _stop_threads(self) -> None:
        self._reaper.stop()
        threads = self._stop_workers()
        if self._on_end is not None:
            _thread.start_new_thread(self._run_on_end, (threads,))
        deferred_signals.unwatch(self)  # last: from here on an exception may come

    def disown(self) -> None:
        """In a forked child: the lock may be held by a thread that is not there."""
        self.disowned = True
        self.small.filling.clear()  # so that nothing is noted any more
        self._lock = threading.Lock()
        self._changed = Changed(self._lock)


@interruptible
def _join(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.join()
