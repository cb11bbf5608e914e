"""Chains of modules that run in chunks of rows, computed again in the backward pass.

Each chunk goes through all modules of a segment while its values are in a cache, and none of them
is kept: the backward pass computes them again, chunk by chunk, but for the product of a last
`nn.Linear`, whose gradients need its input alone. A chain that ends in a number, a sum over rows
such as a loss, has its gradients computed beside it, so that nothing is computed twice.

Rows are the same bits as unchunked where the modules' kernels are: elementwise operators, norms,
softmaxes. The order in which a product of matrices adds may depend on how many rows it gets, and
gradients of weights are added chunk by chunk.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from penstock.iomodel._chain import ChainOperator, ChainPlan, chain
from penstock.iomodel._chain_checks import (
    check_result,
    forbid_second_derivative,
    random_state,
    refuse_random_numbers,
    run_some_rows,
)
from penstock.iomodel._levels import check_counts, this_machine
from penstock.memory import MachineProfile

Module = Callable[..., Tensor]
_TIMED_ROWS = 32  # whose values stay in a cache, at most


def run_chain(
    modules: Sequence[Module],
    x: Tensor,
    *row_args: Tensor,
    chunk_rows: int | None = None,
    plan: ChainPlan | None = None,
) -> Tensor:
    """Run modules one after the other on the rows of x, in chunks.

    Example:
        >>> run_chain([nn.Linear(8, 32), nn.GELU()], torch.rand(2, 50, 8), chunk_rows=16).shape
        torch.Size([2, 50, 32])

    Args:
        modules: Modules or functions that work on each row alone and draw no random numbers. The
            last one may return a number: the sum over its rows, such as a loss.
        x: Input, `(..., features)`; rows are all dimensions but the last.
        *row_args: Further arguments of the last module, such as labels, with a row for each of x.
        chunk_rows: Rows of a chunk of all modules together; None: as `plan` has it.
        plan: What `plan_chain` returned for such modules and rows; None: planned here.

    Returns:
        The result, `(..., features)`, or the sum of the numbers.

    Raises:
        TypeError: A module's result is no tensor.
        ValueError: No module, no row, autocast that is on, or a module that drew random numbers,
            does not work on each row alone, changes its buffers, or uses tensors that need
            gradients and are no parameters of it.
    """
    rows, others = _flatten(x, row_args)
    check_counts(modules=len(modules), rows=len(rows))
    _refuse_autocast(x)
    if chunk_rows is None:
        plan = plan or plan_chain(modules, x, *row_args)
        segments = [(each.operators, each.chunk_rows) for each in plan.segments]
    else:
        check_counts(chunk_rows=chunk_rows)
        segments = [(tuple(range(len(modules))), chunk_rows)]
    for at, count in segments:
        extra = others if at[-1] == len(modules) - 1 else []
        rows = _ChunkedModules([modules[number] for number in at], count, extra)(rows)
    return rows.reshape(*x.shape[:-1], *rows.shape[1:]) if rows.dim() else rows


def _refuse_autocast(x: Tensor) -> None:
    if torch.is_autocast_enabled(x.device.type):
        raise ValueError(
            "autocast is on, and off where the chain is computed again; call run_chain outside of "
            "it, with modules and x in the dtype to compute in"
        )


def _flatten(x: Tensor, row_args: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return rows of features, and the other arguments by row."""
    rows = x.reshape(-1, x.shape[-1])
    return rows, [each.reshape(len(rows), *each.shape[x.dim() - 1 :]) for each in row_args]


def plan_chain(
    modules: Sequence[Module],
    x: Tensor,
    *row_args: Tensor,
    machine: MachineProfile | None = None,
) -> ChainPlan:
    """Plan the chunks of a chain of modules, from runs of its first rows, which are timed.

    Where gradients are needed, the plan is of a step, forward and backward.

    Args:
        modules: The modules, as `run_chain` takes them.
        x: Its input.
        *row_args: Its other arguments.
        machine: Levels and rates; None: those of `penstock.probe`.
    """
    rows, others = _flatten(x.detach(), row_args)
    value, operators = rows[:_TIMED_ROWS], []
    for number, module in enumerate(modules):
        extra = [each[: len(value)] for each in others] if number == len(modules) - 1 else []
        operator, value = _describe(module, value, extra, needs_rows=x.requires_grad)
        operators.append(operator)
    return chain(
        operators,
        len(rows),
        machine or this_machine(),
        input_row_bytes=max(1, rows[:1].nbytes),
        num_threads=torch.get_num_threads(),
    )


def _describe(
    module: Module, rows: Tensor, extra: Sequence[Tensor], *, needs_rows: bool
) -> tuple[ChainOperator, Tensor]:
    """Return a module as an operator of a chain, and its result of some rows."""
    weights = [*module.parameters()] if isinstance(module, nn.Module) else []
    is_trained = torch.is_grad_enabled() and (
        needs_rows or any(each.requires_grad for each in weights)
    )
    with torch.no_grad():
        with FlopCounterMode(display=False) as flops:
            result = module(rows, *extra)
        check_result(module, result)
        seconds = 0.0
        if not flops.get_total_flops():  # of a product the rate is known
            seconds = min(_time(lambda: module(rows, *extra)) for _ in range(3)) / len(rows)
    passes = 3 if is_trained else 1  # a backward pass takes as long as two forward passes
    operator = ChainOperator(
        name=getattr(module, "__name__", type(module).__name__),
        row_bytes=max(1, result.nbytes // len(rows)),
        weight_bytes=sum(map(_weight_traffic if is_trained else _copy_traffic, weights)),
        row_operations=flops.get_total_flops() // len(rows) * passes,
        row_seconds=seconds * passes,
    )
    return operator, result


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _copy_traffic(weight: Tensor) -> int:
    """Return the bytes of one pass: a weight is read and copied; 2.1 times its own as measured."""
    return weight.nbytes * 2


def _weight_traffic(weight: Tensor) -> int:
    """Return the bytes that a chunk of a step moves for a weight.

    Both passes copy it into the order in which the product reads it; its gradient is added to a
    sum that is read and written.
    """
    return weight.nbytes * (6 if weight.requires_grad else 4)


@dataclasses.dataclass(frozen=True, eq=False)
class _ChunkedModules:
    """Modules that run together, chunk by chunk.

    Attributes:
        modules: The modules.
        chunk_rows: Rows of a chunk.
        others: Arguments of the last module beside its rows, by row.
    """

    modules: list[Module]
    chunk_rows: int
    others: list[Tensor]

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the result of all rows; whole where that is one chunk."""
        if self.chunk_rows >= len(rows):
            return self.run(rows, self.others)
        some = run_some_rows(self.run, self.modules, rows, self.others)
        if not torch.is_grad_enabled():
            return self.join(rows, some)
        # By identity: a parameter that modules share has one gradient.
        weights = {
            id(each): each
            for module in self.modules
            if isinstance(module, nn.Module)
            for each in module.parameters()
            if each.requires_grad
        }
        return _run_in_chunks(self, some, rows, *weights.values())

    def run(self, rows: Tensor, others: Sequence[Tensor]) -> Tensor:
        for module in self.modules[:-1]:
            rows = module(rows)
        return self.modules[-1](rows, *others)

    def join(self, rows: Tensor, some: Tensor) -> Tensor:
        """Return the results of all chunks, as that of some rows is, or the sum of numbers."""
        is_sum = some.dim() == 0
        total = rows.new_zeros(()) if is_sum else some.new_empty(len(rows), *some.shape[1:])
        for at, others in self.chunks(rows):
            if is_sum:
                total = total + self.run(rows[at], others)
            else:
                total[at] = self.run(rows[at], others)
        return total

    def chunks(self, rows: Tensor) -> Iterator[tuple[slice, list[Tensor]]]:
        for first in range(0, len(rows), self.chunk_rows):
            at = slice(first, first + self.chunk_rows)
            yield at, [each[at] for each in self.others]


def _run_in_chunks(
    segment: _ChunkedModules, some: Tensor, rows: Tensor, *weights: Tensor
) -> Tensor:
    result: Any = _ChunkedSegment.apply(segment, some, rows, *weights)
    return result


class _ChunkedSegment(torch.autograd.Function):
    """A segment whose values are computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, segment: _ChunkedModules, some: Tensor, rows: Tensor, *weights: Tensor
    ) -> Tensor:
        """Run all chunks; of sums, with the gradients of all operands."""
        state = random_state(rows.device)
        ctx.segment, ctx.is_sum = segment, some.dim() == 0
        # The others are not read from there: a change of theirs in place is noticed.
        ctx.save_for_backward(rows, *weights, *segment.others)
        needed = ctx.needs_input_grad[2:]
        if ctx.is_sum and any(needed):
            total, ctx.gradients = _sum_with_gradients(segment, rows, weights, needed)
        else:
            total = segment.join(rows, some)
        if not torch.equal(state, random_state(rows.device)):
            refuse_random_numbers()
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the rows and the weights."""
        (gradient,), needed = gradients, ctx.needs_input_grad[2:]
        operands = ctx.saved_tensors[: len(needed)]
        with torch.no_grad():
            found = _differentiate(ctx, operands, needed, gradient)
        if torch.is_grad_enabled():  # create_graph=True
            found = [forbid_second_derivative(each, operands) for each in found]
        return None, None, *found


def _differentiate(
    ctx: Any, operands: Sequence[Tensor], needed: Sequence[bool], gradient: Tensor
) -> list[Tensor | None]:
    segment, (rows, *weights) = ctx.segment, operands
    if ctx.is_sum:
        # Given away, as the next owner may change them; a second pass computes them again.
        found, ctx.gradients = ctx.gradients, None
        if found is None:
            _, found = _sum_with_gradients(segment, rows, weights, needed)
        if bool(gradient == 1):  # as of a loss, and not worth a copy of each
            return found
        return [None if each is None else each * gradient for each in found]
    sums = _GradientSums(rows, weights, needed)
    for at, others in segment.chunks(rows):
        sums.add(at, segment, others, gradient[at])
    return sums.values


def _sum_with_gradients(
    segment: _ChunkedModules, rows: Tensor, weights: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the sum over all chunks, and the gradients of rows and weights."""
    sums, total = _GradientSums(rows, weights, needed), rows.new_zeros(())
    for at, others in segment.chunks(rows):
        total = total + sums.add(at, segment, others, None)
    return total, sums.values


class _GradientSums:
    """Gradients of rows, chunk by chunk, and of weights, added over the chunks.

    Attributes:
        values: By operand its gradient; None where it is not needed.
    """

    def __init__(self, rows: Tensor, weights: Sequence[Tensor], needed: Sequence[bool]) -> None:
        self._rows, self._weights, self._needed = rows, weights, needed
        self.values = [
            torch.zeros_like(each) if need else None
            for each, need in zip((rows, *weights), needed, strict=True)
        ]

    def add(
        self, at: slice, segment: _ChunkedModules, others: Sequence[Tensor], gradient: Tensor | None
    ) -> Tensor:
        """Add the gradients of a chunk, computed again, and return its result."""
        *firsts, last = segment.modules
        needs_rows = self._needed[0]
        with torch.enable_grad():
            rows = value = self._rows[at].detach().requires_grad_(needs_rows)
            for module in firsts:
                value = self._run(module, value, [])
            if gradient is not None and firsts and _is_plain_linear(last):
                self.add_linear(last, value.detach(), gradient)
                gradient = gradient @ last.weight
            else:
                value = self._run(last, value, others)
        wanted = [
            each
            for each, sums in zip(self._weights, self.values[1:], strict=True)
            if sums is not None
        ]
        if not value.requires_grad:
            return value.detach()
        operands = ([rows] if needs_rows else []) + wanted
        found = iter(torch.autograd.grad(value, operands, gradient, allow_unused=True))
        of_rows = self.values[0]
        if of_rows is not None:
            of_rows[at] = next(found)
        for sums, each in zip((s for s in self.values[1:] if s is not None), found, strict=True):
            if each is not None:
                sums.add_(each)
        return value.detach()

    def _run(self, module: Module, value: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Run a module; a linear layer adds the gradients of its weights where they are summed."""
        if _is_plain_linear(module) and not others:
            result: Any = _SummingLinear.apply(self, module, value, module.weight, module.bias)
            return result
        return module(value, *others)

    def add_linear(self, module: nn.Linear, value: Tensor, gradient: Tensor) -> None:
        """Add the gradients of a linear layer to the sums, without a matrix of their own."""
        places = {id(each): at for at, each in enumerate(self._weights, 1)}
        of_weight = self.values[places.get(id(module.weight), 0)]
        if id(module.weight) in places and of_weight is not None:
            of_weight.addmm_(gradient.t(), value)
        if module.bias is not None and id(module.bias) in places:
            of_bias = self.values[places[id(module.bias)]]
            if of_bias is not None:
                of_bias.add_(gradient.sum(0))


def _is_plain_linear(module: Module) -> TypeGuard[nn.Linear]:
    """Return whether a module is a linear layer whose call does nothing else."""
    if not isinstance(module, nn.Linear) or type(module) is not nn.Linear:
        return False
    hooks = module._forward_hooks, module._forward_pre_hooks
    return not any((*hooks, module._backward_hooks, module._backward_pre_hooks))


class _SummingLinear(torch.autograd.Function):
    """A linear layer whose backward pass adds to sums of gradients."""

    @staticmethod
    def forward(ctx: Any, sums: _GradientSums, module: nn.Linear, value: Tensor, *_: Any) -> Tensor:
        """Compute the layer's output; its weights are arguments so that autograd follows it."""
        ctx.sums, ctx.module = sums, module
        ctx.save_for_backward(value)
        return torch.nn.functional.linear(value, module.weight, module.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the value, and add those of the weights."""
        (gradient,), (value,) = gradients, ctx.saved_tensors
        ctx.sums.add_linear(ctx.module, value, gradient)
        needs_value = ctx.needs_input_grad[2]
        return None, None, gradient @ ctx.module.weight if needs_value else None, None, None
