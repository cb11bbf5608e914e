"""The compiled library of scheduling and layout: its build and its calls.

Scheduling and layout walk over every edge a few times, and with batches that are composed anew in
every epoch they do so in every step. In C++ that takes less than a millisecond where NumPy takes
ten; without a compiler NumPy does it, and the search beyond the rule is left out.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock.batching._arrays import Integers
from penstock.batching.dynamic._node_graph import NodeGraph
from penstock.codegen import load_optional_library

_SOURCES = [Path(__file__).with_name(name) for name in ("schedule.cpp", "layout.cpp")]
_MAX_NODES = 1 << 30  # node numbers have 32 bits there


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Return the library, or None without a compiler; the outcome is logged once."""
    count, pointer = ctypes.c_int64, ctypes.c_void_p
    graph = [count, count, pointer, pointer, pointer]
    return load_optional_library(
        "batching",
        _SOURCES,
        flags=("-O3",),
        functions={
            "penstock_batching_order": (count, [*graph, count, count, *[pointer] * 4]),
            "penstock_batching_merge": (None, [count, *[pointer] * 4]),
            "penstock_batching_layout": (count, [*graph, count, *[pointer] * 11]),
        },
        work="batches are planned",
        otherwise="by NumPy, without search",
    )


def load_library_for(graph: NodeGraph) -> ctypes.CDLL | None:
    """Return the library, or None if there is none or the graph is too large for it."""
    return load_library() if graph.num_nodes < _MAX_NODES and len(graph.flat) < _MAX_NODES else None


def merge(graphs: Sequence[NodeGraph], num_types: int) -> NodeGraph:
    """Join graphs into one, as `NodeGraph.merge` does."""
    compiled = load_library()
    if compiled is None:
        return NodeGraph.merge(graphs, num_types)
    parts = np.array([graph.pointers for graph in graphs], dtype=np.int64)
    num_nodes, num_arguments = parts[:, :2].sum(axis=0).tolist()
    types = np.empty(num_nodes, dtype=np.int64)
    starts = np.empty(num_nodes + 1, dtype=np.int64)
    flat = np.empty(num_arguments, dtype=np.int64)
    written = (each.ctypes.data for each in (parts, types, starts, flat))
    compiled.penstock_batching_merge(len(graphs), *written)
    return NodeGraph.merge(graphs, num_types, (types, starts, flat))


def order_by_library(
    compiled: ctypes.CDLL, graph: NodeGraph, *, search: bool, frees_most: bool
) -> tuple[tuple[Integers, Integers, Integers], int]:
    """Schedule a graph as `order_nodes` does; return also the number of batches by depth."""
    num_nodes = graph.num_nodes
    memory = np.empty(3 * num_nodes + 3, dtype=np.int64)
    order, begins = memory[:num_nodes], memory[num_nodes : 2 * num_nodes + 1]
    kinds, bounds = memory[2 * num_nodes + 1 : -2], memory[-2:]
    outputs = (each.ctypes.data for each in (order, begins, kinds, bounds))
    num_batches = compiled.penstock_batching_order(
        *_list_pointers(graph), search, frees_most, *outputs
    )
    lower_bound, by_depth = bounds.tolist()
    graph.remember_bound(lower_bound)
    return (order, begins[: num_batches + 1], kinds[:num_batches]), by_depth


class LibraryLayout:
    """The arrays that `penstock_batching_layout` writes."""

    def __init__(
        self,
        compiled: ctypes.CDLL,
        graph: NodeGraph,
        order: tuple[Integers, Integers, Integers],
        first_rows: Integers | None,
    ) -> None:
        nodes, begins, kinds = (np.ascontiguousarray(each, dtype=np.int64) for each in order)
        num_nodes, num_arguments = graph.num_nodes, len(graph.flat)
        self.nodes: Integers = nodes.copy()
        self.pool_of_kind: Integers = np.empty(graph.num_types, dtype=np.int64)
        self.batch_of: Integers = np.empty(num_nodes, dtype=np.int64)
        self.row_of: Integers = np.empty(num_nodes, dtype=np.int64)
        self.places: Integers = np.empty(num_nodes, dtype=np.int64)
        index = np.empty(num_arguments, dtype=np.int64)
        index_length = np.zeros(1, dtype=np.int64)
        # Six numbers for a batch, which has a node; seven for an operand, which has an argument,
        # and one for each of its sources, of which every one has an argument too.
        plan = np.empty(6 * num_nodes + 8 * num_arguments, dtype=np.int64)
        written = (self.nodes, self.pool_of_kind, self.batch_of, self.row_of, self.places)
        length = compiled.penstock_batching_layout(
            *_list_pointers(graph),
            len(kinds),
            begins.ctypes.data,
            kinds.ctypes.data,
            None if first_rows is None else first_rows.ctypes.data,
            *(each.ctypes.data for each in (*written, index, index_length, plan)),
        )
        self.index: Integers = index[: int(index_length[0])]
        self.plan: list[int] = plan[:length].tolist()


def _list_pointers(graph: NodeGraph) -> tuple[int, ...]:
    num_nodes, _, *arrays = graph.pointers
    return num_nodes, graph.num_types, *arrays
