"""Bad input and operators that fail: clear errors, and the best iterate is kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.errors import NoConvergenceError
from penstock.spectral import CSR, SymmetricOperator, eigs, pca, svds
from penstock.spectral._lanczos import ThickRestartLanczos
from spectral_cases import dense, grid_laplacian, with_spectrum

pytestmark = pytest.mark.usefixtures("one_thread")


def failing(after: int, how):
    matrix = dense(grid_laplacian(20, 20))
    calls = []

    def multiply(v):
        calls.append(1)
        return how(matrix @ v) if len(calls) > after else matrix @ v

    return SymmetricOperator(multiply, 400, dtype=torch.float64)


def test_a_callable_that_raises_in_the_middle_keeps_the_best_iterate():
    def fail(_):
        raise KeyError("the disk of the user")

    with pytest.raises(NoConvergenceError, match="KeyError") as caught:
        eigs(failing(60, fail), 3)
    error = caught.value
    assert isinstance(error.__cause__, KeyError)
    matrix = dense(grid_laplacian(20, 20))
    assert error.vectors is not None
    found = matrix @ error.vectors - error.vectors * error.values
    torch.testing.assert_close(found.norm(dim=0), error.residuals, rtol=0.01, atol=1e-8)
    again = eigs(matrix, 3, start=error.vectors)
    assert float(again.residuals.max()) < 1e-12


def test_one_that_raises_at_once_raises_its_own_error():
    def fail(_):
        raise KeyError("at once")

    with pytest.raises(KeyError, match="at once"):
        eigs(failing(0, fail), 3)


def test_an_error_right_after_a_change_of_the_filter_is_raised_itself(monkeypatch):
    """The basis is empty there, so there is no iterate."""

    def fail(self, pairs, kept, **options):
        self._change_filter(pairs, self.filter)
        raise OSError("the file is gone")

    monkeypatch.setattr(ThickRestartLanczos, "_restart", fail)
    with pytest.raises(OSError, match="the file is gone"):
        eigs(grid_laplacian(20, 20), 3)


def test_nan_in_the_middle_keeps_the_best_iterate():
    with pytest.raises(NoConvergenceError, match="NaN") as caught:
        eigs(failing(60, lambda y: y * torch.nan), 3)
    assert bool(torch.isfinite(caught.value.vectors).all())


def test_nan_in_a_matrix_is_said():
    matrix = dense(grid_laplacian(20, 20))
    matrix[3, 3] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity"):
        eigs(matrix, 3)


def test_few_restarts_give_the_best_iterate():
    matrix = with_spectrum(torch.linspace(0, 1, 400, dtype=torch.float64))
    with pytest.raises(NoConvergenceError, match="after 2 restarts") as caught:
        eigs(matrix, 4, max_restarts=2)
    error = caught.value
    assert error.vectors is not None
    found = (matrix @ error.vectors - error.vectors * error.values).norm(dim=0)
    torch.testing.assert_close(found, error.residuals, rtol=0.01, atol=1e-8)


def test_asymmetric_operators_are_refused():
    matrix = dense(grid_laplacian(20, 20))
    matrix[5, 300] += 1e-3
    with pytest.raises(ValueError, match="not symmetric"):
        eigs(matrix, 3)
    with pytest.raises(ValueError, match="not Hermitian"):
        eigs(1j * dense(grid_laplacian(20, 20)).to(torch.complex128), 3)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"k": 0}, ValueError, "k is 0, but must be at least 1"),
        ({"k": 400}, ValueError, "k=400: an operator of 400 rows"),
        ({"k": 2.0}, TypeError, "k is 2.0"),
        ({"k": True}, TypeError, "k is True"),
        ({"k": 3, "tol": "1e-3"}, TypeError, "tol='1e-3'"),
        ({"k": 3, "seed": 0.5}, TypeError, "seed is 0.5"),
        ({"k": 3, "seed": 2**63}, ValueError, "seed=9223372036854775808: expected a number below"),
        ({"k": 3, "max_restarts": 1.5}, TypeError, "max_restarts is 1.5"),
        ({"k": 3, "start": np.ones(400)}, TypeError, "start: got ndarray"),
        ({"k": 3, "which": "LR"}, ValueError, "which='LR': expected one of LA, SA, LM, SM, BE"),
        ({"k": 3, "tol": -1}, ValueError, "tol=-1"),
        ({"k": 3, "max_restarts": 0}, ValueError, "max_restarts is 0"),
        ({"k": 3, "max_bytes": "many"}, ValueError, "max_bytes must be"),
        ({"k": 3, "start": torch.ones(3)}, ValueError, "start: has shape"),
        ({"k": 3, "start": torch.ones(400, dtype=torch.complex64)}, TypeError, "start: is complex"),
        ({"k": 3, "start": torch.zeros(400)}, ValueError, "start: holds NaN"),
    ],
)
def test_arguments_out_of_range(arguments, kind, message):
    with pytest.raises(kind, match=message):
        eigs(grid_laplacian(20, 20), **arguments)


@pytest.mark.parametrize(
    ("operator", "kind", "message"),
    [
        (
            torch.ones(3, 4),
            ValueError,
            "must be square; for a matrix of other shapes there is svds",
        ),
        (torch.ones(200, 200, dtype=torch.int64), TypeError, "dtype is torch.int64"),
        (torch.ones(200, 200, dtype=torch.float16), TypeError, "dtype is torch.float16"),
        ("nowhere.npy", Exception, "nowhere.npy"),
        (object(), TypeError, "operator: got object"),
        (torch.eye(9).to_sparse(1), TypeError, "operator: got rows that are dense"),
        (torch.ones(1, 1), ValueError, "of at least two rows"),
        (np.ma.masked_array(np.eye(3), np.eye(3) > 0), TypeError, "masked array"),
        (np.eye(3, dtype=np.longdouble), TypeError, "NumPy's longdouble|NumPy's float128"),
        (
            SymmetricOperator(lambda v: v[:-1], 200),
            ValueError,
            "operator: returned a tensor of shape",
        ),
        (SymmetricOperator(lambda v: v * 1j, 200), TypeError, "operator: returned torch.complex64"),
    ],
)
def test_operators_that_are_none(operator, kind, message):
    with pytest.raises(kind, match=message):
        eigs(operator, 2)


def test_malformed_rows_are_refused():
    good = grid_laplacian(20, 20)
    columns = good.columns.clone()
    columns[7] = 400
    with pytest.raises(TypeError, match="shape=400: expected"):
        CSR(good.offsets, good.columns, good.values, 400)  # pyright: ignore[reportArgumentType]
    for lists, message in [
        ((good.offsets[:0], good.columns, good.values), "there must be 401, from 0"),
        ((good.offsets + 1, good.columns, good.values), "offsets go from 1 to"),
        ((good.offsets[:-1], good.columns, good.values), "there must be 401, from 0"),
        ((good.offsets, columns, good.values), "columns must lie from 0 to 399"),
        ((good.offsets, good.columns, good.values[:-1]), "there must be as many"),
    ]:
        for solve in (eigs, svds):
            with pytest.raises(ValueError, match=message):
                solve(CSR(*lists, (400, 400)), 2)


@pytest.mark.parametrize("dtype", [torch.int16, torch.float32, torch.bool])
def test_indices_of_other_dtypes_are_refused(dtype, tmp_path):
    """C++ would read as many numbers of another width."""
    good = grid_laplacian(20, 20)
    for lists, message in [
        ((good.offsets, good.columns.to(dtype), good.values), "columns are torch"),
        ((good.offsets.to(dtype), good.columns, good.values), "offsets are torch"),
    ]:
        for solve in (eigs, svds):
            with pytest.raises(TypeError, match=message):
                solve(CSR(*lists, (400, 400)), 2)
    np.save(tmp_path / "columns.npy", good.columns.to(dtype).numpy())
    np.save(tmp_path / "values.npy", good.values.numpy())
    with pytest.raises(TypeError, match="columns are torch"):
        eigs(CSR(good.offsets, tmp_path / "columns.npy", tmp_path / "values.npy", (400, 400)), 2)


@pytest.mark.parametrize("column", [-1, 400, 2**30])
def test_columns_of_a_file_that_are_none_are_named(column: int, tmp_path):
    good = grid_laplacian(20, 20)
    columns = good.columns.clone()
    columns[-3] = column
    np.save(tmp_path / "columns.npy", columns.numpy())
    np.save(tmp_path / "values.npy", good.values.numpy())
    source = CSR(good.offsets, tmp_path / "columns.npy", tmp_path / "values.npy", (400, 400))
    with pytest.raises(ValueError, match=f"a column is {column} in row"):
        eigs(source, 2)


def test_a_function_may_overwrite_its_vector():
    diagonal = torch.arange(1.0, 201.0, dtype=torch.float64)
    pairs = eigs(SymmetricOperator(lambda v: v.mul_(diagonal), 200, dtype=torch.float64), 2)
    expected = torch.tensor([199, 200], dtype=torch.float64)
    torch.testing.assert_close(pairs.values, expected, rtol=1e-12, atol=0)


def test_bad_tables():
    with pytest.raises(ValueError, match="k=9"):
        pca(torch.randn(30, 8), 9)
    with pytest.raises(ValueError, match="NaN or infinity"):
        pca(torch.tensor([[1.0, torch.nan], [0, 1]]), 1)
    with pytest.raises(TypeError, match="is sparse"):
        pca(torch.eye(20).to_sparse_csr(), 1)
    with pytest.raises(ValueError, match="k=8: a matrix of shape"):
        svds(np.ones((30, 8)), 8)
    with pytest.raises(ValueError, match="at least two rows and columns"):
        svds(np.ones((1, 8)), 1)
    with pytest.raises(TypeError, match="CSR of files"):
        svds(CSR(torch.tensor([0, 1, 2]), "columns.npy", "values.npy", (2, 4)), 1)
    with pytest.raises(ValueError, match="has 1 rows"):
        pca(torch.randn(1, 8), 1)
    with pytest.raises(ValueError, match="table: has shape"):
        pca(torch.randn(4, 0), 1)
    with pytest.raises(TypeError, match="matrix: dtype is"):
        svds(torch.ones(4, 4, dtype=torch.int64), 1)
    with pytest.raises(TypeError, match="k is True"):
        pca(torch.randn(30, 8), True)
    with pytest.raises(ValueError, match="tol=-3"):
        pca(torch.randn(30, 8), 2, tol=-3)
