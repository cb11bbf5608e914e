"""Every order of a tiny graph, and everything that may be on the device when.

Second runs, what leaves between two uses and when: all are tried. It grows so fast with the graph
that nine operators are about the limit.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.graph import StepGraph
from penstock.planner._plan import Budget, Plan, Transfer
from penstock.planner._request import PlanRequest
from penstock.planner._simulate import step_seconds_of
from penstock.planner.exact._assemble import Stay, assemble, packed_offsets
from penstock.planner.exact._moves import Away, Life, last_read, live_bytes, lives_in, moves


@dataclass(frozen=True)
class Limit:
    """The end of a search.

    Attributes:
        deadline: Time by `time.monotonic`.
        processor_seconds: Time by `time.thread_time`, which other processes do not shorten.
        least_processor_seconds: Likewise; the deadline counts from then on only.
    """

    deadline: float = math.inf
    processor_seconds: float = math.inf
    least_processor_seconds: float = 0.0

    def is_over(self) -> bool:
        """Whether the search has to end."""
        used = time.thread_time()
        is_late = time.monotonic() > self.deadline and used >= self.least_processor_seconds
        return is_late or used > self.processor_seconds


@dataclass(frozen=True)
class _Case:
    """One order, with everything resident."""

    order: tuple[int, ...]
    lives: tuple[Life, ...]
    live_bytes: np.ndarray  # at each position
    overwritten: dict[int, dict[int, set[int]]]  # per position and operand: what may take its place
    taken: frozenset[tuple[int, int]]  # positions, and what takes the place of a life that ends


def orders_of(graph: StepGraph, *, reorder: bool, max_again: int) -> Iterator[tuple[int, ...]]:
    """Yield all topological orders, then all with one more run, and so on."""
    for num_again in range(max_again + 1):
        orders = _topological(graph) if reorder else iter([tuple(range(len(graph.operators)))])
        for order in orders:
            yield from with_more_runs(graph, order, num_again)


def _topological(graph: StepGraph) -> Iterator[tuple[int, ...]]:
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
    """Insert second runs where what they read has not been written over."""
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

    for stays, transfers, offsets in residencies(graph, order, request.budget, limit, is_faster):
        best = assemble(request, order, stays, transfers, offsets=offsets, method="brute_force")
        if is_first_enough:
            break
    return best


def residencies(
    graph: StepGraph,
    order: tuple[int, ...],
    budget: Budget,
    limit: Limit,
    is_wanted: Callable[[Sequence[Transfer]], bool],
) -> Iterator[tuple[list[Stay], list[Transfer], list[int]]]:
    """Yield what may be on the device when, with addresses, if its transfers are wanted.

    What could be on the device longer is as fast there, but may be in the way of others: where
    something finds no address, all that leaves earlier or comes later is tried as well.
    """
    for case in _cases(graph, order):
        for is_idle in (False, True):
            lacks_address = False
            for aways in _choices(graph, case, budget, limit, is_idle=is_idle):
                stays, transfers = moves(graph, len(order), case.lives, aways)
                if not is_wanted(transfers):
                    continue
                offsets = packed_offsets(graph, order, stays, budget.device_bytes)
                if offsets is None:
                    lacks_address = True
                else:
                    yield stays, transfers, offsets
            if not lacks_address:
                break


def _cases(graph: StepGraph, order: tuple[int, ...]) -> Iterator[_Case]:
    """With and without results in the place of operands that nobody uses afterwards."""
    overwritten: dict[int, dict[int, set[int]]] = {}
    for position, index in enumerate(order):
        for read, created in graph.operators[index].may_overwrite:
            if graph.num_bytes(created):  # what takes no place takes over none
                overwritten.setdefault(position, {}).setdefault(read, set()).add(created)
    for chosen, taken in _handed_over(graph, lives_in(graph, order), overwritten):
        live = live_bytes(graph, len(order), chosen)
        yield _Case(order, tuple(chosen), live, overwritten, taken)


def _handed_over(
    graph: StepGraph, lives: list[Life], overwritten: dict[int, dict[int, set[int]]]
) -> Iterator[tuple[list[Life], frozenset[tuple[int, int]]]]:
    options: list[list[int | None]] = []
    for life in lives:
        last = last_read(graph, life)
        takers = set() if last is None else overwritten.get(last, {}).get(life.value, set())
        options.append([*sorted(takers), None])
    for choice in itertools.product(*options):
        taken = [
            (life.end - 1, new) for life, new in zip(lives, choice, strict=True) if new is not None
        ]
        if len(set(taken)) == len(taken):
            chosen = [
                life if new is None else life._replace(end=life.end - 1)
                for life, new in zip(lives, choice, strict=True)
            ]
            yield chosen, frozenset(taken)


def _choices(
    graph: StepGraph, case: _Case, budget: Budget, limit: Limit, *, is_idle: bool
) -> Iterator[list[Away]]:
    """All that may be away when, such that the rest fits; without need only if `is_idle`."""
    workspace_bytes = max((operator.workspace_bytes for operator in graph.operators), default=0)
    if budget.device_bytes is None:
        yield []
        return
    capacity = budget.device_bytes - workspace_bytes
    num_positions = len(case.order)
    crowded = (case.live_bytes > capacity) | is_idle
    gaps: list[list[Away]] = []
    for index, life in enumerate(case.lives):
        for use, (begin, after) in enumerate(itertools.pairwise(life.uses)):
            inside = [p for p in range(begin + 1, after) if crowded[p % num_positions]]
            options = [
                Away(index, use, left, last + 1)
                for left in inside
                for last in inside
                if left <= last
            ]
            options += [
                Away(index, use, begin, last + 1, taker)
                for taker in _takers(graph, case, life, use)
                for last in (begin, *inside)
                if crowded[begin % num_positions]
            ]
            if options:
                gaps.append(options)
    most = np.zeros((len(gaps) + 1, num_positions), dtype=np.int64)  # that later gaps can free
    for row in reversed(range(len(gaps))):
        life = case.lives[gaps[row][0].life]
        most[row] = most[row + 1]
        left = min(away.left for away in gaps[row])
        back = max(away.back for away in gaps[row])
        for position in range(left, back):
            most[row, position % num_positions] += graph.num_bytes(life.value)

    def choose(row: int, live: np.ndarray, aways: list[Away]) -> Iterator[list[Away]]:
        if (live - most[row] > capacity).any() or limit.is_over():
            return
        if row == len(gaps):
            if is_idle or not _is_away_in_vain(graph, case, aways, live, capacity):
                yield aways
            return
        yield from choose(row + 1, live, aways)
        for away in gaps[row]:
            if away.taker is not None and any(
                (other.left, other.taker) == (away.left, away.taker) for other in aways
            ):
                continue
            less = live.copy()
            for position in range(away.left, away.back):
                less[position % num_positions] -= graph.num_bytes(case.lives[away.life].value)
            yield from choose(row + 1, less, [*aways, away])

    yield from choose(0, case.live_bytes, [])


def _takers(graph: StepGraph, case: _Case, life: Life, use: int) -> list[int]:
    """Return what may be written over a life at one of its uses, if a copy comes back later."""
    position, value = life.uses[use], life.value
    if position >= len(case.order):
        storage = graph.storages[graph.storage_of_value[value]]
        assert storage.initial is not None
        position, value = position - len(case.order), storage.initial
    if not life.constant and use == 0:  # no time for the copy, or it is only made here
        return []
    takers = case.overwritten.get(position, {}).get(value, set())
    return sorted(new for new in takers if (position, new) not in case.taken)


def _is_away_in_vain(
    graph: StepGraph, case: _Case, aways: list[Away], live: np.ndarray, capacity: int
) -> bool:
    """Whether something could be there a boundary longer: that is never slower."""
    num_positions = len(case.order)
    for away in aways:
        num_bytes = graph.num_bytes(case.lives[away.life].value)
        for position in (away.left, away.back - 1):
            if live[position % num_positions] + num_bytes <= capacity:
                return True
    return False
