"""Modes that decide the course of a step: of modules, of parameters (frozen or not), autocast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from penstock.graph.encoding import dtype_name


def modules_in(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model, and of a loss that is one, with their names in a graph."""
    for name, root in roots.items():
        yield from root.named_modules(prefix=name)


def parameters_in(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Parameter | None]]:
    """Yield each module's entries for parameters, in the order of the modules."""
    for name, module in modules_in(roots):
        for key, parameter in module._parameters.items():
            yield f"{name}.{key}", parameter


def evaluation_modules(roots: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the modules that are in evaluation mode."""
    return [name for name, module in modules_in(roots) if not module.training]


def frozen_parameters(roots: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of the parameters that require no gradient."""
    named = parameters_in(roots)
    return [name for name, each in named if each is not None and not each.requires_grad]


def autocast_of(device: str) -> str | None:
    """Return the dtype that autocast has on a kind of device; None where it is off."""
    if not torch.is_autocast_enabled(device):
        return None
    return dtype_name(torch.get_autocast_dtype(device))
