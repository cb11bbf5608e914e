"""Records of the checker's replay: versions in places, events of boundaries, and accesses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.graph import StepGraph
from penstock.memory import Tier
from penstock.planner._plan import Plan

Version = tuple[int, int]  # value, step
VersionPlace = tuple[Tier, Version]
TransferRun = tuple[int, int]  # transfer, step


@dataclass(slots=True)
class HeldVersion:
    """A version in a place: complete or not, with the transfers that read and write it."""

    start: int  # address; below the device there are none
    end: int
    last: int  # boundary up to which it is there, counted through all steps
    complete: bool = False
    readers: set[TransferRun] = field(default_factory=set)  # transfers that read it
    writer: TransferRun | None = None  # the transfer that writes it


@dataclass
class BoundaryEvents:
    """Events of a boundary; ends that lie in the next step have a boundary beyond N."""

    transfers_begin: list[int] = field(default_factory=list)
    transfers_end: list[int] = field(default_factory=list)
    placements_end: list[int] = field(default_factory=list)
    copies_end: list[int] = field(default_factory=list)
    copies_begin: dict[tuple[Tier, int], int] = field(default_factory=dict)
    placements_begin: dict[int, int] = field(default_factory=dict)


def list_accesses(
    graph: StepGraph, plan: Plan
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], list[tuple[tuple[int, int], ...]]]:
    """Return values needed, made and overwritten at each position; second runs may do less."""
    needs, makes, mutates = [], [], []
    seen: set[int] = set()
    for index in plan.order:
        operator = graph.operators[index]
        partly = index in seen and operator.recompute_args is not None
        pairs = () if partly else operator.mutates
        needs.append(tuple(dict.fromkeys(operator.reads + tuple(old for old, _ in pairs))))
        makes.append(operator.creates + tuple(new for _, new in pairs))
        mutates.append(pairs)
        seen.add(index)
    return needs, makes, mutates


def list_renames(graph: StepGraph) -> dict[int, tuple[int, bool]]:
    """Return, for each value that is filed as what the step before ends with, that value, and
    whether all steps have the same.
    """
    return {
        each.initial: (each.final, each.initial == each.final)
        for each in graph.storages
        if each.persistent and each.initial is not None and each.final is not None
    }


def describe_state(
    blocks: Mapping[VersionPlace, HeldVersion],
    renames: Mapping[int, tuple[int, bool]],
    step: int,
    boundary: int,
) -> dict[VersionPlace, tuple[object, ...]]:
    """Return what is held at a boundary, with steps and boundaries counted from there."""

    def shift(version: Version) -> Version:
        value, its_step = version
        return version if renames.get(value) == (value, True) else (value, its_step - step)

    return {
        (tier, shift(version)): (
            *(block.start, block.end, block.last - boundary, block.complete),
            {(index, its_step - step) for index, its_step in block.readers},
            None if block.writer is None else (block.writer[0], block.writer[1] - step),
        )
        for (tier, version), block in blocks.items()
    }
