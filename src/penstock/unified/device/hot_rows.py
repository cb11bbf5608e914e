"""Hot rows: rows that are kept on the device because batches ask for them often.

A batch asks for a row once or many times; its count is the number of batches, since the
others cost nothing over the link. All rows of a table cost the same to fetch and to keep, so the
most useful ones are those of the most batches, lately: a row has a count, all counts are halved
now and then, and a row that was fetched takes the place of a kept one that has a smaller count
(least frequently used with aging, of "TinyLFU: A Highly Efficient Cache Admission Policy", Einziger
et al., ACM Transactions on Storage 13(4), 2017, section 3). The slots that a batch's rows compete
for go round, so that a batch looks at no more of them than it has rows.

Everything is arithmetic on tensors of known shapes, so the host never waits for the device.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch

from penstock.units import format_bytes, parse_bytes

_MAX_COUNT = 255
_BATCHES_OF_CAPACITY = 10  # counts are halved after so many times the cache's rows
_BYTES_PER_ROW = 5  # of the whole table: its slot (4), and its count (1)

FetchRows = Callable[[torch.Tensor, torch.Tensor], None]
"""`fetch(index, out)` reads rows of the table into memory of the device, both on the device."""


class HotRows:
    """The budget of rows to keep on the device, and their choice.

    Example:
        >>> HotRows("2GiB").budget_bytes
        2147483648

    Args:
        budget: Bytes of the device's memory, such as "2GiB", including 5 bytes for each row of the
            table, by which the rows are found.
        scores: Number for each row, shape (num_rows,), such as the degrees of a graph's nodes. The
            rows of the highest scores are kept, and stay. By default the cache adapts to the
            batches.
    """

    def __init__(self, budget: int | str, *, scores: torch.Tensor | None = None) -> None:
        self.budget_bytes = parse_bytes(budget, name="budget")
        if scores is not None and (scores.dim() != 1 or scores.is_complex()):
            raise ValueError(
                f"scores: expected one number for each row, got {scores.dtype} of shape "
                f"{tuple(scores.shape)}"
            )
        self.scores = scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lookup:
    """A batch in the order of its rows, and their slots in the cache; all of shape (n,)."""

    rows: torch.Tensor
    """Rows of the batch, int64, ascending; not checked, so perhaps out of range."""
    order: torch.Tensor
    """Place of each in the batch, int64."""
    is_first: torch.Tensor
    """True if it differs from the one before, bool."""
    slots: torch.Tensor
    """Slot in which it is kept, int32, or -1."""


class RowCache:
    """The cache of one table's hot rows on one device.

    Calls are to be ordered by the caller, on the host and on the device.

    Attributes:
        rows: Kept rows, shape (capacity + 1, *row); the last one takes writes without a slot.
        version: Version of the table's content, as the caller counts it, that the rows are from.
    """

    def __init__(
        self,
        hot_rows: HotRows,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        version: int = 0,
    ) -> None:
        num_rows = shape[0]
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        room = hot_rows.budget_bytes - _BYTES_PER_ROW * (num_rows + 1)
        self.capacity = min(num_rows, room // (row_bytes + 8) - 1)
        if self.capacity < 1:
            raise ValueError(
                f"cache={format_bytes(hot_rows.budget_bytes)}: finding the hot ones among "
                f"{num_rows} rows takes {format_bytes(_BYTES_PER_ROW * (num_rows + 1))}, and a row "
                f"{format_bytes(row_bytes + 8)}; give the cache room for many"
            )
        self.version = version
        self._num_rows, self._scores = num_rows, hot_rows.scores
        self.rows = torch.zeros((self.capacity + 1, *shape[1:]), dtype=dtype, device=device)
        self._slot_of_row = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=device)
        self._row_of_slot = torch.full((self.capacity + 1,), -1, dtype=torch.int64, device=device)
        self._counts = torch.zeros(num_rows + 1, dtype=torch.uint8, device=device)
        self._sums = torch.zeros(2, dtype=torch.int64, device=device)  # hits, misses
        self._hand = 0  # the first slot that the next batch's rows compete for
        self._num_requested = 0  # rows since counts were halved
        self._filled = False

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All memory on the device."""
        return self.rows, self._slot_of_row, self._row_of_slot, self._counts, self._sums

    def count_hits(self) -> tuple[int, int]:
        """Return hits and misses so far: different rows of a batch; waits for the device."""
        hits, misses = self._sums.tolist()
        return hits, misses

    def look_up(self, index: torch.Tensor) -> Lookup:
        """Find the rows of a batch, of shape (n,), in the cache, and count hits and misses."""
        rows, order = torch.sort(index.long(), stable=True)
        is_first = torch.ones_like(rows, dtype=torch.bool)
        is_first[1:] = rows[1:] != rows[:-1]
        known = self._replace_unknown(rows)
        slots = self._slot_of_row[known]
        is_first &= known < self._num_rows
        hits = (is_first & (slots >= 0)).sum()
        self._sums += torch.stack([hits, is_first.sum() - hits])
        return Lookup(rows=rows, order=order, is_first=is_first, slots=slots)

    def fill(self, fetch: FetchRows) -> None:
        """Fetch the rows of the highest scores; once, and nothing where there are no scores."""
        if self._scores is None or self._filled:
            return
        self._filled = True
        best = self._scores.to(self.rows.device).topk(self.capacity).indices
        fetch(best, self.rows[:-1])
        self._row_of_slot[:-1] = best
        self._slot_of_row[best] = torch.arange(
            self.capacity, dtype=torch.int32, device=self.rows.device
        )

    def admit(self, lookup: Lookup, batch: torch.Tensor) -> None:
        """Keep those rows of a batch, shape (n, *row), that have larger counts than kept ones."""
        num_places = min(len(lookup.rows), self.capacity)
        if self._scores is not None or not num_places:
            return
        known = self._replace_unknown(lookup.rows)
        self._count(known)
        counts = self._counts[known].int()
        # The fetched rows, those of the largest counts first, against the next kept ones.
        fetched = torch.where(lookup.is_first & (lookup.slots < 0), counts, -1)
        fetched, place = fetched.sort(descending=True, stable=True)
        fetched, place = fetched[:num_places], place[:num_places]
        slots = torch.arange(self._hand, self._hand + num_places, device=place.device)
        slots %= self.capacity
        self._hand = (self._hand + num_places) % self.capacity
        kept = self._row_of_slot[slots]
        kept_counts = torch.where(kept < 0, 0, self._counts[kept].int())
        kept_counts, least = kept_counts.sort(stable=True)
        admitted = fetched > kept_counts
        self._replace(admitted, slots[least], known[place], batch, lookup.order[place])

    def refresh(
        self, index: torch.Tensor, fetch: FetchRows, *, before: int = 0, after: int = 0
    ) -> None:
        """Fetch kept rows again that have changed in the table.

        Args:
            index: Rows that have changed.
            fetch: Function that reads rows of the table.
            before: Version of the table before; if the cache has another one, all rows are dropped.
            after: Version of the table now.
        """
        if self.version != before:
            self.clear()
        self.version = after
        if not index.numel():
            return
        index = index.reshape(-1).long().to(self.rows.device)
        index = torch.where(index < 0, index + self._num_rows, index)
        slots = self._slot_of_row[index].long()
        is_kept = slots >= 0
        # Of the rows that are not kept only one is fetched, over and over, into the last place.
        index = torch.where(is_kept, index, index[0])
        changed = self.rows.new_empty((len(index), *self.rows.shape[1:]))
        fetch(index, changed)
        self.rows[torch.where(is_kept, slots, self.capacity)] = changed

    def clear(self) -> None:
        """Drop all rows; those of high scores are fetched again by `fill`."""
        self._slot_of_row.fill_(-1)
        self._row_of_slot.fill_(-1)
        self._filled = False

    def _replace_unknown(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows, with num_rows in place of those that are out of range."""
        return torch.where((rows >= 0) & (rows < self._num_rows), rows, self._num_rows)

    def _count(self, known: torch.Tensor) -> None:
        self._num_requested += len(known)
        if self._num_requested > _BATCHES_OF_CAPACITY * self.capacity:
            self._num_requested = 0
            self._counts >>= 1
        counts = self._counts[known]
        # Of a row that is there several times all write the same: a batch counts once.
        self._counts[known] = counts + (counts < _MAX_COUNT).to(torch.uint8)
        self._counts[self._num_rows] = 0

    def _replace(
        self,
        admitted: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        batch: torch.Tensor,
        places: torch.Tensor,
    ) -> None:
        """Put rows of the batch into slots, where `admitted`; else into the last slot."""
        slots = torch.where(admitted, slots, self.capacity)
        rows = torch.where(admitted, rows, self._num_rows)
        gone = self._row_of_slot[slots]
        self._slot_of_row[torch.where(gone < 0, self._num_rows, gone)] = -1
        self._slot_of_row[rows] = slots.int()
        self._row_of_slot[slots] = rows
        self._slot_of_row[self._num_rows] = -1
        self._row_of_slot[self.capacity] = -1
        self.rows[slots] = batch[places]


def parse_cache(cache: Any) -> HotRows | None:
    """Return the hot rows that `cache=` of `penstock.unified.unify` asks for."""
    if cache is None or isinstance(cache, HotRows):
        return cache
    return HotRows(parse_bytes(cache, name="cache")) if parse_bytes(cache, name="cache") else None
