"""Tables in several processes, which share memory by a descriptor; rows are never sent."""

from __future__ import annotations

from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch

from penstock.unified._tensor import (
    FileTensor,
    UnifiedTensor,
    rebuild_from_content,
    rebuild_from_file,
    tensor_over,
)
from penstock.unified.device.hot_rows import HotRows
from penstock.unified.host.memory import TableMemory
from penstock.unified.host.table import HostTable


def _reduce(tensor: UnifiedTensor) -> Any:
    table = tensor._table
    assert isinstance(table, HostTable)
    table.use.synchronize(to_write=True)  # memory that is moved is written
    memory, shape = table.memory, tuple(table.rows.shape)
    content = (DupFd(memory.share()), memory.num_bytes, shape, tensor.dtype)
    # The other process registers the memory itself, at its first gather on a GPU.
    return _rebuild, (*content, table.device, table.hot_rows, tensor.requires_grad)


@torch.inference_mode(mode=False)
def _rebuild(
    descriptor: Any,
    num_bytes: int,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    hot_rows: HotRows | None,
    requires_grad: bool,
) -> UnifiedTensor:
    memory = TableMemory.attach(descriptor.detach(), num_bytes)
    table = HostTable(memory, shape, dtype).view_from(device, hot_rows)
    return tensor_over(table, requires_grad=requires_grad)


def share_through_multiprocessing() -> None:
    """Register tables with the pickler of `multiprocessing`, and with `torch.load`."""
    ForkingPickler.register(UnifiedTensor, _reduce)
    ForkingPickler.register(FileTensor, FileTensor._reduce_to_name)
    torch.serialization.add_safe_globals([rebuild_from_content, rebuild_from_file])
