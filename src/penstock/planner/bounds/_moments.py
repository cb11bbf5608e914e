"""A linear program over moments of a step: the values on the device, below it, and made again.

Between two moments values come in, leave and are made, and each of these takes time. Unlike the
program over slots it follows each value: what runs again needs its operands, which have to be on
the device then, and have to have been somewhere before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from penstock.graph import StepGraph
from penstock.planner._request import LinkRates
from penstock.planner.bounds._fixed_order import saved_bytes
from penstock.solvers import LinearProgram

_SMALLEST = 1 / 300  # of the arena: smaller values take no bytes, and are wherever they are needed


class Moment(NamedTuple):
    """The start of a run of an operator."""

    operator: int
    is_first: bool  # whether no run of it comes before
    before: np.ndarray  # operators that certainly ran for the first time before it
    after: np.ndarray  # operators that certainly run for the first time after it


class TimedStep(NamedTuple):
    """A step, its memory and its links."""

    graph: StepGraph
    seconds: np.ndarray  # by operator
    capacity: int  # bytes of the arena
    rates: LinkRates


def least_bytes(graph: StepGraph, index: int) -> int:
    """Return the least bytes on the device while an operator runs, for the first time or again."""
    operator = graph.operators[index]
    is_shorter = operator.recompute_args is not None
    made = operator.creates if is_shorter else operator.makes
    return sum(map(graph.num_bytes, {*operator.reads, *made})) - saved_bytes(graph, index)


# Moments 1, ..., K; part 0 is from the start of the step to moment 1, part j from moment j to the
# next one, part K to the end. Values u of this step, of s(u) bytes, which operator p(u) makes;
# operators o that take c(o); W(j) are the least bytes of the operator that starts at moment j.
#
# Columns:
#   m(u, j)  the share that is on the device at moment j                0 <= m <= 1
#   e(u, j)  the share that is there or below at moment j               0 <= e <= 1
#   i(u, j)  the share that comes in in part j and was below before     0 <= i <= 1
#   o(u, j)  the share that leaves in part j, for the first time        0 <= o <= 1
#   r(o, j)  a run of o in part j                                       0 <= r <= 1
#   t(j)     time of part j
#
# minimise   sum of t(j)
# subject to
#   m(u, j + 1) <= m(u, j) + i(u, j) + r(p(u), j)
#   i(u, j) <= sum of o(u, k) over k < j,   o(u, j) <= m(u, j) + r(p(u), j)
#   e(u, j) <= m(u, j) + sum of o(u, k) over k < j,   e(u, j + 1) <= e(u, j) + r(p(u), j)
#   r(o, j) <= m(u, j) + i(u, j) + r(p(u), j),   r(o, j) <= e(u, j) + r(p(u), j)    o needs u
#   sum of s(u) m(u, j) <= M - W(j)           u neither operand nor result of the operator
#   m(u, j) = 1                               u an operand of it
#   sum of r(o, j) over the parts in which o may run for the first time >= 1
#   t(j) >= time of the operators that run for the first time there + sum of c(o) r(o, j)
#   t(j) >= sum of s(u) i(u, j) / in,   t(j) >= sum of s(u) o(u, j) / out
#   sum of t(j) >= time of the other operators + sum of c(o) r(o, j)
#
# A share is a set of bytes of a value. Bytes that have arrived at a moment have a place, so they
# count. What is on the device at a moment was there at the one before, or has come in, or was made;
# bytes that leave for the first time in a part and return in it have been there anyway.


class MomentsProgram:
    """The linear program above; rows can be added to it.

    Attributes:
        program: The program.
        times: Columns t; `scale` seconds are one.
        runs: Columns r, by operator and part.
        here: Columns m, by value and moment.
    """

    def __init__(self, step: TimedStep, moments: list[Moment]) -> None:
        self.step, self.moments, self.last_part = step, moments, len(moments)
        self.scale = max(float(step.seconds.sum()), 1e-30)
        self.program = LinearProgram()
        self.times = [self.program.column(cost=1.0) for _ in range(self.last_part + 1)]
        self.runs: dict[tuple[int, int], int] = {}
        self.here: dict[tuple[int, int], int] = {}
        self._known: dict[tuple[int, int], int] = {}  # e
        self._inward: dict[tuple[int, int], int] = {}
        self._outward: dict[tuple[int, int], int] = {}
        self._find_parts()
        graph = step.graph
        least = max(1.0, step.capacity * _SMALLEST)
        self._producer_of = {
            value: producer
            for value, producer in enumerate(graph.producers)
            if producer is not None
            and not graph.storage(value).persistent
            and graph.num_bytes(value) >= least
        }
        self._makers = set(self._producer_of.values())
        self._add_columns()
        for value, producer in self._producer_of.items():
            self._add_value(value, self.first[producer])
        self._add_needs()
        for number, moment in enumerate(moments, 1):
            self._add_memory(number, moment)
        self._add_times()

    def _find_parts(self) -> None:
        """Find the first and the last part in which each operator may run for the first time."""
        num_operators = len(self.step.graph.operators)
        first = np.zeros(num_operators, np.int64)
        last = np.full(num_operators, self.last_part)
        for number, moment in enumerate(self.moments, 1):
            first[moment.after] = number
            last[moment.before] = np.minimum(last[moment.before], number - 1)
            if moment.is_first:
                first[moment.operator] = number
        self.first, self.last = first.tolist(), last.tolist()

    def _add_columns(self) -> None:
        program, operators = self.program, self.step.graph.operators
        for index in sorted(self._makers):
            first, last = self.first[index], self.last[index]
            is_certain = first == last
            for part in range(max(first, is_certain), self.last_part + 1):
                may_run = part <= last or operators[index].recomputable
                lower = float(is_certain and part == first)
                self.runs[index, part] = program.column(lower=lower, upper=float(may_run))
            if not is_certain:
                possible = [self.runs[index, part] for part in range(first, last + 1)]
                program.row(possible, [1.0] * len(possible), lower=1.0)
        for value, producer in self._producer_of.items():
            for part in range(self.first[producer], self.last_part + 1):
                self._outward[value, part] = program.column(upper=1.0)
                if part:
                    self._inward[value, part] = program.column(upper=1.0)
                if part > self.first[producer]:
                    self.here[value, part] = program.column(upper=1.0)
                    self._known[value, part] = program.column(upper=1.0)

    def _columns(self, value: int, part: int, *kinds: dict[tuple[int, int], int]) -> list[int]:
        """Return the columns of a value in a part, and that of the run which makes it there."""
        found = [kind[value, part] for kind in kinds if (value, part) in kind]
        run = self.runs.get((self._producer_of[value], part))
        return found if run is None else [*found, run]

    def _at_most(self, column: int, others: list[int]) -> None:
        """Add a row: a column is at most the sum of others."""
        self.program.row([column, *others], [-1.0, *[1.0] * len(others)], lower=0.0)

    def _add_value(self, value: int, first: int) -> None:
        for part in range(max(first, 1), self.last_part + 1):
            left = [self._outward[value, earlier] for earlier in range(first, part)]
            self._at_most(self._inward[value, part], left)
            self._at_most(self._outward[value, part], self._columns(value, part, self.here))
            if (value, part) in self._known:
                self._at_most(self._known[value, part], [self.here[value, part], *left])
            if part < self.last_part:
                present = self._columns(value, part, self.here, self._inward)
                self._at_most(self.here[value, part + 1], present)
                known = self._columns(value, part, self._known)
                self._at_most(self._known[value, part + 1], known)

    def _add_needs(self) -> None:
        for index, operator in enumerate(self.step.graph.operators):
            first, last = self.first[index], self.last[index]
            is_shorter = operator.recompute_args is not None
            for part in range(1, self.last_part + 1):
                is_first = first == last == part
                run = self.runs.get((index, part))
                if run is None and not is_first:
                    continue
                needed = operator.reads if is_shorter and not is_first else operator.needs
                for value in self._producer_of.keys() & set(needed):
                    if part < self.first[self._producer_of[value]]:
                        assert run is not None
                        self.program.set_bounds(run, 0.0, 0.0)
                        continue
                    for kinds in ((self.here, self._inward), (self._known,)):
                        present = self._columns(value, part, *kinds)
                        if is_first:
                            self.program.row(present, [1.0] * len(present), lower=1.0)
                        elif run is not None:
                            self._at_most(run, present)

    def _add_memory(self, number: int, moment: Moment) -> None:
        graph, capacity = self.step.graph, self.step.capacity
        operator = graph.operators[moment.operator]
        is_shorter = operator.recompute_args is not None and not moment.is_first
        used = {*operator.needs, *operator.makes}
        for value in operator.reads if is_shorter else operator.needs:
            if (value, number) in self.here:
                self.program.set_bounds(self.here[value, number], 1.0, 1.0)
        beside = [
            (self.here[value, number], graph.num_bytes(value) / capacity)
            for value in self._producer_of
            if value not in used and (value, number) in self.here
        ]
        free = 1 - least_bytes(graph, moment.operator) / capacity
        self.program.row([c for c, _ in beside], [size for _, size in beside], upper=free)

    def _add_times(self) -> None:
        seconds, graph, rates = self.step.seconds, self.step.graph, self.step.rates
        certain, others = [0.0] * (self.last_part + 1), 0.0
        for index, (first, last) in enumerate(zip(self.first, self.last, strict=True)):
            if (index, last) not in self.runs:
                others += seconds[index]
                if first == last:
                    certain[first] += seconds[index]
        self.add_time(range(self.last_part + 1), others, self.runs)
        for part, work in enumerate(certain):
            self.add_time([part], work, (key for key in self.runs if key[1] == part))
            for moved, rate in ((self._inward, rates.inward), (self._outward, rates.outward)):
                columns = [(column, key[0]) for key, column in moved.items() if key[1] == part]
                factors = [-graph.num_bytes(value) / rate / self.scale for _, value in columns]
                row = [self.times[part], *[column for column, _ in columns]]
                self.program.row(row, [1.0, *factors], lower=0.0)

    def add_time(
        self, parts: Sequence[int], seconds: float, runs: Iterable[tuple[int, int]]
    ) -> None:
        """Add a row: parts take at least so many seconds and those of runs."""
        keys = list(runs)
        columns = [*(self.times[part] for part in parts), *(self.runs[key] for key in keys)]
        factors = [1.0] * len(parts)
        factors += [-float(self.step.seconds[index]) / self.scale for index, _ in keys]
        self.program.row(columns, factors, lower=seconds / self.scale)

    def solve(self, time_limit: float) -> float | None:
        """Return the least time in seconds; None if it takes too long."""
        bound = self.program.solve(time_limit=time_limit)
        return None if bound is None else bound * self.scale
