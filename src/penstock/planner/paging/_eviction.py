"""Evictions of a step that repeats, where operators evict when they need memory.

A step is paged operator by operator, again and again, until the values on the device when a step
begins are those of the step before. The result are *allocations*: from when to when a value has a
place on the device, whether it was loaded into it and whether it has to be written when it leaves.
When transfers begin and end is decided afterwards (`_transfer_times`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from penstock.errors import InfeasibleError
from penstock.planner.paging._accesses import NEVER, OrderedStep
from penstock.units import format_bytes

MAX_CYCLES = 4  # of paging, before the values that a step begins with are fixed
_UNBOUND = 1 << 62

Eviction = Literal["lru", "belady"]


@dataclass(slots=True, eq=False)
class Allocation:
    """A place on the device, for a value and for those that reuse it in place one after the other.

    Positions count on from step to step while paging goes on, and are relative to the step in which
    the allocation begins in what `page_step` returns.
    """

    num_bytes: int  # its size
    parts: list[tuple[int, int]]  # (value, position from which it is the one) in order
    loaded: bool  # whether its first value is loaded
    made: int  # position of the operator that made its present value; less if it was loaded
    last_use: int  # position of the last operator that uses it
    next_use: int  # position of the next one
    dirty: bool  # whether its present value is nowhere else
    value: int  # its present value, by the name that it has in the present step
    end: int = _UNBOUND  # boundary at which it is free again
    written: bool = False  # whether its last value has to be written at the end
    number: int = 0  # of the allocation, in the order in which they begin

    @property
    def last_value(self) -> int:
        """The last value in it, by the name that it had when it began."""
        return self.parts[-1][0]

    @property
    def start(self) -> int:
        """The boundary at which it begins; of a loaded one the operator there needs it."""
        return self.parts[0][1]


@dataclass(frozen=True)
class PagedStep:
    """The allocations of one step of many equal ones."""

    allocations: tuple[Allocation, ...]  # those that begin in the step, in order; positions from 0
    permanent: tuple[Allocation, ...]  # allocations that never end, their parts within the step
    resident: tuple[int, ...]  # values of storages that no step changes and that never leave
    is_steady: bool  # False where steps did not become equal by themselves


def page_step(
    step: OrderedStep,
    capacity: int,
    eviction: Eviction,
    *,
    candidates: Collection[int] | None = None,
) -> PagedStep:
    """Find the allocations of a step that repeats, with demand paging.

    `"lru"` evicts the value that was used the longest ago, `"belady"` the one that is used
    again the latest (Belady 1966), if it is one of the candidates.

    Raises:
        InfeasibleError: An operator's operands and results do not fit.
    """
    pager = _Pager(step, capacity, eviction, candidates)
    before: list[tuple[int, int, int, bool]] | None = None
    for cycle in range(3 * MAX_CYCLES):
        pager.run_step(cycle)
        now = pager.snapshot((cycle + 1) * step.num_positions)
        if now == before:
            pager.run_step(cycle + 1)
            return pager.result(cycle)
        before = now
        # Two states may alternate: from now on every step begins with this one; with no values at
        # all if that is not enough.
        if cycle + 1 == MAX_CYCLES:
            pager.first_values = frozenset(pager.present)
        elif cycle + 1 == 2 * MAX_CYCLES:
            pager.first_values = frozenset()
    raise AssertionError("steps that begin empty are all equal")


class _Pager:
    """Pages step after step, from empty memory.

    Attributes:
        present: The allocations of values on the device.
        first_values: Values with which every step has to begin; any if None.
    """

    def __init__(
        self,
        step: OrderedStep,
        capacity: int,
        eviction: Eviction,
        candidates: Collection[int] | None,
    ) -> None:
        self.present: dict[int, Allocation] = {}
        self.first_values: frozenset[int] | None = None
        self._step, self._capacity, self._candidates = step, capacity, candidates
        self._key: Callable[[Allocation], int] = (
            (lambda allocation: allocation.last_use)
            if eviction == "lru"
            else (lambda allocation: -allocation.next_use)
        )
        storages = step.graph.storages
        # Values of which there is a copy below the device.
        self._copied = {s.initial for s in storages if s.persistent and s.initial is not None}
        self._used = 0
        self._heap: list[tuple[int, int, int, Allocation]] = []
        self._finished: list[Allocation] = []
        self._num_allocations = 0

    def run_step(self, cycle: int) -> None:
        """Page one step."""
        base = cycle * self._step.num_positions
        for value in self._step.inputs:
            next_use = self._step.next_initial.get(value, NEVER)
            if next_use != NEVER:
                self._evict_for(value, base, (), "the batch")
                self._allocate(value, base, base + next_use, loaded=False)
        for position in range(self._step.num_positions):
            self._run_operator(base, position)
        self._end_step(base + self._step.num_positions)

    def snapshot(self, end: int) -> list[tuple[int, int, int, bool]]:
        """Return all on which the following steps depend."""
        return sorted(
            (value, allocation.last_use - end, allocation.next_use - end, allocation.dirty)
            for value, allocation in self.present.items()
        )

    def result(self, cycle: int) -> PagedStep:
        """Return the allocations of a step after which another one has run."""
        num_positions = self._step.num_positions
        begin, end = cycle * num_positions, (cycle + 1) * num_positions
        own, permanent, resident = [], [], []
        every = [*self._finished, *self.present.values()]
        for allocation in sorted(every, key=lambda allocation: allocation.number):
            if allocation.end == _UNBOUND and allocation.start < end:  # it outlives the next, too
                parts = [(value, at - begin) for value, at in allocation.parts if begin <= at < end]
                if parts:
                    allocation.parts = parts
                    permanent.append(allocation)
                else:
                    resident.append(allocation.value)
            elif begin <= allocation.start < end:
                allocation.parts = [(value, at - begin) for value, at in allocation.parts]
                allocation.end -= begin
                allocation.last_use -= begin
                own.append(allocation)
        return PagedStep(tuple(own), tuple(permanent), tuple(resident), self.first_values is None)

    def _run_operator(self, base: int, position: int) -> None:
        step, at = self._step, base + position
        accesses = step.accesses[position]
        name = step.graph.operators[step.order[position]].name
        for value in accesses.needs:
            if value not in self.present:
                assert value in self._copied, "a value is neither on the device nor below"
                self._evict_for(value, at, accesses.needs, name)
                self._allocate(value, at, at, loaded=True)
        for value in accesses.creates:
            if value in self.present:  # a result that is made again; others have ended before
                self._free(self.present[value], at)
            self._evict_for(value, at, (*accesses.needs, *accesses.creates), name)
            self._allocate(value, at, at, loaded=False)
        for old, created in accesses.reuses:
            allocation = self.present.pop(old)
            allocation.parts.append((created, at))
            allocation.made, allocation.dirty, allocation.value = at, True, created
            self.present[created] = allocation
            self._copied.discard(old)
        makes = accesses.makes
        self._copied.difference_update(makes)  # of values that are made again
        reused = {old for old, _ in accesses.reuses}
        for values, afters in (
            (accesses.needs, accesses.next_needs),
            (makes, accesses.next_makes),
        ):
            for value, after in zip(values, afters, strict=True):
                if value not in reused:
                    self._note_use(value, at, NEVER if after == NEVER else base + after)

    def _note_use(self, value: int, at: int, next_use: int) -> None:
        allocation = self.present[value]
        allocation.last_use, allocation.next_use = at, next_use
        if value in self._step.results:
            return
        if next_use == NEVER:
            self._free(allocation, at + 1)
        else:
            self._offer(allocation)

    def _end_step(self, at: int) -> None:
        """Free results, and call what is final by its initial name in the next step."""
        step = self._step
        for value in step.results:
            if value in self.present:
                self.present[value].last_use = at - 1
                self._free(self.present[value], at)
        renamed = {
            initial: self.present.pop(final)
            for final, initial in step.renamed.items()
            if final in self.present
        }
        for initial, allocation in renamed.items():
            allocation.value = initial
        self.present.update(renamed)
        copied = {initial for final, initial in step.renamed.items() if final in self._copied}
        self._copied -= step.renamed.keys()
        self._copied |= copied
        if self.first_values is not None:
            self._fix_values(self.first_values, at)

    def _fix_values(self, values: frozenset[int], at: int) -> None:
        """Begin a step with these values on the device and no others."""
        for value, allocation in list(self.present.items()):
            if value not in values:
                self._evict(allocation, at)
        for value in sorted(values - self.present.keys()):
            self._allocate(value, at, at + self._step.next_initial[value], loaded=True)

    def _allocate(self, value: int, at: int, next_use: int, *, loaded: bool) -> None:
        num_bytes = self._step.num_bytes[value]
        self._used += num_bytes
        self._num_allocations += 1
        allocation = Allocation(
            num_bytes=num_bytes,
            parts=[(value, at)],
            loaded=loaded,
            made=-1 if loaded else at,
            last_use=at,
            next_use=next_use,
            dirty=not loaded,
            value=value,
            number=self._num_allocations,
        )
        self.present[value] = allocation
        if next_use not in (at, NEVER):
            self._offer(allocation)

    def _offer(self, allocation: Allocation) -> None:
        """Note that it may be evicted; of equals the first storage is evicted first."""
        storage = self._step.graph.storage_of_value[allocation.last_value]
        entry = (self._key(allocation), storage, allocation.number, allocation)
        heapq.heappush(self._heap, entry)

    def _evict_for(self, value: int, at: int, kept: Collection[int], name: str) -> None:
        """Evict values other than `kept` until one more fits."""
        heap, later, num_bytes = self._heap, [], self._step.num_bytes[value]
        while self._used + num_bytes > self._capacity:
            if not heap:
                raise InfeasibleError(
                    f"operator {name!r} needs {format_bytes(num_bytes)} more than the device "
                    "memory that was given has room for in this order: give more",
                    operator=name,
                    proved=False,
                )
            entry = heapq.heappop(heap)
            allocation = entry[3]
            if allocation.end != _UNBOUND or entry[0] != self._key(allocation):
                continue  # of an earlier use
            if allocation.value in kept or not self._may_leave(allocation, at):
                later.append(entry)
                continue
            self._evict(allocation, at)
        for entry in later:
            heapq.heappush(heap, entry)

    def _may_leave(self, allocation: Allocation, at: int) -> bool:
        if self._candidates is not None and allocation.value not in self._candidates:
            return False
        return not allocation.dirty or allocation.made < at

    def _evict(self, allocation: Allocation, at: int) -> None:
        allocation.written = allocation.dirty
        self._copied.add(allocation.value)
        self._free(allocation, at)

    def _free(self, allocation: Allocation, at: int) -> None:
        allocation.end = at
        del self.present[allocation.value]
        self._used -= allocation.num_bytes
        self._finished.append(allocation)
