"""The base of tables in memory and in files: their reports, and how GPUs see them."""

from __future__ import annotations

import abc
import collections
import dataclasses
import os
import threading

import torch

from penstock.tables import Report
from penstock.unified._devices import check_process, in_forked_child
from penstock.unified.device.hot_rows import HotRows
from penstock.unified.device.table import DeviceTable, MemoryUse, ReadRows

CPU = torch.device("cpu")

_counting = threading.Lock()  # of all counters: a forked child renews one, not one for each table


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnifiedReport(Report, title="penstock.unified"):
    """The account of a table since it was made, over all tensors that share it in this process."""

    num_gathers: int
    """Batches of rows."""
    num_rows_gathered: int
    """Rows in them, each as often as it was asked for."""
    gathered_bytes: int
    """Bytes of those rows."""
    num_reads: int
    """Reads from the file."""
    bytes_read: int
    """Bytes of those reads, including the gaps between rows."""
    num_cache_hits: int
    """Different rows of a batch that the cache had."""
    num_cache_misses: int
    """Different rows of a batch that it had not; zero where there is no cache."""
    cache_bytes: int
    """Budget of the cache; zero where there is none."""
    copy_bytes: int
    """Bytes of a copy of the whole table in memory; zero where there is none."""
    reads: str
    """Source of the rows of a table in a file by now: "direct", the disk past the page cache; "page
    cache", the file through it; or "host copy", a copy of all rows in memory. The first batches
    decide it. "none" for a table in memory."""
    tier: str
    """Tier of the table: "host" or "file"."""
    device: str
    """Device to which gathered rows go, unless an operand is on another one."""
    method: str
    """Method of copying rows. To the CPU: "cpp" or "torch" from memory, "io_uring", "threads" or
    "python" from a file. To a GPU: "triton", which reads host memory itself, or "staged", through
    buffers of pinned memory; "none yet" before the first gather, which decides it."""


class Counters(collections.Counter[str]):
    """Sums that several threads add to."""

    def add(self, **amounts: int) -> None:
        """Add to each of the named sums."""
        with _counting:
            for name, amount in amounts.items():
                self[name] += amount


def _reset_after_fork() -> None:
    global _counting
    _counting = threading.Lock()  # a thread that the child does not have may hold the old one


os.register_at_fork(after_in_child=_reset_after_fork)


class Table(abc.ABC):
    """Rows of one shape and dtype, on some tier.

    Attributes:
        shape: Lengths (num_rows, *row).
        dtype: Dtype of the elements.
        device: Device to which gathered rows go.
        hot_rows: Cache of rows on GPUs; None for no cache.
        use: Record of what GPUs do with the memory; None for a table without memory.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        hot_rows: HotRows | None,
        use: MemoryUse | None,
    ) -> None:
        self.shape, self.dtype = shape, dtype
        self.device, self.hot_rows, self.use = device, hot_rows, use
        self._counters = Counters()
        self._device_tables: dict[torch.device, DeviceTable] = {}
        self._lock = threading.Lock()

    def device_table(self, device: torch.device) -> DeviceTable:
        """Return the table as a GPU sees it."""
        check_process(device)
        found = self._device_tables.get(device)
        if found is None:
            with self._lock:
                if device not in self._device_tables:
                    self._device_tables[device] = DeviceTable(
                        device,
                        self.shape,
                        self.dtype,
                        self._host_reader(),
                        use=self.use,
                        hot_rows=self.hot_rows,
                    )
                found = self._device_tables[device]
        return found

    @abc.abstractmethod
    def _host_reader(self) -> ReadRows:
        """Return the function that reads rows on the CPU for a GPU."""

    @abc.abstractmethod
    def read_rows(self, index: torch.Tensor, out: torch.Tensor, *, negative: bool) -> None:
        """Read rows: `out[i] = table[index[i]]`.

        Args:
            index: Integers of any shape on the CPU.
            out: Memory on the CPU of shape (*index.shape, *row), contiguous.
            negative: Whether indices below zero count from the end.
        """

    @abc.abstractmethod
    def write_rows(
        self, index: torch.Tensor, source: torch.Tensor, *, alpha: float | None, negative: bool
    ) -> None:
        """Write rows: `table[index[i]] = source[i]`; of several for one row the last one stays.

        With `alpha` add them: `table[index[i]] += alpha * source[i]`, in the order of `i`.
        """

    @abc.abstractmethod
    def contains(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor lies in the table's memory, as any device sees it."""

    @abc.abstractmethod
    def report(self) -> UnifiedReport:
        """Return the account of the table so far."""

    def count_batch(self, index: torch.Tensor, num_bytes: int) -> None:
        """Count a batch of rows that was read."""
        self._counters.add(num_gathers=1, num_rows=index.numel(), num_bytes=num_bytes)

    def _report(
        self,
        *,
        reads: Counters,
        tier: str,
        method: str,
        cache_bytes: int = 0,
        copy_bytes: int = 0,
        source: str = "none",
    ) -> UnifiedReport:
        """Return the report; `method` and `cache_bytes` are those of rows for the CPU."""
        tables = [] if in_forked_child() else list(self._device_tables.values())
        for table in tables:
            table.raise_deferred()
        on_gpus = [table.count_hits() for table in tables]
        if self.device != CPU:
            here = self._device_tables.get(self.device)
            method = "none yet" if here is None else here.method
            cache_bytes = 0 if self.hot_rows is None else self.hot_rows.budget_bytes
        return UnifiedReport(
            num_gathers=self._counters["num_gathers"],
            num_rows_gathered=self._counters["num_rows"],
            gathered_bytes=self._counters["num_bytes"],
            num_reads=reads["num_reads"],
            bytes_read=reads["bytes_read"],
            num_cache_hits=reads["num_hits"] + sum(hits for hits, _ in on_gpus),
            num_cache_misses=reads["num_misses"] + sum(misses for _, misses in on_gpus),
            cache_bytes=cache_bytes,
            copy_bytes=copy_bytes,
            reads=source,
            tier=tier,
            device=str(self.device),
            method=method,
        )
