"""Indices by which compiled programs read a graph, each built once, at its first use.

Edges are kept in one internal order, by relation and within a relation by destination, so that the
rows of a relation are contiguous for a matrix product and the rows of a (destination, relation) are
contiguous for a sum. Indices are int32 where the numbers fit. They
are plain tensors even if the first need of one comes in inference mode, which may end before them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch

from penstock._lazy import cached_property
from penstock.compat.dispatch import outside_modes
from penstock.rgnn import spaces
from penstock.rgnn.spaces import Counts, RowMap, Space

_INT32_MAX = 2**31 - 1
_Build = TypeVar("_Build", bound=Callable[..., Any])


def _make_plain(build: _Build) -> _Build:
    """Make a function give plain tensors in inference mode and where operators are recorded."""
    return torch.inference_mode(False)(outside_modes(build))


def build_once(build: _Build) -> _Build:
    """Make a function or method keep its results in its first argument, such as a graph.

    They are plain tensors even if the first use of one is in inference mode, or while operators
    are recorded. Of threads that build the same at once, all get the first result: another must not
    take its place, for programs know it by its address.
    """
    build_outside: Any = _make_plain(build)

    @functools.wraps(build)
    def read(owner: Any, *args: Any, **kwargs: Any) -> Any:
        results = owner.__dict__.setdefault("_built", {})
        key = (build, args, *kwargs.items())
        if key not in results:
            results.setdefault(key, build_outside(owner, *args, **kwargs))
        return results[key]

    return cast("_Build", read)


def dtype_for(count: int) -> torch.dtype:
    """Return the integer dtype of indices below `count`."""
    return torch.int32 if count <= _INT32_MAX else torch.int64


def compute_offsets(sizes: torch.Tensor) -> torch.Tensor:
    """Return the begin of each group that has so many rows, and the end of the last."""
    starts = sizes.new_zeros(len(sizes) + 1)
    torch.cumsum(sizes, 0, out=starts[1:])
    return starts


class GraphTensors(NamedTuple):
    """Tensors and numbers that a graph is made from."""

    edge_index: torch.Tensor
    edge_type: torch.Tensor
    node_type: torch.Tensor | None
    num_nodes: int
    num_relations: int
    num_node_types: int

    @property
    def device(self) -> torch.device:
        """The device of the graph."""
        return self.edge_index.device

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return self.edge_index.shape[1]

    def rows(self, space: Space) -> int:
        """Return the number of rows in a space that arguments and results can have."""
        is_edge = space is Space.EDGE
        return self.num_edges if is_edge else getattr(self, spaces.COUNT_OF[space])


class Indices:
    """Indices derived from a graph's edges; `Graph` supplies those.

    Edges are in the internal order in everything below.
    """

    _tensors: GraphTensors
    num_nodes: int
    num_edges: int
    num_relations: int
    num_node_types: int

    @property
    def device(self) -> torch.device:
        """The device of the indices."""
        return self._tensors.edge_index.device

    @cached_property
    def counts(self) -> Counts:
        """Rows of each space, for the compiler."""
        return Counts(
            num_nodes=self.num_nodes,
            num_edges=self.num_edges,
            num_relations=self.num_relations,
            num_node_types=self.num_node_types,
            num_src_pairs=len(self._src_pairs[0]),
            num_dst_pairs=len(self._dst_pairs[0]),
            is_canonical=self._relation_types is not None,
        )

    @cached_property
    @_make_plain
    def edge_order(self) -> torch.Tensor:
        """The given number of each edge in the internal order; integers, (num_edges,)."""
        # The product is below 2**63 for any graph that fits into memory.
        key = self._tensors.edge_type.long() * self.num_nodes + self._tensors.edge_index[1]
        return torch.sort(key, stable=True)[1].to(dtype_for(self.num_edges))

    @build_once
    def index(self, row_map: RowMap) -> torch.Tensor:
        """Return the target of each row of `row_map.rows`; int32 where the numbers fit.

        Raises:
            ValueError: The node types at a relation's ends are asked for and not unique.
        """
        if row_map in (spaces.EDGE_SRC, spaces.EDGE_DST):
            ends = self._tensors.edge_index[int(row_map == spaces.EDGE_DST)]
            return ends.index_select(0, self.edge_order)
        if row_map == spaces.EDGE_TYPE:
            return self._tensors.edge_type.index_select(0, self.edge_order)
        if row_map in (spaces.EDGE_SRC_PAIR, spaces.SRC_PAIR_SRC, spaces.SRC_PAIR_TYPE):
            return self._build_pair_index(self._src_pairs, row_map.name)
        if row_map in (spaces.EDGE_DST_PAIR, spaces.DST_PAIR_DST, spaces.DST_PAIR_TYPE):
            return self._build_pair_index(self._dst_pairs, row_map.name)
        if row_map == spaces.NODE_TYPE_OF:
            if self._tensors.node_type is not None:
                return self._tensors.node_type
            return torch.zeros(self.num_nodes, dtype=torch.int32, device=self.device)
        if row_map in (spaces.RELATION_SRC_TYPE, spaces.RELATION_DST_TYPE):
            if self._relation_types is None:
                raise ValueError("a relation of this graph joins nodes of more than one type")
            return self._relation_types[int(row_map == spaces.RELATION_DST_TYPE)]
        assert row_map.into is Space.ONE, row_map
        num_rows = self.counts.rows(row_map.rows)
        return torch.zeros(num_rows, dtype=torch.int32, device=self.device)

    @build_once
    def segment_starts(self, row_map: RowMap) -> tuple[int, ...]:
        """Return the begin of each type among rows sorted by type, and the end of the last.

        Edges and pairs are stored sorted by relation; nodes need `nodes_by_type`.
        """
        if row_map.into is Space.ONE:
            return 0, self.counts.rows(row_map.rows)
        return tuple(compute_offsets(self.group_sizes(row_map).cpu()).tolist())

    @cached_property
    @_make_plain
    def nodes_by_type(self) -> torch.Tensor | None:
        """Nodes sorted by type; None where they already are, so that nothing need be permuted."""
        node_type = self._tensors.node_type
        if node_type is None or bool((node_type[1:] >= node_type[:-1]).all()):
            return None
        return torch.sort(node_type, stable=True)[1].to(dtype_for(self.num_nodes))

    @build_once
    def grouped(self, row_map: RowMap) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rows grouped by their target under `row_map` (CSR): (starts, rows).

        With `EDGE_DST` this is the CSR by destination, with `EDGE_SRC` the one by source.

        Returns:
            `starts` of shape (targets + 1,) and `rows` such that `rows[starts[i]:starts[i + 1]]`
            are those sent to `i`, in ascending order. Both int32 where the numbers fit.
        """
        index = self.index(row_map)
        dtype = dtype_for(len(index))
        starts = compute_offsets(self.group_sizes(row_map))
        if row_map == spaces.EDGE_SRC_PAIR:
            rows = self._by_src_pair[1]
        else:
            rows = torch.sort(index, stable=True)[1]
        return starts.to(dtype), rows.to(dtype)

    @build_once
    def group_sizes(self, row_map: RowMap) -> torch.Tensor:
        """Return the number of rows of each target of `row_map`; int64, on the graph's device."""
        num_targets = self.counts.rows(row_map.into)
        return torch.bincount(self.index(row_map), minlength=num_targets)

    @cached_property
    @_make_plain
    def _by_src_pair(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`relation * num_nodes + source` of all edges in ascending order, and the edges so."""
        return torch.sort(self._build_pair_keys(spaces.EDGE_SRC), stable=True)

    @cached_property
    @_make_plain
    def _src_pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Unique `relation * num_nodes + source` in ascending order, and each edge's place there.

        Sorting costs more than all else of a graph, so it is done once, for the groups as well.
        """
        keys, edges = self._by_src_pair
        unique, place = torch.unique_consecutive(keys, return_inverse=True)
        return unique, torch.empty_like(place).index_copy_(0, edges, place)

    @cached_property
    @_make_plain
    def _dst_pairs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of destinations, by which the edges are in order."""
        return torch.unique_consecutive(self._build_pair_keys(spaces.EDGE_DST), return_inverse=True)

    def _build_pair_keys(self, end: RowMap) -> torch.Tensor:
        return self.index(spaces.EDGE_TYPE).long() * self.num_nodes + self.index(end)

    def _build_pair_index(
        self, pairs: tuple[torch.Tensor, torch.Tensor], name: str
    ) -> torch.Tensor:
        key, pair_of_edge = pairs
        num_nodes = max(self.num_nodes, 1)
        if name.endswith(".type"):
            return (key // num_nodes).to(dtype_for(self.num_relations))
        if "." in name:
            return (key % num_nodes).to(dtype_for(self.num_nodes))
        return pair_of_edge.to(dtype_for(len(key)))

    @cached_property
    @_make_plain
    def _relation_types(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Node type at the source and the destination of each relation; None if not unique."""
        of_relation = []
        relation = self.index(spaces.EDGE_TYPE).long()
        node_type = self.index(spaces.NODE_TYPE_OF).long()
        for end in (spaces.EDGE_SRC, spaces.EDGE_DST):
            of_edge = node_type.index_select(0, self.index(end))
            found = torch.zeros(self.num_relations, dtype=torch.int64, device=self.device)
            found.scatter_reduce_(0, relation, of_edge, "amax")
            if not torch.equal(found.index_select(0, relation), of_edge):
                return None
            of_relation.append(found.to(dtype_for(self.num_node_types)))
        return of_relation[0], of_relation[1]
