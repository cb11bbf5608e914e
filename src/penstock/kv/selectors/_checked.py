"""Checks of what a user's selector returns, before an address is computed from it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.kv.selectors._budget import BlockCounts
from penstock.units import parse_count


class CheckedSelector:
    """Selector of the user whose results are checked at every call.

    Example:
        >>> def newest(query, layer, pool):
        ...     last = pool.num_blocks(layer) - 1
        ...     return torch.full((query.shape[0], 2, 1), last)  # of 2 KV heads
        >>> selector = CheckedSelector(newest)

    Args:
        selector: A function `(query, layer, pool) -> blocks`, or an object with such a method
            `select`; its `observe`, `note`, `reorder`, `crop` and `nbytes` are used where it has
            them.

    Raises:
        TypeError: It is neither.
    """

    def __init__(self, selector: Any) -> None:
        self._selector = selector
        select = getattr(selector, "select", selector)
        if not callable(select):
            raise TypeError(
                "selector must be a function (query, layer, pool) -> blocks or have a method "
                f"select; got {selector!r}"
            )
        self._select: Callable[[Tensor, int, Any], Any] = select
        self._name = getattr(selector, "__name__", type(selector).__name__)
        self._num_heads: dict[int, int] = {}
        if hasattr(selector, "note"):
            # Weights cost time to sum: the pool does so for selectors that have this method only.
            self.note = selector.note

    @property
    def wrapped(self) -> Any:
        """The user's function or object."""
        return self._selector

    @property
    def name(self) -> str:
        """Name of the user's function or class."""
        return self._name

    @property
    def reads_keys(self) -> bool:
        """True where the user's selector is shown keys."""
        return hasattr(self._selector, "observe")

    @property
    def nbytes(self) -> int:
        """Bytes that the user's selector says it keeps on the device."""
        name = f"nbytes of selector {self._name!r}"
        return parse_count(getattr(self._selector, "nbytes", 0), name=name)

    def observe(self, layer: int, first_block: int, keys: Tensor) -> None:
        """Hand on the keys of full blocks, `(B, H, blocks, T, d)`."""
        self._num_heads[layer] = keys.shape[1]
        self._forward("observe", layer, first_block, keys)

    def reorder(self, index: Tensor, layers: Collection[int] | None = None) -> None:
        """Hand on the new order of the sequences, int64 `(B,)`.

        Raises:
            PenstockError: It is that of some layers only, which the user's method is not told.
        """
        if layers is not None and hasattr(self._selector, "reorder"):
            raise PenstockError(
                f"reorder of layers {sorted(layers)} alone: selector {self._name!r} follows one of "
                "all its layers; reorder them in one call"
            )
        self._forward("reorder", index)

    def crop(self, num_blocks: int, layers: Collection[int] | None = None) -> None:
        """Hand on the number of blocks that are left."""
        self._forward("crop", num_blocks)

    def select(self, query: Tensor, layer: int, pool: BlockCounts) -> Tensor | None:
        """Return the user's choice for a query `(B, Hq, n, d)`.

        Returns:
            int64 `(B, H, k)`, ascending apart from fills of -1; None for all.

        Raises:
            TypeError: It is neither a tensor nor None, or not of int64.
            ValueError: Its shape, device, range or order is wrong.
        """
        blocks = self._select(query.clone(), layer, pool)  # which attention is to use unchanged
        if blocks is None:
            return None
        is_dense = isinstance(blocks, Tensor) and blocks.layout is torch.strided
        if not is_dense or blocks.dtype != torch.int64:
            got = blocks.dtype if is_dense else getattr(blocks, "layout", type(blocks).__name__)
            raise TypeError(self._say(layer, f"an int64 tensor or None; got {got}"))
        num_heads = self._num_heads.get(layer)
        expected = f"shape ({query.shape[0]}, {num_heads or 'KV heads'}, k)"
        is_shaped = blocks.dim() == 3 and blocks.shape[0] == query.shape[0]
        if not is_shaped or (num_heads is not None and blocks.shape[1] != num_heads):
            raise ValueError(self._say(layer, f"{expected}; got {tuple(blocks.shape)}"))
        if blocks.device != query.device:
            raise ValueError(
                self._say(layer, f"a tensor on the query's {query.device}; got {blocks.device}")
            )
        self._check_numbers(layer, blocks, pool.num_blocks(layer))
        return blocks

    def _check_numbers(self, layer: int, blocks: Tensor, total: int) -> None:
        if blocks.numel() == 0:
            return
        low, high = (int(extreme) for extreme in blocks.aminmax())
        if low < -1 or high >= total:
            wrong = low if low < -1 else high
            message = f"numbers of full blocks, 0 to {total - 1}, or -1; got {wrong}"
            raise ValueError(self._say(layer, message))
        # The largest number before each place: fills are passed over.
        before = blocks.cummax(dim=-1).values[..., :-1]
        later = blocks[..., 1:]
        wrong = (later >= 0) & (later <= before)
        if bool(wrong.any()):
            sequence, head, place = (int(i) for i in wrong.nonzero()[0])
            raise ValueError(
                self._say(
                    layer,
                    "distinct blocks in ascending order; sequence "
                    f"{sequence}, head {head} has {blocks[sequence, head].tolist()[: place + 2]}; "
                    "use .sort(dim=-1).values",
                )
            )

    def _say(self, layer: int, expected: str) -> str:
        return f"selector {self._name!r}, layer {layer}: must return {expected}"

    def _forward(self, name: str, *args: Any) -> None:
        method = getattr(self._selector, name, None)
        if method is not None:
            method(*args)
