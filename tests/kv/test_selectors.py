"""All selectors: the shape of a choice, its budget, and that it follows the pool's history."""

import pytest
import torch

from _fake_pool import BATCH, BLOCK, GROUP, HEADS, SELECTORS, FakePool, draw_keys, draw_query
from penstock.kv.selectors import Accumulated, Window

NUM_BLOCKS = 9


@pytest.fixture(params=SELECTORS)
def make(request):
    return SELECTORS[request.param]


def note_something(selector, num_blocks):
    if isinstance(selector, Accumulated):
        generator = torch.Generator().manual_seed(5)
        weights = torch.rand(BATCH, HEADS, num_blocks, generator=generator)
        blocks = torch.arange(num_blocks).expand(BATCH, HEADS, -1)
        selector.note(0, blocks, weights)


def select(selector, num_blocks=NUM_BLOCKS, query=None):
    return selector.select(draw_query() if query is None else query, 0, FakePool(num_blocks))


def test_a_choice_is_ascending_and_holds_sinks_and_recent(make):
    selector = make(num_blocks=4)
    selector.observe(0, 0, draw_keys(NUM_BLOCKS))
    note_something(selector, NUM_BLOCKS)
    blocks = select(selector, query=draw_query(num_tokens=3))
    assert blocks.dtype == torch.int64
    assert blocks.shape == (BATCH, HEADS, 4)
    assert bool((blocks.diff(dim=-1) > 0).all())
    assert bool((blocks[..., 0] == 0).all() and (blocks[..., -1] == NUM_BLOCKS - 1).all())


@pytest.mark.parametrize(
    ("budget", "expected"),
    [({"num_blocks": 9}, None), ({"share": 1.0}, None), ({"share": 0.1}, 2), ({"share": 0.4}, 4)],
)
def test_budget_by_number_or_share(make, budget, expected):
    selector = make(**budget)
    selector.observe(0, 0, draw_keys(NUM_BLOCKS))
    blocks = select(selector)
    assert (blocks if expected is None else blocks.shape[-1]) == expected


def test_a_pool_without_full_blocks_is_read_whole(make):
    assert select(make(num_blocks=4), num_blocks=0) is None


def test_keys_may_come_block_by_block(make):
    keys = draw_keys(NUM_BLOCKS)
    whole, parts = make(num_blocks=4), make(num_blocks=4)
    whole.observe(0, 0, keys)
    for block in range(NUM_BLOCKS):
        parts.observe(0, block, keys[:, :, block : block + 1])
    note_something(whole, NUM_BLOCKS)
    note_something(parts, NUM_BLOCKS)
    assert torch.equal(select(whole), select(parts))


def test_cropped_blocks_are_forgotten(make):
    keys = draw_keys(NUM_BLOCKS)
    fresh, cropped = make(num_blocks=4), make(num_blocks=4)
    fresh.observe(0, 0, keys)
    cropped.observe(0, 0, torch.cat([keys[:, :, :5], 9 * draw_keys(4, seed=3)], dim=2))
    cropped.crop(5)
    cropped.observe(0, 5, keys[:, :, 5:])
    note_something(fresh, NUM_BLOCKS)
    note_something(cropped, NUM_BLOCKS)
    assert torch.equal(select(fresh), select(cropped))


def test_beams_take_their_blocks_along(make):
    keys = draw_keys(NUM_BLOCKS)
    selector = make(num_blocks=4)
    selector.observe(0, 0, keys)
    note_something(selector, NUM_BLOCKS)
    before = select(selector)
    selector.reorder(torch.tensor([1, 1, 0]))
    query = draw_query()[[1, 1, 0]]
    assert torch.equal(select(selector, query=query), before[[1, 1, 0]])


def test_bytes_are_those_of_the_tensors_kept(make):
    selector = make(num_blocks=4)
    start = selector.nbytes
    selector.observe(0, 0, draw_keys(NUM_BLOCKS))
    per_block = (selector.nbytes - start) / (BATCH * HEADS * NUM_BLOCKS)
    expected = {
        "Window": {0},
        "Accumulated": {4},
        "DoubleSparsity": {BLOCK * 4 * 4, BLOCK * 2 + 2 * 4 * 2},  # float32, and packed
        "Nosa": {4 + BLOCK // 4 * 8 * 4, 4 + BLOCK // 4 * 8 // 2 + 2 * 8 * 2},  # float32, packed
    }
    assert per_block in expected[type(selector).__name__]


def test_a_selector_that_missed_blocks_says_so(make):
    selector = make(num_blocks=4)
    if isinstance(selector, Window):
        pytest.skip("it keeps nothing")
    with pytest.raises(ValueError, match="never shown"):
        selector.observe(0, 3, draw_keys(1))
    selector.observe(0, 0, draw_keys(5))
    with pytest.raises(ValueError, match="was shown 5"):
        select(selector)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({}, "one of"),
        ({"num_blocks": 3, "share": 0.5}, "one of"),
        ({"share": 0.0}, "share"),
        ({"share": 1.5}, "share"),
        ({"share": "1/8"}, "share must be a number"),
        ({"num_blocks": 1}, "num_blocks must be at least"),
        ({"num_blocks": 8, "num_sinks": -1}, "at least 0"),
    ],
)
def test_wrong_budgets_are_refused(make, budget, message):
    with pytest.raises(ValueError, match=message):
        make(**budget)


def test_window_is_sinks_and_newest():
    selector = Window(num_blocks=5, num_sinks=2)
    selector.observe(0, 0, draw_keys(NUM_BLOCKS))
    assert select(selector)[1, 0].tolist() == [0, 1, 6, 7, 8]


def test_accumulated_follows_the_weights_and_their_age():
    selector = Accumulated(num_blocks=4, num_sinks=0, num_recent=1, half_life=1)
    selector.observe(0, 0, draw_keys(NUM_BLOCKS))
    blocks = torch.tensor([2, 4, -1]).expand(BATCH, HEADS, -1)
    selector.note(0, blocks, torch.tensor([1.0, 5.0, 100.0]).expand(BATCH, HEADS, -1))
    # Blocks without weights follow, the newest first.
    assert select(selector)[0, 0].tolist() == [2, 4, 7, 8]
    for _ in range(4):
        selector.note(0, torch.full((BATCH, HEADS, 1), 5), torch.full((BATCH, HEADS, 1), 0.5))
    # Block 5: 0.5 (1 + 1/2 + 1/4 + 1/8); block 4: 5/16; block 2: 1/16.
    (sums,) = selector._summaries.read(0, NUM_BLOCKS)
    assert sums[0, 0].tolist() == [0, 0, 1 / 16, 0, 5 / 16, 0.9375, 0, 0, 0]
    assert select(selector)[0, 0].tolist() == [2, 4, 5, 8]


def test_query_heads_must_be_groups(make):
    selector = make(num_blocks=4)
    if isinstance(selector, Window | Accumulated):
        pytest.skip("it reads no query")
    selector.observe(0, 0, draw_keys(NUM_BLOCKS))
    with pytest.raises(ValueError, match="no multiple of the 2 KV heads"):
        select(selector, query=draw_query()[:, : HEADS * GROUP - 1])
