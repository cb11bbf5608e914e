"""Hooks around the steps of all optimizers, for which torch has functions to add them only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def global_step_hooks() -> list[Callable[..., Any]]:
    """Return what runs before and after the step of every optimizer.

    Hooks of `torch.optim.optimizer.register_optimizer_step_pre_hook` and
    `register_optimizer_step_post_hook`.
    """
    return [*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values()]
