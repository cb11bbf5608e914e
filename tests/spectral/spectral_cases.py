"""Matrices whose spectra are known, for the tests of eigensolvers."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.spectral import CSR, Eigenpairs


def grid_laplacian(*lengths: int) -> CSR:
    """The Laplacian of a grid with zero boundaries, of 2 on the diagonal per dimension."""
    num_rows = int(np.prod(lengths))
    place = np.arange(num_rows).reshape(lengths)
    rows, columns = [place.ravel()], [place.ravel()]
    values = [np.full(num_rows, 2.0 * len(lengths))]
    for axis in range(len(lengths)):
        low = np.delete(place, -1, axis).ravel()
        high = np.delete(place, 0, axis).ravel()
        rows += [low, high]
        columns += [high, low]
        values.append(np.full(2 * len(low), -1.0))
    return from_entries(
        np.concatenate(rows), np.concatenate(columns), np.concatenate(values), num_rows
    )


def from_entries(rows, columns, values, num_rows: int) -> CSR:
    order = np.lexsort((columns, rows))
    offsets = np.zeros(num_rows + 1, dtype=np.int32)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=offsets[1:])
    return CSR(
        torch.from_numpy(offsets),
        torch.from_numpy(columns[order].astype(np.int32)),
        torch.from_numpy(values[order]),
        (num_rows, num_rows),
    )


def sparse_graph_laplacian(num_rows: int, *, seed: int = 0) -> Tensor:
    """The dense Laplacian of a random graph of three edges for two nodes, with many small trees."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, num_rows, (2, 3 * num_rows // 2), generator=generator)
    edges = torch.zeros(num_rows, num_rows, dtype=torch.float64)
    edges[ends[0], ends[1]] = 1
    edges = torch.maximum(edges, edges.T).fill_diagonal_(0)
    return torch.diag(edges.sum(0)) - edges


def grid_spectrum(*lengths: int) -> Tensor:
    """All its eigenvalues, sums of 2 - 2 cos(pi j / (m + 1)), rising, with all copies."""
    found = np.zeros(1)
    for m in lengths:
        one = 2 - 2 * np.cos(np.pi * np.arange(1, m + 1) / (m + 1))
        found = (found[:, None] + one).ravel()
    return torch.from_numpy(np.sort(found))


def with_spectrum(values: Tensor, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """A dense matrix with these eigenvalues and random eigenvectors."""
    wide = torch.complex128 if dtype.is_complex else torch.float64
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(len(values), len(values), dtype=wide, generator=generator)
    q = torch.linalg.qr(drawn).Q
    matrix = (q * values.to(wide)) @ q.mH
    return ((matrix + matrix.mH) / 2).to(dtype)


def dense(matrix: CSR) -> Tensor:
    found = torch.sparse_csr_tensor(matrix.offsets, matrix.columns, matrix.values, matrix.shape)
    return found.to_dense()


def residuals(matrix: Tensor, pairs: Eigenpairs, b: Tensor | None = None) -> Tensor:
    wide = torch.complex128 if matrix.is_complex() else torch.float64
    x = pairs.vectors.to(wide)
    bx = x if b is None else b.to(wide) @ x
    return (matrix.to(wide) @ x - bx * pairs.values).norm(dim=0)
