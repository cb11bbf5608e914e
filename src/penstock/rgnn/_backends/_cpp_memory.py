"""Where the values live: tensors for those that leave a generated program, an arena for the others.

In the arena a value has its bytes from the kernel that writes it to the last one that reads it, so
the arena is as large as the largest set of values alive together, or hardly more.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import mmap
from collections.abc import Callable, Iterable

import torch

ALIGNMENT = 64
_HUGE_PAGE_BYTES = 2 * 2**20


def allocate(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose content is undefined; a large one is made of huge pages.

    The C library takes large memory from the kernel anew each time, and the kernel clears it page
    by page as it is touched: by small pages that costs more than a pass over the numbers.
    """
    tensor = torch.empty(shape, dtype=dtype)
    num_bytes = tensor.numel() * tensor.element_size()
    advise = _madvise()
    if num_bytes >= 2 * _HUGE_PAGE_BYTES and advise is not None:
        begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
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
    placed: list[tuple[int, int, Lifetime]] = []  # begin, end
    # The largest first: the small ones fit into what is left between them.
    for lifetime in sorted(lifetimes, key=lambda life: (-life.num_bytes, life.first, life.value)):
        length = -(-lifetime.num_bytes // ALIGNMENT) * ALIGNMENT
        begin = 0
        for other_begin, other_end, other in sorted(placed, key=lambda place: place[:2]):
            is_apart = other.last < lifetime.first or lifetime.last < other.first
            if is_apart or other_end <= begin:
                continue
            if begin + length <= other_begin:
                break
            begin = other_end
        placed.append((begin, begin + length, lifetime))
    offsets = {lifetime.value: begin for begin, _, lifetime in placed}
    return offsets, max((end for _, end, _ in placed), default=0)
