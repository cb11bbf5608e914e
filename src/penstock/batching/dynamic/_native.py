"""The compiled library of scheduling and layout: its build and its calls.

Scheduling and layout walk over every edge a few times, and with batches that are composed anew in
every epoch they do so in every step. In C++ that takes less than a millisecond where NumPy takes
ten; without a compiler NumPy does it, and the search beyond the rule is left out.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.batching._arrays import Integers
from penstock.batching.dynamic._node_graph import NodeGraph
from penstock.codegen import load_optional_library, to_struct

_SOURCES = [Path(__file__).with_name(name) for name in ("schedule.cpp", "layout.cpp")]
_MAX_NODES = 1 << 30  # node numbers have 32 bits there


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
class _GraphRequest:
    num_nodes: int
    num_types: int
    types: Integers
    starts: Integers
    flat: Integers


@dataclass
class _OrderRequest(_GraphRequest):
    """Arguments of `penstock_batching_order`; the last five are written."""

    search: bool
    frees_most: bool
    order: Integers
    begins: Integers
    kinds: Integers
    lower_bound: int = 0
    num_by_depth: int = 0


@dataclass
class LayoutRequest(_GraphRequest):
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


def order_by_library(
    compiled: ctypes.CDLL, graph: NodeGraph, *, search: bool, frees_most: bool
) -> tuple[tuple[Integers, Integers, Integers], int]:
    """Schedule a graph as `order_nodes` does; return also the number of batches by depth."""
    outputs = (_make(graph.num_nodes), _make(graph.num_nodes + 1), _make(graph.num_nodes))
    request = to_struct(_OrderRequest(*_list_fields(graph), search, frees_most, *outputs))
    num_batches = compiled.penstock_batching_order(ctypes.byref(request))
    graph.remember_bound(request.lower_bound)
    order, begins, kinds = outputs
    return (order, begins[: num_batches + 1], kinds[:num_batches]), request.num_by_depth


def lay_out_by_library(
    compiled: ctypes.CDLL,
    graph: NodeGraph,
    order: tuple[Integers, Integers, Integers],
    first_rows: Integers | None,
) -> LayoutRequest:
    """Lay out a schedule; `index` and `plan` have the lengths that are in use."""
    nodes, begins, kinds = (np.ascontiguousarray(each, dtype=np.int64) for each in order)
    num_nodes, num_arguments = graph.num_nodes, len(graph.flat)
    request = LayoutRequest(
        *_list_fields(graph),
        *(len(kinds), begins, kinds, first_rows, nodes.copy(), _make(graph.num_types)),
        *(_make(num_nodes), _make(num_nodes), _make(num_nodes), _make(num_arguments)),
        # Six numbers for a batch, which has a node; seven for an operand, which has an argument,
        # and one for each of its sources, of which every one has an argument too.
        _make(6 * num_nodes + 8 * num_arguments),
    )
    struct = to_struct(request)
    length = compiled.penstock_batching_layout(ctypes.byref(struct))
    request.index, request.plan = request.index[: struct.num_gathered], request.plan[:length]
    return request


def _list_fields(graph: NodeGraph) -> tuple[int, int, Integers, Integers, Integers]:
    assert all(each.dtype == np.int64 for each in (graph.types, graph.starts, graph.flat))
    return graph.num_nodes, graph.num_types, graph.types, graph.starts, graph.flat


def _make(length: int) -> Integers:
    return np.empty(length, dtype=np.int64)
