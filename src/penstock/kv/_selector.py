"""Selectors: which blocks a step of few tokens reads.

`all` is exact and the others are not: they read less. A selector that names every block gives what
`all` gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

if TYPE_CHECKING:
    from penstock.kv._pool import BlockPool


@runtime_checkable
class Selector(Protocol):
    """Choice of blocks, asked before each step of few tokens; longer calls read all blocks.

    A selector may also have `observe(layer, first_block, keys)`, called with the keys
    `(B, H, num_blocks, block_tokens, key_dim)` of blocks that became full;
    `note(layer, blocks, weights)`, called after attention with the blocks that were read
    `(B, H, k)` and their shares of the attention weight, summed over the queries of a head;
    `reorder(index)` and `crop(num_blocks)`, called when the pool does the same; and `nbytes`,
    the bytes that it keeps, which count against the pool's budget.
    """

    def select(self, query: torch.Tensor, layer: int, pool: BlockPool) -> torch.Tensor | None:
        """Return the full blocks to read; the newest, unfinished block is always read.

        Args:
            query: `(B, Hq, n, key_dim)`.
            layer: Number of the layer.
            pool: The pool, whose `num_blocks(layer)` and `keys_of` may be asked.

        Returns:
            int64 `(B, H, k)`: numbers of blocks within each sequence, ascending, -1 where there are
            fewer; or None: all blocks.
        """
        ...


class Window:
    """Selector of the first blocks (attention sinks) and the most recent ones.

    Example:
        >>> Window(num_sinks=1, num_recent=15)
        Window(num_sinks=1, num_recent=15)

    Args:
        num_sinks: Full blocks from the beginning.
        num_recent: Full blocks from the end, beside the unfinished one.

    Source: Xiao et al., Efficient Streaming Language Models with Attention Sinks, arXiv:2309.17453,
    section 3.
    """

    def __init__(self, num_sinks: int = 1, num_recent: int = 15) -> None:
        if num_sinks < 0 or num_recent < 0:
            raise ValueError(
                f"num_sinks and num_recent must be at least 0; got {num_sinks} and {num_recent}"
            )
        self.num_sinks = num_sinks
        self.num_recent = num_recent

    def __repr__(self) -> str:
        return f"Window(num_sinks={self.num_sinks}, num_recent={self.num_recent})"

    def select(self, query: torch.Tensor, layer: int, pool: BlockPool) -> torch.Tensor | None:
        """Return the first and the last blocks; None where these are all."""
        num_blocks = pool.num_blocks(layer)
        if num_blocks <= self.num_sinks + self.num_recent:
            return None
        recent = torch.arange(num_blocks - self.num_recent, num_blocks)
        blocks = torch.cat([torch.arange(self.num_sinks), recent])
        return blocks.expand(query.shape[0], pool.layout(layer).num_heads, -1)


class FunctionSelector:
    """Selector that asks a function of the user's.

    Args:
        function: Called as `select(query, layer, pool)`.
    """

    def __init__(
        self, function: Callable[[torch.Tensor, int, BlockPool], torch.Tensor | None]
    ) -> None:
        self._function = function

    def __repr__(self) -> str:
        return getattr(self._function, "__name__", type(self._function).__name__)

    def select(self, query: torch.Tensor, layer: int, pool: BlockPool) -> torch.Tensor | None:
        """Return the function's result."""
        return self._function(query, layer, pool)


def resolve_selector(selector: object) -> Selector | None:
    """Turn the argument `selector` into a selector; None for `"all"`.

    Raises:
        ValueError: It is an unknown name.
        TypeError: It is neither a name, nor a selector, nor a function.
    """
    if selector is None or selector == "all":
        return None
    if selector == "window":
        return Window()
    if isinstance(selector, str):
        raise ValueError(f"selector must be one of 'all', 'window' or an object; got {selector!r}")
    if isinstance(selector, Selector):
        return selector
    if callable(selector):
        return FunctionSelector(selector)
    raise TypeError(
        "selector must be a name, an object with select(query, layer, pool) or a function; got "
        f"{type(selector).__name__}"
    )
