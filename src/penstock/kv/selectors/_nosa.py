"""NOSA: a part that follows the query, and a part that does not and so stays on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from penstock.kv.selectors._budget import (
    BlockCounts,
    BlockSummaries,
    BudgetSelector,
    split_heads,
    top_blocks,
)


class Nosa(BudgetSelector):
    """Sinks, recent blocks, some that fit the query, and for the rest a choice without the query.

    Query-aware part: keys averaged over `pool_tokens` tokens every `stride` tokens are scored by
    the query, a block by the best of the averages that overlap it, after a softmax over the blocks,
    summed over the group. Query-independent part: a score that a block gets when it is full and
    keeps. While no block is added, at most `query_blocks` of the blocks change from step to step.

    A model without a trained head has no such score. Then a block's is one less the least cosine
    of its averages to the mean of all keys up to it: keys unlike the rest attract attention.

    Example:
        >>> selector = Nosa(num_blocks=64, query_blocks=16)

    Args:
        num_blocks: Full blocks to read; or give `share`.
        share: Of the full blocks.
        query_blocks: Blocks chosen by the query; None is half of what sinks and recent blocks
            leave. At most what they leave.
        sinks: Blocks at the beginning that are always read.
        recent: Newest full blocks that are always read.
        pool_tokens: Tokens of an average, a multiple of `stride`.
        stride: Tokens from one average to the next; divides the tokens of a block.
        scale: Of the attention's products; None is d ** -0.5.
        score: The model's trained head: takes the layer and the keys `(B, H, blocks, T, d)` of
            blocks that became full, and returns their scores, `(B, H, blocks)`.

    Source:
        Huang et al., NOSA, arXiv:2510.13602, section 3 (selection with locality); the scores
        without a trained head: Park et al., KeyDiff, arXiv:2504.15364, section 3.
    """

    def __init__(
        self,
        *,
        num_blocks: int | None = None,
        share: float | None = None,
        query_blocks: int | None = None,
        sinks: int = 1,
        recent: int = 1,
        pool_tokens: int = 32,
        stride: int = 16,
        scale: float | None = None,
        score: Callable[[int, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(num_blocks=num_blocks, share=share, sinks=sinks, recent=recent)
        if stride < 1 or pool_tokens < stride or pool_tokens % stride:
            raise ValueError(
                f"pool_tokens must be a multiple of stride; got {pool_tokens} and {stride}"
            )
        if query_blocks is not None and query_blocks < 0:
            raise ValueError(f"query_blocks must be at least 0; got {query_blocks}")
        self._query_blocks = query_blocks
        self._pool_tokens = pool_tokens
        self._stride = stride
        self._scale = scale
        self._score = score
        self._summaries = BlockSummaries()  # means (B, H, N, T / stride, d), scores (B, H, N)

    @property
    def nbytes(self) -> int:
        """Bytes of the means and scores on the device, with room for growth."""
        return self._summaries.nbytes

    def observe(self, layer: int, first_block: int, keys: Tensor) -> None:
        """Keep averages and scores of new blocks; arguments as of `BudgetSelector.observe`."""
        super().observe(layer, first_block, keys)
        if keys.shape[3] % self._stride:
            raise ValueError(
                f"stride must divide the tokens of a block, {keys.shape[3]}; got {self._stride}"
            )
        # Averages over pool_tokens are averages of these, so products are taken with these only.
        means = keys.unflatten(3, (-1, self._stride)).float().mean(dim=4)
        if self._score is None:
            scores = self._difference(layer, first_block, means)
        else:
            scores = self._score(layer, keys)
            if scores.shape != keys.shape[:3]:
                raise ValueError(
                    f"score must return {tuple(keys.shape[:3])}, one number per block; got "
                    f"{tuple(scores.shape)}"
                )
        self._summaries.append(layer, first_block, [means.to(keys.dtype), scores.float()])

    def reorder(self, index: Tensor) -> None:
        """Follow the beams; see `BudgetSelector.reorder`."""
        self._summaries.reorder(index)

    def crop(self, num_blocks: int) -> None:
        """Forget later blocks; see `BudgetSelector.crop`."""
        self._summaries.crop(num_blocks)

    def select(self, query: Tensor, layer: int, pool: BlockCounts) -> Tensor | None:
        """Return the blocks to read; see `BudgetSelector.select`."""
        total = pool.num_blocks(layer)
        budget = self._budget(total)
        if budget >= total:
            return None
        means, scores = self._summaries.read(layer, total)
        forced = self._force(torch.zeros_like(scores)).isinf()
        left = budget - int(forced[0, 0].sum())
        num_query = left - left // 2 if self._query_blocks is None else self._query_blocks
        fit = self._fit(query, means).masked_fill(forced, -torch.inf)
        chosen = forced.scatter(2, top_blocks(fit, min(num_query, left)), True)
        return top_blocks(scores.masked_fill(chosen, torch.inf), budget).sort(dim=-1).values

    def _fit(self, query: Tensor, means: Tensor) -> Tensor:
        """Return the query-aware scores, float32 `(B, H, N)`."""
        batch, num_heads, total, per_block, _ = means.shape
        rows = split_heads(query, num_heads)
        scale = query.shape[-1] ** -0.5 if self._scale is None else self._scale
        products = rows @ means.float().flatten(2, 3).transpose(2, 3) * scale
        # The product with an average is the average of the products.
        span = min(self._pool_tokens // self._stride, products.shape[-1])
        averages = functional.avg_pool1d(products.flatten(0, 1), span, stride=1)
        padded = functional.pad(averages, (span - 1, span - 1), value=-torch.inf)
        best = functional.max_pool1d(padded, per_block + span - 1, stride=per_block)
        weights = best.softmax(dim=-1).unflatten(0, (batch, num_heads))
        return weights.sum(dim=2)

    def _difference(self, layer: int, first_block: int, means: Tensor) -> Tensor:
        """Return one less the least cosine of a block's means to the mean of the keys up to it."""
        sums = means.mean(dim=3).cumsum(dim=2)
        if first_block:
            earlier, _ = self._summaries.read(layer, self._summaries.count(layer))
            sums = sums + earlier[:, :, :first_block].float().mean(dim=3).sum(dim=2, keepdim=True)
        anchor = sums[:, :, :, None]  # the cosine does not see the number of blocks in the sum
        return 1 - functional.cosine_similarity(means, anchor, dim=-1).amin(dim=3)
