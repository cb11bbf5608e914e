"""Bin completion: bins are filled one after the other, each as full as possible (Korf, 2003).

The largest sample that is left opens a bin, and of the ways to fill its rest those that leave least
room come first, as with minimum bin slack (Gupta and Ho, 1999). K bins of cap C may leave no more
than W = K C - sum of s_i empty altogether, which cuts off most fillings where first fit decreasing
is bad: where nothing may be left empty. Limits count steps, not time, so results are the same on
every machine.
"""

from __future__ import annotations

from collections.abc import Sequence

_MAX_BINS = 400  # that are filled in one search
_MAX_VISITS = 1500  # of the search for fillings of one bin
_MAX_FILLINGS = 12  # of one bin that are tried

Filling = tuple[int, ...]
"""Places of samples in a list of sizes, ascending."""


def complete_bins(sizes: Sequence[int], cap: int, num_bins: int) -> list[list[int]] | None:
    """Search a packing into at most `num_bins` bins; return the sizes in each, or None.

    Example:
        >>> complete_bins([5, 4, 4, 3, 3, 2], 7, 3)
        [[5, 2], [4, 3], [4, 3]]

    Args:
        sizes: Descending whole numbers from 1 to `cap`.
        cap: The most that a bin holds.
        num_bins: Bins that may be used.
    """
    waste = num_bins * cap - sum(sizes)
    left = _MAX_BINS
    # Of each bin: the samples before it, the room that may still be lost, and untried fillings.
    bins: list[list[int]] = []
    stack = [(list(sizes), waste, iter(find_fillings(sizes, cap, waste)))]
    while stack:
        samples, waste, fillings = stack[-1]
        if not samples:
            return bins
        filling = next(fillings, None) if left > 0 else None
        if filling is None:
            stack.pop()
            if bins:
                bins.pop()
            continue
        left -= 1
        chosen = set(filling)
        bins.append([samples[place] for place in filling])
        rest = [size for place, size in enumerate(samples) if place not in chosen]
        waste -= cap - sum(bins[-1])
        stack.append((rest, waste, iter(find_fillings(rest, cap, waste) if rest else ())))
    return None


def find_fillings(sizes: Sequence[int], cap: int, waste: int) -> list[Filling]:
    """Return ways to fill a bin that holds the first sample, the fullest first.

    Args:
        sizes: Descending whole numbers from 1 to `cap`.
        cap: The most that a bin holds.
        waste: The most room that may be left; below 0 there is no way.
    """
    behind = [0]  # the sizes from a place on, added up
    for size in reversed(sizes):
        behind.append(behind[-1] + size)
    behind.reverse()
    found: list[tuple[int, Filling]] = []
    stack: list[tuple[Filling, int, int]] = [((0,), 1, cap - sizes[0])] if waste >= 0 else []
    visits = 0
    while stack and visits < _MAX_VISITS:
        visits += 1
        filling, place, room = stack.pop()
        while place < len(sizes) and sizes[place] > room:
            place += 1
        if room - behind[place] > waste:
            continue
        if place == len(sizes) or room == 0:
            found.append((room, filling))
            if room == 0 and len(found) > 4 * _MAX_FILLINGS:
                break
            continue
        after = place + 1  # of equal samples the later ones are not tried without the first
        while after < len(sizes) and sizes[after] == sizes[place]:
            after += 1
        stack.append((filling, after, room))
        stack.append(((*filling, place), place + 1, room - sizes[place]))
    found.sort()
    return [filling for _, filling in found[:_MAX_FILLINGS]]
