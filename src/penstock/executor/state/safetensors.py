"""Safetensors files, read and written tensor by tensor, in pieces that fit into memory.

The format (github.com/huggingface/safetensors): the length of a JSON text (8 bytes, little endian),
the text (for each name `dtype`, `shape` and `data_offsets` in what follows), the bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

import torch

from penstock.errors import StoreReadError
from penstock.memory.raw_memory import MAX_VIEW_BYTES, view_at

_DTYPES = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8},
    **{"U8": torch.uint8, "BOOL": torch.bool},
}
_NAME_OF_DTYPE = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 64 * 2**20  # more than this is no header
_ALIGNMENT_BYTES = 8


class SafetensorsFile:
    """A file from which single tensors are read.

    Args:
        path: The file.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is no safetensors file, or a damaged one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        with open(self.path, "rb") as file:
            total = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, total - 8):
                raise ValueError(f"{self.path} is no safetensors file: its header has no length")
            text = file.read(length)
        self._begin = 8 + length
        try:
            self._entries = _entries(json.loads(text), total - self._begin)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{self.path} is no safetensors file, or damaged: {error}") from error

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def form(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape of a tensor."""
        dtype, shape, _, _ = self._entries[name]
        return dtype, shape

    def read(self, name: str, tensor: torch.Tensor) -> None:
        """Read a tensor of the same dtype and shape into memory that is there.

        Raises:
            StoreReadError: The file ends early, or cannot be read.
        """
        _, _, begin, end = self._entries[name]
        is_there = tensor.device.type == "cpu" and tensor.is_contiguous()
        place = tensor if is_there else torch.empty(tensor.shape, dtype=tensor.dtype)
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self._begin + begin)
            for piece in _pieces(place.data_ptr(), end - begin):
                while len(piece):
                    count = file.readinto(piece)
                    if not count:
                        raise StoreReadError(
                            f"{self.path} ends in the middle of {name!r}", path=self.path
                        )
                    piece = piece[count:]
        if place is not tensor:
            tensor.copy_(place)


def save_safetensors(tensors: Mapping[str, torch.Tensor], path: str | os.PathLike[str]) -> None:
    """Write tensors to a safetensors file, one after the other; no copy of them all is made.

    Example:
        >>> save_safetensors(model.state_dict(), "model.safetensors")  # doctest: +SKIP

    Tensors of several names that are the same memory (tied weights) are written once; the file's
    metadata maps the other names to the one that is there, as safetensors' own `save_model` does.

    Args:
        tensors: By name, as `state_dict()` returns them, on any device.
        path: The file; it is there when it is complete, and not before.

    Raises:
        ValueError: A tensor has a dtype that the format has not.
        OSError: The file cannot be written.
    """
    header: dict[str, Any] = {}
    metadata = {"format": "pt"}
    first: dict[tuple[object, ...], str] = {}
    written: dict[str, torch.Tensor] = {}
    at = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAME_OF_DTYPE:
            known = ", ".join(map(str, _NAME_OF_DTYPE))
            raise ValueError(f"{name} is {tensor.dtype}; safetensors here has {known}")
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and first.setdefault(memory, name) != name:
            metadata[name] = first[memory]
            continue
        written[name] = tensor
        num_bytes = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAME_OF_DTYPE[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + num_bytes],
        }
        at += num_bytes
    text = json.dumps({"__metadata__": metadata, **header}).encode()
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    path = os.fspath(path)
    unfinished = f"{path}.{os.getpid()}.unfinished"
    try:
        with open(unfinished, "wb", buffering=0) as file:
            for piece in (len(text).to_bytes(8, "little"), text):
                _write(file, memoryview(piece))
            for tensor in written.values():
                whole = tensor.detach().cpu().contiguous()
                for piece in _pieces(whole.data_ptr(), whole.numel() * whole.element_size()):
                    _write(file, piece)
        os.replace(unfinished, path)
    except BaseException:
        if os.path.exists(unfinished):
            os.unlink(unfinished)
        raise


def _write(file: Any, piece: memoryview) -> None:
    while len(piece):
        piece = piece[file.write(piece) :]


def _pieces(address: int, num_bytes: int) -> list[memoryview]:
    starts = range(0, num_bytes, MAX_VIEW_BYTES)
    return [view_at(address + start, min(MAX_VIEW_BYTES, num_bytes - start)) for start in starts]


def _entries(
    header: Mapping[str, Any], num_bytes: int
) -> dict[str, tuple[torch.dtype, tuple[int, ...], int, int]]:
    entries = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype, shape = _DTYPES.get(entry["dtype"]), tuple(map(int, entry["shape"]))
        begin, end = map(int, entry["data_offsets"])
        if dtype is None:
            continue  # no parameter here has such a dtype: to be asked for, it counts as missing
        count = dtype.itemsize
        for extent in shape:
            count *= extent
        if not 0 <= begin <= end <= num_bytes or end - begin != count or min(shape, default=0) < 0:
            raise ValueError(f"{name!r} is not where the header says")
        entries[name] = (dtype, shape, begin, end)
    return entries
