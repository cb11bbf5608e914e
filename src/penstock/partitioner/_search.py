"""The search: meshes, levels, and the price of a byte.

For each way to write the number of ranks as levels, and each price of a byte, levels are solved
from the outermost in; each sees the pieces that those above have left, so that splits by two levels
are not chosen apart, which ends in data parallelism at each. At a price of nothing parameters are
replicated, at a high price everything is split; the price is bisected until the fullest rank fits.
Points between two prices are then looked for among splits that cost little more (Handler, Zang, "A
Dual Algorithm for the Constrained Shortest Path Problem", Networks 1980), by an integer program
where HiGHS is there, or by single changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.memory import MachineProfile
from penstock.partitioner._elimination import Elimination
from penstock.partitioner._flat import solve_flat
from penstock.partitioner._level import Level, make_level
from penstock.partitioner._mesh import Mesh, make_mesh
from penstock.partitioner._split import Model, StepSplit
from penstock.partitioner._styles import (
    GREEDY,
    METHODS,
    STYLES,
    AxisClasses,
    choose_greedily,
    price_style,
)
from penstock.solvers import can_solve

_PRICES = (0.0, *(2.0**power for power in range(-8, 11, 2)))
_NUM_BISECTIONS = 8
_NUM_BOUNDS = 16
_MOST_SPLITS = 20_000  # looked at between two prices


class FoundSplit(NamedTuple):
    """A split with its costs.

    Attributes:
        cost: Bytes exchanged, weighted by their links, with the cost of repeated work.
        weighted_bytes: Without that.
        exchanged_bytes: That a rank receives.
        peak_bytes: Of the fullest rank.
        step: The split.
        origin: Name of the search that found it.
    """

    cost: float
    weighted_bytes: float
    exchanged_bytes: float
    peak_bytes: int
    step: StepSplit
    origin: str = "search"


@dataclass
class SplitSearch:
    """A search and its candidates.

    Attributes:
        model: The step.
        machine: Its links.
        budget: Bytes of a rank; None: as many as needed.
        deadline: By `time.monotonic`.
        candidates: All that were found.
        lower_bound: Of `FoundSplit.cost`, where all was solved exactly; else 0.
        solves_programs: Whether splits by one level are also looked for by integer programs.
    """

    model: Model
    machine: MachineProfile
    budget: int | None
    deadline: float = math.inf
    candidates: list[FoundSplit] = field(default_factory=list)
    lower_bound: float = 0.0
    solves_programs: bool = True
    _classes: AxisClasses | None = None
    _solvers: dict[object, tuple[Level, Elimination]] = field(default_factory=dict)
    _critical_of: dict[StepSplit | None, int] = field(default_factory=dict)

    @property
    def is_late(self) -> bool:
        """True once the time is over."""
        return time.monotonic() > self.deadline

    def run(self, devices: int) -> None:
        """Search all meshes of a number of ranks, and all styles."""
        for style in METHODS[1:]:
            self.run_style(devices, style)
        meshes = [make_mesh(sizes, self.machine) for sizes in list_meshes(devices)]
        for number, mesh in enumerate(meshes):
            share = (self.deadline - time.monotonic()) / (len(meshes) + 1 - number)
            self._search_mesh(mesh, time.monotonic() + share)
            self._solvers.clear()
            if self.is_late:
                return
        self._solve_flat(meshes[0])

    def run_style(self, devices: int, style: str) -> None:
        """Split as a person would: by one style, and by batch between nodes of tensor splits."""
        node = self.machine.devices_per_node
        if style == "tensor" and devices > node and devices % node == 0:
            mesh = make_mesh((devices // node, node), self.machine)
            self._solve(mesh, 1.0, "batch", "tensor")
        else:
            mesh = make_mesh((devices,), self.machine)
            self._solve(mesh, 0.0 if style == "batch" else 1.0, style)

    def best(self) -> FoundSplit | None:
        """Return the cheapest candidate that fits the budget."""
        within = filter(self.fits, self.candidates)
        return min(within, default=None, key=lambda each: (each.cost, each.peak_bytes))

    def rank_candidates(self) -> list[FoundSplit]:
        """Return different candidates, those of the least exchange first."""

        def key(each: FoundSplit) -> tuple[float, ...]:
            return each.weighted_bytes, each.cost, each.peak_bytes

        ranked = sorted(self.candidates, key=key)
        return [*{key(each): each for each in reversed(ranked)}.values()][::-1]

    def fits(self, candidate: FoundSplit) -> bool:
        """Return whether a split fits the budget."""
        return self.budget is None or candidate.peak_bytes <= self.budget

    def _search_mesh(self, mesh: Mesh, ends: float) -> None:
        for style in STYLES:
            self._solve(mesh, 0.0 if style == "batch" else 1.0, style)
        free = self._solve(mesh, 0.0)
        if self.fits(free):
            if len(mesh.sizes) == 1 and self._solver(mesh, None, self._critical(None))[1].is_exact:
                self.lower_bound = max(self.lower_bound, free.cost)
            # Solved level by level, a price may give less exchange than none.
            for price in _PRICES:
                if time.monotonic() > ends:
                    return
                self._solve(mesh, price)
            self._repair(mesh, ends)
            return
        below, above = 0.0, _PRICES[-1]  # prices at which it does not fit, and does
        if not self.fits(self._solve(mesh, above)) or time.monotonic() > ends:
            return
        for _ in range(_NUM_BISECTIONS):
            if time.monotonic() > ends or above <= max(1.01 * below, _PRICES[1]):
                break
            middle = math.sqrt(max(below, _PRICES[1]) * above)
            if self.fits(self._solve(mesh, middle)):
                above = middle
            else:
                below = middle
        if len(mesh.sizes) == 1:
            self._close_gap(mesh, above, ends)
        self._repair(mesh, ends)

    def _solver(
        self, mesh: Mesh, above: StepSplit | None, *places: int
    ) -> tuple[Level, Elimination]:
        """Return the choices of a level, with bytes that are the mean of some operators'."""
        key = (mesh, above, places)
        if key not in self._solvers:
            level = make_level(self.model, mesh, above, dict.fromkeys(places, 1 / len(places)))
            self._solvers[key] = level, Elimination(level.choices)
        return self._solvers[key]

    def _solve(self, mesh: Mesh, price: float, *styles: str) -> FoundSplit:
        """Solve level by level at a price; styles are those of the levels, or one of all."""
        above: StepSplit | None = None
        for num_levels in range(1, len(mesh.sizes) + 1):
            partial = Mesh(mesh.sizes[:num_levels], mesh.weights[:num_levels])
            level, elimination = self._solver(partial, above, self._critical(above))
            style = styles[min(num_levels, len(styles)) - 1] if styles else None
            above = level.step_split(self._solve_level(level, elimination, price, style))
        assert above is not None
        return self.add(above, "+".join(styles) or "search")

    def _critical(self, step: StepSplit | None) -> int:
        """Return the operator at which a rank needs the most bytes."""
        if step not in self._critical_of:
            model = self.model
            whole = step is None
            num_bytes = model.live_bytes(model.num_bytes) if whole else model.device_bytes(step)
            self._critical_of[step] = int(num_bytes.argmax())
        return self._critical_of[step]

    def _solve_level(
        self, level: Level, elimination: Elimination, price: float, style: str | None
    ) -> np.ndarray:
        start = np.zeros(len(level.choices.num_options), dtype=int)
        if style == GREEDY:
            return choose_greedily(level)
        if self._classes is None:
            self._classes = AxisClasses(self.model)
        if style is not None:
            added = price_style(level, self._classes, style)
            return elimination.solve(price, start, added)[1]
        starts = [start]
        if not elimination.is_exact:
            known = (level.options_of(each.step) for each in self.candidates[-len(STYLES) :])
            starts += [each for each in known if each is not None]
        found = (elimination.solve(price, each) for each in starts)
        return min(found, key=lambda each: each[0])[1]

    def add(self, step: StepSplit, origin: str) -> FoundSplit:
        """Count the costs of a split, and keep it as a candidate."""
        num_bytes, weighted, cost = self.model.exchange(step)
        peak = int(self.model.device_bytes(step).max(initial=0))
        candidate = FoundSplit(cost, weighted, num_bytes, peak, step, origin)
        self.candidates.append(candidate)
        return candidate

    def _close_gap(self, mesh: Mesh, price: float, ends: float) -> None:
        """Look at all splits that may cost less than the best, at the price of the best bound.

        A split that fits needs no more than the budget at any operator, so not in the mean of some.
        """
        best = self.best()
        assert best is not None and self.budget is not None
        first, second = self._critical(None), self._critical(best.step)
        places = dict.fromkeys([(first,), (second,), tuple(sorted({first, second}))])
        found = [self._best_bound(mesh, each, price) for each in places]
        bound, price, level, elimination = max(found, key=lambda each: each[0])
        if not elimination.is_exact:
            return
        self.lower_bound = max(self.lower_bound, bound)
        start = np.zeros(len(level.choices.num_options), dtype=int)
        elimination.solve(price, start)
        cheapest, limit = best.cost, None
        cost_of = level.choices.find_total(level.choices.costs, level.choices.pair_costs)
        splits = elimination.enumerate(cheapest * (1 - 1e-9) + price * self.budget)
        for _ in range(_MOST_SPLITS):
            try:
                _, options = splits.send(limit)
            except StopIteration:
                return
            limit = None
            if cost_of(options) < cheapest * (1 - 1e-9):
                step = level.step_split(options)
                if self.model.device_bytes(step).max(initial=0) <= self.budget:
                    cheapest = self.add(step, "gap").cost
                    limit = cheapest * (1 - 1e-9) + price * self.budget
            if time.monotonic() > ends:
                return

    def _solve_flat(self, mesh: Mesh) -> None:
        """Solve a level as an integer program, if it is not known that nothing is cheaper."""
        best = self.best()
        is_best = best is not None and best.cost <= self.lower_bound * (1 + 1e-9)
        if is_best or not (self.solves_programs and can_solve()):
            return
        left = self.deadline - time.monotonic()
        found = solve_flat(self.model, mesh, self.budget, left)
        if found.step is not None:
            self.add(found.step, "program")

    def _best_bound(
        self, mesh: Mesh, places: tuple[int, ...], price: float
    ) -> tuple[float, float, Level, Elimination]:
        """Return the largest bound of the cost near a price, with the price; it is concave in it.

        bound(price) = min over x of (cost + price * bytes) - price * budget
        """
        level, elimination = self._solver(mesh, None, *places)
        if not elimination.is_exact:
            return -math.inf, price, level, elimination
        start = np.zeros(len(level.choices.num_options), dtype=int)

        def bound(price: float) -> float:
            return elimination.solve(price, start)[0] - price * (self.budget or 0)

        low, high = 0.0, max(4 * price, 1.0)
        for _ in range(_NUM_BOUNDS):
            a, b = low + (high - low) / 3, high - (high - low) / 3
            if bound(a) < bound(b):
                low = a
            else:
                high = b
        best = max((0.0, low, high), key=bound)
        return bound(best), best, level, elimination

    def _repair(self, mesh: Mesh, ends: float) -> None:
        """Change one group at a time while the step fits and gets cheaper."""
        best = min(
            (each for each in self.candidates if each.step.mesh == mesh and self.fits(each)),
            default=None,
            key=lambda each: each.cost,
        )
        if best is None:
            return
        above = None
        if len(mesh.sizes) > 1:
            outer = Mesh(mesh.sizes[:-1], mesh.weights[:-1])
            above = StepSplit(
                outer,
                tuple(each[:-1] for each in best.step.placements),
                tuple(each[:-1] for each in best.step.splits),
            )
        level, _ = self._solver(mesh, above, self._critical(above))
        options = level.options_of(best.step)
        if options is None:
            return
        for _, changed in _list_changes(level, options):
            if time.monotonic() > ends:
                return
            found = self.add(level.step_split(changed), "repair")
            if not self.fits(found) or found.cost >= best.cost:
                self.candidates.pop()
            else:
                best = found


def _list_changes(level: Level, options: np.ndarray) -> Iterator[tuple[float, np.ndarray]]:
    """Yield options that differ in one group and cost less, the cheapest first."""
    choices = level.choices
    pairs: list[list[tuple[int, np.ndarray]]] = [[] for _ in choices.num_options]
    for (a, b), table in choices.pair_costs.items():
        pairs[a].append((b, table))
        pairs[b].append((a, table.T))
    changes = []
    for v, own in enumerate(options):
        costs = choices.costs[v].copy()
        for other, table in pairs[v]:
            costs += table[:, options[other]]
        changes += [
            (cost - costs[own], v, option)
            for option, cost in enumerate(costs)
            if cost < costs[own] - 1e-9
        ]
    for gain, v, option in sorted(changes):
        changed = options.copy()
        changed[v] = option
        yield gain, changed


def list_meshes(devices: int) -> list[tuple[int, ...]]:
    """Return the ways to write a number of ranks as levels: one, two, or all its prime factors.

    Example:
        >>> list_meshes(8)
        [(8,), (2, 4), (4, 2), (2, 2, 2)]
    """
    meshes: list[tuple[int, ...]] = [(devices,)]
    meshes += [(k, devices // k) for k in range(2, devices) if devices % k == 0]
    primes, rest = [], devices
    for factor in range(2, devices + 1):
        while rest % factor == 0:
            primes.append(factor)
            rest //= factor
    if len(primes) > 2:
        meshes.append(tuple(primes))
    return meshes
