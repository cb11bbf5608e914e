"""Products of a linear layer with adapters, forward and backward, by torch's library.

With m the dropout mask, c = scaling / (1 - dropout), and for each adapter its own rows of x, y:

    y  = x W^T + b + c S B^T         S  = (m * x) A^T
    dx = dy W + m * (dS A)           dS = c dy B
    dA = dS^T (m * x)                dB = c dy^T S

The layer's product is one for all rows: to tile it would repack W for every tile. The parts of
rank r follow for each adapter, tile by tile of rows where the input is masked or gathered, so that
no more than a tile of it is ever stored. An adapter's products have its own rows only: their bits
do not depend on its neighbours.

Sums over rows are those of one thread after the other in a fixed order: no atomics.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.lora._dropout import TILE_ROWS, Mask, keep


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

    def rows_of(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the adapter's rows of a matrix: a view where they lie together."""
        if self.index is not None:
            return matrix.index_select(0, self.index)
        return matrix.narrow(0, self.start, self.num_rows)

    def tiles(self, x: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the input m * x of the adapter by tiles, each with its place among the rows."""
        dtype = self.down.dtype
        if self.mask is None and self.index is None and x.dtype == dtype:
            yield slice(0, self.num_rows), self.rows_of(x)
            return
        memory = None
        for first in range(0, self.num_rows, TILE_ROWS):
            tile = slice(first, min(first + TILE_ROWS, self.num_rows))
            if self.index is not None:
                rows = x.index_select(0, self.index[tile])
            else:
                rows = x[self.start + tile.start : self.start + tile.stop]
            rows = rows.to(dtype)
            if self.mask is not None:
                if memory is None:
                    memory = rows.new_empty(rows.shape)
                rows = self.mask.select(rows, first, memory[: len(rows)])
            yield tile, rows


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
        for tile, rows in use.tiles(x):
            torch.mm(rows, use.down.t(), out=s[tile])
        _add_product(y, use, s)
    return y, hidden


def make_hidden(x: torch.Tensor, uses: list[AdapterUse]) -> torch.Tensor:
    """Return memory for the matrices S of all adapters, one after the other."""
    size = sum(use.num_rows * use.down.shape[0] for use in uses)
    return x.new_empty(size, dtype=uses[0].down.dtype if uses else x.dtype)


def split_hidden(hidden: torch.Tensor, uses: list[AdapterUse]) -> list[torch.Tensor]:
    """Return the matrix S of each adapter, `(num_rows, r)`, as views."""
    sizes = [use.num_rows * use.down.shape[0] for use in uses]
    parts = hidden.split(sizes) if uses else ()
    return [part.view(-1, use.down.shape[0]) for part, use in zip(parts, uses, strict=True)]


def _add_product(y: torch.Tensor, use: AdapterUse, s: torch.Tensor) -> None:
    """Add c S B^T to the adapter's rows of y."""
    if not use.num_rows:
        return
    if use.index is None and y.dtype == s.dtype:
        use.rows_of(y).addmm_(s, use.up.t(), alpha=use.factor)
        return
    product = torch.mm(s, use.up.t()).mul_(use.factor)
    if use.index is None:
        use.rows_of(y).add_(product)  # rounded once, as the sum of both dtypes
    else:
        y.index_copy_(0, use.index, (use.rows_of(y) + product).to(y.dtype))


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
        dx = torch.zeros_like(x) if weight is None else torch.mm(dy, weight.to(dy.dtype))
    downs: list[torch.Tensor | None] = []
    ups: list[torch.Tensor | None] = []
    for use, s, has_down, has_up in zip(
        uses, split_hidden(hidden, uses), needs_down, needs_up, strict=True
    ):
        rows = use.rows_of(dy).to(s.dtype)
        ups.append(torch.mm(rows.t(), s).mul_(use.factor) if has_up else None)
        downs.append(torch.zeros_like(use.down) if has_down else None)
        if has_down or dx is not None:
            ds = torch.mm(rows, use.up).mul_(use.factor)
            if (down := downs[-1]) is not None:
                for tile, inputs in use.tiles(x):
                    down.addmm_(ds[tile].t(), inputs)
            if dx is not None:
                _add_input_gradient(dx, use, ds)
    return Gradients(dx, downs, ups)


def _add_input_gradient(dx: torch.Tensor, use: AdapterUse, ds: torch.Tensor) -> None:
    """Add m * (dS A) to the adapter's rows of dx."""
    if not use.num_rows:
        return
    if use.mask is None and use.index is None and dx.dtype == ds.dtype:
        use.rows_of(dx).addmm_(ds, use.down)
        return
    memory = ds.new_empty(min(TILE_ROWS, use.num_rows), dx.shape[1])
    for first in range(0, use.num_rows, TILE_ROWS):
        tile = slice(first, min(first + TILE_ROWS, use.num_rows))
        product = torch.mm(ds[tile], use.down, out=memory[: tile.stop - first])
        if use.index is None:
            total = dx[use.start + first : use.start + tile.stop]
        else:
            total = dx.index_select(0, use.index[tile])
        if use.mask is None:
            total.add_(product)
        elif total.dtype == product.dtype:
            use.mask.add_selected(total, product, first)
        else:
            total.add_(use.mask.select(product, first, product))
        if use.index is not None:
            dx.index_copy_(0, use.index[tile], total)
