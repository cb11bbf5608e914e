"""Optimizers for tables whose gradients are sparse: they touch the rows that were used, once each.

The formulas are those of `torch.optim`; `_updates.py` and `row_updates.cpp` hold them. Rows are
changed where they lie, and the result does not depend on the number of threads: the gradients of
what was gathered several times are added up in the order in which they were gathered.

**Rows without a gradient are not changed, nor is their state.** A row that has a gradient in every
step is changed as by the dense optimizer. A row that has none in a step does not move by its
momentum meanwhile, its means do not decay, and it gets no weight decay; the dense optimizers do all
that. The step count, of which bias corrections and `lr_decay` are made, is the table's. All this is
as in `torch.optim.SparseAdam`.

**State** lies beside the table. Beside a table in a file it lies in files named `<file>.<state>`
(`<file>.<name>.<state>` for one tensor of several): `exp_avg`, `step` and so on, which the next run
goes on with, if the table still has rows that the last step wrote; delete them to begin anew. Rows,
their state and the step count are written together: a killed process leaves the table before the
step or after it, and nothing between. State of 16-bit tables is kept in float32, because the decay
of the means in a step is less than the last digit of 16 bits.

The optimizers are ordinary ones: parameter groups, schedulers of the learning rate and
`state_dict()` work as with any other. Options of `torch.optim` that choose an implementation
(`foreach`, `fused`, `capturable`, `differentiable`) do not exist here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from penstock.unified.optim._optimizer import RowOptimizer
from penstock.unified.optim._updates import AdagradStep, AdamStep, SgdStep

__all__ = ["SGD", "Adagrad", "Adam"]


class SGD(RowOptimizer):
    """Gradient descent on the rows of tables, with momentum (Sutskever et al., ICML 2013).

    For the gradient g of a row p with velocity m, as `torch.optim.SGD` computes it::

        g = g + weight_decay p
        m = momentum m + (1 - dampening) g      (g itself in the table's first step)
        p = p - lr m                            (p - lr (g + momentum m) with nesterov)

    Example:
        >>> table = unify(torch.ones(4, 2), requires_grad=True)
        >>> table[torch.tensor([1, 1])].sum().backward()
        >>> SGD([table], lr=0.1).step()
        >>> table.detach()[torch.tensor([0, 1])]
        tensor([[1.0000, 1.0000],
                [0.8000, 0.8000]])

    Args:
        params: Tables, or groups of them as `torch.optim` takes them.
        lr: Learning rate; a number, or a tensor of one.
        momentum: Factor of the velocity, the state `momentum_buffer`; with 0 there is none.
        dampening: Part of the gradient that is not added to the velocity.
        weight_decay: Added to the gradient, times the weight, of rows that have a gradient.
        nesterov: Whether to look ahead; needs momentum, and no dampening.
        maximize: Whether to climb.

    Raises:
        TypeError: One of `params` is no table.
        ValueError: An option makes no sense.
    """

    _step_class = SgdStep

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        numbers = {"lr": lr, "momentum": momentum, "dampening": dampening}
        options = {"weight_decay": weight_decay, "nesterov": nesterov, "maximize": maximize}
        super().__init__(params, numbers | options)

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        momentum, dampening = options["momentum"], options["dampening"]
        if options["nesterov"] and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"nesterov=True, momentum={momentum}, dampening={dampening}: nesterov needs a "
                "momentum above 0, and no dampening"
            )

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("momentum_buffer",) if group["momentum"] else ()


class Adagrad(RowOptimizer):
    """Adagrad on the rows of tables (Duchi et al., JMLR 12, 2011, figure 1, diagonal).

    For the gradient g of a row p with sum of squares s in step t, as `torch.optim.Adagrad`
    computes it::

        g = g + weight_decay p
        s = s + g^2
        p = p - lr / (1 + (t - 1) lr_decay) g / (sqrt(s) + eps)

    Args:
        params: Tables, or groups of them as `torch.optim` takes them.
        lr: Learning rate; a number, or a tensor of one.
        lr_decay: Decay of the learning rate per step.
        weight_decay: Added to the gradient, times the weight, of rows that have a gradient.
        initial_accumulator_value: First value of the sums of squares, the state `sum`.
        eps: Small number that keeps the denominator from zero.
        maximize: Whether to climb.

    Raises:
        TypeError: One of `params` is no table.
        ValueError: An option makes no sense.
    """

    _step_class = AdagradStep

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        numbers = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        options = {"initial_accumulator_value": initial_accumulator_value, "maximize": maximize}
        super().__init__(params, numbers | options)

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        return ("sum",)


class Adam(RowOptimizer):
    """Adam on the rows of tables (Kingma and Ba, ICLR 2015, algorithm 1).

    For the gradient g of a row p with means m and v in step t, as `torch.optim.Adam` computes it::

        g = g + weight_decay p
        m = m + (1 - beta1) (g - m)
        v = beta2 v + (1 - beta2) g^2
        p = p - lr / (1 - beta1^t) m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    Args:
        params: Tables, or groups of them as `torch.optim` takes them.
        lr: Learning rate; a number, or a tensor of one.
        betas: Decay of the means of gradients and of their squares, the states `exp_avg` and
            `exp_avg_sq`.
        eps: Small number that keeps the denominator from zero.
        weight_decay: Added to the gradient, times the weight, of rows that have a gradient.
        amsgrad: Whether the largest v so far, the state `max_exp_avg_sq`, takes the place of v in
            the last line (Reddi et al., ICLR 2018).
        maximize: Whether to climb.

    Raises:
        TypeError: One of `params` is no table.
        ValueError: An option makes no sense.
    """

    _step_class = AdamStep

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**numbers, "amsgrad": amsgrad, "maximize": maximize})

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        betas = options["betas"]
        is_pair = isinstance(betas, tuple | list) and len(betas) == 2
        if not is_pair or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas={betas}: expected two numbers from 0 to below 1")

    def _state_names(self, group: dict[str, Any]) -> tuple[str, ...]:
        names = ("exp_avg", "exp_avg_sq")
        return (*names, "max_exp_avg_sq") if group["amsgrad"] else names
