"""The packer in C++: how it is built, and how it is called."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import logging
import threading
from pathlib import Path
from typing import ClassVar

import numpy as np

from penstock.codegen import load_library
from penstock.errors import BuildError
from penstock.planner.packing._types import Buffer

_logger = logging.getLogger(__name__)

_SOURCES = ("parts.cpp", "fit.cpp", "search.cpp", "driver.cpp")
_FLAGS = ("-O3", "-march=native", "-pthread")
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
    directory = Path(__file__).parent
    source = "".join((directory / name).read_text(encoding="utf-8") for name in _SOURCES)
    try:
        compiled = load_library("pack", source, flags=_FLAGS)
    except BuildError as error:
        _logger.info("buffers are packed by Python, without search: %s", error)
        return None
    compiled.penstock_pack.argtypes = [
        ctypes.POINTER(_Request),
        ctypes.POINTER(_Answer),
        ctypes.c_void_p,
    ]
    compiled.penstock_pack.restype = None
    _logger.info("buffers are packed by C++")
    return compiled


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
    # In a thread of its own, because Python handles signals only between bytecodes of the main one.
    thread = threading.Thread(
        target=compiled.penstock_pack,
        args=(ctypes.byref(request), ctypes.byref(answer), offsets.ctypes.data),
        name="penstock-pack",
    )
    thread.start()
    try:
        thread.join()
    except BaseException:
        stop[0] = 1
        thread.join()
        raise
    return Found(
        offsets=tuple(offsets.tolist()),
        height=answer.height,
        lower_bound=answer.lower_bound,
        impossible=bool(answer.impossible),
        searched=bool(answer.searched),
        num_nodes=answer.num_nodes,
        num_parts=answer.num_parts,
    )
