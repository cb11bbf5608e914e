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

from penstock.iomodel._chain import KEPT_SHARE
from penstock.iomodel._chain_checks import forbid_second_derivative
from penstock.iomodel._levels import ceil_div
from penstock.iomodel._modules import Module, find_in_place, find_parameters, is_plain_linear
from penstock.iomodel._row_chunks import WeightVersions, find_gradient, reuse_memory


def can_run_in_blocks(modules: Sequence[Module]) -> bool:
    """Return whether modules are two linear layers with functions of each element between them."""
    if len(modules) < 2 or any(find_in_place(each) is None for each in modules[1:-1]):
        return False
    first, last = modules[0], modules[-1]
    if not is_plain_linear(first) or not is_plain_linear(last):
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
        with reuse_memory(rows.device):
            if not torch.is_grad_enabled():
                return self.run(rows, 0)[0]
            weights = find_parameters([self.first, self.last])
            result: Any = _BlockedLayers.apply(self, rows, *weights)
            return result

    def blocks(self) -> list[slice]:
        """Return the features of each block."""
        width = self.first.out_features
        step = ceil_div(width, self.count)
        return [slice(at, min(at + step, width)) for at in range(0, width, step)]

    def make_buffer(self, rows: Tensor) -> Tensor:
        """Return room for one block of all rows."""
        return rows.new_empty(len(rows) * ceil_div(self.first.out_features, self.count))

    def enter(self, rows: Tensor, at: slice, buffer: Tensor | None) -> Tensor:
        """Return a block of the first product, in the buffer if there is one."""
        weight, bias = self.first.weight[at].t(), self.first.bias
        out = None if buffer is None else _view_block(buffer, rows, at)
        if bias is None:
            return torch.mm(rows, weight, out=out)
        return torch.addmm(bias[at], rows, weight, out=out)

    def run(self, rows: Tensor, num_kept: int) -> tuple[Tensor, list[Tensor]]:
        """Return the result, and the first product of some blocks; there are no gradients here."""
        result, kept, buffer = None, [], self.make_buffer(rows)
        for number, at in enumerate(self.blocks()):
            is_kept = number < num_kept
            value = self.enter(rows, at, None if is_kept else buffer)
            if is_kept:
                kept.append(value)
                value = _view_block(buffer, rows, at).copy_(value)
            for module in self.middle:
                in_place = find_in_place(module)
                assert in_place is not None
                in_place(value)
            weight = self.last.weight[:, at].t()
            if result is not None:
                result.addmm_(value, weight)
            elif self.last.bias is None:
                result = value @ weight
            else:
                result = torch.addmm(self.last.bias, value, weight)
        assert result is not None
        return result, kept


def _view_block(buffer: Tensor, rows: Tensor, at: slice) -> Tensor:
    width = at.stop - at.start
    return buffer[: len(rows) * width].view(len(rows), width)


class _BlockedLayers(torch.autograd.Function):
    """The layers, whose blocks are computed again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, layers: FeatureBlocks, rows: Tensor, *weights: Tensor) -> Tensor:
        """Run all blocks."""
        ctx.layers, ctx.weights = layers, WeightVersions(weights)
        is_step = any(ctx.needs_input_grad)
        num_kept = int(KEPT_SHARE * len(layers.blocks())) if is_step else 0
        result, kept = layers.run(rows, num_kept)
        ctx.save_for_backward(rows, *kept)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the rows and the weights."""
        (gradient,), (rows, *kept), weights = gradients, ctx.saved_tensors, ctx.weights.check()
        needed = {
            id(each): need for each, need in zip(weights, ctx.needs_input_grad[2:], strict=True)
        }
        with torch.no_grad(), reuse_memory(gradient.device):
            sums = _BlockGradients(ctx.layers, rows, gradient, needed, ctx.needs_input_grad[1])
            for number, at in enumerate(ctx.layers.blocks()):
                sums.add(at, kept[number] if number < len(kept) else None)
            found = [sums.of_rows, *(sums.returned(each) for each in weights)]
        if torch.is_grad_enabled():  # create_graph=True
            found = [forbid_second_derivative(each, (rows, *weights)) for each in found]
        return None, *found


class _BlockGradients:
    """Gradients of the rows, added over the blocks, and of the weights, block by block.

    Attributes:
        of_rows: Gradient of the rows; None where it is not needed.
    """

    def __init__(
        self,
        layers: FeatureBlocks,
        rows: Tensor,
        gradient: Tensor,
        needed: dict[int, bool],
        needs_rows: bool,
    ) -> None:
        self._layers, self._rows, self._gradient = layers, rows, gradient
        self.of_rows = torch.zeros_like(rows) if needs_rows else None
        self._buffer = layers.make_buffer(rows)
        self._places: dict[int, Tensor] = {}
        self._added: set[int] = set()  # to gradients that were there before
        for layer in (layers.first, layers.last):
            for each in (layer.weight, layer.bias):
                if each is None or not needed.get(id(each)):
                    continue
                known = find_gradient(each, layers.accumulates)
                self._added |= set() if known is None else {id(each)}
                self._places[id(each)] = torch.empty_like(each) if known is None else known
        bias = self._find(layers.last.bias)
        if bias is not None:
            self._put(layers.last.bias, bias, gradient.sum(0))

    def _find(self, weight: Tensor | None) -> Tensor | None:
        return self._places.get(id(weight))

    def _put(self, weight: Tensor, place: Tensor, value: Tensor) -> None:
        place.add_(value) if id(weight) in self._added else place.copy_(value)

    def returned(self, weight: Tensor) -> Tensor | None:
        """Return the gradient of a weight, unless it was added to the one that it has."""
        return None if id(weight) in self._added else self._find(weight)

    def _multiply(self, weight: Tensor, place: Tensor, left: Tensor, right: Tensor) -> None:
        """Write a product into a part of a weight's gradient, or add it there."""
        if id(weight) in self._added:
            place.addmm_(left.t(), right)
        else:
            torch.mm(left.t(), right, out=place)

    def add(self, at: slice, kept: Tensor | None) -> None:
        """Add the gradients of a block."""
        layers, rows, gradient = self._layers, self._rows, self._gradient
        first, last = layers.first, layers.last
        entered = layers.enter(rows, at, self._buffer) if kept is None else kept
        with torch.enable_grad():
            leaf = value = entered.detach().requires_grad_()
            for module in layers.middle:
                value = module(value)
        of_last = self._find(last.weight)
        if of_last is not None:
            self._multiply(last.weight, of_last[:, at], gradient, value.detach())
        if self.of_rows is None and not {id(first.weight), id(first.bias)} & self._places.keys():
            return
        edge = torch.autograd.graph.get_gradient_edge(value)
        del value  # its gradient lies in its memory, if no function has saved it
        of_entered = gradient @ last.weight[:, at]
        if layers.middle:
            (of_entered,) = torch.autograd.grad(edge, leaf, of_entered)
        of_first, of_bias = self._find(first.weight), self._find(first.bias)
        if of_first is not None:
            self._multiply(first.weight, of_first[at], of_entered, rows)
        if of_bias is not None:
            self._put(first.bias, of_bias[at], of_entered.sum(0))
        if self.of_rows is not None:
            self.of_rows.addmm_(of_entered, first.weight[at])
