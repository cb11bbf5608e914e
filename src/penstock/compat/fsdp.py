"""Records of FSDP2 (`fully_shard`) whose attributes differ between versions of torch."""

from __future__ import annotations

from typing import Any

import torch


def parameter_groups_of(state: Any) -> list[Any]:
    """Return the groups of parameters of a module's `FSDPState`: several since torch 2.12."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def precision_of(group: Any, parameter: Any) -> Any:
    """Return the `MixedPrecisionPolicy` of a parameter; before torch 2.15, of its group."""
    return parameter.mp_policy if hasattr(parameter, "mp_policy") else group.mp_policy


def reduce_dtype_of(parameter: Any) -> torch.dtype | None:
    """Return the dtype in which an `FSDPParam`'s gradient is reduced; None if in its own.

    Where the policy names none, torch reduces in the dtype of the shards since 2.15, and in that
    of the gradient before.
    """
    if parameter.reduce_dtype is not None:
        return parameter.reduce_dtype
    return getattr(parameter, "unsharded_grad_dtype", None)
