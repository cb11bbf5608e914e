"""Writes of rows: whoever is killed leaves all of them or none, in one file or in several."""

from __future__ import annotations

import errno
import os
import signal
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.errors import StoreError, StoreFullError, StoreUnavailableError, StoreWriteError
from penstock.unified import _row_writer, unify
from penstock.unified._row_file import RowLayout, create, native_layout, open_layout
from penstock.unified._row_writer import RowWriter, put_together, recover

ROWS = np.arange(0, 200, 2)
NAMES = ("table", "table.mean", "table.step")  # the first one leads


@pytest.fixture
def folder(real_disk, tmp_path_factory) -> Path:
    """A directory on a real disk."""
    return tmp_path_factory.mktemp("tables")


def content_of(layout: RowLayout, count: int, value: int) -> np.ndarray:
    return np.full((count, layout.row_bytes), value, dtype=np.uint8)


def make_files(folder: Path) -> list[RowLayout]:
    """Files with rows of different lengths; the last one has a single row."""
    shapes = [(200, 512), (200, 3), (1,)]
    for name, shape in zip(NAMES, shapes, strict=True):
        create(folder / name, shape, torch.float32)
    return [open_layout(folder / name) for name in NAMES]


def put_in_all(layouts: list[RowLayout], value: int) -> None:
    writers = [RowWriter(layout) for layout in layouts]
    rows = [ROWS if layout.num_rows == 200 else np.array([0]) for layout in layouts]
    put_together(
        [
            (writer, each, content_of(writer.layout, len(each), value))
            for writer, each in zip(writers, rows, strict=True)
        ]
    )


def values_in(folder: Path, name: str) -> set[int]:
    """The bytes of the rows that are written; those between them must be zero."""
    layout, content = open_layout(folder / name), (folder / name).read_bytes()
    starts = [layout.row_offset(row) for row in range(layout.num_rows)]
    rows = [content[start : start + layout.row_bytes] for start in starts]
    assert not any(any(row) for row in rows[1::2])
    return {value for row in rows[::2] for value in row}


def killed_at(call: int, work: Callable[[], None]) -> bool:
    """Do it in a child that kills itself behind the `call`-th access to a file; False if it ended.

    The child is a fork: it uses no operators of torch.
    """
    child = os.fork()
    if child == 0:
        made = 0

        def counted(function: Callable) -> Callable:
            def wrapped(*arguments):
                nonlocal made
                made += 1
                if made == call and function is original_rows:
                    tear(*arguments)
                result = function(*arguments)
                if made == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return wrapped

        original_rows = _row_writer._write_rows
        _row_writer._write = counted(_row_writer._write)
        _row_writer._write_rows = counted(original_rows)
        _row_writer.os.fdatasync = counted(os.fdatasync)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def tear(fd: int, layout: RowLayout, rows: np.ndarray, content: np.ndarray) -> None:
    """Write a part of the rows, the last of them by half, and be killed."""
    half = len(rows) // 2
    for row, new in zip(rows[:half].tolist(), content[:half], strict=True):
        os.pwrite(fd, new.tobytes(), layout.row_offset(row))
    os.pwrite(fd, content[half, : layout.row_bytes // 2].tobytes(), layout.row_offset(rows[half]))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("opened_first", [0, 1, 2])
def test_a_killed_process_leaves_all_rows_of_all_files_or_none(folder, opened_first):
    """Killed behind every single write, sync and part of the rows, one after the other, and then
    opened by the file that leads or by one that follows.
    """
    outcomes = []
    for call in range(1, 100):
        place = folder / str(call)
        place.mkdir()
        layouts = make_files(place)
        if not killed_at(call, lambda layouts=layouts: put_in_all(layouts, 7)):
            break
        assert recover(layouts[opened_first]) in (0, 201)
        found = {name: values_in(place, name) for name in NAMES}
        assert found in ({name: {0} for name in NAMES}, {name: {7} for name in NAMES}), call
        outcomes.append(found["table"] == {7})
        assert [recover(layout) for layout in layouts] == [0, 0, 0]
        put_in_all(layouts, 9)  # and writing goes on
        assert all(values_in(place, name) == {9} for name in NAMES)
    # A header for each of the journals, what it covers and the rows: there is that much to survive.
    assert len(outcomes) > 15 and outcomes == sorted(outcomes) and set(outcomes) == {False, True}


def test_journals_go_with_their_writers(folder):
    layouts = make_files(folder)
    put_in_all(layouts, 1)
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    put_in_all([layouts[1], layouts[0]], 2)  # another one may lead
    put_in_all(layouts[1:], 3)
    assert [values_in(folder, name) for name in NAMES] == [{2}, {3}, {3}]
    assert unify(folder / NAMES[1])[2].view(torch.uint8).tolist() == [3] * 12
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)


def test_a_file_that_followed_is_written_alone(folder):
    layouts = make_files(folder)[:2]
    writers = [RowWriter(layout) for layout in layouts]
    parts = [(writer, ROWS, content_of(writer.layout, 100, 1)) for writer in writers]
    put_together(parts)
    writers[1].put(ROWS, content_of(layouts[1], 100, 2))
    put_together(parts[:1])
    put_together(parts[::-1])
    assert [values_in(folder, name) for name in NAMES[:2]] == [{1}, {1}]


# ------------------------------------------------------------------------ errors


def fails(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, "")

    return fail


def test_rows_that_a_killed_process_tore_are_mended(folder, monkeypatch):
    """Half of a row was written; the journal has all of it."""
    layout = create(folder / "table", (10, 512), torch.float32)
    writer = RowWriter(layout)

    def tear_one(fd, layout, rows, content):
        os.pwrite(fd, bytes(content[0][:100]), layout.row_offset(int(rows[0])))
        raise OSError(errno.EIO, "")

    with monkeypatch.context() as patch:
        patch.setattr(_row_writer, "_write_rows", tear_one)
        with pytest.raises(StoreWriteError, match="could not be written: Input/output error"):
            writer.put(np.array([3]), content_of(layout, 1, 9))
    writer.close()
    assert (folder / "table.journal").exists()
    assert (unify(folder / "table")[3].view(torch.uint8) == 9).all()
    assert not (folder / "table.journal").exists()


def test_the_next_write_finishes_one_that_failed(folder, monkeypatch):
    layout = create(folder / "table", (10, 512), torch.float32)
    writer = RowWriter(layout)
    with monkeypatch.context() as patch:
        patch.setattr(_row_writer, "_write_rows", fails(errno.EIO))
        for _ in range(2):
            with pytest.raises(StoreError, match="Input/output error"):
                writer.put(np.array([3]), content_of(layout, 1, 9))
    writer.put(np.array([5]), content_of(layout, 1, 8))
    writer.close()
    rows = unify(folder / "table")[torch.arange(10)].view(torch.uint8)
    assert (rows[3] == 9).all() and (rows[5] == 8).all() and not rows[[0, 4, 6]].any()


def test_a_write_of_several_files_that_failed_is_finished_by_any_of_them(folder, monkeypatch):
    layouts = make_files(folder)[:2]
    writers = [RowWriter(layout) for layout in layouts]
    parts = [(writer, ROWS, content_of(writer.layout, 100, 5)) for writer in writers]
    with monkeypatch.context() as patch:
        patch.setattr(_row_writer, "_write_rows", fails(errno.EIO))
        with pytest.raises(StoreWriteError):
            put_together(parts)
        with pytest.raises(StoreWriteError):
            writers[1].finish()
    writers[1].put(np.array([0]), content_of(layouts[1], 1, 5))
    assert [values_in(folder, name) for name in NAMES[:2]] == [{5}, {5}]


def test_rows_are_not_read_while_a_write_of_them_is_unfinished(folder, monkeypatch):
    create(folder / "table", (10, 4), torch.float32)
    u = unify(folder / "table", cache="1KB")
    index, ones = torch.tensor([2, 3]), torch.ones(2, 4)
    assert not u[index[:1]].any()  # which the cache has from now on
    with monkeypatch.context() as patch:
        patch.setattr(_row_writer, "_write_rows", fails(errno.EIO))
        with pytest.raises(StoreWriteError):
            u[index] = ones
        with pytest.raises(StoreWriteError, match="Input/output error"):
            u[index]
    assert torch.equal(u[index], ones)


def test_a_journal_without_room_leaves_the_table_as_it_was(folder, monkeypatch):
    layouts = make_files(folder)
    writers = [RowWriter(layout) for layout in layouts[:2]]
    real = os.open("/dev/full", os.O_RDWR)
    journal, writers[0]._journal = writers[0]._journal, real
    parts = [(writer, ROWS, content_of(writer.layout, 100, 5)) for writer in writers]
    with pytest.raises(StoreFullError, match="No space left on device"):
        put_together(parts)
    writers[0]._journal = journal
    os.close(real)
    assert [values_in(folder, name) for name in NAMES[:2]] == [{0}, {0}]
    put_together(parts)
    assert [values_in(folder, name) for name in NAMES[:2]] == [{5}, {5}]


@pytest.mark.parametrize("call", [2, 3, 4])
def test_a_journal_that_does_not_fit_gives_its_room_back(folder, monkeypatch, call):
    """Whichever write fails: of the rows, or of the header that would make it complete."""
    layout = create(folder / "table", (200, 512), torch.float32)
    writer, write, calls = RowWriter(layout), _row_writer._write, []

    def write_some(fd, content, offset):
        calls.append(offset)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "")
        write(fd, content, offset)

    with monkeypatch.context() as patch:
        patch.setattr(_row_writer, "_write", write_some)
        with pytest.raises(StoreFullError):
            writer.put(ROWS, content_of(layout, 100, 7))
    assert len(calls) == call and (folder / "table.journal").stat().st_size == 0
    assert values_in(folder, "table") == {0}
    writer.put(ROWS, content_of(layout, 100, 8))
    assert values_in(folder, "table") == {8}


def journal(body: bytes, *, magic: bytes = b"PENSTJR2", checksum: int | None = None) -> bytes:
    checksum = zlib.crc32(body) if checksum is None else checksum
    return struct.pack("<8sQI", magic, len(body), checksum).ljust(4096, b"\0") + body


def test_a_damaged_journal_is_an_error_not_garbage(folder):
    layout = create(folder / "table", (10, 512), torch.float32)
    for content in (journal(bytes(99), checksum=12345), journal(bytes(99))[:-1]):
        (folder / "table.journal").write_bytes(content)
        with pytest.raises(StoreError, match=r"table\.journal is damaged: its checksum is wrong"):
            unify(folder / "table")
        assert (folder / "table.journal").exists()
    # Its header was not whole, so no row was touched.
    (folder / "table.journal").write_bytes(journal(bytes(99))[:15])
    assert recover(layout) == 0


def test_the_journal_of_another_table_is_refused(folder):
    layout = make_files(folder)[0]
    assert killed_at(6, lambda: RowWriter(layout).put(ROWS, content_of(layout, 100, 7)))
    os.unlink(folder / "table")
    create(folder / "table", (200, 511), torch.float32)
    with pytest.raises(StoreError, match=r"is the journal of another table\. Move it away\."):
        unify(folder / "table")
    os.rename(folder / "table.journal", folder / "moved")
    assert values_in(folder, "table") == {0}


def test_the_journal_of_one_tensor_is_finished_when_another_is_opened(folder):
    """Both are in one file, so they have one journal, which says which of them it is for."""
    from safetensors.torch import save_file

    path = folder / "x.safetensors"
    save_file({"a": torch.zeros(200, 2), "b": torch.ones(200, 2)}, path)
    layout = open_layout(f"{path}#a")
    assert killed_at(6, lambda: RowWriter(layout).put(ROWS, content_of(layout, 100, 7)))
    assert torch.equal(unify(f"{path}#b")[torch.arange(200)], torch.ones(200, 2))
    found = unify(f"{path}#a")[torch.arange(200)].view(torch.uint8)
    assert (found[::2] == 7).all() and not found[1::2].any()


def test_only_one_writes(folder):
    layout = create(folder / "table", (10, 4), torch.float32)
    writer = RowWriter(layout)
    with pytest.raises(StoreUnavailableError, match="is being written by another"):
        RowWriter(layout)
    writer.close()
    RowWriter(layout).close()
    assert [path.name for path in folder.iterdir()] == ["table"]


def test_a_file_in_the_place_of_the_one_that_was_opened_is_not_written(folder):
    layout = make_files(folder)[0]
    create(folder / "other", (200, 512), torch.float32)
    os.replace(folder / "other", folder / "table")
    with pytest.raises(StoreUnavailableError, match="has been replaced by another file"):
        RowWriter(layout)
    assert not (folder / "table.journal").exists()
    # A layout that was not read from a file says nothing of it.
    RowWriter(native_layout(str(folder / "table"), (200, 512), torch.float32)).close()


def test_a_writer_ends_what_was_interrupted_since_it_opened_the_table(folder):
    layout = make_files(folder)[0]
    u = unify(folder / "table")
    assert killed_at(6, lambda: RowWriter(layout).put(ROWS, content_of(layout, 100, 7)))
    u[[1]] = torch.zeros(1, 512)  # its own journal must not take the place of that one
    assert values_in(folder, "table") == {7}


def test_a_journal_that_was_taken_away_while_it_was_locked_is_not_used(folder, monkeypatch):
    """Or nobody would find it after a kill."""
    layout = create(folder / "table", (10, 4), torch.float32)
    first, lock = RowWriter(layout), _row_writer._try_lock

    def lock_late(journal: int) -> bool:
        first.close()  # which unlinks what is open here already
        return lock(journal)

    monkeypatch.setattr(_row_writer, "_try_lock", lock_late)
    second = RowWriter(layout)
    assert os.path.samestat(os.fstat(second._journal), (folder / "table.journal").stat())


def test_who_may_only_read_opens_the_table_unless_rows_are_torn(folder, monkeypatch):
    layout = make_files(folder)[0]
    monkeypatch.setattr(_row_writer, "_open", read_only(_row_writer._open))
    (folder / "table.journal").write_bytes(bytes(20))  # nothing to do
    assert not unify(folder / "table")[[0]].any()
    monkeypatch.undo()
    assert killed_at(6, lambda: RowWriter(layout).put(ROWS, content_of(layout, 100, 7)))
    monkeypatch.setattr(_row_writer, "_open", read_only(_row_writer._open))
    with pytest.raises(StoreUnavailableError, match="as a user who may write to both"):
        unify(folder / "table")
    assert (folder / "table.journal").exists()


def read_only(function: Callable[..., int]) -> Callable[..., int]:
    def opened(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise StoreUnavailableError("no", path=path, errno=errno.EACCES)
        return function(path, flags, *mode)

    return opened


def test_a_journal_is_for_whoever_may_read_the_table(folder):
    layout = create(folder / "table", (10, 4), torch.float32)
    os.chmod(folder / "table", 0o640)
    writer = RowWriter(layout)
    assert (folder / "table.journal").stat().st_mode & 0o777 == 0o640
    writer.close()


def test_rows_without_bytes_are_written(folder):
    u = unify(create(folder / "table", (10, 0), torch.float32).path)
    u[torch.tensor([3])] = torch.ones(1, 0)
    assert u[[3]].shape == (1, 0)
