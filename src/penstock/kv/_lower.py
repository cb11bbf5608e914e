"""Tiers below the device: pages in host memory and in a file, and the buffers between.

A page is written once, before or after the computation that does not need it (write-behind), and
freed as a whole; what is read is records. Pages of a layer lie one after the other in segments of
the file, so that a run of missing records is one read.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import CapacityError
from penstock.kv._areas import Area, SlotMemory
from penstock.kv._file_records import FileRecords, QueuedGroups
from penstock.kv._layout import BlockLayout
from penstock.kv._pages import PageTable
from penstock.kv._platform import Platform
from penstock.kv._prefix_file import PrefixFile, PrefixRecords, SavedLayer
from penstock.memory import (
    Extent,
    ExtentFile,
    FileStore,
    Ledger,
    Link,
    StartedReads,
    Tier,
    WorkerThreads,
)
from penstock.units import format_bytes

_NUM_THREADS = 4  # reads that are under way at once, at least, which keep a disk busy
_FIRST_SEGMENT_BYTES = 256 * 1024
_SEGMENT_BYTES = 4 * 2**20
_BOUNCE_BYTES = 2**20


_Piece = tuple[Extent | PrefixRecords, int, int, int]  # what is read, address, bytes, first byte


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
        self.pending: list[Future[None] | StartedReads] = []
        self.uses: list[Any] = []
        self.reads: list[tuple[int, int, int]] = []

    @property
    def is_moving(self) -> bool:
        """True while transfers are under way."""
        return bool(self.pending) and not all(transfer.done() for transfer in self.pending)

    def wait(self, num_transfers: int | None = None) -> None:
        """Wait for its first transfers, or all; the first error is raised when they have ended."""
        if not self.pending:
            return
        errors = []
        for transfer in self.pending[:num_transfers]:
            error = transfer.exception()
            self.pending.remove(transfer)
            if error is not None:
                errors.append(error)
            elif isinstance(transfer, StartedReads):
                self.reads.append((transfer.num_bytes, transfer.start_ns, transfer.end_ns))
        if errors:
            raise errors[0]

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


class PageTiers:
    """Host memory and file of one pool.

    Args:
        platform: The device above.
        pages: Places of pages, which this class sets.
        ledger: Account of bytes.
        host_bytes: The most bytes of host memory; None: no limit.
        store: Directory of the file; None: no file.
        prefix: A further file, whose pages are only read; closed with the others.
        times_reads: Whether the ledger's bandwidth is used, so that reads have to end when they
            end and not when that is seen.

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
        times_reads: bool = False,
    ) -> None:
        self._platform = platform
        self._pages = pages
        self._ledger = ledger
        # Records of a prefix file are compared with checksums, by the threads that read them.
        self._may_queue = not times_reads and prefix is None
        self._host_bytes = host_bytes
        self._host_used_bytes = 0
        self._host: dict[BlockLayout, SlotMemory] = {}
        self._file = None if store is None else ExtentFile(store)
        self._segments: dict[int, Segment] = {}
        self._open_segments: dict[int, tuple[int, Segment]] = {}  # by layer
        self._num_segments = 0
        self._threads: WorkerThreads | None = None
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

    def locate(self, pages: np.ndarray, heads: np.ndarray, layout: BlockLayout) -> FileRecords:
        """Return where records are in the file.

        Args:
            pages: Page of each record, int64; all of them in the file.
            heads: Head of each, int64.
            layout: Their layout.
        """
        segments = self._pages.segment[pages]
        begins = (self._pages.place[pages] * layout.num_heads + heads) * layout.record_bytes
        follows = np.zeros(len(pages), dtype=bool)
        follows[1:] = begins[1:] - begins[:-1] == layout.record_bytes
        follows[1:] &= segments[1:] == segments[:-1]
        return FileRecords(layout.record_bytes, segments, begins, follows)

    def queue_groups(self, records: FileRecords, per_group: int) -> QueuedGroups | None:
        """Return the reads of records in groups; None where they have to be read by threads."""
        if not self._may_queue or self._file is None or not self._file.queues_reads:
            return None
        starts = records.find_runs(None, per_group)
        to = starts % per_group * records.num_bytes
        pieces = self._pieces(records, starts, to)
        bounds = np.searchsorted(starts, np.arange(0, len(records.begins) + per_group, per_group))
        return QueuedGroups(self._file.locate(pieces), bounds.tolist())

    def start(self, groups: QueuedGroups, number: int, buffer: TransferBuffer) -> None:
        """Start to read a group into a buffer, as `read` does."""
        assert self._file is not None
        requests = groups.for_buffer(number, buffer.area.address)
        buffer.pending.append(self._file.start_located(requests, buffer.area))

    def _pieces(self, records: FileRecords, starts: np.ndarray, to: np.ndarray) -> list[Any]:
        """Return the pieces of runs that begin at some records and go to some addresses."""
        lengths = np.diff(starts, append=len(records.begins)) * records.num_bytes
        extents = [self._segments[number].extent for number in records.segments[starts].tolist()]
        numbers = to, lengths, records.begins[starts]
        return list(zip(extents, *(each.tolist() for each in numbers), strict=True))

    def read(
        self,
        records: FileRecords,
        buffer: TransferBuffer,
        places: np.ndarray | None = None,
        num_buffers: int = 1,
    ) -> None:
        """Start to read records from the file into a buffer, by threads.

        The bytes are counted when `count_reads` is called for the buffer.

        Args:
            records: Where they are.
            buffer: Memory for all of them.
            places: First byte of each in the buffer, int64; None for one after the other.
            num_buffers: Buffers that are read into at the same time.
        """
        count, num_bytes = len(records.begins), records.num_bytes
        if not count:
            return
        share = -(-count // max(1, _NUM_THREADS // num_buffers))
        starts = records.find_runs(places, share)
        to = starts * num_bytes if places is None else places[starts]
        pieces = self._pieces(records, starts, to + buffer.area.address)
        ends = np.searchsorted(starts, np.arange(share, count + share, share)).tolist()
        for first, end in itertools.pairwise([0, *ends]):
            buffer.pending.append(self._submit(self._read_pieces, buffer, pieces[first:end]))

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
        self._bounce, self.prefix_bytes = None, 0

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
            self._threads = WorkerThreads(_NUM_THREADS, thread_name_prefix="penstock-kv")
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

    def _read_pieces(self, buffer: TransferBuffer, pieces: list[_Piece]) -> None:
        for extent, address, num_bytes, begin in pieces:
            start_ns = time.perf_counter_ns()
            if isinstance(extent, PrefixRecords):
                extent.read(begin, address, num_bytes)
            else:
                assert self._file is not None
                self._file.read(extent, address, num_bytes, begin)
            buffer.reads.append((num_bytes, start_ns, time.perf_counter_ns()))
