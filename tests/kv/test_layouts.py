"""Pools and models whose layers have blocks of different sizes: one budget for all of them."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock
from kv_models import assert_same, generate, make_prompt, transformers
from penstock.errors import CapacityError, InfeasibleError
from penstock.kv import BlockPool, Nosa
from penstock.kv.transformers._model import find_attention
from penstock.memory import Tier

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL, LARGE = 2 * 2 * 16 * 16 * 4, 2 * 2 * 16 * 64 * 4  # bytes of blocks of 16 tokens, two heads


def budgeted_bytes(pool: BlockPool) -> int:
    """Peak of the device tier without the unfinished blocks."""
    return pool.ledger.peak(Tier.DEVICE) - sum(pool.blocks(i).tail_bytes for i in pool.layers())


def gemma4_settings() -> Any:
    return transformers.Gemma4TextConfig(
        vocab_size=89,
        vocab_size_per_layer_input=89,
        hidden_size=32,
        hidden_size_per_layer_input=8,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        global_head_dim=64,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=70,
        num_kv_shared_layers=0,
        pad_token_id=0,
        eos_token_id=None,
    )


def test_the_least_budget_is_that_of_all_layers_from_the_first_one_on():
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(gemma4_settings()).eval()
    prompt = make_prompt(150)
    least = SMALL + LARGE
    with penstock.kv.cache(model, device_memory=least - 1, block_tokens=16) as cache:
        with pytest.raises(InfeasibleError, match="one block per layer") as caught:
            generate(model, prompt, 2, past_key_values=cache)
        assert caught.value.minimum_device_bytes == least
        assert cache.report().device_bytes == 0
    with penstock.kv.cache(model, device_memory=least, block_tokens=16) as cache:
        ours = generate(model, prompt, 6, past_key_values=cache)
        assert budgeted_bytes(cache.pool) <= least
    assert_same(ours, generate(model, prompt, 6))


def test_the_budgets_that_errors_name_are_enough(store: Path):
    def fill(budget: str, num_layers: int, keys: torch.Tensor, **options: Any) -> None:
        pool = BlockPool(device_memory=budget, num_layers=num_layers, **options)
        with contextlib.closing(pool):
            for layer in range(num_layers):
                pool.append(layer, keys, keys)

    few = {"num_layers": 17, "keys": torch.zeros(1, 1, 3, 8), "block_tokens": 1}  # 1.0625 KiB
    with pytest.raises(InfeasibleError, match="one block per layer") as caught:
        fill("1KiB", **few)
    (named,) = re.findall(r"per layer, ([\d.]+ KiB)", str(caught.value))
    fill(named, **few)
    keys = torch.rand(1, 2, 256, 16)
    for options in ({}, {"store": store}):
        many: Any = {"num_layers": 1, "keys": keys, "block_tokens": 16, **options}
        with pytest.raises(CapacityError, match="the selector keeps 32") as refused:
            fill("8KiB", **many, selector=Nosa(share=0.5, bits=None, pool_tokens=1))
        (named,) = re.findall(r"raise it to ([\d.]+ KiB)", str(refused.value))
        fill(named, **many, selector=Nosa(share=0.5, bits=None, pool_tokens=1))


def test_buffers_that_grow_take_the_place_of_slots(store: Path):
    budget = 2 * 4096 + 4 * 4096  # a block of each: records take multiples of 4096 there
    pool = BlockPool(device_memory=budget, store=store, block_tokens=16, num_layers=2)
    pool.append(0, *torch.rand(2, 1, 2, 400, 16))
    pool.append(1, *torch.rand(2, 1, 2, 400, 64))
    assert budgeted_bytes(pool) <= budget
    pool.close()


def test_a_layer_without_room_for_more_records_replaces_its_own():
    pool = BlockPool(device_memory=4 * SMALL + 2 * LARGE, block_tokens=16)
    for layer, dim, num_blocks in ((0, 16, 4), (1, 64, 6)):
        pool.append(layer, *torch.rand(2, 1, 2, 16 * num_blocks, dim))
    device, pages = pool._tiers.device, pool.blocks(1).table[0]
    layout = pool.layout(1)
    residency = device.residency(layout)
    assert (device.room(layout), residency.num_resident) == (0, 4)
    assert residency.num_resident < residency.num_slots  # which the other layer's records occupy
    wanted = np.repeat(pages[-2:], 2) * 2 + [0, 1, 0, 1]
    for _ in range(12):
        for _ in pool.stream(1, np.repeat(pages[-2:], 2), np.array([0, 1, 0, 1])):
            pass
    assert (residency.look_up(wanted) >= 0).all()
    assert budgeted_bytes(pool) <= 4 * SMALL + 2 * LARGE
    pool.close()


def test_layers_of_a_tower_are_not_the_decoders():
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    settings = transformers.Gemma4Config(
        text_config=gemma4_settings().to_dict(), vision_config=vision, audio_config=None
    )
    found = find_attention(transformers.Gemma4ForConditionalGeneration(settings))
    assert sorted(found) == [0, 1]
    assert all("language_model" in name for _, name in found.values())
