"""From GPU memory to the file and back, past host memory (GPUDirect Storage, by kvikio).

cuFile moves bytes without a CUDA stream, so the order against the computation is kept here: a
write starts when the storage has been computed, and a read goes to memory of a stream of its own,
which the computation has never used before and which the allocator hands out again only when the
computing stream is done with it.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from penstock.activations._cuda import CudaMarks, Token, bytes_of
from penstock.activations._routes import Route
from penstock.errors import PenstockError, StoreReadError, StoreWriteError
from penstock.memory import Extent, ExtentFile, Ledger, Link, Tier


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
