"""The base of tensors over tables, and the error of operations that would copy them whole."""

from __future__ import annotations

import torch

from penstock.errors import WholeTableError
from penstock.unified.file.table import FileTable
from penstock.unified.host.table import HostTable
from penstock.units import format_bytes


class TableTensor(torch.Tensor):
    """A tensor whose rows are those of a table."""

    _table: HostTable | FileTable


def whole_table_error(table: torch.Tensor, operation: str, remedy: str) -> WholeTableError:
    """Return the error of an operation that would silently copy a whole table."""
    return WholeTableError(
        f"{operation} would copy the whole table of {format_size(table)}: {remedy}."
    )


def format_size(table: torch.Tensor) -> str:
    """Return the bytes of a table, for messages."""
    return format_bytes(table.numel() * table.element_size())
