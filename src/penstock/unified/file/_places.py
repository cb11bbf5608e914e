"""Rows in place: read and written in a file through the page cache, in one pass."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

import numpy as np

from penstock.errors import StoreUnavailableError
from penstock.unified.file._reader import get_library
from penstock.unified.file.layout import RowLayout


def write_places(fd: int, layout: RowLayout, rows: np.ndarray, content: np.ndarray) -> None:
    """Write rows to their places.

    Args:
        fd: Descriptor of the file, open for writing.
        layout: Layout of its rows.
        rows: Row numbers, int64, rising, none of them twice.
        content: Bytes of the rows, uint8 (len(rows), row_bytes), contiguous.

    Raises:
        OSError: Some rows could not be written.
    """
    compiled = get_library()
    if compiled is not None:
        _call(compiled.penstock_write_rows, fd, layout, rows, content)
        return
    whole = np.ascontiguousarray(content).data.cast("B")
    for place, row in enumerate(rows.tolist()):
        part = whole[place * layout.row_bytes : (place + 1) * layout.row_bytes]
        offset = layout.row_offset(row)
        while part:
            written = os.pwrite(fd, part, offset)
            part, offset = part[written:], offset + written


def read_places(fd: int, layout: RowLayout, rows: np.ndarray) -> np.ndarray:
    """Read rows, whose numbers rise, from their places; uint8 (len(rows), row_bytes).

    Raises:
        OSError: Some rows could not be read.
    """
    content = np.empty((len(rows), layout.row_bytes), dtype=np.uint8)
    compiled = get_library()
    if compiled is not None:
        _call(compiled.penstock_read_places, fd, layout, rows, content)
        return content
    for place, row in enumerate(rows.tolist()):
        part, offset = content[place].data, layout.row_offset(row)
        while part:
            num_bytes = os.preadv(fd, [part], offset)
            if not num_bytes:
                raise OSError(5, "the file has become shorter")
            part, offset = part[num_bytes:], offset + num_bytes
    return content


def _call(
    function: Callable[..., None],
    fd: int,
    layout: RowLayout,
    rows: np.ndarray,
    content: np.ndarray,
) -> None:
    outcome = (ctypes.c_int64 * 4)()
    function(
        fd,
        layout.offset,
        layout.num_rows,
        layout.row_bytes,
        layout.rows_per_block,
        layout.block_bytes,
        rows.ctypes.data,
        len(rows),
        content.ctypes.data,
        outcome,
    )
    if outcome[0]:
        raise OSError(outcome[3], os.strerror(outcome[3]))


def open_file(path: str, flags: int) -> int:
    """Return a descriptor of a table's file.

    Raises:
        StoreUnavailableError: The file cannot be opened; the message says why.
    """
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise StoreUnavailableError(
            f"{path} cannot be opened{'' if flags == os.O_RDONLY else ' for writing'}: "
            f"{os.strerror(error.errno or 0)}",
            path=path,
            errno=error.errno,
        ) from error
