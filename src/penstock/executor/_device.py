"""Where operators run: its memory, its copies, and the order that copies keep with computing.

On the CPU an operator has run when its call returns, so a boundary that the program has reached is
a boundary that computing has reached. On a GPU calls return at once: what a transfer has to wait
for there is in `_cuda.py`.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.memory import Link
from penstock.memory.raw_memory import copy_bytes

PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 * 2**20

Mark = Any
"""A moment of the computation, as a device names it."""


class Device:
    """The CPU, and what other devices have to provide."""

    device = torch.device("cpu")
    is_behind = False
    """Whether calls return before operators have run."""

    def arena(self, num_bytes: int) -> torch.Tensor:
        """Memory for operators."""
        return anonymous(num_bytes)

    def host(self, num_bytes: int) -> torch.Tensor:
        """Memory for copies beside the device."""
        return anonymous(num_bytes)

    def take_workspace(self, num_bytes: int) -> None:
        """Have memory ready that operators take beside the arena, where it is taken beforehand."""

    def held_bytes(self) -> int | None:
        """What arena and workspace take of the device's memory; None where nobody keeps count."""
        return None

    def let_go_of_unused(self) -> None:
        """Return memory that nothing uses any more, where an allocator keeps it."""

    def computing(self) -> contextlib.AbstractContextManager[object]:
        """Where a step's calls are made."""
        return contextlib.nullcontext()

    def let_go(self, memory: torch.Tensor) -> None:
        """Give up what `host` has done beyond taking memory, which stays valid."""

    def mark(self) -> Mark:
        """What computing has been given so far."""
        return None

    def follow(self, mark: Mark) -> None:
        """Wait, on a link's thread, until that has been computed."""

    def read(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy a value to the CPU; what is returned waits for it alone, and has it."""
        copy = value.clone()
        return lambda: copy

    def settle(self) -> None:
        """Wait until all that computing has been given has been computed."""

    def mover(self, link: Link, target: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        """Return what copies bytes over a link, and returns when they have arrived."""
        to_address, from_address, num_bytes = target.data_ptr(), source.data_ptr(), source.numel()
        return lambda: copy_bytes(to_address, from_address, num_bytes)

    def to_file(
        self, write: Callable[[int, int, int], None], offset: int, source: torch.Tensor
    ) -> Callable[[], None]:
        """Return what writes bytes to a file: `write(offset, address, num_bytes)`."""
        address, num_bytes = source.data_ptr(), source.numel()
        return lambda: write(offset, address, num_bytes)

    def from_file(
        self, read: Callable[[int, int, int], None], offset: int, target: torch.Tensor
    ) -> Callable[[], None]:
        """Return what reads bytes from a file: `read(offset, address, num_bytes)`."""
        address, num_bytes = target.data_ptr(), target.numel()
        return lambda: read(offset, address, num_bytes)

    def random_state(self) -> torch.Tensor:
        """The state of the generator that operators draw from."""
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        """Draw from there on."""
        torch.set_rng_state(state)

    def timed(self, calls: Sequence[Callable[[], object]], ends_ns: list[int]) -> None:
        """Make calls, and append when each was done; also of those before one that fails."""
        clock, append = time.perf_counter_ns, ends_ns.append
        for call in calls:
            call()
            append(clock())

    def recorded(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object] | None:
        """Run operators, and return what runs them again at once; None if there is no such way."""
        return None


def anonymous(num_bytes: int) -> torch.Tensor:
    """Return fresh memory that begins at a page, as a tensor of bytes."""
    memory = mmap.mmap(-1, max(num_bytes, PAGE_BYTES))
    if num_bytes >= _HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
