"""Bytes that the kernels ask of memory, as formulas of shapes and lists.

With E bytes of an element, and of each of B sequences and H query heads, which share KV heads in
groups of G:

    a step         5 [number and flag of a block], (d + dv) E of each token, 4 of the tile's bias or
                   8 of its shifts and deltas; where tokens are compared, 4 [end of queries] or 8
                   [range of keys] of the tile
    attend_queries, differentiate_queries
                   of a tile of queries, 8 [ends of its list], 8 of each query [its range], and a
                   step for each tile of keys of a listed block
                   forward: N (d + dv) E of q and out, N 4 of the log-sum-exp
                   backward: N (2 d + 2 dv) E of q, dq, out and dO, N 4; 8 of each query stored
    differentiate_keys
                   of a tile of keys and a query head, 8, and 4 of each key's bias; a step for each
                   tile of queries of a listed block; M 4 of the gradient of the bias
                   of a KV head, 4 of each key [its end of queries], 2 M (d + dv) E of k, v, dk, dv

Tiles are of whole blocks: they count tokens beyond the last one too, where d and dv are not by.
They are requests, before any cache.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from torch import Tensor

from penstock.attention._layout import Layout
from penstock.attention.triton import _kernels
from penstock.attention.triton._launch import BlockTile, choose_tile
from penstock.codegen import ByteCount

_WORD = 4  # bytes of a float32 and of an int32
_ENTRY = _WORD + 1  # of a listed block: its number, and whether it is partial
_ENDS = 2 * _WORD  # of a list


class _Listed(NamedTuple):
    """Listed blocks of all heads of a layout, and of these the tokens and the compared tiles."""

    blocks: int
    tokens: int
    compared: int


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class BlockBytes:
    """Bytes of the kernels of a call, by shapes; the lists of the layout are read.

    Attributes:
        q: Queries.
        k: Keys.
        v: Values.
        layout: The blocks.
        has_bias: Whether there is a bias.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    layout: Layout
    has_bias: bool

    def forward(self) -> ByteCount:
        """Return the bytes of `forward`."""
        num_queries, dim, value_dim = self._queries * self._heads, self.q.shape[3], self.v.shape[3]
        loaded = self._count_query_steps(_kernels.attend_queries)
        loaded += num_queries * dim * self._element
        stored = num_queries * (value_dim * self._element + _WORD)
        return _count(loaded, stored, 1)

    def backward(self) -> ByteCount:
        """Return the bytes of `backward`, of both kernels."""
        of_queries, of_keys = self.differentiate_queries(), self.differentiate_keys()
        loaded = of_queries.loaded_bytes + of_keys.loaded_bytes
        return _count(loaded, of_queries.stored_bytes + of_keys.stored_bytes, 2)

    def differentiate_queries(self) -> ByteCount:
        """Return the bytes of the kernel of that name."""
        num_queries, dim, value_dim = self._queries * self._heads, self.q.shape[3], self.v.shape[3]
        loaded = self._count_query_steps(_kernels.differentiate_queries)
        loaded += num_queries * ((dim + 2 * value_dim) * self._element + _WORD)
        padded = self._heads * self.layout.num_query_blocks * self.layout.block
        return _count(loaded, num_queries * dim * self._element + padded * 2 * _WORD, 1)

    def differentiate_keys(self) -> ByteCount:
        """Return the bytes of the kernel of that name."""
        layout, (batch, kv_heads, num_keys, _) = self.layout, self.k.shape
        tile = self._choose_tile(_kernels.differentiate_keys)
        listed = _count_list(
            layout.query_blocks,
            layout.is_partial_of_column,
            self._queries,
            layout.block,
            tile.queries,
        )
        rows = batch * kv_heads * num_keys * self._token_bytes
        padded = layout.num_key_blocks * layout.block
        loaded = rows + batch * kv_heads * padded * _WORD
        loaded += self._heads * (padded // tile.keys * _ENDS + padded * self.has_bias * _WORD)
        steps = layout.block // tile.queries * listed.blocks
        read = steps * (_ENTRY + 2 * _WORD * tile.queries) + listed.tokens * self._token_bytes
        read += listed.compared * tile.queries * 2 * _WORD
        loaded += self._copies * (layout.block // tile.keys) * read
        return _count(loaded, rows + self._heads * num_keys * self.has_bias * _WORD, 1)

    def _count_query_steps(self, kernel: object) -> int:
        """Return the bytes of lists, ranges, keys and values of a kernel over queries."""
        layout, tile = self.layout, self._choose_tile(kernel)
        listed = _count_list(
            layout.key_blocks, layout.is_partial, self.k.shape[2], layout.block, tile.keys
        )
        steps = layout.block // tile.keys * listed.blocks
        read = steps * (_ENTRY + self.has_bias * _WORD * tile.keys)
        read += listed.tokens * self._token_bytes + listed.compared * tile.keys * _WORD
        padded = layout.num_query_blocks * layout.block
        of_tiles = self._heads * (padded // tile.queries * _ENDS + padded * 2 * _WORD)
        return of_tiles + self._copies * (layout.block // tile.queries) * read

    def _choose_tile(self, kernel: object) -> BlockTile:
        return choose_tile(kernel, self.q, self.v, self.layout.block)

    @property
    def _queries(self) -> int:
        return self.q.shape[2]

    @property
    def _heads(self) -> int:
        """Query heads of all sequences."""
        return self.q.shape[0] * self.q.shape[1]

    @property
    def _copies(self) -> int:
        """Times that the lists of all heads of the layout are gone through."""
        return self._heads // self.layout.num_heads

    @property
    def _element(self) -> int:
        return self.q.element_size()

    @property
    def _token_bytes(self) -> int:
        """Bytes of a key and a value, and of a query and a gradient of the output."""
        return (self.q.shape[3] + self.v.shape[3]) * self._element


def _count_list(
    blocks: Tensor, is_partial: Tensor, num_tokens: int, block: int, tile: int
) -> _Listed:
    tokens = (num_tokens - blocks.long() * block).clamp(max=block)
    compared = (block // tile) * is_partial.bool()
    compared = compared.maximum(block // tile - tokens // tile)
    return _Listed(len(blocks), int(tokens.sum()), int(compared.sum()))


def _count(loaded: int, stored: int, num_launches: int) -> ByteCount:
    return ByteCount(
        loaded_bytes=loaded, stored_bytes=stored, atomic_bytes=0, num_launches=num_launches
    )
