"""Order in which the rows of a large batch are read: that of the batch, or page by page.

Random rows of a table beyond the reach of the processor's translation cache (TLB) cost a walk
through the page tables each, also with huge pages. Rows of one page read together share it, for a
sort of the batch. Whether that pays depends on the processor, on a hypervisor's own page tables, on
the batch and on the rows: so the first batches are read both ways, and the times decide.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_LEAST_TABLE_BYTES = 256 * 2**20  # behind the caches, and of many huge pages
_LEAST_INDICES = 8192
_LEAST_ROW_BYTES = 64  # a line: parts of lines would be written in any order
_MOST_ROWS = 2**32  # whose numbers the sort has 32 bits for
_NUM_TRIALS = 3  # of each order
_PAYS_BELOW = 0.95  # of the time in the batch's order


class RowOrder:
    """Choice of an order for batches of one table, by the times of the first ones of each size.

    Sizes within a power of two are decided together. Results do not depend on the choice.

    Args:
        num_rows: Rows of the table.
        row_bytes: Bytes of a row.
        clock: Clock in seconds.

    Attributes:
        last: Order of the last large batch: "as given" or "by page", or "measuring" while both are
            tried.
    """

    def __init__(
        self, num_rows: int, row_bytes: int, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.may_sort = (
            num_rows * row_bytes >= _LEAST_TABLE_BYTES
            and row_bytes >= _LEAST_ROW_BYTES
            and num_rows <= _MOST_ROWS
        )
        self.last = "as given"
        self._clock = clock
        self._trials: dict[int, tuple[list[float], list[float]]] = {}
        self._by_page: dict[int, bool] = {}

    def read(self, num_indices: int, read: Callable[[bool], None]) -> None:
        """Call `read(by_page)` once, in the order that is faster for so many rows.

        Args:
            num_indices: Rows of the batch.
            read: Function that reads the batch; true asks it to read page by page.
        """
        if not self.may_sort or num_indices < _LEAST_INDICES:
            read(False)
            return
        size = num_indices.bit_length()
        by_page = self._by_page.get(size)
        if by_page is None:
            self._try(size, num_indices, read)
        else:
            self.last = "by page" if by_page else "as given"
            read(by_page)

    def _try(self, size: int, num_indices: int, read: Callable[[bool], None]) -> None:
        """Read in the order that has fewer times yet; decide once both have enough of them."""
        trials = self._trials.setdefault(size, ([], []))
        by_page = len(trials[True]) < len(trials[False])
        self.last = "measuring"
        start = self._clock()
        read(by_page)
        trials[by_page].append((self._clock() - start) / num_indices)
        if min(map(len, trials)) >= _NUM_TRIALS:
            # The least of each: what else the machine does only adds to a time.
            self._by_page[size] = min(trials[True]) < _PAYS_BELOW * min(trials[False])
            del self._trials[size]
