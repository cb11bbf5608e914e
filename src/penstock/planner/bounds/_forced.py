"""Bounds that hold for every order: what has to be alive when an operator runs, wherever it runs.

A value that an ancestor of operator v makes and a descendant of v needs is alive when v runs for
the first time. So are the operands and results of v, and every storage that lives from step to
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.graph import StepGraph
from penstock.planner._link_rates import LinkRates
from penstock.planner.bounds._fixed_order import saved_bytes
from penstock.planner.bounds._slots import cost_level, level_cost

MAX_OPERATORS = 20_000  # two bits for each pair: 100 MB


def forced_bounds(
    forced: Forced, operator_seconds: Sequence[float], capacity: int, rates: LinkRates
) -> dict[str, float]:
    """Bound the time of a step in any order.

    Let F(v) be the bytes of the values that are alive when v runs for the first time and needed
    after it in the same step; at least D = F(v) - M of them are missing then. Let X of these be
    brought back and the others be made again, which costs W(D - X), where the cheapest bytes come
    first; without recomputation X = D. All X come in after v has started. Those that the step has
    made (all but the persistent storages' first values, P bytes) went out before. So

        cut: T >= max(c(ancestors), (X - P) / out) + max(c(v) + c(descendants) + W(D - X), X / in).

    Let G(v) be the bytes of all persistent storages that some operator uses and of the values that
    are forced to be alive when v runs, Q of them in storages that no step changes. Whatever is
    missing at v comes back within a cycle, or is made again, and what is not in Q went out within
    the cycle before. With D = G(v) - M

        persistent: T >= max(C + W(D - X), X / in, (X - Q) / out).

    Both are at their least for the X that is best for the plan, and hold for the v that is worst.
    An operator that runs again makes all its results: bytes cost at least its time over their sum.
    Only values that an operator with `recomputable` makes can be made again. A persistent storage
    that such an operator changes does not count in G.

    Args:
        forced: Of `forced_of`, which says whether operators may run again.
        operator_seconds: Time of each operator.
        capacity: Bytes of the arena.
        rates: Of the links.

    Returns:
        The two bounds by name.
    """
    compute = float(sum(operator_seconds))

    def cut(brought: np.ndarray) -> np.ndarray:
        shed = np.maximum(forced.here - capacity - brought, 0.0)
        out = np.maximum(brought - forced.first_values, 0.0) / rates.outward
        after = forced.seconds_after + _remaking_seconds(forced, shed)
        return np.maximum(forced.seconds_before, out) + np.maximum(after, brought / rates.inward)

    def cycle(brought: np.ndarray) -> np.ndarray:
        shed = np.maximum(forced.anywhere - capacity - brought, 0.0)
        out = np.maximum(brought - forced.constant_bytes, 0.0) / rates.outward
        seconds = np.maximum(compute + _remaking_seconds(forced, shed), out)
        return np.maximum(seconds, brought / rates.inward)

    return {
        "cut": _least(cut, forced.here - capacity, forced),
        "persistent": _least(cycle, forced.anywhere - capacity, forced),
    }


@dataclass(frozen=True, kw_only=True)
class Forced:
    """Per operator v what is alive when it runs, in any order; bytes and seconds."""

    here: np.ndarray  # F(v)
    first_values: np.ndarray  # P: of those, first values of persistent storages
    anywhere: np.ndarray  # G(v)
    constant_bytes: int  # Q
    seconds_before: np.ndarray
    seconds_after: np.ndarray  # of v and its descendants
    remakable: dict[int, np.ndarray]  # by class of the seconds per byte: bytes of F(v)
    ancestors: np.ndarray  # packed bits
    descendants: np.ndarray

    def ancestors_of(self, operator: int) -> np.ndarray:
        """Return which operators run before one in any order, as booleans."""
        return np.unpackbits(self.ancestors[operator], count=len(self.here)).astype(bool)

    def descendants_of(self, operator: int) -> np.ndarray:
        """Return which operators run after one in any order, as booleans."""
        return np.unpackbits(self.descendants[operator], count=len(self.here)).astype(bool)


def _least(
    seconds: Callable[[np.ndarray], np.ndarray], excess: np.ndarray, forced: Forced
) -> float:
    """Return the largest, over operators, of the least over how much is brought back."""
    remakable = sum(forced.remakable.values(), np.zeros_like(excess))
    low, high = np.maximum(excess - remakable, 0.0), np.maximum(excess, 0.0)
    for _ in range(60):  # the seconds are convex in the bytes
        third = (high - low) / 3
        better = seconds(low + third) <= seconds(high - third)
        low, high = np.where(better, low, low + third), np.where(better, high - third, high)
    return float(seconds((low + high) / 2).max(initial=0.0))


def _remaking_seconds(forced: Forced, shed: np.ndarray) -> np.ndarray:
    """Return W: the least time in which so many bytes can be made again."""
    seconds, left = np.zeros_like(shed), shed.copy()
    for level, num_bytes in sorted(forced.remakable.items()):
        taken = np.minimum(left, num_bytes)
        seconds += taken * level_cost(level)
        left -= taken
    return seconds


def forced_of(graph: StepGraph, operator_seconds: Sequence[float], *, recompute: bool) -> Forced:
    """Find what is alive when operators run.

    Args:
        graph: The step, of at most `MAX_OPERATORS` operators.
        operator_seconds: Time of each operator.
        recompute: Whether operators may run again.
    """
    num_operators = len(graph.operators)
    ancestors, descendants = relatives(graph)
    seconds = np.asarray(operator_seconds, dtype=np.float64)
    here, first_values = np.zeros(num_operators), np.zeros(num_operators)
    anywhere = np.zeros(num_operators)
    remakable: dict[int, np.ndarray] = {}
    costs = remake_costs(graph, seconds) if recompute else {}
    everyone = np.full(ancestors.shape[1], 255, dtype=np.uint8)
    for value, storage_index in enumerate(graph.storage_of_value):
        storage = graph.storages[storage_index]
        if not storage.num_bytes:
            continue
        producer, consumers = graph.producers[value], graph.consumers[value]
        later = np.zeros_like(everyone)
        for consumer in consumers:
            later |= ancestors[consumer]
        if storage.final == value and not storage.persistent:
            later = everyone  # it has to be there at the end
        alive = later & (everyone if producer is None else descendants[producer])
        at = np.unpackbits(alive, count=num_operators).astype(bool)
        at[list(consumers)] = True
        if producer is not None:
            at[producer] = True
        here[at] += storage.num_bytes
        if not storage.persistent:
            anywhere[at] += storage.num_bytes
        if storage.persistent and value == storage.initial:
            first_values[at] += storage.num_bytes
        level = costs.get(producer) if producer is not None else None
        if level is not None:
            inside = at.copy()  # what v itself needs or makes is there
            inside[list(consumers)] = False
            inside[producer] = False
            remakable.setdefault(level, np.zeros(num_operators))[inside] += storage.num_bytes
    shared = np.array([saved_bytes(graph, index) for index in range(num_operators)], dtype=float)
    changed = np.zeros(num_operators)  # old and new are one
    changed_here = np.zeros(num_operators)
    for index, operator in enumerate(graph.operators):
        for old, _ in operator.mutates:
            changed_here[index] += graph.num_bytes(old)
            if not graph.storages[graph.storage_of_value[old]].persistent:
                changed[index] += graph.num_bytes(old)
    persistent, constant = _persistent_bytes(graph, recompute=recompute)
    return Forced(
        here=here - shared - changed_here,
        first_values=first_values,
        anywhere=anywhere - shared - changed + persistent,
        constant_bytes=constant,
        seconds_before=_sums(ancestors, seconds),
        seconds_after=_sums(descendants, seconds) + seconds,
        remakable=remakable,
        ancestors=ancestors,
        descendants=descendants,
    )


def forced_bytes(graph: StepGraph) -> np.ndarray:
    """Return F(v), the bytes that have to be alive when each operator runs, in any order."""
    return forced_of(graph, [0.0] * len(graph.operators), recompute=False).here


def relatives(graph: StepGraph) -> tuple[np.ndarray, np.ndarray]:
    """Ancestors and descendants of each operator, as packed bits."""
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


def remake_costs(graph: StepGraph, seconds: np.ndarray) -> dict[int, int]:
    """Seconds per byte of running each operator again, by `cost_level`, where it can."""
    costs = {}
    for index, operator in enumerate(graph.operators):
        made_bytes = sum(map(graph.num_bytes, operator.makes))
        if operator.recomputable and made_bytes:
            costs[index] = cost_level(float(seconds[index]) / made_bytes)
    return costs


def made_anew(graph: StepGraph, *, recompute: bool) -> set[int]:
    """Persistent storages of which an operator may make the content without having had it."""
    found = set()
    for index, operator in enumerate(graph.operators):
        made = operator.makes if recompute and operator.recomputable else operator.creates
        for value in made:
            assert graph.producers[value] == index
            found.add(graph.storage_of_value[value])
    return {index for index in found if graph.storages[index].persistent}


def _persistent_bytes(graph: StepGraph, *, recompute: bool) -> tuple[int, int]:
    """Bytes of persistent storages that are used, and of those that no step changes."""
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
