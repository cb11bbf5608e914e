"""Where a table's bytes lie: in host memory, shared between processes."""

from __future__ import annotations

import math

import torch

from penstock.unified import _host_rows
from penstock.unified._host_memory import SharedMemory


class HostTable:
    """A table in host memory.

    Attributes:
        memory: What holds it; other processes map the same.
        rows: All of it as a contiguous tensor on the CPU, of shape (num_rows, *row).
    """

    def __init__(self, memory: SharedMemory, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.memory = memory
        self.rows = memory.tensor(shape, dtype)

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: torch.dtype) -> HostTable:
        """A table of zeroes, whose pages are there."""
        memory = SharedMemory(dtype.itemsize * math.prod(shape))
        memory.touch()
        return cls(memory, shape, dtype)

    def gather(self, index: torch.Tensor, out: torch.Tensor, *, negative: bool) -> None:
        """`out[i] = table[index[i]]`, of shapes (n,) and (n, *row), both on the CPU."""
        _host_rows.gather_rows(self.rows, index, out, negative=negative)

    def put(self, index: torch.Tensor, source: torch.Tensor, *, negative: bool) -> None:
        """`table[index[i]] = source[i]`; of several for one row the last one stays."""
        _host_rows.put_rows(self.rows, index, source, negative=negative)

    def add(
        self, index: torch.Tensor, source: torch.Tensor, *, alpha: float, negative: bool
    ) -> None:
        """`table[index[i]] += alpha * source[i]`, in the order of `i` for each row."""
        _host_rows.add_rows(self.rows, index, source, alpha=alpha, negative=negative)
