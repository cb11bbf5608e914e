"""Selectors that read no keys: a window, and the blocks that got most attention so far."""

from __future__ import annotations

from numbers import Real

import torch
from torch import Tensor

from penstock.kv.selectors._budget import BudgetSelector


class Window(BudgetSelector):
    """Sinks and the newest blocks; all that lies between is lost to the model.

    Example:
        >>> selector = Window(num_blocks=8, num_sinks=1)  # one sink and the 7 newest full blocks

    Args:
        num_blocks: Full blocks to read; or give `share`, which grows with the context.
        share: Of the full blocks.
        num_sinks: Blocks at the beginning among them.

    Source:
        Xiao et al., "Efficient streaming language models with attention sinks", arXiv:2309.17453,
        section 3.
    """

    reads_keys = False

    def __init__(
        self, *, num_blocks: int | None = None, share: float | None = None, num_sinks: int = 1
    ) -> None:
        super().__init__(num_blocks=num_blocks, share=share, num_sinks=num_sinks)

    def _scores(self, query: Tensor, layer: int, total: int) -> Tensor:
        batch, num_heads = query.shape[0], self._num_heads[layer]
        newness = torch.arange(total, dtype=torch.float32, device=query.device)
        return newness.expand(batch, num_heads, total)


class Accumulated(BudgetSelector):
    """Recent blocks and those with the largest sum of attention weights so far.

    The attention over the blocks that are read is added up through `note`, with a sum that halves
    every `half_life` steps, so that it is ALISA's sum over the latest steps without their list. A
    block that is not read keeps its sum and may return.

    Example:
        >>> selector = Accumulated(share=1 / 16, num_recent=2)

    Args:
        num_blocks: Full blocks to read; or give `share`.
        share: Of the full blocks.
        num_sinks: Blocks at the beginning that are always read.
        num_recent: Newest full blocks that are always read.
        half_life: Steps after which a weight counts half.

    Source:
        Zhao, Wu, Wang: ALISA, arXiv:2403.17312, section IV-A (sparse window attention).
    """

    reads_keys = False

    def __init__(
        self,
        *,
        num_blocks: int | None = None,
        share: float | None = None,
        num_sinks: int = 1,
        num_recent: int = 1,
        half_life: float = 64,
    ) -> None:
        super().__init__(
            num_blocks=num_blocks, share=share, num_sinks=num_sinks, num_recent=num_recent
        )
        if not isinstance(half_life, Real) or not half_life > 0:
            raise ValueError(f"half_life must be a number of steps above 0; got {half_life!r}")
        self._keep = 0.5 ** (1 / half_life)  # summaries: sums of weights (B, H, N)

    def observe(self, layer: int, first_block: int, keys: Tensor) -> None:
        """Begin the sums of new blocks at 0; arguments as of `BudgetSelector.observe`."""
        super().observe(layer, first_block, keys)
        zeros = torch.zeros(keys.shape[:3], dtype=torch.float32, device=keys.device)
        self._summaries.append(layer, first_block, [zeros])

    def note(self, layer: int, blocks: Tensor, weights: Tensor) -> None:
        """Add the attention weights of a step.

        Args:
            layer: Index of the layer.
            blocks: Numbers of blocks read, int64 `(B, H, k)`; -1 fills.
            weights: Share of the softmax weights that fell on each, summed over the group's queries
                and the block's tokens, float32 `(B, H, k)`.
        """
        (sums,) = self._summaries.read(layer, self._summaries.count(layer))
        sums.mul_(self._keep)
        weights = weights.to(sums.dtype).masked_fill(blocks < 0, 0)
        sums.scatter_add_(2, blocks.clamp(min=0), weights)

    def _scores(self, query: Tensor, layer: int, total: int) -> Tensor:
        return self._summaries.read(layer, total)[0]
