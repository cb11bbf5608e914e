"""Groups of operators that may run one right after the other: fewer orders to choose from.

Two exchange arguments. Take any order with its residency; it moves and needs no more bytes if

- b *follows* a at once, where b needs only what a needs or makes, its results all reuse places of
  what a has made (or it makes the last change of a persistent storage in the step): the bytes that
  are on the device between the two are then those of b's result instead of a's;
- a *precedes* b at once, where a reads only what b needs, and only b needs what a makes: the bytes
  that are on the device between the two are then those that a changes.

In both, no operator that has to run between the two may exist. Inputs are on the device while the
first operator runs, and results while the last one does: b is not moved if it may be the last, nor
a if it may be the first, where another one in its place would need more bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from penstock.graph import StepGraph
from penstock.planner.bounds import relatives
from penstock.planner.exact._peak import find_reuses


@dataclass(frozen=True)
class OperatorGroups:
    """Operators that stay together, and certain orders between them."""

    # Operators that run one right after the other, in the order given. Operators without bytes that
    # wait for none with bytes are a group that runs first of all.
    groups: list[list[int]]
    ancestors: list[set[int]]  # per operator those that certainly run before it
    descendants: list[set[int]]  # per operator those that certainly run after it

    def free_pairs(self) -> list[tuple[int, int]]:
        """Return pairs of groups (indices) of which either may run first."""
        heads = [group[0] for group in self.groups]
        return [
            (a, b)
            for (a, first), (b, second) in itertools.combinations(enumerate(heads), 2)
            if first not in self.ancestors[second] and second not in self.ancestors[first]
        ]


def group_operators(graph: StepGraph, *, at_ends: bool = True) -> OperatorGroups:
    """Group operators that may run one right after the other, in an order of least traffic.

    `at_ends`: whether inputs have to be there when the step begins, and results when it ends.
    """
    ancestors, descendants = (
        [set(np.flatnonzero(np.unpackbits(row)).tolist()) for row in rows]
        for rows in relatives(graph)
    )
    front = _first_group(graph)
    passing = [s for s in graph.storages if s.num_bytes and not s.persistent]
    is_given = at_ends and any(storage.initial is not None for storage in passing)
    is_read = at_ends and any(storage.final is not None for storage in passing)
    groups: dict[int, list[int]] = {}  # by their last member
    for operator, earlier in enumerate(graph.predecessors):
        if operator in front:
            continue
        for last in earlier:
            is_next = last in groups and set(earlier) - front <= ancestors[last] | {last}
            is_next = is_next and (bool(descendants[operator]) or not is_read)
            if is_next and _may_follow(graph, last, operator):
                groups[operator] = [*groups.pop(last), operator]
                break
        else:
            groups[operator] = [operator]
    groups = {members[0]: members for members in groups.values()}  # by their first
    free_first = is_given and not front
    _prepend_operators(graph, groups, ancestors, descendants, free_first=free_first)
    rest = [groups[first] for first in sorted(groups)]
    if front:
        rest = [sorted(front), *rest]
    return _with_certain_orders(graph, rest, has_front=bool(front))


def _prepend_operators(
    graph: StepGraph,
    groups: dict[int, list[int]],
    ancestors: list[set[int]],
    descendants: list[set[int]],
    *,
    free_first: bool,
) -> None:
    """Join single operators to the groups before which they may run; groups are by their first.

    `free_first`: whether operators that may be the first of the step stay as they are.
    """
    successors: list[set[int]] = [set() for _ in graph.operators]
    for operator, earlier in enumerate(graph.predecessors):
        for before in earlier:
            successors[before].add(operator)
    for operator in reversed(range(len(graph.operators))):
        may_be_first = free_first and not ancestors[operator]
        if len(groups.get(operator, ())) != 1 or may_be_first:
            continue
        for first in sorted(successors[operator]):
            is_next = first in groups and successors[operator] <= descendants[first] | {first}
            if is_next and _may_precede(graph, operator, first):
                groups[operator] = [operator, *groups.pop(first)]
                break


def separate_operators(graph: StepGraph) -> OperatorGroups:
    """Return each operator as a group of its own, in the program's order."""
    num_operators = len(graph.operators)
    return OperatorGroups(
        [[operator] for operator in range(num_operators)],
        [set(range(operator)) for operator in range(num_operators)],
        [set(range(operator + 1, num_operators)) for operator in range(num_operators)],
    )


def _first_group(graph: StepGraph) -> set[int]:
    """Return operators without bytes that wait for none with bytes: they may run anywhere."""
    front: set[int] = set()
    for index, operator in enumerate(graph.operators):
        touched = _with_bytes(graph, operator.needs + operator.makes)
        if (
            not touched
            and not operator.workspace_bytes
            and front.issuperset(graph.predecessors[index])
        ):
            front.add(index)
    return front


def _with_certain_orders(
    graph: StepGraph, groups: list[list[int]], *, has_front: bool
) -> OperatorGroups:
    """Return the groups with the orders between operators that follow from them."""
    group_of = {operator: number for number, group in enumerate(groups) for operator in group}
    front = {0} if has_front else set()
    before = [
        ({group_of[p] for operator in group for p in graph.predecessors[operator]} | front)
        - {number}
        for number, group in enumerate(groups)
    ]
    order: list[int] = []
    while len(order) < len(groups):
        order += [
            number
            for number in range(len(groups))
            if number not in order and before[number].issubset(order)
        ]
    for number in order:  # now all of them, not only the nearest
        before[number] = before[number].union(*(before[earlier] for earlier in before[number]))
    ancestors: list[set[int]] = [set() for _ in graph.operators]
    for number, group in enumerate(groups):
        earlier = {operator for other in before[number] for operator in groups[other]}
        for position, operator in enumerate(group):
            ancestors[operator] = earlier.union(group[:position])
    descendants: list[set[int]] = [set() for _ in graph.operators]
    for operator, earlier in enumerate(ancestors):
        for other in earlier:
            descendants[other].add(operator)
    return OperatorGroups(groups, ancestors, descendants)


def _may_follow(graph: StepGraph, before: int, after: int) -> bool:
    first, second = graph.operators[before], graph.operators[after]
    gone = {read for read, _ in first.may_overwrite}
    there = set(first.needs + first.makes) - gone
    if not set(_with_bytes(graph, second.needs)) <= there:
        return False
    dead = {
        value
        for value in first.makes
        if graph.consumers[value] == (after,)
        and graph.storages[graph.storage_of_value[value]].final != value
    }
    placed = {created for _, created in find_reuses(graph, after, dead)}
    if not set(_with_bytes(graph, second.creates)) <= placed:
        return False
    return all(
        old in first.makes or _is_whole_update(graph, old, new)
        for old, new in second.mutates
        if graph.num_bytes(old)
    )


def _may_precede(graph: StepGraph, before: int, after: int) -> bool:
    first, needed = graph.operators[before], graph.operators[after].needs
    made = _with_bytes(graph, first.makes)
    return (
        set(_with_bytes(graph, first.reads)) <= set(needed)
        and set(made) <= set(needed)
        and all(
            graph.consumers[value] == (after,)
            and graph.storages[graph.storage_of_value[value]].final != value
            for value in made
        )
    )


def _is_whole_update(graph: StepGraph, old: int, new: int) -> bool:
    storage = graph.storages[graph.storage_of_value[old]]
    return storage.persistent and (storage.initial, storage.final) == (old, new)


def _with_bytes(graph: StepGraph, values: Iterable[int]) -> list[int]:
    return [value for value in values if graph.num_bytes(value)]
