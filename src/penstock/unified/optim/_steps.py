"""One step of each optimizer: its numbers for C++, and its arithmetic by torch.

`row_updates.cpp` computes the same formulas from the same numbers. By torch they are computed by
the functions that `torch.optim` itself is made of, on rows that were gathered.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import torch
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowStep(abc.ABC):
    """One step of an optimizer."""

    function: ClassVar[str]
    """Name of the step in the library."""

    lr: float
    weight_decay: float
    maximize: bool
    count: int
    """Number of steps of the table, this one included."""

    @abc.abstractmethod
    def numbers(self) -> tuple[float, ...]:
        """Return the numbers that the step's constructor in C++ reads, in its order."""

    @abc.abstractmethod
    def run_in_torch(
        self, rows: torch.Tensor, gradients: torch.Tensor, states: list[torch.Tensor]
    ) -> None:
        """Change `rows` and `states` in place; all of the same shape and dtype."""

    def _common_options(self) -> dict[str, Any]:
        """Return the keywords that torch's functions have in common."""
        return {
            "lr": self.lr,
            "weight_decay": self.weight_decay,
            "maximize": self.maximize,
            "foreach": False,
        }

    def _steps_before(self) -> torch.Tensor:
        """Return the count that torch's functions increase."""
        return torch.tensor(float(self.count - 1), dtype=torch.float64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SgdStep(RowStep):
    """A step of `penstock.unified.optim.SGD`; with momentum, `states` are its velocities."""

    function = "penstock_sgd"
    momentum: float
    dampening: float
    nesterov: bool

    @property
    def _is_first(self) -> bool:
        """True in the first step, whose velocity is the gradient itself, undampened."""
        return self.count == 1

    def numbers(self) -> tuple[float, ...]:
        return (
            *(self.lr, self.weight_decay, self.momentum, self.dampening),
            *(self._is_first, self.nesterov),
        )

    def run_in_torch(
        self, rows: torch.Tensor, gradients: torch.Tensor, states: list[torch.Tensor]
    ) -> None:
        velocities: list[torch.Tensor | None] = [
            None if self._is_first else each for each in states
        ]
        velocities = velocities or [None]
        sgd(
            [rows],
            [gradients],
            velocities,
            momentum=self.momentum,
            dampening=self.dampening,
            nesterov=self.nesterov,
            **self._common_options(),
        )
        if states and self._is_first:
            assert velocities[0] is not None
            states[0].copy_(velocities[0])


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdagradStep(RowStep):
    """A step of `penstock.unified.optim.Adagrad`; `states` are the sums of squares."""

    function = "penstock_adagrad"
    lr_decay: float
    eps: float

    def numbers(self) -> tuple[float, ...]:
        lr = self.lr / (1 + (self.count - 1) * self.lr_decay)
        return lr, self.weight_decay, self.eps

    def run_in_torch(
        self, rows: torch.Tensor, gradients: torch.Tensor, states: list[torch.Tensor]
    ) -> None:
        adagrad(
            [rows],
            [gradients],
            states,
            [self._steps_before()],
            lr_decay=self.lr_decay,
            eps=self.eps,
            has_sparse_grad=False,
            **self._common_options(),
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamStep(RowStep):
    """A step of `penstock.unified.optim.Adam`; `states` are both means, and the largest v."""

    function = "penstock_adam"
    betas: tuple[float, float]
    eps: float
    amsgrad: bool

    def numbers(self) -> tuple[float, ...]:
        beta1, beta2 = self.betas
        step_size = self.lr / (1 - beta1**self.count)
        correction = (1 - beta2**self.count) ** 0.5
        return (
            *(step_size, self.weight_decay, self.eps, 1 - beta1, beta2, 1 - beta2),
            *(correction, self.amsgrad),
        )

    def run_in_torch(
        self, rows: torch.Tensor, gradients: torch.Tensor, states: list[torch.Tensor]
    ) -> None:
        adam(
            [rows],
            [gradients],
            states[:1],
            states[1:2],
            states[2:],
            [self._steps_before()],
            amsgrad=self.amsgrad,
            beta1=self.betas[0],
            beta2=self.betas[1],
            eps=self.eps,
            **self._common_options(),
        )
