"""The least memory of an inference graph: for each operator alone (M_R), for any order (M_P).

Both are budgets of COSMA's tables (arXiv 2311.18246, V-A2); between them values have to leave.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import NamedTuple

from penstock.graph import StepGraph
from penstock.planner.bounds import forced_bytes, working_set
from penstock.planner.exact._addresses import aligned_graph

_MAX_STATES = 200_000


class Peak(NamedTuple):
    """The least peak of any order in which nothing leaves.

    Attributes:
        num_bytes: The peak, workspace included.
        order: An order that has it.
        proved: Whether no order has a lower one; else the search ended early.
    """

    num_bytes: int
    order: tuple[int, ...]
    proved: bool


def min_working_set(graph: StepGraph) -> int:
    """Return M_R, the least memory with which every operator alone can run (COSMA, V-A2).

    Example:
        >>> min_working_set(graph)  # doctest: +SKIP
        9408

    Args:
        graph: The step.

    Returns:
        Bytes of the largest operator's operands and results, aligned, and the largest workspace.
    """
    return working_set(aligned_graph(graph)).num_bytes


def min_peak(graph: StepGraph, *, max_states: int = _MAX_STATES) -> Peak:
    """Find M_P, the least peak of any order without spills (COSMA's "MPMF").

    Best-first search over sets S of operators that have run; the live bytes L(S) depend on S alone:

        peak(S + v) = max(peak(S), L(S) + bytes that v makes - bytes reused in place).

    An operator that frees at least what it makes, within the peak so far, runs at once: exchanging
    it with operators that run before it in any other order never needs more.

    Example:
        >>> min_peak(graph).num_bytes  # doctest: +SKIP
        12544

    Args:
        graph: A step without persistent storages.
        max_states: Sets after which the search goes on greedily from the best one.

    Returns:
        The peak with an order that has it.

    Raises:
        ValueError: The graph has persistent storages with bytes.
    """
    _require_inference(graph)
    return _PeakSearch(graph).run(max_states)


class _PeakSearch:
    """A search over sets of operators, written as the bits of an integer."""

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.before = [_bits(earlier) for earlier in graph.predecessors]
        self.after: list[list[int]] = [[] for _ in graph.operators]
        for operator, earlier in enumerate(graph.predecessors):
            for index in earlier:
                self.after[index].append(operator)
        final = {storage.final for storage in graph.storages}
        self.readers = [
            -1 if value in final else _bits(graph.consumers[value])
            for value in range(len(graph.storage_of_value))
        ]
        self.given = sum(
            graph.num_bytes(value)
            for value, producer in enumerate(graph.producers)
            if producer is None and graph.consumers[value]
        )

    def transition(self, done: int, live: int, operator: int) -> tuple[int, int]:
        """Bytes while the operator runs, and after it."""
        node, graph = self.graph.operators[operator], self.graph
        now = done | 1 << operator
        changed = {old for old, _ in node.mutates}
        made = sum(map(graph.num_bytes, node.creates))
        dead = {value for value in node.reads if not self.readers[value] & ~now}
        shared = sum(graph.num_bytes(read) for read, _ in find_reuses(graph, operator, dead))
        during = live + made - shared
        after = live + made - sum(map(graph.num_bytes, dead))
        for value in node.makes:
            if not self.readers[value]:  # it is never read
                after -= graph.num_bytes(value)
        assert not changed & dead
        return during, after

    def run(self, max_states: int) -> Peak:
        graph = self.graph
        everything = (1 << len(graph.operators)) - 1
        ready = frozenset(i for i, bits in enumerate(self.before) if not bits)
        # No order is below the bytes that an operator forces to be live.
        least = max(self.given, int(forced_bytes(graph).max(initial=0)))
        heap: list[tuple[int, int, int, int]] = [(least, 0, self.given, 0)]
        parent: dict[int, tuple[int, int]] = {}
        ready_of = {0: ready}
        best = {0: least}
        proved = True
        while heap:
            peak, _, live, done = heapq.heappop(heap)
            if done == everything:
                order = _read_order(parent, done)
                return Peak(peak + graph.workspace_bytes, order, proved)
            if peak > best.get(done, peak):
                continue
            if len(best) > max_states:
                proved = False
                heap = []  # go on from here alone
                best = {done: peak}
            choices = []
            for operator in ready_of[done]:
                during, after = self.transition(done, live, operator)
                choices.append((max(peak, during), after, operator))
            free = [c for c in choices if c[0] == peak and c[1] <= live]
            for higher, after, operator in free[:1] or choices:
                reached = done | 1 << operator
                if higher < best.get(reached, higher + 1):
                    best[reached] = higher
                    parent[reached] = done, operator
                    ready_of[reached] = ready_of[done] - {operator} | {
                        later for later in self.after[operator] if not self.before[later] & ~reached
                    }
                    heapq.heappush(heap, (higher, -reached.bit_count(), after, reached))
        raise AssertionError("a graph has an order")


def _read_order(parent: dict[int, tuple[int, int]], done: int) -> tuple[int, ...]:
    order: list[int] = []
    while done:
        done, last = parent[done]
        order.append(last)
    return tuple(reversed(order))


def _bits(operators: Sequence[int]) -> int:
    return sum(1 << operator for operator in set(operators))


def _require_inference(graph: StepGraph) -> None:
    for storage in graph.storages:
        if storage.persistent and storage.num_bytes:
            raise ValueError(
                f"storage {storage.name!r} lives from step to step; the least peak is known for "
                "inference graphs only, whose parameters are in a memory of their own: give such "
                "storages no bytes"
            )


def find_reuses(graph: StepGraph, index: int, dead: Collection[int]) -> list[tuple[int, int]]:
    """Return pairs (read, created) of equal bytes: results that reuse dead operands' places."""
    reused: set[int] = set()
    pairs = []
    for read, created in graph.operators[index].may_overwrite:
        is_equal = graph.num_bytes(read) == graph.num_bytes(created) > 0
        if is_equal and read in dead and not {read, created} & reused:
            reused |= {read, created}
            pairs.append((read, created))
    return pairs
