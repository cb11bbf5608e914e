"""Products of sparse matrices: row by row, or with a block of B's columns at hand.

Row by row, each nonzero of A loads a row of B, and a row of C is summed at hand (Gustavson 1978).
Where B is cut into blocks of columns with equal nonzeros, each stays while A passes by; where B
fits, one block is enough.
"""

from __future__ import annotations

import dataclasses

from penstock.codegen import ceil_div
from penstock.iomodel._bounds import SPARSE_BOUND, product_bound
from penstock.iomodel._levels import (
    FastMemory,
    IOModel,
    TiledSchedule,
    check_counts,
    model_levels,
)


def spgemm(
    multiplications: int,
    left_nonzeros: int,
    right_nonzeros: int,
    result_nonzeros: int,
    fast_memory: FastMemory,
    *,
    longest_row: int = 1,
    element_bytes: int = 8,
) -> IOModel:
    """Model C = A B of sparse matrices by their counts: bytes, regime, and the lower bound.

    Example:
        >>> spgemm(10**6, 10**5, 10**5, 5 * 10**5, "16KiB").regime
        'row by row'
        >>> spgemm(10**6, 10**5, 10**5, 5 * 10**5, "1MiB").regime
        'blocks of columns'

    Args:
        multiplications: Pairs of a nonzero of A and one of B that meet.
        left_nonzeros: Nonzeros of A.
        right_nonzeros: Nonzeros of B.
        result_nonzeros: Nonzeros of C.
        fast_memory: Bytes of the fast memory, or a machine: a size for each level.
        longest_row: Nonzeros of C's longest row, which is summed in the fast memory.
        element_bytes: Bytes of a nonzero with its index. Pointers to rows are left out.

    Raises:
        TypeError: A count is no integer, or `fast_memory` is no size.
        ValueError: A count is below 1, the counts contradict each other, or the fast memory does
            not hold the longest row and two nonzeros.
    """
    nonzeros = (left_nonzeros, right_nonzeros, result_nonzeros)
    of = _SparseProduct(multiplications, *nonzeros, longest_row)
    levels = model_levels(fast_memory, element_bytes, of.choose, of.bound, longest_row + 2)
    return IOModel(f"spgemm, {multiplications} multiplications", levels, SPARSE_BOUND)


@dataclasses.dataclass(frozen=True)
class _SparseProduct:
    """Counts of a product, which are checked."""

    multiplications: int
    left: int
    right: int
    result: int
    longest_row: int

    def __post_init__(self) -> None:
        check_counts(**dataclasses.asdict(self))
        if max(self.left, self.right, self.result) > self.multiplications:
            raise ValueError(
                f"there are {self.multiplications} multiplications for {self.left}, {self.right} "
                f"and {self.result} nonzeros; pass nonzeros that take part in at least one each"
            )
        product = self.left * self.right * self.result
        if self.multiplications**2 > product or self.longest_row > self.result:
            raise ValueError(
                f"{self.multiplications} multiplications, or a row of {self.longest_row}, are more "
                "than these nonzeros allow (Loomis and Whitney 1949: at most the root of the three "
                "counts' product); pass the counts of one product"
            )

    def bound(self, elements: int) -> int:
        """Return the elements that move at least through so many."""
        compulsory = self.left + self.right + self.result
        return max(compulsory, product_bound(self.multiplications, elements))

    def choose(self, elements: int) -> TiledSchedule:
        """Return the schedule that moves fewer elements through so many."""
        at_hand = elements - self.longest_row - 1  # beside a row of C and a nonzero of A
        blocks = ceil_div(self.right, at_hand)
        by_blocks = blocks * self.left + self.right
        by_rows = self.left + self.multiplications
        is_blocked = by_blocks <= by_rows
        return TiledSchedule(
            regime="blocks of columns" if is_blocked else "row by row",
            tiles={"blocks": blocks} if is_blocked else {"rows": 1},
            loaded=min(by_blocks, by_rows),
            stored=self.result,
        )
