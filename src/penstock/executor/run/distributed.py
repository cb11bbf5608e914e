"""Data parallelism: operators of the step's graph average gradients."""

from __future__ import annotations

from torch import distributed, nn

from penstock.errors import CaptureError
from penstock.graph import StepGraph
from penstock.graph.capturing.schemas import COLLECTIVES
from penstock.graph.fsdp.collectives import average_over_ranks_


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


def require_collective(graph: StepGraph) -> None:
    """Refuse a step of several ranks that averages no gradient: they would diverge silently.

    `DistributedDataParallel` averages in its `forward` and its hooks, which are not in a step of
    the model within.

    Raises:
        CaptureError: There are several ranks, and the step has no collective.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return
    num_ranks = distributed.get_world_size()
    targets = {each.target for each in graph.operators}
    if num_ranks > 1 and targets.isdisjoint(COLLECTIVES) and not any("c10d" in t for t in targets):
        raise CaptureError(
            f"there are {num_ranks} ranks, and nothing in the step averages gradients over them: "
            "pass before_step=lambda: penstock.executor.average_gradients(model); for ranks that "
            "are to learn apart, with group= of this rank alone"
        )
