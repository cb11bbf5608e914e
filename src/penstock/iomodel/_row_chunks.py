"""Modules that run in chunks of rows, computed again in the backward pass.

The product of a last `nn.Linear` is not computed again: its gradients need its input alone. Of a
sum over rows, such as a loss, the gradients are computed beside it, and nothing twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.iomodel._chain import REUSED_BYTES
from penstock.iomodel._chain_checks import (
    forbid_second_derivative,
    random_state,
    refuse_random_numbers,
    run_some_rows,
)
from penstock.iomodel._modules import Module, find_parameters, is_plain_linear, run_fused
from penstock.memory import CachingAllocator


@dataclasses.dataclass(frozen=True, eq=False)
class ChunkedModules:
    """Modules that run together, chunk by chunk.

    Attributes:
        modules: The modules.
        chunk_rows: Rows of a chunk.
        others: Arguments of the last module beside its rows, by row.
        accumulates: Whether gradients of weights are added to those that the weights have.
    """

    modules: list[Module]
    chunk_rows: int
    others: list[Tensor]
    accumulates: bool = False

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the result of all rows; whole where that is one chunk."""
        if self.chunk_rows >= len(rows):
            return self.run(rows, self.others)
        with reuse_memory(rows.device):
            some = run_some_rows(self.run, self.modules, rows, self.others)
            if not torch.is_grad_enabled():
                return self.join(rows, some)
            return _run_in_chunks(self, some, rows, *find_parameters(self.modules))

    def run(self, rows: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Return the result of some rows."""
        if not torch.is_grad_enabled():
            return run_fused(self.modules, rows, others)
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


@contextlib.contextmanager
def reuse_memory(device: torch.device) -> Iterator[None]:
    """Have the values of a chunk lie in the memory of the chunk before.

    malloc maps a value of 32 MiB or more, and the kernel clears its pages, for each chunk anew.
    Where the allocator cannot be had, malloc is made to keep what is smaller: glibc hands out
    blocks of its heap, whose pages are there, up to the size of the largest mapped block that was
    freed. No page of that block is touched.
    """
    if device.type != "cpu":
        yield
        return
    allocator = CachingAllocator.instance()
    if not allocator.acquire():
        torch.empty(REUSED_BYTES, dtype=torch.uint8)
    try:
        yield
    finally:
        allocator.release()


def _run_in_chunks(segment: ChunkedModules, some: Tensor, rows: Tensor, *weights: Tensor) -> Tensor:
    result: Any = _ChunkedSegment.apply(segment, some, rows, *weights)
    return result


class _ChunkedSegment(torch.autograd.Function):
    """A segment whose values are computed again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, segment: ChunkedModules, some: Tensor, rows: Tensor, *weights: Tensor
    ) -> Tensor:
        """Run all chunks; of sums, with the gradients of all operands."""
        state = random_state(rows.device)
        ctx.segment, ctx.is_sum = segment, some.dim() == 0
        ctx.weights = WeightVersions(weights)
        # The others are not read from there: a change of theirs in place is noticed.
        ctx.save_for_backward(rows, *segment.others)
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
        (gradient,), operands = gradients, (ctx.saved_tensors[0], *ctx.weights.check())
        with torch.no_grad(), reuse_memory(gradient.device):
            found = _differentiate(ctx, operands, ctx.needs_input_grad[2:], gradient)
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
    places = [find_gradient(each, segment.accumulates) for each in weights]
    sums = GradientSums(rows, weights, needed, places)
    for at, others in segment.chunks(rows):
        sums.add(at, segment, others, gradient[at])
    return sums.new_values


def _sum_with_gradients(
    segment: ChunkedModules, rows: Tensor, weights: Sequence[Tensor], needed: Sequence[bool]
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the sum over all chunks, and the gradients of rows and weights."""
    sums, total = GradientSums(rows, weights, needed), rows.new_zeros(())
    for at, others in segment.chunks(rows):
        total = total + sums.add(at, segment, others, None)
    return total, sums.values


class WeightVersions:
    """Weights as a forward pass used them.

    The backward pass looks for them among the modules' own, so that they are kept as they are:
    hooks on saved tensors may hand out copies.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = tuple(weights)
        self._versions = [each._version for each in weights]

    def check(self) -> tuple[Tensor, ...]:
        """Return the weights.

        Raises:
            RuntimeError: One was changed in place since.
        """
        if [each._version for each in self._weights] != self._versions:
            raise RuntimeError(
                "a weight of the chain was changed in place between its forward and its backward "
                "pass, which computes it again; call backward() before the optimizer's step"
            )
        return self._weights


def find_gradient(weight: Tensor, accumulates: bool) -> Tensor | None:
    """Return the gradient that a weight has, if more may be added to it here; None if not.

    Hooks of a weight are given its gradient, so that it has to be returned.
    """
    if not accumulates or weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return None
    return weight.grad


class GradientSums:
    """Gradients of rows, chunk by chunk, and of weights, added over the chunks.

    Attributes:
        values: By operand its gradient; None where it is not needed.
        new_values: Those that were not there before.
    """

    def __init__(
        self,
        rows: Tensor,
        weights: Sequence[Tensor],
        needed: Sequence[bool],
        places: Sequence[Tensor | None] = (),
    ) -> None:
        self._rows, self._weights, self._needed = rows, weights, needed
        self._anchor = torch.empty(0, requires_grad=any(needed[1:]))
        of_rows = torch.empty_like(rows) if needed[0] else None  # every chunk writes its own
        known = [of_rows, *(places or [None] * len(weights))]
        self.values = [
            (torch.zeros_like(each) if place is None else place) if need else None
            for each, need, place in zip((rows, *weights), needed, known, strict=True)
        ]
        self.new_values = [of_rows] + [
            each if place is None else None
            for each, place in zip(self.values[1:], known[1:], strict=True)
        ]

    def add(
        self, at: slice, segment: ChunkedModules, others: Sequence[Tensor], gradient: Tensor | None
    ) -> Tensor:
        """Add the gradients of a chunk, computed again, and return its result."""
        *firsts, last = segment.modules
        needs_rows = self._needed[0]
        with torch.enable_grad():
            rows = value = self._rows[at].detach().requires_grad_(needs_rows)
            for module in firsts:
                value = self._run(module, value, [])
            if gradient is not None and firsts and is_plain_linear(last):
                self.add_linear(last, value.detach(), gradient)
                gradient = gradient @ last.weight
            else:
                value = self._run(last, value, others)
        wanted = [
            each
            for each, sums in zip(self._weights, self.values[1:], strict=True)
            if sums is not None
        ]
        of_rows = self.values[0]
        if not value.requires_grad:
            if of_rows is not None:
                of_rows[at] = 0
            return value.detach()
        operands = ([rows] if needs_rows else []) + wanted
        anchors = [self._anchor] if wanted else []
        graded = torch.autograd.grad(value, operands + anchors, gradient, allow_unused=True)
        found = iter(graded[: len(operands)])
        if of_rows is not None:
            chunk = next(found)
            of_rows[at] = 0 if chunk is None else chunk
        for sums, each in zip((s for s in self.values[1:] if s is not None), found, strict=True):
            if each is not None:
                sums.add_(each)
        return value.detach()

    def _run(self, module: Module, value: Tensor, others: Sequence[Tensor]) -> Tensor:
        """Run a module; a linear layer adds the gradients of its weights where they are summed."""
        if is_plain_linear(module) and not others:
            result: Any = _SummingLinear.apply(self, module, value, self._anchor)
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


class _SummingLinear(torch.autograd.Function):
    """A linear layer whose backward pass adds to sums of gradients."""

    @staticmethod
    def forward(ctx: Any, sums: GradientSums, module: nn.Linear, value: Tensor, *_: Any) -> Tensor:
        """Compute the layer's output.

        Autograd goes through it for an anchor's sake: for weights, which are no arguments here, it
        would call their hooks for each chunk.
        """
        ctx.sums, ctx.module = sums, module
        ctx.save_for_backward(value)
        return torch.nn.functional.linear(value, module.weight, module.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the value, and add those of the weights."""
        (gradient,), (value,) = gradients, ctx.saved_tensors
        ctx.sums.add_linear(ctx.module, value, gradient)
        needs_value = ctx.needs_input_grad[2]
        return None, None, gradient @ ctx.module.weight if needs_value else None, None
