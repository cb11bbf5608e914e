"""Platforms: the device of a pool, as its memory, copies by address, and attention by address.

`CpuPlatform` is here, where each call has ended when it returns; `CudaPlatform` is in `_cuda.py`,
where a call has only been launched. The pool above them is one.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import numpy as np
import torch

from penstock.compat.autograd import outside_inference_mode
from penstock.errors import PenstockError
from penstock.kv._areas import Area, SlotMemory
from penstock.kv._cuda import CudaPlatform, check_device
from penstock.kv._kernel import RecordAttention, copy_pieces
from penstock.kv._layout import BlockLayout, FullBlocks
from penstock.memory import Link
from penstock.memory.raw_memory import MAX_VIEW_BYTES, view_at

_COPY_BYTES = 4 * 2**20  # of blocks that are brought into the order of records at once


class Scratch:
    """Memory that records are copied to, in any order, before all of it is read.

    Attributes:
        address: Where it begins.
    """

    def __init__(self, num_bytes: int) -> None:
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        self.address = self._bytes.data_ptr()

    def view(self, offset: int, num_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `num_bytes` bytes from `offset` on as a flat tensor."""
        return self._bytes[offset : offset + num_bytes].view(dtype)

    def copy(self, destinations: np.ndarray, sources: np.ndarray, num_bytes: int) -> None:
        """Copy pieces to it, as `copy_pieces` does."""
        copy_pieces(destinations, sources, num_bytes)

    def begin_reading(self) -> None:
        """Have what is computed now read what was copied before."""

    def end_reading(self) -> None:
        """Let the memory be written again."""


class CpuPlatform:
    """The CPU: its device tier is RAM, and so is the host tier.

    Attributes:
        device: Device of the model's tensors.
        is_lazy: True where memory is occupied when it is written, False where it is when mapped.
        has_staging: True where files are reached through host memory beside the device tier.
        chunk_bytes: Bytes of a chunk of device memory that blocks pass; 0: there is none.
        file_links: Links of reading the file and of writing it.
    """

    device = torch.device("cpu")
    is_lazy = True
    has_staging = False
    chunk_bytes = 0
    file_links = Link.FILE_TO_DEVICE, Link.DEVICE_TO_FILE

    def use(self) -> contextlib.AbstractContextManager[None]:
        """Compute in this context what later calls go on with, after what was computed before."""
        return outside_inference_mode()

    def make_slots(self, slot_bytes: int, budget_bytes: int) -> SlotMemory:
        """Return slots of the device tier, which has a budget."""
        return SlotMemory(slot_bytes)

    def make_pages(self, page_bytes: int, limit_bytes: int | None) -> SlotMemory:
        """Return pages of host memory, which has a limit or none."""
        return SlotMemory(page_bytes)

    def host_area(self, num_bytes: int) -> Area:
        """Return memory that files are read into and written from."""
        return Area(num_bytes)

    def scratch(self, num_bytes: int) -> Scratch:
        """Return memory of a group of records."""
        return Scratch(num_bytes)

    def copy(self, destinations: np.ndarray, sources: np.ndarray, num_bytes: int) -> None:
        """Copy pieces of memory between addresses, int64 each; none overlap."""
        copy_pieces(destinations, sources, num_bytes)

    def save(self, destinations: np.ndarray, sources: np.ndarray, num_bytes: int) -> None:
        """Copy pieces from slots to the host tier."""
        copy_pieces(destinations, sources, num_bytes)

    def fill_slots(self, slots: np.ndarray, sources: np.ndarray, num_bytes: int) -> np.ndarray:
        """Copy records of the host tier to those of the slots that are not 0.

        Returns:
            Addresses that they are to be read at now, int64.
        """
        there = slots != 0
        if there.any():
            copy_pieces(slots[there], sources[there], num_bytes)
        return sources

    def store(
        self, blocks: FullBlocks, first: int, places: np.ndarray, *, below: bool
    ) -> object | None:
        """Write pages from number `first` on.

        Args:
            blocks: Source of the pages.
            first: Number of the first of them.
            places: Addresses of their records, int64 `(n, H)`.
            below: Whether these are of the host tier, and not slots.

        Returns:
            Event that files are to be written after; None: now.
        """
        layout = blocks.layout
        per_copy = max(1, _COPY_BYTES // layout.page_bytes)
        for at in range(0, len(places), per_copy):
            some = places[at : at + per_copy].ravel()
            num_bytes = len(some) * layout.record_bytes
            if num_bytes <= MAX_VIEW_BYTES and (np.diff(some) == layout.record_bytes).all():
                pages = torch.frombuffer(view_at(int(some[0]), num_bytes), dtype=layout.dtype)
            else:
                pages = torch.empty(
                    len(some) * layout.record_items, dtype=layout.dtype, device="cpu"
                )
            blocks.fill(pages.view(-1, layout.num_heads, layout.record_items), first + at)
            sources = pages.data_ptr() + np.arange(len(some)) * layout.record_bytes
            if sources[0] != some[0]:
                copy_pieces(some, sources, layout.record_bytes)
        return None

    def attention(
        self, query: torch.Tensor, layout: BlockLayout, scale: float, softcap: float | None
    ) -> RecordAttention:
        """Return attention of few tokens over records where they lie."""
        return RecordAttention(
            query, layout.dtype, layout.block_tokens, layout.value_dim, scale, softcap
        )

    def most_rows(self, layout: BlockLayout) -> int:
        """Return the most rows of queries of a KV head for which a record is read only once."""
        return sys.maxsize

    def localize(
        self, groups: Iterator[tuple[np.ndarray, np.ndarray]], num_bytes: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield groups of records in memory in which reading one several times costs little."""
        return groups

    def find_in_host(self, addresses: np.ndarray) -> np.ndarray:
        """Return which addresses the CPU can read, bool."""
        return np.ones(len(addresses), dtype=bool)

    def to_host(self, tensor: torch.Tensor) -> np.ndarray:
        """Return the numbers of a tensor, once they are computed."""
        return tensor.numpy()

    def from_host(self, array: np.ndarray) -> torch.Tensor:
        """Return an array as a tensor of the device."""
        return torch.from_numpy(array)

    def hand_over(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a result to the caller of the pool."""
        return tensor

    def marks(self) -> list[torch.cuda.Event]:
        """Return events of all that was launched so far."""
        return []

    def synchronize(self) -> None:
        """Wait for all that was launched."""

    def close(self) -> None:
        """Give back memory of the platform's own."""


Platform = CpuPlatform | CudaPlatform


def make_platform(device: torch.device | str) -> Platform:
    """Return the platform of a device.

    Raises:
        ValueError: There is no such device here, or it is neither the CPU nor a CUDA device.
        PenstockError: Triton, which a GPU needs, is not there.
    """
    found = check_device(device)
    if found.type == "cpu":
        return CpuPlatform()
    try:
        return CudaPlatform(found)
    except ImportError as error:
        raise PenstockError(
            f"device={str(device)!r}: a pool on a GPU needs Triton, which comes with PyTorch's "
            f"builds for GPUs ({error}); install it, or use device='cpu'"
        ) from error
