"""Pools on CUDA devices: what is launched on which stream, and in which order.

All of a pool's computation runs on one stream, `home`: that which was current when the pool was
made. A call from another stream is put between that stream's work before and after it, so tensors
of the caller and the pool's own are safe with PyTorch's allocator. Transfers run on a second
stream, `side`, beside the model:

    home    keys to chunks and to slots; attention, over slots, tails and registered host memory
    side    chunks to host pages and to buffers of the file; missing records to slots and to chunks

Records, in slots and in host memory, are one memory in two streams' use, and each chunk is another
(`StreamOrder`). So a slot, or a page that was freed and taken again, is not overwritten before the
attention that reads it has run, and no attention begins before its records are there; what the
model computes between its layers is beside both. Threads write a buffer to the file after its
event, and read into one after the marks of what was launched when it was given back.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from penstock.compat.autograd import outside_inference_mode
from penstock.errors import PenstockError
from penstock.kv._areas import SLAB_BYTES, Area, SlotMemory
from penstock.kv._cuda_memory import (
    DeviceArea,
    DeviceChunk,
    HostRanges,
    RegisteredArea,
    StreamOrder,
)
from penstock.kv._layout import BlockLayout, FullBlocks
from penstock.kv._partial import merge
from penstock.memory import Link

_SLAB_SHARE = 32  # of a budget: a slab takes at most 1 / this, so that little of it is lost


def check_device(device: torch.device | str) -> torch.device:
    """Return the device that `device=` of a pool names, with its number, without starting CUDA.

    Raises:
        ValueError: There is no such device here, or it is neither the CPU nor a CUDA device.
    """
    found = torch.device(device)
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != "cuda":
        raise ValueError(f"device must be 'cpu' or a CUDA device; got {str(device)!r}")
    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        raise ValueError(f"device={str(device)!r}: PyTorch finds no CUDA device; use device='cpu'")
    if found.index is None:
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        found = torch.device("cuda", index)
    if found.index >= num_gpus:
        raise ValueError(f"device={str(device)!r}: PyTorch finds {num_gpus} CUDA devices")
    return found


class CudaPlatform:
    """A CUDA device, with the methods and attributes of `CpuPlatform`.

    Args:
        device: The GPU, with its number.

    Raises:
        ImportError: Triton is not there.
    """

    is_lazy = False
    has_staging = True
    file_links = Link.FILE_TO_HOST, Link.HOST_TO_FILE

    def __init__(self, device: torch.device) -> None:
        import penstock.kv.triton  # noqa: F401  # what is missing is missing now

        self.device = device
        self._home: Any = torch.cuda.current_stream(device)
        self._side: Any = torch.cuda.Stream(device)
        self._records = StreamOrder()
        self._chunks: deque[DeviceChunk] = deque()
        self._host = HostRanges()

    # ------------------------------------------------------------------ streams

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Launch on `home` in this context, between the caller's stream's work before and after.

        Raises:
            PenstockError: The caller's stream is being captured.
        """
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                raise PenstockError(
                    "penstock.kv cannot be captured into a CUDA graph: which blocks a step reads, "
                    "and where they are, changes from step to step; run the model without graphs"
                )
        current: Any = torch.cuda.current_stream(self.device)
        is_other = current != self._home
        with torch.cuda.stream(self._home), outside_inference_mode():
            if is_other:
                self._home.wait_stream(current)
            try:
                yield
            finally:
                if is_other:
                    current.wait_stream(self._home)

    def hand_over(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a result, whose memory the caller's stream may go on to use."""
        current: Any = torch.cuda.current_stream(self.device)
        if current != self._home:
            tensor.record_stream(current)
        return tensor

    def marks(self) -> list[Any]:
        """Return events of all that was launched so far."""
        return [self._home.record_event(), self._side.record_event()]

    def synchronize(self) -> None:
        """Wait for all that was launched."""
        self._home.synchronize()
        self._side.synchronize()

    # ------------------------------------------------------------------- memory

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return self._chunks[0].area.num_bytes if self._chunks else 0

    @property
    def num_chunks(self) -> int:
        """Chunks there are."""
        return len(self._chunks)

    def make_chunks(self, num_chunks: int, num_bytes: int) -> None:
        """Make chunks of so many bytes each, in place of those there are."""
        self._chunks.clear()
        for _ in range(num_chunks):
            area = DeviceArea(num_bytes, self.device, self._home, self._side)
            self._chunks.append(DeviceChunk(area, self._home, self._copy_to_chunk))

    def scratch(self, num_bytes: int) -> DeviceChunk:
        """Return the chunk whose last use is longest ago."""
        assert num_bytes <= self.chunk_bytes
        self._chunks.rotate(-1)
        return self._chunks[-1]

    def make_slots(self, slot_bytes: int, budget_bytes: int) -> SlotMemory:
        """Return slots of the device tier, which has a budget."""
        return SlotMemory(
            slot_bytes, self._device_area, min(SLAB_BYTES, budget_bytes // _SLAB_SHARE)
        )

    def make_pages(self, page_bytes: int, limit_bytes: int | None) -> SlotMemory:
        """Return pages of host memory, which has a limit or none."""
        share = SLAB_BYTES if limit_bytes is None else limit_bytes // _SLAB_SHARE
        return SlotMemory(page_bytes, self.host_area, min(SLAB_BYTES, share))

    def host_area(self, num_bytes: int) -> RegisteredArea:
        """Return registered host memory."""
        return self._host.add(RegisteredArea(num_bytes, (self._home, self._side)))

    def _device_area(self, num_bytes: int) -> Area:
        return DeviceArea(num_bytes, self.device, self._home, self._side)

    def find_in_host(self, addresses: np.ndarray) -> np.ndarray:
        """Return which addresses the CPU can read, bool."""
        return self._host.contain(addresses)

    def close(self) -> None:
        """Give back the chunks."""
        self._chunks.clear()

    # ------------------------------------------------------------------- copies

    def copy(self, destinations: np.ndarray, sources: np.ndarray, num_bytes: int) -> None:
        """Copy pieces of memory between addresses, int64 each, on `home`; none overlap."""
        with self._records.use(self._home):
            self._launch_copy(self._home, destinations, sources, num_bytes)

    def save(self, destinations: np.ndarray, sources: np.ndarray, num_bytes: int) -> None:
        """Copy pieces from slots to the host tier, on `side`."""
        with self._records.use(self._side):
            self._launch_copy(self._side, destinations, sources, num_bytes)

    def fill_slots(self, slots: np.ndarray, sources: np.ndarray, num_bytes: int) -> np.ndarray:
        """Copy records of the host tier to those of the slots that are not 0, on `side`.

        Returns:
            Addresses that they are to be read at now, int64: a record crosses the link once.
        """
        there = slots != 0
        if there.any():
            self.save(slots[there], sources[there], num_bytes)
        return np.where(there, slots, sources)

    def store(self, blocks: FullBlocks, first: int, places: np.ndarray, *, below: bool) -> Any:
        """Write pages from number `first` on, by way of chunks; arguments as of `CpuPlatform`.

        Returns:
            Event that files are to be written after.
        """
        layout, event = blocks.layout, None
        stream = self._side if below else self._home
        per_chunk = self.chunk_bytes // layout.page_bytes
        for at in range(0, len(places), per_chunk):
            some = places[at : at + per_chunk]
            chunk = self.scratch(some.size * layout.record_bytes)
            with chunk.order.use(self._home):
                pages = chunk.view(0, some.size * layout.record_bytes, layout.dtype)
                blocks.fill(pages.view(*some.shape, layout.record_items), first + at)
            sources = chunk.address + np.arange(some.size, dtype=np.int64) * layout.record_bytes
            with chunk.order.use(stream), self._records.use(stream):
                self._launch_copy(stream, some.ravel(), sources, layout.record_bytes)
                event = stream.record_event()
        return event

    def _copy_to_chunk(
        self, destinations: np.ndarray, sources: np.ndarray, num_bytes: int, chunk: DeviceChunk
    ) -> None:
        _, first, number = np.unique(sources, return_index=True, return_inverse=True)
        is_again = np.ones(len(sources), dtype=bool)
        is_again[first] = False
        side = self._side
        with chunk.order.use(side), self._records.use(side):
            self._launch_copy(side, destinations[first], sources[first], num_bytes)
            if is_again.any():  # sequences that share a record: it crosses the link once
                again = destinations[first[number[is_again]]]
                self._launch_copy(side, destinations[is_again], again, num_bytes)

    def _launch_copy(
        self, stream: Any, destinations: np.ndarray, sources: np.ndarray, num_bytes: int
    ) -> None:
        """Launch one kernel that copies pieces; `_records` and chunks are ordered by the caller."""
        from penstock.kv.triton import common_alignment, copy_launch

        alignment = common_alignment(num_bytes, destinations, sources)
        with torch.cuda.stream(stream):
            table = self.from_host(np.stack([destinations, sources]))
            copy_launch(table, num_bytes, alignment)()

    def localize(
        self, groups: Iterator[tuple[np.ndarray, np.ndarray]], num_bytes: int
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield groups of records of `num_bytes`, those of host memory by way of chunks.

        The kernel reads a record again for each block of rows and each sequence that shares it.
        """
        for items, addresses in groups:
            in_host = self.find_in_host(addresses)
            if not in_host.all():
                yield items[~in_host], addresses[~in_host]
            items, addresses = items[in_host], addresses[in_host]
            distinct, number = np.unique(addresses, return_inverse=True)
            per_chunk = self.chunk_bytes // num_bytes
            for first in range(0, len(distinct), per_chunk):
                some = distinct[first : first + per_chunk]
                chunk = self.scratch(len(some) * num_bytes)
                places = chunk.address + np.arange(len(some), dtype=np.int64) * num_bytes
                chunk.copy(places, some, num_bytes)
                is_some = (number >= first) & (number < first + per_chunk)
                chunk.begin_reading()
                yield items[is_some], places[number[is_some] - first]
                chunk.end_reading()

    # ---------------------------------------------------------------- attention

    def attention(
        self, query: torch.Tensor, layout: BlockLayout, scale: float, softcap: float | None
    ) -> CudaAttention:
        """Return attention of few tokens over records where they lie."""
        return CudaAttention(self, query, layout, scale, softcap)

    def most_rows(self, layout: BlockLayout) -> int:
        """Return the most rows of queries of a KV head for which a record is read only once."""
        from penstock.kv.triton import most_rows

        return most_rows(layout.dtype, layout.key_dim, layout.value_dim)

    def attend(self, *operands: torch.Tensor, **options: Any) -> Any:
        """Launch attention by address on `home`, as `penstock.kv.triton.attend_records`."""
        from penstock.kv.triton import attend_records

        with self._records.use(self._home):
            return attend_records(*operands, **options, is_aligned=True)

    def to_host(self, tensor: torch.Tensor) -> np.ndarray:
        """Return the numbers of a tensor, once they are computed."""
        return tensor.cpu().numpy()

    def from_host(self, array: np.ndarray) -> torch.Tensor:
        """Return an array as a tensor of the device, without waiting for what runs there."""
        # PyTorch's pinned memory is not given out again before the copy from it has ended.
        pinned = torch.from_numpy(np.ascontiguousarray(array)).pin_memory()
        return pinned.to(self.device, non_blocking=True)


class CudaAttention:
    """Attention of few tokens over records that come part by part, as `RecordAttention` on the CPU.

    Attributes:
        out: The output over the records so far, float32 `(B, Hq, n, value_dim)`.
        lse: Its log-sum-exp of scores, float32 `(B, Hq, n)`.
        has_parts: Whether there were any; before, `out` and `lse` hold nothing.
    """

    def __init__(
        self,
        platform: CudaPlatform,
        query: torch.Tensor,
        layout: BlockLayout,
        scale: float,
        softcap: float | None,
    ) -> None:
        self._platform = platform
        self._query = query.to(layout.dtype).contiguous()
        self._options = {
            "block_tokens": layout.block_tokens,
            "value_dim": layout.value_dim,
            "scale": scale,
            "softcap": softcap,
        }
        self.out = self.lse = query.new_empty(0)
        self.has_parts = False

    def add(
        self,
        addresses: torch.Tensor,
        counts: torch.Tensor,
        visible: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        first_token: int = 0,
        with_block_lse: bool = False,
    ) -> torch.Tensor | None:
        """Attend to further records; arguments as of `RecordAttention.add`, on the device.

        Returns:
            The log-sum-exps of each record, where they are wanted.
        """
        num_tokens = addresses.shape[2] * self._options["block_tokens"]
        visible, bias = (
            None if each is None else each.narrow(-1, first_token, num_tokens)
            for each in (visible, bias)
        )
        out, lse, block_lse = self._platform.attend(
            self._query,
            addresses,
            counts,
            **self._options,
            visible=visible,
            bias=bias,
            with_block_lse=with_block_lse,
        )
        if self.has_parts:
            out, lse = merge([(self.out, self.lse), (out, lse)])
        self.out, self.lse, self.has_parts = out, lse, True
        return block_lse
