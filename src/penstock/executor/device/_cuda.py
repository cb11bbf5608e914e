"""The CUDA device: streams, a fixed pool, pinned memory, operators recorded as CUDA graphs.

The program runs ahead of the GPU, on a stream of its own. A transfer that the CPU has waited for is
visible to every operator that is launched afterwards. The other way round, a transfer must not
begin before the GPU has reached the boundary that releases it, so the program records an event at
each such boundary, and the link's thread waits for it. Transfers between device and host run on one
stream per direction.

Segments of operators without changing numbers, random draws or looks at results are recorded as
CUDA graphs: their addresses are the plan's, so they can be replayed in all later steps.

Arena and workspace are a pool of torch's allocator that nothing else allocates from. The workspace
is allocated once and reused by eager and by recorded operators. Free blocks belong to the stream
that they were allocated on, so all operators run on the same one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from penstock.executor.device.base import Device, FileAccess, Mark, allocate_pages
from penstock.memory import Link
from penstock.memory.pinned import pin, unpin

_logger = logging.getLogger(__name__)

_LINKS = (Link.DEVICE_TO_HOST, Link.HOST_TO_DEVICE)
_BUFFER_BYTES = 16 * 2**20  # a whole number of what direct I/O takes
_SMALL_BYTES = 2**20  # below it torch's allocator takes segments of twice as much, and divides them


class CudaDevice(Device):
    """The current CUDA device."""

    is_behind = True

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        try:
            self._streams = {link: torch.cuda.Stream(self.device) for link in _LINKS}
            self._stream = torch.cuda.Stream(self.device)
        except RuntimeError as error:  # of CUDA's own, which `except OutOfMemoryError` would miss
            if "out of memory" not in str(error):
                raise
            raise torch.OutOfMemoryError(
                f"{self.device} has no memory left, not even for a stream: end its other users"
            ) from error
        self._buffers: dict[Link, _PinnedBuffers] = {}
        self._pool = torch.cuda.MemPool()
        self._pool_use = contextlib.ExitStack()

    @contextlib.contextmanager
    def enter_step(self) -> Iterator[None]:
        """Use the step's stream and pool; the caller's stream waits for it at the end."""
        caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream), self._pool_use:
                self._use_pool()
                yield
        finally:
            caller.wait_stream(self._stream)

    def _use_pool(self) -> None:
        self._pool_use.enter_context(torch.cuda.use_mem_pool(self._pool, self.device))

    def allocate_arena(self, num_bytes: int) -> torch.Tensor:
        """Allocate a segment that nothing else shares."""
        with self.enter_step():
            return torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self.device)[:num_bytes]

    def reserve_workspace(self, num_bytes: int) -> None:
        """Let the pool hold the workspace; cuBLAS' own is allocated outside of it before."""
        with torch.cuda.stream(self._stream):
            square = torch.ones(8, 8, dtype=torch.float32, device=self.device)
            torch.mm(square, square)  # cuBLAS asks for its own workspace once a stream
            del square
        with self.enter_step():
            for size in (num_bytes, _SMALL_BYTES):  # small tensors come from segments of their own
                torch.empty(size, dtype=torch.uint8, device=self.device)

    def measure_held_bytes(self) -> int:
        """Return the bytes of the pool's segments."""
        return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(self._pool.id))

    def empty_cache(self) -> None:
        """Return what torch's allocator keeps, such as the parameters' former memory."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Allocate pinned memory: copies need no staging, and overlap with the computation."""
        memory = allocate_pages(num_bytes)
        if num_bytes:
            pin(memory.data_ptr(), num_bytes, remedy="plan with less host_memory=")
        return memory

    def unpin(self, memory: torch.Tensor) -> None:
        """Unregister the memory of `allocate_host`."""
        if memory.numel():
            unpin(memory.data_ptr())

    def mark(self) -> Mark:
        """Record an event on the computing stream."""
        return torch.cuda.current_stream(self.device).record_event()

    def wait_for(self, mark: Mark) -> None:
        """Wait for the event."""
        mark.synchronize()

    def start_reading(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Copy to pinned memory on the computing stream, with an event behind it."""
        copy = torch.empty_like(value, device="cpu", pin_memory=True)
        copy.copy_(value, non_blocking=True)
        arrived = self.mark()

        def wait() -> torch.Tensor:
            arrived.synchronize()
            return copy

        return wait

    def synchronize(self) -> None:
        """Wait for the computing stream."""
        torch.cuda.current_stream(self.device).synchronize()

    def make_copy(
        self, link: Link, target: torch.Tensor, source: torch.Tensor
    ) -> Callable[[], None]:
        """Return a copy on the link's stream."""
        stream = self._streams[link]

        def move() -> None:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
                arrived = stream.record_event()
            arrived.synchronize()

        return move

    def make_write(
        self, write: FileAccess, offset: int, source: torch.Tensor
    ) -> Callable[[], None]:
        """Write through two pinned buffers: one is filled while the other is written."""
        if source.device.type == "cpu":
            return super().make_write(write, offset, source)
        buffers = self._buffers_of(Link.DEVICE_TO_FILE)
        parts = source.split(_BUFFER_BYTES)

        def move() -> None:
            arrived = [buffers.fill(0, parts[0])]
            for number, part in enumerate(parts):
                if number + 1 < len(parts):
                    arrived.append(buffers.fill(number + 1, parts[number + 1]))
                arrived[number].synchronize()
                address = buffers.buffer_of(number).data_ptr()
                write(address, part.numel(), offset + number * _BUFFER_BYTES)

        return move

    def make_read(self, read: FileAccess, offset: int, target: torch.Tensor) -> Callable[[], None]:
        """Read through two pinned buffers: one is read into while the other is emptied."""
        if target.device.type == "cpu":
            return super().make_read(read, offset, target)
        buffers = self._buffers_of(Link.FILE_TO_DEVICE)
        parts = target.split(_BUFFER_BYTES)

        def move() -> None:
            departed: list[Mark] = []
            for number, part in enumerate(parts):
                if number >= 2:
                    departed[number - 2].synchronize()
                address = buffers.buffer_of(number).data_ptr()
                read(address, part.numel(), offset + number * _BUFFER_BYTES)
                departed.append(buffers.empty(number, part))
            departed[-1].synchronize()

        return move

    def _buffers_of(self, link: Link) -> _PinnedBuffers:
        if link not in self._buffers:
            self._buffers[link] = _PinnedBuffers(self.device)
        return self._buffers[link]

    def get_random_state(self) -> torch.Tensor:
        """Return the state of the device's generator, followed by the CPU's."""
        return torch.cat([torch.cuda.get_rng_state(self.device), torch.get_rng_state()])

    def set_random_state(self, state: torch.Tensor) -> None:
        """Set the states of both generators."""
        of_device = state.numel() - torch.get_rng_state().numel()
        torch.cuda.set_rng_state(state[:of_device].clone(), self.device)
        torch.set_rng_state(state[of_device:].clone())  # torch reads a storage from its first byte

    def run_timed(self, calls: Sequence[Callable[[], object]], ends_ns: list[int]) -> None:
        """Make calls with an event behind each; the kernels of a call count as its time."""
        begin_ns = time.perf_counter_ns()
        first = _record_time()
        ends = []
        try:
            for call in calls:
                call()
                ends.append(_record_time())
        finally:
            self.synchronize()
            ends_ns += (begin_ns + round(first.elapsed_time(end) * 1e6) for end in ends)

    def record(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object] | None:
        """Record operators as a CUDA graph, and replay it once."""
        self._pool_use.close()  # the graph allocates from the pool itself
        try:
            recording = _Recording(self._pool, calls)
        except torch.OutOfMemoryError:
            raise  # running one by one needs as much
        except RuntimeError as error:
            _logger.warning("operators run one by one, as CUDA cannot record them: %s", error)
            return None
        finally:
            self._use_pool()
        recording()
        return recording


class _Recording:
    """A CUDA graph with the pool of its operators' workspace.

    A pool must outlive the graphs that allocate from it, and attributes die in the order in which
    they were set.
    """

    def __init__(self, pool: torch.cuda.MemPool, calls: Sequence[Callable[[], object]]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        # Links' threads go on copying: only this thread's work must be recordable.
        pool_id: Any = pool.id
        self._graph.capture_begin(pool=pool_id, capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            self._graph.capture_end()

    def __call__(self) -> None:
        self._graph.replay()


def _record_time() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class _PinnedBuffers:
    """Two pinned buffers between the device and a file, and the stream of their copies."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._memory = [
            torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True, device="cpu")
            for _ in range(2)
        ]

    def buffer_of(self, number: int) -> torch.Tensor:
        """Return the buffer of a part."""
        return self._memory[number % 2]

    def fill(self, number: int, part: torch.Tensor) -> Mark:
        """Copy a part from the device; return a mark of its arrival."""
        return self._copy(self.buffer_of(number)[: part.numel()], part)

    def empty(self, number: int, part: torch.Tensor) -> Mark:
        """Copy a part to the device; return a mark of its departure."""
        return self._copy(part, self.buffer_of(number)[: part.numel()])

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Mark:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()
