"""Rows read on the CPU and copied to a device through two buffers that are used in turn.

Used by tables that CUDA cannot read where they lie: those in files, and those in memory that it
refused to register. While one buffer is on its way the other is filled.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any

import torch

logger = logging.getLogger(__name__)

_BUFFER_BYTES = 8 * 2**20  # copied in one piece: long enough for a link's full speed

ReadRows = Callable[[torch.Tensor, torch.Tensor], None]
"""`read(index, out)`, both on the CPU, `out` contiguous."""


class Staging:
    """Two buffers of pinned memory for copies to one device; thread-safe."""

    def __init__(self, device: torch.device, *, buffer_bytes: int = _BUFFER_BYTES) -> None:
        self._device = device
        self._buffer_bytes = buffer_bytes
        self._lock = threading.Lock()
        self._buffers: list[torch.Tensor] = []
        self._copied: list[Any] = [None, None]  # an event for each: its copy has ended
        self._turn = 0

    def read_rows(self, read: ReadRows, index: torch.Tensor, out: torch.Tensor) -> None:
        """Read rows: `out[i] = table[index[i]]`; copies are launched on the current stream.

        `index` has shape (n,), on the CPU; `out` has shape (n, *row), on the device, contiguous.
        """
        row_bytes = out.numel() // max(1, len(out)) * out.element_size()
        if not row_bytes:
            read(index, torch.empty(out.shape, dtype=out.dtype))  # for its check of `index`
            return
        with self._lock:
            num_rows = max(1, self._buffer_bytes // row_bytes)
            for start in range(0, len(index), num_rows):
                part = index[start : start + num_rows]
                self._read_part(read, part, out[start : start + num_rows], row_bytes)

    def _read_part(
        self, read: ReadRows, index: torch.Tensor, out: torch.Tensor, row_bytes: int
    ) -> None:
        self._turn = 1 - self._turn
        if self._copied[self._turn] is not None:
            self._copied[self._turn].synchronize()
        num_bytes = len(index) * row_bytes
        if not self._buffers or self._buffers[self._turn].numel() < num_bytes:
            self._allocate(max(self._buffer_bytes, row_bytes))
        rows = self._buffers[self._turn][:num_bytes].view(out.dtype).view(out.shape)
        read(index, rows)
        out.copy_(rows, non_blocking=True)
        stream = getattr(torch, self._device.type).current_stream(self._device)
        self._copied[self._turn] = stream.record_event()

    def _allocate(self, num_bytes: int) -> None:
        for event in self._copied:
            if event is not None:
                event.synchronize()
        pinned = self._device.type == "cuda"
        try:
            self._buffers = [
                torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)
            ]
        except RuntimeError as error:
            logger.info("buffers for copies to %s are not pinned: %s", self._device, error)
            self._buffers = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(2)]


@functools.cache
def staging(device: torch.device) -> Staging:
    """Return the buffers that all tables share for their copies to one device."""
    return Staging(device)
