"""Schedules: orders of typed nodes that make few batches.

A batch is all nodes of one type that are ready. So a schedule is a sequence of types of which the
types along every path are a subsequence, and the shortest one is a shortest common supersequence:
hard to find, but bounded from below by the longest chain of each type. With `ahead(v, t)` the most
nodes of type t on one path from node v on (ED-Batch, arXiv 2302.03851, section 2.2):

    number of batches >= sum over t of max over v of ahead(v, t)

The rule needs no training. Let F_t be the ready nodes of type t. Type t is *free* if

    max over v in F_t of ahead(v, t)  >  max over u != t, v in F_u of ahead(v, t)

Running it then lowers the bound of the remaining graph, and nothing is lost. If no type is free,
run the one with the most urgent nodes, by the lengths l(v) of the paths behind them:

    urgency_t = sum over v in F_t of l(v) ** exponent

On trees and chains some type is always free, and the result is optimal. If the rule does not meet
the bound, as on lattices, it is tried from the end too, and `schedule` searches on: see
schedule.cpp.

Scheduling and layout walk over every edge a few times, and with batches that are composed anew in
every epoch they do so in every step. In C++ that takes less than a millisecond where NumPy takes
ten; without a compiler NumPy does it, and the search beyond the rule is left out.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.batching._arrays import Integers
from penstock.batching.dynamic._typed_graph import NodeGraph
from penstock.codegen import load_optional_library, to_struct
from penstock.tables import Report

Order = tuple[Integers, Integers, Integers]
"""Nodes in execution order, the first of each batch, and its type: see `order_nodes`."""

_Batch = tuple[int, Integers]  # its type and its nodes

_SOURCES = [Path(__file__).with_name(name) for name in ("schedule.cpp", "layout.cpp")]
_MAX_NODES = 1 << 30  # node numbers have 32 bits there

# Exponents of path lengths in the urgency; infinity takes the longest path only.
# They are tried one after the other until the bound is met, and the best result is taken.
_EXPONENTS = (8.0, np.inf, 4.0)


@dataclass(frozen=True)
class BatchSchedule(Report, title="schedule"):
    """Batches of nodes of one type, in an order in which every node comes after its arguments."""

    batches: list[list[int]]
    """Node numbers of each batch, in execution order."""
    types: list[int]
    """The type of each batch."""
    lower_bound: int
    """A number of batches below which this graph has no schedule."""

    @property
    def num_batches(self) -> int:
        """Number of batches."""
        return len(self.batches)

    def _rows(self) -> list[tuple[str, object]]:
        return [
            ("num_nodes", sum(map(len, self.batches))),
            ("num_batches", self.num_batches),
            ("lower_bound", self.lower_bound),
            ("largest_batch", max(map(len, self.batches), default=0)),
        ]


def schedule(types: Sequence[int], arguments: Sequence[Sequence[int]]) -> BatchSchedule:
    """Order typed nodes so that they run in few batches, never more than by depth.

    Example:
        >>> schedule([0, 0, 1, 0, 1], [[], [], [0, 1], [], [2, 3]]).batches
        [[0, 1, 3], [2], [4]]

    Args:
        types: The type of each node, a whole number >= 0; nodes of one type can run together.
        arguments: For each node the earlier nodes that it reads, in any number.

    Returns:
        The schedule and its lower bound. An empty graph has no batches.

    Raises:
        TypeError: Types or arguments are not whole numbers.
        ValueError: Their lengths differ, a type is negative, or an argument is no earlier node.
    """
    graph = NodeGraph.of(types, arguments)
    names, codes = np.unique(graph.types, return_inverse=True)
    graph = NodeGraph(codes, graph.starts, graph.flat, len(names))
    order, starts, batch_types = order_nodes(graph, search=True)
    return BatchSchedule(
        [part.tolist() for part in np.split(order, starts[1:-1])] if len(order) else [],
        names[batch_types].tolist(),
        graph.lower_bound,
    )


def order_nodes(graph: NodeGraph, *, search: bool = False, frees_most: bool = False) -> Order:
    """Schedule a graph.

    With `search` the search goes on if the rule does not meet the bound; that takes some ten times
    as long, and a compiler. With `frees_most` the free type runs after which the fewest outputs are
    still to be read; that takes a compiler too.

    Returns:
        The nodes in execution order `[num_nodes]`, the first place of each batch
        `[num_batches + 1]`, and its type `[num_batches]`.
    """
    compiled = load_library_for(graph)
    if compiled is None:
        found, by_depth = order_by_numpy(graph), None
    else:
        found, by_depth = order_by_library(compiled, graph, search=search, frees_most=frees_most)
    if len(found[2]) > graph.lower_bound and (by_depth is None or len(found[2]) > by_depth):
        found = min(found, _to_arrays(_batch_by_depth(graph)), key=lambda order: len(order[2]))
    return found


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Return the library, or None without a compiler; the outcome is logged once."""
    return load_optional_library(
        "batching",
        _SOURCES,
        flags=("-O3",),
        functions={
            f"penstock_batching_{name}": (ctypes.c_int64, [ctypes.c_void_p])
            for name in ("order", "layout")
        },
        work="batches are planned",
        otherwise="by NumPy, without search",
    )


def load_library_for(graph: NodeGraph) -> ctypes.CDLL | None:
    """Return the library, or None if there is none or the graph is too large for it."""
    return load_library() if graph.num_nodes < _MAX_NODES and len(graph.flat) < _MAX_NODES else None


@dataclass
class GraphRequest:
    """Arguments of the library's functions that are a graph."""

    num_nodes: int
    num_types: int
    types: Integers
    starts: Integers
    flat: Integers


@dataclass
class _OrderRequest(GraphRequest):
    """Arguments of `penstock_batching_order`; the last five are written."""

    search: bool
    frees_most: bool
    order: Integers
    begins: Integers
    kinds: Integers
    lower_bound: int = 0
    num_by_depth: int = 0


def list_fields(graph: NodeGraph) -> tuple[int, int, Integers, Integers, Integers]:
    """Return the fields of a `GraphRequest`."""
    assert all(each.dtype == np.int64 for each in (graph.types, graph.starts, graph.flat))
    return graph.num_nodes, graph.num_types, graph.types, graph.starts, graph.flat


def order_by_library(
    compiled: ctypes.CDLL, graph: NodeGraph, *, search: bool, frees_most: bool
) -> tuple[Order, int]:
    """Schedule a graph as `order_nodes` does; return also the number of batches by depth."""
    make = functools.partial(np.empty, dtype=np.int64)
    outputs = (make(graph.num_nodes), make(graph.num_nodes + 1), make(graph.num_nodes))
    request = to_struct(_OrderRequest(*list_fields(graph), search, frees_most, *outputs))
    num_batches = compiled.penstock_batching_order(ctypes.byref(request))
    graph.__dict__["lower_bound"] = request.lower_bound  # so it is not computed again
    order, begins, kinds = outputs
    return (order, begins[: num_batches + 1], kinds[:num_batches]), request.num_by_depth


def order_by_numpy(graph: NodeGraph) -> Order:
    """Schedule a graph by the rule alone."""
    best: list[_Batch] | None = None
    for exponent in _EXPONENTS:
        found = _apply_rule(graph, exponent)
        if best is None or len(found) < len(best):
            best = found
        if len(best) == graph.lower_bound:
            break
    assert best is not None
    return _to_arrays(best)


def _to_arrays(batches: list[_Batch]) -> Order:
    nodes = [np.zeros(0, dtype=np.int64), *(np.sort(members) for _, members in batches)]
    kinds = np.array([kind for kind, _ in batches], dtype=np.int64)
    return np.concatenate(nodes), np.cumsum([*map(len, nodes)]), kinds


def _apply_rule(graph: NodeGraph, exponent: float) -> list[_Batch]:
    num_types, length = graph.num_types, graph.ahead[:, -1]
    weights, join = (length / max(int(length.max(initial=1)), 1)) ** exponent, np.sum
    if np.isinf(exponent):
        weights, join = length.astype(np.float64), np.max
    by_argument = np.argsort(graph.flat, kind="stable")
    readers = graph.readers_flat[by_argument]
    starts = np.searchsorted(graph.flat[by_argument], np.arange(graph.num_nodes + 1))
    waits = graph.num_arguments.copy()
    ready: list[list[Integers]] = [[] for _ in range(num_types)]
    ahead = np.zeros((num_types, num_types), dtype=np.int64)  # the most, over each type's ready
    urgency = [0.0] * num_types
    done: list[_Batch] = []
    arrived = np.flatnonzero(waits == 0)
    while True:
        for kind, nodes in _group(graph.types[arrived], arrived):
            ready[kind].append(nodes)
            np.maximum(ahead[kind], graph.ahead[nodes, :-1].max(axis=0), out=ahead[kind])
            urgency[kind] = float(join([urgency[kind], join(weights[nodes])]))
        waiting = [kind for kind in range(num_types) if ready[kind]]
        if not waiting:
            return done
        others = ahead.copy()
        np.fill_diagonal(others, 0)
        is_free = ahead.diagonal() > others.max(axis=0)
        kind = max([k for k in waiting if is_free[k]] or waiting, key=urgency.__getitem__)
        done.append((kind, np.concatenate(ready[kind])))
        ready[kind], ahead[kind], urgency[kind] = [], 0, 0.0
        reached = readers[_list_places(starts, done[-1][1])]
        np.subtract.at(waits, reached, 1)
        arrived = np.unique(reached[waits[reached] == 0])


def _batch_by_depth(graph: NodeGraph) -> list[_Batch]:
    """Batch nodes of one type and depth (TensorFlow Fold), the reference that is never exceeded."""
    keys = graph.depth * max(graph.num_types, 1) + graph.types
    return [
        (key % max(graph.num_types, 1), nodes) for key, nodes in _group(keys, np.arange(len(keys)))
    ]


def _group(keys: Integers, nodes: Integers) -> list[_Batch]:
    """Return the nodes of each key, by key."""
    return [(key, nodes[keys == key]) for key in np.unique(keys).tolist()]


def _list_places(starts: Integers, chosen: Integers) -> Integers:
    """Return the places `starts[c]` up to `starts[c + 1]` of all chosen, one after the other."""
    first, counts = starts[chosen], np.diff(starts)[chosen]
    return np.arange(counts.sum()) + np.repeat(first - np.cumsum(counts) + counts, counts)
