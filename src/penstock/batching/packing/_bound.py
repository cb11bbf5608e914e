"""The bound L2 of Martello and Toth (1990): a number of bins that no packing is below."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.batching._arrays import Integers

_FEW = 24  # samples, for which a list is faster than arrays


# For each K from 0 to cap / 2 the samples are
#
#   J1 = {i: s_i > cap - K}          alone among those of at least K
#   J2 = {i: cap - K >= s_i > cap/2}   in bins of their own, which have room for some of J3
#   J3 = {i: cap/2 >= s_i >= K}
#
#   L(K) = |J1| + |J2| + max(0, ceil((sum of J3 - (|J2| cap - sum of J2)) / cap))
#   L2   = max over K of L(K)
#
# L(0) is at least the sum over the cap. Only K = 0 and the sizes themselves have to be tried.
def least_bins(sizes: Integers | Sequence[int], cap: int) -> int:
    """Return a number of bins below which the samples cannot be packed.

    Example:
        >>> least_bins(np.array([6, 6, 4, 2, 1]), 10), least_bins(np.array([6, 6, 6, 2, 2]), 10)
        (2, 3)

    Args:
        sizes: Whole numbers from 0 to `cap`, one per sample: int64 of `[num_samples]`, or a
            sequence.
        cap: The most that the samples of a bin may add up to.

    Source:
        Martello and Toth, Knapsack Problems (1990), section 8.3.2.
    """
    if len(sizes) == 0:
        return 0
    if len(sizes) <= _FEW:
        return _least_of_few(sizes.tolist() if isinstance(sizes, np.ndarray) else sizes, cap)
    ascending = np.sort(np.asarray(sizes, dtype=np.int64))
    sums = np.concatenate([[0], np.cumsum(ascending)])
    cap = min(cap, int(sums[-1]))  # more than all of them is as good: products stay in 64 bits
    if cap == 0:
        return 1
    halves = int(np.searchsorted(ascending, cap // 2, side="right"))  # so many are at most cap / 2
    limits = np.unique(np.concatenate([[0], ascending[:halves]]))
    first_of_3 = np.searchsorted(ascending, limits, side="left")
    first_of_1 = np.searchsorted(ascending, cap - limits, side="right")
    first_of_1 = np.maximum(first_of_1, halves)
    room_beside_2 = (first_of_1 - halves) * cap - (sums[first_of_1] - sums[halves])
    rest = np.maximum(sums[halves] - sums[first_of_3] - room_beside_2, 0)
    bins = len(sizes) - halves + -(-rest // cap)
    return int(bins.max())


def _least_of_few(sizes: Sequence[int], cap: int) -> int:
    """Return the same for few samples, without arrays."""
    cap = min(cap, sum(sizes))
    if cap == 0:
        return 1
    small = [size for size in sizes if size <= cap // 2]
    large = [size for size in sizes if size > cap // 2]
    most = 0
    for limit in {0, *small}:
        of_3 = sum([size for size in small if size >= limit])
        room_beside_2 = sum([cap - size for size in large if size <= cap - limit])
        most = max(most, of_3 - room_beside_2)
    return len(large) + -(-most // cap)
