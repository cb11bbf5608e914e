"""The base of tables in memory and in files: their reports, and how GPUs see them."""

from __future__ import annotations

import abc
import threading

import torch

from penstock.unified._devices import check_process, in_forked_child
from penstock.unified._report import Counters, UnifiedReport
from penstock.unified.device.hot_rows import HotRows
from penstock.unified.device.table import DeviceTable

CPU = torch.device("cpu")


class Table(abc.ABC):
    """Rows of one shape and dtype, on some tier.

    Attributes:
        device: Device to which gathered rows go.
        hot_rows: Cache of rows on GPUs; None for no cache.
    """

    def __init__(self, device: torch.device, hot_rows: HotRows | None) -> None:
        self.device = device
        self.hot_rows = hot_rows
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
                    self._device_tables[device] = self._make_device_table(device)
                found = self._device_tables[device]
        return found

    @abc.abstractmethod
    def _make_device_table(self, device: torch.device) -> DeviceTable: ...

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
        self,
        index: torch.Tensor,
        source: torch.Tensor,
        *,
        alpha: float | None = None,
        negative: bool,
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
