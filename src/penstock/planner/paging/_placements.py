"""Placements and transfers of a paged step: addresses, and names of values across steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from penstock.errors import InfeasibleError
from penstock.memory import Link
from penstock.planner._plan_records import Placement, Transfer
from penstock.planner.packing import Buffer, pack
from penstock.planner.paging._accesses import OrderedStep
from penstock.planner.paging._eviction import PagedStep
from penstock.planner.paging._transfer_times import TransferTimes

PACK_SECONDS = 2.0  # for the addresses of one paged step


def assign_offsets(
    step: OrderedStep,
    paged: PagedStep,
    times: TransferTimes,
    *,
    capacity: int | None,
    deadline: float,
    seed: int,
) -> tuple[list[int], int]:
    """Pack the allocations of a step, then those that never end; each keeps one address.

    The search for addresses ends at a deadline, by `time.monotonic`, if it takes that long.

    Returns:
        Offsets of `paged.allocations`, `paged.permanent` and `paged.resident`, one after the other,
        and by how many bytes they exceed the capacity: at most 0 if they fit.
    """
    num_positions, unit = step.num_positions, step.alignment
    buffers = [
        _buffer(start, end, allocation.num_bytes, num_positions, unit)
        for allocation, start, end in zip(paged.allocations, times.starts, times.ends, strict=True)
    ]
    lasting = [allocation.num_bytes for allocation in paged.permanent]
    lasting += [step.num_bytes[value] for value in paged.resident]
    buffers += [Buffer(0, num_positions, size, alignment=unit) for size in lasting]
    left = min(PACK_SECONDS, max(deadline - time.monotonic(), 0.0))
    try:
        packing = pack(buffers, capacity=capacity, time_limit=left, seed=seed)
    except InfeasibleError as error:
        return [], max(1, (error.minimum_device_bytes or 0) - (capacity or 0))
    return list(packing.offsets), 0 if capacity is None else packing.height - capacity


def _buffer(start: int, end: int, num_bytes: int, num_positions: int, unit: int) -> Buffer:
    """Return the buffer of an allocation; one across the end of the step has a gap within."""
    shift = start // num_positions * num_positions
    start, end = start - shift, end - shift
    if end - start >= num_positions:
        return Buffer(0, num_positions, num_bytes, alignment=unit)
    if end <= num_positions:
        return Buffer(start, end, num_bytes, alignment=unit)
    gap = (end - num_positions, start)
    return Buffer(0, num_positions, num_bytes, alignment=unit, gaps=(gap,))


def _name(step: OrderedStep, value: int, shift: int) -> int:
    """Return a value by the name that it has a step later (1), or had in the step before (-1)."""
    if shift == 0:
        return value
    table = step.renamed if shift > 0 else {i: f for f, i in step.renamed.items()}
    return table.get(value, value)


def make_placements(
    step: OrderedStep, paged: PagedStep, times: TransferTimes, offsets: Sequence[int]
) -> Iterator[Placement]:
    """Return where the values of a paged step are on the device, and when."""
    num_positions, graph = step.num_positions, step.graph
    num_own, num_permanent = len(paged.allocations), len(paged.permanent)
    spans = [
        *zip(paged.allocations, times.starts, times.ends, strict=True),
        *((a, a.parts[0][1], a.parts[0][1] + num_positions) for a in paged.permanent),
    ]
    for offset, (allocation, first, last) in zip(offsets, spans, strict=False):
        boundaries = [first, *(at for _, at in allocation.parts[1:]), last]
        for index, (value, since) in enumerate(allocation.parts):
            start, end = boundaries[index : index + 2]
            shift = start // num_positions
            yield Placement(
                _name(step, value, shift - since // num_positions),
                offset,
                graph.num_bytes(value),
                start - shift * num_positions,
                end - shift * num_positions,
            )
    for value, offset in zip(paged.resident, offsets[num_own + num_permanent :], strict=True):
        yield Placement(value, offset, graph.num_bytes(value), 0, num_positions)


def make_transfers(
    step: OrderedStep, paged: PagedStep, times: TransferTimes, links: tuple[Link, Link]
) -> list[Transfer]:
    """Return the transfers of a paged step over the links out of the device and back."""
    num_positions = step.num_positions
    transfers = []
    for link, part, timed in ((links[0], -1, times.writes), (links[1], 0, times.loads)):
        of_link = []
        for transfer in timed:
            value, since = paged.allocations[transfer.allocation].parts[part]
            shift = transfer.start // num_positions
            start = transfer.start - shift * num_positions
            end = transfer.end - shift * num_positions
            name = _name(step, value, shift - since // num_positions)
            of_link.append(Transfer(name, link, step.graph.num_bytes(value), start, end))
        transfers += sorted(of_link, key=lambda transfer: transfer.start)
    return transfers
