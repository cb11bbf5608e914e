"""What generated programs need of a graph beyond its indices: orders, chunks, tasks; made once.

Nothing here depends on the number of threads, so the order of every sum is the graph's own.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable

import torch

from penstock.rgnn import _interpreter, _rows
from penstock.rgnn._backends._cpp_fields import Field
from penstock.rgnn._backends._cpp_memory import Blocks
from penstock.rgnn._graph import Graph
from penstock.rgnn._rows import RowMap, Space

_CHUNK_ROWS = 1024  # rows and groups of a chunk, unless a group has more
HUB_ROWS = 16384  # rows beyond which a group is cut into pieces, for all threads
PIECE_ROWS = 4096
_TILE_ROWS = 192  # rows of a segment GEMM between two looks at the queue
_TASK_ROWS = 2048  # rows that a part of a sum over a type has at least
_MAX_TASKS = 64  # parts of all rows, so that the parts stay small beside the rows
_RANGE_ROWS = 2048  # rows and nodes of a range of nodes, unless there are many relations
_RANGE_ROWS_OF_RELATION = 64  # of each relation then: its matrix is read once for a range
_MIN_RANGES = 8  # of the nodes, for that many threads
_MAX_AHEAD = 64  # rows; no less than kAhead of the generated programs
_INT32_MAX = 2**31 - 1
_RELATION_OF = {
    _rows.SRC_PAIR_SRC: _rows.SRC_PAIR_TYPE,
    _rows.DST_PAIR_DST: _rows.DST_PAIR_TYPE,
}


class GraphArrays:
    """Arrays of one graph by what they are; each is built when it is first asked for.

    Args:
        graph: On the CPU.
    """

    def __init__(self, graph: Graph) -> None:
        # Weak, for the arrays live in a map whose key is the graph.
        self._graph = weakref.ref(graph)
        self._known: dict[Hashable, torch.Tensor] = {}
        self.blocks = Blocks()
        counts = graph.counts
        most = max(counts.rows(space) for space in Space)
        self.index_dtype = torch.int32 if most <= _INT32_MAX else torch.int64

    @property
    def graph(self) -> Graph:
        """The graph."""
        graph = self._graph()
        assert graph is not None
        return graph

    def index(self, row_map: RowMap) -> torch.Tensor:
        """For each row, where the map sends it."""
        return self._once(("index", row_map), lambda: self.graph.index(row_map))

    def rows(self, grouping: RowMap) -> torch.Tensor:
        """The rows grouped by where they are sent."""
        return self._once(("rows", grouping), lambda: self.graph.grouped(grouping)[1])

    def starts(self, grouping: RowMap) -> torch.Tensor:
        """Where each group begins among the grouped rows, and where the last ends."""
        return self._once(("starts", grouping), lambda: _starts(self.graph.group_sizes(grouping)))

    def grouped(self, grouping: RowMap, row_map: RowMap) -> torch.Tensor:
        """Where `row_map` sends each of the grouped rows."""
        return self._once(
            ("grouped", grouping, row_map),
            lambda: self.graph.index(row_map).index_select(0, self.graph.grouped(grouping)[1]),
        )

    def chunks(self, grouping: RowMap) -> torch.Tensor:
        """The first group of each chunk, and the number of groups."""

        def build() -> torch.Tensor:
            sizes = self.graph.group_sizes(grouping)
            if not len(sizes):
                return torch.zeros(1, dtype=torch.int64)
            # The work up to and with each group: its rows, and one for itself.
            work = torch.cumsum(sizes + 1, 0)
            marks = torch.arange(0, int(work[-1]), _CHUNK_ROWS)
            first = torch.searchsorted(work, marks, right=True)
            return torch.cat([torch.unique_consecutive(first), torch.tensor([len(sizes)])])

        return self._once(("chunks", grouping), build)

    def ranges(self, grouping: RowMap) -> torch.Tensor:
        """The first node of each range, and the number of nodes.

        A range goes over all relations, so it has some rows of each; which ranges there are has no
        influence on a sum's order.
        """

        def build() -> torch.Tensor:
            sizes = self.graph.group_sizes(grouping)
            work = torch.cumsum(sizes + 1, 0)
            total = int(work[-1]) if len(work) else 0
            length = max(_RANGE_ROWS, _RANGE_ROWS_OF_RELATION * self.graph.num_relations)
            length = max(1, min(length, -(-total // _MIN_RANGES)))
            first = torch.searchsorted(work, torch.arange(0, total, length), right=True)
            return torch.cat([torch.unique_consecutive(first), torch.tensor([len(sizes)])])

        return self._once(("ranges", grouping), build)

    def longest_range(self, grouping: RowMap) -> int:
        """The number of nodes of the largest range."""
        ranges = self.ranges(grouping)
        return int((ranges[1:] - ranges[:-1]).max()) if len(ranges) > 1 else 0

    def range_rows(self, grouping: RowMap) -> torch.Tensor:
        """Where the rows of each relation begin, (ranges + 1, relations); of pairs, in order."""

        def build() -> torch.Tensor:
            graph, num_nodes = self.graph, self.graph.num_nodes
            relation = graph.index(_RELATION_OF[grouping]).long()
            key = relation * num_nodes + graph.index(grouping)
            marks = torch.arange(graph.num_relations) * num_nodes + self.ranges(grouping)[:, None]
            return torch.searchsorted(key, marks)

        return self._once(("range_rows", grouping), build)

    def hubs(self, grouping: RowMap) -> torch.Tensor:
        """The groups that have more than `HUB_ROWS` rows."""
        return self._once(
            ("hubs", grouping),
            lambda: (self.graph.group_sizes(grouping) > HUB_ROWS).nonzero()[:, 0],
        )

    def longest_group(self, grouping: RowMap) -> int:
        """The number of rows of the largest group."""
        sizes = self.graph.group_sizes(grouping)
        return int(sizes.max()) if len(sizes) else 0

    def tiles(self, row_map: RowMap) -> torch.Tensor:
        """Short ranges of rows of one type: (type, begin, end)."""
        return self._once(("tiles", row_map), lambda: self._ranges(row_map, _TILE_ROWS))

    def tasks(self, row_map: RowMap) -> torch.Tensor:
        """Long ranges of rows of one type: (type, begin, end)."""
        num_rows = self.graph.counts.rows(row_map.rows)
        length = max(_TASK_ROWS, -(-num_rows // _MAX_TASKS))
        return self._once(("tasks", row_map), lambda: self._ranges(row_map, length))

    def task_starts(self, row_map: RowMap) -> torch.Tensor:
        """The first task of each type, and the number of all."""

        def build() -> torch.Tensor:
            num_types = self.graph.counts.rows(row_map.into)
            types = self.tasks(row_map)[:, 0].long()
            return _starts(torch.bincount(types, minlength=num_types))

        return self._once(("task_starts", row_map), build)

    def inverse_count(self, row_map: RowMap, dtype: torch.dtype) -> torch.Tensor:
        """For each target, 1 / number of rows sent to it."""
        key = ("inverse_count", row_map, dtype)
        if key not in self._known:
            self._known[key] = _interpreter.inverse_count(self.graph, row_map, dtype)
        return self._known[key]

    def number(self, field: Field, dtype: torch.dtype) -> int:
        """A field of a generated program that is the same in every call: an address or a count."""
        if field.space is not None:
            return self.graph.counts.rows(field.space)
        if field.kind == "inverse_count":
            return self.inverse_count(field.maps[0], dtype).data_ptr()
        if field.kind in ("longest_group", "longest_range"):
            return getattr(self, field.kind)(*field.maps)
        if field.kind.startswith("num_"):
            array = getattr(self, field.kind.removeprefix("num_"))(*field.maps)
            return len(array) - (field.kind in ("num_chunks", "num_ranges"))
        return getattr(self, field.kind)(*field.maps).data_ptr()

    def _ranges(self, row_map: RowMap, length: int) -> torch.Tensor:
        if row_map.into is Space.ONE:
            starts = (0, self.graph.counts.rows(row_map.rows))
        else:
            starts = tuple(_starts(self.graph.group_sizes(row_map)).tolist())
        found = [
            (kind, first, min(first + length, end))
            for kind, (begin, end) in enumerate(itertools.pairwise(starts))
            for first in range(begin, end, length)
        ]
        return torch.tensor(found, dtype=torch.int64).reshape(-1, 3)

    def _once(self, key: Hashable, build: Callable[[], torch.Tensor]) -> torch.Tensor:
        if key not in self._known:
            found = build().to(self.index_dtype).contiguous()
            # Programs look ahead of the row that they are at, and so beyond the last.
            padded = found.new_zeros(found.numel() + _MAX_AHEAD)
            padded[: found.numel()] = found.flatten()
            self._known[key] = padded[: found.numel()].view(found.shape)
        return self._known[key]


_arrays: weakref.WeakKeyDictionary[Graph, GraphArrays] = weakref.WeakKeyDictionary()


def arrays_of(graph: Graph) -> GraphArrays:
    """The arrays of a graph; they go when it does."""
    if graph not in _arrays:
        _arrays[graph] = GraphArrays(graph)
    return _arrays[graph]


def _starts(sizes: torch.Tensor) -> torch.Tensor:
    starts = sizes.new_zeros(len(sizes) + 1)
    torch.cumsum(sizes, 0, out=starts[1:])
    return starts
