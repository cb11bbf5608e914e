"""Times of the transfers of a paged step: three streams and plain rules.

A load begins as soon as its place is free, no earlier than the load before it (so the link serves
the operator that runs first), and is complete when its operator runs. A write begins after the last
use of its value and has time until its place is needed; how early its place counts as free follows
from a simulation, because an operator that waits for a write that is late waits in vain.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from penstock.planner._request import LinkRates
from penstock.planner.paging._accesses import OrderedStep
from penstock.planner.paging._eviction import Allocation, PagedStep

_PASSES = 4  # of choosing ends of writes by the times of the pass before


@dataclass(slots=True)
class TimedTransfer:
    """A load or a write; positions as in a plan, but a start may lie before the step."""

    allocation: int  # index of the allocation that is loaded or written
    start: int  # boundary at which it may begin
    end: int  # boundary by which it has finished
    seconds: float  # time that it takes


@dataclass(frozen=True)
class TransferTimes:
    """Transfers with their boundaries, and the time of a step with them."""

    # Of each allocation the boundary from which it is taken, perhaps before the step.
    starts: tuple[int, ...]
    ends: tuple[int, ...]  # the boundary at which it is free
    writes: tuple[TimedTransfer, ...]  # in the order of their link
    loads: tuple[TimedTransfer, ...]  # in the order of theirs
    step_seconds: float  # time of a step once steps repeat


def time_transfers(
    step: OrderedStep,
    paged: PagedStep,
    operator_seconds: Sequence[float],
    rates: LinkRates,
    *,
    prefetch_bytes: int | None,
) -> TransferTimes:
    """Give every transfer of a paged step its boundaries; return the best times of all passes.

    `prefetch_bytes` may be taken at any boundary where values are loaded ahead and written after
    their last use. None: transfers run when an operator needs the memory.
    """
    allocations = paged.allocations
    writes = _writes(allocations, rates.outward, is_early=prefetch_bytes is not None)
    loaded = [(index, each) for index, each in enumerate(allocations) if each.loaded]
    loaded.sort(key=lambda pair: pair[1].start)
    by_use = [index for index, _ in loaded]
    seconds = [operator_seconds[index] for index in step.order]
    finish_of_write = _finish_without_waiting(seconds, writes)
    best: TransferTimes | None = None
    for _ in range(_PASSES):
        ends = _end_writes(allocations, writes, finish_of_write)
        begins = [each.start for _, each in loaded]
        if prefetch_bytes is not None:
            earliest = _find_free_boundaries(step, paged, prefetch_bytes, ends, by_use)
            begins = _delay_to_order(earliest, begins, step.num_positions)
        loads = [
            TimedTransfer(index, begin, each.start, each.num_bytes / rates.inward)
            for (index, each), begin in zip(loaded, begins, strict=True)
        ]
        step_seconds, finish_of_write = simulate_streams(seconds, writes, loads)
        if best is None or step_seconds < best.step_seconds:
            starts = [allocation.start for allocation in allocations]
            for load in loads:
                starts[load.allocation] = load.start
            best = TransferTimes(
                tuple(starts), tuple(ends), tuple(map(replace, writes)), tuple(loads), step_seconds
            )
        if not writes:
            break
    assert best is not None
    return best


def _writes(
    allocations: Sequence[Allocation], bytes_per_second: float, *, is_early: bool
) -> list[TimedTransfer]:
    writes = [
        TimedTransfer(
            index,
            allocation.last_use + 1 if is_early else allocation.end,
            allocation.end,
            allocation.num_bytes / bytes_per_second,
        )
        for index, allocation in enumerate(allocations)
        if allocation.written
    ]
    writes.sort(key=lambda write: (write.start, allocations[write.allocation].end))
    return writes


def _end_writes(
    allocations: Sequence[Allocation], writes: Sequence[TimedTransfer], finish: Sequence[int]
) -> list[int]:
    """Choose the ends of writes by when they finish; return those of allocations."""
    ends = [a.end if a.written else a.last_use + 1 for a in allocations]
    for write, boundary in zip(writes, finish, strict=True):
        allocation = allocations[write.allocation]
        write.end = min(allocation.end, max(allocation.last_use + 1, boundary))
        ends[write.allocation] = write.end
    return ends


def _delay_to_order(begins: list[int], uses: list[int], num_positions: int) -> list[int]:
    """Delay loads that would begin before one that is used earlier; steps follow each other."""
    latest = max((begin - num_positions for begin in begins), default=0)
    delayed = []
    for begin, use in zip(begins, uses, strict=True):
        latest = min(max(latest, begin), use)
        delayed.append(latest)
    return delayed


def _finish_without_waiting(seconds: Sequence[float], writes: Sequence[TimedTransfer]) -> list[int]:
    """Return the boundary by which each write is finished, if operators never wait."""
    clock = np.concatenate([[0.0], np.cumsum(seconds)])
    period, num_positions = float(clock[-1]), len(seconds)
    times, free, boundaries = clock.tolist(), 0.0, []
    for write in writes:
        steps, position = divmod(write.start, num_positions)
        free = max(free, steps * period + times[position]) + write.seconds
        boundaries.append(_find_boundary(times, period, free))
    return boundaries


def _find_boundary(times: Sequence[float], period: float, at: float) -> int:
    """Return the first boundary not before a time; `times` are those of one step's boundaries."""
    if period <= 0:
        return 0
    steps = int(at // period)
    inside = at - steps * period
    return steps * (len(times) - 1) + bisect.bisect_left(times, inside * (1 - 1e-12))


def simulate_streams(
    seconds: Sequence[float], writes: Sequence[TimedTransfer], loads: Sequence[TimedTransfer]
) -> tuple[float, list[int]]:
    """Run steps on three streams until they repeat.

    Transfers are in the order of their link; starts of writes count from 0.

    Returns:
        Seconds of a step, and for each write the boundary at which it is really finished.
    """
    num_positions = len(seconds)
    write_starts, write_ends = _group_by_boundary(writes, num_positions)
    load_starts, load_ends = _group_by_boundary(loads, num_positions)
    finish_write, finish_load = [0.0] * len(writes), [0.0] * len(loads)
    clock = free_out = free_in = began = 0.0
    boundaries: list[float] = []
    write_time = [write.seconds for write in writes]
    load_time = [load.seconds for load in loads]
    for _ in range(3):
        began = clock
        boundaries = []
        for position in range(num_positions):
            boundaries.append(clock)
            for index in write_starts[position]:
                free_out = finish_write[index] = max(free_out, clock) + write_time[index]
            for index in write_ends[position]:
                clock = max(clock, finish_write[index])
            for index in load_starts[position]:
                free_in = finish_load[index] = max(free_in, clock) + load_time[index]
            for index in load_ends[position]:
                clock = max(clock, finish_load[index])
            clock += seconds[position]
    times, period = [at - began for at in (*boundaries, clock)], clock - began
    finished = (_find_boundary(times, period, finish - began) for finish in finish_write)
    return period, [
        boundary if write.start < num_positions else boundary + num_positions
        for boundary, write in zip(finished, writes, strict=True)
    ]


def _group_by_boundary(
    transfers: Sequence[TimedTransfer], num_positions: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return indices of the transfers that start, and that end, at each boundary of the step."""
    starts: list[list[int]] = [[] for _ in range(num_positions)]
    ends: list[list[int]] = [[] for _ in range(num_positions)]
    for index in sorted(range(len(transfers)), key=lambda i: transfers[i].start % num_positions):
        starts[transfers[index].start % num_positions].append(index)
        ends[transfers[index].end % num_positions].append(index)
    return starts, ends


def _find_free_boundaries(
    step: OrderedStep, paged: PagedStep, capacity: int, ends: list[int], loads: list[int]
) -> list[int]:
    """Return for each load the earliest boundary from which its bytes are free until its use."""
    allocations, num_positions = paged.allocations, step.num_positions
    fixed = sum(allocation.num_bytes for allocation in paged.permanent)
    fixed += sum(step.num_bytes[value] for value in paged.resident)
    sources = _find_sources(step, allocations)
    used = np.full(num_positions, fixed, dtype=np.int64)
    for allocation, end in zip(allocations, ends, strict=True):
        _add_bytes(used, allocation.start, end, allocation.num_bytes)
    begins = []
    for index in loads:
        allocation, source = allocations[index], sources[index]
        earliest = ends[index] - num_positions
        if source is not None:
            earliest = max(earliest, ends[source[0]] - source[1] * num_positions)
        use, num_bytes = allocation.start, allocation.num_bytes
        begin = _find_earliest(used, earliest, use, capacity - num_bytes)
        _add_bytes(used, begin, use, num_bytes)
        begins.append(begin)
    return begins


def _find_sources(
    step: OrderedStep, allocations: Sequence[Allocation]
) -> list[tuple[int, int] | None]:
    """Return for each load the allocation that had its value before, and how many steps ago."""
    latest: dict[int, tuple[int, int]] = {}
    found: list[tuple[int, int] | None] = [None] * len(allocations)
    order = sorted(range(len(allocations)), key=lambda index: allocations[index].start)
    for cycle in (0, 1):
        for index in order:
            allocation = allocations[index]
            first, last = allocation.parts[0][0], allocation.last_value
            source = latest.get(step.renamed.get(first, first))
            if allocation.loaded and cycle == 1 and source is not None:
                found[index] = source[0], 1 - source[1]
            latest[step.renamed.get(last, last)] = (index, cycle)
    return found


def _add_bytes(used: np.ndarray, start: int, end: int, num_bytes: int) -> None:
    """Add bytes to the boundaries from start to end, over the end of the step where they go."""
    num_positions = len(used)
    if end - start >= num_positions:
        used += num_bytes
        return
    first, last = start % num_positions, end % num_positions
    if start == end:
        return
    if first < last:
        used[first:last] += num_bytes
    else:
        used[first:] += num_bytes
        used[:last] += num_bytes


def _find_earliest(used: np.ndarray, earliest: int, use: int, limit: int) -> int:
    """Return the first boundary from which on to `use` no more than `limit` bytes are taken."""
    num_positions, stop = len(used), use
    while stop > earliest:  # at most two pieces: this step's and the one's before
        begin = max(earliest, (stop - 1) // num_positions * num_positions)
        offset = begin // num_positions * num_positions
        window = used[begin - offset : stop - offset]
        full = np.flatnonzero(window > limit)
        if len(full):
            return begin + int(full[-1]) + 1
        stop = begin
    return earliest
