"""The least traffic of small inference graphs, proved: order, residency and spills together.

COSMA's setting (arXiv 2311.18246): a step without parameters in the same memory, costs are bytes
that leave and come back ("non-compulsory"), whatever their time. Its model with address pairs has
no useful bound; here residency is solved without addresses, then packed, and a packing that fails
goes back as a cut.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock.errors import InfeasibleError
from penstock.graph import StepGraph
from penstock.memory import Link, MachineProfile
from penstock.planner._plan import Budget, Plan, Transfer
from penstock.planner.optima._assemble import Stay, assemble, packed_offsets
from penstock.planner.optima._peak import (
    handovers,
    min_peak,
    min_working_set,
    require_inference,
    workspace_bytes,
)
from penstock.planner.proofs._forced import forced_bytes, relatives
from penstock.planner.proofs._linear import LinearProgram
from penstock.planner.proofs._lives import lives_of

_MAX_CUTS = 10
_MAX_WIDTH = 8  # mean steps at which an operator may run, beyond which a program is wide
_WIDE_SHARE = 0.5  # of the time for a program that is
_NEAR_STEPS = 2
_LESS = (0.97, 0.9, 0.8, 0.7)  # of the capacity, where what needs all of it cannot be packed
_TOLERANCE = 1e-6


def exact(
    graph: StepGraph,
    operator_seconds: Sequence[float],
    budget: Budget,
    machine: MachineProfile,
    *,
    links: tuple[Link, Link] | None = (Link.DEVICE_TO_HOST, Link.HOST_TO_DEVICE),
    reorder: bool = True,
    time_limit: float = 60.0,
) -> Plan:
    """Plan an inference graph with the least bytes that leave and come back.

    A result takes the place of an operand only where both have the same bytes.

    Columns, for operators v, values u and time steps t: a(v, t), v runs at t, between the number of
    its ancestors and that of all but its descendants; r(u, t), u is on the device while t runs;
    b(u, t), u comes back for t; s(u), u is written below. Rows: one operator a step, in order; what
    is read or made at t is there; r(u, t) <= r(u, t - 1) + made at t + b(u, t); b(u, t) <= s(u);
    what is there fits. Least: the sum of bytes of s and b (COSMA, equations 1 to 12 without 9 to
    11). At least twice the bytes that any order has to shed at an operator (`forced_bytes`).

    Example:
        >>> plan = exact(graph, seconds, budget, machine)  # doctest: +SKIP
        >>> plan.notes["non_compulsory_bytes"], plan.notes["proved"]  # doctest: +SKIP
        (3426564, True)

    Args:
        graph: A step without persistent storages, of about a hundred operators at most.
        operator_seconds: Time of each operator; says nothing about what is best.
        budget: With the tier below.
        machine: Rates of the links.
        links: Out of the device and back; None: there is nowhere to go.
        reorder: Whether other orders than the program's are allowed.
        time_limit: Seconds for the solver.

    Returns:
        The plan; `notes` has `non_compulsory_bytes`, `lower_bound_bytes` and `proved`.

    Raises:
        InfeasibleError: No plan fits, or none was found in time.
        ValueError: The graph has persistent storages with bytes, or the budget no device bytes.
    """
    require_inference(graph)
    if budget.device_bytes is None:
        raise ValueError("budget.device_bytes is None: an exact plan is for a number of bytes")
    _require_working_set(graph, budget.device_bytes)
    fields = {"budget": budget, "machine": machine, "operator_seconds": operator_seconds}
    program_order = tuple(range(len(graph.operators)))
    order = min_peak(graph).order if reorder else program_order
    stays = _resident(graph, order)
    offsets = packed_offsets(graph, order, stays, budget.device_bytes, time_limit=10.0)
    if offsets is not None:
        plan = assemble(graph, order, stays, (), offsets=offsets, method="exact", **fields)
        return _with_notes(plan, 0, 0, True)
    if links is None:
        raise InfeasibleError(
            f"{budget.device_bytes} bytes are too little for the best order that was found, and "
            "there is no tier to which anything could leave: pass host_memory= or store=",
            proved=False,
        )
    deadline = time.monotonic() + time_limit
    windows = _windows(graph) if reorder else _near(program_order, 0, None)
    is_wide = sum(map(len, windows)) > _MAX_WIDTH * len(windows)
    # Of a wide program only its bound may be had in time; the plan then comes from nearby orders.
    share = time_limit * _WIDE_SHARE if is_wide else time_limit
    best = _solved(graph, budget.device_bytes, windows, min(deadline, time.monotonic() + share))
    proved = best.proved
    if not proved and reorder:
        for start in (program_order, order):
            best = _nearby(graph, budget.device_bytes, windows, start, best, deadline)
    if best.moves is None and not proved:
        best = _with_less(graph, budget.device_bytes, windows, best.least, deadline)
    if best.moves is None:
        raise InfeasibleError(
            f"no plan for {budget.device_bytes} bytes "
            + ("exists" if proved else f"was found within {time_limit} seconds"),
            proved=proved,
        )
    order, stays, transfers = best.moves
    out, back = links
    transfers = [
        transfer._replace(link=out if transfer.link is Link.DEVICE_TO_HOST else back)
        for transfer in transfers
    ]
    plan = assemble(graph, order, stays, transfers, offsets=best.offsets, method="exact", **fields)
    proved = proved or best.traffic <= best.least
    return _with_notes(plan, best.traffic, best.traffic if proved else best.least, proved)


class _Solved(NamedTuple):
    """What came of an integer program: the best solution that can be packed, if there is one."""

    moves: tuple[tuple[int, ...], list[Stay], list[Transfer]] | None
    offsets: Sequence[int] | None
    traffic: int
    least: int  # bytes that any order with these windows moves
    proved: bool  # that no other moves less, or that there is none


def _solved(
    graph: StepGraph, device_bytes: int, windows: Sequence[range], deadline: float
) -> _Solved:
    """Solve for the operators' windows; what cannot be packed is cut off."""
    model = _Model(graph, device_bytes - workspace_bytes(graph), windows)
    for cut in range(_MAX_CUTS):
        if model.solve(max(deadline - time.monotonic(), 0.1)) is None:
            infeasible = model.program.proved_infeasible and not cut
            return _Solved(None, None, 0, model.least, infeasible)
        moves = model.moves()
        offsets = packed_offsets(graph, moves[0], moves[1], device_bytes, time_limit=10.0)
        if offsets is not None:
            traffic = sum(transfer.num_bytes for transfer in moves[2])
            return _Solved(moves, offsets, traffic, model.least, model.proved)
        model.forbid()
    return _Solved(None, None, 0, model.least, False)


def _with_less(
    graph: StepGraph, device_bytes: int, windows: Sequence[range], least: int, deadline: float
) -> _Solved:
    """Solve for a smaller capacity, where what needs all of it cannot be packed."""
    for share in _LESS:
        capacity = int((device_bytes - workspace_bytes(graph)) * share)
        model = _Model(graph, capacity, windows)
        if model.solve(max(deadline - time.monotonic(), 0.1)) is None:
            break
        moves = model.moves()
        offsets = packed_offsets(graph, moves[0], moves[1], device_bytes, time_limit=10.0)
        if offsets is not None:
            traffic = sum(transfer.num_bytes for transfer in moves[2])
            return _Solved(moves, offsets, traffic, least, False)
    return _Solved(None, None, 0, least, False)


def _nearby(
    graph: StepGraph,
    device_bytes: int,
    windows: Sequence[range],
    order: tuple[int, ...],
    best: _Solved,
    deadline: float,
) -> _Solved:
    """Let each operator run a few steps earlier or later than in the best order, again and again.

    Each of these programs is small and solved to its end, so this descends to an order that no
    order near it beats.
    """
    local: _Solved | None = None
    while time.monotonic() < deadline:
        near = _near(order, _NEAR_STEPS if local else 0, windows)
        found = _solved(graph, device_bytes, near, deadline)
        if found.moves is None:
            if local:
                break
            local = found  # its own order does not do; those near it may
            continue
        if local and local.moves and found.traffic >= local.traffic:
            break
        local, order = found, found.moves[0]
    if local is None or local.moves is None:
        return best
    if best.moves is not None and best.traffic <= local.traffic:
        return best
    return local._replace(least=best.least, proved=False)


def _windows(graph: StepGraph) -> list[range]:
    """The steps at which each operator may run in any order."""
    ancestors, descendants = relatives(graph)
    before = [int(np.unpackbits(row).sum()) for row in ancestors]
    after = [int(np.unpackbits(row).sum()) for row in descendants]
    return [range(first, len(before) - later) for first, later in zip(before, after, strict=True)]


def _near(order: Sequence[int], num_steps: int, windows: Sequence[range] | None) -> list[range]:
    """The steps near those of an order, within the windows."""
    step_of = {operator: step for step, operator in enumerate(order)}
    near = [range(step_of[v] - num_steps, step_of[v] + num_steps + 1) for v in range(len(order))]
    if windows is None:
        return near
    return [
        range(max(a.start, b.start), min(a.stop, b.stop))
        for a, b in zip(near, windows, strict=True)
    ]


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
        )


def _resident(graph: StepGraph, order: Sequence[int]) -> list[Stay]:
    """Everything from where it is made to where it is last used."""
    position_of = {operator: position for position, operator in enumerate(order)}
    stays = {}
    for value, producer in enumerate(graph.producers):
        stay = _life(graph, value, producer, position_of)
        if stay is not None:
            stays[value] = stay
    for position, index in enumerate(order):
        reads = graph.operators[index].reads
        # Whoever writes over a value later needs it as well, though its stay ends there.
        last_need = {v: max(position_of[c] for c in graph.consumers[v]) for v in reads}
        dead = [v for v in reads if v in stays and last_need[v] == position]
        dead = [v for v in dead if graph.storages[graph.storage_of_value[v]].final != v]
        for read, _ in handovers(graph, index, dead):
            stays[read] = stays[read]._replace(end=position)
    return list(stays.values())


def _life(
    graph: StepGraph, value: int, producer: int | None, position_of: dict[int, int]
) -> Stay | None:
    storage = graph.storages[graph.storage_of_value[value]]
    if not storage.num_bytes or (producer is None and not graph.consumers[value]):
        return None
    start = 0 if producer is None else position_of[producer]
    last = max([start, *(position_of[consumer] for consumer in graph.consumers[value])])
    if storage.final == value:
        return Stay(value, start, len(position_of))
    writers = [
        position_of[consumer]
        for consumer in graph.consumers[value]
        if value in (old for old, _ in graph.operators[consumer].mutates)
    ]
    return Stay(value, start, last if last in writers else last + 1)


class _Model:
    """The integer program of `exact`."""

    def __init__(self, graph: StepGraph, capacity: int, windows: Sequence[range]) -> None:
        self.graph = graph
        self.capacity = max(capacity, 1)
        self.num_steps = len(graph.operators)
        self.program = LinearProgram()
        self.proved = False
        self.windows = windows
        shed = max(0, math.ceil(float(forced_bytes(graph).max(initial=0)) - capacity))
        self.least = 2 * shed
        self.values = [
            value
            for value, producer in enumerate(graph.producers)
            if graph.num_bytes(value) and (producer is not None or graph.consumers[value])
        ]
        self._place_operators()
        self._place_values(capacity)

    def _place_operators(self) -> None:
        self.runs = [
            {step: self.program.column(upper=1.0, integer=True) for step in window}
            for window in self.windows
        ]
        for columns in self.runs:
            self.program.row([*columns.values()], [1.0] * len(columns), lower=1.0, upper=1.0)
        for step in range(self.num_steps):
            columns = [runs[step] for runs in self.runs if step in runs]
            self.program.row(columns, [1.0] * len(columns), lower=1.0, upper=1.0)
        for operator, earlier in enumerate(self.graph.predecessors):
            for before in earlier:
                for step in self.windows[operator]:  # it has run by `step`: the other one earlier
                    late = [c for t, c in self.runs[operator].items() if t <= step]
                    early = [c for t, c in self.runs[before].items() if t < step]
                    factors = [1.0] * len(early) + [-1.0] * len(late)
                    self.program.row(early + late, factors, lower=0.0)

    def _place_values(self, capacity: int) -> None:
        graph, program, unit = self.graph, self.program, float(max(capacity, 1))
        self.there: dict[int, dict[int, int]] = {}
        self.back: dict[int, dict[int, int]] = {}
        traffic: tuple[list[int], list[float]] = ([], [])
        held: list[tuple[list[int], list[float]]] = [([], []) for _ in range(self.num_steps)]
        for value in self.values:
            size = graph.num_bytes(value) / unit
            window = self._lifetime(value)
            there = {t: program.column(upper=1.0, integer=True) for t in window}
            back = {t: program.column(upper=1.0, cost=size) for t in window}
            written = program.column(upper=1.0, cost=size)
            traffic[0].extend([*back.values(), written])
            traffic[1].extend([size] * (len(back) + 1))
            self.there[value], self.back[value] = there, back
            made = self._runs_of(graph.producers[value])
            for step in window:
                held[step][0].append(there[step])
                held[step][1].append(size)
                if step in made:
                    program.row([there[step], made[step]], [1.0, -1.0], lower=0.0)
                for consumer in graph.consumers[value]:
                    if step in self.runs[consumer]:
                        used = self.runs[consumer][step]
                        program.row([there[step], used], [1.0, -1.0], lower=0.0)
                sources = [back[step]]
                sources += [there[step - 1]] if step - 1 in there else []
                sources += [made[step]] if step in made else []
                program.row([there[step], *sources], [1.0, *[-1.0] * len(sources)], upper=0.0)
                program.row([written, back[step]], [1.0, -1.0], lower=0.0)
            storage = graph.storages[graph.storage_of_value[value]]
            if storage.final == value:
                program.row([there[window[-1]]], [1.0], lower=1.0)
        self._share(held, unit)
        for columns, factors in held:
            program.row(columns, factors, upper=capacity / unit)
        program.row(*traffic, lower=self.least / unit)

    def _lifetime(self, value: int) -> range:
        graph = self.graph
        producer = graph.producers[value]
        start = 0 if producer is None else self.windows[producer].start
        ends = [self.windows[consumer].stop for consumer in graph.consumers[value]]
        if graph.storages[graph.storage_of_value[value]].final == value:
            ends.append(self.num_steps)
        ends.append(self.windows[producer].stop if producer is not None else 1)
        return range(start, max(ends))

    def _runs_of(self, producer: int | None) -> dict[int, int]:
        if producer is not None:
            return self.runs[producer]
        return {0: self.program.column(lower=1.0, upper=1.0)}  # given when the step begins

    def _share(self, held: list[tuple[list[int], list[float]]], unit: float) -> None:
        """What is written over counts once while its operator runs."""
        graph = self.graph
        self.handed: dict[int, list[tuple[int, int]]] = {}
        for index, operator in enumerate(graph.operators):
            for old, _ in operator.mutates:
                for step, column in self.runs[index].items():
                    held[step][0].append(column)
                    held[step][1].append(-graph.num_bytes(old) / unit)
            pairs: dict[tuple[int, int], list[int]] = {}
            for read, created in operator.may_overwrite:
                both = graph.num_bytes(read) / unit
                if graph.num_bytes(created) != graph.num_bytes(read):
                    continue
                for step, column in self.runs[index].items():
                    given_now = step == 0 and graph.producers[read] is None
                    if not both or (given_now and len(graph.consumers[read]) > 1):
                        continue
                    handed = self.program.column(upper=1.0, integer=True)
                    self.handed.setdefault(read, []).append((step, handed))
                    self.program.row([handed, column], [1.0, -1.0], upper=0.0)
                    following = self.there[read].get(step + 1)
                    if following is not None:  # needed at once: it comes back
                        back = self.back[read][step + 1]
                        self.program.row([handed, following, back], [1.0, 1.0, -1.0], upper=1.0)
                    held[step][0].append(handed)
                    held[step][1].append(-both)
                    for value in (read, created):
                        pairs.setdefault((value, step), []).append(handed)
            for columns in pairs.values():
                self.program.row(columns, [1.0] * len(columns), upper=1.0)

    def solve(self, time_limit: float) -> float | None:
        """Return the least traffic, in parts of the capacity; None if there is no solution yet."""
        traffic = self.program.solve(time_limit=time_limit)
        self.proved = traffic is not None
        if math.isfinite(self.program.bound):  # rounded down for the solver's tolerance
            least = self.program.bound * self.capacity * (1 - _TOLERANCE)
            self.least = max(self.least, math.floor(least))
        if traffic is None and not self.program.has_solution:
            return None
        return 0.0 if traffic is None else traffic

    def forbid(self) -> None:
        """Cut off the solution that was found: it cannot be packed."""
        columns = [c for there in self.there.values() for c in there.values()]
        columns += [c for runs in self.runs for c in runs.values()]
        chosen = [self.program.values[c] > 0.5 for c in columns]
        factors = [-1.0 if one else 1.0 for one in chosen]
        self.program.row(columns, factors, lower=1.0 - sum(chosen))

    def moves(self) -> tuple[tuple[int, ...], list[Stay], list[Transfer]]:
        """Read the order, the stays and the transfers off the solution."""
        solution, num_steps, graph = self.program.values, self.num_steps, self.graph
        step_of = {
            operator: next(t for t, column in runs.items() if solution[column] > 0.5)
            for operator, runs in enumerate(self.runs)
        }
        order = tuple(sorted(range(num_steps), key=lambda operator: step_of[operator]))
        stays: list[Stay] = []
        transfers: list[Transfer] = []
        for value in self.values:
            life = _life(graph, value, graph.producers[value], step_of)
            assert life is not None
            there = {t for t, column in self.there[value].items() if solution[column] > 0.5}
            uses = sorted({life.start, *(step_of[c] for c in graph.consumers[value])})
            if life.end == num_steps and graph.producers[value] is not None:
                uses.append(num_steps - 1)
            uses = sorted(set(uses))
            begin, written = life.start, False
            taken = {t for t, c in self.handed.get(value, ()) if solution[c] > 0.5}
            kept = graph.storages[graph.storage_of_value[value]].final == value
            for use, after in itertools.pairwise(uses):
                gone = [t for t in range(use + 1, after) if t not in there]
                if not gone and use not in taken:
                    continue
                # A result that takes its place takes it while the operator runs.
                left, back = use if use in taken else gone[0], max([use, *gone]) + 1
                if not written:
                    start = life.start + 1
                    transfers.append(self._transfer(value, Link.DEVICE_TO_HOST, start, left))
                    written = True
                stays.append(Stay(value, begin, left))
                transfers.append(self._transfer(value, Link.HOST_TO_DEVICE, back, after))
                begin = back
            handed = life.end - 1 in taken and life.end - 1 == uses[-1] and not kept
            stays.append(Stay(value, begin, life.end - 1 if handed else life.end))
        transfers.sort(key=lambda transfer: (transfer.end, transfer.start))
        return order, stays, transfers

    def _transfer(self, value: int, link: Link, start: int, end: int) -> Transfer:
        return Transfer(value, link, self.graph.num_bytes(value), start, end)
