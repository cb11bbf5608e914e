"""SwapAdvisor's search, as the reference to beat: a genetic algorithm over order and allocation.

Huang, Jin, Li: SwapAdvisor: Pushing Deep Learning Beyond the GPU Memory Limit via Smart Swapping,
ASPLOS 2020 (doi 10.1145/3373376.3378530). Its code is not public; this follows the paper. A
candidate is a schedule and an allocation (`_genes`). The swap plan follows from both (section 4):
where no object of a size class is free, the value of the class that is used again the latest is
evicted, and the value that takes its object waits until it has left. A replay of three streams
gives the time of a step. Neither recomputation nor files are part of it, and there is no bound.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import InfeasibleError
from penstock.graph import StepGraph
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Found
from penstock.planner._request import LinkRates, PlanRequest
from penstock.planner.bounds import working_set
from penstock.planner.genetic._genes import (
    Schedules,
    SizeClasses,
    cross_allocations,
    geometric_classes,
    mutate_allocation,
    random_classes,
)
from penstock.planner.paging import (
    count_arena_bytes,
    find_swap_links,
    find_swap_rates,
    plan_by_paging,
)
from penstock.planner.search import (
    EvictionChoice,
    OperatorSequence,
    Problem,
    load_engine,
    plan_residency,
)

_DEFAULT_SECONDS = 60.0  # where the request has no deadline
POPULATION = 100
# Generations without a better candidate that end the search, as the time limit does.
STAGNATION = 60
MUTATION = 0.1  # probability that a child mutates, and that one of its genes does
RATIOS = (1.0, 1.3, 2.0, 4.0, 8.0)  # of sizes within a class, with the program's own order
_MAX_TRIES = 5  # times the population, to find as many candidates that fit


@dataclass(frozen=True)
class Candidate:
    """A schedule and an allocation, and the time of a step with them."""

    order: tuple[int, ...]
    allocation: SizeClasses
    step_seconds: float


class _Search:
    """A population of candidates, and how it evolves."""

    def __init__(self, request: PlanRequest, evaluator: Evaluator) -> None:
        self.request, self.evaluator = request, evaluator
        self.schedules = Schedules(request.graph)
        self.program = tuple(range(len(request.graph.operators)))
        self.random = random.Random(request.seed)
        self.began = time.monotonic()
        self.population: list[Candidate] = []
        self.num_evaluations = self.num_generations = 0

    def run(self) -> None:
        """Fill the population, and let it evolve until the deadline or until nothing helps."""
        try:
            for candidate in _first_population(self):
                if candidate is not None:
                    self.population.append(candidate)
                    self.report()
                if self.population and not self.request.seconds_left():
                    break
            if self.population:
                _evolve(self)
        except KeyboardInterrupt:  # the best so far is a candidate as well
            if not self.population:
                raise

    def report(self) -> None:
        """Report the time of the best candidate as progress."""
        if self.request.progress is not None:
            best = min(candidate.step_seconds for candidate in self.population)
            elapsed = time.monotonic() - self.began
            self.request.progress(Found(elapsed, best, self.request.compute_seconds))

    def mutate(self, order: tuple[int, ...], probability: float) -> tuple[int, ...]:
        """Return a mutant of an order; the order itself where it has to stay the program's."""
        if not self.request.reorder:
            return order
        return self.schedules.mutate(order, probability, self.random)

    def evaluate(
        self, order: tuple[int, ...], classes: Sequence[int], wanted: dict[int, int]
    ) -> Candidate | None:
        """Repair an allocation and replay it; None where an operator does not fit."""
        self.num_evaluations += 1
        found = self.evaluator.evaluate(order, classes, wanted)
        if found is None:
            return None
        allocation, residency, _ = found
        return Candidate(order, allocation, residency.replay.step_seconds)


def plan_genetic(request: PlanRequest) -> Plan:
    """Plan with SwapAdvisor's genetic algorithm.

    The same seed gives the same plan where the search ends before the time limit.

    Args:
        request: The step and what it is planned for. Without a limit of the device everything
            stays there; without a deadline the search has 60 seconds. Called with progress is the
            best candidate, once a generation.

    Returns:
        A plan that `check` accepts. Without a C++ compiler nothing is searched, and it is Belady's:
        `notes["searched"]` is False then.

    Raises:
        ValueError: There is no tier below the device, or the times are another graph's.
        InfeasibleError: No candidate of the first population fits: a size class needs objects for
            the operator that has most of its sizes, at all times.
    """
    request = request.ending(_DEFAULT_SECONDS)
    if load_engine() is None:  # Belady's plan is the candidate that the search would begin with
        return plan_by_paging(request, policy="belady", notes={"searched": False})
    if find_swap_links(request) is None:
        raise ValueError(
            "method='genetic' swaps values to the host or to files: give host_memory or a store "
            "(and a machine that has links to it), or use method='auto'"
        )
    rates, capacity = find_swap_rates(request), count_arena_bytes(request)
    search = _Search(request, Evaluator(request.graph, request.operator_seconds, rates, capacity))
    search.run()
    if not search.population:
        least, given = working_set(request.graph), request.budget.device_bytes
        raise InfeasibleError(
            f"method='genetic' found no size classes for device_memory={given}: give more, or use "
            "method='auto'",
            minimum_device_bytes=least.num_bytes,
            operator=least.operator,
            proved=given is not None and given < least.num_bytes,
        )
    best = min(search.population, key=lambda candidate: candidate.step_seconds)
    classes, counts = best.allocation.class_of_size, best.allocation.num_objects
    found = search.evaluator.evaluate(best.order, classes, counts)
    assert found is not None
    notes = {
        "planning_seconds": time.monotonic() - search.began,
        "num_generations": search.num_generations,
        "num_evaluations": search.num_evaluations,
    }
    _, choice, offsets = found
    return plan_residency(request, choice, offsets, method="genetic", notes=notes)


def _first_population(search: _Search) -> Iterator[Candidate | None]:
    """Evaluate the program's own order with several allocations, then near and random ones."""
    sizes, rng = search.evaluator.sizes, search.random
    most = search.evaluator.count_values(search.program)
    for number in range(_MAX_TRIES * POPULATION):
        if len(search.population) >= POPULATION:
            return
        order = search.program
        if number < len(RATIOS):
            classes = geometric_classes(sizes, RATIOS[number])
        else:
            probability = 1.0 if number % 4 == 0 else 0.01 * rng.random()
            order = search.mutate(order, probability)
            classes = random_classes(sizes, rng)
        wanted: dict[int, int] = {}
        for index, name in enumerate(classes):
            wanted[name] = wanted.get(name, 0) + most[index]
        yield search.evaluate(order, classes, wanted)


def _evolve(search: _Search) -> None:
    """Replace the worse half of the population by children of the better one, again and again."""
    stagnant = 0
    while stagnant < STAGNATION:
        search.population.sort(key=lambda candidate: candidate.step_seconds)
        parents = search.population[: max(2, POPULATION // 2)]
        children: list[Candidate] = []
        while len(parents) + len(children) < POPULATION:
            if not search.request.seconds_left():
                search.population = parents + children
                return
            child = _breed(search, parents)
            if child is not None:
                children.append(child)
            elif search.random.random() < 0.1:  # no child fits: a generation of parents will do
                break
        search.population = parents + children
        search.num_generations += 1
        search.report()
        best = min((child.step_seconds for child in children), default=math.inf)
        stagnant = 0 if best < parents[0].step_seconds else stagnant + 1


def _breed(search: _Search, parents: Sequence[Candidate]) -> Candidate | None:
    rng = search.random
    first, second = _select(parents, rng), _select(parents, rng)
    order = search.schedules.cross(first.order, second.order, rng)
    classes, wanted = cross_allocations(first.allocation, second.allocation, rng)
    if rng.random() < MUTATION:
        order = search.mutate(order, MUTATION * rng.random() ** 3)
    if rng.random() < MUTATION:
        classes, wanted = mutate_allocation(classes, wanted, MUTATION, rng)
    return search.evaluate(order, classes, wanted)


def _select(parents: Sequence[Candidate], rng: random.Random) -> Candidate:
    """Return the better of two random parents, which are sorted."""
    return parents[min(rng.randrange(len(parents)), rng.randrange(len(parents)))]


class Evaluator:
    """A step graph with a memory and links, for candidates of any order and allocation.

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

        An allocation is, for each distinct size, the class that it is in, and the number of objects
        by class, which is made to hold every operator and to fit the capacity.

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
        asked = np.array([wanted.get(name, 0) for name in names], np.int64)
        counts = _repair(asked, least, most, class_bytes, self.capacity)
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
