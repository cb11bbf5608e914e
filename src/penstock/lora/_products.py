"""Products of a linear layer with adapters, forward and backward, by torch's library.

With m the dropout mask, c = scaling / (1 - dropout), and for each adapter its own rows of x, y:

    y  = x W^T + b + c S B^T         S  = (m * x) A^T
    dx = dy W + m * (dS A)           dS = c dy B
    dA = dS^T (m * x)                dB = c dy^T S

The layer's product is one for all rows: to tile it would repack W for every tile. The parts of
rank r follow for each adapter, tile by tile of its rows, so that no more than a tile of a masked,
gathered or converted matrix is ever stored. An adapter's products have its own rows only, in the
same tiles wherever its rows lie: their bits do not depend on its neighbours.

Sums over rows are those of one tile after the other: no atomics. Where the adapter's dtype has
fewer than 32 bits they are in float32, and rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

from penstock.lora._dropout import TILE_ROWS, Mask, keep

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SHORT = (torch.float16, torch.bfloat16)


def is_autocasting(device: torch.device) -> bool:
    """Return whether autocast is on for a device; the meta device has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def without_autocast(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Run a function with the dtypes of its operands, where autocast would choose others."""

    @functools.wraps(function)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        device = next(each for each in args if isinstance(each, torch.Tensor)).device
        if not is_autocasting(device):
            return function(*args, **kwargs)
        with torch.autocast(device.type, enabled=False):
            return function(*args, **kwargs)

    return run


@dataclass(frozen=True, kw_only=True)
class AdapterUse:
    """An adapter with its rows of one batch.

    Attributes:
        down: The matrix A, `(r, K)`.
        up: The matrix B, `(N, r)`.
        factor: The factor c.
        mask: The dropout mask; None without dropout.
        start: First row of the batch, where the rows lie together.
        num_rows: Rows.
        index: Numbers of the rows where they do not lie together.
    """

    down: torch.Tensor
    up: torch.Tensor
    factor: float
    mask: Mask | None
    start: int
    num_rows: int
    index: torch.Tensor | None

    def tiles(self) -> Iterator[slice]:
        """Yield the adapter's rows by tiles, as places among them."""
        for first in range(0, self.num_rows, TILE_ROWS):
            yield slice(first, min(first + TILE_ROWS, self.num_rows))

    def rows_of(self, matrix: torch.Tensor, tile: slice) -> torch.Tensor:
        """Return a tile of the adapter's rows of a matrix: a view where they lie together."""
        if self.index is not None:
            return matrix.index_select(0, self.index[tile])
        if tile.stop - tile.start == matrix.shape[0]:
            return matrix
        return matrix[self.start + tile.start : self.start + tile.stop]

    def new_tile(self) -> torch.Tensor:
        """Return memory for a tile of x, in the dtype of the adapter's matrices."""
        return self.down.new_empty(min(TILE_ROWS, self.num_rows), self.down.shape[1])

    def copies(self, x: torch.Tensor) -> bool:
        """Return whether a tile of x is gathered or converted, and so may be overwritten."""
        return self.index is not None or x.dtype != self.down.dtype

    def inputs_of(self, x: torch.Tensor, tile: slice, memory: torch.Tensor | None) -> torch.Tensor:
        """Return a tile of the adapter's input m * x, in the dtype of its matrices.

        Args:
            x: Input, `(M, K)`.
            tile: Place of the tile among the adapter's rows.
            memory: Result of `new_tile`; needed where x is masked and not copied.
        """
        rows = self.rows_of(x, tile).to(self.down.dtype)
        if self.mask is None:
            return rows
        out = rows if memory is None or self.copies(x) else memory[: len(rows)]
        assert out is not rows or self.copies(x)
        return self.mask.select(rows, tile.start, out)


@without_autocast
def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the product of two matrices in their dtype."""
    return torch.mm(left, right)


@without_autocast
def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    total: torch.Tensor | None,
    uses: list[AdapterUse],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the layer's output and what the backward pass needs beside its input.

    Args:
        x: Input, `(M, K)`.
        weight: The matrix W, `(N, K)`; None where `total` is given.
        bias: The vector b, `(N,)`.
        total: The layer's own output, `(M, N)`, to which the adapters add.
        uses: The adapters with their rows.

    Returns:
        The output y, `(M, N)`, and the matrices S of all adapters in one vector.
    """
    if weight is None:
        assert total is not None
        y = total.clone()
    elif bias is None:
        y = torch.mm(x, weight.to(x.dtype).t())
    else:
        y = torch.addmm(bias.to(x.dtype), x, weight.to(x.dtype).t())
    hidden = make_hidden(x, uses)
    for use, s in zip(uses, split_hidden(hidden, uses), strict=True):
        memory = None if use.mask is None or use.copies(x) else use.new_tile()
        for tile in use.tiles():
            part = s[tile]
            torch.mm(use.inputs_of(x, tile, memory), use.down.t(), out=part)
            _add_product(y, use, tile, part)
    return y, hidden


def make_hidden(x: torch.Tensor, uses: list[AdapterUse]) -> torch.Tensor:
    """Return memory for the matrices S of all adapters, one after the other."""
    size = sum(use.num_rows * use.down.shape[0] for use in uses)
    return x.new_empty(size, dtype=uses[0].down.dtype if uses else x.dtype)


def split_hidden(hidden: torch.Tensor, uses: list[AdapterUse]) -> list[torch.Tensor]:
    """Return the matrix S of each adapter, `(num_rows, r)`, as views."""
    if len(uses) == 1:
        return [hidden.view(-1, uses[0].down.shape[0])]
    sizes = [use.num_rows * use.down.shape[0] for use in uses]
    parts = hidden.split_with_sizes(sizes) if uses else ()
    return [part.view(-1, use.down.shape[0]) for part, use in zip(parts, uses, strict=True)]


def _add_product(y: torch.Tensor, use: AdapterUse, tile: slice, s: torch.Tensor) -> None:
    """Add c S B^T to a tile of the adapter's rows of y."""
    rows = use.rows_of(y, tile)
    if rows.dtype == s.dtype:
        rows.addmm_(s, use.up.t(), alpha=use.factor)
    else:  # rounded once, as the sum of both dtypes
        rows.add_(torch.mm(s, use.up.t()), alpha=use.factor)
    if use.index is not None:
        y.index_copy_(0, use.index[tile], rows)


@without_autocast
def compose(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    total: torch.Tensor | None,
    uses: list[AdapterUse],
) -> torch.Tensor:
    """Return the output as `forward` does, by operators that any transformation of torch knows.

    It keeps the masked input. Forward-mode derivatives, `torch.func` and gradients of gradients
    take this way.
    """
    y = total if weight is None else torch.nn.functional.linear(x, weight.to(x.dtype))
    assert y is not None
    if bias is not None:
        y = y + bias.to(y.dtype)
    for use in uses:
        index = use.index
        if index is None:
            index = torch.arange(use.start, use.start + use.num_rows, device=x.device)
        inputs = x.index_select(0, index).to(use.down.dtype)
        if use.mask is not None:
            kept = keep(
                use.mask.seed, 0, inputs.shape[0], inputs.shape[1], use.mask.probability, x.device
            )
            inputs = torch.where(kept, inputs, 0)
        product = inputs @ use.down.t() @ use.up.t() * use.factor
        y = y.index_copy(0, index, (y.index_select(0, index) + product).to(y.dtype))
    return y


@dataclass(frozen=True)
class Gradients:
    """Gradients of one call: of x, and of each adapter's down and up; None where not asked for."""

    x: torch.Tensor | None
    downs: list[torch.Tensor | None]
    ups: list[torch.Tensor | None]


@without_autocast
def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    hidden: torch.Tensor,
    uses: list[AdapterUse],
    *,
    needs_x: bool,
    needs_down: list[bool],
    needs_up: list[bool],
) -> Gradients:
    """Return the gradients of `forward`.

    Args:
        dy: Gradient of the output, `(M, N)`.
        x: Input, `(M, K)`.
        weight: The matrix W; None where the layer's own output was given.
        hidden: The second result of `forward`.
        uses: The adapters with their rows.
        needs_x: Whether the gradient of x is asked for.
        needs_down: By adapter, whether dA is.
        needs_up: By adapter, whether dB is.
    """
    dx = None
    if needs_x:
        dx = x.new_zeros(x.shape) if weight is None else torch.mm(dy, weight.to(dy.dtype))
    downs: list[torch.Tensor | None] = []
    ups: list[torch.Tensor | None] = []
    for use, s, has_down, has_up in zip(
        uses, split_hidden(hidden, uses), needs_down, needs_up, strict=True
    ):
        down, up = _new_sum(use.down, has_down), _new_sum(use.up, has_up)
        if dx is None:
            buffered = has_down and use.mask is not None and not use.copies(x)
        else:
            buffered = use.mask is not None or dx.dtype != use.down.dtype
        memory = use.new_tile() if buffered else None
        for tile in use.tiles():
            rows = use.rows_of(dy, tile).to(s.dtype)
            if up is not None:
                _add_to_sum(up, rows.t(), s[tile], use.factor)
            if down is None and dx is None:
                continue
            ds = torch.mm(rows, use.up).mul_(use.factor)
            if down is not None:
                _add_to_sum(down, ds.t(), use.inputs_of(x, tile, memory), 1.0)
            if dx is not None:
                _add_input_gradient(dx, use, tile, ds, memory)
        downs.append(None if down is None else down.to(use.down.dtype))
        ups.append(None if up is None else up.to(use.up.dtype))
    return Gradients(dx, downs, ups)


def _new_sum(matrix: torch.Tensor, needed: bool) -> torch.Tensor | None:
    """Return zeros to which a matrix's gradient is added tile by tile; None if not needed."""
    if not needed:
        return None
    return matrix.new_zeros(
        matrix.shape, dtype=torch.float32 if matrix.dtype in _SHORT else matrix.dtype
    )


def _add_to_sum(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, by: float) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right, alpha=by)
    else:
        total.add_(torch.mm(left, right), alpha=by)


def _add_input_gradient(
    dx: torch.Tensor, use: AdapterUse, tile: slice, ds: torch.Tensor, memory: torch.Tensor | None
) -> None:
    """Add m * (dS A) to a tile of dx, by way of `memory` where it is masked or converted."""
    total = use.rows_of(dx, tile)
    if memory is None:
        total.addmm_(ds, use.down)
    else:
        product = torch.mm(ds, use.down, out=memory[: len(ds)])
        if use.mask is None:
            total.add_(product)
        elif total.dtype == product.dtype:
            use.mask.add_selected(total, product, tile.start)
        else:
            total.add_(use.mask.select(product, tile.start, product))
    if use.index is not None:
        dx.index_copy_(0, use.index[tile], total)
