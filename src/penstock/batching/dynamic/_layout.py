"""Layout: the rows of all outputs, and the rows that each batch reads.

Outputs of a batch are contiguous, batch after batch. Within a batch the order is free, and it is
chosen from the last batch backwards so that nodes that are read together are adjacent: then an
operand is a slice, and nothing is gathered. Nodes without readers take the order of their operands.
"""

from __future__ import annotations

import ctypes
import functools
from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from penstock._lazy import cached_property
from penstock.batching._arrays import Integers
from penstock.batching.dynamic._schedule import (
    GraphRequest,
    Order,
    list_fields,
    load_library_for,
    order_nodes,
)
from penstock.batching.dynamic._typed_graph import NodeGraph
from penstock.codegen import to_struct


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
    lower_bound: int
    planned_by: str
    """"C++", or "NumPy" where there is no compiler."""

    @cached_property
    def pool_rows(self) -> list[int]:
        """Rows of each pool."""
        rows = [0] * (max((batch.pool for batch in self.batches), default=-1) + 1)
        for batch in self.batches:
            rows[batch.pool] = max(rows[batch.pool], batch.start + batch.num_nodes)
        return rows

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


@dataclass
class _LayoutRequest(GraphRequest):
    """Arguments of `penstock_batching_layout`; those from `nodes` on are written."""

    num_batches: int
    begins: Integers
    kinds: Integers
    first_rows: Integers | None
    nodes: Integers
    pool_of_kind: Integers
    batch_of: Integers
    row_of: Integers
    places: Integers
    index: Integers
    plan: Integers
    num_gathered: int = 0


def _plan_by_library(
    compiled: ctypes.CDLL, graph: NodeGraph, order: Order, first_rows: Integers | None
) -> ExecutionPlan:
    nodes, begins, kinds = (np.ascontiguousarray(each, dtype=np.int64) for each in order)
    num_nodes, num_arguments = graph.num_nodes, len(graph.flat)
    # Six numbers for a batch, which has a node; seven for an operand, which has an argument, and
    # one for each of its sources, of which every one has an argument too.
    most = 6 * num_nodes + 8 * num_arguments
    make = functools.partial(np.empty, dtype=np.int64)
    pool_of_kind, batch_of, row_of = make(graph.num_types), make(num_nodes), make(num_nodes)
    places, index, numbers_of_plan = make(num_nodes), make(num_arguments), make(most)
    outputs = (pool_of_kind, batch_of, row_of, places, index, numbers_of_plan)
    fields = (len(kinds), begins, kinds, first_rows, nodes.copy(), *outputs)
    request = to_struct(_LayoutRequest(*list_fields(graph), *fields))
    length = compiled.penstock_batching_layout(ctypes.byref(request))
    numbers = iter(numbers_of_plan[:length].tolist())
    batches: list[BatchPlan] = []
    for first, kind in zip(begins.tolist(), numbers, strict=False):
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
    return ExecutionPlan(
        batches=batches,
        index=index[: request.num_gathered],
        input_index=places,
        pool_of_node=pool_of_kind[graph.types],
        row_of_node=row_of,
        batch_of_node=batch_of,
        lower_bound=graph.lower_bound,
        planned_by="C++",
    )


def plan_by_numpy(
    graph: NodeGraph, order: Order, first_rows: Integers | None = None
) -> ExecutionPlan:
    """Lay out a graph without the compiled library."""
    kinds, pool_of_kind = order[2].tolist(), _number_pools(graph)
    pool_of, batch_of = pool_of_kind[graph.types], _find_batches(order)
    row_of, places = np.empty_like(batch_of), _number_within_kinds(graph)
    nodes, num_read = _sort_by_reader(graph, order)
    next_rows = [0] * (int(pool_of_kind.max(initial=-1)) + 1)
    batches: list[BatchPlan] = []
    index: list[Integers] = [np.zeros(0, dtype=np.int64)]
    for batch, (first, last) in enumerate(pairwise(order[1].tolist())):
        own, kind = nodes[first:last], kinds[batch]
        unread = own[num_read[batch] :]
        if len(unread) and graph.num_arguments[unread[0]]:  # these take the order of operands
            unread[:] = unread[np.argsort(row_of[_list_columns(graph, unread)[0]], kind="stable")]
        pool = int(pool_of_kind[kind])
        start = next_rows[pool] if first_rows is None else int(first_rows[batch])
        row_of[own] = np.arange(start, start + len(own))
        operands = _find_operands(_list_columns(graph, own), pool_of, row_of, batch_of, index)
        in_order = int(places[own[0]]) if _are_consecutive(places[own]) else None
        rows = slice(first, last)
        batches.append(BatchPlan(kind, len(own), pool, start, operands, rows, in_order))
        next_rows[pool] = start + len(own)
    return ExecutionPlan(
        batches=batches,
        index=np.concatenate(index),
        input_index=places[nodes],
        pool_of_node=pool_of,
        row_of_node=row_of,
        batch_of_node=batch_of,
        lower_bound=graph.lower_bound,
        planned_by="NumPy",
    )


def _list_columns(graph: NodeGraph, nodes: Integers) -> Integers:
    """Return the arguments of nodes of one type: `[arguments, nodes]`."""
    slots = np.arange(int(graph.num_arguments[nodes[0]]))
    return graph.flat[graph.starts[nodes] + slots[:, None]]


def _sort_by_reader(graph: NodeGraph, order: Order) -> tuple[Integers, list[int]]:
    """Sort the nodes of each batch by their first reader: its batch, the argument, its place.

    Returns the nodes, and the number of those of each batch that are read; they come first.
    """
    nodes, bounds = order[0].copy(), order[1].tolist()
    most, width = int(graph.num_arguments.max(initial=0)), graph.num_nodes
    never = np.iinfo(np.int64).max
    first_read = np.full(graph.num_nodes, never)
    for batch, (first, last) in reversed([*enumerate(pairwise(bounds))]):
        own = nodes[first:last]
        own[:] = own[np.argsort(first_read[own], kind="stable")]
        for slot, arguments in reversed([*enumerate(_list_columns(graph, own))]):
            # Of a node that is read several times the last key stays: that of its first reader.
            keys = (batch * most + slot) * width + np.arange(last - first)
            first_read[arguments[::-1]] = keys[::-1]
    is_read = first_read[nodes] < never
    return nodes, [int(is_read[first:last].sum()) for first, last in pairwise(bounds)]


def _find_operands(
    columns: Integers,
    pool_of: Integers,
    row_of: Integers,
    batch_of: Integers,
    index: list[Integers],
) -> tuple[Operands, ...]:
    """Find the operands of a batch, `[slots, nodes]`; `index` gets the rows that are no slice."""
    operands: list[Operands] = []
    scattered: dict[int, list[int]] = {}
    num_gathered = sum(map(len, index))
    for slot, nodes in enumerate(columns):
        rows, pool = row_of[nodes], int(pool_of[nodes[0]])
        if _are_consecutive(rows):
            sources = tuple(np.unique(batch_of[nodes]).tolist())
            operands.append(Operands((slot,), pool, int(rows[0]), slice(0, len(rows)), sources))
        else:
            scattered.setdefault(pool, []).append(slot)
    for pool, slots in scattered.items():
        nodes = columns[slots].ravel()
        rows = slice(num_gathered, num_gathered + len(nodes))
        num_gathered += len(nodes)
        index.append(row_of[nodes])
        sources = tuple(np.unique(batch_of[nodes]).tolist())
        operands.append(Operands(tuple(slots), pool, None, rows, sources))
    return tuple(operands)


def _number_within_kinds(graph: NodeGraph) -> Integers:
    places = np.empty(graph.num_nodes, dtype=np.int64)
    for kind in range(graph.num_types):
        own = np.flatnonzero(graph.types == kind)
        places[own] = np.arange(len(own))
    return places


def _find_batches(order: Order) -> Integers:
    """Return the batch of each node of a schedule."""
    nodes, begins, kinds = order
    batch_of = np.empty(len(nodes), dtype=np.int64)
    batch_of[nodes] = np.repeat(np.arange(len(kinds)), np.diff(begins))
    return batch_of


def _are_consecutive(rows: Integers) -> bool:
    return int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool((np.diff(rows) == 1).all())


def _reuse_rows(graph: NodeGraph, order: Order, kept: Collection[int]) -> Integers:
    """Choose the first row of each batch in its pool: the smallest free range that fits.

    A batch's rows are free for those after the last batch that reads any of them, unless its type
    is kept.
    """
    _, begins, kinds = order
    num_batches, batch_of = len(kinds), _find_batches(order)
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


def _number_pools(graph: NodeGraph) -> Integers:
    """Number the pools: types that are read as the same argument of one type share a pool."""
    pool_of = np.arange(graph.num_types)
    slots = np.arange(len(graph.flat)) - graph.starts[graph.readers_flat]
    readers = graph.types[graph.readers_flat] * (int(slots.max(initial=0)) + 1) + slots
    first: dict[int, int] = {}
    for pair in np.unique(readers * graph.num_types + graph.types[graph.flat]).tolist():
        reader, kind = divmod(pair, graph.num_types)
        one, other = sorted(pool_of[[kind, first.setdefault(reader, kind)]])
        pool_of[pool_of == other] = one
    return np.unique(pool_of, return_inverse=True)[1].astype(np.int64)
