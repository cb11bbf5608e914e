"""Comparisons that show whether a number is a sum over rows: that of the numbers of parts of them.

Parts of which one has 0, or no finite number, show nothing: a mean over labels that are ignored is
then as good as a sum. So there are further rows to try, those of the largest and the smallest
labels or weights first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from penstock.iomodel._row_checks import Run, choose_rows, find_tolerance, is_inexact

_NUM_EXTREME = 4  # rows of the largest numbers of an argument, and of the smallest
_NUM_ROWS = (16, 32, 64)  # further ones, evenly
# Of the largest number, by dtype: most sums differ by less, and a penalty of weights by more
_FINE_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
_FINE_TOLERANCE = 0.01  # of numbers of 16 bits
_CONSTANT_SHARE = 0.3  # by which a penalty may differ between parts of several rows and of one


def check_sum(run: Run, result: Tensor, rows: Tensor, others: Sequence[Tensor]) -> None:
    """Refuse a number that is no sum over rows.

    Args:
        run: Computes the number, from rows and other arguments by row.
        result: What it returned of `choose_rows`.
        rows: All rows, at least 2.
        others: Their other arguments.
    """
    for number, (some, of_some) in enumerate(_choose_samples(rows, others)):
        whole = run(some.clone(), of_some) if number else result
        middle = len(some) // 3 + 1  # of two, one each; a mean of unequal parts is no sum
        first, second = (
            run(some[at].clone(), [each[at] for each in of_some])
            for at in (slice(middle), slice(middle, None))
        )
        numbers = whole, first, second
        if not _is_sum(numbers) or _has_penalty(run, numbers, some, of_some):
            raise ValueError(
                "the number that the chain's last module returned is no sum over its rows: "
                f"{whole.item():.4g} of {len(some)} rows, {first.item():.4g} and "
                f"{second.item():.4g} of two parts of them; pass one that adds, as with "
                "reduction='sum', divide the result by the rows, and add to it what is no row's, "
                "as a penalty of weights"
            )
        if all(bool(each.isfinite() & (each != 0)) for each in numbers):
            return


def _choose_samples(
    rows: Tensor, others: Sequence[Tensor]
) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """Yield some rows with their other arguments, then other ones, then more."""
    yield choose_rows(rows, others)
    count = min(_NUM_EXTREME, len(rows) // 2)
    for each in others:
        if each.numel() and not each.is_complex():
            values = each.detach().reshape(len(rows), -1)
            largest = values.amax(1).double().topk(count).indices
            smallest = values.amin(1).double().topk(count, largest=False).indices
            # The first of both in one part, the second ones in the other
            at = torch.stack([largest, smallest], 1).flatten().roll(1)
            yield rows.detach()[at], [of[at] for of in others]
    for most in _NUM_ROWS:
        if most < 2 * len(rows):
            yield choose_rows(rows, others, most)


def _is_sum(numbers: Sequence[Tensor]) -> bool:
    """Return whether a number, the first, is the sum of two others, up to the rounding of sums."""
    if numbers[0].dtype == torch.bool:
        return False
    whole, first, second = map(_widen, numbers)
    total = first + second
    if not bool(whole.isfinite()):  # a sum of 16 bits may be larger than their largest number
        return bool(whole.isnan() == total.isnan())
    tolerance = find_tolerance(numbers[0].dtype) if is_inexact(numbers[0]) else 0.0
    return bool((total - whole).abs() <= tolerance * _find_most(numbers))


def _has_penalty(
    run: Run, numbers: Sequence[Tensor], some: Tensor, others: Sequence[Tensor]
) -> bool:
    """Return whether a number is added once in each part, unlike what rounding adds.

    The sum over n single rows then exceeds the number of all of them n - 1 times by what the sum
    over two parts does.
    """
    if not is_inexact(numbers[0]) or len(some) < 4:
        return False
    whole, first, second = map(_widen, numbers)
    error = first + second - whole
    tolerance = _FINE_TOLERANCES.get(numbers[0].dtype.to_real(), _FINE_TOLERANCE)
    if not bool(error.abs() > tolerance * _find_most(numbers)):
        return False
    total = sum(_widen(run(some[n : n + 1].clone(), [each[n : n + 1] for each in others]))
                for n in range(len(some)))  # fmt: skip
    again = (total - whole) / (len(some) - 1)
    return bool((again - error).abs() <= _CONSTANT_SHARE * error.abs())


def _widen(number: Tensor) -> Tensor:
    return number.to(torch.complex128 if number.is_complex() else torch.float64)


def _find_most(numbers: Sequence[Tensor]) -> Tensor:
    return torch.stack([_widen(each).abs() for each in numbers]).max()
