"""Reads that are under way without a thread of their own: by io_uring, where the kernel allows it.

They begin when they are started, not when a thread gets its turn, and as many are in flight as keep
a disk busy.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from pathlib import Path

import numpy as np

from penstock.codegen import IO_RING, load_optional_library
from penstock.memory import _fork


class QueuedReads:
    """Reads of one file that were started together.

    Args:
        fd: The file, which stays open until `finish` returns.
        requests: Offset in the file, address and bytes of each, int64 `(n, 3)`, n at least 1.
        alignment: Of offsets, in bytes, at which a short read may go on.
        memory: What they read into; kept alive until they have ended.
    """

    def __init__(self, fd: int, requests: np.ndarray, alignment: int, memory: object) -> None:
        self._batch = ctypes.c_void_p()  # null until there is one: __del__ runs when this raises
        self._memory = memory
        self._is_whole = np.zeros(len(requests), dtype=bool)
        self._is_whole_address = _address_of(self._is_whole)
        self._generation = _fork.generation()
        requests = np.ascontiguousarray(requests, dtype=np.int64)
        address = _address_of(requests)
        with _fork.read_gate.lock:
            _started.add(self)
            _library_of_queue().penstock_reads_start(
                _queue(self._generation),
                fd,
                address,
                len(requests),
                alignment,
                ctypes.byref(self._batch),
            )

    def have_ended(self, *, wait: bool = False) -> bool:
        """Return whether all have ended; with `wait`, true, unless a signal came."""
        if not self._batch or self._generation != _fork.generation():
            return True
        queue = _queue(self._generation)
        return bool(_library_of_queue().penstock_reads_have_ended(queue, self._batch, wait))

    def finish(self) -> np.ndarray:
        """Wait for all; return which were read whole, bool `(n,)`, all false in a forked child."""
        while not self.have_ended(wait=True):
            pass  # a signal's handler has run
        if self._batch and self._generation == _fork.generation():
            batch, self._batch = self._batch, ctypes.c_void_p()
            _library_of_queue().penstock_reads_finish(batch, self._is_whole_address)
            _started.discard(self)
        return self._is_whole

    def __del__(self) -> None:
        if self._batch:  # a call would let a signal's handler run, whose exception is lost here
            self.finish()


def _address_of(array: np.ndarray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(array.data))  # faster than its `ctypes`


_started: weakref.WeakSet[QueuedReads] = weakref.WeakSet()


def can_queue_reads() -> bool:
    """Return whether there can be `QueuedReads`: there is a compiler, the kernel has a queue."""
    return _queue(_fork.generation()) is not None


def _end_before_fork() -> None:
    for reads in list(_started):
        while not reads.have_ended(wait=True):
            pass


_fork.call_before_fork(_end_before_fork)


@functools.cache
def _queue(generation: int) -> int | None:  # of a process: a forked child has one of its own
    library = _library()
    return None if library is None else library.penstock_read_queue()


def _library_of_queue() -> ctypes.CDLL:
    library = _library()
    assert library is not None
    return library


@functools.cache
def _library() -> ctypes.CDLL | None:
    pointer, count, flag = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    return load_optional_library(
        "read_queue",
        [IO_RING, Path(__file__).with_name("read_queue.cpp")],
        flags=("-O3", "-pthread"),
        functions={
            "penstock_read_queue": (pointer, []),
            "penstock_reads_start": (None, [pointer, flag, pointer, count, count, pointer]),
            "penstock_reads_have_ended": (flag, [pointer, pointer, flag]),
            "penstock_reads_finish": (None, [pointer, pointer]),
        },
        work="reads are started without waiting",
        otherwise="by threads",
    )
