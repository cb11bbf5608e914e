"""The planner's inner loop, in C++: evictions, the times of transfers, and the time of a step.

The C++ beside this file works on arrays; this file turns a step graph into them. An *object* is a
storage with bytes; a *hole* lies between two uses of an object, and the last hole of a persistent
object goes on at the beginning of the next step.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.codegen import load_optional_library, why_nothing_can_be_built
from penstock.errors import BuildError
from penstock.graph import Kind, Phase, StepGraph, alignment_bytes
from penstock.planner._link_rates import LinkRates

_SOURCES = (
    "sequence.cpp",
    "evictions.cpp",
    "allocators.cpp",
    "size_classes.cpp",
    "replay.cpp",
    "offset_assignment.cpp",
    "order.cpp",
    "recompute.cpp",
    "engine.cpp",
)

READ, WRITE, CREATE = 0, 1, 2
_PERSISTENT, _INPUT, _KEPT, _PINNED = 1, 2, 4, 8

# Smaller objects leave only where larger ones are not enough: a transfer has a fixed cost.
MIN_EVICTED_BYTES = 64 * 1024
# Positions ahead of their use at which values may be fetched, at most.
MAX_PREFETCH_DISTANCE = 4096


# `out_end` of an object that has not left by the end of the replay: it leaves as late as it may.
NEVER = np.iinfo(np.int32).max
NUM_STRATEGIES = 6
PRIORITY_STRATEGIES = (5, 4, 3)  # the fullest positions first, or by size
_MAX_CHAIN = 512  # operators run again for one operand
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


class GreedyWeights(NamedTuple):
    """Weights of bytes, and of operators overtaken, in the score of a greedy order.

    The ready operator with the least score runs next:

        fetch * bytes fetched + create * bytes made - release * bytes freed + late * overtaken

    Attributes:
        fetch: Of operands that were last used long ago.
        create: Of new results.
        release: Of operands that are used for the last time.
        late: Of each earlier operator of the program that has to wait, in bytes.
        capacity: Bytes touched since its last use after which an operand counts as far away.
        window: Number of candidates, the earliest in the program first.
    """

    fetch: float
    create: float
    release: float
    late: float
    capacity: int
    window: int = 128


class Problem:
    """A step graph as the engine sees it.

    Args:
        graph: The graph.
        operator_seconds: Time of each operator.
        alignment: Bytes of which offsets are multiples; None: `alignment_bytes` of the graph.
    """

    def __init__(
        self,
        graph: StepGraph,
        operator_seconds: SequenceOf[float] | np.ndarray,
        *,
        alignment: int | None = None,
    ) -> None:
        self.graph = graph
        self.operator_seconds = np.asarray(operator_seconds, dtype=np.float64)
        self.actual_bytes = np.array([s.num_bytes for s in graph.storages], dtype=np.int64)
        self.alignment = alignment_bytes(graph) if alignment is None else alignment
        self.object_bytes = -(-self.actual_bytes // self.alignment) * self.alignment
        self.object_flags = np.array(
            [_flags(graph, i) for i in range(len(graph.storages))], np.uint8
        )
        accesses = [_accesses(graph, operator) for operator in range(len(graph.operators))]
        first_access = _offsets(accesses)
        self.access_object = np.array([o for part in accesses for o, _ in part], dtype=np.int32)
        self.access_kind = np.array([kind for part in accesses for _, kind in part], dtype=np.uint8)
        self.first_access = first_access
        reuses = [_reuses(graph, operator) for operator in range(len(graph.operators))]
        first_reuse = _offsets(reuses)
        reused_from = np.array([a for part in reuses for a, _ in part], dtype=np.int32)
        reused_by = np.array([b for part in reuses for _, b in part], dtype=np.int32)
        self._handle = _library().problem_new(
            len(graph.operators),
            len(graph.storages),
            _pointer(self.operator_seconds),
            _pointer(self.object_bytes),
            _pointer(self.object_flags),
            _pointer(first_access),
            _pointer(self.access_object),
            _pointer(self.access_kind),
            _pointer(first_reuse),
            _pointer(reused_from),
            _pointer(reused_by),
        )
        weakref.finalize(self, _library().problem_free, self._handle)
        self._first_predecessor = np.cumsum([0, *map(len, graph.predecessors)], dtype=np.int32)
        self._predecessors = np.array(
            [before for part in graph.predecessors for before in part], dtype=np.int32
        )

    def greedy_order(
        self,
        base: np.ndarray,
        weights: GreedyWeights,
        *,
        begin: int = 0,
        end: int | None = None,
        noise: np.ndarray | None = None,
    ) -> np.ndarray:
        """Order the operators at positions [begin, end) of a valid order anew, greedily.

        Args:
            base: A valid order, each operator once.
            weights: Weights of the score.
            begin: First position that may change.
            end: Last one, exclusive; None: the end.
            noise: For each operator the fraction by which its score is changed.

        Returns:
            A valid order.
        """
        base = np.ascontiguousarray(base, np.int32)
        order = np.empty_like(base)
        noise = None if noise is None else np.ascontiguousarray(noise, np.float32)
        _library().problem_greedy_order(
            self._handle,
            _pointer(self._first_predecessor),
            _pointer(self._predecessors),
            _pointer(base),
            begin,
            len(base) if end is None else end,
            *weights,
            None if noise is None else _pointer(noise),
            _pointer(order),
        )
        return order


class OrderExpander:
    """Orders with second runs that make the values of a graph again.

    Args:
        graph: The graph.
        chain_of: For each storage that can be dropped the operators that make it, in order.
    """

    def __init__(self, graph: StepGraph, chain_of: Mapping[int, SequenceOf[int]]) -> None:
        again = [operator.recompute_target is not None for operator in graph.operators]
        operators = list(zip(graph.operators, again, strict=True))
        lists = (
            [operator.needs for operator in graph.operators],
            [operator.makes for operator in graph.operators],
            [operator.reads if other else operator.needs for operator, other in operators],
            [operator.creates if other else operator.makes for operator, other in operators],
            [chain_of.get(item, ()) for item in range(len(graph.storages))],
        )
        first = [np.cumsum([0, *map(len, parts)], dtype=np.int32) for parts in lists]
        items = [np.array([i for part in parts for i in part], np.int32) for parts in lists]
        object_of = np.array(graph.storage_of_value, np.int32)
        given = [storage.initial for storage in graph.storages]
        initial = np.array([-1 if value is None else value for value in given], np.int32)
        is_forward = np.array([o.phase is Phase.FORWARD for o in graph.operators], np.uint8)
        pointers = ctypes.c_void_p * len(lists)
        self._handle = _library().expander_new(
            len(graph.operators),
            len(graph.storages),
            len(object_of),
            _pointer(object_of),
            _pointer(initial),
            _pointer(is_forward),
            pointers(*(array.ctypes.data for array in first)),
            pointers(*(array.ctypes.data for array in items)),
        )
        weakref.finalize(self, _library().expander_free, self._handle)

    def expand(self, order: np.ndarray, dropped: Collection[int]) -> np.ndarray | None:
        """Insert second runs before the operators that need dropped storages.

        Args:
            order: Operators, each once.
            dropped: Storages, and complements of those that are dropped briefly.
        """
        order = np.ascontiguousarray(order, np.int32)
        items = np.fromiter(dropped, np.int32, len(dropped))
        length = _library().expander_expand(
            self._handle, _pointer(order), len(order), _pointer(items), len(items), _MAX_CHAIN
        )
        if length < 0:
            return None
        expanded = np.empty(length, np.int32)
        _library().expander_read(self._handle, _pointer(expanded))
        return expanded


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

    def __init__(self, problem: Problem, order: SequenceOf[int] | np.ndarray) -> None:
        self.problem = problem
        self.order = np.ascontiguousarray(order, dtype=np.int32)
        self.again = find_second_runs(self.order, len(problem.operator_seconds))
        library = _library()
        self._handle = library.sequence_new(
            problem._handle, _pointer(self.order), _pointer(self.again), len(self.order)
        )
        weakref.finalize(self, library.sequence_free, self._handle)
        num_holes = library.sequence_num_holes(self._handle)
        self.hole_object = np.empty(num_holes, np.int32)
        self.hole_start = np.empty(num_holes, np.int32)
        self.hole_end = np.empty(num_holes, np.int32)
        self.base = np.empty(len(self.order), np.int64)
        reused_from = np.empty(len(self.order), np.int32)
        reused_by = np.empty(len(self.order), np.int32)
        library.sequence_read(
            self._handle,
            _pointer(self.hole_object),
            _pointer(self.hole_start),
            _pointer(self.hole_end),
            _pointer(self.base),
            _pointer(reused_from),
            _pointer(reused_by),
        )
        self.reused = np.stack([reused_from, reused_by], axis=1)

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
                if not (again[position] and kind != READ and flags[item] & _PERSISTENT):
                    uses[item].append((position, kind))
        last = len(self.order) - 1
        for item, own in uses.items():  # results are read when the step ends
            if flags[item] & _KEPT and not flags[item] & _PERSISTENT and own[-1][0] < last:
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
        worst = _library().sequence_evict(
            self._handle,
            _pointer(capacities),
            MIN_EVICTED_BYTES,
            None if bias is None else _pointer(bias),
            _pointer(evicted),
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
        _library().sequence_class_needs(
            self._handle, _pointer(class_of_object), num_classes, _pointer(least), _pointer(most)
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
        evicted = np.zeros(len(self.hole_object), np.uint8)
        most = len(self.hole_object) + len(self.order) + len(self.problem.access_object)
        intervals = np.zeros(most + len(self.problem.object_bytes), INTERVAL)
        num_intervals = _library().sequence_evict_in_classes(
            self._handle,
            _pointer(class_of_object),
            len(counts),
            _pointer(counts),
            _pointer(class_bytes),
            _pointer(evicted),
            _pointer(intervals),
        )
        return None if num_intervals < 0 else (evicted, intervals[:num_intervals])

    def dirty(self, evicted: np.ndarray) -> np.ndarray:
        """Return for each evicted hole whether its object has to be written before it is gone."""
        dirty = np.zeros(len(evicted), np.uint8)
        _library().sequence_dirty(self._handle, _pointer(evicted), _pointer(dirty))
        return dirty

    def replay(
        self,
        evicted: np.ndarray,
        memory: int | np.ndarray,
        rates: SequenceOf[LinkRates],
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
        library = _library()
        if isinstance(memory, np.ndarray):
            where = (_pointer(memory), len(memory))
            return self._replay(
                library.sequence_replay_at, where, evicted, rates, tier, prefetch_distance
            )
        return self._replay(
            library.sequence_replay, (memory,), evicted, rates, tier, prefetch_distance
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
        missing = np.zeros(num_positions, np.int64)
        _library().assign_offsets(
            _pointer(intervals),
            len(intervals),
            num_positions,
            capacity,
            capacity // _LARGE,
            int(resident_bytes(intervals, num_positions).argmax()),
            step_seconds,
            strategy,
            None if priority is None else _pointer(priority),
            _pointer(missing),
        )
        return missing

    def _replay(
        self,
        function: Callable[..., int],
        where: tuple[Any, ...],
        evicted: np.ndarray,
        rates: SequenceOf[LinkRates],
        tier: np.ndarray | None,
        prefetch_distance: int,
    ) -> ReplayTimes:
        out_end = np.full(len(evicted), NEVER, np.int32)
        in_start = np.full(len(evicted), np.iinfo(np.int32).min, np.int32)
        starts = np.empty(len(self.order))
        seconds = ctypes.c_double()
        pace = ctypes.c_double * 2
        overflow = function(
            self._handle,
            *where,
            pace(*(1 / rate.outward for rate in rates)),
            pace(*(1 / rate.inward for rate in rates)),
            None if tier is None else _pointer(tier),
            _pointer(evicted),
            prefetch_distance,
            _pointer(out_end),
            _pointer(in_start),
            _pointer(starts),
            ctypes.byref(seconds),
        )
        return ReplayTimes(seconds.value, overflow, out_end, in_start, starts)

    def tiers(self, evicted: np.ndarray, host_bytes: int) -> np.ndarray:
        """Return for each evicted hole the tier of its object: 0 the host, 1 the file.

        The host takes objects that move often and stay there briefly, as long as they fit.
        """
        tier = np.zeros(len(evicted), np.uint8)
        _library().sequence_assign_tiers(
            self._handle, _pointer(evicted), host_bytes, _pointer(tier)
        )
        return tier


def find_second_runs(order: np.ndarray, num_operators: int) -> np.ndarray:
    """Return for each position whether its operator has run before."""
    again, first = np.ones(len(order), np.uint8), np.empty(num_operators, np.int64)
    first[order[::-1]] = np.arange(len(order))[::-1]  # of equal indices the last one counts
    again[first[order]] = 0
    return again


def _flags(graph: StepGraph, index: int) -> int:
    storage = graph.storages[index]
    if storage.persistent:
        return _PERSISTENT
    flags = _INPUT if storage.initial is not None else 0
    return flags | (_KEPT if storage.final is not None else 0)


def _accesses(graph: StepGraph, index: int) -> list[tuple[int, int]]:
    """Return the objects that an operator accesses and the kinds of access, each object once."""
    operator = graph.operators[index]
    kinds: dict[int, int] = {}
    for value in operator.reads:
        kinds.setdefault(graph.storage_of_value[value], READ)
    for old, _ in operator.mutates:
        kinds[graph.storage_of_value[old]] = WRITE
    for value in operator.creates:
        storage = graph.storage_of_value[value]
        kinds[storage] = WRITE if graph.storages[storage].persistent else CREATE
    return [(o, kind) for o, kind in kinds.items() if graph.storages[o].num_bytes]


def _reuses(graph: StepGraph, index: int) -> list[tuple[int, int]]:
    operator = graph.operators[index]
    return [
        (graph.storage_of_value[read], graph.storage_of_value[created])
        for read, created in operator.may_overwrite
        if not graph.storages[graph.storage_of_value[created]].persistent
        and graph.storages[graph.storage_of_value[read]].kind != Kind.INPUT
    ]


def _offsets(parts: list[list[tuple[int, int]]]) -> np.ndarray:
    return np.cumsum([0, *map(len, parts)], dtype=np.int32)


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _library() -> ctypes.CDLL:
    library = load_engine()
    if library is None:
        raise BuildError(f"nothing can be searched without C++: {why_nothing_can_be_built()}")
    return library


@functools.cache
def load_engine() -> ctypes.CDLL | None:
    """Return the engine, or None where there is no compiler."""
    pointer, i32, i64, double = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
    replay_tail = [*[pointer] * 4, i32, *[pointer] * 4]
    functions = {
        "problem_new": (pointer, [i32, i32, *[pointer] * 9]),
        "problem_free": (None, [pointer]),
        "problem_greedy_order": (
            None,
            [*[pointer] * 4, i32, i32, *[double] * 4, i64, i32, pointer, pointer],
        ),
        "sequence_new": (pointer, [pointer, pointer, pointer, i32]),
        "sequence_free": (None, [pointer]),
        "sequence_num_holes": (i32, [pointer]),
        "sequence_read": (None, [pointer] * 7),
        "sequence_evict": (i64, [pointer, pointer, i64, pointer, pointer]),
        "sequence_class_needs": (None, [pointer, pointer, i32, pointer, pointer]),
        "sequence_evict_in_classes": (i32, [pointer, pointer, i32, *[pointer] * 4]),
        "sequence_dirty": (None, [pointer] * 3),
        "sequence_replay": (
            i64,
            [pointer, i64, *replay_tail],
        ),
        "sequence_replay_at": (i64, [pointer, pointer, i32, *replay_tail]),
        "assign_offsets": (i32, [pointer, i32, i32, i64, i64, i32, double, i32, pointer, pointer]),
        "sequence_assign_tiers": (None, [pointer, pointer, i64, pointer]),
        "expander_new": (pointer, [i32, i32, i32, *[pointer] * 5]),
        "expander_free": (None, [pointer]),
        "expander_expand": (i32, [pointer, pointer, i32, pointer, i32, i32]),
        "expander_read": (None, [pointer, pointer]),
    }
    sources = [Path(__file__).with_name(name) for name in _SOURCES]
    return load_optional_library(
        "planner_engine",
        sources,
        flags=("-O3",),
        functions=functions,
        work="plans are made",
        otherwise="by paging, without a search",
    )
