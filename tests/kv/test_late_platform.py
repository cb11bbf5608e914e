"""Pools on a device on which nothing runs before it is waited for."""

from __future__ import annotations

import contextlib
import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import late_platform
from penstock.errors import CapacityError, PenstockError
from penstock.kv import BlockPool
from penstock.kv._attend import attend_pool
from penstock.kv._partial import ScoreRule
from penstock.kv._visibility import Visibility
from penstock.kv.selectors import Accumulated, Nosa
from pool_model import PoolModel, run_any_order
from simulated_cuda import SimulatedCuda

pytest.importorskip("triton")
pytestmark = pytest.mark.usefixtures("one_thread")
T, HEADS, KEY_DIM = 4, 2, 8
RECORD_BYTES = 2 * T * KEY_DIM * 4


class LateModel(PoolModel):
    """Tensors of the caller are computed late as well, and freed when the call returns."""

    pool_device = "cuda"

    def __init__(self, cuda: SimulatedCuda, store: Path, **options: Any) -> None:
        self.cuda = cuda
        super().__init__(store, num_pages=8, **options)  # a block of each of six sequences passes

    def to_pool(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 0

    def from_pool(self, tensor: torch.Tensor) -> torch.Tensor:
        self.cuda.synchronize()
        return tensor

    def launch(self) -> contextlib.AbstractContextManager[None]:
        return self.cuda.kernels()


@pytest.fixture
def late(simulated_cuda: SimulatedCuda, monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
    late_platform.install(simulated_cuda, monkeypatch)
    return simulated_cuda


@pytest.mark.parametrize("has_early_side", [False, True])
@pytest.mark.parametrize("where", ["host", "file", "both"])
def test_any_order_of_operations(
    where: str,
    has_early_side: bool,
    store: Path,
    simulated_cuda: SimulatedCuda,
    monkeypatch: pytest.MonkeyPatch,
):
    late_platform.install(simulated_cuda, monkeypatch, has_early_side=has_early_side)
    for seed, num_steps in ((1, 24), (2, 40)):
        options = {"block_tokens": 2 + seed, "heads": 1 + seed % 2, "slots": 3 * seed, "batch": 2}
        run_any_order(LateModel(simulated_cuda, store, where=where, **options), seed, num_steps)


def make_tokens(length: int, batch: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.rand(2, batch, HEADS, length, KEY_DIM, generator=generator)


def decode(pool: BlockPool, num_steps: int, launch: Any = contextlib.nullcontext) -> torch.Tensor:
    """Results of steps of one token after a prefill of 60, each in float32 `(1, 4, 1, 8)`."""
    keys, values = make_tokens(60 + num_steps)
    queries = torch.rand(num_steps, 1, 2 * HEADS, 1, KEY_DIM)
    outs = []
    with launch():
        pool.append(0, keys[:, :, :60] + 0, values[:, :, :60] + 0)
        for i in range(num_steps):
            token = slice(60 + i, 61 + i)
            pool.append(0, keys[:, :, token] + 0, values[:, :, token] + 0)
            visibility = Visibility(query_start=60 + i, is_causal=True)
            outs.append(attend_pool(pool, 0, queries[i] + 0, ScoreRule(1.0), visibility))
        return torch.stack(outs)


@pytest.mark.parametrize("kind", ["all", "window", "nosa", "accumulated"])
@pytest.mark.parametrize("pages", [3, 40])
def test_steps_are_those_of_a_pool_on_the_cpu(kind: str, pages: int, late: SimulatedCuda):
    """With few pages records are fetched or read in place; with many the selector takes slots."""
    found = []
    for device in ("cuda", "cpu"):
        selector: Any = {
            "nosa": lambda: Nosa(num_blocks=6, pool_tokens=2, bits=None),
            "accumulated": lambda: Accumulated(num_blocks=6),
        }.get(kind, lambda: kind)()
        budget_bytes = pages * HEADS * RECORD_BYTES + 16384 * (kind == "nosa")
        options: dict[str, Any] = {"device_memory": budget_bytes, "block_tokens": T}
        torch.manual_seed(0)
        pool = BlockPool(**options, selector=selector, device=device)
        launch = late.kernels if device == "cuda" else contextlib.nullcontext
        found.append(decode(pool, 18, launch))
        late.synchronize()
        report = pool.report()
        assert report.read_bytes == report.num_misses * RECORD_BYTES
        assert report.peak_device_bytes - report.tail_bytes <= budget_bytes
        pool.close()
    torch.testing.assert_close(*found)


def test_a_selector_that_grows_takes_the_memory_of_slots(late: SimulatedCuda):
    budget_bytes = 64 * HEADS * RECORD_BYTES
    selector = Accumulated(share=1.0)
    pool = BlockPool(device_memory=budget_bytes, block_tokens=T, selector=selector, device="cuda")
    keys, values = make_tokens(100 * T)
    with late.kernels():
        pool.append(0, keys[:, :, : 50 * T] + 0, values[:, :, : 50 * T] + 0)
        device = pool._tiers.device
        before = device.slot_bytes
        device.set_selector_bytes(device.selector_bytes + budget_bytes // 4)
        assert device.slot_bytes <= before - budget_bytes // 8
        blocks = torch.arange(50).expand(1, HEADS, -1)
        found = pool.keys_of(0, blocks)
    late.synchronize()
    assert torch.equal(found.flatten(2, 3), keys[:, :, : 50 * T])  # what lost its slot was saved
    report = pool.report()
    assert report.device_bytes - report.tail_bytes <= budget_bytes
    pool.close()


def test_calls_from_another_stream(late: SimulatedCuda):
    keys, values = make_tokens(50)
    pool = BlockPool(device_memory=4 * HEADS * RECORD_BYTES, block_tokens=T, device="cuda")
    outs, streams = [], [torch.cuda.Stream() for _ in range(4)]
    for i in range(4):
        with torch.cuda.stream(streams[i]):  # type: ignore[arg-type]
            if i == 0:
                pool.append(0, keys + 0, values + 0)
            query = torch.ones(1, HEADS, 1, KEY_DIM) + i
            out = attend_pool(pool, 0, query, ScoreRule(1.0), Visibility())
            del query
            outs.append(out + 0)
            del out
            torch.full((1, HEADS, 1, KEY_DIM), torch.nan)  # takes memory that was freed
    for i, out in enumerate(outs):
        streams[i].synchronize()  # which waits for the pool's
        query = torch.ones(1, HEADS, 1, KEY_DIM) + i
        attend = torch.nn.functional.scaled_dot_product_attention
        torch.testing.assert_close(out, attend(query, keys, values, scale=1.0))
    pool.close()


def test_host_memory_is_unregistered_after_what_uses_it(late: SimulatedCuda):
    keys, values = make_tokens(400)
    pool = BlockPool(device_memory=4 * HEADS * RECORD_BYTES, block_tokens=T, device="cuda")
    with late.kernels():
        pool.append(0, keys + 0, values + 0)
        out = attend_pool(pool, 0, torch.ones(1, 2, 1, 8) + 0, ScoreRule(1.0), Visibility())
    slabs = {call[1] for call in late.calls if call[0] == "register"}
    assert slabs and slabs <= set(late.registered)
    pool.close()
    del pool
    gc.collect()
    assert not slabs & set(late.registered)
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(torch.ones(1, 2, 1, 8), keys, values, scale=1.0)
    torch.testing.assert_close(out, expected)  # it was waited for


def test_what_is_still_on_its_way_to_host_memory_is_saved(late: SimulatedCuda, store: Path):
    keys, values = make_tokens(60)
    pool = BlockPool(device_memory=HEADS * RECORD_BYTES, block_tokens=T, device="cuda")
    with late.kernels():
        pool.append(0, keys + 0, values + 0)
        pool.save(store / "prefix")
    pool.close()
    with contextlib.closing(
        BlockPool(device_memory="64KiB", block_tokens=T, prefix=store / "prefix")
    ) as pool:
        found = pool.keys_of(0, torch.arange(60 // T).expand(1, HEADS, -1))
        assert torch.equal(found.flatten(2, 3), keys)
    (store / "prefix").unlink()


def test_the_host_limit_is_that_of_the_slabs(late: SimulatedCuda):
    page_bytes = HEADS * RECORD_BYTES
    pool = BlockPool(
        device_memory=4 * page_bytes, host_memory=40 * page_bytes, block_tokens=T, device="cuda"
    )
    keys, values = make_tokens(100 * T)
    with late.kernels(), pytest.raises(CapacityError, match="host_memory"):
        pool.append(0, keys + 0, values + 0)
    mapped = sum(call[2] for call in late.calls if call[0] == "register")
    assert mapped <= 40 * page_bytes + 4096 * 40  # whole pages are registered
    pool.close()


def test_records_that_are_read_several_times_cross_the_link_once(late: SimulatedCuda):
    """Sequences that share blocks, and more rows than a program of the kernel has."""
    keys, values = make_tokens(60)
    pool = BlockPool(device_memory=16 * HEADS * RECORD_BYTES, block_tokens=T, device="cuda")
    with late.kernels():
        for layer in (0, 1):  # the other layer takes the slots
            pool.append(layer, keys + 0, values + 0)
        pool.repeat(3)
        query = torch.rand(3, 4 * HEADS, 8, KEY_DIM)
        out = attend_pool(pool, 1, query + 0, ScoreRule(1.0), Visibility())
    late.synchronize()
    repeated = [each.repeat(3, 1, 1, 1).repeat_interleave(4, 1) for each in (keys, values)]
    expected = torch.nn.functional.scaled_dot_product_attention(query, *repeated, scale=1.0)
    torch.testing.assert_close(out, expected)
    report = pool.report()
    assert report.num_misses > 0
    assert report.read_bytes == report.num_misses * RECORD_BYTES
    pool.close()


def test_what_cannot_be_done_is_refused(late: SimulatedCuda, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(PenstockError, match="recompute= is for pools on the CPU"):
        BlockPool(device_memory="1MiB", device="cuda", recompute=lambda layer, inputs: inputs)
    pool = BlockPool(device_memory=4 * HEADS * RECORD_BYTES, block_tokens=T, device="cuda")
    keys, values = make_tokens(40, batch=8)
    with late.kernels():
        pool.append(0, keys + 0, values + 0)
        query = torch.rand(8, HEADS, 40, KEY_DIM)
        with pytest.raises(CapacityError, match="a block of every sequence"):
            attend_pool(pool, 0, query, ScoreRule(1.0), Visibility())
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(PenstockError, match="CUDA graph"):
            attend_pool(pool, 0, query, ScoreRule(1.0), Visibility())
    pool.close()
