"""Devices: the one to which a table's rows go, and the one on which an operation runs."""

from __future__ import annotations

import functools
from typing import Any

import torch

from penstock.compat.dispatch import is_in_bad_fork
from penstock.memory import WorkerThreads

GPU = "cuda"  # tests let another type of device play this part


def resolve_device(device: torch.device | str | int | None) -> torch.device:
    """Return the device that `device=` of `penstock.unified.unify` names, without starting CUDA.

    Raises:
        ValueError: There is no such device here.
    """
    # Counted by NVML, while `torch.cuda.is_available` starts the driver, which no fork survives.
    num_gpus = torch.cuda.device_count()
    if device is None:
        device = GPU if num_gpus and not in_forked_child() else "cpu"
    try:
        found = torch.device(GPU, device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r}: {error}") from error
    if found.type == "cpu":
        return torch.device("cpu")
    if found.type != GPU:
        raise ValueError(f"device={str(device)!r}: expected the CPU or a CUDA device")
    if not num_gpus:
        raise ValueError(
            f"device={str(device)!r}: PyTorch finds no CUDA device here; leave out `device` for "
            'the best there is, or give device="cpu"'
        )
    if found.index is None:
        index = torch.cuda.current_device() if torch.cuda.is_initialized() else 0
        found = torch.device(GPU, index)
    if found.index >= num_gpus:
        raise ValueError(f"device={str(device)!r}: PyTorch finds {num_gpus} CUDA devices here")
    return found


def in_forked_child() -> bool:
    """Return whether this process is the child of a fork of one that has used CUDA."""
    return bool(is_in_bad_fork())


def check_process(device: torch.device) -> None:
    """Raise RuntimeError where `device` cannot be used because the process was forked."""
    if device.type == GPU and in_forked_child():
        raise RuntimeError(
            f"{device} cannot be used in this process, which was forked from one that uses CUDA. "
            'Gather rows on the CPU here (unify(table, device="cpu")), or start processes with '
            'multiprocessing_context="spawn".'
        )


def gpu_of(*values: Any) -> torch.device | None:
    """Return the GPU of the first tensor that is on one, also within lists; None if none is."""
    for value in values:
        found = gpu_of(*value) if isinstance(value, list | tuple) else None
        if isinstance(value, torch.Tensor) and value.device.type == GPU:
            found = value.device
        if found is not None:
            return found
    return None


@functools.cache
def gather_threads(process: int) -> WorkerThreads:
    """Return the threads of a process that gather beside it: one batch is read while another is
    copied. A forked child has none of its parent's.
    """
    del process
    return WorkerThreads(2, thread_name_prefix="gather-rows")
