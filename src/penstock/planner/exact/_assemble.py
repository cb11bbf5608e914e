"""From decisions to a plan: when values are on the device and what moves says all the rest.

Copies follow from the transfers, times from `simulate`, addresses from a first fit over the cycle.
For plans of small graphs; the large ones come with addresses of their own.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

from penstock.errors import InfeasibleError
from penstock.graph import StepGraph, alignment_bytes
from penstock.memory import Tier
from penstock.planner._plan import Bound, Budget, Copy, Placement, Plan, Transfer
from penstock.planner._request import PlanRequest
from penstock.planner._simulate import simulate
from penstock.planner.packing import Buffer, pack


class Stay(NamedTuple):
    """A value is on the device, somewhere.

    Attributes:
        value: Index of the value.
        start: From this boundary, as of `Placement`.
        end: Up to this boundary, exclusive.
    """

    value: int
    start: int
    end: int


def assemble(
    request: PlanRequest,
    order: Sequence[int],
    stays: Sequence[Stay],
    transfers: Sequence[Transfer],
    *,
    offsets: Sequence[int] | None = None,
    bound: Bound | None = None,
    method: str = "assembled",
) -> Plan:
    """Complete a plan.

    Example:
        >>> assemble(request, order, stays, ()).peak_device_bytes  # doctest: +SKIP
        4096

    Args:
        request: The step, and what the plan is for.
        order: Operators by position.
        stays: When values are on the device. A stay that ends at the operator that writes over it
            is handed over.
        transfers: What moves, those of one link in their order.
        offsets: Address of each stay; None: the first that fits, largest first.
        bound: What no plan can beat; None: the time to compute.
        method: Who decided.

    Returns:
        The plan, with simulated times.

    Raises:
        InfeasibleError: The first fit does not fit into the budget.
    """
    graph, budget, workspace_bytes = request.graph, request.budget, request.workspace_bytes
    if offsets is None:
        offsets = first_fit(graph, order, stays)
    placements = tuple(
        Placement(stay.value, offset, graph.num_bytes(stay.value), stay.start, stay.end)
        for stay, offset in zip(stays, offsets, strict=True)
    )
    arena_bytes = max((p.offset + p.num_bytes for p in placements), default=0)
    limit = budget.device_bytes
    if limit is not None and arena_bytes + workspace_bytes > limit:
        raise InfeasibleError(
            f"first fit needs {arena_bytes} bytes and {workspace_bytes} of workspace; the budget "
            f"is {limit}",
            proved=False,
        )
    ideal_seconds = request.compute_seconds
    bound = bound or Bound(
        seconds=ideal_seconds, binding="compute", seconds_of={"compute": ideal_seconds}
    )
    plan = Plan(
        graph_digest=graph.digest,
        order=tuple(order),
        placements=placements,
        transfers=tuple(transfers),
        copies=(
            *_copies(graph, len(order), transfers),
            *_unused(graph, len(order), stays, budget),
        ),
        budget=budget,
        machine=request.machine,
        operator_seconds=tuple(request.operator_seconds),
        step_seconds=0.0,
        ideal_seconds=ideal_seconds,
        bound=bound,
        workspace_bytes=workspace_bytes,
        method=method,
        seed=0,
    )
    fields = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    return Plan(**{**fields, "step_seconds": simulate(graph, plan).step_seconds})


def _copies(graph: StepGraph, num_positions: int, transfers: Sequence[Transfer]) -> list[Copy]:
    """Copies from the transfer that writes each to the last that reads it.

    What no step changes has one for ever; what a step changes and the next reads has one across.
    """
    copies = []
    constant = set()
    for index, transfer in enumerate(transfers):
        tier, value = transfer.link.destination, transfer.value
        storage = graph.storages[graph.storage_of_value[value]]
        if storage.persistent and storage.initial == storage.final:
            below = tier if tier != Tier.DEVICE else transfer.link.source
            if (value, below) not in constant:
                constant.add((value, below))
                copies.append(Copy(value, below, transfer.num_bytes, 0, num_positions))
        elif tier != Tier.DEVICE:
            end = _last_read(graph, num_positions, transfers, index)
            copies.append(Copy(value, tier, transfer.num_bytes, transfer.start, end))
    return copies


def _unused(
    graph: StepGraph, num_positions: int, stays: Sequence[Stay], budget: Budget
) -> list[Copy]:
    """Persistent storages that nobody looks at stay below the device, if there is anything."""
    placed = {stay.value for stay in stays}
    tier = Tier.HOST if budget.host_bytes is not None else Tier.FILE
    return [
        Copy(storage.initial, tier, storage.num_bytes, 0, num_positions)
        for storage in graph.storages
        if storage.persistent and storage.num_bytes and storage.initial == storage.final
        if storage.initial is not None and storage.initial not in placed
    ]


def _last_read(
    graph: StepGraph, num_positions: int, transfers: Sequence[Transfer], written: int
) -> int:
    """Return the boundary up to which what a transfer writes is needed, or itself is written."""
    write = transfers[written]
    storage = graph.storages[graph.storage_of_value[write.value]]
    rewritten = min(
        (
            other.start + shift
            for other in transfers
            for shift in (0, num_positions)
            if other.link == write.link
            and other.value == write.value
            and other.start + shift > write.start
        ),
        default=write.start + num_positions,
    )
    end = write.end + 1
    for other in transfers:
        if other.link.source != write.link.destination:
            continue
        if other.value == write.value and write.end <= other.start < rewritten:
            end = max(end, other.end + 1)
        carried = storage.persistent and storage.final == write.value
        later = other.start + num_positions
        if carried and other.value == storage.initial and write.end <= later < rewritten:
            end = max(end, other.end + num_positions + 1)
    if storage.persistent and storage.final == write.value:
        end = max(end, num_positions + 1)  # it may be all that is left of it when the step ends
    return min(end, rewritten)


def with_places(graph: StepGraph) -> StepGraph:
    """Return the graph with the bytes that places take: up to where the next tensor may begin."""
    unit = alignment_bytes(graph)
    storages = (
        dataclasses.replace(storage, num_bytes=-(-storage.num_bytes // unit) * unit)
        for storage in graph.storages
    )
    return dataclasses.replace(graph, storages=tuple(storages))


def first_fit(graph: StepGraph, order: Sequence[int], stays: Sequence[Stay]) -> list[int]:
    """Return an address for each stay; what is handed over keeps its address.

    Args:
        request: The step, and what the plan is for.
        graph: The step.
        order: Operators by position.
        stays: When values are on the device.
    """
    groups = joined_stays(graph, order, stays)
    unit = alignment_bytes(graph)
    sizes = [
        max(-(-graph.num_bytes(stays[i].value) // unit) * unit for i in members)
        for members in groups
    ]
    offsets = [0] * len(stays)
    placed: list[tuple[int, int, list[int]]] = []
    for group in sorted(range(len(groups)), key=lambda g: -sizes[g]):
        taken = sorted(
            (start, end)
            for start, end, members in placed
            if any(meet(stays[a], stays[b], len(order)) for a in groups[group] for b in members)
        )
        offset = 0
        for start, end in taken:
            if offset + sizes[group] <= start:
                break
            offset = max(offset, end)
        placed.append((offset, offset + sizes[group], groups[group]))
        for index in groups[group]:
            offsets[index] = offset
    return offsets


def packed_offsets(
    graph: StepGraph,
    order: Sequence[int],
    stays: Sequence[Stay],
    device_bytes: int | None,
    *,
    time_limit: float = 5.0,
) -> list[int] | None:
    """Return addresses within a budget, workspace included; None if none were found.

    Args:
        request: The step, and what the plan is for.
        graph: The step.
        order: Operators by position.
        stays: When values are on the device.
        device_bytes: The budget; None: any.
        time_limit: Seconds for the packer, where the first fit does not do.
    """
    groups = joined_stays(graph, order, stays)
    for members in groups:  # what hands its place over may be back before that is free again
        for a, b in itertools.combinations(members, 2):
            if meet(stays[a], stays[b], len(order)):
                return None
    offsets = first_fit(graph, order, stays)
    if device_bytes is None:
        return offsets
    capacity = device_bytes - max((o.workspace_bytes for o in graph.operators), default=0)
    ends = (at + graph.num_bytes(stay.value) for at, stay in zip(offsets, stays, strict=True))
    if max(ends, default=0) <= capacity:
        return offsets
    buffers = [_buffer(graph, len(order), [stays[i] for i in members]) for members in groups]
    try:
        packing = pack(buffers, capacity=capacity, time_limit=time_limit)
    except InfeasibleError:
        return None
    for members, offset in zip(groups, packing.offsets, strict=True):
        for index in members:
            offsets[index] = offset
    return offsets


def _buffer(graph: StepGraph, num_positions: int, stays: Sequence[Stay]) -> Buffer:
    """One address for several stays: a buffer that does not need its room between them."""
    busy = sorted(
        {
            position % num_positions
            for stay in stays
            for position in range(stay.start, max(stay.end, stay.start + 1))
        }
    )
    gaps = tuple(
        (before + 1, after) for before, after in itertools.pairwise(busy) if after > before + 1
    )
    unit = alignment_bytes(graph)
    size = max(-(-graph.num_bytes(stay.value) // unit) * unit for stay in stays)
    return Buffer(busy[0], busy[-1] + 1, size, alignment=unit, gaps=gaps)


def meet(a: Stay, b: Stay, num_positions: int) -> bool:
    """Whether two stays have a position of the cycle in common."""
    return any(
        a.start < b.end + shift and b.start + shift < a.end
        for shift in (-num_positions, 0, num_positions)
    )


def joined_stays(graph: StepGraph, order: Sequence[int], stays: Sequence[Stay]) -> list[list[int]]:
    """Indices of stays that share an address: an operator or the next step takes them over."""
    num_positions = len(order)
    group = list(range(len(stays)))

    def root(index: int) -> int:
        while group[index] != index:
            index = group[index]
        return index

    begin = {(stay.value, stay.start): index for index, stay in enumerate(stays)}
    end = {(stay.value, stay.end): index for index, stay in enumerate(stays)}
    for index, stay in enumerate(stays):  # as the next step calls it
        storage = graph.storages[graph.storage_of_value[stay.value]]
        if stay.end >= num_positions and storage.persistent and storage.initial is not None:
            key = storage.initial, stay.end - num_positions
            if key == (storage.initial, 0) and key in begin:
                group[root(index)] = root(begin[key])  # it goes on there
            else:
                end.setdefault(key, index)
    for position, index in enumerate(order):
        operator = graph.operators[index]
        taken = set()
        for old, new in operator.mutates + operator.may_overwrite:
            first, second = end.get((old, position)), begin.get((new, position))
            arriving = begin.get((old, position))
            if arriving is not None:  # what was there before leaves, and is not handed over
                first = arriving if stays[arriving].end == position else None
            if first is not None and second is not None and not {old, new} & taken:
                taken |= {old, new}
                group[root(first)] = root(second)
    members: dict[int, list[int]] = {}
    for index in range(len(stays)):
        members.setdefault(root(index), []).append(index)
    return list(members.values())
