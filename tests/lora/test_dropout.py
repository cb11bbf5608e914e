"""Dropout masks: their definition, their bits by C++ and by torch, and their statistics."""

from __future__ import annotations

import ctypes
import itertools
import logging
import math
import struct

import numpy as np
import pytest
import torch

from penstock.errors import BuildError
from penstock.lora import Adapter, _dropout, linear
from penstock.lora._dropout import Mask, keep, to_threshold

CPU = torch.device("cpu")
SEEDS = [0, 1, 7, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -1, -(2**63), 0x9E3779B97F4A7C15 - 2**64]
FIRST_NUMBERS = [0, 511, 2**31 - 2, 2**32 - 3, 2**32, 2**32 + 5]
PROBABILITIES = [1e-12, 2**-32, 0.1, 0.5, 1 - 2**-31, 1 - 1e-10, math.nextafter(1, 0)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("seed", SEEDS)
def test_mask_is_its_definition(oracle, seed):
    for first, probability in itertools.product(FIRST_NUMBERS, PROBABILITIES):
        words = oracle.words(seed, np.arange(first, first + 5), 9)
        threshold = min(round(probability * 2**32), 2**32 - 1)
        mask = keep(seed, first, 5, 9, probability, CPU)
        assert mask.dtype == torch.bool
        assert np.array_equal(mask.numpy(), words >= threshold)


def test_seeds_have_64_bits():
    """The two's complement of a number is the same seed; each half of it counts."""
    masks = {seed: keep(seed, 0, 8, 64, 0.5, CPU) for seed in (0, 1, 2**32, 2**63, 2**64 - 1)}
    for a, b in itertools.combinations(masks, 2):
        assert not torch.equal(masks[a], masks[b]), (a, b)
    assert torch.equal(masks[2**64 - 1], keep(-1, 0, 8, 64, 0.5, CPU))


def _strided(dtype: torch.dtype, layout: str) -> torch.Tensor:
    values = torch.randn(6, 37).to(dtype)
    if layout == "rows apart":
        return torch.randn(12, 50).to(dtype)[::2, 5:42].copy_(values)
    if layout == "one row expanded":
        return values[:1].expand(6, 37)
    if layout == "transposed":
        return values.t().contiguous().t()
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "rows apart", "one row expanded", "transposed"])
def test_the_backends_have_the_same_bits(masks_by, oracle, dtype, layout):
    rows = _strided(dtype, layout)
    cases = itertools.product(SEEDS[::2], FIRST_NUMBERS[::3], [0.3, 1 - 1e-10, 1e-12])
    for seed, first, probability in cases:
        mask = Mask(seed=seed, probability=probability)
        words = oracle.words(seed, np.arange(first, first + 6), 37)
        kept = torch.from_numpy(words >= to_threshold(probability))
        expected = torch.where(kept, rows, torch.zeros((), dtype=dtype))
        out = torch.full((6, 37), math.nan, dtype=dtype)
        assert mask.select(rows, first, out) is out
        assert torch.equal(out, expected)
        total = torch.randn(6, 80).to(dtype)[:, 20:57]  # rows that do not follow each other
        sums = total + expected
        mask.add_selected(total, rows.contiguous().clone(), first)
        assert torch.equal(total, sums)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cpp_masks_where_rows_have_unit_stride(dtype, masks_by):
    """Otherwise the comparisons above would compare torch with torch."""
    rows = torch.ones(6, 40, dtype=dtype)[:, :37]
    mask, out = Mask(seed=3, probability=0.5), torch.empty(6, 37, dtype=dtype)
    assert _dropout._call_native(rows, out, mask, 0, accumulate=False) == (masks_by == "C++")
    assert not _dropout._call_native(rows[:, ::2], out, mask, 0, accumulate=False)


def test_large_masks_do_not_depend_on_the_threads(masks_by):
    rows, mask = torch.randn(700, 301), Mask(seed=11, probability=0.2)
    results, num_threads = [], torch.get_num_threads()
    try:
        for num in (1, 2, 3):
            torch.set_num_threads(num)
            total = torch.ones_like(rows)
            mask.add_selected(total, rows.clone(), 5)
            results.append((mask.select(rows, 5, torch.empty_like(rows)), total))
    finally:
        torch.set_num_threads(num_threads)
    for selected, total in results[1:]:
        assert torch.equal(selected, results[0][0])
        assert torch.equal(total, results[0][1])


def test_struct_of_arguments_is_that_of_cpp():
    """Thirteen numbers of 8 bytes, the pointers too."""
    assert struct.calcsize("13q") == 13 * 8
    assert ctypes.sizeof(ctypes.c_void_p) == 8


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropped_elements_are_zero_whatever_they_were(masks_by, oracle, value, dtype):
    kept = oracle.mask(5, 9, 20, 0.5)
    rows = torch.where(kept, 1.0, value).to(dtype)
    mask = Mask(seed=5, probability=0.5)
    assert torch.equal(mask.select(rows, 0, torch.empty_like(rows)), kept.to(dtype))
    total = torch.ones(9, 20, dtype=dtype)
    mask.add_selected(total, rows.clone(), 0)
    assert torch.equal(total, 1 + kept.to(dtype))


def test_not_a_number_in_a_dropped_element_reaches_nothing(masks_by, oracle):
    """Neither the products of the adapter nor its gradients; the base has it, of course."""
    kept = oracle.mask(5, 6, 16, 0.5)
    x = torch.where(kept, 1.0, math.nan).requires_grad_()
    down, up = torch.randn(3, 16, requires_grad=True), torch.randn(4, 3, requires_grad=True)
    y = _dropout_only(x, down, up, 0.5, 5)
    assert y.isfinite().all()
    gradients = torch.autograd.grad(y.sum(), (x, down, up))
    assert all(each.isfinite().all() for each in gradients)


def _dropout_only(x, down, up, probability, seed):
    from penstock.lora import add

    adapter = Adapter(down, up, dropout=probability)
    return add(x.new_zeros(x.shape[0], up.shape[0]), x, [adapter], seed=[seed])


@pytest.mark.parametrize(
    ("probability", "threshold"),
    [
        (0.0, 0),
        (1e-12, 0),
        (2**-32, 1),
        (0.5, 2**31),
        (1 - 2**-32, 2**32 - 1),
        (1 - 1e-10, 2**32 - 1),  # rounds to 2**32, which wraps to 0 and would keep everything
        (math.nextafter(1, 0), 2**32 - 1),
    ],
)
def test_thresholds(probability, threshold):
    assert to_threshold(probability) == threshold


@pytest.mark.parametrize("probability", [1e-12, 1 - 1e-10, math.nextafter(1, 0)])
def test_probabilities_near_the_ends_do_not_turn_over(masks_by, probability):
    rows = torch.ones(300, 1000)
    out = Mask(seed=9, probability=probability).select(rows, 0, torch.empty_like(rows))
    assert out.sum() == (rows.numel() if probability < 0.5 else 0)


def _assert_chi_squared(observed: torch.Tensor, expected: torch.Tensor | float, free: int) -> None:
    """Compare counts, by the cube root of the statistic, which is close to normal (E. B. Wilson and
    M. M. Hilferty, "The Distribution of Chi-Square", 1931)."""
    statistic = float(((observed.double() - expected) ** 2 / expected).sum())
    variance = 2 / (9 * free)
    deviations = ((statistic / free) ** (1 / 3) - (1 - variance)) / math.sqrt(variance)
    assert abs(deviations) < 4, (statistic, free)


ROWS, COLUMNS = 1536, 1024


@pytest.mark.parametrize("probability", [0.02, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 12345, -(2**62)])
def test_frequencies_by_row_column_and_in_all(probability, seed):
    dropped = ~keep(seed, 0, ROWS, COLUMNS, probability, CPU)
    p = probability
    deviation = math.sqrt(p * (1 - p) * dropped.numel())
    assert abs(int(dropped.sum()) - p * dropped.numel()) < 4 * deviation
    for axis, num, length in ((0, COLUMNS, ROWS), (1, ROWS, COLUMNS)):
        counts = dropped.sum(axis)
        both = torch.stack([counts, length - counts])
        expected = torch.tensor([[p * length], [(1 - p) * length]]).double()
        _assert_chi_squared(both, expected, num)


@pytest.mark.parametrize("probability", [0.1, 0.5])
@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (1, 1), (1, -1), (0, 2), (0, 64), (512, 0)])
def test_neighbouring_elements_are_independent(probability, shift):
    dropped = ~keep(77, 0, ROWS + 512, COLUMNS, probability, CPU)
    rolled = dropped.roll(shift, dims=(0, 1))
    _assert_independent(dropped[512:, 64:-64], rolled[512:, 64:-64], probability)


def _assert_independent(a: torch.Tensor, b: torch.Tensor, probability: float) -> None:
    pairs = torch.bincount((a.long() * 2 + b.long()).flatten(), minlength=4)
    one = torch.tensor([1 - probability, probability], dtype=torch.float64)
    _assert_chi_squared(pairs, torch.outer(one, one).flatten() * a.numel(), 3)


@pytest.mark.parametrize("bit", [0, 1, 5, 31, 32, 33, 47, 63])
def test_masks_of_seeds_that_differ_in_a_bit_are_independent(bit):
    """Steps and layers that count their seeds differ in few bits."""
    for seed in (0, 41):
        a = keep(seed, 0, 512, COLUMNS, 0.1, CPU)
        b = keep(seed ^ (1 << bit), 0, 512, COLUMNS, 0.1, CPU)
        _assert_independent(~a, ~b, 0.1)


def test_adapters_and_steps_have_masks_of_their_own():
    """An integer seed is another one for each adapter, and in each step."""
    num_rows, num_columns = 64, 512
    x, eye = torch.ones(2 * num_rows, num_columns), torch.eye(num_columns)
    adapters = [Adapter(eye, eye, dropout=0.5) for _ in range(2)]
    base = torch.zeros(num_columns, num_columns)
    assignment = [0] * num_rows + [1] * num_rows
    masks = [
        linear(x, base, None, adapters, assignment, seed=step)[half] == 0
        for step in range(3)
        for half in (slice(0, num_rows), slice(num_rows, None))
    ]
    for a, b in itertools.combinations(masks, 2):
        _assert_independent(a, b, 0.5)


def test_runs_of_dropped_elements_have_a_geometric_distribution():
    dropped = ~keep(3, 0, 2000, 512, 0.5, CPU)
    # 8 neighbours of a row make a byte; all 256 are equally frequent.
    octets = dropped.view(-1, 8).long() @ (1 << torch.arange(8))
    _assert_chi_squared(torch.bincount(octets, minlength=256), len(octets) / 256, 255)
    columns = dropped.t().reshape(-1, 8).long() @ (1 << torch.arange(8))
    _assert_chi_squared(torch.bincount(columns, minlength=256), len(columns) / 256, 255)


@pytest.mark.parametrize("probability", [0.05, 0.5, 0.95])
def test_the_expected_addition_is_that_without_dropout(probability):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 64, generator=generator).expand(40_000, 64)
    down, up = torch.randn(2, 64, generator=generator), torch.randn(3, 2, generator=generator)
    weight = torch.zeros(3, 64)
    dropped = linear(x, weight, None, [Adapter(down, up, 2.0, probability)], seed=4).double()
    exact = linear(x[:1], weight, None, [Adapter(down, up, 2.0)], seed=4).double()
    error = dropped.std(0) / math.sqrt(len(x))
    assert ((dropped.mean(0) - exact).abs() < 4.5 * error).all()


def test_a_machine_without_a_compiler_is_told_once(monkeypatch, caplog):
    def fail(*_, **__):
        raise BuildError("no compiler")

    monkeypatch.setattr("penstock.codegen._load.build_library", fail)
    _dropout._library.cache_clear()
    try:
        with caplog.at_level(logging.INFO, logger="penstock"):
            rows = torch.ones(4, 8)
            for _ in range(2):
                out = Mask(seed=1, probability=0.5).select(rows, 0, torch.empty_like(rows))
        assert torch.equal(out != 0, keep(1, 0, 4, 8, 0.5, CPU))
        assert [each for each in caplog.messages if "by torch" in each] == [
            "dropout masks of LoRA are made by torch: no compiler"
        ]
    finally:
        _dropout._library.cache_clear()


def test_rows_that_are_negated_later_are_masked_negated():
    rows = torch.randn(6, 16)
    mask = Mask(seed=3, probability=0.3)
    found = mask.select(torch._neg_view(rows), 0, torch.empty(6, 16))
    assert torch.equal(found, mask.select(-rows, 0, torch.empty(6, 16)))
