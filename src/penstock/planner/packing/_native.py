"""The packer in C++: how it is built, and how it is called."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from pathlib import Path
from typing import ClassVar

import numpy as np

from penstock.codegen import load_optional_library
from penstock.planner._stoppable import run_stoppable
from penstock.planner.packing._types import Buffer

_SOURCES = [
    Path(__file__).with_name(name) for name in ("parts.cpp", "fit.cpp", "search.cpp", "driver.cpp")
]
_NUM_THREADS = 2


@dataclasses.dataclass(frozen=True)
class Found:
    """What an engine answers."""

    offsets: tuple[int, ...]
    height: int
    lower_bound: int
    impossible: bool
    """With a capacity: whether it is proven that nothing fits."""
    searched: bool
    num_nodes: int
    num_parts: int


class _Request(ctypes.Structure):
    """`struct Request` of parts.cpp, field by field."""

    _fields_: ClassVar = [
        ("num_buffers", ctypes.c_int64),
        ("num_spans", ctypes.c_int64),
        *[
            (name, ctypes.c_void_p)
            for name in ("size", "alignment", "fixed", "first_span", "lower", "upper")
        ],
        ("capacity", ctypes.c_int64),
        ("time_limit", ctypes.c_double),
        ("seed", ctypes.c_int64),
        ("num_threads", ctypes.c_int64),
        ("stop", ctypes.c_void_p),
    ]


class _Answer(ctypes.Structure):
    """`struct Answer` of driver.cpp, field by field."""

    _fields_: ClassVar = [
        (name, ctypes.c_int64)
        for name in ("height", "lower_bound", "impossible", "searched", "num_nodes", "num_parts")
    ]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The packer in C++, or None where there is no compiler; which one it is is logged once."""
    request, answer = ctypes.POINTER(_Request), ctypes.POINTER(_Answer)
    return load_optional_library(
        "pack",
        _SOURCES,
        flags=("-O3", "-march=native", "-pthread"),
        functions={"penstock_pack": (None, [request, answer, ctypes.c_void_p])},
        work="buffers are packed",
        otherwise="by Python, without search",
    )


def pack_native(
    compiled: ctypes.CDLL,
    buffers: list[Buffer],
    *,
    capacity: int | None,
    time_limit: float,
    seed: int,
) -> Found:
    """Pack buffers of at least one byte each; Ctrl-C stops it."""
    all_spans = [buffer.spans for buffer in buffers]
    arrays = [
        np.array([buffer.size for buffer in buffers], dtype=np.int64),
        np.array([buffer.alignment for buffer in buffers], dtype=np.int64),
        np.array([-1 if b.offset is None else b.offset for b in buffers], dtype=np.int64),
        np.cumsum([0, *map(len, all_spans)], dtype=np.int64),
        np.array([lower for spans in all_spans for lower, _ in spans], dtype=np.int64),
        np.array([upper for spans in all_spans for _, upper in spans], dtype=np.int64),
    ]
    offsets, stop = np.zeros(len(buffers), dtype=np.int64), np.zeros(1, dtype=np.int32)
    answer = _Answer()
    request = _Request(
        len(buffers),
        len(arrays[-1]),
        *[array.ctypes.data for array in arrays],
        -1 if capacity is None else capacity,
        time_limit,
        seed,
        _NUM_THREADS,
        stop.ctypes.data,
    )
    arguments = (ctypes.byref(request), ctypes.byref(answer), offsets.ctypes.data)
    run_stoppable([functools.partial(compiled.penstock_pack, *arguments)], stop, name="pack")
    return Found(
        offsets=tuple(offsets.tolist()),
        height=answer.height,
        lower_bound=answer.lower_bound,
        impossible=bool(answer.impossible),
        searched=bool(answer.searched),
        num_nodes=answer.num_nodes,
        num_parts=answer.num_parts,
    )
