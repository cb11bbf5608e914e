"""A lower bound of the traffic in any order, and an order that may move no more.

The program has no positions, only the columns of which operator runs before which where that is not
certain: it is small, and its bound is good where the order is nearly given, as in training steps.
It is a relaxation: every plan, of any order, is a solution with the same traffic.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from penstock.graph import StepGraph
from penstock.planner.exact._groups import OperatorGroups
from penstock.solvers import LinearProgram

_Terms = tuple[float, list[int], list[float]]  # a constant, columns and their factors

_TOLERANCE = 1e-6
_END = -1  # the use of a result, when the step ends

# Operators v, storages S, uses c: operators that use S, or the end of the step for results. D(v)
# are the bytes that v uses, M is the capacity, s(S) are bytes.
#
# Columns, from 0 to 1 (p and b integer):
#   p(v, w)      v runs before w; a constant where that is certain
#   b(S, c)      S comes back for its use c
#   w(S, u)      the version u of S is written below
#   x(S, v)      S is on the device while v runs, which does not use it
#   f(S, c, v)   c is the first use of S after v, in this step or, of a persistent S, in the next,
#                and S comes back for it
#   h(u, n)      the result n reuses the place of the operand u
#
# minimise   sum of s(S) b(S, c) + sum of s(S) w(S, u)
# subject to
#   0 <= p(a, b) + p(b, c) - p(a, c) <= 1                            order is transitive
#   b(S, c) <= w(S, the version that c needs)                        not for a constant S
#   x(S, v) + sum over c of f(S, c, v) >= l                          for each l of `_live_terms`
#   f(S, c, v) <= b(S, c),  f(S, c, v) <= p(v, c)
#   f(S, c, v) <= p(d, v) + p(c, d)                                  for each other use d of S
#   D(v) + sum of s(S) x(S, v) - sum of s(u) h(u, n) <= M
#   1 - h(u, n) + sum over c of f(S, c, v) >= l                      n is a result of v, u of S
#   sum over n of h(u, n) <= 1,  sum over u of h(u, n) <= 1


class OrderRelaxation:
    """The least traffic of any order, from below, in a linear or integer program.

    The graph has the bytes that placements take, `moved_bytes` are those that each storage
    moves. With `is_ordered` p(v, w) are columns; else the program is quick and counts only what
    is certain. With `at_ends` inputs have to be there when the step begins, and results when it
    ends.
    """

    def __init__(
        self,
        graph: StepGraph,
        moved_bytes: Sequence[int],
        capacity: int,
        groups: OperatorGroups,
        *,
        is_ordered: bool,
        at_ends: bool = False,
    ) -> None:
        self.graph, self.order_of_groups = graph, groups
        self.moved_bytes, self.unit = moved_bytes, float(max(capacity, 1))
        self.capacity = capacity
        self.is_ordered, self.at_ends = is_ordered, at_ends
        self.program = LinearProgram()
        self.returns: dict[tuple[int, int], int] = {}
        self.written: dict[tuple[int, int | None], int] = {}
        self.users: dict[int, dict[int, int | None]] = {}  # by storage: operator, what it needs
        for index, operator in enumerate(graph.operators):
            for value in operator.creates:
                self._note_use(value, index, None)
            for value in operator.needs:
                self._note_use(value, index, value)
        self.groups = groups.groups
        self.group_of = {v: number for number, group in enumerate(self.groups) for v in group}
        self._add_orders()
        for index in range(len(graph.operators)):
            self._add_operator(index)

    def _note_use(self, value: int, index: int, needed: int | None) -> None:
        if self.graph.num_bytes(value):
            self.users.setdefault(self.graph.storage_of_value[value], {})[index] = needed

    def solve(self, time_limit: float) -> int | None:
        """Return bytes that no plan moves less than; None if there is no plan."""
        if not self.returns:
            return 0
        found = self.program.solve(time_limit=time_limit)
        if self.program.proved_infeasible:
            return None
        columns = [*self.returns.items(), *self.written.items()]
        if found is not None:
            chosen = (key for key, column in columns if self.program.values[column] > 0.5)
            return sum(self.moved_bytes[storage] for storage, _ in chosen)
        return max(0, int(max(self.program.bound, 0.0) * self.unit * (1 - _TOLERANCE)))

    def order(self) -> tuple[int, ...] | None:
        """Return the order of the solution, if there is one."""
        if not self.program.has_solution:
            return None
        heads = [group[0] for group in self.groups]
        rank = [
            sum(self._is_before(other, head) for other in heads if other != head) for head in heads
        ]
        numbers = sorted(range(len(heads)), key=lambda number: rank[number])
        return tuple(v for number in numbers for v in self.groups[number])

    def _is_before(self, first: int, second: int) -> bool:
        constant, columns, factors = self._before(first, second)
        return sum(self.program.values[columns] * factors) + constant > 0.5

    def _add_orders(self) -> None:
        """Add p(v, w) of groups, and that they are transitive."""
        heads = [group[0] for group in self.groups]
        free = self.order_of_groups.free_pairs()
        self.pairs = {
            pair: self.program.column(upper=1.0, integer=self.is_ordered) for pair in free
        }
        if not self.is_ordered:
            return
        for a, b, c in itertools.combinations(range(len(heads)), 3):
            if sum(pair in self.pairs for pair in ((a, b), (b, c), (a, c))) < 2:
                continue
            terms = _sum(
                self._before(heads[a], heads[b]),
                self._before(heads[b], heads[c]),
                _times(-1.0, self._before(heads[a], heads[c])),
            )
            self._row(terms, lower=0.0, upper=1.0)

    def _before(self, first: int, second: int) -> _Terms:
        """Return p(first, second): 0, 1, or a column."""
        if first in self.order_of_groups.ancestors[second]:
            return 1.0, [], []
        if second in self.order_of_groups.ancestors[first]:
            return 0.0, [], []
        a, b = self.group_of[first], self.group_of[second]
        if a < b:
            return 0.0, [self.pairs[a, b]], [1.0]
        return 1.0, [self.pairs[b, a]], [-1.0]

    def _row(self, terms: _Terms, *, lower: float = -math.inf, upper: float = math.inf) -> None:
        constant, columns, factors = terms
        self.program.row(columns, factors, lower=lower - constant, upper=upper - constant)

    def _add_operator(self, index: int) -> None:
        """Add the rows of one operator: what is on the device while it runs fits."""
        graph = self.graph
        operator = graph.operators[index]
        used = sum(map(graph.num_bytes, {*operator.reads, *operator.makes}))
        others = {
            storage: live
            for storage, users in self.users.items()
            if index not in users and (live := self._live_terms(storage, index))
        }
        if used + sum(graph.storages[each].num_bytes for each in others) <= self.capacity:
            return
        columns, factors = [], []
        for storage, live in others.items():
            resident = self.program.column(upper=1.0)
            first_returns = self._first_returns(storage, index)
            for term in live:
                there = 0.0, [resident, *first_returns], [1.0] * (len(first_returns) + 1)
                self._row(_sum(there, _times(-1.0, term)), lower=0.0)
            for other_terms in self._ends(storage, index):
                self._row(_sum((-1.0, [resident], [1.0]), *other_terms), lower=0.0)
            columns.append(resident)
            factors.append(graph.storages[storage].num_bytes / self.unit)
        for column, num_bytes in self._reuses(index):
            columns.append(column)
            factors.append(-num_bytes / self.unit)
        self.program.row(columns, factors, upper=(self.capacity - used) / self.unit)

    def _reuses(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield h(u, n) of an operator's operands and results, and the bytes."""
        graph = self.graph
        rivals: dict[int, list[int]] = {}
        for read, created in graph.operators[index].may_overwrite:
            num_bytes = graph.num_bytes(read)
            if not num_bytes or num_bytes != graph.num_bytes(created):
                continue
            reused = self.program.column(upper=1.0)
            storage = graph.storage_of_value[read]
            live = self._live_terms(storage, index)
            first_returns = self._first_returns(storage, index) if live else []
            for term in live:
                taken = (1.0, [reused, *first_returns], [-1.0, *[1.0] * len(first_returns)])
                self._row(_sum(taken, _times(-1.0, term)), lower=0.0)
            for other_terms in self._ends(storage, index) if live else ():
                self._row(_sum((0.0, [reused], [-1.0]), *other_terms), lower=0.0)
            for value in (read, created):
                rivals.setdefault(value, []).append(reused)
            yield reused, num_bytes
        for columns in rivals.values():
            self.program.row(columns, [1.0] * len(columns), upper=1.0)

    def _live_terms(self, storage_index: int, index: int) -> list[_Terms]:
        """Return terms of which one is 1 if a storage is made before an operator, needed after."""
        storage, users = self.graph.storages[storage_index], self.users[storage_index]
        if storage.persistent:
            return [(1.0, [], [])]
        made = (1.0, [], [])
        for user, needed in users.items():
            if needed is None and storage.initial is None and user != index:
                made = self._before(user, index)
        if storage.final is not None:
            alive = [made]
        else:
            alive = [
                _sum(made, self._before(index, user), (-1.0, [], []))
                for user, needed in users.items()
                if needed is not None and user != index
            ]
            certain = [terms for terms in alive if terms == made]
            alive = certain[:1] or alive
        if not self.is_ordered:
            alive = [terms for terms in alive if not terms[1]]
        return [terms for terms in alive if _most(terms) > 0]

    def _ends(self, storage_index: int, index: int) -> Iterator[list[_Terms]]:
        """Yield terms that add up to 0 if an operator is the first, or the last, of the step.

        Inputs are on the device while the first operator runs, results while the last one does.
        """
        storage = self.graph.storages[storage_index]
        if storage.persistent or not (self.at_ends and self.is_ordered):
            return
        heads = [group[0] for group in self.groups if index not in group]
        if storage.initial is not None and not self.order_of_groups.ancestors[index]:
            yield [self._before(head, index) for head in heads]
        if storage.final is not None and not self.order_of_groups.descendants[index]:
            yield [self._before(index, head) for head in heads]

    def _first_returns(self, storage_index: int, index: int) -> list[int]:
        """Return f(S, c, v) for all uses of a storage."""
        storage, users = self.graph.storages[storage_index], self.users[storage_index]
        others = [user for user in users if user != index]
        first_returns = []
        for use in (user for user in others if users[user] is not None):
            conditions = [self._before(index, use)]
            conditions += [
                _sum(self._before(other, index), self._before(use, other))
                for other in others
                if other != use
            ]
            first_returns += self._first_return(storage_index, use, conditions)
        ended = [self._before(other, index) for other in others]
        if storage.final is not None and not storage.persistent:
            first_returns += self._first_return(storage_index, _END, ended)
        for use in users if storage.persistent else ():  # in the next step
            first = [self._before(use, other) for other in users if other != use]
            first_returns += self._first_return(storage_index, use, [*ended, *first])
        return first_returns

    def _first_return(self, storage_index: int, use: int, conditions: list[_Terms]) -> list[int]:
        """Return f(S, c, v) for one use, the first if all these terms are at least 1."""
        if any(_most(terms) <= 0 for terms in conditions):
            return []
        open_conditions = [terms for terms in conditions if _least(terms) < 1]
        returned = self._return(storage_index, use)
        if not open_conditions or not self.is_ordered:
            return [returned]
        first = self.program.column(upper=1.0)
        self.program.row([first, returned], [1.0, -1.0], upper=0.0)
        for terms in open_conditions:
            self._row(_sum((0.0, [first], [1.0]), _times(-1.0, terms)), upper=0.0)
        return [first]

    def _return(self, storage_index: int, use: int) -> int:
        """Return b(S, c)."""
        key = storage_index, use
        if key not in self.returns:
            storage = self.graph.storages[storage_index]
            cost = self.moved_bytes[storage_index] / self.unit
            self.returns[key] = self.program.column(upper=1.0, cost=cost, integer=True)
            version = storage.final if use == _END else self.users[storage_index][use]
            if storage.persistent and version == storage.initial:
                version = storage.final  # of the step before
            if not (storage.persistent and storage.initial == storage.final):
                written = storage_index, version
                if written not in self.written:
                    self.written[written] = self.program.column(upper=1.0, cost=cost)
                columns = [self.written[written], self.returns[key]]
                self.program.row(columns, [1.0, -1.0], lower=0.0)
        return self.returns[key]


def _sum(*several: _Terms) -> _Terms:
    constants, columns, factors = zip(*several, strict=True)
    return sum(constants), list(itertools.chain(*columns)), list(itertools.chain(*factors))


def _times(factor: float, terms: _Terms) -> _Terms:
    constant, columns, factors = terms
    return factor * constant, columns, [factor * each for each in factors]


def _most(terms: _Terms) -> float:
    return terms[0] + sum(max(each, 0.0) for each in terms[2])


def _least(terms: _Terms) -> float:
    return terms[0] + sum(min(each, 0.0) for each in terms[2])
