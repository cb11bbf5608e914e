"""Run by `test_quick_interpreter.py` in a process of its own, where Triton interprets kernels."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

import quick_operations
from quick_interpreter import quick_interpreter

assert os.environ.get("TRITON_INTERPRET") == "1", "test_quick_interpreter.py runs this"

WIDTH = 16
TYPES = {
    "int8": torch.int8,
    "int32": torch.int32,
    "int64": torch.int64,
    "half": torch.float16,
    "float": torch.float32,
    "double": torch.float64,
}


@triton.jit
def compute(x, y, out, WIDTH: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Store results of many operations, each as float64, of rows and a column."""
    at = tl.arange(0, WIDTH)
    place = at[:, None] * WIDTH + at[None, :]
    for step in range(2):  # the second time types are known, and other numbers come
        a = tl.load(x + step * WIDTH + at)[:, None]
        b = tl.load(y + step * WIDTH + at, mask=at < WIDTH - 3, other=1)[None, :]
        to = out + step * 32 * WIDTH * WIDTH + place
        if IS_WHOLE:
            c = tl.where(b == 0, b + 3, b)
            tl.store(to, (a // c).to(tl.float64))
            tl.store(to + WIDTH * WIDTH, (a % c).to(tl.float64))
            tl.store(to + 2 * WIDTH * WIDTH, ((a & b) | (a ^ 5)).to(tl.float64))
        else:
            tl.store(to, (a / b).to(tl.float64))
            tl.store(to + WIDTH * WIDTH, tl.where(a == a, a, 0.0).to(tl.float64))
            tl.store(to + 2 * WIDTH * WIDTH, (a * -0.0 + b * 0.0).to(tl.float64))
        to += 3 * WIDTH * WIDTH
        tl.store(to, (a + b).to(tl.float64))
        tl.store(to + WIDTH * WIDTH, (1 - a + step).to(tl.float64))
        tl.store(to + 2 * WIDTH * WIDTH, (a * b - a).to(tl.float64))
        tl.store(to + 3 * WIDTH * WIDTH, tl.where(a < b, a, b).to(tl.float64))
        tl.store(to + 4 * WIDTH * WIDTH, tl.maximum(tl.minimum(a, b), 1).to(tl.float64))
        to += 5 * WIDTH * WIDTH
        tl.store(to, ((a > b) & (a >= 0)).to(tl.float64))
        tl.store(to + WIDTH * WIDTH, ((a <= b) | (a != b) ^ (b == 2)).to(tl.float64))
        tl.store(to + 2 * WIDTH * WIDTH, a.to(tl.float32).to(tl.float16).to(tl.float64) + b)
        masked = tl.load(out + place, mask=(at < 5 + step)[:, None] & (at > 2)[None, :], other=-1)
        tl.store(to + 3 * WIDTH * WIDTH, masked)
        tl.store(to + 4 * WIDTH * WIDTH, tl.load(x + 1).to(tl.float64) + tl.sum(masked, 1)[:, None])


def draw(dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return numbers around 0, with what is special among them."""
    generator = torch.Generator().manual_seed(seed)
    numbers = 8 * torch.randn(2 * WIDTH, generator=generator)
    if dtype.is_floating_point:
        numbers[3], numbers[5], numbers[-2], numbers[-4] = torch.nan, torch.inf, 0.0, -0.0
    return numbers.to(dtype)


def run(first: str, second: str) -> Any:
    out = torch.zeros(2, 32, WIDTH, WIDTH, dtype=torch.float64)
    x, y = draw(TYPES[first], 0), draw(TYPES[second], 1)
    is_whole = not (x.dtype.is_floating_point or y.dtype.is_floating_point)
    compute[(1,)](x, y, out, WIDTH=WIDTH, IS_WHOLE=is_whole)
    return out.numpy().tobytes()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, of infinity
@pytest.mark.parametrize(
    ("first", "second"),
    [
        *((name, name) for name in TYPES),
        *(("int32", "int64"), ("int64", "int8"), ("int32", "float"), ("double", "int32")),
        *(("half", "float"), ("float", "double")),
        *(("int8", "half"), ("int64", "double")),
    ],
)
def test_results_are_those_of_the_interpreter(first: str, second: str):
    expected = run(first, second)
    with quick_interpreter():
        assert run(first, second) == expected


@pytest.mark.parametrize(("name", "operation"), [("add", "sub"), ("less_than", "less_equal")])
def test_a_wrong_operation_is_found_out_at_its_first_result(monkeypatch, name: str, operation: str):
    operations = quick_operations.ARITHMETIC | quick_operations.COMPARISONS
    of = "ARITHMETIC" if name in quick_operations.ARITHMETIC else "COMPARISONS"
    table = getattr(quick_operations, of)
    expected = run("int32", "int32")
    monkeypatch.setitem(table, name, operations[operation])
    with quick_interpreter():
        assert run("int32", "int32") == expected
