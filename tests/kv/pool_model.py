"""A pool beside tensors that are simply kept: the same operations on both, on any device."""

from __future__ import annotations

import contextlib
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.kv import BlockPool
from penstock.kv._attend import attend_pool
from penstock.kv._partial import ScoreRule
from penstock.kv._visibility import Visibility

DIM = 4
MOST_SEQUENCES = 6


def read_all(pool: BlockPool, layer: int) -> torch.Tensor:
    """Keys of all full blocks, `(B, H, tokens, dim)`."""
    batch, heads = pool.batch_size(layer), pool.layout(layer).num_heads
    blocks = torch.arange(pool.num_blocks(layer)).expand(batch, heads, -1)
    return pool.keys_of(layer, blocks).flatten(2, 3)


class PoolModel:
    """A pool of two layers, and what it must hold.

    Args:
        store: Directory.
        where: Tiers below: "host", "file" or "both".
        num_pages, slots: Pages and records of the budget.
    """

    device = "cpu"  # of tensors
    pool_device = "cpu"

    def __init__(
        self,
        store: Path,
        *,
        block_tokens: int,
        heads: int,
        where: str,
        num_pages: int = 2,
        slots: int,
        batch: int,
    ) -> None:
        self.store, self.heads, self.num_pages = store, heads, num_pages
        record_bytes = 64 * math.ceil(block_tokens * 2 * DIM * 4 / 64)
        if where != "host":
            record_bytes = 4096 * math.ceil(record_bytes / 4096)
        page_bytes = heads * record_bytes
        self.budget_bytes = num_pages * page_bytes + slots * record_bytes
        self.options: dict[str, Any] = {
            "device_memory": self.budget_bytes,
            "host_memory": {"host": None, "file": 0, "both": 2 * page_bytes}[where],
            "store": None if where == "host" else store,
            "block_tokens": block_tokens,
            "num_layers": 2,
            "device": self.pool_device,
        }
        self.pool = BlockPool(**self.options)
        empty = torch.zeros(batch, heads, 0, DIM)
        self.kept = dict.fromkeys(range(2), (empty, empty))
        self.dropped = dict.fromkeys(range(2), 0)  # first tokens of each layer that are forgotten
        self.generator = torch.Generator().manual_seed(block_tokens)

    def to_pool(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the pool's device."""
        return tensor.to(self.device)

    def from_pool(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the CPU, computed."""
        return tensor.cpu()

    def launch(self) -> contextlib.AbstractContextManager[None]:
        """The context of the pool's calls."""
        return contextlib.nullcontext()

    def append(self, layer: int, length: int) -> None:
        shape = (self.kept[layer][0].shape[0], self.heads, length, DIM)
        keys, values = (torch.rand(shape, generator=self.generator) for _ in range(2))
        with self.launch():
            self.pool.append(layer, self.to_pool(keys), self.to_pool(values))
        before = self.kept[layer]
        self.kept[layer] = (torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2))

    def drop_before(self, layer: int, token: int) -> None:
        with self.launch():
            self.pool.drop_before(layer, token)
        full = self.pool.num_blocks(layer) * self.pool.block_tokens
        block = token // self.pool.block_tokens * self.pool.block_tokens
        self.dropped[layer] = max(self.dropped[layer], min(block, full))

    def crop(self, layer: int, length: int) -> None:
        keys, values = self.kept[layer]
        tail = length - length % self.pool.block_tokens
        if tail < self.dropped[layer] and tail < length < keys.shape[2]:
            with pytest.raises(ValueError, match="keeps a window only"), self.launch():
                self.pool.crop(length, [layer])
            return
        with self.launch():
            self.pool.crop(length, [layer])
        self.kept[layer] = keys[:, :, :length], values[:, :, :length]
        self.dropped[layer] = min(self.dropped[layer], length)

    def reorder(self, index: list[int]) -> None:
        chosen = torch.tensor(index)
        with self.launch():
            self.pool.reorder(chosen)
        self.kept = {
            layer: (keys[index], values[index]) for layer, (keys, values) in self.kept.items()
        }

    def repeat(self, layer: int, repeats: int) -> None:
        if self.pool.length(layer) and self.pool.batch_size(layer) * repeats <= MOST_SEQUENCES:
            with self.launch():
                self.pool.repeat(repeats, [layer])
            keys, values = self.kept[layer]
            self.kept[layer] = (
                keys.repeat_interleave(repeats, 0),
                values.repeat_interleave(repeats, 0),
            )

    def reset(self, layer: int) -> None:
        with self.launch():
            self.pool.reset([layer])
        keys, values = self.kept[layer]
        self.kept[layer] = keys[:, :, :0], values[:, :, :0]
        self.dropped[layer] = 0

    def save_and_load(self) -> None:
        path = self.store / "prefix"
        with self.launch():
            self.pool.save(path)
        self.pool.close()
        # In a prefix file a record takes a multiple of 4096 bytes, and so does it in slots.
        self.budget_bytes = max(self.budget_bytes, (self.num_pages * self.heads + 1) * 4096)
        options = {**self.options, "device_memory": self.budget_bytes}
        with self.launch():
            self.pool = BlockPool(**options, prefix=path)
        path.unlink()

    def attend(self, layer: int, num_queries: int) -> None:
        first = self.dropped[layer]
        keys, values = (each[:, :, first:] for each in self.kept[layer])
        if not keys.shape[2]:
            return
        shape = (keys.shape[0], 2 * self.heads, num_queries, DIM)
        query = torch.rand(shape, generator=self.generator)
        visibility = Visibility(device=self.device)
        with self.launch():
            call = self.pool, layer, self.to_pool(query), ScoreRule(0.5), visibility
            out = attend_pool(*call, first_token=first)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1), scale=0.5
        )
        torch.testing.assert_close(self.from_pool(out), expected, atol=1e-5, rtol=1e-5)

    def check(self) -> None:
        """Compare what the pool holds, and its bytes."""
        for layer, (keys, _) in self.kept.items():
            assert self.pool.length(layer) == keys.shape[2]
            if self.pool.num_blocks(layer):
                full = self.pool.num_blocks(layer) * self.pool.block_tokens
                with self.launch():
                    found = read_all(self.pool, layer)
                right = keys[:, :, :full].clone()
                right[:, :, : self.dropped[layer]] = 0
                assert torch.equal(self.from_pool(found), right)
        report = self.pool.report()
        assert report.device_bytes - report.tail_bytes <= self.budget_bytes


def run_any_order(model: PoolModel, seed: int, num_steps: int) -> None:
    """Take seeded operations, most of which add or read tokens."""
    draw = random.Random(seed)
    for step in range(num_steps):
        layer = draw.randrange(2)
        kind = draw.choice(
            ["append"] * 4 + ["attend"] * 4 + ["crop", "reorder", "repeat", "drop", "other"]
        )
        if kind == "append":
            model.append(layer, draw.randint(1, 13))
        elif kind == "attend":
            model.attend(layer, draw.choice([1, 2, 20]))
        elif kind == "crop":
            model.crop(layer, draw.randint(0, model.kept[layer][0].shape[2] + 2))
        elif kind == "reorder" and all(model.pool.length(each) for each in range(2)):
            least = min(model.pool.batch_size(each) for each in range(2))
            model.reorder([draw.randrange(least) for _ in range(draw.randint(1, 4))])
        elif kind == "repeat":
            model.repeat(layer, 2)
        elif kind == "drop":
            model.drop_before(layer, draw.randint(0, model.kept[layer][0].shape[2]))
        elif kind == "other":
            model.save_and_load() if draw.randrange(2) else model.reset(layer)
        if step % 4 == 3:
            model.check()
    model.check()
    model.pool.close()
