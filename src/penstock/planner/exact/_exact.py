"""The least traffic of small steps, proved: order, residency and what moves, together.

COSMA's question (arXiv 2311.18246), asked of training steps too: which bytes have to leave and come
back, whatever their time. Its model with address pairs has no useful bound; here residency is
solved without addresses, then packed, and a packing that fails goes back as a cut. A bound that
knows nothing of orders (`_floor.py`) and programs near good orders meet in the middle; where they
do not, the whole program is solved.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.errors import InfeasibleError
from penstock.graph import StepGraph
from penstock.memory import Link
from penstock.planner._plan import Plan, Transfer
from penstock.planner._request import PlanRequest
from penstock.planner.bounds import lives_of, made_anew
from penstock.planner.exact._assemble import Stay, assemble, packed_offsets, with_places
from penstock.planner.exact._floor import Floor
from penstock.planner.exact._moves import last_read, lives_in, moves
from penstock.planner.exact._peak import handovers, min_peak, min_working_set, workspace_bytes
from penstock.planner.exact._program import Program, Residency
from penstock.planner.exact._together import Together, apart, runs_together

_DEFAULT_SECONDS = 60.0  # where the request has no deadline
_MAX_CUTS = 10
_NEAR_STEPS = 2
_ORDERED_SHARE = 0.6  # of the time that is left
_MAX_PAIRS = 1500  # whose order is decided by columns of their own
_STAGE_SHARE = 0.25  # of the time that is left
_LESS = (0.97, 0.9, 0.8, 0.7)  # of the capacity, where what needs all of it cannot be packed


def exact(request: PlanRequest) -> Plan:
    """Plan a small step, of training or inference, with the least bytes that leave and come back.

    Steps repeat: what a step leaves is what the next one begins with, wherever it is. Nothing runs
    twice. What leaves goes to the nearest tier below. A result takes the place of an operand only
    where both have the same bytes; places have multiples of 64 bytes if anything has a kilobyte.

    Columns, for operators v, values u and time steps t: a(v, t), v runs at t, between the number of
    its ancestors and that of all but its descendants; r(u, t), u is on the device while t runs;
    b(u, t), u comes back for t; s(u), u is written below. Rows: one operator a step, in order; what
    is read or made at t is there; r(u, t) <= r(u, t - 1) + made at t + b(u, t); b(u, t) <= s(u);
    what is there fits. Of a storage that steps change, the step before t = 0 is the last one, where
    its first value u0 was the last one, uf: s(u0) is s(uf). Of one that no step changes a copy lies
    below for ever: s is 0. Something comes back for a use and leaves after one, if at all. Least:
    the sum of bytes of s and b (COSMA, equations 1 to 12 without 9 to 11).

    Example:
        >>> plan = exact(request)  # doctest: +SKIP
        >>> plan.notes["non_compulsory_bytes"], plan.notes["proved"]  # doctest: +SKIP
        (3426564, True)

    Args:
        request: A step of about a hundred operators at most. Its times say nothing about what is
            best. Without a deadline the solver has 60 seconds.

    Returns:
        The plan; `notes` has `non_compulsory_bytes`, `lower_bound_bytes` and `proved`.

    Raises:
        InfeasibleError: No plan fits, or none was found in time.
        ValueError: The budget has no device bytes, or an operator makes a persistent storage's
            content elsewhere instead of changing it.
    """
    graph, budget = request.graph, request.budget
    links = request.links[0] if request.links else None  # the tier above the others
    time_limit = request.ending(_DEFAULT_SECONDS).seconds_left()
    require_kept_storages(graph)
    if budget.device_bytes is None:
        raise ValueError("budget.device_bytes is None: an exact plan is for a number of bytes")
    _require_working_set(graph, budget.device_bytes)
    orders = _orders(graph) if request.reorder else [tuple(range(len(graph.operators)))]
    for order in orders:
        stays = _resident(graph, order, unused=links is None)
        offsets = packed_offsets(graph, order, stays, budget.device_bytes, time_limit=10.0)
        if offsets is not None:
            plan = assemble(request, order, stays, (), offsets=offsets, method="exact")
            return _with_notes(plan, 0, 0, True)
    if links is None:
        raise InfeasibleError(
            f"{budget.device_bytes} bytes are too little for the best order that was found, and "
            "there is no tier to which anything could leave: pass host_memory= or store=",
            proved=False,
        )
    search = _Search(graph, budget.device_bytes, reorder=request.reorder, time_limit=time_limit)
    best = search.run(orders)
    if best.found is None:
        raise InfeasibleError(
            f"no plan for {budget.device_bytes} bytes "
            + ("runs nothing twice" if best.proved else f"was found in {time_limit:.3g} seconds"),
            minimum_device_bytes=min_working_set(graph),
        )
    out, back = links
    transfers = [
        transfer._replace(link=out if transfer.link is Link.DEVICE_TO_HOST else back)
        for transfer in best.found.transfers
    ]
    order, stays, _, offsets = best.found
    plan = assemble(request, order, stays, transfers, offsets=offsets, method="exact")
    least = best.found.traffic if best.proved else best.least
    return _with_notes(plan, best.found.traffic, least, best.proved)


class _Solved(NamedTuple):
    """What came of an integer program: the best solution that can be packed, if there is one."""

    found: _Found | None
    least: int  # bytes that any order with these windows moves
    proved: bool  # that no other moves less, or that there is none


class _Found(NamedTuple):
    order: tuple[int, ...]
    stays: list[Stay]
    transfers: list[Transfer]
    offsets: Sequence[int]

    @property
    def traffic(self) -> int:
        """Bytes that leave and come back."""
        return sum(transfer.num_bytes for transfer in self.transfers)


class _Search:
    """The least traffic: near good orders first, then ever farther from the best."""

    def __init__(
        self, graph: StepGraph, device_bytes: int, *, reorder: bool, time_limit: float
    ) -> None:
        self.graph, self.device_bytes, self.reorder = graph, device_bytes, reorder
        self.deadline = time.monotonic() + time_limit
        self.moved_bytes = [storage.num_bytes for storage in graph.storages]
        self.places = with_places(graph)
        self.capacity = device_bytes - workspace_bytes(graph)
        self.together = runs_together(self.places) if reorder else apart(graph)
        self.freely = runs_together(self.places, at_ends=False) if reorder else self.together
        num_steps = len(graph.operators)
        self.windows = [
            range(len(earlier), num_steps - len(later))
            for earlier, later in zip(
                self.together.ancestors, self.together.descendants, strict=True
            )
        ]

    def run(self, starts: Sequence[Sequence[int]]) -> _Solved:
        """Look near each of these orders, then near the best, ever farther."""
        least = self._floor(self.freely, is_ordered=False).solve(self.left)
        if least is None:
            return _Solved(None, 0, True)
        best = _Solved(None, least, False)
        if not self.reorder:
            return self._near(range(len(self.windows)), 0, best, 1.0)
        for order in starts:
            best = self._near(order, 0, best, _STAGE_SHARE)
        for at_ends in (False, True):
            best = self._ordered(best, at_ends=at_ends)
        num_steps = _NEAR_STEPS
        while not best.proved and self.left > 0:
            before = best.found
            orders = starts if before is None else [before.order]
            for order in orders:
                best = self._near(order, num_steps, best, _STAGE_SHARE)
            if best.found is before and num_steps >= len(self.windows):
                break
            if best.found is before:
                num_steps *= 2
        return self._with_less(best) if best.found is None and not best.proved else best

    def _ordered(self, best: _Solved, *, at_ends: bool) -> _Solved:
        """Ask for the least that an order may move, and look what that order does move.

        Where nothing is asked for at the ends of the step more operators stay together.
        """
        together = self.together if at_ends else self.freely
        if best.proved or len(together.free_pairs()) > _MAX_PAIRS:
            return best
        floor = self._floor(together, is_ordered=True, at_ends=at_ends)
        least = floor.solve(_ORDERED_SHARE * self.left)
        if least is None:
            return _Solved(None, best.least, True)
        best = best._replace(least=max(best.least, least))
        if best.found is not None and best.found.traffic <= best.least:
            return best._replace(proved=True)
        order = floor.order()
        return best if order is None else self._near(order, 0, best, _STAGE_SHARE)

    def _floor(self, together: Together, *, is_ordered: bool, at_ends: bool = False) -> Floor:
        return Floor(
            self.places,
            self.moved_bytes,
            self.capacity,
            together,
            is_ordered=is_ordered,
            at_ends=at_ends,
        )

    def _near(self, order: Sequence[int], num_steps: int, best: _Solved, share: float) -> _Solved:
        """Let operators run a few steps earlier or later than in an order."""
        if best.proved:
            return best
        step_of = {operator: step for step, operator in enumerate(order)}
        windows = [
            range(max(step_of[v] - num_steps, w.start), min(step_of[v] + num_steps + 1, w.stop))
            for v, w in enumerate(self.windows)
        ]
        share = 1.0 if windows == self.windows else share
        return self._solved(windows, best, share * self.left)

    @property
    def left(self) -> float:
        """Seconds."""
        return max(self.deadline - time.monotonic(), 0.0)

    def _program(self, capacity: int, windows: Sequence[range], best: _Solved) -> Program:
        most = None if best.found is None else best.found.traffic
        return Program(
            self.places,
            self.moved_bytes,
            capacity,
            windows,
            self.together,
            least=best.least,
            most=most,
        )

    def _solved(self, windows: Sequence[range], best: _Solved, time_limit: float) -> _Solved:
        """Solve for the operators' windows; what cannot be packed is cut off."""
        deadline = time.monotonic() + time_limit
        is_all = list(windows) == self.windows
        program = self._program(self.capacity, windows, best)
        least = best.least
        for cut in range(_MAX_CUTS):
            has_solution = program.solve(max(deadline - time.monotonic(), 0.1))
            least = max(least, program.least) if is_all else least
            if not has_solution:
                proved = is_all and program.program.proved_infeasible
                if best.found is None:
                    return _Solved(None, least, proved and not cut)
                # Nothing moves less, or everything that does cannot be packed and was tried.
                return _Solved(best.found, least, proved)
            found = self._packed(program.residency())
            if found is not None:
                better = best.found is None or found.traffic < best.found.traffic
                proved = (is_all and program.proved) or found.traffic <= least
                return _Solved(found if better else best.found, least, proved)
            program.forbid()
        return _Solved(best.found, least, False)

    def _with_less(self, best: _Solved) -> _Solved:
        """Solve for a smaller capacity, where what needs all of it cannot be packed."""
        for share in _LESS:
            program = self._program(int(self.capacity * share), self.windows, best)
            if not program.solve(max(self.left, 0.1)):
                break
            found = self._packed(program.residency())
            if found is not None:
                return _Solved(found, best.least, False)
        return best

    def pack(self, order: Sequence[int], stays: Sequence[Stay]) -> list[int] | None:
        """Return an address for each stay, if some were found."""
        return packed_offsets(self.graph, order, stays, self.device_bytes, time_limit=10.0)

    def _packed(self, residency: Residency) -> _Found | None:
        order = residency.order
        stays, transfers = moves(self.graph, len(order), residency.lives, residency.aways)
        offsets = self.pack(order, stays)
        return None if offsets is None else _Found(order, stays, transfers, offsets)


def _orders(graph: StepGraph) -> list[tuple[int, ...]]:
    """Good orders to look near: the program's, one of least peak, and one that is frugal."""
    together = runs_together(with_places(graph))
    steps = [tuple(range(len(graph.operators)))]
    if not any(storage.persistent and storage.num_bytes for storage in graph.storages):
        steps.append(min_peak(graph).order)
    orders = [_grouped(together, order) for order in steps]
    return list(dict.fromkeys([*orders[1:], orders[0], frugal_order(graph, together)]))


def _grouped(together: Together, order: Sequence[int]) -> tuple[int, ...]:
    """An order in which groups run together, each where the last of it did."""
    step_of = {operator: step for step, operator in enumerate(order)}
    left = sorted(together.groups, key=lambda group: max(step_of[each] for each in group))
    found: list[int] = []
    while left:
        group = next(g for g in left if together.ancestors[g[0]].issubset(found))
        left.remove(group)
        found += group
    return tuple(found)


def frugal_order(graph: StepGraph, together: Together) -> tuple[int, ...]:
    """An order in which whatever frees the most of what the step makes runs next."""
    found: list[int] = []
    left = list(together.groups)

    def growth(group: list[int]) -> int:
        done = {*found, *group}
        made = (v for index in group for v in graph.operators[index].creates)
        needed = {v for index in group for v in graph.operators[index].needs}
        dead = (
            v
            for v in needed
            if done.issuperset(graph.consumers[v])
            and not any(v == old for i in group for old, _ in graph.operators[i].mutates)
            and graph.storages[graph.storage_of_value[v]].final != v
        )
        return sum(map(graph.num_bytes, made)) - sum(map(graph.num_bytes, dead))

    while left:
        ready = [g for g in left if together.ancestors[g[0]].issubset(found)]
        group = min(ready, key=lambda each: (growth(each), each))
        left.remove(group)
        found += group
    return tuple(found)


def require_kept_storages(graph: StepGraph) -> None:
    """Refuse steps that make a persistent storage without having had it."""
    for index in made_anew(graph, recompute=False):
        raise ValueError(
            f"storage {graph.storages[index].name!r} lives from step to step, and an operator "
            "makes its content in memory of its own; the exact planner is for storages that are "
            "changed in place"
        )


def _with_notes(plan: Plan, traffic: int, least: int, proved: bool) -> Plan:
    fields = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    notes = {"non_compulsory_bytes": traffic, "lower_bound_bytes": least, "proved": proved}
    return Plan(**{**fields, "notes": notes})


def _require_working_set(graph: StepGraph, device_bytes: int) -> None:
    if min_working_set(graph) > device_bytes:
        used = lives_of(graph, range(len(graph.operators))).used_bytes
        raise InfeasibleError(
            f"{graph.operators[int(np.argmax(used))].name!r} alone needs {min_working_set(graph)} "
            f"bytes; the budget is {device_bytes}",
            minimum_device_bytes=min_working_set(graph),
            operator=graph.operators[int(np.argmax(used))].name,
            proved=True,
        )


def _resident(graph: StepGraph, order: Sequence[int], *, unused: bool) -> list[Stay]:
    """Everything from where it is made to where it is last used; also what nobody uses, if so."""
    lives = lives_in(graph, order)
    for position, index in enumerate(order):
        reads = graph.operators[index].reads
        dying = {
            life.value: number
            for number, life in enumerate(lives)
            if life.value in reads and last_read(graph, life) == position
        }
        for read, _ in handovers(graph, index, dying):
            lives[dying[read]] = lives[dying[read]]._replace(end=position)
    stays, _ = moves(graph, len(order), lives, ())
    if unused:
        placed = {life.value for life in lives}
        stays += [
            Stay(storage.initial, 0, len(order))
            for storage in graph.storages
            if storage.persistent and storage.num_bytes and storage.initial == storage.final
            if storage.initial is not None and storage.initial not in placed
        ]
    return stays
