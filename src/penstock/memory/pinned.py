"""Pinned host memory: registered with CUDA, so that every GPU of the process reads it directly.

`torch.Tensor.pin_memory()` would copy the bytes and round their number up to a power of two; here
memory that is already there is registered where it lies.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
from typing import Any

import torch

from penstock.errors import PenstockError
from penstock.units import format_bytes

_logger = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: for all GPUs, not only the current one


def pin(address: int, num_bytes: int, *, remedy: str) -> None:
    """Register host memory with CUDA for all GPUs of the process.

    Example:
        >>> pin(address_of(mapping), len(mapping), remedy="lower host_memory=")  # doctest: +SKIP

    Args:
        address: Where the memory begins; it stays mapped until `unpin`.
        num_bytes: Its length, at least 1.
        remedy: What the user can do where CUDA refuses, for the error's message.

    Raises:
        PenstockError: CUDA refuses. No error of CUDA's stays behind.
    """
    code = try_pin(address, num_bytes)
    if code:
        raise PenstockError(
            f"cudaHostRegister refused {format_bytes(num_bytes)} of host memory (CUDA error "
            f"{code}): {remedy}, or raise the locked-memory limit (ulimit -l)"
        )


def try_pin(address: int, num_bytes: int, device: torch.device | None = None) -> int:
    """Register host memory as `pin` does, for work that can also be done without it.

    Args:
        address: Where the memory begins.
        num_bytes: Its length, at least 1.
        device: The GPU whose address of the memory is the same as the CPU's; None: the current one.

    Returns:
        0, or CUDA's error number where it refuses. No error of CUDA's stays behind.
    """
    runtime: Any = torch.cuda.cudart()
    with contextlib.nullcontext() if device is None else torch.cuda.device(device):
        code = int(runtime.cudaHostRegister(address, num_bytes, _PORTABLE))
        if code:
            _clear_last_error(device)
    return code


def unpin(address: int) -> int:
    """Undo `pin`; the memory stays mapped.

    A kernel or a copy that still uses the memory ends the program: wait for it before.

    Returns:
        0, or CUDA's error number, which has been logged.
    """
    runtime: Any = torch.cuda.cudart()
    code = int(runtime.cudaHostUnregister(address))
    if code:
        _logger.warning("cudaHostUnregister failed with CUDA error %d", code)
    return code


def _clear_last_error(device: torch.device | None) -> None:
    """Ask CUDA for its last error, or it would be the error of the next kernel that is launched."""
    library = _runtime_library()
    if library is not None:
        library.cudaGetLastError()
        return
    try:  # a kernel's launch asks
        torch.zeros(1, dtype=torch.float32, device=device or "cuda").add_(1)
    except (RuntimeError, AssertionError) as error:  # the latter of a torch without CUDA
        _logger.debug("forgotten: %s", error)


@functools.cache
def _runtime_library() -> ctypes.CDLL | None:
    """Return the CUDA runtime that torch has loaded; torch has no `cudaGetLastError` for Python."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "libcudart" in line}
    for path in sorted(paths):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(path)
            library.cudaGetLastError.restype = ctypes.c_int
            return library
    return None
