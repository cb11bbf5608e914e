"""Data parallelism: gradients are averaged by operators of the step's graph."""

from __future__ import annotations

from torch import distributed, nn

from penstock.graph._collectives import average_over_ranks_


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
            average_over_ranks_(parameter.grad, name)
