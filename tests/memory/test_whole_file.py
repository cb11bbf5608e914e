"""Files written as a whole: nothing of them is left before they are complete."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from _round_trips import BLOCK, Memory
from penstock.errors import StoreFullError, StoreReadError, StoreUnavailableError, StoreWriteError
from penstock.memory import NewFile, WholeFile, _transfers, _whole_file


@pytest.fixture(params=["nameless", "named"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """File systems with and without nameless files."""
    if request.param == "named":
        monkeypatch.setattr(_whole_file, "_O_TMPFILE", 0)
    return request.param


@pytest.mark.usefixtures("kind")
def test_a_file_has_its_name_when_it_is_complete(tmp_path: Path):
    path = tmp_path / "file"
    for text in (b"first", b"second"):
        with NewFile(path) as file:
            file.write(0, [memoryview(text[:2]), memoryview(b""), memoryview(text[2:])])
            assert not path.exists() or path.read_bytes() == b"first"
            file.finish()
        assert path.read_bytes() == text
        assert os.listdir(tmp_path) == ["file"]
    assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.usefixtures("kind")
def test_an_error_leaves_nothing_and_the_old_file_as_it_was(tmp_path: Path):
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with contextlib.suppress(ZeroDivisionError), NewFile(path) as file:
        file.write(0, [memoryview(b"new")])
        raise ZeroDivisionError
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]


def test_the_rest_of_a_killed_rename_is_taken_away(tmp_path: Path):
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / ".file.complete").write_bytes(b"of a process that was killed")
    with NewFile(tmp_path / "file") as file:
        file.write(0, [memoryview(b"new")])
        file.finish()
    assert (tmp_path / "file").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["file"]


@pytest.mark.usefixtures("kind")
def test_a_limit_of_the_file_size(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * BLOCK, hard))
    try:
        with NewFile(tmp_path / "file") as file:
            file.write(0, [memoryview(bytes(2 * BLOCK))])
            with pytest.raises(StoreFullError, match=r"file.*does not fit.*Nothing is") as caught:
                file.write(2 * BLOCK, [memoryview(b"one more")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.errno == errno.EFBIG
    assert os.listdir(tmp_path) == []


def test_short_and_stuck_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def write_little(fd: int, buffers: list[memoryview], offset: int) -> int:
        return os.pwritev(fd, [buffers[0][:3]], offset)

    monkeypatch.setattr(_transfers, "_pwritev", write_little)
    with NewFile(tmp_path / "file") as file:
        file.write(0, [memoryview(b"abcde"), memoryview(b"fg"), memoryview(b"hijklmn")])
        file.finish()
    assert (tmp_path / "file").read_bytes() == b"abcdefghijklmn"
    monkeypatch.setattr(_transfers, "_pwritev", lambda *_: 0)
    with pytest.raises(StoreWriteError), NewFile(tmp_path / "other") as file:
        file.write(0, [memoryview(b"a")])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_signals_leave_nothing(tmp_path: Path, number: signal.Signals):
    program = (
        "import sys, time\n"
        "from penstock.memory import NewFile\n"
        "with NewFile(sys.argv[1]) as file:\n"
        "    file.write(0, [memoryview(bytes(2**20))])\n"
        "    print('ready', flush=True)\n"
        "    while True:\n"
        "        time.sleep(0.1)\n"
    )
    source = str(Path(_whole_file.__file__).parents[2])
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "file")],
        env={**os.environ, "PYTHONPATH": source},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == -number
    assert os.listdir(tmp_path) == []


def test_paths_that_cannot_be(tmp_path: Path):
    for path in (tmp_path / "none" / "file", tmp_path):
        with pytest.raises(StoreUnavailableError, match=str(path)):
            NewFile(path)
        with pytest.raises(StoreUnavailableError, match=str(path)):
            WholeFile(path)


def test_devices_and_pipes_are_neither_replaced_nor_waited_for(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    (tmp_path / "link").symlink_to(pipe)
    for path in (pipe, tmp_path / "link"):
        with pytest.raises(StoreUnavailableError, match="is a device, a pipe or a socket, which"):
            NewFile(path)
        with pytest.raises(StoreUnavailableError, match="It is a device, a pipe or a socket"):
            WholeFile(path)
    assert pipe.is_fifo()


def test_reading(tmp_path: Path):
    path, memory = tmp_path / "file", Memory(4 * BLOCK)
    content = np.random.default_rng(0).bytes(4 * BLOCK + 5)
    path.write_bytes(content)
    file = WholeFile(path)
    assert file.num_bytes == len(content)
    assert file.read_bytes(4 * BLOCK, 100) == content[-5:]
    for address in (memory.address, memory.address + 1):
        file.read(BLOCK, address, 2 * BLOCK)
        start = address - memory.address
        assert memory.bytes[start : start + 2 * BLOCK].tobytes() == content[BLOCK : 3 * BLOCK]
    changes = file.count_changes()
    path.unlink()
    path.write_bytes(b"another file")
    assert file.count_changes() == changes
    assert file.read_bytes(0, 10) == content[:10]
    file.close()


def test_a_file_that_changes_or_ends_while_it_is_open(tmp_path: Path):
    path, memory = tmp_path / "file", Memory(4 * BLOCK)
    path.write_bytes(bytes(4 * BLOCK))
    file = WholeFile(path)
    changes = file.count_changes()
    with path.open("r+b") as other:
        other.truncate(2 * BLOCK + 7)
    assert file.count_changes() > changes
    file.read(0, memory.address, 2 * BLOCK)
    with pytest.raises(StoreReadError, match="shorter than it was"):
        file.read(BLOCK, memory.address, 2 * BLOCK)
    file.close()
