"""Checkpointing: orders in which layers recompute values that forward would save for backward.

This is how frameworks see recomputation: a value that forward makes is dropped, and recomputed from
what is still there right before backward first needs it (Chen et al., arXiv 1604.06174).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from penstock.graph import Kind, Phase, StepGraph
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Budget
from penstock.planner._request import PlanRequest
from penstock.planner.paging._plan_paging import plan_by_paging


def plan_checkpointing(request: PlanRequest) -> Plan:
    """Plan a step in which nothing moves and every layer runs again for its backward pass.

    Args:
        request: The step; it may have all the memory that it needs.
    """
    recomputation = Recomputation(request.graph)
    dropped = {saved.value for saved in recomputation.saved() if saved.is_droppable}
    order, _ = recomputation.order_without(dropped)
    unlimited = replace(request, budget=Budget())
    return plan_by_paging(unlimited, order=order, method="checkpointing")


def name_layers(graph: StepGraph) -> tuple[str, ...]:
    """Return each operator's layer: the module's name up to the first number in it."""
    names: dict[str, str] = {}
    for operator in graph.operators:
        if operator.module not in names:
            parts = operator.module.split(".")
            numbers = [place for place, part in enumerate(parts) if part.isdigit()]
            names[operator.module] = ".".join(parts[: numbers[0] + 1]) if numbers else ""
    return tuple(names[operator.module] for operator in graph.operators)


@dataclass(frozen=True)
class Saved:
    """A value that forward makes and backward needs."""

    value: int
    num_bytes: int  # its bytes
    layer: str  # of the operator that makes it
    is_border: bool  # whether another layer's forward needs it, too
    # Operators that make it again, in order, if everything else that is saved is there; None if it
    # cannot be made again.
    chain: tuple[int, ...] | None

    @property
    def is_droppable(self) -> bool:
        """True if its recomputation stays within its layer: it begins at the layer's borders."""
        return self.chain is not None and not self.is_border


class Recomputation:
    """Orders of a graph in which saved values are dropped and recomputed.

    Args:
        graph: A captured step; its program order is forward, backward, optimizer.
    """

    def __init__(self, graph: StepGraph) -> None:
        self.graph = graph
        self.layers = name_layers(graph)
        self._num_values = len(graph.storage_of_value)
        self._num_operators = len(graph.operators)
        self._last_forward = [-1] * self._num_values
        self._first_later = [self._num_operators] * self._num_values
        for value, consumers in enumerate(graph.consumers):
            for index in consumers:
                if graph.operators[index].phase is Phase.FORWARD:
                    self._last_forward[value] = index
                else:
                    self._first_later[value] = min(self._first_later[value], index)

    def saved(self) -> tuple[Saved, ...]:
        """Return the values that forward saves, in the order in which they are made."""
        graph, found = self.graph, []
        kept = self._kept()
        for index, operator in enumerate(graph.operators):
            for value in operator.makes if operator.phase is Phase.FORWARD else ():
                if not self._saves(value):
                    continue
                readers = [i for i in graph.consumers[value] if i <= self._last_forward[value]]
                found.append(
                    Saved(
                        value,
                        graph.num_bytes(value),
                        self.layers[index],
                        any(self.layers[reader] != self.layers[index] for reader in readers),
                        self._find_chain(value, kept - {value}),
                    )
                )
        return tuple(found)

    def order_without(self, dropped: Collection[int]) -> tuple[tuple[int, ...], frozenset[int]]:
        """Return the program's order, with operators that recompute dropped values.

        Returns:
            The order, and the values that are dropped in it: a value is kept after all if it
            cannot be made again from what is there then.
        """
        kept = self._kept()
        remaining = {
            value
            for value in dropped
            if value in kept and self._find_chain(value, kept - {value}) is not None
        }
        while True:
            order, missing = self._try_order(remaining)
            if missing is None:
                return tuple(order), frozenset(remaining)
            # Recomputation may overwrite values that are still needed: then nothing is dropped.
            remaining = remaining - {missing} if missing in remaining else set()

    def _try_order(self, dropped: set[int]) -> tuple[list[int], int | None]:
        """Return the order, and a value that cannot be made again if there is one."""
        graph, order, present = self.graph, [], set(self._initial())
        for index, operator in enumerate(graph.operators):
            later = operator.phase is not Phase.FORWARD
            for value in operator.needs if later else ():
                if value in present:
                    continue
                chain = self._find_chain(value, present)
                if chain is None:
                    return order, value
                order += chain
                for again in chain:
                    _, made, overwritten = self._second_run(again)
                    present.update(made)
                    present -= overwritten
            order.append(index)
            present.update(
                value
                for value in operator.makes
                if later
                or (value not in dropped and self._first_later[value] < self._num_operators)
            )
            present.difference_update(old for old, _ in operator.mutates)
        return order, None

    def _kept(self) -> set[int]:
        """Return the values that are there in the backward pass, if nothing is dropped."""
        return self._initial() | {v for v in range(self._num_values) if self._saves(v)}

    def _initial(self) -> set[int]:
        return {s.initial for s in self.graph.storages if s.initial is not None}

    def _saves(self, value: int) -> bool:
        storage = self.graph.storages[self.graph.storage_of_value[value]]
        later = self._first_later[value]
        return (
            later < self._num_operators
            and self.graph.operators[later].phase is Phase.BACKWARD
            and storage.kind in (Kind.ACTIVATION, Kind.GRADIENT)
            and storage.final is None
            and storage.num_bytes > 0
        )

    def _second_run(self, index: int) -> tuple[tuple[int, ...], tuple[int, ...], set[int]]:
        """Return the values that a second run of an operator needs, makes and overwrites."""
        operator = self.graph.operators[index]
        if operator.recompute_args is not None:
            return operator.reads, operator.creates, set()
        return operator.needs, operator.makes, {old for old, _ in operator.mutates}

    def _find_chain(self, value: int, present: Collection[int]) -> tuple[int, ...] | None:
        """Return operators that make a value from what is present, or None if there are none."""
        chain: dict[int, None] = {}
        made: set[int] = set()
        # Depth first with an explicit stack: chains can be longer than Python's own.
        stack: list[tuple[int, bool]] = [(value, False)]
        while stack:
            wanted, expanded = stack.pop()
            if wanted in made or wanted in present:
                continue
            producer = self.graph.producers[wanted]
            if producer is None:  # what the step began with is overwritten
                return None
            operator = self.graph.operators[producer]
            if not operator.recomputable or operator.phase is not Phase.FORWARD:
                return None
            needs, makes, overwritten = self._second_run(producer)
            if wanted not in makes:
                return None
            if expanded:
                chain[producer] = None
                made.update(makes)
                made -= overwritten
                continue
            stack.append((wanted, True))
            stack += [(needed, False) for needed in needs]
        return tuple(chain)
