"""First fit: the bin of a sample is the first one with room, found by a tree of maxima."""

from __future__ import annotations


class FirstFit:
    """Bins of one cap in a row without end; each sample goes into the first one with room.

    The tree has the room of every bin at its leaves, and at each node the most room below it, so a
    sample is placed in O(log n). Node 1 is the root, nodes 2 i and 2 i + 1 are below node i.

    Example:
        >>> row = FirstFit(10)
        >>> [row.place(7), row.place(6), row.place(3), row.place(1, first=1)]
        [0, 1, 0, 1]

    Args:
        cap: The room of an empty bin, a whole number.
        num_bins: Bins that are expected; more are added as they are needed.
    """

    def __init__(self, cap: int, num_bins: int = 1) -> None:
        self._cap = cap
        self._width = 1 << max(num_bins - 1, 0).bit_length()
        self._room = [cap] * (2 * self._width)

    def place(self, size: int, first: int = 0) -> int:
        """Put a sample into the first bin with room; return its number.

        Args:
            size: Of the sample, at most the cap.
            first: Bins before this one are left out.
        """
        while (leaf := self._find(size, first)) is None:
            self._double()
        room, bin_number = self._room, leaf - self._width
        most = room[leaf] - size
        room[leaf] = most
        # A maximum that stays as it is ends the way up.
        while leaf > 1:
            other = room[leaf ^ 1]
            if other > most:
                most = other
            leaf >>= 1
            if room[leaf] == most:
                break
            room[leaf] = most
        return bin_number

    def _find(self, size: int, first: int) -> int | None:
        """Return the first leaf with room from bin `first` on; None if there is none yet."""
        room, width = self._room, self._width
        if first >= width:
            return None
        node = 1 if first == 0 else width + first
        while room[node] < size:
            node += 1  # to the right, and up as far as nothing left of it is below
            node //= node & -node
            if node == 1:
                return None
        while node < width:
            node += node
            if room[node] < size:
                node += 1
        return node

    def _double(self) -> None:
        leaves = self._room[self._width :]
        self._width *= 2
        leaves += [self._cap] * (self._width - len(leaves))
        self._room = [0] * self._width + leaves
        for node in range(self._width - 1, 0, -1):
            self._room[node] = max(self._room[2 * node], self._room[2 * node + 1])
