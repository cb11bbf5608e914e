"""The file tier: one nameless file per process, in extents.

Bytes go between the file and the memory of a tensor without a copy: O_DIRECT demands offsets and
lengths that are multiples of 4096 and addresses that are multiples of 512, so `store` writes the
aligned middle of a memory range straight from where it lies and keeps the few bytes around it in
RAM.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import numpy as np

from penstock.errors import StoreError
from penstock.memory import _fork
from penstock.memory._extents import FileSpace
from penstock.memory._read_queue import QueuedReads
from penstock.memory._store import FileStore, open_nameless, reserved_bytes, warn_if_ram
from penstock.memory._transfers import Throttle, Transfers
from penstock.memory.pages import DIRECT_IO_BYTES
from penstock.memory.raw_memory import view_at

_ADDRESS_PERIOD_BYTES = 512


@dataclass(frozen=True, slots=True, eq=False)
class Extent:
    """The half-open range `[offset, offset + num_bytes)` of the file; compared by identity.

    Attributes:
        offset: First byte, a multiple of 4096.
        num_bytes: Bytes asked for; the file holds a multiple of 4096 for them.
    """

    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class StoredSpan:
    """Range of memory that `ExtentFile.store` took away.

    Attributes:
        extent: Where the aligned middle is, or everything where there is none.
        num_bytes: Length of the whole range.
        address_offset: Source address modulo 512. A `load` to an address with the same remainder
            needs no copy; any other works too, through a small buffer.
        head: The bytes before the middle, kept in RAM.
        tail: The bytes after the middle, kept in RAM.
    """

    extent: Extent
    num_bytes: int
    address_offset: int
    head: bytes = field(repr=False)
    tail: bytes = field(repr=False)

    @property
    def ram_bytes(self) -> int:
        """Bytes of this span that did not go to the file."""
        return len(self.head) + len(self.tail)


class StartedReads:
    """Reads of an `ExtentFile` that are under way; `done` and `exception` are as of a `Future`.

    Their memory is kept alive, and the file open, until they have ended.

    Attributes:
        num_bytes: Bytes of all of them.
        start_ns: When they were started, on the clock of `time.perf_counter_ns`.
        end_ns: When it was seen that they have ended; 0 before.
    """

    def __init__(
        self,
        reads: QueuedReads,
        requests: np.ndarray,
        repeat: Callable[[int, int, int], None],
        lent: AbstractContextManager[int],
    ) -> None:
        self.num_bytes = sum(requests[:, 2].tolist())
        self.start_ns, self.end_ns = time.perf_counter_ns(), 0
        self._reads: QueuedReads | None = reads
        self._requests = requests
        self._repeat = repeat
        self._lent = lent
        self._error: StoreError | None = None

    def done(self) -> bool:
        """Return whether `exception` would not wait."""
        return self._reads is None or self._reads.have_ended()

    def exception(self) -> StoreError | None:
        """Wait until all is there; return the error that `ExtentFile.read` would raise, if any."""
        if self._reads is not None:
            # A signal's handler may raise at any line: then the next call does again what was not
            # done, and all is done before the reads are forgotten.
            is_whole = self._reads.finish()
            try:
                for number in () if all(is_whole.tolist()) else np.flatnonzero(~is_whole).tolist():
                    self._repeat(*self._requests[number].tolist())
                    is_whole[number] = True
            except StoreError as error:
                self._error = error
                is_whole[:] = True
            self.end_ns = self.end_ns or time.perf_counter_ns()
            self._lent.__exit__(None, None, None)
            self._reads = None
        return self._error


class _LentDescriptor:
    """Descriptor of an `ExtentFile`, from `with` to the end of the block or of this object.

    Each transfer has two, for which a generator would take three times as long.
    """

    __slots__ = ("_file", "_is_lent")

    def __init__(self, file: ExtentFile) -> None:
        self._file = file
        self._is_lent = False

    def __enter__(self) -> int:
        file = self._file
        file._check_process()
        with file._fd_lock:
            if file._closed:
                raise StoreError(
                    f"the extent file in store {file.path!r} is closed; make a new one",
                    path=file.path,
                )
            file._num_users += 1
            self._is_lent = True
        return file._fd

    def __exit__(self, *_: object) -> None:
        file = self._file
        with file._fd_lock:
            self._is_lent = False  # first: a descriptor must not be given back twice
            file._num_users -= 1
            close_now = file._closed and file._num_users == 0
        if close_now and file._generation == _fork.generation():
            os.close(file._fd)

    def __del__(self) -> None:
        if self._is_lent:  # of reads that were not waited for
            self.__exit__()


class ExtentFile:
    """A file without a name, in a store's directory, that holds extents of raw memory.

    All transfers are synchronous and take place without the interpreter lock: call them from
    threads. All methods may be called from many threads at once. `free`, `discard` and `close`
    never wait, so destructors may call them. In a child process after a fork everything but these
    three raises `StoreError`, and these three do nothing.

    Example:
        >>> import ctypes, tempfile
        >>> memory = ctypes.create_string_buffer(b"activations", 8192)
        >>> file = ExtentFile(tempfile.gettempdir())
        >>> span = file.store(ctypes.addressof(memory), 8192)
        >>> memory.value = b""
        >>> file.load(span, ctypes.addressof(memory))
        >>> memory.value
        b'activations'
        >>> file.close()

    Args:
        store: Directory, or a `FileStore` with limits.

    Raises:
        StoreUnavailableError: The directory is missing, is none, or cannot be written.
        StoreFullError: The file system has nothing free beyond the reserve.
    """

    def __init__(self, store: FileStore | str | os.PathLike[str]) -> None:
        self._closed = True  # until there is a file: __del__ also runs when this constructor raises
        self._generation = _fork.generation()
        self.file_store = limits = FileStore.of(store)
        self.path = os.path.abspath(self.file_store.path)
        opened = open_nameless(self.path)
        self._fd = opened.fd
        self.direct = opened.direct
        self._fd_lock = threading.RLock()  # reentrant: a destructor may close inside of it
        self._num_users = 0
        self._closed = False
        reserve_bytes = limits.reserve_bytes
        try:
            if reserve_bytes is None:
                reserve_bytes = reserved_bytes(self._fd)
            self._space = FileSpace(self._fd, self.path, limits.max_bytes, reserve_bytes)
            warn_if_ram(self.path)
        except BaseException:
            self.close()
            raise
        self._live: dict[int, Extent] = {}
        self._transfers = Transfers(
            path=self.path,
            address_alignment=opened.address_alignment,
            length_alignment=opened.length_alignment,
            write_throttle=_throttle(limits.write_bytes_per_second),
            read_throttle=_throttle(limits.read_bytes_per_second),
        )
        _fork.set_right_in_children(self)

    @property
    def used_bytes(self) -> int:
        """Bytes of the file in extents that are in use, each rounded up to 4096."""
        return self._space.used_bytes

    @property
    def file_bytes(self) -> int:
        """Length of the file, all of it preallocated where the file system can do that."""
        return self._space.file_bytes

    @property
    def descriptor_path(self) -> str:
        """A path by which this process can open the file once more, while it is open."""
        return f"/proc/self/fd/{self._fd}"

    def allocate(self, num_bytes: int) -> Extent:
        """Take an extent of the file for `num_bytes`, at least 1, to be given back with `free`.

        Raises:
            ValueError: `num_bytes` is below 1.
            StoreFullError: There is no room.
            StoreError: The file is closed, or belongs to another process.
        """
        with self._descriptor():
            extent = Extent(self._space.allocate(num_bytes), num_bytes)
            self._live[extent.offset] = extent
            return extent

    def free(self, extent: Extent) -> None:
        """Give an extent back, at once and without waiting; no transfer of it may be under way.

        Raises:
            ValueError: It is not in use: of another file, or freed already.
        """
        if self._generation != _fork.generation():
            return
        self._check_live(extent)
        # Of two threads that free the same extent, one gets it here.
        if self._live.pop(extent.offset, None) is not None:
            self._space.free(extent.offset)

    def write(self, extent: Extent, address: int, num_bytes: int, begin: int = 0) -> None:
        """Write raw memory to an extent; returns when all of it is written.

        Args:
            extent: Where to.
            address: Where the bytes are, valid until this returns; a multiple of 512 needs no copy.
            num_bytes: How many, at most `extent.num_bytes - begin`.
            begin: Byte of the extent at which they begin, a multiple of 4096.

        Raises:
            ValueError: The extent is not in use or too short, or `begin` is not aligned.
            StoreFullError: The file system has run full.
            StoreWriteError: The operating system refused; the message names offset and errno.
            StoreError: The file is closed, or belongs to another process.
        """
        with self._descriptor() as fd:
            self._check_transfer(extent, num_bytes, begin)
            self._transfers.write(fd, extent.offset + begin, address, num_bytes)

    def read(self, extent: Extent, address: int, num_bytes: int, begin: int = 0) -> None:
        """Read from an extent into raw memory; returns when all of it is there.

        The arguments are those of `write`.

        Raises:
            ValueError: The extent is not in use or too short, or `begin` is not aligned.
            StoreReadError: Not all bytes came; what is at `address` must not be used.
            StoreError: The file is closed, or belongs to another process.
        """
        with self._descriptor() as fd:
            self._check_transfer(extent, num_bytes, begin)
            self._transfers.read(fd, extent.offset + begin, address, num_bytes)

    @property
    def queues_reads(self) -> bool:
        """True if `start_reads` starts any; else `read` has to be called in threads."""
        return self._transfers.queues_reads

    def start_reads(
        self, pieces: Sequence[tuple[Extent, int, int, int]], memory: object
    ) -> StartedReads:
        """Start to read at many places; the reads go on while the caller does something else.

        Args:
            pieces: The arguments of `read` for each, at least one: extent, address, bytes, byte of
                the extent. Addresses are multiples of 512, bytes of 4096.
            memory: What they read into, kept alive until they have ended.

        Raises:
            ValueError: An extent is not in use or too short, or a number is no such multiple.
            StoreError: The file is closed, belongs to another process, or does not queue reads.
        """
        return self.start_located(self.locate(pieces), memory)

    def locate(self, pieces: Sequence[tuple[Extent, int, int, int]]) -> np.ndarray:
        """Return what `start_located` takes to read pieces, which are those of `start_reads`.

        Returns:
            Offset in the file, address and bytes of each, int64 `(n, 3)`, as long as their extents
            are in use.
        """
        for extent, _, num_bytes, begin in pieces:
            self._check_transfer(extent, num_bytes, begin)
        requests = [(e.offset + begin, to, size) for e, to, size, begin in pieces]
        return np.array(requests, dtype=np.int64).reshape(-1, 3)

    def start_located(self, requests: np.ndarray, memory: object) -> StartedReads:
        """Start to read as `start_reads` does, from places that `locate` returned."""
        lent = self._descriptor()
        fd = lent.__enter__()
        try:
            reads = self._transfers.start_reads(fd, requests, memory)
        except BaseException:
            lent.__exit__(None, None, None)
            raise
        return StartedReads(reads, requests, functools.partial(self._read_again, fd), lent)

    def store(self, address: int, num_bytes: int) -> StoredSpan:
        """Take a range of memory away: its aligned middle to the file, the rest to a few bytes of
        RAM.

        Args:
            address: Any address, valid until this returns.
            num_bytes: Bytes, at least 1.

        Returns:
            The span, to be given back with `discard`.

        Raises:
            ValueError, StoreFullError, StoreWriteError, StoreError: As `allocate` and `write`;
                nothing is kept then, and the memory is as it was.
        """
        head_bytes, middle_bytes = self._transfers.split(address, num_bytes)
        extent = self.allocate(middle_bytes)
        try:
            self.write(extent, address + head_bytes, middle_bytes)
            end = head_bytes + middle_bytes
            return StoredSpan(
                extent=extent,
                num_bytes=num_bytes,
                address_offset=address % _ADDRESS_PERIOD_BYTES,
                head=view_at(address, head_bytes).tobytes() if head_bytes else b"",
                tail=view_at(address + end, num_bytes - end).tobytes() if end < num_bytes else b"",
            )
        except BaseException:
            self.free(extent)
            raise

    def load(self, span: StoredSpan, address: int) -> None:
        """Bring a span back to memory; it stays stored and can be loaded again.

        Args:
            span: What `store` returned.
            address: Where it goes, valid until this returns; without a copy where it is congruent
                to `span.address_offset` modulo 512.

        Raises:
            ValueError: The span was given back.
            StoreReadError, StoreError: As `read`.
        """
        middle = len(span.head)
        tail = middle + span.extent.num_bytes
        self.read(span.extent, address + middle, span.extent.num_bytes)
        if span.head:
            view_at(address, middle)[:] = span.head
        if span.tail:
            view_at(address + tail, len(span.tail))[:] = span.tail

    def discard(self, span: StoredSpan) -> None:
        """Give back what a span occupies, without waiting; no transfer of it may be under way.

        Raises:
            ValueError: It was given back already.
        """
        self.free(span.extent)

    def close(self) -> None:
        """Close the file, which gives its space back; a transfer under way ends first, on its own
        thread.

        Further calls do nothing.
        """
        if self._generation != _fork.generation() or self._closed:
            return
        with self._fd_lock:
            close_now = not self._closed and self._num_users == 0
            self._closed = True
        if close_now:
            os.close(self._fd)

    def __del__(self) -> None:
        self.close()

    def _after_fork_in_child(self) -> None:
        """Close the file, without an effect on the parent."""
        if not self._closed:
            self._closed = True
            os.close(self._fd)

    def _descriptor(self) -> _LentDescriptor:
        """Lend the file's descriptor, which is not closed while it is lent."""
        return _LentDescriptor(self)

    def _check_process(self) -> None:
        if self._generation != _fork.generation():
            raise StoreError(
                f"the extent file in store {self.path!r} belongs to another process, of which this "
                "one is a fork; offload in the process that made the file, or make a new one here",
                path=self.path,
            )

    def _read_again(self, fd: int, offset: int, address: int, num_bytes: int) -> None:
        self._check_process()
        self._transfers.read(fd, offset, address, num_bytes)

    def _check_live(self, extent: Extent) -> None:
        if self._live.get(extent.offset) is not extent:
            raise ValueError(
                f"{extent} is not in use in this file: it was freed, or belongs to another file"
            )

    def _check_transfer(self, extent: Extent, num_bytes: int, begin: int) -> None:
        self._check_live(extent)
        if begin % DIRECT_IO_BYTES or not 0 <= begin <= extent.num_bytes:
            raise ValueError(
                f"begin must be a multiple of {DIRECT_IO_BYTES} in [0, {extent.num_bytes}] for "
                f"{extent}; got {begin}"
            )
        if not 0 <= num_bytes <= extent.num_bytes - begin:
            raise ValueError(
                f"num_bytes must be in [0, {extent.num_bytes - begin}] for {extent} from byte "
                f"{begin} on; got {num_bytes}"
            )


def _throttle(bytes_per_second: float | None) -> Throttle | None:
    return None if bytes_per_second is None else Throttle(bytes_per_second)
