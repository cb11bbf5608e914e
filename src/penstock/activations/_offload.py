"""`penstock.offload`: the context manager around any number of training steps, and its report."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import sys
import threading
import weakref
from typing import Literal

import torch

from penstock.activations._engine import Engine
from penstock.activations._hooks import Hooks, ModuleStorages
from penstock.activations._policy import AutoPolicy, Limits, Policy
from penstock.activations._routes import FileRoute, Route
from penstock.memory import (
    CachingAllocator,
    ExtentFile,
    FileStore,
    Ledger,
    Link,
    Tier,
    Timeline,
    Uncopied,
    deferred_signals,
    uninterrupted,
)
from penstock.tables import Report
from penstock.units import parse_bytes

# By device type how many bytes writes may lag behind, and reads run ahead of, the computation.
_AHEAD_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffloadReport(Report, title="penstock.offload"):
    """Account of an `Offload`, from its creation until `report()` was called.

    Sums run over all steps; a step is what is saved up to a backward pass, and that pass (a
    micro-batch of gradient accumulation is a step).
    """

    num_steps: int
    """Steps begun."""
    num_saved: int
    """Storages that autograd saved, without parameters, buffers and views of them; each once, and
    once more if it was saved again after a change in place."""
    num_kept: int
    """Those of them whose write was never started."""
    saved_bytes: int
    """Bytes of the `num_saved` storages."""
    offloaded_bytes: int
    """Bytes whose write was started, whether or not they were forwarded before it had ended."""
    bytes_written: int
    """Bytes whose write was completed."""
    forwarded_bytes: int
    """Offloaded bytes that were forwarded from memory, without a read."""
    bytes_read: int
    """Bytes read back; more than once where a graph is used more than once."""
    peak_device_bytes: int
    """Most saved bytes resident on the device tier at once, bytes in flight included."""
    peak_host_bytes: int
    """Most bytes of host memory that Penstock held at once."""
    peak_file_bytes: int
    """Most bytes in the file at once."""
    stall_seconds: float
    """Time for which the computation waited for a transfer."""
    policy: str
    """"all" or "auto"."""
    reason: str
    """Why the policy chose what it chose, and why some of that stayed, or why offloading stopped;
    and what kinds of saved tensors, such as sparse ones, stay whatever their size, and are in no
    number here."""
    device: str
    """Device type of the tensors that were offloaded: "cpu", "cuda", or "none"."""
    store: str | None
    """Directory of the file tier."""
    direct_io: bool | None
    """True if the file is read and written past the page cache; None without a file."""
    allocator: str
    """CPU allocator that served the tensors: "caching", or "stock" and why."""
    hooks: str
    """Language of the hooks for parameters and small tensors: "C++", or "Python", which is slower,
    where it cannot be built."""
    moved_bytes: dict[str, int]
    """Bytes moved per link."""


class Offload(Uncopied):
    """Context in which saved tensors leave the device tier; made by `penstock.offload`.

    It can be entered any number of times, one after the other, nested, and in several threads
    (PyTorch installs saved-tensor hooks per thread). Graphs outlive the block: what they saved
    comes back whenever their backward pass runs.
    """

    instead_of_copies = "several threads may use one; make others with penstock.offload"

    def __init__(
        self, store: FileStore | None, limits: Limits, policy: Policy, *, host_memory: int | None
    ) -> None:
        self._store = store
        self.ledger = Ledger()
        self._engine = Engine(self.ledger, policy, limits)
        self._modules = ModuleStorages()
        self._local = threading.local()
        self._lock = threading.Lock()
        self._num_entered = 0
        self._closed = False
        self._allocator_name = "stock"
        self._file = None if store is None else ExtentFile(store)
        self._routes = self._make_routes(host_memory)
        self._engine.file_route = self._routes.get("cpu")
        self._allocator = None if "cuda" in self._routes else CachingAllocator.instance()
        self._hooks = Hooks(self._engine, self._modules, self._routes)
        _ENGINES.add(self._engine)
        _OFFLOADS.add(self)
        # After it was garbage collected; its graphs may live on.
        close = functools.partial(_close, list(self._routes.values()))
        self._finalizer = weakref.finalize(self, self._engine.abandon, close)
        self._finalizer.atexit = False  # there `_close_all` is called

    def _make_routes(self, host_memory: int | None) -> dict[str, Route]:
        """Return the routes by the type of the device that storages leave."""
        routes: dict[str, Route] = {}
        if self._file is not None:
            routes["cpu"] = FileRoute(self._file, self.ledger, host_memory=host_memory)
        if self._file is not None and self._file.file_store.gpu_direct:
            from penstock.activations._cuda import GdsRoute

            routes["cuda"] = GdsRoute.for_cuda(self._file, self.ledger)
        elif torch.cuda.is_available():
            from penstock.activations._cuda import CudaCopies
            from penstock.activations._host_route import HostRoute

            routes["cuda"] = HostRoute(
                self.ledger, CudaCopies(), file=self._file, host_memory=host_memory
            )
        return routes

    # ----------------------------------------------------------------- context

    def __enter__(self) -> Offload:
        while True:
            deferred_signals.watch(self._engine)  # first: what follows is not to be interrupted
            try:
                self._enter()
            except BaseException:
                deferred_signals.deliver(sys._getframe(1))
                raise
            if not deferred_signals.pending:
                return self  # Python looks for no signal in between
            self._leave()
            deferred_signals.deliver(sys._getframe(1))  # which may raise

    def _enter(self) -> None:
        hooks = self._hooks.context()
        hooks.__enter__()  # first: PyTorch refuses where hooks are disabled
        try:
            with self._lock:
                if self._closed:
                    raise RuntimeError(
                        "this Offload is closed; make a new one with penstock.offload"
                    )
                if self._num_entered == 0:
                    self._start()
                self._num_entered += 1
        except BaseException:
            hooks.__exit__()
            raise
        if not hasattr(self._local, "entered"):
            self._local.entered = []
        self._local.entered.append(hooks)

    @uninterrupted
    def __exit__(self, *exception: object) -> None:
        self._leave(*exception)

    def _leave(self, *exception: object) -> None:
        entered = getattr(self._local, "entered", None)
        if not entered:
            raise RuntimeError(
                "this thread has not entered this Offload: use `with offload:`, which leaves it in "
                "the thread that has entered it"
            )
        entered.pop().__exit__(*exception)
        with self._lock:
            self._num_entered -= 1
            if self._num_entered == 0:
                self._stop()

    def _start(self) -> None:
        self._engine.resume()
        self._modules.watch()
        if self._allocator is not None:
            replaced = self._allocator.acquire()
            self._allocator_name = "caching" if replaced else f"stock: {self._allocator.reason}"

    def _stop(self) -> None:
        self._modules.unwatch()
        if self._allocator is not None:
            self._allocator.release()
        self._engine.park()  # last: signals may not be held back any more

    @uninterrupted
    def close(self) -> None:
        """End the transfers and close the file.

        Raises:
            RuntimeError: A graph that saved tensors here is still alive, or the block is not left.
        """
        if self._num_entered and not self._engine.disowned:
            raise RuntimeError(
                "Offload.close() inside its own `with` block: tensors saved afterwards would have "
                "nowhere to go. Leave the block first, in every thread."
            )
        if not self._engine.close():
            raise RuntimeError(
                "Offload.close(): a graph is still alive whose saved tensors are offloaded here. "
                "Run its backward pass, or delete the loss that holds it, and close again."
            )
        self._closed = True
        self._finalizer.detach()
        if not self._engine.disowned:
            _close(list(self._routes.values()))

    # ------------------------------------------------------------------ reports

    def report(self) -> OffloadReport:
        """Return what was saved, moved and waited for until now; inside and after the block."""
        self._engine.settle()
        totals, ledger, file = dataclasses.asdict(self._engine.totals), self.ledger, self._file
        policy, reason, kinds = self._engine.policy, self._engine.reason, self._hooks.kinds
        if kinds:
            reason += f"; uncounted, these kinds of tensors stay: {', '.join(kinds)}"
        return OffloadReport(
            num_kept=totals["num_saved"] - totals.pop("num_offloaded"),
            **totals,
            peak_device_bytes=ledger.peak(Tier.DEVICE),
            peak_host_bytes=ledger.peak(Tier.HOST),
            peak_file_bytes=ledger.peak(Tier.FILE),
            stall_seconds=ledger.stall_seconds,
            policy=policy.name,
            reason=reason,
            device=self._hooks.device,
            store=None if self._store is None else str(self._store.path),
            direct_io=None if file is None else file.direct,
            allocator=self._allocator_name,
            hooks=self._hooks.language,
            moved_bytes={link.value: ledger.moved(link) for link in Link if ledger.moved(link)},
        )

    def timeline(self) -> Timeline:
        """Return the bytes per tier over time, transfers and stalls of the last whole step."""
        self._engine.settle()
        return self.ledger.timeline("last")


def offload(
    store: str | os.PathLike[str] | FileStore | None = None,
    *,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    min_bytes: int | str = "1MiB",
    policy: Literal["auto", "all"] = "auto",
) -> Offload:
    """Train with saved activations in host memory or in a file, moved beside the computation.

    Example::

        with penstock.offload("/mnt/nvme") as offload:
            for batch in batches:
                model(batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        print(offload.report())

    Everything autograd saves for the backward pass, except parameters and buffers, may leave the
    device while the forward pass goes on, and is read back before the backward pass needs it:
    from GPU memory to pinned host memory, and from there to the file if `store` is given; on a
    machine without a GPU from RAM to the file. Gradients are bit for bit those without it.

    Args:
        store: A directory on a fast local disk, or a `penstock.memory.FileStore` with limits. One
            file without a name is created in it; it vanishes with the process.
        device_memory: Budget in bytes ("8GiB") for saved tensors on the device; saving waits
            rather than exceed it. Exceeded only by what cannot leave: a storage that is being
            saved, what the program itself holds, what one operator needs at once.
        host_memory: Budget in bytes for host memory that Penstock may hold.
        min_bytes: Smaller storages stay where they are, unless `device_memory` needs their room:
            then they leave too, the smallest packed together.
        policy: "all" sends out everything eligible; "auto" profiles the first step and keeps what
            could not be back in time, or as much as `device_memory` allows.

    Returns:
        A reusable context manager with `report()` and `timeline()`.

    Raises:
        ValueError: An argument is out of its range; no store on a machine without a GPU.
        StoreError: The store cannot be used, or, in a backward pass, bytes cannot be read.
        CapacityError: `device_memory` cannot be held because the store, or `host_memory`, is full.

    Source:
        SSDTrain (arXiv 2408.10013), sections III-A to III-D.
    """
    if policy not in ("auto", "all"):
        raise ValueError(f'policy={policy!r}: expected "auto" or "all"')
    limits = Limits(
        min_bytes=parse_bytes(min_bytes, name="min_bytes"),
        device_memory=_parse_optional(device_memory, "device_memory"),
        ahead_bytes=_AHEAD_BYTES["cuda" if torch.cuda.is_available() else "cpu"],
    )
    return Offload(
        _parse_store(store, limits),
        limits,
        AutoPolicy(limits) if policy == "auto" else Policy(),
        host_memory=_parse_optional(host_memory, "host_memory"),
    )


def _parse_optional(value: int | str | None, name: str) -> int | None:
    return None if value is None else parse_bytes(value, name=name)


def _parse_store(
    store: str | os.PathLike[str] | FileStore | None, limits: Limits
) -> FileStore | None:
    on_gpu = torch.cuda.is_available()
    if store is None and not on_gpu:
        raise ValueError(
            "store=None: this machine has no GPU, so saved tensors lie in RAM and can only leave "
            "to a file. Give a directory on a disk, for example "
            'penstock.offload("/mnt/nvme").'
        )
    if store is None:
        return None
    store = FileStore.of(store)
    if store.gpu_direct and not on_gpu:
        raise ValueError(
            "store: gpu_direct=True, but PyTorch sees no CUDA device here. Leave gpu_direct out: "
            "saved tensors lie in RAM and go to the file directly."
        )
    limit, least = store.max_bytes, limits.min_bytes
    if limit is not None and limit < least and not on_gpu and not limits.has_budget:
        raise ValueError(
            f"store: its max_bytes={limit} is below min_bytes={least}, so nothing could leave. "
            "Raise max_bytes of the FileStore, or lower min_bytes."
        )
    return store


def _close(routes: list[Route]) -> None:
    for route in routes:
        route.close()


_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()
_OFFLOADS: weakref.WeakSet[Offload] = weakref.WeakSet()


def _close_all() -> None:
    """Close all before the interpreter ends: no thread may still be in torch or in a write."""
    for engine in list(_ENGINES):
        engine.close()


def _disown_all() -> None:
    for engine in list(_ENGINES):
        engine.disown()
    for offload in list(_OFFLOADS):
        offload._lock = threading.Lock()  # a thread that is not here may hold it


deferred_signals.mark(Offload.__enter__, uninterrupted=True)
atexit.register(_close_all)
os.register_at_fork(after_in_child=_disown_all)
