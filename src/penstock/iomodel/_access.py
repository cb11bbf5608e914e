"""Accesses to memory in their order, as code declares them, and caches that they go through.

The caches evict the line that was used longest ago (LRU), have no sets, and prefetch nothing. They
are C++ where there is a compiler (`lru.cpp`), and else Python, which takes some hundred times as
long.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import inspect
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from penstock.codegen import load_optional_library
from penstock.iomodel._levels import LevelBytes, check_counts

_SOURCE = Path(__file__).with_name("lru.cpp")
_IN_STEP_BYTES = 4096
_LINE_BYTES = 64
_DECLARED = "penstock_access"

_Function = TypeVar("_Function", bound=Callable[..., Any])


class AccessTrace:
    """Ranges of bytes that code reads and writes, in their order.

    A buffer is a tensor, at its own address, or an address in bytes.

    Example:
        >>> trace = AccessTrace()
        >>> trace.read(0, 0, 256)
        >>> trace.write(4096, 0, 256)
        >>> [each.loaded_bytes for each in simulate_caches(trace, [1024])]
        [512]
    """

    def __init__(self) -> None:
        self._begins: list[np.ndarray] = []
        self._lengths: list[np.ndarray] = []
        self._stores: list[np.ndarray] = []
        self.read_bytes = 0
        self.written_bytes = 0

    def read(self, buffer: torch.Tensor | int, offsets: Any = 0, num_bytes: Any = None) -> None:
        """Add reads: `num_bytes` bytes from each offset on.

        Args:
            buffer: The tensor or address.
            offsets: Offsets in bytes: a number, or an array or tensor of them.
            num_bytes: Bytes of each range, one number or one for each; None: all of the tensor,
                without what lies between its elements, a line or more.
        """
        self.read_bytes += self._add(buffer, offsets, num_bytes, is_store=False)

    def write(self, buffer: torch.Tensor | int, offsets: Any = 0, num_bytes: Any = None) -> None:
        """Add writes, as `read` adds reads."""
        self.written_bytes += self._add(buffer, offsets, num_bytes, is_store=True)

    def stream(
        self, reads: Sequence[torch.Tensor] = (), writes: Sequence[torch.Tensor] = ()
    ) -> None:
        """Add reads of tensors and writes of others, whole and in step, some KiB of each in turn.

        Args:
            reads: Tensors that are read once, from their first byte to their last.
            writes: Tensors that are written likewise.
        """
        tensors = [*((each, False) for each in reads), *((each, True) for each in writes)]
        found = [(*_find_stretches(each), is_store) for each, is_store in tensors]
        longest = max((int(lengths.sum()) for _, lengths, _ in found), default=0)
        num_steps = -(-longest // _IN_STEP_BYTES)
        if not num_steps:
            return
        parts = [
            (*_cut_stretches(begins, lengths, num_steps), is_store)
            for begins, lengths, is_store in found
        ]
        order = np.argsort(np.concatenate([steps for *_, steps, _ in parts]), kind="stable")
        begins, lengths = (np.concatenate([each[at] for each in parts])[order] for at in (0, 1))
        stores = np.concatenate([np.full(len(each[0]), each[3]) for each in parts])[order]
        self._append(begins, lengths, stores)
        self.read_bytes += int(lengths[~stores].sum())
        self.written_bytes += int(lengths[stores].sum())

    def interleave(self, buffers: Sequence[tuple[torch.Tensor | int, Any, Any, bool]]) -> None:
        """Add accesses to several buffers in turn: the first range of each, then the second.

        Args:
            buffers: For each the buffer, the offsets (as many as the others have), the bytes of
                each range, and whether it is written.
        """
        spans = [(*_ranges(buffer, at, size), store) for buffer, at, size, store in buffers]
        begins = np.stack([begin for begin, _, _ in spans], axis=1)
        lengths = np.stack([length for _, length, _ in spans], axis=1)
        stores = np.broadcast_to([store for *_, store in spans], begins.shape)
        self._append(begins.ravel(), lengths.ravel(), stores.ravel())
        self.read_bytes += sum(int(length.sum()) for _, length, store in spans if not store)
        self.written_bytes += sum(int(length.sum()) for _, length, store in spans if store)

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return begins (int64, bytes), lengths (int64, bytes) and whether each is a store."""
        kinds = ((self._begins, np.int64), (self._lengths, np.int64), (self._stores, np.uint8))
        begins, lengths, stores = (
            np.ascontiguousarray(np.concatenate(parts) if parts else [], dtype=kind)
            for parts, kind in kinds
        )
        return begins, lengths, stores

    def _add(
        self, buffer: torch.Tensor | int, offsets: Any, num_bytes: Any, *, is_store: bool
    ) -> int:
        if num_bytes is None and isinstance(buffer, torch.Tensor) and np.all(offsets == 0):
            begins, lengths = _find_stretches(buffer)
        else:
            begins, lengths = _ranges(buffer, offsets, num_bytes)
        self._append(begins, lengths, np.full(len(begins), is_store))
        return int(lengths.sum())

    def _append(self, begins: np.ndarray, lengths: np.ndarray, stores: np.ndarray) -> None:
        self._begins.append(begins)
        self._lengths.append(lengths)
        self._stores.append(stores)


def _address(buffer: torch.Tensor | int) -> int:
    if isinstance(buffer, int):
        return buffer
    if buffer.is_meta:
        raise ValueError(
            f"a tensor of the shape {tuple(buffer.shape)} is on the device meta, where it has no "
            "memory and no accesses; pass one that has"
        )
    return buffer.data_ptr()


def _extent(tensor: torch.Tensor) -> int:
    """Return the bytes from a tensor's first element to its last."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _find_stretches(tensor: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the begins and the lengths of a tensor's stretches of memory, ascending.

    Gaps of less than a line, which moves as a whole, are part of a stretch: columns of a matrix are
    a stretch for each row, or one for all where the rows are short.
    """
    begins, length = np.array([_address(tensor)]), tensor.element_size()
    if not tensor.numel():
        return begins[:0], begins[:0]
    dims = zip(tensor.stride(), tensor.shape, strict=True)
    for stride, size in sorted(each for each in dims if each[1] > 1):
        step = stride * tensor.element_size()
        if len(begins) == 1 and step - length < _LINE_BYTES:
            length += (size - 1) * step
        else:
            begins = (np.arange(size)[:, None] * step + begins).ravel()
    return begins, np.full(len(begins), length)


def _cut_stretches(
    begins: np.ndarray, lengths: np.ndarray, num_steps: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut stretches into steps of equal bytes; return begin, length and step of each part."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    cuts = np.linspace(0, lengths.sum(), num_steps + 1).astype(np.int64)
    edges = np.unique(np.concatenate([starts, cuts]))
    places = edges[:-1]
    at = np.searchsorted(ends, places, side="right")
    steps = np.searchsorted(cuts, places, side="right") - 1
    return begins[at] + places - starts[at], np.diff(edges), steps


def _ranges(buffer: torch.Tensor | int, offsets: Any, num_bytes: Any) -> tuple[Any, Any]:
    if num_bytes is None:
        if isinstance(buffer, int):
            raise ValueError("num_bytes is None for an address; pass the bytes of each range")
        num_bytes = _extent(buffer)
    starts = np.atleast_1d(np.asarray(offsets, dtype=np.int64)).ravel()
    lengths = np.asarray(num_bytes, dtype=np.int64).ravel()
    if lengths.size not in (1, starts.size) or (lengths < 0).any():
        raise ValueError(
            f"num_bytes has {lengths.size} numbers, the least {lengths.min(initial=0)}, for "
            f"{starts.size} offsets; pass one of at least 0, or one for each"
        )
    lengths = np.broadcast_to(lengths, starts.shape)
    return starts + _address(buffer), lengths


def declare_access(access: Callable[..., None]) -> Callable[[_Function], _Function]:
    """Decorate a function with the accesses that it makes, for `explain` to simulate.

    Example:
        >>> @declare_access(lambda trace, x, y: trace.stream([x, y], [x]))
        ... def add_in_place(x, y):
        ...     x.add_(y)

    Args:
        access: Takes an `AccessTrace` and the arguments of the function, and adds the accesses of
            a call.
    """

    def decorate(function: _Function) -> _Function:
        setattr(function, _DECLARED, access)
        return function

    return decorate


def find_access(function: Any) -> Callable[..., None] | None:
    """Return the accesses that a function declares, a partial one with its own arguments first."""
    declared = getattr(function, _DECLARED, None)
    if declared is not None and inspect.ismethod(function):
        return functools.partial(_call_with_object, declared, function.__self__)
    if declared is not None or not isinstance(function, functools.partial):
        return declared
    of = find_access(function.func)
    if of is None:
        return None
    return lambda trace, *args: of(trace, *function.args, *args, **function.keywords)


def _call_with_object(
    access: Callable[..., None], of: object, trace: AccessTrace, *args: Any, **kwargs: Any
) -> None:
    access(trace, of, *args, **kwargs)


def simulate_caches(
    trace: AccessTrace,
    capacities_bytes: Sequence[int],
    *,
    line_bytes: int = 64,
    allocates: bool = True,
    is_warm: bool = False,
) -> tuple[LevelBytes, ...]:
    """Return the bytes that caches of some capacities load and write back over a trace.

    Args:
        trace: The accesses.
        capacities_bytes: Of each cache, ascending.
        line_bytes: Bytes of a line, which moves as a whole.
        allocates: Whether a store that misses loads its line first, as processors do.
        is_warm: Whether caches begin with what the same accesses left there. Else they begin
            empty, and are written back at the end.

    Returns:
        For each cache its loaded and its stored bytes, those of dirty lines that it evicts; the
        level is named by the cache in front: `"behind 32768"`.

    Raises:
        TypeError: A capacity is no integer.
        ValueError: Capacities do not ascend, or are below a line, or a line is below a byte.
    """
    check_counts(line_bytes=line_bytes)
    lines = _count_lines(capacities_bytes, line_bytes)
    run = _simulate_by_cpp if _library() is not None else _simulate_by_python
    counts = run(trace.arrays(), lines, line_bytes, allocates, is_warm)
    return tuple(
        LevelBytes(
            level=f"behind {capacity}",
            loaded_bytes=int(loaded) * line_bytes,
            stored_bytes=int(stored) * line_bytes,
            fast_memory_bytes=capacity,
        )
        for capacity, loaded, stored in zip(capacities_bytes, *counts, strict=True)
    )


def _count_lines(capacities_bytes: Sequence[int], line_bytes: int) -> list[int]:
    """Return the lines that caches hold."""
    for capacity in capacities_bytes:
        check_counts(capacities_bytes=capacity)
    lines = [capacity // line_bytes for capacity in capacities_bytes]
    if lines != sorted(lines) or (lines and lines[0] < 1):
        raise ValueError(
            f"capacities_bytes are {list(capacities_bytes)}; pass capacities of at least a line of "
            f"{line_bytes} bytes, ascending"
        )
    return lines


@functools.cache
def _library() -> ctypes.CDLL | None:
    return load_optional_library(
        "lru",
        _SOURCE,
        work="caches are simulated",
        otherwise="by Python, slowly",
        flags=("-O3",),
        functions={"penstock_lru": (None, [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 4
                                    + [ctypes.c_void_p, ctypes.c_int64] + [ctypes.c_void_p] * 2)},
    )  # fmt: skip


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


def _simulate_by_cpp(
    accesses: Arrays,
    capacities: Sequence[int],
    line_bytes: int,
    allocates: bool,
    is_warm: bool,
) -> tuple[Sequence[int], Sequence[int]]:
    library = _library()
    assert library is not None
    begins, lengths, stores = accesses
    room = np.array(capacities, dtype=np.int64)
    loaded, stored = np.zeros_like(room), np.zeros_like(room)
    library.penstock_lru(
        *(begins.ctypes.data, lengths.ctypes.data, stores.ctypes.data),
        *(len(begins), line_bytes, int(allocates), int(is_warm)),
        *(room.ctypes.data, len(room), loaded.ctypes.data, stored.ctypes.data),
    )
    return loaded.tolist(), stored.tolist()


@dataclasses.dataclass
class _PythonCache:
    """A cache as `lru.cpp` has it: lines in their order of use, each with whether it is dirty."""

    capacity: int
    lines: OrderedDict[int, bool] = dataclasses.field(default_factory=OrderedDict)
    loaded: int = 0
    stored: int = 0

    def use(self, line: int, is_store: bool, is_loaded: bool) -> None:
        if line not in self.lines:
            self.loaded += is_loaded
            if len(self.lines) == self.capacity:
                self.stored += self.lines.popitem(last=False)[1]
        self.lines[line] = self.lines.pop(line, False) or is_store


def _simulate_by_python(
    accesses: Arrays,
    capacities: Sequence[int],
    line_bytes: int,
    allocates: bool,
    is_warm: bool,
) -> tuple[Sequence[int], Sequence[int]]:
    caches = [_PythonCache(capacity) for capacity in capacities]
    for _ in range(1 + is_warm):
        for cache in caches:
            cache.loaded = cache.stored = 0
        for begin, length, is_store in zip(*(each.tolist() for each in accesses), strict=True):
            if not length:
                continue
            for line in range(begin // line_bytes, (begin + length - 1) // line_bytes + 1):
                for cache in caches:
                    cache.use(line, bool(is_store), allocates or not is_store)
    dirty = [0 if is_warm else sum(cache.lines.values()) for cache in caches]
    stored = [cache.stored + left for cache, left in zip(caches, dirty, strict=True)]
    return [cache.loaded for cache in caches], stored
