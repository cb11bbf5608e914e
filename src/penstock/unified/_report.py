"""The report of a table: rows that were gathered from it, and their source."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from penstock.tables import report_table


@dataclasses.dataclass(frozen=True, kw_only=True)
class UnifiedReport:
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

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as plain data, for JSON."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        return report_table(self, title="penstock.unified")


class Counters:
    """Sums that several threads add to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, int] = {}

    def add(self, **amounts: int) -> None:
        """Add to each of the named sums."""
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] = self._sums.get(name, 0) + amount

    def __getitem__(self, name: str) -> int:
        return self._sums.get(name, 0)
