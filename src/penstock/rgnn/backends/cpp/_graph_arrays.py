"""Arrays of a graph for generated programs, beyond its indices: orders, chunks, tasks; made once.

Nothing here depends on the number of threads, so the order of every sum is the graph's own.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable

import torch

from penstock.rgnn import interpreter, spaces
from penstock.rgnn.backends.cpp._kernel import Field
from penstock.rgnn.backends.cpp._memory import BufferPool
from penstock.rgnn.graph import Graph, build_once, compute_offsets
from penstock.rgnn.spaces import RowMap, Space

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
    spaces.SRC_PAIR_SRC: spaces.SRC_PAIR_TYPE,
    spaces.DST_PAIR_DST: spaces.DST_PAIR_TYPE,
}


def _build_padded(build: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make a method of `GraphArrays` build its array for some maps once, padded."""

    @functools.wraps(build)
    def pad(self: GraphArrays, *maps: RowMap) -> torch.Tensor:
        found = build(self, *maps).to(self.index_dtype).contiguous()
        # Programs look ahead of the row that they are at, and so beyond the last.
        padded = found.new_zeros(found.numel() + _MAX_AHEAD)
        padded[: found.numel()] = found.flatten()
        return padded[: found.numel()].view(found.shape)

    return build_once(pad)


class GraphArrays:
    """Arrays of one graph by the fields that they fill in; each is built at its first use."""

    def __init__(self, graph: Graph) -> None:
        # Weak, for the graph owns its arrays.
        self._graph = weakref.ref(graph)
        self.buffers = BufferPool()
        most = max(graph.counts.rows(space) for space in Space)
        self.index_dtype = torch.int32 if most <= _INT32_MAX else torch.int64

    @property
    def graph(self) -> Graph:
        """The graph."""
        graph = self._graph()
        assert graph is not None
        return graph

    @_build_padded
    def index(self, row_map: RowMap) -> torch.Tensor:
        """Return, for each row, the target of the map."""
        return self.graph.index(row_map)

    @_build_padded
    def rows(self, grouping: RowMap) -> torch.Tensor:
        """Return the rows grouped by their targets."""
        return self.graph.grouped(grouping)[1]

    @_build_padded
    def starts(self, grouping: RowMap) -> torch.Tensor:
        """Return the begin of each group among the grouped rows, and the end of the last."""
        return compute_offsets(self.graph.group_sizes(grouping))

    @_build_padded
    def grouped_index(self, grouping: RowMap, row_map: RowMap) -> torch.Tensor:
        """Return the target of `row_map` for each of the grouped rows."""
        return self.graph.index(row_map).index_select(0, self.graph.grouped(grouping)[1])

    @_build_padded
    def chunks(self, grouping: RowMap) -> torch.Tensor:
        """Return the first group of each chunk, about equal in work, and the number of groups."""
        sizes = self.graph.group_sizes(grouping)
        return (
            _cut_by_work(sizes, _CHUNK_ROWS)
            if len(sizes)
            else torch.zeros(1, dtype=torch.int64, device="cpu")
        )

    @_build_padded
    def ranges(self, grouping: RowMap) -> torch.Tensor:
        """Return the first node of each range that a thread takes, and the number of nodes.

        A range goes over all relations, so it has some rows of each; which ranges there are has no
        influence on a sum's order.
        """
        sizes = self.graph.group_sizes(grouping)
        total = int((sizes + 1).sum())
        length = max(_RANGE_ROWS, _RANGE_ROWS_OF_RELATION * self.graph.num_relations)
        return _cut_by_work(sizes, max(1, min(length, -(-total // _MIN_RANGES))))

    def longest_range(self, grouping: RowMap) -> int:
        """Return the number of nodes of the largest range."""
        ranges = self.ranges(grouping)
        return int((ranges[1:] - ranges[:-1]).max()) if len(ranges) > 1 else 0

    @_build_padded
    def range_rows(self, grouping: RowMap) -> torch.Tensor:
        """Return the begin of each relation's rows, (ranges + 1, relations); of pairs, in order."""
        graph, num_nodes = self.graph, self.graph.num_nodes
        relation = graph.index(_RELATION_OF[grouping]).long()
        key = relation * num_nodes + graph.index(grouping)
        marks = (
            torch.arange(graph.num_relations, device="cpu") * num_nodes
            + self.ranges(grouping)[:, None]
        )
        return torch.searchsorted(key, marks)

    @_build_padded
    def hubs(self, grouping: RowMap) -> torch.Tensor:
        """Return the groups that have more than `HUB_ROWS` rows: too many for one thread."""
        return (self.graph.group_sizes(grouping) > HUB_ROWS).nonzero()[:, 0]

    def longest_group(self, grouping: RowMap) -> int:
        """Return the number of rows of the largest group."""
        sizes = self.graph.group_sizes(grouping)
        return int(sizes.max()) if len(sizes) else 0

    @_build_padded
    def tiles(self, row_map: RowMap) -> torch.Tensor:
        """Return short ranges of rows of one type: (type, begin, end)."""
        return self._cut_types(row_map, _TILE_ROWS)

    @_build_padded
    def tasks(self, row_map: RowMap) -> torch.Tensor:
        """Return long ranges of rows of one type: (type, begin, end)."""
        num_rows = self.graph.counts.rows(row_map.rows)
        return self._cut_types(row_map, max(_TASK_ROWS, -(-num_rows // _MAX_TASKS)))

    @_build_padded
    def task_starts(self, row_map: RowMap) -> torch.Tensor:
        """Return the first task of each type, and the number of all."""
        num_types = self.graph.counts.rows(row_map.into)
        types = self.tasks(row_map)[:, 0].long()
        return compute_offsets(torch.bincount(types, minlength=num_types))

    @build_once
    def inverse_count(self, row_map: RowMap, dtype: torch.dtype) -> torch.Tensor:
        """Return, for each target, 1 / number of rows sent to it."""
        return interpreter.inverse_count(self.graph, row_map, dtype)

    def number(self, field: Field, dtype: torch.dtype) -> int:
        """Return a field that is the same in every call: an address or a count."""
        kind, subjects = field.kind, field.subjects
        if kind == "num_rows":
            (space,) = subjects
            assert isinstance(space, Space)
            return self.graph.counts.rows(space)
        if kind.startswith("num_"):
            array = getattr(self, kind.removeprefix("num_"))(*subjects)
            return len(array) - (kind in ("num_chunks", "num_ranges"))
        arguments = (*subjects, dtype) if kind == "inverse_count" else subjects
        found = getattr(self, kind)(*arguments)
        return found if isinstance(found, int) else found.data_ptr()

    def _cut_types(self, row_map: RowMap, length: int) -> torch.Tensor:
        starts = self.graph.segment_starts(row_map)
        found = [
            (kind, first, min(first + length, end))
            for kind, (begin, end) in enumerate(itertools.pairwise(starts))
            for first in range(begin, end, length)
        ]
        return torch.tensor(found, dtype=torch.int64, device="cpu").reshape(-1, 3)


@build_once
def find_arrays(graph: Graph) -> GraphArrays:
    """Return the arrays of a graph; they live as long as it does."""
    return GraphArrays(graph)


def _cut_by_work(sizes: torch.Tensor, length: int) -> torch.Tensor:
    """Return the first group of each interval of about equal work, and the number of groups."""
    # The work up to and with each group: its rows, and one for itself.
    work = torch.cumsum(sizes + 1, 0)
    marks = torch.arange(0, int(work[-1]) if len(work) else 0, length, device="cpu")
    first = torch.searchsorted(work, marks, right=True)
    return torch.cat([torch.unique_consecutive(first), torch.tensor([len(sizes)], device="cpu")])
