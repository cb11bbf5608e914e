"""Tables of a batch's rows, which say per program of a kernel whose rows it has.

Rows are grouped by adapter; a part is a run of them that belongs to one adapter. Products are
computed by blocks, of at most so many rows of one part. Sums over rows are computed by pieces,
of which a part has at most `MAX_PIECES`; they depend on the part's own length alone, so that a
part's sums are the same bits beside any others.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from penstock.lora.triton._tiles import Tiles

FIELDS = 6
"""Numbers of an entry of a table of blocks or pieces: adapter, first position, rows, number of the
first row within its adapter, first element in S, ranks of the pieces before."""
MAX_PIECES = 16
"""Of each part: sums of this many are stored and added."""


class Part(NamedTuple):
    """A run of rows of one adapter.

    Attributes:
        adapter: Number of the adapter.
        start: First position in the order of the rows.
        stop: Position behind the last.
        first: Number of the first row within the adapter's rows, which the dropout mask counts by.
    """

    adapter: int
    start: int
    stop: int
    first: int


def find_parts(counts: Sequence[int], starts: Sequence[int], *, has_order: bool) -> list[Part]:
    """Return the parts of an `AdapterRows`: one of each adapter.

    Args:
        counts: By adapter its rows.
        starts: By adapter its first row, where there is no order.
        has_order: Whether rows are those of an order, one adapter's behind the other's.
    """
    ends = list(itertools.accumulate(counts))
    return [
        Part(number, begin, begin + count, 0)
        for number, (count, start, end) in enumerate(zip(counts, starts, ends, strict=True))
        for begin in (end - count if has_order else start,)
    ]


class Entry(NamedTuple):
    """Rows of one program: positions `[first, first + num_rows)` in the order of the rows.

    Attributes:
        adapter: Number of the adapter; the number of adapters for rows of none.
        first: First position.
        num_rows: Rows.
        number: Number of the first row within the adapter's rows.
        offset: Element of S at which the first row begins.
        ranks_before: Sum of the ranks of the pieces before: a piece's partial gradient begins at
            this times the layer's width.
    """

    adapter: int
    first: int
    num_rows: int
    number: int
    offset: int
    ranks_before: int = 0


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class RowTables:
    """Tables of a batch for adapters of some ranks, on a device.

    Attributes:
        num_rows: Rows of the batch, those of no adapter included.
        ranks: By adapter its rank.
        tiles: Tile sizes, on which the tables depend.
        order: Positions' rows, int64 of shape `(num_rows,)`; None: position i is row i.
        blocks: Blocks of rows that have an adapter.
        all_blocks: Blocks of all rows.
        pieces: Pieces, ascending by adapter and by part.
        part_pieces: By part, ascending by adapter, its first piece; one more number ends the last.
        adapter_parts: By adapter its first part; one more number ends the last.
        num_elements: Elements of S: the sum of rows times rank.
        device_tables: `blocks`, `all_blocks`, `pieces`, `part_pieces` and `adapter_parts` on the
            device, int64.
    """

    num_rows: int
    ranks: tuple[int, ...]
    tiles: Tiles
    order: torch.Tensor | None
    blocks: tuple[Entry, ...]
    all_blocks: tuple[Entry, ...]
    pieces: tuple[Entry, ...]
    part_pieces: tuple[int, ...]
    adapter_parts: tuple[int, ...]
    num_elements: int
    device_tables: tuple[torch.Tensor, ...]

    @property
    def max_rank(self) -> int:
        """The largest rank; 0 without adapters."""
        return max(self.ranks, default=0)

    @property
    def num_partial_ranks(self) -> int:
        """Sum of the ranks of all pieces: rows of the partial gradients."""
        return sum(self.ranks[piece.adapter] for piece in self.pieces)


def cut_rows(
    num_rows: int,
    parts: Sequence[Part],
    ranks: Sequence[int],
    tiles: Tiles,
    *,
    device: torch.device,
    order: torch.Tensor | None = None,
) -> RowTables:
    """Cut the rows of a batch into blocks and pieces, once for all layers with these ranks.

    Args:
        num_rows: Rows of the batch.
        parts: Parts that do not overlap; rows between them have no adapter. Parts of one adapter
            have their gradients added in their order.
        ranks: By adapter its rank, at least 1.
        tiles: Tile sizes of the layers' dtype.
        device: Device of the tables.
        order: Rows by position, int64 without repetition, of which there may be fewer than
            `num_rows`: the others have no adapter. None: position i is row i.

    Raises:
        ValueError: A part overlaps another, or has an adapter, rows or an order that is not there.
    """
    parts, ranks = tuple(Part(*each) for each in parts), tuple(ranks)
    num_ordered = num_rows if order is None else len(order)
    _check_parts(parts, ranks, num_ordered, num_rows)
    offsets = (0, *itertools.accumulate((p.stop - p.start) * ranks[p.adapter] for p in parts))
    blocks = tuple(_cut_blocks(parts, ranks, offsets, tiles.down_rows))
    all_blocks = list(_cut_blocks(parts, ranks, offsets, tiles.base_rows))
    for start, stop in _find_gaps(parts, num_rows):
        gap = Part(len(ranks), start, stop, 0)
        all_blocks += _cut_blocks((gap,), (*ranks, 0), (0,), tiles.base_rows)
    all_blocks.sort(key=lambda entry: entry.first)
    sorted_parts = sorted(range(len(parts)), key=lambda at: parts[at].adapter)
    pieces: list[Entry] = []
    part_pieces, adapter_parts, ranks_before = [0], [0] * (len(ranks) + 1), 0
    for at in sorted_parts:
        part, rank = parts[at], ranks[parts[at].adapter]
        for entry in _cut_blocks((part,), ranks, (offsets[at],), _piece_rows(part, tiles)):
            pieces.append(entry._replace(ranks_before=ranks_before))
            ranks_before += rank
        part_pieces.append(len(pieces))
        adapter_parts[part.adapter + 1] += 1
    adapter_parts = list(itertools.accumulate(adapter_parts))
    host = (blocks, all_blocks, pieces, part_pieces, adapter_parts)
    return RowTables(
        num_rows=num_rows,
        ranks=ranks,
        tiles=tiles,
        order=None if order is None else _complete_order(order.to(device), num_rows),
        blocks=blocks,
        all_blocks=tuple(all_blocks),
        pieces=tuple(pieces),
        part_pieces=tuple(part_pieces),
        adapter_parts=tuple(adapter_parts),
        num_elements=offsets[-1],
        device_tables=_copy_together(host, device),
    )


def _check_parts(
    parts: Sequence[Part], ranks: Sequence[int], num_ordered: int, num_rows: int
) -> None:
    if num_ordered > num_rows:
        raise ValueError(f"order has {num_ordered} rows; accepted are at most num_rows={num_rows}")
    if any(rank < 1 for rank in ranks):
        raise ValueError(f"ranks are {tuple(ranks)}; accepted are ranks of at least 1")
    end = 0
    for part in sorted(parts, key=lambda each: (each.start, each.stop)):
        if not 0 <= part.adapter < len(ranks):
            raise ValueError(f"{part} has an adapter that is not among the {len(ranks)} with ranks")
        if not end <= part.start <= part.stop <= num_ordered:
            raise ValueError(
                f"{part} is not within rows [{end}, {num_ordered}): parts may neither overlap nor "
                "reach behind the rows"
            )
        end = part.stop


def _piece_rows(part: Part, tiles: Tiles) -> int:
    """Return the rows of a part's pieces: whole blocks, and at most `MAX_PIECES` pieces."""
    num_blocks = -(-(part.stop - part.start) // tiles.gradient_rows)
    return max(1, -(-num_blocks // MAX_PIECES)) * tiles.gradient_rows


def _cut_blocks(
    parts: Sequence[Part], ranks: Sequence[int], offsets: Sequence[int], rows: int
) -> Iterator[Entry]:
    for part, offset in zip(parts, offsets, strict=False):  # one more offset ends the last
        for start in range(part.start, part.stop, rows):
            before = start - part.start
            yield Entry(
                adapter=part.adapter,
                first=start,
                num_rows=min(rows, part.stop - start),
                number=part.first + before,
                offset=offset + before * ranks[part.adapter],
            )


def _find_gaps(parts: Sequence[Part], num_rows: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of positions, as (start, stop), that no part has."""
    end = 0
    for part in sorted(parts, key=lambda each: (each.start, each.stop)):
        if part.start > end:
            yield end, part.start
        end = part.stop
    if num_rows > end:
        yield end, num_rows


def _complete_order(order: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Append the rows that an order lacks, ascending, without waiting for the device."""
    is_ordered = torch.zeros(num_rows, dtype=torch.uint8, device=order.device)
    is_ordered.index_fill_(0, order, 1)
    rest = is_ordered.sort(stable=True).indices[: num_rows - len(order)]
    return torch.cat([order, rest]) if len(rest) else order


def _copy_together(
    tables: Sequence[Sequence[Entry] | Sequence[int]], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """Copy tables to a device at once."""
    flat = [
        [number for entry in table for number in (entry if isinstance(entry, tuple) else (entry,))]
        for table in tables
    ]
    numbers = torch.tensor(list(itertools.chain(*flat)), dtype=torch.int64, device="cpu").to(device)
    return numbers.split([len(table) for table in flat])
