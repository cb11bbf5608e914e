"""Roles of storages: repeated layers are folded, so that a decision for one is made for all.

Two storages have the same role if operators of the same kind make and use them, on operands and for
results of the same roles, a few operators around. In a stack of equal layers that puts the n-th
storage of each layer together, except near the ends of the stack.
"""

from __future__ import annotations

from collections.abc import Hashable

from penstock.graph import StepGraph

_NUM_ROUNDS = 3  # operators around a storage that its role looks at, in either direction


def find_roles(graph: StepGraph) -> list[int]:
    """Find the role of each storage, as numbers from 0 on.

    This is colour refinement (Weisfeiler and Leman 1968) of the graph of operators and storages: a
    storage's colour in the next round is its own with those of the operators that touch it, an
    operator's its kind with the colours of what it touches, in order.
    """
    storage_of = graph.storage_of_value
    touched = [
        tuple(storage_of[value] for value in (*operator.needs, *operator.makes))
        for operator in graph.operators
    ]
    kinds = [(operator.target, operator.phase, len(operator.makes)) for operator in graph.operators]
    users: list[list[int]] = [[] for _ in graph.storages]
    for index, items in enumerate(touched):
        for item in dict.fromkeys(items):
            users[item].append(index)
    colours = _number([(storage.num_bytes, storage.kind) for storage in graph.storages])
    for _ in range(_NUM_ROUNDS):
        of_operator = _number(
            [
                (kind, *(colours[item] for item in items))
                for kind, items in zip(kinds, touched, strict=True)
            ]
        )
        # Each once: a tensor that all layers share has one more user with each of them.
        colours = _number(
            [
                (colour, *sorted({of_operator[index] for index in using}))
                for colour, using in zip(colours, users, strict=True)
            ]
        )
    return colours


def _number(keys: list[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
