"""Tables as tensors.

A `UnifiedTensor` *is* a tensor over the table's memory, so all that PyTorch can do with a tensor it
can do with this one, without a copy. `__torch_function__` calls an override where a table is
different (`overrides/`): rows are gathered by kernels made for that, their gradients are sparse,
and an operation that would copy the whole table raises.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from multiprocessing.reduction import DupFd, ForkingPickler
from typing import Any, NoReturn

import torch

from penstock.compat.dispatch import (
    make_subclass,
    make_wrapper_subclass,
    tree_leaves,
    without_torch_function,
)
from penstock.compat.dynamo import disable_dynamo
from penstock.errors import WholeTableError
from penstock.unified._devices import resolve_device
from penstock.unified._table import CPU, UnifiedReport
from penstock.unified.device.hot_rows import HotRows
from penstock.unified.device.table import MemoryUse
from penstock.unified.file.layout import RowLayout
from penstock.unified.file.table import FileTable, copy_to_file
from penstock.unified.host.memory import TableMemory
from penstock.unified.host.table import HostTable
from penstock.unified.overrides.gather import PendingRows, gather
from penstock.unified.overrides.registry import (
    TableTensor,
    dispatch,
    format_size,
    whole_table_error,
)


class UnifiedTensor(TableTensor):
    """A table of shape (num_rows, *row), whose rows are gathered from where they lie.

    Made by `penstock.unified.unify` and `penstock.unified.empty`.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return _dispatch_uncompiled(func, args, kwargs)
        return dispatch(func, args, kwargs)

    @property
    def output_device(self) -> torch.device:
        """Device of gathered rows if no operand is on a GPU; the table itself stays on the CPU."""
        return self._table.device

    @property
    def file_layout(self) -> RowLayout | None:
        """Places of the rows in the table's file; None of a table in memory."""
        return self._table.layout if isinstance(self._table, FileTable) else None

    def gather_rows(self, index: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return rows of the table, copied side by side.

        Example:
            >>> from penstock.unified import unify
            >>> table = unify(torch.arange(12.0).view(4, 3))
            >>> table.gather_rows(torch.tensor([2, 0]))
            tensor([[6., 7., 8.],
                    [0., 1., 2.]])

        Args:
            index: Integers of any shape, from 0 to num_rows - 1, on the CPU or a GPU. For one on a
                GPU the host waits for the rows, to raise if it was wrong; `gather_rows_async` does
                not.
            out: Memory for the rows, of shape (*index.shape, *row) and the table's dtype; not where
                gradients are recorded.

        Returns:
            `out`, or a new tensor: on the GPU of `index` if it is on one, else on
            `output_device`. Its gradient reaches the table as a sparse tensor.

        Raises:
            IndexError: An index is out of range; the message names it.
            TypeError: `index` does not hold integers, or `out` has another dtype.
            ValueError: `out` has another shape, or is on another GPU than `index`.
        """
        with without_torch_function():
            if torch.compiler.is_dynamo_compiling():
                return _gather_uncompiled(self, index, out=out)
            return gather(self, index, out=out)

    def gather_rows_async(
        self, index: torch.Tensor, *, stream: torch.cuda.Stream | None = None
    ) -> PendingRows:
        """Start to gather rows beside other work, and return at once.

        Rows for the CPU are gathered by another thread, rows for a GPU on another stream, by few
        of its processors, so that the model has the others.

        Example:
            >>> from penstock.unified import unify
            >>> table = unify(torch.arange(12.0).view(4, 3))
            >>> pending = table.gather_rows_async(torch.tensor([2]))
            >>> pending.wait()
            tensor([[6., 7., 8.]])

        Args:
            index: Integers of any shape, from 0 to num_rows - 1, on the CPU or a GPU; not to be
                changed before `wait` has returned. One on the GPU is waited for, with all that was
                launched on the current stream before it.
            stream: Stream of the GPU for the gather; by default one that all tables share.

        Returns:
            An object whose `wait()` returns the rows, or raises what `gather_rows` raises. On a GPU
            it makes the current stream wait, not the host.

        Raises:
            TypeError: `index` does not hold integers.
            ValueError: `stream` is given, but the rows go to the CPU.
        """
        with without_torch_function():
            return PendingRows(self, index, stream)

    def save_rows(self, path: str | os.PathLike[str]) -> UnifiedTensor:
        """Copy all rows to a new file, a block at a time, as they are now.

        `torch.save` writes the name of a table in a file, not its rows; this writes the rows.

        Args:
            path: Path of the new file: in NumPy's format if it ends in ".npy", else in Penstock's.

        Returns:
            The table in the new file.

        Raises:
            StoreError: The file exists, or has no room.
        """
        with without_torch_function(), torch.inference_mode(mode=False):
            return tensor_over(copy_to_file(self._table, path))

    def report(self) -> UnifiedReport:
        """Return the account of what was gathered from the table so far."""
        return self._table.report()

    def __copy__(self) -> UnifiedTensor:
        return tensor_over(self._table, requires_grad=self.requires_grad)

    def __deepcopy__(self, memo: Any) -> NoReturn:
        raise whole_table_error(self, "copy.deepcopy", "share it, or copy it with unify(u.cpu())")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save the content, as for `torch.save`; multiprocessing shares the memory instead."""
        table = self._table
        assert isinstance(table, HostTable)
        table.use.synchronize()
        with without_torch_function():
            device = "cpu" if table.device.type == "cpu" else None
            return rebuild_from_content, (table.rows, device, self.requires_grad)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        parts = f"shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'"
        return f"UnifiedTensor({parts}{', requires_grad=True' if self.requires_grad else ''})"


# Breaks in a compiled graph: the compiler sees the result, not how rows are gathered.
_dispatch_uncompiled = disable_dynamo(dispatch)
_gather_uncompiled = disable_dynamo(gather)


class FileTensor(UnifiedTensor):
    """A table in a file: a tensor without memory, which refuses what is not done row by row."""

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return CPU
        table = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, FileTensor))
        if func is torch.ops.aten.detach.default:
            return tensor_over(table._table)
        name = func.overloadpacket.__name__
        if func._schema.is_mutable:
            raise WholeTableError(
                f"{name} would write the whole table of {format_size(table)}: write rows of it, "
                "with u[index] = rows or the optimizers of penstock.unified.optim."
            )
        raise whole_table_error(table, name, "gather rows of it, or load all of it into a tensor")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Save the file's name: loading opens the same file."""
        table = self._table
        assert isinstance(table, FileTable)
        warnings.warn(
            f"{table.source}: what is saved is the name of the file, not its rows; when it "
            "is loaded it has the rows that the file has then. table.save_rows(path) saves them.",
            stacklevel=2,
        )
        return self._reduce_to_name()

    def _reduce_to_name(self) -> Any:
        table = self._table
        assert isinstance(table, FileTable)
        with without_torch_function():
            device = "cpu" if table.device.type == "cpu" else None
            hot_rows = table.hot_rows
            cache = None if table.may_copy else (0, None)
            if hot_rows is not None:
                cache = (hot_rows.budget_bytes, hot_rows.scores)
            return rebuild_from_file, (table.source, device, cache, self.requires_grad)


def tensor_over(table: HostTable | FileTable, *, requires_grad: bool = False) -> UnifiedTensor:
    """Return a tensor over `table`."""
    if isinstance(table, HostTable):  # all tensors over its rows share their version counter
        tensor = make_subclass(UnifiedTensor, table.rows, requires_grad)
    else:
        tensor = make_wrapper_subclass(
            FileTensor,
            table.shape,
            dtype=table.dtype,
            # On this device `x.data = table` is refused for any tensor that has memory: it would
            # get the null pointer of this one.
            device=torch.device("meta"),
            dispatch_device=True,
            requires_grad=requires_grad,
        )
    tensor._table = table
    return tensor


@torch.inference_mode(mode=False)
def rebuild_from_content(
    rows: torch.Tensor, device: str | None, requires_grad: bool
) -> UnifiedTensor:
    """Return a new table with the content of `rows`; `device` None is the best there is here."""
    table = HostTable.empty(tuple(rows.shape), rows.dtype, device=resolve_device(device))
    table.rows.copy_(rows)
    return tensor_over(table, requires_grad=requires_grad)


def rebuild_from_file(
    source: str,
    device: str | None,
    cache: tuple[int, torch.Tensor | None] | None,
    requires_grad: bool,
) -> UnifiedTensor:
    """Return the table in a file; `source` is a path as `penstock.unified.unify` takes it."""
    hot_rows = HotRows(cache[0], scores=cache[1]) if cache is not None and cache[0] else None
    place = resolve_device(device)
    table = FileTable(source, device=place, hot_rows=hot_rows, may_copy=cache is None)
    return tensor_over(table, requires_grad=requires_grad)


# ------------------------------------------------------------------ other processes


def _reduce(tensor: UnifiedTensor) -> Any:
    table = tensor._table
    assert isinstance(table, HostTable)
    table.use.synchronize(to_write=True)  # memory that is moved is written
    memory = table.memory
    content = (DupFd(memory.share()), memory.num_bytes, table.shape, table.dtype)
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
    memory = TableMemory(num_bytes, descriptor.detach())
    use = MemoryUse(memory.tensor(shape, dtype), memory)
    table = HostTable(use, device=device, hot_rows=hot_rows)
    return tensor_over(table, requires_grad=requires_grad)


def share_through_multiprocessing() -> None:
    """Register tables with the pickler of `multiprocessing`, and with `torch.load`."""
    ForkingPickler.register(UnifiedTensor, _reduce)
    ForkingPickler.register(FileTensor, FileTensor._reduce_to_name)
    torch.serialization.add_safe_globals([rebuild_from_content, rebuild_from_file])
