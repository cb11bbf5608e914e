"""A bound for any order that counts what recomputing values takes: operands, and theirs.

`cut` prices a recomputed byte at the time of the one operator that makes it. But that operator
needs its operands, and those that are not needed any more are not resident: they have to be
recomputed too, or be kept, where they take bytes, or leave and return.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.graph import StepGraph
from penstock.planner._request import LinkRates
from penstock.planner.bounds._forced import Forced, made_anew
from penstock.solvers import LinearProgram

_NUM_OPERATORS = 2  # at which the program is solved


def recomputation_bound(
    graph: StepGraph,
    forced: Forced,
    operator_seconds: Sequence[float],
    capacity: int,
    rates: LinkRates,
    *,
    time_limit: float,
) -> float | None:
    """Bound the time of a step in any order, with second runs, by absent bytes at an operator.

    Returns:
        The bound in seconds, the largest of those at a few operators; None if it takes too long.
    """
    excess = forced.anywhere - capacity
    if excess.max(initial=0.0) <= 0:
        return float(sum(operator_seconds))
    worst = [int(np.argmax(excess))]
    later = np.where(forced.descendants_of(worst[0]), excess, 0.0)
    worst += [int(np.argmax(later))] if later.max() > 0 else []
    found = []
    for v in worst[:_NUM_OPERATORS]:
        program = _RecomputationProgram(graph, forced, np.asarray(operator_seconds), v)
        program.require(float(excess[v]), capacity, rates)
        found.append(program.solve(time_limit / len(worst)))
    known = [bound for bound in found if bound is not None]
    return max(known, default=None)


# At an operator v; before and after it are counted from the start of its first run. Values u are
# live at v and neither operands nor results of v; values b are made by an ancestor of v and not
# forced to be live at v; operators o run before v. s are bytes, E(v) is the excess, c are times, C
# all of them.
#
# Columns:
#   x(u)   the share that leaves before v and returns after it        0 <= x <= 1
#   z(u)   the share that is recomputed after v                       0 <= z <= 1
#   r(o)   a second run of o after v                                  0 <= r <= 1
#   k(b)   the share that is on the device at v all the same          0 <= k <= 1
#   y(b)   the share that is below at v                               0 <= y <= 1
#   B, A   the times before and after v
#
# minimise   B + A
# subject to
#   sum of s(u) (x(u) + z(u)) - sum of s(b) k(b) >= E(v),  x(u) + z(u) <= 1
#   z(u) <= r(o)                              o makes u
#   r(o) <= k(b) + y(b) + r(o')               o' makes the operand b of o: whatever o reads after v
#                                             was recomputed after v, or lay somewhere at v
#   B >= c(ancestors of v),  A >= c(v) + c(descendants of v) + sum of c(o) r(o)
#   B + A >= C + sum of c(o) r(o)
#   B >= bytes out before v / out,  A >= bytes in after v / in
#   B + A >= all bytes out / out,   B + A >= all bytes in / in
#
# Persistent storages, as of `forced_bounds`, leave and return within the cycle: they count in x,
# and in the bytes of the sums B + A.


class _RecomputationProgram:
    """The linear program above."""

    def __init__(self, graph: StepGraph, forced: Forced, seconds: np.ndarray, v: int) -> None:
        self.graph, self.seconds, self.v = graph, seconds, v
        self.earlier, self.later = forced.ancestors_of(v), forced.descendants_of(v)
        self.program = LinearProgram()
        self.before = self.program.column(cost=1.0)
        self.after = self.program.column(cost=1.0)
        self.runs: dict[int, int] = {}
        self.kept: list[tuple[int, int]] = []  # column, bytes
        self.missing: list[tuple[int, int]] = []
        self.out_before: list[tuple[int, int]] = []
        self.in_after: list[tuple[int, int]] = []
        self.out_sometime: list[tuple[int, int]] = []
        self.in_sometime: list[tuple[int, int]] = []
        self._forced_values: set[int] = set()
        self._operators: list[int] = []  # whose operands are still to be added
        self._lower: dict[int, tuple[int, int]] = {}  # value: columns k and y
        for value in range(len(graph.storage_of_value)):
            self._add_live_value(value)
        self._add_persistent()
        while self._operators:
            self._add_operands(self._operators.pop())

    def _add_live_value(self, value: int) -> None:
        graph, program = self.graph, self.program
        storage = graph.storages[graph.storage_of_value[value]]
        producer, consumers = graph.producers[value], graph.consumers[value]
        if storage.persistent or not storage.num_bytes:
            return
        is_made = producer is None or self.earlier[producer] or producer == self.v
        is_needed = storage.final == value or self.v in consumers
        is_needed = is_needed or self.later[list(consumers)].any()
        if not (is_made and is_needed):
            return
        self._forced_values.add(value)
        if self.v in consumers or producer == self.v:
            return
        moved = program.column(upper=1.0)
        self.missing.append((moved, storage.num_bytes))
        self.out_before.append((moved, storage.num_bytes))
        self.in_after.append((moved, storage.num_bytes))
        if producer is not None and graph.operators[producer].recomputable:
            again = program.column(upper=1.0)
            self.missing.append((again, storage.num_bytes))
            program.row([moved, again], [1.0, 1.0], upper=1.0)
            program.row([again, self._second_run(producer)], [-1.0, 1.0], lower=0.0)

    def _add_persistent(self) -> None:
        graph = self.graph
        anew = made_anew(graph, recompute=True)
        touching: dict[int, set[int]] = {}
        for value, index in enumerate(graph.storage_of_value):
            if graph.storages[index].persistent and index not in anew:
                touching.setdefault(index, set()).update(graph.consumers[value])
        for index, users in touching.items():
            storage = graph.storages[index]
            if not users or self.v in users or not storage.num_bytes:
                continue
            moved = self.program.column(upper=1.0)
            self.missing.append((moved, storage.num_bytes))
            self.in_sometime.append((moved, storage.num_bytes))
            if self.later[list(users)].any():
                self.in_after.append((moved, storage.num_bytes))
            if storage.initial != storage.final:
                self.out_sometime.append((moved, storage.num_bytes))

    def _second_run(self, operator: int) -> int:
        """Return r of an operator."""
        if operator not in self.runs:
            self.runs[operator] = self.program.column(upper=1.0)
            self._operators.append(operator)
        return self.runs[operator]

    def _add_operands(self, index: int) -> None:
        graph = self.graph
        operator = graph.operators[index]
        needed = operator.reads if operator.recompute_args is not None else operator.needs
        for value in needed:
            producer = graph.producers[value]
            storage = graph.storages[graph.storage_of_value[value]]
            if producer is None or not self.earlier[producer] or not storage.num_bytes:
                continue
            if storage.persistent or value in self._forced_values:
                continue
            if value not in self._lower:
                kept, below = (self.program.column(upper=1.0) for _ in range(2))
                self._lower[value] = kept, below
                self.kept.append((kept, storage.num_bytes))
                self.out_before.append((below, storage.num_bytes))
                self.in_after.append((below, storage.num_bytes))
            columns = [self.runs[index], *self._lower[value]]
            if graph.operators[producer].recomputable:
                columns.append(self._second_run(producer))
            self.program.row(columns, [-1.0, *[1.0] * (len(columns) - 1)], lower=0.0)

    def require(self, excess: float, capacity: int, rates: LinkRates) -> None:
        """Add the rows of memory and time; times are in units of the time to compute."""
        program, unit = self.program, float(max(capacity, 1))
        self.scale = scale = max(float(self.seconds.sum()), 1e-30)
        absent = [*self.missing, *((column, -num_bytes) for column, num_bytes in self.kept)]
        columns, sizes = [c for c, _ in absent], [num_bytes / unit for _, num_bytes in absent]
        program.row(columns, sizes, lower=excess / unit)
        both = [self.before, self.after]
        runs = [*self.runs.values()]
        costs = [-float(self.seconds[operator]) / scale for operator in self.runs]
        earlier = float(self.seconds[self.earlier].sum())
        later = float(self.seconds[self.later].sum() + self.seconds[self.v])
        for times, seconds, again, factors in (
            ([self.before], earlier, [], []),
            ([self.after], later, runs, costs),
            (both, scale, runs, costs),
        ):
            ones = [1.0] * len(times)
            program.row([*times, *again], [*ones, *factors], lower=seconds / scale)
        for times, moved, rate in (
            ([self.before], self.out_before, rates.outward),
            ([self.after], self.in_after, rates.inward),
            (both, [*self.out_before, *self.out_sometime], rates.outward),
            (both, sorted({*self.in_sometime, *self.in_after}), rates.inward),
        ):
            factors = [-num_bytes / rate / scale for _, num_bytes in moved]
            columns = [column for column, _ in moved]
            program.row([*times, *columns], [*[1.0] * len(times), *factors], lower=0.0)

    def solve(self, time_limit: float) -> float | None:
        """Return the least time in seconds; None if it takes too long."""
        bound = self.program.solve(time_limit=time_limit)
        return None if bound is None else bound * self.scale
