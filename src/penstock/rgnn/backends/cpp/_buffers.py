"""A pool of large buffers: memory for tensors that leave a generated program, and its scratch."""

from __future__ import annotations

import dataclasses
import math
import threading

import torch

from penstock.compat.dispatch import num_owners
from penstock.memory.pages import HUGE_PAGE_BYTES, advise_huge_pages

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
            return torch.empty(shape, dtype=dtype)
        memory = self._allocate(num_bytes, most_bytes=_MAX_WASTE * num_bytes)
        return memory.view(dtype).view(shape)

    def scratch(self, num_bytes: int) -> torch.Tensor:
        """Return bytes for the time of a call, in a free buffer of any size."""
        if num_bytes < _MIN_POOLED_BYTES:
            return torch.empty(num_bytes, dtype=torch.uint8)
        return self._allocate(num_bytes, most_bytes=math.inf)

    @property
    def num_buffers(self) -> int:
        """Number of buffers, used or free."""
        return len(self._buffers)

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
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes >= 2 * HUGE_PAGE_BYTES:
            advise_huge_pages(memory.data_ptr(), num_bytes)
        self._buffers.append(_PooledBuffer(memory, _count_owners(memory)))
        return self._buffers[-1]


def _count_owners(tensor: torch.Tensor) -> int:
    """Return how many tensors (and other objects of torch) share a tensor's storage."""
    return num_owners(tensor.untyped_storage()._cdata)
