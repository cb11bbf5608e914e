"""Layout: offset assignment of a plan's copies in host memory and in the file.

A plan places values in the arena only. The packer places their copies below the device, from the
intervals that the plan gives them.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from penstock.graph import StepGraph
from penstock.memory import Tier
from penstock.memory.pages import DIRECT_IO_BYTES, round_up
from penstock.planner import Buffer, Plan, pack

_PACK_SECONDS = 1.0
# Direct I/O takes such addresses without a copy, and such offsets of a file.
_ALIGNMENT_BYTES = {Tier.HOST: 512, Tier.FILE: DIRECT_IO_BYTES}


class Layout(NamedTuple):
    """Offsets of a plan's copies below the device.

    Attributes:
        offsets: For each tier and each copy there (index in `plan.copies`) its first byte in the
            tier's block. Copies of one value that meet at the step boundary share a place.
        num_bytes: For each tier the bytes of the block; 0 if the plan does not use it.
        homes: For each tier the places that last from step to step, by the storages' names.
    """

    offsets: dict[Tier, dict[int, int]]
    num_bytes: dict[Tier, int]
    homes: dict[Tier, dict[str, int]]


def lay_out_copies(graph: StepGraph, plan: Plan, others: Sequence[Layout] = ()) -> Layout:
    """Assign offsets to the copies of a plan.

    A home that has a place in another plan's layout keeps it, so that nothing has to move when
    plans take turns in the same blocks.
    """
    layout = Layout({}, {Tier.DEVICE: plan.arena_bytes}, {})
    for tier, alignment in _ALIGNMENT_BYTES.items():
        known = {name: offset for other in others for name, offset in other.homes[tier].items()}
        groups = list(_group_copies(graph, plan, tier))
        names = [_name_home(graph, plan, group) for group in groups]
        buffers = _fix_homes([_buffer_of(plan, each, alignment) for each in groups], names, known)
        packing = pack(buffers, None, _PACK_SECONDS, 0)
        places = list(zip(groups, names, packing.offsets, strict=True))
        layout.offsets[tier] = {index: at for group, _, at in places for index in group}
        layout.num_bytes[tier] = packing.height
        layout.homes[tier] = known | {name: at for _, name, at in places if name is not None}
    return layout


def _name_home(graph: StepGraph, plan: Plan, group: list[int]) -> str | None:
    """Return the name of the storage whose home a group is; None if it is no home."""
    copy = plan.copies[group[0]]
    storage = graph.storage(copy.value)
    begins = copy.start == 0 and copy.value == storage.initial
    goes_on = copy.end > len(plan.order) and copy.value == storage.final
    return storage.name if storage.persistent and (begins or goes_on) else None


def _fix_homes(
    buffers: list[Buffer], names: list[str | None], known: Mapping[str, int]
) -> list[Buffer]:
    """Fix homes at their offsets in other plans, as far as these do not overlap."""
    taken: list[tuple[int, int]] = []
    fixed = []
    for buffer, name in zip(buffers, names, strict=True):
        begin = known.get(name) if name is not None else None
        end = (begin or 0) + buffer.size
        if begin is None or any(begin < high and low < end for low, high in taken):
            fixed.append(buffer)
            continue
        taken.append((begin, end))
        fixed.append(dataclasses.replace(buffer, offset=begin))
    return fixed


def _group_copies(graph: StepGraph, plan: Plan, tier: Tier) -> Iterator[list[int]]:
    """Group the copies that share a place: one that begins the step, and those of its storage that
    end it.
    """
    num_positions = len(plan.order)
    written = {
        (transfer.value, transfer.start)
        for transfer in plan.transfers
        if transfer.link.destination is tier
    }
    begins: dict[int, int] = {}  # by storage
    ends: defaultdict[int, list[int]] = defaultdict(list)
    singles = []
    for index, copy in enumerate(plan.copies):
        if copy.tier is not tier:
            continue
        storage = graph.storage(copy.value)
        carried = storage.persistent and copy.start == 0 and copy.value == storage.initial
        if carried and (copy.value, 0) not in written:
            begins[graph.storage_of_value[copy.value]] = index
        elif storage.persistent and copy.value == storage.final and copy.end == num_positions:
            ends[graph.storage_of_value[copy.value]].append(index)
        else:
            singles.append(index)
    yield from ([index] for index in singles)
    for number, index in begins.items():
        yield [index, *ends.pop(number, [])]
    for rest in ends.values():
        yield from ([index] for index in rest)


def _buffer_of(plan: Plan, group: list[int], alignment: int) -> Buffer:
    """Return a group as the packer's buffer; it is free in the gaps between its copies."""
    num_positions = len(plan.order)
    copies = [plan.copies[index] for index in group]
    taken = []
    for copy in copies:
        taken.append((copy.start, min(copy.end, num_positions)))
        if copy.end > num_positions:  # it wraps around
            taken.append((0, copy.end - num_positions))
    taken.sort()
    gaps, reached = [], taken[0][1]
    for start, end in taken[1:]:
        if start > reached:
            gaps.append((reached, start))
        reached = max(reached, end)
    size = round_up(copies[0].num_bytes, alignment)
    return Buffer(taken[0][0], reached, size, alignment=alignment, gaps=tuple(gaps))
