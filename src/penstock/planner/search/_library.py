"""The search engine's C++ library."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.codegen import load_optional_library, why_nothing_can_be_built
from penstock.errors import BuildError

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


def _array(dtype: npt.DTypeLike) -> Any:
    """Return the type of an argument that is a contiguous array of elements of a type, or None."""
    array = np.ctypeslib.ndpointer(dtype, flags="C_CONTIGUOUS")

    def from_param(value: np.ndarray | None) -> Any:
        return None if value is None else array.from_param(value)

    return type("Array", (), {"from_param": staticmethod(from_param)})


def engine() -> ctypes.CDLL:
    """Return the engine.

    Raises:
        BuildError: There is no compiler.
    """
    library = load_engine()
    if library is None:
        raise BuildError(f"nothing can be searched without C++: {why_nothing_can_be_built()}")
    return library


@functools.cache
def load_engine() -> ctypes.CDLL | None:
    """Return the engine, or None where there is no compiler."""
    pointer, i32, i64, f64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double
    i32s, i64s, f64s, bools = map(_array, (np.int32, np.int64, np.float64, np.uint8))
    intervals, parts = _array(INTERVAL), _array(PART)
    replay = [pointer, bools, bools, f64s, i32, i32s, i32s, f64s]
    functions = {
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
        "sequence_evict": (i64, [pointer, i64s, i64, f64s, bools]),
        "sequence_cut": (i32, [pointer, bools, i32s, i32s, parts]),
        "sequence_class_needs": (None, [pointer, i32s, i32, i64s, i64s]),
        "sequence_evict_in_classes": (i32, [pointer, i32s, i32, i64s, i64s, bools, intervals]),
        "sequence_dirty": (None, [pointer, bools, bools]),
        "sequence_replay": (i64, [*replay, i64]),
        "sequence_replay_at": (i64, [*replay, intervals, i32]),
        "sequence_assign_tiers": (None, [pointer, bools, i64, bools]),
        "assign_offsets": (None, [intervals, i32, i32, i64, i64, i32, f64, i32, f64s, i64s]),
        "expander_new": (pointer, [i32, i32, i32, i32s, i32s, bools, i32s, i32s]),
        "expander_free": (None, [pointer]),
        "expander_expand": (i32, [pointer, i32s, i32, i32s, i32, i32]),
        "expander_read": (None, [pointer, i32s]),
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
