"""Numbers of nodes on the CPU, in C++ (`closure.cpp`)."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from pathlib import Path

import torch
from torch import Tensor

from penstock.codegen import THREADS, load_optional_library, to_struct
from penstock.traversal._blocks import NeighborLists
from penstock.traversal._budget import SearchBudget

MOST_NODES = 2**31 - 2
"""Nodes of a graph whose numbers have 32 bits."""
_BLOCK_ROWS = 256  # kBlockRows
_SLOTS_PER_NODE = 2
_OTHERS = -(2**63)
_CPU = torch.device("cpu")


def is_available() -> bool:
    """Return whether the kernels can be built, or were."""
    return _library() is not None


class DamagedList(Exception):
    """An entry of the lists is no node.

    Attributes:
        place: Its place in the lists.
    """

    def __init__(self, place: int) -> None:
        super().__init__(place)
        self.place = place


class NativeNumbers:
    """Numbers of the nodes that were found, in an array or a table, whichever takes fewer bytes.

    Args:
        num_nodes: Nodes of the graph.
        budget: The account of the numbers' memory.
    """

    def __init__(self, num_nodes: int, budget: SearchBudget) -> None:
        assert num_nodes <= MOST_NODES, "more nodes are numbered by torch"
        self._num_nodes, self._budget = num_nodes, budget
        self._slots: Tensor | None = None
        self._num_slots = 0  # 0 for an array
        library = _library()
        assert library is not None, "there is a path without the library"
        self._library = library

    def reserve(self, count: int, known: Tensor) -> None:
        """Make room for so many nodes, of which `known` are numbered from 1 on."""
        is_array = self._slots is not None and self._num_slots == 0
        wanted = _SLOTS_PER_NODE * count
        if is_array or (self._slots is not None and wanted <= self._num_slots):
            return
        self.release()
        if 2 * wanted < self._num_nodes:
            self._num_slots = max(wanted, 1)
            self._slots = self._budget.zeros(2 * self._num_slots, dtype=torch.int32, device=_CPU)
        else:
            self._num_slots = 0
            self._slots = self._budget.zeros(self._num_nodes, dtype=torch.int32, device=_CPU)
        self.number(known, None)

    def release(self) -> None:
        """Give the memory back."""
        if self._slots is not None:
            self._budget.release(self._slots)
            self._slots = None

    def number(self, nodes: Tensor, positions: Tensor | None) -> int:
        """Number nodes from 1 on, each once, in their order; return how many there are.

        Args:
            nodes: int64 of shape (count,); there are no numbers yet.
            positions: The place for the position of each, int64 of shape (count,), or None.
        """
        address = None if positions is None else positions.data_ptr()
        return self._library.penstock_number_nodes(
            self._refer(), nodes.data_ptr(), len(nodes), address
        )

    def mark(self, lists: NeighborLists) -> None:
        """Mark the nodes of lists that have no number."""
        _check(self._library.penstock_mark_nodes(_refer_lists(lists), self._refer()))

    def can_pull(self) -> bool:
        """Return whether all nodes of the graph have a place for their number."""
        return self._slots is not None and self._num_slots == 0

    def pull(self, lists: NeighborLists) -> int:
        """Mark the nodes without a number whose list has one with a number.

        Args:
            lists: Lists of all nodes of the graph.

        Returns:
            Entries that were looked at.
        """
        return _check(self._library.penstock_pull_nodes(_refer_lists(lists), self._refer()))

    def count_found(self) -> int:
        """Return the nodes that are marked."""
        return self._library.penstock_count_found(self._refer())

    def number_found(self, first: int, nodes: Tensor) -> None:
        """Write the marked nodes to `nodes` in rising order, and number them from `first` on."""
        self._library.penstock_number_found(self._refer(), first, nodes.data_ptr(), len(nodes))

    def make_counts(self, num_rows: int) -> Tensor:
        """Return memory for the edges of each block of so many lists."""
        return self._budget.empty(_count_blocks(num_rows) + 1, dtype=torch.int64, device=_CPU)

    def count_bytes(self, num_rows: int) -> int:
        """Return the bytes of `make_counts`."""
        return 8 * (_count_blocks(num_rows) + 1)

    def count_edges(self, lists: NeighborLists, num_inner: int, counts: Tensor) -> int:
        """Return the entries that are numbered; those of the first `num_inner` lists all are."""
        return _check(
            self._library.penstock_count_edges(
                _refer_lists(lists), self._refer(), num_inner, counts.data_ptr()
            )
        )

    def write_edges(
        self,
        lists: NeighborLists,
        counts: Tensor,
        neighbors: Tensor,
        owners: Tensor,
        places: Tensor | None,
    ) -> None:
        """Write positions of both ends, and places, of the entries that are numbered."""
        address = None if places is None else places.data_ptr()
        _check(
            self._library.penstock_write_edges(
                *(_refer_lists(lists), self._refer(), lists.first, counts.data_ptr()),
                *(neighbors.data_ptr(), owners.data_ptr(), address),
            )
        )

    def _refer(self) -> object:
        assert self._slots is not None, "room is reserved first"
        return _refer(_NumbersStruct(self._slots, self._num_slots, self._num_nodes))


def _count_blocks(num_rows: int) -> int:
    return -(-num_rows // _BLOCK_ROWS)


def sum_lengths(lists: NeighborLists) -> int:
    """Return the entries of all lists.

    Raises:
        ValueError: The offsets of a list fall, or leave the entries.
    """
    library = _library()
    assert library is not None, "there is a path without the library"
    total = library.penstock_sum_lengths(_refer_lists(lists))
    if total < 0:
        assert lists.rows is not None, "offsets of blocks are made here"
        raise ValueError(
            f"indptr: falls, or leaves the indices, at node {int(lists.rows[~total])}; it was "
            "changed after the graph was made"
        )
    return total


def count_closures(lists: NeighborLists, seeds: Tensor, hops: int) -> Tensor:
    """Return nodes, entries of their lists, and edges among them, of each seed by itself.

    Args:
        lists: Lists of all nodes of the graph.
        seeds: int64 of shape (count,).
        hops: Hops from a node to its neighbours.

    Returns:
        int64 of shape (3, count).
    """
    library = _library()
    assert library is not None, "there is a path without the library"
    counts = torch.empty(3, len(seeds), dtype=torch.int64, device="cpu")
    _check(
        library.penstock_count_closures(
            *(_refer_lists(lists), lists.num_rows, seeds.data_ptr(), len(seeds), hops),
            *(each.data_ptr() for each in counts),
        )
    )
    return counts


@dataclasses.dataclass(frozen=True, eq=False)
class _ListsStruct:
    """`struct Lists` of `closure.cpp`."""

    rows: Tensor | None
    offsets: Tensor
    entries: Tensor
    places: Tensor | None
    num_rows: int
    num_entries: int
    has_wide_offsets: bool
    has_wide_entries: bool
    num_threads: int


@dataclasses.dataclass(frozen=True, eq=False)
class _NumbersStruct:
    """`struct Numbers` of `closure.cpp`."""

    slots: Tensor
    num_slots: int
    num_nodes: int


def _refer_lists(lists: NeighborLists) -> object:
    return _refer(
        _ListsStruct(
            *(lists.rows, lists.offsets, lists.entries, lists.places),
            num_rows=lists.num_rows,
            num_entries=len(lists.entries),
            has_wide_offsets=lists.offsets.dtype == torch.int64,
            has_wide_entries=lists.entries.dtype == torch.int64,
            num_threads=torch.get_num_threads(),
        )
    )


def _refer(call: _ListsStruct | _NumbersStruct) -> object:
    return ctypes.byref(to_struct(call))


def _check(result: int) -> int:
    if result == _OTHERS:
        raise ValueError("indptr or indices: were changed after the graph was made")
    if result < 0:
        raise DamagedList(~result)
    return result


@functools.cache
def _library() -> ctypes.CDLL | None:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    return load_optional_library(
        "closure",
        [THREADS, Path(__file__).with_name("closure.cpp")],
        flags=("-O3", "-march=native"),
        functions={
            "penstock_number_nodes": (number, [pointer, pointer, number, pointer]),
            "penstock_sum_lengths": (number, [pointer]),
            "penstock_mark_nodes": (number, [pointer, pointer]),
            "penstock_pull_nodes": (number, [pointer, pointer]),
            "penstock_count_found": (number, [pointer]),
            "penstock_number_found": (None, [pointer, number, pointer, number]),
            "penstock_count_edges": (number, [pointer, pointer, number, pointer]),
            "penstock_write_edges": (
                number,
                [pointer, pointer, number, pointer, pointer, pointer, pointer],
            ),
            "penstock_count_closures": (
                number,
                [pointer, number, pointer, number, number, pointer, pointer, pointer],
            ),
        },
        work="neighbourhoods are searched",
        otherwise="by torch, slower",
    )
