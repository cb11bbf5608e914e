"""A step graph as arrays for the engine: objects, accesses, and in-place reuse."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.codegen import to_struct
from penstock.graph import Kind, StepGraph, alignment_bytes
from penstock.planner.search._library import engine

READ, WRITE, CREATE = 0, 1, 2
PERSISTENT, INPUT, KEPT, PINNED = 1, 2, 4, 8


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


@dataclass(frozen=True)
class _ProblemArguments:
    """`struct ProblemArguments` of engine.cpp."""

    num_operators: int
    num_objects: int
    seconds: np.ndarray
    bytes: np.ndarray
    flags: np.ndarray
    first_access: np.ndarray
    access_object: np.ndarray
    access_kind: np.ndarray
    first_reuse: np.ndarray
    reuse_from: np.ndarray
    reuse_by: np.ndarray


@dataclass(frozen=True)
class _GreedyArguments:
    """`struct GreedyArguments` of engine.cpp."""

    first_predecessor: np.ndarray
    predecessors: np.ndarray
    base: np.ndarray
    begin: int
    end: int
    fetch: float
    create: float
    release: float
    late: float
    capacity: int
    window: int
    noise: np.ndarray | None
    order: np.ndarray


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
        flags = [_flags(graph, storage) for storage in range(len(graph.storages))]
        self.object_flags = np.array(flags, np.uint8)
        accesses = [_accesses(graph, operator) for operator in range(len(graph.operators))]
        reuses = [_reuses(graph, operator) for operator in range(len(graph.operators))]
        self.first_access = _offsets(accesses)
        self.access_object = np.array([o for part in accesses for o, _ in part], dtype=np.int32)
        self.access_kind = np.array([kind for part in accesses for _, kind in part], dtype=np.uint8)
        arguments = _ProblemArguments(
            num_operators=len(graph.operators),
            num_objects=len(graph.storages),
            seconds=self.operator_seconds,
            bytes=self.object_bytes,
            flags=self.object_flags,
            first_access=self.first_access,
            access_object=self.access_object,
            access_kind=self.access_kind,
            first_reuse=_offsets(reuses),
            reuse_from=np.array([a for part in reuses for a, _ in part], dtype=np.int32),
            reuse_by=np.array([b for part in reuses for _, b in part], dtype=np.int32),
        )
        self.handle = engine().problem_new(ctypes.byref(to_struct(arguments)))
        weakref.finalize(self, engine().problem_free, self.handle)
        self._first_predecessor = np.cumsum([0, *map(len, graph.predecessors)], dtype=np.int32)
        self._predecessors = np.array(
            [before for part in graph.predecessors for before in part], dtype=np.int32
        )

    def greedy_order(
        self,
        base: np.ndarray,
        weights: GreedyWeights,
        *,
        begin: int = 0,
        end: int | None = None,
        noise: np.ndarray | None = None,
    ) -> np.ndarray:
        """Order the operators at positions [begin, end) of a valid order anew, greedily.

        Args:
            base: A valid order, each operator once.
            weights: Weights of the score.
            begin: First position that may change.
            end: Last one, exclusive; None: the end.
            noise: For each operator the fraction by which its score is changed.

        Returns:
            A valid order.
        """
        arguments = _GreedyArguments(
            first_predecessor=self._first_predecessor,
            predecessors=self._predecessors,
            base=np.ascontiguousarray(base, np.int32),
            begin=begin,
            end=len(base) if end is None else end,
            **weights._asdict(),
            noise=None if noise is None else np.ascontiguousarray(noise, np.float32),
            order=np.empty(len(base), np.int32),
        )
        engine().problem_greedy_order(self.handle, ctypes.byref(to_struct(arguments)))
        return arguments.order


def _flags(graph: StepGraph, index: int) -> int:
    storage = graph.storages[index]
    if storage.persistent:
        return PERSISTENT
    flags = INPUT if storage.initial is not None else 0
    return flags | (KEPT if storage.final is not None else 0)


def _accesses(graph: StepGraph, index: int) -> list[tuple[int, int]]:
    """Return the objects that an operator accesses and the kinds of access, each object once."""
    operator = graph.operators[index]
    kinds: dict[int, int] = {}
    for value in operator.reads:
        kinds.setdefault(graph.storage_of_value[value], READ)
    for old, _ in operator.mutates:
        kinds[graph.storage_of_value[old]] = WRITE
    for value in operator.creates:
        storage = graph.storage_of_value[value]
        kinds[storage] = WRITE if graph.storages[storage].persistent else CREATE
    return [(o, kind) for o, kind in kinds.items() if graph.storages[o].num_bytes]


def _reuses(graph: StepGraph, index: int) -> list[tuple[int, int]]:
    operator = graph.operators[index]
    return [
        (graph.storage_of_value[read], graph.storage_of_value[created])
        for read, created in operator.may_overwrite
        if not graph.storages[graph.storage_of_value[created]].persistent
        and graph.storages[graph.storage_of_value[read]].kind != Kind.INPUT
    ]


def _offsets(parts: list[list[tuple[int, int]]]) -> np.ndarray:
    return np.cumsum([0, *map(len, parts)], dtype=np.int32)
