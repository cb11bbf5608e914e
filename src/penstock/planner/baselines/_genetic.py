"""SwapAdvisor's search, as the reference to beat: a genetic algorithm over order and allocation.

Huang, Jin, Li: SwapAdvisor: Pushing Deep Learning Beyond the GPU Memory Limit via Smart Swapping,
ASPLOS 2020 (doi 10.1145/3373376.3378530). Its code is not public; this follows the paper. A
candidate is a schedule and an allocation (`_genetic_genes`). From both follows the swap plan
(section 4): whoever is needed again the latest leaves its object, which whoever takes it waits for
and nobody else does. How good a candidate is, a simulation of three streams says. Neither
recomputation nor files are part of it, and there is no bound.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from penstock.errors import InfeasibleError
from penstock.graph import StepGraph
from penstock.memory import MachineProfile
from penstock.planner._plan import Budget, Plan
from penstock.planner.baselines._decisions import (
    Below,
    Found,
    Progress,
    assemble,
    device_capacity,
    require_times,
    speeds_of,
)
from penstock.planner.baselines._genetic_genes import (
    Allocation,
    Schedules,
    cross_allocations,
    demand,
    distinct_sizes,
    geometric_classes,
    mutate_allocation,
    repair,
)
from penstock.planner.baselines._genetic_objects import (
    assign_objects,
    missing_objects,
    pools_of_rooms,
    room_by_objects,
)
from penstock.planner.baselines._order import OrderedStep, ordered_step
from penstock.planner.baselines._timing import Arrangement, Speeds, arrange
from penstock.planner.baselines._walk import Pools, Residency, walk

POPULATION = 40
GENERATIONS = 10_000  # the time limit ends the search, or a population that no longer changes
STAGNATION = 60  # generations without a better candidate
MUTATION = 0.1  # probability that a child mutates, and that one of its genes does
RATIOS = (1.0, 1.3, 2.0, 4.0)  # of sizes within a class, in the allocations that it begins with
_SPARES = 6  # times that objects of a class are given up, so that rooms go round the step's end


@dataclass(frozen=True)
class Candidate:
    """A schedule, an allocation and what they are worth."""

    order: tuple[int, ...]
    allocation: Allocation
    step_seconds: float


@dataclass(frozen=True)
class _Derived:
    """The swap plan of a candidate."""

    step: OrderedStep
    residency: Residency
    arrangement: Arrangement
    offsets: list[int]


class _Problem:
    """What does not change during a search."""

    def __init__(
        self, graph: StepGraph, capacity: int, speeds: Speeds, progress: Progress | None
    ) -> None:
        self.progress, self.began = progress, time.monotonic()
        self.graph, self.capacity, self.speeds = graph, capacity, speeds
        self.schedules = Schedules(graph)
        self.program = tuple(range(len(graph.operators)))
        self.steps: dict[tuple[int, ...], OrderedStep] = {}
        self.sizes = distinct_sizes(ordered_step(graph))
        self.num_evaluations = 0

    def report(self, population: Sequence[Candidate]) -> None:
        """Tell whoever asked how good the best candidate is."""
        if self.progress is not None:
            best = min(candidate.step_seconds for candidate in population)
            elapsed = time.monotonic() - self.began
            self.progress(Found(elapsed, best, sum(self.speeds.operator_seconds)))

    def step(self, order: tuple[int, ...]) -> OrderedStep:
        """The graph in an order; the last few are kept."""
        if order not in self.steps:
            if len(self.steps) > 2 * POPULATION:
                self.steps.clear()
            self.steps[order] = ordered_step(self.graph, order)
        return self.steps[order]

    def evaluate(
        self, order: tuple[int, ...], classes: Sequence[int], wanted: dict[int, int]
    ) -> Candidate | None:
        """Repair an allocation and simulate; None where an operator does not fit."""
        self.num_evaluations += 1
        step = self.step(order)
        asked = demand(step, self.sizes)
        allocation = repair(classes, wanted, self.sizes, asked, self.capacity)
        derived = None if allocation is None else self.derive(order, allocation, passes=2)
        if allocation is None or derived is None:
            return None
        return Candidate(order, allocation, derived.arrangement.step_seconds)

    def derive(
        self, order: tuple[int, ...], allocation: Allocation, *, passes: int
    ) -> _Derived | None:
        """The swap plan of a schedule and an allocation; None where objects do not suffice."""
        step, sizes = self.step(order), self.sizes
        names = sorted(allocation.num_objects)
        pool_of_class = {name: pool for pool, name in enumerate(names)}
        pool_of_bytes = {
            size: pool_of_class[name]
            for size, name in zip(sizes, allocation.class_of_size, strict=True)
        }
        counts = [allocation.num_objects[name] for name in names]
        used = counts.copy()
        for _ in range(_SPARES):
            try:
                residency = walk(step, Pools(tuple(used), pool_of_bytes), "belady")
            except InfeasibleError:
                return None
            objects = assign_objects(residency, step, counts)
            short = missing_objects(residency, objects, len(counts))
            if not any(short):
                break
            used = [max(0, count - less) for count, less in zip(used, short, strict=True)]
        else:
            return None
        arrangement = arrange(
            step,
            residency,
            self.speeds,
            prefetch=room_by_objects(step, residency, objects),
            passes=passes,
        )
        starts, base = [], 0
        for name, count in zip(names, counts, strict=True):
            starts.append(base)
            base += sizes[name] * count
        offsets = [
            starts[pool] + item * sizes[names[pool]]
            for pool, item in zip(pools_of_rooms(residency), objects, strict=True)
        ]
        return _Derived(step, residency, arrangement, offsets)


def plan_genetic(
    graph: StepGraph,
    *,
    operator_seconds: Sequence[float],
    budget: Budget,
    machine: MachineProfile,
    time_limit: float = 60.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Plan:
    """Plan with SwapAdvisor's genetic algorithm.

    The same seed gives the same plan where the search ends before the time limit.

    Example:
        >>> plan = plan_genetic(  # doctest: +SKIP
        ...     graph, operator_seconds=seconds, budget=Budget(device_bytes=2**30), machine=machine
        ... )

    Args:
        graph: A captured step.
        operator_seconds: Time of each operator.
        budget: Bytes of the tiers; without a limit of the device everything stays there.
        machine: The links' bandwidths.
        time_limit: Seconds after which the best candidate is taken.
        seed: Of schedules, crossovers and mutations.
        progress: Called with the best candidate after each one that is new.

    Returns:
        A plan that `check` accepts.

    Raises:
        ValueError: There is no tier below the device, or the times are another graph's.
        InfeasibleError: No candidate of the first population fits: a size class needs room for
            the operator that has most of its sizes, at all times.
    """
    began = time.monotonic()
    require_times(graph, operator_seconds)
    below = Below.of(machine, budget)
    if below is None:
        raise ValueError(
            "method='genetic' swaps values to the host or to files: give host_memory or a store "
            "(and a machine that has links to it), or use method='auto'"
        )
    speeds = speeds_of(below, machine, operator_seconds)
    rng = random.Random(seed)
    capacity = device_capacity(ordered_step(graph), budget)
    problem = _Problem(graph, capacity, speeds, progress)
    deadline = began + time_limit
    population: list[Candidate] = []
    num_generations = 0
    try:
        for candidate in _first_population(problem, rng):
            if candidate is not None:
                population.append(candidate)
                problem.report(population)
            if time.monotonic() > deadline and population:
                break
        if not population:
            raise InfeasibleError(
                f"method='genetic' found no size classes for device_memory={budget.device_bytes}: "
                "give more, or use method='auto'",
                proved=False,
            )
        num_generations = _evolve(problem, population, rng, deadline)
    except KeyboardInterrupt:
        if not population:
            raise
    best = min(population, key=lambda candidate: candidate.step_seconds)
    derived = problem.derive(best.order, best.allocation, passes=4)
    assert derived is not None
    return assemble(
        derived.step,
        derived.residency,
        derived.arrangement,
        derived.offsets,
        operator_seconds=operator_seconds,
        budget=budget,
        machine=machine,
        method="genetic",
        seed=seed,
        notes={
            "planning_seconds": time.monotonic() - began,
            "num_generations": num_generations,
            "num_evaluations": problem.num_evaluations,
        },
    )


def _first_population(problem: _Problem, rng: random.Random) -> Iterator[Candidate | None]:
    """The framework's own order with several allocations, near orders, and random ones."""
    sizes = problem.sizes
    most = demand(problem.step(problem.program), sizes).most
    for number in range(POPULATION):
        ratio = RATIOS[number % len(RATIOS)]
        order = problem.program
        if number >= len(RATIOS):
            probability = 1.0 if number % 4 == 0 else 0.01 * rng.random()
            order = problem.schedules.mutate(order, probability, rng)
        classes = geometric_classes(sizes, ratio)
        wanted: dict[int, int] = {}
        for index, name in enumerate(classes):
            wanted[name] = wanted.get(name, 0) + most[index]
        yield problem.evaluate(order, classes, wanted)


def _evolve(
    problem: _Problem,
    population: list[Candidate],
    rng: random.Random,
    deadline: float,
) -> int:
    """Replace the worse half of the population by children of the better one, again and again.

    Returns:
        The number of generations.
    """
    stagnant = 0
    for generation in range(GENERATIONS):
        population.sort(key=lambda candidate: candidate.step_seconds)
        best = population[0].step_seconds
        parents = population[: max(2, POPULATION // 2)]
        children: list[Candidate] = []
        while len(parents) + len(children) < POPULATION:
            if time.monotonic() > deadline:
                population[:] = parents + children
                return generation
            child = _child(problem, parents, rng)
            if child is not None:
                children.append(child)
            elif rng.random() < 0.1:  # no child fits: a generation of parents will do
                break
        population[:] = parents + children
        problem.report(population)
        stagnant = 0 if min(c.step_seconds for c in population) < best else stagnant + 1
        if stagnant >= STAGNATION:
            return generation + 1
    return GENERATIONS


def _child(problem: _Problem, parents: Sequence[Candidate], rng: random.Random) -> Candidate | None:
    first, second = _selected(parents, rng), _selected(parents, rng)
    order = problem.schedules.cross(first.order, second.order, rng)
    classes, wanted = cross_allocations(first.allocation, second.allocation, rng)
    if rng.random() < MUTATION:
        order = problem.schedules.mutate(order, MUTATION * rng.random() ** 3, rng)
    if rng.random() < MUTATION:
        classes, wanted = mutate_allocation(classes, wanted, MUTATION, rng)
    return problem.evaluate(order, classes, wanted)


def _selected(parents: Sequence[Candidate], rng: random.Random) -> Candidate:
    """The better of two random ones; parents are sorted."""
    return parents[min(rng.randrange(len(parents)), rng.randrange(len(parents)))]
