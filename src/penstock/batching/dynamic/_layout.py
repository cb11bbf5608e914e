"""Layout: the rows of all outputs, and the rows that each batch reads.

Outputs of a batch are contiguous, batch after batch. Within a batch the order is free, and it is
chosen from the last batch backwards so that nodes that are read together are adjacent: then an
operand is a slice, and nothing is gathered. Nodes without readers take the order of their operands.
"""

from __future__ import annotations

import ctypes
from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np

from penstock.batching._arrays import Integers
from penstock.batching.dynamic._native import lay_out_by_library, load_library_for
from penstock.batching.dynamic._node_graph import NodeGraph, drop_repeats, expand_ranges
from penstock.batching.dynamic._schedule import Order, order_nodes


class Operands(NamedTuple):
    """Rows of one pool that all nodes of a batch read, for some of their arguments."""

    slots: tuple[int, ...]
    """The positions of these arguments."""
    pool: int
    start: int | None
    """First row if the rows are consecutive (then there is one slot), or None."""
    rows: slice
    """Otherwise, the range of the rows in `ExecutionPlan.index`, one slot after the other."""
    sources: tuple[int, ...]
    """The batches that write these rows."""


class BatchPlan(NamedTuple):
    """One batch: nodes of one type that run in one call."""

    kind: int
    num_nodes: int
    pool: int
    """The pool of its outputs."""
    start: int
    """Its first row there."""
    operands: tuple[Operands, ...]
    input_rows: slice
    """The range of its inputs' rows in `ExecutionPlan.input_index`."""
    inputs_in_order: int | None
    """First row if its inputs are contiguous, or None."""


@dataclass(frozen=True, eq=False)
class ExecutionPlan:
    """A graph's batches, and the row of every node's outputs."""

    batches: list[BatchPlan]
    index: Integers
    input_index: Integers
    pool_of_node: Integers
    row_of_node: Integers
    batch_of_node: Integers
    pool_rows: list[int]
    """Rows of each pool."""
    lower_bound: int
    planned_by: str
    """"C++", or "NumPy" where there is no compiler."""

    @cached_property
    def shared_pools(self) -> frozenset[int]:
        """The pools with outputs of more than one type."""
        kinds: dict[int, set[int]] = {}
        for batch in self.batches:
            kinds.setdefault(batch.pool, set()).add(batch.kind)
        return frozenset(pool for pool, types in kinds.items() if len(types) > 1)


def plan_execution(
    graph: NodeGraph, order: Order | None = None, kept: Collection[int] | None = None
) -> ExecutionPlan:
    """Lay out a graph's outputs and find the rows that each batch reads.

    The order is by default that of `order_nodes`. Rows of all types but those in `kept` are reused
    as soon as no batch has to read them; None keeps everything.
    """
    order = order_nodes(graph, frees_most=kept is not None) if order is None else order
    first_rows = None if kept is None else _reuse_rows(graph, order, kept)
    compiled = load_library_for(graph)
    if compiled is None:
        return plan_by_numpy(graph, order, first_rows)
    return _plan_by_library(compiled, graph, order, first_rows)


def _plan_by_library(
    compiled: ctypes.CDLL, graph: NodeGraph, order: Order, first_rows: Integers | None
) -> ExecutionPlan:
    laid = lay_out_by_library(compiled, graph, order, first_rows)
    begins = order[1].tolist()
    numbers = iter(laid.plan.tolist())
    pool_rows = [0] * (int(laid.pool_of_kind.max(initial=-1)) + 1)
    batches: list[BatchPlan] = []
    for first, kind in zip(begins, numbers, strict=False):
        count, pool, start, inputs, num_operands = islice(numbers, 5)
        operands: list[Operands] = []
        for _ in range(num_operands):
            source_pool, row, begin, end, num_slots = islice(numbers, 5)
            slots = tuple(islice(numbers, num_slots))
            sources = tuple(islice(numbers, next(numbers)))
            place = slice(begin, end)
            operands.append(Operands(slots, source_pool, None if row < 0 else row, place, sources))
        in_order = None if inputs < 0 else inputs
        rows = slice(first, first + count)
        batches.append(BatchPlan(kind, count, pool, start, tuple(operands), rows, in_order))
        pool_rows[pool] = max(pool_rows[pool], start + count)
    return ExecutionPlan(
        batches=batches,
        index=laid.index,
        input_index=laid.places,
        pool_of_node=laid.pool_of_kind[graph.types],
        row_of_node=laid.row_of,
        batch_of_node=laid.batch_of,
        pool_rows=pool_rows,
        lower_bound=graph.lower_bound,
        planned_by="C++",
    )


def plan_by_numpy(
    graph: NodeGraph, order: Order, first_rows: Integers | None = None
) -> ExecutionPlan:
    """Lay out a graph without the compiled library."""
    nodes, begins, kinds = order
    num_batches = len(kinds)
    bounds = begins.tolist()
    batch_of = np.empty(graph.num_nodes, dtype=np.int64)
    batch_of[nodes] = np.repeat(np.arange(num_batches), np.diff(begins))
    nodes = _sort_by_reader(graph, nodes, bounds, batch_of)
    pool_of_kind = _number_pools(graph)
    row_of = np.empty(graph.num_nodes, dtype=np.int64)
    pool_rows = [0] * (int(pool_of_kind.max(initial=-1)) + 1)
    place_in_kind = _number_within_kinds(graph)
    is_read = np.diff(graph.readers[0]) > 0
    batches: list[BatchPlan] = []
    gathered: list[Integers] = []
    num_gathered = 0
    for batch in range(num_batches):
        first, last = bounds[batch], bounds[batch + 1]
        members, kind = nodes[first:last], int(kinds[batch])
        pool = int(pool_of_kind[kind])
        _sort_unread(graph, members, row_of, int(is_read[members].sum()))
        start = pool_rows[pool] if first_rows is None else int(first_rows[batch])
        row_of[members] = np.arange(start, start + last - first)
        operands, indices = _find_operands(
            graph, members, pool_of_kind, row_of, batch_of, num_gathered
        )
        gathered += indices
        num_gathered += sum(map(len, indices))
        places = place_in_kind[members]
        in_order = int(places[0]) if _are_consecutive(places) else None
        rows = slice(first, last)
        batches.append(BatchPlan(kind, last - first, pool, start, operands, rows, in_order))
        pool_rows[pool] = max(pool_rows[pool], start + last - first)
    return ExecutionPlan(
        batches=batches,
        index=np.concatenate(gathered) if gathered else np.zeros(0, dtype=np.int64),
        input_index=place_in_kind[nodes],
        pool_of_node=pool_of_kind[graph.types],
        row_of_node=row_of,
        batch_of_node=batch_of,
        pool_rows=pool_rows,
        lower_bound=graph.lower_bound,
        planned_by="NumPy",
    )


def _reuse_rows(graph: NodeGraph, order: Order, kept: Collection[int]) -> Integers:
    """Choose the first row of each batch in its pool: the smallest free range that fits.

    A batch's rows are free for those after the last batch that reads any of them, unless its type
    is kept.
    """
    nodes, begins, kinds = order
    num_batches = len(kinds)
    batch_of = np.empty(graph.num_nodes, dtype=np.int64)
    batch_of[nodes] = np.repeat(np.arange(num_batches), np.diff(begins))
    last_read = np.arange(num_batches)
    np.maximum.at(last_read, batch_of[graph.flat], batch_of[graph.readers_flat])
    last_read[np.isin(kinds, list(kept))] = num_batches
    ends: list[list[int]] = [[] for _ in range(num_batches + 1)]
    for batch, last in enumerate(last_read.tolist()):
        ends[last].append(batch)
    pools, counts = _number_pools(graph)[kinds].tolist(), np.diff(begins).tolist()
    free_rows = [_FreeRows() for _ in range(max(pools, default=-1) + 1)]
    first_rows = np.zeros(num_batches, dtype=np.int64)
    for batch in range(num_batches):
        first_rows[batch] = free_rows[pools[batch]].allocate(counts[batch])
        for other in ends[batch]:
            free_rows[pools[other]].free(int(first_rows[other]), counts[other])
    return first_rows


class _FreeRows:
    """The free rows of a pool; above the last one there are always more."""

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []  # [start, stop), sorted, no two adjacent
        self._top = 0

    def allocate(self, count: int) -> int:
        fitting = [(stop - start, start) for start, stop in self._ranges if stop - start >= count]
        if fitting:
            width, start = min(fitting)
            self._ranges.remove((start, start + width))
            if width > count:
                insort(self._ranges, (start + count, start + width))
            return start
        start = self._top
        if self._ranges and self._ranges[-1][1] == self._top:
            start = self._ranges.pop()[0]
        self._top = start + count
        return start

    def free(self, start: int, count: int) -> None:
        merged: list[tuple[int, int]] = []
        for each in sorted([*self._ranges, (start, start + count)]):
            if merged and merged[-1][1] == each[0]:
                each = (merged.pop()[0], each[1])
            merged.append(each)
        self._ranges = merged


def _sort_unread(graph: NodeGraph, members: Integers, row_of: Integers, num_read: int) -> None:
    """Sort, in place, the nodes at the end, which have no readers, by the rows that they read."""
    unread = members[num_read:]
    if len(unread) > 1 and graph.num_arguments[unread[0]]:
        read = row_of[graph.flat[graph.starts[unread]]]
        members[num_read:] = unread[np.argsort(read, kind="stable")]


def _sort_by_reader(
    graph: NodeGraph, nodes: Integers, bounds: list[int], batch_of: Integers
) -> Integers:
    """Sort the nodes of each batch by their first reader: its batch, the argument, its place."""
    starts, readers = graph.readers
    slots = np.arange(len(graph.flat)) - graph.starts[graph.readers_flat]
    slots = slots[graph.by_argument]
    width = max(graph.num_nodes, 1)
    most = int(slots.max(initial=0)) + 1
    # All of the key but the reader's place in its batch, which is known once that is sorted.
    keys = (batch_of[readers] * most + slots) * width
    place = np.zeros(graph.num_nodes, dtype=np.int64)
    nodes = nodes.copy()
    is_read = np.diff(starts) > 0
    no_reader = np.iinfo(np.int64).max
    for first, last in zip(bounds[-2::-1], bounds[:0:-1], strict=True):
        members = nodes[first:last]
        if last - first > 1:
            read = is_read[members]
            found, begins = expand_ranges(starts, members[read])
            key = np.full(last - first, no_reader)
            if len(found):
                key[read] = np.minimum.reduceat(keys[found] + place[readers[found]], begins[:-1])
            members = members[np.argsort(key, kind="stable")]
            nodes[first:last] = members
        place[members] = np.arange(last - first)
    return nodes


def _number_pools(graph: NodeGraph) -> Integers:
    """Number the pools: types that are read as the same argument of one type share a pool."""
    parent = list(range(graph.num_types))

    def root(kind: int) -> int:
        while parent[kind] != kind:
            parent[kind] = parent[parent[kind]]
            kind = parent[kind]
        return kind

    slots = np.arange(len(graph.flat)) - graph.starts[graph.readers_flat]
    readers = graph.types[graph.readers_flat] * (int(slots.max(initial=0)) + 1) + slots
    first: dict[int, int] = {}
    for pair in drop_repeats(readers * graph.num_types + graph.types[graph.flat]).tolist():
        reader, kind = divmod(pair, graph.num_types)
        one, other = root(kind), root(first.setdefault(reader, kind))
        parent[max(one, other)] = min(one, other)
    _, pools = np.unique([root(kind) for kind in range(graph.num_types)], return_inverse=True)
    return pools.astype(np.int64)


def _number_within_kinds(graph: NodeGraph) -> Integers:
    """Number the nodes of each type."""
    narrow = graph.types.astype(np.uint16) if graph.num_types < 1 << 16 else graph.types
    by_kind = np.argsort(narrow, kind="stable")  # 16 bits are sorted by radix
    firsts = np.cumsum([0, *np.bincount(graph.types, minlength=graph.num_types)])
    places = np.empty(graph.num_nodes, dtype=np.int64)
    places[by_kind] = np.arange(graph.num_nodes) - firsts[graph.types[by_kind]]
    return places


def _find_operands(
    graph: NodeGraph,
    nodes: Integers,
    pool_of_kind: Integers,
    row_of: Integers,
    batch_of: Integers,
    num_gathered: int,
) -> tuple[tuple[Operands, ...], list[Integers]]:
    """Find the operands of a batch: slices, and per pool the rows to gather at once."""
    first = int(nodes[0])
    arity = int(graph.starts[first + 1] - graph.starts[first])
    operands: list[Operands] = []
    scattered: dict[int, list[tuple[int, Integers]]] = {}
    for slot in range(arity):
        arguments = graph.flat[graph.starts[nodes] + slot]
        rows, pool = row_of[arguments], int(pool_of_kind[graph.types[arguments[0]]])
        if _are_consecutive(rows):
            sources = _to_tuple(batch_of[arguments])
            start = int(rows[0])
            operands.append(Operands((slot,), pool, start, slice(0, len(rows)), sources))
        else:
            scattered.setdefault(pool, []).append((slot, arguments))
    indices: list[Integers] = []
    for pool, parts in scattered.items():
        arguments = np.concatenate([each for _, each in parts])
        rows = slice(num_gathered, num_gathered + len(arguments))
        num_gathered += len(arguments)
        indices.append(row_of[arguments])
        slots = tuple(slot for slot, _ in parts)
        operands.append(Operands(slots, pool, None, rows, _to_tuple(batch_of[arguments])))
    return tuple(operands), indices


def _are_consecutive(rows: Integers) -> bool:
    return int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((np.diff(rows) == 1).all())


def _to_tuple(batches: Integers) -> tuple[int, ...]:
    return tuple(drop_repeats(batches).tolist())
