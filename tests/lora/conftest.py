"""Oracles of LoRA: the dropout mask by NumPy, and PEFT's formula under a given mask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from penstock.lora import Adapter, _dropout


def _mix(word: np.ndarray) -> np.ndarray:
    word = (word ^ (word >> 16)) * np.uint32(0x7FEB352D)
    word = (word ^ (word >> 15)) * np.uint32(0x846CA68B)
    return word ^ (word >> 16)


class Oracle:
    """The definitions of `_dropout.py` and of PEFT's layer, in other words than the library's."""

    @staticmethod
    def words(seed: int, rows: Sequence[int] | np.ndarray, num_columns: int) -> np.ndarray:
        """The words of some rows, in arithmetic of 32 bits."""
        low, high = np.array([[seed % 2**32], [seed // 2**32 % 2**32]], np.uint32)
        numbers = np.asarray(rows, np.uint64).astype(np.uint32)
        keys = _mix(_mix(_mix(low) + high) + numbers)
        columns = np.arange(num_columns, dtype=np.uint32) * np.uint32(0x9E3779B9)
        return _mix(keys[:, None] + columns)

    @classmethod
    def mask(cls, seed: int, num_rows: int, num_columns: int, probability: float) -> torch.Tensor:
        """True where an element is kept."""
        words = cls.words(seed, range(num_rows), num_columns)
        return torch.from_numpy(words >= round(probability * 2**32))

    @classmethod
    def formula(
        cls,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        adapters: Sequence[Adapter],
        by_row: Sequence[int],
        seeds: Sequence[int],
    ) -> torch.Tensor:
        """`result + lora_B(lora_A(dropout(x))) * scaling`, for the rows of each adapter."""
        y = torch.nn.functional.linear(x, weight, bias)
        for number, adapter in enumerate(adapters):
            index = torch.tensor([i for i, each in enumerate(by_row) if each == number]).long()
            inputs = x[index]
            if adapter.dropout:
                kept = cls.mask(seeds[number], *inputs.shape, adapter.dropout)
                inputs = inputs * kept / (1 - adapter.dropout)
            product = inputs @ adapter.down.T @ adapter.up.T * adapter.scaling
            y = y.index_add(0, index, product)
        return y


@pytest.fixture(scope="session")
def oracle() -> type[Oracle]:
    return Oracle


@pytest.fixture(params=["C++", "torch"])
def masks_by(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The masks by C++, and as on a machine without a compiler."""
    if request.param == "torch":
        monkeypatch.setattr(_dropout, "_library", lambda: None)
    elif _dropout._library() is None:
        pytest.skip("no C++ compiler")
    return request.param
