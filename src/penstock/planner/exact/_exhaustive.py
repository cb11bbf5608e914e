"""All orders of a tiny graph, and all residencies of an order.

Second runs and evictions between two uses, from any boundary to any: all are tried. Their number
grows so fast with the graph that nine operators are about the limit.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.graph import StepGraph
from penstock.planner._assemble import assemble
from penstock.planner._live_ranges import (
    LiveRange,
    ResidentInterval,
    columns_of,
    live_ranges,
    occupied_bytes,
)
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Budget, Transfer
from penstock.planner._request import PlanRequest
from penstock.planner._simulate import step_seconds_of
from penstock.planner.exact._addresses import (
    Eviction,
    derive_movement,
    find_offsets,
    last_read,
    place,
    rename,
)


@dataclass(frozen=True)
class Limit:
    """The end of a search."""

    deadline: float = math.inf  # time by `time.monotonic`
    # Time by `time.thread_time`, which other processes do not shorten.
    processor_seconds: float = math.inf
    # Time by the same clock from which on only the deadline counts.
    least_processor_seconds: float = 0.0

    def is_over(self) -> bool:
        """Return whether the search has to end.

        The processor's clock is asked for only where it matters: a search of a small step spends a
        fifth of its time there otherwise.
        """
        is_late = time.monotonic() > self.deadline
        if not is_late and self.processor_seconds == math.inf:
            return False
        used = time.thread_time()
        return (is_late and used >= self.least_processor_seconds) or used > self.processor_seconds


def orders_of(graph: StepGraph, *, reorder: bool, max_again: int) -> Iterator[tuple[int, ...]]:
    """Yield all topological orders, then all with one more run, and so on."""
    for num_again in range(max_again + 1):
        program = tuple(range(len(graph.operators)))
        for order in _topological_orders(graph) if reorder else [program]:
            yield from with_more_runs(graph, order, num_again)


def _topological_orders(graph: StepGraph) -> Iterator[tuple[int, ...]]:
    def extend(order: tuple[int, ...], left: frozenset[int]) -> Iterator[tuple[int, ...]]:
        if not left:
            yield order
        for operator in sorted(left):
            if left.isdisjoint(graph.predecessors[operator]):
                yield from extend((*order, operator), left - {operator})

    return extend((), frozenset(range(len(graph.operators))))


def with_more_runs(
    graph: StepGraph, order: tuple[int, ...], num_again: int
) -> Iterator[tuple[int, ...]]:
    """Yield an order with second runs inserted where their operands have not been overwritten."""
    if num_again == 0:
        yield order
        return
    able = [
        index
        for index, operator in enumerate(graph.operators)
        if operator.recomputable and (not operator.mutates or operator.recompute_args is not None)
    ]
    for chosen in itertools.combinations(able, num_again):
        yield from _insert(graph, order, chosen)


def _insert(
    graph: StepGraph, order: tuple[int, ...], chosen: tuple[int, ...]
) -> Iterator[tuple[int, ...]]:
    if not chosen:
        yield order
        return
    operator = graph.operators[chosen[0]]
    writers = {
        order.index(index)
        for index, other in enumerate(graph.operators)
        if {old for old, _ in other.mutates}.intersection(operator.reads)
    }
    first = order.index(chosen[0]) + 2  # at once after it, it would be of no use
    for position in range(first, min(writers, default=len(order) - 1) + 1):
        longer = (*order[:position], chosen[0], *order[position:])
        yield from _insert(graph, longer, chosen[1:])


def fastest_of_order(
    request: PlanRequest,
    order: tuple[int, ...],
    best: Plan | None,
    limit: Limit,
    *,
    is_first_enough: bool = False,
) -> Plan | None:
    """Return the fastest plan of one order, or the first, or `best` if none is faster."""
    graph, operator_seconds = request.graph, request.operator_seconds
    if best is not None and sum(operator_seconds[i] for i in order) >= best.step_seconds:
        return best

    def is_faster(transfers: Sequence[Transfer]) -> bool:
        seconds = step_seconds_of(order, transfers, operator_seconds, request.machine)
        return best is None or seconds < best.step_seconds * (1 - 1e-9)

    found = residencies(graph, order, request.budget, limit, is_faster)
    for intervals, transfers, offsets in found:
        placements = place(graph, intervals, offsets)
        best = assemble(request, order, placements, transfers, method="brute_force")
        if is_first_enough:
            break
    return best


def residencies(
    graph: StepGraph,
    order: tuple[int, ...],
    budget: Budget,
    limit: Limit,
    is_wanted: Callable[[Sequence[Transfer]], bool],
) -> Iterator[tuple[list[ResidentInterval], list[Transfer], list[int]]]:
    """Yield residencies with addresses, if their transfers are wanted.

    A value that could be on the device longer is as fast there, but may be in the way of others:
    where something finds no address, all earlier evictions and later returns are tried as well.
    """
    for case in _reuse_cases(graph, order):
        for any_eviction in (False, True):
            lacks_address = False
            for evictions in _choices(case, budget, limit, any_eviction=any_eviction):
                ranges = case.live_ranges
                intervals, transfers = derive_movement(graph, len(order), ranges, evictions)
                if not is_wanted(transfers):
                    continue
                offsets = find_offsets(graph, order, intervals, budget.device_bytes)
                if offsets is None:
                    lacks_address = True
                else:
                    yield intervals, transfers, offsets
            if not lacks_address:
                break


@dataclass(frozen=True)
class _ReuseCase:
    """An order and the places that results reuse in it, with everything resident."""

    graph: StepGraph
    order: tuple[int, ...]  # operators by position
    live_ranges: tuple[LiveRange, ...]  # those that end in reuse end a position earlier
    live_bytes: np.ndarray  # at each position
    # By position and operand: results that may reuse its place.
    reusable: dict[int, dict[int, set[int]]]
    # Positions, and the results that reuse the place of a live range that ends there.
    reused: frozenset[tuple[int, int]]


def _reuse_cases(graph: StepGraph, order: tuple[int, ...]) -> Iterator[_ReuseCase]:
    """Yield all choices of results that reuse the place of an operand that ends there."""
    reusable: dict[int, dict[int, set[int]]] = {}
    for position, index in enumerate(order):
        for read, created in graph.operators[index].may_overwrite:
            if graph.num_bytes(created):
                reusable.setdefault(position, {}).setdefault(read, set()).add(created)
    ranges = live_ranges(graph, order)
    options: list[list[int | None]] = []
    for live_range in ranges:
        last = last_read(graph, live_range)
        results = set() if last is None else reusable.get(last, {}).get(live_range.value, set())
        options.append([*sorted(results), None])
    for choice in itertools.product(*options):
        reused = [
            (live_range.end - 1, new)
            for live_range, new in zip(ranges, choice, strict=True)
            if new is not None
        ]
        if len(set(reused)) == len(reused):
            chosen = tuple(
                live_range if new is None else live_range._replace(end=live_range.end - 1)
                for live_range, new in zip(ranges, choice, strict=True)
            )
            rows = [(each.uses[0], each.end, graph.num_bytes(each.value)) for each in chosen]
            live = occupied_bytes(*columns_of(rows), len(order))
            yield _ReuseCase(graph, order, chosen, live, reusable, frozenset(reused))


def _choices(
    case: _ReuseCase, budget: Budget, limit: Limit, *, any_eviction: bool
) -> Iterator[list[Eviction]]:
    """Yield all sets of evictions such that the rest fits; without need only if `any_eviction`."""
    if budget.device_bytes is None:
        yield []
        return
    capacity = budget.device_bytes - case.graph.workspace_bytes
    is_crowded = (case.live_bytes > capacity) | any_eviction
    options_of_holes = _options(case, is_crowded)
    freed = [[_freed_bytes(case, eviction) for eviction in each] for each in options_of_holes]
    # Bytes that may be live before the evictions of this hole and of all later ones.
    most = np.full((len(options_of_holes) + 1, len(case.order)), capacity, dtype=np.int64)
    for row, options in reversed(list(enumerate(options_of_holes))):
        widest = options[0]._replace(
            leaves=min(eviction.leaves for eviction in options),
            returns=max(eviction.returns for eviction in options),
        )
        most[row] = most[row + 1] + _freed_bytes(case, widest)

    def choose(row: int, live: np.ndarray, evictions: list[Eviction]) -> Iterator[list[Eviction]]:
        if (live > most[row]).any() or limit.is_over():
            return
        if row == len(options_of_holes):
            if any_eviction or not _is_needless(case, evictions, live, capacity):
                yield evictions
            return
        yield from choose(row + 1, live, evictions)
        for eviction, less in zip(options_of_holes[row], freed[row], strict=True):
            reused = eviction.leaves, eviction.reused_by
            if eviction.reused_by is not None and any(
                (other.leaves, other.reused_by) == reused for other in evictions
            ):
                continue
            yield from choose(row + 1, live - less, [*evictions, eviction])

    yield from choose(0, case.live_bytes, [])


def _options(case: _ReuseCase, is_crowded: np.ndarray) -> list[list[Eviction]]:
    """Return for each hole that has any its evictions, between crowded positions."""
    num_positions = len(case.order)
    options_of_holes: list[list[Eviction]] = []
    for index, live_range in enumerate(case.live_ranges):
        for number, hole in enumerate(live_range.holes):
            inside = [p for p in hole.positions if is_crowded[p % num_positions]]
            options = [
                Eviction(index, number, first, last + 1)
                for first in inside
                for last in inside
                if first <= last
            ]
            if is_crowded[hole.begin % num_positions]:
                options += [
                    Eviction(index, number, hole.begin, last + 1, reused_by)
                    for reused_by in _results_in_place(case, live_range, number)
                    for last in (hole.begin, *inside)
                ]
            if options:
                options_of_holes.append(options)
    return options_of_holes


def _freed_bytes(case: _ReuseCase, eviction: Eviction) -> np.ndarray:
    """Return by position the bytes that an eviction frees."""
    freed = np.zeros(len(case.order), dtype=np.int64)
    num_bytes = case.graph.num_bytes(case.live_ranges[eviction.live_range].value)
    for position in range(eviction.leaves, eviction.returns):
        freed[position % len(freed)] += num_bytes
    return freed


def _results_in_place(case: _ReuseCase, live_range: LiveRange, number: int) -> list[int]:
    """Return the results that may reuse a place at one of its uses, if a copy comes back later."""
    use, num_positions = live_range.uses[number], len(case.order)
    value, position = rename(case.graph, live_range.value, use, num_positions)
    if not live_range.is_constant and number == 0:  # no time for the copy
        return []
    results = case.reusable.get(position, {}).get(value, set())
    return sorted(new for new in results if (position, new) not in case.reused)


def _is_needless(
    case: _ReuseCase, evictions: list[Eviction], live: np.ndarray, capacity: int
) -> bool:
    """Return whether a value could be there a boundary longer: that is never slower."""
    for eviction in evictions:
        num_bytes = case.graph.num_bytes(case.live_ranges[eviction.live_range].value)
        ends = live[eviction.leaves % len(live)], live[(eviction.returns - 1) % len(live)]
        if min(ends) + num_bytes <= capacity:
            return True
    return False
