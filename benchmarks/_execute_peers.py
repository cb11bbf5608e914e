"""Training without a plan, which `execute.py` compares with: eager, and what others do."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from _models import MODELS as TRANSFORMERS

EAGER = "eager"
CHECKPOINTING = "checkpointing"
COMPILED = "torch.compile"
BUDGET = "torch's memory budget, 1/4"  # of what the forward pass keeps
TRL = "TRL's offload"
PEERS = (CHECKPOINTING, COMPILED, BUDGET, TRL)


def why_not(arm: str, model: str, device: str) -> str | None:
    """Return why there is no such arm for a model on a device; None if there is."""
    if arm == CHECKPOINTING and model not in TRANSFORMERS:
        return "it has no layers that say how to be checkpointed"
    if arm == TRL and device != "cuda":
        return "TRL offloads from GPUs only"
    if arm == TRL and importlib.util.find_spec("trl") is None:
        return "TRL is not installed"
    return None


def ordinary_step(
    arm: str, model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Any], torch.Tensor]:
    """Return a function that trains with a batch and returns the loss.

    Args:
        arm: `EAGER`, or one of `PEERS`.
        model: The model; changed as the arm has it.
        optimizer: Its optimizer.
    """
    forward: Callable[..., Any] = model
    around: Callable[[], Any] = contextlib.nullcontext
    if arm == CHECKPOINTING:
        model.gradient_checkpointing_enable(  # pyright: ignore[reportCallIssue]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    elif arm in (COMPILED, BUDGET):
        from torch._functorch import config

        config.activation_memory_budget = 0.25 if arm == BUDGET else 1.0
        forward = torch.compile(model)
    elif arm == TRL:
        from trl.models.activation_offloading import OffloadActivations  # type: ignore[import]

        around = OffloadActivations

    def step(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        with around():
            output = forward(**batch)
            loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
