"""Copies between CUDA devices and registered host memory, on streams of their own."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import torch

from penstock.memory.pinned import pin, unpin

Token = tuple[torch.cuda.Stream, Any]  # the computing stream, and the event to wait for


class CudaMarks:
    """Marks of a computation, and streams beside it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: dict[tuple[torch.device, str], torch.cuda.Stream] = {}

    def mark(self, device: torch.device) -> Token:
        """Record an event on the stream that is computing what is being saved."""
        stream = torch.cuda.current_stream(device)
        return stream, stream.record_event()

    def mark_again(self, ready: Token) -> Token:
        """Record an event on the same stream, now."""
        return ready[0], ready[0].record_event()

    def _stream(self, device: torch.device, purpose: str) -> torch.cuda.Stream:
        with self._lock:
            key = device, purpose
            if key not in self._streams:
                self._streams[key] = torch.cuda.Stream(device)
            return self._streams[key]


class CudaCopies(CudaMarks):
    """`DeviceCopies` for CUDA: one stream per device and direction."""

    def register(self, address: int, num_bytes: int) -> None:
        """Pin host memory."""
        pin(address, num_bytes, remedy="lower host_memory")

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        unpin(address)

    def to_host(self, storage: torch.UntypedStorage, address: int, ready: Token) -> None:
        """Copy after `ready`; the storage may be freed on return, the copy has ended.

        The operator that saved it reads it after `ready`, on that stream, and stock PyTorch would
        keep it until the backward pass: a storage of another stream must not be given out before.
        """
        stream = self._stream(storage.device, "out")
        stream.wait_event(ready[1])
        with torch.cuda.stream(stream):
            host = _host_bytes(address, storage.nbytes())
            host.copy_(bytes_of(storage), non_blocking=True)
            event = stream.record_event()
        event.synchronize()
        bytes_of(storage).record_stream(ready[0])

    def allocate(self, num_bytes: int, device: torch.device, ready: Token) -> torch.UntypedStorage:
        """Allocate in the computing stream's pool: freeing it needs no further ordering."""
        with torch.cuda.stream(ready[0]):
            return torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()

    def to_device(
        self, address: int, storage: torch.UntypedStorage, start: int, end: int, ready: Token
    ) -> Token:
        """Start the copy once the computing stream is done with the memory's former content."""
        compute = ready[0]  # autograd runs the backward pass on the stream of the forward pass
        stream = self._stream(storage.device, "in")
        stream.wait_event(compute.record_event())
        with torch.cuda.stream(stream):
            bytes_of(storage)[start:end].copy_(_host_bytes(address, end - start), non_blocking=True)
            return compute, stream.record_event()

    def finish(self, token: Token) -> None:
        """Block this thread until the copy has ended."""
        token[1].synchronize()

    def has_ended(self, token: Token) -> bool:
        """Return whether the copy has ended."""
        return token[1].query()

    def settle(self, token: Token, storage: torch.UntypedStorage | None) -> None:
        """Order the stream that computes here, and the memory's own, after the copy."""
        compute, event = token
        compute.wait_event(event)
        current = torch.cuda.current_stream(compute.device)
        if current != compute:
            current.wait_event(event)
            if storage is not None:
                bytes_of(storage).record_stream(current)


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the whole storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_bytes(address: int, num_bytes: int) -> torch.Tensor:
    buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8)
