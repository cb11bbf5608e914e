"""Selectors: which blocks a step of few tokens reads.

`all` is exact and the others are not: they read less. A selector that names every block gives what
`all` gives.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol, runtime_checkable

import torch

from penstock.kv.selectors import Accumulated, CheckedSelector, Nosa, Window

_SHARE = 1 / 16  # of the full blocks, for selectors that are named only
_pools: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Pools by the identities of their selectors, which they keep alive."""
_NAMED = {"window": Window, "nosa": Nosa, "accumulated": Accumulated}


@runtime_checkable
class Selector(Protocol):
    """Choice of blocks, asked before each step of few tokens; longer calls read all blocks.

    A selector may also have `observe(layer, first_block, keys)`, called with the keys
    `(B, H, num_blocks, block_tokens, key_dim)` of blocks that became full;
    `note(layer, blocks, weights)`, called after attention with the blocks that were read
    `(B, H, k)` and their shares of the attention weight, summed over the queries of a head;
    `reorder(index)` and `crop(num_blocks)`, called when the pool does the same, in all layers
    that the selector is asked for; and `nbytes`,
    the bytes that it keeps, which count against the pool's budget.

    Example:
        >>> class Newest:
        ...     def select(self, query, layer, pool):
        ...         last = pool.num_blocks(layer) - 1
        ...         return torch.full((query.shape[0], 2, 1), last)  # of 2 heads of keys
        >>> isinstance(Newest(), Selector)
        True
    """

    def select(self, query: torch.Tensor, layer: int, pool: Any) -> torch.Tensor | None:
        """Return the full blocks to read; the newest, unfinished block is always read.

        Args:
            query: `(B, Hq, n, key_dim)`.
            layer: Number of the layer.
            pool: The `BlockPool`, whose `num_blocks(layer)` and `keys_of` may be asked.

        Returns:
            int64 `(B, H, k)`: numbers of blocks within each sequence, ascending, -1 where there are
            fewer; or None: all blocks.
        """
        ...


def resolve_selector(selector: object) -> Selector | None:
    """Turn the argument `selector` into a selector; None for `"all"`.

    Raises:
        ValueError: It is an unknown name, or the selector of another open pool.
        TypeError: It is neither a name, nor a selector, nor a function.
    """
    if selector is None or selector == "all":
        return None
    if isinstance(selector, str):
        if selector not in _NAMED:
            names = ", ".join(["'all'", *map(repr, _NAMED)])
            raise ValueError(f"selector must be one of {names} or an object; got {selector!r}")
        return _NAMED[selector](share=_SHARE)
    if isinstance(selector, type):
        raise TypeError(f"selector is the class {selector.__name__}; pass an object of it")
    _check_free(selector)
    if type(selector).__module__.startswith(Window.__module__.rpartition(".")[0]):
        assert isinstance(selector, Selector)
        return selector
    return CheckedSelector(selector)


def claim(selector: Any, pool: Any) -> None:
    """Note the pool of a selector, which `resolve_selector` refuses for others while it is open."""
    if selector is not None and (selector.reads_keys or hasattr(selector, "note")):
        _pools[_identify(selector)] = pool


def _identify(selector: object) -> int:
    return id(selector.wrapped if isinstance(selector, CheckedSelector) else selector)


def _check_free(selector: object) -> None:
    """Raise `ValueError` where a selector keeps something of the blocks of another open pool."""
    pool = _pools.get(_identify(selector))
    if pool is not None and pool.is_open:
        raise ValueError(
            f"selector {type(selector).__name__!r} is that of another open cache, whose blocks it "
            "knows; make a selector for each cache, or close the other"
        )


def tell(
    selector: Any, event: str, value: object, asked: list[int], layers: list[int] | None
) -> None:
    """Tell a selector of a change of some layers, or all: of those that it is asked for."""
    some = asked if layers is None else [layer for layer in asked if layer in layers]
    if (layers is None or some) and hasattr(selector, event):
        options = {} if some == asked else {"layers": some}
        getattr(selector, event)(value, **options)


def name_of(selector: Selector | None) -> str:
    """Return a selector's name for reports."""
    if selector is None:
        return "all"
    if isinstance(selector, CheckedSelector):
        return selector.name
    return type(selector).__name__
