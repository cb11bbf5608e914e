"""Optimizers for tables whose gradients are sparse: they touch the rows that were used, once each.

The arithmetic is that of `torch.optim`, applied to the gathered rows and to the rows of the state.
A row that has a gradient in every step goes the way that the dense optimizer would take it. A row
without a gradient is left alone, with its state: momentum does not decay meanwhile (as in
`torch.optim.SparseAdam`; the step count of the bias correction is the table's).

State lies where the table lies: in host memory, or in files beside the table's own, named
`<file>.<table>.<state>` and found there again by the next run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from penstock.unified._row_file import split_source
from penstock.unified._tables import FileTable
from penstock.unified._tensor import UnifiedTensor
from penstock.unified._unify import empty, unify

__all__ = ["SGD", "Adagrad", "Adam"]


class _RowOptimizer(torch.optim.Optimizer):
    """What the optimizers share: which rows there are, and where their state lies."""

    _states: tuple[str, ...] = ()

    def __init__(self, tables: Iterable[Any], defaults: dict[str, Any]) -> None:
        super().__init__(tables, defaults)
        for group in self.param_groups:
            for table in group["params"]:
                if not isinstance(table, UnifiedTensor):
                    raise TypeError(
                        f"params: expected tables made by penstock.unify, got "
                        f"{type(table).__name__}; give other parameters to torch.optim"
                    )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update the rows that have a gradient.

        Args:
            closure: computes the loss again, as for any `torch.optim.Optimizer`.

        Raises:
            TypeError: a gradient is dense: the table was used as a whole, not row by row.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for table in group["params"]:
                if table.grad is not None:
                    self._step_table(table, group)
        return loss

    def _step_table(self, table: UnifiedTensor, group: dict[str, Any]) -> None:
        assert table.grad is not None
        if table.grad.layout != torch.sparse_coo:
            raise TypeError(
                f"{table!r} has a dense gradient, because it was used as a whole. Use it row by "
                "row, or update it with an optimizer of torch.optim."
            )
        gradient = table.grad.coalesce()
        rows, gradients = gradient.indices()[0], gradient.values()
        state = self.state[table]
        if not state:
            state["step"] = torch.tensor(0.0)
            for name in self._states:
                state[name] = self._new_state(table, name, group)
        tables = [table, *(state[name] for name in self._states)]
        gathered = [each.detach().gather_rows(rows) for each in tables]
        self._update(gathered[0], gradients, gathered[1:], state["step"], group)
        for each, changed in zip(tables, gathered, strict=True):
            each._table.put(rows, changed, negative=False)
            torch.autograd.graph.increment_version(each)

    def _new_state(self, table: UnifiedTensor, name: str, group: dict[str, Any]) -> UnifiedTensor:
        """A table of zeroes beside the table."""
        if not isinstance(table._table, FileTable):
            return empty(table.shape, table.dtype)
        file, key = split_source(table._table.source)
        path = f"{file}.{key}.{name}" if key else f"{file}.{name}"
        if os.path.exists(path):
            return unify(path)
        return empty(table.shape, table.dtype, path=path)

    def _update(
        self,
        rows: torch.Tensor,
        gradients: torch.Tensor,
        states: list[torch.Tensor],
        step: torch.Tensor,
        group: dict[str, Any],
    ) -> None:
        """Change `rows` and `states` in place, as the dense optimizer would."""
        raise NotImplementedError


class SGD(_RowOptimizer):
    """Gradient descent on the rows of tables.

    Example:
        >>> table = unify(torch.ones(4, 2), requires_grad=True)
        >>> table[torch.tensor([1, 1])].sum().backward()
        >>> SGD([table], lr=0.1).step()
        >>> table.detach()[torch.tensor([0, 1])]
        tensor([[1.0000, 1.0000],
                [0.8000, 0.8000]])

    Args:
        params: tables, or groups of them as `torch.optim` takes them.
        lr: learning rate.
        weight_decay: added to the gradient, times the weight, of rows that have a gradient.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, *, weight_decay: float = 0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def _update(self, rows: Any, gradients: Any, states: Any, step: Any, group: Any) -> None:
        sgd(
            [rows],
            [gradients],
            [None],
            weight_decay=group["weight_decay"],
            momentum=0,
            lr=group["lr"],
            dampening=0,
            nesterov=False,
            maximize=False,
            foreach=False,
        )


class Adagrad(_RowOptimizer):
    """Adagrad on the rows of tables (Duchi et al., JMLR 12, 2011).

    Args:
        params: tables, or groups of them as `torch.optim` takes them.
        lr: learning rate.
        lr_decay: decay of the learning rate per step.
        weight_decay: added to the gradient, times the weight, of rows that have a gradient.
        eps: keeps the denominator from zero.
    """

    _states = ("sum",)

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-2,
        *,
        lr_decay: float = 0,
        weight_decay: float = 0,
        eps: float = 1e-10,
    ) -> None:
        defaults = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        super().__init__(params, defaults)

    def _update(self, rows: Any, gradients: Any, states: Any, step: Any, group: Any) -> None:
        adagrad(
            [rows],
            [gradients],
            states,
            [step],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            lr_decay=group["lr_decay"],
            eps=group["eps"],
            has_sparse_grad=False,
            maximize=False,
            foreach=False,
        )


class Adam(_RowOptimizer):
    """Adam on the rows of tables (Kingma and Ba, ICLR 2015).

    Args:
        params: tables, or groups of them as `torch.optim` takes them.
        lr: learning rate.
        betas: how slowly the means of gradients and of their squares forget.
        eps: keeps the denominator from zero.
        weight_decay: added to the gradient, times the weight, of rows that have a gradient.
    """

    _states = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)

    def _update(self, rows: Any, gradients: Any, states: Any, step: Any, group: Any) -> None:
        adam(
            [rows],
            [gradients],
            [states[0]],
            [states[1]],
            [],
            [step],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            foreach=False,
        )
