"""NOSA: a part that follows the query, and a part that does not and so stays on the device."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kv.selectors._budget import (
    BlockCounts,
    BudgetSelector,
    check_scale,
    split_heads,
    top_blocks,
)
from penstock.kv.selectors._packing import best_products, pack, unpack
from penstock.units import parse_count


class Nosa(BudgetSelector):
    """Sinks, recent blocks, some that fit the query, and for the rest a choice without the query.

    Query-aware part: the keys of a block are pooled, one pool for `pool_tokens` tokens, and a block
    scores as the mean key of a pool that has the largest product with the query, after a softmax
    over the blocks, summed over the group. Pools hold keys that are alike, wherever in the block
    they are: their first members are the key nearest to the block's mean and then, again and again,
    the key farthest from all first members. So keys unlike the rest, which attract attention, have
    pools of their own, and are not lost in an average.

    Query-independent part: a score that a block gets when it is full and keeps. While no block is
    added, a step changes at most `num_query_blocks` of the blocks. A model without a trained head
    has no such score. Then a block's is one less the least cosine of its means to the mean of those
    of all blocks up to it.

    Kept per token, KV head and layer: with 4 bits, d / (2 pool_tokens) bytes for means and
    4 d / block_tokens for steps and offsets, 12 bytes at d = 64 and blocks of 64; without,
    d / pool_tokens numbers.

    Example:
        >>> selector = Nosa(num_blocks=64, num_query_blocks=16)

    Args:
        num_blocks: Full blocks to read; or give `share`.
        share: Of the full blocks.
        num_query_blocks: Blocks chosen by the query; None is half of what sinks and recent blocks
            leave, rounded up, and at least 2. At most what they leave. More find more, and make
            steps more different from each other, so that fewer of their blocks are resident.
        num_sinks: Blocks at the beginning that are always read.
        num_recent: Newest full blocks that are always read.
        pool_tokens: Tokens of a block for each of its pools; divides the tokens of a block.
        bits: 4 keeps two numbers in a byte, with a float16 step and offset per block and channel;
            None keeps means in the dtype of the keys. With 4, the head size must be even.
        scale: Of the attention's products; None is d ** -0.5.
        score: The model's trained head: takes the layer and the keys `(B, H, blocks, T, d)` of
            blocks that became full, and returns their scores, `(B, H, blocks)`.

    Source:
        Huang et al., NOSA, arXiv:2510.13602, section 3 (selection with locality); the first members
        of pools: Gonzalez, "Clustering to minimize the maximum intercluster distance", 1985; the
        scores without a trained head: Park et al., KeyDiff, arXiv:2504.15364, section 3.
    """

    def __init__(
        self,
        *,
        num_blocks: int | None = None,
        share: float | None = None,
        num_query_blocks: int | None = None,
        num_sinks: int = 1,
        num_recent: int = 1,
        pool_tokens: int = 4,
        bits: int | None = 4,
        scale: float | None = None,
        score: Callable[[int, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(
            num_blocks=num_blocks, share=share, num_sinks=num_sinks, num_recent=num_recent
        )
        pool_tokens = parse_count(pool_tokens, name="pool_tokens", least=1)
        if bits not in (None, 4):
            raise ValueError(f"bits must be None or 4; got {bits!r}")
        if num_query_blocks is not None:
            num_query_blocks = parse_count(num_query_blocks, name="num_query_blocks")
        check_scale(scale)
        self._num_query_blocks = num_query_blocks
        self._pool_tokens = pool_tokens
        self._bits = bits
        self._scale = scale
        self._score = score
        # Summaries: scores (B, H, N), and means (B, H, N, T / pool_tokens, d) as `pack` makes them

    def observe(self, layer: int, first_block: int, keys: Tensor) -> None:
        """Keep means and scores of new blocks; arguments as of `BudgetSelector.observe`."""
        super().observe(layer, first_block, keys)
        if keys.shape[3] % self._pool_tokens:
            raise ValueError(
                f"pool_tokens must divide the tokens of a block, {keys.shape[3]}; got "
                f"{self._pool_tokens}"
            )
        if self._bits and keys.shape[4] % 2:
            raise ValueError(f"with bits=4 the head size must be even; got {keys.shape[4]}")
        means = pool_alike(keys.float(), keys.shape[3] // self._pool_tokens)
        parts = pack(means if self._bits else means.to(keys.dtype), self._bits)
        if self._score is None:
            scores = self._difference(layer, first_block, unpack(parts))
        else:
            scores = self._score(layer, keys)
            if scores.shape != keys.shape[:3] or bool(scores.isnan().any()):
                raise ValueError(
                    f"score must return {tuple(keys.shape[:3])}, one number per block and no NaN; "
                    f"got {tuple(scores.shape)}: {scores.flatten()[:4].tolist()}"
                )
        self._summaries.append(layer, first_block, [scores.float(), *parts])

    def select(self, query: Tensor, layer: int, pool: BlockCounts) -> Tensor | None:
        """Return the blocks to read; see `BudgetSelector.select`."""
        total = pool.num_blocks(layer)
        budget = self._budget(total)
        if budget >= total:
            return None
        scores, *parts = self._summaries.read(layer, total)
        left = budget - self._num_sinks - self._num_recent
        num_query = self._num_query_blocks
        if num_query is None:
            num_query = max(2, left - left // 2)
        fit = self._force(self._fit(query, parts), -math.inf)
        scores = self._force(scores).scatter_(2, top_blocks(fit, min(num_query, left)), math.inf)
        return top_blocks(scores, budget).sort(dim=-1).values

    def _fit(self, query: Tensor, parts: list[Tensor]) -> Tensor:
        """Return the query-aware scores, float32 `(B, H, N)`."""
        scale = query.shape[-1] ** -0.5 if self._scale is None else self._scale
        rows = split_heads(query, parts[0].shape[1]) * scale
        return best_products(rows, parts).softmax(dim=-1).sum(dim=2)

    def _difference(self, layer: int, first_block: int, means: Tensor) -> Tensor:
        """Return one less the least cosine of a block's means to the mean of those up to it."""
        sums = means.mean(dim=3).cumsum(dim=2)
        self._summaries.check_first(layer, first_block)
        if first_block:
            _, *parts = self._summaries.read(layer, self._summaries.count(layer))
            earlier = unpack([part[:, :, :first_block] for part in parts])
            sums = sums + earlier.mean(dim=3).sum(dim=2, keepdim=True)
        anchor = sums[:, :, :, None]  # the cosine does not see the number of blocks in the sum
        return 1 - functional.cosine_similarity(means, anchor, dim=-1).amin(dim=3)


def pool_alike(keys: Tensor, num_pools: int) -> Tensor:
    """Return the mean keys of pools of keys that are alike.

    Args:
        keys: float32 `(..., T, d)`.
        num_pools: Pools of each `T` keys.

    Returns:
        float32 `(..., num_pools, d)`.
    """
    distance = _square_distance(keys, keys.mean(dim=-2, keepdim=True))
    first = distance.argmin(dim=-1, keepdim=True)
    nearest = torch.full_like(distance, torch.inf)  # square distance to the nearest first member
    pool = torch.zeros_like(distance, dtype=torch.int64)
    for number in range(num_pools):
        member = keys.take_along_dim(first[..., None], dim=-2)
        distance = _square_distance(keys, member)
        # Not only nearer ones: equal keys must not leave a later pool empty.
        is_own = (distance < nearest).scatter(-1, first, True)
        pool = pool.masked_fill(is_own, number)
        nearest = torch.minimum(nearest, distance).scatter(-1, first, -1.0)
        first = nearest.argmax(dim=-1, keepdim=True)
    members = functional.one_hot(pool, num_pools).to(keys.dtype).transpose(-2, -1)
    return members @ keys / members.sum(dim=-1, keepdim=True)


def _square_distance(keys: Tensor, others: Tensor) -> Tensor:
    """Return `(..., T)`."""
    return (keys - others).square().sum(dim=-1)
