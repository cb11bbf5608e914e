"""Ordinary steps of an optimizer between planned ones, which torch's version counters may miss."""

from __future__ import annotations

import weakref

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class EagerSteps:
    """Steps of an optimizer: torch counts no versions if they are fused or `foreach`."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._seen: list[bool] = []
        watched, seen = weakref.ref(optimizer), self._seen

        def note(stepper: torch.optim.Optimizer, *_: object) -> None:
            if stepper is watched():
                seen[:] = [True]

        hook = register_optimizer_step_post_hook(note)
        self._remove = weakref.finalize(self, hook.remove)

    def clear(self) -> bool:
        """Forget the steps so far; return whether there were any."""
        seen = bool(self._seen)
        self._seen.clear()
        return seen

    def close(self) -> None:
        """Remove the hook."""
        self._remove()
