"""Headers of safetensors files: those of the safetensors package are read, and it reads ours."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from penstock.memory.safetensors import DTYPES, SafetensorsHeader, TensorExtent, encode_header


def read(path: Path) -> SafetensorsHeader:
    with open(path, "rb") as file:
        return SafetensorsHeader(file, str(path))


def write(path: Path, header: object, num_bytes: int = 6) -> Path:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(num_bytes))
    return path


def tensors() -> dict[str, torch.Tensor]:
    """One of each dtype; bool has no other values than 0 and 1."""
    bits = torch.arange(6, dtype=torch.uint8).bitwise_and(1)
    made = {str(dtype): bits.repeat(dtype.itemsize).view(dtype) for dtype in DTYPES.values()}
    return {**made, "matrix": torch.arange(6.0).view(2, 3), "scalar": torch.tensor(3.0), "b": torch.zeros(0)}


def bits_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def test_what_the_package_writes_is_found(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(tensors(), path, metadata={"format": "pt"})
    header, content = read(path), path.read_bytes()
    assert header.names == sorted(tensors()) and header.metadata == {"format": "pt"}
    for name, tensor in tensors().items():
        extent = header.extent_of(name)
        assert (extent.dtype, extent.shape) == (tensor.dtype, tuple(tensor.shape))
        assert header.is_whole(extent)
        there = content[extent.offset : extent.offset + extent.num_bytes]
        assert there == bits_of(tensor)


def test_the_package_reads_what_is_written(tmp_path):
    path = tmp_path / "x.safetensors"
    forms = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors().items()}
    with open(path, "wb") as file:
        file.write(encode_header(forms, {"format": "pt", "ä": "ö"}))
        for tensor in tensors().values():
            file.write(bits_of(tensor))
    loaded = load_file(path)
    assert set(loaded) == set(forms)
    for name, tensor in tensors().items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(
            loaded[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)
        )
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "ä": "ö"}


def test_a_dtype_that_the_format_has_not():
    with pytest.raises(ValueError, match=r"x is torch\.complex128; safetensors files hold"):
        encode_header({"x": (torch.complex128, (1,))}, {})


def test_a_dtype_that_torch_has_not(tmp_path):
    entry = {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}
    extent = read(write(tmp_path / "x", {"a": entry})).extent_of("a")
    assert (extent.dtype_name, extent.dtype, extent.num_bytes) == ("F4", None, 2)


@pytest.mark.parametrize(
    "content",
    [b"", b"12345", b"\xff" * 8, b"\x02" + b"\0" * 7 + b"{{", b"\x02" + b"\0" * 7 + b"12",
     b"\x02" + b"\0" * 7 + b"{}"[:1], struct.pack("<Q", 20_000) + b"[" * 20_000],
)  # fmt: skip
def test_what_is_no_such_file(tmp_path, content):
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(ValueError, match="x is no safetensors file"):
        read(tmp_path / "x")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "I8", "shape": [2, 3], "data_offsets": [0, 5]},
        {"dtype": "I8", "shape": [2, 3], "data_offsets": [6, 0]},
        {"dtype": "I8", "shape": [2, 3], "data_offsets": [-6, 0]},
        {"dtype": "I8", "shape": [2, 3], "data_offsets": [6]},
        {"dtype": "I8", "shape": [2.0, 3], "data_offsets": [0, 6]},
        {"dtype": "I8", "shape": [-2, -3], "data_offsets": [0, 6]},
        {"dtype": "I8", "shape": [True, 6], "data_offsets": [0, 6]},
        {"dtype": "I8", "shape": [2**62, 2], "data_offsets": [0, 2**63]},
        {"dtype": "I8", "shape": 6, "data_offsets": [0, 6]},
        {"dtype": "I8", "shape": [2, 3]},
        [],
    ],
)
def test_entries_that_make_no_sense_are_refused_when_they_are_asked_for(tmp_path, entry):
    good = {"dtype": "I8", "shape": [6], "data_offsets": [0, 6]}
    header = read(write(tmp_path / "x", {"a": entry, "good": good}))
    with pytest.raises(ValueError, match="x has a damaged header: 'a' "):
        header.extent_of("a")
    extent = header.extent_of("good")
    assert isinstance(extent, TensorExtent) and header.is_whole(extent)


def test_a_file_that_was_cut_short(tmp_path):
    entry = {"dtype": "I8", "shape": [6], "data_offsets": [0, 6]}
    header = read(write(tmp_path / "x", {"a": entry}, num_bytes=5))
    assert not header.is_whole(header.extent_of("a"))


def test_a_name_that_is_not_there(tmp_path):
    with pytest.raises(KeyError):
        read(write(tmp_path / "x", {})).extent_of("a")
