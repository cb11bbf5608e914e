"""Layouts have the blocks and the tokens that their definition says, and no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given

from attention_cases import Pattern, patterns
from penstock.attention import Layout, _csr


@given(patterns())
def test_a_layout_has_the_pairs_of_its_definition(pattern: Pattern):
    found = pattern.layout.token_mask(*pattern.mask.shape[1:])
    assert torch.equal(found, pattern.mask.expand_as(found))


@given(patterns())
def test_blocks_are_partial_where_a_whole_block_has_hidden_pairs(pattern: Pattern):
    layout = pattern.layout
    seen = layout.token_mask(len(layout.first_key), len(layout.end_query))
    shape = (layout.num_heads, layout.num_query_blocks, layout.block, -1, layout.block)
    is_full = seen.view(shape).all(4).all(2)
    partial = layout.is_partial.bool()
    head, row, column = layout.block_mask().nonzero().unbind(1)
    assert torch.equal(layout.key_blocks.long(), column)
    assert torch.equal(~partial, is_full[head, row, column])


@given(patterns())
def test_the_transposed_list_has_the_same_blocks(pattern: Pattern):
    layout = pattern.layout
    counts = layout.column_offsets.diff(dim=1).flatten().long()
    assert layout.column_offsets[0, 0] == 0
    assert layout.column_offsets[-1, -1] == layout.num_blocks
    by_column = layout.block_mask().mT.contiguous().nonzero()
    number = torch.arange(counts.numel()).repeat_interleave(counts)
    heads, columns = number // layout.num_key_blocks, number % layout.num_key_blocks
    listed = torch.stack([heads, columns, layout.query_blocks.long()], 1)
    assert torch.equal(listed, by_column)
    partial = torch.zeros(layout.block_mask().shape, dtype=torch.uint8)
    partial[layout.block_mask()] = layout.is_partial
    assert torch.equal(partial.mT[layout.block_mask().mT], layout.is_partial_of_column)


def test_chunks_of_query_blocks_give_the_same_lists(monkeypatch):
    whole = Layout.documents([70, 33, 120, 5], 16)
    monkeypatch.setattr(_csr, "_CHUNK_BLOCKS", 20)
    for left, right in zip(
        whole.arrays, Layout.documents([70, 33, 120, 5], 16).arrays, strict=True
    ):
        assert torch.equal(left, right)


def test_blocks_that_no_pair_needs_are_not_listed():
    assert Layout.documents([64, 64, 64], 64).num_blocks == 3
    assert Layout.window(6400, 65, 64).num_blocks == 199
    assert Layout.causal(640, 64).num_blocks == 55
    assert Layout.tree([-1, *range(15), -1, *range(16, 31)], 16).num_blocks == 2


def test_bigbird_has_global_near_and_random_blocks():
    layout = Layout.bigbird(1024, 64, heads=3, random_blocks=2)
    mask = layout.block_mask()
    assert mask[:, 0].all() and mask[:, :, 0].all()
    number = torch.arange(16)
    assert mask[:, (number[:, None] - number).abs() <= 1].all()
    assert (mask[:, 3:15].sum(2) == 6).all()
    assert not torch.equal(mask[0], mask[1])


def test_the_best_blocks_of_scores_are_listed():
    scores = torch.randn(2, 6, 6)
    mask = Layout.from_scores(scores, 2, 16).block_mask()
    assert (mask.sum(2) == 2).all()
    assert scores[mask].view(2, 6, 2).amin() >= scores.masked_fill(mask, -9).amax(2).amin()
    mask = Layout.from_scores(scores, 2, 16, causal=True).block_mask()
    assert mask.diagonal(dim1=1, dim2=2).all() and not mask.triu(1).any()
    assert (mask.sum(2) == torch.tensor([1, 2, 2, 2, 2, 2])).all()


@pytest.mark.parametrize(
    ("make", "pattern"),
    [
        (lambda: Layout.causal(100), "causal"),
        (lambda: Layout.from_blocks(torch.ones(2, 3, 4).bool()), "dense"),
        (lambda: Layout.from_blocks(torch.ones(3, 3).bool().tril(), causal=True), "causal"),
        (lambda: Layout.from_blocks(torch.ones(3, 3).bool().tril()), "blocks"),
        (lambda: Layout.documents([100]), "blocks"),
    ],
)
def test_dense_and_causal_layouts_are_known(make, pattern: str):
    assert make().pattern == pattern


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.uint64]
)
def test_integers_of_any_dtype_are_ranges(dtype: torch.dtype):
    first, queries = torch.arange(40) // 10 * 10, torch.full((300,), 50)
    expected = Layout.from_ranges(first, first + 10, 16, num_keys=300, end_query=queries)
    given = first.to(dtype), (first + 10).to(dtype)
    found = Layout.from_ranges(*given, 16, num_keys=300, end_query=queries.to(dtype))
    for each, wanted in zip(found.arrays, expected.arrays, strict=True):
        assert torch.equal(each, wanted)


def test_more_tokens_than_the_dtype_of_ranges_counts():
    first = torch.zeros(40_000, dtype=torch.int16)
    layout = Layout.from_ranges(first, first + 1, 128)
    assert layout.num_blocks == 313 and int(layout.end_key.sum()) == 40_000


def test_whole_numbers_of_other_libraries_are_ints():
    sixteen, two = np.int64(16), torch.tensor(2)
    layout = Layout.from_blocks(torch.ones(2, 2).bool(), sixteen, num_keys=np.int32(20))
    assert type(layout.block) is int and type(layout.num_keys) is int
    for found, wanted in (
        (Layout.causal(np.int64(100), sixteen), Layout.causal(100, 16)),
        (Layout.window(torch.tensor(100), two, 16), Layout.window(100, 2, 16)),
        (Layout.strided(100, 16, stride=two), Layout.strided(100, 16, stride=2)),
        (Layout.bigbird(100, 16, seed=np.int64(-3)), Layout.bigbird(100, 16, seed=-3)),
    ):
        assert torch.equal(found.block_mask(), wanted.block_mask())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_scores_that_are_nan_are_refused_where_they_count(dtype: torch.dtype):
    scores = torch.arange(18).view(2, 3, 3).to(dtype)
    expected = Layout.from_scores(scores, 2, 16, causal=True).block_mask()
    scores[:, 0, 1:] = torch.nan  # keys after the queries
    scores.diagonal(dim1=1, dim2=2).fill_(torch.nan)  # the best ones, whatever their scores
    found = Layout.from_scores(scores, 2, 16, causal=True).block_mask()
    assert torch.equal(found, expected)
    scores[1, 2, 0] = torch.nan
    with pytest.raises(ValueError, match=r"NaN at \[1, 2, 0\].* 0 other places.*nan_to_num"):
        Layout.from_scores(scores, 2, 16, causal=True)
    with pytest.raises(ValueError, match=r"NaN at \[0, 0, 0\]"):
        Layout.from_scores(scores, 1, 16)
    assert Layout.from_scores(scores.nan_to_num(-torch.inf), 1, 16).num_blocks == 6


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Layout.causal(100.5), TypeError, r"num_tokens is 100\.5"),
        (lambda: Layout.causal(100, 16.0), TypeError, r"block is 16\.0"),
        (lambda: Layout.window(100, 2.5), TypeError, r"window is 2\.5"),
        (lambda: Layout.strided(100, stride=2.5), TypeError, r"stride is 2\.5"),
        (lambda: Layout.strided(100, local_blocks=1.5), TypeError, r"local_blocks is 1\.5"),
        (lambda: Layout.bigbird(100, window_blocks=2.5), TypeError, r"window_blocks is 2\.5"),
        (lambda: Layout.bigbird(100, global_blocks=1.5), TypeError, r"global_blocks is 1\.5"),
        (lambda: Layout.bigbird(100, random_blocks=1.5), TypeError, r"random_blocks is 1\.5"),
        (lambda: Layout.bigbird(100, seed=1.5), TypeError, r"seed is 1\.5"),
        (
            lambda: Layout.from_blocks(torch.ones(2, 2).bool(), num_keys=100.5),
            TypeError,
            r"num_keys is 100\.5",
        ),
        (lambda: Layout.from_blocks(torch.ones(2, 2).bool().numpy()), TypeError, "mask is ndarray"),
        (lambda: Layout.from_scores(torch.ones(1, 2, 2), 1.5), TypeError, r"num_blocks is 1\.5"),
        (lambda: Layout.from_scores(torch.ones(1, 2, 2).int(), 1), TypeError, "scores.float"),
        (lambda: Layout.from_scores(torch.ones(0, 2, 2), 1), ValueError, "none of them 0"),
        (lambda: Layout.from_ranges([0], [1]), TypeError, "first_key is list.*as_tensor"),
        (
            lambda: Layout.from_ranges(torch.tensor(0), torch.tensor(1)),
            ValueError,
            r"first_key has the shape \(\)",
        ),
        (
            lambda: Layout.from_ranges(torch.zeros(3).cfloat(), torch.ones(3).long()),
            TypeError,
            "first_key has the dtype torch.complex64",
        ),
        (
            lambda: Layout.from_ranges(torch.zeros(3).long(), torch.ones(3).long(), num_keys=-3),
            ValueError,
            "num_keys is -3",
        ),
        (
            lambda: Layout.from_ranges(
                torch.zeros(3).long(),
                torch.ones(3).long(),
                mask=torch.ones(1, 1, device="meta").bool(),
            ),
            ValueError,
            "mask is on meta, but must be on cpu",
        ),
        (lambda: Layout.causal(32).token_mask(-3), ValueError, "num_queries is -3"),
        (lambda: Layout.causal(32).token_mask(65), ValueError, "65, but layout has blocks of 64"),
        (lambda: Layout.causal(32).token_mask(9, 70), ValueError, "num_keys is 70"),
    ],
)
def test_other_numbers_and_tensors_are_refused(make, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Layout.causal(100, 48), ValueError, "block is 48"),
        (lambda: Layout.causal(0), ValueError, "num_tokens is 0"),
        (lambda: Layout.from_blocks(torch.ones(1, 2, 2)), TypeError, "compare it"),
        (lambda: Layout.from_blocks(torch.ones(2).bool()), ValueError, r"shape \(2,\)"),
        (
            lambda: Layout.from_blocks(torch.ones(2, 2).bool(), num_keys=64),
            ValueError,
            "num_keys is 64, which need 1 blocks",
        ),
        (lambda: Layout.documents([]), ValueError, "lengths are"),
        (lambda: Layout.documents([3, 0]), ValueError, "lengths are"),
        (lambda: Layout.documents([3, 2.5]), TypeError, "lengths has the dtype"),
        (lambda: Layout.documents([3], window=0), ValueError, "window is 0"),
        (lambda: Layout.documents(["a"]), TypeError, r"lengths are .*must be whole numbers"),
        (lambda: Layout.tree([[-1], [0, 1]]), TypeError, r"parents are .*must be whole numbers"),
        (lambda: Layout.tree([-1.0, 0.5]), TypeError, "parents has the dtype"),
        (lambda: Layout.tree([]), ValueError, "one at least"),
        (lambda: Layout.bigbird(100, random_blocks=-1), ValueError, "random_blocks is -1"),
        (lambda: Layout.bigbird(100, global_blocks=-1), ValueError, "global_blocks is -1"),
        (lambda: Layout.tree([-1, 0, 0, 1]), ValueError, "parent of token 3 is 1"),
        (lambda: Layout.tree([-1, 3]), ValueError, "parent of token 1 is 3"),
        (lambda: Layout.bigbird(100, window_blocks=2), ValueError, "must be odd"),
        (lambda: Layout.from_scores(torch.ones(2, 2), 1), ValueError, "scores have the shape"),
        (
            lambda: Layout.from_ranges(torch.zeros(3), torch.ones(3).long()),
            TypeError,
            "first_key has the dtype",
        ),
        (
            lambda: Layout.from_ranges(torch.zeros(3).long(), torch.ones(2).long()),
            ValueError,
            "end_key has the shape",
        ),
        (
            lambda: Layout.from_ranges(
                torch.zeros(3).long(), torch.ones(3).long(), mask=torch.ones(2, 2).bool()
            ),
            ValueError,
            "num_queries is 3, which need 1 blocks of 64, but mask has 2",
        ),
    ],
)
def test_wrong_arguments_are_refused(make, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        make()


def test_a_window_longer_than_any_number_sees_all():
    layout = Layout.window(40, 10**20, 16)
    assert torch.equal(layout.token_mask(), Layout.causal(40, 16).token_mask(40, 40))
