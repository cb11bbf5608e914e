"""Registration of tables' memory with CUDA, which ends after the last use on any stream.

`cudaHostRegister` locks a table's pages and maps them for all GPUs of the process. Ending that, or
unmapping the memory, while a kernel reads it is a fault that ends the program, and PyTorch's
allocator orders such things for its own memory only. So the streams that use a table are recorded
here, and its memory is unregistered after the last of them has finished.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from penstock.compat.dispatch import storage_from_pointer
from penstock.errors import CapacityError
from penstock.memory.pages import PAGE_BYTES, round_up
from penstock.memory.pinned import try_pin, unpin
from penstock.unified.host.memory import TableMemory
from penstock.units import format_bytes

logger = logging.getLogger(__name__)

_MEMPOLICY_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}  # get_mempolicy, set_mempolicy
_DEFAULT, _PREFERRED = 0, 1  # MPOL_DEFAULT, MPOL_PREFERRED

_lock = threading.Lock()

captured: set[TableMemory] = set()
"""Memory of CUDA graphs, which may be replayed until the process ends."""


class StreamUses:
    """The last use of a memory on each stream that has used it."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._events: dict[Any, Any] = {}

    def record(self, stream: Any) -> None:
        """Record that what was launched on `stream` so far uses the memory."""
        event = stream.record_event()
        if event is not None:  # on the CPU, where tests run, it has ended already
            self._events[stream] = event

    def make_wait(self, stream: Any) -> None:
        """Make later launches on `stream` wait for all uses recorded so far."""
        for other, event in list(self._events.items()):
            if other != stream:
                stream.wait_event(event)

    def wait(self) -> None:
        """Block this thread until all uses recorded so far have ended."""
        if self._events and self._process == os.getpid():  # a forked child has no part in them
            for event in list(self._events.values()):
                event.synchronize()


class MemoryUse:
    """The uses of a memory by the GPUs of this process, shared by all tables over it.

    Attributes:
        rows: All rows, as a tensor on the CPU.
        memory: Memory that holds them.
        is_registered: Whether GPUs can use the memory; None before one has asked.
        reads: Kernels that read the memory.
        writes: Kernels that write to it.
        exported: Devices with uses that are not recorded, through an alias.
        device_tables: Tables of GPUs that keep some of the rows.
    """

    def __init__(self, rows: torch.Tensor, memory: TableMemory) -> None:
        self.rows, self.memory = rows, memory
        self.is_registered: bool | None = None
        self.reads, self.writes = StreamUses(), StreamUses()
        self.exported: set[torch.device] = set()
        self.device_tables: weakref.WeakSet[Any] = weakref.WeakSet()

    def register(self, device: torch.device) -> bool:
        """Make the memory usable by all GPUs, once; return whether it is.

        The memory moves into shared memory first, as much for the driver, which pins shared pages
        through a fork, as for processes that will get the table later. Where CUDA refuses, the
        reason is logged, and no error stays behind.
        """
        with _lock:
            if self.is_registered is None:
                error = self._try_to_register(device)
                if error:
                    logger.info(
                        "CUDA refused to register %s of host memory: %s. Rows are copied through "
                        "buffers instead, more slowly. A higher locked-memory limit (ulimit -l) or "
                        "memory limit of this container may help.",
                        format_bytes(self.memory.num_bytes),
                        error,
                    )
                self.is_registered = not error
            return self.is_registered

    def _try_to_register(self, device: torch.device) -> str:
        """Register whole pages; returns the error, or an empty string."""
        memory = self.memory
        try:
            with _prefer_node_of(device):
                memory.share()
        except CapacityError as refusal:
            return f"it could not be moved into shared memory ({refusal})"
        if not memory.num_bytes:
            return ""
        if code := try_pin(memory.address, round_up(memory.num_bytes, PAGE_BYTES), device):
            return f"CUDA error {code}"
        # At the interpreter's end nothing is undone: kernels may still run then, other clean-ups
        # may still use the table, and the process's end gives everything back anyway.
        content = memory.tensor((memory.num_bytes,), torch.uint8)
        uses = self.reads, self.writes, self.exported
        weakref.finalize(memory, _unregister, os.getpid(), content, *uses).atexit = False
        return ""

    def synchronize(self, *, to_write: bool = False) -> None:
        """Wait until the CPU may read the memory, or write to it."""
        self.writes.wait()
        if to_write:
            self.reads.wait()

    def mark_written(self, index: torch.Tensor, before: int) -> None:
        """Count a write of rows, before which the version of the memory was `before`."""
        torch.autograd.graph.increment_version(self.rows)
        for table in list(self.device_tables):
            table.refresh(index, before, self.rows._version)


def _unregister(
    process: int,
    content: torch.Tensor,
    reads: StreamUses,
    writes: StreamUses,
    exported: set[torch.device],
) -> None:
    """Unregister the memory of a table that is gone; `content` keeps it mapped until then."""
    if process != os.getpid():
        return
    reads.wait()
    writes.wait()
    for device in exported:
        torch.cuda.synchronize(device)
    unpin(content.data_ptr())


# ----------------------------------------------------------------------- aliases


def make_alias(memory: TableMemory, device: torch.device) -> torch.Tensor:
    """Return all bytes of registered memory as a tensor on a GPU, without a copy.

    As long as it lives, or a view of it, the memory stays. CUDA's protocol for arrays would copy
    everything where the memory was registered by another GPU.
    """
    empty = torch.empty(0, dtype=torch.uint8, device=device)
    if not memory.num_bytes:
        return empty
    storage: Any = storage_from_pointer(memory.address, device, memory.num_bytes)
    # PyTorch keeps a storage's Python object, with its attributes, as long as a tensor over it.
    storage._penstock_memory = memory
    return empty.set_(storage, 0, (memory.num_bytes,), (1,))


# ------------------------------------------------------------------- NUMA nodes


def find_numa_node(
    device: torch.device, devices: Path = Path("/sys/bus/pci/devices")
) -> int | None:
    """Return the memory node nearest to a GPU; None where there is one only, or none known."""
    properties: Any = torch.cuda.get_device_properties(device)
    try:
        name = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:"
        node = int((devices / f"{name}{properties.pci_device_id:02x}.0" / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return node if node >= 0 else None


@contextlib.contextmanager
def _prefer_node_of(device: torch.device) -> Iterator[None]:
    """Make the kernel take this thread's new pages from the GPU's node while there are some.

    Where the user has chosen a policy of their own, as by numactl, that stays.
    """
    node = find_numa_node(device)
    calls = _MEMPOLICY_CALLS.get(platform.machine())
    if node is None or calls is None or node >= 64:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    get, set_ = calls
    policy = ctypes.c_int(-1)
    libc.syscall(get, ctypes.byref(policy), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
    mask = ctypes.c_uint64(1 << node)
    preferred = policy.value == _DEFAULT and not libc.syscall(
        set_, _PREFERRED, ctypes.byref(mask), ctypes.c_ulong(65)
    )
    logger.info(
        "pages of a table %s NUMA node %d, next to %s",
        "are taken from" if preferred else "cannot be had, or are not to be, from",
        node,
        device,
    )
    try:
        yield
    finally:
        if preferred:
            libc.syscall(set_, _DEFAULT, None, ctypes.c_ulong(0))
