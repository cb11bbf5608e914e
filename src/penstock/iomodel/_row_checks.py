"""Comparisons that show whether a function works on each row alone.

A row's result must be the same whatever is beside the row, and wherever it is. A product's sums
depend on how many rows it gets, so results are compared within tolerances of their largest number.
Where that is too coarse, the rows stay where they are and those beside them change: then kernels
compute the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from penstock.compat.random_numbers import keep_random_state

Run = Callable[[Tensor, Sequence[Tensor]], Tensor]
_NUM_ROWS = 8
# Of the largest number, by dtype: sums in another order differ by less
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_TOLERANCE = 0.05  # of numbers of 16 bits
_INDEX_SHARE = 0.25  # of integers and truth values, which rounding changes where numbers are near


def choose_rows(
    rows: Tensor, others: Sequence[Tensor], most: int = _NUM_ROWS
) -> tuple[Tensor, list[Tensor]]:
    """Return a few rows, evenly, first and last included."""
    num_rows = min(most, len(rows))
    at = torch.arange(num_rows, device=rows.device) * (len(rows) - 1) // (num_rows - 1)
    return rows.detach()[at], [each[at] for each in others]


def check_rows(run: Run, result: Tensor, some: Tensor, others: Sequence[Tensor]) -> None:
    """Refuse results that are not of each row alone, wherever it is.

    Args:
        run: Computes the results, from rows and other arguments by row.
        result: What it returned of some rows.
        some: The rows, at least 2.
        others: Their other arguments.
    """
    with torch.no_grad():
        # The rows turned around, and without the first of them
        found = run(some[1:].flip(0), [each[1:].flip(0) for each in others])
    expected = result[1:].flip(0)
    if len(result) != len(some) or found.shape != expected.shape or differ(found, expected):
        refuse_mixed_rows()
    # What a large column hides, or a few integers, may be rounding.
    if not is_inexact(result) or differ(found, expected, by_column=True):
        check_beside_others(run, some, others)


def check_beside_others(run: Run, some: Tensor, others: Sequence[Tensor]) -> None:
    """Refuse results of rows that change with those beside them, by the same random numbers.

    Args:
        run: Computes the results, from rows and other arguments by row.
        some: Some rows, at least 2.
        others: Their other arguments.
    """
    inner = slice(1, -1 if len(some) > 2 else None)
    same = torch.arange(len(some), device=some.device)
    changed = torch.ones_like(same)
    changed[inner] = same[inner]
    found = []
    for at in (same, changed):
        with torch.no_grad(), keep_random_state(some.device):
            found.append(run(some[at], [each[at] for each in others]))
    first, second = found
    if len(first) != len(some) or first.shape != second.shape:
        refuse_mixed_rows()
    if differ(second[inner], first[inner], by_column=True):
        refuse_mixed_rows()


def refuse_mixed_rows() -> None:
    """Raise `ValueError`: chunks would compute something else."""
    raise ValueError(
        "a module of the chain does not work on each row alone: a row's result depends on the rows "
        "beside it; leave out what reduces, sorts or normalises over rows"
    )


def is_inexact(tensor: Tensor) -> bool:
    """Return whether numbers may be rounded."""
    return tensor.is_floating_point() or tensor.is_complex()


def find_tolerance(dtype: torch.dtype) -> float:
    """Return the share of the largest number by which sums in another order may differ."""
    return _TOLERANCES.get(dtype.to_real(), _TOLERANCE)


def differ(found: Tensor, expected: Tensor, *, by_column: bool = False) -> bool:
    """Return whether numbers differ by more than sums of floats do, or than few integers.

    Args:
        found: The numbers, by row.
        expected: What they should be.
        by_column: Whether by more than those of the same column do, or than no integer.
    """
    if not expected.numel():
        return False
    if not is_inexact(expected):
        share = 0.0 if by_column else _INDEX_SHARE  # an index of equals may be any of them
        return bool((found != expected).double().mean() > share)
    if expected.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    tolerance = find_tolerance(expected.dtype)
    found, expected = found.double(), expected.double()
    if not torch.equal(found.isnan(), expected.isnan()):
        return True
    sizes = expected.abs().where(expected.isfinite(), 0.0)
    most = sizes.amax(0) if by_column else sizes.max()
    return bool(((found - expected).abs() > tolerance * most).any())
