"""SwapAdvisor's search, as the reference to beat: a genetic algorithm over order and allocation.

Huang, Jin, Li: SwapAdvisor: Pushing Deep Learning Beyond the GPU Memory Limit via Smart Swapping,
ASPLOS 2020 (doi 10.1145/3373376.3378530). Its code is not public; this follows the paper. A
candidate is a schedule and an allocation (`_genetic_genes`). From both follows the swap plan
(section 4): whoever is needed again the latest leaves its object, which whoever takes it waits for
and nobody else does. How good a candidate is, a simulation of three streams says. Neither
recomputation nor files are part of it, and there is no bound.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from penstock.errors import InfeasibleError
from penstock.graph import StepGraph
from penstock.planner._plan import Found, Plan
from penstock.planner._request import PlanRequest
from penstock.planner.genetic._evaluator import Evaluator
from penstock.planner.genetic._genes import (
    Allocation,
    Schedules,
    cross_allocations,
    geometric_classes,
    mutate_allocation,
    random_classes,
)
from penstock.planner.genetic._objects import (
    assign_objects,
    missing_objects,
    pools_of_rooms,
    room_by_objects,
)
from penstock.planner.paging._accesses import OrderedStep, ordered_step
from penstock.planner.paging._decisions import (
    Below,
    assemble,
    device_capacity,
    speeds_of,
)
from penstock.planner.paging._timing import Arrangement, Speeds, arrange
from penstock.planner.paging._walk import Pools, Residency, walk

_DEFAULT_SECONDS = 60.0  # where the request has no deadline
POPULATION = 100
STAGNATION = (
    60  # generations without a better candidate that end the search, as the time limit does
)
MUTATION = 0.1  # probability that a child mutates, and that one of its genes does
RATIOS = (1.0, 1.3, 2.0, 4.0, 8.0)  # of sizes within a class, with the framework's own order
_MAX_TRIES = 5  # times the population, to find as many candidates that fit
_SPARES = 6  # times that objects of a class are given up, so that rooms go round the step's end


@dataclass(frozen=True)
class Candidate:
    """A schedule, an allocation and what they are worth."""

    order: tuple[int, ...]
    allocation: Allocation
    step_seconds: float


@dataclass(frozen=True)
class Derived:
    """The swap plan of a candidate.

    Attributes:
        step: The graph in the candidate's order.
        residency: Who is on the device when.
        arrangement: Transfers with their places.
        offsets: Addresses of the residency's rooms, those that are never free last.
    """

    step: OrderedStep
    residency: Residency
    arrangement: Arrangement
    offsets: list[int]


class _Search:
    """What does not change during a search, and how far it is."""

    def __init__(
        self,
        graph: StepGraph,
        evaluator: Evaluator,
        *,
        time_limit: float,
        seed: int,
        progress: Callable[[Found], None] | None,
    ) -> None:
        self.evaluator, self.progress = evaluator, progress
        self.schedules = Schedules(graph)
        self.program = tuple(range(len(graph.operators)))
        self.random = random.Random(seed)
        self.began = time.monotonic()
        self.deadline = self.began + time_limit
        self.population: list[Candidate] = []
        self.num_evaluations = self.num_generations = 0

    def run(self) -> None:
        """Fill the population, and let it evolve until the deadline or until nothing helps."""
        try:
            for candidate in _first_population(self):
                if candidate is not None:
                    self.population.append(candidate)
                    self.report()
                if self.population and self.late():
                    break
            if self.population:
                _evolve(self)
        except KeyboardInterrupt:  # the best so far is a candidate as well
            if not self.population:
                raise

    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self.deadline

    def report(self) -> None:
        """Tell whoever asked how good the best candidate is."""
        if self.progress is not None:
            best = min(candidate.step_seconds for candidate in self.population)
            elapsed = time.monotonic() - self.began
            self.progress(Found(elapsed, best, sum(self.evaluator.speeds.operator_seconds)))

    def evaluate(
        self, order: tuple[int, ...], classes: Sequence[int], wanted: dict[int, int]
    ) -> Candidate | None:
        """Repair an allocation and simulate; None where an operator does not fit."""
        self.num_evaluations += 1
        found = self.evaluator.evaluate(order, classes, wanted)
        return None if found is None else Candidate(order, *found)


def plan_genetic(request: PlanRequest) -> Plan:
    """Plan with SwapAdvisor's genetic algorithm.

    The same seed gives the same plan where the search ends before the time limit.

    Example:
        >>> plan = plan_genetic(request)  # doctest: +SKIP

    Args:
        request: The step and what it is planned for. Without a limit of the device everything
            stays there; without a deadline the search has 60 seconds. Called with progress is the
            best candidate, once a generation.

    Returns:
        A plan that `check` accepts.

    Raises:
        ValueError: There is no tier below the device, or the times are another graph's.
        InfeasibleError: No candidate of the first population fits: a size class needs room for
            the operator that has most of its sizes, at all times.
    """
    graph = request.graph
    if Below.of(request) is None:
        raise ValueError(
            "method='genetic' swaps values to the host or to files: give host_memory or a store "
            "(and a machine that has links to it), or use method='auto'"
        )
    speeds = speeds_of(request)
    evaluator = Evaluator(graph, device_capacity(ordered_step(graph), request.budget), speeds)
    search = _Search(
        graph,
        evaluator,
        time_limit=request.ending(_DEFAULT_SECONDS).seconds_left(),
        seed=request.seed,
        progress=request.progress,
    )
    search.run()
    if not search.population:
        raise InfeasibleError(
            "method='genetic' found no size classes for "
            f"device_memory={request.budget.device_bytes}: give more, or use method='auto'",
            proved=False,
        )
    best = min(search.population, key=lambda candidate: candidate.step_seconds)
    derived = derive(graph, best.order, best.allocation, evaluator.sizes, speeds)
    assert derived is not None
    return assemble(
        request,
        derived.step,
        derived.residency,
        derived.arrangement,
        derived.offsets,
        method="genetic",
        notes={
            "planning_seconds": time.monotonic() - search.began,
            "num_generations": search.num_generations,
            "num_evaluations": search.num_evaluations,
        },
    )


def derive(
    graph: StepGraph,
    order: Sequence[int],
    allocation: Allocation,
    sizes: Sequence[int],
    speeds: Speeds,
    *,
    passes: int = 4,
) -> Derived | None:
    """Return the swap plan of a schedule and an allocation; None where objects do not suffice.

    `Evaluator.evaluate` does the same in C++ and keeps only the time.

    Args:
        graph: A captured step.
        order: Operators by position, each once.
        allocation: Classes of equal objects.
        sizes: Distinct sizes of values, in rising order.
        speeds: What takes how long.
        passes: How often ends of writes are chosen.
    """
    step = ordered_step(graph, order)
    names = sorted(allocation.num_objects)
    pool_of_class = {name: pool for pool, name in enumerate(names)}
    pool_of_bytes = {
        size: pool_of_class[name]
        for size, name in zip(sizes, allocation.class_of_size, strict=True)
    }
    counts = [allocation.num_objects[name] for name in names]
    found = _walk_in_objects(step, counts, pool_of_bytes)
    if found is None:
        return None
    residency, objects = found
    prefetch = room_by_objects(step, residency, objects)
    arrangement = arrange(step, residency, speeds, prefetch=prefetch, passes=passes)
    starts, base = [], 0
    for name, count in zip(names, counts, strict=True):
        starts.append(base)
        base += sizes[name] * count
    offsets = [
        starts[pool] + item * sizes[names[pool]]
        for pool, item in zip(pools_of_rooms(residency), objects, strict=True)
    ]
    return Derived(step, residency, arrangement, offsets)


def _walk_in_objects(
    step: OrderedStep, counts: Sequence[int], pool_of_bytes: dict[int, int]
) -> tuple[Residency, list[int]] | None:
    """A residency with an object for every room; None where there is none."""
    used = list(counts)
    for _ in range(_SPARES):
        try:
            residency = walk(step, Pools(tuple(used), pool_of_bytes), "belady")
        except InfeasibleError:
            return None
        objects = assign_objects(residency, step, counts)
        short = missing_objects(residency, objects, len(counts))
        if not any(short):
            return residency, objects
        used = [max(0, count - less) for count, less in zip(used, short, strict=True)]
    return None


def _first_population(search: _Search) -> Iterator[Candidate | None]:
    """The framework's own order with several allocations; then near and random ones of both."""
    sizes, rng = search.evaluator.sizes, search.random
    most = search.evaluator.demand(search.program)
    for number in range(_MAX_TRIES * POPULATION):
        if len(search.population) >= POPULATION:
            return
        order = search.program
        if number < len(RATIOS):
            classes = geometric_classes(sizes, RATIOS[number])
        else:
            probability = 1.0 if number % 4 == 0 else 0.01 * rng.random()
            order = search.schedules.mutate(order, probability, rng)
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
            if search.late():
                search.population = parents + children
                return
            child = _child(search, parents)
            if child is not None:
                children.append(child)
            elif search.random.random() < 0.1:  # no child fits: a generation of parents will do
                break
        search.population = parents + children
        search.num_generations += 1
        search.report()
        best = min((child.step_seconds for child in children), default=math.inf)
        stagnant = 0 if best < parents[0].step_seconds else stagnant + 1


def _child(search: _Search, parents: Sequence[Candidate]) -> Candidate | None:
    rng = search.random
    first, second = _selected(parents, rng), _selected(parents, rng)
    order = search.schedules.cross(first.order, second.order, rng)
    classes, wanted = cross_allocations(first.allocation, second.allocation, rng)
    if rng.random() < MUTATION:
        order = search.schedules.mutate(order, MUTATION * rng.random() ** 3, rng)
    if rng.random() < MUTATION:
        classes, wanted = mutate_allocation(classes, wanted, MUTATION, rng)
    return search.evaluate(order, classes, wanted)


def _selected(parents: Sequence[Candidate], rng: random.Random) -> Candidate:
    """The better of two random ones; parents are sorted."""
    return parents[min(rng.randrange(len(parents)), rng.randrange(len(parents)))]
