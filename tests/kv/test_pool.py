"""The pool against a dictionary of tensors, its bytes, and faults of the file."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.errors import PenstockError, StoreFullError, StoreReadError, StoreWriteError
from penstock.kv import BlockPool
from penstock.kv._attend import attend_pool
from penstock.kv._partial import ScoreRule, attend, merge, score, weigh
from penstock.kv._visibility import Visibility
from penstock.memory import FileStore, _transfers
from penstock.memory._read_queue import QueuedReads
from pool_model import PoolModel

pytestmark = pytest.mark.usefixtures("one_thread")


class PoolMachine(RuleBasedStateMachine):
    """Any order of operations."""

    store: Path

    @initialize(
        block_tokens=st.integers(1, 5),
        heads=st.integers(1, 3),
        where=st.sampled_from(["host", "file", "both"]),
        slots=st.integers(0, 6),
        batch=st.integers(1, 3),
    )
    def make(self, **options: Any) -> None:
        self.model = PoolModel(self.store, **options)

    def teardown(self) -> None:
        if hasattr(self, "model"):
            self.model.pool.close()

    @rule(layer=st.integers(0, 1), length=st.integers(1, 13))
    def append(self, layer: int, length: int) -> None:
        self.model.append(layer, length)

    @rule(data=st.data(), layer=st.integers(0, 1))
    def crop(self, data: st.DataObject, layer: int) -> None:
        self.model.crop(layer, data.draw(st.integers(0, self.model.kept[layer][0].shape[2] + 2)))

    @rule(data=st.data(), layer=st.integers(0, 1))
    def drop_before(self, data: st.DataObject, layer: int) -> None:
        length = self.model.kept[layer][0].shape[2]
        self.model.drop_before(layer, data.draw(st.integers(0, length)))

    @precondition(lambda self: all(self.model.pool.length(layer) for layer in range(2)))
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        least = min(self.model.pool.batch_size(layer) for layer in range(2))
        index = st.lists(st.integers(0, least - 1), min_size=1, max_size=4)
        self.model.reorder(data.draw(index))

    @rule(layer=st.integers(0, 1), repeats=st.integers(1, 2))
    def repeat(self, layer: int, repeats: int) -> None:
        self.model.repeat(layer, repeats)

    @rule(layer=st.integers(0, 1))
    def reset(self, layer: int) -> None:
        self.model.reset(layer)

    @rule()
    def save_and_load(self) -> None:
        self.model.save_and_load()

    @rule(layer=st.integers(0, 1), num_queries=st.sampled_from([1, 2, 20]))
    def attend(self, layer: int, num_queries: int) -> None:
        self.model.attend(layer, num_queries)

    @invariant()
    def holds_the_same(self) -> None:
        if hasattr(self, "model"):
            self.model.check()


def test_any_order_of_operations(store: Path):
    machine = type("Machine", (PoolMachine,), {"store": store})
    machine.TestCase.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
    machine.TestCase("runTest").runTest()


def test_freed_blocks_give_their_bytes_back(store: Path):
    pool = BlockPool(device_memory="16KiB", store=store, block_tokens=16)
    for _ in range(5):
        pool.append(0, torch.rand(1, 1, 400, 32), torch.rand(1, 1, 400, 32))
        pool.reset()
    report = pool.report()
    assert (report.file_bytes, report.num_blocks, report.tail_bytes) == (0, 0, 0)
    pool.append(0, torch.rand(1, 1, 400, 32), torch.rand(1, 1, 400, 32))
    assert pool.report().file_bytes <= 25 * 4096
    pool.close()


def test_memory_of_the_process_stays_within_the_budget(store: Path):
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    pool = BlockPool(device_memory="8MiB", store=store)
    some = torch.rand(1, 4, 1024, 64)
    query = torch.rand(1, 8, 1, 64)
    pool.append(0, some, some)
    attend_pool(pool, 0, query, ScoreRule(0.1), Visibility())
    before = resident_bytes()
    for _ in range(63):  # 128 MiB in all
        pool.append(0, some, some)
    attend_pool(pool, 0, query, ScoreRule(0.1), Visibility())
    grown = resident_bytes() - before
    assert pool.report().file_bytes > 100 * 2**20
    assert pool.report().peak_device_bytes <= 8 * 2**20 + pool.report().tail_bytes
    assert grown <= 8 * 2**20 + 16 * 2**20
    pool.close()


def fill(pool: BlockPool, length: int = 400) -> None:
    pool.append(0, torch.rand(1, 2, length, 32), torch.rand(1, 2, length, 32))


def step(pool: BlockPool) -> torch.Tensor:
    return attend_pool(pool, 0, torch.rand(1, 2, 1, 32), ScoreRule(1.0), Visibility())


def fill_and_step(pool: BlockPool) -> None:
    fill(pool)
    step(pool)


def test_a_full_disk(store: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    pool = BlockPool(device_memory="32KiB", store=store, block_tokens=16)
    fill(pool)
    step(pool)  # waits for what is being written
    monkeypatch.setattr(_transfers, "_pwritev", refuse)
    with pytest.raises(PenstockError) as caught:
        fill_and_step(pool)
    # Writes go on behind: the call after the one whose write failed says so.
    failure = caught.value.__cause__ or caught.value
    assert isinstance(failure, (StoreFullError, StoreWriteError, OSError)), failure
    monkeypatch.undo()
    with pytest.raises(PenstockError, match="lost tokens"):
        step(pool)
    pool.reset()
    fill(pool)
    step(pool)
    pool.close()
    assert list(store.iterdir()) == []


def test_a_store_that_is_too_small(store: Path):
    pool = BlockPool(device_memory="32KiB", store=FileStore(store, "512KiB"), block_tokens=16)
    with pytest.raises(StoreFullError):
        fill(pool, 4000)
    pool.close()


def finish_with_nothing(
    reads: QueuedReads, finish: Callable[[QueuedReads], np.ndarray] = QueuedReads.finish
) -> np.ndarray:
    """Let none of the reads be whole, so that each is repeated."""
    return np.zeros_like(finish(reads))


def test_reads_that_are_repeated(store: Path, monkeypatch: pytest.MonkeyPatch):
    pool = BlockPool(device_memory="32KiB", store=store, block_tokens=16)
    fill(pool)
    query = torch.rand(1, 2, 1, 32)
    right = attend_pool(pool, 0, query, ScoreRule(1.0), Visibility())
    monkeypatch.setattr(QueuedReads, "finish", finish_with_nothing)
    again = attend_pool(pool, 0, query, ScoreRule(1.0), Visibility())
    torch.testing.assert_close(again, right, rtol=1e-5, atol=1e-6)
    pool.close()


def test_a_read_error(store: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    pool = BlockPool(device_memory="32KiB", store=store, block_tokens=16)
    fill(pool)
    right = step(pool)
    assert torch.isfinite(right).all()
    monkeypatch.setattr(_transfers, "_preadv", refuse)
    monkeypatch.setattr(QueuedReads, "finish", finish_with_nothing)
    with pytest.raises(StoreReadError):
        step(pool)
    monkeypatch.undo()
    step(pool)  # nothing was lost
    pool.close()


def test_misses_are_the_bytes_that_are_read(store: Path):
    pool = BlockPool(device_memory="64KiB", store=store, block_tokens=16)
    fill(pool)
    num_records = 2 * pool.num_blocks(0)
    for _ in range(3):
        before = pool.report()
        step(pool)
        after = pool.report()
        hits, misses = after.num_hits - before.num_hits, after.num_misses - before.num_misses
        assert hits + misses == num_records
        assert hits > 0
        assert after.read_bytes - before.read_bytes == misses * 4096
    pool.close()


def test_selected_blocks_find_room_beside_the_buffers_of_a_file(store: Path):
    """They take an eighth of the budget where a selector chooses, and not half of it."""
    from penstock.kv.selectors import Window

    window = Window(num_blocks=24)  # 48 records of the 64 that the budget is
    pool = BlockPool(device_memory="256KiB", store=store, block_tokens=16, selector=window)
    fill(pool, 1600)
    for _ in range(8):  # it learns which blocks are read again
        step(pool)
    before = pool.report()
    step(pool)
    after = pool.report()
    assert after.num_hits - before.num_hits == 48
    assert after.num_misses == before.num_misses > 0
    assert after.peak_device_bytes <= 256 * 1024 + after.tail_bytes
    pool.close()


def test_tokens_of_more_sequences_than_are_left():
    pool = BlockPool(device_memory="64KiB", block_tokens=16)
    some = torch.rand(4, 1, 1, 8)
    for _ in range(2):
        pool.append(0, some, some)
    pool.reorder(torch.tensor([2, 0]))
    with pytest.raises(ValueError, match=r"holds 2 sequences.*got\s+4 of"):
        pool.append(0, some, some)
    pool.append(0, some[:2], some[:2])
    assert pool.length(0) == 3
    pool.close()


def test_blocks_that_are_dropped_again_after_a_crop():
    pool = BlockPool(device_memory="64KiB", block_tokens=16)
    some = torch.rand(1, 1, 96, 8)
    pool.append(0, some, some)
    pool.drop_before(0, 64)
    assert pool.report().num_blocks == 2
    pool.crop(32)
    pool.append(0, some, some)
    assert pool.report().num_blocks == 6
    pool.drop_before(0, 50)
    assert pool.report().num_blocks == 5
    pool.close()


def test_shapes_that_do_not_fit():
    pool = BlockPool(device_memory="64KiB", block_tokens=16)
    fill(pool, 20)
    with pytest.raises(ValueError, match="holds 1 sequences"):
        pool.append(0, torch.rand(2, 2, 1, 32), torch.rand(2, 2, 1, 32))
    with pytest.raises(ValueError, match="differ in dim only"):
        pool.append(0, torch.rand(1, 2, 1, 32), torch.rand(1, 2, 2, 32))
    with pytest.raises(TypeError, match="float64"):
        pool.append(1, torch.rand(1, 2, 1, 32).double(), torch.rand(1, 2, 1, 32).double())
    with pytest.raises(ValueError, match="on the pool's device, cpu; got meta and cpu"):
        pool.append(0, torch.rand(1, 2, 1, 32, device="meta"), torch.rand(1, 2, 1, 32))
    with pytest.raises(IndexError):
        pool.reorder(torch.tensor([1]))
    assert pool.length(0) == 20
    pool.close()


@pytest.mark.parametrize("selector", ["window", "nosa", "accumulated"])
def test_a_selector_of_every_block_is_exact(selector: str):
    from penstock.kv import selectors

    kind = {"window": "Window", "nosa": "Nosa", "accumulated": "Accumulated"}[selector]
    some = torch.rand(2, 2, 300, 32)
    pools = [
        BlockPool(device_memory="64KiB", block_tokens=16, selector=each)
        for each in ("all", getattr(selectors, kind)(share=1.0))
    ]
    outs = []
    for pool in pools:
        pool.append(0, some, some)
        torch.manual_seed(1)
        query = torch.rand(2, 4, 1, 32)
        outs.append(attend_pool(pool, 0, query, ScoreRule(1.0), Visibility(query_start=299)))
        pool.close()
    torch.testing.assert_close(*outs)


def test_window_reads_sinks_and_recent_blocks():
    from penstock.kv.selectors import Window

    keys, values = torch.rand(1, 1, 330, 32), torch.rand(1, 1, 330, 32)
    pool = BlockPool(
        device_memory="64KiB", block_tokens=16, selector=Window(num_blocks=4, num_sinks=1)
    )
    pool.append(0, keys, values)
    query = torch.rand(1, 1, 1, 32)
    out = attend_pool(pool, 0, query, ScoreRule(1.0), Visibility())
    seen = [*range(16), *range(320 - 48, 330)]
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, keys[:, :, seen], values[:, :, seen], scale=1.0
    )
    torch.testing.assert_close(out, expected)
    assert pool.report().num_hits + pool.report().num_misses == 4
    pool.close()


@pytest.mark.parametrize("is_padded", [False, True])
def test_a_window_that_is_resident(is_padded: bool):
    """Its addresses are kept from step to step; only blocks with tokens that are seen are read."""
    keys, values = torch.rand(2, 2, 2, 330, 32)
    pool = BlockPool(device_memory="4MiB", block_tokens=16)
    pool.append(0, keys, values)
    padding = torch.ones(2, 400, dtype=torch.bool)
    if is_padded:
        padding[1, :100] = False  # of the blocks 2 to 19, four are hidden in the second sequence
    for step, first_token in enumerate((37, 38, 48)):
        query = torch.rand(2, 4, 1, 32)
        visibility = Visibility(2, 329 + step, is_causal=True, padding=padding)
        before = pool.report().num_hits
        out = attend_pool(pool, 0, query, ScoreRule(1.0), visibility, first_token=first_token)
        num_blocks = pool.num_blocks(0) - first_token // 16
        num_hidden = 6 - first_token // 16 if is_padded else 0
        assert pool.report().num_hits - before == 2 * (2 * num_blocks - num_hidden)
        seen = padding[:, None, None, : keys.shape[2]].clone()
        seen[..., :first_token] = False
        repeated = (each.repeat_interleave(2, 1) for each in (keys, values))
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, *repeated, seen, scale=1.0
        )
        torch.testing.assert_close(out, expected)
        more = torch.rand(2, 2, 2, 1, 32)
        pool.append(0, *more)
        keys, values = torch.cat([keys, more[0]], 2), torch.cat([values, more[1]], 2)
    assert pool.report().num_misses == 0
    pool.close()


class DrawnBlocks:
    """A selector that draws three blocks for each sequence and head, and keeps what it is told."""

    def __init__(self, *, with_fill: bool) -> None:
        self.with_fill = with_fill

    def select(self, query: torch.Tensor, layer: int, pool: Any) -> torch.Tensor:
        order = torch.rand(query.shape[0], 2, pool.num_blocks(layer)).argsort(-1)
        self.chosen = order[..., :3].sort(dim=-1).values
        if self.with_fill:
            self.chosen[0, 1, 2] = -1
        return self.chosen

    def note(self, layer: int, blocks: torch.Tensor, weights: torch.Tensor) -> None:
        shape = (*blocks.shape[:2], 1 + int(blocks.max()))
        self.weights = torch.zeros(shape).scatter_add_(2, blocks.clamp(min=0), weights)


@pytest.mark.parametrize("way", ["resident", "in host memory", "filled", "shared"])
def test_chosen_blocks_are_read_wherever_they_are(way: str):
    """Where a layer is resident, chosen blocks are found by the addresses of the step before."""
    selector = DrawnBlocks(with_fill=way == "filled")
    budget = "64KiB" if way == "in host memory" else "4MiB"
    pool = BlockPool(device_memory=budget, block_tokens=16, selector=selector)
    keys, values = torch.rand(2, 2, 2, 190, 32)
    pool.append(0, keys, values)
    if way == "shared":
        pool.reorder(torch.tensor([1, 1]))
        keys, values = keys[[1, 1]], values[[1, 1]]
    for _ in range(4):  # the last two have a block more
        query = torch.rand(2, 4, 1, 32)
        before = pool.report()
        out = attend_pool(pool, 0, query, ScoreRule(1.0), Visibility(2, keys.shape[2] - 1))
        after, chosen = pool.report(), selector.chosen
        distinct = {
            (0 if way == "shared" else b, h, int(c))
            for b, h in np.ndindex(2, 2)
            for c in chosen[b, h]
            if c >= 0
        }
        num_read = [each.num_hits + each.num_misses for each in (before, after)]
        assert num_read[1] - num_read[0] == len(distinct)
        assert (after.num_misses == 0) == (way != "in host memory")
        is_read = torch.zeros(2, 2, keys.shape[2] // 16 + 1, dtype=torch.bool)
        is_read = is_read.scatter(2, chosen.where(chosen >= 0, chosen[..., :1]), True)
        is_read[..., -1] = True  # the unfinished block
        seen = is_read.repeat_interleave(16, 2)[..., : keys.shape[2]].repeat_interleave(2, 1)
        repeated = [each.repeat_interleave(2, 1) for each in (keys, values)]
        scores = (query @ repeated[0].mT).masked_fill(~seen.unsqueeze(2), -math.inf)
        weights = scores.softmax(-1)
        torch.testing.assert_close(out, weights @ repeated[1])
        shares = torch.nn.functional.pad(weights, (0, -keys.shape[2] % 16)).unflatten(-1, (-1, 16))
        shares = shares.sum(-1).unflatten(1, (2, 2)).sum((2, 3))
        torch.testing.assert_close(selector.weights, shares[..., : selector.weights.shape[2]])
        more = torch.rand(2, 2, 2, 1, 32)
        pool.append(0, *more)
        keys, values = torch.cat([keys, more[0]], 2), torch.cat([values, more[1]], 2)
    pool.close()


@given(st.data())
@settings(max_examples=40)
def test_parts_merge_to_the_whole(data: st.DataObject):
    num_keys = data.draw(st.integers(1, 12))
    cuts = sorted(data.draw(st.sets(st.integers(1, num_keys), max_size=4)) | {num_keys})
    torch.manual_seed(num_keys)
    query, keys = torch.randn(2, 4, 3, 8).double(), torch.randn(2, 2, num_keys, 8).double()
    values = torch.randn(2, 2, num_keys, 5).double()
    softcap = data.draw(st.sampled_from([None, 2.0]))
    visible = torch.rand(2, 1, 3, num_keys) < data.draw(st.sampled_from([0.3, 0.9]))
    bias = torch.randn(1, 4, 3, num_keys).double()
    rule = ScoreRule(0.7, softcap)
    parts, first = [], 0
    for cut in cuts:
        some = slice(first, cut)
        scores = score(query, keys[:, :, some], rule, bias[..., some], visible[..., some])
        parts.append(weigh(scores, values[:, :, some]))
        first = cut
    scores = 0.7 * query @ keys.repeat_interleave(2, 1).mT
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    scores = (scores + bias).masked_fill(~visible, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    out, lse = merge(parts)
    torch.testing.assert_close(out, weights @ values.repeat_interleave(2, 1))
    torch.testing.assert_close(lse, scores.logsumexp(-1))


@pytest.mark.parametrize("shape", [(1, 50), (40, 50), (700, 900)])
@pytest.mark.parametrize("kind", ["causal", "all", "window", "padding"])
def test_long_queries_in_chunks(shape: tuple[int, int], kind: str):
    num_queries, num_keys = shape
    torch.manual_seed(0)
    query, keys, values = torch.randn(2, 4, num_queries, 8), *torch.randn(2, 2, 2, num_keys, 8)
    start = num_keys - num_queries
    padding = torch.ones(2, num_keys, dtype=torch.bool)
    padding[1, : num_keys // 3] = False
    visibility = Visibility(
        batch_size=2,
        query_start=start,
        is_causal=kind in ("causal", "padding"),
        rule=(lambda b, h, q, k: (k <= q) & (k > q - 20)) if kind == "window" else None,
        padding=padding if kind == "padding" else None,
    )
    out, _ = attend(query, keys, values, ScoreRule(0.4), visibility, 0)
    q, k = torch.arange(num_queries)[:, None] + start, torch.arange(num_keys)[None]
    seen = torch.ones(2, 1, num_queries, num_keys, dtype=torch.bool)
    seen &= (k <= q) | (kind == "all")
    seen &= (k > q - 20) | (kind != "window")
    seen &= padding[:, None, None] | (kind != "padding")
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1), seen, scale=0.4
    )
    torch.testing.assert_close(out, expected.nan_to_num(0.0), atol=1e-5, rtol=1e-5)
