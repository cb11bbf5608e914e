"""Candidates of the genetic search: from an order and an allocation to the time of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from penstock.graph import StepGraph
from penstock.planner._request import LinkRates
from penstock.planner.genetic._genes import SizeClasses
from penstock.planner.search import EvictionChoice, OperatorSequence, Problem


class Evaluator:
    """A step graph with a memory and links, for candidates of any order and allocation.

    Args:
        graph: The graph.
        operator_seconds: Time of each operator.
        rates: Of the links to the tier below the device.
        capacity: Bytes of the device for values.

    Attributes:
        sizes: Distinct sizes of values, in rising order.
        size_of_object: For each storage the index of its size; -1 for those without bytes.
        capacity: Bytes of the device for values.
    """

    def __init__(
        self,
        graph: StepGraph,
        operator_seconds: Sequence[float],
        rates: LinkRates,
        capacity: int,
    ) -> None:
        self._problem = Problem(graph, operator_seconds)
        self._rates = rates
        num_bytes = self._problem.object_bytes
        self.sizes: tuple[int, ...] = tuple(np.unique(num_bytes[num_bytes > 0]).tolist())
        self.capacity = capacity
        self.size_of_object = np.searchsorted(self.sizes, num_bytes).astype(np.int32)
        self.size_of_object[num_bytes == 0] = -1

    def count_values(self, order: Sequence[int]) -> list[int]:
        """Return how many values of each size are live at once in an order, at most."""
        sequence = OperatorSequence(self._problem, order)
        return sequence.class_needs(self.size_of_object, len(self.sizes))[1].tolist()

    def evaluate(
        self, order: Sequence[int], classes: Sequence[int], wanted: Mapping[int, int]
    ) -> tuple[SizeClasses, EvictionChoice, list[int]] | None:
        """Repair an allocation, and replay a step with the evictions that follow from it.

        Args:
            order: Operators by position, each once.
            classes: For each distinct size the class that it is in, named by its largest size.
            wanted: Objects by class; they are made to hold every operator and to fit the capacity.

        Returns:
            The repaired allocation, the residency with its times, and the address of each chain of
            intervals; None where an operator does not fit.
        """
        sequence = OperatorSequence(self._problem, order)
        names = sorted(set(classes))
        class_bytes = np.array([self.sizes[name] for name in names], np.int64)
        class_of_size = np.append(np.searchsorted(names, classes), -1).astype(np.int32)
        class_of_object = class_of_size[self.size_of_object]
        least, most = sequence.class_needs(class_of_object, len(names))
        counts = _repair(
            np.array([wanted.get(name, 0) for name in names], np.int64),
            least,
            most,
            class_bytes,
            self.capacity,
        )
        if counts is None:
            return None
        chosen = sequence.evict_in_classes(class_of_object, counts, class_bytes)
        if chosen is None:
            return None
        evicted, intervals = chosen
        replay = sequence.replay(evicted, intervals, (self._rates,))
        if replay.overflow > 0:
            return None
        allocation = SizeClasses(tuple(classes), dict(zip(names, counts.tolist(), strict=True)))
        residency = EvictionChoice(sequence, evicted, replay, np.ones(len(sequence.order)))
        return allocation, residency, intervals["offset"].tolist()


def _repair(
    wanted: np.ndarray,
    least: np.ndarray,
    most: np.ndarray,
    class_bytes: np.ndarray,
    capacity: int,
) -> np.ndarray | None:
    """Return numbers of objects that fit the capacity and hold every operator, or None."""
    free = capacity - int(class_bytes @ least)
    if free < 0:
        return None
    more = np.minimum(wanted, most) - least
    more = np.maximum(more, 0)
    asked = int(class_bytes @ more)
    counts = least + (more * min(1.0, free / asked) if asked else more).astype(np.int64)
    free = capacity - int(class_bytes @ counts)
    for name in range(len(counts) - 1, -1, -1):  # the rest is for the largest classes first
        extra = min(free // int(class_bytes[name]), int(most[name] - counts[name]))
        counts[name] += extra
        free -= extra * int(class_bytes[name])
    return counts
