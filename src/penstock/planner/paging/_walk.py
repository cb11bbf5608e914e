"""Demand paging of a step that repeats: who is put out when an operator needs room.

This is what the reference planners share. A step is walked operator by operator, again and again,
until what is on the device when a step begins is what was there a step before. What comes out are
*rooms*: from when to when a value has a place on the device, whether it was loaded into it and
whether it has to be written out of it. When transfers begin and end is decided afterwards
(`_timing`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal

from penstock.errors import InfeasibleError
from penstock.planner.paging._accesses import NEVER, OrderedStep
from penstock.units import format_bytes

MAX_CYCLES = 4  # of the walk, before what is resident when a step begins is laid down
_UNBOUND = 1 << 62

Policy = Literal["lru", "belady"]


@dataclass(slots=True, eq=False)
class Room:
    """A place on the device, from the value that takes it first to the last one it is handed to.

    Positions count on from step to step while the walk goes on, and are relative to the step in
    which the room is taken in what `walk` returns.

    Attributes:
        num_bytes: Its size.
        pool: The pool that it is taken from.
        parts: (value, position from which it is the one) in order.
        end: Boundary at which it is free again.
        loaded: Whether its first value comes from below.
        made: Position of the operator that made its present value; less if it was loaded.
        first_need: For a loaded one the position of the operator that it is loaded for.
        last_need: Position of the last operator that uses it.
        next_need: Position of the next one.
        dirty: Whether its present value is nowhere else.
        written: Whether its last value has to be written out at the end.
        ticket: When it was taken, among all rooms.
        key: What its present value is called in the present step.
    """

    num_bytes: int
    pool: int
    parts: list[tuple[int, int]]
    loaded: bool
    made: int
    first_need: int
    last_need: int
    next_need: int
    dirty: bool
    end: int = _UNBOUND
    written: bool = False
    ticket: int = 0
    key: int = -1

    @property
    def value(self) -> int:
        """Who is in it last, as it was called when it came in."""
        return self.parts[-1][0]

    @property
    def start(self) -> int:
        """The boundary from which it is taken."""
        return self.parts[0][1]


@dataclass(frozen=True)
class Pools:
    """How the device's memory may be used: one heap of bytes, or pools of equal objects.

    Attributes:
        capacities: Bytes of each pool; of a pool of objects their number.
        pool_of_bytes: For each size of values the pool; everything is in the first one if None.
    """

    capacities: tuple[int, ...]
    pool_of_bytes: dict[int, int] | None = None

    def pool(self, num_bytes: int) -> int:
        """The pool that a value of so many bytes is in."""
        return 0 if self.pool_of_bytes is None else self.pool_of_bytes[num_bytes]

    def charge(self, num_bytes: int) -> int:
        """What it takes of the pool's capacity."""
        return num_bytes if self.pool_of_bytes is None else 1


@dataclass(slots=True)
class _State:
    """The walk's own."""

    rooms: dict[int, Room] = field(default_factory=dict)  # by value
    copies: set[int] = field(default_factory=set)  # values that are below the device
    used: list[int] = field(default_factory=list)
    heaps: list[list[tuple[int, int, int, Room]]] = field(default_factory=list)
    finished: list[Room] = field(default_factory=list)
    num_rooms: int = 0


@dataclass(frozen=True)
class Residency:
    """What a walk finds, for one step of many equal ones.

    Attributes:
        rooms: Those that are taken in the step, in the order in which they are; positions from 0.
        always: Rooms that are never free, their parts within the step; without parts at all the
            value is in `resident`.
        resident: Values of storages that no step changes and that never leave.
        pools_of_resident: The pools that they are in.
        is_steady: False where the walk did not come to rest by itself.
    """

    rooms: tuple[Room, ...]
    always: tuple[Room, ...]
    resident: tuple[int, ...]
    pools_of_resident: tuple[int, ...]
    is_steady: bool


class Walk:
    """A walk over a step, from empty memory."""

    def __init__(
        self,
        step: OrderedStep,
        pools: Pools,
        policy: Policy,
        candidates: Collection[int] | None,
    ) -> None:
        self.step = step
        self.pools = pools
        self.candidates = candidates
        self.laid_down: frozenset[int] | None = None  # who is there when a step begins
        self.key: Callable[[Room], int] = (
            (lambda room: room.last_need) if policy == "lru" else (lambda room: -room.next_need)
        )
        state = self.state = _State()
        state.used = [0] * len(pools.capacities)
        state.heaps = [[] for _ in pools.capacities]
        graph = step.graph
        state.copies = {s.initial for s in graph.storages if s.persistent and s.initial is not None}

    def run_cycle(self, cycle: int) -> None:
        """One step."""
        base = cycle * self.step.num_positions
        self._begin(base)
        for position in range(self.step.num_positions):
            self._visit(base, position)
        self._end(base + self.step.num_positions)

    def snapshot(self, end: int) -> list[tuple[int, int, int, bool]]:
        """What decides how the walk goes on."""
        return sorted(
            (value, room.last_need - end, room.next_need - end, room.dirty)
            for value, room in self.state.rooms.items()
        )

    def _begin(self, base: int) -> None:
        for value in self.step.inputs:
            next_need = self.step.next_initial.get(value, NEVER)
            if next_need == NEVER:
                continue
            num_bytes = self.step.num_bytes[value]
            self._make_room(num_bytes, base, (), "the batch")
            self._take(value, base, base, base + next_need, loaded=False)

    def _visit(self, base: int, position: int) -> None:
        step, state, at = self.step, self.state, base + position
        visit = step.visits[position]
        name = step.graph.operators[step.order[position]].name
        for value in visit.needs:
            if value not in state.rooms:
                assert value in state.copies, "a value is neither on the device nor below"
                self._make_room(step.num_bytes[value], at, visit.needs, name)
                self._take(value, at, at, at, loaded=True)
        new = visit.creates
        for value in new:
            if value in state.rooms:  # a result that is made again; others have ended before
                self._free(state.rooms[value], at)
            self._make_room(step.num_bytes[value], at, (*visit.needs, *new), name)
            self._take(value, at, at, at, loaded=False)
        for old, created in visit.handovers:
            room = state.rooms.pop(old)
            room.parts.append((created, at))
            room.made, room.dirty = at, True
            state.rooms[created] = room
            room.key = created
            state.copies.discard(old)
        makes = (*new, *(created for _, created in visit.handovers))
        state.copies.difference_update(makes)  # of values that are made again
        handed = {old for old, _ in visit.handovers}
        for values, afters in ((visit.needs, visit.next_needs), (makes, visit.next_makes)):
            for value, after in zip(values, afters, strict=True):
                if value not in handed:
                    self._touch(value, at, NEVER if after == NEVER else base + after)

    def _touch(self, value: int, at: int, next_need: int) -> None:
        room = self.state.rooms[value]
        room.last_need, room.next_need = at, next_need
        if value in self.step.pinned:
            return
        if next_need == NEVER:
            self._free(room, at + 1)
        else:
            self._offer(room)

    def _end(self, at: int) -> None:
        """A step is over: results go, and what is final is the next one's initial."""
        state, step = self.state, self.step
        for value in step.pinned:
            if value in state.rooms:
                state.rooms[value].last_need = at - 1
                self._free(state.rooms[value], at)
        renamed = {
            initial: state.rooms.pop(final)
            for final, initial in step.renamed.items()
            if final in state.rooms
        }
        for initial, room in renamed.items():
            room.key = initial
        state.rooms.update(renamed)
        copied = {initial for final, initial in step.renamed.items() if final in state.copies}
        state.copies -= step.renamed.keys()
        state.copies |= copied
        if self.laid_down is not None:
            self._restore(self.laid_down, at)

    def _restore(self, values: frozenset[int], at: int) -> None:
        """Begin a step with these values on the device and no others."""
        state = self.state
        for value, room in list(state.rooms.items()):
            if value not in values:
                self._put_out(room, at)
        for value in sorted(values - state.rooms.keys()):
            next_need = at + self.step.next_initial[value]
            self._take(value, at, at, next_need, loaded=True)

    def _take(self, value: int, at: int, last: int, next_need: int, *, loaded: bool) -> Room:
        state, num_bytes = self.state, self.step.num_bytes[value]
        pool = self.pools.pool(num_bytes)
        state.used[pool] += self.pools.charge(num_bytes)
        state.num_rooms += 1
        room = Room(
            num_bytes=num_bytes,
            pool=pool,
            parts=[(value, at)],
            loaded=loaded,
            made=-1 if loaded else at,
            first_need=at,
            last_need=last,
            next_need=next_need,
            dirty=not loaded,
            ticket=state.num_rooms,
            key=value,
        )
        state.rooms[value] = room
        if next_need not in (at, NEVER):
            self._offer(room)
        return room

    def _offer(self, room: Room) -> None:
        """Note that the room may be freed; of equals the first storage goes first."""
        storage = self.step.graph.storage_of_value[room.value]
        heapq.heappush(self.state.heaps[room.pool], (self.key(room), storage, room.ticket, room))

    def _make_room(self, num_bytes: int, at: int, kept: Collection[int], name: str) -> None:
        """Put values out until so many more bytes fit."""
        state = self.state
        pool, charge = self.pools.pool(num_bytes), self.pools.charge(num_bytes)
        capacity = self.pools.capacities[pool]
        heap, later = state.heaps[pool], []
        while state.used[pool] + charge > capacity:
            if not heap:
                raise InfeasibleError(
                    f"operator {name!r} needs {format_bytes(num_bytes)} more than the device "
                    "memory that was given has room for in this order: give more",
                    operator=name,
                    proved=False,
                )
            entry = heapq.heappop(heap)
            room = entry[3]
            if room.end != _UNBOUND or entry[0] != self.key(room):
                continue  # of an earlier use
            if room.key in kept or not self._may_leave(room, at):
                later.append(entry)
                continue
            self._put_out(room, at)
        for entry in later:
            heapq.heappush(heap, entry)

    def _may_leave(self, room: Room, at: int) -> bool:
        if self.candidates is not None and room.key not in self.candidates:
            return False
        return not room.dirty or room.made < at

    def _put_out(self, room: Room, at: int) -> None:
        room.written = room.dirty
        self.state.copies.add(room.key)
        self._free(room, at)

    def _free(self, room: Room, at: int) -> None:
        room.end = at
        del self.state.rooms[room.key]
        self.state.used[room.pool] -= self.pools.charge(room.num_bytes)
        self.state.finished.append(room)


def walk(
    step: OrderedStep,
    pools: Pools,
    policy: Policy,
    *,
    candidates: Collection[int] | None = None,
) -> Residency:
    """Find out who is where when, with demand paging.

    Args:
        step: The graph in its order.
        pools: What there is.
        policy: Who goes first: `"lru"`, whoever was used the longest ago; `"belady"`, whoever is
            used again the latest (Belady 1966).
        candidates: Values that may leave at all; any if None.

    Raises:
        InfeasibleError: An operator's operands and results do not fit.
    """
    one = Walk(step, pools, policy, candidates)
    before: list[tuple[int, int, int, bool]] | None = None
    for cycle in range(3 * MAX_CYCLES):
        one.run_cycle(cycle)
        now = one.snapshot((cycle + 1) * step.num_positions)
        if now == before:
            one.run_cycle(cycle + 1)
            return _of_cycle(one, cycle)
        before = now
        if cycle + 1 >= MAX_CYCLES:
            # Two states that alternate: from now on every step begins with this one; with
            # none at all if that is not enough.
            empty = cycle + 1 >= 2 * MAX_CYCLES
            if cycle + 1 in (MAX_CYCLES, 2 * MAX_CYCLES):
                one.laid_down = frozenset() if empty else frozenset(one.state.rooms)
    raise AssertionError("steps that begin empty are all equal")


def _of_cycle(one: Walk, cycle: int) -> Residency:
    """What the walk did in a step, seen from the step's beginning."""
    num_positions = one.step.num_positions
    begin, end = cycle * num_positions, (cycle + 1) * num_positions
    alive = list(one.state.rooms.values())
    rooms, always, resident, pools = [], [], [], []
    for room in sorted([*one.state.finished, *alive], key=lambda room: room.ticket):
        if room.end == _UNBOUND and room.start < end:  # it outlives the step after, too
            parts = [(value, at - begin) for value, at in room.parts if begin <= at < end]
            if parts:
                room.parts = parts
                always.append(room)
            else:
                resident.append(room.key)
                pools.append(room.pool)
        elif begin <= room.start < end:
            room.parts = [(value, at - begin) for value, at in room.parts]
            room.end -= begin
            room.first_need -= begin
            room.last_need -= begin
            room.made -= begin
            rooms.append(room)
    return Residency(
        tuple(rooms), tuple(always), tuple(resident), tuple(pools), one.laid_down is None
    )
