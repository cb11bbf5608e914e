"""Costs of the samples of a data set, checked once: the input of packing.

The cost of a batch b is

    max(least, fixed + sum_{i in b} summed_i + |b| * sum_k max_{i in b} padded_ki)

so every padded cost counts as the largest of the batch for each of its samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from penstock.batching._arrays import Floats, Integers

# Sums of costs stay exact in 64 bits, also while one sample more than fits is tried.
_MAX_TOTAL_BYTES = 1 << 61


@dataclass(frozen=True, kw_only=True)
class SampleCosts:
    """Bytes that the samples of a data set need, as `ByteModel.costs` predicts them.

    Example:
        >>> costs = SampleCosts(
        ...     fixed_bytes=100,
        ...     summed_bytes=np.array([10, 20, 30]),
        ...     padded_bytes=(np.array([4, 1, 2]),),
        ... )
        >>> costs.of_batch([1, 2])  # 100 + (20 + 30) + 2 * max(1, 2)
        154
    """

    fixed_bytes: int = 0
    """Bytes of every batch, even of an empty one."""
    least_bytes: int = 0
    """Bytes of the smallest batch, which peaks at another moment of the step: the optimizer's."""
    summed_bytes: Integers
    """Bytes that a sample adds to any batch: int64 of shape `[num_samples]`."""
    padded_bytes: tuple[Integers, ...] = field(default=())
    """Bytes that every sample of a batch needs if this sample is the longest of them: any number of
    int64 arrays of shape `[num_samples]`, each with a maximum of its own."""

    def __len__(self) -> int:
        return len(self.summed_bytes)

    def of_batch(self, samples: Sequence[int] | Integers) -> int:
        """Return the bytes of one batch, given by the numbers of its samples."""
        chosen = np.asarray(samples, dtype=np.int64)
        if len(chosen) == 0:
            return max(self.fixed_bytes, self.least_bytes)
        padded = sum(int(each[chosen].max()) for each in self.padded_bytes)
        total = self.fixed_bytes + int(self.summed_bytes[chosen].sum()) + len(chosen) * padded
        return max(total, self.least_bytes)

    def of_each(self) -> Integers:
        """Return the bytes of every sample as a batch of its own: int64 of `[num_samples]`."""
        total = self.summed_bytes + self.fixed_bytes
        for each in self.padded_bytes:
            total = total + each
        return np.maximum(total, self.least_bytes)

    def extend(self, more_bytes: Sequence[int]) -> SampleCosts:
        """Return these costs with further samples, which are not padded."""
        added = np.asarray(more_bytes, dtype=np.int64)
        return replace(
            self,
            summed_bytes=np.concatenate([self.summed_bytes, added]),
            padded_bytes=tuple(
                np.concatenate([each, np.zeros_like(added)]) for each in self.padded_bytes
            ),
        )


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
