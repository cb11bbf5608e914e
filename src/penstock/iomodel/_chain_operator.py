"""Operators of a chain, with what a plan of it knows of them."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from penstock.iomodel._levels import check_amounts, check_counts

Features = Literal["mixed", "each", "product"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainOperator:
    """An operator that works on each row alone.

    Attributes:
        name: For reports.
        row_bytes: Bytes of its result for each row.
        inputs: Numbers of the operators whose results it reads, all before it; -1 is the input of
            the chain. None: the operator before it.
        weight_bytes: Bytes that it reads for all rows together.
        row_operations: Additions and multiplications for each row.
        row_seconds: Time of a row whose bytes are in a cache, on all threads, where it was
            measured: of functions that take longer than their additions and multiplications.
        chunk_seconds: Time of a chunk beside that of its rows, where it was measured.
        again_row_seconds: Time of a row that is spent once more where a step runs in chunks.
        again_chunk_seconds: Likewise of a chunk.
        value_passes: Times that its operands and its result are read or written.
        new_row_bytes: Bytes of memory that it takes for each row; None: its result.
        can_fuse: Whether it is computed in place of its operand.
        features: Whether each feature of its result follows from the same feature of its operand
            (`"each"`), or it is a product of matrices (`"product"`); else `"mixed"`.
    """

    name: str
    row_bytes: int
    inputs: tuple[int, ...] | None = None
    weight_bytes: int = 0
    row_operations: int = 0
    row_seconds: float = 0.0
    chunk_seconds: float = 0.0
    again_row_seconds: float = 0.0
    again_chunk_seconds: float = 0.0
    value_passes: float = 1.0
    new_row_bytes: int | None = None
    can_fuse: bool = False
    features: Features = "mixed"

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            TypeError: One is no number.
            ValueError: One is below 0, or `features` is of no kind.
        """
        if self.features not in (kinds := get_args(Features)):
            raise ValueError(f"features is {self.features!r}; pass one of {', '.join(kinds)}")
        counts = {"row_bytes": self.row_bytes, "weight_bytes": self.weight_bytes}
        counts["row_operations"] = self.row_operations
        if self.new_row_bytes is not None:
            counts["new_row_bytes"] = self.new_row_bytes
        check_counts(least=0, **counts)
        check_amounts(
            row_seconds=self.row_seconds,
            chunk_seconds=self.chunk_seconds,
            again_row_seconds=self.again_row_seconds,
            again_chunk_seconds=self.again_chunk_seconds,
            value_passes=self.value_passes,
        )
