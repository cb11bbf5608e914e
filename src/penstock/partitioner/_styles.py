"""Styles: how a person splits a step, to start a search from and to compare with.

Axes of operators and storages that are the same axis, joined by the axis table from operator to
operator, are one class: the batch is one, found at the outermost axis of the inputs. A style says
which options operators and storages may take; a search over the others finds the rest.

- `"batch"`: data parallelism. Operators are split along the batch, parameters are replicated.
- `"fsdp"`: as `"batch"`, with parameters, gradients and optimizer state split at rest.
- `"tensor"`: products are split along axes of parameters, by columns or rows (Shoeybi et al.,
  "Megatron-LM", 2019); parameters are split at rest.
- `"chop"`: every tensor is split along one axis over all ranks, whatever that exchanges (the
  baseline "EqualChop" of Wang, Huang, Li, EuroSys 2019, section 7).
- `"greedy"` is no style: operators and storages take, one after the other, what is cheapest beside
  those before them.
"""

from __future__ import annotations

import numpy as np

from penstock.graph.step_graph import Kind
from penstock.partitioner._level import Level
from penstock.partitioner._split import Model
from penstock.partitioner.axes import is_heavy

STYLES = ("batch", "fsdp", "tensor")
CHOP, GREEDY = "chop", "greedy"
METHODS = ("auto", *STYLES, CHOP, GREEDY)
_UNWANTED = 1e24


class AxisClasses:
    """Classes of axes that are one."""

    def __init__(self, model: Model) -> None:
        self._parent: dict[tuple[str, int, int], tuple[str, int, int]] = {}
        self.model = model
        for index, axes in enumerate(model.axes.operators):
            for use in (*axes.inputs, *axes.outputs):
                for loop, axis in enumerate(use.axis_of_loop):
                    if axis is not None:
                        self._join(("operator", index, loop), ("storage", use.storage, axis))
        graph = model.graph
        self.batch = {
            self.find(("storage", index, len(model.extents[index]) - 1))
            for index, storage in enumerate(graph.storages)
            if storage.kind is Kind.INPUT and model.extents[index]
        }

    def find(self, item: tuple[str, int, int]) -> tuple[str, int, int]:
        """Return the class of an axis, by one of its members."""
        while (above := self._parent.get(item, item)) != item:
            self._parent[item] = self._parent.get(above, above)
            item = above
        return item

    def _join(self, a: tuple[str, int, int], b: tuple[str, int, int]) -> None:
        first, second = self.find(a), self.find(b)
        if first != second:
            self._parent[first] = second

    def is_batch(self, kind: str, index: int, axis: int) -> bool:
        """Return whether an axis is the batch's."""
        return axis >= 0 and self.find((kind, index, axis)) in self.batch


def price_style(level: Level, classes: AxisClasses, style: str) -> list[np.ndarray]:
    """Return the cost of options that a style does not take, for each variable."""
    model = level.model
    added = []
    for members, options in zip(model.groups.storages, level.storages, strict=True):
        index = members[0]
        storage = model.graph.storages[index]
        is_state = storage.kind in (Kind.PARAMETER, Kind.OPTIMIZER_STATE, Kind.GRADIENT)
        is_named = is_state or style == CHOP
        has_split = any(option[-1] >= 0 for option in options)
        wants_split = is_named and style != "batch" and has_split
        added.append(
            np.array(
                [_UNWANTED * (is_named and (option[-1] >= 0) != wants_split) for option in options]
            )
        )
    for members, options in zip(model.groups.operators, level.operators, strict=True):
        index = members[0]
        heavy = is_heavy(model.graph.operators[index].target)
        batch = [classes.is_batch("operator", index, option[-1]) for option in options]
        wanted = (not each for each in batch) if style == "tensor" else batch
        free = not heavy or style == CHOP or (style != "tensor" and not any(batch))
        added.append(np.array([0.0 if free or each else _UNWANTED for each in wanted]))
    return added


def choose_greedily(level: Level) -> np.ndarray:
    """Return the options of variables that are chosen one after the other, as the program runs."""
    choices, groups = level.choices, level.model.groups
    num = len(level.storages)
    order: list[int] = []
    for group, members in enumerate(groups.operators):
        axes = level.model.axes.operators[members[0]]
        order += [groups.of_storage[use.storage] for use in axes.inputs]
        order.append(num + group)
        order += [groups.of_storage[use.storage] for use in axes.outputs]
    near: dict[int, list[tuple[int, np.ndarray]]] = {}
    for (a, b), table in choices.pair_costs.items():
        near.setdefault(a, []).append((b, table))
        near.setdefault(b, []).append((a, table.T))
    options = np.zeros(len(choices.num_options), dtype=int)
    chosen: set[int] = set()
    for v in dict.fromkeys(order):
        costs = choices.costs[v].copy()
        for other, table in near.get(v, ()):
            costs += table[:, options[other]] if other in chosen else table.min(axis=1)
        options[v] = int((costs + 1e-6 * choices.bytes[v]).argmin())
        chosen.add(v)
    return options
