"""Saved tensors that stay as they are: parameters, buffers, small ones, and what cannot leave.

Autograd saves thousands of them a step, each for a few microseconds of its own; their handle is a
tuple, which takes a third of the time of an object with attributes.
"""

from __future__ import annotations

from typing import NoReturn, TypeAlias

import torch

from penstock.activations._record import changed_in_place
from penstock.activations._small import Chunk

# The tensor; its version when it was saved, if it has one; the chunk that counts its bytes, if any.
Resident: TypeAlias = tuple[torch.Tensor, int | None, Chunk | None]


def keep(tensor: torch.Tensor) -> Resident:
    """A handle for a tensor that nobody counts."""
    # A leaf is kept itself, as autograd does: its data may be replaced and gathered again. Any
    # other tensor may own the graph node that will own this handle.
    alias = tensor if tensor.grad_fn is None else tensor.detach()
    try:
        return alias, tensor._version, None
    except (RuntimeError, NotImplementedError):  # inference tensors and wrappers without one
        return alias, None, None


def raise_changed(tensor: torch.Tensor, version: int) -> NoReturn:
    """Raise stock autograd's error for a tensor that was changed in place."""
    shape = None if tensor.is_nested else tensor.shape
    raise changed_in_place(tensor._version, version, tensor.dtype, shape)
