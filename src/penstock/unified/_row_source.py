"""Where the rows of a table in a file come from: the disk, the page cache, or a copy in memory.

A table begins on the disk, past the page cache: a row that is not asked for again costs least that
way, and takes no memory. Rows here and there come page by page, several times more slowly than the
same bytes in order. So once batches have asked for an eighth of a table's pages, they have taken
about as long as reading all of it in order would; it is read into memory then, if that takes no
more than a quarter of what is free, and from then on rows are copied from there. What is paid for a
table that nobody asks for again is a small multiple of what its reads have cost; for one that is
read at random for an epoch it is a fraction of them (renting against buying: Karlin, Manasse,
Rudolph and Sleator, "Competitive Snoopy Caching", Algorithmica 3, 1988).

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
from penstock.unified import _host_rows
from penstock.unified._file_rows import RowReader
from penstock.unified._row_file import PAGE_BYTES
from penstock.units import format_bytes

logger = logging.getLogger(__name__)

_PART_FOR_COPY = 8  # of the pages: when they have been asked for, the table is copied
_PART_FOR_PAGE_CACHE = 4  # likewise: read through the page cache
_PART_OF_MEMORY = 4  # of what is free: the most that a copy takes
_SECONDS_BETWEEN_LOOKS = 1.0  # at how much memory is left
_LIMITS = {"VmData": resource.RLIMIT_DATA, "VmSize": resource.RLIMIT_AS}


class RowSource:
    """Gathers the rows of a table in a file from wherever that pays, while there is room.

    Calls are to be ordered by the caller, with the writes of the rows.

    Args:
        reader: reads the file.
        is_free: whether memory may be taken; else all rows are read as the reader does it.

    Attributes:
        copy_bytes: What the copy in memory takes; zero while there is none.
    """

    def __init__(self, reader: RowReader, *, is_free: bool) -> None:
        self.copy_bytes = 0
        self._reader = reader
        # Without direct reads the page cache has what is asked for again.
        self._may_choose = is_free and reader.is_direct
        self._copy: torch.Tensor | None = None
        self._process = os.getpid()
        self._read_before = 0  # bytes that the reader had read when reads began to count
        self._num_copies = 0
        self._looked = -math.inf

    @property
    def name(self) -> str:
        """Name of it: "direct", "page cache" or "host copy"."""
        if self._copy is not None:
            return "host copy"
        return "direct" if self._reader.is_direct else "page cache"

    def gather(self, index: torch.Tensor, out: torch.Tensor, *, negative: bool = False) -> None:
        """`out[i] = table[index[i]]`; as `RowReader.gather`, which says what it raises."""
        if self._may_choose:
            self._choose(index)
        if self._copy is not None:
            alone = self._is_forked()
            _host_rows.gather_rows(self._copy, index, out, negative=negative, alone=alone)
        else:
            self._reader.gather(index, out, negative=negative)

    def update(self, rows: torch.Tensor, content: torch.Tensor) -> None:
        """Hear of rows that have changed; int64 (n,) and their bytes, uint8 (n, row_bytes)."""
        self._reader.update_cache(rows, content)
        if self._copy is not None:
            copied = self._copy.view(len(self._copy), -1).view(torch.uint8)
            _host_rows.put_rows(copied, rows, content, alone=self._is_forked())

    def drop(self) -> None:
        """Forget all rows: they are others now, or there is no room."""
        self._reader.clear_cache()
        self._copy, self.copy_bytes = None, 0
        self._read_before = self._reader.counters["bytes_read"]

    def _choose(self, index: torch.Tensor) -> None:
        """Settle where the rows of this batch come from."""
        layout = self._reader.layout
        num_bytes = layout.num_rows * layout.row_bytes
        if self._copy is not None:
            if self._is_time() and _free_bytes() < num_bytes:
                logger.info("%s: memory is short; its copy goes", layout.path)
                self.drop()
        elif not self._reader.is_direct:
            if self._is_time() and _free_bytes() < num_bytes // 2:
                logger.info("%s: memory is short; rows pass the page cache by", layout.path)
                self._reader.be_direct(True)
                self.drop()
        elif num_bytes:
            for_copy = (num_bytes // _PART_FOR_COPY) << self._num_copies
            for_page_cache = num_bytes // _PART_FOR_PAGE_CACHE
            asked = self._asked_bytes(index, for_copy, for_page_cache)
            if asked < min(for_copy, for_page_cache) or not self._is_time():
                return
            free = _free_bytes()
            if num_bytes <= free // _PART_OF_MEMORY and not self._is_worker():
                if asked >= for_copy:
                    self._make_copy()
            elif num_bytes <= free and asked >= for_page_cache:
                self._reader.be_direct(False)
                logger.info("%s: rows are read through the page cache now", layout.path)

    def _asked_bytes(self, index: torch.Tensor, *steps: int) -> int:
        """Bytes in the pages that batches have asked for; with this one if that takes a step."""
        layout = self._reader.layout
        asked = self._reader.counters["bytes_read"] - self._read_before
        index = _host_rows.as_index(index)
        pages_per_row = -(-layout.row_bytes // PAGE_BYTES)
        most = asked + index.numel() * pages_per_row * PAGE_BYTES
        if not any(asked < step <= most for step in steps):
            return asked
        # It depends on how many of the rows are the same, or lie side by side.
        rows_per_page = max(1, PAGE_BYTES // layout.row_bytes)
        # By NumPy: the threads of torch's operators are not there in a forked process.
        num_pages = len(np.unique(index.numpy() // rows_per_page)) * pages_per_row
        return asked + num_pages * PAGE_BYTES

    def _is_worker(self) -> bool:
        """Whether this process is likely to be one of several, each of which would have a copy."""
        return self._is_forked() or multiprocessing.parent_process() is not None

    def _is_forked(self) -> bool:
        return self._process != os.getpid()

    def _make_copy(self) -> None:
        """Read all rows into memory; none of them if that fails."""
        layout = self._reader.layout
        # What others write, or a lack of memory, may end each copy soon: they get rarer.
        self._num_copies += 1
        num_bytes = layout.num_rows * layout.row_bytes
        logger.info("%s: its rows are copied to memory, %s", layout.path, format_bytes(num_bytes))
        try:
            rows = self._reader.read_table()
        except (CapacityError, StoreReadError) as error:  # of rows that nobody may have asked for
            logger.info("%s: no copy in memory: %s", layout.path, error)
            self.drop()
            return
        self._copy, self.copy_bytes = rows, num_bytes

    def _is_time(self) -> bool:
        """Whether it is time to look at how much memory is left, which takes some."""
        now = time.monotonic()
        if now - self._looked < _SECONDS_BETWEEN_LOOKS:
            return False
        self._looked = now
        return True


def _free_bytes() -> int:
    """Memory that this process may take, where others of its kind run beside it."""
    free = [available_ram()]
    for name, limit in _LIMITS.items():
        most = resource.getrlimit(limit)[0]
        if most != resource.RLIM_INFINITY:
            free.append(most - _taken_bytes(name))
    return max(0, min(free)) // max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def _taken_bytes(name: str) -> int:
    """What counts against a limit of this process, as /proc/self/status has it; all, if unknown."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrlimit(_LIMITS[name])[0]
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
