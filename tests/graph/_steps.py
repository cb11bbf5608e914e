"""Training steps side by side: eager, and a captured graph that is run operator by operator."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.graph import StepGraph, capture, run
from penstock.graph.capturing.step_program import call_model, loss_of


class Case(NamedTuple):
    """A model, a batch, and how the loss comes about."""

    make: Callable[[], nn.Module]
    batch: Any
    loss: Callable[[Any, Any], torch.Tensor] | None = None


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors are equal to the bit, signs of zeros and NaNs included."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    raw = [each.detach().contiguous().reshape(-1).view(torch.uint8) for each in (left, right)]
    return torch.equal(*raw)


def differences(left: Any, right: Any, name: str) -> list[str]:
    """Names of the tensors and numbers in two state dicts that differ."""
    if isinstance(left, dict):
        if left.keys() != right.keys():
            return [f"{name}: {sorted(map(str, left.keys() ^ right.keys()))}"]
        return [
            each for key in left for each in differences(left[key], right[key], f"{name}.{key}")
        ]
    if isinstance(left, (list, tuple)):
        pairs = enumerate(zip(left, right, strict=True))
        return [each for i, pair in pairs for each in differences(*pair, f"{name}.{i}")]
    if isinstance(left, torch.Tensor):
        return [] if same_bits(left, right) else [name]
    return [] if left == right else [name]


def eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, case: Case) -> torch.Tensor:
    """Take one ordinary training step."""
    optimizer.zero_grad()
    loss = loss_of(call_model(model, case.batch), case.batch, case.loss)
    loss.backward()
    optimizer.step()
    return loss.detach()


def unlike_eager(
    case: Case,
    make_optimizer: Callable[[Any], torch.optim.Optimizer],
    *,
    num_steps: int = 3,
    before_step: Callable[[torch.optim.Optimizer, int], None] = lambda optimizer, step: None,
    change: Callable[[StepGraph], StepGraph] = lambda graph: graph,
    warm_up_steps: int = 0,
) -> list[str]:
    """Names of what differs after some steps between eager training and a captured graph.

    The graph goes through JSON, so that it proves to be complete.
    """
    models, optimizers = [], []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(case.make())
        optimizers.append(make_optimizer(models[-1].parameters()))
    for model, optimizer in zip(models, optimizers, strict=True):
        torch.manual_seed(1)
        for _ in range(warm_up_steps):
            eager_step(model, optimizer, case)
    graph = change(capture(models[1], optimizers[1], case.batch, loss=case.loss))
    graph = StepGraph.from_dict(json.loads(json.dumps(graph.to_dict())))
    ends = []
    for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
        torch.manual_seed(2)
        losses = []
        for step in range(num_steps):
            before_step(optimizer, step)
            if number:
                losses.append(run(graph, model, optimizer, case.batch, loss=case.loss))
            else:
                losses.append(eager_step(model, optimizer, case))
        ends.append(
            {
                "losses": losses,
                "model": dict(model.state_dict()),
                "optimizer": optimizer.state_dict(),
                "random": torch.get_rng_state(),
            }
        )
    return differences(ends[0], ends[1], "")
