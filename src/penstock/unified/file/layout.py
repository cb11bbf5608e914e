"""Layouts: the places of a table's rows in a file.

Three formats are read: NumPy's `.npy`, one tensor of a `.safetensors` file, and Penstock's own,
whose rows never cross a page if they fit into one, so that a random row costs one read of one page.

The native format, version 1: the first 4096 bytes hold 8 bytes of magic, the length of a JSON text
(unsigned, 4 bytes, little endian), its CRC-32 (the same) and the text: `shape`, `dtype` (as torch
names it, without "torch."), `rows_per_block` and `block_bytes`. The rows begin at byte 4096: row r
at 4096 + (r // rows_per_block) * block_bytes + (r % rows_per_block) * row_bytes. Numbers are little
endian. What lies between rows is zero.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import functools
import io
import json
import math
import os
import stat
import struct
import tokenize
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from penstock._lazy import cached_property
from penstock.errors import StoreError, StoreFullError, StoreUnavailableError
from penstock.memory import NewFile
from penstock.memory.pages import round_up
from penstock.memory.safetensors import SafetensorsHeader
from penstock.units import format_bytes

PAGE_BYTES = 4096
_MAGIC = b"PENSTOCK"
_VERSION = 1
_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_MAX_HEADER_BYTES = 64 * 2**20  # of a foreign file: a longer one is no header
_MAX_COUNT = 2**62  # of elements or bytes: offsets stay below 2^63
# By version. The third differs from the second in the names of fields, which tables do not have.
_NPY_HEADERS = {
    1: np.lib.format.read_array_header_1_0,
    2: np.lib.format.read_array_header_2_0,
    3: np.lib.format.read_array_header_2_0,
}
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_STATX_INO, _STATX_BTIME = 0x100, 0x800
_STATX = struct.Struct("=32xQ40x12s44xII112x")  # inode, time of birth, device

FileId = tuple[int, int, bytes]
"""Device, inode and time of birth: a new file may get the inode of one that is gone."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowLayout:
    """The places of a table's rows in a file."""

    path: str
    """Path of the file."""
    shape: tuple[int, ...]
    """Lengths (num_rows, *row)."""
    dtype: torch.dtype
    """Dtype of the elements."""
    offset: int
    """Byte at which the first row begins."""
    rows_per_block: int = 1
    """Rows that lie side by side."""
    block_bytes: int
    """Bytes from the first row of a block to the first row of the next."""
    key: str = ""
    """Name of the tensor, in a file that holds several."""
    file_id: FileId | None = dataclasses.field(default=None, compare=False)
    """Identity of the file whose header was read."""
    file_bytes: int | None = dataclasses.field(default=None, compare=False)
    """Length of the file at that time."""

    @cached_property
    def struct(self) -> ctypes.Array[ctypes.c_int64]:
        """The struct `Layout` of `file_rows.cpp`, which has only numbers."""
        numbers = self.offset, self.num_rows, self.row_bytes, self.rows_per_block, self.block_bytes
        return (ctypes.c_int64 * len(numbers))(*numbers)

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def inode(self) -> int | None:
        """Inode of the file whose header was read."""
        return None if self.file_id is None else self.file_id[1]

    def row_offset(self, row: int) -> int:
        """Return the byte at which a row begins."""
        block, place = divmod(row, self.rows_per_block)
        return self.offset + block * self.block_bytes + place * self.row_bytes

    @property
    def end(self) -> int:
        """Byte behind the last row."""
        return self.row_offset(self.num_rows - 1) + self.row_bytes if self.num_rows else self.offset


def open_layout(source: str | os.PathLike[str]) -> RowLayout:
    """Read the header of a file and check that its rows are all there.

    Args:
        source: Path that ends in ".npy", or "file.safetensors#name", or of a native file.

    Raises:
        StoreUnavailableError: There is no such file, or no such tensor in it.
        StoreError: The file is not what its name or its header says; the message says why.
    """
    path, key = split_source(os.fspath(source))
    try:
        _refuse_pipe(path)
        with open(path, "rb") as file:
            if path.endswith(".safetensors"):
                layout = _safetensors_layout(file, path, key)
            elif path.endswith(".npy"):
                layout = _npy_layout(file, path)
            else:
                layout = _native_layout(file, path)
            identity = file_id(file.fileno())
            num_bytes = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise store_error(error, path, "cannot be opened", StoreUnavailableError) from error
    if num_bytes < layout.end:
        raise StoreError(
            f"{path} is shorter than its header says: a table of shape {layout.shape} and "
            f"{layout.dtype} ends at byte {layout.end}, but the file has {num_bytes}. It was "
            "truncated, or its copying was not finished.",
            path=path,
            offset=num_bytes,
        )
    return dataclasses.replace(layout, file_id=identity, file_bytes=num_bytes)


def _refuse_pipe(path: str) -> None:
    """Refuse what holds no rows: to open a pipe would wait for its writer."""
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise StoreUnavailableError(
            f"{path} cannot be opened: it is a device, a pipe or a socket; give the path of a file",
            path=path,
        )


def store_error(error: OSError, path: str, problem: str, kind: type[StoreError]) -> StoreError:
    """Return the error of a failed system call; `StoreFullError` if there is no room."""
    kind = StoreFullError if error.errno in _FULL_ERRORS else kind
    message = f"{path} {problem}: {os.strerror(error.errno or 0)}"
    return kind(message, path=path, errno=error.errno)


def file_id(file: int | str) -> FileId:
    """Identify the file of a descriptor or a path, by `statx`.

    Raises:
        OSError: There is no such file.
    """
    directory, path = (file, b"") if isinstance(file, int) else (_AT_FDCWD, os.fsencode(file))
    status = ctypes.create_string_buffer(_STATX.size)
    if _libc().statx(directory, path, _AT_EMPTY_PATH, _STATX_INO | _STATX_BTIME, status):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    inode, birth, *device = _STATX.unpack(status.raw)
    return os.makedev(*device), inode, birth  # zeroes, where a file system does not keep it


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def split_source(source: str) -> tuple[str, str]:
    """Return the file and, of a .safetensors file, the tensor in it."""
    path, mark, key = source.rpartition(".safetensors#")
    return (path + mark[:-1], key) if mark else (source, "")


def join_source(path: str, key: str) -> str:
    """Return the source of a file, or of a tensor in it; undoes `split_source`."""
    return f"{path}#{key}" if key else path


def native_layout(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> RowLayout:
    """Return the layout of a table in the native format."""
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    per_block = max(1, PAGE_BYTES // max(row_bytes, 1)) if row_bytes <= PAGE_BYTES else 1
    block_bytes = PAGE_BYTES if row_bytes <= PAGE_BYTES else round_up(row_bytes, 512)
    return RowLayout(
        path=path,
        shape=shape,
        dtype=dtype,
        offset=PAGE_BYTES,
        rows_per_block=per_block,
        block_bytes=block_bytes,
    )


def create(
    path: str | os.PathLike[str],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    fill: Callable[[int, RowLayout], None] | None = None,
) -> RowLayout:
    """Make a file, with its space allocated: NumPy's if its name says so, else native.

    It gets its name when all of it is on the disk, so an error or a kill leaves nothing.

    Args:
        path: Path of the file, which must be free.
        shape: Lengths (num_rows, *row).
        dtype: Dtype of the elements.
        fill: Function that writes rows, given a descriptor and the layout; they are zeroes else.

    Raises:
        ValueError: The format is another, or does not have the dtype, or no file is as large.
        StoreUnavailableError: The file exists, or its directory cannot be written to.
        StoreFullError: The file system has no room.
    """
    path = os.fspath(path)
    layout, header, num_bytes = _new_layout(path, shape, dtype)
    if os.path.lexists(path):
        raise StoreUnavailableError(
            f"{path} exists; give another path, or open it with penstock.unify",
            path=path,
            errno=errno.EEXIST,
        )
    with NewFile(path, replace=False) as file:
        try:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            problem = f"cannot be made as a table of {format_bytes(num_bytes)}"
            raise store_error(error, path, problem, StoreUnavailableError) from error
        file.write(0, [memoryview(header)])
        if fill is not None:
            fill(file.fileno(), layout)
        file.finish()
    return layout


def _new_layout(
    path: str, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[RowLayout, bytes, int]:
    """Return the layout of a new file, its header, and the bytes of all of it."""
    if path.endswith(".npy"):
        layout, header = _new_npy(path, shape, dtype)
    elif split_source(path)[0].endswith(".safetensors"):
        raise ValueError(f"path={path!r}: no table is made in that format; end the name otherwise")
    else:
        layout, header = _new_native(path, shape, dtype)
    num_blocks = -(-layout.num_rows // layout.rows_per_block)
    num_bytes = layout.offset + num_blocks * layout.block_bytes
    if max(num_bytes, math.prod(shape)) > _MAX_COUNT:
        raise ValueError(f"shape={shape}: no file has as many bytes as that needs in {dtype}")
    return layout, header, num_bytes


def _new_native(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[RowLayout, bytes]:
    layout = native_layout(path, shape, dtype)
    text = json.dumps(
        {
            "version": _VERSION,
            "shape": list(shape),
            "dtype": str(dtype).removeprefix("torch."),
            "rows_per_block": layout.rows_per_block,
            "block_bytes": layout.block_bytes,
        }
    ).encode()
    header = _MAGIC + struct.pack("<II", len(text), zlib.crc32(text)) + text
    return layout, header.ljust(PAGE_BYTES, b"\0")


def _new_npy(path: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[RowLayout, bytes]:
    try:
        description = torch.empty(0, dtype=dtype, device="cpu").numpy().dtype.str
    except TypeError as error:
        problem = f"path={path!r}: NumPy's format has no {dtype}; leave out the .npy"
        raise ValueError(problem) from error
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": description, "fortran_order": False, "shape": shape}
    )
    return _plain_layout(path, shape, dtype, len(header.getvalue())), header.getvalue()


def _format_error(path: str, problem: str) -> StoreError:
    return StoreError(f"{path} {problem}", path=path)


def _native_layout(file: Any, path: str) -> RowLayout:
    header = file.read(PAGE_BYTES)
    if header[:8] != _MAGIC:
        raise _format_error(
            path, "is no table: expected .npy, .safetensors#name or the native format"
        )
    num_bytes, checksum = struct.unpack("<II", header[8:16])
    text = header[16 : 16 + num_bytes]
    if len(text) != num_bytes or zlib.crc32(text) != checksum:
        raise _format_error(path, "has a damaged header: its checksum is wrong")
    try:
        fields = json.loads(text)
        version, shape, name = fields["version"], fields["shape"], str(fields["dtype"])
        blocks = fields["rows_per_block"], fields["block_bytes"]
    except (ValueError, TypeError, KeyError) as error:
        raise _format_error(path, f"has a damaged header: {error!r}") from error
    if version != _VERSION:
        raise _format_error(path, f"has version {version}; this Penstock reads {_VERSION}")
    shape, dtype = _check_shape(path, shape), getattr(torch, name, None)
    if not shape or not isinstance(dtype, torch.dtype):
        raise _format_error(path, f"has a damaged header: shape {shape}, dtype {name!r}")
    layout = native_layout(path, shape, dtype)
    # All that this version writes; a checksum alone does not tell which version wrote it.
    if blocks != (layout.rows_per_block, layout.block_bytes):
        problem = "has a damaged header: {!r} rows of {} bytes in blocks of {!r}"
        raise _format_error(path, problem.format(blocks[0], layout.row_bytes, blocks[1]))
    return layout


def _npy_layout(file: Any, path: str) -> RowLayout:
    """Read the header of NumPy's format, versions 1 to 3."""
    try:
        read_header = _NPY_HEADERS[np.lib.format.read_magic(file)[0]]
    except (ValueError, KeyError) as error:
        raise _format_error(path, "is no .npy file: its first bytes are wrong") from error
    try:
        shape, fortran, described = read_header(file, max_header_size=_MAX_HEADER_BYTES)
    except (ValueError, SyntaxError, TypeError, MemoryError, tokenize.TokenError) as error:
        raise _format_error(path, f"has a damaged header: {error}") from error
    try:
        dtype = torch_dtype(described)
    except TypeError as error:
        problem = f"has elements of dtype {described.str!r}, which tables do not hold"
        raise _format_error(path, problem) from error
    if described.byteorder == ">":
        little = described.newbyteorder("<").str
        problem = (
            f"has elements of dtype {described.str!r}, big endian; save array.astype({little!r})"
        )
        raise _format_error(path, problem)
    if fortran and len(shape) > 1:
        raise _format_error(
            path, "is in Fortran order, so its rows are in pieces; save it in C order"
        )
    return _plain_layout(path, _check_shape(path, shape), dtype, file.tell())


def torch_dtype(dtype: np.dtype) -> torch.dtype:
    """Return torch's dtype for NumPy's of any byte order; raise TypeError where it has none."""
    return torch.from_numpy(np.empty(0, dtype.newbyteorder("="))).dtype


def _safetensors_layout(file: Any, path: str, key: str) -> RowLayout:
    """Read the place of one tensor of a file in Hugging Face's format."""
    if not key:
        raise ValueError(f"source={path!r}: which tensor of it? Write {path}#name")
    try:
        header = SafetensorsHeader(file, path)
        extent = header.extent_of(key) if key in header.names else None
    except ValueError as error:
        raise StoreError(str(error), path=path) from error
    if extent is None:
        some = ", ".join(header.names[:8]) + (", ..." if len(header.names) > 8 else "")
        raise StoreUnavailableError(f"{path} has no tensor {key!r}; it has {some}", path=path)
    if extent.dtype is None:
        problem = f"holds {key!r} as {extent.dtype_name}, which tables do not hold"
        raise _format_error(path, problem)
    return _plain_layout(path, extent.shape, extent.dtype, extent.offset, key)


def _check_shape(path: str, lengths: Any) -> tuple[int, ...]:
    """Return the shape that a header names, if a table can have it."""
    if not isinstance(lengths, list | tuple) or not all(
        type(each) is int and 0 <= each <= _MAX_COUNT for each in lengths
    ):
        raise _format_error(path, f"has a damaged header: its shape is {lengths!r}")
    if math.prod(lengths) > _MAX_COUNT:
        raise _format_error(
            path, f"has a damaged header: no file has as many bytes as {lengths!r} needs"
        )
    return tuple(lengths)


def _plain_layout(
    path: str, shape: tuple[int, ...], dtype: torch.dtype, offset: int, key: str = ""
) -> RowLayout:
    """Return the layout of rows without a gap."""
    if not shape:
        raise _format_error(path, "holds a scalar, not a table of shape (num_rows, *row)")
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    return RowLayout(
        path=path, shape=shape, dtype=dtype, offset=offset, block_bytes=row_bytes, key=key
    )
