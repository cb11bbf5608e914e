"""Adapters, and rows grouped by adapter: what is grouped how, and what is refused."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.lora import Adapter, AdapterRows, linear


def _adapter(rank=2, dtype=torch.float32, **options) -> Adapter:
    return Adapter(torch.randn(rank, 5, dtype=dtype), torch.randn(4, rank, dtype=dtype), **options)


@pytest.mark.parametrize(
    ("down", "up", "named"),
    [
        ((2, 5), (4, 3), r"\(2, 5\) and \(4, 3\)"),
        ((5,), (4, 1), r"\(5,\)"),
        ((2, 5), (2,), r"\(2,\)"),
        ((0, 5), (4, 0), "rank 0"),
    ],
)
def test_shapes_that_do_not_fit(down, up, named):
    with pytest.raises(ValueError, match=named):
        Adapter(torch.zeros(down), torch.zeros(up))


@pytest.mark.parametrize(
    ("down", "up"),
    [
        (torch.float32, torch.bfloat16),
        (torch.int64, torch.int64),
        (torch.complex64, torch.complex64),
    ],
)
def test_dtypes_that_do_not_fit(down, up):
    with pytest.raises(ValueError, match=f"{down}.*{up}.*one floating-point dtype"):
        Adapter(torch.zeros(2, 5, dtype=down), torch.zeros(4, 2, dtype=up))


def test_devices_that_do_not_fit():
    with pytest.raises(ValueError, match=r"on cpu and up .* on meta"):
        Adapter(torch.zeros(2, 5), torch.zeros(4, 2, device="meta"))


def test_matrices_that_are_no_tensors():
    with pytest.raises(TypeError, match="list and Tensor"):
        Adapter([[1.0]], torch.zeros(1, 1))  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="Tensor and ndarray"):
        Adapter(torch.zeros(1, 1), np.zeros((1, 1)))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("dropout", [1.0, -0.1, 1.5, math.nan, math.inf])
def test_dropout_that_is_no_probability(dropout):
    with pytest.raises(ValueError, match=rf"dropout is {dropout}; .*\[0, 1\)"):
        _adapter(dropout=dropout)


@pytest.mark.parametrize("scaling", [math.nan, math.inf, -math.inf])
def test_scaling_that_is_not_finite(scaling):
    with pytest.raises(ValueError, match=f"scaling is {scaling}"):
        _adapter(scaling=scaling)


@pytest.mark.parametrize("name", ["scaling", "dropout"])
@pytest.mark.parametrize("value", [torch.tensor(0.5, requires_grad=True), "0.5", None, 0.5j])
def test_numbers_of_other_types_are_refused(name, value):
    with pytest.raises(TypeError, match=f"{name} is a {type(value).__name__}; accepted are num"):
        _adapter(**{name: value})
    assert getattr(_adapter(**{name: np.float32(0.5)}), name) == 0.5


def test_adapter_is_frozen_and_compared_by_identity():
    adapter = _adapter()
    with pytest.raises(dataclasses.FrozenInstanceError):
        adapter.scaling = 3.0  # pyright: ignore[reportAttributeAccessIssue]
    assert adapter != dataclasses.replace(adapter)
    assert adapter in {adapter}


@pytest.mark.parametrize("move", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_compute_the_same(move):
    down, up = torch.nn.Parameter(torch.randn(2, 5)), torch.nn.Parameter(torch.randn(4, 2))
    adapter = Adapter(down, up, scaling=3.0, dropout=0.5)
    rows = AdapterRows.group([0, -1, 0, 0, -1], 1)
    other, other_rows = move(adapter), move(rows)
    assert (other.scaling, other.dropout, other.rank) == (3.0, 0.5, 2)
    assert isinstance(other.down, torch.nn.Parameter)
    assert other.down.data_ptr() != down.data_ptr()
    assert (other_rows.counts, other_rows.starts) == (rows.counts, rows.starts)
    x, weight = torch.randn(5, 5), torch.randn(4, 5)
    assert torch.equal(
        linear(x, weight, None, [other], other_rows, seed=1),
        linear(x, weight, None, [adapter], rows, seed=1),
    )


@given(st.lists(st.integers(-1, 3), max_size=12))
def test_rows_are_grouped_in_ascending_order(by_row):
    rows = AdapterRows.group(by_row, 4)
    expected = [[i for i, each in enumerate(by_row) if each == number] for number in range(4)]
    assert rows.num_rows == len(by_row)
    assert rows.counts == tuple(len(each) for each in expected)
    parts = [None] * 4 if rows.order is None else rows.order.split(list(rows.counts))
    for start, part, numbers in zip(rows.starts, parts, expected, strict=True):
        run = list(range(numbers[0], numbers[0] + len(numbers))) if numbers else []
        assert (start >= 0) == (run == numbers)
        if start < 0:
            assert part is not None
            assert part.tolist() == numbers
        elif numbers:
            assert start == numbers[0]
    assert (rows.order is None) == all(start >= 0 for start in rows.starts)


@pytest.mark.parametrize(
    "assignment",
    [
        [1, 0, -1],
        (1, 0, -1),
        np.array([1, 0, -1], np.int16),
        torch.tensor([1, 0, -1], dtype=torch.int8),
        torch.tensor([1, 0, -1, 9, 9, 9])[:3],
        torch.tensor([1, 9, 0, 9, -1, 9])[::2],
    ],
)
def test_assignments_of_any_integers(assignment):
    rows = AdapterRows.group(assignment, 2)
    assert (rows.num_rows, rows.counts, rows.starts) == (3, (1, 1), (1, 0))
    assert rows.num_adapters == 2


def test_a_batch_without_rows():
    for assignment in ([], torch.zeros(0, dtype=torch.int64), np.zeros(0, np.int64)):
        rows = AdapterRows.group(assignment, 2)
        assert (rows.num_rows, rows.counts, rows.starts, rows.order) == (0, (0, 0), (0, 0), None)
    assert AdapterRows.group([], 0).counts == ()
    assert AdapterRows.of_runs([]).num_rows == 0


@pytest.mark.parametrize(
    "assignment",
    [
        [0.0, 1.0],
        torch.zeros(2),
        torch.zeros(0),
        [True, False],
        torch.zeros(2, dtype=torch.complex128),
        [None, 0],
        None,
        "01",
    ],
)
def test_assignments_that_are_no_integers(assignment):
    with pytest.raises(TypeError, match=r"assignment .*integers"):
        AdapterRows.group(assignment, 2)


@pytest.mark.parametrize(("number", "num_adapters"), [(2, 2), (-2, 2), (0, 0), (2**62, 3)])
def test_adapters_that_do_not_exist(number, num_adapters):
    with pytest.raises(ValueError, match=f"number {number}; .* {num_adapters} adapters"):
        AdapterRows.group([-1, number], num_adapters)


def test_assignments_of_other_shapes():
    with pytest.raises(ValueError, match=r"\(1, 2\)"):
        AdapterRows.group([[0, 1]], 2)
    with pytest.raises(ValueError, match=r"\(\)"):
        AdapterRows.group(torch.tensor(0), 2)


def test_runs():
    rows = AdapterRows.of_runs([2, 0, 3], num_rows=7)
    same = AdapterRows.group([0, 0, 2, 2, 2, -1, -1], 3)
    assert (rows.num_rows, rows.counts) == (same.num_rows, same.counts) == (7, (2, 0, 3))
    assert rows.starts == (0, 2, 2)
    assert rows.order is None
    assert AdapterRows.of_runs([2, 0, 3]).num_rows == 5


@pytest.mark.parametrize(("counts", "num_rows"), [([3, 2], 4), ([3, -1], None), ([3], 0)])
def test_runs_that_do_not_fit(counts, num_rows):
    with pytest.raises(ValueError, match="counts are"):
        AdapterRows.of_runs(counts, num_rows=num_rows)


@pytest.mark.parametrize(
    "fields",
    [
        {"counts": (2, 1), "starts": (0,)},
        {"counts": (2,), "starts": (3,)},
        {"counts": (2,), "starts": (-2,)},
        {"counts": (2,), "starts": (-1,)},
        {"counts": (2,), "starts": (-1,), "order": torch.tensor([0])},
        {"counts": (2,), "starts": (-1,), "order": torch.tensor([0, 2], dtype=torch.int32)},
    ],
)
def test_rows_that_contradict_themselves(fields):
    with pytest.raises(ValueError, match=r"counts are|order is"):
        AdapterRows(num_rows=4, **fields)


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ([0, 4], "order has the number 4; accepted are .* from 0 to 3"),
        ([-1, 2], "order has the number -1; accepted"),
        ([3, 3], "order has a row 2 times for adapter 0"),
    ],
)
def test_orders_of_rows_that_no_batch_has(order, message):
    with pytest.raises(ValueError, match=message):
        AdapterRows(4, (2,), (-1,), torch.tensor(order))
    with pytest.raises(TypeError, match="order is a list; accepted is a tensor"):
        AdapterRows(4, (2,), (-1,), order)
