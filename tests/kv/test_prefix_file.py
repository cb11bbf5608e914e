"""Prefix files of pools: what is written and read, and every damage."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import (
    InfeasibleError,
    PenstockError,
    PrefixFileError,
    StoreFullError,
    StoreReadError,
    StoreUnavailableError,
)
from penstock.kv import BlockPool, _prefix_file
from penstock.kv._attend import attend_pool
from penstock.kv._partial import ScoreRule
from penstock.kv._prefix_file import PrefixFile
from penstock.kv._visibility import Visibility
from penstock.kv.selectors import DoubleSparsity, Nosa
from penstock.memory import StartedReads, _transfers

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK, DIM, HEADS, LENGTH = 4, 8, 2, 30
RECORD_BYTES = 4096


def make_pool(length: int = LENGTH, **options: Any) -> BlockPool:
    settings = {"device_memory": "64KiB", "block_tokens": BLOCK, "num_layers": 2, **options}
    pool = BlockPool(**settings)
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        pool.append(layer, *torch.rand(2, 2, HEADS, length, DIM, generator=generator))
    return pool


def begin(path: Path, **options: Any) -> BlockPool:
    return BlockPool(
        **{"device_memory": "64KiB", "block_tokens": BLOCK, "num_layers": 2, **options}, prefix=path
    )


def step(pool: BlockPool) -> torch.Tensor:
    """Attention of two layers, over all that they hold."""
    query = torch.rand(pool.batch_size(0), 2 * HEADS, 1, DIM, generator=torch.Generator())
    return torch.stack(
        [attend_pool(pool, layer, query, ScoreRule(1.0), Visibility()) for layer in range(2)]
    )


def assert_same(some: torch.Tensor, others: torch.Tensor) -> None:
    """Sums of the same numbers, perhaps in other groups."""
    torch.testing.assert_close(some, others, atol=1e-6, rtol=1e-6)


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[tuple[Path, torch.Tensor]]:
    """A prefix file, and the attention over it."""
    with contextlib.closing(make_pool()) as pool:
        pool.save(tmp_path / "prefix")
        yield tmp_path / "prefix", step(pool)


@pytest.mark.parametrize("source", ["host", "file", "prefix"])
def test_a_pool_goes_on_from_a_file(source: str, store: Path, tmp_path: Path):
    pool = make_pool(store=store if source == "file" else None)
    if source == "prefix":
        pool.save(tmp_path / "first")
        pool.close()
        pool = begin(tmp_path / "first")
    pool.save(tmp_path / "prefix")
    with contextlib.closing(begin(tmp_path / "prefix")) as other:
        assert [other.length(layer) for layer in range(2)] == [LENGTH] * 2
        assert_same(step(other), step(pool))
        for each in (pool, other):
            each.append(0, *torch.ones(2, 2, HEADS, 40, DIM))
            each.crop(27)
        assert_same(step(other), step(pool))
    pool.close()
    assert os.listdir(tmp_path) == ["first", "prefix"][source != "prefix" :]


def test_nothing_but_header_and_tails_is_read_before_it_is_needed(saved: tuple[Path, Any]):
    path, _ = saved
    num_records = 2 * 2 * HEADS * (LENGTH // BLOCK)
    assert path.stat().st_size > num_records * RECORD_BYTES
    file = PrefixFile(str(path))
    assert file.read_bytes == path.stat().st_size - num_records * RECORD_BYTES
    file.close()
    pool = begin(path, device_memory="512KiB")
    report = pool.report()
    assert (report.read_bytes, report.num_misses, report.written_bytes) == (0, 0, 0)
    assert report.prefix_bytes == num_records * RECORD_BYTES
    for num_reads in (1, 1):  # the second step finds everything
        step(pool)
        assert pool.report().read_bytes == num_reads * num_records * RECORD_BYTES
        assert pool.report().num_misses == num_records
    assert (pool.report().written_bytes, pool.report().file_bytes) == (0, 0)
    pool.reset()
    assert pool.report().prefix_bytes == 0
    pool.close()


def test_misses_are_the_bytes_that_are_read(saved: tuple[Path, Any]):
    pool = begin(saved[0], device_memory="48KiB")
    for _ in range(3):
        before = pool.report()
        step(pool)
        after = pool.report()
        misses = after.num_misses - before.num_misses
        assert misses > 0
        assert after.read_bytes - before.read_bytes == misses * RECORD_BYTES
    assert after.peak_device_bytes <= 48 * 1024 + after.tail_bytes
    pool.close()


def test_memory_of_the_process_stays_within_the_budget(tmp_path: Path):
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    path, budget = tmp_path / "prefix", 8 * 2**20
    with contextlib.closing(BlockPool(device_memory=budget, store=str(tmp_path))) as pool:
        some = torch.rand(1, 4, 1024, 64)
        for _ in range(64):  # 128 MiB in all
            pool.append(0, some, some)
        before = resident_bytes()
        pool.save(path)
        assert resident_bytes() - before <= 8 * 2**20
    before = resident_bytes()
    with contextlib.closing(BlockPool(device_memory=budget, prefix=path)) as pool:
        assert resident_bytes() - before <= 8 * 2**20
        query = torch.rand(1, 8, 1, 64)
        for _ in range(2):
            attend_pool(pool, 0, query, ScoreRule(0.1), Visibility())
        assert resident_bytes() - before <= budget + 16 * 2**20
        assert pool.report().peak_device_bytes <= budget + pool.report().tail_bytes


def test_shared_pages_are_saved_once(tmp_path: Path):
    pool = make_pool()
    pool.reorder(torch.tensor([1, 0, 1, 1]))
    pool.save(tmp_path / "prefix")
    file = PrefixFile(str(tmp_path / "prefix"))
    assert [layer.num_pages for layer in file.layers] == [2 * (LENGTH // BLOCK)] * 2
    file.close()
    other = begin(tmp_path / "prefix")
    assert other.report().num_blocks == pool.report().num_blocks
    assert_same(step(other), step(pool))
    other.reorder(torch.tensor([0]))
    pool.reorder(torch.tensor([0]))
    assert other.report().num_blocks == pool.report().num_blocks == 2 * (LENGTH // BLOCK)
    assert_same(step(other), step(pool))
    pool.close()
    other.close()


def test_blocks_that_left_a_window_are_not_saved(tmp_path: Path):
    pool = make_pool()
    for layer in range(2):
        pool.drop_before(layer, 17)
    pool.save(tmp_path / "prefix")
    other = begin(tmp_path / "prefix")
    assert other.length(0) == LENGTH
    assert other.report().num_blocks == pool.report().num_blocks == 2 * 2 * 3
    assert_same(step(other), step(pool))
    with pytest.raises(ValueError, match="keeps a window only"):
        other.crop(14)
    pool.close()
    other.close()


@pytest.mark.parametrize("kind", ["nosa", "labels", "labels4"])
def test_selectors_have_the_state_of_a_prefill(kind: str, saved: tuple[Path, Any]):
    def make() -> Any:
        if kind == "nosa":
            return Nosa(num_blocks=3, pool_tokens=4)
        bits = 4 if kind == "labels4" else None
        return DoubleSparsity([torch.tensor([[0, 3], [1, 2]])] * 2, num_blocks=3, bits=bits)

    pools = [make_pool(selector=make()), begin(saved[0], selector=make())]
    for pool in pools:
        pool.append(0, *torch.ones(2, 2, HEADS, 5, DIM))
    some, others = (step(pool) for pool in pools)
    torch.testing.assert_close(some, others)
    assert not torch.allclose(some, saved[1])
    reads = [report.num_hits + report.num_misses for report in (p.report() for p in pools)]
    assert reads[1] == reads[0] + 2 * 2 * HEADS * (LENGTH // BLOCK)  # and all keys once
    for pool in pools:
        pool.close()


@pytest.mark.parametrize("selector", ["window", "accumulated"])
def test_selectors_that_look_at_no_keys_read_none(selector: str, saved: tuple[Path, Any]):
    pools = [make_pool(selector=selector), begin(saved[0], selector=selector)]
    assert pools[1].report().read_bytes == 0
    torch.testing.assert_close(*(step(pool) for pool in pools))
    for pool in pools:
        pool.close()


def read_whole(path: Path) -> torch.Tensor:
    with contextlib.closing(begin(path)) as pool:
        return step(pool)


def test_a_flipped_bit_anywhere(saved: tuple[Path, torch.Tensor]):
    path, right = saved
    assert_same(read_whole(path), right)
    numbers, content = random.Random(0), path.read_bytes()
    num_records = 2 * 2 * HEADS * (LENGTH // BLOCK)
    ends = [4096 * i for i in range(1, num_records + 2)]
    places = [0, 8, 12, 40, *ends, *(end - 1 for end in ends), len(content) - 1]
    places += [numbers.randrange(len(content)) for _ in range(30)]
    places += [numbers.randrange(ends[-1], len(content)) for _ in range(70)]
    for place in places:
        damaged = bytearray(content)
        damaged[place] ^= 1 << numbers.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(PrefixFileError, match=r"is damaged|is no prefix file") as caught:
            read_whole(path)
        assert caught.value.path == str(path) and str(path) in str(caught.value)
    path.write_bytes(content)
    assert_same(read_whole(path), right)


def test_a_file_that_ends_early_or_late(saved: tuple[Path, torch.Tensor]):
    path, _ = saved
    content = path.read_bytes()
    lengths = [0, 1, 7, 8, 100, 4095, 4096, 4097, len(content) // 2, len(content) - 1]
    for some in [*(content[:length] for length in lengths), content + b"\0"]:
        path.write_bytes(some)
        with pytest.raises(PrefixFileError, match=r"is damaged|is no prefix file"):
            begin(path)


def test_records_in_each_others_place(saved: tuple[Path, torch.Tensor]):
    content = bytearray(saved[0].read_bytes())
    content[4096:12288] = content[8192:12288] + content[4096:8192]
    saved[0].write_bytes(content)
    with pytest.raises(PrefixFileError, match="damaged in the 4096 bytes at offset"):
        read_whole(saved[0])


def test_a_pool_with_a_damaged_record_goes_on(saved: tuple[Path, torch.Tensor]):
    path, right = saved
    content = bytearray(path.read_bytes())
    content[5000] ^= 1
    path.write_bytes(content)
    pool = begin(path)
    for _ in range(2):
        with pytest.raises(PrefixFileError, match="offset 4096"):
            step(pool)
    content[5000] ^= 1
    with path.open("r+b") as file:
        file.write(content)
    assert_same(step(pool), right)
    pool.close()


def test_another_file_takes_the_name(saved: tuple[Path, torch.Tensor]):
    path, right = saved
    pool = begin(path)
    shutil.copy(path, path.with_name("other"))
    path.with_name("other").replace(path)
    assert_same(step(pool), right)
    path.unlink()
    assert_same(step(pool), right)
    pool.save(path)
    assert_same(read_whole(path), right)
    pool.close()


def test_writing_to_the_file_while_it_is_open(saved: tuple[Path, torch.Tensor]):
    """Also to records that were read before, and found right."""
    path, right = saved
    pool = begin(path, device_memory="40KiB")
    assert_same(step(pool), right)
    before = path.stat()
    with path.open("r+b") as file:
        for i in range(2 * 2 * HEADS * (LENGTH // BLOCK)):
            file.seek(4096 * (i + 1))
            file.write(b"\xff")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(PrefixFileError, match="is damaged"):
        step(pool)
    pool.close()


def test_cutting_the_file_while_it_is_open(saved: tuple[Path, torch.Tensor]):
    path, _ = saved
    pool = begin(path)
    os.truncate(path, 8192)
    with pytest.raises(StoreReadError, match=f"{path}.*shorter than it was"):
        step(pool)
    pool.close()


def test_a_read_error(saved: tuple[Path, torch.Tensor], monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    pool = begin(saved[0])
    with monkeypatch.context() as patch:
        patch.setattr(_transfers, "_preadv", refuse)
        with pytest.raises(StoreReadError):
            step(pool)
    assert_same(step(pool), saved[1])
    pool.close()


def test_files_that_do_not_fit(saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch):
    path, _ = saved
    with pytest.raises(PrefixFileError, match=rf"{path}.*pass block_tokens=4"):
        begin(path, block_tokens=8)
    with pytest.raises(InfeasibleError, match="below one block per layer"):
        begin(path, device_memory="12KiB")
    for wrong in (path.parent / "none", path.parent):
        with pytest.raises(StoreUnavailableError, match=str(wrong)):
            begin(wrong)
    pool = begin(path)
    with pytest.raises(ValueError, match="holds 2 sequences"):
        pool.append(0, *torch.rand(2, 1, HEADS, 1, DIM))
    pool.close()
    monkeypatch.setattr(_prefix_file, "VERSION", 2)
    with contextlib.closing(make_pool()) as pool:
        pool.save(path)
    monkeypatch.undo()
    with pytest.raises(PrefixFileError, match=r"has version 2 .* reads version 1; install"):
        begin(path)


def test_a_limit_while_it_is_saved(tmp_path: Path):
    pool, (soft, hard) = make_pool(), resource.getrlimit(resource.RLIMIT_FSIZE)
    right = step(pool)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20 * 4096, hard))
    try:
        with pytest.raises(StoreFullError, match="prefix"):
            pool.save(tmp_path / "prefix")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []
    assert_same(step(pool), right)
    pool.save(tmp_path / "prefix")
    assert_same(read_whole(tmp_path / "prefix"), right)
    pool.close()


@pytest.mark.parametrize("event", ["write", "read", "queued read"])
def test_interrupts_while_it_is_saved(
    event: str, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """At each call in turn: nothing is left, and the pool is right or refuses by name."""
    num_refused = 0
    for at in range(0, 12, 3):
        pool = make_pool(store=store, device_memory="40KiB")
        right, left = step(pool), at
        owner, name = (StartedReads, "exception") if "q" in event else (_transfers, f"_p{event}v")
        original = getattr(owner, name)

        def interrupt(*args: Any, original: Any = original) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise KeyboardInterrupt
            return original(*args)

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupt)
            if event == "read":
                patch.setattr(_transfers, "can_queue_reads", lambda: False)
            with contextlib.suppress(KeyboardInterrupt):
                pool.save(tmp_path / "prefix")
        if left < 0:
            assert os.listdir(tmp_path) == []
        try:
            assert_same(step(pool), right)
        except PenstockError:
            num_refused += 1
            with pytest.raises(PenstockError, match="interrupted"):
                step(pool)
            pool.reset()
            for layer in range(2):
                pool.append(layer, *torch.rand(2, 2, HEADS, LENGTH, DIM))
            step(pool)
        pool.close()
    assert num_refused == (0 if event == "write" else 4)  # reads are those of the pool
