"""Headers of files: what is read from them, and what is refused."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import struct
import zlib

import numpy as np
import pytest
import torch

from penstock.errors import StoreError, StoreFullError, StoreUnavailableError, StoreWriteError
from penstock.memory import _transfers
from penstock.unified import empty, unify
from penstock.unified.file import layout as file_layout
from penstock.unified.file import table as file_table
from penstock.unified.file.layout import create, open_layout
from penstock.unified.file.table import write_file


@pytest.mark.parametrize(
    "dtype", ["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u8", "?", "c8"]
)
@pytest.mark.parametrize("shape", [(7,), (7, 3), (7, 3, 2), (0, 3), (7, 0)])
@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
def test_npy(tmp_path, dtype, shape, version):
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    with open(tmp_path / "x.npy", "wb") as file:
        np.lib.format.write_array(file, array, version=version)
    layout = open_layout(tmp_path / "x.npy")
    content = (tmp_path / "x.npy").read_bytes()
    assert layout.shape == shape
    assert layout.dtype == torch.from_numpy(array).dtype
    assert layout.end == len(content)
    for row in range(layout.num_rows):
        start = layout.row_offset(row)
        assert content[start : start + layout.row_bytes] == array[row].tobytes()


def write_safetensors(path, tensors: dict[str, tuple[str, list[int], bytes]]) -> None:
    """By hand, from the format's description."""
    entries, content = {"__metadata__": {"format": "pt"}}, b""
    for name, (dtype, shape, part) in tensors.items():
        offsets = [len(content), len(content) + len(part)]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        content += part
    text = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content)


def test_safetensors(tmp_path):
    path = tmp_path / "x.safetensors"
    table = torch.randn(5, 4).bfloat16()
    part = table.view(torch.int16).numpy().tobytes()
    write_safetensors(path, {"a": ("I64", [1], b"12345678"), "b.c": ("BF16", [5, 4], part)})
    layout = open_layout(f"{path}#b.c")
    assert (layout.shape, layout.dtype, layout.row_bytes) == ((5, 4), torch.bfloat16, 8)
    assert path.read_bytes()[layout.row_offset(2) :][:8] == part[16:24]
    with pytest.raises(StoreUnavailableError, match=r"no tensor 'd'; it has a, b\.c"):
        open_layout(f"{path}#d")
    with pytest.raises(ValueError, match=r"which tensor of it\? Write .*x\.safetensors#name"):
        open_layout(path)


@pytest.mark.parametrize("row", [(), (1,), (128,), (150,), (1024,), (1025,), (3, 700)])
def test_native_rows_lie_in_one_page_or_begin_on_a_sector(tmp_path, row):
    made = create(tmp_path / "table", (50, *row), torch.float32)
    layout = open_layout(tmp_path / "table")
    assert layout == made
    assert (tmp_path / "table").stat().st_size >= layout.end
    ends = [(layout.row_offset(r), layout.row_offset(r) + layout.row_bytes) for r in range(50)]
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
    for start, end in ends:
        if layout.row_bytes <= 4096:
            assert start // 4096 == (end - 1) // 4096
        else:
            assert start % 512 == 0


def test_a_new_file_does_not_replace_one(tmp_path):
    create(tmp_path / "table", (3, 2), torch.int8)
    with pytest.raises(StoreUnavailableError, match="exists"):
        create(tmp_path / "table", (3, 2), torch.int8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.uint16])
@pytest.mark.parametrize("shape", [(7, 3), (7,), (0, 3), (2, 0)])
def test_a_new_file_of_numpy_is_one_to_numpy(tmp_path, shape, dtype):
    made = create(tmp_path / "x.npy", shape, dtype)
    assert made == open_layout(tmp_path / "x.npy")
    found = torch.from_numpy(np.load(tmp_path / "x.npy"))
    assert found.shape == shape and found.dtype == dtype and not found.any()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("x.npy", "NumPy's format has no torch.bfloat16"),
        ("x.safetensors", "no table is made in that format"),
        ("x.safetensors#weight", "no table is made in that format"),
    ],
)
def test_a_name_of_another_format_makes_no_file(tmp_path, name, says):
    with pytest.raises(ValueError, match=says):
        create(tmp_path / name, (7, 3), torch.bfloat16)
    assert not list(tmp_path.iterdir())


def test_a_file_without_room_is_an_error_and_leaves_nothing(tmp_path, monkeypatch):
    def no_space(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_layout.os, "posix_fallocate", no_space)
    with pytest.raises(StoreFullError, match=r"cannot be made as a table of 1\.00 MiB: No space"):
        create(tmp_path / "table", (2**18 - 1024, 1), torch.float32)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["table", "table.npy"])
@pytest.mark.parametrize("moment", ["allocated", "headed", "half filled"])
def test_a_killed_process_leaves_no_part_of_a_new_file(tmp_path, monkeypatch, name, moment):
    """A part would be in the way of the next run, or pass for a table with rows of zeroes."""

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def read_rows(index: torch.Tensor, out: torch.Tensor) -> None:
        out.fill_(1)
        if index[0]:
            die()

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(file_table, "_BLOCK_BYTES", 64)
        if moment == "allocated":
            monkeypatch.setattr(os, "posix_fallocate", die)
        if moment == "headed":
            monkeypatch.setattr(os, "fsync", die)
            create(tmp_path / name, (50, 2), torch.float32)
        write_file(tmp_path / name, (50, 2), torch.float32, read_rows)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["table", "table.npy"])
def test_a_disk_that_fails_leaves_no_part_of_a_new_file(tmp_path, monkeypatch, name):
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(_transfers, "_pwritev", fail)
        with pytest.raises(StoreWriteError, match="Input/output error"):
            empty((3, 2), path=tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    assert not empty((3, 2), path=tmp_path / name)[torch.arange(3)].any()


def test_a_name_that_was_taken_meanwhile_is_not_replaced(tmp_path):
    def take(*_: object) -> None:
        (tmp_path / "table").write_bytes(b"of another process")

    with pytest.raises(StoreUnavailableError, match="exists"):
        create(tmp_path / "table", (3, 2), torch.int8, fill=take)
    assert (tmp_path / "table").read_bytes() == b"of another process"
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("shape", "path", "error", "says"),
    [
        ((2**62, 4), "table", ValueError, r"shape=\(4611686018427387904, 4\): no file has as many"),
        ((3, 2**61), "table.npy", ValueError, "no file has as many"),
        ((3, 2), b"table", TypeError, "path=b'table': expected a string"),
    ],
)
def test_tables_that_no_file_can_hold_are_refused(shape, path, error, says):
    with pytest.raises(error, match=says):
        empty(shape, path=path)


def damaged_native(content: bytes) -> bytes:
    return content[:20] + bytes([content[20] ^ 1]) + content[21:]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x", b"hello", "is no table"),
        ("x", b"", "is no table"),
        ("x.npy", b"", "is no .npy file"),
        ("x.npy", b"\x93NUMPY\x01\x00\x05\x00{{{{{", "damaged header"),
        ("x.npy", b"\x93NUMPY\x01\x00\x02\x00{}", "damaged header"),
        ("x.npy", b"\x93NUMPY\x02\x00\xff\xff\xff\xff", "damaged header"),
        ("x.safetensors#a", b"", "is no safetensors file"),
        ("x.safetensors#a", b"\xff" * 8, "is no safetensors file"),
        ("x.safetensors#a", b"\x02" + b"\0" * 7 + b"{{", "damaged header"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, name, content, says):
    (tmp_path / name.partition("#")[0]).write_bytes(content)
    with pytest.raises(StoreError, match=says):
        open_layout(tmp_path / name)


def test_kinds_of_npy_that_cannot_be_tables(tmp_path):
    for array, says in [
        (np.asfortranarray(np.zeros((3, 4))), "Fortran order"),
        (np.zeros(3, dtype=">f8"), "dtype '>f8'"),
        (np.zeros(3, dtype="U3"), "dtype '<U3'"),
        (np.zeros(3, dtype=[("a", "f4")]), "dtype"),
        (np.array(1.0), "a scalar"),
    ]:
        np.save(tmp_path / "x.npy", array)
        with pytest.raises(StoreError, match=says):
            open_layout(tmp_path / "x.npy")


def test_a_file_shorter_than_its_header_says(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((100, 10)))
    create(tmp_path / "table", (100, 10), torch.float64)
    for name in ("x.npy", "table"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: open_layout(tmp_path / name).end - 1])
        with pytest.raises(StoreError, match=r"shorter than its header says: .*\(100, 10\)"):
            open_layout(tmp_path / name)


def test_a_damaged_native_header_is_noticed(tmp_path):
    create(tmp_path / "table", (3, 2), torch.int8)
    content = (tmp_path / "table").read_bytes()
    for place in range(8, 100):
        changed = bytearray(content)
        changed[place] ^= 0x40
        if content[place] == 0 and place > 90:
            break
        (tmp_path / "table").write_bytes(changed)
        with pytest.raises(StoreError):
            open_layout(tmp_path / "table")


SOUND = {
    "version": 1,
    "shape": [3, 2],
    "dtype": "int8",
    "rows_per_block": 2048,
    "block_bytes": 4096,
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": [-3, 2]},
        {"shape": [3.0, 2]},
        {"shape": [True, 2]},
        {"shape": [2**40, 2**40]},
        {"shape": []},
        {"shape": "32"},
        {"shape": None},
        {"dtype": "Tensor"},
        {"dtype": "load"},
        {"dtype": 7},
        {"rows_per_block": 0},
        {"rows_per_block": -1},
        {"rows_per_block": 4096},
        {"block_bytes": 0},
        {"block_bytes": -4096},
        {"block_bytes": 2**70},
        {"version": 2},
    ],
)
def test_fields_of_a_native_header_that_make_no_sense(tmp_path, wrong):
    """Their sum is right, so somebody wrote them that way."""
    write_native(tmp_path / "table", json.dumps({**SOUND, **wrong}))
    with pytest.raises(StoreError, match=r"has a damaged header|has version 2"):
        open_layout(tmp_path / "table")


@pytest.mark.parametrize("text", ["[]", "7", "{}", '{"version": 1}', "nonsense", '"version"'])
def test_a_native_header_that_is_none(tmp_path, text):
    write_native(tmp_path / "table", text)
    with pytest.raises(StoreError, match="has a damaged header"):
        open_layout(tmp_path / "table")


def test_a_sound_native_header(tmp_path):
    write_native(tmp_path / "table", json.dumps(SOUND))
    assert open_layout(tmp_path / "table").shape == (3, 2)


def write_native(path, text: str) -> None:
    """By hand, from the format's description."""
    content = text.encode()
    header = b"PENSTOCK" + struct.pack("<II", len(content), zlib.crc32(content)) + content
    path.write_bytes(header.ljust(8192, b"\0"))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "I8", "shape": [2, 3], "data_offsets": [0, 7]},
        {"dtype": "I8", "shape": [2, 3], "data_offsets": [-6, 0]},
        {"dtype": "I8", "shape": [2, 3], "data_offsets": [0.0, 6.0]},
        {"dtype": "I8", "shape": [2, 3], "data_offsets": [6]},
        {"dtype": "I8", "shape": [-2, -3], "data_offsets": [0, 6]},
        {"dtype": "I8", "shape": 6, "data_offsets": [0, 6]},
        {"dtype": "I8", "shape": [2, 3]},
        [],
    ],
)
def test_entries_of_safetensors_that_make_no_sense(tmp_path, entry):
    text = json.dumps({"a": entry}).encode()
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(6))
    with pytest.raises(StoreError, match="has a damaged header"):
        open_layout(f"{tmp_path}/x.safetensors#a")


def test_shapes_of_npy_that_make_no_sense(tmp_path):
    for shape in ("(-2, 3)", "(2.0, 3)", "(99999999999, 99999999999)"):
        text = f"{{'descr': '|i1', 'fortran_order': False, 'shape': {shape}}}".encode()
        start = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text))
        (tmp_path / "x.npy").write_bytes(start + text + bytes(6))
        with pytest.raises(StoreError, match="has a damaged header"):
            open_layout(tmp_path / "x.npy")


def test_a_missing_file(tmp_path):
    with pytest.raises(StoreUnavailableError, match=r"x\.npy cannot be opened: No such file"):
        open_layout(tmp_path / "x.npy")


@pytest.mark.parametrize("name", ["x", "x.npy", "x.safetensors#a"])
def test_a_pipe_is_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / name.partition("#")[0])
    with pytest.raises(StoreUnavailableError, match="a device, a pipe or a socket; give the path"):
        unify(tmp_path / name)
