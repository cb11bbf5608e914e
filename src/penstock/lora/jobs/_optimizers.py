"""Optimizers and schedules that a user's functions make, checked before anything is trained."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
MakeSchedule = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def make_optimizer(
    name: str, make: MakeOptimizer, parameters: list[Tensor]
) -> torch.optim.Optimizer:
    """Return the optimizer of a job's parameters.

    Args:
        name: The job.
        make: The user's function.
        parameters: The job's parameters, all of which the optimizer has to hold, and no others.

    Raises:
        ValueError: It is no optimizer of torch, needs a closure, or holds other parameters.
    """
    optimizer = make(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer) or isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"job {name!r}: optimizer gave a {type(optimizer).__name__}; accepted are optimizers "
            "of torch whose step needs no closure"
        )
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    if held != {id(each) for each in parameters}:
        raise ValueError(
            f"job {name!r}: optimizer holds other parameters than those it was given: give it all "
            "of them, and none of another job"
        )
    return optimizer


def make_schedule(
    name: str, make: MakeSchedule | None, optimizer: torch.optim.Optimizer
) -> torch.optim.lr_scheduler.LRScheduler | None:
    """Return the schedule of a job's optimizer, None without one.

    Args:
        name: The job.
        make: The user's function.
        optimizer: The job's optimizer.

    Raises:
        ValueError: It is no schedule of torch, or its step needs a metric.
    """
    if make is None:
        return None
    schedule = make(optimizer)
    is_plain = isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)
    if not is_plain or isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            f"job {name!r}: schedule gave a {type(schedule).__name__}; accepted are schedules of "
            "torch whose step needs no metric"
        )
    return schedule
