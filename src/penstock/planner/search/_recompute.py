"""Recomputation: dropping values after the forward pass, and making them again before their use.

Drops are decided by storage. The value of a dropped storage is made again by running the operators
that made it, on operands that are on the device, that come back, or that are made again themselves;
operands live on until then. A parameter that was updated in the meantime cannot come back, and an
order that would need it does not exist.

A value that was made again is kept until its last use. Where it is large and its uses are far
apart, it may be dropped after each of them, and made again for each: such a storage is dropped
*briefly* too, which sets of storages write as its complement (`~storage`).
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable

import numpy as np

from penstock.graph import Phase, StepGraph
from penstock.planner._native_calls import flatten
from penstock.planner.search._problem import engine

_MAX_CHAIN = 512  # operators run again for one operand


def mark_brief(items: Iterable[int]) -> frozenset[int]:
    """Return the marks of storages that are dropped after each use in the backward pass."""
    return frozenset(~item for item in items)


class RecomputeChains:
    """Chains of operators by which the values of a graph can be made again.

    Attributes:
        chain_of: For each storage that can be dropped the operators that make it, in order.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self._storage_of = graph.storage_of_value
        writers: dict[int, list[int]] = {}
        for index, operator in enumerate(graph.operators):
            for value in operator.makes:
                writers.setdefault(self._storage_of[value], []).append(index)
        self.chain_of = {
            item: chain for item, chain in writers.items() if self._can_drop(item, chain)
        }
        # The engine's object has the accesses of first and second runs, and reads these arrays.
        again = [operator.recompute_target is not None for operator in graph.operators]
        operators = list(zip(graph.operators, again, strict=True))
        rows = [
            *(operator.needs for operator in graph.operators),
            *(operator.makes for operator in graph.operators),
            *(operator.reads if other else operator.needs for operator, other in operators),
            *(operator.creates if other else operator.makes for operator, other in operators),
            *(self.chain_of.get(item, ()) for item in range(len(graph.storages))),
        ]
        given = [storage.initial for storage in graph.storages]
        self._arrays = (
            np.array(graph.storage_of_value, np.int32),
            np.array([-1 if value is None else value for value in given], np.int32),
            np.array([o.phase is Phase.FORWARD for o in graph.operators], np.uint8),
            *flatten(rows, np.int32),
        )
        sizes = len(graph.operators), len(graph.storages)
        self._expander = engine().expander_new(*sizes, *self._arrays)
        weakref.finalize(self, engine().expander_free, self._expander)

    def _can_drop(self, item: int, chain: list[int]) -> bool:
        storage = self.graph.storages[item]
        if storage.persistent or storage.initial is not None or storage.final is not None:
            return False
        return storage.num_bytes > 0 and all(self._runs_again(index, item) for index in chain)

    def _runs_again(self, index: int, item: int) -> bool:
        """Return whether an operator may run again to make a storage's value."""
        operator = self.graph.operators[index]
        if not operator.recomputable:
            return False
        if operator.recompute_target is not None:
            return True
        return all(self._storage_of[new] == item for _, new in operator.mutates)

    def expand(self, order: np.ndarray, dropped: Collection[int]) -> np.ndarray | None:
        """Insert second runs before the operators that need dropped storages.

        Storages are dropped after their last use in the forward pass, and after their last use;
        those whose complements are in `dropped` after each use in the backward pass. None if an
        operand is not available.
        """
        order = np.ascontiguousarray(order, np.int32)
        items = np.fromiter(dropped, np.int32, len(dropped))
        length = engine().expander_expand(
            self._expander, order, len(order), items, len(items), _MAX_CHAIN
        )
        if length < 0:
            return None
        expanded = np.empty(length, np.int32)
        engine().expander_read(self._expander, expanded)
        return expanded
