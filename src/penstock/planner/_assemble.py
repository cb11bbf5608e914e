"""One way from decisions to a plan: copies below the device and times follow from the rest."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from penstock.graph import StepGraph, Storage
from penstock.memory import Tier
from penstock.planner._plan import Plan
from penstock.planner._plan_records import Bound, Copy, Placement, Transfer
from penstock.planner._request import PlanRequest
from penstock.planner._simulate import simulate


def assemble(
    request: PlanRequest,
    order: Sequence[int],
    placements: Iterable[Placement],
    transfers: Sequence[Transfer],
    *,
    method: str,
    bound: Bound | None = None,
    notes: Mapping[str, Any] | None = None,
    unused: Mapping[int, Tier] | None = None,
) -> Plan:
    """Complete a plan.

    Placements come in any sequence, transfers of one link in the order in which they run.
    `unused` has the tier of each value that no operator uses and that lives from step to step
    below the device; of those that are missing here and have no placement either it is the tier
    next to the device. Without a bound it is the time to compute.

    Returns:
        The plan, with simulated times. `check` says whether it is right.
    """
    graph, ideal_seconds = request.graph, request.compute_seconds
    placements = sorted(placements, key=lambda p: (p.start, p.offset, p.value))
    resting = _rest_below(request, placements, transfers) | dict(unused or {})
    copies = [*_copies(graph, len(order), transfers)]
    copies += [Copy(v, tier, graph.num_bytes(v), 0, len(order)) for v, tier in resting.items()]
    plan = Plan(
        graph_digest=graph.digest,
        order=tuple(order),
        placements=tuple(placements),
        transfers=tuple(transfers),
        copies=tuple(sorted(copies, key=lambda copy: (copy.start, copy.value))),
        budget=request.budget,
        machine=request.machine,
        operator_seconds=tuple(request.operator_seconds),
        step_seconds=0.0,
        ideal_seconds=ideal_seconds,
        bound=bound or compute_bound(request),
        workspace_bytes=graph.workspace_bytes,
        method=method,
        seed=request.seed,
        notes=dict(notes or {}),
    )
    return dataclasses.replace(plan, step_seconds=simulate(graph, plan).step_seconds)


def compute_bound(request: PlanRequest) -> Bound:
    """Return the weakest lower bound of a request: the time to compute."""
    seconds = request.compute_seconds
    return Bound(
        seconds=seconds,
        binding="compute",
        seconds_of={"compute": seconds},
        reorder=request.reorder,
        recompute=request.recompute,
    )


def _rest_below(
    request: PlanRequest, placements: Iterable[Placement], transfers: Sequence[Transfer]
) -> dict[int, Tier]:
    """Return the nearest lower tier for values that last, and neither are placed nor move."""
    if not request.links:
        return {}
    used = {placement.value for placement in placements}
    used |= {transfer.value for transfer in transfers}
    values = (
        storage.initial
        for storage in request.graph.storages
        if storage.persistent and storage.num_bytes and storage.initial == storage.final
    )
    nearest = request.links[0][0].destination
    return {value: nearest for value in values if value is not None and value not in used}


def _copies(graph: StepGraph, num_positions: int, transfers: Sequence[Transfer]) -> Iterator[Copy]:
    """Derive copies: each lasts from the transfer that writes it to the last that reads it.

    A copy of a value that no step changes lasts for ever.
    """
    of_storage: dict[int, list[Transfer]] = defaultdict(list)
    for transfer in transfers:
        of_storage[graph.storage_of_value[transfer.value]].append(transfer)
    for index, own in of_storage.items():
        storage = graph.storages[index]
        if storage.persistent and storage.initial == storage.final:
            ends = ((transfer.link.source, transfer.link.destination) for transfer in own)
            for tier in dict.fromkeys(t for pair in ends for t in pair if t != Tier.DEVICE):
                yield Copy(own[0].value, tier, own[0].num_bytes, 0, num_positions)
            continue
        for write in own:
            tier = write.link.destination
            if tier != Tier.DEVICE:
                end = _end_of_copy(storage, num_positions, own, write)
                yield Copy(write.value, tier, write.num_bytes, write.start, end)


def _end_of_copy(
    storage: Storage, num_positions: int, transfers: Sequence[Transfer], write: Transfer
) -> int:
    """Return the boundary up to which a copy is needed; `transfers` are those of its storage."""
    lasts = storage.persistent and storage.final == write.value
    rewritten = min(
        other.start + shift
        for other in transfers
        for shift in (0, num_positions)
        if (other.link, other.value) == (write.link, write.value)
        if other.start + shift > write.start
    )
    ends = []
    for other in transfers:
        if other.link.source != write.link.destination:
            continue
        if other.value == write.value and write.end <= other.start < rewritten:
            ends.append(other.end + 1)
        later = other.start + num_positions  # in the next step, by its name there
        if lasts and other.value == storage.initial and write.end <= later < rewritten:
            ends.append(other.end + num_positions + 1)
    # What nothing reads may be all that is left of the storage when the step ends.
    end = max(ends, default=num_positions + 1 if lasts else 0)
    return min(max(end, write.end + 1), rewritten)
