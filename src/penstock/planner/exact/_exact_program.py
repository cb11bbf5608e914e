"""The integer program of `exact`: order, residency and traffic of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from penstock.graph import StepGraph
from penstock.planner._live_ranges import LiveRange, live_ranges
from penstock.planner.exact._addresses import Eviction, last_read, rename
from penstock.planner.exact._groups import OperatorGroups
from penstock.solvers import LinearProgram

_TOLERANCE = 1e-6


class Solution(NamedTuple):
    """An order, its live ranges, and the evictions from them."""

    order: tuple[int, ...]
    live_ranges: list[LiveRange]
    evictions: list[Eviction]


# Operators v, values u, positions t = 0 .. N - 1; s(u) are bytes, M is the capacity. Groups of
# operators share their columns. COSMA, equations 1 to 12 without those of addresses (9 to 11).
#
# Columns, 0 or 1:
#   a(v, t)     v runs at t, between the number of its ancestors and that of all but its descendants
#   r(u, t)     u is on the device while t runs
#   b(u, t)     u comes back for t
#   w(u)        u is written below
#   h(u, n, t)  the result n reuses the place of the operand u at t
#
# minimise   sum of s(u) w(u) + sum of s(u) b(u, t)
# subject to
#   sum over t of a(v, t) = 1,  sum over v of a(v, t) = 1
#   sum over t' <= t of a(v, t') <= sum over t' < t of a(p, t')      p is a predecessor of v
#   r(u, t) >= a(v, t)                                               v reads or makes u
#   r(u, t) <= r(u, t - 1) + a(producer of u, t) + b(u, t)
#   b(u, t) <= sum of a(v, t) over v that read u,  b(u, t) <= w(u)
#   r(u, t) <= r(u, t + 1) + sum of a(v, t) over v that read or make u
#   sum of s(u) r(u, t) - sum of s(u) a(v, t) over v that change u - sum of s(u) h(u, n, t) <= M
#   h(u, n, t) <= a(producer of n, t),  h(u, n, t) + r(u, t + 1) <= 1 + b(u, t + 1)
#   sum over n of h(u, n, t) <= 1,  sum over u of h(u, n, t) <= 1
#   least <= objective < most
#
# A value is evicted after a use and returns for one, if at all (the rows of b and of r(u, t + 1)).
# Steps repeat: for a storage that steps change, t - 1 before t = 0 is N - 1, where its initial
# value is its final one, so both have one w. For a constant one w is 0: its copy lasts for ever.


class ExactProgram:
    """Order and residency of a step in which steps repeat, in an integer program.

    The graph has the bytes that placements take, `moved_bytes` are those that each storage
    moves, and operators run within their windows of positions.
    """

    def __init__(
        self,
        graph: StepGraph,
        moved_bytes: Sequence[int],
        capacity: int,
        windows: Sequence[range],
        groups: OperatorGroups,
        *,
        least: int = 0,
        most: int | None = None,
    ) -> None:
        self.graph, self.moved_bytes = graph, moved_bytes
        self.capacity, self.unit = capacity, float(max(capacity, 1))
        self.num_positions = len(graph.operators)
        self.windows, self.groups = windows, groups
        self.least = least
        self.proved = False
        self.program = LinearProgram()
        self._always = self.program.column(lower=1.0, upper=1.0)
        self.values = [
            value
            for value, producer in enumerate(graph.producers)
            if graph.num_bytes(value) and (producer is not None or graph.consumers[value])
        ]
        self._add_operators()
        self._add_values()
        self._add_reuses()
        for columns, factors in self.held:
            self.program.row(columns, factors, upper=capacity / self.unit)
        self._add_traffic_limits(least, most)

    def _add_operators(self) -> None:
        """Add a(v, t) and the rows of order; the operators of a group share their columns."""
        self.runs: list[dict[int, int]] = [{} for _ in self.windows]
        for group in self.groups.groups:
            windows = [(place, self.windows[operator]) for place, operator in enumerate(group)]
            first = range(
                max(window.start - place for place, window in windows),
                min(window.stop - place for place, window in windows),
            )
            columns = {step: self.program.column(upper=1.0, integer=True) for step in first}
            for place, operator in enumerate(group):
                self.runs[operator] = {step + place: c for step, c in columns.items()}
            self.program.row([*columns.values()], [1.0] * len(columns), lower=1.0, upper=1.0)
        for step in range(self.num_positions):
            columns = [runs[step] for runs in self.runs if step in runs]
            self.program.row(columns, [1.0] * len(columns), lower=1.0, upper=1.0)
        ancestors = self.groups.ancestors
        for operator, earlier in enumerate(ancestors):
            nearest = earlier.difference(*(ancestors[before] for before in earlier))
            for before in nearest:
                for step in self.windows[operator]:  # it has run by `step`: the other one earlier
                    late = [c for t, c in self.runs[operator].items() if t <= step]
                    early = [c for t, c in self.runs[before].items() if t < step]
                    factors = [1.0] * len(early) + [-1.0] * len(late)
                    self.program.row(early + late, factors, lower=0.0)

    def _add_values(self) -> None:
        """Add r(u, t), b(u, t) and w(u) of all values."""
        program = self.program
        self.resident: dict[int, dict[int, int]] = {}
        self.returns: dict[int, dict[int, int]] = {}
        self.written: dict[int, int] = {}  # by the value that a step makes
        positions = range(self.num_positions)
        self.held: list[tuple[list[int], list[float]]] = [([], []) for _ in positions]
        for value in self.values:
            window = self._lifetime(value)
            cost = self.moved_bytes[self.graph.storage_of_value[value]] / self.unit
            self.resident[value] = {t: program.column(upper=1.0, integer=True) for t in window}
            self.returns[value] = {t: program.column(upper=1.0, cost=cost) for t in window}
            made = self._name_when_made(value)
            if not self._is_constant(value) and made not in self.written:
                self.written[made] = program.column(upper=1.0, cost=cost)
        for value in self.values:
            self._add_value(value)

    def _add_value(self, value: int) -> None:
        """Add the rows of one value."""
        graph, program = self.graph, self.program
        resident, returns = self.resident[value], self.returns[value]
        size = graph.num_bytes(value) / self.unit
        written = self.written.get(self._name_when_made(value))
        made = self._producing_columns(value)
        storage = graph.storages[graph.storage_of_value[value]]
        is_kept = storage.final == value and not storage.persistent
        for step, column in resident.items():
            self.held[step][0].append(column)
            self.held[step][1].append(size)
            used = [self.runs[c][step] for c in graph.consumers[value] if step in self.runs[c]]
            needed = [*used, made[step]] if step in made else used
            if is_kept and step == self.num_positions - 1:
                used, needed = [self._always], [self._always]
            factors = [-1.0] * len(needed)
            if needed == [*used, self._always]:  # given, whether it is used or not
                program.row([column], [1.0], lower=1.0)
            else:
                program.row([column, *needed], [1.0, *factors], lower=0.0)
            sources = [returns[step], *self._resident_before(value, step)]
            sources += [made[step]] if step in made else []
            program.row([column, *sources], [1.0, *[-1.0] * len(sources)], upper=0.0)
            program.row([returns[step], *used], [1.0, *[-1.0] * len(used)], upper=0.0)
            if written is not None:
                program.row([written, returns[step]], [1.0, -1.0], lower=0.0)
            after = self._resident_after(value, step)
            if after is not None:
                program.row([column, after, *needed], [1.0, -1.0, *factors], upper=0.0)

    def _is_constant(self, value: int) -> bool:
        storage = self.graph.storages[self.graph.storage_of_value[value]]
        return storage.persistent and storage.initial == storage.final

    def _name_when_made(self, value: int) -> int:
        """Return the name of a value in the step that makes it, which may be the one before."""
        storage = self.graph.storages[self.graph.storage_of_value[value]]
        if storage.persistent and storage.initial == value:
            assert storage.final is not None
            return storage.final
        return value

    def _producing_columns(self, value: int) -> dict[int, int]:
        producer = self.graph.producers[value]
        if producer is not None:
            return self.runs[producer]
        storage = self.graph.storages[self.graph.storage_of_value[value]]
        return {} if storage.persistent else {0: self._always}  # given when the step begins

    def _resident_before(self, value: int, step: int) -> list[int]:
        """Return the column of the position before, perhaps the last of the step before."""
        if step:
            return [self.resident[value][step - 1]] if step - 1 in self.resident[value] else []
        storage = self.graph.storages[self.graph.storage_of_value[value]]
        if not storage.persistent or storage.initial != value:
            return []
        return [self.resident[self._name_when_made(value)][self.num_positions - 1]]

    def _resident_after(self, value: int, step: int) -> int | None:
        if step + 1 < self.num_positions:
            return self.resident[value].get(step + 1)
        storage = self.graph.storages[self.graph.storage_of_value[value]]
        if not storage.persistent or storage.initial is None or value != storage.final:
            return None
        return self.resident[storage.initial][0]

    def _lifetime(self, value: int) -> range:
        graph = self.graph
        if self._is_constant(value):
            return range(self.num_positions)
        producer = graph.producers[value]
        start = 0 if producer is None else self.windows[producer].start
        ends = [self.windows[consumer].stop for consumer in graph.consumers[value]]
        if graph.storages[graph.storage_of_value[value]].final == value:
            ends.append(self.num_positions)
        ends.append(self.windows[producer].stop if producer is not None else 1)
        return range(start, max(ends))

    def _add_reuses(self) -> None:
        """Count an operand and the result in its place once while the operator runs."""
        graph = self.graph
        self.reused: dict[int, list[tuple[int, int, int]]] = {}  # by step: read, created, column
        for index, operator in enumerate(graph.operators):
            for step, column in self.runs[index].items():
                for old, _ in operator.mutates:
                    if graph.num_bytes(old):
                        self.held[step][0].append(column)
                        self.held[step][1].append(-graph.num_bytes(old) / self.unit)
                rivals: dict[int, list[int]] = {}
                for read, created in operator.may_overwrite:
                    if self._may_reuse(read, created, step):
                        reused = self._add_reuse(read, created, step, column)
                        for value in (read, created):
                            rivals.setdefault(value, []).append(reused)
                for columns in rivals.values():
                    self.program.row(columns, [1.0] * len(columns), upper=1.0)

    def _may_reuse(self, read: int, created: int, step: int) -> bool:
        graph = self.graph
        storage = graph.storages[graph.storage_of_value[read]]
        given_now = step == 0 and graph.producers[read] is None and not storage.persistent
        if given_now and len(graph.consumers[read]) > 1:
            return False
        if storage.final == read and not storage.persistent and step == self.num_positions - 1:
            return False
        return graph.num_bytes(read) == graph.num_bytes(created) > 0

    def _add_reuse(self, read: int, created: int, step: int, column: int) -> int:
        reused = self.program.column(upper=1.0, integer=True)
        self.reused.setdefault(step, []).append((read, created, reused))
        self.program.row([reused, column], [1.0, -1.0], upper=0.0)
        following = self._resident_after(read, step)
        if following is not None:  # needed at once: it comes back
            value, after = rename(self.graph, read, step + 1, self.num_positions)
            back = self.returns[value][after]
            self.program.row([reused, following, back], [1.0, 1.0, -1.0], upper=1.0)
        self.held[step][0].append(reused)
        self.held[step][1].append(-self.graph.num_bytes(read) / self.unit)
        return reused

    def _add_traffic_limits(self, least: int, most: int | None) -> None:
        """Add the limits of the objective; traffic comes in multiples of a number of bytes."""
        unit = math.gcd(*self.moved_bytes) or 1
        columns = [(value, c) for value, back in self.returns.items() for c in back.values()]
        columns += self.written.items()
        factors = [self.moved_bytes[self.graph.storage_of_value[v]] / unit for v, _ in columns]
        upper = math.inf if most is None else most / unit - 0.5
        self.program.row([c for _, c in columns], factors, lower=least / unit, upper=upper)

    def solve(self, time_limit: float) -> bool:
        """Minimise the traffic; return whether there is a solution."""
        found = self.program.solve(time_limit=time_limit)
        self.proved = found is not None
        if math.isfinite(self.program.bound):  # rounded down for the solver's tolerance
            least = self.program.bound * self.unit * (1 - _TOLERANCE)
            self.least = max(self.least, math.floor(least))
        return self.program.has_solution

    def forbid(self) -> None:
        """Cut off the solution that was found, as it does not pack."""
        columns = [c for resident in self.resident.values() for c in resident.values()]
        columns += [c for runs in self.runs for c in runs.values()]
        columns += [c for reused in self.reused.values() for _, _, c in reused]
        columns = sorted(set(columns))
        chosen = [self.program.values[c] > 0.5 for c in columns]
        factors = [-1.0 if one else 1.0 for one in chosen]
        self.program.row(columns, factors, lower=1.0 - sum(chosen))

    def solution(self) -> Solution:
        """Read the order and the evictions off the columns."""
        order = [0] * self.num_positions
        for operator, runs in enumerate(self.runs):
            order[next(step for step, column in runs.items() if self._is_chosen(column))] = operator
        ranges = live_ranges(self.graph, order)
        evictions = []
        for index, live_range in enumerate(ranges):
            for number, hole in enumerate(live_range.holes):
                reused_by = self._reused_by(live_range, hole.begin)
                absent = [t for t in hole.positions if not self._is_resident(live_range, t)]
                if absent or reused_by is not None:
                    # A result reuses the place while its operator, that of the use, runs.
                    leaves = absent[0] if reused_by is None else hole.begin
                    returns = max([hole.begin, *absent]) + 1
                    evictions.append(Eviction(index, number, leaves, returns, reused_by))
            last = last_read(self.graph, live_range)
            if last is not None and self._reused_by(live_range, last) is not None:
                ranges[index] = live_range._replace(end=last)
        return Solution(tuple(order), ranges, evictions)

    def _is_resident(self, live_range: LiveRange, position: int) -> bool:
        value, step = rename(self.graph, live_range.value, position, self.num_positions)
        return self._is_chosen(self.resident[value][step])

    def _reused_by(self, live_range: LiveRange, position: int) -> int | None:
        value, step = rename(self.graph, live_range.value, position, self.num_positions)
        for read, created, column in self.reused.get(step, ()):
            if read == value and self._is_chosen(column):
                return created
        return None

    def _is_chosen(self, column: int) -> bool:
        return bool(self.program.values[column] > 0.5)
