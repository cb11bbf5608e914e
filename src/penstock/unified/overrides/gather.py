"""Gathers of rows, with gradients that hold only the rows that were gathered.

Rows go to the GPU of an operand if one is on a GPU, else to the table's `device`.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from penstock.compat.dispatch import (
    are_functorch_transforms_active,
    unchecked_sparse_tensor,
    without_torch_function,
)
from penstock.compat.fake_tensors import FakeTensor
from penstock.unified._devices import GPU, gather_threads, gpu_of
from penstock.unified.host.memory import advise_huge_pages
from penstock.unified.overrides.registry import TableTensor

INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def gather(
    table: TableTensor,
    index: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    negative: bool = False,
    padding_index: int | None = None,
) -> torch.Tensor:
    """Return `table[index]` for integers of any shape; see `UnifiedTensor.gather_rows`.

    With `negative` indices below zero count from the end. The row `padding_index` gets no gradient,
    as in `torch.nn.functional.embedding`.
    """
    check_index(index)
    differentiable = torch.is_grad_enabled() and table.requires_grad
    if out is not None:
        if differentiable:
            raise RuntimeError(
                "gather_rows(out=...) records no gradient, but the table requires one: leave out "
                "`out`, or gather under torch.no_grad()"
            )
        _check_out(table, index, out)
        if torch.is_grad_enabled() and out.requires_grad:
            raise RuntimeError(
                "out: it requires a gradient, which gathered rows would have none of; give "
                "out.detach(), or gather under torch.no_grad()"
            )
    if differentiable:
        return _SparseGather.apply(table, index, negative, padding_index, None)
    return _read_rows(table, index, out, negative)


class PendingRows:
    """Rows that are being gathered beside other work; see `UnifiedTensor.gather_rows_async`."""

    def __init__(self, table: TableTensor, index: torch.Tensor, stream: Any = None) -> None:
        self._table = table
        self._index = check_index(index)
        device = _choose_device(table, index, None)
        self._by_thread = device.type == "cpu"
        self._process = os.getpid()
        if self._by_thread:
            if stream is not None:
                raise ValueError("stream: rows that go to the CPU are gathered by a thread")
            threads = gather_threads(self._process)
            self._rows = threads.submit(_read_rows, table, index, None, False)
        else:
            self._rows = table._table.device_table(device).start_read(index, stream)
            num_bytes = index.numel() * (table.numel() // max(1, len(table)))
            table._table.count_batch(index, num_bytes * table.element_size())

    def done(self) -> bool:
        """Return whether the rows are there, or `wait` would raise at once."""
        return self._lost_its_thread or self._rows.done()

    def wait(self) -> torch.Tensor:
        """Return the rows as `gather_rows` does; raise what it raises.

        On a GPU the current stream waits for the rows, not the host. An index that is on the GPU
        can then be found wrong too late: its row is zeroes, and the next use of the table, or its
        report, raises.
        """
        if self._lost_its_thread:
            rows = _read_rows(self._table, self._index, None, False)
        else:
            rows = self._rows.result()
        if torch.is_grad_enabled() and self._table.requires_grad:
            with without_torch_function():
                return _SparseGather.apply(self._table, self._index, False, None, rows)
        return rows

    @property
    def _lost_its_thread(self) -> bool:
        """True in a forked child of the process whose thread gathers the rows."""
        return self._by_thread and self._process != os.getpid()


def check_index(index: Any) -> torch.Tensor:
    """Return `index` itself, if it is a tensor of integers whose numbers can be read."""
    if not isinstance(index, torch.Tensor) or index.dtype not in INTEGERS:
        found = index.dtype if isinstance(index, torch.Tensor) else type(index).__name__
        raise TypeError(f"index: expected a tensor of integers, got {found}")
    if not index.is_cpu and index.device.type != GPU:
        raise ValueError(f"index: expected a tensor on the CPU or a GPU, got one on {index.device}")
    if are_functorch_transforms_active():
        raise RuntimeError(
            "rows of a table are read and written outside of torch's operators, which transforms "
            "(torch.vmap, torch.func.grad and others) do not see: gather them before the "
            "transform, and pass them to the function"
        )
    refuse_fake(index)
    return index


def refuse_fake(*tensors: torch.Tensor) -> None:
    """Refuse fake tensors: rows are copied by addresses, and these have none.

    Raises:
        RuntimeError: One is fake, as all are in a captured step.
    """
    if any(isinstance(each, FakeTensor) for each in tensors):
        raise RuntimeError(
            "rows of a table are read and written outside of torch's operators, which a captured "
            "step (penstock.capture, penstock.fit, torch.export) cannot hold: gather them before "
            "the step and pass them in its batch, or train without a plan"
        )


def _choose_device(
    table: TableTensor, index: torch.Tensor, out: torch.Tensor | None
) -> torch.device:
    """Return the device of `out`, of an index on a GPU, or to which the table's rows go."""
    if out is not None:
        return out.device
    return table._table.device if index.is_cpu else index.device


def _check_out(table: TableTensor, index: torch.Tensor, out: torch.Tensor) -> None:
    shape = index.shape + table.shape[1:]
    if out.dtype != table.dtype:
        raise TypeError(f"out: expected {table.dtype}, as the table has, got {out.dtype}")
    if out.shape != shape:
        raise ValueError(f"out: expected shape {tuple(shape)}, got {tuple(out.shape)}")
    if not out.is_cpu or not index.is_cpu:
        on_gpu = gpu_of(index)
        if out.device.type not in ("cpu", GPU) or (on_gpu is not None and out.device != on_gpu):
            expected = "the CPU or a GPU" if on_gpu is None else f"{on_gpu}, as the index is"
            raise ValueError(f"out: expected a tensor on {expected}, got one on {out.device}")
    if table._table.contains(out):
        raise ValueError("out: it lies in the table itself; give memory of its own")


def _read_rows(
    table: TableTensor, index: torch.Tensor, out: torch.Tensor | None, negative: bool
) -> torch.Tensor:
    device, source = _choose_device(table, index, out), table._table
    reader = None if device.type == "cpu" else source.device_table(device)
    if out is not None and out.is_contiguous() and not out.is_conj() and not out.is_neg():
        rows = out
        if not out.is_inference():  # autograd may have saved what is overwritten, unseen by torch
            torch.autograd.graph.increment_version(out)
    else:
        rows = torch.empty(index.shape + table.shape[1:], dtype=table.dtype, device=device)
    refuse_fake(index, rows)
    if reader is None:
        if rows is not out:
            advise_huge_pages(rows)
        source.read_rows(index, rows, negative=negative)
    else:
        reader.read_rows(index, rows, negative=negative)
        source.count_batch(index, rows.numel() * rows.element_size())
    return rows if out is None or rows is out else out.copy_(rows)


class _SparseGather(torch.autograd.Function):
    """Rows forward, a sparse tensor of (indices, rows) backward."""

    @staticmethod
    def forward(
        ctx: Any,
        table: TableTensor,
        index: torch.Tensor,
        negative: bool,
        padding_index: int | None,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.negative, ctx.padding_index = table.shape, negative, padding_index
        return _read_rows(table, index, None, negative) if rows is None else rows

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (index,) = ctx.saved_tensors
        index = index.reshape(-1).long().to(gradient.device)
        if ctx.negative:
            index = torch.where(index < 0, index + ctx.shape[0], index)
        rows = gradient.reshape(index.numel(), *ctx.shape[1:])
        if ctx.padding_index is not None:
            kept = (index != ctx.padding_index).nonzero().flatten()
            index, rows = index[kept], rows[kept]
        # Not `sparse_coo_tensor(check_invariants=False)`: torch 2.11 warns that nothing is checked.
        sparse = unchecked_sparse_tensor(index[None], rows, ctx.shape)
        if gradient.device.type != "cpu":
            # Autograd accepts a gradient only on its leaf's device, and the table is on the CPU.
            # So the rows cross the link, each once, while the host waits: as many bytes as were
            # gathered, in the direction that gathers leave free.
            sparse = sparse.coalesce().cpu()
        return sparse, None, None, None, None
