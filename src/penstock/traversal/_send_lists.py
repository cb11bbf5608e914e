"""Own nodes that a rank sends to each other rank, in rising order.

Dense lists, as a random split has them, are kept as one bit for each own node; others as positions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_SPAN = 2**13  # nodes between two counts of bits
_POSITION_BITS = 32


class SendLists:
    """Positions of own nodes for each rank.

    Args:
        positions: Positions, int32, rising for each rank, one rank's behind the other's.
        counts: Positions for each rank.
        num_own: Nodes that the rank owns.

    Attributes:
        counts: Positions for each rank.
    """

    def __init__(self, positions: Tensor, counts: list[int], num_own: int) -> None:
        self.counts = counts
        self._lists = [
            _Bits(each, num_own) if len(each) * _POSITION_BITS > num_own else each.clone()
            for each in positions.split(counts)
        ]

    @property
    def num_bytes(self) -> int:
        """Bytes of the lists."""
        return sum(each.nbytes for each in self._lists)

    def read(self, rank: int, begin: int, end: int) -> Tensor:
        """Return consecutive positions of one rank's list, as int64."""
        found = self._lists[rank]
        return found.read(begin, end) if isinstance(found, _Bits) else found[begin:end].long()

    def select(self, rank: int, places: Tensor) -> Tensor:
        """Return the positions at some places of one rank's list, as int64."""
        found = self._lists[rank]
        return found.select(places) if isinstance(found, _Bits) else found[places].long()


class _Bits:
    """A rising list of positions as one bit for each position that could be in it."""

    def __init__(self, positions: Tensor, num_positions: int) -> None:
        is_in = torch.zeros(-(-num_positions // _SPAN), _SPAN, dtype=torch.bool, device="cpu")
        is_in.view(-1)[positions.long()] = True
        self._ends = is_in.sum(1).cumsum(0)
        self._bits = np.packbits(is_in.numpy(), axis=1)

    @property
    def nbytes(self) -> int:
        return self._bits.nbytes + self._ends.nbytes

    def read(self, begin: int, end: int) -> Tensor:
        """Return the positions at consecutive places."""
        if begin >= end:
            return torch.empty(0, dtype=torch.int64, device="cpu")
        first = int(torch.searchsorted(self._ends, begin, right=True))
        last = int(torch.searchsorted(self._ends, end)) + 1
        before = int(self._ends[first - 1]) if first else 0
        return self._unpack(first, last)[begin - before : end - before]

    def select(self, places: Tensor) -> Tensor:
        """Return the positions at some places, span by span."""
        found = torch.empty(len(places), dtype=torch.int64, device="cpu")
        spans = torch.searchsorted(self._ends, places.long(), right=True)
        for span in spans.unique().tolist():
            at = (spans == span).nonzero().flatten()
            before = int(self._ends[span - 1]) if span else 0
            found[at] = self._unpack(span, span + 1)[places[at].long() - before]
        return found

    def _unpack(self, first: int, last: int) -> Tensor:
        bits = torch.from_numpy(np.unpackbits(self._bits[first:last]))
        return bits.nonzero().flatten() + first * _SPAN


def cut_parts(counts: list[int], begin: int, most: int) -> tuple[Tensor, list[int]]:
    """Return places from `begin` on, some of each of consecutive parts, and how many of each."""
    places, found, start = [], [], 0
    for count in counts:
        end = min(begin + most, count)
        places.append(torch.arange(start + min(begin, end), start + end, device="cpu"))
        found.append(len(places[-1]))
        start += count
    return torch.cat(places), found
