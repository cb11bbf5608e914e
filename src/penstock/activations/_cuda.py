"""Copies between CUDA devices and registered host memory, on streams of their own; and the route
from GPU memory to the file and back, past host memory (GPUDirect Storage, by kvikio).

cuFile moves bytes without a CUDA stream, so the order against the computation is kept here: a
write starts when the storage has been computed, and a read goes to memory of a stream of its own,
which the computation has never used before and which the allocator hands out again only when the
computing stream is done with it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import torch

from penstock.activations._routes import Route
from penstock.errors import PenstockError, StoreReadError, StoreWriteError
from penstock.memory import Extent, ExtentFile, Ledger, Link, Tier

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

    def mark_part(self, ready: Token, device: torch.device) -> Token | None:
        """Record an event on the same stream, now; None if another one computes."""
        return self.mark_again(ready) if torch.cuda.current_stream(device) == ready[0] else None

    def _stream(self, device: torch.device, purpose: str) -> torch.cuda.Stream:
        with self._lock:
            key = device, purpose
            if key not in self._streams:
                self._streams[key] = torch.cuda.Stream(device)
            return self._streams[key]


class CudaCopies(CudaMarks):
    """Copies on one stream per device and direction."""

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

    def settle(self, ready: Token, storage: torch.UntypedStorage | None) -> None:
        """Order the stream that computes here, and the memory's own, after the copy."""
        compute, event = ready
        compute.wait_event(event)
        current = torch.cuda.current_stream(compute.device)
        if current != compute:
            current.wait_event(event)
            if storage is not None:
                bytes_of(storage).record_stream(current)


class CudaMemory(CudaMarks):
    """Order of writes after the computation, and memory for reads."""

    def wait(self, ready: Token, storage: torch.UntypedStorage) -> None:
        """Block this thread until the event has come."""
        ready[1].synchronize()
        bytes_of(storage).record_stream(ready[0])

    def allocate(self, num_bytes: int, device: torch.device, ready: Token) -> torch.UntypedStorage:
        """Allocate on a stream without kernels, so that no work is pending on the memory."""
        with torch.cuda.stream(self._stream(device, "read")):
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        memory.record_stream(ready[0])
        return memory.untyped_storage()


class GdsRoute(Route):
    """Route from device to file and back; host memory is not touched."""

    def __init__(
        self, file: ExtentFile, ledger: Ledger, *, device_file: Any, memory: CudaMemory
    ) -> None:
        self._file = file
        self._ledger = ledger
        self._device_file = device_file  # a `kvikio.CuFile`
        self._memory = memory
        self.mark, self.mark_again = memory.mark, memory.mark_again
        self.mark_part = memory.mark_part

    @classmethod
    def for_cuda(cls, file: ExtentFile, ledger: Ledger) -> GdsRoute:
        """Return the route from CUDA devices.

        Raises:
            PenstockError: The package kvikio is not installed, or cannot open the file.
        """
        try:
            import kvikio  # type: ignore[import]

            device_file = kvikio.CuFile(file.descriptor_path, "r+")
        except (ImportError, OSError, RuntimeError) as error:
            raise PenstockError(
                f"store {file.path!r} asks for gpu_direct=True, which kvikio does not offer here "
                f"({error}). Install it with pip install 'penstock[gds]', or leave gpu_direct out."
            ) from error
        return cls(file, ledger, device_file=device_file, memory=CudaMemory())

    def store(self, storage: torch.UntypedStorage, ready: Any) -> tuple[Extent, Any]:
        """Write the storage; raises StoreError and keeps nothing if that fails."""
        self._memory.wait(ready, storage)
        num_bytes = storage.nbytes()
        extent = self._file.allocate(num_bytes)
        start = time.perf_counter_ns()
        try:
            self._move(self._device_file.pwrite, storage, extent, StoreWriteError)
        except BaseException:
            self._file.free(extent)
            raise
        self._ledger.record_transfer(Link.DEVICE_TO_FILE, num_bytes, start)
        self._ledger.add(Tier.FILE, num_bytes)
        return extent, ready

    def load(
        self, copy: tuple[Extent, Any], device: torch.device
    ) -> tuple[torch.UntypedStorage, int, None]:
        """Read the extent into fresh device memory; raises StoreReadError if a byte is missing."""
        extent, ready = copy
        storage = self._memory.allocate(extent.num_bytes, device, ready)
        start = time.perf_counter_ns()
        self._move(self._device_file.pread, storage, extent, StoreReadError)
        self._ledger.record_transfer(Link.FILE_TO_DEVICE, extent.num_bytes, start)
        return storage, 0, None

    def discard(self, copy: tuple[Extent, Any]) -> None:
        """Free the extent."""
        extent, _ = copy
        self._file.free(extent)
        self._ledger.add(Tier.FILE, -extent.num_bytes)

    def close(self) -> None:
        """Close the file."""
        self._device_file.close()
        self._file.close()

    def _move(
        self,
        transfer: Any,
        storage: torch.UntypedStorage,
        extent: Extent,
        kind: type[StoreWriteError | StoreReadError],
    ) -> None:
        """Move all bytes between the storage and the extent, or raise `kind`."""
        num_bytes, path = storage.nbytes(), self._file.path
        try:
            num_moved = transfer(bytes_of(storage), num_bytes, extent.offset).get()
            if num_moved != num_bytes:
                raise RuntimeError(f"it moved {num_moved} of them")
        except (OSError, RuntimeError) as error:
            raise kind(
                f"store {path!r}: GPUDirect Storage could not move {num_bytes} bytes at offset "
                f"{extent.offset}: {error}; check the disk, or leave gpu_direct out",
                path=path,
                offset=extent.offset,
                errno=getattr(error, "errno", None),
            ) from error


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the whole storage as a tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_bytes(address: int, num_bytes: int) -> torch.Tensor:
    buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
    return torch.frombuffer(buffer, dtype=torch.uint8)
