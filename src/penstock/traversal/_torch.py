"""Numbers of nodes by torch's operators: on a GPU, and where there is no compiler."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.traversal._blocks import NeighborLists
from penstock.traversal._budget import SearchBudget

_FOUND = -1
_SEED_BYTES = 64  # of temporaries for a node that is numbered
_FOUND_BYTES = 32


class TorchNumbers:
    """Numbers of the nodes that were found, in an array; see `NativeNumbers`, whose methods it has.

    Args:
        num_nodes: Nodes of the graph.
        budget: The account of the numbers' memory.
        device: Device of the numbers.
    """

    def __init__(self, num_nodes: int, budget: SearchBudget, device: torch.device) -> None:
        self._num_nodes, self._budget, self._device = num_nodes, budget, device
        self._dtype = torch.int32 if num_nodes < torch.iinfo(torch.int32).max else torch.int64
        self._numbers: Tensor | None = None

    def reserve(self, count: int, known: Tensor) -> None:
        """Make room for all nodes of the graph."""
        if self._numbers is None:
            self._numbers = self._budget.zeros(
                self._num_nodes, dtype=self._dtype, device=self._device
            )
            assert not len(known), "an array is made before there are numbers"

    def release(self) -> None:
        """Give the memory back."""
        if self._numbers is not None:
            self._budget.release(self._numbers)
            self._numbers = None

    def number(self, nodes: Tensor, positions: Tensor) -> int:
        """Number nodes from 1 on, each once, in their order; return how many there are."""
        numbers = self._array
        if not len(nodes):
            return 0
        with self._budget.temporary(_SEED_BYTES * len(nodes)):
            order = torch.arange(len(nodes), dtype=self._dtype, device=self._device)
            numbers[nodes] = len(nodes)
            numbers.scatter_reduce_(0, nodes, order, "amin")  # where each node comes first
            first = numbers[nodes].long()
            ranks = (first == order).cumsum(0)
            torch.sub(ranks[first], 1, out=positions)
            numbers[nodes] = (positions + 1).to(self._dtype)
            return int(ranks[-1])

    def mark(self, lists: NeighborLists) -> None:
        """Mark the nodes of lists that have no number."""
        nodes = lists.entries.long()
        self._array[nodes[self._array[nodes] == 0]] = _FOUND

    def can_pull(self) -> bool:
        """Return False: a search by torch looks at all entries."""
        return False

    def pull(self, lists: NeighborLists) -> int:
        """Raise: see `can_pull`."""
        raise NotImplementedError

    def count_found(self) -> int:
        """Return the nodes that are marked."""
        with self._budget.temporary(self._num_nodes):
            return int(torch.count_nonzero(self._array == _FOUND))

    def number_found(self, first: int, nodes: Tensor) -> None:
        """Write the marked nodes to `nodes` in rising order, and number them from `first` on."""
        with self._budget.temporary(self._num_nodes + _FOUND_BYTES * len(nodes)):
            nodes.copy_((self._array == _FOUND).nonzero().flatten())
            last = first + 1 + len(nodes)
            self._array[nodes] = torch.arange(
                first + 1, last, dtype=self._dtype, device=self._device
            )

    def make_counts(self, num_rows: int) -> Tensor:
        """Return memory for nothing: edges are counted and written one block at a time."""
        return self._budget.empty(0, dtype=torch.int64, device=self._device)

    def count_bytes(self, num_rows: int) -> int:
        """Return 0, the bytes of `make_counts`."""
        return 0

    def count_edges(self, lists: NeighborLists, num_inner: int, counts: Tensor) -> int:
        """Return the entries that are numbered."""
        return int(torch.count_nonzero(self._array[lists.entries.long()] > 0))

    def write_edges(
        self,
        lists: NeighborLists,
        counts: Tensor,
        neighbors: Tensor,
        owners: Tensor,
        places: Tensor | None,
    ) -> None:
        """Write positions of both ends, and places, of the entries that are numbered."""
        numbers = self._array[lists.entries.long()]
        kept = (numbers > 0).nonzero().flatten()
        neighbors.copy_(numbers[kept]).sub_(1)
        lengths = lists.offsets.diff()
        row = torch.arange(lists.first, lists.first + lists.num_rows, device=self._device)
        owners.copy_(row.repeat_interleave(lengths)[kept])
        if places is not None:
            assert lists.places is not None, "lists by torch are blocks"
            places.copy_(lists.places[kept])

    @property
    def _array(self) -> Tensor:
        assert self._numbers is not None, "room is reserved first"
        return self._numbers
