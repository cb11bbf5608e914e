"""What is known of one saved storage: where its bytes are, and who still needs them.

Autograd keeps *handles* (`SavedHandle`), one for each tensor that it saved. Several of them may be
views of one storage, and the bytes move once: they share a `Record`. The record is the unit of
transfer; the handle owns it, so that device, host and file bytes are freed when the last handle
dies, however the graph ended: by a backward pass, by being abandoned or by an exception.
"""

from __future__ import annotations

import enum
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from penstock.activations._version_counter import shares_version_counter
from penstock.errors import StoreError

if TYPE_CHECKING:
    from penstock.activations._policy import SavedEntry
    from penstock.activations._routes import Route

_NUMBERS = itertools.count()


class Activity(enum.Enum):
    """The transfer that a record is part of; at most one at a time."""

    IDLE = "idle"
    STORE_QUEUED = "store queued"
    STORING = "storing"
    LOAD_QUEUED = "load queued"
    LOADING = "loading"


class Record:
    """One saved storage. Every field is read and written under the engine's lock.

    `storage` is the strong reference that keeps the bytes in memory, `copy` the bytes that left
    (a route knows what it is). A record with neither does not exist: `copy` is complete before
    `storage` is dropped. `storage` may be a reloaded one, whose first byte lies `shift` bytes
    after its start, so that file and memory addresses agree in their alignment.
    """

    __slots__ = (
        "activity",
        "copy",
        "counted",
        "dead",
        "device",
        "entry",
        "epoch",
        "error",
        "filled",
        "key",
        "leaves",
        "num_bytes",
        "num_small_counted",
        "number",
        "offloadable",
        "origin",
        "prefetched",
        "probe",
        "ready",
        "reserved",
        "returned",
        "route",
        "shift",
        "small_bytes",
        "small_keys",
        "started",
        "storage",
        "unpacked",
        "version",
        "watches",
        "weak",
    )

    def __init__(
        self,
        tensor: torch.Tensor,
        storage: torch.UntypedStorage,
        *,
        route: Route | None,
        offloadable: bool,
        entry: SavedEntry,
    ) -> None:
        self.storage: torch.UntypedStorage | None = storage
        self.num_bytes = storage.nbytes()
        self.device = tensor.device
        self.route = route
        self.offloadable = offloadable
        self.entry = entry
        # An address names this storage only as long as the weak reference is alive.
        self.origin = weakref.ref(storage)
        self.key: int = storage._cdata
        self.weak = self.origin
        self.shift = 0
        self.version = tensor._version
        self.probe = version_probe(tensor)
        self.copy: Any = None
        self.ready: Any = None  # what the route must wait for before it may read the source
        self.activity = Activity.IDLE
        self.counted = False  # its bytes are in the ledger's device tier
        self.filled = True  # the operator that saved it, and may write to it, has run
        self.leaves = False  # the policy sends it out
        self.started = False  # its write has been started once
        self.returned = False  # counted as forwarded
        self.error: BaseException | None = None  # of a read for a thread that waits for it
        self.prefetched = False  # loaded ahead and not asked for yet
        self.dead = False
        self.number = next(_NUMBERS)
        self.watches: dict[int, HandleWatch] = {}  # of the living handles
        # Of a chunk of small storages: their addresses, what was saved so far, what of it is in the
        # totals, and whether they are in memory by themselves.
        self.small_keys: set[int] = set()
        self.small_bytes = self.num_small_counted = 0
        self.unpacked = False
        self.reserved = False  # room for what may still be saved in it
        self.epoch = 0  # rises when the storage goes or comes

    @property
    def num_small(self) -> int:
        """Small storages saved so far, of a chunk."""
        return len(self.small_keys)

    def describes(self, tensor: torch.Tensor) -> bool:
        """Whether the record's bytes are still what `tensor`, a view of the storage, shows."""
        return self.version == tensor._version and shares_version_counter(self.probe, tensor)

    def is_asked_for(self) -> bool:
        """Whether a living handle was unpacked since the storage came."""
        return any(watch.epoch == self.epoch for watch in self.watches.values())

    def is_served(self) -> bool:
        """Whether every living handle was unpacked since the storage came."""
        return all(watch.epoch == self.epoch for watch in self.watches.values())

    def promote(self) -> torch.UntypedStorage | None:
        """The storage, if something else still keeps it alive, else None."""
        storage = self.weak()
        if storage is None or storage.nbytes() < self.shift + self.num_bytes:
            return None
        return storage


class HandleWatch(weakref.ref[Any]):
    """Tells the engine when a handle dies, without running Python code in the dying.

    A `__del__` would swallow the KeyboardInterrupt that arrives during a long kernel, since the
    handle's death is often the first Python that runs after it. The callback is `put` of a
    `queue.SimpleQueue`, which is C and never waits.
    """

    __slots__ = ("epoch", "record")

    record: Record
    epoch: int  # of the record, when the handle was last unpacked


class SavedHandle:
    """What autograd keeps in place of one saved tensor.

    It holds how to look at the storage (dtype, shape, stride, offset) and a version probe, with
    which `check_version` finds the in-place changes that PyTorch does not look for once hooks
    are installed.
    """

    __slots__ = (
        "__weakref__",
        "conj",
        "dtype",
        "neg",
        "offset",
        "probe",
        "record",
        "shape",
        "stride",
        "version",
        "watch",
    )

    def __init__(
        self, record: Record, tensor: torch.Tensor, on_death: Callable[[HandleWatch], object]
    ) -> None:
        self.record = record
        self.probe = version_probe(tensor)
        self.version = tensor._version
        self.dtype = tensor.dtype
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.offset = tensor.storage_offset()
        self.conj = tensor.is_conj()
        self.neg = tensor.is_neg()
        self.watch = HandleWatch(self, on_death)
        self.watch.record = record
        self.watch.epoch = -1
        record.watches[id(self.watch)] = self.watch

    def check_version(self) -> None:
        """Raise, as stock autograd does, if the saved tensor was changed in place."""
        if self.probe._version != self.version:
            raise changed_in_place(self.probe._version, self.version, self.dtype, self.shape)

    def view(self, storage: torch.UntypedStorage, shift: int) -> torch.Tensor:
        """The saved tensor as a view of `storage`, whose bytes begin at `shift`."""
        if torch.is_inference_mode_enabled():  # its tensors have no version
            with torch.inference_mode(False):
                return self.view(storage, shift)
        tensor = torch.empty(0, dtype=self.dtype, device=self.record.device)
        offset = self.offset + shift // tensor.element_size()
        tensor.set_(storage, offset, self.shape, self.stride)  # type: ignore[call-overload]
        if self.conj:
            torch._C._set_conj(tensor, True)
        if self.neg:
            torch._C._set_neg(tensor, True)
        # It counts its in-place changes together with the tensor that was saved: a backward
        # function that changes it is found out when the next one asks for it.
        shared = self.probe.detach()
        shared.data = tensor
        return shared

    def view_in_child(self) -> torch.Tensor:
        """The saved tensor in a forked process, which has the memory of the fork and no store."""
        storage = self.record.storage
        if storage is None:
            raise not_in_child()
        return self.view(storage, self.record.shift)


def not_in_child() -> StoreError:
    """The error for saved tensors that are in the file of a forked process's parent."""
    return StoreError(
        "this process was forked from one that had offloaded this saved tensor, and the parent "
        "owns the store. Run the backward pass in the process that ran the forward pass, or fork "
        "before it."
    )


def version_probe(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that shares `tensor`'s version counter and none of its memory.

    `detach()` shares counter and storage; assigning to `.data` replaces the storage and keeps the
    counter. So an in-place change is seen long after the bytes have left and been freed.
    """
    probe = tensor.detach()
    probe.data = _nothing(tensor.dtype, tensor.device)
    return probe


def changed_in_place(
    found: int, expected: int, dtype: torch.dtype, shape: torch.Size | None
) -> RuntimeError:
    """Stock autograd's error for a saved tensor whose version is not the one it was saved at."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: [{dtype}, shape {None if shape is None else list(shape)}] is at version "
        f"{found}; expected version {expected} instead. Hint: replace the in-place operation on "
        "this tensor by an out-of-place one, or clone the tensor before it is changed."
    )


_EMPTY: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _nothing(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    empty = _EMPTY.get((dtype, device))
    if empty is None:
        empty = _EMPTY[dtype, device] = torch.empty(0, dtype=dtype, device=device)
    return empty
