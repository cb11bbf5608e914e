"""Planned steps on a GPU: streams, a fixed pool, page-locked memory, recorded operators.

The program runs ahead of the GPU, on a stream of its own. What the CPU has waited for is there for
every operator that is launched afterwards; the other way round, a transfer must not begin before
the GPU has reached the boundary that releases it. So the program leaves an event at each such
boundary, and the link's thread waits for it. Transfers between device and host run on a stream for
each direction.

Stretches of operators without numbers that change, random draws or looks at results are recorded as
CUDA graphs: their addresses are the plan's, so they can be replayed for ever.

Arena and workspace are a pool of torch's allocator that nothing else draws from. Its workspace is
taken once and given out again and again, to operators that run by themselves and to recorded ones.
Free blocks belong to the stream that they were taken on, so all of them run on the same one.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.executor._device import Device, Mark, anonymous
from penstock.memory import Link

_logger = logging.getLogger(__name__)

_LINKS = (Link.DEVICE_TO_HOST, Link.HOST_TO_DEVICE)
_BUFFER_BYTES = 16 * 2**20  # a whole number of what direct I/O takes
_PORTABLE = 1  # cudaHostRegisterPortable
_SMALL_BYTES = 2**20  # below it torch's allocator takes segments of twice as much, and divides them


class CudaDevice(Device):
    """The current CUDA device."""

    is_behind = True

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._streams = {link: torch.cuda.Stream(self.device) for link in _LINKS}
        self._buffers: dict[Link, _Buffers] = {}
        self._stream = torch.cuda.Stream(self.device)
        self._pool = torch.cuda.MemPool()
        self._drawing = contextlib.ExitStack()

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """On the stream and in the pool of this step; the caller's stream waits before and after.

        Results are there for what the caller launches on its stream afterwards.
        """
        caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        try:
            with torch.cuda.stream(self._stream), self._drawing:
                self._draw()
                yield
        finally:
            caller.wait_stream(self._stream)

    def _draw(self) -> None:
        """Take memory from the pool, until `_drawing` is closed."""
        self._drawing.enter_context(torch.cuda.use_mem_pool(self._pool, self.device))

    def arena(self, num_bytes: int) -> torch.Tensor:
        """One allocation, which nothing else shares."""
        with self.computing():
            return torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=self.device)[:num_bytes]

    def take_workspace(self, num_bytes: int) -> None:
        """Let the pool hold as much; what the libraries keep for ever is not taken from it."""
        with torch.cuda.stream(self._stream):
            square = torch.ones(8, 8, device=self.device)
            torch.mm(square, square)  # cuBLAS asks for its own workspace once a stream
            del square
        with self.computing():
            for size in (num_bytes, _SMALL_BYTES):  # small tensors come from segments of their own
                torch.empty(size, dtype=torch.uint8, device=self.device)

    def held_bytes(self) -> int:
        """What the pool has of the GPU's memory, in the allocator's segments."""
        return sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(self._pool.id))

    def let_go_of_unused(self) -> None:
        """Return what lies in torch's allocator, such as where parameters were before."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def host(self, num_bytes: int) -> torch.Tensor:
        """Page-locked memory: copies need no detour, and run beside the computation."""
        memory = anonymous(num_bytes)
        if num_bytes:
            runtime: Any = torch.cuda.cudart()
            address = memory.data_ptr()
            code = int(runtime.cudaHostRegister(address, num_bytes, _PORTABLE))
            if code:
                raise PenstockError(
                    f"cudaHostRegister refused {num_bytes} bytes of host memory (CUDA error "
                    f"{code}): plan with less host_memory=, or raise the limit (ulimit -l)"
                )
        return memory

    def let_go(self, memory: torch.Tensor) -> None:
        """Unlock the pages of `host`; the memory stays."""
        if memory.numel():
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(memory.data_ptr())

    def mark(self) -> Mark:
        """An event on the computing stream."""
        return torch.cuda.current_stream(self.device).record_event()

    def follow(self, mark: Mark) -> None:
        """Wait for the event."""
        mark.synchronize()

    def read(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Copy to page-locked memory on the computing stream, with an event behind it."""
        copy = torch.empty_like(value, device="cpu", pin_memory=True)
        copy.copy_(value, non_blocking=True)
        arrived = self.mark()

        def wait() -> torch.Tensor:
            arrived.synchronize()
            return copy

        return wait

    def settle(self) -> None:
        """Wait for the computing stream."""
        torch.cuda.current_stream(self.device).synchronize()

    def mover(self, link: Link, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """A copy on the link's stream."""
        stream = self._streams[link]

        def move() -> None:
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
                arrived = stream.record_event()
            arrived.synchronize()

        return move

    def to_file(
        self, write: Callable[[int, int, int], None], offset: int, source: torch.Tensor
    ) -> Callable[[], None]:
        """Through two page-locked buffers: one is filled while the other is written."""
        if source.device.type == "cpu":
            return super().to_file(write, offset, source)
        buffers = self._buffers_of(Link.DEVICE_TO_FILE)
        parts = source.split(_BUFFER_BYTES)

        def move() -> None:
            arrived = [buffers.fill(0, parts[0])]
            for number, part in enumerate(parts):
                if number + 1 < len(parts):
                    arrived.append(buffers.fill(number + 1, parts[number + 1]))
                arrived[number].synchronize()
                address = buffers.at(number).data_ptr()
                write(offset + number * _BUFFER_BYTES, address, part.numel())

        return move

    def from_file(
        self, read: Callable[[int, int, int], None], offset: int, target: torch.Tensor
    ) -> Callable[[], None]:
        """Through two page-locked buffers: one is read into while the other is emptied."""
        if target.device.type == "cpu":
            return super().from_file(read, offset, target)
        buffers = self._buffers_of(Link.FILE_TO_DEVICE)
        parts = target.split(_BUFFER_BYTES)

        def move() -> None:
            left: list[Mark] = []
            for number, part in enumerate(parts):
                if number >= 2:
                    left[number - 2].synchronize()
                address = buffers.at(number).data_ptr()
                read(offset + number * _BUFFER_BYTES, address, part.numel())
                left.append(buffers.empty(number, part))
            left[-1].synchronize()

        return move

    def _buffers_of(self, link: Link) -> _Buffers:
        if link not in self._buffers:
            self._buffers[link] = _Buffers(self.device)
        return self._buffers[link]

    def random_state(self) -> torch.Tensor:
        """Of the device's generator, followed by that of the CPU's."""
        return torch.cat([torch.cuda.get_rng_state(self.device), torch.get_rng_state()])

    def set_random_state(self, state: torch.Tensor) -> None:
        """Of both."""
        of_device = state.numel() - torch.get_rng_state().numel()
        torch.cuda.set_rng_state(state[:of_device], self.device)
        torch.set_rng_state(state[of_device:])

    def timed(self, calls: Sequence[Callable[[], object]], ends_ns: list[int]) -> None:
        """Make calls with an event behind each; what was launched for one counts as its time."""
        begin_ns = time.perf_counter_ns()
        first = _now()
        ends = []
        try:
            for call in calls:
                call()
                ends.append(_now())
        finally:
            self.settle()
            ends_ns += (begin_ns + round(first.elapsed_time(end) * 1e6) for end in ends)

    def recorded(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object] | None:
        """Record operators as a CUDA graph, and replay it once."""
        recording = _Recording(self._pool)
        self._drawing.close()  # the graph draws from the pool itself
        try:
            recording.record(calls)
        except torch.OutOfMemoryError:
            raise  # which running one by one does not help
        except RuntimeError as error:
            _logger.warning("operators run one by one, as CUDA cannot record them: %s", error)
            return None
        finally:
            self._draw()
        recording()
        return recording


class _Recording:
    """A CUDA graph, and the pool that its operators' workspace comes from.

    A pool must outlive the graphs that draw from it, and attributes die in the order in which they
    were set.
    """

    def __init__(self, pool: torch.cuda.MemPool) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool

    def record(self, calls: Sequence[Callable[[], object]]) -> None:
        # Links' threads go on copying: only what this thread does must be recordable.
        pool: Any = self._pool.id
        self._graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            for call in calls:
                call()
        finally:
            self._graph.capture_end()

    def __call__(self) -> None:
        self._graph.replay()


def _now() -> torch.cuda.Event:
    """An event with the time on the computing stream."""
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class _Buffers:
    """Two page-locked buffers between the device and a file, and the stream of their copies."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._memory = [
            torch.empty(_BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]

    def at(self, number: int) -> torch.Tensor:
        """The buffer of a part."""
        return self._memory[number % 2]

    def fill(self, number: int, part: torch.Tensor) -> Mark:
        """Copy a part from the device; returns when it will have arrived."""
        return self._copy(self.at(number)[: part.numel()], part)

    def empty(self, number: int, part: torch.Tensor) -> Mark:
        """Copy a part to the device; returns when it will have left."""
        return self._copy(part, self.at(number)[: part.numel()])

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Mark:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            return self._stream.record_event()
