"""One level of ranks: the choices of all groups, given those of the levels above.

Variables are groups of operators (by which axis to split them) and groups of storages (by which
axis to split them at rest, or not at all). Costs are bytes that a rank receives, weighted by its
link, and next to nothing for work that all ranks repeat; products are always divided. Bytes are
those that a rank holds at the operators where the step needs the most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.partitioner._elimination import Choices
from penstock.partitioner._mesh import PARTIAL, REPLICATED, Mesh, Placement, can_split, share
from penstock.partitioner._split import Model, Split, StepSplit
from penstock.partitioner.axes import is_heavy


@dataclass(frozen=True)
class Level:
    """The choices of a level.

    Attributes:
        model: The step.
        mesh: Levels of ranks up to this one.
        storages: For each group of storages its placements up to this level.
        operators: For each group of operators its splits up to this level.
        choices: A variable for each group of storages, then one for each of operators.
    """

    model: Model
    mesh: Mesh
    storages: tuple[tuple[Placement, ...], ...]
    operators: tuple[tuple[Split, ...], ...]
    choices: Choices

    def step_split(self, options: np.ndarray) -> StepSplit:
        """Return the split of the step that options stand for."""
        num = len(self.storages)
        return StepSplit(
            self.mesh,
            tuple(each[o] for each, o in zip(self.storages, options[:num], strict=True)),
            tuple(each[o] for each, o in zip(self.operators, options[num:], strict=True)),
        )

    def options_of(self, step: StepSplit) -> np.ndarray | None:
        """Return the options that stand for a split; None if it is not among them."""
        found = []
        for options, chosen in zip(
            (*self.storages, *self.operators), (*step.placements, *step.splits), strict=True
        ):
            if chosen not in options:
                return None
            found.append(options.index(chosen))
        return np.array(found)


def make_level(
    model: Model,
    mesh: Mesh,
    above: StepSplit | None,
    critical: Mapping[int, float],
    skipped: frozenset[int] = frozenset(),
) -> Level:
    """Return the choices of the last level of a mesh.

    Args:
        model: The step.
        mesh: All levels up to this one.
        above: The split by the levels above; None at the first.
        critical: Operators at which bytes count, each with its weight.
        skipped: Groups of operators that cost nothing.
    """
    groups = model.groups
    storages = tuple(
        _storage_options(model, mesh, members[0], above.placements[group] if above else ())
        for group, members in enumerate(groups.storages)
    )
    operators = tuple(
        _operator_options(model, mesh, members[0], above.splits[group] if above else ())
        for group, members in enumerate(groups.operators)
    )
    choices = Choices()
    for options in (*storages, *operators):
        choices.variable(len(options))
    level = Level(model, mesh, storages, operators, choices)
    _add_resident_bytes(level, critical)
    for group in set(range(len(operators))) - skipped:
        _add_operator(level, group, critical)
    return level


def _storage_options(
    model: Model, mesh: Mesh, storage: int, prefix: Placement
) -> tuple[Placement, ...]:
    options = [(*prefix, REPLICATED)]
    options += [
        (*prefix, axis)
        for axis in reversed(range(len(model.extents[storage])))
        if _fits(model.extents[storage][axis], (*prefix, axis), mesh)
    ]
    if model.may_be_partial(storage):
        options.append((*prefix, PARTIAL))
    return tuple(options)


def _operator_options(model: Model, mesh: Mesh, operator: int, prefix: Split) -> tuple[Split, ...]:
    axes = model.axes.operators[operator]
    options = [
        (*prefix, axis)
        for axis, extent in enumerate(axes.sizes)
        if _fits(extent, (*prefix, axis), mesh)
    ]
    if not options or not is_heavy(model.graph.operators[operator].target):
        options.append((*prefix, REPLICATED))
    if axes.is_linear and axes.outputs and axes.outputs[0].storage not in model.changed:
        options.append((*prefix, PARTIAL))
    return tuple(options)


def _fits(extent: int, placement: Sequence[int], mesh: Mesh) -> bool:
    levels = tuple(level for level, axis in enumerate(placement) if axis == placement[-1])
    return can_split(extent, levels, mesh.sizes)


def _add_resident_bytes(level: Level, critical: Mapping[int, float]) -> None:
    """Add the bytes of storages at the critical operators."""
    model, groups = level.model, level.model.groups
    weights = np.zeros(len(model.graph.storages))
    for place, weight in critical.items():
        weights += weight * ((model.first <= place) & (place < model.last))
    for group, members in enumerate(groups.storages):
        num_bytes = sum(float(weights[each] * model.num_bytes[each]) for each in members)
        shares = [share(placement, level.mesh.sizes) for placement in level.storages[group]]
        level.choices.bytes[group] += num_bytes * np.array(shares)


def _add_operator(level: Level, group: int, critical: Mapping[int, float]) -> None:
    """Add an operator's repeated work, and its exchange with each storage that it uses."""
    model, mesh, choices = level.model, level.mesh, level.choices
    members = model.groups.operators[group]
    operator = model.graph.operators[members[0]]
    weight = sum(critical.get(each, 0.0) for each in members) if critical else 0.0
    variable, splits = len(level.storages) + group, level.operators[group]
    shares = np.array([share(split, mesh.sizes) for split in splits])
    choices.costs[variable] += [model.repeated_work(members, split, mesh) for split in splits]
    choices.bytes[variable] += weight * operator.workspace_bytes * shares
    for use in model.uses[group]:
        costs, extra = model.table(use.form, splits, level.storages[use.owner], mesh, use.is_output)
        choices.add_pair(
            variable, use.owner, len(members) * costs, weight * extra if weight else None
        )
