"""A step graph as arrays for the engine: objects, accesses, and in-place reuse."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.graph import Kind, StepGraph, Storage, alignment_bytes
from penstock.planner._native_calls import flatten
from penstock.planner.search._library import engine

READ, WRITE, CREATE = 0, 1, 2
PERSISTENT, INPUT, KEPT = 1, 2, 4


class GreedyWeights(NamedTuple):
    """Weights of bytes, and of operators overtaken, in the score of a greedy order.

    The ready operator with the least score runs next:

        fetch * bytes fetched + create * bytes made - release * bytes freed + late * overtaken

    Attributes:
        fetch: Of operands that were last used long ago.
        create: Of new results.
        release: Of operands that are used for the last time.
        late: Of each earlier operator of the program that has to wait, in bytes.
        capacity: Bytes touched since its last use after which an operand counts as far away.
        window: Number of candidates, the earliest in the program first.
    """

    fetch: float
    create: float
    release: float
    late: float
    capacity: int
    window: int = 128


class Problem:
    """A step graph as the engine sees it.

    Args:
        graph: The graph.
        operator_seconds: Time of each operator.
        alignment: Bytes of which offsets are multiples; None: `alignment_bytes` of the graph.
    """

    def __init__(
        self,
        graph: StepGraph,
        operator_seconds: Sequence[float] | np.ndarray,
        *,
        alignment: int | None = None,
    ) -> None:
        self.graph = graph
        self.operator_seconds = np.asarray(operator_seconds, dtype=np.float64)
        self.actual_bytes = np.array([s.num_bytes for s in graph.storages], dtype=np.int64)
        self.alignment = alignment_bytes(graph) if alignment is None else alignment
        self.object_bytes = -(-self.actual_bytes // self.alignment) * self.alignment
        operators = range(len(graph.operators))
        accesses = [_accesses(graph, operator) for operator in operators]
        reuses = [_reuses(graph, operator) for operator in operators]
        self.handle = engine().problem_new(
            len(graph.operators),
            len(graph.storages),
            self.operator_seconds,
            self.object_bytes,
            np.array([_flags(storage) for storage in graph.storages], np.uint8),
            *flatten([list(kinds) for kinds in accesses], np.int32),
            flatten([list(kinds.values()) for kinds in accesses], np.int32)[1].astype(np.uint8),
            *flatten([[old for old, _ in pairs] for pairs in reuses], np.int32),
            flatten([[new for _, new in pairs] for pairs in reuses], np.int32)[1],
            *flatten(graph.predecessors, np.int32),
        )
        weakref.finalize(self, engine().problem_free, self.handle)

    def greedy_order(
        self, base: np.ndarray, weights: GreedyWeights, *, begin: int = 0, end: int | None = None
    ) -> np.ndarray:
        """Order the operators at positions [begin, end) of a valid order anew, greedily.

        Args:
            base: A valid order, each operator once.
            weights: Weights of the score.
            begin: First position that may change.
            end: Last one, exclusive; None: the end.

        Returns:
            A valid order.
        """
        base, order = np.ascontiguousarray(base, np.int32), np.empty(len(base), np.int32)
        end = len(base) if end is None else end
        parameters = np.array(weights, np.float64)
        engine().problem_greedy_order(self.handle, base, begin, end, parameters, order)
        return order


def _flags(storage: Storage) -> int:
    if storage.persistent:
        return PERSISTENT
    flags = INPUT if storage.initial is not None else 0
    return flags | (KEPT if storage.final is not None else 0)


def _accesses(graph: StepGraph, index: int) -> dict[int, int]:
    """Return the kind of access by object that an operator accesses."""
    operator = graph.operators[index]
    kinds: dict[int, int] = {}
    for value in operator.reads:
        kinds.setdefault(graph.storage_of_value[value], READ)
    for old, _ in operator.mutates:
        kinds[graph.storage_of_value[old]] = WRITE
    for value in operator.creates:
        storage = graph.storage_of_value[value]
        kinds[storage] = WRITE if graph.storages[storage].persistent else CREATE
    return {item: kind for item, kind in kinds.items() if graph.storages[item].num_bytes}


def _reuses(graph: StepGraph, index: int) -> list[tuple[int, int]]:
    operator = graph.operators[index]
    return [
        (graph.storage_of_value[read], graph.storage_of_value[created])
        for read, created in operator.may_overwrite
        if not graph.storages[graph.storage_of_value[created]].persistent
        and graph.storages[graph.storage_of_value[read]].kind != Kind.INPUT
    ]
