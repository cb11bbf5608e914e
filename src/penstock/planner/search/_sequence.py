"""A sequence of operators in the engine: its holes, evictions, times of transfers, and offsets.

The engine's C++ beside this file works on arrays. An *object* is a storage with bytes; a *hole*
lies between two uses of an object, and the last hole of a persistent object goes on at the
beginning of the next step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from penstock._lazy import cached_property
from penstock.planner._live_ranges import occupied_bytes
from penstock.planner._request import LinkRates
from penstock.planner.search._problem import INTERVAL, PART, Problem, engine

# Smaller objects leave only where larger ones are not enough: a transfer has a fixed cost.
MIN_EVICTED_BYTES = 64 * 1024
# Positions ahead of their use at which values may be fetched, at most.
MAX_PREFETCH_DISTANCE = 4096
# `out_end` of an object that has not left by the end of the replay: it leaves as late as it may.
NEVER = int(np.iinfo(np.int32).max)
_NEVER_BACK = int(np.iinfo(np.int32).min)  # `in_start` of an object that does not come back
NUM_STRATEGIES = 6
BY_SIZE = 3  # the first strategy that does not ask which position is the fullest
PRIORITY_STRATEGIES = (5, 4, BY_SIZE)  # the fullest positions first, or by size
AGAIN = 6  # the strategy for intervals that have no offset yet
# Intervals of at least this part of the arena are large, where large and small ones lie apart.
_LARGE = 8


class ReplayTimes(NamedTuple):
    """Times of a step with evictions."""

    step_seconds: float  # time of a step once steps repeat
    overflow: int  # bytes above the capacity at the worst moment; at most 0 if all fits
    out_end: np.ndarray  # for each hole the boundary by which its object has left
    # For each hole the boundary at which its object begins to come back; negative in the step
    # before.
    in_start: np.ndarray
    starts: np.ndarray  # when each position's operator starts, in seconds since the step began


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
    """

    def __init__(self, problem: Problem, order: Sequence[int] | np.ndarray) -> None:
        self.problem = problem
        self.order = np.ascontiguousarray(order, dtype=np.int32)
        self.again = find_second_runs(self.order, len(problem.operator_seconds))
        library = engine()
        self._handle = library.sequence_new(problem.handle, self.order, self.again, len(self.order))
        weakref.finalize(self, library.sequence_free, self._handle)
        num_holes = library.sequence_num_holes(self._handle)
        self.hole_object, self.hole_start, self.hole_end = np.empty((3, num_holes), np.int32)
        self.base = np.empty(len(self.order), np.int64)
        library.sequence_read(
            self._handle, self.hole_object, self.hole_start, self.hole_end, self.base
        )

    @property
    def hole_bytes(self) -> np.ndarray:
        """Bytes of each hole's object."""
        return self.problem.object_bytes[self.hole_object]

    @cached_property
    def working_set(self) -> np.ndarray:
        """Least bytes by position with which its operator can run."""
        start, end = self.hole_start + 1, self.hole_end
        return self.base - occupied_bytes(start, end, self.hole_bytes, len(self.base))

    @property
    def compute_seconds(self) -> float:
        """Time of the operators alone."""
        return float(self.problem.operator_seconds[self.order].sum())

    def evict(self, capacity: np.ndarray, *, bias: np.ndarray | None = None) -> np.ndarray:
        """Return for each hole whether its object leaves, so that live bytes fit the capacity.

        The capacity is in bytes by position. `bias` is added to the next use of each hole, in
        positions; the latest leaves first.
        """
        evicted = np.zeros(len(self.hole_object), np.uint8)
        engine().sequence_evict(self._handle, capacity, MIN_EVICTED_BYTES, bias, evicted)
        return evicted

    def cut(self, evicted: np.ndarray, out_end: np.ndarray, in_start: np.ndarray) -> np.ndarray:
        """Cut the live ranges of all objects at their evicted holes; return the `PART`s.

        Per hole: whether its object leaves, the boundary by which it has left, and the one at which
        it begins to come back; beyond the step in the next one.
        """
        parts = np.zeros(engine().sequence_most_parts(self._handle), PART)
        windows = out_end.astype(np.int32), in_start.astype(np.int32)
        return parts[: engine().sequence_cut(self._handle, evicted, *windows, parts)]

    def class_needs(
        self, class_of_object: np.ndarray, num_classes: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the slots that each size class needs: at the least, and for nothing to leave."""
        least, most = np.zeros((2, num_classes), np.int64)
        engine().sequence_class_needs(self._handle, class_of_object, num_classes, least, most)
        return least, most

    def evict_in_classes(
        self, class_of_object: np.ndarray, counts: np.ndarray, class_bytes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Choose evictions where memory consists of equal slots for each size class.

        Returns:
            For each hole whether its object leaves, and an `INTERVAL` with its address for each
            chain of parts; None if that many slots are not enough.
        """
        evicted = np.zeros(len(self.hole_object), np.uint8)
        intervals = np.zeros(engine().sequence_most_parts(self._handle), INTERVAL)
        num_intervals = engine().sequence_evict_in_classes(
            self._handle, class_of_object, len(counts), counts, class_bytes, evicted, intervals
        )
        return None if num_intervals < 0 else (evicted, intervals[:num_intervals])

    def dirty(self, evicted: np.ndarray) -> np.ndarray:
        """Return for each evicted hole whether its object has to be written before it is gone."""
        dirty = np.zeros(len(evicted), np.uint8)
        engine().sequence_dirty(self._handle, evicted, dirty)
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
        lower = rates[0], rates[-1]
        seconds_per_byte = np.array(
            [1 / rate.outward for rate in lower] + [1 / rate.inward for rate in lower]
        )
        out_end, in_start = np.empty((2, len(evicted)), np.int32)
        out_end[:], in_start[:] = NEVER, _NEVER_BACK
        starts = np.empty(len(self.order) + 1)
        common = self._handle, evicted, tier, seconds_per_byte, prefetch_distance
        if isinstance(memory, np.ndarray):
            overflow = engine().sequence_replay_at(
                *common, out_end, in_start, starts, memory, len(memory)
            )
        else:
            overflow = engine().sequence_replay(*common, out_end, in_start, starts, int(memory))
        return ReplayTimes(float(starts[-1]), overflow, out_end, in_start, starts[:-1])

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
        ends, num_positions = (intervals["start"], intervals["end"]), len(self.order)
        missing = np.zeros(num_positions, np.int64)
        if not num_positions:  # a step without operators
            return missing
        fullest = 0
        if strategy < BY_SIZE:
            fullest = occupied_bytes(*ends, intervals["bytes"], num_positions).argmax()
        engine().assign_offsets(
            intervals,
            len(intervals),
            num_positions,
            capacity,
            capacity // _LARGE,
            int(fullest),
            step_seconds,
            strategy,
            priority,
            missing,
        )
        return missing

    def tiers(self, evicted: np.ndarray, host_bytes: int) -> np.ndarray:
        """Return for each evicted hole the tier of its object: 0 the host, 1 the file.

        The host takes objects that move often and stay there briefly, as long as they fit.
        """
        tier = np.zeros(len(evicted), np.uint8)
        engine().sequence_assign_tiers(self._handle, evicted, host_bytes, tier)
        return tier


def find_second_runs(order: np.ndarray, num_operators: int) -> np.ndarray:
    """Return for each position whether its operator has run before."""
    again, first = np.ones(len(order), np.uint8), np.empty(num_operators, np.int64)
    first[order[::-1]] = np.arange(len(order))[::-1]  # of equal indices the last one counts
    again[first[order]] = 0
    return again
