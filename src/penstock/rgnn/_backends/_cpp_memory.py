"""Where the values live: tensors for those that leave a generated program, an arena for the others.

In the arena a value has its bytes from the kernel that writes it to the last one that reads it, so
the arena is as large as the largest set of values alive together, or hardly more. Values that are
gone before a result is first written lie in the result's memory; and a value that is computed from
one of the same row alone takes its place.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import mmap
import threading
from collections.abc import Callable, Iterable

import torch

ALIGNMENT = 64
_HUGE_PAGE_BYTES = 2 * 2**20
_MIN_POOLED_BYTES = 2**20
_MAX_WASTE = 1.25  # a block is used for no fewer bytes than its own by this factor
_MAX_IDLE = 64  # how often others are asked for before an unused block is let go


@dataclasses.dataclass(slots=True)
class _Block:
    memory: torch.Tensor
    num_owners: int
    """Of its storage, while nobody uses it."""
    last_used: int = 0

    def is_free(self) -> bool:
        return _num_owners(self.memory) == self.num_owners


class Blocks:
    """Large memory that is used again from step to step.

    The C library gives large memory back to the kernel when it is freed, and the kernel clears it
    page by page when it is next touched: that costs more than a pass over the numbers. A block
    here is free again when the last tensor that shares its storage is gone. A new block takes the
    place of the free ones that are smaller: scratch memory of a forward and of the larger backward
    is one block, from the second step on.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # two threads must not find the same block free
        self._blocks: list[_Block] = []
        self._num_asked = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor whose content is undefined."""
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _MIN_POOLED_BYTES:
            return torch.empty(shape, dtype=dtype)
        memory = self._memory(num_bytes, most_bytes=_MAX_WASTE * num_bytes)
        return memory.view(dtype).view(shape)

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """Bytes for the time of a call, in a free block of any size."""
        if num_bytes < _MIN_POOLED_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        return self._memory(num_bytes, most_bytes=math.inf)

    @property
    def num_blocks(self) -> int:
        """How many there are, used or free."""
        return len(self._blocks)

    def clear(self) -> None:
        """Let go of all blocks; those in use live on with their tensors."""
        self._blocks.clear()

    def _memory(self, num_bytes: int, most_bytes: float) -> torch.Tensor:
        with self._lock:
            self._num_asked += 1
            block = self._free_block(num_bytes, most_bytes) or self._new_block(num_bytes)
            block.last_used = self._num_asked
            return block.memory[:num_bytes]

    def _free_block(self, num_bytes: int, most_bytes: float) -> _Block | None:
        fitting = [
            block
            for block in self._blocks
            if num_bytes <= len(block.memory) <= most_bytes and block.is_free()
        ]
        return min(fitting, key=lambda block: len(block.memory), default=None)

    def _new_block(self, num_bytes: int) -> _Block:
        oldest = self._num_asked - _MAX_IDLE
        self._blocks = [
            block
            for block in self._blocks
            if not block.is_free() or (block.last_used >= oldest and len(block.memory) > num_bytes)
        ]
        memory = _in_huge_pages(torch.empty(num_bytes, dtype=torch.uint8))
        self._blocks.append(_Block(memory, _num_owners(memory)))
        return self._blocks[-1]


def _num_owners(tensor: torch.Tensor) -> int:
    """How many tensors (and other objects of torch) share a tensor's storage."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def _in_huge_pages(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that nobody has written to yet; the kernel is asked to make it of huge pages."""
    advise = _madvise()
    if advise is not None and len(tensor) >= 2 * _HUGE_PAGE_BYTES:
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + len(tensor)) // mmap.PAGESIZE * mmap.PAGESIZE
        advise(begin, end - begin, mmap.MADV_HUGEPAGE)  # advice only: a refusal changes nothing
    return tensor


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The system call; None where there are no huge pages to ask for."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function


@dataclasses.dataclass(frozen=True, slots=True)
class Lifetime:
    """A value's kernels, from the first that needs its bytes to the last, and how many bytes."""

    value: int
    first: int
    last: int
    num_bytes: int


def pack(lifetimes: Iterable[Lifetime]) -> tuple[dict[int, int], int]:
    """An offset for each value such that values alive together do not overlap.

    Returns:
        Offsets in bytes by value, multiples of `ALIGNMENT`, and the bytes of the arena.
    """
    placed: list[_Placed] = []
    for lifetime in _largest_first(lifetimes):
        begin = _lowest_gap(placed, lifetime)
        placed.append((begin, begin + _aligned(lifetime.num_bytes), lifetime))
    offsets = {lifetime.value: begin for begin, _, lifetime in placed}
    return offsets, max((end for _, end, _ in placed), default=0)


def lodge(
    lifetimes: Iterable[Lifetime], hosts: Iterable[Lifetime]
) -> tuple[dict[int, tuple[int, int]], list[Lifetime]]:
    """Let values lie in the memory of results that are not written yet.

    Args:
        lifetimes: Of the values that need memory for a while.
        hosts: Of the results, which have memory anyway: until the kernel that first needs it,
            others may have it.

    Returns:
        The host and the offset in its memory, by value, for those that found one; and the rest.
    """
    # A host that is needed soonest is of use to the fewest, so it is taken first.
    known = sorted(hosts, key=lambda host: (host.first, host.num_bytes, host.value))
    placed: dict[int, list[_Placed]] = {host.value: [] for host in known}
    found: dict[int, tuple[int, int]] = {}
    rest = []
    for lifetime in _largest_first(lifetimes):
        for host in known:
            if lifetime.last >= host.first:
                continue
            begin = _lowest_gap(placed[host.value], lifetime)
            if begin + lifetime.num_bytes <= host.num_bytes:
                end = begin + _aligned(lifetime.num_bytes)
                placed[host.value].append((begin, end, lifetime))
                found[lifetime.value] = (host.value, begin)
                break
        else:
            rest.append(lifetime)
    return found, rest


_Placed = tuple[int, int, Lifetime]  # begin, end


def _largest_first(lifetimes: Iterable[Lifetime]) -> list[Lifetime]:
    """The small ones fit into what is left between the large ones."""
    return sorted(lifetimes, key=lambda life: (-life.num_bytes, life.first, life.value))


def _lowest_gap(placed: Iterable[_Placed], lifetime: Lifetime) -> int:
    """The lowest offset at which a value is clear of those that are alive together with it."""
    length, begin = _aligned(lifetime.num_bytes), 0
    for other_begin, other_end, other in sorted(placed, key=lambda place: place[:2]):
        is_apart = other.last < lifetime.first or lifetime.last < other.first
        if is_apart or other_end <= begin:
            continue
        if begin + length <= other_begin:
            break
        begin = other_end
    return begin


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
