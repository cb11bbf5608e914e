"""Rows that go into a layer and come out of it: in memory, or in files."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.traversal._rank_graph import RankGraph
from penstock.unified import UnifiedTensor, empty, unify

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerRows:
    """Rows of the nodes that a rank knows."""

    values: Tensor
    """Rows by number, or by id."""
    part: RankGraph | None
    """The part whose ids the rows stand by; None where they stand by number."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.values.shape[1] * self.values.dtype.itemsize

    def read(self, numbers: Tensor) -> Tensor:
        """Return the rows of some nodes, by number."""
        index = numbers if self.part is None else self.part.id_of(numbers)
        if isinstance(self.values, UnifiedTensor):
            return self.values.gather_rows(index)
        return self.values.index_select(0, index)


def check_features(part: RankGraph, features: Any, cache_bytes: int) -> LayerRows:
    """Return the features of all nodes that a rank knows; those of the halo are exchanged.

    Raises:
        TypeError: They are no table of floats on the CPU.
        ValueError: They have another shape, or ranks have rows of different kinds.
    """
    if isinstance(features, str | os.PathLike):
        features = unify(features, device="cpu", cache=cache_bytes)
    if not isinstance(features, Tensor):
        raise TypeError(
            "features: expected a tensor, a table or the path of a table, got "
            f"{type(features).__name__}"
        )
    is_table = isinstance(features, UnifiedTensor)
    if features.dtype not in DTYPES or not (is_table or features.device.type == "cpu"):
        raise TypeError(
            f"features: expected floats on the CPU, got {features.dtype} on {features.device}"
        )
    counts = {part.num_nodes, part.num_own}
    if features.dim() != 2 or len(features) not in counts:
        expected = " or ".join(f"({count}, width)" for count in sorted(counts, reverse=True))
        raise ValueError(f"features: expected shape {expected}, got {tuple(features.shape)}")
    if not part.exchange.agree(features.dtype, features.shape[1]):
        raise ValueError(
            "features: ranks have rows of different widths or dtypes; rank "
            f"{part.exchange.rank} has {features.shape[1]} of {features.dtype}"
        )
    # Of one rank that owns all nodes the length does not tell.
    is_own_on_any, is_whole_on_any = part.exchange.largest(
        int(len(features) != part.num_nodes), int(len(features) != part.num_own)
    )
    if is_own_on_any and is_whole_on_any:
        raise ValueError("features: expected rows of all nodes on all ranks, or on none")
    if not is_own_on_any:
        part.find_halo_ids()
        return LayerRows(features, part)
    return LayerRows(_add_halo(part, features), None)


def _add_halo(part: RankGraph, own: Tensor) -> Tensor:
    """Return rows of own nodes followed by those of the halo, in memory."""
    rows = (
        own.gather_rows(torch.arange(len(own), device="cpu"))
        if isinstance(own, UnifiedTensor)
        else own
    )
    return torch.cat([rows, part.pull_halo(rows, "rows of features")])


def make_rows(
    num_rows: int, width: int, dtype: torch.dtype, path: Path | None, cache_bytes: int
) -> Tensor:
    """Return memory for rows, or a table in a new file."""
    if path is None:
        return torch.empty(num_rows, width, dtype=dtype, device="cpu")
    empty((num_rows, width), dtype, path=path, device="cpu")
    return unify(path, device="cpu", cache=cache_bytes)


def write_rows(values: Tensor, begin: int, rows: Tensor) -> None:
    """Write consecutive rows."""
    if isinstance(values, UnifiedTensor):
        values[torch.arange(begin, begin + len(rows), device="cpu")] = rows
    else:
        values[begin : begin + len(rows)] = rows
