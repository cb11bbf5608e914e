"""Genes of SwapAdvisor's search: schedules and allocations, their crossover and mutation.

Huang, Jin, Li: SwapAdvisor, ASPLOS 2020 (doi 10.1145/3373376.3378530), section 5. A schedule is a
topological order of the operators. An allocation maps every distinct size of values to a class of
equal objects, and says how many objects each class has.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.graph import StepGraph


@dataclass(frozen=True)
class SizeClasses:
    """An allocation: classes of equal objects, and their numbers."""

    # For each distinct size, in rising order, the class that it is in; a class is named by the
    # index of the largest size in it, which is that of its objects.
    class_of_size: tuple[int, ...]
    num_objects: dict[int, int]  # for each class that is in use the number of its objects


def geometric_classes(sizes: Sequence[int], ratio: float) -> tuple[int, ...]:
    """Return classes whose sizes lie within a ratio; 1.0 gives every size its own."""
    classes = [0] * len(sizes)
    top = len(sizes) - 1
    for index in range(len(sizes) - 1, -1, -1):
        if sizes[top] > sizes[index] * ratio:
            top = index
        classes[index] = top
    return tuple(classes)


def random_classes(sizes: Sequence[int], rng: random.Random) -> tuple[int, ...]:
    """Return random classes of sizes next to each other."""
    if not sizes:
        return ()
    last = len(sizes) - 1
    tops = {last, *rng.sample(range(last + 1), rng.randint(1, last + 1))}
    classes, top = [last] * (last + 1), last
    for index in range(last, -1, -1):
        top = index if index in tops else top
        classes[index] = top
    return tuple(classes)


def cross_allocations(
    first: SizeClasses, second: SizeClasses, rng: random.Random
) -> tuple[list[int], dict[int, int]]:
    """Cross two allocations, map and counts, at one point; the result is to be repaired."""
    cut = rng.randrange(len(first.class_of_size) + 1)
    classes = [*first.class_of_size[:cut], *second.class_of_size[cut:]]
    wanted = {}
    for name in set(classes):
        sources = (first, second) if name < cut else (second, first)
        wanted[name] = sources[0].num_objects.get(name, sources[1].num_objects.get(name, 0))
    return _name_by_largest(classes), wanted


def mutate_allocation(
    classes: list[int], wanted: dict[int, int], probability: float, rng: random.Random
) -> tuple[list[int], dict[int, int]]:
    """Give genes a value near the old one, each with some probability, to be repaired."""
    classes = list(classes)
    for index in range(len(classes)):
        if rng.random() < probability:
            moved = classes[index] + round(rng.gauss(0, 1 + len(classes) / 8))
            classes[index] = min(len(classes) - 1, max(index, moved))
    wanted = {
        name: max(0, round(rng.gauss(count, 1 + count / 4)))
        if rng.random() < probability
        else count
        for name, count in wanted.items()
    }
    return _name_by_largest(classes), wanted


def _name_by_largest(classes: list[int]) -> list[int]:
    """Name each class by the largest size that is in it."""
    largest: dict[int, int] = {}
    for index, name in enumerate(classes):
        largest[name] = index
    return [largest[name] for name in classes]


class Schedules:
    """Topological orders of a graph: random ones, children and mutants."""

    def __init__(self, graph: StepGraph) -> None:
        self._predecessors = graph.predecessors
        self._successors: list[list[int]] = [[] for _ in graph.operators]
        for index, before in enumerate(graph.predecessors):
            for earlier in before:
                self._successors[earlier].append(index)

    def cross(
        self, first: Sequence[int], second: Sequence[int], rng: random.Random
    ) -> tuple[int, ...]:
        """Return the first one up to a random cut, then the rest in the order of the second."""
        cut = rng.randrange(len(first) + 1)
        taken = set(first[:cut])
        return (*first[:cut], *(index for index in second if index not in taken))

    def mutate(
        self, order: Sequence[int], probability: float, rng: random.Random
    ) -> tuple[int, ...]:
        """Rebuild an order; each step with some probability takes any operator that is ready.

        With probability 1 the order is a random topological one.
        """
        rank = [0] * len(order)
        for position, index in enumerate(order):
            rank[index] = position
        num_waiting = [len(before) for before in self._predecessors]
        heap = [rank[index] for index, count in enumerate(num_waiting) if count == 0]
        heapq.heapify(heap)
        ready, slot_of = [], {}  # the same operators, for a random choice

        def add(index: int) -> None:
            slot_of[index] = len(ready)
            ready.append(index)

        for position in heap:
            add(order[position])
        result = []
        while ready:
            if rng.random() < probability:
                chosen = ready[rng.randrange(len(ready))]
            else:
                while order[heap[0]] not in slot_of:
                    heapq.heappop(heap)
                chosen = order[heap[0]]
            last = ready.pop()
            slot = slot_of.pop(chosen)
            if last != chosen:
                ready[slot], slot_of[last] = last, slot
            result.append(chosen)
            for later in self._successors[chosen]:
                num_waiting[later] -= 1
                if num_waiting[later] == 0:
                    heapq.heappush(heap, rank[later])
                    add(later)
        return tuple(result)
