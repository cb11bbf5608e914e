"""Recomputation: which values are dropped after the forward pass, and the order that makes them
again just before they are needed.

What is dropped is decided by storage. A dropped storage's value is made again by running the
operators that made it, on operands that are there, that are brought back, or that are made again
themselves; operands live on until then. A parameter that was updated in the meantime cannot be had
back, and an order that would need it does not exist.

What is made again stays until its last use. Where it is large and its uses are far apart, it may be
given up after each of them, and made again for each: such a storage is dropped *briefly* too, which
sets of storages write as its complement (`~storage`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from penstock.graph import Phase, StepGraph

_MAX_CHAIN = 512  # operators run again for one operand


def briefly(items: Iterable[int]) -> frozenset[int]:
    """What says of storages that they are given up after each use of the backward pass."""
    return frozenset(~item for item in items)


class Recomputation:
    """How the values of a graph can be made again.

    Args:
        graph: The graph.

    Attributes:
        chain_of: For each storage that can be dropped the operators that make it, in order.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self._storage_of = graph.storage_of_value
        # By operator; read many times.
        self.needs = [operator.needs for operator in graph.operators]
        self.makes = [operator.makes for operator in graph.operators]
        self.made_in = [{self._storage_of[value] for value in makes} for makes in self.makes]
        self.touched = [
            {self._storage_of[value] for value in (*needs, *makes)}
            for needs, makes in zip(self.needs, self.makes, strict=True)
        ]
        self.is_forward = [operator.phase is Phase.FORWARD for operator in graph.operators]
        writers: dict[int, list[int]] = {}
        for index, operator in enumerate(graph.operators):
            for value in operator.makes:
                writers.setdefault(self._storage_of[value], []).append(index)
        self._writers = writers
        self.chain_of = {
            item: chain for item, chain in writers.items() if self._can_drop(item, chain)
        }

    def _can_drop(self, item: int, chain: list[int]) -> bool:
        storage = self.graph.storages[item]
        if storage.persistent or storage.initial is not None or storage.final is not None:
            return False
        return storage.num_bytes > 0 and all(self._runs_again(index, item) for index in chain)

    def _runs_again(self, index: int, item: int) -> bool:
        """Whether an operator may run again for the sake of an object."""
        operator = self.graph.operators[index]
        if not operator.recomputable:
            return False
        if operator.recompute_target is not None:
            return True
        return all(self._storage_of[new] == item for _, new in operator.mutates)

    def expand(self, order: Sequence[int], dropped: Collection[int]) -> list[int] | None:
        """Put what makes the dropped storages again before the operators that need them.

        Args:
            order: Operators, each once.
            dropped: Storages that are given up after their last use in the forward pass, and
                after their last use; the complements of those that are given up after each use in
                the backward pass.

        Returns:
            The longer order; None if an operand cannot be had.
        """
        return _Expansion(self, order, dropped).run()


class _Expansion:
    """One walk through an order."""

    def __init__(
        self, recomputation: Recomputation, order: Sequence[int], dropped: Collection[int]
    ) -> None:
        self.graph = recomputation.graph
        self.recomputation = recomputation
        self.order = order
        self.dropped = [item for item in dropped if item >= 0]
        self.brief = briefly(item for item in dropped if item < 0)
        self.content: dict[int, int] = {}  # object -> the value it holds now
        self.gone: set[int] = set()
        self.expanded: list[int] = []

    def run(self) -> list[int] | None:
        graph, storage_of = self.graph, self.graph.storage_of_value
        needs_of, makes_of = self.recomputation.needs, self.recomputation.makes
        made_in, content, gone = self.recomputation.made_in, self.content, self.gone
        for item, storage in enumerate(graph.storages):
            if storage.initial is not None:
                content[item] = storage.initial
        drop_after = self._drop_points()
        for position, index in enumerate(self.order):
            num_before = len(self.expanded)
            for value in needs_of[index]:
                item = storage_of[value]
                is_there = content.get(item) == value and item not in gone
                if not is_there and not self._provide(value, depth=0):
                    return None
            self.expanded.append(index)
            for value in makes_of[index]:
                content[storage_of[value]] = value
            if gone:
                gone -= made_in[index]
            if position in drop_after:
                gone.update(drop_after[position])
            if self.brief and not self.recomputation.is_forward[index]:
                touched = self.recomputation.touched
                ran = self.expanded[num_before:]
                gone.update(item for run in ran for item in touched[run] & self.brief)
        return self.expanded

    def _drop_points(self) -> dict[int, list[int]]:
        """After which positions each dropped storage is given up."""
        uses: dict[int, list[int]] = {item: [] for item in self.dropped}
        touched, dropped = self.recomputation.touched, frozenset(self.dropped)
        for position, index in enumerate(self.order):
            for item in touched[index] & dropped:
                uses[item].append(position)
        points: dict[int, list[int]] = {}
        for item, at in uses.items():
            if not at:
                continue
            # What nobody needs any more is not kept for those that are made again.
            points.setdefault(at[-1], []).append(item)
            ends = next((k for k, p in enumerate(at) if not self._is_forward(p)), len(at))
            if 0 < ends < len(at):
                points.setdefault(at[ends - 1], []).append(item)
        return points

    def _is_forward(self, position: int) -> bool:
        return self.recomputation.is_forward[self.order[position]]

    def _provide(self, value: int, depth: int) -> bool:
        """Make sure that an object holds a value, by running what makes it again if need be."""
        item = self.graph.storage_of_value[value]
        if self.content.get(item) == value and item not in self.gone:
            return True
        chain = self.recomputation.chain_of.get(item)
        if chain is None or depth > _MAX_CHAIN:
            return False
        for index in chain:
            operator = self.graph.operators[index]
            needs = operator.reads if operator.recompute_target is not None else operator.needs
            makes = operator.creates if operator.recompute_target is not None else operator.makes
            for needed in needs:
                if not self._provide(needed, depth + 1):
                    return False
            if any(self._disturbs(made, item) for made in makes):
                return False
            self.expanded.append(index)
            for made in makes:
                other = self.graph.storage_of_value[made]
                self.content[other] = made
                self.gone.discard(other)
            if value in makes:
                return True
        return False

    def _disturbs(self, made: int, item: int) -> bool:
        """Whether making a value again would put back an object that has gone on since."""
        other = self.graph.storage_of_value[made]
        held = self.content.get(other)
        return other != item and held not in (None, made) and other not in self.gone
