"""Choices with pairwise costs, solved by dynamic programming: one variable after the other.

Each variable x_v takes one of some options; a sum of costs and a sum of bytes over variables and
pairs of them is given, and

    min over x of   sum cost + price * sum bytes

is found by eliminating variables (Bertele, Brioschi, "Nonserial Dynamic Programming", 1972): the
best option of x_v for all options of its neighbours is a table over these, the state. On a chain of
groups, the state is the placement of the tensors at the boundary between two of them.

Variables without bytes are eliminated once, for all prices.

Where a state would be too large, a variable of many neighbours keeps an option of its own, and is
improved afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import prod
from typing import NamedTuple

import numpy as np

MOST_STATES = 2**16
_MOST_EARLY_STATES = 2**12
_MOST_SCHEDULES = 64  # that are remembered
_MOST_ROUNDS = 4  # of improving the variables that are not eliminated


@dataclass
class Choices:
    """Variables, and the costs and bytes of their options.

    Attributes:
        num_options: Of each variable.
        costs: By variable: the cost of each option.
        bytes: By variable: the bytes of each option.
        pair_costs: By pair of variables (a < b): the cost of each pair of options.
        pair_bytes: By such pairs: the bytes; missing where there are none.
    """

    num_options: list[int] = field(default_factory=list)
    costs: list[np.ndarray] = field(default_factory=list)
    bytes: list[np.ndarray] = field(default_factory=list)
    pair_costs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    pair_bytes: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def variable(self, num_options: int) -> int:
        """Add a variable; return its index."""
        self.num_options.append(num_options)
        self.costs.append(np.zeros(num_options))
        self.bytes.append(np.zeros(num_options))
        return len(self.num_options) - 1

    def add_pair(self, a: int, b: int, costs: np.ndarray, num_bytes: np.ndarray | None) -> None:
        """Add the costs and bytes of a pair of variables, with options of a in rows."""
        if self.num_options[a] == 1 or self.num_options[b] == 1:
            rest, axis = (b, 0) if self.num_options[a] == 1 else (a, 1)
            self.costs[rest] += costs.sum(axis=axis)
            self.bytes[rest] += 0 if num_bytes is None else num_bytes.sum(axis=axis)
            return
        key = (a, b) if a < b else (b, a)
        for table, added in ((self.pair_costs, costs), (self.pair_bytes, num_bytes)):
            if added is not None:
                added = added if a < b else added.T
                table[key] = table[key] + added if key in table else added

    def total(self, options: np.ndarray) -> tuple[float, float]:
        """Return the cost and the bytes of an option for each variable."""
        cost = self.find_total(self.costs, self.pair_costs)(options)
        return cost, self.find_total(self.bytes, self.pair_bytes)(options)

    def find_total(
        self, single: Sequence[np.ndarray], pairs: dict[tuple[int, int], np.ndarray]
    ) -> Callable[[np.ndarray], float]:
        """Return a function of options that adds up the numbers of variables and their pairs."""
        first = np.cumsum([0, *self.num_options])[:-1]
        numbers, of_pairs = np.concatenate([*single, []]), [each.ravel() for each in pairs.values()]
        first_of_pairs = np.cumsum([0, *map(len, of_pairs)])[:-1]
        numbers_of_pairs = np.concatenate([*of_pairs, []])
        a, b = np.array([*pairs], dtype=np.int64).reshape(-1, 2).T
        columns = np.array(self.num_options, dtype=np.int64)[b]

        def total(options: np.ndarray) -> float:
            found = numbers_of_pairs[first_of_pairs + options[a] * columns + options[b]]
            return sum(numbers[first + options].tolist()) + sum(found.tolist())

        return total


Table = tuple[tuple[int, ...], np.ndarray]
"""Variables, and a number for each of their options."""


class _EliminatedVariable(NamedTuple):
    """Elimination of a variable: the tables that are added up, and how each lies in their sum.

    Attributes:
        names: The variable, then all others of its tables.
        shape: The number of options of each.
        sources: Places of the tables, among those that are given and the results of steps before.
        orders: For each table, the order of its axes.
        shapes: For each table its shape with all axes of the sum.
    """

    names: tuple[int, ...]
    shape: list[int]
    sources: list[int]
    orders: list[list[int]]
    shapes: list[list[int]]


class _EliminationOrder(NamedTuple):
    """The order of elimination, for any numbers in the tables.

    Attributes:
        early: Variables without bytes, in the order in which they are eliminated.
        order: Those that are eliminated after them.
        kept: Those that are not.
        early_pairs: Pairs of variables of which one is eliminated early, in their order.
        other_pairs: All others.
        early_steps: Of the variables without bytes: of their costs, then of their pairs.
        left: Places of tables that these leave.
        left_names: The variables of those.
        steps: Of the others: of what is left, then of the variables' costs, then of their pairs.
        sums: Places of tables that these leave, each with a single number.
    """

    early: list[int]
    order: list[int]
    kept: list[int]
    early_pairs: list[tuple[int, int]]
    other_pairs: list[tuple[int, int]]
    early_steps: list[_EliminatedVariable]
    left: list[int]
    left_names: list[tuple[int, ...]]
    steps: list[_EliminatedVariable]
    sums: list[int]


class Elimination:
    """The order in which variables are eliminated, for any price of a byte.

    Attributes:
        choices: The variables.
    """

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        with_bytes = {v for v, own in enumerate(choices.bytes) if own.any()}
        with_bytes.update(v for pair in choices.pair_bytes for v in pair)
        self._schedule = _find_schedule(
            tuple(choices.num_options),
            tuple(choices.pair_costs),
            frozenset(with_bytes),
            (_MOST_EARLY_STATES, MOST_STATES),
        )
        self._known: tuple[list[Table], list[Table]] | None = None
        self._early_tables: list[Table] = []
        self._tables: list[Table] = []

    @property
    def is_exact(self) -> bool:
        """True if every variable is eliminated, so that what `solve` returns is an optimum."""
        return not self._schedule.kept

    def solve(
        self, price: float, start: np.ndarray, added: Sequence[np.ndarray] | None = None
    ) -> tuple[float, np.ndarray]:
        """Return the least sum, and the options that have it.

        Args:
            price: Of a byte.
            start: Options with which the variables that are not eliminated begin.
            added: By variable: further costs of its options.
        """
        options, best = np.array(start), np.inf
        early, factors = self._eliminate_early(added)
        factors = [*factors, *self._priced(price, added)]
        schedule = self._schedule
        of_kept = {v: [each for each in factors if v in each[0]] for v in schedule.kept}
        for _ in range(_MOST_ROUNDS):
            self._descend(options, of_kept)
            value = self._eliminate(options, factors)
            self._fill_in(options, self._tables)
            if self.is_exact or value >= best - 1e-9 * abs(value):
                best = min(best, value)
                break
            best = value
        self._early_tables = early
        self._fill_in(options, early)
        return best, options

    def _eliminate_early(
        self, added: Sequence[np.ndarray] | None
    ) -> tuple[list[Table], list[Table]]:
        """Eliminate the variables without bytes; return their tables, and those that are left."""
        if added is None and self._known is not None:
            return self._known
        schedule, choices = self._schedule, self.choices
        tables = [
            choices.costs[v] if added is None else choices.costs[v] + added[v]
            for v in schedule.early
        ]
        tables += [choices.pair_costs[key] for key in schedule.early_pairs]
        found = _run(schedule.early_steps, tables)
        left = [tables[place] for place in schedule.left]
        result = found, [*zip(schedule.left_names, left, strict=True)]
        if added is None:
            self._known = result
        return result

    def _priced(self, price: float, added: Sequence[np.ndarray] | None) -> list[Table]:
        """Return the costs of the other variables and their pairs."""
        choices, schedule = self.choices, self._schedule
        tables: list[Table] = []
        for v in (*schedule.order, *schedule.kept):
            own = choices.costs[v] + price * choices.bytes[v]
            tables.append(((v,), own if added is None else own + added[v]))
        for key in schedule.other_pairs:
            table, more = choices.pair_costs[key], choices.pair_bytes.get(key)
            tables.append((key, table if more is None else table + price * more))
        return tables

    def _eliminate(self, fixed: np.ndarray, factors: Sequence[Table]) -> float:
        """Eliminate all variables but the kept ones, whose options are given; return the sum."""
        schedule = self._schedule
        tables = [numbers for _, numbers in factors]
        if schedule.kept:
            kept = {*schedule.kept}
            for place, (names, numbers) in enumerate(factors):
                if not kept.isdisjoint(names):
                    chosen = (fixed[v] if v in kept else slice(None) for v in names)
                    tables[place] = numbers[tuple(chosen)]
        self._tables = _run(schedule.steps, tables)
        constant = 0.0
        for place in schedule.sums:
            constant += float(tables[place])
        return constant

    @staticmethod
    def _fill_in(options: np.ndarray, tables: Sequence[Table]) -> None:
        """Choose the best option of each variable, the last eliminated first."""
        chosen: list[int] = options.tolist()
        for names, numbers in reversed(tables):
            place = [chosen[name] for name in names[1:]]
            chosen[names[0]] = int(numbers[(slice(None), *place)].argmin())
        options[:] = chosen

    def _descend(self, options: np.ndarray, tables_of: dict[int, list[Table]]) -> None:
        """Change one kept variable at a time while that lowers the sum."""
        for _ in range(_MOST_ROUNDS if tables_of else 0):
            before = options.copy()
            for v, tables in tables_of.items():
                costs = np.zeros(self.choices.num_options[v])
                for names, numbers in tables:
                    costs += numbers[tuple(slice(None) if n == v else options[n] for n in names)]
                options[v] = int(costs.argmin())
            if (options == before).all():
                return

    def enumerate(self, limit: float) -> Generator[tuple[float, np.ndarray], float | None, None]:
        """Yield the sums and options below a limit, after `solve`, in no order.

        The limit may be lowered by `send`.
        """
        assert self.is_exact, "only where all variables are eliminated"
        options = np.zeros(len(self.choices.num_options), dtype=int)
        order = [*self._schedule.order[::-1], *self._schedule.early[::-1]]
        tables = [*self._tables[::-1], *self._early_tables[::-1]]
        value = sum(float(t.min()) for names, t in tables if len(names) == 1)
        stack = [(value, 0, options)]
        while stack:
            value, depth, options = stack.pop()
            if value > limit:
                continue
            if depth == len(order):
                lower = yield value, options
                limit = limit if lower is None else min(limit, lower)
                continue
            names, numbers = tables[depth]
            column = numbers[(slice(None), *(options[name] for name in names[1:]))]
            least = column.min()
            for option in np.argsort(-column, kind="stable"):
                after = value + column[option] - least
                if after <= limit:
                    changed = options.copy()
                    changed[order[depth]] = option
                    stack.append((after, depth + 1, changed))


def _run(steps: Sequence[_EliminatedVariable], tables: list[np.ndarray]) -> list[Table]:
    """Eliminate variables; add what each leaves to the tables, and return the sums over each."""
    found: list[Table] = []
    for names, shape, sources, orders, shapes in steps:
        total = np.empty(shape)
        is_first = True
        for source, order, own in zip(sources, orders, shapes, strict=True):
            numbers = tables[source].transpose(order).reshape(own)
            if is_first:
                total[...] = numbers
                is_first = False
            else:
                total += numbers
        found.append((names, total))
        tables.append(np.minimum.reduce(total, axis=0))
    return found


@functools.lru_cache(maxsize=_MOST_SCHEDULES)
def _find_schedule(
    options: tuple[int, ...],
    pairs: tuple[tuple[int, int], ...],
    with_bytes: frozenset[int],
    most: tuple[int, int],
) -> _EliminationOrder:
    """Return the order in which variables are eliminated; levels of a step are often alike.

    Args:
        options: Their numbers of options.
        pairs: Pairs of variables with costs.
        with_bytes: Variables with bytes.
        most: States of a variable that is eliminated, without bytes and with them.
    """
    early, order, kept = _find_order(options, pairs, with_bytes, most)
    first = {*early}
    early_pairs = [key for key in pairs if key[0] in first or key[1] in first]
    other_pairs = [key for key in pairs if key[0] not in first and key[1] not in first]
    names: list[tuple[int, ...]] = [*((v,) for v in early), *early_pairs]
    early_steps, left = _list_steps(early, names, options)
    left_names = [names[place] for place in left]
    rest = [*left_names, *((v,) for v in (*order, *kept)), *other_pairs]
    names = [tuple(v for v in each if v not in {*kept}) for each in rest]
    steps, sums = _list_steps(order, names, options)
    return _EliminationOrder(
        early, order, kept, early_pairs, other_pairs, early_steps, left, left_names, steps, sums
    )


def _list_steps(
    order: Sequence[int], names: list[tuple[int, ...]], options: Sequence[int]
) -> tuple[list[_EliminatedVariable], list[int]]:
    """Return the steps that eliminate variables in an order, and the places of what they leave.

    The variables of tables that they make are added to those of the given ones.
    """
    rank = {v: place for place, v in enumerate(order)}
    buckets: list[list[int]] = [[] for _ in order]
    left: list[int] = []

    def put(place: int) -> None:
        ranks = [rank[v] for v in names[place] if v in rank]
        (buckets[min(ranks)] if ranks else left).append(place)

    for place in range(len(names)):
        put(place)
    steps = []
    for v, bucket in zip(order, buckets, strict=True):
        steps.append(_find_step(v, bucket, [names[place] for place in bucket], options))
        names.append(steps[-1].names[1:])
        put(len(names) - 1)
    return steps, left


def _find_step(
    v: int, sources: list[int], tables: list[tuple[int, ...]], options: Sequence[int]
) -> _EliminatedVariable:
    others = sorted({name for names in tables for name in names} - {v})
    names = (v, *others)
    place = {name: axis for axis, name in enumerate(names)}
    orders = [sorted(range(len(own)), key=lambda axis: place[own[axis]]) for own in tables]
    shapes = [[options[name] if name in own else 1 for name in names] for own in tables]
    return _EliminatedVariable(names, [options[name] for name in names], sources, orders, shapes)


def _find_order(
    options: Sequence[int],
    pairs: Sequence[tuple[int, int]],
    with_bytes: frozenset[int],
    most: tuple[int, int],
) -> tuple[list[int], list[int], list[int]]:
    """Take the variable of the smallest state next; keep one where all are too large."""
    neighbours: list[set[int]] = [set() for _ in options]
    for a, b in pairs:
        neighbours[a].add(b)
        neighbours[b].add(a)
    light = {v for v in range(len(options)) if v not in with_bytes}
    early: list[int] = []
    order: list[int] = []
    kept: list[int] = []
    _take(light, options, neighbours, early, most[0])
    _take(light | with_bytes, options, neighbours, order, most[1])
    while rest := (light | with_bytes) - {*order, *kept}:
        chosen = max(rest, key=lambda v: (len(neighbours[v]), -v))
        kept.append(chosen)
        for other in neighbours[chosen]:
            neighbours[other].discard(chosen)
        _take(rest - {chosen}, options, neighbours, order, most[1])
    return early, order, kept


def _take(
    among: set[int],
    options: Sequence[int],
    neighbours: list[set[int]],
    order: list[int],
    most: int,
) -> None:
    """Eliminate variables while their states are small, and take them out of the set."""

    def state(variable: int) -> int:
        return prod(options[other] for other in neighbours[variable])

    sizes = {v: state(v) for v in among}
    queue = [(size, v) for v, size in sizes.items()]
    heapify(queue)
    while queue:
        size, chosen = heappop(queue)
        if sizes.get(chosen) != size:
            continue  # of a state that has changed since
        if size * options[chosen] > most:
            return
        order.append(chosen)
        among.discard(chosen)
        del sizes[chosen]
        near = neighbours[chosen]
        for other in near:
            neighbours[other] |= near
            neighbours[other] -= {other, chosen}
        for other in near:
            if other in sizes:
                sizes[other] = state(other)
                heappush(queue, (sizes[other], other))
