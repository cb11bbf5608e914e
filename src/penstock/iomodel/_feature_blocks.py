"""Products with functions of each element between them, in blocks of the features between.

With x of all rows, and block j of the rows of V (first weight) and the columns of W (second one),

    y = sum over j of f(x Vj^T + aj) Wj^T + b

so a block needs its own part of the weights alone, and no weight is read twice; chunks of rows read
all weights each. The backward pass computes the blocks again but for the first half of them, whose
x Vj^T + aj is kept. With G the gradient of y, Hj that of x Vj^T + aj:

    Wj' = G^T f(.)     Hj = (G Wj) f'(.)     Vj' = Hj^T x     aj' = sum of Hj     x' = sum of Hj Vj
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.codegen import ceil_div
from penstock.iomodel._chain import KEPT_SHARE
from penstock.iomodel._chain_checks import forbid_second_derivative
from penstock.iomodel._module_tensors import TensorVersions
from penstock.iomodel._modules import Module, find_in_place, is_plain_linear
from penstock.iomodel._row_chunks import (
    adding_to_gradients,
    find_gradient,
    find_sum_dtype,
    plain_mode,
    reuse_memory,
    spare_leaf,
)


def can_run_in_blocks(modules: Sequence[Module]) -> bool:
    """Return whether modules are two linear layers with functions of each element between them."""
    if len(modules) < 2 or any(find_in_place(each) is None for each in modules[1:-1]):
        return False
    first, last = modules[0], modules[-1]
    if not is_plain_linear(first) or not is_plain_linear(last) or not len(first.weight):
        return False
    return first.weight is not last.weight and (first.bias is None or first.bias is not last.bias)


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureBlocks:
    """Two linear layers, what is between them, and the number of blocks.

    Attributes:
        first: The first layer.
        middle: Functions of each element.
        last: The last layer.
        count: Blocks of the features between the layers.
        accumulates: Whether gradients of weights are added to those that the weights have.
    """

    first: nn.Linear
    middle: list[Module]
    last: nn.Linear
    count: int
    accumulates: bool = False

    def __call__(self, rows: Tensor) -> Tensor:
        """Return the result of all rows."""
        weights = self.first.weight, self.first.bias, self.last.weight, self.last.bias
        with reuse_memory(rows.device):
            if not torch.is_grad_enabled():
                return self.run(rows, weights, 0)[0]
            result: Any = _BlockedLayers.apply(self, rows, *weights)
            return result

    def blocks(self, width: int) -> list[slice]:
        """Return the features of each block."""
        step = ceil_div(width, self.count)
        return [slice(at, min(at + step, width)) for at in range(0, width, step)]

    def run(
        self, rows: Tensor, weights: Sequence[Tensor | None], num_kept: int
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the result, and the first product of some blocks; there are no gradients here."""
        first, first_bias, last, last_bias = weights
        assert first is not None and last is not None
        kept, blocks = [], self.blocks(len(first))
        buffer = make_buffer(rows, blocks)
        dtype = find_sum_dtype(rows) if len(blocks) > 1 else rows.dtype
        result = rows.new_zeros(len(rows), len(last), dtype=dtype)
        if last_bias is not None:
            result += last_bias
        for number, at in enumerate(blocks):
            is_kept = number < num_kept
            value = enter(rows, first, first_bias, at, None if is_kept else buffer)
            if is_kept:
                kept.append(value)
                value = _view_block(buffer, rows, at).copy_(value)
            for module in self.middle:
                in_place = find_in_place(module)
                assert in_place is not None
                in_place(value)
            add_product(result, value, last[:, at].t())
        return result.to(rows.dtype), kept


def make_buffer(rows: Tensor, blocks: Sequence[slice]) -> Tensor:
    """Return room for one block of all rows."""
    return rows.new_empty(len(rows) * (blocks[0].stop - blocks[0].start))


def enter(
    rows: Tensor, weight: Tensor, bias: Tensor | None, at: slice, buffer: Tensor | None
) -> Tensor:
    """Return a block of the first product, in the buffer if there is one."""
    out = None if buffer is None else _view_block(buffer, rows, at)
    if bias is None:
        return torch.mm(rows, weight[at].t(), out=out)
    return torch.addmm(bias[at], rows, weight[at].t(), out=out)


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add a product of matrices to a sum, which may be in a wider dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total.add_(left @ right)


def _view_block(buffer: Tensor, rows: Tensor, at: slice) -> Tensor:
    width = at.stop - at.start
    return buffer[: len(rows) * width].view(len(rows), width)


class _BlockedLayers(torch.autograd.Function):
    """The layers, whose blocks are computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, layers: FeatureBlocks, rows: Tensor, *weights: Tensor | None) -> Tensor:
        """Run all blocks."""
        assert weights[0] is not None
        ctx.layers, ctx.weights, ctx.versions = layers, weights, TensorVersions(weights)
        is_step = any(ctx.needs_input_grad)
        num_kept = int(KEPT_SHARE * len(layers.blocks(len(weights[0])))) if is_step else 0
        result, kept = layers.run(rows, weights, num_kept)
        ctx.save_for_backward(rows, *kept)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the rows and the weights."""
        (gradient,), (rows, *kept), device = gradients, ctx.saved_tensors, gradients[0].device
        weights = ctx.versions.check()
        with plain_mode(device), reuse_memory(device):
            sums = _BlockGradients(ctx, rows, weights, gradient)
            for number, at in enumerate(sums.blocks):
                sums.add(at, kept[number] if number < len(kept) else None)
            found = sums.finish()
        if torch.is_grad_enabled():  # create_graph=True
            operands = [gradient, rows, *(each for each in ctx.weights if each is not None)]
            found = [forbid_second_derivative(each, operands) for each in found]
        return None, *found


class _BlockGradients:
    """Gradients of the rows, added over the blocks, and of the weights, block by block.

    Attributes:
        blocks: Features of each block.
    """

    def __init__(
        self, ctx: Any, rows: Tensor, weights: Sequence[Tensor | None], gradient: Tensor
    ) -> None:
        layers: FeatureBlocks = ctx.layers
        _, needs_rows, *needed = ctx.needs_input_grad
        self._first, self._first_bias, self._last, _ = weights
        assert self._first is not None
        self.blocks = layers.blocks(len(self._first))
        self._middle, self._rows, self._gradient = layers.middle, rows, gradient
        dtype = find_sum_dtype(rows) if len(self.blocks) > 1 else rows.dtype
        self._of_rows = torch.zeros_like(rows, dtype=dtype) if needs_rows else None
        self._buffer = make_buffer(rows, self.blocks)
        known = [
            find_gradient(each, layers.accumulates) if need else None
            for each, need in zip(ctx.weights, needed, strict=True)
        ]
        self._is_added = [each is not None for each in known]
        self._places = [
            (torch.empty_like(each) if place is None else place) if need else None
            for each, place, need in zip(ctx.weights, known, needed, strict=True)
        ]
        if (of_bias := self._places[3]) is not None:
            self._put(3, of_bias, gradient.sum(0))

    def finish(self) -> list[Tensor | None]:
        """Return the gradients of rows and weights, unless they were added to those of before."""
        of_rows = None if self._of_rows is None else self._of_rows.to(self._rows.dtype)
        places = zip(self._places, self._is_added, strict=True)
        return [of_rows, *(None if is_added else place for place, is_added in places)]

    def _put(self, number: int, place: Tensor, value: Tensor) -> None:
        with adding_to_gradients:
            place.add_(value) if self._is_added[number] else place.copy_(value)

    def _multiply(self, number: int, place: Tensor, left: Tensor, right: Tensor) -> None:
        """Write a product into a part of a weight's gradient, or add it there."""
        with adding_to_gradients:
            if self._is_added[number]:
                place.addmm_(left.t(), right)
            else:
                torch.mm(left.t(), right, out=place)

    def add(self, at: slice, kept: Tensor | None) -> None:
        """Add the gradients of a block."""
        rows, gradient = self._rows, self._gradient
        first, last = self._first, self._last
        of_first, of_bias, of_last, _ = self._places
        assert first is not None and last is not None
        if kept is None:
            kept = enter(rows, first, self._first_bias, at, self._buffer)
        with torch.enable_grad():
            leaf = value = kept.detach().requires_grad_()
            for module in self._middle:
                value = module(spare_leaf(module, value))
        if of_last is not None:
            self._multiply(2, of_last[:, at], gradient, value.detach())
        if self._of_rows is None and of_first is None and of_bias is None:
            return
        edge = torch.autograd.graph.get_gradient_edge(value)
        del value  # its gradient lies in its memory, if no function has saved it
        of_entered = gradient @ last[:, at]
        if self._middle:
            (of_entered,) = torch.autograd.grad(edge, leaf, of_entered)
        if of_first is not None:
            self._multiply(0, of_first[at], of_entered, rows)
        if of_bias is not None:
            self._put(1, of_bias[at], of_entered.sum(0))
        if self._of_rows is not None:
            add_product(self._of_rows, of_entered, first[at])
