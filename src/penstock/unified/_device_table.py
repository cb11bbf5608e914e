"""A table as one GPU uses it: by its own kernels where CUDA knows the memory, else through buffers.

Kernels on several streams use one memory, so each waits for those that would disturb it: a reader
for the writers before it, a writer for both. The cache of hot rows is used by one batch after the
other; it sees what this process writes to the table, not what others do.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from penstock.unified import _registration
from penstock.unified._devices import GPU, in_forked_child
from penstock.unified._host_memory import TableMemory
from penstock.unified._host_rows import as_index, checked_index, out_of_range
from penstock.unified._hot_rows import HotRows, Lookup, RowCache
from penstock.unified._registration import InFlight, Registration
from penstock.unified._staging import GatherHere, staging

# Of a gather beside a model: each has about 8 KiB in flight, so these fill PCIe 5 several times
# over, and leave most of a GPU's threads free. Not yet tuned on a device.
_PROGRAMS_BESIDE_A_MODEL = 64


class TableUse:
    """What all tables over one memory share, on all devices."""

    def __init__(self, rows: torch.Tensor, memory: TableMemory) -> None:
        self.rows = rows
        self.memory = memory
        self.registration: Registration | None = None
        self.seen_by: weakref.WeakSet[DeviceTable] = weakref.WeakSet()

    def register(self, device: torch.device) -> Registration | None:
        """See `_registration.register`."""
        self.registration = _registration.register(self.memory, device)
        return self.registration

    def settle(self, *, to_write: bool = False) -> None:
        """Wait until the CPU may read the memory, or write to it."""
        registration = self.registration
        if registration is not None:
            registration.writes.wait()
            if to_write:
                registration.reads.wait()

    def changed(self, index: torch.Tensor, before: int) -> None:
        """Rows were written, the version of the memory having been `before`."""
        torch.autograd.graph.increment_version(self.rows)
        for table in list(self.seen_by):
            table.refresh(index, before, self.rows._version)


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
        gather_here: GatherHere,
        *,
        use: TableUse | None = None,
        hot_rows: HotRows | None = None,
    ) -> None:
        """A table on `device`; without `use` it is one that only the CPU can read."""
        self._device, self._shape, self._dtype = device, shape, dtype
        self._gather_here = gather_here
        self._use = use
        self._lock = threading.RLock()
        self._staging = staging(device)
        self._registration = None if use is None else use.register(device)
        self._alias: torch.Tensor | None = None
        self.method = "staged" if self._registration is None else "triton"
        self._unchecked: list[Check] = []
        self._cache: RowCache | None = None
        self._cache_use = InFlight()
        if hot_rows is not None and shape[0]:
            version = 0 if use is None else use.rows._version
            self._cache = RowCache(hot_rows, shape, dtype, device, version=version)
            self._cache_use.note(self._current_stream())  # on which it is being zeroed
        if use is not None:
            use.seen_by.add(self)

    def cache_report(self) -> tuple[int, int]:
        """Hits and misses of the cache so far; waits for the device."""
        return (0, 0) if self._cache is None else self._cache.counted()

    # ------------------------------------------------------------------- reads

    def gather(self, index: torch.Tensor, out: torch.Tensor, *, negative: bool) -> None:
        """`out[i] = table[index[i]]`, launched on the current stream.

        For an index on the GPU the host waits until the rows are there, to raise if it was wrong.

        Raises:
            IndexError: an index is out of range; the message names it. `out` is then undefined.
        """
        self.raise_for_earlier()
        check = self._launch(index, out, negative, 0)
        if not self._is_capturing():  # nobody can look at what a graph will find out
            check.raise_if_wrong()

    def begin(self, index: torch.Tensor, stream: Any = None) -> PendingDeviceRows:
        """Begin to gather rows on a stream of its own, few programs at a time."""
        self.raise_for_earlier()
        if stream is None:
            stream = _side_stream(self._device)
        if index.device.type == GPU:
            stream.wait_stream(self._current_stream())  # which makes the index
            index.record_stream(stream)
        if self.method == "staged":
            # The index is made on this thread's stream, so it is copied here.
            index = index.cpu()
            return PendingDeviceRows(
                self, _threads().submit(self._launch_on, stream, index), self._device
            )
        launched: Future[Any] = Future()
        try:
            launched.set_result(self._launch_on(stream, index))
        except IndexError as error:  # for `wait` to raise, as everywhere
            launched.set_exception(error)
        return PendingDeviceRows(self, launched, self._device)

    def _launch_on(self, stream: Any, index: torch.Tensor) -> tuple[torch.Tensor, Check]:
        shape = (*index.shape, *self._shape[1:])
        with _streams(self._device).stream(stream):
            # Memory of this stream's pool: whoever used it before is not in the way.
            out = torch.empty(shape, dtype=self._dtype, device=self._device)
            check = self._launch(index, out, False, _PROGRAMS_BESIDE_A_MODEL)
            check.follow(stream)
        return out, check

    def _launch(
        self, index: torch.Tensor, out: torch.Tensor, negative: bool, max_programs: int
    ) -> Check:
        num_rows = self._shape[0]
        given, index = index, as_index(index)
        out = out.view(index.numel(), *self._shape[1:])
        if self.method == "staged" or index.device.type == "cpu":
            index, negative = checked_index(index.cpu(), num_rows, negative), False
        index = index.view(-1)
        first_wrong = None
        if index.device.type != "cpu":
            from penstock.unified._device_rows import NONE_WRONG

            first_wrong = torch.full((), NONE_WRONG, dtype=torch.int64, device=self._device)
        if self._cache is None:
            self._fetch(index, out, None, negative, first_wrong, max_programs)
        elif index.numel():
            index = torch.where(index < 0, index + num_rows, index) if negative else index
            index = index.to(self._device, non_blocking=True)
            with self._cached() as cache:
                self._gather_cached(cache, index, out, first_wrong, max_programs)
        return Check(given, first_wrong, num_rows)

    def _fetch(
        self,
        index: torch.Tensor,
        out: torch.Tensor,
        places: torch.Tensor | None = None,
        negative: bool = False,
        first_wrong: torch.Tensor | None = None,
        max_programs: int = 0,
    ) -> None:
        """Rows from where the table lies, as `_device_rows.gather_rows`."""
        if self._registration is None:
            self._staging.gather(self._gather_here, index.cpu(), out)
            return
        from penstock.unified._device_rows import gather_rows

        assert self._use is not None
        with self._launching(self._registration.reads, after=(self._registration.writes,)):
            gather_rows(
                self._use.rows,
                index.to(self._device, non_blocking=True),
                out,
                places=places,
                negative=negative,
                first_wrong=first_wrong,
                max_programs=max_programs,
            )

    # ------------------------------------------------------------------- cache

    @contextlib.contextmanager
    def _cached(self) -> Iterator[RowCache]:
        """The cache, for one batch or change at a time, on the host and on the device."""
        assert self._cache is not None
        with self._lock:
            stream = self._current_stream()
            self._cache_use.order(stream)
            if self._device.type == GPU:
                for tensor in self._cache.tensors:
                    tensor.record_stream(stream)
            yield self._cache
            self._cache_use.note(stream)

    def _gather_cached(
        self,
        cache: RowCache,
        index: torch.Tensor,
        out: torch.Tensor,
        first_wrong: torch.Tensor | None,
        max_programs: int,
    ) -> None:
        version = 0 if self._use is None else self._use.rows._version
        if cache.version != version:  # written by an operation that knows of no cache
            cache.clear()
            cache.version = version
        cache.fill(self._fetch)
        found = cache.look_up(index)
        if self._registration is None:
            self._gather_misses_here(cache, found, out)
        else:
            from penstock.unified._device_rows import gather_rows

            gather_rows(cache.rows, found.slots, out, places=found.order)
            missed = torch.where(found.slots < 0, found.order, -1)
            self._fetch(found.rows, out, missed, False, first_wrong, max_programs)
        cache.admit(found, out)

    def _gather_misses_here(self, cache: RowCache, found: Lookup, out: torch.Tensor) -> None:
        """Hits from the device; misses, each row once, by the CPU, which waits for their names."""
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
        """Rows of the table were written; see `RowCache.refresh`."""
        if self._alias is not None:  # for autograd, which may have saved it
            torch.autograd.graph.increment_version(self._alias)
        # A forked child has no use for the cache, and other processes' caches see no writes anyway.
        if self._cache is not None and not in_forked_child():
            with self._cached() as cache:
                cache.refresh(index, self._fetch, before=before, after=after)

    def forget(self) -> None:
        """Drop what the cache keeps."""
        if self._cache is not None:
            with self._cached() as cache:
                cache.clear()

    # ------------------------------------------------------------------ writes

    def put(self, index: torch.Tensor, source: torch.Tensor, *, negative: bool) -> None:
        """`table[index[i]] = source[i]` by the GPU; the memory must be registered."""
        from penstock.unified._device_rows import put_rows

        with self._writing() as rows:
            put_rows(rows, self._index_here(index), source.to(self._device), negative=negative)

    def add(
        self, index: torch.Tensor, source: torch.Tensor, *, alpha: float, negative: bool
    ) -> None:
        """`table[index[i]] += alpha * source[i]` by the GPU; the memory must be registered."""
        from penstock.unified._device_rows import add_rows

        with self._writing() as rows:
            index, source = self._index_here(index), source.to(self._device)
            add_rows(rows, index, source, alpha=alpha, negative=negative)

    def adds(self, dtype: torch.dtype) -> bool:
        """Whether `add` can add numbers of this dtype."""
        from penstock.unified._device_rows import adds

        return adds(dtype)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[torch.Tensor]:
        assert self._registration is not None and self._use is not None
        use = self._registration
        with self._launching(use.writes, after=(use.reads, use.writes)):
            yield self._use.rows

    @contextlib.contextmanager
    def _launching(self, uses: InFlight, *, after: tuple[InFlight, ...]) -> Iterator[None]:
        """What is launched here is one of `uses`, and comes after others on the device."""
        assert self._use is not None
        stream = self._current_stream()
        if self._is_capturing():
            _registration.keep_for_graph(self._use.memory)
            yield
            return
        for each in after:
            each.order(stream)
        yield
        uses.note(stream)

    def alias(self) -> torch.Tensor | None:
        """The table as a tensor on the GPU over the same memory; None if it cannot be had."""
        if self._registration is None:
            return None
        if self._alias is None:
            assert self._use is not None
            memory = self._use.memory
            content = _registration.alias(memory, self._registration, self._device)
            self._alias = content.view(self._dtype).view(self._shape)
        return self._alias

    @contextlib.contextmanager
    def using_alias(self, alias: torch.Tensor) -> Iterator[None]:
        """What is launched here may read the alias, and write to it."""
        assert self._registration is not None and self._use is not None
        use, version = self._registration, alias._version
        with self._launching(use.reads, after=(use.reads, use.writes)):
            yield
        if alias._version != version:
            use.writes.note(self._current_stream())
            torch.autograd.graph.increment_version(self._use.rows)

    # ------------------------------------------------------------------ checks

    def remember(self, check: Check) -> None:
        """Have a later call raise for a gather that nobody waits for."""
        with self._lock:
            self._unchecked.append(check)

    def raise_for_earlier(self) -> None:
        """Raise IndexError for the first gather that has ended by now, if its index was wrong."""
        if self._unchecked:
            with self._lock:
                done = [check for check in self._unchecked if check.done()]
                self._unchecked = [check for check in self._unchecked if check not in done]
            for check in done:
                check.raise_if_wrong()

    def _index_here(self, index: torch.Tensor) -> torch.Tensor:
        return as_index(index).view(-1).to(self._device)

    def _is_capturing(self) -> bool:
        return self._device.type == GPU and torch.cuda.is_current_stream_capturing()

    def _current_stream(self) -> Any:
        return _streams(self._device).current_stream(self._device)


class Check:
    """What a gather finds out about its index, later."""

    def __init__(
        self, index: torch.Tensor, first_wrong: torch.Tensor | None, num_rows: int
    ) -> None:
        self._index, self._first_wrong, self._num_rows = index, first_wrong, num_rows
        self._event: Any = None

    def follow(self, stream: Any) -> None:
        """Copy the result to the host, and know when everything on `stream` has ended."""
        if self._first_wrong is not None:
            pinned = self._first_wrong.device.type == GPU
            here = torch.empty((), dtype=torch.int64, pin_memory=pinned)
            self._first_wrong = here.copy_(self._first_wrong, non_blocking=True)
        self._event = stream.record_event()

    def done(self) -> bool:
        """Whether the gather has ended."""
        return self._event is None or self._event.query()

    def order(self, stream: Any) -> None:
        """Let `stream` wait for the gather."""
        if self._event is not None:
            stream.wait_event(self._event)

    def raise_if_wrong(self) -> None:
        """Wait for the result.

        Raises:
            IndexError: an index was out of range; the message names it.
        """
        if self._first_wrong is None:
            return
        if self._event is not None:
            self._event.synchronize()
        position = int(self._first_wrong)
        if position < self._index.numel():
            raise out_of_range(self._index, position, self._num_rows)


class PendingDeviceRows:
    """Rows on their way to a GPU; see `UnifiedTensor.gather_rows_async`."""

    def __init__(self, table: DeviceTable, launched: Future[Any], device: torch.device) -> None:
        self._table, self._launched, self._device = table, launched, device
        self._is_remembered = False

    def done(self) -> bool:
        """Whether the rows are there."""
        return self._launched.done() and (
            self._launched.exception() is not None or self._launched.result()[1].done()
        )

    def wait(self) -> torch.Tensor:
        """The rows, once the current stream has been told to wait for them."""
        rows, check = self._launched.result()
        stream = _streams(self._device).current_stream(self._device)
        check.order(stream)
        if rows.device.type == GPU:
            rows.record_stream(stream)
        if check.done():
            check.raise_if_wrong()
        elif not self._is_remembered:
            self._is_remembered = True
            self._table.remember(check)
        return rows


def _streams(device: torch.device) -> Any:
    """The module with the streams of a type of device."""
    return getattr(torch, device.type)


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """The stream on which all tables gather beside a model; a slow one helps nobody."""
    with torch.cuda.device(device) if device.type == GPU else contextlib.nullcontext():
        return _streams(device).Stream()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Two, so that one batch is gathered while another is copied; forked children use no GPU."""
    return ThreadPoolExecutor(2, thread_name_prefix="gather-to-device")
