"""Vectors below the device: in host memory or in a file, moved through a few buffers.

A buffer keeps its vector until another one needs it, so the newest vectors, which each step uses,
need not be read. Writes go on while the next product is computed.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from penstock.memory import Extent, ExtentFile, Ledger, Link, Tier, WorkerThreads
from penstock.memory.pages import DIRECT_IO_BYTES, map_anonymous, round_up

NUM_BUFFERS = 2


def buffer_bytes(length: int, dtype: torch.dtype) -> int:
    """Return the bytes of the buffers that vectors of a lower tier stream through."""
    return NUM_BUFFERS * round_up(length * dtype.itemsize)


def make_workspace(count: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised vectors, (count, length), that buffers of a file may be read into.

    In RAM they begin at a page, end at the end of one and lie in huge ones, which matter to sparse
    products: those read a vector out of order.
    """
    if device.type != "cpu" or not length:
        return torch.empty(count, length, dtype=dtype, device=device)
    num_bytes = count * length * dtype.itemsize
    memory = map_anonymous(round_up(num_bytes), private=True, huge_pages=True)
    whole = torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
    return whole.view(dtype).view(count, length)


def make_lower(
    capacity: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    file: ExtentFile | None,
    ledger: Ledger,
) -> NoVectors | LowerVectors:
    """Return room for so many vectors in a file, or else in host memory."""
    if capacity <= 0:
        return NoVectors()
    if file is None:
        return HostVectors(capacity, length, dtype, device, ledger)
    return FileVectors(capacity, length, dtype, device, file, ledger)


class NoVectors:
    """No vectors: all are on the device."""

    def stream(
        self, indices: Sequence[int], *, keep: int = -1, spare: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        return iter(())

    def stream_parts(self, count: int) -> Iterator[tuple[slice, Tensor]]:
        return iter(())

    def fetch(self, index: int) -> Tensor:
        raise AssertionError("no vector is below the device")

    def write(self, index: int, vector: Tensor) -> None:
        raise AssertionError("no vector is below the device")

    def write_part(self, begin: int, vectors: Tensor) -> None:
        raise AssertionError("no vector is below the device")

    def close(self) -> None:
        pass


class LowerVectors(abc.ABC):
    """Vectors in a lower tier, and the buffers that they pass through.

    Args:
        num_buffers: Buffers of its own.
    """

    def __init__(self, num_buffers: int) -> None:
        self._num_buffers = num_buffers
        self._held: list[int | None] = [None] * num_buffers  # vector of each buffer
        self._writes: list[Any] = [None] * num_buffers  # of buffers that are being written

    def fetch(self, index: int) -> Tensor:
        """Return a vector on the device; valid until another one is streamed or written."""
        (found,) = (vector for _, vector in self.stream([index], keep=index + 1))
        return found

    def write(self, index: int, vector: Tensor) -> None:
        """Write a vector, which stays in a buffer, as does the one before it."""
        at = self._buffer_of(index)
        if at is None:
            at = next(b for b in range(self._num_buffers) if self._held[b] != index - 1)
        self._settle(at)
        self._held[at] = None
        self._fill(at, vector)
        self._held[at] = index
        self._writes[at] = self._start_write(index, at)

    def stream(
        self, indices: Sequence[int], *, keep: int = -1, spare: Tensor | None = None
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield vectors in order; each is valid until the next is asked for.

        Args:
            indices: The vectors, each once.
            keep: One that stays in its buffer, if it is there.
            spare: One more buffer, a vector of `make_workspace`.
        """
        room: list[int | Tensor] = [b for b in range(self._num_buffers) if self._held[b] != keep]
        if spare is not None and self._takes(spare):
            room.append(spare)
        following = self._start(indices, 0, None, room)
        for turn, index in enumerate(indices):
            place, token = following
            if token is not None:
                self._wait(token)
            try:
                if turn + 1 < len(indices):
                    following = self._start(indices, turn + 1, place, room)
                yield index, self._show(place)
            except BaseException:
                self._drain()  # nothing may be read into the buffers any more
                raise

    def _start(
        self,
        indices: Sequence[int],
        turn: int,
        used: int | Tensor | None,
        room: list[int | Tensor],
    ) -> tuple[Any, Any]:
        """Return the buffer of a vector, and what to wait for: None if it is there."""
        if turn >= len(indices):
            return None, None
        at = self._buffer_of(indices[turn])
        if at is not None:
            return at, None
        wanted = set(indices[turn:])
        # Of two buffers rather that whose vector is not needed soon.
        free = [each for each in room if each is not used]
        free.sort(key=lambda each: isinstance(each, int) and self._held[each] in wanted)
        place = free[0] if free else room[0]
        if isinstance(place, int):
            self._settle(place)
            self._held[place] = indices[turn]
        return place, self._start_read(indices[turn], place)

    def _buffer_of(self, index: int) -> int | None:
        return self._held.index(index) if index in self._held else None

    def _settle(self, at: int) -> None:
        """Wait until a buffer has been written."""
        token, self._writes[at] = self._writes[at], None
        if token is not None:
            self._wait(token)

    def _forget(self) -> None:
        """Take the buffers for something else."""
        for at in range(self._num_buffers):
            self._settle(at)
            self._held[at] = None

    def _takes(self, spare: Tensor) -> bool:
        return True

    @abc.abstractmethod
    def stream_parts(self, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the same elements of the first `count` vectors, part by part."""

    @abc.abstractmethod
    def write_part(self, begin: int, vectors: Tensor) -> None:
        """Write elements from `begin` on, a multiple of a page, of the first vectors."""

    @abc.abstractmethod
    def _fill(self, at: int, vector: Tensor) -> None:
        """Copy a vector of the device into a buffer."""

    @abc.abstractmethod
    def _show(self, place: int | Tensor) -> Tensor:
        """Return a buffer's vector on the device."""

    @abc.abstractmethod
    def _start_read(self, index: int, place: int | Tensor) -> Any: ...

    @abc.abstractmethod
    def _start_write(self, index: int, at: int) -> Any: ...

    @abc.abstractmethod
    def _wait(self, token: Any) -> None:
        """Wait for what `_start_read` or `_start_write` started."""

    @abc.abstractmethod
    def _drain(self) -> None:
        """Wait for all that was started, and forget what is in the buffers."""

    @abc.abstractmethod
    def close(self) -> None:
        """Give back memory and file, after what was started has ended."""


class HostVectors(LowerVectors):
    """Vectors in host memory, pinned where the device is a GPU, copied on a stream of their own."""

    def __init__(
        self, capacity: int, length: int, dtype: torch.dtype, device: torch.device, ledger: Ledger
    ) -> None:
        super().__init__(NUM_BUFFERS)
        is_gpu = device.type == "cuda"
        self._vectors = torch.empty(capacity, length, dtype=dtype, pin_memory=is_gpu, device="cpu")
        self._buffers = torch.empty(NUM_BUFFERS, length, dtype=dtype, device=device)
        self._stream = torch.cuda.Stream(device) if is_gpu else None
        self._ledger, self._vector_bytes = ledger, length * dtype.itemsize
        self._ledger.add(Tier.HOST, capacity * self._vector_bytes)
        self._ledger.add(Tier.DEVICE, NUM_BUFFERS * self._vector_bytes)

    def _drain(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self._held = [None] * self._num_buffers

    def _fill(self, at: int, vector: Tensor) -> None:
        if vector.data_ptr() != self._buffers[at].data_ptr():
            self._buffers[at].copy_(vector)

    def _show(self, place: int | Tensor) -> Tensor:
        return self._buffers[place] if isinstance(place, int) else place

    def _start_read(self, index: int, place: int | Tensor) -> bool:
        self._copy(self._show(place), self._vectors[index])
        self._record(Link.HOST_TO_DEVICE, self._vector_bytes)
        return True

    def _start_write(self, index: int, at: int) -> bool:
        self._copy(self._vectors[index], self._buffers[at])
        self._record(Link.DEVICE_TO_HOST, self._vector_bytes)
        return True

    def _copy(self, to: Tensor, vector: Tensor) -> None:
        if self._stream is None:
            to.copy_(vector)
            return
        # The buffer's last use was launched on the current stream before.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            to.copy_(vector, non_blocking=True)

    def _wait(self, token: bool) -> None:
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def stream_parts(self, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the same elements of the first `count` vectors; see `LowerVectors`."""
        self._forget()
        if self._stream is not None:
            self._stream.synchronize()  # what was written is read by the host below
        width = max(1, self._buffers.numel() // count // 2)
        length = self._vectors.shape[1]
        for begin in range(0, length, width):
            part = slice(begin, min(begin + width, length))
            chunk = self._vectors[:count, part].to(self._buffers.device)
            self._record(Link.HOST_TO_DEVICE, chunk.numel() * chunk.element_size())
            yield part, chunk

    def write_part(self, begin: int, vectors: Tensor) -> None:
        """Write elements of the first vectors; see `LowerVectors`."""
        self._vectors[: len(vectors), begin : begin + vectors.shape[1]] = vectors.cpu()
        self._record(Link.DEVICE_TO_HOST, vectors.numel() * vectors.element_size())

    def _record(self, link: Link, num_bytes: int) -> None:
        now = time.perf_counter_ns()
        self._ledger.record_transfer(link, num_bytes, now, now)

    def close(self) -> None:
        """Give back the memory; see `LowerVectors`."""
        if self._stream is not None:
            self._stream.synchronize()
        self._ledger.add(Tier.HOST, -len(self._vectors) * self._vector_bytes)
        if len(self._buffers):
            self._ledger.add(Tier.DEVICE, -NUM_BUFFERS * self._vector_bytes)
        self._vectors, self._buffers = self._vectors[:0], self._buffers[:0]


class FileVectors(LowerVectors):
    """Vectors in a file, read ahead and written by one thread, from page-aligned memory."""

    def __init__(
        self,
        capacity: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        file: ExtentFile,
        ledger: Ledger,
    ) -> None:
        super().__init__(NUM_BUFFERS)
        self._length, self._dtype, self._device = length, dtype, device
        self._file, self._ledger = file, ledger
        self._vector_bytes = length * dtype.itemsize
        self._stride_bytes = round_up(self._vector_bytes)
        self._extent: Extent | None = file.allocate(capacity * self._stride_bytes)
        self._capacity = capacity
        self._memory = torch.frombuffer(
            map_anonymous(NUM_BUFFERS * self._stride_bytes, private=True, huge_pages=True),
            dtype=torch.uint8,
        )
        self._threads = WorkerThreads(1, thread_name_prefix="penstock-spectral")
        self._last: Future[None] | None = None
        is_ram = device.type == "cpu"
        self._read_link = Link.FILE_TO_DEVICE if is_ram else Link.FILE_TO_HOST
        self._write_link = Link.DEVICE_TO_FILE if is_ram else Link.HOST_TO_FILE
        self._buffer_tier = Tier.DEVICE if is_ram else Tier.HOST
        ledger.add(Tier.FILE, capacity * self._stride_bytes)
        ledger.add(self._buffer_tier, NUM_BUFFERS * self._stride_bytes)

    def _vector(self, at: int) -> Tensor:
        begin = at * self._stride_bytes
        return self._memory[begin : begin + self._vector_bytes].view(self._dtype)

    def _fill(self, at: int, vector: Tensor) -> None:
        if vector.data_ptr() != self._vector(at).data_ptr():
            self._vector(at).copy_(vector)

    def _show(self, place: int | Tensor) -> Tensor:
        return self._vector(place).to(self._device) if isinstance(place, int) else place

    def _takes(self, spare: Tensor) -> bool:
        return spare.device.type == "cpu" and spare.data_ptr() % DIRECT_IO_BYTES == 0

    def _start_read(self, index: int, place: int | Tensor) -> Future[None]:
        to = self._vector(place) if isinstance(place, int) else place
        begin = index * self._stride_bytes
        return self._submit(self._read, [(to.data_ptr(), self._stride_bytes, begin)])

    def _start_write(self, index: int, at: int) -> Future[None]:
        begin = index * self._stride_bytes
        return self._submit(self._write, [(self._vector(at).data_ptr(), self._vector_bytes, begin)])

    def _submit(self, function: Any, pieces: list[tuple[int, int, int]]) -> Future[None]:
        self._last = self._threads.submit(function, pieces)
        return self._last

    def _read(self, pieces: list[tuple[int, int, int]]) -> None:
        self._move(self._file.read, self._read_link, pieces)

    def _write(self, pieces: list[tuple[int, int, int]]) -> None:
        self._move(self._file.write, self._write_link, pieces)

    def _move(self, move: Any, link: Link, pieces: list[tuple[int, int, int]]) -> None:
        assert self._extent is not None
        start = time.perf_counter_ns()
        for address, num_bytes, begin in pieces:
            move(self._extent, address, num_bytes, begin)
        self._ledger.record_transfer(link, sum(size for _, size, _ in pieces), start)

    def _wait(self, token: Future[None]) -> None:
        start = time.perf_counter_ns()
        token.result()
        self._ledger.record_stall("basis", start, time.perf_counter_ns())

    def _drain(self) -> None:
        if self._last is not None:
            self._last.exception()  # one thread, in order: all before it have ended too
        self._held = [None] * self._num_buffers

    def stream_parts(self, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the same elements of the first `count` vectors; see `LowerVectors`."""
        self._forget()
        period = DIRECT_IO_BYTES // self._dtype.itemsize
        width = max(period, self._stride_bytes // self._dtype.itemsize // count // period * period)
        if width * count * self._dtype.itemsize > self._stride_bytes:
            memory = torch.empty(NUM_BUFFERS, width * count, dtype=self._dtype, device="cpu")
        else:
            memory = self._memory.view(NUM_BUFFERS, -1).view(self._dtype)
        begins = range(0, self._length, width)

        def start(turn: int) -> tuple[Future[None], Tensor]:
            begin = begins[turn]
            whole = min(width, self._stride_bytes // self._dtype.itemsize - begin)
            chunk = memory[turn % NUM_BUFFERS, : whole * count].view(count, whole)
            pieces = [
                (
                    row.data_ptr(),
                    whole * self._dtype.itemsize,
                    at * self._stride_bytes + begin * self._dtype.itemsize,
                )
                for at, row in enumerate(chunk)
            ]
            return self._submit(self._read, pieces), chunk

        following = start(0)
        for turn, begin in enumerate(begins):
            (pending, chunk), end = following, min(begin + width, self._length)
            self._wait(pending)
            if turn + 1 < len(begins):
                following = start(turn + 1)
            try:
                yield slice(begin, end), chunk[:, : end - begin].to(self._device)
            except BaseException:
                self._drain()
                raise

    def write_part(self, begin: int, vectors: Tensor) -> None:
        """Write elements of the first vectors, and wait for it; see `LowerVectors`."""
        item = self._dtype.itemsize
        host = vectors.contiguous().cpu()
        self._move(
            self._file.write,
            self._write_link,
            [
                (vector.data_ptr(), len(vector) * item, row * self._stride_bytes + begin * item)
                for row, vector in enumerate(host)
            ],
        )

    def close(self) -> None:
        """Give back memory and file; see `LowerVectors`."""
        if self._extent is None:
            return
        self._threads.shutdown(wait=True)
        self._file.free(self._extent)
        self._extent = None
        self._ledger.add(Tier.FILE, -self._capacity * self._stride_bytes)
        self._ledger.add(self._buffer_tier, -NUM_BUFFERS * self._stride_bytes)
        self._memory = self._memory[:0]
