"""Recomputation: which values are dropped after the forward pass, and the order that makes them
again just before they are needed.

What is dropped is decided by storage. A dropped storage's value is made again by running the
operators that made it, on operands that are there, that are brought back, or that are made again
themselves; operands live on until then. A parameter that was updated in the meantime cannot be had
back, and an order that would need it does not exist.

What is made again stays until its last use. Where it is large and its uses are far apart, it may be
given up after each of them, and made again for each: such a storage is dropped *briefly* too, which
sets of storages write as its complement (`~storage`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np

from penstock.graph import StepGraph
from penstock.planner.search._engine import Recipes


def briefly(items: Iterable[int]) -> frozenset[int]:
    """What says of storages that they are given up after each use of the backward pass."""
    return frozenset(~item for item in items)


class Recomputation:
    """How the values of a graph can be made again.

    Args:
        graph: The graph.

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
        self._recipes = Recipes(graph, self.chain_of)

    def _can_drop(self, item: int, chain: list[int]) -> bool:
        storage = self.graph.storages[item]
        if storage.persistent or storage.initial is not None or storage.final is not None:
            return False
        return storage.num_bytes > 0 and all(self._runs_again(index, item) for index in chain)

    def _runs_again(self, index: int, item: int) -> bool:
        """Whether an operator may run again for the sake of an object."""
        operator = self.graph.operators[index]
        if not operator.recomputable:
            return False
        if operator.recompute_target is not None:
            return True
        return all(self._storage_of[new] == item for _, new in operator.mutates)

    def expand(self, order: np.ndarray, dropped: Collection[int]) -> np.ndarray | None:
        """Put what makes the dropped storages again before the operators that need them.

        Args:
            order: Operators, each once.
            dropped: Storages that are given up after their last use in the forward pass, and
                after their last use; the complements of those that are given up after each use in
                the backward pass.

        Returns:
            The longer order; None if an operand cannot be had.
        """
        return self._recipes.expand(order, dropped)
