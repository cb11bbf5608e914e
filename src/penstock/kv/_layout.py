"""Layout of a block: the unit of residency, of selection and of writing, in bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from penstock._lazy import cached_property
from penstock.memory.pages import round_up
from penstock.units import parse_count

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


KeyShape = tuple[int, int, int]
"""Heads of keys and values, numbers of a key, numbers of a value."""


@dataclass(frozen=True)
class BlockLayout:
    """Shapes and bytes of the blocks of one layer.

    A block is `block_tokens` consecutive tokens of one sequence. A record is the part of it that
    belongs to one head: keys `(block_tokens, key_dim)`, then values `(block_tokens, value_dim)`,
    then padding to a multiple of `alignment_bytes`. A page is the records of all heads, one after
    the other.

    Example:
        >>> layout = BlockLayout(8, 64, 128, 128, torch.bfloat16)
        >>> layout.record_bytes, layout.page_bytes
        (32768, 262144)

    Attributes:
        num_heads: Heads of keys and values, H.
        block_tokens: Tokens of a block, T.
        key_dim: Numbers of a key.
        value_dim: Numbers of a value.
        dtype: Of both.
        alignment_bytes: A record takes a multiple of this; 4096 where a file is below.
    """

    num_heads: int
    block_tokens: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype
    alignment_bytes: int = 64

    @cached_property
    def key_items(self) -> int:
        """Numbers of the keys of a record."""
        return self.block_tokens * self.key_dim

    @cached_property
    def value_items(self) -> int:
        """Numbers of the values of a record."""
        return self.block_tokens * self.value_dim

    @cached_property
    def used_bytes(self) -> int:
        """Bytes of a record without its padding."""
        return (self.key_items + self.value_items) * self.dtype.itemsize

    @cached_property
    def record_bytes(self) -> int:
        """Bytes of a record on every tier."""
        return round_up(self.used_bytes, self.alignment_bytes)

    @cached_property
    def record_items(self) -> int:
        """Numbers that a record has room for, its padding included."""
        return self.record_bytes // self.dtype.itemsize

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of a page on every tier."""
        return self.num_heads * self.record_bytes

    @classmethod
    def of(
        cls, keys: torch.Tensor, values: torch.Tensor, block_tokens: int, alignment_bytes: int
    ) -> BlockLayout:
        """Return the layout for keys and values `(B, H, n, dim)`.

        Raises:
            ValueError: Their shapes or dtypes do not fit each other.
            TypeError: The dtype is none of those that are supported.
        """
        if keys.shape[:3] != values.shape[:3] or keys.dim() != 4 or keys.dtype != values.dtype:
            raise ValueError(
                "keys and values must have shapes (B, H, n, dim) that differ in dim only, and one "
                f"dtype; got {tuple(keys.shape)} {keys.dtype} and {tuple(values.shape)} "
                f"{values.dtype}"
            )
        if 0 in (*keys.shape[:2], keys.shape[3], values.shape[3]):
            raise ValueError(
                "keys and values must be of at least one sequence and head, and of dim at least 1; "
                f"got {tuple(keys.shape)} and {tuple(values.shape)}"
            )
        if keys.dtype not in _DTYPES:
            raise TypeError(f"keys must be one of {_DTYPES}; got {keys.dtype}")
        dims = keys.shape[3], values.shape[3]
        return cls(keys.shape[1], block_tokens, *dims, keys.dtype, alignment_bytes)

    def with_shape(self, shape: KeyShape) -> BlockLayout:
        """Return the layout of blocks of as many tokens of a layer of another shape."""
        num_heads, key_dim, value_dim = shape
        return replace(self, num_heads=num_heads, key_dim=key_dim, value_dim=value_dim)

    def split(self, records: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View records as their keys and values.

        Args:
            records: `(..., record_items)`, contiguous.

        Returns:
            Keys `(..., block_tokens, key_dim)` and values `(..., block_tokens, value_dim)`.
        """
        lead, end = records.shape[:-1], self.key_items + self.value_items
        keys = records[..., : self.key_items].unflatten(-1, (self.block_tokens, self.key_dim))
        values = records[..., self.key_items : end]
        values = values.unflatten(-1, (self.block_tokens, self.value_dim))
        assert keys.shape[: len(lead)] == lead
        return keys, values


def check_place(
    device: torch.device, layer: object, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Raise `ValueError` if keys or values are not for a layer, on the device of their pool."""
    if parse_count(layer, name="layer") >= 2**31:
        raise ValueError(f"layer is {layer}, but must be below {2**31}")
    if keys.device != device or values.device != device:
        raise ValueError(
            f"keys and values must be on the pool's device, {device}; got {keys.device} and "
            f"{values.device}: move them there, or make the pool with their device="
        )


class FullBlocks:
    """Keys and values that become pages: block after block, in each all sequences.

    Attributes:
        layout: Shapes of the pages.
        num_pages: Their number.
    """

    def __init__(self, layout: BlockLayout, keys: torch.Tensor, values: torch.Tensor) -> None:
        shape = (-1, layout.block_tokens)
        self.layout = layout
        self._parts = keys.unflatten(2, shape), values.unflatten(2, shape)
        self._batch_size = keys.shape[0]
        self.num_pages = keys.shape[0] * self._parts[0].shape[2]

    def fill(self, pages: torch.Tensor, first: int) -> None:
        """Write the pages from number `first` on to `(num_pages, H, record_items)`."""
        for b in range(self._batch_size):
            start = (b - first) % self._batch_size  # the first of them that is of this sequence
            to = self.layout.split(pages)
            block, num_blocks = (
                (first + start) // self._batch_size,
                len(to[0][start :: self._batch_size]),
            )
            for part, copy in zip(self._parts, to, strict=True):
                some = part[b, :, block : block + num_blocks].transpose(0, 1)
                copy[start :: self._batch_size] = some
