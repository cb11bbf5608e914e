"""The basis: orthonormal vectors on the device up to a budget, the others in a lower tier.

A step uses each vector once, and steps follow each other, so the order of uses is a cycle. What
Belady's rule evicts on a cycle is the vector that was just used: a fixed set stays resident, and
the others stream past through two buffers. Vectors that stay resident are never written to the
file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from penstock.memory import Extent, ExtentFile, Ledger, Link, Tier
from penstock.memory.pages import DIRECT_IO_BYTES, map_anonymous, round_up

NUM_BUFFERS = 2
_CHUNK_BYTES = 4 * 2**20  # of a product in float64, or of rows that are rotated
_ENOUGH = 0.5  # of its norm that a vector keeps, or it is orthogonalised once more


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of Gram matrices: float64 or complex128."""
    return torch.complex128 if dtype.is_complex else torch.float64


def gram(left: Tensor, right: Tensor) -> Tensor:
    """Return `left right^H`, (a, b), in float64 or complex128, of vectors of any precision.

    Args:
        left: Vectors, (a, n).
        right: Vectors, (b, n).
    """
    # G_ij = conj(l_i) r_j, summed in float64
    wide = wide_dtype(left.dtype)
    if left.dtype == wide:
        return left.conj() @ right.T
    total = torch.zeros(len(left), len(right), dtype=wide, device=left.device)
    width = max(1, _CHUNK_BYTES // (8 * max(1, len(left) + len(right))))
    for begin in range(0, left.shape[1], width):
        part = slice(begin, begin + width)
        total += left[:, part].to(wide).conj() @ right[:, part].to(wide).T
    return total


class Basis:
    """Orthonormal vectors of n elements, of which the first `num_resident` are on the device.

    Args:
        capacity: Vectors that it has room for.
        length: Elements of a vector.
        dtype: Their dtype.
        device: The device tier.
        num_resident: Vectors that are kept there.
        file: File of the others; None: host memory.
        ledger: Account of what is resident and what moves.
        reduce: Sums a tensor over ranks, in place.
        accuracy: Components in the basis that new vectors may keep; 0: as few as rounding allows.

    Raises:
        StoreFullError: The file has no room for all vectors.
    """

    def __init__(
        self,
        capacity: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        num_resident: int,
        file: ExtentFile | None,
        ledger: Ledger,
        reduce: Callable[[Tensor], Tensor],
        accuracy: float = 0.0,
    ) -> None:
        # A sweep leaves rounding of what the vector was before it.
        self._enough = min(_ENOUGH, torch.finfo(dtype).eps / max(accuracy, 1e-300))
        self.count, self.capacity, self.length = 0, capacity, length
        self.dtype, self.device, self.reduce = dtype, device, reduce
        self.num_resident = min(num_resident, capacity)
        self._ledger = ledger
        self._resident = torch.empty(self.num_resident, length, dtype=dtype, device=device)
        self._lower = _make_lower(capacity - self.num_resident, length, dtype, device, file, ledger)
        self._device_bytes = self.num_resident * length * dtype.itemsize
        ledger.add(Tier.DEVICE, self._device_bytes)

    def append(self, vectors: Tensor) -> None:
        """Append vectors, (b, n), which are orthonormal to all."""
        for vector in vectors:
            if self.count < self.num_resident:
                self._resident[self.count].copy_(vector)
            else:
                self._lower.write(self.count - self.num_resident, vector)
            self.count += 1

    def read(self, first: int, out: Tensor) -> Tensor:
        """Copy the vectors from `first` on into `out`, (b, n), and return it."""
        for place, index in zip(out, range(first, first + len(out)), strict=True):
            if index < self.num_resident:
                place.copy_(self._resident[index])
            else:
                place.copy_(next(self._lower.stream([index - self.num_resident]))[1])
        return out

    def orthogonalize(self, w: Tensor) -> Tensor:
        """Subtract from vectors, in place, what they have in common with all of the basis.

        The newest vectors come first: their share is the large one, and what its rounding leaves in
        the older ones is gone after the same sweep. A vector that lost much is swept once more
        (Daniel, Gragg, Kaufman and Stewart 1976).

        Args:
            w: Vectors, (b, n).

        Returns:
            Coefficients V^H w, (count, b), in float64 or complex128.
        """
        coefficients = torch.zeros(self.count, len(w), dtype=wide_dtype(w.dtype), device=w.device)
        newest = min(2 * len(w), max(0, min(self.count, self.num_resident)))
        if newest and self.count <= self.num_resident:
            group = slice(self.count - newest, self.count)
            self._subtract(self._resident[group], w, coefficients[group])
        before = self._norms(w)
        for _ in range(3):
            self._sweep(w, coefficients)
            after = self._norms(w)
            if bool((after > self._enough * before).all()) or bool((after == 0).any()):
                break
            before = after
        return coefficients

    def _sweep(self, w: Tensor, coefficients: Tensor) -> None:
        """Subtract the components in all vectors once: per group two products, one reduction."""
        spilled = range(self.count - self.num_resident - 1, -1, -1)
        for index, vector in self._lower.stream(spilled):
            place = self.num_resident + index
            self._subtract(vector[None], w, coefficients[place : place + 1])
        resident = min(self.count, self.num_resident)
        if resident:
            self._subtract(self._resident[:resident], w, coefficients[:resident])

    def _subtract(self, group: Tensor, w: Tensor, coefficients: Tensor) -> None:
        found = self.reduce(gram(group, w))
        coefficients += found
        w.addmm_(found.T.to(w.dtype), group, alpha=-1)

    def _norms(self, w: Tensor) -> Tensor:
        squares = torch.stack([gram(each[None], each[None])[0, 0].real for each in w])
        return self.reduce(squares).sqrt()

    def rotate(self, y: Tensor) -> None:
        """Replace the vectors by combinations of them, chunk by chunk, in place.

        Args:
            y: Coefficients, (count, kept), in float64 or complex128; `kept` is the new count.
        """
        kept = y.shape[1]
        for part, chunk in self._chunks(range(self.count)):
            rotated = (y.T @ chunk.to(y.dtype)).to(self.dtype)  # v'_j = sum_i y_ij v_i
            num = min(kept, self.num_resident)
            self._resident[:num, part] = rotated[:num]
            if kept > self.num_resident:
                self._lower.write_part(part.start, rotated[num:])
        self.count = kept

    def combine(self, y: Tensor, out: Tensor) -> Tensor:
        """Write combinations of the vectors to `out`, (k, n), and return it; `y` is as above."""
        for part, chunk in self._chunks(range(self.count)):
            out[:, part] = (y.T @ chunk.to(y.dtype)).to(dtype=out.dtype, device=out.device)
        return out

    def _chunks(self, indices: range) -> Iterator[tuple[slice, Tensor]]:
        """Yield the same elements of all vectors, chunk by chunk."""
        resident = min(len(indices), self.num_resident)
        if len(indices) <= self.num_resident:
            width = max(DIRECT_IO_BYTES, _CHUNK_BYTES // (8 * max(1, len(indices))))
            for begin in range(0, self.length, width):
                part = slice(begin, min(begin + width, self.length))
                yield part, self._resident[:resident, part]
            return
        for part, spilled in self._lower.stream_parts(len(indices) - resident):
            yield part, torch.cat([self._resident[:resident, part], spilled])

    def close(self) -> None:
        """Give back memory and file."""
        self._lower.close()
        self._ledger.add(Tier.DEVICE, -self._device_bytes)
        self._device_bytes = 0
        self._resident = self._resident[:0]


def buffer_bytes(length: int, dtype: torch.dtype) -> int:
    """Return the bytes of the buffers that vectors of a lower tier stream through."""
    return NUM_BUFFERS * round_up(length * dtype.itemsize)


def _make_lower(
    capacity: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    file: ExtentFile | None,
    ledger: Ledger,
) -> _NoVectors | _FileVectors | _HostVectors:
    if capacity <= 0:
        return _NoVectors()
    if file is None:
        return _HostVectors(capacity, length, dtype, device, ledger)
    return _FileVectors(capacity, length, dtype, device, file, ledger)


class _NoVectors:
    """No vectors: all are on the device."""

    def stream(self, indices: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        return iter(())

    def stream_parts(self, count: int) -> Iterator[tuple[slice, Tensor]]:
        return iter(())

    def write(self, index: int, vector: Tensor) -> None:
        raise AssertionError("no vector is below the device")

    def write_part(self, begin: int, vectors: Tensor) -> None:
        raise AssertionError("no vector is below the device")

    def close(self) -> None:
        pass


class _HostVectors:
    """Vectors in host memory, pinned where the device is a GPU, copied on a stream of their own."""

    def __init__(
        self, capacity: int, length: int, dtype: torch.dtype, device: torch.device, ledger: Ledger
    ) -> None:
        is_gpu = device.type == "cuda"
        self._vectors = torch.empty(capacity, length, dtype=dtype, pin_memory=is_gpu)
        self._buffers = torch.empty(NUM_BUFFERS, length, dtype=dtype, device=device)
        self._stream = torch.cuda.Stream(device) if is_gpu else None
        self._ledger, self._vector_bytes = ledger, length * dtype.itemsize
        self._ledger.add(Tier.HOST, capacity * self._vector_bytes)
        self._ledger.add(Tier.DEVICE, NUM_BUFFERS * self._vector_bytes)

    def stream(self, indices: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        for turn, index in enumerate(indices):
            buffer = self._buffers[turn % NUM_BUFFERS]
            if self._stream is None:
                buffer.copy_(self._vectors[index])
            elif turn == 0:
                self._copy(index, buffer)
            if self._stream is not None:
                torch.cuda.current_stream(buffer.device).wait_stream(self._stream)
                if turn + 1 < len(indices):
                    self._copy(indices[turn + 1], self._buffers[(turn + 1) % NUM_BUFFERS])
            self._record(Link.HOST_TO_DEVICE, self._vector_bytes)
            yield index, buffer

    def _copy(self, index: int, buffer: Tensor) -> None:
        assert self._stream is not None
        # The buffer's last use was launched on the current stream before.
        self._stream.wait_stream(torch.cuda.current_stream(buffer.device))
        with torch.cuda.stream(self._stream):
            buffer.copy_(self._vectors[index], non_blocking=True)

    def stream_parts(self, count: int) -> Iterator[tuple[slice, Tensor]]:
        width = max(1, self._buffers.numel() // count // 2)
        length = self._vectors.shape[1]
        for begin in range(0, length, width):
            part = slice(begin, min(begin + width, length))
            chunk = self._vectors[:count, part].to(self._buffers.device)
            self._record(Link.HOST_TO_DEVICE, chunk.numel() * chunk.element_size())
            yield part, chunk

    def write(self, index: int, vector: Tensor) -> None:
        self._vectors[index].copy_(vector)
        self._record(Link.DEVICE_TO_HOST, self._vector_bytes)

    def write_part(self, begin: int, vectors: Tensor) -> None:
        self._vectors[: len(vectors), begin : begin + vectors.shape[1]] = vectors.cpu()
        self._record(Link.DEVICE_TO_HOST, vectors.numel() * vectors.element_size())

    def _record(self, link: Link, num_bytes: int) -> None:
        now = time.perf_counter_ns()
        self._ledger.record_transfer(link, num_bytes, now, now)

    def close(self) -> None:
        self._ledger.add(Tier.HOST, -len(self._vectors) * self._vector_bytes)
        if len(self._buffers):
            self._ledger.add(Tier.DEVICE, -NUM_BUFFERS * self._vector_bytes)
        self._vectors, self._buffers = self._vectors[:0], self._buffers[:0]


class _FileVectors:
    """Vectors in a file, read ahead by one thread into two buffers of page-aligned memory."""

    def __init__(
        self,
        capacity: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        file: ExtentFile,
        ledger: Ledger,
    ) -> None:
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
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="penstock-spectral")
        is_ram = device.type == "cpu"
        self._read_link = Link.FILE_TO_DEVICE if is_ram else Link.FILE_TO_HOST
        self._write_link = Link.DEVICE_TO_FILE if is_ram else Link.HOST_TO_FILE
        self._buffer_tier = Tier.DEVICE if is_ram else Tier.HOST
        ledger.add(Tier.FILE, capacity * self._stride_bytes)
        ledger.add(self._buffer_tier, NUM_BUFFERS * self._stride_bytes)

    def _buffer(self, turn: int) -> Tensor:
        begin = turn % NUM_BUFFERS * self._stride_bytes
        return self._memory[begin : begin + self._stride_bytes]

    def stream(self, indices: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield vectors in order; each is valid until the next is asked for."""
        if not len(indices):
            return
        pending = self._start(indices[0], 0)
        for turn, index in enumerate(indices):
            self._wait(pending)
            if turn + 1 < len(indices):
                pending = self._start(indices[turn + 1], turn + 1)
            try:
                yield index, self._vector(self._buffer(turn))
            except BaseException:
                pending.exception()  # nothing may read into the buffers any more
                raise

    def _vector(self, buffer: Tensor) -> Tensor:
        return buffer[: self._vector_bytes].view(self._dtype).to(self._device)

    def _start(self, index: int, turn: int) -> Future[None]:
        assert self._extent is not None
        begin = index * self._stride_bytes
        address = self._buffer(turn).data_ptr()
        return self._threads.submit(self._read, [(address, self._stride_bytes, begin)])

    def _read(self, pieces: list[tuple[int, int, int]]) -> None:
        assert self._extent is not None
        start = time.perf_counter_ns()
        for address, num_bytes, begin in pieces:
            self._file.read(self._extent, address, num_bytes, begin)
        self._ledger.record_transfer(self._read_link, sum(size for _, size, _ in pieces), start)

    def _wait(self, pending: Future[None]) -> None:
        start = time.perf_counter_ns()
        pending.result()
        self._ledger.record_stall("basis", start, time.perf_counter_ns())

    def stream_parts(self, count: int) -> Iterator[tuple[slice, Tensor]]:
        """Yield the same elements of the first `count` vectors, part by part."""
        period = DIRECT_IO_BYTES // self._dtype.itemsize
        width = max(period, self._stride_bytes // self._dtype.itemsize // count // period * period)
        if width * count * self._dtype.itemsize > self._stride_bytes:
            memory = torch.empty(NUM_BUFFERS, width * count, dtype=self._dtype)
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
            return self._threads.submit(self._read, pieces), chunk

        following = start(0)
        for turn, begin in enumerate(begins):
            (pending, chunk), end = following, min(begin + width, self._length)
            self._wait(pending)
            if turn + 1 < len(begins):
                following = start(turn + 1)
            try:
                yield slice(begin, end), chunk[:, : end - begin].to(self._device)
            except BaseException:
                following[0].exception()
                raise

    def write(self, index: int, vector: Tensor) -> None:
        """Write a vector; returns when it is written."""
        self.write_part(0, vector[None], first=index)

    def write_part(self, begin: int, vectors: Tensor, *, first: int = 0) -> None:
        """Write elements from `begin` on, a multiple of a page, of the vectors from `first` on."""
        assert self._extent is not None
        item = self._dtype.itemsize
        host = vectors.contiguous().cpu()
        start = time.perf_counter_ns()
        for row, vector in enumerate(host):
            at = (first + row) * self._stride_bytes + begin * item
            self._file.write(self._extent, vector.data_ptr(), len(vector) * item, at)
        self._ledger.record_transfer(self._write_link, host.numel() * item, start)

    def close(self) -> None:
        if self._extent is None:
            return
        self._threads.shutdown(wait=True)
        self._file.free(self._extent)
        self._extent = None
        self._ledger.add(Tier.FILE, -self._capacity * self._stride_bytes)
        self._ledger.add(self._buffer_tier, -NUM_BUFFERS * self._stride_bytes)
        self._memory = self._memory[:0]
