"""A sequence of operators in the engine: its holes, evictions, times of transfers, and offsets.

The engine's C++ beside this file works on arrays. An *object* is a storage with bytes; a *hole*
lies between two uses of an object, and the last hole of a persistent object goes on at the
beginning of the next step.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.codegen import to_struct
from penstock.planner._link_rates import LinkRates
from penstock.planner.search._library import engine, pointer_to
from penstock.planner.search._problem import KEPT, PERSISTENT, READ, Problem

# Smaller objects leave only where larger ones are not enough: a transfer has a fixed cost.
MIN_EVICTED_BYTES = 64 * 1024
# Positions ahead of their use at which values may be fetched, at most.
MAX_PREFETCH_DISTANCE = 4096
# `out_end` of an object that has not left by the end of the replay: it leaves as late as it may.
NEVER = np.iinfo(np.int32).max
NUM_STRATEGIES = 6
PRIORITY_STRATEGIES = (5, 4, 3)  # the fullest positions first, or by size
# Intervals of at least this part of the arena are large, where large and small ones lie apart.
_LARGE = 8
# An interval of an object on the device, with the fields of `struct Interval` of allocators.cpp.
INTERVAL = np.dtype(
    [
        ("offset", np.int64),
        ("bytes", np.int64),
        ("from", np.float64),
        ("until", np.float64),
        ("start", np.int32),
        ("end", np.int32),
        ("arrives", np.int32),
        ("leaves", np.int32),
    ]
)


class ReplayTimes(NamedTuple):
    """Times of a step with evictions.

    Attributes:
        step_seconds: Time of a step once steps repeat.
        overflow: Bytes above the capacity at the worst moment; at most 0 if all fits.
        out_end: For each hole the boundary by which its object has left.
        in_start: For each hole the boundary at which its object begins to come back; negative in
            the step before.
        starts: When each position's operator starts, in seconds since the step began.
    """

    step_seconds: float
    overflow: int
    out_end: np.ndarray
    in_start: np.ndarray
    starts: np.ndarray


def resident_bytes(intervals: np.ndarray, num_positions: int) -> np.ndarray:
    """Return the bytes of intervals by position; those across the end count in both steps."""
    change = np.zeros(2 * num_positions + 1, np.int64)
    np.add.at(change, intervals["start"], intervals["bytes"])
    np.add.at(change, intervals["end"], -intervals["bytes"])
    return np.cumsum(change)[:-1].reshape(2, num_positions).sum(0)


@dataclass(frozen=True)
class _SequenceArrays:
    """`struct SequenceArrays` of engine.cpp."""

    hole_object: np.ndarray
    hole_start: np.ndarray
    hole_end: np.ndarray
    base: np.ndarray
    reused_from: np.ndarray
    reused_by: np.ndarray


@dataclass(frozen=True)
class _ClassArguments:
    """`struct ClassArguments` of engine.cpp."""

    class_of: np.ndarray
    num_classes: int
    counts: np.ndarray
    bytes: np.ndarray
    evicted: np.ndarray
    intervals: np.ndarray


@dataclass(frozen=True)
class _ReplayArguments:
    """`struct ReplayArguments` of engine.cpp."""

    capacity: int
    intervals: np.ndarray | None
    num_intervals: int
    out_seconds_per_byte: float
    in_seconds_per_byte: float
    second_out_seconds_per_byte: float
    second_in_seconds_per_byte: float
    tier: np.ndarray | None
    evicted: np.ndarray
    prefetch_distance: int
    out_end: np.ndarray
    in_start: np.ndarray
    starts: np.ndarray
    step_seconds: float = 0.0  # the engine's answer


@dataclass(frozen=True)
class _OffsetArguments:
    """`struct OffsetArguments` of engine.cpp."""

    intervals: np.ndarray
    num_intervals: int
    num_positions: int
    capacity: int
    large_bytes: int
    fullest: int
    step_seconds: float
    strategy: int
    priority: np.ndarray | None
    missing: np.ndarray


class OperatorSequence:
    """A sequence of operators with its holes and live bytes.

    Args:
        problem: The graph.
        order: Operators by position, each at least once; from its second time on it is recomputed.

    Attributes:
        hole_object: For each hole its object.
        hole_start: The position of the use before it; -1 for an object that is never used.
        hole_end: The position of the use after it; beyond the sequence in the next step.
        base: Live bytes by position if nothing leaves.
        reused: By position the objects (operand, result) of which the second reuses the place of
            the first; -1 for none.
    """

    def __init__(self, problem: Problem, order: Sequence[int] | np.ndarray) -> None:
        self.problem = problem
        self.order = np.ascontiguousarray(order, dtype=np.int32)
        self.again = find_second_runs(self.order, len(problem.operator_seconds))
        library = engine()
        self._handle = library.sequence_new(
            problem.handle, pointer_to(self.order), pointer_to(self.again), len(self.order)
        )
        weakref.finalize(self, library.sequence_free, self._handle)
        num_holes, num_positions = library.sequence_num_holes(self._handle), len(self.order)
        self.hole_object = np.empty(num_holes, np.int32)
        self.hole_start = np.empty(num_holes, np.int32)
        self.hole_end = np.empty(num_holes, np.int32)
        self.base = np.empty(num_positions, np.int64)
        reused = np.empty((2, num_positions), np.int32)
        arrays = _SequenceArrays(
            self.hole_object, self.hole_start, self.hole_end, self.base, reused[0], reused[1]
        )
        library.sequence_read(self._handle, ctypes.byref(to_struct(arrays)))
        self.reused = np.ascontiguousarray(reused.T)

    @property
    def hole_bytes(self) -> np.ndarray:
        """Bytes of each hole's object."""
        return self.problem.object_bytes[self.hole_object]

    @functools.cached_property
    def working_set(self) -> np.ndarray:
        """Least bytes by position with which its operator can run."""
        live = np.concatenate([self.base, np.zeros(len(self.base), np.int64)])
        change = np.zeros(len(live) + 1, np.int64)
        np.add.at(change, self.hole_start + 1, self.hole_bytes)
        np.add.at(change, self.hole_end, -self.hole_bytes)
        live = live - np.cumsum(change[:-1])
        return live[: len(self.base)] + live[len(self.base) :]

    @functools.cached_property
    def uses(self) -> dict[int, list[tuple[int, int]]]:
        """Uses of each object: position and kind."""
        problem = self.problem
        uses: dict[int, list[tuple[int, int]]] = defaultdict(list)
        first, objects, kinds, flags, again = (
            column.tolist()
            for column in (
                problem.first_access,
                problem.access_object,
                problem.access_kind,
                problem.object_flags,
                self.again,
            )
        )
        for position, operator in enumerate(self.order.tolist()):
            for access in range(first[operator], first[operator + 1]):
                item, kind = objects[access], kinds[access]
                if not (again[position] and kind != READ and flags[item] & PERSISTENT):
                    uses[item].append((position, kind))
        last = len(self.order) - 1
        for item, own in uses.items():  # results are read when the step ends
            if flags[item] & KEPT and not flags[item] & PERSISTENT and own[-1][0] < last:
                own.append((last, READ))
        return uses

    @property
    def compute_seconds(self) -> float:
        """Time of the operators alone."""
        return float(self.problem.operator_seconds[self.order].sum())

    def evict(
        self,
        capacity: int | np.ndarray,
        *,
        bias: np.ndarray | None = None,
        evicted: np.ndarray | None = None,
    ) -> tuple[np.ndarray, int]:
        """Choose evictions so that live bytes never exceed the capacity.

        Args:
            capacity: Bytes, for all positions or for each.
            bias: Added to the next use of each hole, in positions; the latest leaves first.
            evicted: A choice to begin with.

        Returns:
            For each hole whether its object leaves, and by how many bytes the worst position
            exceeds the capacity (at most 0 if it fits).
        """
        evicted = np.zeros(len(self.hole_object), np.uint8) if evicted is None else evicted.copy()
        capacities = np.full(len(self.order), capacity, np.int64)
        worst = engine().sequence_evict(
            self._handle,
            pointer_to(capacities),
            MIN_EVICTED_BYTES,
            pointer_to(bias),
            pointer_to(evicted),
        )
        return evicted, worst

    def class_needs(
        self, class_of_object: np.ndarray, num_classes: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots that each size class needs: at the least, and for nothing to leave.

        Args:
            class_of_object: For each object its class; -1 for those without bytes.
            num_classes: Number of classes.
        """
        least, most = np.zeros((2, num_classes), np.int64)
        engine().sequence_class_needs(
            self._handle,
            pointer_to(class_of_object),
            num_classes,
            pointer_to(least),
            pointer_to(most),
        )
        return least, most

    def evict_in_classes(
        self, class_of_object: np.ndarray, counts: np.ndarray, class_bytes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Choose evictions where memory consists of equal slots for each size class.

        Args:
            class_of_object: For each object its class; -1 for those without bytes.
            counts: Slots of each class.
            class_bytes: Bytes of a slot of each class.

        Returns:
            For each hole whether its object leaves, and an `INTERVAL` with its address for each
            chain of intervals; None if that many slots are not enough.
        """
        most = len(self.hole_object) + len(self.order) + len(self.problem.access_object)
        arguments = _ClassArguments(
            class_of=class_of_object,
            num_classes=len(counts),
            counts=counts,
            bytes=class_bytes,
            evicted=np.zeros(len(self.hole_object), np.uint8),
            intervals=np.zeros(most + len(self.problem.object_bytes), INTERVAL),
        )
        num_intervals = engine().sequence_evict_in_classes(
            self._handle, ctypes.byref(to_struct(arguments))
        )
        if num_intervals < 0:
            return None
        return arguments.evicted, arguments.intervals[:num_intervals]

    def dirty(self, evicted: np.ndarray) -> np.ndarray:
        """Return for each evicted hole whether its object has to be written before it is gone."""
        dirty = np.zeros(len(evicted), np.uint8)
        engine().sequence_dirty(self._handle, pointer_to(evicted), pointer_to(dirty))
        return dirty

    def replay(
        self,
        evicted: np.ndarray,
        memory: int | np.ndarray,
        rates: Sequence[LinkRates],
        *,
        tier: np.ndarray | None = None,
        prefetch_distance: int = MAX_PREFETCH_DISTANCE,
    ) -> ReplayTimes:
        """Time a step in which the objects of the evicted holes leave and come back.

        Args:
            evicted: For each hole whether its object leaves.
            memory: Bytes of the arena; or intervals with addresses (`INTERVAL`), of which those at
                one address wait for each other.
            rates: Of the links to the first lower tier, and of those to a second one, if any.
            tier: For each hole the lower tier of its object; None: the first.
            prefetch_distance: Positions ahead of their use at which values may be fetched.
        """
        has_addresses = isinstance(memory, np.ndarray)
        arguments = _ReplayArguments(
            capacity=0 if has_addresses else int(memory),
            intervals=memory if has_addresses else None,
            num_intervals=len(memory) if has_addresses else 0,
            out_seconds_per_byte=1 / rates[0].outward,
            in_seconds_per_byte=1 / rates[0].inward,
            second_out_seconds_per_byte=1 / rates[-1].outward,
            second_in_seconds_per_byte=1 / rates[-1].inward,
            tier=tier,
            evicted=evicted,
            prefetch_distance=prefetch_distance,
            out_end=np.full(len(evicted), NEVER, np.int32),
            in_start=np.full(len(evicted), np.iinfo(np.int32).min, np.int32),
            starts=np.empty(len(self.order)),
        )
        library, struct = engine(), to_struct(arguments)
        replay = library.sequence_replay_at if has_addresses else library.sequence_replay
        overflow = replay(self._handle, ctypes.byref(struct))
        return ReplayTimes(
            struct.step_seconds,
            overflow,
            arguments.out_end,
            arguments.in_start,
            arguments.starts,
        )

    def assign_offsets(
        self,
        intervals: np.ndarray,
        capacity: int,
        *,
        step_seconds: float,
        strategy: int,
        priority: np.ndarray | None = None,
    ) -> np.ndarray:
        """Assign offsets to intervals so that transfers wait little for addresses.

        Args:
            intervals: `INTERVAL`s, which receive the offsets.
            capacity: Bytes of the arena.
            step_seconds: Time of a step, as far as it is known.
            strategy: Number of the strategy, below `NUM_STRATEGIES`: `Strategy` of
                offset_assignment.cpp.
            priority: For each interval an addition to its rank in `PRIORITY_STRATEGIES`: to the
                share of the arena that is taken at its fullest position, or, of a step, to its
                earliness; None: nothing.

        Returns:
            For each position the bytes that its largest free piece lacks for an interval without
            an offset; 0 everywhere if all have one.
        """
        num_positions = len(self.order)
        arguments = _OffsetArguments(
            intervals=intervals,
            num_intervals=len(intervals),
            num_positions=num_positions,
            capacity=capacity,
            large_bytes=capacity // _LARGE,
            fullest=int(resident_bytes(intervals, num_positions).argmax()),
            step_seconds=step_seconds,
            strategy=strategy,
            priority=priority,
            missing=np.zeros(num_positions, np.int64),
        )
        engine().assign_offsets(ctypes.byref(to_struct(arguments)))
        return arguments.missing

    def tiers(self, evicted: np.ndarray, host_bytes: int) -> np.ndarray:
        """Return for each evicted hole the tier of its object: 0 the host, 1 the file.

        The host takes objects that move often and stay there briefly, as long as they fit.
        """
        tier = np.zeros(len(evicted), np.uint8)
        engine().sequence_assign_tiers(
            self._handle, pointer_to(evicted), host_bytes, pointer_to(tier)
        )
        return tier


def find_second_runs(order: np.ndarray, num_operators: int) -> np.ndarray:
    """Return for each position whether its operator has run before."""
    again, first = np.ones(len(order), np.uint8), np.empty(num_operators, np.int64)
    first[order[::-1]] = np.arange(len(order))[::-1]  # of equal indices the last one counts
    again[first[order]] = 0
    return again
