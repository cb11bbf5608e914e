"""Kinds of modules that a chain knows: linear layers, and functions of each element alone.

A function of each element is fused with the module before it where nothing is kept for a backward
pass: it overwrites the value that this one made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.compat.modules import has_global_hooks

Module = Callable[..., Tensor]

_IN_PLACE: dict[type[nn.Module], Callable[[Any, Tensor], object]] = {
    nn.ReLU: lambda _, x: torch.relu_(x),
    nn.Sigmoid: lambda _, x: torch.sigmoid_(x),
    nn.Tanh: lambda _, x: torch.tanh_(x),
    nn.SiLU: lambda _, x: F.silu(x, inplace=True),
    nn.GELU: lambda module, x: torch.ops.aten.gelu_(x, approximate=module.approximate),
    nn.LeakyReLU: lambda module, x: F.leaky_relu_(x, module.negative_slope),
}

_FORWARDS = {kind: kind.forward for kind in (nn.Linear, *_IN_PLACE)}


def check_modules(modules: object) -> None:
    """Raise `TypeError` if a chain is no sequence, or one of it cannot be called."""
    if not isinstance(modules, Iterable) or not hasattr(modules, "__getitem__"):
        raise TypeError(f"modules is a {type(modules).__name__}; pass a list of modules")
    for number, each in enumerate(modules):
        if not callable(each):
            raise TypeError(f"modules[{number}] is {each!r}; pass a module or a function")


def name_module(module: object) -> str:
    """Return the name of a function, or of a module's class."""
    return getattr(module, "__name__", type(module).__name__)


def is_plain_linear(module: Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a linear layer whose call does nothing else."""
    if not isinstance(module, nn.Linear) or type(module) is not nn.Linear:
        return False
    return _is_as_in_torch(module)


def find_in_place(module: Module) -> Callable[[Tensor], object] | None:
    """Return what computes a module in place of its operand; None if it is not of each element."""
    found = _IN_PLACE.get(type(module))  # pyright: ignore[reportArgumentType]
    if found is None or not isinstance(module, nn.Module) or not _is_as_in_torch(module):
        return None
    return lambda value: found(module, value)


def makes_new_value(module: Module) -> bool:
    """Return whether a module's result is memory of its own, which a next one may overwrite."""
    if is_plain_linear(module):
        return True
    return find_in_place(module) is not None and not getattr(module, "inplace", False)


def _is_as_in_torch(module: nn.Module) -> bool:
    """Return whether calling a module does what torch's own class does: no hooks, no patches."""
    known = _FORWARDS.get(type(module))
    if "forward" in module.__dict__ or type(module).forward is not known or has_global_hooks():
        return False
    hooks = module._forward_hooks, module._forward_pre_hooks
    return not any((*hooks, module._backward_hooks, module._backward_pre_hooks))


def run_fused(modules: Sequence[Module], value: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Run modules one after the other, without gradients; the last one takes other arguments too.

    Functions of each element overwrite what the module before them made.
    """
    is_own = False
    for number, module in enumerate(modules):
        extra = others if number == len(modules) - 1 else ()
        in_place = find_in_place(module) if is_own and not extra else None
        if in_place is not None:
            in_place(value)
            continue
        value = module(value, *extra)
        is_own = makes_new_value(module)
    return value


def find_parameters(modules: Sequence[Module]) -> list[nn.Parameter]:
    """Return the parameters of modules that need gradients, each once."""
    found = {
        id(each): each
        for module in modules
        if isinstance(module, nn.Module)
        for each in module.parameters()
        if each.requires_grad
    }
    return list(found.values())
