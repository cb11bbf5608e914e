"""Objects of size classes: which object a room is, and how early a load can begin in it."""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Sequence

from penstock.planner.paging._accesses import OrderedStep
from penstock.planner.paging._timing import Prefetch, sources_of_loads
from penstock.planner.paging._walk import Residency, Room


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
    objects = [-1] * len(rooms)
    lasting, taken = _lasting(residency, counts)
    windows: list[list[tuple[int, int, int]]] = []  # of each object: free from, blocked from, it
    around = [index for index, room in enumerate(rooms) if room.end > num_positions]
    for pool, count in enumerate(counts):
        windows.append([(0, num_positions, item) for item in range(taken[pool], count)])
    for index in around:
        room = rooms[index]
        if windows[room.pool] and windows[room.pool][-1][1] == num_positions:
            item = windows[room.pool].pop()[2]
            objects[index] = item
            windows[room.pool].insert(0, (room.end - num_positions, room.start, item))
    inside = [index for index, room in enumerate(rooms) if room.end <= num_positions]
    inside.sort(key=lambda index: (rooms[index].start, index))
    waiting = [sorted(of_pool, reverse=True) for of_pool in windows]  # not free yet, next one last
    free: list[list[tuple[int, int]]] = [[] for _ in counts]  # blocked from, object; sorted
    busy: list[list[tuple[int, int, int]]] = [[] for _ in counts]  # heap by the end of its room
    for index in inside:
        room = rooms[index]
        pool = room.pool
        while waiting[pool] and waiting[pool][-1][0] <= room.start:
            _, blocked, item = waiting[pool].pop()
            bisect.insort(free[pool], (blocked, item))
        while busy[pool] and busy[pool][0][0] <= room.start:
            _, blocked, item = heapq.heappop(busy[pool])
            bisect.insort(free[pool], (blocked, item))
        place = bisect.bisect_left(free[pool], (room.end, -1))  # the first that stays free so long
        if place < len(free[pool]):
            blocked, objects[index] = free[pool].pop(place)
            heapq.heappush(busy[pool], (room.end, blocked, objects[index]))
    return objects + lasting


def pools_of_rooms(residency: Residency) -> list[int]:
    """The pools of `rooms`, `always` and `resident`, one after the other."""
    rooms = (*residency.rooms, *residency.always)
    return [*(room.pool for room in rooms), *residency.pools_of_resident]


def missing_objects(residency: Residency, objects: Sequence[int], num_pools: int) -> list[int]:
    """How many more objects of each pool would do, as many as rooms without one meet at once."""
    events: list[list[tuple[int, int]]] = [[] for _ in range(num_pools)]
    missing = [0] * num_pools
    for pool, item in zip(pools_of_rooms(residency), objects, strict=True):
        missing[pool] = max(missing[pool], int(item < 0))
    for room, item in zip(residency.rooms, objects, strict=False):
        if item < 0:
            events[room.pool] += [(room.start, 1), (room.end, -1)]
    for pool, changes in enumerate(events):
        at_once = 0
        for _, change in sorted(changes):
            at_once += change
            missing[pool] = max(missing[pool], at_once)
    return missing


def _lasting(residency: Residency, counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Rooms that are never free take the first objects of their pools: (objects, how many)."""
    taken = [0] * len(counts)
    objects = []
    for pool in pools_of_rooms(residency)[len(residency.rooms) :]:
        fits = taken[pool] < counts[pool]
        objects.append(taken[pool] if fits else -1)
        taken[pool] += fits
    return objects, taken


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
