"""The packer's engines: C++, and best fit along several orders in Python without a compiler."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from penstock.codegen import load_optional_library, struct_type, to_struct
from penstock.planner._native_calls import flatten, run_stoppable
from penstock.planner.packing._types import Buffer

_SOURCES = [
    Path(__file__).with_name(name) for name in ("parts.cpp", "fit.cpp", "search.cpp", "driver.cpp")
]


@dataclasses.dataclass(frozen=True)
class EngineAnswer:
    """Offsets' height, and what an engine proved: `struct Answer` of driver.cpp."""

    height: int
    lower_bound: int
    impossible: bool
    """With a capacity: whether it is proven that nothing fits."""
    searched: bool
    num_nodes: int
    num_parts: int


@dataclasses.dataclass(frozen=True)
class _PackingArguments:
    """`struct Request` of parts.cpp."""

    num_buffers: int
    size: np.ndarray
    alignment: np.ndarray
    fixed: np.ndarray
    first_span: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    capacity: int
    time_limit: float
    seed: int
    stop: np.ndarray


@functools.cache
def library() -> ctypes.CDLL | None:
    """Return the packer in C++, or None where there is no compiler."""
    return load_optional_library(
        "pack",
        _SOURCES,
        flags=("-O3", "-march=native", "-pthread"),
        functions={"penstock_pack": (None, [ctypes.c_void_p] * 3)},
        work="buffers are packed",
        otherwise="by Python, without search",
    )


def pack_native(
    compiled: ctypes.CDLL, buffers: list[Buffer], capacity: int | None, time_limit: float, seed: int
) -> tuple[list[int], EngineAnswer]:
    """Pack buffers of at least one byte each; Ctrl-C stops it."""
    all_spans = [buffer.spans for buffer in buffers]
    first_span, lower = flatten([[lower for lower, _ in spans] for spans in all_spans], np.int64)
    request = _PackingArguments(
        num_buffers=len(buffers),
        size=np.array([buffer.size for buffer in buffers], dtype=np.int64),
        alignment=np.array([buffer.alignment for buffer in buffers], dtype=np.int64),
        fixed=np.array([-1 if b.offset is None else b.offset for b in buffers], dtype=np.int64),
        first_span=first_span,
        lower=lower,
        upper=np.array([upper for spans in all_spans for _, upper in spans], dtype=np.int64),
        capacity=-1 if capacity is None else capacity,
        time_limit=time_limit,
        seed=seed,
        stop=np.zeros(1, dtype=np.int32),
    )
    offsets, answer = np.zeros(len(buffers), dtype=np.int64), struct_type(EngineAnswer)()

    def run() -> None:  # holds the arrays, to which the arguments are pointers
        arguments = ctypes.byref(to_struct(request)), ctypes.byref(answer), offsets.ctypes.data
        compiled.penstock_pack(*arguments)

    run_stoppable([run], request.stop, name="pack")
    names = (field.name for field in dataclasses.fields(EngineAnswer))
    return offsets.tolist(), EngineAnswer(*(getattr(answer, name) for name in names))


_ORDERS: tuple[Callable[[Buffer], tuple[int, int]], ...] = (
    lambda buffer: (-buffer.size, buffer.lower - buffer.upper),
    lambda buffer: (buffer.lower - buffer.upper, -buffer.size),
    lambda buffer: ((buffer.lower - buffer.upper) * buffer.size, -buffer.size),
    lambda buffer: (buffer.lower, -buffer.size),
)


def live_bytes(buffers: Iterable[Buffer]) -> int:
    """Return the largest number of bytes that are live at one time."""
    events = []
    for buffer in buffers:
        for lower, upper in buffer.spans:
            events += [(lower, buffer.size), (upper, -buffer.size)]
    return max(itertools.accumulate(size for _, size in sorted(events)), default=0)


def pack_fallback(
    buffers: list[Buffer], capacity: int | None, time_limit: float
) -> tuple[list[int], EngineAnswer]:
    """Pack by the best of several orders; the first is finished whatever the time limit."""
    start = time.monotonic()
    fixed_end = max((b.offset + b.size for b in buffers if b.offset is not None), default=0)
    lower_bound = max(live_bytes(buffers), fixed_end)
    goal = lower_bound if capacity is None else max(capacity, lower_bound)
    best: tuple[int, list[int]] | None = None
    for key in _ORDERS:
        if best is not None and (best[0] <= goal or time.monotonic() - start > time_limit):
            break
        offsets = _fit_along(buffers, sorted(range(len(buffers)), key=lambda i: key(buffers[i])))
        height = max(o + b.size for o, b in zip(offsets, buffers, strict=True))
        if best is None or height < best[0]:
            best = height, offsets
    assert best is not None
    impossible = capacity is not None and lower_bound > capacity
    return best[1], EngineAnswer(best[0], lower_bound, impossible, False, num_nodes=0, num_parts=1)


def _fit_along(buffers: list[Buffer], order: list[int]) -> list[int]:
    """Place each buffer in its turn into the tightest free piece among those live with it."""
    offsets = [buffer.offset for buffer in buffers]
    placed = [index for index in order if offsets[index] is not None]
    for index in order:
        if offsets[index] is not None:
            continue
        buffer = buffers[index]
        taken = sorted(
            (offset, offset + buffers[other].size)
            for other in placed
            if (offset := offsets[other]) is not None and _overlap(buffer, buffers[other])
        )
        offsets[index] = _place(taken, buffer)
        placed.append(index)
    return [offset or 0 for offset in offsets]


def _place(taken: list[tuple[int, int]], buffer: Buffer) -> int:
    best, least, start = None, 0, 0
    for begin, end in taken:
        offset = -(-start // buffer.alignment) * buffer.alignment
        free = begin - offset
        if free >= buffer.size and (best is None or free < least):
            best, least = offset, free
        start = max(start, end)
    return -(-start // buffer.alignment) * buffer.alignment if best is None else best


def _overlap(one: Buffer, other: Buffer) -> bool:
    return any(
        lower < other_upper and other_lower < upper
        for lower, upper in one.spans
        for other_lower, other_upper in other.spans
    )
