"""The source of rows of a table in a file: the disk, the page cache, or a copy in memory.

A table begins on the disk, past the page cache: a row that is read once costs least that way, and
takes no memory. Random rows come page by page, several times more slowly than the same bytes in
order. So once batches have read an eighth of a table's pages, they have taken about as long as
reading all of it in order would; it is read into memory then, if that takes no more than a quarter
of what is free, and from then on rows are copied from there. For a table that is not read again the
copy costs a small multiple of its reads; for one that is read at random for an epoch, a fraction of
them (renting against buying: Karlin, Manasse, Rudolph and Sleator, "Competitive Snoopy Caching",
Algorithmica 3, 1988).

A table that is too large for that, or is read by one of several workers, but not larger than what
is free, is read through the page cache from a quarter of its pages on. A page that is there costs a
tenth of one on the disk, one that is not a fifth more.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import resource
import time
from pathlib import Path

import numpy as np
import torch

from penstock.errors import CapacityError, StoreReadError
from penstock.memory import available_ram
from penstock.unified._row_index import as_index
from penstock.unified.file._rows import RowReader
from penstock.unified.file.layout import PAGE_BYTES
from penstock.unified.host import table as host_table
from penstock.units import format_bytes

logger = logging.getLogger(__name__)

_PART_FOR_COPY = 8  # after reads of 1/8 of the pages the table is copied
_PART_FOR_PAGE_CACHE = 4  # after reads of 1/4 of them it is read through the page cache
_PART_OF_MEMORY = 4  # a copy takes at most 1/4 of what is free
_SECONDS_BETWEEN_CHECKS = 1.0  # of how much memory is left
_LIMITS = {"VmData": resource.RLIMIT_DATA, "VmSize": resource.RLIMIT_AS}


class RowSource:
    """The cheapest source of a table's rows, while there is memory for it.

    Calls are to be ordered by the caller, with the writes of the rows.

    Args:
        reader: Reader of the file.
        may_copy: Whether memory may be taken; else the reader reads all rows.

    Attributes:
        copy_bytes: Bytes of the copy in memory; zero while there is none.
    """

    def __init__(self, reader: RowReader, *, may_copy: bool) -> None:
        self.copy_bytes = 0
        self._reader = reader
        # Without direct reads the page cache keeps what was read.
        self._may_choose = may_copy and reader.file.is_direct
        self._copy: torch.Tensor | None = None
        self._process = os.getpid()
        self._read_before = 0  # bytes that the reader had read when reads began to count
        self._num_copies = 0
        self._last_check = -math.inf

    @property
    def name(self) -> str:
        """Name of it: "direct", "page cache" or "host copy"."""
        if self._copy is not None:
            return "host copy"
        return "direct" if self._reader.file.is_direct else "page cache"

    def read_rows(self, index: torch.Tensor, out: torch.Tensor, *, negative: bool = False) -> None:
        """Read rows: `out[i] = table[index[i]]`; see `RowReader.read_rows`."""
        if self._may_choose:
            self._choose_source(index)
        if self._copy is not None:
            single_thread = self._is_forked()
            host_table.read_rows(
                self._copy, index, out, negative=negative, single_thread=single_thread
            )
        else:
            self._reader.read_rows(index, out, negative=negative)

    def update(self, rows: torch.Tensor, content: torch.Tensor) -> None:
        """Update rows that have changed; int64 (n,) and their bytes, uint8 (n, row_bytes)."""
        self._reader.update_cache(rows, content)
        if self._copy is not None:
            copied = self._copy.view(len(self._copy), -1).view(torch.uint8)
            host_table.write_rows(copied, rows, content, single_thread=self._is_forked())

    def drop(self) -> None:
        """Drop all rows in memory: they have changed, or there is no room."""
        self._reader.clear_cache()
        self._copy, self.copy_bytes = None, 0
        self._read_before = self._reader.counters["bytes_read"]

    def _choose_source(self, index: torch.Tensor) -> None:
        """Choose the source of this batch's rows."""
        layout = self._reader.layout
        num_bytes = layout.num_rows * layout.row_bytes
        if self._copy is not None:
            if self._may_check_memory() and _count_free_bytes() < num_bytes:
                logger.info("%s: memory is short; its copy is dropped", layout.path)
                self.drop()
        elif not self._reader.file.is_direct:
            if self._may_check_memory() and _count_free_bytes() < num_bytes // 2:
                logger.info("%s: memory is short; rows pass the page cache by", layout.path)
                self._reader.file.set_direct(True)
                self.drop()
        elif num_bytes:
            for_copy = (num_bytes // _PART_FOR_COPY) << self._num_copies
            for_page_cache = num_bytes // _PART_FOR_PAGE_CACHE
            requested = self._count_requested_bytes(index, for_copy, for_page_cache)
            if requested < min(for_copy, for_page_cache) or not self._may_check_memory():
                return
            free = _count_free_bytes()
            # Each of several workers would have a copy.
            is_worker = self._is_forked() or multiprocessing.parent_process() is not None
            if num_bytes <= free // _PART_OF_MEMORY and not is_worker:
                if requested >= for_copy:
                    self._make_copy()
            elif num_bytes <= free and requested >= for_page_cache:
                self._reader.file.set_direct(False)
                logger.info("%s: rows are read through the page cache now", layout.path)

    def _count_requested_bytes(self, index: torch.Tensor, *steps: int) -> int:
        """Return the bytes of all pages read; with this batch's if they reach one of `steps`."""
        layout = self._reader.layout
        requested = self._reader.counters["bytes_read"] - self._read_before
        index = as_index(index)
        pages_per_row = -(-layout.row_bytes // PAGE_BYTES)
        most = requested + index.numel() * pages_per_row * PAGE_BYTES
        if not any(requested < step <= most for step in steps):
            return requested
        # It depends on how many of the rows are the same, or lie side by side.
        rows_per_page = max(1, PAGE_BYTES // layout.row_bytes)
        # By NumPy: the threads of torch's operators are not there in a forked process. Not by its
        # `unique`, which imports a module at first: another thread's import would hang there.
        pages = np.sort(index.numpy() // rows_per_page, axis=None)
        num_pages = 1 + int(np.count_nonzero(np.diff(pages)))
        return requested + num_pages * pages_per_row * PAGE_BYTES

    def _is_forked(self) -> bool:
        return self._process != os.getpid()

    def _make_copy(self) -> None:
        """Read all rows into memory; none of them if that fails."""
        layout = self._reader.layout
        # Writes of others, or a lack of memory, may end each copy soon: they get rarer.
        self._num_copies += 1
        num_bytes = layout.num_rows * layout.row_bytes
        logger.info("%s: its rows are copied to memory, %s", layout.path, format_bytes(num_bytes))
        try:
            rows = self._reader.read_table()
        except (CapacityError, StoreReadError) as error:  # of rows that no batch may have requested
            logger.info("%s: no copy in memory: %s", layout.path, error)
            self.drop()
            return
        self._copy, self.copy_bytes = rows, num_bytes

    def _may_check_memory(self) -> bool:
        """Return whether to check how much memory is left, which takes some time."""
        now = time.monotonic()
        if now - self._last_check < _SECONDS_BETWEEN_CHECKS:
            return False
        self._last_check = now
        return True


def _count_free_bytes() -> int:
    """Return the bytes that this process may take, where others of its kind run beside it."""
    free = [available_ram()]
    for name, limit in _LIMITS.items():
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            free.append(most - _count_used_bytes(name))
    return max(0, min(free)) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def _count_used_bytes(name: str) -> int:
    """Return the bytes that count against a limit, of /proc/self/status; all, if unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrlimit(_LIMITS[name])[0]
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
