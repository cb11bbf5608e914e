"""Data parallelism: gradients are averaged by operators of the step's graph.

Each rank captures, plans and runs its own step. A collective is an operator like any other, only
that ranks must run them in one order, whatever their plans are: it counts as one that draws random
numbers, whose order a plan keeps, and as one that must not run twice.
"""

from __future__ import annotations

import torch
from torch import distributed, nn

_NAME = "penstock::average_over_ranks_"


@torch.library.custom_op(_NAME, mutates_args=("tensor",), tags=(torch.Tag.nondeterministic_seeded,))
def _average_over_ranks(tensor: torch.Tensor, group: str) -> None:
    members = distributed.distributed_c10d._resolve_process_group(group)  # pyright: ignore
    # As DDP does it: every rank divides, then all are summed up, so that sums do not overflow.
    tensor.div_(members.size())
    distributed.all_reduce(tensor, group=members)


@_average_over_ranks.register_fake
def _(tensor: torch.Tensor, group: str) -> None:
    return None


def average_gradients(model: nn.Module, group: distributed.ProcessGroup | None = None) -> None:
    """Average the gradients of a model over the ranks of a process group, in place.

    Example:
        >>> step = penstock.fit(  # doctest: +SKIP
        ...     model,
        ...     optimizer,
        ...     batch,
        ...     before_step=lambda: penstock.executor.average_gradients(model),
        ...     device_memory="4GiB",
        ... )

    Each rank runs its own plan for its own batches of the same shapes. Ranks begin with the same
    parameters, as `DistributedDataParallel` would see to, and keep them the same.

    Args:
        model: The model, not wrapped; each parameter's gradient is averaged by itself.
        group: The ranks; None: all.

    Raises:
        ValueError: There is no process group.
    """
    if not distributed.is_initialized():
        raise ValueError(
            "there is no process group: call torch.distributed.init_process_group() before"
        )
    name = (group or distributed.group.WORLD).group_name  # pyright: ignore
    for parameter in model.parameters():
        if parameter.grad is not None:
            _average_over_ranks(parameter.grad, name)
