"""Masks of calls: rules over indices for `penstock.kv`'s attention, and masks in memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import masking_utils

import penstock
from kv_models import make_model, make_prompt, transformers
from penstock.errors import PenstockError
from penstock.kv._visibility import Visibility
from penstock.kv.transformers._mask import make_range_mask

pytestmark = pytest.mark.usefixtures("one_thread")


def make_cache(model: Any) -> Any:
    return penstock.kv.cache(model, device_memory="64KiB", block_tokens=16)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_in_memory(dtype: torch.dtype):
    model, tokens = make_model("llama"), make_prompt(64, batch_size=1)["input_ids"]
    seen = torch.rand(64, 64, generator=torch.Generator().manual_seed(2)) < 0.7
    seen = (seen | torch.eye(64, dtype=torch.bool)).tril()[None, None]
    mask = seen
    if dtype != torch.bool:
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(dtype).min)
    with torch.no_grad():
        theirs = model(input_ids=tokens, attention_mask=mask).logits
        with make_cache(model) as cache:
            parts = [
                model(
                    input_ids=tokens[:, a:b],
                    attention_mask=mask[:, :, a:b, :b],
                    past_key_values=cache,
                ).logits
                for a, b in ((0, 30), (30, 33), (33, 64))
            ]
    torch.testing.assert_close(torch.cat(parts, 1), theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 3, 20, 33])
def test_masks_in_memory_of_layers_with_a_window(dtype: torch.dtype, num_tokens: int):
    """A layer's window of 70 tokens, which the mask covers, begins within a block."""
    model, tokens = make_model("mistral"), make_prompt(110 + num_tokens, batch_size=1)["input_ids"]
    width = 69 + num_tokens
    query, key = torch.arange(num_tokens)[:, None] + 69, torch.arange(width)
    seen = (key <= query) & (key > query - 70) & (key % 7 > 0) | (key == query)
    mask = seen[None, None]
    if dtype != torch.bool:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(dtype).min)

    def decode(cache: Any) -> torch.Tensor:
        with torch.no_grad():
            model(input_ids=tokens[:, :110], past_key_values=cache)
            step = {"input_ids": tokens[:, 110:], "attention_mask": mask}
            return model(past_key_values=cache, **step).logits

    theirs = decode(transformers.DynamicCache(config=model.config))
    with make_cache(model) as cache:
        torch.testing.assert_close(decode(cache), theirs, atol=1e-4, rtol=1e-4)


def test_a_mask_of_nan_gives_nan():
    """As torch's attention does: `(1 - mask) * -inf` hid the visible tokens, in silence."""
    model, tokens = make_model("llama"), make_prompt(47)["input_ids"]
    with make_cache(model) as cache, torch.no_grad():
        for a, b in ((0, 40), (40, 41), (41, 47)):
            mask = torch.ones(1, 1, b - a, b).tril(a)
            step = {"input_ids": tokens[:, a:b], "attention_mask": (1 - mask) * -torch.inf}
            assert model(past_key_values=cache, **step).logits.isnan().all()


@pytest.mark.parametrize("window", [None, 1, 5, 8, 30])
@pytest.mark.parametrize("start", [0, 3, 20])
def test_visibility_of_ranges(start: int, window: int | None):
    """All ranges of 9 queries from the position `start` on and of 30 keys."""
    visibility = Visibility(query_start=start, is_causal=True, window=window)
    query, key = torch.arange(9)[:, None] + start, torch.arange(30)
    whole = (key <= query) & (key > query - (30 if window is None else window))
    for first, last in [(i, j) for i in range(30) for j in range(i + 1, 31)]:
        for some in (slice(0, 9), slice(0, 1), slice(4, 7), slice(8, 9)):
            seen, right = visibility.between(some, first, last), whole[some, first:last]
            assert torch.equal(torch.ones_like(right) if seen is None else seen[0, 0], right)
        right = whole[:, first:last]
        assert not visibility.sees_all(first, last) or right.all()
        is_triangle = right.shape == (9, 9) and torch.equal(right, torch.ones(9, 9).tril().bool())
        assert not visibility.is_triangle(first, last, 9) or is_triangle


@pytest.mark.parametrize(
    ("rule", "window"),
    [
        (masking_utils.causal_mask_function, None),
        (masking_utils.bidirectional_mask_function, None),
        (masking_utils.sliding_window_causal_mask_function(7), 7),
        (masking_utils.sliding_window_causal_mask_function(8), None),  # the model's is 7
        (masking_utils.sliding_window_bidirectional_mask_function(7), None),
        (masking_utils.sliding_window_overlay(7), None),
        (
            masking_utils.and_masks(
                masking_utils.sliding_window_overlay(7), lambda b, h, q, k: k < q - 1
            ),
            None,
        ),
        (
            masking_utils.or_masks(
                masking_utils.sliding_window_overlay(7), masking_utils.causal_mask_function
            ),
            None,
        ),
    ],
)
@pytest.mark.parametrize("num_queries", [1, 12])
def test_masks_of_transformers(rule: Any, window: int | None, num_queries: int):
    """Windows that are the model's are known as such; all masks are those of the rules."""
    padding = torch.ones(2, 40, dtype=torch.bool)
    padding[1, :25] = False
    options = {"q_offset": 40 - num_queries, "kv_offset": 11, "attention_mask": padding}
    config = SimpleNamespace(sliding_window=7)
    mask = make_range_mask(2, num_queries, 29, mask_function=rule, config=config, **options)
    assert mask.visibility.window == window
    query, key = torch.arange(40 - num_queries, 40), torch.arange(11, 40)
    heads = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    right = rule(torch.arange(2)[:, None, None, None], heads, query[:, None], key)
    right = right.expand(2, 1, num_queries, 29) & padding[:, None, None, 11:]
    found = mask.in_memory()
    found = torch.ones_like(right) if found is None else found
    assert torch.equal(found.expand_as(right), right)


def test_the_window_of_a_model_is_found():
    model = make_model("mistral")
    with make_cache(model) as cache:
        mask: Any = masking_utils.create_sliding_window_causal_mask(
            config=model.config,
            inputs_embeds=torch.zeros(1, 4, 64),
            attention_mask=None,
            past_key_values=cache,
        )
        assert (mask.visibility.window, mask.visibility.rule) == (70, None)


def test_masks_that_are_not_index_based():
    model = make_model("llama")
    options = {"inputs_embeds": torch.zeros(1, 9, 64), "attention_mask": None}
    blocks = masking_utils.blockwise_overlay(torch.tensor([[-1, -1, 0, 0, 0, -1, 1, 1, -1]]))
    overlays = {"or_mask_function": blocks}  # as Gemma 3 has them for its images
    overlays["and_mask_function"] = masking_utils.sliding_window_overlay(3)
    expected = masking_utils.create_causal_mask(
        config=model.config, past_key_values=None, **options, **overlays
    )
    with make_cache(model) as cache:
        options |= {"config": model.config, "past_key_values": cache}
        mask: Any = masking_utils.create_causal_mask(**options, **overlays)
        assert torch.equal(mask.in_memory(), expected)
        overlays["or_mask_function"] = masking_utils.or_masks(blocks, lambda b, h, q, k: q == k)
        with pytest.raises(PenstockError, match="or_mask_function"):
            masking_utils.create_causal_mask(**options, **overlays)


@pytest.mark.parametrize("past", [0, 20])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_masks_of_other_shapes(past: int, dtype: torch.dtype):
    model, tokens = make_model("llama"), make_prompt(25)["input_ids"]
    n = 25 - past
    shapes = [(3, 1, n, 25), (2, 2, n, 25), (1, 3, n, 25), (2, 1, n, 26), (2, n, 25), (3, 25)]
    with make_cache(model) as cache, torch.no_grad():
        for shape in shapes:
            cache.reset()
            if past:
                model(input_ids=tokens[:, :past], past_key_values=cache)
            mask = torch.ones(shape, dtype=dtype)
            with pytest.raises(ValueError, match=rf"attention_mask must .* got \({shape[0]}, "):
                model(input_ids=tokens[:, past:], attention_mask=mask, past_key_values=cache)
        cache.reset()
        mask = torch.ones((2, 1, 25, 25), dtype=torch.int64)
        with pytest.raises(TypeError, match=r"must be bool, or numbers .* got torch.int64"):
            model(input_ids=tokens, attention_mask=mask, past_key_values=cache)


def test_uses_of_the_mask():
    model = make_model("llama")
    with make_cache(model) as cache:
        mask: Any = masking_utils.create_causal_mask(
            config=model.config,
            inputs_embeds=torch.zeros(1, 4, 64),
            attention_mask=None,
            past_key_values=cache,
        )
        assert (mask.shape, mask.dtype) == ((1, 1, 4, 4), torch.bool)
        assert mask[:, :, -1:].shape == (1, 1, 1, 4)
        assert mask[:, :, 1:3, :4].in_memory()[0, 0].tolist() == [[1, 1, 0, 0], [1, 1, 1, 0]]
        for index in ((..., slice(2)), 0, (slice(None),) * 3 + (slice(2),), (0, 0)):
            with pytest.raises(PenstockError, match="cuts the attention mask"):
                mask[index]
        with pytest.raises(AttributeError, match="'to'"):
            mask.to(torch.float32)
        uses = (
            lambda: torch.zeros(1, 1, 4, 4) + mask,
            lambda: torch.where(mask, 0.0, 1.0),
            lambda: 1.0 - mask,
            lambda: ~mask,
            lambda: mask == 0,
        )
        for use in uses:
            with pytest.raises(PenstockError, match="computes with"):
                use()
