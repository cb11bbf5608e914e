"""However many tables a process has, few of their files are open; the others are opened again."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest
import torch

import penstock
from penstock.errors import StoreError, StoreUnavailableError
from penstock.unified import _file_pool, _row_writer, empty, unify

ROW = torch.tensor([1])
NUM_ROWS = 4
ALL = torch.arange(NUM_ROWS)


@pytest.fixture
def few(monkeypatch):
    """Two files of each kind may be open, so that the third closes one."""
    monkeypatch.setattr(_file_pool, "MAX_IDLE", 2)
    monkeypatch.setattr(_row_writer, "MAX_WRITERS", 2)


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
    time.sleep(2 * _row_writer.TICK_NANOSECONDS / 1e9)  # what has just been written stays open
    for other in others:
        other[ROW] = other[ROW]
    (file_table,) = table._table.file.watchers
    assert file_table._reader._file._fd < 0 and not file_table.file.is_writer


def test_of_many_tables_few_files_are_open(tmp_path):
    number = _file_pool.MAX_IDLE + _row_writer.MAX_WRITERS + 50
    made = tables(tmp_path, number)
    for _ in range(2):
        for index, table in enumerate(made):
            assert (table[ROW] == index).all()
    time.sleep(2 * _row_writer.TICK_NANOSECONDS / 1e9)
    made[0][ROW] = torch.full((1, 3), 7.0)
    assert num_open(tmp_path) > _file_pool.MAX_IDLE
    assert num_open(tmp_path) <= _file_pool.MAX_IDLE + _row_writer.MAX_WRITERS
    assert (made[0][ROW] == 7).all() and (made[1][ROW] == 1).all()


def test_tables_are_read_and_written_by_turns_with_few_files(few, tmp_path):
    made = tables(tmp_path, 6)
    for round_ in range(1, 4):
        for index, table in enumerate(made):
            table[ROW] = table[ROW] + 10
            assert (table[ROW] == index + 10 * round_).all()
            assert (table[torch.tensor([0])] == index).all()
    time.sleep(2 * _row_writer.TICK_NANOSECONDS / 1e9)
    made[0][ROW] = made[0][ROW]
    assert num_open(tmp_path) <= 4
    del made, table
    assert num_open(tmp_path) == 0


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
    return subprocess.check_output([sys.executable, "-c", code], env=env, text=True)


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
    assert (table[ROW] == 5).all()  # read again
    table[ROW] = table[ROW] + 1
    assert (unify(tmp_path / "table0")[ROW] == 6).all()
    assert (last[ROW] == 3).all()


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
