"""Packing of samples below a cap: first fit decreasing, and a search where it may be bettered."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.batching._arrays import Integers
from penstock.batching._numbers import check_numbers
from penstock.batching.packing._bound import least_bins
from penstock.batching.packing._completion import complete_bins
from penstock.batching.packing._first_fit import FirstFit
from penstock.batching.packing._program import improve
from penstock.solvers import can_solve
from penstock.tables import Report
from penstock.units import parse_bytes

_logger = logging.getLogger(__name__)

# Samples for which HiGHS searches, whose larger programs rarely end within seconds.
_MOST_IN_PROGRAM = 60
_MOST_TO_COMPLETE = 200  # samples for which bin completion searches

_Bins = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class BinPacking(Report, title="bins", hidden={"bins", "loads"}):
    """Samples in bins, the fullest bin first; printing it shows a table without the bins.

    Example:
        >>> pack_bins([5, 2, 9, 5], 10).bins
        ((0, 3), (2,), (1,))
    """

    bins: tuple[tuple[int, ...], ...]
    """Numbers of the samples of each bin, ascending. The bins have descending loads."""
    loads: tuple[int, ...]
    """Sizes of the samples of each bin, added up, in the unit of the sizes."""
    cap: int
    """The most that a load may be."""
    num_samples: int
    num_bins: int
    lower_bound: int
    """A number of bins that no packing is below."""
    optimal: bool
    """True if `num_bins` equals `lower_bound`."""
    method: str
    """The method whose bins these are: "first fit decreasing", "bin completion" or "HiGHS"."""
    stopped: bool
    """True if the time limit ended the search. If not, the same arguments give the same bins on
    every machine that has HiGHS in the same version."""


def pack_bins(
    sizes: Sequence[int] | Integers, cap: int | str, *, time_limit: float = 5.0
) -> BinPacking:
    """Pack samples into few bins, none of which holds more than a cap.

    First fit decreasing: the largest sample comes first, and goes into the first bin with room.
    Where that is above the lower bound L2 of Martello and Toth, up to 200 samples are packed by bin
    completion as well, and up to 60 by HiGHS, for the fewest bins. HiGHS then makes the lightest
    bin lighter, where its program is small.

    Example:
        >>> packing = pack_bins([4, 4, 4, 6, 6, 6, 3], 10)
        >>> packing.bins, packing.loads, packing.optimal
        (((0, 3), (1, 4), (2, 5), (6,)), (10, 10, 10, 3), True)

    Args:
        sizes: Whole numbers >= 0 in any unit that adds up (tokens, bytes), one per sample: a
            sequence, an array or a tensor of shape `[num_samples]`.
        cap: The most that the samples of a bin may add up to, in the same unit; bytes also as a
            string such as `"8GiB"`.
        time_limit: Seconds that HiGHS may take; 0 leaves it out. It searches a fixed number of
            nodes, so the limit rarely ends it; `stopped` says where it did.

    Returns:
        The bins and their lower bound. That HiGHS is not installed is logged once, and nothing
        else changes.

    Raises:
        TypeError: Sizes are no whole numbers.
        ValueError: A size is negative or above the cap, or the time limit is negative.

    Source:
        Johnson, Near-optimal bin packing algorithms (1973); Martello and Toth, Knapsack Problems
        (1990), chapter 8; Gilmore and Gomory, A linear programming approach to the cutting-stock
        problem (1961); Korf, An improved algorithm for optimal bin packing (2003).
    """
    numbers, cap = _check_sizes(sizes), parse_bytes(cap, name="cap")
    if not time_limit >= 0:
        raise ValueError(f"time_limit must be a number of seconds >= 0; got {time_limit!r}")
    if len(numbers) and (largest := int(numbers.max())) > cap:
        raise ValueError(
            f"sizes[{int(numbers.argmax())}]={largest} is above cap={cap}; raise the cap, or split "
            "or leave out that sample"
        )
    bins = _pack_decreasing(numbers, cap)
    bound, method, stopped = least_bins(numbers, cap), "first fit decreasing", False
    if bound < len(bins) and len(numbers) <= _MOST_TO_COMPLETE:
        better = _complete(numbers, cap, bound, len(bins) - 1)
        if better is not None:
            bins, method = better, "bin completion"
    if 0 < len(numbers) <= _MOST_IN_PROGRAM and time_limit > 0 and len(bins) > 1 and _has_solver():
        better, bound, stopped = _improve(numbers, cap, bins, bound, time_limit)
        if better is not None:
            bins, method = better, "HiGHS"
    loads = [int(numbers[each].sum()) for each in bins]
    order = sorted(range(len(bins)), key=lambda number: (-loads[number], bins[number]))
    return BinPacking(
        bins=tuple(tuple(bins[number]) for number in order),
        loads=tuple(loads[number] for number in order),
        cap=cap,
        num_samples=len(numbers),
        num_bins=len(bins),
        lower_bound=bound,
        optimal=len(bins) == bound,
        method=method,
        stopped=stopped,
    )


def _check_sizes(sizes: Any) -> Integers:
    if len(sizes) == 0:
        return np.zeros(0, dtype=np.int64)
    numbers = check_numbers(sizes, name="sizes")
    if numbers.dtype.kind == "f":
        raise TypeError("sizes must be whole numbers; got floats: round them up")
    total = float(numbers.sum(dtype=np.float64))
    if total > 1 << 61:
        raise ValueError(f"sizes must sum to at most {1 << 61}; got {total:.4g}")
    return numbers.astype(np.int64)


def _pack_decreasing(sizes: Integers, cap: int) -> _Bins:
    """Return the samples of each bin, ascending, by first fit decreasing."""
    if len(sizes) == 0:
        return []
    order = np.argsort(-sizes, kind="stable")
    row = FirstFit(cap, len(sizes))
    bin_of = np.empty(len(sizes), dtype=np.int64)
    bin_of[order] = list(map(row.place, sizes[order].tolist()))
    by_bin = np.argsort(bin_of, kind="stable")
    ends = np.cumsum(np.bincount(bin_of)).tolist()
    samples = by_bin.tolist()
    return [samples[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@functools.cache
def _has_solver() -> bool:
    """Return whether HiGHS can be used; log once where it cannot."""
    if can_solve():
        return True
    _logger.info(
        "bins are packed without HiGHS, which is not installed; `pip install highspy` adds its "
        "search for fewer and lighter bins"
    )
    return False


def _complete(sizes: Integers, cap: int, least: int, most: int) -> _Bins | None:
    """Return the samples of each of few bins by bin completion; None if there are more."""
    descending = -np.sort(-sizes[sizes > 0])
    for num_bins in range(least, most + 1):
        found = complete_bins(descending.tolist(), cap, num_bins)
        if found is not None:
            return _number_samples(sizes, found)
    return None


def _number_samples(sizes: Integers, bins: list[list[int]]) -> _Bins:
    """Return the samples of bins that are given by their sizes; of those of 0 all in the first."""
    waiting: dict[int, list[int]] = {}
    for sample, size in enumerate(sizes.tolist()):
        waiting.setdefault(size, []).append(sample)
    for each in waiting.values():
        each.reverse()
    numbered = [[waiting[size].pop() for size in each] for each in bins]
    numbered[0] += waiting.get(0, [])
    return [sorted(each) for each in numbered]


def _improve(
    sizes: Integers, cap: int, bins: _Bins, bound: int, seconds: float
) -> tuple[_Bins | None, int, bool]:
    """Return better bins or None, the lower bound, and whether time was up."""
    loads = [int(sizes[each].sum()) for each in bins]
    lightest = min(loads)
    # The others cannot hold more than their caps.
    if len(bins) == bound and lightest == max(0, sum(loads) - (len(bins) - 1) * cap):
        return None, bound, False
    classes, counts = np.unique(-sizes[sizes > 0], return_counts=True)
    found = improve((-classes).tolist(), counts.tolist(), cap, (bound, len(bins)), seconds)
    if found.bins is None:
        return None, found.lower_bound, found.timed_out
    better = _number_samples(sizes, [np.repeat(-classes, each).tolist() for each in found.bins])
    new_lightest = min(int(sizes[each].sum()) for each in better)
    if (len(better), new_lightest) >= (len(bins), lightest):
        return None, found.lower_bound, found.timed_out
    return better, found.lower_bound, found.timed_out
