"""The search for a good order of a program over scratchpads, which search.cpp does."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from penstock.codegen import load_optional_library, to_struct
from penstock.planner._native_calls import flatten, run_stoppable
from penstock.planner.scratchpad._types import ScratchpadGraph

_SOURCE = Path(__file__).with_name("search.cpp")
# One searcher accepts much at first, the other little: which is better depends on the program.
_TEMPERATURES = (0.02, 0.004)


@dataclasses.dataclass(frozen=True)
class _SearchArguments:
    """`struct Request` of search.cpp."""

    num_operators: int
    num_buffers: int
    num_pools: int
    first_predecessor: np.ndarray
    predecessors: np.ndarray
    first_use: np.ndarray
    uses: np.ndarray
    pool: np.ndarray
    size: np.ndarray
    cost: np.ndarray
    capacity: np.ndarray
    is_anchor: np.ndarray
    time_limit: float
    seed: int
    temperature: float
    stop: np.ndarray


@functools.cache
def load_search() -> ctypes.CDLL | None:
    """Return the search in C++, or None where there is no compiler."""
    return load_optional_library(
        "scratchpad",
        _SOURCE,
        flags=("-O3", "-march=native", "-pthread"),
        functions={"penstock_scratchpad_order": (ctypes.c_int64, [ctypes.c_void_p] * 2)},
        work="orders over scratchpads are searched",
        otherwise="not at all, the first one stays",
    )


def find_neighbours(graph: ScratchpadGraph) -> tuple[list[list[int]], list[list[int]]]:
    """Return the predecessors and the successors of each operator, each once, ascending."""
    predecessors: list[set[int]] = [set() for _ in graph.operators]
    successors: list[set[int]] = [set() for _ in graph.operators]
    for before, after in graph.edges:
        predecessors[after].add(before)
        successors[before].add(after)
    return [sorted(each) for each in predecessors], [sorted(each) for each in successors]


def find_anchors(graph: ScratchpadGraph) -> np.ndarray:
    """Return for each operator whether it is an anchor: the search gives it a place of its own.

    The others run just before the operator that uses them. They use nothing and are used (loads),
    or prepare one operator only, from such loads.
    """
    predecessors, successors = find_neighbours(graph)
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
    """Return orders worth solving exactly, the most promising first; the program's own is last."""
    first = graph.topological_order()
    library = load_search()
    if library is None or not graph.operators:
        return [first]
    stop = np.zeros(1, dtype=np.int32)
    request = _request(graph, pools, time_limit, stop)
    orders = [np.array(first, dtype=np.int64) for _ in _TEMPERATURES]
    costs = [-1 for _ in _TEMPERATURES]

    def search(index: int) -> None:
        own = dataclasses.replace(
            request,
            seed=seed * len(_TEMPERATURES) + index,
            temperature=_TEMPERATURES[index],
        )
        costs[index] = library.penstock_scratchpad_order(
            ctypes.byref(to_struct(own)), orders[index].ctypes.data
        )

    searches = [functools.partial(search, index) for index in range(len(_TEMPERATURES))]
    run_stoppable(searches, stop, name="scratchpad")
    found = sorted((cost, tuple(order.tolist())) for cost, order in zip(costs, orders, strict=True))
    return list(dict.fromkeys([*(order for cost, order in found if cost >= 0), first]))


def _request(
    graph: ScratchpadGraph, pools: Mapping[str, int], time_limit: float, stop: np.ndarray
) -> _SearchArguments:
    names = list(pools)
    first_predecessor, predecessors = flatten(find_neighbours(graph)[0], np.int64)
    first_use, uses = flatten([operator.buffers for operator in graph.operators], np.int64)
    return _SearchArguments(
        num_operators=len(graph.operators),
        num_buffers=len(graph.buffers),
        num_pools=len(names),
        first_predecessor=first_predecessor,
        predecessors=predecessors,
        first_use=first_use,
        uses=uses,
        pool=np.array([names.index(buffer.pool) for buffer in graph.buffers], dtype=np.int64),
        size=np.array([buffer.size for buffer in graph.buffers], dtype=np.int64),
        cost=np.array([buffer.spill_cost for buffer in graph.buffers], dtype=np.int64),
        capacity=np.array([pools[name] for name in names], dtype=np.int64),
        is_anchor=find_anchors(graph).astype(np.uint8),
        time_limit=time_limit,
        seed=0,
        temperature=0.0,
        stop=stop,
    )
