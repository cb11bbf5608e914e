"""Typed nodes that read earlier nodes, as arrays, and the paths behind each of them.

Many small graphs together are one graph. For each node v and type t

    ahead(v, t) = [type(v) = t] + max over readers r of v of ahead(r, t)

is the number of batches of type t that are still to come in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise

import numpy as np

from penstock.batching._arrays import Integers


@dataclass(frozen=True, eq=False)
class NodeGraph:
    """Types and arguments of nodes: node v reads `flat[starts[v]:starts[v + 1]]`.

    Example:
        >>> graph = NodeGraph.of([0, 0, 1], [[], [], [0, 1]])
        >>> graph.num_nodes, graph.ahead.tolist()
        (3, [[1, 1, 2], [1, 1, 2], [0, 1, 1]])
    """

    types: Integers
    """Type of every node, `[num_nodes]`: 0 and up."""
    starts: Integers
    """First argument of every node in `flat`, `[num_nodes + 1]`."""
    flat: Integers
    """The arguments of all nodes, `[num_arguments]`; every one is an earlier node."""
    num_types: int

    @classmethod
    def of(cls, types: Sequence[int], arguments: Iterable[Sequence[int]]) -> NodeGraph:
        """Build and check a graph from lists as `schedule` takes them."""
        codes = np.asarray(types if len(types) else np.zeros(0, dtype=np.int64))
        if codes.ndim != 1 or codes.dtype.kind not in "iu":
            raise TypeError(
                f"types must be whole numbers, one per node; got dtype {codes.dtype} and shape "
                f"{codes.shape}"
            )
        lists = list(arguments)
        if len(lists) != len(codes):
            raise ValueError(
                f"arguments must have one entry per node, {len(codes)}; got {len(lists)}"
            )
        lengths = np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))
        flat = np.array(list(chain.from_iterable(lists)) or np.zeros(0, dtype=np.int64))
        if flat.dtype.kind not in "iu":
            raise TypeError(f"arguments must be whole numbers; got dtype {flat.dtype}")
        starts = np.concatenate([[0], np.cumsum(lengths)])
        graph = cls(
            codes.astype(np.int64),
            starts,
            flat.astype(np.int64),
            int(codes.max(initial=-1)) + 1,
        )
        graph.check()
        return graph

    @classmethod
    def merge(cls, graphs: Sequence[NodeGraph], num_types: int) -> NodeGraph:
        """Join graphs into one."""
        firsts = np.cumsum([0, *(graph.num_nodes for graph in graphs)])
        counts = np.array([len(graph.flat) for graph in graphs], dtype=np.int64)
        starts = np.zeros(int(firsts[-1]) + 1, dtype=np.int64)
        np.cumsum(np.concatenate([graph.num_arguments for graph in graphs]), out=starts[1:])
        flat = np.concatenate([graph.flat for graph in graphs]) + np.repeat(firsts[:-1], counts)
        return cls(np.concatenate([graph.types for graph in graphs]), starts, flat, num_types)

    def recode(self, codes: Integers, num_types: int) -> NodeGraph:
        """Return the graph with type `t` numbered `codes[t]`, of `num_types`."""
        return NodeGraph(codes[self.types], self.starts, self.flat, num_types)

    def remember_bound(self, lower_bound: int) -> None:
        """Set `lower_bound` to a value that is computed already."""
        self.__dict__["lower_bound"] = lower_bound

    def check(self) -> None:
        """Raise ValueError if a type is negative or an argument is no earlier node."""
        if len(self.types) and self.types.min() < 0:
            node = int(self.types.argmin())
            raise ValueError(f"types must be >= 0; node {node} has {self.types[node]}")
        readers = self.readers_flat
        wrong = np.flatnonzero((self.flat < 0) | (self.flat >= readers))
        if len(wrong):
            node, argument = readers[wrong[0]], self.flat[wrong[0]]
            raise ValueError(
                f"arguments must be earlier nodes; node {node} reads node {argument}, which does "
                "not come before it: number the nodes so that each comes after its arguments (in "
                "a cycle none can)"
            )

    def renumber_types(self) -> tuple[NodeGraph, Integers]:
        """Return the graph with its types numbered from 0 without gaps, and the old types."""
        names, codes = np.unique(self.types, return_inverse=True)
        return NodeGraph(codes, self.starts, self.flat, len(names)), names

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.types)

    @cached_property
    def lower_bound(self) -> int:
        """Least number of batches of any schedule (ED-Batch, arXiv 2302.03851, section 2.2)."""
        return int(self.ahead[:, :-1].max(axis=0, initial=0).sum())

    @cached_property
    def num_arguments(self) -> Integers:
        """Arguments per node, `[num_nodes]`."""
        return np.diff(self.starts)

    @cached_property
    def readers_flat(self) -> Integers:
        """The node that reads each entry of `flat`, `[num_arguments]`."""
        return np.repeat(np.arange(self.num_nodes), self.num_arguments)

    @cached_property
    def ahead(self) -> Integers:
        """Most nodes of each type on one path from a node on, itself included.

        The last column counts nodes of any type: `[num_nodes, num_types + 1]`.
        """
        own = np.eye(self.num_types, self.num_types + 1, dtype=np.int64)[self.types]
        own[:, -1] = 1
        ahead, readers = own.copy(), self.readers_flat
        level = self.depth[readers]
        from_last = np.lexsort((self.flat, -level))
        for edges in np.split(from_last, np.flatnonzero(np.diff(level[from_last])) + 1):
            begins = np.flatnonzero(np.diff(self.flat[edges], prepend=-1))
            most = np.maximum.reduceat(ahead[readers[edges]], begins, axis=0)
            arguments = self.flat[edges[begins]]
            ahead[arguments] = np.maximum(ahead[arguments], most + own[arguments])
        return ahead

    @cached_property
    def depth(self) -> Integers:
        """Nodes on the longest path up to a node, itself excluded: `[num_nodes]`."""
        depth: list[int] = []
        flat = self.flat.tolist()
        for first, last in pairwise(self.starts.tolist()):
            depth.append(1 + max(map(depth.__getitem__, flat[first:last]), default=-1))
        return np.array(depth, dtype=np.int64)


def list_places(starts: Integers, chosen: Integers) -> Integers:
    """Return the places `starts[c]` up to `starts[c + 1]` of all chosen, one after the other."""
    first, counts = starts[chosen], np.diff(starts)[chosen]
    return np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)
