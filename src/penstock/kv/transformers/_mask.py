"""Masks that are evaluated for ranges of queries and keys when the attention reaches them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from transformers import masking_utils
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sliding_window_causal_mask_function,
)

from penstock.compat.dynamo import run_uncompiled
from penstock.errors import PenstockError
from penstock.kv._visibility import Visibility


class RangeMask:
    """Mask of one call, for `penstock.kv`'s attention function only.

    Attributes:
        visibility: Tokens that each query sees.
        shape: `(B, 1, n, keys)` that a mask in memory would have.
        dtype: `torch.bool`.
        device: Of the model.
        start: Token of the first key.
    """

    dtype = torch.bool
    ndim = 4

    def __init__(self, visibility: Visibility, shape: tuple[int, ...], start: int) -> None:
        self.visibility = visibility
        self.device = torch.device(visibility.device)
        self.shape = torch.Size(shape)
        self.start = start

    def __repr__(self) -> str:
        return f"RangeMask(shape={tuple(self.shape)}, start={self.start})"

    def dim(self) -> int:
        """Return 4."""
        return self.ndim

    def contiguous(self) -> RangeMask:
        """Return the mask itself, as `generate` asks for with a static cache."""
        return self

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the model asks the attention mask of penstock.kv.cache for {name!r}; it must hand "
            "the mask to Transformers' attention interface as it is"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse: the numbers are not in this object."""
        raise PenstockError(
            f"the model computes with the attention mask of penstock.kv.cache ({func.__name__}); "
            "it must hand the mask to Transformers' attention interface as it is; use another cache"
        )

    def _refuse_operator(self, *_: object) -> Any:
        raise PenstockError(
            "the model cuts the attention mask of penstock.kv.cache or computes with it; it must "
            "hand the mask to Transformers' attention interface as it is; use another cache"
        )

    def __getitem__(self, index: Any) -> RangeMask:
        """Return the mask of a range of the queries, as `[:, :, some]` or `[:, :, some, :]`."""
        parts = index if isinstance(index, tuple) and len(index) <= 4 else (None,)
        parts = (*parts, *(slice(None),) * (4 - len(parts)))
        slices = [part for part in parts if isinstance(part, slice) and part.step in (None, 1)]
        ranges = [part.indices(n)[:2] for part, n in zip(slices, self.shape, strict=False)]
        if len(ranges) < 4 or any(ranges[axis] != (0, self.shape[axis]) for axis in (0, 1, 3)):
            self._refuse_operator()
        first, last = ranges[2]
        visibility = replace(self.visibility, query_start=self.visibility.query_start + first)
        shape = (*self.shape[:2], max(0, last - first), self.shape[3])
        return RangeMask(visibility, shape, self.start)

    __invert__ = __eq__ = __ne__ = _refuse_operator  # pyright: ignore[reportAssignmentType]
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse_operator
    __hash__ = object.__hash__

    def in_memory(self) -> torch.Tensor | None:
        """Return the mask as a bool tensor `(1 or B, 1, n, keys)`; None where all is visible."""
        last = self.start + self.shape[3]
        seen = self.visibility.between(slice(0, self.shape[2]), self.start, last)
        return None if seen is None else seen.expand(-1, -1, self.shape[2], -1)


@run_uncompiled(reason="penstock.kv keeps keys and values outside of graphs")
def make_range_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | RangeMask | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    config: Any = None,
    **_: Any,
) -> RangeMask:
    """Return the mask of a call, as Transformers' mask interface asks for it.

    The first query is token `q_offset`, the first key token `kv_offset`; `mask_function` says the
    visibility by indices of batch, head, query and key, and `attention_mask`, bool `(B, tokens)`,
    is False for padding; `device` is that of all indices, and `config` the model's. Wishes of other
    mask functions change nothing.

    Raises:
        PenstockError: `mask_function` may be other than elementwise.
        ValueError: `attention_mask` has another shape.
    """
    if isinstance(attention_mask, RangeMask):  # made before the call, with a static cache
        return attention_mask
    if use_vmap and not _is_by_index(mask_function):
        raise PenstockError(
            "penstock.kv.cache evaluates masks for ranges of tokens, which or_mask_function= and "
            "and_mask_function= of the model do not promise to allow; use another cache"
        )
    padding = None
    if attention_mask is not None:
        if attention_mask.dim() != 2 or attention_mask.shape[0] not in (1, batch_size):
            raise ValueError(
                f"attention_mask must have the shape ({batch_size}, tokens), or (1 or "
                f"{batch_size}, 1 or heads, {q_length}, {kv_length}); got "
                f"{tuple(attention_mask.shape)}"
            )
        is_short = attention_mask.shape[1] < kv_offset + kv_length  # what is beyond is not seen
        padding = attention_mask.bool() if is_short or not bool(attention_mask.all()) else None
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or not _is_same(
        mask_function, sliding_window_causal_mask_function(window)
    ):
        window = None
    is_causal = window is not None or mask_function is causal_mask_function
    visibility = Visibility(
        batch_size=batch_size,
        query_start=int(q_offset),
        is_causal=is_causal,
        window=window,
        rule=None if is_causal or mask_function is bidirectional_mask_function else mask_function,
        padding=padding,
        device=device,
    )
    return RangeMask(visibility, (batch_size, 1, q_length, kv_length), int(kv_offset))


def _is_by_index(value: Any) -> bool:
    """Return whether a function computes by index: those of Transformers, of each other, do."""
    if isinstance(value, tuple):
        return all(map(_is_by_index, value))
    if not isinstance(value, FunctionType):
        return isinstance(value, int | torch.Tensor)
    cells = (cell.cell_contents for cell in value.__closure__ or ())
    return value.__module__ == masking_utils.__name__ and all(map(_is_by_index, cells))


def _is_same(value: Any, other: Any) -> bool:
    """Return whether functions are one, or closures of one code over variables that are the same.

    Transformers makes the function of a window anew for each call.
    """
    if isinstance(value, tuple) and isinstance(other, tuple):
        return len(value) == len(other) and all(map(_is_same, value, other))
    if not isinstance(value, FunctionType) or not isinstance(other, FunctionType):
        return type(value) is type(other) and isinstance(value, int) and value == other
    if value is other:
        return True
    cells, others = (
        tuple(cell.cell_contents for cell in each.__closure__ or ()) for each in (value, other)
    )
    is_plain = value.__defaults__ is other.__defaults__ is None
    return value.__code__ is other.__code__ and is_plain and _is_same(cells, others)
