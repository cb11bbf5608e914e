"""Safetensors files, read and written tensor by tensor, in pieces that fit into memory."""

from __future__ import annotations

import os
from collections.abc import Mapping

import torch

from penstock.errors import StoreReadError
from penstock.memory.files import open_whole
from penstock.memory.raw_memory import MAX_VIEW_BYTES, view_at
from penstock.memory.safetensors import SafetensorsHeader, TensorExtent, encode_header


class SafetensorsFile:
    """A file from which single tensors are read; torch has all their dtypes.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is no safetensors file, or a damaged one.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        with open(self.path, "rb") as file:
            header = SafetensorsHeader(file, self.path)
        self._extents: dict[str, tuple[torch.dtype, TensorExtent]] = {}
        for name in header.names:
            extent = header.extent_of(name)
            if not header.is_whole(extent):
                raise ValueError(f"{self.path} is damaged: it ends in the middle of {name!r}")
            if extent.dtype is not None:
                self._extents[name] = extent.dtype, extent

    def __contains__(self, name: object) -> bool:
        return name in self._extents

    def form_of(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return dtype and shape of a tensor."""
        dtype, extent = self._extents[name]
        return dtype, extent.shape

    def read(self, name: str, tensor: torch.Tensor) -> None:
        """Read a tensor into a tensor of the same dtype and shape.

        Raises:
            StoreReadError: The file ends early, or cannot be read.
        """
        _, extent = self._extents[name]
        is_direct = tensor.device.type == "cpu" and tensor.is_contiguous()
        place = tensor if is_direct else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        with open(self.path, "rb", buffering=0) as file:
            file.seek(extent.offset)
            for piece in _split(place.data_ptr(), extent.num_bytes):
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
        path: The file; it exists only once it is complete.

    Raises:
        ValueError: The format does not have a tensor's dtype.
        OSError: The file cannot be written.
    """
    metadata = {"format": "pt"}
    first: dict[tuple[object, ...], str] = {}
    written: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        memory = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and first.setdefault(memory, name) != name:
            metadata[name] = first[memory]
        else:
            written[name] = tensor
    forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in written.items()}
    with open_whole(path) as file:
        file.write(encode_header(forms, metadata))
        for tensor in written.values():
            whole = tensor.detach().cpu().contiguous()
            for piece in _split(whole.data_ptr(), whole.numel() * whole.element_size()):
                file.write(piece)


def _split(address: int, num_bytes: int) -> list[memoryview]:
    starts = range(0, num_bytes, MAX_VIEW_BYTES)
    return [view_at(address + start, min(MAX_VIEW_BYTES, num_bytes - start)) for start in starts]
