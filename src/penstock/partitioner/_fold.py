"""Groups: operators and storages of a step that are partitioned alike.

Layers of one kind, and the time steps of a recurrent network, are the same operators on the same
shapes: they get the same split. Operators are in one group if they are the same call with the same
axes in modules of the same name but for numbers, and if that holds for what is around them too, two
operators deep (colour refinement); storages are, if the operators that use them are. A split that
is chosen for a group costs what all its members cost.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass

from penstock.graph.step_graph import StepGraph
from penstock.partitioner.axes import GraphAxes, OperatorAxes

_NUM_ROUNDS = 2
_NUMBERS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of a step's operators and storages.

    Attributes:
        of_operator: For each operator its group.
        of_storage: For each storage its group.
        operators: For each group of operators its members.
        storages: For each group of storages its members.
    """

    of_operator: tuple[int, ...]
    of_storage: tuple[int, ...]
    operators: tuple[tuple[int, ...], ...]
    storages: tuple[tuple[int, ...], ...]


def find_groups(graph: StepGraph, axes: GraphAxes, *, fold: bool = True) -> Groups:
    """Return the groups of a step; without `fold`, each operator and storage is its own."""
    if not fold:
        operators, storages = len(graph.operators), len(graph.storages)
        return _collect([*range(operators)], [*range(storages)])
    changed = {graph.storage_of_value[old] for each in graph.operators for old, _ in each.mutates}
    of_storage = _number(
        [
            (storage.kind, storage.num_bytes, axes.cuts[index], index in changed)
            for index, storage in enumerate(graph.storages)
        ]
    )
    calls = _number(
        [
            (operator.target, operator.phase, _NUMBERS.sub("#", operator.module), _shape(each))
            for operator, each in zip(graph.operators, axes.operators, strict=True)
        ]
    )
    of_operator = calls
    for _ in range(_NUM_ROUNDS):
        used: list[set[Hashable]] = [set() for _ in graph.storages]
        for number, each in zip(of_operator, axes.operators, strict=True):
            for place, use in enumerate((*each.inputs, *each.outputs)):
                used[use.storage].add((number, place))
        of_storage = _number(
            [(own, frozenset(near)) for own, near in zip(of_storage, used, strict=True)]
        )
        of_operator = _number(
            [
                (call, *(of_storage[use.storage] for use in (*each.inputs, *each.outputs)))
                for call, each in zip(calls, axes.operators, strict=True)
            ]
        )
    return _collect(of_operator, of_storage)


def _shape(axes: OperatorAxes) -> Hashable:
    uses = (*axes.inputs, *axes.outputs)
    first = [uses.index(use) for use in uses]  # operands that are one are one in all members
    of_uses = ((u.num_bytes, u.axis_of_loop, u.blocked) for u in uses)
    return axes.names, axes.sizes, *first, *of_uses


def _number(keys: list[Hashable]) -> list[int]:
    """Return the same number for the same key, in order of first appearance."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _collect(of_operator: list[int], of_storage: list[int]) -> Groups:
    found = []
    for numbers in (of_operator, of_storage):
        members: list[list[int]] = [[] for _ in range(max(numbers, default=-1) + 1)]
        for index, number in enumerate(numbers):
            members[number].append(index)
        found.append(tuple(map(tuple, members)))
    return Groups(tuple(of_operator), tuple(of_storage), found[0], found[1])
