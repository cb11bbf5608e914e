"""The search engine's C++ library."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import numpy as np

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


def pointer_to(array: np.ndarray | None) -> ctypes.c_void_p | None:
    """Return the address of an array's data; None for None."""
    return None if array is None else ctypes.c_void_p(array.ctypes.data)


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
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    functions = {
        "problem_new": (pointer, [pointer]),
        "problem_free": (None, [pointer]),
        "problem_greedy_order": (None, [pointer] * 2),
        "sequence_new": (pointer, [pointer, pointer, pointer, i32]),
        "sequence_free": (None, [pointer]),
        "sequence_num_holes": (i32, [pointer]),
        "sequence_read": (None, [pointer] * 2),
        "sequence_evict": (i64, [pointer, pointer, i64, pointer, pointer]),
        "sequence_class_needs": (None, [pointer, pointer, i32, pointer, pointer]),
        "sequence_evict_in_classes": (i32, [pointer] * 2),
        "sequence_dirty": (None, [pointer] * 3),
        "sequence_replay": (i64, [pointer] * 2),
        "sequence_replay_at": (i64, [pointer] * 2),
        "sequence_assign_tiers": (None, [pointer, pointer, i64, pointer]),
        "assign_offsets": (i32, [pointer]),
        "expander_new": (pointer, [pointer]),
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
