"""Operators: symmetric or Hermitian maps that are applied to a few vectors at once.

Vectors are the rows of a tensor (b, n), so that each is contiguous and a basis grows by rows.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.spectral import _native

_SPARE_EXPONENTS = 8  # of the dtype's largest number, for what is multiplied by a scale
_WINDOW_ROWS, _NUM_WINDOWS, _LINE_BYTES = 4096, 16, 64


class LinearOperator(abc.ABC):
    """A square map of vectors of n elements.

    Attributes:
        length: Elements n of a vector; of several ranks, those of this rank.
        dtype: Dtype of the vectors.
        device: Device of the vectors.
        sweep_bytes: Bytes of the operator that one application reads; 0 where that is unknown.
        gather_bytes: Bytes of a vector that one application reads out of order, line by line.
        block: Vectors that it is best applied to at once.
        num_products: Products with one vector so far.
        most_length: The most elements of a vector that a rank has; all ranks plan by it.
        num_ranks: Ranks that a vector is split over.
    """

    def __init__(
        self,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        sweep_bytes: int = 0,
        block: int = 1,
    ) -> None:
        self.length, self.dtype, self.device = length, dtype, device
        self.sweep_bytes, self.block = sweep_bytes, block
        self.num_products = self.gather_bytes = 0
        self.most_length, self.num_ranks = length, 1

    @property
    def global_length(self) -> int:
        """Elements of a vector over all ranks."""
        return self.length

    def apply(
        self,
        x: Tensor,
        out: Tensor,
        *,
        alpha: float = 1.0,
        z: Tensor | None = None,
        gamma: float = 0.0,
        beta: float = 0.0,
    ) -> Tensor:
        """Compute `out = alpha A x + gamma z + beta out` and return `out`.

        Args:
            x: Vectors, (b, n), contiguous; not `out`.
            out: Result, (b, n), contiguous.
            alpha: Factor of the product.
            z: Vectors of the shape of `out`, which may be `x`; by default `x`.
            gamma: Factor of `z`.
            beta: Factor of the old content of `out`; 0 overwrites it, whatever it is.
        """
        self.num_products += len(x)
        self._combine(x, out, alpha, x if z is None else z, gamma, beta)
        return out

    @abc.abstractmethod
    def _combine(
        self, x: Tensor, out: Tensor, alpha: float, z: Tensor, gamma: float, beta: float
    ) -> None:
        """Compute what `apply` does."""

    def diagonal(self) -> Tensor | None:
        """Return the diagonal, (n,); None where it is unknown."""
        return None

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Give back what the operator holds; further calls do nothing."""


class CallableOperator(LinearOperator):
    """A function of one vector, or of several."""

    def __init__(
        self,
        function: Callable[[Tensor], Tensor],
        length: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        takes_columns: bool = False,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        """Make an operator of `function`, which takes (n, b) with `takes_columns`, else (n,)."""
        super().__init__(length, dtype, device)
        self._function, self._takes_columns = function, takes_columns
        self._shape = shape or (length,)

    def _combine(
        self, x: Tensor, out: Tensor, alpha: float, z: Tensor, gamma: float, beta: float
    ) -> None:
        if self._takes_columns:
            product = self._check(self._function(x.T.clone()), (self.length, len(x))).T
            _native.add_scaled(out, product, z, alpha, gamma, beta)
            return
        for vector, place, other in zip(x, out, z, strict=True):
            # A copy, which the function may overwrite: the vector is used again.
            product = self._check(self._function(vector.clone().view(self._shape)), self._shape)
            _native.add_scaled(place, product.reshape(-1), other, alpha, gamma, beta)

    def _check(self, product: Any, shape: tuple[int, ...]) -> Tensor:
        if not isinstance(product, Tensor):
            product = torch.as_tensor(product, device=getattr(product, "device", "cpu"))
        if product.shape != shape:
            raise ValueError(
                f"operator: returned a tensor of shape {tuple(product.shape)} for a vector of "
                f"shape {shape}; it must return one of the same shape"
            )
        if product.dtype.is_complex and not self.dtype.is_complex:
            raise TypeError(
                f"operator: returned {product.dtype} for a vector of {self.dtype}; give the dtype "
                "of its results"
            )
        return product.detach()


class DenseOperator(LinearOperator):
    """A dense matrix on one device."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(
            matrix.shape[0],
            matrix.dtype,
            matrix.device,
            sweep_bytes=matrix.numel() * matrix.element_size(),
            block=4,
        )
        self._matrix = matrix

    def _combine(
        self, x: Tensor, out: Tensor, alpha: float, z: Tensor, gamma: float, beta: float
    ) -> None:
        combine_dense(self._matrix, x, out, alpha, z, gamma, beta)

    def diagonal(self) -> Tensor:
        """Return the diagonal; see `LinearOperator`."""
        return self._matrix.diagonal()


def combine_dense(
    matrix: Tensor, x: Tensor, out: Tensor, alpha: float, z: Tensor, gamma: float, beta: float
) -> None:
    """Compute `out = alpha A x + gamma z + beta out` for some rows A of a dense matrix."""
    # y_i = sum_j a_ij x_j, so Y = X A^T without a conjugate.
    if beta == 0:
        torch.mm(x, matrix.T, out=out) if out.is_contiguous() else out.copy_(x @ matrix.T)
        if alpha != 1:
            out.mul_(alpha)
    else:
        out.addmm_(x, matrix.T, beta=beta, alpha=alpha)
    if gamma:
        out.add_(z, alpha=gamma)


class SparseOperator(LinearOperator):
    """A sparse matrix in CSR on one device."""

    def __init__(self, offsets: Tensor, columns: Tensor, values: Tensor) -> None:
        parts = (offsets, columns, values)
        super().__init__(
            len(offsets) - 1,
            values.dtype,
            values.device,
            sweep_bytes=sum(each.numel() * each.element_size() for each in parts),
            block=4,
        )
        self._offsets, self._columns, self._values = parts
        self.gather_bytes = _estimate_gather(offsets, columns, values.element_size())

    def _combine(
        self, x: Tensor, out: Tensor, alpha: float, z: Tensor, gamma: float, beta: float
    ) -> None:
        _native.combine_rows(
            *(self._offsets, self._columns, self._values, x, out),
            first_row=0,
            alpha=alpha,
            z=z,
            gamma=gamma,
            beta=beta,
        )

    def diagonal(self) -> Tensor:
        """Return the diagonal; see `LinearOperator`."""
        rows = torch.repeat_interleave(self._offsets.diff())
        on_diagonal = self._columns == rows
        found = torch.zeros(self.length, dtype=self.dtype, device=self.device)
        return found.index_add_(0, rows[on_diagonal], self._values[on_diagonal])


def _estimate_gather(offsets: Tensor, columns: Tensor, item: int) -> int:
    """Return the bytes of the cache lines of a vector that rows read, as some windows tell."""
    num_rows, lines, rows = len(offsets) - 1, 0, 0
    for begin in range(0, num_rows, max(_WINDOW_ROWS, num_rows // _NUM_WINDOWS)):
        end = min(begin + _WINDOW_ROWS, num_rows)
        part = columns[int(offsets[begin]) : int(offsets[end])]
        lines += len(torch.unique(part * item // _LINE_BYTES))
        rows += end - begin
    return _LINE_BYTES * lines * num_rows // max(1, rows)


class DerivedOperator(LinearOperator):
    """An operator on the vectors of another one, which is applied some times for each product."""

    def __init__(self, operator: LinearOperator, num_sweeps: int) -> None:
        super().__init__(
            operator.length,
            operator.dtype,
            operator.device,
            sweep_bytes=num_sweeps * operator.sweep_bytes,
            block=operator.block,
        )
        self._operator = operator
        self.most_length, self.num_ranks = operator.most_length, operator.num_ranks
        self.gather_bytes = num_sweeps * operator.gather_bytes

    @property
    def global_length(self) -> int:
        """Elements of a vector over all ranks."""
        return self._operator.global_length


class SquaredOperator(DerivedOperator):
    """A², for the eigenvalues of the largest or the smallest magnitude."""

    def __init__(self, operator: LinearOperator) -> None:
        super().__init__(operator, 2)
        self._between: Tensor | None = None

    def _combine(
        self, x: Tensor, out: Tensor, alpha: float, z: Tensor, gamma: float, beta: float
    ) -> None:
        if self._between is None or self._between.shape != x.shape:
            self._between = torch.empty_like(x)
        self._operator.apply(x, self._between)
        self._operator.apply(self._between, out, alpha=alpha, z=z, gamma=gamma, beta=beta)


class ScaledOperator(DerivedOperator):
    """A times a power of two, by which its entries lose no digits and its squares are in range."""

    def __init__(self, operator: LinearOperator, scale: float) -> None:
        super().__init__(operator, 1)
        self._scale, self.num_products = scale, operator.num_products

    def _combine(
        self, x: Tensor, out: Tensor, alpha: float, z: Tensor, gamma: float, beta: float
    ) -> None:
        self._operator.apply(x, out, alpha=alpha * self._scale, z=z, gamma=gamma, beta=beta)

    def diagonal(self) -> Tensor | None:
        """Return the diagonal; see `LinearOperator`."""
        found = self._operator.diagonal()
        return None if found is None else found * self._scale


def choose_scale(size: float, dtype: torch.dtype) -> float:
    """Return the power of two by which numbers of this size are about one; 1 for zero."""
    if not 0 < size < math.inf:
        return 1.0
    most = math.log2(torch.finfo(dtype).max) - _SPARE_EXPONENTS
    return 2.0 ** round(max(-most, min(most, -math.log2(size))))


def make_random(shape: tuple[int, int], like: LinearOperator, generator: torch.Generator) -> Tensor:
    """Return normal random vectors on the operator's device; the same on every device."""
    drawn = torch.randn(shape, dtype=like.dtype, generator=generator, device="cpu")
    return drawn.to(like.device)
