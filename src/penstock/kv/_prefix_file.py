"""Format of prefix files: keys and values of a prefilled cache, to be started from where they lie.

    preamble  4096 bytes: magic, version, place and checksum of the header, length, own checksum
    records   per layer its pages, in the order in which attention reads them; a record takes a
              multiple of 4096 bytes
    sections  checksums of records, tables of pages, unfinished blocks, the caller's tensors
    header    JSON: shapes, places, lengths and checksums of the above, and the caller's description

Every byte is covered by a checksum (CRC-32). Preamble, header and sections are read and checked
when a file is opened, a record when it is read for the first time, or after the file was written
to.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.errors import PrefixFileError
from penstock.kv._layout import BlockLayout
from penstock.memory import NewFile, WholeFile
from penstock.memory.pages import DIRECT_IO_BYTES
from penstock.memory.raw_memory import MAX_VIEW_BYTES, view_at

VERSION = 1
_MAGIC = b"PENSTKVP"
_PREAMBLE = struct.Struct("<8sIIQQQ")  # magic, version, header: checksum, offset, bytes; length
_CHECKSUM = struct.Struct("<I")
_ZEROS = memoryview(bytes(DIRECT_IO_BYTES))
_RECORDS_PER_WRITE = 256
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_MAKE_AGAIN = "make it again with save()"


@dataclass(frozen=True)
class SavedLayer:
    """One layer of a prefix file.

    Attributes:
        layer: Its number in the pool.
        layout: Shapes of its records.
        table: Page of each full block, int64 `(B, num_blocks)`, from 0; -1 where there is none.
        tail_keys: Of the unfinished block, `(B, H, n, key_dim)`.
        tail_values: `(B, H, n, value_dim)`.
        records: Its records in the file; None while it is written.
    """

    layer: int
    layout: BlockLayout
    table: np.ndarray
    tail_keys: torch.Tensor
    tail_values: torch.Tensor
    records: PrefixRecords | None = None

    @property
    def num_pages(self) -> int:
        """Pages in the file."""
        return int(self.table.max(initial=-1)) + 1


class PrefixWriter:
    """Writing of a prefix file, layer by layer.

    Args:
        file: The new file.
    """

    def __init__(self, file: NewFile) -> None:
        self._file = file
        self._at = DIRECT_IO_BYTES
        self._layers: list[tuple[SavedLayer, int, np.ndarray]] = []

    def add_layer(self, saved: SavedLayer, groups: Iterator[tuple[np.ndarray, np.ndarray]]) -> None:
        """Write the records of a layer.

        Args:
            saved: The layer, with the file's layout.
            groups: Numbers of records, page * H + head, all of them in order and in groups, and the
                addresses of the records, whose padding is not read.
        """
        layout = saved.layout
        checksums = np.zeros(saved.num_pages * layout.num_heads, dtype=np.uint32)
        for numbers, addresses in groups:
            for i in range(0, len(numbers), _RECORDS_PER_WRITE):
                some = slice(i, i + _RECORDS_PER_WRITE)
                self._write_records(saved, numbers[some], addresses[some], checksums)
        self._layers.append((saved, self._at, checksums))
        self._at += checksums.size * layout.record_bytes

    def _write_records(
        self, saved: SavedLayer, numbers: np.ndarray, addresses: np.ndarray, checksums: np.ndarray
    ) -> None:
        assert (np.diff(numbers) == 1).all(), "records come in order"
        record_bytes = saved.layout.record_bytes
        padding = _ZEROS[: record_bytes - saved.layout.used_bytes]
        buffers = []
        for number, address in zip(numbers.tolist(), addresses.tolist(), strict=True):
            views = [*_views(address, saved.layout.used_bytes), padding]
            checksums[number] = _checksum_of(views)
            buffers += views
        self._file.write(self._at + int(numbers[0]) * record_bytes, buffers)

    def finish(self, *, header: dict[str, Any], tensors: Mapping[str, torch.Tensor | None]) -> None:
        """Write all but the records, and give the file its name.

        Args:
            header: Further entries of the header, of what JSON has.
            tensors: The caller's int64 tensors; None is none.
        """
        layers = [
            {
                "layer": saved.layer,
                "num_heads": saved.layout.num_heads,
                "block_tokens": saved.layout.block_tokens,
                "key_dim": saved.layout.key_dim,
                "value_dim": saved.layout.value_dim,
                "dtype": str(saved.layout.dtype).removeprefix("torch."),
                "offset": offset,
                "table": self._add(torch.from_numpy(saved.table)),
                "checksums": self._add(torch.from_numpy(checksums.view(np.int32))),
                "tail_keys": self._add(saved.tail_keys),
                "tail_values": self._add(saved.tail_values),
            }
            for saved, offset, checksums in self._layers
        ]
        kept = {name: self._add(each) for name, each in tensors.items() if each is not None}
        text = json.dumps({**header, "layers": layers, "tensors": kept}).encode()
        self._file.write(self._at, [memoryview(text)])
        preamble = _PREAMBLE.pack(
            _MAGIC, VERSION, zlib.crc32(text), self._at, len(text), self._at + len(text)
        )
        preamble = preamble.ljust(DIRECT_IO_BYTES - _CHECKSUM.size, b"\0")
        preamble += _CHECKSUM.pack(zlib.crc32(preamble))
        self._file.write(0, [memoryview(preamble)])
        self._file.finish()

    def _add(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Write a tensor, and return its entry in the header."""
        flat = tensor.reshape(-1)
        content = flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
        entry = {
            "offset": self._at,
            "shape": [*tensor.shape],
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "checksum": zlib.crc32(content),
        }
        self._file.write(self._at, [memoryview(content)])
        self._at += len(content)
        return entry


class PrefixFile:
    """A prefix file that is open for reading; only its header and sections were read.

    Attributes:
        path: Its name.
        header: The entries that the writer's caller gave.
        layers: Its layers.
        tensors: The caller's tensors, by name.
        read_bytes: Bytes read so far, those of records not included.

    Args:
        path: Its name.

    Raises:
        StoreUnavailableError: It is missing, or cannot be read.
        PrefixFileError: It is no prefix file, damaged, or of a newer version.
    """

    def __init__(self, path: str) -> None:
        self.file = WholeFile(path)
        self.path = self.file.path
        self.read_bytes = 0
        try:
            self.header = self._read_header()
            self.layers = [self._read_layer(entry) for entry in self.header.pop("layers")]
            tensors = self.header.pop("tensors")
            self.tensors = {name: self._read_tensor(entry) for name, entry in tensors.items()}
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Close it; no read may be under way. Further calls do nothing."""
        self.file.close()

    def refuse(self, problem: str) -> PrefixFileError:
        """Return an error that names the file."""
        return _refuse(self.path, problem)

    def check_block_tokens(self, saved: SavedLayer, block_tokens: int) -> None:
        """Raise `PrefixFileError` if blocks of a layer have another length."""
        if saved.layout.block_tokens != block_tokens:
            raise self.refuse(
                f"has blocks of {saved.layout.block_tokens} tokens and block_tokens="
                f"{block_tokens}; pass block_tokens={saved.layout.block_tokens}"
            )

    def _read_header(self) -> dict[str, Any]:
        preamble = self._read(0, DIRECT_IO_BYTES)
        if not preamble.startswith(_MAGIC):
            raise self.refuse("is no prefix file; pass the path of one that save() wrote")
        content, end = preamble[: -_CHECKSUM.size], preamble[-_CHECKSUM.size :]
        if len(preamble) < DIRECT_IO_BYTES or end != _CHECKSUM.pack(zlib.crc32(content)):
            raise self.refuse(f"is damaged in its first {DIRECT_IO_BYTES} bytes; {_MAKE_AGAIN}")
        _, version, checksum, offset, num_bytes, length = _PREAMBLE.unpack_from(preamble)
        if version != VERSION:
            raise self.refuse(
                f"has version {version} of the format, and this Penstock reads version {VERSION}; "
                f"install the Penstock that wrote it, or {_MAKE_AGAIN}"
            )
        if self.file.num_bytes != length:
            raise self.refuse(
                f"is damaged: it has {self.file.num_bytes} bytes and should have {length}; copy it "
                f"anew, or {_MAKE_AGAIN}"
            )
        text = self._read(offset, num_bytes)
        if len(text) != num_bytes or zlib.crc32(text) != checksum:
            raise self.refuse(f"is damaged in its header at offset {offset}; {_MAKE_AGAIN}")
        return json.loads(text)

    def _read_layer(self, entry: dict[str, Any]) -> SavedLayer:
        layout = BlockLayout(
            entry["num_heads"],
            entry["block_tokens"],
            entry["key_dim"],
            entry["value_dim"],
            _DTYPES[entry["dtype"]],
            DIRECT_IO_BYTES,
        )
        checksums = self._read_tensor(entry["checksums"]).numpy().view(np.uint32)
        return SavedLayer(
            entry["layer"],
            layout,
            self._read_tensor(entry["table"]).numpy(),
            self._read_tensor(entry["tail_keys"]),
            self._read_tensor(entry["tail_values"]),
            PrefixRecords(self.file, entry["offset"], layout, checksums),
        )

    def _read_tensor(self, entry: dict[str, Any]) -> torch.Tensor:
        dtype = getattr(torch, entry["dtype"])
        num_bytes = math.prod(entry["shape"]) * dtype.itemsize
        content = bytearray(self._read(entry["offset"], num_bytes))
        if len(content) != num_bytes or zlib.crc32(content) != entry["checksum"]:
            raise self.refuse(f"is damaged at offset {entry['offset']}; {_MAKE_AGAIN}")
        if not num_bytes:
            return torch.empty(entry["shape"], dtype=dtype, device="cpu")
        return torch.frombuffer(content, dtype=dtype).reshape(entry["shape"])

    def _read(self, offset: int, num_bytes: int) -> bytes:
        content = self.file.read_bytes(offset, num_bytes)
        self.read_bytes += len(content)
        return content


class PrefixRecords:
    """Records of one layer of a prefix file, page after page.

    Args:
        file: The file.
        offset: Byte of the file at which they begin.
        layout: Their layout.
        checksums: Of the records, uint32.
    """

    def __init__(
        self,
        file: WholeFile,
        offset: int,
        layout: BlockLayout,
        checksums: np.ndarray,
    ) -> None:
        self._file = file
        self._offset = offset
        self._layout = layout
        self._checksums = checksums
        self._checked = np.zeros(len(checksums), dtype=np.int64)  # count of changes at the check

    def read(self, begin: int, address: int, num_bytes: int) -> None:
        """Read records into memory.

        Args:
            begin: Byte among the records at which the first one begins.
            address: Where they go.
            num_bytes: A multiple of the bytes of a record.

        Raises:
            StoreReadError: The file could not be read.
            PrefixFileError: A record is damaged; what is at `address` must not be used.
        """
        file, record_bytes = self._file, self._layout.record_bytes
        file.read(self._offset + begin, address, num_bytes)
        num_changes = file.count_changes()  # after the read: a later change is of no matter to it
        first = begin // record_bytes
        for number in range(first, first + num_bytes // record_bytes):
            if self._checked[number] != num_changes:
                views = _views(address + (number - first) * record_bytes, record_bytes)
                if _checksum_of(views) != self._checksums[number]:
                    place = self._offset + number * record_bytes
                    raise _refuse(
                        file.path,
                        f"is damaged in the {record_bytes} bytes at offset {place}; {_MAKE_AGAIN}",
                    )
                self._checked[number] = num_changes


def _refuse(path: str, problem: str) -> PrefixFileError:
    return PrefixFileError(f"prefix file {path!r} {problem}", path=path)


def _checksum_of(views: list[memoryview]) -> int:
    checksum = 0
    for view in views:
        checksum = zlib.crc32(view, checksum)
    return checksum


def _views(address: int, num_bytes: int) -> list[memoryview]:
    starts = range(0, num_bytes, MAX_VIEW_BYTES)
    return [view_at(address + at, min(MAX_VIEW_BYTES, num_bytes - at)) for at in starts]
