"""The search for the least traffic: a bound of any order and programs near good orders meet.

The bound (`OrderRelaxation`) needs no order. The programs (`ExactProgram`) let operators run near
their positions in a good order, then ever farther; at last the whole program is solved.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from typing import NamedTuple

from penstock.graph import StepGraph
from penstock.planner._live_ranges import ResidentInterval
from penstock.planner._plan_records import Transfer
from penstock.planner.exact._addresses import aligned_graph, derive_movement, find_offsets
from penstock.planner.exact._exact_program import ExactProgram, Solution
from penstock.planner.exact._groups import group_operators, separate_operators
from penstock.planner.exact._order_relaxation import OrderRelaxation

_MAX_CUTS = 10
_NEAR_STEPS = 2
_ORDERED_SHARE = 0.6  # of the time that is left
_MAX_PAIRS = 1500  # whose order is decided by columns of their own
_STAGE_SHARE = 0.25  # of the time that is left
_LOWER_CAPACITIES = (0.97, 0.9, 0.8, 0.7)  # shares, where solutions for all of it do not pack
_PACK_SECONDS = 10.0


class Packed(NamedTuple):
    """A solution with addresses."""

    order: tuple[int, ...]
    intervals: list[ResidentInterval]
    transfers: list[Transfer]
    offsets: Sequence[int]

    @property
    def traffic(self) -> int:
        """Bytes that leave and come back."""
        return sum(transfer.num_bytes for transfer in self.transfers)


class Incumbent(NamedTuple):
    """The best solution so far, and how good it is."""

    packed: Packed | None  # the solution; None if there is none yet
    least: int  # bytes that any solution moves
    proved: bool  # whether no other moves less, or none exists


class TrafficSearch:
    """A search for the order and residency with the least traffic."""

    def __init__(
        self, graph: StepGraph, device_bytes: int, *, reorder: bool, time_limit: float
    ) -> None:
        self.graph, self.device_bytes, self.reorder = graph, device_bytes, reorder
        self.deadline = time.monotonic() + time_limit
        self.moved_bytes = [storage.num_bytes for storage in graph.storages]
        self.aligned = aligned_graph(graph)
        self.capacity = device_bytes - graph.workspace_bytes
        limits = self.aligned, self.moved_bytes, self.capacity
        self._relaxation = functools.partial(OrderRelaxation, *limits)
        self.groups = group_operators(self.aligned) if reorder else separate_operators(graph)
        self.loose_groups = group_operators(self.aligned, at_ends=False) if reorder else self.groups
        num_positions = len(graph.operators)
        self.windows = [
            range(len(earlier), num_positions - len(later))
            for earlier, later in zip(self.groups.ancestors, self.groups.descendants, strict=True)
        ]

    def run(self, starts: Sequence[Sequence[int]]) -> Incumbent:
        """Search near each of these orders, then near the best, ever farther."""
        least = self._relaxation(self.loose_groups, is_ordered=False).solve(self._seconds_left)
        if least is None:
            return Incumbent(None, 0, True)
        best = Incumbent(None, least, False)
        if not self.reorder:
            return self._search_near(range(len(self.windows)), 0, best, 1.0)
        for order in starts:
            best = self._search_near(order, 0, best, _STAGE_SHARE)
        for at_ends in (False, True):
            best = self._search_relaxed_order(best, at_ends=at_ends)
        distance = _NEAR_STEPS
        while not best.proved and self._seconds_left > 0:
            before = best.packed
            for order in starts if before is None else [before.order]:
                best = self._search_near(order, distance, best, _STAGE_SHARE)
            if best.packed is before and distance >= len(self.windows):
                break
            if best.packed is before:
                distance *= 2
        if best.packed is None and not best.proved:
            return self._search_lower_capacities(best)
        return best

    def _search_relaxed_order(self, best: Incumbent, *, at_ends: bool) -> Incumbent:
        """Solve for the least that an order may move, then for what that order does move.

        Where nothing is required at the ends of the step more operators stay together.
        """
        groups = self.groups if at_ends else self.loose_groups
        if best.proved or not self._seconds_left or len(groups.free_pairs()) > _MAX_PAIRS:
            return best
        relaxation = self._relaxation(groups, is_ordered=True, at_ends=at_ends)
        least = relaxation.solve(_ORDERED_SHARE * self._seconds_left)
        if least is None:
            return Incumbent(None, best.least, True)
        best = best._replace(least=max(best.least, least))
        if best.packed is not None and best.packed.traffic <= best.least:
            return best._replace(proved=True)
        order = relaxation.order()
        return best if order is None else self._search_near(order, 0, best, _STAGE_SHARE)

    def _search_near(
        self, order: Sequence[int], distance: int, best: Incumbent, share: float
    ) -> Incumbent:
        """Let operators run a few positions earlier or later than in an order."""
        if best.proved:
            return best
        position_of = {operator: position for position, operator in enumerate(order)}
        windows = [
            range(
                max(position_of[v] - distance, window.start),
                min(position_of[v] + distance + 1, window.stop),
            )
            for v, window in enumerate(self.windows)
        ]
        share = 1.0 if windows == self.windows else share
        return self._search_windows(windows, best, share * self._seconds_left)

    @property
    def _seconds_left(self) -> float:
        return max(self.deadline - time.monotonic(), 0.0)

    def _program(self, capacity: int, windows: Sequence[range], best: Incumbent) -> ExactProgram:
        return ExactProgram(
            self.aligned,
            self.moved_bytes,
            capacity,
            windows,
            self.groups,
            least=best.least,
            most=None if best.packed is None else best.packed.traffic,
        )

    def _search_windows(
        self, windows: Sequence[range], best: Incumbent, time_limit: float
    ) -> Incumbent:
        """Solve for the operators' windows; solutions that do not pack are cut off."""
        deadline = time.monotonic() + time_limit
        is_all = list(windows) == self.windows
        program = self._program(self.capacity, windows, best)
        least = best.least
        for cut in range(_MAX_CUTS):
            has_solution = program.solve(max(deadline - time.monotonic(), 0.1))
            least = max(least, program.least) if is_all else least
            if not has_solution:
                proved = is_all and program.program.proved_infeasible
                if best.packed is None:
                    return Incumbent(None, least, proved and not cut)
                # None moves less, or all that do were tried and do not pack.
                return Incumbent(best.packed, least, proved)
            found = self._pack_solution(program.solution())
            if found is not None:
                is_better = best.packed is None or found.traffic < best.packed.traffic
                proved = (is_all and program.proved) or found.traffic <= least
                return Incumbent(found if is_better else best.packed, least, proved)
            program.forbid()
        return Incumbent(best.packed, least, False)

    def _search_lower_capacities(self, best: Incumbent) -> Incumbent:
        """Solve for a lower capacity, where no solution for all of it packs."""
        for share in _LOWER_CAPACITIES:
            if not self._seconds_left:  # to make a program takes longer than a short limit
                break
            program = self._program(int(self.capacity * share), self.windows, best)
            if not program.solve(max(self._seconds_left, 0.1)):
                break
            found = self._pack_solution(program.solution())
            if found is not None:
                return Incumbent(found, best.least, False)
        return best

    def find_offsets(
        self, order: Sequence[int], intervals: Sequence[ResidentInterval]
    ) -> Sequence[int] | None:
        """Return an address for each interval, if some were found."""
        time_limit = min(max(self._seconds_left, 0.1), _PACK_SECONDS)
        return find_offsets(self.graph, order, intervals, self.device_bytes, time_limit=time_limit)

    def _pack_solution(self, solution: Solution) -> Packed | None:
        order = solution.order
        intervals, transfers = derive_movement(
            self.graph, len(order), solution.live_ranges, solution.evictions
        )
        offsets = self.find_offsets(order, intervals)
        return None if offsets is None else Packed(order, intervals, transfers, offsets)
