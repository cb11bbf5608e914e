"""Bounds that hold for every order: bytes that have to be live when an operator runs, anywhere.

A value that an ancestor of operator v makes and a descendant of v needs is live when v runs for the
first time. So are the operands and results of v, and every persistent storage.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from penstock._lazy import cached_property
from penstock.graph import StepGraph
from penstock.planner._request import LinkRates
from penstock.planner.bounds._fixed_order import saved_bytes
from penstock.planner.bounds._slots import cost_level, level_cost

MAX_OPERATORS = 20_000  # two bits for each pair: 100 MB
_MAX_KEPT = 4096  # of graphs of which is kept what was found: 4 MB and less
# Thirds of the bytes that may return are left out so often, for all operators at once; then those
# are left out that another one exceeds in any case. Few are looked at one by one.
_NUM_THIRDS, _NUM_THIRDS_AT_ONCE, _FEW_OPERATORS = 60, 6, 6

_Seconds = Callable[[Any, Any, Any, Callable[..., Any]], Any]  # of arrays, or of one operator


def forced_bounds(
    forced: Forced, operator_seconds: Sequence[float], capacity: int, rates: LinkRates
) -> dict[str, float]:
    """Bound the time of a step in any order.

    Let F(v) be the bytes of the values that are live when v runs for the first time and needed
    after it in the same step, M the arena, c(...) the time of operators, C that of all. At least D
    = F(v) - M bytes are absent then. Let X of them return and the others be recomputed, which costs
    W(D - X), the cheapest bytes first; without recomputation X = D. All X come in after v has
    started. Those that the step has made (all but the first values of persistent storages, P bytes)
    have left before. So

        cut: T >= max(c(ancestors), (X - P) / out) + max(c(v) + c(descendants) + W(D - X), X / in).

    Let G(v) be the bytes of all persistent storages that are used and of the values that are forced
    to be live when v runs, Q of them in storages that no step changes. A value that is absent at v
    returns within a cycle, or is recomputed, and unless it is in Q it has left within the cycle
    before. With D = G(v) - M

        persistent: T >= max(C + W(D - X), X / in, (X - Q) / out).

    Both are at their least for the X that is best for the plan, and hold for the worst v. An
    operator that runs again makes all its results: bytes cost at least its time over their sum.
    Only values of operators with `recomputable` can be recomputed. A persistent storage that such
    an operator changes does not count in G.

    Returns:
        The two bounds by name.
    """
    compute = float(sum(operator_seconds))
    kept, key = forced.known_bounds, (compute, capacity, rates)
    if key in kept:
        return kept[key]
    outward, inward, constant = rates.outward, rates.inward, forced.constant_bytes

    def cut(returning: Any, remaking: Any, known: Any, larger: Callable[..., Any]) -> Any:
        first_values, before, after = known
        out = larger(returning - first_values, 0.0) / outward
        return larger(before, out) + larger(after + remaking, returning / inward)

    def cycle(returning: Any, remaking: Any, known: Any, larger: Callable[..., Any]) -> Any:
        out = larger(returning - constant, 0.0) / outward
        return larger(larger(compute + remaking, out), returning / inward)

    known = np.stack((forced.first_values, forced.seconds_before, forced.seconds_after))
    bounds = kept[key] = {
        "cut": _least(cut, known, forced.here - capacity, forced),
        "persistent": _least(cycle, known[:0], forced.anywhere - capacity, forced),
    }
    return bounds


@dataclass(frozen=True, kw_only=True)
class Forced:
    """Live bytes and seconds per operator v, in any order."""

    here: np.ndarray  # F(v)
    first_values: np.ndarray  # P: of those, first values of persistent storages
    anywhere: np.ndarray  # G(v)
    constant_bytes: int  # Q
    seconds_before: np.ndarray
    seconds_after: np.ndarray  # of v and its descendants
    recomputable_bytes: dict[int, np.ndarray]  # by class of the seconds per byte: bytes of F(v)
    ancestors: np.ndarray  # packed bits
    descendants: np.ndarray

    @cached_property
    def recomputable_by_cost(self) -> list[tuple[float, np.ndarray]]:
        """Seconds per byte of each class, the cheapest first, with its bytes."""
        levels = sorted(self.recomputable_bytes.items())
        return [(level_cost(level), num_bytes) for level, num_bytes in levels]

    @cached_property
    def known_bounds(self) -> dict[tuple[float, int, LinkRates], dict[str, float]]:
        """The bounds of `forced_bounds` that were asked for, by its other arguments."""
        return {}

    def ancestors_of(self, operator: int) -> np.ndarray:
        """Return which operators run before one in any order, as booleans."""
        return np.unpackbits(self.ancestors[operator], count=len(self.here)).astype(bool)

    def descendants_of(self, operator: int) -> np.ndarray:
        """Return which operators run after one in any order, as booleans."""
        return np.unpackbits(self.descendants[operator], count=len(self.here)).astype(bool)


class _Operators(NamedTuple):
    """Operators for which X is looked for: the range of X, D, what the time depends on, W's bytes.

    Arrays have a column for each operator.
    """

    low: np.ndarray
    high: np.ndarray
    excess: np.ndarray
    known: np.ndarray
    num_bytes: np.ndarray  # by class of the seconds per byte
    costs: list[float]  # of these

    def find_seconds(self, seconds: _Seconds, returning: np.ndarray) -> np.ndarray:
        """Return the time if so many bytes return."""
        return seconds(returning, self.remake(returning), self.known, np.maximum)

    def remake(self, returning: np.ndarray) -> np.ndarray:
        """Return W(D - X)."""
        remade = np.maximum(self.excess - returning, 0.0)
        return _recompute_seconds(self.costs, self.num_bytes, remade)

    def narrow(self, seconds: _Seconds) -> _Operators:
        """Leave a third of the bytes out: the seconds are convex in them."""
        third = (self.high - self.low) / 3
        inner = np.stack((self.low + third, self.high - third))
        left, right = self.find_seconds(seconds, inner)
        better = left <= right
        low, high = np.where(better, self.low, inner[0]), np.where(better, inner[1], self.high)
        return self._replace(low=low, high=high)

    def prune(self, seconds: _Seconds) -> _Operators:
        """Leave operators out that another exceeds for all X that are left, or that are alike.

        W falls with X and all else grows, so that ends of the range bound the time within.
        """
        least = seconds(self.low, self.remake(self.high), self.known, np.maximum)
        most = seconds(self.high, self.remake(self.low), self.known, np.maximum)
        stays = most >= least.max()
        stays[stays] = _is_first(np.vstack((self.excess, self.known, self.num_bytes))[:, stays])
        low, high, excess, known, num_bytes = (each[..., stays] for each in self[:-1])
        return _Operators(low, high, excess, known, num_bytes, self.costs)


def _least(seconds: _Seconds, known: np.ndarray, excess: np.ndarray, forced: Forced) -> float:
    """Return the largest, over operators, of the least over X.

    Args:
        seconds: The time for X, W(D - X), the operators' columns of `known`, and a maximum of two.
        known: Of each operator, what the time depends on.
        excess: Of each operator: D.
        forced: Live bytes.
    """
    if not len(excess):
        return 0.0
    costs = [cost for cost, _ in forced.recomputable_by_cost]
    num_bytes = np.array([each for _, each in forced.recomputable_by_cost])
    num_bytes = num_bytes.reshape(len(costs), len(excess))
    recomputable_bytes = sum(forced.recomputable_bytes.values(), np.zeros_like(excess))
    low, high = np.maximum(excess - recomputable_bytes, 0.0), np.maximum(excess, 0.0)
    rest = _Operators(low, high, excess, known, num_bytes, costs)
    for number in range(_NUM_THIRDS if (low < high).any() else 0):
        if number % _NUM_THIRDS_AT_ONCE == 0:
            rest = rest.prune(seconds)
            if len(rest.excess) <= _FEW_OPERATORS:
                columns = zip(*(each.T.tolist() for each in rest[:-1]), strict=True)
                left = _NUM_THIRDS - number
                return max(_least_of_operator(seconds, costs, left, *each) for each in columns)
        rest = rest.narrow(seconds)
    return float(rest.find_seconds(seconds, (rest.low + rest.high) / 2).max(initial=0.0))


def _is_first(columns: np.ndarray) -> np.ndarray:
    """Return which columns are none of those before them."""
    first = np.zeros(columns.shape[1], bool)
    keys = map(bytes, np.ascontiguousarray(columns.T))
    first[[*{key: place for place, key in reversed([*enumerate(keys)])}.values()]] = True
    return first


def _least_of_operator(
    seconds: _Seconds,
    costs: Sequence[float],
    num_thirds: int,
    low: float,
    high: float,
    excess: float,
    known: Sequence[float],
    num_bytes: Sequence[float],
) -> float:
    """Return the least over X, between two, of one operator; numbers are those of arrays."""
    classes = [(cost, each) for cost, each in zip(costs, num_bytes, strict=True) if each]

    def find_seconds(returning: float) -> float:
        left, remaking = max(excess - returning, 0.0), 0.0
        for cost, each in classes:
            if left <= each:
                remaking += left * cost
                break
            remaking += each * cost
            left -= each
        return seconds(returning, remaking, known, max)

    for _ in range(num_thirds):
        third = (high - low) / 3
        first, second = low + third, high - third
        if find_seconds(first) <= find_seconds(second):
            high = second
        else:
            low = first
    return max(0.0, find_seconds((low + high) / 2))


def _recompute_seconds(
    costs: Sequence[float], num_bytes: np.ndarray, remade: np.ndarray
) -> np.ndarray:
    """Return W: the least time in which so many bytes can be recomputed."""
    seconds, left = np.zeros_like(remade), remade
    for cost, own in zip(costs, num_bytes, strict=True):
        taken = np.minimum(left, own)
        left = left - taken
        seconds += taken * cost
    return seconds


_Found = dict[bool, tuple[tuple[float, ...], Forced]]
_found: dict[int, tuple[weakref.ref[StepGraph], _Found]] = {}  # by identities of graphs


def find_forced(graph: StepGraph, operator_seconds: Sequence[float], *, recompute: bool) -> Forced:
    """Find the bytes that are live when operators run.

    The last result is kept with the graph: checks of a plan ask for what its planner has asked.
    """
    entry, seconds = _found.get(id(graph)), tuple(operator_seconds)
    if entry is None or entry[0]() is not graph:
        pop, key = _found.pop, id(graph)
        entry = _found[key] = weakref.ref(graph, lambda _: pop(key, None)), {}
    known = entry[1].get(recompute)
    if known is None or known[0] != seconds:
        known = seconds, _find_forced(graph, seconds, recompute=recompute)
        if len(graph.operators) <= _MAX_KEPT:
            entry[1][recompute] = known
    return known[1]


def _find_forced(graph: StepGraph, operator_seconds: Sequence[float], *, recompute: bool) -> Forced:
    num_operators = len(graph.operators)
    ancestors, descendants = related = relatives(graph)
    seconds = np.asarray(operator_seconds, dtype=np.float64)
    here, first_values, anywhere = np.zeros((3, num_operators))
    recomputable_bytes: dict[int, np.ndarray] = {}
    costs = recompute_levels(graph, seconds) if recompute else {}
    for value, storage_index in enumerate(graph.storage_of_value):
        storage = graph.storages[storage_index]
        if not storage.num_bytes:
            continue
        producer, consumers = graph.producers[value], graph.consumers[value]
        at = _forced_at(graph, value, related)
        here[at] += storage.num_bytes
        if not storage.persistent:
            anywhere[at] += storage.num_bytes
        if storage.persistent and value == storage.initial:
            first_values[at] += storage.num_bytes
        level = costs.get(producer) if producer is not None else None
        if level is not None:
            inside = at.copy()  # operands and results of v are resident
            inside[[*consumers, producer]] = False
            at_level = recomputable_bytes.setdefault(level, np.zeros(num_operators))
            at_level[inside] += storage.num_bytes
    shared = np.array([saved_bytes(graph, index) for index in range(num_operators)], dtype=float)
    changed, changed_here = _changed_bytes(graph)
    persistent, constant = _persistent_bytes(graph, recompute=recompute)
    return Forced(
        here=here - shared - changed_here,
        first_values=first_values,
        anywhere=anywhere - shared - changed + persistent,
        constant_bytes=constant,
        seconds_before=_sums(ancestors, seconds),
        seconds_after=_sums(descendants, seconds) + seconds,
        recomputable_bytes=recomputable_bytes,
        ancestors=ancestors,
        descendants=descendants,
    )


def _forced_at(graph: StepGraph, value: int, related: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Return for each operator whether a value is live when it runs, in any order.

    It is where its producer runs, where its consumers do, and in between.
    """
    ancestors, descendants = related
    producer, consumers = graph.producers[value], list(graph.consumers[value])
    storage = graph.storages[graph.storage_of_value[value]]
    later = np.bitwise_or.reduce(ancestors[consumers], axis=0)  # of no consumer: nothing
    if storage.final == value and not storage.persistent:
        later = np.full_like(later, 255)  # it has to be there at the end
    live = later if producer is None else later & descendants[producer]
    at = np.unpackbits(live, count=len(graph.operators)).astype(bool)
    at[consumers if producer is None else [*consumers, producer]] = True
    return at


def _changed_bytes(graph: StepGraph) -> tuple[np.ndarray, np.ndarray]:
    """Return per operator the bytes it changes in place, without persistent ones, and all.

    Old and new value are one there.
    """
    changed, changed_here = np.zeros((2, len(graph.operators)))
    for index, operator in enumerate(graph.operators):
        for old, _ in operator.mutates:
            changed_here[index] += graph.num_bytes(old)
            if not graph.storages[graph.storage_of_value[old]].persistent:
                changed[index] += graph.num_bytes(old)
    return changed, changed_here


def forced_bytes(graph: StepGraph) -> np.ndarray:
    """Return F(v), the bytes that have to be live when each operator runs, in any order."""
    return find_forced(graph, [0.0] * len(graph.operators), recompute=False).here


def relatives(graph: StepGraph) -> tuple[np.ndarray, np.ndarray]:
    """Return the ancestors and descendants of each operator, as packed bits."""
    num_operators = len(graph.operators)
    width = (num_operators + 7) // 8
    ancestors = np.zeros((num_operators, width), dtype=np.uint8)
    descendants = np.zeros_like(ancestors)
    for operator, earlier in enumerate(graph.predecessors):
        for before in earlier:
            ancestors[operator] |= ancestors[before]
            ancestors[operator, before // 8] |= 128 >> (before % 8)
    for operator in reversed(range(num_operators)):
        for before in graph.predecessors[operator]:
            descendants[before] |= descendants[operator]
            descendants[before, operator // 8] |= 128 >> (operator % 8)
    return ancestors, descendants


def _sums(relatives: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return for each operator the seconds of its relatives, by a table for each eight of them."""
    columns = np.zeros((relatives.shape[1], 8))
    columns.ravel()[: len(seconds)] = seconds
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
    sums = np.zeros(len(seconds))
    for packed, table in zip(relatives.T, columns @ bits.T, strict=True):
        sums += table[packed]
    return sums


def recompute_levels(graph: StepGraph, seconds: np.ndarray) -> dict[int, int]:
    """Return the class of the seconds per byte of each operator that may run again."""
    costs = {}
    for index, operator in enumerate(graph.operators):
        made_bytes = sum(map(graph.num_bytes, operator.makes))
        if operator.recomputable and made_bytes:
            costs[index] = cost_level(float(seconds[index]) / made_bytes)
    return costs


def made_anew(graph: StepGraph, *, recompute: bool) -> set[int]:
    """Return persistent storages whose content an operator may make without having had it."""
    found = set()
    for index, operator in enumerate(graph.operators):
        made = operator.makes if recompute and operator.recomputable else operator.creates
        for value in made:
            assert graph.producers[value] == index
            found.add(graph.storage_of_value[value])
    return {index for index in found if graph.storages[index].persistent}


def _persistent_bytes(graph: StepGraph, *, recompute: bool) -> tuple[int, int]:
    """Return the bytes of persistent storages that are used, and of those that no step changes."""
    consumed = {
        storage
        for value, storage in enumerate(graph.storage_of_value)
        if graph.consumers[value] and graph.storages[storage].persistent
    }
    total = constant = 0
    for index in consumed - made_anew(graph, recompute=recompute):
        storage = graph.storages[index]
        total += storage.num_bytes
        constant += storage.num_bytes if storage.initial == storage.final else 0
    return total, constant
