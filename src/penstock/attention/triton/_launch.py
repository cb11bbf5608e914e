"""Tiles of the kernels, chosen from shapes alone, and their launches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from penstock.attention._csr import Ranges
from penstock.attention._operands import (
    BlockOperands,
    empty_gradient,
    empty_results,
    with_whole_rows,
)
from penstock.attention.triton import _kernels
from penstock.codegen import (
    Run,
    TritonLaunch,
    ceil_power,
    launch,
    product_precision,
    use_device,
)

_LEAST_WIDTH = 16  # of a matrix that tensor cores multiply


class TokenRows(NamedTuple):
    """A tensor `(batch, heads, tokens, ...)`, with strides in elements; the rest lies together."""

    pointer: Tensor
    batch: int
    head: int
    token: int


class BlockList(NamedTuple):
    """The blocks that are listed for each block of tokens, as in `Layout`."""

    offsets: Tensor
    blocks: Tensor
    is_partial: Tensor


class QueryTerms(NamedTuple):
    """Numbers by query, `(batch, heads, queries of whole blocks)`, that one kernel hands another.

    Attributes:
        shift: Log-sum-exp times log2(e), which is subtracted from scores; infinity where there is
            no key.
        delta: Sum of weights' gradients, which is subtracted from each.
    """

    shift: Tensor
    delta: Tensor


class Sizes(NamedTuple):
    """Constants of a kernel; each is a `tl.constexpr`.

    Attributes:
        queries: Tokens of a tile of queries, which divide a block.
        keys: Tokens of a tile of keys, which divide a block.
        block: Tokens of a block.
        dim: Elements of a query and a key.
        value_dim: Elements of a value.
        width: The power of two, at least 16, that holds `dim`.
        value_width: The same of `value_dim`.
        heads: Query heads.
        group: Query heads that share a KV head.
        layout_heads: Heads of the layout.
        has_bias: Whether there is a bias.
        precision: Of products, "ieee" or "tf32".
    """

    queries: Any
    keys: Any
    block: Any
    dim: Any
    value_dim: Any
    width: Any
    value_width: Any
    heads: Any
    group: Any
    layout_heads: Any
    has_bias: Any
    precision: Any


class BlockTile(NamedTuple):
    """Tokens of the tiles of a kernel, its warps, and its tiles on their way, on AMD in registers.

    There one is as many as there is room for.
    """

    queries: int
    keys: int
    num_warps: int
    num_stages: int


_LEAST_TILE = BlockTile(16, 16, 4, 1)
_QUERY_TILES = {
    2: {64: BlockTile(64, 64, 4, 3), 128: BlockTile(64, 64, 4, 3), 256: BlockTile(64, 32, 4, 2)},
    4: {64: BlockTile(32, 32, 4, 2), 128: BlockTile(32, 32, 4, 2), 256: BlockTile(16, 16, 4, 2)},
}
"""Of kernels over queries, by bytes of an element and by elements of a row, up to so many. Float32
is multiplied in registers on sm_90, so its tiles are smaller."""
_KEY_TILES = {
    2: {64: BlockTile(64, 64, 4, 2), 128: BlockTile(32, 64, 4, 2), 256: BlockTile(16, 32, 8, 2)},
    4: {64: BlockTile(32, 32, 4, 2), 128: BlockTile(16, 32, 4, 2), 256: BlockTile(16, 16, 4, 2)},
}
"""Of the kernel over keys, which has two sums."""


def choose_tile(kernel: Any, q: Tensor, v: Tensor, block: int) -> BlockTile:
    """Choose tiles such that no kernel spills registers on sm_90 or gfx942 up to 256 elements.

    Nothing depends on the device or the batch, so a sequence has the same bits on its own.
    """
    of_kernel = _KEY_TILES if kernel is _kernels.differentiate_keys else _QUERY_TILES
    dims = (q.shape[3], v.shape[3])
    widths = tuple(ceil_power(each, _LEAST_WIDTH) for each in dims)
    width = max(*widths, min(_QUERY_TILES[2]))
    is_masked = widths != dims
    if of_kernel is _KEY_TILES and is_masked and width < 256:
        width *= 2  # masks of elements take registers
    tile = of_kernel[q.element_size()].get(width, _LEAST_TILE)
    queries, keys = min(block, tile.queries), min(block, tile.keys)
    num_warps = tile.num_warps if keys == tile.keys else 4
    return BlockTile(queries, keys, num_warps, 1 if torch.version.hip else tile.num_stages)


def forward(given: BlockOperands, *, run: Run = launch) -> tuple[Tensor, Tensor]:
    """Return the attention and the log-sum-exp of its scores, as `_torch.forward` does.

    Operands are float16, bfloat16 or float32, and the bias float32. Lists of the layout that lead
    out of the operands are not noticed. `run` takes the launch.
    """
    out, lse = empty_results(given.q, given.v)
    with use_device(given.q.device):
        operands = (*_read(given), _operand(out), lse)
        run(_over_queries(_kernels.attend_queries, operands, given))
    return out, lse


def backward(
    dout: Tensor, given: BlockOperands, out: Tensor, lse: Tensor, *, run: Run = launch
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and the bias, as `_torch.backward` does.

    `run` takes the two launches; `given` is as `forward` got it, and it gave `out` and `lse`.
    """
    q, k, v, layout, bias, _ = given
    dq, dk, dv = (empty_gradient(each) for each in (q, k, v))
    dbias = None if bias is None else torch.empty(bias.shape, dtype=torch.float32, device=q.device)
    padded = layout.num_query_blocks * layout.block
    terms = QueryTerms(*lse.new_empty(2, *lse.shape[:2], padded))
    read = (*_read(given), _operand(dout))
    of_queries = (*read, _operand(out), lse, terms, _operand(dq))
    of_keys = (*read, terms, _operand(dk), _operand(dv), lse if dbias is None else dbias)
    with use_device(q.device):
        run(_over_queries(_kernels.differentiate_queries, of_queries, given))
        run(_over_keys(of_keys, given))
    return dq, dk, dv, dbias


def _over_queries(kernel: Any, operands: tuple[Any, ...], given: BlockOperands) -> TritonLaunch:
    """Return the launch of a kernel whose programs have a tile of queries each."""
    layout, tile = given.layout, choose_tile(kernel, given.q, given.v, given.layout.block)
    lists = BlockList(layout.row_offsets, layout.key_blocks, layout.is_partial)
    num_tiles = layout.num_query_blocks * (layout.block // tile.queries)
    return _make_launch(kernel, tile, given.q, num_tiles, (*operands, lists), given)


def _over_keys(operands: tuple[Any, ...], given: BlockOperands) -> TritonLaunch:
    """Return the launch of the kernel whose programs have a tile of keys each."""
    kernel, layout = _kernels.differentiate_keys, given.layout
    tile = choose_tile(kernel, given.q, given.v, layout.block)
    lists = BlockList(layout.column_offsets, layout.query_blocks, layout.is_partial_of_column)
    num_tiles = layout.num_key_blocks * (layout.block // tile.keys)
    return _make_launch(kernel, tile, given.k, num_tiles, (*operands, lists), given)


def _make_launch(
    kernel: Any,
    tile: BlockTile,
    of: Tensor,
    num_tiles: int,
    operands: tuple[Any, ...],
    given: BlockOperands,
) -> TritonLaunch:
    """Return a launch of programs for so many tiles of each head of `of`."""
    layout = given.layout
    ranges = Ranges(layout.first_key, layout.end_key, layout.end_query)
    rest = (ranges, given.q.shape[2], given.k.shape[2], float(given.scale), _sizes(tile, given))
    return TritonLaunch(
        kernel=kernel,
        grid=(of.shape[0] * of.shape[1] * num_tiles,),
        arguments=(*operands, *rest),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _sizes(tile: BlockTile, given: BlockOperands) -> Sizes:
    q, k, v, layout, bias, _ = given
    dim, value_dim = q.shape[3], v.shape[3]
    values = Sizes(
        queries=tile.queries,
        keys=tile.keys,
        block=layout.block,
        dim=dim,
        value_dim=value_dim,
        width=ceil_power(dim, _LEAST_WIDTH),
        value_width=ceil_power(value_dim, _LEAST_WIDTH),
        heads=q.shape[1],
        group=q.shape[1] // k.shape[1],
        layout_heads=layout.num_heads,
        has_bias=bias is not None,
        precision=product_precision(),
    )
    return Sizes(*(tl.constexpr(each) for each in values))


def _read(given: BlockOperands) -> tuple[Any, ...]:
    """Return queries, keys, values and the bias as kernels take them."""
    q, k, v, _, bias, _ = given
    return *(_operand(each) for each in (q, k, v)), _bias_operand(bias, q)


def _operand(tensor: Tensor) -> TokenRows:
    """Return a tensor with its strides, copied where the last dimension does not lie together."""
    tensor = with_whole_rows(tensor)
    return TokenRows(tensor, *tensor.stride()[:3])


def _bias_operand(bias: Tensor | None, q: Tensor) -> TokenRows:
    """Return the bias, or where there is none a tensor that is not read."""
    if bias is None:
        return TokenRows(q, 0, 0, 0)
    bias = bias if bias.stride(-1) in (0, 1) else bias.contiguous()
    return TokenRows(bias, *bias.stride())
