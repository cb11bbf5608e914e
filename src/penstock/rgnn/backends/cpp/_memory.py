"""Memory of a call: a pool of large buffers, and in one of them an arena with assigned offsets.

The arena is for the values that do not leave a generated program. There a value has its bytes in
its live range: from the kernel that writes it to the last one that reads it. So the arena is as
large as the largest set of values alive together, or hardly more.
Values with a live range that ends before a result is first written lie in the result's memory;
and a value that is computed from one of the same row alone is written in its place.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Iterable

import torch

from penstock.compat.dispatch import num_owners
from penstock.memory.pages import HUGE_PAGE_BYTES, advise_huge_pages, round_up

ALIGNMENT = 64
_MIN_POOLED_BYTES = 2**20
_MAX_WASTE = 1.25  # a buffer is used for no fewer bytes than its own by this factor
_MAX_IDLE = 64  # requests for others after which an unused buffer is freed


@dataclasses.dataclass(slots=True)
class _PooledBuffer:
    memory: torch.Tensor
    num_owners: int
    """Owners of its storage while it is free."""
    last_used: int = 0

    def is_free(self) -> bool:
        return _count_owners(self.memory) == self.num_owners


class BufferPool:
    """Large memory that is used again from step to step.

    The C library gives large memory back to the kernel when it is freed, and the kernel clears it
    page by page when it is next touched: that costs more than a pass over the numbers. A buffer
    here is free again when the last tensor that shares its storage is gone. A new buffer takes the
    place of the free ones that are smaller: scratch memory of a forward and of the larger backward
    is one buffer, from the second step on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # two threads must not find the same buffer free
        self._buffers: list[_PooledBuffer] = []
        self._num_requests = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor with undefined content."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _MIN_POOLED_BYTES:
            return torch.empty(shape, dtype=dtype, device="cpu")
        memory = self._allocate(num_bytes, most_bytes=_MAX_WASTE * num_bytes)
        return memory.view(dtype).view(shape)

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """Return bytes for the time of a call, in a free buffer of any size."""
        if num_bytes < _MIN_POOLED_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        return self._allocate(num_bytes, most_bytes=math.inf)

    def clear(self) -> None:
        """Free all buffers; those in use live on with their tensors."""
        self._buffers.clear()

    def _allocate(self, num_bytes: int, most_bytes: float) -> torch.Tensor:
        with self._lock:
            self._num_requests += 1
            fitting = [
                buffer
                for buffer in self._buffers
                if num_bytes <= len(buffer.memory) <= most_bytes and buffer.is_free()
            ]
            smallest = min(fitting, key=lambda buffer: len(buffer.memory), default=None)
            buffer = smallest or self._add_buffer(num_bytes)
            buffer.last_used = self._num_requests
            return buffer.memory[:num_bytes]

    def _add_buffer(self, num_bytes: int) -> _PooledBuffer:
        oldest = self._num_requests - _MAX_IDLE
        self._buffers = [
            buffer
            for buffer in self._buffers
            if not buffer.is_free()
            or (buffer.last_used >= oldest and len(buffer.memory) > num_bytes)
        ]
        memory = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        if num_bytes >= 2 * HUGE_PAGE_BYTES:
            advise_huge_pages(memory.data_ptr(), num_bytes)
        self._buffers.append(_PooledBuffer(memory, _count_owners(memory)))
        return self._buffers[-1]


def _count_owners(tensor: torch.Tensor) -> int:
    """Return how many tensors (and other objects of torch) share a tensor's storage."""
    return num_owners(tensor.untyped_storage()._cdata)


@dataclasses.dataclass(frozen=True, slots=True)
class ArenaValue:
    """A value's live range, from the first kernel that needs it to the last, and its size."""

    value: int
    first: int
    last: int
    num_bytes: int


_Placed = tuple[int, int, ArenaValue]
"""Begin and end of a value's bytes, and the value."""


def assign_offsets(
    values: Iterable[ArenaValue], results: Iterable[ArenaValue] = ()
) -> tuple[dict[int, tuple[int | None, int]], int]:
    """Assign an offset to each value such that values alive together do not overlap.

    Args:
        values: Values that need memory in their live ranges.
        results: Results, which have memory anyway: until the kernel that first needs it, other
            values may lie there.

    Returns:
        By value, the result in which it lies, or None for the arena, and the offset there in bytes,
        a multiple of `ALIGNMENT`; and the bytes of the arena.
    """
    # A result that is needed soonest is of use to the fewest, so it is taken first.
    ordered = sorted(results, key=lambda result: (result.first, result.num_bytes, result.value))
    placed: dict[int | None, list[_Placed]] = {result.value: [] for result in ordered}
    in_arena = placed[None] = []
    found: dict[int, tuple[int | None, int]] = {}
    # The largest first: small ones fit into what is left between large ones.
    for value in sorted(values, key=lambda each: (-each.num_bytes, each.first, each.value)):
        for result in ordered:
            begin = _find_lowest_gap(placed[result.value], value)
            if value.last < result.first and begin + value.num_bytes <= result.num_bytes:
                place = (result.value, begin)
                break
        else:
            place = (None, _find_lowest_gap(in_arena, value))
        host, begin = found[value.value] = place
        placed[host].append((begin, begin + round_up(value.num_bytes, ALIGNMENT), value))
    return found, max((end for _, end, _ in in_arena), default=0)


def _find_lowest_gap(placed: Iterable[_Placed], value: ArenaValue) -> int:
    """Return the lowest offset at which a value is clear of those that are alive with it."""
    length, begin = round_up(value.num_bytes, ALIGNMENT), 0
    for other_begin, other_end, other in sorted(placed, key=lambda place: place[:2]):
        is_disjoint = other.last < value.first or value.last < other.first
        if is_disjoint or other_end <= begin:
            continue
        if begin + length <= other_begin:
            break
        begin = other_end
    return begin
