"""A pool against a dictionary of tensors, in any order of operations, on any device."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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


class PoolMachine(RuleBasedStateMachine):
    """Any order of operations, against tensors that are simply kept."""

    store: Path
    device = "cpu"
    num_pages = 2  # of the least budget
    options: dict[str, Any]

    def to_pool(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the pool's device."""
        return tensor

    def from_pool(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the CPU, computed."""
        return tensor

    def launch(self) -> contextlib.AbstractContextManager[None]:
        """What calls of the pool are made in."""
        return contextlib.nullcontext()

    @initialize(
        block_tokens=st.integers(1, 5),
        heads=st.integers(1, 3),
        where=st.sampled_from(["host", "file", "both"]),
        slots=st.integers(0, 6),
        batch=st.integers(1, 3),
    )
    def make(self, block_tokens: int, heads: int, where: str, slots: int, batch: int) -> None:
        self.heads = heads
        record_bytes = 64 * math.ceil(block_tokens * 2 * DIM * 4 / 64)
        if where != "host":
            record_bytes = 4096 * math.ceil(record_bytes / 4096)
        page_bytes = heads * record_bytes
        self.budget_bytes = self.num_pages * page_bytes + slots * record_bytes
        self.options = {
            "device_memory": self.budget_bytes,
            "host_memory": {"host": None, "file": 0, "both": 2 * page_bytes}[where],
            "store": None if where == "host" else self.store,
            "block_tokens": block_tokens,
            "num_layers": 2,
            "device": self.device,
        }
        self.pool = BlockPool(**self.options)
        empty = torch.zeros(batch, heads, 0, DIM)
        self.model = dict.fromkeys(range(2), (empty, empty))
        self.generator = torch.Generator().manual_seed(block_tokens)

    def teardown(self) -> None:
        if hasattr(self, "pool"):
            self.pool.close()

    @rule(layer=st.integers(0, 1), length=st.integers(1, 13))
    def append(self, layer: int, length: int) -> None:
        batch = self.model[layer][0].shape[0]
        if self.pool.length(layer) == 0:
            batch = max(batch, 1)
        shape = (batch, self.heads, length, DIM)
        keys, values = (torch.rand(shape, generator=self.generator) for _ in range(2))
        with self.launch():
            self.pool.append(layer, self.to_pool(keys), self.to_pool(values))
        before = [each.expand(batch, -1, -1, -1) for each in self.model[layer]]
        self.model[layer] = (torch.cat([before[0], keys], 2), torch.cat([before[1], values], 2))

    @rule(data=st.data(), layer=st.integers(0, 1))
    def crop(self, data: st.DataObject, layer: int) -> None:
        length = data.draw(st.integers(0, self.model[layer][0].shape[2] + 2))
        with self.launch():
            self.pool.crop(length, [layer])
        keys, values = self.model[layer]
        self.model[layer] = keys[:, :, :length], values[:, :, :length]

    @precondition(lambda self: all(self.pool.length(layer) for layer in range(2)))
    @rule(data=st.data())
    def reorder(self, data: st.DataObject) -> None:
        least = min(self.pool.batch_size(layer) for layer in range(2))
        index = data.draw(st.lists(st.integers(0, least - 1), min_size=1, max_size=4))
        chosen = torch.tensor(index)
        with self.launch():
            self.pool.reorder(chosen)
        self.model = {
            layer: (keys[index], values[index]) for layer, (keys, values) in self.model.items()
        }

    @rule(layer=st.integers(0, 1), repeats=st.integers(1, 2))
    def repeat(self, layer: int, repeats: int) -> None:
        if self.pool.length(layer) and self.pool.batch_size(layer) * repeats <= MOST_SEQUENCES:
            with self.launch():
                self.pool.repeat(repeats, [layer])
            keys, values = self.model[layer]
            self.model[layer] = (
                keys.repeat_interleave(repeats, 0),
                values.repeat_interleave(repeats, 0),
            )

    @rule(layer=st.integers(0, 1))
    def reset(self, layer: int) -> None:
        self.pool.reset([layer])
        keys, values = self.model[layer]
        self.model[layer] = keys[:, :, :0], values[:, :, :0]

    @rule()
    def save_and_load(self) -> None:
        path = self.store / "prefix"
        with self.launch():
            self.pool.save(path)
        self.pool.close()
        # In a prefix file a record takes a multiple of 4096 bytes, and so does it in slots.
        self.budget_bytes = max(self.budget_bytes, (self.num_pages * self.heads + 1) * 4096)
        self.pool = BlockPool(**{**self.options, "device_memory": self.budget_bytes}, prefix=path)
        path.unlink()

    @rule(layer=st.integers(0, 1), num_queries=st.sampled_from([1, 2, 20]))
    def attend(self, layer: int, num_queries: int) -> None:
        keys, values = self.model[layer]
        if not keys.shape[2]:
            return
        shape = (keys.shape[0], 2 * self.heads, num_queries, DIM)
        query = torch.rand(shape, generator=self.generator)
        with self.launch():
            out = attend_pool(
                self.pool, layer, self.to_pool(query), ScoreRule(0.5), Visibility(device=self.device)
            )
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1), scale=0.5
        )
        torch.testing.assert_close(self.from_pool(out), expected, atol=1e-5, rtol=1e-5)

    @invariant()
    def holds_the_same(self) -> None:
        if not hasattr(self, "pool"):
            return
        for layer, (keys, _) in self.model.items():
            assert self.pool.length(layer) == keys.shape[2]
            if self.pool.num_blocks(layer):
                full = self.pool.num_blocks(layer) * self.pool.block_tokens
                with self.launch():
                    found = read_all(self.pool, layer)
                assert torch.equal(self.from_pool(found), keys[:, :, :full])
        report = self.pool.report()
        assert report.device_bytes - report.tail_bytes <= self.budget_bytes


def run_machine(kind: type[PoolMachine], *, num_examples: int, **attributes: Any) -> None:
    """Run a kind of machine with some attributes of its class."""
    machine = type("Machine", (kind,), attributes)
    machine.TestCase.settings = settings(
        max_examples=num_examples, stateful_step_count=15, deadline=None
    )
    machine.TestCase("runTest").runTest()
