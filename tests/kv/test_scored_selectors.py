"""Scores of DoubleSparsity and Nosa against loops over queries, tokens and averages."""

import pytest
import torch

from _fake_pool import (
    BATCH,
    BLOCK,
    DIM,
    GROUP,
    HEADS,
    FakePool,
    calibrated,
    draw_keys,
    draw_query,
)
from penstock.kv.selectors import ChannelCalibration, DoubleSparsity, Nosa
from penstock.kv.selectors._nosa import pool_alike
from penstock.kv.selectors._packing import best_products, best_weights, pack, unpack

NUM_BLOCKS = 10
ALL_CHANNELS = [torch.arange(DIM).expand(HEADS, DIM)]


def groups(query, batch, head):
    return query[batch, head * GROUP : (head + 1) * GROUP].flatten(0, 1)


def test_channels_are_those_with_the_largest_products_of_pairs():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, HEADS * GROUP, 20, DIM, generator=generator)
    keys = torch.randn(1, HEADS, 20, DIM, generator=generator)
    calibration = ChannelCalibration()
    calibration.note(0, query, keys)
    for head in range(HEADS):
        sums = torch.zeros(DIM)
        for row in range(GROUP):
            for j in range(20):
                for i in range(j + 1):
                    sums += (query[0, head * GROUP + row, j] * keys[0, head, i]).abs()
        torch.testing.assert_close(calibration._sums[0][head].float(), sums)
        best = sums.topk(3).indices.sort().values
        assert torch.equal(calibration.channels(3)[0][head], best)


@pytest.mark.parametrize("reduce", ["sum", "max"])
def test_double_sparsity_with_all_channels_finds_the_heaviest_tokens(reduce):
    keys, query = draw_keys(NUM_BLOCKS), draw_query(num_tokens=2)
    selector = DoubleSparsity(
        ALL_CHANNELS, num_blocks=4, reduce=reduce, scale=0.7, num_sinks=0, num_recent=0
    )
    selector.observe(0, 0, keys)
    chosen = selector.select(query, 0, FakePool(NUM_BLOCKS))
    for batch in range(BATCH):
        for head in range(HEADS):
            products = 0.7 * groups(query, batch, head) @ keys[batch, head].flatten(0, 1).T
            heaviest = products.softmax(-1).unflatten(-1, (NUM_BLOCKS, BLOCK)).amax(-1)
            scores = heaviest.sum(0) if reduce == "sum" else heaviest.amax(0)
            expected = scores.topk(4).indices.sort().values
            assert torch.equal(chosen[batch, head], expected)


def test_labels_are_the_channels_of_each_head():
    keys, query = draw_keys(NUM_BLOCKS), draw_query()
    channels = calibrated(3)
    other = [i for i in range(DIM) if i not in channels[0][0].tolist()]
    selector = DoubleSparsity(channels, num_blocks=4)
    selector.observe(0, 0, keys)
    before = selector.select(query, 0, FakePool(NUM_BLOCKS))
    keys[:, 0, ..., other] += 100  # channels of head 0 that no label has
    selector.observe(0, 0, keys)
    assert torch.equal(selector.select(query, 0, FakePool(NUM_BLOCKS)), before)
    keys[:, 0, 3, 5, channels[0][0]] = 100 * query[:, 0, 0, channels[0][0]]
    selector.observe(0, 0, keys)
    after = selector.select(query, 0, FakePool(NUM_BLOCKS))
    assert bool((after[:, 0] == 3).any(dim=-1).all())


def test_4bit_labels_are_within_half_a_step():
    labels = draw_keys(NUM_BLOCKS)[..., :6] * torch.tensor([1.0, 50, 0, 1e-3, 5, 1])
    parts = pack(labels, 4)
    assert [part.dtype for part in parts] == [torch.uint8, torch.float16, torch.float16]
    assert parts[0].shape == (BATCH, HEADS, NUM_BLOCKS, 3, BLOCK)
    step = (labels.amax(3) - labels.amin(3)) / 15
    error = (unpack(parts) - labels).abs().amax(3)
    # Half a step, and what float16 rounds off the step (16 times) and the offset.
    room = 0.5 * step + (labels.abs().amax(3) + 16 * step) * 2**-10 + 1e-6
    assert bool((error <= room).all())
    constant = torch.full((1, 1, 1, BLOCK, 2), 3.0)
    assert torch.equal(unpack(pack(constant, 4)), constant)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 11])
@pytest.mark.parametrize(("num_tokens", "num_channels"), [(1, 2), (16, 64), (17, 6), (100, 24)])
def test_packed_products_are_those_of_the_numbers(num_rows, num_tokens, num_channels, num_threads):
    generator = torch.Generator().manual_seed(num_rows)
    numbers = torch.randn(2, 3, 9, num_tokens, num_channels, generator=generator)
    numbers[0, 1, 2] = 0.0
    numbers[1, 0, 3] *= 1e-4  # steps that float16 holds as subnormal numbers
    rows = torch.randn(2, 3, num_rows, num_channels, generator=generator)
    # Of a larger room, as selectors keep them.
    parts = [part[:, :, :7] for part in pack(numbers, 4)]
    plain = pack(unpack(parts), None)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        products, weights = best_products(rows, parts), best_weights(rows, parts)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(products, best_products(rows, plain), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights, best_weights(rows, plain), rtol=1e-4, atol=1e-6)
    assert torch.equal(products, best_products(rows, parts))


def test_packed_products_without_a_compiler(monkeypatch):
    numbers, rows = draw_keys(NUM_BLOCKS), torch.randn(BATCH, HEADS, 4, DIM)
    parts = pack(numbers, 4)
    expected = best_products(rows, parts), best_weights(rows, parts)
    monkeypatch.setattr("penstock.kv.selectors._packing._library", lambda: None)
    for found, wanted in zip(
        (best_products(rows, parts), best_weights(rows, parts)), expected, strict=True
    ):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"reduce": "mean"}, "reduce"),
        ({"bits": 8}, "bits"),
        ({"channels": calibrated(3), "bits": 4}, "even"),
        ({"channels": [torch.zeros(2, 4)]}, "int64"),
        ({"scale": float("inf")}, "scale must be finite"),
    ],
)
def test_wrong_settings_of_double_sparsity_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        DoubleSparsity(**({"channels": ALL_CHANNELS, "num_blocks": 4} | arguments))


def test_foreign_layers_and_heads_are_refused():
    selector = DoubleSparsity(ALL_CHANNELS, num_blocks=4)
    with pytest.raises(ValueError, match="only 1 layers"):
        selector.observe(1, 0, draw_keys(1))
    with pytest.raises(ValueError, match="of 2 KV heads, keys of 1"):
        selector.observe(0, 0, draw_keys(1)[:, :1])
    with pytest.raises(ValueError, match="same tokens"):
        ChannelCalibration().note(0, draw_query(), draw_keys(1).flatten(2, 3))
    with pytest.raises(ValueError, match="every layer"):
        ChannelCalibration().channels(1)


def pool_by_loops(keys, num_pools):
    """Means of pools around keys that are far from each other."""
    firsts = [int((keys - keys.mean(0)).norm(dim=1).argmin())]
    while len(firsts) < num_pools:
        distances = torch.cdist(keys, keys[firsts]).amin(1)
        distances[firsts] = -1
        firsts.append(int(distances.argmax()))
    pool = torch.cdist(keys, keys[firsts]).argmin(1)
    pool[firsts] = torch.arange(num_pools)
    return torch.stack([keys[pool == number].mean(0) for number in range(num_pools)])


def test_pools_hold_keys_that_are_alike():
    keys = draw_keys(3)
    means = pool_alike(keys, 5)
    for place in [(0, 0, 0), (1, 1, 2)]:
        torch.testing.assert_close(means[place], pool_by_loops(keys[place], 5))
    torch.testing.assert_close(pool_alike(keys, 1)[..., 0, :], keys.mean(3))
    every = pool_alike(keys, BLOCK).sort(3).values
    torch.testing.assert_close(every, keys.sort(3).values)
    assert torch.equal(pool_alike(torch.ones(1, 4, 3), 3), torch.ones(1, 3, 3))


def reference_fit(means, query):
    """Score a block by the mean that fits best."""
    return (DIM**-0.5 * query @ means.mT).amax(-1).T.softmax(-1).sum(0)


def test_nosa_takes_what_fits_the_query_and_then_its_own_scores():
    keys, query = draw_keys(NUM_BLOCKS), draw_query(num_tokens=2)
    selector = Nosa(num_blocks=6, num_query_blocks=2, bits=None)
    selector.observe(0, 0, keys[:, :, :4])
    selector.observe(0, 4, keys[:, :, 4:])
    chosen = selector.select(query, 0, FakePool(NUM_BLOCKS))
    for batch in range(BATCH):
        for head in range(HEADS):
            means = torch.stack([pool_by_loops(block, BLOCK // 4) for block in keys[batch, head]])
            fit = reference_fit(means, groups(query, batch, head))
            middle = range(1, NUM_BLOCKS - 1)
            aware = sorted(middle, key=lambda block: -fit[block])[:2]
            unlike = [
                1 - torch.cosine_similarity(means[b], means[: b + 1].mean((0, 1)), dim=-1).min()
                for b in range(NUM_BLOCKS)
            ]
            free = sorted(set(middle) - set(aware), key=lambda block: -unlike[block])[:2]
            expected = sorted([0, NUM_BLOCKS - 1, *aware, *free])
            assert chosen[batch, head].tolist() == expected


@pytest.mark.parametrize("bits", [None, 4])
def test_nosa_finds_one_token_that_an_average_would_lose(bits):
    keys = draw_keys(NUM_BLOCKS) / 4
    wanted = draw_query()[:, ::GROUP, 0]
    query = wanted.repeat_interleave(GROUP, 1)[:, :, None]
    keys[:, :, 5] -= wanted[:, :, None] / 4  # a block that fits badly, but for one token
    keys[:, :, 5, 20] = wanted
    averages = (keys.mean(3) * wanted[:, :, None]).sum(-1)
    assert bool((averages.argmax(-1) != 5).all())
    selector = Nosa(num_blocks=3, num_query_blocks=1, bits=bits)
    selector.observe(0, 0, keys)
    chosen = selector.select(query, 0, FakePool(NUM_BLOCKS))
    assert bool((chosen[..., 1] == 5).all())


def test_nosa_changes_at_most_its_query_blocks():
    selector = Nosa(num_blocks=20, num_query_blocks=3)
    selector.observe(0, 0, draw_keys(64))
    before = None
    changes = []
    for step in range(30):
        chosen = selector.select(draw_query(seed=step), 0, FakePool(64))
        for batch in range(BATCH):
            for head in range(HEADS):
                if before is not None:
                    new = set(chosen[batch, head].tolist()) - set(before[batch, head].tolist())
                    changes.append(len(new))
        before = chosen
    assert 0 < max(changes) <= 3


def test_nosa_uses_the_head_of_a_model_that_has_one():
    def score(layer, keys):
        return torch.arange(keys.shape[2]).expand(keys.shape[:3]) % 4

    selector = Nosa(num_blocks=4, num_query_blocks=0, score=score)
    selector.observe(0, 0, draw_keys(NUM_BLOCKS))
    chosen = selector.select(draw_query(), 0, FakePool(NUM_BLOCKS))
    assert chosen[0, 0].tolist() == [0, 3, 7, 9]
    for wrong in (lambda layer, keys: keys.mean(), lambda layer, keys: keys.mean((3, 4)) / 0 * 0):
        with pytest.raises(ValueError, match="one number per block and no NaN"):
            Nosa(num_blocks=4, score=wrong).observe(0, 0, draw_keys(2))


@pytest.mark.parametrize(
    "arguments",
    [
        {"pool_tokens": 0},
        {"pool_tokens": 2.0},
        {"bits": 8},
        {"num_query_blocks": -1},
        {"num_query_blocks": 1.5},
        {"scale": float("nan")},
        {"scale": "1"},
    ],
)
def test_wrong_settings_of_nosa_are_refused(arguments):
    with pytest.raises((ValueError, TypeError), match=next(iter(arguments))):
        Nosa(num_blocks=4, **arguments)


def test_nosa_needs_pools_that_divide_the_block_and_an_even_head_size():
    with pytest.raises(ValueError, match="must divide"):
        Nosa(num_blocks=4, pool_tokens=24).observe(0, 0, draw_keys(1))
    with pytest.raises(ValueError, match="must be even; got 7"):
        Nosa(num_blocks=4).observe(0, 0, draw_keys(1)[..., :7])
