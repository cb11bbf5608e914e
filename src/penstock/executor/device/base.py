"""The device that operators run on: its memory, its copies, and how copies are ordered by it.

On the CPU an operator has run when its call returns, so a boundary that the program has reached is
a boundary that computing has reached. On a GPU calls return at once: `_cuda.py` has what a transfer
waits for there.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from penstock.memory import Link
from penstock.memory.pages import map_anonymous
from penstock.memory.raw_memory import copy_bytes

Mark = Any
"""A moment of the computation, in the device's own representation."""

FileAccess = Callable[[int, int, int], None]
"""Reads or writes bytes of a file: `access(address, num_bytes, offset)`."""


class Device:
    """The CPU, and the methods that other devices override.

    Attributes:
        device: The device in torch's words.
        is_behind: Whether calls return before operators have run.
    """

    device = torch.device("cpu")
    is_behind = False

    def allocate_arena(self, num_bytes: int) -> torch.Tensor:
        """Allocate memory for operators."""
        return allocate_pages(num_bytes)

    def allocate_host(self, num_bytes: int) -> torch.Tensor:
        """Allocate host memory for copies."""
        return allocate_pages(num_bytes)

    def unpin(self, memory: torch.Tensor) -> None:
        """Undo the pinning of `allocate_host`; the memory stays valid."""

    def reserve_workspace(self, num_bytes: int) -> None:
        """Allocate the operators' workspace ahead of the steps, on devices that can keep it."""

    def measure_held_bytes(self) -> int | None:
        """Return the device memory of arena and workspace; None if no allocator counts it."""
        return None

    def empty_cache(self) -> None:
        """Return the memory that the allocator keeps without use."""

    def enter_step(self) -> contextlib.AbstractContextManager[object]:
        """Return the context in which a step's calls are made."""
        return contextlib.nullcontext()

    def mark(self) -> Mark:
        """Return a mark behind all that has been launched so far."""
        return None

    def wait_for(self, mark: Mark) -> None:
        """Wait, on a link's thread, until the computation has reached a mark."""

    def start_reading(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy a value to the CPU; return a function that waits for the copy only."""
        copy = value.clone()
        return lambda: copy

    def synchronize(self) -> None:
        """Wait until all that has been launched has been computed."""

    def make_copy(
        self, link: Link, target: torch.Tensor, source: torch.Tensor
    ) -> Callable[[], None]:
        """Return a function that copies bytes over a link, and returns when they have arrived."""
        to_address, from_address, num_bytes = target.data_ptr(), source.data_ptr(), source.numel()
        return lambda: copy_bytes(to_address, from_address, num_bytes)

    def make_write(
        self, write: FileAccess, offset: int, source: torch.Tensor
    ) -> Callable[[], None]:
        """Return a function that writes bytes to a file."""
        address, num_bytes = source.data_ptr(), source.numel()
        return lambda: write(address, num_bytes, offset)

    def make_read(self, read: FileAccess, offset: int, target: torch.Tensor) -> Callable[[], None]:
        """Return a function that reads bytes from a file."""
        address, num_bytes = target.data_ptr(), target.numel()
        return lambda: read(address, num_bytes, offset)

    def get_random_state(self) -> torch.Tensor:
        """Return the state of the generator that operators draw from."""
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        """Set the state of the generator that operators draw from."""
        torch.set_rng_state(state)

    def run_timed(self, calls: Sequence[Callable[[], object]], ends_ns: list[int]) -> None:
        """Make calls, and append the end of each; also of those before one that fails."""
        clock, append = time.perf_counter_ns, ends_ns.append
        for call in calls:
            call()
            append(clock())

    def record(self, calls: Sequence[Callable[[], object]]) -> Callable[[], object] | None:
        """Run operators; return a function that replays all of them, or None if there is none."""
        return None


def allocate_pages(num_bytes: int) -> torch.Tensor:
    """Return fresh memory that begins at a page, as a tensor of bytes."""
    memory = map_anonymous(num_bytes, huge_pages=True)
    return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]
