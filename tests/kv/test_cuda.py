"""Pools and caches on a CUDA device; needs a GPU."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from kv_models import MODELS, assert_same, cache_bytes, generate, make_model, make_prompt
from penstock.errors import PenstockError
from penstock.kv import BlockPool
from penstock.kv._attend import attend_pool
from penstock.kv._partial import ScoreRule
from penstock.kv._visibility import Visibility
from pool_model import PoolModel, run_any_order

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
BLOCK = 16
HALF_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Weights below 1 are rounded by 2**-11 and 2**-8, and so are the parts of long calls."""


class CudaModel(PoolModel):
    device = pool_device = "cuda"


@pytest.fixture(autouse=True)
def exact_products():
    """Models multiply float32 as it is, or no two orders of sums have the same tokens."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    yield
    torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.parametrize("where", ["host", "file", "both"])
def test_any_order_of_operations(where: str, store: Path):
    for seed in range(4):
        options = {"block_tokens": 1 + seed, "heads": 1 + seed % 3, "slots": seed, "batch": 2}
        run_any_order(CudaModel(store, where=where, num_pages=8, **options), seed, 60)


def on_device(prompt: dict[str, Any]) -> dict[str, Any]:
    return {name: each.to(CUDA) for name, each in prompt.items()}


def make_cache(model: Any, budget: int | str, **options: Any) -> Any:
    return penstock.kv.cache(model, device_memory=budget, block_tokens=BLOCK, **options)


@pytest.mark.parametrize(
    ("kind", "part", "below"),
    [*((kind, 16, "host") for kind in MODELS), ("llama", 4, "file"), ("gemma3", 16, "file")],
)
def test_tokens_are_those_of_dynamic_cache(kind: str, part: int, below: str, store: Path):
    model, prompt = make_model(kind).to(CUDA), on_device(make_prompt(500))
    theirs = generate(model, prompt, 40)
    budget = cache_bytes(model, 540) // part
    options = {"store": store} if below == "file" else {}
    with make_cache(model, budget, **options) as cache:
        assert_same(generate(model, prompt, 40, past_key_values=cache), theirs)
        report = cache.report()
        assert report.peak_device_bytes - report.tail_bytes <= budget
        assert report.read_bytes == report.num_misses * record_bytes(cache)


def record_bytes(cache: Any) -> int:
    return cache.pool.layout(cache.pool.layers()[0]).record_bytes


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"prefill_chunk_size": 64}], ids=str)
def test_beams_and_chunks(options: dict[str, Any]):
    model, prompt = make_model("llama").to(CUDA), on_device(make_prompt(300))
    theirs = generate(model, prompt, 30, **{**options, "prefill_chunk_size": None})
    with make_cache(model, cache_bytes(model, 330) // 4) as cache:
        ours = generate(model, prompt, 30, past_key_values=cache, **options)
        assert torch.equal(ours.sequences, theirs.sequences)


@pytest.mark.parametrize("selector", ["window", "nosa", "accumulated"])
def test_selectors_choose_as_on_the_cpu(selector: str):
    model, prompt = make_model("llama"), make_prompt(500, batch_size=1)
    found = []
    for device in ("cpu", CUDA):
        model.to(device)
        inputs = {name: each.to(device) for name, each in prompt.items()}
        with make_cache(model, "256KiB", selector=selector) as cache:
            found.append(generate(model, inputs, 30, past_key_values=cache))
    assert torch.equal(found[0].sequences, found[1].sequences.cpu())


def test_a_prefix_is_read_on_the_other_device(tmp_path: Path):
    model, prompt = make_model("llama"), make_prompt(200, num_padding=0)["input_ids"]
    question = torch.cat([prompt, prompt[:, :20]], 1)
    theirs = generate(model, {"input_ids": question}, 20)
    for first, second in (("cpu", CUDA), (CUDA, "cpu")):
        path = tmp_path / "prefix"
        with torch.inference_mode(), make_cache(model.to(first), "64KiB") as cache:
            model(input_ids=prompt.to(first), past_key_values=cache)
            cache.save(path, tokens=prompt)
        with make_cache(model.to(second), "256KiB", prefix=path) as cache:
            inputs = {"input_ids": question.to(second)}
            ours = generate(model, inputs, 20, past_key_values=cache)
        assert torch.equal(ours.sequences.cpu(), theirs.sequences)


@pytest.mark.parametrize("dtype", HALF_TOLERANCE, ids=str)
@pytest.mark.parametrize("num_queries", [1, 16, 100])
@pytest.mark.parametrize("below", ["host", "file"])
def test_half_precision(dtype: torch.dtype, num_queries: int, below: str, store: Path):
    torch.manual_seed(0)
    keys, values = torch.randn(2, 2, 4, 1000, 128, device=CUDA).to(dtype)
    query = torch.randn(2, 16, num_queries, 128, device=CUDA).to(dtype)
    options = {"store": store} if below == "file" else {}
    pool = BlockPool(device_memory="2MiB", device=CUDA, **options)
    pool.append(0, keys, values)
    visibility = Visibility(2, 1000 - num_queries, is_causal=True, device=CUDA)
    found = [attend_pool(pool, 0, query, ScoreRule(0.09), visibility) for _ in range(3)]
    mask = torch.ones(num_queries, 1000, dtype=torch.bool, device=CUDA).tril(1000 - num_queries)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query.double(),
        *(each.double().repeat_interleave(4, 1) for each in (keys, values)),
        attn_mask=mask,
        scale=0.09,
    )
    tolerance = HALF_TOLERANCE[dtype]
    for each in found:
        torch.testing.assert_close(each.double(), expected, atol=tolerance, rtol=tolerance)
    assert pool.report().num_misses > 0
    pool.close()


def test_the_device_memory_is_the_budget_and_is_given_back():
    def allocated() -> int:
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    tokens = torch.randn(2, 1, 8, 4096, 64, device=CUDA)
    before = allocated()
    pool = BlockPool(device_memory="4MiB", device=CUDA, selector="nosa")
    for _ in range(4):
        pool.append(0, tokens[0], tokens[1])
    attend_pool(pool, 0, tokens[0, :, :, :1], ScoreRule(1.0), Visibility(device=CUDA))
    report = pool.report()
    grown = allocated() - before
    assert report.host_bytes > 2**25
    assert report.peak_device_bytes <= 2**22 + report.tail_bytes
    assert grown <= 2**22 + report.tail_bytes + 2**16  # tables of addresses, rounding
    pool.close()
    del pool
    assert allocated() - before <= 2**16


def test_streams_of_the_caller_and_busy_devices():
    """A long kernel before each call: what is not ordered shows."""
    tokens = torch.randn(2, 1, 4, 3000, 64, device=CUDA)
    busy = torch.randn(3000, 3000, device=CUDA)
    pool = BlockPool(device_memory="1MiB", device=CUDA)
    found = []
    for i in range(12):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(4):
                busy = busy @ busy / busy.norm()
            if i == 0:
                pool.append(0, tokens[0] + 0, tokens[1] + 0)
            query = tokens[0, :, :, i : i + 1 + 20 * (i % 2)] + 0
            out = attend_pool(pool, 0, query, ScoreRule(0.1), Visibility(device=CUDA))
            del query
            found.append(out + 0)
            del out
            torch.full_like(found[-1], torch.nan)
    torch.cuda.synchronize()
    for i, out in enumerate(found):
        query = tokens[0, :, :, i : i + 1 + 20 * (i % 2)]
        attend = torch.nn.functional.scaled_dot_product_attention
        expected = attend(query.double(), *tokens.double(), scale=0.1).float()
        torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)
    pool.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_device_that_is_not_the_current_one():
    other = torch.device("cuda", 1)
    model, prompt = make_model("llama"), make_prompt(300)
    theirs = generate(model, prompt, 20)
    model.to(other)
    inputs = {name: each.to(other) for name, each in prompt.items()}
    with torch.cuda.device(0), make_cache(model, "64KiB") as cache:
        ours = generate(model, inputs, 20, past_key_values=cache)
    assert torch.equal(ours.sequences.cpu(), theirs.sequences)


def test_what_cannot_be_done_is_refused():
    model = make_model("llama").to(CUDA)
    with pytest.raises(PenstockError, match="keep_inputs=True is for models on the CPU"):
        make_cache(model, "1MiB", keep_inputs=True)
    with pytest.raises(ValueError, match="PyTorch finds"):
        BlockPool(device_memory="1MiB", device="cuda:99")
