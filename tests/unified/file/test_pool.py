"""However many tables a process has, few of their files are open; the others are opened again."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time

import pytest
import torch

import penstock
from fork_servers import find_python
from penstock.errors import StoreError, StoreFullError, StoreUnavailableError
from penstock.unified import empty, unify
from penstock.unified.file import _pool
from penstock.unified.file import writer as file_writer
from penstock.unified.file._rows import RowReader

ROW = torch.tensor([1])
NUM_ROWS = 4
ALL = torch.arange(NUM_ROWS)


@pytest.fixture
def few(monkeypatch):
    """Two files of each kind may be open, so that the third closes one."""
    monkeypatch.setattr(_pool, "MAX_FILES", 2)
    monkeypatch.setattr(file_writer, "MAX_WRITERS", 2)


def tables(folder, number, first=0):
    """Tables in files of their own, each of the numbers that it was made with."""
    made = []
    for index in range(first, first + number):
        table = empty((NUM_ROWS, 3), path=folder / f"table{index}")
        table[ALL] = torch.full((NUM_ROWS, 3), float(index))
        made.append(table)
    return made


def num_open(folder):
    found = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            found += os.readlink(f"/proc/self/fd/{number}").startswith(str(folder))
        except FileNotFoundError:  # of the folder that was listed
            continue
    return found


def be_closed(table, others):
    """Use others until the file of a table is closed, for reading and for writing."""
    for other in others:
        other[ROW] = other[ROW]
    (file_table,) = table._table.file.watchers
    assert file_table._reader.file._fd < 0 and not file_table.file.is_writer


def test_of_many_tables_few_files_are_open(tmp_path):
    number = _pool.MAX_FILES + file_writer.MAX_WRITERS + 50
    made = tables(tmp_path, number)
    for _ in range(2):
        for index, table in enumerate(made):
            assert (table[ROW] == index).all()
    made[0][ROW] = torch.full((1, 3), 7.0)
    assert num_open(tmp_path) > _pool.MAX_FILES
    assert num_open(tmp_path) <= _pool.MAX_FILES + file_writer.MAX_WRITERS
    assert (made[0][ROW] == 7).all() and (made[1][ROW] == 1).all()


def test_many_tables_work_where_a_process_may_open_few_files(tmp_path):
    code = """
import os, resource, sys
import torch
from penstock.unified import empty
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
made = [empty((4, 3), path=f"{sys.argv[1]}/{index}") for index in range(150)]
for round in range(2):
    for index, table in enumerate(made):
        table[[1]] = table[[1]] + index
        assert (table[[1]] == (round + 1) * index).all()
print(len(os.listdir("/proc/self/fd")))
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [find_python("torch"), "-c", code, str(tmp_path)]
    told = subprocess.run(command, env=env, capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    assert _pool.MAX_FILES < int(told.stdout) < 200


def test_tables_are_read_and_written_by_turns_with_few_files(few, tmp_path):
    made = tables(tmp_path, 6)
    for round_ in range(1, 4):
        for index, table in enumerate(made):
            table[ROW] = table[ROW] + 10
            assert (table[ROW] == index + 10 * round_).all()
            assert (table[torch.tensor([0])] == index).all()
    assert num_open(tmp_path) <= 4
    del made, table
    assert num_open(tmp_path) == 0


@pytest.mark.parametrize("how", ["of no rows", "that fail"])
def test_writes_leave_few_files_open(few, tmp_path, monkeypatch, how):
    made = [empty((NUM_ROWS, 3), path=tmp_path / f"table{index}") for index in range(6)]

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(file_writer, "write_journal", fail)
    for table in made:
        if how == "of no rows":
            table[ROW[:0]] = torch.ones(0, 3)
        else:
            with pytest.raises(StoreFullError, match="No space left"):
                table[ROW] = torch.ones(1, 3)
    assert num_open(tmp_path) == 4 and sum(table._table.file.is_writer for table in made) == 2


def test_no_file_is_closed_under_a_thread_that_reads_it(few, tmp_path):
    made, wrong = tables(tmp_path, 6), []

    def read(offset):
        for number in range(300):
            index = (number + offset) % len(made)
            if not (made[index][ALL] == index).all():
                wrong.append(index)

    threads = [threading.Thread(target=read, args=(offset,)) for offset in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong


@pytest.mark.parametrize("how", ["replaced", "renamed", "unlinked"])
def test_a_name_that_leads_elsewhere_is_refused(few, tmp_path, how):
    table, *others = tables(tmp_path, 4)
    be_closed(table, others)
    path = tmp_path / "table0"
    os.rename(path, tmp_path / "elsewhere")
    if how == "replaced":
        kept = empty((NUM_ROWS, 3), path=path)
        assert kept.shape == (NUM_ROWS, 3)
    if how == "unlinked":
        (tmp_path / "elsewhere").unlink()
    problem = "has been replaced" if how == "replaced" else "cannot be opened: No such file"
    for _ in range(2):
        with pytest.raises(StoreError, match=rf"table0 {problem}"):
            table[ROW]
    if how == "renamed":
        os.rename(tmp_path / "elsewhere", path)
        assert (table[ROW] == 0).all()


def test_a_file_that_gets_the_inode_of_one_that_is_gone_is_another_one(few, tmp_path):
    """Disks give an inode that is free to the next file: the time of birth tells them apart."""
    *others, table = tables(tmp_path, 4)
    path = tmp_path / "table3"
    inode = os.stat(path).st_ino
    be_closed(table, others)
    path.unlink()
    other = empty((2 * NUM_ROWS, 5), path=path)
    if os.stat(path).st_ino != inode:
        pytest.skip("this file system gives another inode")
    assert other._table.file is not table._table.file
    other[ROW] = torch.ones(1, 5)
    with pytest.raises(StoreUnavailableError, match="table3 has been replaced"):
        table[ROW]
    with pytest.raises(StoreUnavailableError, match="table3 has been replaced"):
        table[ROW] = torch.ones(1, 3)
    assert (other[ROW] == 1).all()


def test_a_file_that_is_replaced_when_its_header_has_been_read_is_not_opened(tmp_path):
    layout = tables(tmp_path, 1)[0]._table.layout
    os.rename(tmp_path / "table0", tmp_path / "kept")
    tables(tmp_path, 1)
    with pytest.raises(StoreUnavailableError, match="table0 has been replaced"):
        RowReader(layout)


def test_files_without_names_take_no_room_of_others(few, tmp_path):
    gone = tables(tmp_path, 2)
    for index in range(2):
        (tmp_path / f"table{index}").unlink()
    made = tables(tmp_path, 6, first=2)
    for index, table in enumerate(made, 2):
        assert (table[ROW] == index).all()
    is_open = [table._table._reader.file._fd >= 0 for table in (*gone, *made)]
    assert is_open == [True] * 2 + [False] * 4 + [True] * 2


def test_a_file_without_its_name_stays_open(few, tmp_path):
    table, *others = tables(tmp_path, 4)
    assert (table[ROW] == 0).all()
    (tmp_path / "table0").unlink()
    for _ in range(2):
        for index, other in enumerate(others):
            assert (other[ROW] == index + 1).all()
        assert (table[ROW] == 0).all()


def written_by_another_process(path, value):
    """Write a row in a process that has not been forked from this one, or tell why it could not."""
    code = f"""
import torch, penstock
from penstock.unified import unify
try:
    unify({str(path)!r})[torch.tensor([1])] = torch.full((1, 3), {value})
except penstock.errors.StoreError as error:
    print(error)
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.check_output([find_python("torch"), "-c", code], env=env, text=True)


def test_what_another_process_writes_meanwhile_is_not_overwritten_in_silence(few, tmp_path):
    table, *others = tables(tmp_path, 4)
    last = others[-1]
    assert "being written by another process" in written_by_another_process(
        tmp_path / "table3", 5.0
    )
    be_closed(table, others)
    assert not written_by_another_process(tmp_path / "table0", 5.0)
    with pytest.raises(StoreUnavailableError, match=r"table0 was written to by another process"):
        table[ROW] = torch.zeros(1, 3)
    assert not written_by_another_process(tmp_path / "table0", 5.0)
    with pytest.raises(StoreUnavailableError, match=r"table0 was written to by another process"):
        table[ROW] = torch.zeros(1, 3)
    assert (table[ROW] == 5).all()  # read again
    table[ROW] = table[ROW] + 1
    assert (unify(tmp_path / "table0")[ROW] == 6).all()
    assert (last[ROW] == 3).all()


def test_a_lock_is_kept_until_the_next_write_has_another_time(tmp_path):
    """By which another process's write is told from this one's."""
    (table,) = tables(tmp_path, 1)
    assert table._table.file.release() and not table._table.file.is_writer
    age = time.time_ns() - os.stat(tmp_path / "table0").st_mtime_ns
    assert age >= file_writer.TICK_NANOSECONDS


def test_a_lock_is_given_up_whoever_has_a_copy_of_the_descriptor(few, tmp_path):
    """A child that is being forked has copies of all until it has closed them."""
    table, *others = tables(tmp_path, 3)
    table[ROW] = torch.full((1, 3), 4.0)
    copy = os.dup(table._table.file._fd)
    be_closed(table, others)
    table[ROW] = torch.full((1, 3), 5.0)
    os.close(copy)
    assert (table[ROW] == 5).all()


def test_a_forked_child_writes_where_its_parent_no_longer_does(few, tmp_path):
    """What the parent has written is not taken for that of a stranger."""
    table, *others = tables(tmp_path, 3)
    table[ROW] = torch.full((1, 3), 4.0)
    go, goes = os.pipe()
    child = os.fork()
    if not child:
        status = 1
        try:
            os.read(go, 1)
            table[ROW] = table[ROW] + 1
            status = 0
        finally:
            os._exit(status)
    be_closed(table, others)
    os.write(goes, b".")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert (table[ROW] == 5).all()
    os.close(go)
    os.close(goes)


def test_a_forked_child_opens_files_for_itself(few, tmp_path):
    made = tables(tmp_path, 6)
    child = os.fork()
    if not child:
        status = 1
        try:
            right = all(
                bool((table[ROW] == index).all())
                for _ in range(2)
                for index, table in enumerate(made)
            )
            status = 0 if right and num_open(tmp_path) <= 4 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for index, table in enumerate(made):
        assert (table[ROW] == index).all()


def test_optimizers_of_many_tables_go_on(few, tmp_path):
    made = [
        empty((NUM_ROWS, 3), path=tmp_path / f"table{index}", requires_grad=True)
        for index in range(5)
    ]
    optimizers = [penstock.unified.optim.Adam([table], lr=0.5) for table in made]
    for _ in range(3):
        for table, optimizer in zip(made, optimizers, strict=True):
            optimizer.zero_grad()
            table[ROW].sum().backward()
            optimizer.step()
    for table in made:  # the gradient is always one, and so is its mean over its root mean square
        torch.testing.assert_close(table[ROW].detach(), torch.full((1, 3), -1.5))
        assert (table[torch.tensor([0])] == 0).all()
