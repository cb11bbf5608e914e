"""Entries of the cache: private, for one process at a time, done without where there is none."""

import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.codegen import cache_entry
from penstock.codegen._cache import digest
from penstock.errors import PlanError


def test_a_key_has_a_place_of_its_own(cache):
    paths = set()
    for folder, key in [("plans", ["a"]), ("plans", ["b"]), ("plans", ["a", 1]), ("other", ["a"])]:
        with cache_entry(folder, key, wait_seconds=1) as entry:
            assert entry.path is not None
            assert entry.path.parent == cache / folder
            paths.add(entry.path)
    assert len(paths) == 4
    with cache_entry("plans", ["a"], wait_seconds=1) as entry:
        assert entry.path in paths


def read(directory: Path) -> str:
    return (directory / "text").read_text()


def write(content: str) -> Callable[[Path], object]:
    return lambda directory: (directory / "text").write_text(content)


def test_content_is_kept_and_replaced(cache):
    for content in ("old", "new"):
        with cache_entry("plans", [], wait_seconds=1) as entry:
            entry.save(write(content))
            assert entry.load(read) == content
    with cache_entry("plans", ["another"], wait_seconds=1) as entry:
        assert entry.load(read) is None
    names = [path.name for path in (cache / "plans").iterdir() if path.suffix != ".lock"]
    assert len(names) == 1  # nothing unfinished is left


@pytest.mark.parametrize(
    "error", [ValueError("wrong"), OSError(5, "wrong"), PlanError("wrong", rule="")]
)
def test_content_that_cannot_be_used_is_done_without(error, caplog):
    def fail(directory: Path) -> None:
        raise error

    with cache_entry("plans", [], wait_seconds=1) as entry:
        entry.save(write("x"))
        with caplog.at_level(logging.WARNING, logger="penstock"):
            assert entry.load(fail) is None
    assert "is unusable, and made anew: " in caplog.text and "wrong" in caplog.text


def test_content_that_cannot_be_written_leaves_the_old(cache, caplog):
    def fail(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with cache_entry("plans", [], wait_seconds=1) as entry:
        entry.save(write("old"))
        with caplog.at_level(logging.WARNING, logger="penstock"):
            entry.save(fail)
        assert entry.load(read) == "old"
    assert "could not be kept: [Errno 28]" in caplog.text
    assert not list((cache / "plans").rglob("half"))


def test_without_a_cache_nothing_is_kept(cache):
    cache.write_text("in the way")
    with cache_entry("plans", [], wait_seconds=1) as entry:
        entry.save(lambda directory: pytest.fail("nothing is to be written"))
        assert entry.load(read) is None


def test_entries_are_private(cache):
    old_mask = os.umask(0)
    try:
        with cache_entry("plans", [], wait_seconds=1):
            pass
    finally:
        os.umask(old_mask)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (cache, cache / "plans")}
    assert modes == {"cache": 0o700, "plans": 0o700}
    assert all(stat.S_IMODE(p.stat().st_mode) == 0o600 for p in (cache / "plans").iterdir())


def test_another_process_waits_for_its_turn(cache, caplog):
    program = (
        "import sys; from penstock.codegen import cache_entry\n"
        "with cache_entry('plans', ['same'], wait_seconds=1) as entry:\n"
        "    print(entry.path, flush=True); sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert other.stdout is not None
    held = other.stdout.readline().strip()
    with caplog.at_level(logging.WARNING, logger="penstock"):
        with cache_entry("plans", ["same"], wait_seconds=0.1) as entry:
            assert entry.path is None
    assert "plans are not cached" in caplog.text
    with cache_entry("plans", ["different"], wait_seconds=0.1) as entry:
        assert entry.path is not None
    other.communicate("", timeout=200)
    with cache_entry("plans", ["same"], wait_seconds=10) as entry:
        assert str(entry.path) == held


def test_an_exception_gives_the_entry_back():
    with pytest.raises(ZeroDivisionError), cache_entry("plans", [], wait_seconds=0.1):
        raise ZeroDivisionError
    with cache_entry("plans", [], wait_seconds=0.1) as entry:
        assert entry.path is not None


@pytest.mark.parametrize("below", ["", "plans"])
def test_a_directory_that_others_can_write_to_is_done_without(cache, below, caplog):
    (cache / "plans").mkdir(parents=True, mode=0o700)
    (cache / below).chmod(0o777)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        with cache_entry("plans", [], wait_seconds=1) as entry:
            assert entry.path is None
    assert "plans are not cached" in caplog.text
    assert "others can write to it" in caplog.text
    assert "chmod 700" in caplog.text
    assert list((cache / "plans").iterdir()) == []


def test_a_directory_that_cannot_be_made_is_done_without(cache, caplog):
    cache.write_text("in the way")
    with caplog.at_level(logging.WARNING, logger="penstock"):
        with cache_entry("plans", [], wait_seconds=1) as entry:
            assert entry.path is None
    assert "PENSTOCK_CACHE_DIR" in caplog.text


def test_a_file_system_without_locks_is_done_without(monkeypatch, caplog):
    def refuse(self):
        raise NotImplementedError("no locks here")

    monkeypatch.setattr("filelock.FileLock.acquire", refuse)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        with cache_entry("plans", [], wait_seconds=1) as entry:
            assert entry.path is None
    assert "no locks here" in caplog.text


def test_moving_a_byte_between_parts_changes_the_digest():
    assert digest("ab", "c") != digest("a", "bc")
    assert digest("abc") == digest("abc") != digest("abd")
