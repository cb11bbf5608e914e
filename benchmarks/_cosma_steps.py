"""Training steps of at most a hundred operators, captured: plain torch, float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.graph import StepGraph
from penstock.graph.capturing.capture import record_step
from penstock.graph.capturing.step_program import StepProgram


class Perceptron(nn.Module):
    """Linear layers with ReLU between them, and the squared error as loss."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(before, after) for before, after in itertools.pairwise(widths)
        )

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return nn.functional.mse_loss(self.layers[-1](x), target)


class Convolutions(nn.Module):
    """Three convolutions without bias, the mean over the image, a classifier."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False)
        self.third = nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1, bias=False)
        self.classifier = nn.Linear(4 * width, 10)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.second, self.third):
            x = layer(x).relu()
        return nn.functional.cross_entropy(self.classifier(x.mean((2, 3))), target)


def perceptron_step(
    widths: Sequence[int], batch: int, optimizer: Callable[..., torch.optim.Optimizer]
) -> StepGraph:
    """One step on vectors."""
    with torch.device("meta"):
        model = Perceptron(widths)
        inputs = torch.empty(batch, widths[0]), torch.empty(batch, widths[-1])
    return record_step(StepProgram(model, inputs), optimizer(model.parameters()))


def convolutions_step(
    width: int, batch: int, optimizer: Callable[..., torch.optim.Optimizer]
) -> StepGraph:
    """One step on images of 32 x 32."""
    with torch.device("meta"):
        model = Convolutions(width)
        inputs: tuple[Any, ...] = (
            torch.empty(batch, 3, 32, 32),
            torch.empty(batch, dtype=torch.int64),
        )
    return record_step(StepProgram(model, inputs), optimizer(model.parameters()))


_SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
STEPS: dict[str, Callable[[], StepGraph]] = {
    "MLP, 2 layers, SGD": partial(perceptron_step, (256, 1024, 10), 64, _SGD),
    "MLP, 3 layers, SGD": partial(perceptron_step, (256, 512, 512, 10), 64, _SGD),
    "MLP, 5 layers, SGD": partial(perceptron_step, (256, 512, 512, 512, 512, 10), 64, _SGD),
    "MLP, 3 layers, AdamW": partial(perceptron_step, (256, 512, 512, 10), 64, torch.optim.AdamW),
    "CNN, SGD": partial(convolutions_step, 64, 8, _SGD),
    "CNN, AdamW": partial(convolutions_step, 64, 8, torch.optim.AdamW),
}
