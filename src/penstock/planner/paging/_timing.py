"""When the transfers of a residency begin and end: three streams and plain rules.

A load begins as soon as its room is free, no earlier than the load before it (so the link serves
whoever is needed first), and is complete when its operator runs. A write begins after the last use
of its value and has time until its room is needed; how early its room counts as free follows from a
simulation, because whoever waits for a write that is late waits in vain.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.planner.paging._accesses import OrderedStep
from penstock.planner.paging._walk import Residency, Room

_PASSES = 4  # of choosing ends of writes by the times of the pass before


@dataclass(frozen=True, slots=True)
class Speeds:
    """What takes how long.

    Attributes:
        operator_seconds: Of each operator of the graph.
        out_bytes_per_second: Of the link out of the device.
        in_bytes_per_second: Of the link into it.
    """

    operator_seconds: Sequence[float]
    out_bytes_per_second: float
    in_bytes_per_second: float


@dataclass(slots=True)
class Move:
    """A load or a write; positions as in a plan, but a start may lie before the step.

    Attributes:
        room: Index of the room that is loaded or written.
        start: Boundary at which it may begin.
        end: Boundary by which it has finished.
        seconds: Time that it takes.
    """

    room: int
    start: int
    end: int
    seconds: float


@dataclass(frozen=True)
class Arrangement:
    """Transfers with their places, and what a step takes with them.

    Attributes:
        starts: Of each room the boundary from which it is taken, perhaps before the step.
        ends: The boundary at which it is free.
        writes: In the order of their link.
        loads: In the order of theirs.
        step_seconds: Of a step once steps repeat.
    """

    starts: tuple[int, ...]
    ends: tuple[int, ...]
    writes: tuple[Move, ...]
    loads: tuple[Move, ...]
    step_seconds: float


# From the ends of rooms (writes decided, loads not yet) to the boundary from which each load's room
# is free: (ends, loads in the order of their link) -> starts of these loads.
Prefetch = Callable[[list[int], list[int]], list[int]]


def arrange(
    step: OrderedStep,
    residency: Residency,
    speeds: Speeds,
    *,
    prefetch: Prefetch | None,
    early_writes: bool = True,
    passes: int = _PASSES,
) -> Arrangement:
    """Give every transfer of a residency its place.

    Args:
        step: The graph in its order.
        residency: What a walk found.
        speeds: What takes how long.
        prefetch: Says when the rooms of loads are free; None: loads begin when they are needed.
        early_writes: Whether a write begins after the last use of its value, or only when its
            room is needed.
        passes: How often ends of writes are chosen anew.

    Returns:
        The best arrangement of all passes.
    """
    rooms = residency.rooms
    writes = _writes(rooms, speeds, early=early_writes)
    by_need = sorted(
        (index for index, room in enumerate(rooms) if room.loaded),
        key=lambda index: (rooms[index].first_need, index),
    )
    seconds = [speeds.operator_seconds[index] for index in step.order]
    finish_of_write = _without_waiting(seconds, writes)
    best: Arrangement | None = None
    for _ in range(passes):
        ends = [room.end if room.written else room.last_need + 1 for room in rooms]
        for move, boundary in zip(writes, finish_of_write, strict=True):
            latest = rooms[move.room].end
            earliest = rooms[move.room].last_need + 1
            move.end = ends[move.room] = min(latest, max(earliest, boundary))
        begins = [rooms[index].first_need for index in by_need]
        if prefetch is not None:
            begins = _in_turn(prefetch(ends, by_need), begins, step.num_positions)
        loads = [
            Move(index, begin, rooms[index].first_need, rooms[index].num_bytes)
            for index, begin in zip(by_need, begins, strict=True)
        ]
        for load in loads:
            load.seconds /= speeds.in_bytes_per_second
        step_seconds, finish_of_write = replay(seconds, writes, loads)
        if best is None or step_seconds < best.step_seconds:
            starts = [room.start for room in rooms]
            for load in loads:
                starts[load.room] = load.start
            kept = tuple(Move(m.room, m.start, m.end, m.seconds) for m in writes)
            best = Arrangement(tuple(starts), tuple(ends), kept, tuple(loads), step_seconds)
        if not writes:
            break
    assert best is not None
    return best


def _writes(rooms: Sequence[Room], speeds: Speeds, *, early: bool) -> list[Move]:
    writes = []
    for index, room in enumerate(rooms):
        if room.written:
            start = room.last_need + 1 if early else room.end
            seconds = room.num_bytes / speeds.out_bytes_per_second
            writes.append(Move(index, start, room.end, seconds))
    writes.sort(key=lambda move: (move.start, rooms[move.room].end))
    return writes


def _in_turn(begins: list[int], needs: list[int], num_positions: int) -> list[int]:
    """Delay loads that would begin before one that is needed earlier; steps follow each other."""
    if not begins:
        return begins
    latest = max(begin - num_positions for begin in begins)
    turns = []
    for begin, need in zip(begins, needs, strict=True):
        latest = min(max(latest, begin), need)
        turns.append(latest)
    return turns


def _without_waiting(seconds: Sequence[float], writes: Sequence[Move]) -> list[int]:
    """The boundary by which each write is finished, if operators never wait."""
    clock = np.concatenate([[0.0], np.cumsum(seconds)])
    period, num_positions = float(clock[-1]), len(seconds)
    times, free, boundaries = clock.tolist(), 0.0, []
    for move in writes:
        steps, position = divmod(move.start, num_positions)
        free = max(free, steps * period + times[position]) + move.seconds
        boundaries.append(_boundary(times, period, free))
    return boundaries


def _boundary(times: Sequence[float], period: float, at: float) -> int:
    """The first boundary that is not before a time; `times` are those of one step's boundaries."""
    if period <= 0:
        return 0
    steps = int(at // period)
    inside = at - steps * period
    return steps * (len(times) - 1) + bisect.bisect_left(times, inside * (1 - 1e-12))


def replay(
    seconds: Sequence[float], writes: Sequence[Move], loads: Sequence[Move]
) -> tuple[float, list[int]]:
    """Run steps on three streams until they repeat.

    Args:
        seconds: Of the operator at each position.
        writes: In the order of their link, with starts from 0 on.
        loads: In the order of theirs.

    Returns:
        Seconds of a step, and for each write the boundary at which it is really finished.
    """
    num_positions = len(seconds)
    write_starts, write_ends = _at_boundaries(writes, num_positions)
    load_starts, load_ends = _at_boundaries(loads, num_positions)
    finish_write, finish_load = [0.0] * len(writes), [0.0] * len(loads)
    clock = free_out = free_in = began = 0.0
    boundaries: list[float] = []
    write_time = [move.seconds for move in writes]
    load_time = [move.seconds for move in loads]
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
    period = clock - began
    boundaries.append(clock)
    times = [at - began for at in boundaries]
    reached = []
    for move, finish in zip(writes, finish_write, strict=True):
        boundary = _boundary(times, period, finish - began)
        reached.append(boundary if move.start < num_positions else boundary + num_positions)
    return period, reached


def _at_boundaries(
    moves: Sequence[Move], num_positions: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Indices of the moves that start, and that end, at each boundary of the step."""
    starts: list[list[int]] = [[] for _ in range(num_positions)]
    ends: list[list[int]] = [[] for _ in range(num_positions)]
    turn = sorted(range(len(moves)), key=lambda index: moves[index].start % num_positions)
    for index in turn:
        starts[moves[index].start % num_positions].append(index)
        ends[moves[index].end % num_positions].append(index)
    return starts, ends


def room_by_bytes(
    step: OrderedStep, residency: Residency, capacity: int, *, lookahead: int | None = None
) -> Prefetch:
    """Prefetch into whatever bytes are free, wherever they are.

    Args:
        step: The graph in its order.
        residency: What a walk found.
        capacity: Bytes that may be taken at any boundary.
        lookahead: So many operators before they are needed loads begin at the earliest.
    """
    rooms, num_positions = residency.rooms, step.num_positions
    fixed = sum(room.num_bytes for room in residency.always)
    fixed += sum(step.num_bytes[value] for value in residency.resident)
    sources = sources_of_loads(step, rooms)

    def prefetch(ends: list[int], loads: list[int]) -> list[int]:
        used = np.full(num_positions, fixed, dtype=np.int64)
        for room, end in zip(rooms, ends, strict=True):
            _occupy(used, room.start, end, room.num_bytes)
        begins = []
        for index in loads:
            room, source, steps = rooms[index], *sources[index]
            need = room.first_need
            earliest = ends[index] - num_positions
            if source is not None:
                earliest = max(earliest, ends[source] - steps * num_positions)
            if lookahead is not None:
                earliest = max(earliest, need - lookahead)
            begin = _earliest(used, earliest, need, capacity - room.num_bytes)
            _occupy(used, begin, need, room.num_bytes)
            begins.append(begin)
        return begins

    return prefetch


def sources_of_loads(step: OrderedStep, rooms: Sequence[Room]) -> list[tuple[int | None, int]]:
    """For each loaded room the one that held its value before, and how many steps ago that was."""
    canonical = step.renamed
    latest: dict[int, tuple[int, int]] = {}
    found: list[tuple[int | None, int]] = [(None, 0)] * len(rooms)
    order = sorted(range(len(rooms)), key=lambda index: rooms[index].start)
    for cycle in (0, 1):
        for index in order:
            room = rooms[index]
            first, last = room.parts[0][0], room.value
            if room.loaded and cycle == 1:
                source = latest.get(canonical.get(first, first))
                if source is not None:
                    found[index] = source[0], 1 - source[1]
            latest[canonical.get(last, last)] = (index, cycle)
    return found


def _occupy(used: np.ndarray, start: int, end: int, num_bytes: int) -> None:
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


def _earliest(used: np.ndarray, earliest: int, need: int, limit: int) -> int:
    """The first boundary from which up to `need` no more than `limit` bytes are taken."""
    num_positions, stop = len(used), need
    while stop > earliest:  # at most two pieces: this step's and the one's before
        begin = max(earliest, (stop - 1) // num_positions * num_positions)
        offset = begin // num_positions * num_positions
        window = used[begin - offset : stop - offset]
        full = np.flatnonzero(window > limit)
        if len(full):
            return begin + int(full[-1]) + 1
        stop = begin
    return earliest
