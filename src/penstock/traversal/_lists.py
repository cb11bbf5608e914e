"""Lists of integers in any tier: plain tensors, tables in memory and tables in files.

The lists of a graph are checked here when they are given, and read here by index.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.unified import UnifiedTensor, unify

INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def as_list(source: Any, name: str) -> Tensor:
    """Return a list as a contiguous tensor or a table; nothing that is in memory is copied.

    Args:
        source: A tensor on the CPU, a table, a NumPy array, a sequence of integers, or a path.
        name: Argument that the list came by.
    """
    if isinstance(source, str | os.PathLike):
        source = unify(source, device="cpu")
    elif isinstance(source, np.ndarray):
        source = _read_array(source)
    elif isinstance(source, Sequence):
        try:
            source = (
                torch.tensor(source, device="cpu")
                if len(source)
                else torch.empty(0, dtype=torch.int64, device="cpu")
            )
        except (TypeError, ValueError) as error:
            raise TypeError(f"{name}: expected integers, got {type(source).__name__}") from error
    if not isinstance(source, Tensor):
        raise TypeError(
            f"{name}: expected a tensor, a table, a NumPy array, a sequence of integers or the "
            f"path of a table, got {type(source).__name__}"
        )
    if source.dim() != 1 or source.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"{name}: expected int32 or int64 of one dimension, got {source.dtype} of shape "
            f"{tuple(source.shape)}"
        )
    if isinstance(source, UnifiedTensor):
        return source
    if source.device.type != "cpu" or source.layout != torch.strided:
        raise TypeError(
            f"{name}: expected a dense tensor on the CPU, got {source.layout} on {source.device}; "
            f"call {name}.cpu() first"
        )
    return source.detach().contiguous()


def _read_array(array: np.ndarray) -> Tensor:
    """Return an array as a tensor, in its memory unless strides or byte order forbid it."""
    native = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    with warnings.catch_warnings():
        # Lists are read only, and so may arrays be.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(native)


def in_memory(values: Tensor) -> Tensor | None:
    """Return a list's memory as a plain tensor; None for a table in a file."""
    if not isinstance(values, UnifiedTensor):
        return values
    return values.as_subclass(Tensor) if values.report().tier == "host" else None


def read_entries(values: Tensor, index: Tensor) -> Tensor:
    """Return `values[index]` as int64, on the device of the index; of a table, only those rows."""
    if isinstance(values, UnifiedTensor):
        out = torch.empty(index.shape, dtype=values.dtype, device=index.device)
        return values.gather_rows(index, out=out).long()
    return values[index.to(values.device)].to(index.device, torch.int64)


def narrow(values: Tensor, bound: int) -> Tensor:
    """Return the values as int32, where the bound of their values allows it."""
    return values.to(torch.int32 if bound <= torch.iinfo(torch.int32).max else torch.int64)


def list_places(starts: Tensor, degrees: Tensor) -> Tensor:
    """Return the places of the entries of lists that begin at `starts`, side by side."""
    ends = degrees.cumsum(0)
    shift = (starts - (ends - degrees)).repeat_interleave(degrees)
    return shift + torch.arange(len(shift), device="cpu")


def check_bounds(starts: Tensor, ends: Tensor, nodes: Tensor, num_edges: int) -> None:
    """Raise unless the lists of nodes begin before they end, among the entries that there are."""
    wrong = (ends < starts) | (starts < 0) | (ends > num_edges)
    if wrong.any():
        at = int(wrong.nonzero()[0])
        raise ValueError(
            f"indptr: goes from {int(starts[at])} to {int(ends[at])} at node {int(nodes[at])}; "
            f"expected it to rise from 0 to {num_edges}"
        )


def find_lists(indptr: Tensor, places: Tensor) -> Tensor:
    """Return the numbers of the lists that have some places, by bisection of their offsets."""
    low, high = torch.zeros_like(places), torch.full_like(places, len(indptr) - 1)
    for _ in range(len(indptr).bit_length()):  # indptr[low] <= place < indptr[high]
        middle = (low + high) // 2
        is_before = read_entries(indptr, middle) <= places
        low, high = torch.where(is_before, middle, low), torch.where(is_before, high, middle)
    return low


def check_edges(edge_index: Any, num_nodes: int) -> None:
    """Raise unless the edges are pairs of nodes below a number."""
    if not isinstance(edge_index, Tensor) or edge_index.dtype not in INTEGERS:
        found = edge_index.dtype if isinstance(edge_index, Tensor) else type(edge_index).__name__
        raise TypeError(f"edge_index: expected a tensor of integers, got {found}")
    if edge_index.dim() != 2 or len(edge_index) != 2:
        raise ValueError(
            f"edge_index: expected shape (2, num_edges), got {tuple(edge_index.shape)}"
        )
    if edge_index.numel():
        low, high = int(edge_index.min()), int(edge_index.max())
        if low < 0 or high >= num_nodes:
            raise ValueError(
                f"edge_index: names node {low if low < 0 else high}, but num_nodes={num_nodes}"
            )


def check_seeds(seeds: Any, num_nodes: int) -> Tensor:
    """Return seeds as int64; raise unless they are nodes."""
    if not isinstance(seeds, Tensor) or seeds.dtype not in INTEGERS:
        found = seeds.dtype if isinstance(seeds, Tensor) else type(seeds).__name__
        raise TypeError(f"seeds: expected a tensor of integers, got {found}")
    if seeds.dim() != 1:
        raise ValueError(f"seeds: expected shape (n,), got {tuple(seeds.shape)}")
    seeds = seeds.long()
    wrong = ((seeds < 0) | (seeds >= num_nodes)).nonzero()
    if len(wrong):
        at = int(wrong[0])
        raise IndexError(f"seeds[{at}] is {int(seeds[at])}, but the graph has {num_nodes} nodes")
    return seeds
