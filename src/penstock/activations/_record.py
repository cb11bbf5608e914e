"""Records: one for each saved storage, with the place of its bytes and the handles that need them.

Autograd keeps *handles* (`SavedHandle`), one for each tensor that it saved. Several of them may be
views of one storage, and the bytes move once: they share a `Record`. The record is the unit of
transfer; the handle owns it, so that device, host and file bytes are freed when the last handle
dies, however the graph ended: by a backward pass, by being abandoned or by an exception. A record
whose operator may not have run yet is deferred (`DeferredSaves`).
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from penstock.compat.autograd import next_sequence_number, set_lazy_bits
from penstock.compat.threads import watch_this_thread
from penstock.compat.version_counter import shares_version_counter
from penstock.errors import StoreError

if TYPE_CHECKING:
    from penstock.activations._policy import SavedEntry
    from penstock.activations._routes import Route

# How a tensor looks at its storage: offset, shape, stride, conjugate bit, negative bit.
View: TypeAlias = tuple[int, torch.Size, tuple[int, ...], bool, bool]


class Activity(enum.Enum):
    """The transfer that a record is part of; at most one at a time."""

    IDLE = "idle"
    STORE_QUEUED = "store queued"
    STORING = "storing"
    LOAD_QUEUED = "load queued"
    LOADING = "loading"


@dataclasses.dataclass(slots=True, eq=False)
class Record:
    """One saved storage. Every field is read and written under the engine's lock.

    `storage` is the strong reference that keeps the bytes in memory, `copy` the bytes that left, in
    whatever form the route gives them. A record with neither does not exist: `copy` is complete
    before `storage` is dropped. `storage` may be a reloaded one, whose first byte lies `shift`
    bytes after its start, so that file and memory addresses agree in their alignment.
    """

    tensor: dataclasses.InitVar[torch.Tensor]
    storage: torch.UntypedStorage | None
    route: Route | None
    offloadable: bool
    entry: SavedEntry
    num_bytes: int = dataclasses.field(init=False)
    num_storages: int = 1  # more where it is a chunk that was packed
    device: torch.device = dataclasses.field(init=False)
    # An address (`key`) names this storage only as long as the weak reference is alive.
    key: int = dataclasses.field(init=False)
    origin: weakref.ref[torch.UntypedStorage] = dataclasses.field(init=False)
    weak: weakref.ref[torch.UntypedStorage] = dataclasses.field(init=False)  # as it is now
    # A probe of each version counter of its tensors, and the version whose bytes it holds.
    versions: list[tuple[torch.Tensor, int]] = dataclasses.field(init=False)
    shift: int = 0
    copy: Any = None
    ready: Any = None  # what the route must wait for before it may read the source
    activity: Activity = Activity.IDLE
    counted: bool = False  # its bytes are in the ledger's device tier
    filled: bool = True  # the operator that saved it, and may write to it, has run
    leaves: bool = False  # the policy sends it out
    started: bool = False  # its write has been started once
    returned: bool = False  # counted as forwarded
    error: BaseException | None = None  # of a read for a thread that waits for it
    prefetched: bool = False  # loaded ahead and not asked for yet
    dead: bool = False
    number: int = dataclasses.field(default_factory=itertools.count().__next__)
    watches: dict[int, HandleWatch] = dataclasses.field(default_factory=dict)  # of living handles
    # Of a chunk of small storages: their addresses, what was saved so far, what of it is in the
    # totals, and whether they are in memory by themselves.
    small_keys: set[int] = dataclasses.field(default_factory=set)
    small_bytes: int = 0
    num_small_counted: int = 0
    unpacked: bool = False
    reserved: bool = False  # its full length is reserved on the device tier
    epoch: int = 0  # rises when the storage goes or comes

    def __post_init__(self, tensor: torch.Tensor) -> None:
        assert self.storage is not None
        self.num_bytes = self.storage.nbytes()
        self.device = tensor.device
        self.key = self.storage._cdata
        self.origin = self.weak = weakref.ref(self.storage)
        self.versions = [(version_probe(tensor), tensor._version)]

    def describes(self, tensor: torch.Tensor) -> bool:
        """Return whether the record's bytes are what `tensor`, a view of them, shows."""
        return any(
            version == tensor._version and shares_version_counter(probe, tensor)
            for probe, version in self.versions
        )

    def probe_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a probe of a tensor's version counter; several of its tensors share one."""
        for probe, _ in self.versions:
            if probe.dtype == tensor.dtype and shares_version_counter(probe, tensor):
                return probe
        return version_probe(tensor)

    def take(self, tensor: torch.Tensor) -> bool:
        """Take a part of the storage with a counter of its own, if no transfer has read the bytes.

        So are the gates of `LSTMCell`: computed in place, one after the other.
        """
        if self.storage is None or self.copy is not None or self.started:
            return False
        if any(shares_version_counter(probe, tensor) for probe, _ in self.versions):
            return False  # changed in place since
        if self.ready is not None and self.route is not None:
            ready = self.route.mark_part(self.ready, self.device)
            if ready is None:
                return False
            self.ready = ready
        self.versions.append((version_probe(tensor), tensor._version))
        return True

    def is_kept(self) -> bool:
        """Return whether it is in memory only, may leave, and no backward pass has asked for it."""
        return (
            self.offloadable
            and self.filled
            and (self.storage is not None or self.unpacked)
            and self.copy is None
            and not self.dead
            and self.activity is Activity.IDLE
            and not self.is_asked_for()
        )

    def is_asked_for(self) -> bool:
        """Return whether a living handle was unpacked since the storage came."""
        return any(watch.epoch == self.epoch for watch in self.watches.values())

    def is_served(self) -> bool:
        """Return whether every living handle was unpacked since the storage came."""
        return all(watch.epoch == self.epoch for watch in self.watches.values())

    def mark_served(self) -> None:
        """Count every living handle as unpacked since the storage came."""
        for watch in self.watches.values():
            watch.epoch = self.epoch

    def promote(self) -> torch.UntypedStorage | None:
        """Return the storage if something else still keeps it alive, else None."""
        storage = self.weak()
        if storage is None or storage.nbytes() < self.shift + self.num_bytes:
            return None
        return storage

    def require_storage(self) -> torch.UntypedStorage:
        """Return the storage in a forked process, whose parent owns the file.

        Raises:
            StoreError: The bytes are in the file.
        """
        if self.storage is None:
            raise StoreError(
                "this process was forked from one that had offloaded this saved tensor, and the "
                "parent owns the store. Run the backward pass in the process that ran the forward "
                "pass, or fork before it."
            )
        return self.storage


class RecordTable:
    """All living records, by storage and in the order of saving.

    Every change is a single operation on a dictionary.
    """

    def __init__(self) -> None:
        self._by_number: dict[int, Record] = {}  # numbers rise, so the order is that of saving
        self._by_storage: dict[int, Record] = {}

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[Record]:
        """Yield from the oldest to the newest; the table must not change meanwhile."""
        return iter(self._by_number.values())

    def find(self, storage: torch.UntypedStorage, tensor: torch.Tensor) -> Record | None:
        """Return the record that holds, or takes, what `tensor`, a view of `storage`, shows now."""
        record = self._by_storage.get(storage._cdata)
        if record is None or record.origin() is not storage:
            return None
        return record if record.describes(tensor) or record.take(tensor) else None

    def add(self, record: Record) -> None:
        """Add the newest record."""
        self._by_storage[record.key] = record
        self._by_number[record.number] = record

    def remove(self, record: Record) -> None:
        """Take a record out."""
        if self._by_storage.get(record.key) is record:
            del self._by_storage[record.key]
        self._by_number.pop(record.number, None)

    def older_than(self, record: Record, at_most: int) -> Iterator[Record]:
        """Yield what was saved before `record`, the newest first, `at_most` numbers back."""
        numbers: Sequence[int] = range(record.number - 1, record.number - 1 - at_most, -1)
        if len(self._by_number) < at_most:  # most numbers have no record any more
            living = sorted(self._by_number, reverse=True)
            numbers = [number for number in living if number in numbers]
        for number in numbers:
            older = self._by_number.get(number)
            if older is not None:
                yield older


class DeferredSaves:
    """Records whose bytes may not be there yet, by the thread that computes them.

    Operators save their inputs before they run, and a few (`rrelu`'s noise) fill one of them while
    they run without raising its version: its bytes are there only afterwards. What has a history of
    its own was computed by an operator that has run. Anything else waits for the same thread to
    record another operator: autograd numbers them, and one has run before the next one is recorded.
    Those of a thread that has ended have run, too.
    Parts that count their changes apart wait until something of another storage is saved.
    """

    def __init__(self) -> None:
        self._records: dict[int, list[Record]] = {}
        self._operators: dict[int, int] = {}  # that their thread was recording
        self._ended: dict[int, Callable[[], bool]] = {}  # of the thread: a new one may have its key

    @staticmethod
    def concern(tensor: torch.Tensor, num_bytes: int) -> bool:
        """Return whether the storage of a tensor, of `num_bytes`, may be written to yet."""
        is_part = not tensor._is_view() and tensor.nbytes < num_bytes  # of `unsafe_chunk`
        return is_part or not tensor.requires_grad

    def add(self, record: Record) -> None:
        """Defer what this thread is saving."""
        thread = threading.get_ident()
        record.filled = False
        self._ended[thread] = watch_this_thread()
        self._operators[thread] = next_sequence_number()
        self._records.setdefault(thread, []).append(record)

    def take_due(self, key: int | None = None) -> Iterator[Record]:
        """Take out what operators have filled that have run, but for the storage `key`.

        They are those of threads that have ended, and the earlier ones of this thread.
        """
        for thread in list(self._records):
            if not self._has_run(thread):
                continue
            records = self._records.pop(thread)
            waiting = [record for record in records if record.key == key]
            if waiting:
                self._records[thread] = waiting
            for record in records:
                if record.key != key:
                    record.filled = True
                    yield record

    def _has_run(self, thread: int) -> bool:
        """Return whether the operator that a thread was recording has run, as far as is known."""
        if thread == threading.get_ident() and self._operators[thread] != next_sequence_number():
            return True
        return self._ended[thread]()


class HandleWatch(weakref.ref[Any]):
    """Weak reference that tells of a handle's death, without running Python code in the dying.

    A `__del__` would swallow the KeyboardInterrupt that arrives during a long kernel, since the
    handle's death is often the first Python that runs after it. The callback is `put` of a
    `queue.SimpleQueue`, which is C and never waits.
    """

    __slots__ = ("epoch", "record")

    record: Record
    epoch: int  # of the record, when the handle was last unpacked

    @classmethod
    def add(
        cls, handle: object, record: Record, on_death: Callable[[HandleWatch], object]
    ) -> HandleWatch:
        """Watch a handle of a record; `on_death` is called with the watch."""
        watch = cls(handle, on_death)
        watch.record, watch.epoch = record, -1
        record.watches[id(watch)] = watch
        return watch


class SavedHandle:
    """Object that autograd keeps in place of one saved tensor.

    It holds the tensor's view of the storage, and a version probe with which `check_version` finds
    the in-place changes that PyTorch does not look for once hooks are installed.
    """

    __slots__ = ("__weakref__", "probe", "record", "version", "view", "watch")

    def __init__(
        self, record: Record, tensor: torch.Tensor, on_death: Callable[[HandleWatch], object]
    ) -> None:
        self.record = record
        self.probe = record.probe_of(tensor)
        self.version = tensor._version
        self.view = view_of(tensor)
        self.watch = HandleWatch.add(self, record, on_death)

    def check_version(self) -> None:
        """Raise, as stock autograd does, if the saved tensor was changed in place."""
        if self.probe._version != self.version:
            raise changed_in_place(
                self.probe._version, self.version, self.probe.dtype, self.view[1]
            )

    def restore(self, storage: torch.UntypedStorage, shift: int) -> torch.Tensor:
        """Return the saved tensor as a view of `storage`, whose bytes begin at `shift`."""
        if torch.is_inference_mode_enabled():  # its tensors have no version
            with torch.inference_mode(False):
                return restore_view(self.probe, storage, self.view, shift)
        return restore_view(self.probe, storage, self.view, shift)


def view_of(tensor: torch.Tensor) -> View:
    """Return how a tensor looks at its storage."""
    offset, shape, stride = tensor.storage_offset(), tensor.shape, tensor.stride()
    return offset, shape, stride, tensor.is_conj(), tensor.is_neg()  # pyright: ignore


def restore_view(
    probe: torch.Tensor, storage: torch.UntypedStorage, view: View, shift: int = 0
) -> torch.Tensor:
    """Return a view of `storage`, whose bytes begin at `shift`, with the probe's version counter.

    So it counts its in-place changes together with the tensor that was saved: a backward function
    that changes it is found out when the next one asks for it.
    """
    offset, shape, stride, conjugate, negative = view
    tensor = torch.empty(0, dtype=probe.dtype, device=probe.device)
    offset += shift // tensor.element_size()
    tensor.set_(storage, offset, shape, stride)  # type: ignore[call-overload]
    set_lazy_bits(tensor, conjugate=conjugate, negative=negative)
    shared = probe.detach()
    shared.data = tensor
    return shared


def version_probe(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that shares `tensor`'s version counter and none of its memory.

    `detach()` shares counter and storage; assigning to `.data` replaces the storage and keeps the
    counter. So an in-place change is seen long after the bytes have left and been freed.
    """
    probe = tensor.detach()
    probe.data = _empty(tensor.dtype, tensor.device)
    return probe


def changed_in_place(
    found: int, expected: int, dtype: torch.dtype, shape: torch.Size | None
) -> RuntimeError:
    """Return stock autograd's error for a tensor whose version is not the one it was saved at."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{dtype}, shape {None if shape is None else list(shape)}] is at version "
        f"{found}; expected version {expected} instead. Hint: replace the in-place operation on "
        "this tensor by an out-of-place one, or clone the tensor before it is changed."
    )


_EMPTY: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    empty = _EMPTY.get((dtype, device))
    if empty is None:
        empty = _EMPTY[dtype, device] = torch.empty(0, dtype=dtype, device=device)
    return empty
