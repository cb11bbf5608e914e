"""Ordinary steps of an optimizer between planned ones, which torch's version counters may miss."""

from __future__ import annotations

import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class EagerSteps:
    """Notices steps of an optimizer: torch counts no versions where they are fused or of lists.

    Args:
        optimizer: The optimizer; nothing of it is changed.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._found: list[bool] = []
        watched, found = weakref.ref(optimizer), self._found

        def note(stepper: torch.optim.Optimizer, *_: object) -> None:
            if stepper is watched():
                found[:] = [True]

        hook = register_optimizer_step_post_hook(note)
        self._remove = weakref.finalize(self, hook.remove)

    def any(self) -> bool:
        """Whether there was one since this was asked last."""
        found = bool(self._found)
        self._found.clear()
        return found

    def stop(self) -> None:
        """Look no more."""
        self._remove()
