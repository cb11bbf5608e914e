"""Checks of some rows: what mixes rows, or is no sum over them, is refused whatever hides it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from penstock.iomodel import run_chain

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SUM_LOSS = nn.CrossEntropyLoss(reduction="sum")
MIXERS = {
    "softmax": lambda h: h.softmax(0),
    "mean": lambda h: h - h.mean(0),
    "attention": lambda h: (h @ h.t()).softmax(-1) @ h,
}


@pytest.mark.parametrize("mix", MIXERS.values(), ids=MIXERS)
def test_dropout_hides_no_mixing(mix):
    with pytest.raises(ValueError, match="each row alone"), torch.no_grad():
        run_chain([mix, nn.Dropout(0.1)], torch.randn(40, 6), chunk_rows=8)
    with pytest.raises(ValueError, match="each row alone"):  # in a single chunk of sequences
        run_chain([mix, nn.Dropout(0.1)], torch.randn(4, 6, 6).transpose(0, 1), chunk_rows=99)


def test_dropout_before_a_number_is_refused():
    labels, state = torch.randint(0, 5, (40,)), torch.get_rng_state()
    with torch.no_grad(), pytest.raises(ValueError, match="random numbers for a number"):
        run_chain([nn.Dropout(0.1), nn.CrossEntropyLoss()], torch.ones(40, 5), labels,
                  chunk_rows=8)  # fmt: skip
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("num_rows", [2, 3, 20])
def test_dropout_of_rows_alone_runs(num_rows: int):
    x = torch.rand(num_rows, 6) + 1
    with torch.no_grad():
        found = run_chain([nn.LayerNorm(6), nn.Dropout(0.5)], x, chunk_rows=1)
    expected = 2 * F.layer_norm(x, (6,))
    torch.testing.assert_close(found, expected.where(found != 0, 0.0))


@pytest.mark.parametrize("mask", [-1e4, torch.finfo().min, float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_large_column_hides_no_mixing(dtype: torch.dtype, mask: float):
    def hide(h):
        return torch.cat([h, h.new_full((len(h), 1), max(mask, torch.finfo(dtype).min))], 1)

    x = torch.randn(40, 6, dtype=dtype)
    with pytest.raises(ValueError, match="each row alone"):
        run_chain([lambda h: hide(h - h.mean(0))], x, chunk_rows=8)
    assert run_chain([lambda h: hide(h.softmax(-1))], x, chunk_rows=8).shape == (40, 7)


@pytest.mark.parametrize(
    "module",
    [
        lambda h: h > h.mean(0),
        lambda h: h.argsort(0),
        lambda h: torch.arange(len(h)),
        lambda h: torch.fft.fft(h, dim=0),
    ],
    ids=["bool", "argsort", "places", "complex"],
)
def test_results_that_are_no_floats_are_compared(module):
    with pytest.raises(ValueError, match="each row alone"):
        run_chain([module], torch.randn(40, 6), chunk_rows=8)


@pytest.mark.parametrize(
    "module",
    [lambda h: (h > -5).all(), lambda h: h.argmax(-1).max(), lambda h: torch.fft.fft(h).mean()],
    ids=["all", "largest", "complex"],
)
def test_numbers_that_are_no_floats_are_compared(module):
    with pytest.raises(ValueError, match="no sum over its rows"):
        run_chain([module], torch.randn(40, 6), chunk_rows=8)


def test_integers_and_complex_numbers_of_rows_alone_run():
    x, head = torch.randn(40, 6), nn.Linear(6, 5)
    labels = torch.randint(0, 5, (40,))
    for end in (lambda h: h.argmax(-1), lambda h: h > 0, torch.fft.fft):
        torch.testing.assert_close(run_chain([head, end], x, chunk_rows=8), end(head(x)))
    for count in (lambda h, y: (h.argmax(-1) == y).sum(), lambda h, y: (h > 99).sum()):
        assert run_chain([head, count], x, labels, chunk_rows=8) == count(head(x), labels)


def masked_mean(h, mask):
    return (h.square().sum(-1) * mask).sum() / mask.sum().clamp(min=1)


@pytest.mark.parametrize("num_rows", [2, 3, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_means_are_refused_whatever_rows_are_ignored(num_rows: int, dtype: torch.dtype):
    x = torch.randn(num_rows, 6, dtype=dtype)
    labels = torch.full((num_rows,), -100)
    labels[-2:] = torch.tensor([1, 2])
    labels[-1:] = labels[-1:] if num_rows < 4 else -100
    labels[num_rows // 2] = 3
    with pytest.raises(ValueError, match="no sum over its rows"):
        run_chain([nn.CrossEntropyLoss()], x, labels, chunk_rows=1)
    with pytest.raises(ValueError, match="no sum over its rows"):
        run_chain([masked_mean], x, (labels >= 0).to(dtype), chunk_rows=1)
    loss = run_chain([SUM_LOSS], x, labels, chunk_rows=1)
    torch.testing.assert_close(loss, SUM_LOSS(x, labels))


def test_labels_that_are_all_ignored_run():
    labels = torch.full((40,), -100)
    assert run_chain([SUM_LOSS], torch.randn(40, 6), labels, chunk_rows=8) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_penalty_of_weights_is_no_row_s(dtype: torch.dtype):
    torch.manual_seed(0)
    head = nn.Linear(8, 3, dtype=dtype)
    x, labels = torch.randn(64, 8, dtype=dtype), torch.randint(0, 3, (64,))
    share = 0.3 if dtype.itemsize == 2 else 3e-3

    def add_penalty(h, y):
        return SUM_LOSS(h, y) + share * head.weight.detach().square().sum()

    with pytest.raises(ValueError, match="no sum over its rows"):
        run_chain([head, add_penalty], x, labels, chunk_rows=4)


@pytest.mark.parametrize(
    "module",
    [
        F.normalize,
        nn.Softmax(1),
        nn.BatchNorm1d(6).eval(),
        nn.PReLU(6),
        nn.GroupNorm(2, 6),
        nn.Flatten(),
        lambda h: h - h.mean(1, keepdim=True),
        lambda h: h[:, 0].sum(),
    ],
)
@pytest.mark.parametrize("chunk_rows", [5, 99])
def test_modules_that_name_a_dimension_are_refused_for_sequences(module, chunk_rows: int):
    if isinstance(module, nn.BatchNorm1d | nn.PReLU):
        with torch.no_grad():
            for each in (*module.parameters(), *module.buffers()):
                each.copy_(torch.arange(1, 7)) if each.dim() else None
    x = torch.randn(4, 6, 6)
    with pytest.raises(ValueError, match=r"pass x\.flatten"):
        run_chain([nn.Linear(6, 6), module], x, chunk_rows=chunk_rows)
    rows = x.flatten(0, -2)
    torch.testing.assert_close(run_chain([module], rows, chunk_rows=5), module(rows))


def test_modules_of_rows_run_on_sequences():
    x, labels = torch.randn(2, 3, 4, 6), torch.randint(0, 6, (2, 3, 4))
    modules = [nn.Linear(6, 6), nn.LayerNorm(6), nn.Softmax(-1), nn.Unflatten(-1, (2, 3))]
    for end in (nn.RMSNorm(3), lambda h: h.square().sum()):
        found = run_chain([*modules, end], x, chunk_rows=5)
        torch.testing.assert_close(found, end(nn.Sequential(*modules)(x)))
    found = run_chain([nn.Linear(6, 6), SUM_LOSS], x, labels, chunk_rows=5)
    assert found.shape == ()
