"""Matrices of any shape, for singular values and principal components."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from penstock.memory import Ledger
from penstock.spectral._native import combine_rows
from penstock.spectral._sources import CSR, check_dtype, read_lists, read_source
from penstock.spectral._tiles import DenseSource, TileStream
from penstock.unified import UnifiedTensor, unify

_CHUNK_ELEMENTS = 1 << 18  # of rows that are centred, which stay in a cache


class Matrix:
    """A matrix of any shape, read by ranges of rows.

    Attributes:
        shape: Rows m and columns n.
        dtype: Dtype of the entries.
        device: Device of the vectors.
        held_bytes: Bytes of tiles in memory.
    """

    def __init__(self, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = shape, check_dtype(dtype, "matrix"), device
        self.held_bytes = 0

    def products(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield A x for ranges of rows: the first row, and (b, num_rows)."""
        raise NotImplementedError

    def add_gram(self, x: Tensor, total: Tensor, mean: Tensor | None) -> None:
        """Add A^H A x to `total`, (b, n); with `mean` that of A with it subtracted from rows."""
        raise NotImplementedError


class RowsMatrix(Matrix):
    """A dense matrix, in memory or tile by tile."""

    def __init__(self, tiles: Iterable[tuple[int, tuple[Tensor, ...]]], *args: Any) -> None:
        super().__init__(*args)
        self.tiles = tiles

    def products(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield A x; see `Matrix`."""
        for begin, (rows,) in self.tiles:
            yield begin, x @ rows.T

    def add_gram(self, x: Tensor, total: Tensor, mean: Tensor | None) -> None:
        """Add A^H A x; see `Matrix`."""
        for _, (rows,) in self.tiles:
            # Centred row by row: what a mean far from zero would add is not there to be rounded.
            step = len(rows) if mean is None else max(1, _CHUNK_ELEMENTS // self.shape[1])
            for begin in range(0, len(rows), max(1, step)):
                chunk = rows[begin : begin + step]
                if mean is not None:
                    chunk = chunk - mean
                total.addmm_(x @ chunk.T, chunk.conj())


class SparseMatrix(Matrix):
    """A sparse matrix in memory, and its conjugate transpose."""

    def __init__(self, csr: CSR) -> None:
        super().__init__(csr.shape, csr.values.dtype, csr.values.device)
        shape = csr.shape
        matrix = torch.sparse_csr_tensor(
            *(csr.offsets, csr.columns, csr.values, shape),
            device=csr.values.device,
            check_invariants=False,  # `read_lists` has checked them
        )
        self._rows = csr
        # A CSC matrix is the CSR of its transpose.
        turned = matrix.to_sparse_csc()
        lists = (turned.ccol_indices(), turned.row_indices(), turned.values().conj_physical())
        self._columns = CSR(*lists, shape=(shape[1], shape[0]))

    def products(self, x: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield A x; see `Matrix`."""
        yield 0, _multiply(self._rows, x)

    def add_gram(self, x: Tensor, total: Tensor, mean: Tensor | None) -> None:
        """Add A^H A x; see `Matrix`."""
        assert mean is None, "a sparse matrix is not centred"
        total += _multiply(self._columns, _multiply(self._rows, x))


def _multiply(csr: CSR, x: Tensor) -> Tensor:
    out = x.new_empty(len(x), csr.shape[0])
    combine_rows(
        *(csr.offsets, csr.columns, csr.values, x.contiguous(), out),
        first_row=0,
        alpha=1.0,
        z=out,
        gamma=0.0,
        beta=0.0,
    )
    return out


def open_matrix(
    source: Any,
    budget_bytes: int | None,
    ledger: Ledger,
    stack: contextlib.ExitStack,
    *,
    is_read_once: bool = False,
) -> Matrix:
    """Return a matrix of any shape, which `stack` closes.

    Raises:
        TypeError: It is no matrix.
        ValueError: It has not two dimensions.
    """
    source = read_source(source)
    if isinstance(source, Tensor) and source.layout in (torch.sparse_csr, torch.sparse_coo):
        found = source.detach()
        found = found.coalesce().to_sparse_csr() if found.layout == torch.sparse_coo else found
        lists = (found.crow_indices(), found.col_indices(), found.values())
        source = CSR(*lists, shape=(found.shape[0], found.shape[1]))
    if isinstance(source, CSR):
        if any(isinstance(each, str | os.PathLike) for each in (source.columns, source.values)):
            raise TypeError("matrix: is a CSR of files, which only eigs reads; load its lists")
        offsets, columns, values = read_lists(source)
        return SparseMatrix(CSR(offsets, columns, values, source.shape))
    if not isinstance(source, Tensor) or source.layout != torch.strided:
        raise TypeError(f"matrix: got {type(source).__name__}; expected a matrix, as for eigs")
    if source.dim() != 2:
        raise ValueError(f"matrix: has shape {tuple(source.shape)}, but must be (m, n)")
    shape, cpu = (source.shape[0], source.shape[1]), torch.device("cpu")
    if not isinstance(source, UnifiedTensor) or source.report().tier == "host":
        plain = source.as_subclass(Tensor).detach()
        return RowsMatrix([(0, (plain,))], shape, plain.dtype, plain.device)
    table = DenseSource(unify(source, device="cpu", cache=0))
    tiles = TileStream(
        table, budget_bytes=budget_bytes, ledger=ledger, device=cpu, is_read_once=is_read_once
    )
    stack.callback(tiles.close)
    matrix = RowsMatrix(tiles, shape, source.dtype, cpu)
    matrix.held_bytes = tiles.held_bytes
    return matrix
