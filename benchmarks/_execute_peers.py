"""Training without a plan, which `execute.py` compares with: eager, and what others do."""

from __future__ import annotations

import contextlib
import importlib.util
import os
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
DEEPSPEED = "DeepSpeed ZeRO-Offload"  # gradients and the optimizer's state in host memory
PEERS = (CHECKPOINTING, COMPILED, BUDGET, TRL, DEEPSPEED)
_PACKAGES = {TRL: "trl", DEEPSPEED: "deepspeed"}


def why_not(arm: str, model: str, device: str) -> str | None:
    """Return why there is no such arm for a model on a device; None if there is."""
    if arm == CHECKPOINTING and model not in TRANSFORMERS:
        return "it has no layers that say how to be checkpointed"
    if arm == TRL and device != "cuda":
        return "TRL offloads from GPUs only"
    package = _PACKAGES.get(arm)
    if package is not None and importlib.util.find_spec(package) is None:
        return f"{package} is not installed"
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
    if arm == DEEPSPEED:
        return _deepspeed_step(model, optimizer)
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


def _deepspeed_step(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> Callable[[Any], torch.Tensor]:
    """ZeRO's second stage with its own AdamW on the CPU; one process."""
    import deepspeed  # type: ignore[import]

    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(alone | {"MASTER_PORT": "29517"})
    (group,) = optimizer.param_groups
    options = {"lr": group["lr"], "betas": group["betas"], "weight_decay": group["weight_decay"]}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config={
            "train_micro_batch_size_per_gpu": 1,  # only says how losses are averaged
            "optimizer": {"type": "AdamW", "params": options},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        },
    )

    def step(batch: Any) -> torch.Tensor:
        output = engine(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return step
