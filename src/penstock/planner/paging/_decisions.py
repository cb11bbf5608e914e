"""From rooms and transfers to a `Plan`: addresses, copies below the device, names across steps."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import InfeasibleError
from penstock.memory import Link, Tier
from penstock.planner._plan import Bound, Budget, Copy, Placement, Plan, Transfer
from penstock.planner._request import PlanRequest
from penstock.planner._simulate import simulate
from penstock.planner.packing import Buffer, pack
from penstock.planner.paging._accesses import OrderedStep
from penstock.planner.paging._timing import Arrangement, Speeds, sources_of_loads
from penstock.planner.paging._walk import Residency

PACK_SECONDS = 2.0  # for the addresses of one residency


@dataclass(frozen=True, slots=True)
class Below:
    """The tier below the device that a reference planner swaps to."""

    tier: Tier
    out: Link
    back: Link

    @classmethod
    def of(cls, request: PlanRequest) -> Below | None:
        """The host, or the file store where there is no host memory; None without either."""
        ways = (
            (cls(Tier.HOST, Link.DEVICE_TO_HOST, Link.HOST_TO_DEVICE), request.budget.host_bytes),
            (cls(Tier.FILE, Link.DEVICE_TO_FILE, Link.FILE_TO_DEVICE), request.budget.file_bytes),
        )
        for below, limit in ways:
            if limit is not None and {below.out, below.back} <= request.machine.links.keys():
                return below
        return None


def speeds_of(request: PlanRequest) -> Speeds:
    """What takes how long on a machine."""
    below, links = Below.of(request), request.machine.links
    if below is None:
        return Speeds(request.operator_seconds, 1.0, 1.0)  # nothing moves
    rates = links[below.out].bytes_per_second, links[below.back].bytes_per_second
    return Speeds(request.operator_seconds, *rates)


def device_capacity(step: OrderedStep, budget: Budget) -> int:
    """Bytes for values: the budget without the largest workspace; without a budget, plenty."""
    if budget.device_bytes is None:
        return sum(storage.num_bytes for storage in step.graph.storages) + (1 << 20)
    return budget.device_bytes - step.workspace_bytes


def address_rooms(
    step: OrderedStep,
    residency: Residency,
    arrangement: Arrangement,
    *,
    capacity: int | None,
    deadline: float,
    seed: int,
) -> tuple[list[int], int]:
    """Pack the rooms of a step, then those that are never free; a room keeps one address.

    The search for addresses ends at a deadline, by `time.monotonic`, if it takes that long.

    Returns:
        Offsets of `residency.rooms`, `residency.always` and `residency.resident`, one after the
        other, and by how many bytes they exceed the capacity: at most 0 if they fit.
    """
    num_positions, unit = step.num_positions, step.alignment
    buffers = []
    for room, start, end in zip(residency.rooms, arrangement.starts, arrangement.ends, strict=True):
        buffers.append(_buffer(start, end, room.num_bytes, num_positions, unit))
    lasting = [room.num_bytes for room in residency.always]
    lasting += [step.num_bytes[value] for value in residency.resident]
    buffers += [Buffer(0, num_positions, size, alignment=unit) for size in lasting]
    left = min(PACK_SECONDS, max(deadline - time.monotonic(), 0.0))
    try:
        packing = pack(buffers, capacity=capacity, time_limit=left, seed=seed)
    except InfeasibleError as error:
        given = capacity or 0
        return [], max(1, (error.minimum_device_bytes or 0) - given)
    return list(packing.offsets), 0 if capacity is None else packing.height - capacity


def _buffer(start: int, end: int, num_bytes: int, num_positions: int, unit: int) -> Buffer:
    """The part of a step in which a room is taken; one over the step's end has a gap within."""
    shift = start // num_positions * num_positions
    start, end = start - shift, end - shift
    if end - start >= num_positions:
        return Buffer(0, num_positions, num_bytes, alignment=unit)
    if end <= num_positions:
        return Buffer(start, end, num_bytes, alignment=unit)
    gap = (end - num_positions, start)
    return Buffer(0, num_positions, num_bytes, alignment=unit, gaps=(gap,))


def assemble(
    request: PlanRequest,
    step: OrderedStep,
    residency: Residency,
    arrangement: Arrangement,
    offsets: Sequence[int],
    *,
    method: str,
    notes: Mapping[str, Any],
) -> Plan:
    """Say in the words of a `Plan` what was decided.

    Raises:
        InfeasibleError: What was swapped out does not fit the tier below.
    """
    below, budget, ideal = Below.of(request), request.budget, request.compute_seconds
    parts = {
        "order": step.order,
        "placements": tuple(_placements(step, residency, arrangement, offsets)),
        "transfers": tuple(_transfers(step, residency, arrangement, below)) if below else (),
        "copies": tuple(_copies(step, residency, arrangement, below)) if below else (),
        "graph_digest": step.graph.digest,
        "budget": budget,
        "machine": request.machine,
        "operator_seconds": tuple(request.operator_seconds),
        "ideal_seconds": ideal,
        "bound": Bound(seconds=ideal, binding="compute", seconds_of={"compute": ideal}),
        "workspace_bytes": step.workspace_bytes,
        "method": method,
        "seed": request.seed,
        "notes": {"is_steady": residency.is_steady, **notes},
    }
    plan = Plan(**parts, step_seconds=arrangement.step_seconds)
    plan = Plan(**parts, step_seconds=simulate(step.graph, plan).step_seconds)
    for tier, limit, peak in (
        (Tier.HOST, budget.host_bytes, plan.peak_host_bytes),
        (Tier.FILE, budget.file_bytes, plan.peak_file_bytes),
    ):
        if limit is not None and peak > limit:
            raise InfeasibleError(
                f"method={method!r} swaps {peak} bytes to the {tier} and may use {limit}: give "
                f"{tier} memory of {peak} bytes, or use method='auto'",
                proved=False,
            )
    return plan


def _name(step: OrderedStep, value: int, shift: int) -> int:
    """A value by the name that it has a step later (1), or had in the step before (-1)."""
    if shift == 0:
        return value
    table = step.renamed if shift > 0 else {i: f for f, i in step.renamed.items()}
    return table.get(value, value)


def _placements(
    step: OrderedStep, residency: Residency, arrangement: Arrangement, offsets: Sequence[int]
) -> list[Placement]:
    num_positions = step.num_positions
    placements = []

    def add(part: tuple[int, int], offset: int, start: int, end: int) -> None:
        value, since = part
        shift = start // num_positions
        placements.append(
            Placement(
                _name(step, value, shift - since // num_positions),
                offset,
                step.graph.num_bytes(value),
                start - shift * num_positions,
                end - shift * num_positions,
            )
        )

    num_rooms, num_always = len(residency.rooms), len(residency.always)
    for index, room in enumerate(residency.rooms):
        begins = [arrangement.starts[index], *(at for _, at in room.parts[1:])]
        stops = [*begins[1:], arrangement.ends[index]]
        for part, start, end in zip(room.parts, begins, stops, strict=True):
            add(part, offsets[index], start, end)
    for index, room in enumerate(residency.always):
        begins = [at for _, at in room.parts]
        for part, start, end in zip(
            room.parts, begins, [*begins[1:], begins[0] + num_positions], strict=True
        ):
            add(part, offsets[num_rooms + index], start, end)
    for index, value in enumerate(residency.resident):
        add((value, 0), offsets[num_rooms + num_always + index], 0, num_positions)
    return sorted(placements, key=lambda placement: (placement.start, placement.value))


def _transfers(
    step: OrderedStep, residency: Residency, arrangement: Arrangement, below: Below
) -> list[Transfer]:
    num_positions = step.num_positions
    transfers = []
    for link, moves in ((below.out, arrangement.writes), (below.back, arrangement.loads)):
        of_link = []
        for move in moves:
            room = residency.rooms[move.room]
            value, since = room.parts[-1 if link is below.out else 0]
            shift = move.start // num_positions
            start, end = move.start - shift * num_positions, move.end - shift * num_positions
            name = _name(step, value, shift - since // num_positions)
            num_bytes = step.graph.num_bytes(value)
            of_link.append(Transfer(name, link, num_bytes, start, end))
        transfers += sorted(of_link, key=lambda transfer: transfer.start)
    return transfers


def _copies(
    step: OrderedStep, residency: Residency, arrangement: Arrangement, below: Below
) -> list[Copy]:
    """A copy lives from the write that makes it to the end of the last load of it."""
    num_positions, rooms = step.num_positions, residency.rooms
    sources = sources_of_loads(step, rooms)
    write_of_room = {move.room: move for move in arrangement.writes}
    last_load: dict[int, int] = {}  # of a written room: when its copy was last read
    lasting = dict.fromkeys(set(step.idle) - set(residency.resident))
    for load in arrangement.loads:
        index, steps, seen = load.room, 0, set()
        while True:
            source, ago = sources[index]
            if source is None or source in seen:  # from step to step without a write
                lasting[rooms[load.room].parts[0][0]] = None
                break
            steps += ago
            if source in write_of_room:
                end = load.end + steps * num_positions
                last_load[source] = max(last_load.get(source, 0), end)
                break
            seen.add(source)
            index = source
    num_bytes = step.graph.num_bytes
    copies = [Copy(value, below.tier, num_bytes(value), 0, num_positions) for value in lasting]
    for index, move in write_of_room.items():
        shift = move.start // num_positions
        start = move.start - shift * num_positions
        end = max(last_load.get(index, 0) + 1, move.end + 1) - shift * num_positions
        value, since = rooms[index].parts[-1]
        name = _name(step, value, shift - since // num_positions)
        copies.append(Copy(name, below.tier, num_bytes(name), start, end))
    return sorted(copies, key=lambda copy: (copy.start, copy.value))
