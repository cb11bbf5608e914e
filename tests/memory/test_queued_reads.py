"""Reads that go on by themselves: all bytes or an error, whatever happens in the meantime."""

from __future__ import annotations

import gc
import os
import random
import signal
import warnings
from pathlib import Path

import numpy as np
import pytest

from _round_trips import BLOCK, MIB, Memory
from penstock.errors import StoreError, StoreReadError
from penstock.memory import ExtentFile, FileStore, _read_queue, _transfers
from penstock.memory._read_queue import QueuedReads, can_queue_reads

needs_queue = pytest.mark.skipif(
    not can_queue_reads(), reason="this kernel has no io_uring for us, or there is no compiler"
)


class Stored:
    """Noise in a file, and memory to read it into."""

    def __init__(self, file: ExtentFile, num_bytes: int = 4 * MIB) -> None:
        self.file, self.source = file, Memory(num_bytes, seed=1)
        self.target = Memory(num_bytes, seed=2)
        self.extent = file.allocate(num_bytes)
        file.write(self.extent, self.source.address, num_bytes)

    def pieces(self, length: int, seed: int = 0) -> list[tuple]:
        starts = list(range(0, len(self.source.bytes), length))
        random.Random(seed).shuffle(starts)
        return [(self.extent, self.target.address + at, length, at) for at in starts]

    def start(self, length: int = BLOCK):
        return self.file.start_reads(self.pieces(length), self.target)

    @property
    def is_read(self) -> bool:
        return np.array_equal(self.target.bytes, self.source.bytes)


@pytest.fixture
def stored(file: ExtentFile) -> Stored:
    return Stored(file)


@needs_queue
@pytest.mark.parametrize("length", [BLOCK, 16 * BLOCK, 4 * MIB])
def test_many_at_once(stored: Stored, length: int):
    assert stored.file.queues_reads
    reads = stored.start(length)  # up to 1024, more than are in flight
    assert reads.exception() is None
    assert stored.is_read
    assert reads.done()
    assert reads.num_bytes == 4 * MIB
    assert 0 < reads.start_ns < reads.end_ns
    assert reads.exception() is None  # does not read again
    assert not _read_queue._started


@needs_queue
def test_several_batches_in_any_order(stored: Stored):
    pieces = stored.pieces(BLOCK)
    batches = [stored.file.start_reads(pieces[i::7], stored.target) for i in range(7)]
    for number in (3, 0, 6, 1, 2, 5, 4):
        assert batches[number].exception() is None
    assert stored.is_read


@needs_queue
def test_a_file_that_became_shorter(stored: Stored):
    os.truncate(stored.file.descriptor_path, MIB + BLOCK)
    error = stored.start(16 * BLOCK).exception()
    assert isinstance(error, StoreReadError)
    assert "shorter than it was" in str(error)
    first = stored.pieces(BLOCK)[:1]
    assert stored.file.start_reads([(stored.extent, first[0][1], BLOCK, 0)], 0).exception() is None


@needs_queue
def test_reads_that_did_not_end_as_expected_are_repeated(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
):
    finish, seen = QueuedReads.finish, []

    def forget_all(reads: QueuedReads) -> np.ndarray:
        is_whole = finish(reads)
        if not seen:  # not when they are deleted
            seen.append(True)
            stored.target.bytes[:] = 0
        return np.zeros_like(is_whole)

    monkeypatch.setattr(QueuedReads, "finish", forget_all)
    assert stored.start(64 * BLOCK).exception() is None
    assert stored.is_read


@needs_queue
def test_a_file_that_is_closed_in_the_meantime(store: Path):
    stored = Stored(ExtentFile(store))
    reads = stored.start()
    stored.file.close()
    assert os.path.exists(stored.file.descriptor_path)
    assert reads.exception() is None
    assert stored.is_read
    assert not os.path.exists(stored.file.descriptor_path)


@needs_queue
def test_reads_that_nobody_waits_for_keep_their_memory(store: Path):
    stored = Stored(ExtentFile(store))
    path = stored.file.descriptor_path
    del stored.start().num_bytes
    gc.collect()
    assert stored.is_read  # they have ended before their memory could be freed
    assert not _read_queue._started
    stored.file.close()
    assert not os.path.exists(path)


@needs_queue
def test_an_interrupt_just_after_the_start(stored: Stored, monkeypatch: pytest.MonkeyPatch):
    library, finished = _read_queue._library_of_queue(), []

    class Interrupting:
        def __getattr__(self, name: str):
            return getattr(library, name)

        def penstock_reads_start(self, *arguments):
            library.penstock_reads_start(*arguments)
            raise KeyboardInterrupt

        def penstock_reads_finish(self, batch, is_whole):
            finished.append(batch)
            library.penstock_reads_finish(batch, is_whole)

    monkeypatch.setattr(_read_queue, "_library_of_queue", Interrupting)
    with pytest.raises(KeyboardInterrupt):
        stored.start()
    gc.collect()
    assert finished and stored.is_read  # they have ended before their memory could be freed


@needs_queue
def test_signals_while_waiting(file: ExtentFile):
    stored, calls = Stored(file, 64 * MIB), []
    before = signal.signal(signal.SIGALRM, lambda *_: calls.append(None))
    try:
        signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
        for _ in range(3):
            stored.target.bytes[:] = 0
            assert stored.start(16 * BLOCK).exception() is None
            assert stored.is_read
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert calls


@needs_queue
def test_a_fork_waits_for_them(stored: Stored):
    reads = stored.start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forks beside threads
        pid = os.fork()
    if pid == 0:  # it must not wait for its parent's reads, nor say that the bytes are there
        try:
            error = reads.exception()
            assert isinstance(error, StoreError)
            assert "another process" in str(error)
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert reads._reads is not None
    assert reads._reads.have_ended()  # before the fork
    assert reads.exception() is None
    assert stored.is_read
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_what_cannot_be_queued(stored: Stored, store: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="multiple of 4096"):
        stored.file.start_reads([(stored.extent, stored.target.address, BLOCK, 100)], stored)
    if can_queue_reads():
        with pytest.raises(ValueError, match="multiples of 512"):
            stored.file.start_reads([(stored.extent, stored.target.address + 8, BLOCK, 0)], stored)
    slow = Stored(ExtentFile(FileStore(store, read_bytes_per_second=1e9)), BLOCK)
    monkeypatch.setattr(_transfers, "can_queue_reads", lambda: False)
    for each in (slow, stored):
        assert not each.file.queues_reads
        with pytest.raises(StoreError, match="call `read` in threads"):
            each.start()
    slow.file.close()
