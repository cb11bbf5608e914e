"""Admission to the device tier: which storages may become resident, and what leaves for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from penstock.activations._account import DeviceAccount
from penstock.activations._chunks import pack
from penstock.activations._policy import Limits
from penstock.activations._record import Activity, Record
from penstock.activations._transfers import RecordReads, RecordWrites
from penstock.errors import CapacityError


class DeviceBudget:
    """Limit on the saved bytes of the device tier; without one, on those that wait for a write.

    `wait_while` waits, without the lock, while a condition holds; a stall of the reason given.
    """

    def __init__(
        self,
        limits: Limits,
        account: DeviceAccount,
        writes: RecordWrites,
        reads: RecordReads,
        wait_while: Callable[[Callable[[], bool], str], None],
    ) -> None:
        self._limits = limits
        self._account = account
        self._writes = writes
        self._reads = reads
        self._wait_while = wait_while
        self._reserved_bytes = 0  # for chunks that are being filled
        self.kept: dict[int, Record] = {}  # what stays until its room is needed, by number

    def reserve(self, record: Record) -> None:
        """Reserve a whole chunk's bytes for what will be saved in it."""
        record.reserved = True
        self._reserved_bytes += self._limits.chunk_bytes

    def end_reservation(self, record: Record) -> None:
        """Undo `reserve`, if it was called: from now on what was saved counts."""
        if record.reserved:
            record.reserved = False
            self._reserved_bytes -= self._limits.chunk_bytes

    def explain(self, reason: str) -> str:
        """Return the reason for a choice of what leaves, and for what stayed in spite of it."""
        error, refusal = self._writes.error, self._writes.refusal
        if error is not None:
            return f"offloading stopped: {error}"
        return reason if refusal is None else f"{reason}; some of it stayed: {refusal}"

    def forget(self, record: Record) -> None:
        """Forget a record that is dead."""
        self.kept.pop(record.number, None)
        self._writes.refused.pop(record.number, None)
        self.end_reservation(record)

    def admit(self, num_bytes: int, *, limits_backlog: bool) -> None:
        """Wait until a storage may become resident.

        Args:
            num_bytes: Its length.
            limits_backlog: Whether, without a budget, it waits until fewer bytes wait for a write.

        Raises:
            CapacityError: The budget cannot be held, as no more can be written.
        """
        if self._limits.device_memory is not None:
            self.make_room(num_bytes)
            if self._is_exceeded_by(num_bytes):
                self._check_refusals(num_bytes)
        elif limits_backlog:
            limit = self._limits.ahead_bytes - num_bytes
            self._wait_while(lambda: 0 < self._writes.backlog_bytes > limit, "write")

    def _check_refusals(self, num_bytes: int) -> None:
        """Raise if the budget would be held, had the tiers below taken what they refused."""
        error, refusal = self._writes.error, self._writes.refusal
        if error is not None:
            problem = f"the store takes no more of them ({error}). Free or enlarge the store, or"
        else:
            refused = self._writes.refused.values()
            refused_bytes = sum(record.num_bytes for record in refused if record.counted)
            if not refused_bytes or self._is_exceeded_by(num_bytes - refused_bytes):
                return
            problem = f"{refused_bytes} of them had to stay, as {refusal}. Raise host_memory, or"
        raise CapacityError(
            f"device_memory={self._limits.device_memory}: {self._account.resident_bytes} bytes of "
            f"saved activations and {num_bytes} more do not fit, and {problem} raise device_memory."
        )

    def make_room(self, num_bytes: int) -> None:
        """Bring the resident bytes down until `num_bytes` more keep within the device budget.

        Drops what was read too early, waits for transfers under way, sends what had been kept.
        Returns with the budget still exceeded where nothing more can leave.
        """
        if self._is_exceeded_by(num_bytes):
            self._account.sweep(None)
        while self._is_exceeded_by(num_bytes):
            if self._reads.drop_prefetched():
                continue
            if self._writes.backlog_bytes or self._reads.num_loading:
                before = self._progress()
                self._wait_while(lambda before=before: before == self._progress(), "device budget")
            elif not self._offload_oldest():
                return

    def _is_exceeded_by(self, num_bytes: int) -> bool:
        limit = self._limits.device_memory
        held_bytes = self._account.resident_bytes + self._reserved_bytes
        return limit is not None and 0 < held_bytes > limit - num_bytes

    def _progress(self) -> tuple[int, int, int]:
        writes, reads = self._writes.backlog_bytes, self._reads.num_loading
        return self._account.resident_bytes, writes, reads

    def _offload_oldest(self) -> bool:
        """Queue the write of the oldest kept storage that no backward pass has asked for."""
        if self._writes.error:
            return False
        found, over = None, []
        for number, record in self.kept.items():
            if record.is_kept():
                over.append(number)
                if not record.unpacked or self._pack(record):
                    found = record
                    break
            elif record.filled and record.activity is Activity.IDLE:
                over.append(number)  # dead, asked for, declined: not again
        for number in over:
            del self.kept[number]
        if found is not None:
            self._writes.put(found)
        return found is not None

    def _pack(self, record: Record) -> bool:
        """Bring a chunk into one storage, which can leave; False if there is nothing in it."""
        chunk = next((found for watch in record.watches.values() if (found := watch())), None)
        packed = None if chunk is None else pack(chunk)
        if packed is None:
            return False
        storage, record.num_storages = packed
        self._account.remove(record)
        record.num_bytes = storage.nbytes()
        record.storage, record.unpacked, record.shift = storage, False, 0
        record.weak = weakref.ref(storage)
        self._account.add(record)
        return True
