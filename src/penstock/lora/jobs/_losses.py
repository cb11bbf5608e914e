"""Losses of jobs: their sum by default, and a trial of a user's function before it trains.

An update divides the sum of its targets' losses by their number over all chunks. A mean in place of
a sum trains with another weight for each target, and no shape tells: the value for a sample twice,
one after the other, does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]

_TOLERANCE = 0.02  # rounding of a loss in half precision; a mean is off by 50 %


def sum_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross entropy of the rows that have a target, added up.

    Args:
        logits: Shape `(n, vocabulary)`.
        targets: Shape `(n,)`, -100 where there is no target.
    """
    return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum")


def check_total(total: Any) -> None:
    """Refuse what is no single number that depends on the logits.

    Args:
        total: The result of a loss.

    Raises:
        ValueError: It is another value.
    """
    if not isinstance(total, Tensor):
        raise ValueError(f"the loss is a {type(total).__name__}, no tensor of one number")
    if total.numel() != 1 or not total.requires_grad:
        raise ValueError(
            f"the loss is no number that depends on the logits: its shape is {tuple(total.shape)}"
            f"{'' if total.requires_grad else ', without a gradient'}"
        )


def check_loss(job: str, loss: Loss, targets: Tensor, vocab_size: int, like: Tensor) -> None:
    """Refuse a loss that does not add up over samples, by a trial on random logits.

    Args:
        job: Name of the job.
        loss: The user's function.
        targets: Targets of a small sample, int64 of shape `(n,)`.
        vocab_size: Columns of the logits.
        like: A parameter of the model, with the device and dtype of logits.

    Raises:
        TypeError: It cannot be called.
        ValueError: It raises, returns no single number that depends on the logits, or is not twice
            as large for the sample twice.
    """
    remedy = (
        'return the sum of the targets\' losses (reduction="sum"), which Jobs divides by the '
        "number of targets of the whole batch"
    )
    if not callable(loss):
        raise TypeError(
            f"job {job!r}: loss is a {type(loss).__name__}; accepted is a function of logits and "
            f"targets: {remedy}"
        )
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(
        len(targets), vocab_size, generator=generator, dtype=torch.float32, device="cpu"
    ).to(like)
    found = []
    for times in (1, 2):
        try:
            with torch.enable_grad():
                total = loss(
                    logits.repeat(times, 1).requires_grad_(), targets.repeat(times).to(like.device)
                )
            check_total(total)
        except Exception as error:
            raise ValueError(
                f"job {job!r}: loss failed on random logits of shape "
                f"{(times * len(targets), vocab_size)}: {type(error).__name__}: {error}; {remedy}"
            ) from error
        found.append(float(total.detach()))
    once, twice = found
    if not abs(twice - 2 * once) <= _TOLERANCE * abs(2 * once):
        raise ValueError(
            f"job {job!r}: loss is {once:.6g} for a sample of random logits, and {twice:.6g} for "
            f"the same sample twice, not double: {remedy}"
        )
