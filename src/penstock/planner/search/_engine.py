"""The planner's inner loop, in C++: what leaves between two uses, when it moves, how long it takes.

The C++ beside this file does the work on arrays; this file turns a step graph into them. An
*object* is a storage with bytes; a *gap* lies between two uses of an object, and the last gap of a
persistent object goes on at the beginning of the next step.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from penstock.codegen import load_optional_library, why_nothing_can_be_built
from penstock.errors import BuildError
from penstock.graph import Kind, Phase, StepGraph, alignment_bytes

_SOURCES = (
    "sequence.cpp",
    "choice.cpp",
    "rooms.cpp",
    "size_classes.cpp",
    "replay.cpp",
    "stacking.cpp",
    "order.cpp",
    "recompute.cpp",
    "engine.cpp",
)

READ, WRITE, CREATE = 0, 1, 2
_PERSISTENT, _INPUT, _KEPT, _PINNED = 1, 2, 4, 8

# Smaller objects leave only where larger ones are not enough: a transfer has a fixed cost.
MIN_EVICTED_BYTES = 64 * 1024
# How far ahead, in positions, values are fetched.
HORIZON = 4096


# `out_end` of what has not left by the end of the replay: it leaves as late as it may.
NEVER = np.iinfo(np.int32).max
NUM_WAYS = 6
PRIORITY_WAYS = (5, 4, 3)  # the fullest positions first, or by size
_MAX_CHAIN = 512  # operators run again for one operand
# This part of the arena is large, where large and small stays lie apart.
_LARGE = 8
# A stay as `struct Stay` of rooms.cpp has it.
STAY = np.dtype(
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


@dataclass(frozen=True)
class Rates:
    """Bytes per second out of the device and back."""

    out: float
    back: float


class Replay(NamedTuple):
    """What a replay of a choice found.

    Attributes:
        step_seconds: Time of a step once steps repeat.
        overflow: Bytes that are too many at the worst moment; at most 0 if it fits.
        out_end: For each gap the boundary by which its object has left.
        in_start: For each gap the boundary at which its object begins to come back; negative in
            the step before.
        starts: When each position's operator starts, in seconds since the step began.
    """

    step_seconds: float
    overflow: int
    out_end: np.ndarray
    in_start: np.ndarray
    starts: np.ndarray


def bytes_there(stays: np.ndarray, num_positions: int) -> np.ndarray:
    """Bytes of the stays (`STAY`) at each position; what is there over the end counts in both."""
    change = np.zeros(2 * num_positions + 1, np.int64)
    np.add.at(change, stays["start"], stays["bytes"])
    np.add.at(change, stays["end"], -stays["bytes"])
    return np.cumsum(change)[:-1].reshape(2, num_positions).sum(0)


class Taste(NamedTuple):
    """What a greedy order prefers; weights of bytes, and of operators overtaken.

    Attributes:
        fetch: Of operands that were last used long ago.
        create: Of new results.
        release: Of operands that nobody needs afterwards.
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
        handovers = [_handovers(graph, operator) for operator in range(len(graph.operators))]
        first_handover = _offsets(handovers)
        handed_from = np.array([a for part in handovers for a, _ in part], dtype=np.int32)
        handed_to = np.array([b for part in handovers for _, b in part], dtype=np.int32)
        self._handle = _library().problem_new(
            len(graph.operators),
            len(graph.storages),
            _pointer(self.operator_seconds),
            _pointer(self.object_bytes),
            _pointer(self.object_flags),
            _pointer(first_access),
            _pointer(self.access_object),
            _pointer(self.access_kind),
            _pointer(first_handover),
            _pointer(handed_from),
            _pointer(handed_to),
        )
        weakref.finalize(self, _library().problem_free, self._handle)
        self._first_predecessor = np.cumsum([0, *map(len, graph.predecessors)], dtype=np.int32)
        self._predecessors = np.array(
            [before for part in graph.predecessors for before in part], dtype=np.int32
        )

    def greedy_order(
        self,
        base: np.ndarray,
        taste: Taste,
        *,
        begin: int = 0,
        end: int | None = None,
        noise: np.ndarray | None = None,
    ) -> np.ndarray:
        """Order the operators at positions [begin, end) of a valid order anew, greedily.

        Args:
            base: A valid order, each operator once.
            taste: What is preferred.
            begin: First position that may change.
            end: Last one, exclusive; None: the end.
            noise: For each operator by which fraction its score is off.

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
            *taste,
            None if noise is None else _pointer(noise),
            _pointer(order),
        )
        return order


class Recipes:
    """How the values of a graph can be made again, as the engine sees it.

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
        self._handle = _library().recipes_new(
            len(graph.operators),
            len(graph.storages),
            len(object_of),
            _pointer(object_of),
            _pointer(initial),
            _pointer(is_forward),
            pointers(*(array.ctypes.data for array in first)),
            pointers(*(array.ctypes.data for array in items)),
        )
        weakref.finalize(self, _library().recipes_free, self._handle)

    def expand(self, order: np.ndarray, dropped: Collection[int]) -> np.ndarray | None:
        """Put what makes the dropped storages again before the operators that need them.

        Args:
            order: Operators, each once.
            dropped: As of `Recomputation.expand`.
        """
        order = np.ascontiguousarray(order, np.int32)
        items = np.fromiter(dropped, np.int32, len(dropped))
        length = _library().recipes_expand(
            self._handle, _pointer(order), len(order), _pointer(items), len(items), _MAX_CHAIN
        )
        if length < 0:
            return None
        expanded = np.empty(length, np.int32)
        _library().recipes_read(self._handle, _pointer(expanded))
        return expanded


class OperatorSequence:
    """A sequence of operators, and what follows from it alone.

    Args:
        problem: The graph.
        order: Operators by position, each at least once; from its second time on it is recomputed.

    Attributes:
        gap_object: For each gap its object.
        gap_start: The position of the use before it; -1 for an object that is never used.
        gap_end: The position of the use after it; beyond the sequence in the next step.
        base: Live bytes by position if nothing leaves.
        handed: By position the objects (from, to) of which the second takes the room of the
            first; -1 for none.
    """

    def __init__(self, problem: Problem, order: SequenceOf[int] | np.ndarray) -> None:
        self.problem = problem
        self.order = np.ascontiguousarray(order, dtype=np.int32)
        self.again = recomputed(self.order, len(problem.operator_seconds))
        library = _library()
        self._handle = library.sequence_new(
            problem._handle, _pointer(self.order), _pointer(self.again), len(self.order)
        )
        weakref.finalize(self, library.sequence_free, self._handle)
        num_gaps = library.sequence_num_gaps(self._handle)
        self.gap_object = np.empty(num_gaps, np.int32)
        self.gap_start = np.empty(num_gaps, np.int32)
        self.gap_end = np.empty(num_gaps, np.int32)
        self.base = np.empty(len(self.order), np.int64)
        handed_from = np.empty(len(self.order), np.int32)
        handed_to = np.empty(len(self.order), np.int32)
        library.sequence_read(
            self._handle,
            _pointer(self.gap_object),
            _pointer(self.gap_start),
            _pointer(self.gap_end),
            _pointer(self.base),
            _pointer(handed_from),
            _pointer(handed_to),
        )
        self.handed = np.stack([handed_from, handed_to], axis=1)

    @property
    def gap_bytes(self) -> np.ndarray:
        """Bytes of each gap's object."""
        return self.problem.object_bytes[self.gap_object]

    @functools.cached_property
    def working_set(self) -> np.ndarray:
        """By position the least bytes with which its operator can run."""
        live = np.concatenate([self.base, np.zeros(len(self.base), np.int64)])
        change = np.zeros(len(live) + 1, np.int64)
        np.add.at(change, self.gap_start + 1, self.gap_bytes)
        np.add.at(change, self.gap_end, -self.gap_bytes)
        live = live - np.cumsum(change[:-1])
        return live[: len(self.base)] + live[len(self.base) :]

    @functools.cached_property
    def uses(self) -> dict[int, list[tuple[int, int]]]:
        """For each object its uses: position and kind."""
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
        for item, own in uses.items():  # the caller reads them when the step ends
            if flags[item] & _KEPT and not flags[item] & _PERSISTENT and own[-1][0] < last:
                own.append((last, READ))
        return uses

    @property
    def compute_seconds(self) -> float:
        """Time of the operators alone."""
        return float(self.problem.operator_seconds[self.order].sum())

    def choose(
        self,
        capacity: int | np.ndarray,
        *,
        bias: np.ndarray | None = None,
        evicted: np.ndarray | None = None,
    ) -> tuple[np.ndarray, int]:
        """Choose what leaves so that live bytes never exceed the capacity.

        Args:
            capacity: Bytes, for all positions or for each.
            bias: Added to the next use of each gap, in positions: what leaves first.
            evicted: A choice to begin with.

        Returns:
            For each gap whether its object leaves, and by how many bytes the worst position
            exceeds the capacity (at most 0 if it fits).
        """
        evicted = np.zeros(len(self.gap_object), np.uint8) if evicted is None else evicted.copy()
        capacities = np.full(len(self.order), capacity, np.int64)
        worst = _library().sequence_choose(
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

    def choose_in_classes(
        self, class_of_object: np.ndarray, counts: np.ndarray, class_bytes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Choose what leaves where memory consists of equal slots for each size class.

        Args:
            class_of_object: For each object its class; -1 for those without bytes.
            counts: Slots of each class.
            class_bytes: Bytes of a slot of each class.

        Returns:
            For each gap whether its object leaves, and a `STAY` with its address for each chain of
            stays; None if that many slots are not enough.
        """
        evicted = np.zeros(len(self.gap_object), np.uint8)
        most = len(self.gap_object) + len(self.order) + len(self.problem.access_object)
        stays = np.zeros(most + len(self.problem.object_bytes), STAY)
        num_stays = _library().sequence_choose_in_classes(
            self._handle,
            _pointer(class_of_object),
            len(counts),
            _pointer(counts),
            _pointer(class_bytes),
            _pointer(evicted),
            _pointer(stays),
        )
        return None if num_stays < 0 else (evicted, stays[:num_stays])

    def dirty(self, evicted: np.ndarray) -> np.ndarray:
        """For each evicted gap whether its object has to be written before it is gone."""
        dirty = np.zeros(len(evicted), np.uint8)
        _library().sequence_dirty(self._handle, _pointer(evicted), _pointer(dirty))
        return dirty

    def replay(
        self,
        evicted: np.ndarray,
        room: int | np.ndarray,
        rates: SequenceOf[Rates],
        *,
        tier: np.ndarray | None = None,
        horizon: int = HORIZON,
    ) -> Replay:
        """Time a step in which the objects of the evicted gaps leave and come back.

        Args:
            evicted: For each gap whether its object leaves.
            room: Bytes of the arena; or stays with addresses (`STAY`), which then wait for
                each other.
            rates: Of the links to the tier below, and of those to a second one, if any.
            tier: For each gap to which of them its object goes; None: to the first.
            horizon: How many positions ahead values may be fetched.
        """
        library = _library()
        if isinstance(room, np.ndarray):
            where = (_pointer(room), len(room))
            return self._replay(library.sequence_replay_at, where, evicted, rates, tier, horizon)
        return self._replay(library.sequence_replay, (room,), evicted, rates, tier, horizon)

    def stack(
        self,
        stays: np.ndarray,
        capacity: int,
        *,
        step_seconds: float,
        way: int,
        priority: np.ndarray | None = None,
    ) -> np.ndarray:
        """Give stays offsets at which they wait little for each other.

        Args:
            stays: `STAY`s; gets the offsets.
            capacity: Bytes of the arena.
            step_seconds: Time of a step, as far as it is known.
            way: Which place is preferred among equals, below `NUM_WAYS`.
            priority: For each stay what is added to the share of the arena that is taken at its
                fullest position, or by what share of a step it comes earlier, by which the
                `PRIORITY_WAYS` order stays; None: nothing.

        Returns:
            For each position how many bytes its largest piece lacks for one that found no room;
            nowhere any if all have an offset.
        """
        num_positions = len(self.order)
        missing = np.zeros(num_positions, np.int64)
        _library().stack(
            _pointer(stays),
            len(stays),
            num_positions,
            capacity,
            capacity // _LARGE,
            int(bytes_there(stays, num_positions).argmax()),
            step_seconds,
            way,
            None if priority is None else _pointer(priority),
            _pointer(missing),
        )
        return missing

    def _replay(
        self,
        function: Callable[..., int],
        where: tuple[Any, ...],
        evicted: np.ndarray,
        rates: SequenceOf[Rates],
        tier: np.ndarray | None,
        horizon: int,
    ) -> Replay:
        out_end = np.full(len(evicted), NEVER, np.int32)
        in_start = np.full(len(evicted), np.iinfo(np.int32).min, np.int32)
        starts = np.empty(len(self.order))
        seconds = ctypes.c_double()
        pace = ctypes.c_double * 2
        overflow = function(
            self._handle,
            *where,
            pace(*(1 / rate.out for rate in rates)),
            pace(*(1 / rate.back for rate in rates)),
            None if tier is None else _pointer(tier),
            _pointer(evicted),
            horizon,
            _pointer(out_end),
            _pointer(in_start),
            _pointer(starts),
            ctypes.byref(seconds),
        )
        return Replay(seconds.value, overflow, out_end, in_start, starts)

    def tiers(self, evicted: np.ndarray, host_bytes: int) -> np.ndarray:
        """For each evicted gap 0 if its object goes to the host, 1 if to the file.

        The host takes what moves often and stays there briefly, as long as there is room.
        """
        tier = np.zeros(len(evicted), np.uint8)
        _library().sequence_place_below(self._handle, _pointer(evicted), host_bytes, _pointer(tier))
        return tier


def recomputed(order: np.ndarray, num_operators: int) -> np.ndarray:
    """For each position whether its operator has run before."""
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
    """The objects that an operator touches, and how; each once."""
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


def _handovers(graph: StepGraph, index: int) -> list[tuple[int, int]]:
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
        "sequence_num_gaps": (i32, [pointer]),
        "sequence_read": (None, [pointer] * 7),
        "sequence_choose": (i64, [pointer, pointer, i64, pointer, pointer]),
        "sequence_class_needs": (None, [pointer, pointer, i32, pointer, pointer]),
        "sequence_choose_in_classes": (i32, [pointer, pointer, i32, *[pointer] * 4]),
        "sequence_dirty": (None, [pointer] * 3),
        "sequence_replay": (
            i64,
            [pointer, i64, *replay_tail],
        ),
        "sequence_replay_at": (i64, [pointer, pointer, i32, *replay_tail]),
        "stack": (i32, [pointer, i32, i32, i64, i64, i32, double, i32, pointer, pointer]),
        "sequence_place_below": (None, [pointer, pointer, i64, pointer]),
        "recipes_new": (pointer, [i32, i32, i32, *[pointer] * 5]),
        "recipes_free": (None, [pointer]),
        "recipes_expand": (i32, [pointer, pointer, i32, pointer, i32, i32]),
        "recipes_read": (None, [pointer, pointer]),
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
