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

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

MOST_STATES = 2**16
_MOST_EARLY_STATES = 2**12
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


class _Joint(NamedTuple):
    """The table of variables that are added up, and how each of the given ones lies in it."""

    names: tuple[int, ...]
    shape: list[int]
    orders: list[list[int]]
    shapes: list[list[int]]


class Elimination:
    """The order in which variables are eliminated, for any price of a byte.

    Attributes:
        choices: The variables.
        early: Variables without bytes, in the order in which they are eliminated.
        order: Those that are eliminated after them.
        kept: Those that are not.
    """

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.early: list[int] = []
        self.order: list[int] = []
        self.kept: list[int] = []
        self._find_order()
        self._place = {v: place for place, v in enumerate(self.early)}
        self._known: tuple[list[Table], list[Table]] | None = None
        self._early_tables: list[Table] = []
        self._joints: dict[tuple[object, ...], _Joint] = {}
        self._tables: list[Table] = []

    @property
    def is_exact(self) -> bool:
        """True if every variable is eliminated, so that what `solve` returns is an optimum."""
        return not self.kept

    def _find_order(self) -> None:
        """Take the variable of the smallest state next; keep one where all are too large."""
        options = self.choices.num_options
        neighbours: list[set[int]] = [set() for _ in options]
        for a, b in self.choices.pair_costs:
            neighbours[a].add(b)
            neighbours[b].add(a)
        with_bytes = {v for v, own in enumerate(self.choices.bytes) if own.any()}
        with_bytes.update(v for pair in self.choices.pair_bytes for v in pair)
        light = {v for v in range(len(options)) if v not in with_bytes}
        self._take(light, neighbours, self.early, _MOST_EARLY_STATES)
        self._take(with_bytes | light, neighbours, self.order, MOST_STATES)
        while rest := (with_bytes | light) - {*self.order, *self.kept}:
            chosen = max(rest, key=lambda v: (len(neighbours[v]), -v))
            self.kept.append(chosen)
            for other in neighbours[chosen]:
                neighbours[other].discard(chosen)
            self._take(rest - {chosen}, neighbours, self.order, MOST_STATES)

    def _take(
        self, among: set[int], neighbours: list[set[int]], order: list[int], most: int
    ) -> None:
        """Eliminate variables while their states are small, and take them out of the set."""
        options = self.choices.num_options
        sizes = {v: self._state(v, neighbours) for v in among}
        while sizes:
            chosen = min(sizes, key=lambda v: (sizes[v], v))
            if sizes[chosen] * options[chosen] > most:
                return
            order.append(chosen)
            among.discard(chosen)
            near = neighbours[chosen]
            for other in near:
                neighbours[other] |= near
                neighbours[other] -= {other, chosen}
            del sizes[chosen]
            for other in near:
                if other in sizes:
                    sizes[other] = self._state(other, neighbours)

    def _state(self, variable: int, neighbours: list[set[int]]) -> int:
        size = 1
        for other in neighbours[variable]:
            size *= self.choices.num_options[other]
        return size

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
        of_kept = {v: [each for each in factors if v in each[0]] for v in self.kept}
        for _ in range(_MOST_ROUNDS):
            self._descend(options, of_kept)
            value = self._eliminate(options, factors)
            self._fill_in(options, self.order, self._tables)
            if self.is_exact or value >= best - 1e-9 * abs(value):
                best = min(best, value)
                break
            best = value
        self._early_tables = early
        self._fill_in(options, self.early, early)
        return best, options

    def _eliminate_early(
        self, added: Sequence[np.ndarray] | None
    ) -> tuple[list[Table], list[Table]]:
        """Eliminate the variables without bytes; return their tables, and those that are left."""
        if added is None and self._known is not None:
            return self._known
        place, choices = self._place, self.choices
        buckets: list[list[Table]] = [[] for _ in self.early]
        left: list[Table] = []

        def put(names: tuple[int, ...], numbers: np.ndarray) -> None:
            early = [place[v] for v in names if v in place]
            (buckets[min(early)] if early else left).append((names, numbers))

        for v in self.early:
            put((v,), choices.costs[v] if added is None else choices.costs[v] + added[v])
        for key, numbers in choices.pair_costs.items():
            if key[0] in place or key[1] in place:
                put(key, numbers)
        tables = []
        for v, bucket in zip(self.early, buckets, strict=True):
            joined = self._join(v, bucket)
            tables.append(joined)
            put(joined[0][1:], joined[1].min(axis=0))
        if added is None:
            self._known = tables, left
        return tables, left

    def _priced(self, price: float, added: Sequence[np.ndarray] | None) -> list[Table]:
        """Return the costs of the other variables and their pairs."""
        choices = self.choices
        tables: list[Table] = []
        for v in (*self.order, *self.kept):
            own = choices.costs[v] + price * choices.bytes[v]
            tables.append(((v,), own if added is None else own + added[v]))
        for key, table in choices.pair_costs.items():
            if key[0] not in self._place and key[1] not in self._place:
                more = choices.pair_bytes.get(key)
                tables.append((key, table if more is None else table + price * more))
        return tables

    def _eliminate(self, fixed: np.ndarray, factors: Sequence[Table]) -> float:
        """Eliminate all variables but the kept ones, whose options are given; return the sum."""
        rank = {v: place for place, v in enumerate(self.order)}
        buckets: list[list[Table]] = [[] for _ in self.order]
        constant = 0.0

        def put(names: tuple[int, ...], numbers: np.ndarray) -> None:
            nonlocal constant
            for axis in reversed(range(len(names))):
                if names[axis] not in rank:
                    numbers = numbers.take(fixed[names[axis]], axis=axis)
            names = tuple(v for v in names if v in rank)
            if names:
                buckets[min(rank[v] for v in names)].append((names, numbers))
            else:
                constant += float(numbers)

        for names, numbers in factors:
            put(names, numbers)
        self._tables = []
        for v, bucket in zip(self.order, buckets, strict=True):
            joined = self._join(v, bucket)
            self._tables.append(joined)
            put(joined[0][1:], joined[1].min(axis=0))
        return constant

    @staticmethod
    def _fill_in(options: np.ndarray, order: Sequence[int], tables: Sequence[Table]) -> None:
        """Choose the best option of each variable, the last eliminated first."""
        for v, (names, numbers) in zip(reversed(order), reversed(tables), strict=True):
            place = [options[name] for name in names[1:]]
            options[v] = numbers[(slice(None), *place)].argmin()

    def _join(self, v: int, tables: list[Table]) -> Table:
        """Add tables up over all their variables, v first."""
        key = v, *[names for names, _ in tables]
        joint = self._joints.get(key)
        if joint is None:
            joint = self._joints[key] = self._find_joint(v, [names for names, _ in tables])
        total = np.zeros(joint.shape)
        for (_, numbers), order, shape in zip(tables, joint.orders, joint.shapes, strict=True):
            total += numbers.transpose(order).reshape(shape)
        return joint.names, total

    def _find_joint(self, v: int, tables: list[tuple[int, ...]]) -> _Joint:
        others = sorted({name for names in tables for name in names} - {v})
        names, options = (v, *others), self.choices.num_options
        place = {name: axis for axis, name in enumerate(names)}
        orders = [sorted(range(len(own)), key=lambda axis: place[own[axis]]) for own in tables]
        shapes = [[options[name] if name in own else 1 for name in names] for own in tables]
        return _Joint(names, [options[name] for name in names], orders, shapes)

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
        order = [*self.order[::-1], *self.early[::-1]]
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
