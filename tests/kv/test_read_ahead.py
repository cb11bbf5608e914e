"""Reading ahead across layers: the right bytes, counted; errors where the bytes were needed."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.errors import StoreReadError
from penstock.kv import BlockPool, _attend
from penstock.kv._attend import attend_pool
from penstock.kv._partial import ScoreRule
from penstock.kv._visibility import Visibility
from penstock.memory import Link, _transfers

pytestmark = pytest.mark.usefixtures("one_thread")
LAYERS, HEADS, DIM, BLOCK = 3, 2, 32, 16
RECORD_BYTES = 4096
LENGTH = 212


class Model:
    """A pool of several layers, and the tensors that it holds."""

    def __init__(self, store: Path, budget: int = 16 * RECORD_BYTES, batch: int = 1) -> None:
        self.generator = torch.Generator().manual_seed(budget + batch)
        self.pool = BlockPool(
            device_memory=budget, store=store, block_tokens=BLOCK, num_layers=LAYERS
        )
        empty = torch.zeros(batch, HEADS, 0, DIM)
        self.tensors = [(empty, empty)] * LAYERS

    def append(self, layer: int, length: int) -> None:
        shape = (self.tensors[layer][0].shape[0], HEADS, length, DIM)
        new = [torch.rand(shape, generator=self.generator) for _ in range(2)]
        self.pool.append(layer, *new)
        keys, values = (torch.cat(pair, 2) for pair in zip(self.tensors[layer], new, strict=True))
        self.tensors[layer] = keys, values

    def attend(self, layer: int) -> None:
        keys, values = self.tensors[layer]
        query = torch.rand(len(keys), 2 * HEADS, 1, DIM, generator=self.generator)
        out = attend_pool(self.pool, layer, query, ScoreRule(0.5), Visibility())
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1), scale=0.5
        )
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)

    def step(self, length: int = 1) -> None:
        for layer in range(LAYERS):
            if length:
                self.append(layer, length)
            self.attend(layer)

    def crop(self, length: int) -> None:
        self.pool.crop(length)
        self.tensors = [(k[:, :, :length], v[:, :, :length]) for k, v in self.tensors]

    def reorder(self, index: list[int]) -> None:
        self.pool.reorder(torch.tensor(index))
        self.tensors = [(k[index], v[index]) for k, v in self.tensors]

    def check_bytes(self) -> None:
        report = self.pool.report()
        assert report.read_bytes == report.num_misses * RECORD_BYTES
        moved = self.pool.ledger.moved(Link.FILE_TO_DEVICE)
        assert moved == report.read_bytes + report.unused_bytes


@pytest.fixture
def model(store: Path) -> Iterator[Model]:
    made = Model(store)
    for layer in range(LAYERS):
        made.append(layer, LENGTH)
    made.step()
    made.step()
    yield made
    made.pool.close()


class Reads:
    """Reads of the file, by offset; `refuse` makes those of some offsets fail, `hold` wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offsets: list[int] = []
        self.refused: set[int] = set()
        self.held: set[int] = set()
        self.holding, self.go_on = threading.Event(), threading.Event()
        preadv = _transfers._preadv

        def read(fd: int, buffers: list[memoryview], offset: int) -> int:
            self.offsets.append(offset)
            if offset in self.held:
                self.holding.set()
                assert self.go_on.wait(60)
            if offset in self.refused:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return preadv(fd, buffers, offset)

        monkeypatch.setattr(_transfers, "_preadv", read)
        monkeypatch.setattr(_transfers, "can_queue_reads", lambda: False)

    def of(self, model: Model, layer: int) -> set[int]:
        """Return the offsets at which a step begins to read a layer, and not another one."""
        seen = []
        for each in range(LAYERS):
            model.pool._tiers.reads.drop_ahead()
            self.offsets.clear()
            keys = torch.arange(model.pool.num_blocks(each)).expand(1, HEADS, -1)
            model.pool.keys_of(each, keys)
            seen.append(set(self.offsets))
        for each in range(LAYERS):
            model.attend(each)
        others = set().union(*(seen[each] for each in range(LAYERS) if each != layer))
        return seen[layer] - others


def test_steady_steps_read_what_they_miss_and_nothing_else(model: Model):
    for number in range(2 * BLOCK):  # blocks become full meanwhile
        before = model.pool.report()
        model.step()
        after = model.pool.report()
        assert after.num_misses > before.num_misses, number
        assert after.unused_bytes == 0
        model.check_bytes()


def test_the_next_layer_is_read_before_it_is_asked_for(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    reads = Reads(monkeypatch)
    of_next = reads.of(model, 1)
    reads.offsets.clear()
    reads.held = of_next
    model.attend(0)
    assert reads.holding.wait(60), "a read of the next layer is under way"
    reads.go_on.set()
    model.attend(1)
    model.check_bytes()


def test_the_first_layer_is_read_between_steps(model: Model, monkeypatch: pytest.MonkeyPatch):
    reads = Reads(monkeypatch)
    of_first = reads.of(model, 0)
    model.attend(0)
    reads.held = of_first
    for layer in range(1, LAYERS):
        model.attend(layer)
    assert reads.holding.wait(60)
    reads.go_on.set()
    before = model.pool.report().unused_bytes
    model.step()
    assert model.pool.report().unused_bytes == before


@pytest.mark.parametrize("budget", [7, 12, 40])
@pytest.mark.parametrize("batch", [1, 3])
def test_changes_between_steps(store: Path, budget: int, batch: int):
    model = Model(store, budget * RECORD_BYTES, batch)
    choice = random.Random(budget * batch)
    for layer in range(LAYERS):
        model.append(layer, LENGTH)
    for _ in range(24):
        model.step(choice.choice([0, 1, 1, 5, BLOCK]))
        kind = choice.randrange(8)
        length = model.pool.length(0)
        if kind == 0:
            model.crop(length - choice.randrange(1, 3 * BLOCK))
        elif kind == 1:
            model.reorder([choice.randrange(batch) for _ in range(batch)])
        elif kind == 2:  # layers in another order, or not at all
            model.attend(choice.randrange(LAYERS))
        elif kind == 3:
            model.pool.keys_of(1, torch.zeros(batch, HEADS, 1, dtype=torch.int64))
        model.check_bytes()
    model.pool.close()
    assert list(store.iterdir()) == []


def test_an_error_is_raised_by_the_layer_that_needed_the_bytes(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    reads = Reads(monkeypatch)
    reads.refused = reads.of(model, 1)
    model.attend(0)
    with pytest.raises(StoreReadError):
        model.attend(1)
    model.attend(2)
    reads.refused = set()
    for _ in range(3):  # nothing was lost
        model.step()


def test_an_error_of_bytes_that_nothing_needs_is_not_raised(
    model: Model, monkeypatch: pytest.MonkeyPatch
):
    reads = Reads(monkeypatch)
    reads.refused = reads.of(model, 1)
    model.attend(0)
    model.crop(BLOCK)
    reads.refused = set()
    model.step(3 * BLOCK)
    model.attend(0)


def test_bytes_that_are_not_used_are_counted(model: Model):
    model.attend(0)
    model.crop(0)
    report = model.pool.report()
    assert report.unused_bytes > 0
    model.check_bytes()


def test_close_while_reads_are_under_way(
    model: Model, store: Path, monkeypatch: pytest.MonkeyPatch
):
    reads = Reads(monkeypatch)
    reads.held = reads.of(model, 1)
    model.attend(0)
    assert reads.holding.wait(60)
    thread = threading.Thread(target=model.pool.close)
    thread.start()
    reads.go_on.set()
    thread.join(60)
    assert not thread.is_alive()
    assert list(store.iterdir()) == []


@pytest.mark.parametrize("batch", [1, 3])
def test_long_calls_gather_group_after_group(
    store: Path, batch: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(_attend, "_GROUP_BYTES", 3 * batch * HEADS * RECORD_BYTES)
    model = Model(store, 9 * RECORD_BYTES, batch)
    model.append(0, LENGTH)
    keys, values = model.tensors[0]
    query = torch.rand(batch, HEADS, 40, DIM)
    for first in (0, 5 * BLOCK + 3, LENGTH - 2):
        out = attend_pool(model.pool, 0, query, ScoreRule(0.5), Visibility(), first_token=first)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, keys[:, :, first:], values[:, :, first:], scale=0.5
        )
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    model.pool.close()


@pytest.mark.parametrize("length", [BLOCK, 1])
@pytest.mark.parametrize("num_blocks", [4, 7, 10, 12])
def test_blocks_that_follow_a_group_that_was_not_full(store: Path, num_blocks: int, length: int):
    """What was read ahead ends within a buffer where a layer has had no more blocks by then."""
    model = Model(store, budget=num_blocks * LAYERS * HEADS * RECORD_BYTES)
    for _ in range(8 * BLOCK // length):
        model.step(length)
    model.check_bytes()
    model.pool.close()
