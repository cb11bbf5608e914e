"""Tiers below the device: pages in host memory and in a file, and the buffers between.

A page is written once, before or after the computation that does not need it (write-behind), and
freed as a whole; what is read is records. Pages of a layer lie one after the other in segments of
the file, so that a run of missing records is one read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import CapacityError
from penstock.kv._areas import Area, SlotMemory
from penstock.kv._layout import BlockLayout
from penstock.kv._platform import Platform
from penstock.kv._prefix_file import PrefixFile, PrefixRecords, SavedLayer
from penstock.memory import Extent, ExtentFile, FileStore, Ledger, Link, Tier
from penstock.units import format_bytes

NUM_THREADS = 4
"""Reads that are under way at once, which keep the queue of a disk full."""
_FIRST_SEGMENT_BYTES = 256 * 1024
_SEGMENT_BYTES = 4 * 2**20
_BOUNCE_BYTES = 2**20


class TransferBuffer:
    """Part of the staging memory; transfers of it may be under way.

    Attributes:
        area: Its memory.
        pending: Transfers that end before it is used again.
        uses: Events of a GPU that end before it is used again.
        reads: Bytes, start and end of those reads that have ended, until they are counted.
    """

    def __init__(self, area: Area) -> None:
        self.area = area
        self.pending: list[Future[None]] = []
        self.uses: list[Any] = []
        self.reads: list[tuple[int, int, int]] = []

    @property
    def is_moving(self) -> bool:
        """True while transfers are under way."""
        return not all(future.done() for future in self.pending)

    def wait(self, num_transfers: int | None = None) -> None:
        """Wait for its first transfers, or all; the first error is raised when they have ended."""
        pending = self.pending[:num_transfers]
        self.pending = self.pending[len(pending) :]
        errors = [future.exception() for future in pending]
        for error in errors:
            if error is not None:
                raise error

    def wait_for_uses(self) -> None:
        """Wait until a GPU has read what it holds."""
        uses, self.uses = self.uses, []
        for event in uses:
            event.synchronize()


@dataclass(eq=False)
class Segment:
    """Pages that lie one after the other in the file.

    Those of a prefix file have no extent: they are read from it, and never written or given back.
    """

    extent: Extent | PrefixRecords
    num_pages: int
    num_taken: int = 0
    num_live: int = 0

    @property
    def is_prefix(self) -> bool:
        """True for pages of a prefix file."""
        return isinstance(self.extent, PrefixRecords)


class PageTable:
    """Every page's references and places, by its number.

    Attributes:
        references: Blocks of sequences that are this page; int32.
        host: Address in host memory, 0 where it is not there; int64.
        host_slot: Slot there; int64.
        segment: Segment of the file, -1 where it is not there; int32.
        place: Place in the segment; int32.
        layer: Layer that it belongs to; int32.
        inputs: Page of the inputs from which it can be computed again, -1 for none; int64.
    """

    def __init__(self) -> None:
        self.references = np.zeros(0, dtype=np.int32)
        self.host = np.zeros(0, dtype=np.int64)
        self.host_slot = np.zeros(0, dtype=np.int64)
        self.segment = np.zeros(0, dtype=np.int32)
        self.place = np.zeros(0, dtype=np.int32)
        self.layer = np.zeros(0, dtype=np.int32)
        self.inputs = np.zeros(0, dtype=np.int64)
        self._free: list[int] = []

    @property
    def num_live(self) -> int:
        """Pages that are referenced."""
        return int(np.count_nonzero(self.references))

    def take(self, num_pages: int, layer: int) -> np.ndarray:
        """Return numbers of new pages of a layer, each with one reference and no place."""
        missing = num_pages - len(self._free)
        if missing > 0:
            old = len(self.references)
            more = max(missing, old, 256)
            for name in ("references", "host", "host_slot", "segment", "place", "layer", "inputs"):
                values = getattr(self, name)
                setattr(self, name, np.concatenate([values, np.zeros(more, values.dtype)]))
            self._free.extend(range(old + more - 1, old - 1, -1))
        pages = np.array([self._free.pop() for _ in range(num_pages)], dtype=np.int64)
        self.references[pages] = 1
        self.host[pages] = 0
        self.segment[pages] = self.inputs[pages] = -1
        self.layer[pages] = layer
        return pages

    def give_back(self, page: int) -> None:
        """Let a page's number be taken again."""
        self._free.append(page)

    def is_below(self, page: int) -> bool:
        """Return whether a page was written to a lower tier."""
        return bool(self.host[page] != 0 or self.segment[page] >= 0)


class PageTiers:
    """Host memory and file of one pool.

    Args:
        platform: The device above.
        pages: Places of pages, which this class sets.
        ledger: Account of bytes.
        host_bytes: The most bytes of host memory; None: no limit.
        store: Directory of the file; None: no file.
        prefix: A further file, whose pages are only read; closed with the others.

    Attributes:
        prefix_bytes: Bytes of the pages in use that are in the prefix file.
        failure: Error of a write, whose tokens are lost.
    """

    def __init__(
        self,
        platform: Platform,
        pages: PageTable,
        ledger: Ledger,
        host_bytes: int | None,
        store: FileStore | str | None,
        prefix: PrefixFile | None = None,
    ) -> None:
        self._platform = platform
        self._pages = pages
        self._ledger = ledger
        self._host_bytes = host_bytes
        self._host_used_bytes = 0
        self._host: dict[BlockLayout, SlotMemory] = {}
        self._file = None if store is None else ExtentFile(store)
        self._segments: dict[int, Segment] = {}
        self._open_segments: dict[int, tuple[int, Segment]] = {}  # by layer
        self._num_segments = 0
        self._threads: ThreadPoolExecutor | None = None
        self._prefix = prefix
        self._bounce: Area | None = None  # host memory of records that leave the device singly
        self.prefix_bytes = 0
        self.failure: BaseException | None = None

    @property
    def has_file(self) -> bool:
        """True where there is a file below, that of a prefix included."""
        return self._file is not None or self._prefix is not None

    def take_prefix(self, saved: SavedLayer) -> np.ndarray:
        """Return new pages that are a layer's pages of the prefix file, one after the other."""
        assert saved.records is not None
        pages = self._pages.take(saved.num_pages, saved.layer)
        self._num_segments += 1
        number, num_pages = self._num_segments, len(pages)
        self._segments[number] = Segment(saved.records, num_pages, num_pages, num_pages)
        self._pages.segment[pages] = number
        self._pages.place[pages] = np.arange(num_pages)
        self.prefix_bytes += num_pages * saved.layout.page_bytes
        return pages

    def take_host(self, pages: np.ndarray, layout: BlockLayout) -> np.ndarray:
        """Take room for the first of some pages in host memory, to be filled at once.

        Returns:
            Their addresses, int64: fewer than `pages` where host memory has no room.
        """
        slots = self._host.get(layout)
        if slots is None:
            slots = self._platform.make_pages(layout.page_bytes, self._host_bytes)
            self._host[layout] = slots
        taken = []
        for page in pages.tolist():
            if not self._has_host_room(slots):
                break
            slot = slots.take()
            self._pages.host_slot[page] = slot
            self._host_used_bytes += layout.page_bytes
            taken.append(slot)
        addresses = slots.addresses(np.array(taken, dtype=np.int64))
        self._pages.host[pages[: len(taken)]] = addresses
        num_bytes = len(taken) * layout.page_bytes
        if num_bytes:
            self._ledger.add(Tier.HOST, num_bytes)
            self._ledger.record_transfer(Link.DEVICE_TO_HOST, num_bytes, time.perf_counter_ns())
        return addresses

    def _has_host_room(self, slots: SlotMemory) -> bool:
        if self._host_bytes is None:
            return True
        if self._platform.is_lazy:
            return self._host_used_bytes + slots.slot_bytes <= self._host_bytes
        mapped_bytes = sum(each.mapped_bytes for each in self._host.values())
        return not slots.is_full or mapped_bytes + slots.slab_bytes <= self._host_bytes

    def write(
        self,
        layer: int,
        pages: np.ndarray,
        layout: BlockLayout,
        buffer: TransferBuffer,
        event: Any = None,
    ) -> None:
        """Start to write pages that lie one after the other in a buffer, after an event.

        Raises:
            CapacityError: There is no file.
            StoreFullError: The file has no room.
        """
        offset = 0
        for number, begin, num_pages in self._place(layer, pages, layout):
            num_bytes = num_pages * layout.page_bytes
            address = buffer.area.address + offset
            extent = self._segments[number].extent
            begin *= layout.page_bytes
            write = self._submit(self._write, extent, address, num_bytes, begin, event)
            buffer.pending.append(write)
            offset += num_bytes
        if self._platform.has_staging:
            self._ledger.record_transfer(Link.DEVICE_TO_HOST, offset, time.perf_counter_ns())

    def read(
        self,
        pages: np.ndarray,
        heads: np.ndarray,
        layout: BlockLayout,
        buffer: TransferBuffer,
        offsets: np.ndarray,
        num_threads: int = 1,
    ) -> None:
        """Start to read records from the file into a buffer.

        The bytes are counted when `count_reads` is called for the buffer.

        Args:
            pages: Page of each record, int64; all of them in the file.
            heads: Head of each, int64.
            layout: Their layout.
            buffer: Memory for all of them.
            offsets: Place of each in the buffer in bytes, int64.
            num_threads: Threads that divide them.
        """
        if not len(pages):
            return
        record = layout.record_bytes
        segments = self._pages.segment[pages]
        begins = (self._pages.place[pages] * layout.num_heads + heads) * record
        share = -(-len(pages) // num_threads)
        is_start = np.ones(len(pages), dtype=bool)
        is_apart = (np.diff([begins, offsets]) != record).any(0)
        is_start[1:] = is_apart | (np.diff(segments) != 0)
        is_start[::share] = True
        starts = np.flatnonzero(is_start)
        lengths = dict(zip(starts.tolist(), np.diff(starts, append=len(pages)), strict=True))
        for tasks in np.split(starts, np.searchsorted(starts, range(share, len(pages), share))):
            pieces = [
                (
                    self._segments[int(segments[at])].extent,
                    buffer.area.address + int(offsets[at]),
                    int(lengths[at]) * record,
                    int(begins[at]),
                )
                for at in tasks.tolist()
            ]
            buffer.pending.append(self._submit(self._read_pieces, buffer, pieces))

    def count_reads(self, buffer: TransferBuffer) -> int:
        """Record the reads into a buffer that have ended; return their bytes."""
        reads, buffer.reads = buffer.reads, []
        link, _ = self._platform.file_links
        for num_bytes, start_ns, end_ns in reads:
            self._ledger.record_transfer(link, num_bytes, start_ns, end_ns)
        return sum(num_bytes for num_bytes, _, _ in reads)

    def save(self, page: int, layout: BlockLayout, addresses: np.ndarray) -> None:
        """Write a page whose records lie apart, and wait for it."""
        host = self.take_host(np.array([page]), layout)
        record = layout.record_bytes
        if len(host):
            self._platform.save(host + np.arange(len(addresses)) * record, addresses, record)
            return
        layer = int(self._pages.layer[page])
        ((number, place, _),) = self._place(layer, np.array([page]), layout)
        begin = place * layout.page_bytes
        for some, copies in self.bring_to_host(addresses, record):
            for i, address in zip(some.tolist(), copies.tolist(), strict=True):
                self._write(self._segments[number].extent, address, record, begin + i * record)
        if self._platform.has_staging:
            self._ledger.record_transfer(
                Link.DEVICE_TO_HOST, layout.page_bytes, time.perf_counter_ns()
            )

    def bring_to_host(
        self, addresses: np.ndarray, num_bytes: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield pieces of `num_bytes` at addresses that the CPU can read until the next group.

        Yields:
            Numbers of pieces, in their order, and their addresses; both int64.
        """
        numbers, in_host = np.arange(len(addresses)), self._platform.find_in_host(addresses)
        if in_host.all():
            self._platform.synchronize()
            yield numbers, addresses
            return
        if self._bounce is None or self._bounce.num_bytes < num_bytes:
            old_bytes = 0 if self._bounce is None else self._bounce.num_bytes
            self._bounce = self._platform.host_area(max(_BOUNCE_BYTES, num_bytes))
            self._ledger.add(Tier.HOST, self._bounce.num_bytes - old_bytes)
        per_group = self._bounce.num_bytes // num_bytes
        places = self._bounce.address + np.arange(per_group, dtype=np.int64) * num_bytes
        for first in range(0, len(addresses), per_group):
            some, is_there = (
                addresses[first : first + per_group],
                in_host[first : first + per_group],
            )
            copies = np.where(is_there, some, places[: len(some)])
            if not is_there.all():
                self._platform.copy(copies[~is_there], some[~is_there], num_bytes)
            self._platform.synchronize()
            yield numbers[first : first + per_group], copies

    def free(self, page: int, layout: BlockLayout) -> None:
        """Give back what a page occupies; no transfer of it may be under way."""
        if self._pages.host[page]:
            self._host[layout].give_back(int(self._pages.host_slot[page]))
            self._pages.host[page] = 0
            self._host_used_bytes -= layout.page_bytes
            self._ledger.add(Tier.HOST, -layout.page_bytes)
        number = int(self._pages.segment[page])
        if number >= 0:
            self._pages.segment[page] = -1
            segment = self._segments[number]
            segment.num_live -= 1
            if segment.is_prefix:
                self.prefix_bytes -= layout.page_bytes
            else:
                self._ledger.add(Tier.FILE, -layout.page_bytes)
            if segment.num_live == 0 and segment.num_taken == segment.num_pages:
                self._drop(number)

    def close(self) -> None:
        """Wait for transfers under way and close the file."""
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        if self._file is not None:
            self._file.close()
        if self._prefix is not None:
            self._prefix.close()
        self._host.clear()
        self._bounce = None

    def check_file(self) -> None:
        """Raise an error if there is no file for what host memory has no room for."""
        if self._file is None:
            raise CapacityError(
                f"host_memory={format_bytes(self._host_bytes or 0)} is full and there is no file "
                "below; raise host_memory or give store="
            )

    def _place(
        self, layer: int, pages: np.ndarray, layout: BlockLayout
    ) -> list[tuple[int, int, int]]:
        """Give pages places in the file: segment, first place there, number of pages."""
        self.check_file()
        runs = []
        at = 0
        while at < len(pages):
            number, segment = self._open_segment(layer, layout)
            num_pages = min(len(pages) - at, segment.num_pages - segment.num_taken)
            run = pages[at : at + num_pages]
            self._pages.segment[run] = number
            self._pages.place[run] = np.arange(num_pages) + segment.num_taken
            runs.append((number, segment.num_taken, num_pages))
            segment.num_taken += num_pages
            segment.num_live += num_pages
            self._ledger.add(Tier.FILE, num_pages * layout.page_bytes)
            at += num_pages
        return runs

    def _open_segment(self, layer: int, layout: BlockLayout) -> tuple[int, Segment]:
        assert self._file is not None
        number, segment = self._open_segments.get(layer, (-1, None))
        if segment is not None and segment.num_taken < segment.num_pages:
            return number, segment
        length = _FIRST_SEGMENT_BYTES
        if segment is not None:
            length = min(_SEGMENT_BYTES, 2 * segment.num_pages * layout.page_bytes)
            if segment.num_live == 0:  # its pages died while it was the layer's open one
                self._drop(number)
        num_pages = max(1, length // layout.page_bytes)
        segment = Segment(self._file.allocate(num_pages * layout.page_bytes), num_pages)
        self._num_segments += 1
        self._segments[self._num_segments] = segment
        self._open_segments[layer] = self._num_segments, segment
        return self._num_segments, segment

    def _drop(self, number: int) -> None:
        segment = self._segments.pop(number, None)
        if segment is not None and isinstance(segment.extent, Extent):
            assert self._file is not None
            self._file.free(segment.extent)

    def _submit(self, function: Callable[..., None], *args: object) -> Future[None]:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="penstock-kv")
        return self._threads.submit(function, *args)

    def _write(
        self,
        extent: Extent | PrefixRecords,
        address: int,
        num_bytes: int,
        begin: int,
        event: Any = None,
    ) -> None:
        assert self._file is not None and isinstance(extent, Extent)
        try:
            if event is not None:
                event.synchronize()
            start_ns = time.perf_counter_ns()
            self._file.write(extent, address, num_bytes, begin)
        except BaseException as error:
            self.failure = error
            raise
        self._ledger.record_transfer(self._platform.file_links[1], num_bytes, start_ns)

    def _read_pieces(
        self, buffer: TransferBuffer, pieces: list[tuple[Extent | PrefixRecords, int, int, int]]
    ) -> None:
        for piece in pieces:
            self._read(buffer, *piece)

    def _read(
        self,
        buffer: TransferBuffer,
        extent: Extent | PrefixRecords,
        address: int,
        num_bytes: int,
        begin: int,
    ) -> None:
        start_ns = time.perf_counter_ns()
        if isinstance(extent, PrefixRecords):
            extent.read(begin, address, num_bytes)
        else:
            assert self._file is not None
            self._file.read(extent, address, num_bytes, begin)
        buffer.reads.append((num_bytes, start_ns, time.perf_counter_ns()))
