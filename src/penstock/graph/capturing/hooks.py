"""Hooks on gradients and around optimizers: the user's Python, which a graph does not hold."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import lr_scheduler

from penstock.compat.autograd import count_node_hooks
from penstock.compat.optimizers import global_step_hooks

_LIBRARIES = ("torch.", "penstock.")  # whose hooks around all optimizers only look on


def describe_gradient_hooks(name: str, parameter: nn.Parameter) -> str | None:
    """Describe the hooks on the gradient of a parameter; None if there are none."""
    if not (parameter._backward_hooks or parameter._post_accumulate_grad_hooks):
        return None
    return _describe_hooks_of(name)


def describe_accumulation_hooks(name: str, parameter: nn.Parameter) -> str | None:
    """Describe the hooks on the node that accumulates the gradient of a parameter; None if there
    are none. It takes microseconds, as the node has to be found.
    """
    if not parameter.requires_grad or not count_node_hooks(parameter):
        return None
    return _describe_hooks_of(name)


def _describe_hooks_of(name: str) -> str:
    return (
        f"parameter {name!r} has hooks on its gradient, which run Python that a graph does not "
        "hold; remove them, or do their work in the loss or in the optimizer"
    )


def describe_step_hooks(optimizer: torch.optim.Optimizer) -> str | None:
    """Describe what runs around an optimizer's step or instead of it; None if nothing does."""
    kind = type(optimizer).__name__
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return (
            f"the {kind} has hooks around step(), which run Python that a graph does not hold; "
            "remove them (register_step_pre_hook, register_step_post_hook)"
        )
    modules = (getattr(hook, "__module__", "") or "" for hook in global_step_hooks())
    if not all(name.startswith(_LIBRARIES) for name in modules):
        return (
            "there are hooks around step() of all optimizers, which run Python that a graph does "
            "not hold; remove them (register_optimizer_step_pre_hook, "
            "register_optimizer_step_post_hook)"
        )
    if not _has_step_of_class(optimizer):
        return (
            f"this {kind} has a step of its own in place of its class's, which planned steps would "
            "not run: delete optimizer.step, and do its work in before_step or between steps"
        )
    return None


def _has_step_of_class(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the step is that of the class, within what schedulers wrap around it."""
    step = vars(optimizer).get("step")
    while step is not None:
        function = getattr(step, "__func__", step)
        code = getattr(function, "__code__", None)
        if code is None or code.co_filename != lr_scheduler.__file__:
            return function is type(optimizer).step
        step = function.__wrapped__
    return True
