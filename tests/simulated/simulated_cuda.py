"""One CUDA device that is not there: streams, events, memory, late copies and late kernels.

On a real device a call returns before its kernel has run, so a missing wait is a race that a test
may win. Here nothing runs until the host waits for it, or for something that was ordered after it:
the latest that CUDA allows, the same in every run. Memory is the CPU's. A kernel holds no reference
to the memory that it uses, as on a device: what is freed is given out again on the stream that it
was taken on, and waits for others only if `record_stream` has named them.

    cuda = SimulatedCuda()
    cuda.install(monkeypatch)              # torch.cuda.Stream, current_stream, cudart, ...
    with cuda.kernels():                   # operators of this thread are launched on its stream
        y = model(x)                       # nothing has been computed
    cuda.synchronize()                     # now it has
"""

from __future__ import annotations

import contextlib
import functools
import queue
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

POISON = 0xFF  # every byte of memory that is given out: not a number, or -1


class Operation:
    """A call on a stream, or a point in it; it runs when what it depends on has run."""

    def __init__(
        self,
        stream: Stream,
        call: Callable[[], object] | None = None,
        after: Operation | None = None,
    ) -> None:
        self.stream, self.call, self.after = stream, call, after
        self.done = False


class Event:
    """A point in a stream."""

    def __init__(self, operation: Operation, name: object) -> None:
        self.operation, self.name = operation, name

    def query(self) -> bool:
        return self.operation.done

    def synchronize(self) -> None:
        cuda = self.operation.stream.cuda
        cuda.calls.append(("wait", self.name))
        cuda.complete(self.operation)

    def wait(self, stream: Stream | None = None) -> None:
        stream = stream or self.operation.stream.cuda.current_stream()
        stream.wait_event(self)


class Stream:
    """Operations in order; equal only to itself."""

    def __init__(self, cuda: SimulatedCuda, name: str) -> None:
        self.cuda, self.name, self.device = cuda, name, torch.device("cpu")
        self.operations: deque[Operation] = deque()
        self.num_events = 0

    def launch(
        self, call: Callable[[], object] | None, after: Operation | None = None
    ) -> Operation:
        operation = Operation(self, call, after)
        self.operations.append(operation)
        if not self.cuda.late:
            self.cuda.complete(operation, wait=False)
        return operation

    def record_event(self, event: Event | None = None) -> Event:
        self.num_events += 1
        operation = self.launch(None)
        if event is None:
            return Event(operation, (self.name, self.num_events))
        event.operation, event.name = operation, (self.name, self.num_events)
        return event

    def wait_event(self, event: Event) -> None:
        self.cuda.calls.append((f"{self.name} after", event.name))
        self.launch(None, event.operation)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def synchronize(self) -> None:
        self.record_event().synchronize()


class SimulatedCuda:
    """The device and its runtime.

    late: nothing runs before it is waited for; else soon, on another thread, with rests.

    Attributes:
        calls: Host memory registered, waits, orders between streams.
        code: The runtime's answer to registrations.
    """

    def __init__(self, *, late: bool = True) -> None:
        self.late, self.code = late, 0
        self.calls: list[tuple[object, ...]] = []
        self.registered: dict[int, int] = {}
        self.streams: list[Stream] = []
        self.pool = Pool()
        self.failed: BaseException | None = None
        self._local = threading.local()
        self._wanted: queue.SimpleQueue[tuple[Operation, threading.Event | None] | None]
        self._wanted = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self.default_stream = self.Stream(name="default")

    # ------------------------------------------------------- the names of torch.cuda

    def Stream(self, device: object = None, *, name: str | None = None, **_: Any) -> Stream:
        stream = Stream(self, name or f"stream {len(self.streams)}")
        self.streams.append(stream)
        return stream

    def current_stream(self, device: object = None) -> Stream:
        return getattr(self._local, "stream", self.default_stream)

    @contextlib.contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before = self.current_stream()
        self._local.stream = stream or before
        try:
            with self.kernels():
                yield
        finally:
            self._local.stream = before

    def synchronize(self, device: object = None) -> None:
        self.calls.append(("synchronize", device))
        for stream in list(self.streams):
            self.complete(stream.launch(None))

    def cudart(self) -> SimulatedCuda:
        return self

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        self.calls.append(("register", address, num_bytes, flags))
        if not self.code:
            self.registered[address] = num_bytes
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.calls.append(("unregister", address))
        del self.registered[address]
        return 0

    def is_registered(self, tensor: torch.Tensor) -> bool:
        """Return whether copies of that memory run beside the host."""
        begin = tensor.data_ptr()
        end = begin + tensor.numel() * tensor.element_size()
        return any(start <= begin and end <= start + n for start, n in self.registered.items())

    def install(self, monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
        """Be what `torch.cuda` offers; tensors stay on the CPU."""
        for name in ("Stream", "current_stream", "stream", "synchronize", "cudart"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: self.pool.note(tensor, stream)
        )
        return self

    # ------------------------------------------------------------------ running

    @contextlib.contextmanager
    def kernels(self) -> Iterator[None]:
        """Launch this thread's operators on its current stream instead of running them."""
        outer = getattr(self._local, "launches", False)
        self._local.launches = True
        try:
            with contextlib.nullcontext() if outer else Kernels(self):
                yield
        finally:
            self._local.launches = outer

    def complete(self, operation: Operation, *, wait: bool = True) -> None:
        """Run all that `operation` stands behind, and it."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="simulated cuda", daemon=True
                )
                self._thread.start()
        arrived = threading.Event() if wait else None
        self._wanted.put((operation, arrived))
        if arrived is not None:
            assert arrived.wait(60), "the device does not get there"
            if self.failed is not None:
                raise RuntimeError("CUDA error: an operator has failed") from self.failed

    def close(self) -> None:
        """End the device's thread."""
        self._wanted.put(None)
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        rests = random.Random(0)
        mode = torch._C._AutoDispatchBelowAutograd
        with mode(), torch.autocast("cpu", enabled=False):
            for operation, arrived in iter(self._wanted.get, None):
                if not self.late and rests.random() < 1 / 7:
                    time.sleep(1e-4)
                try:
                    self._reach(operation)
                except BaseException as error:
                    self.failed = self.failed or error
                if arrived is not None:
                    arrived.set()

    def _reach(self, target: Operation) -> None:
        while not target.done:
            operation = target.stream.operations.popleft()
            if operation.after is not None:
                self._reach(operation.after)
            try:
                if operation.call is not None:
                    operation.call()
            finally:
                operation.done, operation.call, operation.after = True, None, None


class Pool:
    """The caching allocator: freed blocks are taken again on their stream, without a wait."""

    def __init__(self) -> None:
        self._blocks: dict[int, tuple[Any, Stream]] = {}  # by address, in use or not
        self._free: dict[tuple[Stream, int], list[Any]] = {}
        self._users: dict[int, list[Stream]] = {}  # of blocks in use, by `record_stream`
        self._uses: dict[int, list[Event]] = {}  # of free blocks
        self._lock = threading.RLock()
        self.num_reused = 0

    def empty(self, like: torch.Tensor, stream: Stream) -> torch.Tensor:
        """A tensor of that shape, stride and type, taken on `stream`."""
        size, stride = like.shape, like.stride()
        reach = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        num_bytes = (reach if like.numel() else 0) * like.element_size()
        if not num_bytes:
            return torch.empty_strided(size, stride, dtype=like.dtype)
        with self._lock:
            block = self._take(num_bytes, stream)
        content = block[:]  # lives as long as the storage
        weakref.finalize(content, self._give_back, block).atexit = False
        storage = torch.frombuffer(content, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=like.dtype).set_(storage, 0, size, stride)  # type: ignore[call-overload]

    def note(self, tensor: torch.Tensor, stream: Stream) -> None:
        """`record_stream`: what was launched there when the block is freed is waited for."""
        with self._lock:
            self._users.setdefault(tensor.untyped_storage().data_ptr(), []).append(stream)

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, as a kernel knows it: without a reference to the storage."""
        address = tensor.untyped_storage().data_ptr()
        with self._lock:
            if address not in self._blocks:
                return tensor.detach()
            block = self._blocks[address][0]
        storage = torch.frombuffer(block, dtype=torch.uint8).untyped_storage()
        empty = torch.empty(0, dtype=tensor.dtype)
        found = empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]
        if tensor.is_conj():
            torch._C._set_conj(found, True)
        if tensor.is_neg():
            torch._C._set_neg(found, True)
        return found

    def _take(self, num_bytes: int, stream: Stream) -> Any:
        for block in (free := self._free.setdefault((stream, num_bytes), [])):
            if all(event.query() for event in self._uses.get(block.ctypes.data, ())):
                free[:] = [other for other in free if other is not block]
                self._uses.pop(block.ctypes.data, None)
                self.num_reused += 1
                return block
        memory = np.full(num_bytes + 64, POISON, dtype=np.uint8)
        start = -memory.ctypes.data % 64
        block = memory[start : start + num_bytes]
        self._blocks[block.ctypes.data] = block, stream
        return block

    def _give_back(self, block: Any) -> None:
        address = block.ctypes.data
        with self._lock:
            stream = self._blocks[address][1]
            users = self._users.pop(address, [])
            self._uses[address] = [user.record_event() for user in users]
            self._free.setdefault((stream, block.nbytes), []).append(block)


_AT_ONCE = {"set_", "resize_", "empty", "empty_like", "empty_strided", "new_empty", "record_stream"}
_WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Behaviour:
    """Facts that an operator's schema tells of all its calls."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        name = schema.name.partition("::")[2]
        self.writes = any(each.alias_info and each.alias_info.is_write for each in schema.arguments)
        views = not self.writes and any(each.alias_info for each in schema.returns)
        self.runs_at_once = views or name in _AT_ONCE
        self.makes_empty = name.startswith(("empty", "new_empty"))
        self.returns_operands = all(each.alias_info is not None for each in schema.returns)
        gives_number = any("Tensor" not in str(each.type) for each in schema.returns)
        has_effects = not (schema.returns or self.writes)
        self.waits = bool(_WAITS & set(func.tags)) or has_effects or gives_number


_behaviour_of = functools.cache(Behaviour)
_results: dict[Any, Any] = {}  # tensors without content, by operator and forms of operands


class Kernels(TorchDispatchMode):
    """Launches operators; returns tensors whose content comes later."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        super().__init__()
        self._cuda = cuda

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and guarding every operator takes time."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs, behaviour = kwargs or {}, _behaviour_of(func)
        if behaviour.runs_at_once:
            found = func(*args, **kwargs)
            if behaviour.makes_empty and found.device.type == "cpu":
                return self._cuda.pool.empty(found, self._cuda.current_stream())
            return found
        stream = self._cuda.current_stream()
        if behaviour.waits:
            stream.synchronize()
            return func(*args, **kwargs)
        return self._launch(func, args, kwargs, stream)

    def _launch(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], stream: Stream
    ) -> Any:
        pool = self._cuda.pool
        late_args, late_kwargs = _map_tensors(pool.unowned, (args, kwargs))
        if func is torch.ops.aten.copy_.default and args[2:] == (True,):
            assert any(map(self._cuda.is_registered, args[:2])), "a copy that is not page-locked"
        if _behaviour_of(func).returns_operands:
            stream.launch(lambda: func(*late_args, **late_kwargs))
            written = [
                value
                for each, value in _given(func, args, kwargs)
                if each.alias_info and each.alias_info.is_write
            ]
            num_returned = len(func._schema.returns)
            return None if not num_returned else written[0] if num_returned == 1 else tuple(written)
        shapes = _without_content(func, args, kwargs)
        found = _map_tensors(lambda each: pool.empty(each, stream), shapes)
        results: list[torch.Tensor] = []
        _map_tensors(lambda each: results.append(pool.unowned(each)), found)

        def run() -> None:
            computed: list[torch.Tensor] = []
            _map_tensors(computed.append, func(*late_args, **late_kwargs))
            for result, value in zip(results, computed, strict=True):
                result.copy_(value)

        stream.launch(run)
        return found


def _map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """Return arguments or results with what a function returns in place of each tensor."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        mapped = [_map_tensors(function, each) for each in value]
        return mapped if isinstance(value, list) else tuple(mapped)
    if isinstance(value, dict):
        return {name: _map_tensors(function, each) for name, each in value.items()}
    return value


def _without_content(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the results of an operator on the meta device, made once for each form of operands."""
    key = func, torch.get_default_dtype(), _form(args), _form(kwargs)
    try:
        found = _results.get(key)
    except TypeError:  # an argument that has no hash
        key, found = None, None
    if found is None:
        found = func(*_map_tensors(_meta, args), **_on_meta(kwargs))
        if key is not None:
            _results[key] = found
    return found


def _form(value: Any) -> Any:
    """Return all that results' forms depend on, of an argument."""
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_form, value))
    if isinstance(value, dict):
        return tuple((name, _form(each)) for name, each in value.items())
    return type(value), value  # 1, 1.0 and True are equal and give other dtypes


def _given(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]


def _meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    found = _map_tensors(_meta, kwargs)
    return {**found, "device": torch.device("meta")} if "device" in found else found
