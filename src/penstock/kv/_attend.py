"""Attention of queries over a layer of a pool.

Steps of few tokens read records where they lie: resident ones in their slots, the tail, missing
ones in a buffer that they pass through. Long calls gather blocks group by group. Both add up
partial results in the order of the tokens, so that memory is the budget and not the context.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.errors import PenstockError
from penstock.kv._blocks import LayerBlocks
from penstock.kv._partial import ScoreRule, attend, merge, nothing
from penstock.kv._pool import BlockPool
from penstock.kv._resident import find_range, find_tails
from penstock.kv._selector import name_of
from penstock.kv._visibility import Visibility

FEW_TOKENS = 16
"""The most queries of a step that reads records where they lie."""
_GROUP_BYTES = 4 * 2**20  # of blocks that a long call gathers at once

_QUERIES = 1024  # that visibility is evaluated for at once

_Part = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, eq=False)
class _LayerCall:
    """The arguments of `attend_pool`, by their names."""

    pool: BlockPool
    layer: int
    query: torch.Tensor
    rule: ScoreRule
    visibility: Visibility
    first_token: int

    @property
    def blocks(self) -> LayerBlocks:
        """The layer's blocks."""
        return self.pool.blocks(self.layer)

    def attend(self, keys: torch.Tensor, values: torch.Tensor, first: int) -> _Part:
        """Return the part of keys and values that are there as tensors, from token `first` on."""
        return attend(self.query, keys, values, self.rule, self.visibility, first)


def attend_pool(
    pool: BlockPool,
    layer: int,
    query: torch.Tensor,
    rule: ScoreRule,
    visibility: Visibility,
    *,
    first_token: int = 0,
    fresh: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """Return the attention of queries over the tokens of a layer.

    Args:
        pool: The pool.
        layer: Number of the layer.
        query: `(B, Hq, n, key_dim)`; queries of H heads of keys are beside each other.
        rule: Scores from products.
        visibility: Tokens that each query sees.
        first_token: Tokens before it are not looked at.
        fresh: Keys and values of further tokens that the pool does not hold yet,
            `(B, H, m, dim)`; they follow its own.

    Returns:
        `(B, Hq, n, value_dim)` in the dtype of `query`; 0 for queries that see nothing.

    Raises:
        StoreReadError: The file could not be read.
        PenstockError: The pool is closed, or lost tokens.
    """
    pool.check_usable()
    call = _LayerCall(pool, layer, query, rule, visibility, first_token)
    with pool.lock, pool.platform.use():
        if fresh is None and query.shape[2] <= FEW_TOKENS:
            part = _attend_few(call)
        else:
            part = _attend_many(call, fresh)
        if part is None:
            value_dim = pool.layout(layer).value_dim if fresh is None else fresh[1].shape[3]
            part = nothing(query, value_dim)
        out = rule.weigh_down(*part).to(query.dtype)
    return pool.platform.hand_over(out)


def _attend_few(call: _LayerCall) -> _Part | None:
    pool, layer, state = call.pool, call.layer, call.blocks
    selector: Any = pool.selector_of(layer)
    # A user's selector may have `note` or not, behind one that always has.
    is_noted = bool(getattr(selector, "has_note", hasattr(selector, "note")))
    step = _Step(call, state, is_noted)
    chosen = None if selector is None else _select(call, selector)
    if chosen is None and not is_noted and step.reads_all:
        resident = pool.resident.find_all(state, layer, step.first_block)
        if resident is not None and resident.addresses is not None:
            step.attention.add(resident.addresses, resident.counts, *step.all_operands())
            return step.result
    if chosen is not None and step.is_unmasked:
        operands = pool.resident.find_chosen(state, layer, step.first_block, chosen)
        if operands is not None:
            block_lse = step.attention.add(*operands, with_block_lse=is_noted)
            if selector is not None and block_lse is not None:
                selector.note(layer, chosen, step.sum_shares(block_lse[..., :-1], sees_some=True))
            return step.result
    is_read = step.find_read(chosen)
    c, b, h = np.nonzero(is_read.transpose(2, 0, 1))  # block after block
    pages = state.table[b, c + step.first_block]
    is_repeated = selector is None and call.first_token == 0
    is_shared = state.batch_size > 1 and pool.is_shared(pages)
    stream = pool.stream(layer, pages, h, is_repeated=is_repeated)
    # It holds slots and buffers, and a traceback of an error here may live on.
    with contextlib.closing(stream):
        groups = stream
        if is_shared or step.num_rows > pool.platform.most_rows(state.layout):
            groups = pool.platform.localize(stream, state.layout.record_bytes)
        for items, addresses in groups:
            step.attend(b[items], h[items], c[items], addresses)
    if not step.has_tail and state.num_tail:
        none = np.zeros(0, dtype=np.int64)
        step.attend(none, none, none, none)
    if selector is not None and is_noted and is_read.any():
        selector.note(layer, *step.shares(is_read))
    return step.result


def _select(call: _LayerCall, selector: Any) -> torch.Tensor | None:
    """Return what a selector chooses."""
    pool, layer = call.pool, call.layer
    num_tokens = pool.length(layer)
    chosen = selector.select(call.query, layer, pool)
    if pool.length(layer) != num_tokens:
        raise PenstockError(
            f"selector {name_of(selector)!r} changed layer {layer} of the pool, from {num_tokens} "
            f"tokens to {pool.length(layer)}, while it was asked for blocks; let it read the pool "
            "only, and reset() that"
        )
    return chosen


class _Step:
    """One step of few tokens, over columns: a column is a block number, from `first_block` on.

    Attributes:
        attention: The result so far.
        num_rows: Rows of queries that share a KV head.
        first_block: Number of the first column.
        has_tail: Whether the tail was attended to.
        sees_all: Whether each query sees all tokens of the call, which begin in the first column.
    """

    def __init__(self, call: _LayerCall, state: LayerBlocks, is_noted: bool) -> None:
        layout, query, rule = state.layout, call.query, call.rule
        T = layout.block_tokens
        self._platform, self._state, self._is_noted = call.pool.platform, state, is_noted
        self._rule = rule
        self._shape = (state.batch_size, layout.num_heads)
        self._query_shape = query.shape[:3]
        self.attention = self._platform.attention(query.detach(), layout, rule.scale, rule.softcap)
        self.num_rows = query.shape[1] // layout.num_heads * query.shape[2]
        self.has_tail = False
        self._block_lse: list[tuple[int, torch.Tensor]] = []  # with the first column
        self.first_block = call.first_token // T
        self._num_columns = state.num_blocks - self.first_block
        start = self.first_block * T
        seen = call.visibility.of_call(query.shape[2], call.first_token, state.num_tokens)
        self.sees_all = seen is None
        width = (self._num_columns + 1) * T
        seen = _hide_before(seen, call.first_token - start, width, query.device)
        bias = rule.bias
        if bias is not None:
            before = rule.bias_start - start
            bias = (
                torch.nn.functional.pad(bias, (before, 0)) if before >= 0 else bias[..., -before:]
            )
        if seen is not None and seen.shape[1] > 1:  # differs by query head: the bias hides it
            hidden = query.new_zeros(seen.shape, dtype=torch.float32)
            hidden.masked_fill_(~seen, -math.inf)
            bias, seen = hidden if bias is None else bias + hidden, seen.any(1, keepdim=True)
        # (1 or B, 1 or Hq, 1 or n, columns * T): the last column is the tail.
        self._seen = None if seen is None else self._pad(seen)
        self._bias = None if bias is None else self._pad(bias)
        self._visible, self._added = self._expand(self._seen), self._expand(self._bias)

    @property
    def result(self) -> _Part | None:
        """The result, and its log-sum-exp; None where nothing was attended to."""
        attention = self.attention
        return (attention.out, attention.lse) if attention.has_parts else None

    @property
    def is_unmasked(self) -> bool:
        """True where each query sees each token, with nothing added to the scores."""
        return self._seen is None and self._bias is None

    @property
    def reads_all(self) -> bool:
        """True where each column has tokens that are seen, of every sequence."""
        return self.sees_all or self._seen is None or bool(self._columns_seen(self._seen).all())

    def all_operands(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return visibility and bias of all columns and the tail."""
        return self._visible, self._added

    def _pad(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return numbers of tokens for whole columns."""
        missing = (self._num_columns + 1) * self._state.layout.block_tokens - tensor.shape[-1]
        return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor

    def _expand(self, tensor: torch.Tensor | None) -> torch.Tensor | None:
        """Return numbers for every sequence, head and query."""
        if tensor is None:
            return None
        B, Hq, n = self._query_shape
        return tensor.expand(B, self._shape[1] if tensor.dtype == torch.bool else Hq, n, -1)

    def _columns_seen(self, seen: torch.Tensor) -> torch.Tensor:
        """Return which columns have tokens that are seen, `(1 or B, 1, columns)`; no tail."""
        by_column = seen.unflatten(-1, (-1, self._state.layout.block_tokens))
        return by_column[..., :-1, :].any(-1).any(2)

    def find_read(self, chosen: torch.Tensor | None) -> np.ndarray:
        """Return which columns are read for each sequence and head, bool `(B, H, columns)`."""
        B, H = self._shape
        num_blocks = self._state.num_blocks
        if chosen is None:
            is_read = np.ones((B, H, self._num_columns), dtype=bool)
        else:
            blocks = self._platform.to_host(chosen)
            if blocks.shape[:2] != (B, H) or blocks.max(initial=-1) >= num_blocks:
                raise ValueError(
                    f"select must return blocks of [0, {num_blocks}) in the shape ({B}, {H}, k); "
                    f"got the shape {blocks.shape} and up to {blocks.max(initial=-1)}"
                )
            all_blocks = np.zeros((B, H, num_blocks + 1), dtype=bool)
            np.put_along_axis(all_blocks, blocks, True, axis=2)  # -1 is the last, cut off
            is_read = all_blocks[:, :, self.first_block : num_blocks]
        is_read = is_read & (self._state.table[:, None, self.first_block :] >= 0)
        if self._seen is not None and not self.sees_all:
            is_read &= self._platform.to_host(self._columns_seen(self._seen))
        return is_read

    def attend(
        self,
        b: np.ndarray,
        h: np.ndarray,
        c: np.ndarray,
        addresses: np.ndarray,
    ) -> None:
        """Add the part of some records; the tail belongs to the first part."""
        state, layout = self._state, self._state.layout
        first, last = find_range(c)
        with_tail = not self.has_tail and state.num_tail > 0
        shape = (*self._shape, last - first + with_tail)
        table, counts = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int32)
        places = b, h, c - first
        table[places] = addresses
        counts[places] = layout.block_tokens
        masks, first_token = (self._visible, self._added), first * layout.block_tokens
        if with_tail:
            table[:, :, -1] = find_tails(state)
            counts[:, :, -1] = state.num_tail
            self.has_tail = True
            if last < self._num_columns:
                masks, first_token = self._with_tail(masks, first, last), 0
        block_lse = self.attention.add(
            self._platform.from_host(table),
            self._platform.from_host(counts),
            *masks,
            first_token=first_token,
            with_block_lse=self._is_noted,
        )
        if block_lse is not None:
            self._block_lse.append((first, block_lse[..., : last - first]))

    def _with_tail(
        self, masks: tuple[torch.Tensor | None, ...], first: int, last: int
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the tokens of the columns `[first, last)`, and the tail's."""
        T = self._state.layout.block_tokens
        return tuple(
            None
            if each is None
            else torch.cat([each[..., first * T : last * T], each[..., -T:]], dim=-1)
            for each in masks
        )

    def sum_shares(self, block_lse: torch.Tensor, *, sees_some: bool = False) -> torch.Tensor:
        """Return the shares of records `(B, Hq, n, k)` of the weights, by KV head, `(B, H, k)`.

        `sees_some` says that each query is known to see a token.
        """
        lse = base = self.attention.lse
        if not sees_some:
            base = lse.masked_fill(lse == -math.inf, 0.0)
        share = self._rule.weigh_down((block_lse - base.unsqueeze(-1)).exp_(), lse)
        return share.view(*self._shape, -1, share.shape[-1]).sum(2)

    def shares(self, is_read: np.ndarray) -> _Part:
        """Return the blocks that were read, -1 elsewhere, and their shares of the weights."""
        weights = self.attention.lse.new_zeros(is_read.shape)
        for first, block_lse in self._block_lse:
            share = self.sum_shares(block_lse)
            weights[:, :, first : first + share.shape[2]] += share
        blocks = np.where(is_read, np.arange(is_read.shape[2]) + self.first_block, -1)
        used = is_read.any((0, 1))
        columns = self._platform.from_host(np.flatnonzero(used))
        return self._platform.from_host(blocks[:, :, used]), weights.index_select(2, columns)


def _hide_before(
    seen: torch.Tensor | None, num_hidden: int, num_tokens: int, device: torch.device
) -> torch.Tensor | None:
    """Return visibility of tokens, the first of which `seen` leaves out; None: it sees the rest."""
    if not num_hidden:
        return seen
    if seen is not None:
        return torch.nn.functional.pad(seen, (num_hidden, 0))
    seen = torch.ones((1, 1, 1, num_tokens), dtype=torch.bool, device=device)
    seen[..., :num_hidden] = False
    return seen


def _attend_many(call: _LayerCall, fresh: tuple[torch.Tensor, torch.Tensor] | None) -> _Part | None:
    whole: list[_Part] = []
    pool = call.pool
    num_tokens = pool.length(call.layer)
    if num_tokens:
        state = call.blocks
        for first, keys, values in _gather(call):
            whole = [merge([*whole, call.attend(keys, values, first)])]
        if state.num_tail:
            keys, values = state.tail_parts
            first = state.num_blocks * pool.block_tokens
            skipped = max(0, call.first_token - first)
            if skipped < state.num_tail:
                some = slice(skipped, state.num_tail)
                part = call.attend(keys[:, :, some], values[:, :, some], first + skipped)
                whole = [merge([*whole, part])]
    if fresh is not None:
        whole = [merge([*whole, call.attend(*fresh, num_tokens)])]
    return whole[0] if whole else None


def _gather(call: _LayerCall) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Yield full blocks that are seen, as their first token, keys and values, group by group."""
    pool, layer, state, first_token = call.pool, call.layer, call.blocks, call.first_token
    layout, T = state.layout, pool.block_tokens
    B, H = state.batch_size, layout.num_heads
    pool.make_chunks(B * layout.page_bytes)
    group_bytes = pool.platform.chunk_bytes or _GROUP_BYTES
    num_columns = max(1, group_bytes // (B * layout.page_bytes))
    starts = range(first_token // T, state.num_blocks, num_columns)
    groups = [range(first, min(first + num_columns, state.num_blocks)) for first in starts]
    seen = [group for group in groups if _is_seen(call, group.start * T, group.stop * T)]
    columns = np.array([c for group in seen for c in group], dtype=np.int64)
    c, b, h = (axis.ravel() for axis in np.indices((len(columns), B, H)))
    ends = np.cumsum([len(group) * B * H for group in seen], dtype=np.int64)
    number, current = 0, _ColumnGroup(pool, layer, seen[0]) if seen else None
    # Items come column after column; a group of columns may lie in several groups of the stream.
    for items, addresses in pool.stream(layer, state.table[b, columns[c]], h):
        of_group = np.searchsorted(ends, items, side="right")
        for i in range(int(of_group[0]), int(of_group[-1]) + 1):
            if i > number and current is not None:
                yield current.cut(first_token)
                current.end()
                number, current = i, _ColumnGroup(pool, layer, seen[i])
            some = of_group == i
            at = items[some]
            assert current is not None
            current.put(b[at], h[at], columns[c[at]], addresses[some])
    if current is not None:
        yield current.cut(first_token)
        current.end()


class _ColumnGroup:
    """Keys and values of some columns, one after the other, that records are copied to."""

    def __init__(self, pool: BlockPool, layer: int, columns: range) -> None:
        layout, B = pool.layout(layer), pool.batch_size(layer)
        self._shape = (B, layout.num_heads, len(columns) * layout.block_tokens)
        self._layout, self._columns = layout, columns
        self._key_bytes = layout.key_items * layout.dtype.itemsize
        self._value_bytes = layout.value_items * layout.dtype.itemsize
        self._values_begin = B * layout.num_heads * len(columns) * self._key_bytes
        self._scratch = pool.platform.scratch(B * len(columns) * layout.page_bytes)

    def put(self, b: np.ndarray, h: np.ndarray, c: np.ndarray, addresses: np.ndarray) -> None:
        """Copy records."""
        places = (b * self._shape[1] + h) * len(self._columns) + c - self._columns.start
        to = self._scratch.address + places * self._key_bytes
        self._scratch.copy(to, addresses, self._key_bytes)
        to = self._scratch.address + self._values_begin + places * self._value_bytes
        self._scratch.copy(to, addresses + self._key_bytes, self._value_bytes)

    def cut(self, first_token: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        """Return the first token from `first_token` on, and the keys and values from there on."""
        layout, scratch = self._layout, self._scratch
        first = self._columns.start * layout.block_tokens
        skipped = max(0, first_token - first)
        scratch.begin_reading()
        values_bytes = self._values_begin // self._key_bytes * self._value_bytes
        keys = scratch.view(0, self._values_begin, layout.dtype)
        values = scratch.view(self._values_begin, values_bytes, layout.dtype)
        keys, values = (
            each.view(*self._shape, dim)[:, :, skipped:]
            for each, dim in ((keys, layout.key_dim), (values, layout.value_dim))
        )
        return first + skipped, keys, values

    def end(self) -> None:
        """Let what `cut` returned be overwritten."""
        self._scratch.end_reading()


def _is_seen(call: _LayerCall, first: int, last: int) -> bool:
    """Return whether any query sees any of the keys `[first, last)` that the call looks at."""
    num_queries, first = call.query.shape[2], max(first, call.first_token)
    for i in range(0, num_queries, _QUERIES):
        seen = call.visibility.between(slice(i, min(i + _QUERIES, num_queries)), first, last)
        if seen is None or bool(seen.any()):
            return True
    return False
