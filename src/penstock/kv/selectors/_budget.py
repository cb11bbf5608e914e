"""Parts that all selectors share: the budget, the choice by score, and summaries of blocks."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from numbers import Real
from typing import Protocol

from torch import Tensor
from torch.nn import functional

from penstock.units import parse_count


class BlockCounts(Protocol):
    """Facts about a pool that selectors use."""

    block_tokens: int

    def num_blocks(self, layer: int) -> int:
        """Return the number of full blocks of every sequence."""
        ...


class BudgetSelector:
    """Base of the selectors that read a number or share of the blocks, sinks and recent included.

    Tensors have the shapes of the pool: B sequences, H KV heads, Hq query heads, n new tokens,
    N full blocks of T tokens, d channels.

    Args:
        num_blocks: Full blocks to read per sequence, KV head and layer; or give `share`.
        share: Of the full blocks, above 0 and at most 1; rounded up.
        num_sinks: Blocks at the beginning that are always read.
        num_recent: Newest full blocks that are always read, besides the unfinished one.

    Raises:
        ValueError: Not exactly one of `num_blocks` and `share` is given, or the sinks and recent
            blocks exceed `num_blocks`. (A share that holds less than these holds just these.)
    """

    reads_keys = True
    """True where `observe` looks at the numbers of the keys, and not only at their shape."""

    def __init__(
        self,
        *,
        num_blocks: int | None = None,
        share: float | None = None,
        num_sinks: int = 1,
        num_recent: int = 1,
    ) -> None:
        if (num_blocks is None) == (share is None):
            raise ValueError(
                f"give one of num_blocks and share; got num_blocks={num_blocks}, share={share}"
            )
        counts = {"num_blocks": num_blocks, "num_sinks": num_sinks, "num_recent": num_recent}
        for name, count in counts.items():
            if count is not None:
                parse_count(count, name=name)
        if share is not None and not (isinstance(share, Real) and 0 < share <= 1):
            raise ValueError(f"share must be a number above 0 and at most 1; got {share!r}")
        if num_blocks is not None and num_blocks < max(1, num_sinks + num_recent):
            raise ValueError(
                f"num_blocks must be at least 1 and hold num_sinks + num_recent, "
                f"{num_sinks + num_recent} blocks; got {num_blocks}"
            )
        self._num_blocks = num_blocks
        self._share = share
        self._num_sinks = num_sinks
        self._num_recent = num_recent
        self._num_heads: dict[int, int] = {}  # KV heads by layer
        self._summaries = BlockSummaries()

    @property
    def nbytes(self) -> int:
        """Bytes of the summaries of blocks on the device, with room for growth."""
        return self._summaries.nbytes

    def observe(self, layer: int, first_block: int, keys: Tensor) -> None:
        """Take the keys of blocks that became full.

        Args:
            layer: Index of the layer.
            first_block: Number of the first of these blocks within the sequences.
            keys: `(B, H, blocks, T, d)`, as the attention reads them (rotated).
        """
        self._num_heads[layer] = keys.shape[1]

    def reorder(self, index: Tensor, layers: Collection[int] | None = None) -> None:
        """Make sequence i the copy of what was `index[i]`, int64 `(B,)`; None: in all layers."""
        self._summaries.reorder(index, layers)

    def crop(self, num_blocks: int, layers: Collection[int] | None = None) -> None:
        """Forget all but the first `num_blocks` blocks; None: of all layers."""
        self._summaries.crop(num_blocks, layers)

    def select(self, query: Tensor, layer: int, pool: BlockCounts) -> Tensor | None:
        """Return the blocks to read.

        Args:
            query: `(B, Hq, n, d)`, rotated; query heads of a KV head lie side by side.
            layer: Index of the layer.
            pool: The pool; asked for the number of full blocks.

        Returns:
            Numbers of full blocks, int64 `(B, H, k)`, ascending; None for all of them. The
            unfinished block is read in any case.
        """
        total = pool.num_blocks(layer)
        budget = self._budget(total)
        if budget >= total:
            return None
        scores = self._scores(query, layer, total)
        return self._choose(scores, budget)

    def _scores(self, query: Tensor, layer: int, total: int) -> Tensor:
        """Return what each block is worth, float32 `(B, H, N)`."""
        raise NotImplementedError

    def _budget(self, total: int) -> int:
        if self._num_blocks is not None:
            return self._num_blocks
        assert self._share is not None
        return max(1, self._num_sinks + self._num_recent, math.ceil(self._share * total))

    def _choose(self, scores: Tensor, budget: int) -> Tensor:
        """Return the `budget` best blocks, ascending, always with the sinks and recent ones."""
        return top_blocks(self._force(scores), budget).sort(dim=-1).values

    def _force(self, scores: Tensor, value: float = math.inf) -> Tensor:
        """Return a copy of scores in which those of the sinks and recent blocks have a value."""
        sinks, recent = self._num_sinks, self._num_recent
        others = scores[..., sinks : scores.shape[-1] - recent]
        return functional.pad(others, (sinks, recent), value=value)


def check_scale(scale: object) -> None:
    """Raise an error if the scale of products is neither None nor a finite number."""
    if scale is not None and not isinstance(scale, Real):
        raise TypeError(f"scale must be a number or None; got {scale!r}")
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite; got {scale}")


def top_blocks(scores: Tensor, num_blocks: int) -> Tensor:
    """Return the best blocks of `(B, H, N)`, int64 `(B, H, num_blocks)`; of equals, the newest."""
    ascending = scores.sort(dim=-1, stable=True).indices
    return ascending[..., scores.shape[-1] - num_blocks :]


def split_heads(query: Tensor, num_heads: int) -> Tensor:
    """Turn a query `(B, Hq, n, d)` into float32 rows per KV head, `(B, H, group * n, d)`."""
    batch, num_query_heads, num_tokens, dim = query.shape
    if num_query_heads % num_heads:
        raise ValueError(
            f"query has {num_query_heads} heads, which is no multiple of the {num_heads} KV heads"
        )
    rows = num_query_heads // num_heads * num_tokens
    return query.reshape(batch, num_heads, rows, dim).float()


class BlockSummaries:
    """Tensors per layer that grow with the blocks: `(B, H, N, ...)`, room doubled when full."""

    def __init__(self) -> None:
        self._room: dict[int, list[Tensor]] = {}
        self._count: dict[int, int] = {}

    @property
    def nbytes(self) -> int:
        """Bytes held, unused room included."""
        return sum(part.nbytes for parts in self._room.values() for part in parts)

    def count(self, layer: int) -> int:
        """Return the number of blocks of a layer."""
        return self._count.get(layer, 0)

    def check_first(self, layer: int, first_block: int) -> None:
        """Raise `ValueError` if blocks before `first_block` are missing."""
        count = self.count(layer)
        if first_block > count:
            raise ValueError(
                f"layer {layer}: blocks {count} to {first_block - 1} were never shown to the "
                "selector; a selector must be given to the pool before the first token"
            )

    def append(self, layer: int, first_block: int, parts: Sequence[Tensor]) -> None:
        """Set the parts of blocks from `first_block` on, and forget later ones."""
        self.check_first(layer, first_block)
        end = first_block + parts[0].shape[2]
        room = self._room.get(layer)
        if room is not None and room[0].shape[:2] != parts[0].shape[:2]:
            raise ValueError(
                f"the selector holds {room[0].shape[0]} sequences of layer {layer}, and is shown "
                f"{parts[0].shape[0]}; make a selector for each cache"
            )
        if room is None or room[0].shape[2] < end:
            # The first time (the prefill) no more than needed, later twice as much.
            size = end if room is None else max(end, 2 * room[0].shape[2])
            grown = [p.new_zeros((*p.shape[:2], size, *p.shape[3:])) for p in parts]
            for new, old in zip(grown, room or [], strict=False):
                new[:, :, :first_block] = old[:, :, :first_block]
            room = self._room[layer] = grown
        for whole, part in zip(room, parts, strict=True):
            whole[:, :, first_block:end] = part
        self._count[layer] = end

    def read(self, layer: int, total: int) -> list[Tensor]:
        """Return the parts of the first `total` blocks, each `(B, H, total, ...)`."""
        count = self.count(layer)
        if count != total:
            raise ValueError(
                f"layer {layer} has {total} full blocks, but the selector was shown {count}; "
                "a selector belongs to one pool, from the first token on"
            )
        return [part[:, :, :total] for part in self._room[layer]]

    def reorder(self, index: Tensor, layers: Collection[int] | None) -> None:
        """Select sequences of some layers, or all, int64 `(B,)`."""
        for layer, parts in self._room.items():
            if layers is None or layer in layers:
                self._room[layer] = [part.index_select(0, index.to(part.device)) for part in parts]

    def crop(self, num_blocks: int, layers: Collection[int] | None) -> None:
        """Forget all but the first blocks of some layers, or all."""
        for layer in list(self._room) if layers is None else layers:
            if num_blocks == 0:  # what comes next may be another number of sequences
                self._room.pop(layer, None)
            if layer in self._count:
                self._count[layer] = min(self._count[layer], num_blocks)
