"""Checks of the arguments of a capture."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.errors import CaptureError
from penstock.graph.batches import tensors_in


def check_optimizer(optimizer: object) -> None:
    """Raise unless the argument is an optimizer of PyTorch, and wraps none (Accelerate, Lightning).

    Raises:
        TypeError: It is none; the message names its class, and the way to the optimizer within.
    """
    kind = type(optimizer).__name__
    inner = getattr(optimizer, "optimizer", None)
    if isinstance(inner, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer is a {kind} around an optimizer of class {type(inner).__name__}; pass "
            "optimizer.optimizer: a planned step scales and accumulates gradients itself"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"optimizer has to be a torch.optim.Optimizer, and is a {kind}")


def check_model(model: object) -> None:
    """Raise unless the argument is a module whose code a capture can see.

    Raises:
        TypeError: It is no module.
        CaptureError: It is wrapped or compiled, or has hooks on gradients.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model has to be an nn.Module, and is a {type(model).__name__}")
    for name, module in model.named_modules():
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise CaptureError(
                f"{name or 'model'} is wrapped for data parallelism; pass its .module, with "
                "before_step=lambda: penstock.executor.average_gradients(model)"
            )
        if _is_compiled(module):
            raise CaptureError(
                f"{name or 'model'} is compiled (torch.compile, torch.jit), and what it runs is "
                "not seen; pass the module as it was before"
            )
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise CaptureError(
                f"parameter {name!r} has hooks on its gradient, which run Python that a graph does "
                "not hold; remove them, or do their work in the loss or in the optimizer"
            )


def _is_compiled(module: nn.Module) -> bool:
    return (
        isinstance(module, torch.jit.ScriptModule)
        or hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
    )


def check_accumulation(batch: Any, accumulate: int | None) -> None:
    """Compare the number of micro-batches with `accumulate`.

    Raises:
        ValueError: The batch has another number of them.
    """
    if accumulate is None:
        return
    found = len(batch) if isinstance(batch, list | tuple) else type(batch).__name__
    if found != accumulate or accumulate < 1:
        raise ValueError(
            f"accumulate={accumulate}: the batch has to be a list of so many micro-batches, at "
            f"least one, and is {found if isinstance(found, str) else f'one of {found}'}"
        )


def find_device_type(root: nn.Module, batch: Any) -> str:
    """Return the type of the device that parameters are on, or else of the batch's.

    Raises:
        CaptureError: There are several.
    """
    types = {each.device.type for each in root.parameters()} - {"meta"}
    if len(types) > 1:
        raise CaptureError(
            f"the parameters are on {', '.join(sorted(types))}; a step graph is of one device"
        )
    types = types or {each.device.type for _, each in tensors_in(batch, "batch")} - {"meta"}
    if len(types) > 1:
        raise CaptureError(
            "the parameters are on the meta device, and the batch's tensors on "
            f"{', '.join(sorted(types))}, so the device of the step is not known; move the batch "
            "to one"
        )
    return types.pop() if types else "cpu"
