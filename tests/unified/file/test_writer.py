"""Writes of rows: whoever is killed leaves all of them or none, in one file or in several."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from fork_servers import find_python
from penstock.errors import StoreError, StoreFullError, StoreUnavailableError, StoreWriteError
from penstock.unified import empty, unify
from penstock.unified.file import _journal
from penstock.unified.file import writer as file_writer
from penstock.unified.file._journal import forget_journal, recover
from penstock.unified.file.layout import RowLayout, create, native_layout, open_layout
from penstock.unified.file.writer import table_file, without_gradients, write_batch

ROWS = np.arange(0, 200, 2)
NAMES = ("table", "table.mean", "table.step")  # the first one leads


@pytest.fixture
def folder(real_disk, tmp_path_factory) -> Path:
    """A directory on a real disk."""
    return tmp_path_factory.mktemp("tables")


class RowWriter:
    """A table that is written, and not read."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout, self.file = layout, table_file(layout)
        self.file.open(layout)


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
    write_batch(
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
    assert not b"".join(rows[1::2]).strip(b"\0")
    return set(b"".join(rows[::2]))


def killed_at(call: int, work: Callable[[], None]) -> bool:
    """Do it in a child that kills itself behind the `call`-th access to a file; False if it ended.

    The child is a fork: it uses no operators of torch.
    """
    child = os.fork()
    if child == 0:
        made = 0

        def counted(function: Callable) -> Callable:
            def wrapped(*arguments, **options):
                nonlocal made
                made += 1
                if made == call and function is original_rows:
                    tear(*arguments)
                result = function(*arguments, **options)
                if made == call:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return wrapped

        original_rows = file_writer.write_places
        _journal.write_all = counted(_journal.write_all)
        file_writer.write_places = counted(original_rows)
        for name in ("fdatasync", "fsync", "link", "unlink"):
            setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def tear(fd: int, layout: RowLayout, rows: np.ndarray, content: np.ndarray) -> None:
    """Write a part of the rows, the last of them by half, and be killed."""
    half = len(rows) // 2
    for row, new in zip(rows[:half].tolist(), content[:half], strict=True):
        os.pwrite(fd, new.tobytes(), layout.row_offset(row))
    os.pwrite(fd, content[half, : layout.row_bytes // 2].tobytes(), layout.row_offset(rows[half]))
    os.kill(os.getpid(), signal.SIGKILL)


class Killed:
    """The files that a killed process left, to be brought back as they were: bytes and times."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.content = {path: path.read_bytes() for path in place.iterdir()}
        self.times = {path: os.stat(path).st_mtime_ns for path in self.content}

    def bring_back(self) -> None:
        """Write what is there again, in the same files, and make a journal anew."""
        for path in set(self.place.iterdir()) - self.content.keys():
            path.unlink()
        for path, content in self.content.items():
            path.write_bytes(content)
            os.utime(path, ns=(self.times[path], self.times[path]))


def test_a_killed_process_leaves_all_rows_of_all_files_or_none(folder):
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
        killed, num_rows = Killed(place), set()
        for opened_first in layouts:
            killed.bring_back()
            num_rows.add(recover(opened_first))
            found = {name: values_in(place, name) for name in NAMES}
            assert found in ({name: {0} for name in NAMES}, {name: {7} for name in NAMES}), call
            outcomes.append(found["table"] == {7})
            assert [recover(layout) for layout in layouts] == [0, 0, 0]
            put_in_all(layouts, 9)  # and writing goes on
            assert all(values_in(place, name) == {9} for name in NAMES)
        assert num_rows in ({0}, {201})
    # The rows, old and new, of each file, syncs, the name: there is that much to survive.
    assert len(outcomes) > 3 * 15 and outcomes == sorted(outcomes)
    assert set(outcomes) == {False, True}


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
    write_batch(parts)
    write_batch([(writers[1], ROWS, content_of(layouts[1], 100, 2))])
    write_batch(parts[:1])
    write_batch(parts[::-1])
    assert [values_in(folder, name) for name in NAMES[:2]] == [{1}, {1}]


# ------------------------------------------------------------------------ errors


def fails(number: int) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise OSError(number, "")

    return fail


def test_rows_that_a_killed_process_tore_are_mended(folder, monkeypatch):
    """Half of a row was written; the journal has all of it."""
    layout = open_layout(create(folder / "table", (10, 512), torch.float32).path)
    writer = RowWriter(layout)

    def tear_one(fd, layout, rows, content):
        os.pwrite(fd, bytes(content[0][:100]), layout.row_offset(int(rows[0])))
        raise OSError(errno.EIO, "")

    with monkeypatch.context() as patch:
        patch.setattr(file_writer, "write_places", tear_one)
        with pytest.raises(StoreWriteError, match="could not be written: Input/output error"):
            write_batch([(writer, np.array([3]), content_of(layout, 1, 9))])
    del writer
    assert (folder / "table.journal").exists()
    assert (unify(folder / "table")[3].view(torch.uint8) == 9).all()
    assert not (folder / "table.journal").exists()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_the_next_write_finishes_one_that_failed(folder, monkeypatch, number):
    """Without room, too, as in the holes of a sparse file: the rows are kept."""
    layout = open_layout(create(folder / "table", (10, 512), torch.float32).path)
    writer = RowWriter(layout)
    with monkeypatch.context() as patch:
        patch.setattr(file_writer, "write_places", fails(number))
        for _ in range(2):
            with pytest.raises(StoreWriteError, match=rf"{os.strerror(number)}.*kept in .*journal"):
                write_batch([(writer, np.array([3]), content_of(layout, 1, 9))])
    write_batch([(writer, np.array([5]), content_of(layout, 1, 8))])
    rows = unify(folder / "table")[torch.arange(10)].view(torch.uint8)
    assert (rows[3] == 9).all() and (rows[5] == 8).all() and not rows[[0, 4, 6]].any()


def test_a_write_of_several_files_that_failed_is_finished_by_any_of_them(folder, monkeypatch):
    layouts = make_files(folder)[:2]
    writers = [RowWriter(layout) for layout in layouts]
    parts = [(writer, ROWS, content_of(writer.layout, 100, 5)) for writer in writers]
    with monkeypatch.context() as patch:
        patch.setattr(file_writer, "write_places", fails(errno.EIO))
        with pytest.raises(StoreWriteError):
            write_batch(parts)
        with pytest.raises(StoreWriteError):
            writers[1].file.finish()
    write_batch([(writers[1], np.array([0]), content_of(layouts[1], 1, 5))])
    assert [values_in(folder, name) for name in NAMES[:2]] == [{5}, {5}]


def test_rows_are_not_read_while_a_write_of_them_is_unfinished(folder, monkeypatch):
    create(folder / "table", (10, 4), torch.float32)
    u = unify(folder / "table", cache="1KB")
    index, ones = torch.tensor([2, 3]), torch.ones(2, 4)
    assert not u[index[:1]].any()  # which the cache has from now on
    with monkeypatch.context() as patch:
        patch.setattr(file_writer, "write_places", fails(errno.EIO))
        with pytest.raises(StoreWriteError):
            u[index] = ones
        with pytest.raises(StoreWriteError, match="Input/output error"):
            u[index]
    assert torch.equal(u[index], ones)


@pytest.mark.parametrize("call", [1, 4, 7])
def test_a_journal_without_room_leaves_the_table_as_it_was(folder, monkeypatch, call):
    """Whichever write fails: of the text, of rows, or of the header."""
    layouts = make_files(folder)
    writers = [RowWriter(layout) for layout in layouts[:2]]
    parts = [(writer, ROWS, content_of(writer.layout, 100, 5)) for writer in writers]
    write, calls = _journal.write_all, []

    def write_some(fd, content, offset):
        calls.append(offset)
        if len(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(fd, content, offset)

    with monkeypatch.context() as patch:
        patch.setattr(_journal, "write_all", write_some)
        with pytest.raises(StoreFullError, match="No space left on device"):
            write_batch(parts)
    assert len(calls) == call and sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    assert [values_in(folder, name) for name in NAMES[:2]] == [{0}, {0}]
    write_batch(parts)
    assert [values_in(folder, name) for name in NAMES[:2]] == [{5}, {5}]


def test_a_name_that_the_disk_does_not_keep_is_taken_back(folder, monkeypatch):
    """Of a journal, or the next opening would write rows that were reported as lost; of a table."""
    layout = make_files(folder)[0]
    part = RowWriter(layout), ROWS, content_of(layout, 100, 5)
    sync = os.fsync

    def fail_for_directories(file):
        if os.path.isdir(f"/proc/self/fd/{file}"):
            raise OSError(errno.EIO, "Input/output error")
        sync(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail_for_directories)
        with pytest.raises(StoreWriteError, match="Input/output error"):
            write_batch([part])
        with pytest.raises(StoreWriteError, match="Nothing is left of it"):
            create(folder / "another", (3, 2), torch.float32)
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    assert values_in(folder, NAMES[0]) == {0}
    write_batch([part])
    assert values_in(folder, NAMES[0]) == {5}


def killed_in_the_rows(layout: RowLayout) -> None:
    """A child that is killed when half of the rows, and half of one more, are in their places."""

    def work() -> None:
        file_writer.write_places = tear
        write_batch([(RowWriter(layout), ROWS, content_of(layout, 100, 7))])

    assert killed_at(10**6, work)
    assert os.path.exists(layout.path + ".journal")


def test_a_damaged_journal_is_an_error_not_garbage(folder):
    layout = make_files(folder)[0]
    killed_in_the_rows(layout)
    journal, sound = folder / "table.journal", (folder / "table.journal").read_bytes()
    for at in (0, 7, 8, 16, 20, 3000, len(sound) - 1):
        flipped = bytearray(sound)
        flipped[at] ^= 1
        journal.write_bytes(flipped)
        with pytest.raises(StoreError, match=r"table\.journal is damaged: "):
            unify(folder / "table")
    for content in (b"", bytes(4096), sound[:-1], sound[:15]):
        journal.write_bytes(content)
        with pytest.raises(StoreError, match=r"table\.journal is damaged: "):
            unify(folder / "table")
    journal.write_bytes(sound)
    assert recover(layout) == 100 and values_in(folder, "table") == {7}


def test_data_that_was_made_anew_is_not_touched(folder):
    """In the same file, in another one of the name, or of another shape."""
    for case in ("in place", "another file", "another shape", "by empty"):
        path = folder / ("t.npy" if case != "by empty" else "t")
        u = empty((200, 16), path=path)
        layout = u._table.layout
        del u
        killed_in_the_rows(layout)
        if case != "in place":
            os.unlink(path)
        if case == "by empty":
            table = empty((200, 16), path=path)
            assert not table[torch.arange(199)].any()
        else:
            shape = (200, 17) if case == "another shape" else (200, 16)
            np.save(path, np.ones(shape, dtype=np.float32))
            table = unify(path)
            assert (table[torch.arange(199)] == 1).all()
        assert [each.name for each in folder.iterdir()] == [path.name]
        del table
        os.unlink(path)


def test_a_batch_that_no_row_was_placed_of_is_written_unless_the_file_changed_since(folder):
    for anew in (False, True):
        path = folder / f"{anew}.npy"
        np.save(path, np.zeros((200, 16), dtype=np.float32))
        layout = open_layout(path)

        def work(layout: RowLayout = layout) -> None:
            file_writer.write_places = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            write_batch([(RowWriter(layout), ROWS, content_of(layout, 100, 7))])

        assert killed_at(10**6, work)
        time.sleep(0.02)  # two times that every file system tells apart
        if anew:
            np.save(path, np.zeros((200, 16), dtype=np.float32))
        assert unify(path)[torch.from_numpy(ROWS)].any() == (not anew)
        assert not os.path.exists(f"{path}.journal")


def test_a_table_that_was_changed_beside_its_journal_is_an_error(folder):
    """Some rows are torn, some were written by other means: it cannot be both."""
    layout = make_files(folder)[0]
    killed_in_the_rows(layout)
    with open(folder / "table", "r+b") as file:
        file.seek(layout.row_offset(198))
        file.write(bytes([9]) * 100)
    with pytest.raises(StoreError, match="has rows of it beside others: it was changed since"):
        unify(folder / "table")
    os.unlink(folder / "table.journal")
    assert unify(folder / "table").shape == (200, 512)


@pytest.mark.parametrize("how", ["renamed", "by a symbolic link", "by a hard link"])
def test_a_journal_is_found_by_whatever_name_the_table_has(folder, how):
    layout = make_files(folder)[0]
    other = folder / "other"
    if how == "by a symbolic link":
        os.makedirs(folder / "deep")
        other = folder / "deep" / "other"
        os.symlink("../table", other)
    elif how == "by a hard link":
        os.link(folder / "table", other)
    killed_in_the_rows(layout)
    if how == "renamed":
        os.rename(folder / "table", other)
    found = unify(other)[torch.arange(200)].view(torch.uint8)
    assert (found[::2] == 7).all() and not found[1::2].any()
    assert not (folder / "table.journal").exists()


def test_a_renamed_table_is_mended_before_another_takes_its_name(folder):
    layout = make_files(folder)[0]
    killed_in_the_rows(layout)
    os.rename(folder / "table", folder / "other")
    assert not empty((200, 512), path=folder / "table")[[0]].any()
    assert values_in(folder, "other") == {7} and values_in(folder, "table") == {0}
    forget_journal(str(folder / "table"))  # there is none


def test_one_that_opens_a_torn_table_waits_for_another_that_mends_it(folder, monkeypatch):
    """Or for one that may be about to write: what is complete is finished before it is read."""
    layout = make_files(folder)[0]
    killed_in_the_rows(layout)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            write = _journal.write_places

            def write_late(*arguments) -> None:
                os.write(writing, b".")
                time.sleep(0.3)
                write(*arguments)

            _journal.write_places = write_late
            recover(layout)
        finally:
            os._exit(0)
    assert os.read(reading, 1) == b"."
    found = unify(folder / "table")[torch.arange(200)].view(torch.uint8)
    os.waitpid(child, 0)
    assert (found[::2] == 7).all() and not found[1::2].any()


def test_nobody_waits_for_ever(folder, monkeypatch):
    layout = make_files(folder)[0]
    killed_in_the_rows(layout)
    monkeypatch.setattr(_journal, "WAIT_SECONDS", 0.05)
    with open(layout.path, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StoreUnavailableError, match="another process has been writing for"):
            unify(folder / "table")
    assert unify(folder / "table")[0].view(torch.uint8).eq(7).all()


def test_the_journal_of_one_tensor_is_finished_when_another_is_opened(folder):
    """Both are in one file, so they have one journal, which says which of them it is for."""
    from safetensors.torch import save_file

    path = folder / "x.safetensors"
    save_file({"a": torch.zeros(200, 2), "b": torch.ones(200, 2)}, path)
    layout = open_layout(f"{path}#a")
    killed_in_the_rows(layout)
    assert torch.equal(unify(f"{path}#b")[torch.arange(200)], torch.ones(200, 2))
    found = unify(f"{path}#a")[torch.arange(200)].view(torch.uint8)
    assert (found[::2] == 7).all() and not found[1::2].any()


def test_only_one_process_writes(folder):
    layout = make_files(folder)[0]
    writer = RowWriter(layout)
    write_batch(
        [(RowWriter(layout), ROWS, content_of(layout, 100, 1))]
    )  # the same file, by another object
    script = f"from penstock.unified import unify; unify({layout.path!r})[[0]] = 1.0"
    told = subprocess.run([find_python("torch"), "-c", script], capture_output=True, text=True)
    assert "is being written by another process; only one may write" in told.stderr
    del writer
    write_batch([(RowWriter(layout), ROWS, content_of(layout, 100, 2))])
    assert values_in(folder, "table") == {2}
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)


def test_a_file_in_the_place_of_the_one_that_was_opened_is_not_written(folder):
    layout = make_files(folder)[0]
    writer = RowWriter(layout)
    create(folder / "other", (200, 512), torch.float32)
    os.replace(folder / "other", folder / "table")
    with pytest.raises(StoreUnavailableError, match="has been replaced by another file"):
        write_batch([(writer, ROWS, content_of(layout, 100, 2))])
    del writer
    with pytest.raises(StoreUnavailableError, match="has been replaced by another file"):
        RowWriter(layout)
    assert not (folder / "table.journal").exists() and values_in(folder, "table") == {0}
    # A layout that was not read from a file says nothing of it.
    RowWriter(native_layout(str(folder / "table"), (200, 512), torch.float32))


def test_a_writer_ends_what_was_interrupted_since_it_opened_the_table(folder):
    layout = make_files(folder)[0]
    u = unify(folder / "table")
    killed_in_the_rows(layout)
    u[[1]] = torch.zeros(1, 512)  # its own journal must not take the place of that one
    assert values_in(folder, "table") == {7}


def test_rows_that_a_writer_mends_are_not_kept_as_they_were(folder):
    """The process was killed when its journal was complete, and no row at its place."""
    layout = make_files(folder)[0]
    os.utime(layout.path, (0, 0))
    u = unify(folder / "table", cache="1MiB")
    assert not u[[0, 2]].any()

    def work() -> None:
        file_writer.write_places = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        write_batch([(RowWriter(layout), ROWS, content_of(layout, 100, 7))])

    assert killed_at(10**6, work)
    u[[1]] = torch.zeros(1, 512)
    assert (u[[0, 2]].view(torch.uint8) == 7).all()


def test_a_reader_mends_what_was_interrupted_since_it_opened_the_table(folder):
    u = unify(make_files(folder)[0].path, cache="1MiB")
    assert not u[[0, 2]].any()
    killed_in_the_rows(u._table.layout)
    found = u[torch.arange(200)].view(torch.uint8)
    assert (found[::2] == 7).all() and not found[1::2].any()


@pytest.mark.parametrize("moment", ["before", "behind"])
def test_an_interrupt_leaves_all_rows_or_none_and_no_lock(folder, monkeypatch, moment):
    """A KeyboardInterrupt around the moment at which the journal gets its name."""
    layout = make_files(folder)[0]
    u = unify(folder / "table")
    real = os.link

    def link(*arguments, **options) -> None:
        if moment == "behind":
            real(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", link)
        with pytest.raises(KeyboardInterrupt):
            u[torch.from_numpy(ROWS)] = torch.ones(100, 512)
    with ThreadPoolExecutor(1) as threads:  # another thread finds no lock held
        assert not threads.submit(lambda: u[torch.arange(200)].any()).result(timeout=20)
    assert not os.path.exists(layout.path + ".journal")
    u[torch.from_numpy(ROWS)] = torch.ones(100, 512)
    assert u[torch.arange(0, 200, 2)].all()


def test_who_may_only_read_opens_the_table_unless_rows_are_torn(folder, monkeypatch):
    layout = make_files(folder)[0]
    killed_in_the_rows(layout)
    monkeypatch.setattr(_journal, "open_file", read_only(_journal.open_file))
    with pytest.raises(StoreUnavailableError, match="as a user with permission to write to both"):
        unify(folder / "table")
    assert (folder / "table.journal").exists()


def read_only(function: Callable[..., int]) -> Callable[..., int]:
    def opened(path: str, flags: int, *mode: int) -> int:
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise StoreUnavailableError("no", path=path, errno=errno.EACCES)
        return function(path, flags, *mode)

    return opened


def test_a_journal_is_for_whoever_may_read_the_table(folder):
    layout = make_files(folder)[0]
    os.chmod(folder / "table", 0o640)
    killed_in_the_rows(layout)
    assert (folder / "table.journal").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("kind", ["directory", "pipe", "unreadable"])
def test_what_has_the_name_of_a_journal_and_is_none(folder, monkeypatch, kind):
    """It is passed over beside a table, and an error under the name of the table's journal."""
    make_files(folder)

    def place(path: Path) -> None:
        {"directory": Path.mkdir, "pipe": os.mkfifo, "unreadable": Path.touch}[kind](path)

    def opened(path, *options):
        if str(path).endswith(".journal") and kind == "unreadable":
            raise PermissionError(errno.EACCES, "Permission denied")
        return open(path, *options)

    monkeypatch.setattr(_journal, "open", opened, raising=False)
    place(folder / "other.journal")
    u = unify(folder / "table")
    u[torch.tensor([3])] = 1.0
    assert u[torch.tensor([3])].all()
    del u  # or this process is the writer, who knows that there is none
    place(folder / "table.journal")
    with pytest.raises(StoreError, match=r"table\.journal (is damaged: it is no|cannot be read)"):
        unify(folder / "table")


def test_a_file_system_without_unnamed_files(folder, monkeypatch):
    """The journal has another name until it is complete."""
    real, layout = os.open, make_files(folder)[0]

    def refuse(path, flags, *mode):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "")
        return real(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)
    write_batch([(RowWriter(layout), ROWS, content_of(layout, 100, 7))])
    assert values_in(folder, "table") == {7}
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)


def test_rows_without_bytes_are_written(folder):
    u = unify(create(folder / "table", (10, 0), torch.float32).path)
    u[torch.tensor([3])] = torch.ones(1, 0)
    assert u[[3]].shape == (1, 0)


def test_a_signal_whose_handler_raises_leaves_gradients_as_they_were():
    class Came(BaseException):
        pass

    def come(*_):
        raise Came

    @without_gradients
    def nothing():
        assert not torch.is_grad_enabled()

    num_came, moments = 0, random.Random(0)
    before = signal.signal(signal.SIGALRM, come)
    try:
        for _ in range(1000):
            try:
                signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-6, 2e-5))
                for _ in range(30):
                    nothing()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Came:
                num_came += 1
            assert torch.is_grad_enabled()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_came > 100
