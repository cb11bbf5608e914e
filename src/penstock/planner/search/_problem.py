"""The search engine: its C++ library, and a step graph as arrays for it.

Objects are storages; the engine knows their accesses, and results that may reuse their place.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from penstock.codegen import load_optional_library, why_nothing_can_be_built
from penstock.errors import BuildError
from penstock.graph import Kind, StepGraph, Storage, alignment_bytes
from penstock.planner._native_calls import flatten

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


# An interval of an object on the device, with the fields of `struct Interval` of allocators.cpp.
INTERVAL = np.dtype(
    [(name, np.int64) for name in ("offset", "bytes")]
    + [(name, np.float64) for name in ("from", "until")]
    + [(name, np.int32) for name in ("start", "end", "arrives", "leaves")]
)
# A part of a live range between evicted holes: `struct Part` of evictions.cpp. It comes in after
# the hole `arrives`, leaves in `leaves`, reuses the place of `before`, and `next` reuses its place.
PART = np.dtype(
    [
        (name, np.int32)
        for name in ("object", "start", "end", "arrives", "leaves", "before", "next", "chain")
    ]
)
NO_HOLE, ALWAYS = -1, -2  # in place of the hole at an end of an interval
READ, WRITE, CREATE = 0, 1, 2
PERSISTENT, INPUT, KEPT = 1, 2, 4


_Elements = ctypes.c_char * 0  # of any number; only their address is asked for


class _ElementsType(NamedTuple):
    """Type of an argument that is a contiguous array of elements of a type, or None."""

    dtype: np.dtype


def engine() -> SimpleNamespace:
    """Return the functions of the engine.

    Raises:
        BuildError: There is no compiler.
    """
    functions = load_engine()
    if functions is None:
        raise BuildError(f"nothing can be searched without C++: {why_nothing_can_be_built()}")
    return functions


@functools.cache
def load_engine() -> SimpleNamespace | None:
    """Return the functions of the engine, or None where there is no compiler."""
    pointer, i32, i64, f64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
    i32s, i64s, f64s, bools, intervals, parts = (
        _ElementsType(np.dtype(kind))
        for kind in (np.int32, np.int64, np.float64, np.uint8, INTERVAL, PART)
    )
    replay = [pointer, bools, bools, f64s, i32, i32s, i32s, f64s]
    functions: dict[str, tuple[Any, list[Any]]] = {
        "problem_new": (
            pointer,
            [i32, i32, f64s, i64s, bools, i32s, i32s, bools, i32s, i32s, i32s, i32s, i32s],
        ),
        "problem_free": (None, [pointer]),
        "problem_greedy_order": (None, [pointer, i32s, i32, i32, f64s, i32s]),
        "sequence_new": (pointer, [pointer, i32s, bools, i32]),
        "sequence_free": (None, [pointer]),
        "sequence_num_holes": (i32, [pointer]),
        "sequence_most_parts": (i32, [pointer]),
        "sequence_read": (None, [pointer, i32s, i32s, i32s, i64s]),
        "sequence_evict": (None, [pointer, i64s, i64, f64s, bools]),
        "sequence_cut": (i32, [pointer, bools, i32s, i32s, parts]),
        "sequence_class_needs": (None, [pointer, i32s, i32, i64s, i64s]),
        "sequence_evict_in_classes": (i32, [pointer, i32s, i32, i64s, i64s, bools, intervals]),
        "sequence_dirty": (None, [pointer, bools, bools]),
        "sequence_replay": (i64, [*replay, i64]),
        "sequence_replay_at": (i64, [*replay, intervals, i32]),
        "sequence_assign_tiers": (None, [pointer, bools, i64, bools]),
        "assign_offsets": (None, [intervals, i32, i32, i64, i64, i32, f64, i32, f64s, i64s]),
        "expander_new": (pointer, [i32, i32, i32s, i32s, bools, i32s, i32s]),
        "expander_free": (None, [pointer]),
        "expander_expand": (i32, [pointer, i32s, i32, i32s, i32, i32]),
        "expander_read": (None, [pointer, i32s]),
    }
    sources = [Path(__file__).with_name(name) for name in _SOURCES]
    library = load_optional_library(
        "planner_engine",
        sources,
        flags=("-O3",),
        functions={
            name: (result, [pointer if isinstance(kind, _ElementsType) else kind for kind in kinds])
            for name, (result, kinds) in functions.items()
        },
        work="plans are made",
        otherwise="by paging, without a search",
        level=logging.WARNING,
    )
    if library is None:
        return None
    calls = {name: _take_arrays(getattr(library, name), functions[name][1]) for name in functions}
    return SimpleNamespace(**calls)


def _take_arrays(function: Callable[..., Any], kinds: Sequence[Any]) -> Callable[..., Any]:
    """Return a function that takes arrays where a C function takes their addresses.

    They are converted before ctypes converts arguments, since it makes an ArgumentError of every
    exception in a conversion: also of the KeyboardInterrupt at which a search ends early.
    """
    dtypes = [kind.dtype if isinstance(kind, _ElementsType) else None for kind in kinds]
    arrays = [(index, dtype) for index, dtype in enumerate(dtypes) if dtype is not None]

    def call(*arguments: Any) -> Any:
        if len(arguments) != len(dtypes):
            raise TypeError(f"expected {len(dtypes)} arguments; got {len(arguments)}")
        converted = list(arguments)
        for index, dtype in arrays:
            if converted[index] is not None:
                converted[index] = _find_elements(converted[index], dtype)
        return function(*converted)

    return call


def _find_elements(array: Any, dtype: np.dtype) -> Any:
    """Return where an array's elements are, as ctypes takes it.

    Searches of small steps spend a tenth of their time here: `array.ctypes` takes five times as
    long as a look through the buffer protocol, which needs an array that may be written.
    """
    flags = array.flags
    if (array.dtype is not dtype and array.dtype != dtype) or not flags.c_contiguous:
        raise TypeError(f"expected a contiguous array of {dtype}; got {array.dtype}")
    return _Elements.from_buffer(array) if flags.writeable else array.ctypes.data


class GreedyWeights(NamedTuple):
    """Weights of bytes, and of operators overtaken, in the score of a greedy order.

    The ready operator with the least score runs next:

        fetch * bytes fetched + create * bytes made - release * bytes freed + late * overtaken
    """

    fetch: float  # of operands that were last used long ago
    create: float  # of new results
    release: float  # of operands that are used for the last time
    late: float  # of each earlier operator of the program that has to wait, in bytes
    capacity: int  # bytes touched since its last use after which an operand counts as far away
    window: int = 128  # number of candidates, the earliest in the program first


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
        operator_seconds: Sequence[float] | np.ndarray,
        *,
        alignment: int | None = None,
    ) -> None:
        self.graph = graph
        self.operator_seconds = np.asarray(operator_seconds, dtype=np.float64)
        self.actual_bytes = np.array([s.num_bytes for s in graph.storages], dtype=np.int64)
        self.alignment = alignment_bytes(graph) if alignment is None else alignment
        self.object_bytes = -(-self.actual_bytes // self.alignment) * self.alignment
        operators = range(len(graph.operators))
        accesses = [_accesses(graph, operator) for operator in operators]
        reuses = [_reuses(graph, operator) for operator in operators]
        self._arrays = (  # the engine reads these ones
            self.operator_seconds,
            self.object_bytes,
            np.array([_flags(storage) for storage in graph.storages], np.uint8),
            *flatten([list(kinds) for kinds in accesses], np.int32),
            flatten([list(kinds.values()) for kinds in accesses], np.int32)[1].astype(np.uint8),
            *flatten([[old for old, _ in pairs] for pairs in reuses], np.int32),
            flatten([[new for _, new in pairs] for pairs in reuses], np.int32)[1],
            *flatten(graph.predecessors, np.int32),
        )
        sizes = len(graph.operators), len(graph.storages)
        self.handle = engine().problem_new(*sizes, *self._arrays)
        weakref.finalize(self, engine().problem_free, self.handle)

    def greedy_order(
        self, base: np.ndarray, weights: GreedyWeights, *, begin: int = 0, end: int | None = None
    ) -> np.ndarray:
        """Order the operators at positions [begin, end) of a valid order anew, greedily.

        Returns:
            A valid order.
        """
        base, order = np.ascontiguousarray(base, np.int32), np.empty(len(base), np.int32)
        end = len(base) if end is None else end
        parameters = np.array(weights, np.float64)
        engine().problem_greedy_order(self.handle, base, begin, end, parameters, order)
        return order


def _flags(storage: Storage) -> int:
    if storage.persistent:
        return PERSISTENT
    flags = INPUT if storage.initial is not None else 0
    return flags | (KEPT if storage.final is not None else 0)


def _accesses(graph: StepGraph, index: int) -> dict[int, int]:
    """Return the kind of access by object that an operator accesses."""
    operator = graph.operators[index]
    kinds: dict[int, int] = {}
    for value in operator.reads:
        kinds.setdefault(graph.storage_of_value[value], READ)
    for old, _ in operator.mutates:
        kinds[graph.storage_of_value[old]] = WRITE
    for value in operator.creates:
        storage = graph.storage_of_value[value]
        kinds[storage] = WRITE if graph.storages[storage].persistent else CREATE
    return {item: kind for item, kind in kinds.items() if graph.storages[item].num_bytes}


def _reuses(graph: StepGraph, index: int) -> list[tuple[int, int]]:
    operator = graph.operators[index]
    return [
        (graph.storage_of_value[read], graph.storage_of_value[created])
        for read, created in operator.may_overwrite
        if not graph.storages[graph.storage_of_value[created]].persistent
        and graph.storages[graph.storage_of_value[read]].kind != Kind.INPUT
        # A result of the step stays, also where the last operator is the last to read it.
        and graph.storages[graph.storage_of_value[read]].final != read
    ]
