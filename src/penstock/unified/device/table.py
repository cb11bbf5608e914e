"""Tables as one GPU uses them: by kernels where CUDA has registered the memory, else by buffers.

Kernels on several streams use one memory, so each waits for those that would disturb it: a reader
for the writers before it, a writer for both. The cache of hot rows is used by one batch after the
other; it sees what this process writes to the table, not what others do.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import torch

from penstock.unified._devices import GPU, gather_threads, in_forked_child
from penstock.unified._row_index import as_index, index_error, resolve_index
from penstock.unified.device import _registration
from penstock.unified.device._registration import MemoryUse, StreamUses
from penstock.unified.device.hot_rows import HotRows, Lookup, RowCache

logger = logging.getLogger(__name__)

# Programs of an asynchronous gather: each has about 8 KiB in flight, so these fill PCIe 5 several
# times over, and leave most of a GPU's threads to the model. Not yet tuned on a device.
_ASYNC_PROGRAMS = 64
_BUFFER_BYTES = 8 * 2**20  # copied in one piece: long enough for a link's full speed

ReadRows = Callable[[torch.Tensor, torch.Tensor], None]
"""`read(index, out)`, both on the CPU, `out` contiguous."""


class DeviceTable:
    """A table for one device, thread-safe; made at the first gather there.

    Attributes:
        method: "triton" where the GPU reads the table's memory, "staged" where rows are gathered on
            the CPU and copied.
    """

    def __init__(
        self,
        device: torch.device,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        read_on_host: ReadRows,
        *,
        use: MemoryUse | None = None,
        hot_rows: HotRows | None = None,
    ) -> None:
        """Make a table on `device`; without `use` only the CPU can read it."""
        self._device, self._shape, self._dtype = device, shape, dtype
        self._read_on_host = read_on_host
        self._use = use
        self._lock = threading.RLock()
        self._staging = staging(device)
        self._registered = use if use is not None and use.register(device) else None
        self._alias: torch.Tensor | None = None
        self.method = "staged" if self._registered is None else "triton"
        self._unchecked: list[IndexCheck] = []
        self._cache: RowCache | None = None
        self._cache_use = StreamUses()
        if hot_rows is not None and shape[0]:
            version = 0 if use is None else use.rows._version
            self._cache = RowCache(hot_rows, shape, dtype, device, version=version)
            self._cache_use.record(self._current_stream())  # on which it is being zeroed
        if use is not None:
            use.device_tables.add(self)

    def count_hits(self) -> tuple[int, int]:
        """Return hits and misses of the cache so far; waits for the device."""
        return (0, 0) if self._cache is None else self._cache.count_hits()

    # ------------------------------------------------------------------- reads

    def read_rows(self, index: torch.Tensor, out: torch.Tensor, *, negative: bool) -> None:
        """Read rows: `out[i] = table[index[i]]`, launched on the current stream.

        For an index on the GPU the host waits until the rows are there, to raise if it was wrong.

        Raises:
            IndexError: An index is out of range; the message names it. `out` is then undefined.
        """
        self.raise_deferred()
        check = self._launch(index, out, negative, 0)
        if not self._is_capturing():  # the result of a captured check is not there yet
            check.raise_if_wrong()

    def start_read(self, index: torch.Tensor, stream: Any = None) -> PendingDeviceRows:
        """Start to read rows on a stream of its own, few programs at a time."""
        self.raise_deferred()
        if stream is None:
            stream = _side_stream(self._device)
        if index.device.type == GPU:
            stream.wait_stream(self._current_stream())  # which makes the index
            index.record_stream(stream)
        if self.method == "staged":
            # The index is made on this thread's stream, so it is copied here.
            index = index.cpu()
            launched = gather_threads(os.getpid()).submit(self._launch_on, stream, index)
        else:
            launched = Future()
            try:
                launched.set_result(self._launch_on(stream, index))
            except IndexError as error:  # for `wait` to raise, as everywhere
                launched.set_exception(error)
        return PendingDeviceRows(self, launched)

    def _launch_on(self, stream: Any, index: torch.Tensor) -> tuple[torch.Tensor, IndexCheck]:
        shape = (*index.shape, *self._shape[1:])
        with _stream_module(self._device).stream(stream):
            # Memory of this stream's pool: its earlier uses are on this stream, too.
            out = torch.empty(shape, dtype=self._dtype, device=self._device)
            check = self._launch(index, out, False, _ASYNC_PROGRAMS)
            check.copy_to_host(stream)
        return out, check

    def _launch(
        self, index: torch.Tensor, out: torch.Tensor, negative: bool, max_programs: int
    ) -> IndexCheck:
        num_rows = self._shape[0]
        given, index = index, as_index(index)
        out = out.view(index.numel(), *self._shape[1:])
        is_empty = not num_rows or not out.numel()  # of which the kernels check no index
        if self.method == "staged" or index.device.type == "cpu" or is_empty:
            index, negative = resolve_index(index.cpu(), num_rows, negative), False
        index = index.view(-1)
        first_wrong = None
        if index.device.type != "cpu":
            none_wrong = torch.iinfo(torch.int64).max
            first_wrong = torch.full((), none_wrong, dtype=torch.int64, device=self._device)
        if self._cache is None:
            self._fetch(index, out, None, negative, first_wrong, max_programs)
        elif index.numel():
            index = torch.where(index < 0, index + num_rows, index) if negative else index
            index = index.to(self._device, non_blocking=True)
            with self._locked_cache() as cache:
                self._read_cached(cache, index, out, first_wrong, max_programs)
        return IndexCheck(given, first_wrong, num_rows)

    def _fetch(
        self,
        index: torch.Tensor,
        out: torch.Tensor,
        places: torch.Tensor | None = None,
        negative: bool = False,
        first_wrong: torch.Tensor | None = None,
        max_programs: int = 0,
    ) -> None:
        """Read rows from the table's own memory or file, as `_rows.read_rows`."""
        use = self._registered
        if use is None:
            self._staging.read_rows(self._read_on_host, index.cpu(), out)
            return
        with self._ordered_launch(use, use.reads, after=(use.writes,)):
            _device_rows().read_rows(
                use.rows,
                index.to(self._device, non_blocking=True),
                out,
                places=places,
                negative=negative,
                first_wrong=first_wrong,
                max_programs=max_programs,
            )

    # ------------------------------------------------------------------- cache

    @contextlib.contextmanager
    def _locked_cache(self) -> Iterator[RowCache]:
        """Give the cache to one batch or change at a time, on the host and on the device."""
        assert self._cache is not None
        with self._lock:
            stream = self._current_stream()
            self._cache_use.make_wait(stream)
            if self._device.type == GPU:
                for tensor in self._cache.tensors:
                    tensor.record_stream(stream)
            yield self._cache
            self._cache_use.record(stream)

    def _read_cached(
        self,
        cache: RowCache,
        index: torch.Tensor,
        out: torch.Tensor,
        first_wrong: torch.Tensor | None,
        max_programs: int,
    ) -> None:
        version = 0 if self._use is None else self._use.rows._version
        if cache.version != version:  # written by an operation that refreshes no cache
            cache.clear()
            cache.version = version
        cache.fill(self._fetch)
        found = cache.look_up(index)
        if self._registered is None:
            self._read_staged_misses(cache, found, out)
        else:
            _device_rows().read_rows(cache.rows, found.slots, out, places=found.order)
            missed = torch.where(found.slots < 0, found.order, -1)
            self._fetch(found.rows, out, missed, False, first_wrong, max_programs)
        cache.admit(found, out)

    def _read_staged_misses(self, cache: RowCache, found: Lookup, out: torch.Tensor) -> None:
        """Read hits from the device; misses, each row once, by the CPU, which waits for them."""
        is_kept = found.slots >= 0
        is_fetched = found.is_first & ~is_kept
        rows = found.rows[is_fetched]
        fetched = torch.empty((len(rows), *out.shape[1:]), dtype=out.dtype, device=out.device)
        self._fetch(rows, fetched)
        batch = cache.rows[torch.where(is_kept, found.slots.long(), cache.capacity)]
        place = is_fetched.cumsum(0) - 1  # in `fetched`, for equal rows the same
        batch[~is_kept] = fetched[place[~is_kept]]
        out[found.order] = batch

    def refresh(self, index: torch.Tensor, before: int, after: int) -> None:
        """Refresh the cache after a write to the table; see `RowCache.refresh`."""
        if self._alias is not None:  # for autograd, which may have saved it
            torch.autograd.graph.increment_version(self._alias)
        # A forked child has no use for the cache, and other processes' caches see no writes anyway.
        if self._cache is not None and not in_forked_child():
            with self._locked_cache() as cache:
                cache.refresh(index, self._fetch, before=before, after=after)

    def clear_cache(self) -> None:
        """Drop all rows of the cache."""
        if self._cache is not None:
            with self._locked_cache() as cache:
                cache.clear()

    # ------------------------------------------------------------------ writes

    def can_write(self, dtype: torch.dtype | None) -> bool:
        """Return whether the GPU can write rows, and add numbers of `dtype` if one is given."""
        return self.method == "triton" and (dtype is None or _device_rows().can_add(dtype))

    def write_rows(
        self, index: torch.Tensor, source: torch.Tensor, *, alpha: float | None, negative: bool
    ) -> None:
        """Write or add rows by the GPU; see `Table`. The memory must be registered."""
        use = self._registered
        assert use is not None
        index, source = as_index(index).view(-1).to(self._device), source.to(self._device)
        with self._ordered_launch(use, use.writes, after=(use.reads, use.writes)):
            if alpha is None:
                _device_rows().write_rows(use.rows, index, source, negative=negative)
            else:
                _device_rows().add_rows(use.rows, index, source, alpha=alpha, negative=negative)

    @contextlib.contextmanager
    def _ordered_launch(
        self, use: MemoryUse, uses: StreamUses, *, after: tuple[StreamUses, ...]
    ) -> Iterator[None]:
        """Record the launches in this context as one of `uses`, after others on the device."""
        stream = self._current_stream()
        if self._is_capturing():
            _registration.captured.add(use.memory)
            yield
            return
        for each in after:
            each.make_wait(stream)
        yield
        uses.record(stream)

    def alias(self) -> torch.Tensor | None:
        """Return the table as a tensor on the GPU over the same memory; None if not registered."""
        if self._registered is None:
            return None
        if self._alias is None:
            self._registered.exported.add(self._device)
            content = _registration.make_alias(self._registered.memory, self._device)
            self._alias = content.view(self._dtype).view(self._shape)
        return self._alias

    @contextlib.contextmanager
    def alias_access(self, alias: torch.Tensor) -> Iterator[None]:
        """Order launches in this context that read the alias, or write to it."""
        use, version = self._registered, alias._version
        assert use is not None
        with self._ordered_launch(use, use.reads, after=(use.reads, use.writes)):
            yield
        if alias._version != version:
            use.writes.record(self._current_stream())
            torch.autograd.graph.increment_version(use.rows)

    # ------------------------------------------------------------------ checks

    def defer_check(self, check: IndexCheck) -> None:
        """Keep the check of a gather without a waiting host, for a later call to raise."""
        with self._lock:
            self._unchecked.append(check)

    def raise_deferred(self) -> None:
        """Raise IndexError for the first gather that has ended by now, if its index was wrong."""
        if self._unchecked:
            with self._lock:
                done = [check for check in self._unchecked if check.done()]
                self._unchecked = [check for check in self._unchecked if check not in done]
            for check in done:
                check.raise_if_wrong()

    def _is_capturing(self) -> bool:
        return self._device.type == GPU and torch.cuda.is_current_stream_capturing()

    def _current_stream(self) -> Any:
        return _stream_module(self._device).current_stream(self._device)


class IndexCheck:
    """The check of a gather's index, whose result comes later."""

    def __init__(
        self, index: torch.Tensor, first_wrong: torch.Tensor | None, num_rows: int
    ) -> None:
        self._index, self._first_wrong, self._num_rows = index, first_wrong, num_rows
        self._event: Any = None

    def copy_to_host(self, stream: Any) -> None:
        """Start to copy the result to the host, behind everything on `stream`."""
        if self._first_wrong is not None:
            pinned = self._first_wrong.device.type == GPU
            here = torch.empty((), dtype=torch.int64, pin_memory=pinned, device="cpu")
            self._first_wrong = here.copy_(self._first_wrong, non_blocking=True)
        self._event = stream.record_event()

    def done(self) -> bool:
        """Return whether the gather has ended."""
        return self._event is None or self._event.query()

    def make_wait(self, stream: Any) -> None:
        """Make `stream` wait for the gather."""
        if self._event is not None:
            stream.wait_event(self._event)

    def raise_if_wrong(self) -> None:
        """Wait for the result.

        Raises:
            IndexError: An index was out of range; the message names it.
        """
        if self._first_wrong is None:
            return
        if self._event is not None:
            self._event.synchronize()
        position = int(self._first_wrong)
        if position < self._index.numel():
            raise index_error(self._index, position, self._num_rows)


class PendingDeviceRows:
    """Rows on their way to a GPU; see `UnifiedTensor.gather_rows_async`."""

    def __init__(self, table: DeviceTable, launched: Future[Any]) -> None:
        self._table, self._launched = table, launched
        self._is_remembered = False

    def done(self) -> bool:
        """Return whether the rows are there."""
        return self._launched.done() and (
            self._launched.exception() is not None or self._launched.result()[1].done()
        )

    def result(self) -> torch.Tensor:
        """Make the current stream wait for the rows, and return them."""
        rows, check = self._launched.result()
        stream = self._table._current_stream()
        check.make_wait(stream)
        if rows.device.type == GPU:
            rows.record_stream(stream)
        if check.done():
            check.raise_if_wrong()
        elif not self._is_remembered:
            self._is_remembered = True
            self._table.defer_check(check)
        return rows


class Staging:
    """Two buffers of pinned memory for copies to one device; thread-safe.

    Used by tables that CUDA cannot read where they lie: those in files, and those in memory that it
    refused to register. While one buffer is on its way the other is filled.
    """

    def __init__(self, device: torch.device, *, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self._device = device
        self._buffer_bytes = buffer_bytes
        self._lock = threading.Lock()
        self._buffers: list[torch.Tensor] = []
        self._copied: list[Any] = [None, None]  # an event for each: its copy has ended
        self._turn = 0

    def read_rows(self, read: ReadRows, index: torch.Tensor, out: torch.Tensor) -> None:
        """Read rows: `out[i] = table[index[i]]`; copies are launched on the current stream.

        `index` has shape (n,), on the CPU; `out` has shape (n, *row), on the device, contiguous.
        """
        row_bytes = out.numel() // max(1, len(out)) * out.element_size()
        if not row_bytes:
            read(
                index, torch.empty(out.shape, dtype=out.dtype, device="cpu")
            )  # for its check of `index`
            return
        with self._lock:
            num_rows = max(1, self._buffer_bytes // row_bytes)
            for start in range(0, len(index), num_rows):
                part = index[start : start + num_rows]
                self._read_part(read, part, out[start : start + num_rows], row_bytes)

    def _read_part(
        self, read: ReadRows, index: torch.Tensor, out: torch.Tensor, row_bytes: int
    ) -> None:
        self._turn = 1 - self._turn
        if self._copied[self._turn] is not None:
            self._copied[self._turn].synchronize()
        num_bytes = len(index) * row_bytes
        if not self._buffers or self._buffers[self._turn].numel() < num_bytes:
            self._allocate(max(self._buffer_bytes, row_bytes))
        rows = self._buffers[self._turn][:num_bytes].view(out.dtype).view(out.shape)
        read(index, rows)
        out.copy_(rows, non_blocking=True)
        stream = _stream_module(self._device).current_stream(self._device)
        self._copied[self._turn] = stream.record_event()

    def _allocate(self, num_bytes: int) -> None:
        for event in self._copied:
            if event is not None:
                event.synchronize()
        pinned = self._device.type == GPU
        try:
            self._buffers = [
                torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned, device="cpu")
                for _ in range(2)
            ]
        except RuntimeError as error:
            logger.info("buffers for copies to %s are not pinned: %s", self._device, error)
            self._buffers = [
                torch.empty(num_bytes, dtype=torch.uint8, device="cpu") for _ in range(2)
            ]


@functools.cache
def staging(device: torch.device) -> Staging:
    """Return the buffers that all tables share for their copies to one device."""
    return Staging(device)


def _device_rows() -> Any:
    """Return the module that launches kernels; it imports Triton."""
    from penstock.unified.device import _rows

    return _rows


def _stream_module(device: torch.device) -> Any:
    """Return the module with the streams of a type of device."""
    return getattr(torch, device.type)


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """Return the stream on which all tables gather beside a model."""
    with torch.cuda.device(device) if device.type == GPU else contextlib.nullcontext():
        return _stream_module(device).Stream()
