"""Numbers that users give, one per sample: checked, and exact in 64 bits when they are added up."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.batching._arrays import Floats, Integers

# Sums of costs stay exact in 64 bits, also while one sample more than fits is tried.
_MAX_TOTAL_BYTES = 1 << 61


def check_numbers(values: Any, *, name: str) -> Floats | Integers:
    """Turn a sequence, an array or a tensor into a row of numbers >= 0; integers stay integers."""
    if hasattr(values, "detach"):  # a tensor, on any device
        values = values.detach().cpu()
        if values.is_floating_point():  # NumPy has no bfloat16
            values = values.double()
        values = values.numpy()
    try:
        array = np.asarray(values)
    except (ValueError, TypeError) as error:
        raise TypeError(f"{name} must be numbers, one per sample: {error}") from None
    if array.dtype.kind not in "iufb":
        raise TypeError(
            f"{name} must be numbers, one per sample; got {type(values).__name__} "
            f"of dtype {array.dtype}"
        )
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis; got shape {array.shape}")
    if len(array) == 0:
        raise ValueError(f"{name} is empty; give one number per sample, at least one")
    wrong = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if len(wrong):
        raise ValueError(
            f"{name} must be finite and >= 0; sample {wrong[0]} has {array[wrong[0]]} "
            f"({len(wrong)} of {len(array)} are wrong)"
        )
    if array.dtype.kind != "f":
        if int(array.max()) > _MAX_TOTAL_BYTES:
            raise ValueError(f"{name} must be at most {_MAX_TOTAL_BYTES}; got {array.max()}")
        return array.astype(np.int64)
    array = array.astype(np.float64)
    with np.errstate(over="ignore"):
        if not np.isfinite(array.sum()):
            raise ValueError(f"{name} must have a finite sum; the largest is {array.max()}")
    return array


def round_up_bytes(values: Any, *, name: str) -> Integers:
    """Turn numbers >= 0 into whole bytes, rounded up, with a sum of at most 64 bits."""
    numbers = check_numbers(values, name=name)
    total = float(numbers.sum(dtype=np.float64))
    if total > _MAX_TOTAL_BYTES:
        raise ValueError(f"{name} must sum to at most {_MAX_TOTAL_BYTES} bytes; got {total:.4g}")
    if numbers.dtype.kind == "f":  # only then: as floats, large integers become equal
        numbers = np.ceil(numbers)
    return numbers.astype(np.int64)


def read_samples(samples: Any, num_samples: int, *, name: str) -> Integers:
    """Turn the numbers of a batch's samples into an array; masks and negative ones are refused."""
    chosen = np.asarray(samples.detach().cpu() if hasattr(samples, "detach") else samples)
    if chosen.size and chosen.dtype.kind not in "iu":
        raise TypeError(
            f"{name} must be whole numbers, those of the samples; got dtype {chosen.dtype}: of a "
            "mask pass mask.nonzero()[0]"
        )
    if chosen.ndim != 1:
        raise ValueError(f"{name} must have one axis; got shape {chosen.shape}")
    if chosen.size and not 0 <= chosen.min() <= chosen.max() < num_samples:
        raise ValueError(
            f"{name} must be numbers of samples, from 0 to {num_samples - 1}; got {chosen.min()} "
            f"to {chosen.max()}"
        )
    return chosen.astype(np.int64)
