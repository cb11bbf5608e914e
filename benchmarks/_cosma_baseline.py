"""What COSMA is compared with: TFLite's linear arena in the given order, with Belady's rule.

Tensors are placed when they are made or come back, each in the smallest hole of the arena that
holds it (best fit), and are not moved. Where no hole is large enough, those that no operand of the
running operator is leave, the one that is needed last first (Belady), until there is one. Where the
operands themselves are in the way, the fewest bytes of them leave and come back elsewhere at once.
What leaves is written once, if it is needed again; what comes back is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from penstock.graph import StepGraph


def belady_traffic(graph: StepGraph, device_bytes: int) -> int | None:
    """Replay a graph in its own order.

    Args:
        graph: An inference graph; each operator makes one value.
        device_bytes: Of the arena.

    Returns:
        The bytes written and read beyond the compulsory ones; None if an operator does not fit.
    """
    return _Replay(graph, device_bytes).run()


class _Replay:
    def __init__(self, graph: StepGraph, device_bytes: int) -> None:
        self.graph, self.device_bytes = graph, device_bytes
        end = len(graph.operators)
        self.uses = [sorted(consumers) for consumers in graph.consumers]
        for storage in graph.storages:
            if storage.final is not None:
                self.uses[storage.final].append(end)
        self.offset_of: dict[int, int] = {}
        self.written: set[int] = set()
        self.traffic = 0

    def run(self) -> int | None:
        """All operators; returns the traffic."""
        for position, operator in enumerate(self.graph.operators):
            for value in operator.reads:
                if value not in self.offset_of:
                    if not self._place(value, position):
                        return None
                    self.traffic += self.graph.num_bytes(value)
            for value in operator.creates:
                if not self._place(value, position):
                    return None
            for value in list(self.offset_of):
                if not any(use > position for use in self.uses[value]):
                    del self.offset_of[value]
        return self.traffic

    def _place(self, value: int, position: int) -> bool:
        operator = self.graph.operators[position]
        pinned = {*operator.reads, *operator.creates}
        while True:
            offset = self._best_fit(self.graph.num_bytes(value), self.offset_of)
            if offset is not None:
                self.offset_of[value] = offset
                return True
            victims = [other for other in self.offset_of if other not in pinned]
            if not victims:
                return self._move(value)
            self._evict(max(victims, key=lambda other: (self._next_use(other, position), other)))

    def _next_use(self, value: int, position: int) -> int:
        return next(use for use in self.uses[value] if use > position)

    def _evict(self, value: int) -> None:
        del self.offset_of[value]
        if value not in self.written:
            self.written.add(value)
            self.traffic += self.graph.num_bytes(value)

    def _best_fit(self, num_bytes: int, offset_of: Mapping[int, int]) -> int | None:
        places = sorted((offset, self.graph.num_bytes(v)) for v, offset in offset_of.items())
        holes, end = [], 0
        for offset, taken in [*places, (self.device_bytes, 0)]:
            if offset - end >= num_bytes:
                holes.append((offset - end, end))
            end = max(end, offset + taken)
        return min(holes)[1] if holes else None

    def _move(self, value: int) -> bool:
        """Only operands are left: the fewest bytes of them change their place."""
        values = sorted(self.offset_of)
        sets = [
            moved
            for count in range(1, len(values) + 1)
            for moved in itertools.combinations(values, count)
        ]
        for moved in sorted(sets, key=lambda each: sum(map(self.graph.num_bytes, each))):
            kept = {other: at for other, at in self.offset_of.items() if other not in moved}
            for order in itertools.permutations((*moved, value)):
                placed = self._all_placed(kept, order)
                if placed is not None:
                    for other in moved:
                        self._evict(other)
                        self.traffic += self.graph.num_bytes(other)
                    self.offset_of = placed
                    return True
        return False

    def _all_placed(self, kept: Mapping[int, int], values: Iterable[int]) -> dict[int, int] | None:
        placed = dict(kept)
        for value in values:
            offset = self._best_fit(self.graph.num_bytes(value), placed)
            if offset is None:
                return None
            placed[value] = offset
        return placed
