"""Headers of safetensors files: where each tensor's bytes lie, read and written.

The format (github.com/huggingface/safetensors): the length of a JSON text (8 bytes, little endian),
the text (for each name `dtype`, `shape` and `data_offsets` in what follows it), the bytes.

The `safetensors` package reads whole tensors or slices into new memory and tells no offsets; tables
are read row by row, and parameters into memory that is there.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from typing import Any, BinaryIO

import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""By the format's name of a dtype torch's."""
NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER_BYTES = 64 * 2**20  # more than this is no header
_MAX_BYTES = 2**62  # of a tensor: offsets stay below 2^63
_ALIGNMENT_BYTES = 8  # of the first tensor in the file


@dataclasses.dataclass(frozen=True, slots=True)
class TensorExtent:
    """A tensor's form, and the bytes of the file that hold it."""

    dtype_name: str
    """The format's name of its dtype."""
    shape: tuple[int, ...]
    """Its shape; it is stored contiguously in C order."""
    offset: int
    """Byte of the file at which it begins."""
    num_bytes: int
    """Its length."""

    @property
    def dtype(self) -> torch.dtype | None:
        """Its dtype; None where torch has none for the format's."""
        return DTYPES.get(self.dtype_name)


class SafetensorsHeader:
    """A file's header, from which nothing but the header is read.

    Example:
        >>> with open("model.safetensors", "rb") as file:  # doctest: +SKIP
        ...     extent = SafetensorsHeader(file, "model.safetensors").extent_of("0.weight")

    Args:
        file: The file, opened for reading in binary mode, at its beginning.
        path: Its path, for messages.

    Attributes:
        names: The tensors' names, sorted.
        metadata: The file's own texts by name.

    Raises:
        ValueError: It is no safetensors file, or its header is damaged.
    """

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._path = path
        self._file_bytes = os.fstat(file.fileno()).st_size
        num_bytes = int.from_bytes(file.read(8), "little")
        if not 2 <= num_bytes <= min(_MAX_HEADER_BYTES, self._file_bytes - 8):
            raise ValueError(f"{path} is no safetensors file: its first bytes are wrong")
        self._begin = 8 + num_bytes
        try:
            self._entries: dict[str, Any] = dict(json.loads(file.read(num_bytes)))
            self.metadata = dict(self._entries.pop("__metadata__", {}))
        except (ValueError, TypeError, RecursionError) as error:
            raise ValueError(f"{path} is no safetensors file: damaged header: {error}") from error
        self.names = sorted(self._entries)

    def extent_of(self, name: str) -> TensorExtent:
        """Return where a tensor lies; whether the file is long enough is not asked.

        Raises:
            KeyError: There is no tensor of this name.
            ValueError: Its entry is damaged.
        """
        entry = self._entries[name]
        try:
            dtype_name, shape = str(entry["dtype"]), tuple(entry["shape"])
            begin, end = entry["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._damaged(name, f"is {entry!r}") from error
        if not _are_counts(shape) or math.prod(shape) > _MAX_BYTES:
            raise self._damaged(name, f"has the shape {shape}")
        if not _are_counts((begin, end)) or begin > end:
            raise self._damaged(name, f"lies from byte {begin} to {end}")
        extent = TensorExtent(dtype_name, shape, self._begin + begin, end - begin)
        if extent.dtype and extent.num_bytes != math.prod(shape) * extent.dtype.itemsize:
            raise self._damaged(
                name, f"lies from byte {begin} to {end}, as {dtype_name} of shape {shape}"
            )
        return extent

    def is_whole(self, extent: TensorExtent) -> bool:
        """Return whether the file had all bytes of a tensor when its header was read."""
        return extent.offset + extent.num_bytes <= self._file_bytes

    def _damaged(self, name: str, problem: str) -> ValueError:
        return ValueError(f"{self._path} has a damaged header: {name!r} {problem}")


def encode_header(
    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Return the bytes of a file before its tensors, which follow in their order without a gap.

    Example:
        >>> len(encode_header({"x": (torch.float32, (2, 3))}, {"format": "pt"})) % 8
        0

    Args:
        tensors: By name the dtype and the shape.
        metadata: The file's own texts by name.

    Raises:
        ValueError: The format has no such dtype.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in NAME_OF_DTYPE:
            known = ", ".join(map(str, NAME_OF_DTYPE))
            raise ValueError(f"{name} is {dtype}; safetensors files hold {known}")
        end = begin + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": NAME_OF_DTYPE[dtype],
            "shape": list(shape),
            "data_offsets": [begin, end],
        }
        begin = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def _are_counts(numbers: Iterable[Any]) -> bool:
    return all(type(number) is int and 0 <= number <= _MAX_BYTES for number in numbers)
