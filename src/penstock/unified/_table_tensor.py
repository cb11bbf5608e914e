"""The base of tensors over tables, and the error of operations that would copy them whole."""

from __future__ import annotations

import torch

from penstock.errors import WholeTableError
from penstock.unified._tables import FileTable, HostTable
from penstock.units import format_bytes


class TableTensor(torch.Tensor):
    """A tensor whose rows are those of a table."""

    _table: HostTable | FileTable


def copies_everything(table: torch.Tensor, operation: str, remedy: str) -> WholeTableError:
    """The error of an operation that would copy a whole table behind its user's back."""
    return WholeTableError(f"{operation} would copy the whole table of {size_of(table)}: {remedy}.")


def size_of(table: torch.Tensor) -> str:
    """The bytes of a table, for messages."""
    return format_bytes(table.numel() * table.element_size())
