"""The integer program of `exact`: who runs when, what is where then, and what that moves."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from penstock.graph import StepGraph
from penstock.planner._linear_program import LinearProgram
from penstock.planner.exact._moves import Away, Life, last_read, lives_in
from penstock.planner.exact._together import Together

_TOLERANCE = 1e-6


class Residency(NamedTuple):
    """An order, and what is away when in it."""

    order: tuple[int, ...]
    lives: list[Life]
    aways: list[Away]

    def traffic(self, graph: StepGraph) -> int:
        """Bytes that leave and come back, a storage that a step changes once for all its leaves."""
        written = {away.life for away in self.aways if not self.lives[away.life].constant}
        moved = [*written, *(away.life for away in self.aways)]
        return sum(graph.num_bytes(self.lives[life].value) for life in moved)


class Program:
    """Order and residency of a step in which steps repeat (columns and rows: see `exact`).

    Args:
        graph: The step, with the bytes that places take.
        moved_bytes: Bytes that each storage moves.
        capacity: Bytes of the arena.
        windows: Positions at which each operator may run.
        together: Operators that stay together.
        least: Bytes that any solution moves.
        most: Bytes that a solution is to move less than; None: any.
    """

    def __init__(
        self,
        graph: StepGraph,
        moved_bytes: Sequence[int],
        capacity: int,
        windows: Sequence[range],
        together: Together,
        *,
        least: int = 0,
        most: int | None = None,
    ) -> None:
        self.graph, self.moved_bytes = graph, moved_bytes
        self.capacity, self.unit = capacity, float(max(capacity, 1))
        self.num_steps = len(graph.operators)
        self.windows, self.together = windows, together
        self.least = least
        self.proved = False
        self.program = LinearProgram()
        self._always = self.program.column(lower=1.0, upper=1.0)
        self.values = [
            value
            for value, producer in enumerate(graph.producers)
            if graph.num_bytes(value) and (producer is not None or graph.consumers[value])
        ]
        self._place_operators()
        self._place_values()
        self._share()
        for columns, factors in self.held:
            self.program.row(columns, factors, upper=capacity / self.unit)
        self._limit_traffic(least, most)

    def _place_operators(self) -> None:
        """Who stays together has its columns in common."""
        self.runs: list[dict[int, int]] = [{} for _ in self.windows]
        for group in self.together.groups:
            windows = [(place, self.windows[operator]) for place, operator in enumerate(group)]
            first = range(
                max(window.start - place for place, window in windows),
                min(window.stop - place for place, window in windows),
            )
            columns = {step: self.program.column(upper=1.0, integer=True) for step in first}
            for place, operator in enumerate(group):
                self.runs[operator] = {step + place: c for step, c in columns.items()}
            self.program.row([*columns.values()], [1.0] * len(columns), lower=1.0, upper=1.0)
        for step in range(self.num_steps):
            columns = [runs[step] for runs in self.runs if step in runs]
            self.program.row(columns, [1.0] * len(columns), lower=1.0, upper=1.0)
        ancestors = self.together.ancestors
        for operator, earlier in enumerate(ancestors):
            nearest = earlier.difference(*(ancestors[before] for before in earlier))
            for before in nearest:
                for step in self.windows[operator]:  # it has run by `step`: the other one earlier
                    late = [c for t, c in self.runs[operator].items() if t <= step]
                    early = [c for t, c in self.runs[before].items() if t < step]
                    factors = [1.0] * len(early) + [-1.0] * len(late)
                    self.program.row(early + late, factors, lower=0.0)

    def _place_values(self) -> None:
        """A value is there from where it is made, or comes back, until it leaves."""
        program = self.program
        self.there: dict[int, dict[int, int]] = {}
        self.back: dict[int, dict[int, int]] = {}
        self.written: dict[int, int] = {}  # by the value that a step makes
        self.held: list[tuple[list[int], list[float]]] = [([], []) for _ in range(self.num_steps)]
        for value in self.values:
            window = self._lifetime(value)
            cost = self.moved_bytes[self.graph.storage_of_value[value]] / self.unit
            self.there[value] = {t: program.column(upper=1.0, integer=True) for t in window}
            self.back[value] = {t: program.column(upper=1.0, cost=cost) for t in window}
            made = self._made_by(value)
            if not self._is_constant(value) and made not in self.written:
                self.written[made] = program.column(upper=1.0, cost=cost)
        for value in self.values:
            self._keep(value)

    def _keep(self, value: int) -> None:
        """Rows of one value; it comes back for a use, and leaves after one, if at all."""
        graph, program, there, back = self.graph, self.program, self.there[value], self.back[value]
        size = graph.num_bytes(value) / self.unit
        written = self.written.get(self._made_by(value))
        made = self._made_at(value)
        storage = graph.storages[graph.storage_of_value[value]]
        is_kept = storage.final == value and not storage.persistent
        for step, column in there.items():
            self.held[step][0].append(column)
            self.held[step][1].append(size)
            used = [self.runs[c][step] for c in graph.consumers[value] if step in self.runs[c]]
            needed = [*used, made[step]] if step in made else used
            if is_kept and step == self.num_steps - 1:
                used, needed = [self._always], [self._always]
            factors = [-1.0] * len(needed)
            if needed == [*used, self._always]:  # given, and used or not
                program.row([column], [1.0], lower=1.0)
            else:
                program.row([column, *needed], [1.0, *factors], lower=0.0)
            sources = [back[step], *self._before(value, step)]
            sources += [made[step]] if step in made else []
            program.row([column, *sources], [1.0, *[-1.0] * len(sources)], upper=0.0)
            program.row([back[step], *used], [1.0, *[-1.0] * len(used)], upper=0.0)
            if written is not None:
                program.row([written, back[step]], [1.0, -1.0], lower=0.0)
            after = self._after(value, step)
            if after is not None:
                program.row([column, after, *needed], [1.0, -1.0, *factors], upper=0.0)

    def _is_constant(self, value: int) -> bool:
        storage = self.graph.storages[self.graph.storage_of_value[value]]
        return storage.persistent and storage.initial == storage.final

    def _made_by(self, value: int) -> int:
        """What a step begins with has been made by the one before under another name."""
        storage = self.graph.storages[self.graph.storage_of_value[value]]
        if storage.persistent and storage.initial == value:
            assert storage.final is not None
            return storage.final
        return value

    def _made_at(self, value: int) -> dict[int, int]:
        producer = self.graph.producers[value]
        if producer is not None:
            return self.runs[producer]
        storage = self.graph.storages[self.graph.storage_of_value[value]]
        return {} if storage.persistent else {0: self._always}  # given when the step begins

    def _before(self, value: int, step: int) -> list[int]:
        """The column for the step before, which may be the last one of the step before."""
        if step:
            return [self.there[value][step - 1]] if step - 1 in self.there[value] else []
        storage = self.graph.storages[self.graph.storage_of_value[value]]
        if not storage.persistent or storage.initial != value:
            return []
        return [self.there[self._made_by(value)][self.num_steps - 1]]

    def _after(self, value: int, step: int) -> int | None:
        if step + 1 < self.num_steps:
            return self.there[value].get(step + 1)
        storage = self.graph.storages[self.graph.storage_of_value[value]]
        if not storage.persistent or storage.initial is None or value != storage.final:
            return None
        return self.there[storage.initial][0]

    def _lifetime(self, value: int) -> range:
        graph = self.graph
        if self._is_constant(value):
            return range(self.num_steps)
        producer = graph.producers[value]
        start = 0 if producer is None else self.windows[producer].start
        ends = [self.windows[consumer].stop for consumer in graph.consumers[value]]
        if graph.storages[graph.storage_of_value[value]].final == value:
            ends.append(self.num_steps)
        ends.append(self.windows[producer].stop if producer is not None else 1)
        return range(start, max(ends))

    def _share(self) -> None:
        """What is written over counts once while its operator runs."""
        graph = self.graph
        self.handed: dict[int, list[tuple[int, int, int]]] = {}  # by step: read, created, column
        for index, operator in enumerate(graph.operators):
            for step, column in self.runs[index].items():
                for old, _ in operator.mutates:
                    if graph.num_bytes(old):
                        self.held[step][0].append(column)
                        self.held[step][1].append(-graph.num_bytes(old) / self.unit)
                rivals: dict[int, list[int]] = {}
                for read, created in operator.may_overwrite:
                    if self._may_take(read, created, step):
                        handed = self._hand_over(read, created, step, column)
                        for value in (read, created):
                            rivals.setdefault(value, []).append(handed)
                for columns in rivals.values():
                    self.program.row(columns, [1.0] * len(columns), upper=1.0)

    def _may_take(self, read: int, created: int, step: int) -> bool:
        graph = self.graph
        storage = graph.storages[graph.storage_of_value[read]]
        given_now = step == 0 and graph.producers[read] is None and not storage.persistent
        if given_now and len(graph.consumers[read]) > 1:
            return False
        if storage.final == read and not storage.persistent and step == self.num_steps - 1:
            return False
        return graph.num_bytes(read) == graph.num_bytes(created) > 0

    def _hand_over(self, read: int, created: int, step: int, column: int) -> int:
        handed = self.program.column(upper=1.0, integer=True)
        self.handed.setdefault(step, []).append((read, created, handed))
        self.program.row([handed, column], [1.0, -1.0], upper=0.0)
        following = self._after(read, step)
        if following is not None:  # needed at once: it comes back
            value, after = (read, step + 1)
            if after == self.num_steps:
                value, after = self._begin_of(read), 0
            back = self.back[value][after]
            self.program.row([handed, following, back], [1.0, 1.0, -1.0], upper=1.0)
        self.held[step][0].append(handed)
        self.held[step][1].append(-self.graph.num_bytes(read) / self.unit)
        return handed

    def _begin_of(self, final: int) -> int:
        initial = self.graph.storages[self.graph.storage_of_value[final]].initial
        assert initial is not None
        return initial

    def _limit_traffic(self, least: int, most: int | None) -> None:
        """Traffic comes in multiples of a number of bytes, so less means less by that."""
        unit = math.gcd(*self.moved_bytes) or 1
        columns = [(value, c) for value, back in self.back.items() for c in back.values()]
        columns += self.written.items()
        factors = [self.moved_bytes[self.graph.storage_of_value[v]] / unit for v, _ in columns]
        upper = math.inf if most is None else most / unit - 0.5
        self.program.row([c for _, c in columns], factors, lower=least / unit, upper=upper)

    def solve(self, time_limit: float) -> bool:
        """Look for the least traffic; return whether there is a solution."""
        found = self.program.solve(time_limit=time_limit)
        self.proved = found is not None
        if math.isfinite(self.program.bound):  # rounded down for the solver's tolerance
            least = self.program.bound * self.unit * (1 - _TOLERANCE)
            self.least = max(self.least, math.floor(least))
        return self.program.has_solution

    def forbid(self) -> None:
        """Cut off the solution that was found: it cannot be packed."""
        columns = [c for there in self.there.values() for c in there.values()]
        columns += [c for runs in self.runs for c in runs.values()]
        columns += [c for handed in self.handed.values() for _, _, c in handed]
        columns = sorted(set(columns))
        chosen = [self.program.values[c] > 0.5 for c in columns]
        factors = [-1.0 if one else 1.0 for one in chosen]
        self.program.row(columns, factors, lower=1.0 - sum(chosen))

    def residency(self) -> Residency:
        """Read the order and what is away off the solution."""
        order = [0] * self.num_steps
        for operator, runs in enumerate(self.runs):
            order[next(step for step, column in runs.items() if self._is_chosen(column))] = operator
        lives = lives_in(self.graph, order)
        aways = []
        for index, life in enumerate(lives):
            for use, (begin, after) in enumerate(itertools.pairwise(life.uses)):
                taker = self._taker(life, begin)
                gone = [t for t in range(begin + 1, after) if not self._is_there(life, t)]
                if gone or taker is not None:
                    # A result that takes its place takes it while the operator runs.
                    left = begin if taker is not None else gone[0]
                    aways.append(Away(index, use, left, max([begin, *gone]) + 1, taker))
            last = last_read(self.graph, life)
            if last is not None and self._taker(life, last) is not None:
                lives[index] = life._replace(end=last)
        return Residency(tuple(order), lives, aways)

    def _named(self, life: Life, position: int) -> tuple[int, int]:
        """What the step calls a life at a position, and the step there."""
        if position < self.num_steps:
            return life.value, position
        return self._begin_of(life.value), position - self.num_steps

    def _is_there(self, life: Life, position: int) -> bool:
        value, step = self._named(life, position)
        return self._is_chosen(self.there[value][step])

    def _taker(self, life: Life, position: int) -> int | None:
        value, step = self._named(life, position)
        for read, created, column in self.handed.get(step, ()):
            if read == value and self._is_chosen(column):
                return created
        return None

    def _is_chosen(self, column: int) -> bool:
        return bool(self.program.values[column] > 0.5)
