"""Objects of size classes: which object a room is, and how early a load can begin in it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from penstock.planner._reference_order import OrderedStep
from penstock.planner._reference_timing import Prefetch, sources_of_loads
from penstock.planner._reference_walk import Residency, Room


def assign_objects(residency: Residency, step: OrderedStep, counts: Sequence[int]) -> list[int]:
    """Give every room an object of its pool, the same one in every step.

    Args:
        residency: A walk with pools of objects.
        step: The graph in its order.
        counts: Objects of each pool.

    Returns:
        For `rooms`, `always` and `resident`, one after the other, the object within its pool; -1
        where there is none: rooms that go round the end of the step can block more than their
        number says.
    """
    num_positions = step.num_positions
    rooms = residency.rooms
    free_from = [[0] * count for count in counts]  # of each object, in this step
    blocked_from = [[num_positions] * count for count in counts]
    objects = [-1] * len(rooms)
    lasting = _lasting(residency, free_from, blocked_from, num_positions)
    around = [index for index, room in enumerate(rooms) if room.end > num_positions]
    for index in around:
        room = rooms[index]
        chosen = _find(free_from[room.pool], blocked_from[room.pool], 0, 1)
        if chosen is None:
            continue
        objects[index] = chosen
        free_from[room.pool][chosen] = room.end - num_positions
        blocked_from[room.pool][chosen] = room.start
    for index in sorted(range(len(rooms)), key=lambda index: (rooms[index].start, index)):
        room = rooms[index]
        if room.end > num_positions:
            continue
        chosen = _find(free_from[room.pool], blocked_from[room.pool], room.start, room.end)
        if chosen is not None:
            objects[index] = chosen
            free_from[room.pool][chosen] = room.end
    return objects + lasting


def _lasting(
    residency: Residency,
    free_from: list[list[int]],
    blocked_from: list[list[int]],
    num_positions: int,
) -> list[int]:
    """Rooms that are never free take the first objects of their pools."""
    pools = [room.pool for room in residency.always] + list(residency.pools_of_resident)
    taken = [0] * len(free_from)
    objects = []
    for pool in pools:
        fits = taken[pool] < len(free_from[pool])
        objects.append(taken[pool] if fits else -1)
        if fits:
            free_from[pool][taken[pool]] = num_positions
            blocked_from[pool][taken[pool]] = 0
            taken[pool] += 1
    return objects


def _find(free: Sequence[int], blocked: Sequence[int], start: int, end: int) -> int | None:
    """The object that is free the longest, of those that stay free up to `end`."""
    best = None
    for index, since in enumerate(free):
        if since <= start and blocked[index] >= end and (best is None or since < free[best]):
            best = index
    return best


def room_by_objects(step: OrderedStep, residency: Residency, objects: Sequence[int]) -> Prefetch:
    """A load begins when whoever had its object before has left it (section 4 of the paper)."""
    rooms, num_positions = residency.rooms, step.num_positions
    before = _before_in_object(rooms, objects)
    sources = sources_of_loads(step, rooms)

    def prefetch(ends: list[int], loads: list[int]) -> list[int]:
        begins = []
        for index in loads:
            earliest = ends[index] - num_positions
            previous, steps = before[index]
            earliest = max(earliest, ends[previous] - steps * num_positions)
            source, ago = sources[index]
            if source is not None:
                earliest = max(earliest, ends[source] - ago * num_positions)
            begins.append(min(earliest, rooms[index].first_need))
        return begins

    return prefetch


def _before_in_object(rooms: Sequence[Room], objects: Sequence[int]) -> list[tuple[int, int]]:
    """For each room the one that has its object before, and how many steps ago."""
    of_object: dict[tuple[int, int], list[int]] = {}
    for index in sorted(range(len(rooms)), key=lambda index: (rooms[index].start, index)):
        of_object.setdefault((rooms[index].pool, objects[index]), []).append(index)
    before = [(0, 0)] * len(rooms)
    for tenants in of_object.values():
        before[tenants[0]] = tenants[-1], 1
        for earlier, later in itertools.pairwise(tenants):
            before[later] = earlier, 0
    return before
