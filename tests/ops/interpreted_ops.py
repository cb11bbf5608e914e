"""What `test_triton.py` runs in a process of its own, where Triton interprets the kernels of ops.

The interpreter has to be chosen before Triton is imported, and is wrong to have for other tests.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_bytes import rational as rational_bytes
from kernel_bytes.columns import column_bytes
from kernel_bytes.windows import WindowBytes
from penstock.codegen import ByteCount, count_bytes
from penstock.ops import _column_launch as columns
from penstock.ops import group_rational
from penstock.ops.rational import _launch as rational
from penstock.ops.rational import _operator
from penstock.ops.rational import _torch as plain_rational
from penstock.ops.windows import _launch as windows
from penstock.ops.windows import _torch as plain_windows
from penstock.ops.windows._filters import Filters
from penstock.ops.windows._geometry import Windows
from window_cases import Case, largest_error

assert os.environ.get("TRITON_INTERPRET") == "1", "test_triton.py runs this"

FLOAT, HALF, DOUBLE = torch.float32, torch.float16, torch.float64
TOLERANCES = {FLOAT: 5e-6, HALF: 2e-3, DOUBLE: 1e-12}
"""Of the largest element: sums of up to some hundred products; 11 bits of results."""


pytestmark = pytest.mark.usefixtures("interpreter_of_triton")


def count(run: Any) -> tuple[Any, ByteCount]:
    """Return a result and the bytes that its kernels ask for."""
    found: list[Any] = []
    counted = count_bytes(lambda: found.append(run()))
    return found[0], counted


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("rows", "groups", "width", "degrees"),
    [(70, 3, 40, (5, 4)), (9, 2, 96, (2, 0)), (33, 5, 7, (0, 3)), (20, 1, 300, (1, 1))],
)
def test_rational_activations_and_their_bytes(dtype, rows: int, groups: int, width: int, degrees):
    generator = torch.Generator().manual_seed(0)
    shape = (rows, groups * width)
    shapes = [shape, shape, (groups, degrees[0] + 1), (groups, degrees[1])]
    exact = [torch.randn(each, generator=generator, dtype=DOUBLE) for each in shapes]
    of_sums = DOUBLE if dtype == DOUBLE else FLOAT
    dtypes = (dtype, dtype, of_sums, of_sums)
    given = [each.to(of) for each, of in zip(exact, dtypes, strict=True)]
    exact = [each.double() for each in given]
    y, counted = count(lambda: rational.forward(*given[1:]))
    assert counted == rational_bytes.forward_bytes(*given[1:])
    gradients, counted = count(lambda: rational.backward(*given))
    assert counted == rational_bytes.backward_bytes(*given[1:])
    expected = plain_rational.forward(*exact[1:]), *plain_rational.backward(*exact)
    for found, wanted in zip((y, *gradients), expected, strict=True):
        assert largest_error(found, wanted) < TOLERANCES[dtype]
    again = rational.backward(*given)
    assert all(map(torch.equal, gradients, again))


@pytest.mark.parametrize("shape", [(300, 70), (1, 5), (0, 3), (17000, 2)])
def test_sums_of_columns_and_their_bytes(shape: tuple[int, int]):
    for dtype in (FLOAT, HALF):
        rows = torch.rand(shape, dtype=DOUBLE).to(dtype)
        sums, counted = count(lambda rows=rows: columns.reduce_columns(rows))
        assert counted == column_bytes(rows)
        assert largest_error(sums, rows.double().sum(0)) < TOLERANCES[FLOAT]


CASES = [
    Case(Windows((3, 3), (1, 1), (1, 1), (1, 1)), 2, 2, 2, 3, 3, 7),
    Case(Windows((2, 3), (2, 1), (0, 2), (2, 2)), 3, 1, 2, 2, 7, 8, is_moved=True),
    Case(Windows((1, 2), (1, 3), (1, 0), (1, 2)), 1, 2, 1, 1, 3, 11),
    Case(Windows((3, 3), (1, 1), (1, 1), (1, 1)), 2, 2, 3, 1, 3, 7, is_dynamic=True),
    Case(Windows((3, 2), (2, 2), (2, 3), (1, 2)), 1, 1, 9, 1, 6, 7, is_dynamic=True),
]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_windows_filters_and_their_bytes(case: Case, dtype: torch.dtype):
    x, weight = case.draw(dtype)
    of = Filters.of(x.shape, weight, case.op_groups)
    model = WindowBytes(shape=x.shape, windows=case.windows, element=x.element_size())
    size = (case.height, case.width)
    dy = torch.randn(x.shape[0], of.outs * case.groups if case.op_groups else x.shape[1], *case.out)
    dy, dwindows = dy.to(dtype), torch.randn(*x.shape[:2], *case.out, *case.windows.kernel)
    dwindows = dwindows.to(dtype).movedim(5, 2)[:, :].contiguous().movedim(2, 5)
    calls: dict[str, tuple[Any, ByteCount]] = {
        "unfold": ((x, case.windows), model.unfold()),
        "fold": ((dwindows, case.windows, *size), model.fold()),
        "multiply": ((x, weight, case.windows, case.op_groups), model.multiply(of)),
        "differentiate_input": (
            (dy, weight, case.windows, case.op_groups, size),
            model.differentiate_input(of),
        ),
        "differentiate_weight": (
            (dy, x, weight, case.windows, case.op_groups),
            model.differentiate_weight(of),
        ),
    }
    for name, (arguments, bytes_of_model) in calls.items():
        found, counted = count(lambda name=name, of=arguments: getattr(windows, name)(*of))
        exact = [each.double() if isinstance(each, Tensor) else each for each in arguments]
        wanted = getattr(plain_windows, name)(*exact)
        assert found.dtype == dtype and found.shape == wanted.shape, name
        assert largest_error(found, wanted) < TOLERANCES[dtype], name
        assert counted == bytes_of_model, name
        if dtype == FLOAT:  # twice is slow here; what runs is the same for each
            assert torch.equal(found, getattr(windows, name)(*arguments)), name


def test_the_operator_takes_the_kernels(monkeypatch: pytest.MonkeyPatch):
    """As on a GPU: output and gradients by autograd."""
    monkeypatch.setattr(_operator, "kernels_for", lambda *_: rational)
    given = [torch.randn(shape, requires_grad=True) for shape in ((6, 8), (2, 3), (2, 2))]
    y = group_rational(*given)
    wanted = plain_rational.evaluate(*given)
    assert largest_error(y.detach(), wanted.detach()) < TOLERANCES[FLOAT]
    dy = torch.randn(6, 8)
    for found, each in zip(
        torch.autograd.grad(y, given, dy), torch.autograd.grad(wanted, given, dy), strict=True
    ):
        assert largest_error(found, each) < TOLERANCES[FLOAT]
