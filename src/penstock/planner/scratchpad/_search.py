"""The search for a good order of a program over scratchpads, in C++: how it is built and called."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from penstock.codegen import load_optional_library
from penstock.planner._stoppable import run_stoppable
from penstock.planner.scratchpad._types import ScratchpadGraph

_SOURCE = Path(__file__).with_name("search.cpp")
_NUM_PROPOSALS = 150_000
# One searcher accepts much at first, the other little: which is better depends on the program.
_TEMPERATURES = (0.02, 0.004)


class _Request(ctypes.Structure):
    """`struct Request` of search.cpp, field by field."""

    _fields_: ClassVar = [
        ("num_operators", ctypes.c_int64),
        ("num_buffers", ctypes.c_int64),
        ("num_pools", ctypes.c_int64),
        *[
            (name, ctypes.c_void_p)
            for name in (
                *("first_predecessor", "predecessors", "first_use", "uses"),
                *("pool", "size", "cost", "capacity", "is_anchor"),
            )
        ],
        ("num_proposals", ctypes.c_int64),
        ("time_limit", ctypes.c_double),
        ("seed", ctypes.c_int64),
        ("temperature", ctypes.c_double),
        ("stop", ctypes.c_void_p),
    ]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The search in C++, or None where there is no compiler; which one it is is logged once."""
    arguments = [ctypes.POINTER(_Request), ctypes.c_void_p]
    return load_optional_library(
        "scratchpad",
        _SOURCE,
        flags=("-O3", "-march=native", "-pthread"),
        functions={"penstock_scratchpad_order": (ctypes.c_int64, arguments)},
        work="orders over scratchpads are searched",
        otherwise="not at all, the first one stays",
    )


def neighbours(graph: ScratchpadGraph) -> tuple[list[list[int]], list[list[int]]]:
    """The predecessors and the successors of each operator, each once, ascending."""
    predecessors: list[set[int]] = [set() for _ in graph.operators]
    successors: list[set[int]] = [set() for _ in graph.operators]
    for before, after in graph.edges:
        predecessors[after].add(before)
        successors[before].add(after)
    return [sorted(each) for each in predecessors], [sorted(each) for each in successors]


def anchors(graph: ScratchpadGraph) -> np.ndarray:
    """Which operators the search places by itself; the others run just before who needs them.

    Those others need nothing and are needed (loads), or prepare one operator only, from such loads.
    """
    predecessors, successors = neighbours(graph)
    feeds = [False] * len(graph.operators)
    for op in graph.topological_order():
        if not predecessors[op]:
            feeds[op] = bool(successors[op])
        else:
            private = all(feeds[p] and len(successors[p]) == 1 for p in predecessors[op])
            feeds[op] = private and len(successors[op]) == 1
    return ~np.array(feeds, dtype=bool)


def search_orders(
    graph: ScratchpadGraph, pools: Mapping[str, int], *, time_limit: float, seed: int
) -> list[tuple[int, ...]]:
    """Orders worth solving exactly, the most promising first; the last is the first legal one."""
    first = graph.topological_order()
    compiled = library()
    if compiled is None or not graph.operators:
        return [first]
    names, (predecessors, _) = list(pools), neighbours(graph)
    arrays = [
        *_rows(predecessors),
        *_rows([operator.buffers for operator in graph.operators]),
        np.array([names.index(buffer.pool) for buffer in graph.buffers], dtype=np.int64),
        np.array([buffer.size for buffer in graph.buffers], dtype=np.int64),
        np.array([buffer.spill_cost for buffer in graph.buffers], dtype=np.int64),
        np.array([pools[name] for name in names], dtype=np.int64),
        anchors(graph).astype(np.uint8),
    ]
    stop = np.zeros(1, dtype=np.int32)
    orders = [np.array(first, dtype=np.int64) for _ in _TEMPERATURES]
    costs = [-1 for _ in _TEMPERATURES]

    def search(index: int) -> None:
        request = _Request(
            len(graph.operators),
            len(graph.buffers),
            len(pools),
            *[array.ctypes.data for array in arrays],
            _NUM_PROPOSALS,
            time_limit,
            seed * len(_TEMPERATURES) + index,
            _TEMPERATURES[index],
            stop.ctypes.data,
        )
        costs[index] = compiled.penstock_scratchpad_order(
            ctypes.byref(request), orders[index].ctypes.data
        )

    searches = [functools.partial(search, index) for index in range(len(_TEMPERATURES))]
    run_stoppable(searches, stop, name="scratchpad")
    found = sorted((cost, tuple(order.tolist())) for cost, order in zip(costs, orders, strict=True))
    return list(dict.fromkeys([*(order for cost, order in found if cost >= 0), first]))


def _rows(rows: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Lists of numbers as one array with the beginnings of each."""
    first = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return first, np.array([value for row in rows for value in row] or [0], dtype=np.int64)
