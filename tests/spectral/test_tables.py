"""Singular values and principal components, in memory and in files."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.errors import CapacityError
from penstock.spectral import eigs, pca, svds
from penstock.unified import unify

pytestmark = pytest.mark.usefixtures("one_thread")


def make_table(num_rows: int, num_columns: int, dtype=torch.float64):
    """Rows far from zero, with a spectrum that falls."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(num_rows, num_columns, dtype=torch.float64, generator=generator)
    turn = torch.linalg.qr(
        torch.randn(num_columns, num_columns, dtype=torch.float64, generator=generator)
    ).Q
    return ((drawn * 0.9 ** torch.arange(num_columns)) @ turn + 100).to(dtype)


def check_components(found, table, k: int, atol: float = 1e-6):
    centred = table.double() - table.double().mean(0)
    _, s, vh = torch.linalg.svd(centred, full_matrices=False)
    expected = s[:k] ** 2 / (len(table) - 1)
    torch.testing.assert_close(found.variances, expected, rtol=atol, atol=0)
    overlap = (found.components @ vh[:k].T).abs()
    torch.testing.assert_close(overlap, torch.eye(k, dtype=torch.float64), rtol=0, atol=atol)
    torch.testing.assert_close(found.mean, table.double().mean(0), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_table_in_a_file_beyond_the_budget(store, dtype):
    table = make_table(20_000, 24, dtype)
    path = store / "table.npy"
    np.save(path, table.numpy())
    num_bytes = table.numel() * dtype.itemsize
    budget = num_bytes // 2 + 5 * 2**20
    for source in (path, unify(path)):
        found = pca(source, 5, max_bytes=budget)
        check_components(found, table, 5)
        assert found.report.bytes_read == num_bytes  # once
        assert found.report.peak_device_bytes <= budget
    path.unlink()


def test_tables_in_memory():
    table = make_table(500, 12)
    for source in (table, unify(table), table.numpy()):
        check_components(pca(source, 3), table, 3)
    variances, components = pca(table, 12)
    assert components.gather(1, components.abs().argmax(1, keepdim=True)).min() > 0
    coordinates = pca(table, 12).transform(table)
    torch.testing.assert_close(coordinates.var(0), variances)


@pytest.mark.parametrize("num_columns", [1, 8, 13, 31])
def test_sums_of_products_are_those_without_a_compiler(num_columns: int, monkeypatch):
    from penstock.spectral import _native

    table = make_table(10_001, num_columns, torch.float32)
    first = pca(table, num_columns)
    monkeypatch.setattr(_native, "_library", lambda: None)
    again = pca(table, num_columns)
    torch.testing.assert_close(first.variances, again.variances, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(first.mean, again.mean, rtol=1e-13, atol=0)


def test_wide_tables_are_iterated(store):
    """The covariance does not fit into the budget."""
    table = make_table(300, 500)
    path = store / "wide.npy"
    np.save(path, table.numpy())
    found = pca(path, 3, max_bytes=table.numel() * 4)
    assert found.report.method == "lanczos"
    check_components(found, table, 3)
    path.unlink()


@pytest.mark.parametrize("kind", ["dense", "csr", "file", "complex"])
def test_singular_values(store, kind: str):
    dtype = torch.complex128 if kind == "complex" else torch.float64
    matrix = torch.randn(300, 170, dtype=dtype, generator=torch.Generator().manual_seed(0))
    source, path = matrix, store / "matrix.npy"
    if kind == "csr":
        source = matrix.to_sparse_csr()
    if kind == "file":
        np.save(path, matrix.numpy())
        source = path
    u, s, vh = svds(source, 4, max_bytes=matrix.numel() * 8 if kind == "file" else None)
    expected = torch.linalg.svdvals(matrix)[:4]
    torch.testing.assert_close(s, expected, rtol=1e-10, atol=0)
    torch.testing.assert_close(matrix @ vh.mH, u * s, rtol=0, atol=1e-8)
    identity = torch.eye(4, dtype=dtype)
    torch.testing.assert_close(u.mH @ u, identity, rtol=0, atol=1e-8)
    if kind == "file":
        path.unlink()


@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float32, 1e-25),
        (torch.float32, 1e25),
        (torch.float64, 1e-165),
        (torch.float64, 1e200),
    ],
)
def test_singular_values_whose_squares_are_out_of_range(dtype, scale: float):
    unscaled = torch.randn(60, 50, dtype=dtype, generator=torch.Generator().manual_seed(0))
    u, s, vh = svds(unscaled * scale, 3)
    expected = torch.linalg.svdvals(unscaled.double())[:3]
    torch.testing.assert_close(s / scale, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(unscaled @ vh.mH, u * (s / scale).to(dtype))


@pytest.mark.parametrize("rank", [0, 2])
def test_left_vectors_of_values_that_drown_are_orthonormal(rank: int):
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(110, rank, dtype=torch.float64, generator=generator).split([60, 50])
    u, s, vh = svds(factors[0] @ factors[1].T, 4)
    identity = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(u.mH @ u, identity, rtol=0, atol=1e-12)
    torch.testing.assert_close(vh @ vh.mH, identity, rtol=0, atol=1e-12)
    assert s.sort(descending=True).values.tolist() == s.tolist() and s[rank] < 1e-6
    torch.testing.assert_close((u * s) @ vh, factors[0] @ factors[1].T, rtol=0, atol=1e-6)


def test_components_of_a_wide_table_whose_squares_are_out_of_range():
    table = torch.randn(20, 4100, generator=torch.Generator().manual_seed(0))
    table[:, 0] *= 300
    variances, components = pca(table * 1e-24, 1, tol=1e-4)
    torch.testing.assert_close(
        variances * 1e48, table[:, 0].double().var()[None], rtol=1e-2, atol=0
    )
    assert int(components[0].argmax()) == 0
    with pytest.raises(ValueError, match="overflows"):
        pca(table.double() * 1e200, 1, tol=1e-4)


@pytest.mark.parametrize("k", [7, 28])
def test_most_of_the_spectrum_of_an_operator_that_takes_blocks(k: int, store):
    """The complement of a full basis has no room for a block: Ritz values were those of garbage."""
    table = torch.randn(40, 30, dtype=torch.float64)
    found = svds(table, k, max_bytes=10_000, store=store)
    torch.testing.assert_close(found.s, torch.linalg.svdvals(table)[:k], rtol=1e-9, atol=1e-9)


def test_most_of_the_spectrum_of_a_dense_matrix_with_a_basis_in_a_file(store):
    matrix = torch.randn(40, 40, dtype=torch.float64)
    matrix += matrix.T.clone()
    pairs = eigs(matrix, 37, max_bytes=320 * 10 + 8192, store=store)
    expected = torch.linalg.eigvalsh(matrix)[3:]
    torch.testing.assert_close(pairs.values, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("view", [slice(None), slice(None, None, 3), "expanded"])
def test_tables_whose_rows_lie_apart(view):
    wide = make_table(90, 14)[:, 2:9]
    table = wide[:1].expand(90, 7) if view == "expanded" else wide[view]
    expected = torch.linalg.eigvalsh(torch.cov(table.contiguous().T)).flip(0)[:3]
    torch.testing.assert_close(pca(table, 3).variances, expected, rtol=1e-9, atol=1e-9)


def test_all_components_take_the_covariance(store):
    table = make_table(50, 20)
    with pytest.raises(CapacityError, match="all of 20 components are") as caught:
        pca(table, 20, max_bytes=5000, store=store)
    enough = int(str(caught.value).split("at least ")[1].split(",")[0])
    check_components(pca(table, 20, max_bytes=enough, store=store), table, 20)
    with pytest.raises(ValueError, match="k=4097: of more than 4096 columns"):
        pca(torch.ones(2, 4097), 4097)


def test_nearly_all_values_of_some_hundred_rows_are_computed_densely():
    table = torch.randn(300, 200, dtype=torch.float64)
    found = svds(table, 199)
    assert found.report.method == "dense"
    torch.testing.assert_close(found.s, torch.linalg.svdvals(table)[:199], rtol=1e-6, atol=1e-6)
