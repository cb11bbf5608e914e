"""Standard problems, and the plan of the memory in which Lanczos solves one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from penstock.errors import CapacityError
from penstock.memory import ExtentFile, Ledger
from penstock.spectral._lower import buffer_bytes
from penstock.spectral._operator import LinearOperator
from penstock.units import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StandardProblem:
    """A standard problem and the means to solve it.

    Attributes:
        operator: The operator, of a norm of about one.
        unit: Size of its one in the caller's operator, a power of two.
        k: Pairs that are wanted.
        which: "LA", "SA" or "SM".
        tol: Relative accuracy; 0: that of the dtype.
        max_bytes: The most bytes on the device; None: what it takes.
        file: File of the vectors that are not on the device; None: host memory.
        max_restarts: Restarts after which the iteration gives up.
        start: Vectors to begin with, (b, n), or None.
        reduce: Sums a tensor over ranks, in place.
        generator: Source of random vectors.
        ledger: Account of bytes.
    """

    operator: LinearOperator
    unit: float
    k: int
    which: str
    tol: float
    max_bytes: int | None
    file: ExtentFile | None
    max_restarts: int
    start: Tensor | None
    reduce: Callable[[Tensor], Tensor]
    generator: torch.Generator
    ledger: Ledger


@dataclasses.dataclass(frozen=True)
class BasisPlan:
    """Numbers of vectors: in the basis, of it on the device, and in a block."""

    num_vectors: int
    num_resident: int
    block: int


_LEAST_POWERS = 13  # of the operator in a basis: with fewer, blocks restart too often


def num_basis_vectors(k: int, block: int = 1) -> int:
    """Return how many vectors a basis for k pairs has, of an operator with enough rows."""
    return max(2 * k + 16, 32, k + _LEAST_POWERS * block)


def plan_basis(
    problem: StandardProblem, *, squared: bool, most_block: int | None = None
) -> BasisPlan:
    """Plan a basis and its residency within the budget.

    A block has at most `most_block` vectors, or those that the operator is best applied to; an
    operator that is `squared` needs vectors between its products.

    Raises:
        CapacityError: The budget does not hold the workspace, or the basis does not fit into it and
            there is no lower tier.
    """
    operator, k = problem.operator, problem.k
    vector_bytes = max(1, operator.most_length * operator.dtype.itemsize)
    block = max(1, min(operator.block, k, most_block or k))
    # What follows a full basis is orthogonal to all of it: the space has to have room for a block.
    while block > 1 and num_basis_vectors(k, block) + block > operator.global_length:
        block -= 1
    blocks = 3 if squared else 2  # vectors and their products, and those between
    fitting = block
    while True:
        num_vectors = min(num_basis_vectors(k, fitting), operator.global_length)
        needed_bytes = (num_vectors + blocks * fitting) * vector_bytes
        if problem.max_bytes is None or needed_bytes <= problem.max_bytes:
            return BasisPlan(num_vectors, num_vectors, fitting)
        if fitting == 1:
            break
        fitting -= 1
    while True:
        room_bytes = problem.max_bytes - blocks * block * vector_bytes
        streamed_bytes = room_bytes - buffer_bytes(operator.most_length, operator.dtype)
        if block == 1 or streamed_bytes >= 0:
            break
        block //= 2
    if problem.file is None and operator.device.type == "cpu":
        raise CapacityError(
            f"max_bytes={problem.max_bytes}: a basis of {num_vectors} vectors of "
            f"{format_bytes(vector_bytes)} does not fit; give store=, a directory on a disk, or "
            f"max_bytes of at least {(num_vectors + blocks) * vector_bytes}"
        )
    if streamed_bytes < 0:
        least = blocks * vector_bytes + buffer_bytes(operator.most_length, operator.dtype)
        raise CapacityError(
            f"max_bytes={problem.max_bytes} does not hold the workspace and buffers of vectors of "
            f"{format_bytes(vector_bytes)}; give at least {least}"
        )
    return BasisPlan(num_vectors, streamed_bytes // vector_bytes, block)
