"""Reading of records, wherever they are; those of the file in groups that pass through buffers.

Steps that read all blocks read what they read before. While a layer's last groups are attended to,
and while the model computes what lies between its layers, the first groups of the layer that
followed it in the last step are read into idle buffers. Whether they are the right ones is found
when that layer is read, and an error of theirs is raised there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from penstock.kv._device import DeviceTier
from penstock.kv._file_records import FileRecords, QueuedGroups
from penstock.kv._inputs import ComputedPages, InputPages
from penstock.kv._layout import BlockLayout
from penstock.kv._lower import PageTiers, TransferBuffer
from penstock.kv._pages import PageTable
from penstock.memory import Ledger, Link

_MERGED_BYTES = 2**19  # of groups that are attended to together

Groups = Iterator[tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class _Wanted:
    """Records in the order of reading, equal ones beside each other."""

    order: np.ndarray  # numbers among what the caller asked for
    records: np.ndarray
    is_new: np.ndarray  # bool: not equal to the one before
    addresses: np.ndarray  # 0 where they must be read


class _Absent:
    """Items that are missing, by their records, which come in parts.

    Attributes:
        item_ends: Of each number of first records, the first item of a later one.
    """

    def __init__(self, wanted: _Wanted, missing: np.ndarray) -> None:
        self._items = np.flatnonzero(missing)
        is_first = wanted.is_new[self._items]
        firsts = np.flatnonzero(is_first)
        self._bounds = [*firsts.tolist(), len(self._items)]
        self.item_ends = [*self._items[firsts].tolist(), len(missing)]
        self._numbers = None if len(firsts) == len(self._items) else np.cumsum(is_first) - 1

    def put(self, addresses: np.ndarray, start: int, end: int, places: np.ndarray) -> None:
        """Set the addresses of the items of the records `[start, end)`, which are at places."""
        some = slice(self._bounds[start], self._bounds[end])
        if self._numbers is not None:  # several items are one record
            places = places[self._numbers[some] - start]
        addresses[self._items[some]] = places


@dataclass(eq=False)
class _Group:
    """Distinct records that are in a buffer, one after the other, or on their way there."""

    records: np.ndarray
    buffer: TransferBuffer
    computed: ComputedPages | None

    def addresses(self, places: np.ndarray) -> np.ndarray:
        """Return where each record is, of the places of all records of a buffer, int64."""
        return self.buffer.area.address + places[: len(self.records)]


class _FileReads:
    """Records of one layer that are read from the file, in their order.

    Attributes:
        layout: Their layout.
        records: Distinct records.
        stored: Where they are in the file.
        queued: Their reads, where threads are not needed.
        places: First bytes of records in a buffer.
        groups: Groups of them whose reads were started, and that were not taken yet.
    """

    def __init__(
        self,
        layout: BlockLayout,
        records: np.ndarray,
        stored: FileRecords,
        per_buffer: int,
        queued: QueuedGroups | None,
    ) -> None:
        self.layout = layout
        self.records = records
        self.queued = queued
        self.stored = stored
        self.groups: list[_Group] = []
        self.places = np.arange(per_buffer) * layout.record_bytes
        self._per_buffer = per_buffer
        self._num_started = 0

    @property
    def num_left(self) -> int:
        """Records that were not started."""
        return len(self.records) - self._num_started

    @property
    def next_number(self) -> int:
        """Number of the group after those that were started."""
        return self._num_started // self._per_buffer

    @property
    def next_some(self) -> slice:
        """Numbers of the records of the group after those that were started."""
        return slice(self._num_started, self._num_started + self._per_buffer)

    def count_fitting(self, groups: list[_Group]) -> int:
        """Return how many first groups have all records of those that would be started next."""
        at = 0
        for number, group in enumerate(groups):
            at += len(group.records)
            if at != min((number + 1) * self._per_buffer, len(self.records)):
                return number
        return len(groups)

    def start(self, group: _Group) -> None:
        """Add a group, whose reads were started."""
        self.groups.append(group)
        self._num_started += len(group.records)

    def take_groups(self, num_groups: int | None = None) -> list[_Group]:
        """Remove the first groups that were started, or all of them."""
        taken = self.groups[:num_groups]
        del self.groups[: len(taken)]
        return taken


class BlockReads:
    """Reading of records.

    Attributes:
        num_hits: Records that were resident.
        num_misses: Records that were not.
        unused_bytes: Bytes that were read ahead of a layer and then not used.
    """

    def __init__(
        self,
        pages: PageTable,
        device: DeviceTier,
        lower: PageTiers,
        ledger: Ledger,
        inputs: InputPages | None,
    ) -> None:
        self._pages = pages
        self._device = device
        self._lower = lower
        self._ledger = ledger
        self._inputs = inputs
        self.num_hits = self.num_misses = self.unused_bytes = 0
        self._ahead: _FileReads | None = None
        self._last: dict[int, tuple[BlockLayout, np.ndarray]] = {}  # records of layers, as read
        self._next: dict[int, int] = {}  # the layer that was read after a layer
        self._layer_before: int | None = None

    def stream(
        self, layout: BlockLayout, pages: np.ndarray, heads: np.ndarray, *, layer: int | None = None
    ) -> Groups:
        """Yield records in groups, each with an address that is valid until the next group.

        Resident records, and those of host memory, are where they lie. The others are read ahead
        into buffers, and a group ends where one is full.

        Args:
            layout: Their layout.
            pages: Page of each record, int64, in the order in which they are wanted.
            heads: Head of each, int64.
            layer: Their layer, where the next step is expected to read the same records.

        Yields:
            Numbers of records (indices into `pages`) and their addresses, both int64.
        """
        if not len(pages):
            return
        wanted = self._find(layout, pages * layout.num_heads + heads)
        new = wanted.records[wanted.is_new]
        if layer is not None:
            self._note(layer, layout, new)
        residency = self._device.residency(layout)
        is_resident = wanted.addresses != 0
        if is_resident.all():
            self.count_hits(layout, len(new), lambda: new)
            yield wanted.order, wanted.addresses
            return
        self.num_hits += int((wanted.is_new & is_resident).sum())
        in_slots = wanted.records[wanted.is_new & is_resident]
        residency.pin(in_slots)  # none of them loses its slot before it was read
        try:
            self.num_misses += len(new) - len(in_slots)
            new_in_host = self._find_in_host(layout, wanted)
            missing = wanted.addresses == 0
            plan = None
            if missing.any():
                self._device.wait()  # what is still being written is not read before
                plan = self._take_plan(layout, wanted.records[wanted.is_new & missing])
                self._keep_reading(plan, layer)  # before all that takes time
            try:
                residency.touch(new)
                admitted = self._admit_from_host(layout, wanted, new_in_host)
                residency.pin(admitted)
                in_slots = np.concatenate([in_slots, admitted])
                if plan is None:
                    yield wanted.order, wanted.addresses
                else:
                    yield from self._stream_missing(layout, wanted, missing, plan, layer)
            finally:
                for group in () if plan is None else plan.take_groups():
                    self._discard(group)
        finally:
            residency.release(in_slots)

    def count_hits(
        self, layout: BlockLayout, num_records: int, find_records: Callable[[], np.ndarray]
    ) -> None:
        """Note that distinct records are used that are resident, all of them."""
        if not self._device.room(layout):  # else none has to leave, and no slot is competed for
            self._device.residency(layout).touch(find_records())
        self.num_hits += num_records

    def keep_counts_of(self, other: BlockReads) -> None:
        """Go on with the counts of another one."""
        self.num_hits, self.num_misses = other.num_hits, other.num_misses
        self.unused_bytes = other.unused_bytes

    def release(self, pages: np.ndarray) -> None:
        """Let no read of pages be under way: they are going to be freed."""
        ahead = self._ahead
        if ahead is not None and np.isin(ahead.records // ahead.layout.num_heads, pages).any():
            self.drop_ahead()

    def drop_ahead(self) -> None:
        """Forget what was read ahead, with its errors."""
        ahead, self._ahead = self._ahead, None
        for group in () if ahead is None else ahead.groups:
            self._discard(group)

    def _find(self, layout: BlockLayout, records: np.ndarray) -> _Wanted:
        order = _order_of(records)
        records = records[order]
        is_new = np.ones(len(records), dtype=bool)
        is_new[1:] = records[1:] != records[:-1]
        return _Wanted(order, records, is_new, self._device.find(layout, records))

    def _find_in_host(self, layout: BlockLayout, wanted: _Wanted) -> np.ndarray:
        """Find those missing records that are in host memory; return which, the first of equals."""
        pages, heads = np.divmod(wanted.records, layout.num_heads)
        host, addresses = self._pages.host[pages], wanted.addresses
        in_host = (addresses == 0) & (host != 0)
        if not in_host.any():
            return in_host
        addresses[in_host] = (host + heads * layout.record_bytes)[in_host]
        new = in_host & wanted.is_new
        # The kernel reads them where they lie: they move, but never enter the device tier.
        num_bytes = int(new.sum()) * layout.record_bytes
        self._ledger.record_transfer(Link.HOST_TO_DEVICE, num_bytes, time.perf_counter_ns())
        return new

    def _admit_from_host(self, layout: BlockLayout, wanted: _Wanted, new: np.ndarray) -> np.ndarray:
        """Copy those of some records to slots that are worth one; return those to be read there."""
        if not new.any():
            return wanted.records[:0]
        records, sources = wanted.records[new], wanted.addresses[new]
        found = self._fill_slots(layout, self._admit(layout, records), sources)
        if found is not sources:
            number = np.cumsum(new) - 1
            is_found = (number >= 0) & (wanted.records == records[number])
            wanted.addresses[is_found] = found[number[is_found]]
        return records[found != sources]

    def _admit(self, layout: BlockLayout, records: np.ndarray) -> np.ndarray:
        """Give slots to those missing records that are worth one; return addresses, 0 for none."""
        admitted, places = self._device.admit(layout, records)
        found = np.zeros(len(records), dtype=np.int64)
        if len(admitted):
            order = np.argsort(records)
            found[order[np.searchsorted(records[order], admitted)]] = places
        return found

    def _stream_missing(
        self,
        layout: BlockLayout,
        wanted: _Wanted,
        missing: np.ndarray,
        plan: _FileReads,
        layer: int | None,
    ) -> Groups:
        """Yield groups, with the missing records of some buffers; the next ones are under way."""
        absent = _Absent(wanted, missing)
        num_records, start, item = len(plan.records), 0, 0
        places = self._admit(layout, plan.records)  # filled as the records come
        num_places = [0, *np.cumsum(places != 0).tolist()]  # of the first records
        try:
            while start < num_records:
                self._keep_reading(plan, layer)
                ready = plan.groups[: self._wait_for_some(plan.groups, layout)]
                sources = _join([group.addresses(plan.places) for group in ready])
                end = start + len(sources)
                if num_places[start] < num_places[end]:
                    sources = self._fill_slots(layout, places[start:end], sources)
                absent.put(wanted.addresses, start, end, sources)
                some = slice(item, absent.item_ends[end])
                start, item = end, some.stop
                yield wanted.order[some], wanted.addresses[some]
                for group in plan.take_groups(len(ready)):
                    self._device.give_back(group.buffer)
            self._keep_reading(plan, layer)
        finally:
            if places[start:].any():
                self._device.drop_records(layout, plan.records[start:][places[start:] != 0])

    def _fill_slots(
        self, layout: BlockLayout, places: np.ndarray, sources: np.ndarray
    ) -> np.ndarray:
        """Copy records to the slots that are not 0; return where they are to be read."""
        return self._device.platform.fill_slots(places, sources, layout.record_bytes)

    def _wait_for_some(self, groups: list[_Group], layout: BlockLayout) -> int:
        """Wait for the first group; return how many have come, while the others go on."""
        self._compute(groups[0], layout)
        begin_ns = time.perf_counter_ns()
        groups[0].buffer.wait()
        self._ledger.record_stall("read", begin_ns, time.perf_counter_ns())
        most = min(self._device.num_buffers // 2, _MERGED_BYTES // self._device.buffer_bytes)
        num_ready = 1
        while num_ready < min(most, len(groups)) and not groups[num_ready].buffer.is_moving:
            groups[num_ready].buffer.wait()
            self._compute(groups[num_ready], layout)
            num_ready += 1
        for group in groups[:num_ready]:
            num_bytes = self._lower.count_reads(group.buffer)
            if self._device.platform.has_staging:
                now = time.perf_counter_ns()
                self._ledger.record_transfer(Link.HOST_TO_DEVICE, num_bytes, now)
        return num_ready

    def _compute(self, group: _Group, layout: BlockLayout) -> None:
        """Compute those records of a group that are not read, once their inputs are there."""
        if group.computed is not None and self._inputs is not None:
            self._inputs.finish(group.computed, layout, group.buffer)

    def _discard(self, group: _Group) -> None:
        """Give a group's buffer back without using what was read."""
        with contextlib.suppress(Exception):
            group.buffer.wait()
        self.unused_bytes += self._lower.count_reads(group.buffer)
        self._device.give_back(group.buffer)

    def _take_plan(self, layout: BlockLayout, records: np.ndarray) -> _FileReads:
        """Return a plan to read records, some of which were read ahead where they are the same."""
        plan = self._plan(layout, records)
        if self._ahead is not None:
            ahead = np.concatenate([group.records for group in self._ahead.groups])
            if self._ahead.layout == layout and np.array_equal(records[: len(ahead)], ahead):
                groups, self._ahead = self._ahead.groups, None
                # A last group is not full where a block follows that was not there then.
                num_fitting = plan.count_fitting(groups)
                for group in groups[:num_fitting]:
                    plan.start(group)
                for group in groups[num_fitting:]:
                    self._discard(group)
            else:
                self.drop_ahead()
        return plan

    def _plan(self, layout: BlockLayout, records: np.ndarray) -> _FileReads:
        stored, per_buffer = self._locate(layout, records), self._per_buffer(layout, records)
        queued = self._lower.queue_groups(stored, per_buffer)
        return _FileReads(layout, records, stored, per_buffer, queued)

    def _locate(self, layout: BlockLayout, records: np.ndarray) -> FileRecords:
        return self._lower.locate(*np.divmod(records, layout.num_heads), layout)

    def _keep_reading(self, plan: _FileReads, layer: int | None) -> None:
        """Start reads while there are idle buffers: of this layer, then of the next one."""
        while self._device.num_idle and plan.num_left:
            self._read_group(plan)
        # One is left to writes, so that they never wait for what is read ahead.
        if layer is None or self._device.num_idle < 2 or self._device.is_writing:
            return
        if self._ahead is None:
            ahead = self._plan_ahead(layer)
            if ahead is None:
                return
            self._read_group(ahead)
            self._ahead = ahead
        while self._device.num_idle > 1 and self._ahead.num_left:
            self._read_group(self._ahead)

    def _read_group(self, plan: _FileReads) -> None:
        number, some = plan.next_number, plan.next_some
        records, buffer = plan.records[some], self._device.take_buffer()
        computed = None
        if plan.queued is not None:
            plan.start(_Group(records, buffer, None))
            self._lower.start(plan.queued, number, buffer)
            return
        stored = plan.stored[some]
        if self._inputs is not None:
            computed = self._inputs.start(plan.layout, records, buffer)
        plan.start(_Group(records, buffer, computed))
        places = None
        if computed is not None:
            is_read = np.ones(len(records), dtype=bool)
            is_read[computed.places] = False
            stored = self._locate(plan.layout, records[is_read])
            places = np.flatnonzero(is_read) * plan.layout.record_bytes
        self._lower.read(stored, buffer, places, self._device.num_buffers)

    def _per_buffer(self, layout: BlockLayout, records: np.ndarray) -> int:
        """Return how many of the records of one layer a buffer holds."""
        if self._inputs is None:
            return self._device.buffer_bytes // layout.record_bytes
        layer = int(self._pages.layer[records[0] // layout.num_heads])
        return self._inputs.per_buffer(layer, layout, self._device.buffer_bytes)

    def _note(self, layer: int, layout: BlockLayout, records: np.ndarray) -> None:
        if self._layer_before is not None:
            self._next[self._layer_before] = layer
        self._layer_before = layer
        self._last[layer] = layout, records

    def _plan_ahead(self, layer: int) -> _FileReads | None:
        """Return what the next layer with missing records will read, as far as can be told now."""
        for _ in range(len(self._next)):
            following = self._next.get(layer)
            if following is None:
                return None
            layer = following
            layout, records = self._last[layer]
            pages = records // layout.num_heads
            alive = (self._pages.references[pages] > 0) & (self._pages.layer[pages] == layer)
            if not alive.all():
                return None
            is_missing = (self._device.find(layout, records) == 0) & (self._pages.host[pages] == 0)
            if is_missing.any():
                records = records[is_missing]
                return self._plan(layout, records)
        return None


def _join(parts: list[np.ndarray]) -> np.ndarray:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _order_of(records: np.ndarray) -> np.ndarray:
    """Return an order that keeps the first of equal records in place, the others beside it."""
    if (np.diff(records) > 0).all():
        return np.arange(len(records))
    _, first, inverse = np.unique(records, return_index=True, return_inverse=True)
    return np.argsort(first[inverse], kind="stable")
