"""Row numbers as the copy loops take them, and the error of one that is out of range."""

from __future__ import annotations

import numpy as np
import torch

_LOOP_DTYPES = (torch.int64, torch.int32)


def as_index(index: torch.Tensor) -> torch.Tensor:
    """Return the index as contiguous int32 or int64."""
    return (index if index.dtype in _LOOP_DTYPES else index.long()).contiguous()


def resolve_index(index: torch.Tensor, num_rows: int, negative: bool) -> torch.Tensor:
    """Return the index from 0 to num_rows - 1; raise IndexError for what is out of range."""
    resolved = torch.where(index < 0, index + num_rows, index) if negative else index
    wrong = ((resolved < 0) | (resolved >= num_rows)).flatten().nonzero()
    if len(wrong):
        raise index_error(index, int(wrong[0]), num_rows)
    return resolved


def index_error(index: torch.Tensor, position: int, num_rows: int) -> IndexError:
    """Return the error that names an index, its place and the number of rows."""
    place = "".join(f"[{int(each)}]" for each in np.unravel_index(position, index.shape))
    return IndexError(
        f"index{place} is {int(index.view(-1)[position])}, but the table has {num_rows} rows"
    )
