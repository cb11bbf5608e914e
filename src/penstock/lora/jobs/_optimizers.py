"""Optimizers and schedules that a user's functions make, checked before anything is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
MakeSchedule = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


def check_makers(name: str, optimizer: object, schedule: object) -> None:
    """Refuse an optimizer or a schedule that is no function.

    Args:
        name: The job.
        optimizer: The argument of that name.
        schedule: The argument of that name; None is none.

    Raises:
        TypeError: One cannot be called.
    """
    if not callable(optimizer):
        raise TypeError(
            f"job {name!r}: optimizer is a {type(optimizer).__name__}; accepted is a function that "
            "makes it: lambda parameters: torch.optim.AdamW(parameters, lr=1e-4)"
        )
    if schedule is not None and not callable(schedule):
        raise TypeError(
            f"job {name!r}: schedule is a {type(schedule).__name__}; accepted is a function that "
            "makes it: lambda optimizer: torch.optim.lr_scheduler.LinearLR(optimizer)"
        )


def _call(name: str, kind: str, make: Callable[[Any], Any], argument: Any) -> Any:
    """Call a user's function; an exception of it names the job."""
    try:
        return make(argument)
    except Exception as error:
        raise ValueError(
            f"job {name!r}: {kind} raised {type(error).__name__}: {error}; it is called with one "
            "argument, the list of the adapter's parameters for optimizer, the job's optimizer for "
            "schedule"
        ) from error


def make_optimizer(
    name: str, make: MakeOptimizer, parameters: list[Tensor]
) -> torch.optim.Optimizer:
    """Return the optimizer of a job's parameters.

    Args:
        name: The job.
        make: The user's function.
        parameters: The job's parameters, all of which the optimizer has to hold, and no others.

    Raises:
        ValueError: The function raises, or gives no optimizer of torch, or one that needs a closure
            or holds other parameters.
    """
    optimizer = _call(name, "optimizer", make, parameters)
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
        ValueError: The function raises, or gives no schedule of torch, or one that needs a metric.
    """
    if make is None:
        return None
    schedule = _call(name, "schedule", make, optimizer)
    is_plain = isinstance(schedule, torch.optim.lr_scheduler.LRScheduler)
    if not is_plain or isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise ValueError(
            f"job {name!r}: schedule gave a {type(schedule).__name__}; accepted are schedules of "
            "torch whose step needs no metric"
        )
    return schedule
