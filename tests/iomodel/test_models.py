"""Models: equal to what schedules move, never below the bound, monotone in the fast memory."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from fast_memory import FastMemory, attend_flash, attend_two_pass, multiply, multiply_left
from penstock.codegen import ceil_div
from penstock.iomodel import attention, convolution, matmul, memory_levels, spgemm
from penstock.iomodel._attention import flash_forward, two_pass_forward
from penstock.iomodel._levels import tile_lengths
from penstock.memory import machine

LENGTHS = st.integers(1, 300)
SIZES = st.integers(8, 200_000)
QUICK = settings(max_examples=40, deadline=None)


def sparse_counts(seed: int, rows: int, inner: int, columns: int) -> list[int]:
    """Multiplications and nonzeros of a product of random matrices, all of which take part."""
    generator = np.random.default_rng(seed)
    left, right = generator.random((rows, inner)) < 0.2, generator.random((inner, columns)) < 0.2
    left[0, 0] = right[0, 0] = True
    left, right = left & right.any(1)[None, :], right & left.any(0)[:, None]
    product = left.astype(int) @ right.astype(int)
    return [int(each) for each in (product.sum(), left.sum(), right.sum(), (product > 0).sum())]


def models(draw):
    """Calls of all models with shapes drawn; each takes the elements of the fast memory."""
    n = [draw(LENGTHS) for _ in range(3)]
    density, stride = draw(st.floats(0.01, 1)), draw(st.integers(1, 3))
    window = (draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    padding = draw(st.integers(0, min(window) - 1))
    image = (draw(st.integers(3, 12)), draw(st.integers(3, 12)))
    counts = sparse_counts(draw(st.integers(0, 99)), *(1 + each % 40 for each in n))
    return [
        lambda m: matmul(*n, 4 * m),
        lambda m: attention(n[0], n[1], 4 * m, density),
        lambda m: attention(n[0], n[1], 4 * m, density, "backward"),
        lambda m: convolution(
            1 + n[0] % 3, n[1], n[2], image, window, 4 * m, stride=stride, padding=padding
        ),
        lambda m: spgemm(*counts, 8 * m),
    ]


@QUICK
@given(data=st.data())
def test_no_model_is_below_its_bound_or_moves_more_with_more_memory(data):
    sizes = sorted(data.draw(st.lists(SIZES, min_size=2, max_size=4)))
    for model in models(data.draw):
        found = [model(size) for size in sizes]
        assert all(each.ratio >= 1 for each in found)
        moved = [each.moved_bytes for each in found]
        assert moved == sorted(moved, reverse=True)


@QUICK
@given(shape=st.tuples(*[st.integers(1, 12)] * 3), elements=st.integers(3, 200))
def test_a_product_moves_what_its_model_says(shape, elements):
    rows, columns, inner = shape
    model = matmul(rows, columns, inner, 4 * elements)
    generator = np.random.default_rng(0)
    left, right = generator.normal(size=(rows, inner)), generator.normal(size=(inner, columns))
    memory, tiles = FastMemory(elements), model.tiles
    if model.regime == "result stationary":
        result = multiply(left, right, tiles, memory)
    elif model.regime == "left stationary":
        result = multiply_left(left, right, tiles["rows"], tiles["inner"], memory)
    else:  # the transposed product has its left operand at hand
        result = multiply_left(right.T, left.T, tiles["columns"], tiles["inner"], memory).T
    event(model.regime)
    np.testing.assert_allclose(result, left @ right)
    counted = (4 * memory.loaded, 4 * memory.stored)
    assert counted == (model.levels[0].loaded_bytes, model.levels[0].stored_bytes)


@pytest.mark.parametrize("regime", ["FlashAttention", "two-pass"])
@QUICK
@given(
    tokens=st.integers(1, 14),
    keys=st.integers(1, 14),
    head_dim=st.integers(1, 6),
    elements=st.integers(6, 300),
)
def test_attention_moves_what_its_model_says(regime, tokens, keys, head_dim, elements):
    generator = np.random.default_rng(0)
    q = generator.normal(size=(tokens, head_dim))
    k, v = generator.normal(size=(2, keys, head_dim))
    choose = flash_forward if regime == "FlashAttention" else two_pass_forward
    attend = attend_flash if regime == "FlashAttention" else attend_two_pass
    schedule = choose(tokens, keys, head_dim, elements)
    if schedule is None:
        assert elements < 3 * head_dim + 3
        return
    memory = FastMemory(elements)
    scores = q @ k.T
    powers = np.exp(scores - scores.max(1, keepdims=True))
    expected = powers / powers.sum(1, keepdims=True) @ v
    np.testing.assert_allclose(attend(q, k, v, schedule.tiles, memory), expected)
    assert (memory.loaded, memory.stored) == (schedule.loaded, schedule.stored)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 576])
def test_the_two_pass_regime_ends_near_the_square_of_the_head_dim(head_dim):
    square = 4 * head_dim**2
    assert attention(8192, head_dim, square // 4).regime == "two-pass"
    assert attention(8192, head_dim, square).regime == "FlashAttention"
    assert attention(8192, head_dim, 4 * square).regime == "FlashAttention"


def test_flash_attention_follows_its_asymptote():
    """Elements are N^2 d^2 / M, up to the constant of tiles of q and o beside each other."""
    for head_dim in (64, 128):
        for times in (4, 16):
            elements = times * head_dim**2
            moved = attention(65536, head_dim, 4 * elements).moved_bytes / 4
            assert moved / (65536**2 * head_dim**2 / elements) == pytest.approx(4, rel=0.1)


def test_a_product_comes_close_to_its_bound():
    assert matmul(4096, 4096, 4096, "1MiB").ratio < 1.15


def test_a_sparse_layout_moves_its_share():
    dense, sparse = (attention(16384, 64, "100KiB", density) for density in (1, 0.125))
    assert 0.1 < sparse.moved_bytes / dense.moved_bytes < 0.16


def test_everything_that_fits_moves_once():
    for model in (
        matmul(30, 20, 10, "1MiB"),
        attention(64, 16, "1MiB"),
        convolution(1, 4, 8, (8, 8), (3, 3), "1MiB", padding=1),
        spgemm(400, 100, 100, 200, "1MiB"),
    ):
        assert model.ratio == 1


def test_bounds_count_only_what_is_needed():
    tokens, head_dim = 4, 8
    q, k, v, gradient = np.random.default_rng(0).normal(size=(4, tokens, head_dim))
    powers = np.exp(q @ k.T)
    p = powers / powers.sum(1, keepdims=True)
    of_p, out = gradient @ v.T, p @ v
    # The output's rows times its gradient's need no output.
    np.testing.assert_allclose((p * of_p).sum(1), (out * gradient).sum(1))
    moved = 7 * tokens * head_dim  # q, k, v and the gradient in, three gradients out
    bound = attention(tokens, head_dim, "1MiB", pass_="backward").lower_bound_bytes
    assert bound == 4 * moved
    # Eight of nine weights meet padding only.
    assert convolution(1, 1, 1, (1, 1), (3, 3), "1KiB", padding=1).lower_bound_bytes == 4 * 3
    assert convolution(1, 1, 1, (2, 1), (3, 3), "1KiB", padding=1).lower_bound_bytes == 4 * 7
    skipped = convolution(1, 1, 1, (4, 1), (2, 1), "1KiB", stride=3)
    assert skipped.lower_bound_bytes == 4 * (2 + 2 + 1)


def test_levels_of_a_machine_come_near_to_far():
    profile = machine("h200")
    model = attention(8192, 576, profile, element_bytes=2)
    assert [each.level for each in model.levels] == ["L2", "memory", "link"]
    assert memory_levels(profile)[0].name == "shared"
    moved = [each.moved_bytes for each in model.levels]
    assert moved == sorted(moved, reverse=True)
    shown = str(model)
    assert "two-pass" in shown and "proposition 3" in shown
    assert json.loads(json.dumps(model.to_dict()))["levels"][0]["tiles"]["queries"] == 391


@given(length=st.integers(1, 5000))
def test_tile_lengths_are_the_smallest_for_each_count(length):
    found = tile_lengths(length)
    counts = {ceil_div(length, tile) for tile in range(1, length + 1)}
    assert {ceil_div(length, tile) for tile in found} == counts
    assert all(tile == ceil_div(length, ceil_div(length, tile)) for tile in found)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: matmul(4, 4, 4, 8), ValueError, "fast_memory is 8 B"),
        (lambda: matmul(4, 4, 0, "1KiB"), ValueError, "inner is 0"),
        (lambda: matmul(4, 4, 1.5, "1KiB"), TypeError, "inner is 1.5"),
        (lambda: matmul(4, 4, 4, "1KiB", element_bytes=0), ValueError, "element_bytes is 0"),
        (lambda: attention(4, 4, "1KiB", 0), ValueError, "density is 0"),
        (lambda: attention(4, 4, "1KiB", pass_="both"), ValueError, "pass_ is 'both'"),
        (lambda: convolution(1, 1, 1, (2, 9), (3, 3), "1KiB"), ValueError, "height of the window"),
        (lambda: convolution(1, 1, 1, 5, (3, 3), "1KiB"), TypeError, "image is 5; pass its height"),
        (lambda: spgemm(5, 10, 2, 3, "1KiB"), ValueError, "5 multiplications for 10"),
        (lambda: spgemm(50, 10, 20, 3, "1KiB"), ValueError, "multiplications, or a row"),
    ],
)
def test_wrong_arguments_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_counts_may_be_integers_of_numpy():
    counts = np.array([64, 32, 16])
    assert matmul(*counts, "1KiB") == matmul(64, 32, 16, "1KiB")
