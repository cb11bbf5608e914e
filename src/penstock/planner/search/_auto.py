"""The search for order, recomputation and residency, together, under a deadline.

Each candidate is a sequence of operators (an order, with second runs); its evictions are chosen and
timed by the engine in milliseconds. Candidates come in families: greedy orders of different
weights, drops of different prices and segments. The best of them is then improved piece by piece:
profile of the residency, groups of recomputed values, windows of the order.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.planner._request import PlanRequest
from penstock.planner.search._drops import DropFamilies, DropProposals
from penstock.planner.search._orders import greedy_weights, move_gradients_late, move_updates_early
from penstock.planner.search._problem import GreedyWeights, Problem
from penstock.planner.search._recompute import RecomputeChains, mark_brief
from penstock.planner.search._residency import Arena, EvictionChoice, ResidencySearch
from penstock.planner.search._sequence import OperatorSequence

_FRACTIONS = (0.25, 0.5, 0.75)
_NUM_FINALISTS, _DISTINCT = 3, 1.005
_MAX_CANDIDATES = 32
_MAX_QUICK = 100_000  # positions of sequences whose times are kept, of some 250 bytes each
_NUM_CROSSED = 3  # families of drops that are tried with all orders
_MAX_FAILURES = 120  # changes of dropped storages in succession
# Shares of the arena for which the best is improved, so that bytes are left for fragmentation; and
# of the time for the search with all decisions free.
_TIGHTER, _TIGHT_SHARE = (0.95, 0.9), 0.4
_PART_IF_LONG = 0.1  # of the time for profiles of long sequences, before what is dropped is changed
_FREE_SHARE = 0.85  # of the time; the rest is for the same with decisions frozen
# Where one operator fills nearly the arena: the part of the time that is searched at all, and of it
# the part in the program's order.
_TIGHT_END, _FROZEN_FIRST = 0.75, 0.35
# Frozen candidates of longer sequences that are slower by more than this are not refined.
_FEW_OPERATORS, _HOPELESS = 500, 1.3


@dataclass(frozen=True, eq=False)
class SearchCandidate:
    """An order with second runs and evictions that could be the plan's."""

    order: np.ndarray  # operators, each once
    dropped: frozenset[int]  # storages that are recomputed
    choice: EvictionChoice  # evictions, and the time of the step

    @property
    def seconds(self) -> float:
        """Time of a step."""
        return self.choice.seconds


class AutoSearch:
    """A search of one request in one arena.

    Attributes:
        best: The best candidate so far.
        tighter: Candidates that were found for smaller arenas, the largest first.
    """

    def __init__(
        self,
        request: PlanRequest,
        arena: Arena,
        *,
        on_better: Callable[[SearchCandidate], None],
        alignment: int | None = None,
    ) -> None:
        graph, seed = request.graph, request.seed
        seconds = np.asarray(request.operator_seconds, np.float64)
        self.problem = Problem(graph, seconds, alignment=alignment)
        self.arena = arena
        self.reorder = request.reorder
        self.recompute = request.recompute
        self.deadline = request.deadline
        self.random = np.random.default_rng(seed)
        self.best: SearchCandidate | None = None
        self._candidates: dict[bytes, SearchCandidate] = {}  # by the sequence of operators
        self.tighter: list[SearchCandidate] = []
        self._kept: list[SearchCandidate] = []  # finalists of the searches that are over
        self._quick: dict[tuple[bytes, frozenset[int]], EvictionChoice | None] = {}
        # Neighbours of a choice, by order, dropped storages and whether profiles were tried.
        self._near: EvictionChoice | None = None
        self._neighbours: dict[tuple[bytes, frozenset[int], bool], SearchCandidate | None] = {}
        self._seed = seed
        self._on_better = on_better
        self._chains = RecomputeChains(graph)
        one_way = 1e9
        if arena.lower is not None:
            rate = arena.lower.rates[0]
            one_way = rate.outward * rate.inward / (rate.outward + rate.inward)
        self._drops = DropFamilies(graph, self._chains, self.problem.operator_seconds, one_way)
        self._program = np.arange(len(graph.operators), dtype=np.int32)
        self._ideal_seconds = float(seconds.sum())

    def run(self) -> SearchCandidate | None:
        """Search until the deadline or until nothing helps; return the best, if any fits.

        The same search with the order or single runs frozen has its share of the time, and its
        finalists are finalists of the whole search: freedom makes no plan slower.
        """
        end, freedom = self.deadline, (self.reorder, self.recompute)
        frozen = frozen_decisions(*freedom)
        if frozen and self.recompute and self._is_tight():
            return self._run_tight(frozen)
        if frozen:
            now = time.monotonic()
            self.deadline = now + max(0.0, end - now) * _FREE_SHARE
        whole = self.deadline
        if self.recompute:
            self.deadline -= max(0.0, whole - time.monotonic()) * _TIGHT_SHARE
        self._search(worth=np.inf)
        self.deadline = whole
        if self.recompute:  # else nothing can be dropped, and a smaller arena only moves more
            self._search_tighter(
                self._finalists(), [int(self.arena.capacity * share) for share in _TIGHTER]
            )
        self._search_frozen(frozen, end)
        self.deadline, (self.reorder, self.recompute) = end, freedom
        if self.recompute:
            self._search_tightest()
        return self.best

    def _is_tight(self) -> bool:
        """Return whether an operator alone fills nearly the whole arena."""
        needed = OperatorSequence(self.problem, self._program).working_set.max(initial=0)
        return self.arena.lower is not None and needed > self.arena.capacity * max(_TIGHTER)

    def _run_tight(self, frozen: list[tuple[bool, bool]]) -> SearchCandidate | None:
        """Search in the program's order first, then from there with all decisions free.

        With so little memory an order that frees bytes late fits nowhere, and offsets need time.
        """
        now, freedom = time.monotonic(), (self.reorder, self.recompute)
        left = max(0.0, self.deadline - now) * _TIGHT_END
        again = [decisions for decisions in frozen if decisions[1]]
        self._search_frozen(again, now + left * _FROZEN_FIRST)
        self.deadline, (self.reorder, self.recompute) = now + left * _FREE_SHARE, freedom
        self._search(worth=np.inf)
        self._search_frozen([decisions for decisions in frozen if not decisions[1]], now + left)
        self.deadline, (self.reorder, self.recompute) = now + left, freedom
        self._search_tightest()
        return self.best

    def _search_tightest(self) -> None:
        """Search as tight as the operators allow, if they nearly fill the arena."""
        near = [candidate for candidate in self.finalists() if candidate.dropped]
        least = max((int(c.choice.sequence.working_set.max()) for c in near), default=0)
        if least > self.arena.capacity * max(_TIGHTER):
            self._search_tighter(near, [least])

    def _search_frozen(self, frozen: list[tuple[bool, bool]], end: float) -> None:
        for done, (self.reorder, self.recompute) in enumerate(frozen):
            if self._is_ideal():
                break
            now = time.monotonic()
            self.deadline = now + max(0.0, end - now) / (len(frozen) - done)
            self._search_anew()

    def _search_tighter(self, finalists: list[SearchCandidate], capacities: Sequence[int]) -> None:
        """Search near the finalists for smaller arenas, which leaves bytes for fragmentation.

        A choice that fills the arena to the last byte finds offsets only where it evicts much more;
        one that was found for a smaller arena evicts what is cheapest.
        """
        best, whole = self.best, self.arena
        moves = whole.lower is not None and best is not None and best.choice.evicted.any()
        if not moves or self._is_ideal():
            return
        saved = self._candidates, self._quick, self._on_better
        near = finalists[:_NUM_FINALISTS]
        began, end = time.monotonic(), self.deadline
        try:
            for done, capacity in enumerate(capacities):
                self.deadline = began + max(0.0, end - began) * (done + 1) / len(capacities)
                self.arena = dataclasses.replace(whole, capacity=capacity)
                self._on_better = lambda _: None
                self.best, self._candidates, self._quick = None, {}, {}
                for candidate in near:
                    self._try(candidate.order, candidate.dropped)
                self._improve()
                self._note_tighter(whole, capacity / whole.capacity)
        finally:
            self.arena, self.best, self.deadline = whole, best, end
            self._candidates, self._quick, self._on_better = saved

    def _note_tighter(self, whole: Arena, share: float) -> None:
        """Keep the best, with the times that it takes in the whole arena."""
        if self.best is None:
            return
        choice = self.best.choice
        again = ResidencySearch(choice.sequence, whole).at(choice.shares * share)
        if again is not None:
            self.tighter.append(SearchCandidate(self.best.order, self.best.dropped, again))

    def _search_anew(self) -> None:
        """Search as if nothing had been found; keep the earlier best if it is better."""
        before, self._kept = self.best, [*self._kept, *self._finalists()]
        report, self._on_better = self._on_better, lambda _: None
        self.best, self._candidates = None, {}
        self.random = np.random.default_rng(self._seed)
        is_long = len(self._program) > _FEW_OPERATORS and before is not None
        worth = before.seconds * _HOPELESS if is_long and before else np.inf
        try:
            self._search(worth=worth)
        finally:  # also where Ctrl-C ends the search before it has found anything
            self._on_better = report
            if before is not None and (self.best is None or before.seconds <= self.best.seconds):
                self.best = before
            elif self.best is not None:
                report(self.best)

    def _search(self, *, worth: float) -> None:
        """Search with the free decisions; refine only what takes less than `worth` seconds."""
        orders = [self._program]
        self._try(self._program, frozenset())
        if self._is_ideal():
            return
        if self.reorder:
            graph = self.problem.graph
            greedy = functools.partial(self.problem.greedy_order, self._program)
            for find, argument in [
                (move_updates_early, graph),
                (move_gradients_late, graph),
                *((greedy, weights) for weights in greedy_weights(self.arena.capacity)),
            ]:
                if self._is_late():
                    break
                order = find(argument)
                if not any(np.array_equal(order, other) for other in orders):
                    orders.append(order)
                    self._try(order, frozenset())
        if self.recompute:
            self._try_drops(orders)
        if self.best is None or self.best.seconds > worth:
            return
        self._refine_finalists()
        self._improve()

    def _improve(self) -> None:
        """Change the best piece by piece until nothing helps."""
        while self.best is not None and not self._is_late() and not self._is_ideal():
            before = self.best.seconds
            if self.recompute:
                self._refine_groups()
                self._refine_drops()
            self._refine(self.best, self.deadline)
            if self.reorder:
                self._refine_order_windows()
            if self.best.seconds >= before * (1 - 1e-4):
                break

    def finalists(self) -> list[SearchCandidate]:
        """Return the finalists of all searches, the fastest first.

        One whose offsets do not fit may end behind one that is a little slower.
        """
        found = [*self._finalists(), *self._kept, *self.tighter]
        unique = {(c.seconds, c.choice.sequence.order.tobytes()): c for c in found}
        return sorted(unique.values(), key=lambda candidate: candidate.seconds)

    def _finalists(self) -> list[SearchCandidate]:
        """Return the best candidate, the best without second runs, the program's order, others."""
        ranked = sorted(self._candidates.values(), key=lambda candidate: candidate.seconds)
        chosen = ranked[:1]
        chosen += [c for c in ranked if not c.dropped][:1]
        chosen += [c for c in (self._candidates.get(self._program.tobytes()),) if c is not None]
        others = ranked[1:]
        if ranked and len(self._program) > _FEW_OPERATORS:
            # Neighbours of the best have its offsets too, and take the time that these need.
            others = [c for c in others if c.seconds > ranked[0].seconds * _DISTINCT]
        chosen += others[: _NUM_FINALISTS - 1]
        return list(dict.fromkeys(chosen))

    def _forget_one(self) -> None:
        """Forget the slowest candidate; of longer sequences the one most similar to a faster one,
        as finalists have to differ there.
        """
        ranked = sorted(self._candidates, key=lambda key: self._candidates[key].seconds)
        seconds = [self._candidates[key].seconds for key in ranked]
        needed = {ranked[0], self._program.tobytes()}
        needed |= {*[key for key in ranked if not self._candidates[key].dropped][:1]}
        others = [index for index, key in enumerate(ranked) if key not in needed]
        if len(self._program) > _FEW_OPERATORS:
            del self._candidates[ranked[min(others, key=lambda i: seconds[i] / seconds[i - 1])]]
        else:
            del self._candidates[ranked[others[-1]]]

    def _refine_finalists(self) -> None:
        """Give each of the finalists that may win its share of a part of the time that is left."""
        assert self.best is not None
        finalists = self._finalists()
        if len(self._program) > _FEW_OPERATORS:
            most = self.best.seconds * _HOPELESS
            finalists = [candidate for candidate in finalists if candidate.seconds <= most]
        # What runs twice can be changed piece by piece afterwards, which is worth more.
        is_long = self.recompute and len(self._program) > _FEW_OPERATORS
        part = max(0.0, self.deadline - time.monotonic()) * (_PART_IF_LONG if is_long else 0.5)
        share = part / max(1, len(finalists))
        for candidate in finalists:
            self._refine(candidate, min(self.deadline, time.monotonic() + share))

    def _is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def _is_ideal(self) -> bool:
        return self.best is not None and self.best.seconds <= self._ideal_seconds * (1 + 1e-6)

    def _sequence(self, order: np.ndarray, dropped: frozenset[int]) -> OperatorSequence | None:
        if not dropped:
            return OperatorSequence(self.problem, order)
        expanded = self._chains.expand(order, dropped)
        return None if expanded is None else OperatorSequence(self.problem, expanded)

    def _try(self, order: np.ndarray, dropped: frozenset[int]) -> SearchCandidate | None:
        """Time a candidate roughly, and keep it if it is the best."""
        sequence = self._sequence(order, dropped)
        if sequence is None:
            return None
        if self.best is not None and sequence.compute_seconds >= self.best.seconds:
            return None
        key = sequence.order.tobytes(), dropped
        if key not in self._quick:
            if len(self._quick) * len(sequence.order) > _MAX_QUICK:
                del self._quick[next(iter(self._quick))]
            search = ResidencySearch(sequence, self.arena)
            self._quick[key] = search.quick()
        residency = self._quick[key]
        if residency is None:
            return None
        candidate = SearchCandidate(order, dropped, residency)
        self._note(candidate)
        return candidate

    def _note(self, candidate: SearchCandidate) -> bool:
        key = candidate.choice.sequence.order.tobytes()
        known = self._candidates.get(key)
        if known is None or candidate.seconds < known.seconds:
            self._candidates[key] = candidate
            if len(self._candidates) > _MAX_CANDIDATES:
                self._forget_one()
        if self.best is not None and candidate.seconds >= self.best.seconds * (1 - 1e-9):
            return False
        self.best = candidate
        self._on_better(candidate)
        return True

    def _try_drops(self, orders: list[np.ndarray]) -> None:
        """Try families of drops, whole and for the first part of the forward pass only."""
        order = self.best.order if self.best else orders[-1]
        # Where nothing fits without recomputation, any order may be the one.
        candidates = [order, self._program] if self.best else orders
        if np.array_equal(order, self._program):
            candidates = candidates[:1] if self.best else orders
        families = [*self._drops.by_price(), *self._drops.by_segment()]
        for base in candidates:
            for dropped in families:
                if self._is_late():
                    return
                self._try(base, dropped)
        if self.best is None:
            return
        self._try_families_with(orders)
        made_at = self._drops.made_at
        last = max(made_at.values(), default=0)
        for dropped in families:
            for fraction in _FRACTIONS:
                if self._is_late():
                    return
                early = frozenset(i for i in dropped if made_at[i] <= last * fraction)
                if early and early != dropped:
                    self._try(self.best.order, early)

    def _try_families_with(self, orders: list[np.ndarray]) -> None:
        """Try the best families with all orders: the best order may differ with them."""
        ranked = sorted(self._candidates.values(), key=lambda candidate: candidate.seconds)
        for dropped in list(dict.fromkeys(c.dropped for c in ranked if c.dropped))[:_NUM_CROSSED]:
            for order in orders:
                if self._is_late():
                    return
                self._try(order, dropped)

    def _refine(self, candidate: SearchCandidate, deadline: float) -> None:
        """Improve the evictions of a candidate, which may become the best."""
        search = ResidencySearch(candidate.choice.sequence, self.arena)
        search.refine(
            candidate.choice,
            deadline=deadline,
            on_better=lambda choice: self._note(
                SearchCandidate(candidate.order, candidate.dropped, choice)
            ),
        )

    def _refine_groups(self) -> None:
        """Drop, or keep, all storages of one kind of operator, or of one role."""
        assert self.best is not None
        none: frozenset[int] = frozenset()
        for members in self._drops.groups():
            both = members | mark_brief(members)
            for add, remove in (
                (members, none),
                (none, both),
                (both, none),
                (none, mark_brief(members)),
            ):
                if self._is_late():
                    return
                changed = (self.best.dropped | add) - remove
                if changed != self.best.dropped:
                    self._try_neighbour(self.best.order, changed)

    def _refine_drops(self) -> None:
        """Drop, or keep, some of the storages of a window of the forward pass."""
        assert self.best is not None
        moves = DropProposals(self._drops, self.random)
        failures = 0
        while len(moves) and failures < _MAX_FAILURES and not self._is_late():
            changed = moves.propose(self.best.dropped)
            if changed == self.best.dropped:
                failures += 1
                continue
            improved = self._try_neighbour(self.best.order, changed, also_quick=False)
            failures = 0 if improved else failures + 1

    def _refine_order_windows(self) -> None:
        """Order a window anew, with random weights."""
        assert self.best is not None
        n = len(self._program)
        failures = 0
        while failures < 40 and not self._is_late():
            length = int(self.random.integers(4, max(5, n // 2)))
            begin = int(self.random.integers(0, max(1, n - length)))
            fetch, create, release = self.random.choice([0, 0.25, 1, 4], 3)
            share = self.random.choice([0.25, 0.5, 1])
            late = float(10 ** self.random.uniform(-6, -1)) * self.arena.capacity
            weights = GreedyWeights(fetch, create, release, late, int(self.arena.capacity * share))
            order = self.problem.greedy_order(
                self.best.order, weights, begin=begin, end=min(n, begin + length)
            )
            if np.array_equal(order, self.best.order):
                failures += 1
                continue
            improved = self._try_neighbour(order, self.best.dropped)
            failures = 0 if improved else failures + 1

    def _try_neighbour(
        self, order: np.ndarray, dropped: frozenset[int], *, also_quick: bool = True
    ) -> bool:
        """Time a neighbour of the best with the best's own profile, scaled to its length.

        Where few values can be dropped the same neighbours come again and again.
        """
        assert self.best is not None
        if self._near is not self.best.choice:
            self._near = self.best.choice
            self._neighbours.clear()
        key = order.tobytes(), dropped, also_quick
        if key not in self._neighbours:
            if len(self._neighbours) * len(order) > _MAX_QUICK:
                del self._neighbours[next(iter(self._neighbours))]
            self._neighbours[key] = self._time_neighbour(order, dropped, also_quick=also_quick)
        found = self._neighbours[key]
        return found is not None and self._note(found)

    def _time_neighbour(
        self, order: np.ndarray, dropped: frozenset[int], *, also_quick: bool
    ) -> SearchCandidate | None:
        best = self.best
        assert best is not None
        sequence = self._sequence(order, dropped)
        if sequence is None or sequence.compute_seconds >= best.seconds:
            return None
        search = ResidencySearch(sequence, self.arena)
        shares = best.choice.shares
        at = np.linspace(0, len(shares) - 1, len(sequence.order)).round().astype(int)
        found = search.at(shares[at])
        if also_quick and (found is None or found.seconds >= best.seconds):
            found = min(
                filter(None, (found, search.quick())), key=lambda r: r.seconds, default=None
            )
        return None if found is None else SearchCandidate(order, dropped, found)


def frozen_decisions(reorder: bool, recompute: bool) -> list[tuple[bool, bool]]:
    """Return the pairs (reorder, recompute) that allow less than the given one."""
    return [
        (order, again)
        for order in (False, True)[: 1 + reorder]
        for again in (False, True)[: 1 + recompute]
        if (order, again) != (reorder, recompute)
    ]
