"""Tables in several processes: what is sent is a descriptor of the memory, never the rows."""

from __future__ import annotations

from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any

import torch

from penstock.unified._host_memory import TableMemory
from penstock.unified._hot_rows import HotRows
from penstock.unified._tables import HostTable
from penstock.unified._tensor import (
    FileTensor,
    UnifiedTensor,
    rebuild_from_content,
    rebuild_from_file,
    tensor_over,
)


def _reduce(tensor: UnifiedTensor) -> Any:
    table = tensor._table
    assert isinstance(table, HostTable)
    table.use.settle(to_write=True)  # memory that is moved is written
    memory, shape = table.memory, tuple(table.rows.shape)
    content = (DupFd(memory.share()), memory.num_bytes, shape, tensor.dtype)
    # What the other process gathers with, it registers itself, when it first needs it.
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
    memory = TableMemory.attached(descriptor.detach(), num_bytes)
    table = HostTable(memory, shape, dtype).seen_from(device, hot_rows)
    return tensor_over(table, requires_grad=requires_grad)


def share_through_multiprocessing() -> None:
    """Teach the pickler of `multiprocessing`, and `torch.load`, about tables."""
    ForkingPickler.register(UnifiedTensor, _reduce)
    ForkingPickler.register(FileTensor, FileTensor._reduce_to_name)
    torch.serialization.add_safe_globals([rebuild_from_content, rebuild_from_file])
