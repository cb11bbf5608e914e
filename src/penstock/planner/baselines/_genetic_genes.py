"""What SwapAdvisor's search varies: schedules and allocations, and how they cross and mutate.

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
from penstock.planner.baselines._order import OrderedStep


@dataclass(frozen=True)
class Allocation:
    """Classes of equal objects.

    Attributes:
        class_of_size: For each distinct size, in rising order, the class that it is in; a class is
            named by the index of the largest size in it, which is that of its objects.
        num_objects: For each class that is in use the number of its objects.
    """

    class_of_size: tuple[int, ...]
    num_objects: dict[int, int]


@dataclass(frozen=True)
class Demand:
    """How many objects of each distinct size an order asks for.

    Attributes:
        least: For each position with an operator's operands and results: counts by size index.
            What the operator before has made is counted too; it cannot have left yet.
        most: The largest number of values of each size that live at once.
    """

    least: tuple[dict[int, int], ...]
    most: tuple[int, ...]


def distinct_sizes(step: OrderedStep) -> tuple[int, ...]:
    """Sizes of values, in rising order."""
    return tuple(sorted({num_bytes for num_bytes in step.num_bytes if num_bytes}))


def demand(step: OrderedStep, sizes: Sequence[int]) -> Demand:
    """Count what the operators of an order need at once."""
    index_of = {size: index for index, size in enumerate(sizes)}
    storages = step.graph.storages
    live = [0] * len(sizes)
    for storage in storages:
        if storage.num_bytes and storage.initial is not None:
            live[index_of[step.num_bytes[storage.initial]]] += 1
    most = live.copy()
    least: set[tuple[tuple[int, int], ...]] = set()
    before: Sequence[int] = ()
    for visit in step.visits:
        at_once = {*visit.needs, *visit.creates, *before}
        counts: dict[int, int] = {}
        for value in at_once:
            index = index_of[step.num_bytes[value]]
            counts[index] = counts.get(index, 0) + 1
        least.add(tuple(sorted(counts.items())))
        for value in visit.creates:
            index = index_of[step.num_bytes[value]]
            live[index] += 1
            most[index] = max(most[index], live[index])
        made = [*visit.creates, *(new for _, new in visit.handovers)]
        handed = {old for old, _ in visit.handovers}
        afters = [*visit.next_needs, *visit.next_makes]
        for value, after in zip([*visit.needs, *made], afters, strict=True):
            storage = storages[step.graph.storage_of_value[value]]
            if after >= 1 << 60 and value not in handed and not storage.persistent:
                live[index_of[step.num_bytes[value]]] -= 1
        before = [*visit.creates, *(new for _, new in visit.handovers if new not in handed)]
    return Demand(tuple(dict(counts) for counts in least), tuple(most))


def repair(
    class_of_size: Sequence[int],
    wanted: dict[int, int],
    sizes: Sequence[int],
    asked: Demand,
    capacity: int,
) -> Allocation | None:
    """Make an allocation that every operator fits into, and that fits the capacity.

    Returns:
        The allocation; None if not even the least number of objects of each class fits.
    """
    classes = sorted(set(class_of_size))
    least = dict.fromkeys(classes, 0)
    for counts in asked.least:
        of_class: dict[int, int] = {}
        for index, count in counts.items():
            name = class_of_size[index]
            of_class[name] = of_class.get(name, 0) + count
        for name, count in of_class.items():
            least[name] = max(least[name], count)
    most = dict.fromkeys(classes, 0)
    for index, count in enumerate(asked.most):
        most[class_of_size[index]] += count
    free = capacity - sum(sizes[name] * count for name, count in least.items())
    if free < 0:
        return None
    more = {
        name: max(0, min(wanted.get(name, 0), max(most[name], least[name])) - least[name])
        for name in classes
    }
    asked_bytes = sum(sizes[name] * count for name, count in more.items())
    share = min(1.0, free / asked_bytes) if asked_bytes else 0.0
    objects = {name: least[name] + int(more[name] * share) for name in classes}
    free = capacity - sum(sizes[name] * count for name, count in objects.items())
    for name in sorted(classes, reverse=True):  # what is left goes to whoever can use it
        extra = min(free // sizes[name], max(0, most[name] - objects[name]))
        objects[name] += extra
        free -= extra * sizes[name]
    return Allocation(tuple(class_of_size), objects)


def geometric_classes(sizes: Sequence[int], ratio: float) -> tuple[int, ...]:
    """Classes whose sizes lie within a ratio; 1.0 gives every size its own."""
    classes = [0] * len(sizes)
    top = len(sizes) - 1
    for index in range(len(sizes) - 1, -1, -1):
        if sizes[top] > sizes[index] * ratio:
            top = index
        classes[index] = top
    return tuple(classes)


def cross_allocations(
    first: Allocation, second: Allocation, rng: random.Random
) -> tuple[list[int], dict[int, int]]:
    """One-point crossover of map and counts; to be repaired."""
    cut = rng.randrange(len(first.class_of_size) + 1)
    classes = [*first.class_of_size[:cut], *second.class_of_size[cut:]]
    wanted = {}
    for name in set(classes):
        sources = (first, second) if name < cut else (second, first)
        wanted[name] = sources[0].num_objects.get(name, sources[1].num_objects.get(name, 0))
    return _closed(classes), wanted


def mutate_allocation(
    classes: list[int], wanted: dict[int, int], probability: float, rng: random.Random
) -> tuple[list[int], dict[int, int]]:
    """Give genes a value near the old one, each with some probability; to be repaired."""
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
    return _closed(classes), wanted


def _closed(classes: list[int]) -> list[int]:
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
        """The first one up to a random cut, then the rest in the order of the second one."""
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
        missing = [len(before) for before in self._predecessors]
        heap = [rank[index] for index, count in enumerate(missing) if count == 0]
        heapq.heapify(heap)
        ready, place = [], {}  # the same operators, for a random choice

        def add(index: int) -> None:
            place[index] = len(ready)
            ready.append(index)

        for position in heap:
            add(order[position])
        result = []
        while ready:
            if rng.random() < probability:
                chosen = ready[rng.randrange(len(ready))]
            else:
                while order[heap[0]] not in place:
                    heapq.heappop(heap)
                chosen = order[heap[0]]
            last = ready.pop()
            hole = place.pop(chosen)
            if last != chosen:
                ready[hole], place[last] = last, hole
            result.append(chosen)
            for later in self._successors[chosen]:
                missing[later] -= 1
                if missing[later] == 0:
                    heapq.heappush(heap, rank[later])
                    add(later)
        return tuple(result)
