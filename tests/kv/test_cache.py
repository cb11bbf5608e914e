"""`penstock.kv.cache` against `DynamicCache`: tokens, logits, bytes."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from kv_models import (
    MODELS,
    WITH_SINKS,
    assert_same,
    cache_bytes,
    generate,
    make_model,
    make_prompt,
    transformers,
)
from penstock.kv.transformers import PooledCache

BLOCK = 16
BEAMS = {"num_beams": 3, "output_scores": False}
pytestmark = pytest.mark.usefixtures("one_thread")


def make_cache(model: Any, budget: int | str = "64KiB", **options: Any) -> Any:
    return penstock.kv.cache(model, device_memory=budget, block_tokens=BLOCK, **options)


def count_tokens(kind: str) -> int:
    """Return after how many tokens a block is full for long; of T5 the decoder has none before."""
    return 20 if kind == "t5" else 10


@functools.cache
def stock_tokens(kind: str) -> Any:
    """Tokens and logits of `DynamicCache` for a prompt of 508, on one thread of torch."""
    return generate(make_model(kind), make_prompt(508), count_tokens(kind))


@functools.cache
def stock_beams(kind: str) -> Any:
    """Tokens of `DynamicCache` for a prompt of 90, by beams, on one thread of torch."""
    return generate(make_model(kind), make_prompt(90), count_tokens(kind), **BEAMS)


@pytest.mark.parametrize("part", [4, 16])
@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_those_of_dynamic_cache(kind: str, part: int):
    model, prompt = make_model(kind), make_prompt(508)
    theirs = stock_tokens(kind)
    budget = cache_bytes(model, 508 + count_tokens(kind)) // part
    with make_cache(model, budget) as cache:
        assert_same(generate(model, prompt, count_tokens(kind), past_key_values=cache), theirs)
        check_bytes(cache.report(), budget)
        # All layers of this Mistral have a window, and all windows fit a quarter.
        assert (cache.report().num_misses > 0) == ((kind, part) != ("mistral", 4))


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_are_the_same_from_a_file(kind: str, store: Path):
    model, prompt = make_model(kind), make_prompt(508)
    budget = cache_bytes(model, 508 + count_tokens(kind)) // 16
    with make_cache(model, budget, store=store) as cache:
        assert_same(
            generate(model, prompt, count_tokens(kind), past_key_values=cache), stock_tokens(kind)
        )
        report = cache.report()
        assert report.file_bytes > 0
        assert report.host_bytes == 0
        check_bytes(report, budget)
    assert list(store.iterdir()) == []


@pytest.mark.parametrize("num_decoder_layers", [1, 3])
def test_a_decoder_of_other_depth_than_its_encoder(num_decoder_layers: int):
    config = make_model("t5").config
    config.num_decoder_layers = num_decoder_layers
    torch.manual_seed(0)
    model, prompt = transformers.T5ForConditionalGeneration(config).eval(), make_prompt(90)
    theirs = generate(model, prompt, 24, use_cache=False)  # the stock cache has no third layer
    with make_cache(model) as cache:
        assert_same(generate(model, prompt, 24, past_key_values=cache), theirs)
        assert cache.report().num_layers == 2 * num_decoder_layers


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_200_tokens_are_the_same_from_a_file(kind: str, store: Path):
    model, prompt = make_model(kind), make_prompt(60)
    theirs = generate(model, prompt, 200)
    budget = cache_bytes(model, 260) // 16
    with make_cache(model, budget, store=store) as cache:
        assert_same(generate(model, prompt, 200, past_key_values=cache), theirs)
        report = cache.report()
        assert report.num_misses > 0 and report.file_bytes > 0
        check_bytes(report, budget)


@pytest.mark.parametrize("kind", WITH_SINKS)
def test_attention_sinks(kind: str, store: Path):
    model, prompt = make_model(kind), make_prompt(250)
    for module in model.modules():
        if getattr(module, "sinks", None) is not None:
            torch.nn.init.normal_(module.sinks, 2.0)  # a share of the weights that cannot be missed
    theirs = generate(model, prompt, 12)
    with make_cache(model, "128KiB", store=store) as cache:
        assert_same(generate(model, prompt, 12, past_key_values=cache), theirs)
        assert cache.report().num_misses > 0
        with torch.no_grad():
            beside = model(**prompt).logits  # a call without the cache, while it lives
    is_token = prompt["attention_mask"].bool()
    with torch.no_grad():
        alone = model(**prompt).logits
    torch.testing.assert_close(beside[is_token], alone[is_token], atol=1e-4, rtol=1e-4)


def test_sinks_take_their_share_of_the_weights_that_a_selector_sees():
    model, prompt = make_model("granite"), make_prompt(64, batch_size=1)
    sums = []
    for score in (-100.0, 100.0):
        for module in model.modules():
            if hasattr(module, "sinks"):
                module.sinks.data.fill_(score)
        selector = _Weights()
        with make_cache(model, "4MiB", selector=selector) as cache, torch.no_grad():
            model(**prompt, past_key_values=cache)
            model(input_ids=prompt["input_ids"][:, :1], past_key_values=cache)
        sums.append(torch.stack(selector.weights).sum(2))
    assert ((sums[0] > 0.01) & (sums[0] < 2.0)).all()  # of two query heads of each KV head
    assert (sums[1] < 1e-20).all()


class _Weights:
    """A selector of all blocks that keeps what it is told of their weights."""

    def __init__(self) -> None:
        self.weights: list[torch.Tensor] = []

    def select(self, query: torch.Tensor, layer: int, pool: Any) -> torch.Tensor:
        shape = (query.shape[0], 2, -1)
        return torch.arange(pool.num_blocks(layer)).expand(shape)

    def note(self, layer: int, blocks: torch.Tensor, weights: torch.Tensor) -> None:
        self.weights.append(weights)


def check_bytes(report: Any, budget: int) -> None:
    record_bytes = BLOCK * (32 + 32) * 4  # of one head, without padding
    assert report.peak_device_bytes <= budget + report.tail_bytes
    assert report.read_bytes == report.num_misses * record_bytes
    # Each block is written at most once: what was written is there, or was there.
    assert report.written_bytes % record_bytes == 0


def test_nothing_is_written_or_read_when_everything_fits(store: Path):
    model, prompt = make_model("llama"), make_prompt(100)
    with make_cache(model, "4MiB", store=store) as cache:
        generate(model, prompt, 20, past_key_values=cache)
        report = cache.report()
        assert report.num_hits > 0
        assert (report.num_misses, report.read_bytes, report.written_bytes) == (0, 0, 0)


def test_blocks_are_written_once(store: Path):
    model, prompt = make_model("llama"), make_prompt(300, batch_size=1)
    with make_cache(model, "48KiB", store=store) as cache:
        generate(model, prompt, 40, past_key_values=cache)
        report = cache.report()
        full_blocks = 2 * (339 // BLOCK)  # two layers; the last token was not appended
        assert report.num_blocks == full_blocks
        assert 0 < report.written_bytes <= full_blocks * 2 * BLOCK * 64 * 4
        assert report.file_bytes == report.written_bytes


def test_host_memory_goes_first_and_the_file_takes_the_rest(store: Path):
    model, prompt = make_model("llama"), make_prompt(300)
    theirs = generate(model, prompt, 20)
    with make_cache(model, "64KiB", host_memory="128KiB", store=store) as cache:
        assert_same(generate(model, prompt, 20, past_key_values=cache), theirs)
        report = cache.report()
        assert report.host_bytes == 128 * 1024
        assert report.file_bytes > 0


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_window_layers_keep_their_window_only(kind: str):
    model, prompt = make_model(kind), make_prompt(500, batch_size=1)
    with make_cache(model, "1MiB") as cache:
        generate(model, prompt, 20, past_key_values=cache)
        in_window = -(-70 // BLOCK) + 1
        num_full = 519 // BLOCK
        most = num_full + (in_window if kind == "gemma3" else num_full)
        least = num_full + (1 if kind == "gemma3" else num_full)
        assert least <= cache.report().num_blocks <= most


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gemma3", "t5"])
@pytest.mark.parametrize("where", ["host", "file"])
def test_beam_search(kind: str, where: str, store: Path):
    model, prompt = make_model(kind), make_prompt(90)
    theirs = stock_beams(kind)
    with make_cache(model, "64KiB", store=store if where == "file" else None) as cache:
        ours = generate(model, prompt, count_tokens(kind), past_key_values=cache, **BEAMS)
        assert torch.equal(ours.sequences, theirs.sequences)
        torch.testing.assert_close(ours.sequences_scores, theirs.sequences_scores)


def test_beams_share_full_blocks():
    model, prompt = make_model("llama"), make_prompt(160, batch_size=1)
    with make_cache(model, "1MiB") as cache:
        with torch.no_grad():
            model(**prompt, past_key_values=cache)
        cache.batch_repeat_interleave(4)
        assert cache.report().num_blocks == 2 * (160 // BLOCK)  # two layers, not times four


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_assisted_decoding(kind: str):
    model, prompt = make_model(kind), make_prompt(90, batch_size=1)
    theirs = generate(model, prompt, 30, output_logits=False)
    torch.manual_seed(3)
    assistant = MODELS[kind]().eval()
    for module in assistant.parameters():  # near the model, so that some guesses are right
        module.data.mul_(0.02)
    for own, other in zip(assistant.parameters(), model.parameters(), strict=True):
        own.data.add_(other.data)
    assistant.generation_config.eos_token_id = None
    with make_cache(model) as cache:
        ours = generate(
            model, prompt, 30, past_key_values=cache, assistant_model=assistant, output_logits=False
        )
        assert torch.equal(ours.sequences, theirs.sequences)


def test_prompt_lookup_decoding():
    model = make_model("gemma3")
    prompt = make_prompt(40, batch_size=1)
    prompt = {name: each.repeat(1, 4) for name, each in prompt.items()}
    options = {"prompt_lookup_num_tokens": 4, "output_logits": False}
    theirs = generate(model, prompt, 50, output_logits=False)
    with make_cache(model) as cache:
        ours = generate(model, prompt, 50, past_key_values=cache, **options)
        assert torch.equal(ours.sequences, theirs.sequences)
        cache.reset()
        generate(model, prompt, 2, past_key_values=cache)
        assert cache.report().num_blocks == 10 + 5  # all that left the window was kept before


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2", "gpt2"])
def test_prefill_in_chunks(kind: str, store: Path):
    model, prompt = make_model(kind), make_prompt(500)
    theirs = generate(model, prompt, 8)
    with make_cache(model, "64KiB", store=store) as cache:
        ours = generate(model, prompt, 8, past_key_values=cache, prefill_chunk_size=128)
        assert_same(ours, theirs)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gpt2"])
def test_several_turns_on_one_cache(kind: str):
    model = make_model(kind)
    other = transformers.DynamicCache(config=model.config)
    with make_cache(model, "64KiB") as cache:
        tokens = make_prompt(60, batch_size=1)["input_ids"]
        for turn in range(3):
            ours = generate(model, {"input_ids": tokens}, 8, past_key_values=cache)
            cache_length = cache.get_seq_length()
            model.set_attn_implementation("eager")
            theirs = generate(model, {"input_ids": tokens}, 8, past_key_values=other)
            model.set_attn_implementation("penstock_kv")
            assert_same(ours, theirs)
            assert cache_length == other.get_seq_length()
            extra = torch.full((1, 30), 7 + turn)
            tokens = torch.cat([ours.sequences, extra], 1)


@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_calls_of_any_length_add_up(kind: str):
    model, prompt = make_model(kind), make_prompt(200, batch_size=1)
    tokens = prompt["input_ids"]
    with torch.no_grad():
        whole = model(input_ids=tokens).logits
        with make_cache(model, "48KiB") as cache:
            at, parts = 0, []
            for length in (50, 1, 3, 16, 17, 40, 1, 72):
                part = model(input_ids=tokens[:, at : at + length], past_key_values=cache)
                parts.append(part.logits)
                at += length
            assert at == 200
            torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("window", [1, 5, 16])
@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_windows_that_are_shorter_than_a_step(window: int, block_tokens: int):
    config = make_model("gemma2").config
    config.sliding_window = window
    model, tokens = transformers.Gemma2ForCausalLM(config).eval(), make_prompt(66)["input_ids"]
    with (
        torch.no_grad(),
        penstock.kv.cache(model, device_memory="64KiB", block_tokens=block_tokens) as cache,
    ):
        parts = [
            model(input_ids=tokens[:, a:b], past_key_values=cache).logits
            for a, b in ((0, 5), (5, 21), (21, 22), (22, 50), (50, 66))
        ]
        whole = model(input_ids=tokens).logits
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-4)


def test_layers_that_share_keys(store: Path):
    config = transformers.Gemma4TextConfig(
        vocab_size=89,
        vocab_size_per_layer_input=89,
        hidden_size=64,
        intermediate_size=96,
        hidden_size_per_layer_input=8,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        global_head_dim=32,
        sliding_window=21,
        layer_types=["sliding_attention", "full_attention"] * 2 + ["full_attention"],
        num_kv_shared_layers=3,
        initializer_range=0.2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model, prompt = transformers.Gemma4ForCausalLM(config).eval(), make_prompt(90)
    theirs = generate(model, prompt, 12)
    for chunk in (None, 7, 33):
        with make_cache(model, "128KiB", store=store) as cache:
            ours = generate(model, prompt, 12, past_key_values=cache, prefill_chunk_size=chunk)
            assert_same(ours, theirs)
            assert cache.report().num_layers == 2


def test_crop_and_reset():
    model, prompt = make_model("llama"), make_prompt(100, batch_size=1)
    with make_cache(model) as cache, torch.no_grad():
        tokens = prompt["input_ids"]
        model(input_ids=tokens, past_key_values=cache)
        cache.crop(-45)
        assert cache.get_seq_length() == 55
        after = model(input_ids=tokens[:, 55:70], past_key_values=cache).logits
        torch.testing.assert_close(after, model(input_ids=tokens[:, :70]).logits[:, 55:])
        cache.reset()
        assert cache.get_seq_length() == 0
        assert cache.report().num_blocks == 0
        again = model(input_ids=tokens, past_key_values=cache).logits
        torch.testing.assert_close(again, model(input_ids=tokens).logits)


@pytest.mark.parametrize("kind", ["gemma3", "t5"])
def test_the_cache_says_whether_it_holds_tokens(kind: str):
    """Models ask for it whose first call has tokens that see each other."""
    model, prompt = make_model(kind), make_prompt(20)
    with make_cache(model) as cache:
        own = getattr(cache, "self_attention_cache", cache)
        own.early_initialization(2, 2, 32, torch.float32, torch.device("cpu"))
        assert not own.is_initialized
        generate(model, prompt, 2, past_key_values=cache)
        assert own.is_initialized
        cache.reset()
        assert not own.is_initialized


def test_selecting_sequences():
    model, prompt = make_model("llama"), make_prompt(60, batch_size=4)
    step = torch.tensor([[5], [6]])
    with torch.no_grad(), make_cache(model) as cache:
        other = transformers.DynamicCache(config=model.config)
        model(**prompt, past_key_values=cache)
        cache.batch_select_indices(torch.tensor([3, 1]))
        mask = torch.cat([prompt["attention_mask"][[3, 1]], torch.ones(2, 1, dtype=torch.int64)], 1)
        ours = model(input_ids=step, attention_mask=mask, past_key_values=cache).logits
        cache.close()
        model(**prompt, past_key_values=other)
        other.batch_select_indices(torch.tensor([3, 1]))
        theirs = model(input_ids=step, attention_mask=mask, past_key_values=other).logits
        torch.testing.assert_close(ours, theirs)


def test_a_model_without_the_cache_computes_as_before():
    for kind in ("llama", "gemma2", "t5"):
        model, prompt = make_model(kind), make_prompt(100)
        theirs = generate(model, prompt, 6)
        with make_cache(model):
            assert_same(generate(model, prompt, 6), theirs)
            if kind != "t5":  # of which Transformers makes no static cache on the CPU
                static = generate(model, prompt, 6, cache_implementation="static")
                assert_same(static, theirs)


def test_the_models_attention_comes_back():
    model = make_model("llama")
    before = model.config._attn_implementation
    first, second = make_cache(model), make_cache(model)
    assert model.config._attn_implementation == "penstock_kv"
    first.close()
    first.close()
    assert model.config._attn_implementation == "penstock_kv"
    del second
    gc.collect()
    assert model.config._attn_implementation == before


def test_a_closed_cache_holds_nothing_and_keeps_its_counts(store: Path):
    model, prompt = make_model("llama"), make_prompt(100)
    for options in ({}, {"store": store, "keep_inputs": True}):
        with make_cache(model, "48KiB", **options) as cache:
            generate(model, prompt, 4, past_key_values=cache)
            before = cache.report()
        after = cache.report()
        held = "device_bytes host_bytes file_bytes tail_bytes prefix_bytes num_blocks num_tokens"
        assert [getattr(after, name) for name in held.split()] == [0] * 7
        for name in ("num_hits", "num_misses", "read_bytes", "written_bytes", "peak_device_bytes"):
            assert getattr(after, name) == getattr(before, name) > 0


def test_copies_of_a_model_that_had_a_cache_have_their_own_attention_back():
    model, prompt = make_model("gemma2"), make_prompt(40)
    with make_cache(model, "1MiB") as cache:
        copied = copy.deepcopy(model)
        saved = pickle.loads(pickle.dumps(model))
        expected = generate(model, prompt, 4, past_key_values=cache)
    for other in (copied, saved):
        assert_same(generate(other, prompt, 4), expected)
        assert other.config._attn_implementation == model.config._attn_implementation
        assert other(**prompt, output_attentions=True).attentions[0] is not None
        other.train()(**prompt, labels=prompt["input_ids"]).loss.backward()
        with make_cache(other.eval(), "1MiB") as cache:
            assert_same(generate(other, prompt, 4, past_key_values=cache), expected)


def test_a_cache_that_dies_leaves_nothing(store: Path):
    model, prompt = make_model("llama"), make_prompt(200)
    cache = make_cache(model, store=store)
    generate(model, prompt, 4, past_key_values=cache)
    assert isinstance(cache, PooledCache)
    del cache
    gc.collect()
    assert model.config._attn_implementation != "penstock_kv"
    assert list(store.iterdir()) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype):
    model, prompt = make_model("llama").to(dtype), make_prompt(200, batch_size=1)
    with torch.no_grad():
        theirs = model(**prompt).logits
        with make_cache(model, "32KiB") as cache:
            model(input_ids=prompt["input_ids"][:, :190], past_key_values=cache)
            ours = model(input_ids=prompt["input_ids"][:, 190:], past_key_values=cache).logits
    # Logits near 1 of two layers in 8 bits of mantissa.
    torch.testing.assert_close(ours, theirs[:, 190:], atol=0.2, rtol=0.1)


@pytest.mark.parametrize("selector", ["window", "nosa", "accumulated"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "t5"])
def test_selectors_read_less(selector: str, kind: str):
    reads = [count_reads(each, kind) for each in ("all", selector)]
    assert reads[1] < reads[0] or kind == "t5"  # a short decoder, and cross attention reads all


@functools.cache
def count_reads(selector: str, kind: str) -> int:
    model, prompt = make_model(kind), make_prompt(500)
    with make_cache(model, "128KiB", selector=selector) as cache:
        ours = generate(model, prompt, 12, past_key_values=cache)
        assert ours.sequences.shape[1] >= 12
        report = cache.report()
        assert report.peak_device_bytes <= report.budget_bytes + report.tail_bytes
        return report.num_hits + report.num_misses


def test_a_selector_of_every_block_gives_the_same_tokens_over_beams():
    from penstock.kv.selectors import Accumulated, Nosa

    model, prompt = make_model("llama"), make_prompt(150)
    options = {"num_beams": 3, "output_logits": False}
    theirs = generate(model, prompt, 20, **options)
    for selector in (Nosa(share=1.0), Accumulated(share=1.0)):
        with make_cache(model, "256KiB", selector=selector) as cache:
            ours = generate(model, prompt, 20, past_key_values=cache, **options)
            assert torch.equal(ours.sequences, theirs.sequences)
