"""The packer in C++: its build, and its call."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from pathlib import Path

import numpy as np

from penstock.codegen import load_optional_library, struct_type, to_struct
from penstock.planner._native_calls import run_stoppable
from penstock.planner.packing._types import Buffer

_SOURCES = [
    Path(__file__).with_name(name) for name in ("parts.cpp", "fit.cpp", "search.cpp", "driver.cpp")
]
_NUM_THREADS = 2


@dataclasses.dataclass(frozen=True)
class EngineResult:
    """Offsets that an engine found, with what it proved."""

    offsets: tuple[int, ...]
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
    num_spans: int
    size: np.ndarray
    alignment: np.ndarray
    fixed: np.ndarray
    first_span: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    capacity: int
    time_limit: float
    seed: int
    num_threads: int
    stop: np.ndarray


@dataclasses.dataclass
class _Answer:
    """`struct Answer` of driver.cpp."""

    height: int
    lower_bound: int
    impossible: bool
    searched: bool
    num_nodes: int
    num_parts: int


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
    compiled: ctypes.CDLL,
    buffers: list[Buffer],
    *,
    capacity: int | None,
    time_limit: float,
    seed: int,
) -> EngineResult:
    """Pack buffers of at least one byte each; Ctrl-C stops it."""
    all_spans = [buffer.spans for buffer in buffers]
    request = _PackingArguments(
        num_buffers=len(buffers),
        num_spans=sum(map(len, all_spans)),
        size=np.array([buffer.size for buffer in buffers], dtype=np.int64),
        alignment=np.array([buffer.alignment for buffer in buffers], dtype=np.int64),
        fixed=np.array([-1 if b.offset is None else b.offset for b in buffers], dtype=np.int64),
        first_span=np.cumsum([0, *map(len, all_spans)], dtype=np.int64),
        lower=np.array([lower for spans in all_spans for lower, _ in spans], dtype=np.int64),
        upper=np.array([upper for spans in all_spans for _, upper in spans], dtype=np.int64),
        capacity=-1 if capacity is None else capacity,
        time_limit=time_limit,
        seed=seed,
        num_threads=_NUM_THREADS,
        stop=np.zeros(1, dtype=np.int32),
    )
    offsets, answer = np.zeros(len(buffers), dtype=np.int64), struct_type(_Answer)()
    arguments = (ctypes.byref(to_struct(request)), ctypes.byref(answer), offsets.ctypes.data)
    run = functools.partial(compiled.penstock_pack, *arguments)
    run_stoppable([run], request.stop, name="pack")
    return EngineResult(
        offsets=tuple(offsets.tolist()),
        height=answer.height,
        lower_bound=answer.lower_bound,
        impossible=bool(answer.impossible),
        searched=bool(answer.searched),
        num_nodes=answer.num_nodes,
        num_parts=answer.num_parts,
    )
