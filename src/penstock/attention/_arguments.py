"""Checks of the arguments that layouts are made from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock.units import parse_count

_BLOCKS = (16, 32, 64, 128)


def parse_block(block: int) -> int:
    """Return the tokens of a block as an int."""
    if block not in _BLOCKS:
        raise ValueError(f"block is {block!r}, but must be one of {_BLOCKS}")
    return parse_count(block, name="block")


def check_mask(mask: Tensor) -> Tensor:
    """Return a mask of blocks with heads."""
    _check_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask has the dtype {mask.dtype}, but must be bool: compare it, as in scores > 0"
        )
    mask = mask[None] if mask.dim() == 2 else mask
    if mask.dim() != 3 or 0 in mask.shape:
        raise ValueError(
            f"mask has the shape {tuple(mask.shape)}, but must have (heads or 1, query blocks, "
            "key blocks), none of them 0"
        )
    return mask


def check_scores(scores: Tensor) -> None:
    """Refuse scores that are no floating-point numbers of blocks."""
    _check_tensor("scores", scores)
    if not scores.is_floating_point():
        raise TypeError(
            f"scores have the dtype {scores.dtype}, but must be floating: convert them with "
            "scores.float()"
        )
    if scores.dim() != 3 or 0 in scores.shape:
        raise ValueError(
            f"scores have the shape {tuple(scores.shape)}, but must have (heads or 1, query "
            "blocks, key blocks), none of them 0"
        )


def check_tokens(name: str, value: int | None, num_blocks: int, block: int) -> int | None:
    """Return a number of tokens that needs all blocks, or None for any."""
    if value is None:
        return None
    value = parse_count(value, name=name, least=1)
    if -(-value // block) != num_blocks:
        raise ValueError(
            f"{name} is {value}, which need {-(-value // block)} blocks of {block}, but mask has "
            f"{num_blocks}"
        )
    return value


def check_vector(name: str, tensor: Tensor, length: int | None = None) -> None:
    """Refuse what is no tensor of so many integers."""
    _check_tensor(name, tensor)
    check_integers(name, tensor)
    if tensor.dim() != 1 or length not in (None, len(tensor)):
        expected = "one dimension" if length is None else f"({length},)"
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}, but must have {expected}")


def as_numbers(name: str, values: Any) -> Tensor:
    """Return numbers as a tensor, on the device that they are on."""
    try:
        return torch.as_tensor(values, device=getattr(values, "device", "cpu"))
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"{name} are {values!r:.200}, but must be whole numbers: {error}") from None


def check_integers(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that has no elements, or others than integers."""
    if tensor.numel() == 0:
        raise ValueError(f"{name} has the shape {tuple(tensor.shape)}: there must be one at least")
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} has the dtype {tensor.dtype}, but must have integers")


def check_tensors(*, bias: Any, **tensors: Any) -> None:
    """Refuse what is no tensor; there may be no bias."""
    for name, each in tensors.items():
        _check_tensor(name, each)
    if bias is not None:
        _check_tensor("bias", bias)


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"{name} is {type(value).__name__}, but must be a tensor: make it one with "
            f"torch.as_tensor({name})"
        )
