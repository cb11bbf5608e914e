"""Generalised problems, with and without a preconditioner, against dense factorisations."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import CapacityError, NoConvergenceError
from penstock.spectral import SymmetricOperator, eigs, pca, svds
from spectral_cases import dense, from_entries, grid_laplacian, residuals, with_spectrum

pytestmark = pytest.mark.usefixtures("one_thread")


def mass_matrix(num_rows: int, *, seed: int = 0):
    """A diagonal mass matrix with a condition of about a hundred."""
    generator = torch.Generator().manual_seed(seed)
    diagonal = 10 ** (2 * torch.rand(num_rows, dtype=torch.float64, generator=generator))
    place = torch.arange(num_rows).numpy()
    return from_entries(place, place, diagonal.numpy(), num_rows)


def expected_values(a, b):
    factor = torch.linalg.inv(torch.linalg.cholesky(b))
    return torch.linalg.eigvalsh(factor @ a @ factor.mH)


@pytest.mark.parametrize("which", ["SA", "LA"])
def test_values_and_residuals(which: str):
    a, b = grid_laplacian(14, 13), mass_matrix(182)
    pairs = eigs(a, 5, which=which, B=b)
    spectrum = expected_values(dense(a), dense(b))
    expected = spectrum[:5] if which == "SA" else spectrum[-5:]
    torch.testing.assert_close(pairs.values, expected, rtol=1e-9, atol=1e-13)
    assert float(residuals(dense(a), pairs, dense(b)).max()) < 1e-12
    gram = pairs.vectors.T @ dense(b) @ pairs.vectors
    torch.testing.assert_close(gram, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-11)


def test_complex_hermitian_with_dense_mass():
    a = with_spectrum(torch.linspace(1, 50, 160).double(), dtype=torch.complex128)
    b = with_spectrum(torch.linspace(1, 3, 160).double(), dtype=torch.complex128, seed=1)
    pairs = eigs(a, 4, which="SA", B=b)
    torch.testing.assert_close(pairs.values, expected_values(a, b)[:4], rtol=1e-10, atol=0)
    assert float(residuals(a, pairs, b).max()) < 1e-11


@pytest.mark.parametrize("k", [33, 128])
def test_more_pairs_than_blocks_have_room_for_are_found_densely(k: int):
    a, b = with_spectrum(torch.linspace(-1, 1, 129).double()), mass_matrix(129)
    pairs = eigs(a, k, B=b, tol=1e-3)
    expected = expected_values(a, dense(b))[129 - k :]
    torch.testing.assert_close(pairs.values, expected, rtol=1e-9, atol=1e-12)


def test_more_pairs_than_blocks_of_many_rows_have_room_for_are_refused():
    with pytest.raises(ValueError, match="k=600: of 2049 rows LOBPCG, which"):
        eigs(grid_laplacian(2049), 600, B=mass_matrix(2049))


SPECTRA = {
    "clustered": torch.cat(
        [torch.linspace(0, 1, 190).double(), 2 + 1e-9 * torch.arange(10.0, dtype=torch.float64)]
    ),
    "indefinite": torch.linspace(-3, 3.01, 200, dtype=torch.float64) ** 3,
}


@pytest.mark.parametrize(("which", "seed"), [("LA", 0), ("SA", 1)])
@pytest.mark.parametrize("name", sorted(SPECTRA))
def test_residuals_are_at_most_those_of_arpack(name: str, which: str, seed: int):
    linalg = pytest.importorskip("scipy.sparse.linalg")
    a = with_spectrum(SPECTRA[name], seed=seed)
    b = with_spectrum(torch.linspace(1, 3, 200, dtype=torch.float64), seed=seed + 100)
    pairs = eigs(a, 6, which=which, B=b, seed=seed)
    start = torch.randn(200, generator=torch.Generator().manual_seed(seed)).double()
    values, vectors = linalg.eigsh(a.numpy(), 6, b.numpy(), which=which, v0=start.numpy())
    theirs = torch.from_numpy(a.numpy() @ vectors - b.numpy() @ vectors * values).norm(dim=0)
    assert float(residuals(a, pairs, b).max()) <= float(theirs.max())
    torch.testing.assert_close(pairs.values, torch.from_numpy(values), rtol=0, atol=1e-11)


def test_stiff_problems_of_few_rows_are_solved_densely():
    """Without a preconditioner 60,000 iterations would find none of these."""
    spectrum = torch.logspace(-6, 3, 200, dtype=torch.float64)
    a = with_spectrum(spectrum)
    b = with_spectrum(torch.linspace(1, 3, 200, dtype=torch.float64), seed=1)
    pairs = eigs(a, 6, which="SA", B=b)
    assert pairs.report.method == "dense"
    torch.testing.assert_close(pairs.values, expected_values(a, b)[:6], rtol=0, atol=1e-11)
    with pytest.raises(NoConvergenceError):
        eigs(a, 6, which="SA", B=b, max_restarts=2)


def test_a_preconditioner_saves_steps():
    """The stiff matrix that plain iterations hardly get on with: its condition is 1e8."""
    spectrum = torch.logspace(-4, 4, 200, dtype=torch.float64)
    a = with_spectrum(spectrum)
    near = torch.linalg.inv(a + 1e-3 * torch.eye(200, dtype=torch.float64))
    m = SymmetricOperator(lambda r: near @ r, 200, dtype=torch.float64)
    pairs = eigs(a, 4, which="SA", M=m, tol=1e-6)
    torch.testing.assert_close(pairs.values, spectrum[:4], rtol=0, atol=1e-10)
    assert pairs.report.method == "lobpcg" and pairs.report.num_steps < 60


def test_few_rows_are_solved_densely():
    a, b = grid_laplacian(6, 6), mass_matrix(36)
    pairs = eigs(a, 35, which="SA", B=b)
    expected = expected_values(dense(a), dense(b))[:35]
    torch.testing.assert_close(pairs.values, expected, rtol=1e-10, atol=0)


def test_what_is_not_supported_is_refused():
    a, b = grid_laplacian(14, 13), mass_matrix(182)
    with pytest.raises(ValueError, match="'LA' or 'SA'"):
        eigs(a, 3, which="LM", B=b)
    with pytest.raises(ValueError, match="B: has 36 rows"):
        eigs(a, 3, B=mass_matrix(36))
    with pytest.raises(CapacityError, match="keeps its blocks"):
        eigs(a, 3, B=b, max_bytes=1000)
    indefinite = from_entries(*(torch.arange(182).numpy(),) * 2, -dense(b).diagonal().numpy(), 182)
    with pytest.raises(ValueError, match="not positive definite"):
        eigs(a, 3, B=indefinite)
    with pytest.raises(ValueError, match="not positive definite"):
        eigs(grid_laplacian(5, 5), 3, B=dense(grid_laplacian(5, 5)) * -1)


def test_giving_up_keeps_the_best_iterate():
    with pytest.raises(NoConvergenceError, match="preconditioner") as caught:
        eigs(grid_laplacian(40, 40), 3, which="SA", B=mass_matrix(1600), max_restarts=1)
    error = caught.value
    assert error.vectors.shape == (1600, 3) and bool(torch.isfinite(error.residuals).all())
    assert float(error.residuals.max()) < 1.0


@pytest.mark.parametrize("which", ["LA", "SA"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_tolerance_is_kept_whatever_the_scale_of_the_mass(which: str, scale: float):
    """Vectors of B-norm one are long where B is small, and so are their residuals."""
    a = with_spectrum(torch.linspace(-2, 1, 160, dtype=torch.float64) ** 3)
    mass = scale * torch.logspace(0, -6, 160, dtype=torch.float64)
    pairs = eigs(a, 3, which=which, B=mass.diag(), tol=1e-6)
    root = mass.rsqrt()
    spectrum = torch.linalg.eigvalsh(root[:, None] * a * root)
    expected = spectrum[-3:] if which == "LA" else spectrum[:3]
    torch.testing.assert_close(pairs.values, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_rows", [100, 160])
def test_matrices_that_are_no_mass_are_refused(num_rows: int):
    a = with_spectrum(torch.linspace(-1, 1, num_rows, dtype=torch.float64))
    ones = torch.ones(num_rows, num_rows, dtype=torch.float64)
    kernel = torch.ones(num_rows, dtype=torch.float64)
    kernel[num_rows // 2 :] = 0
    for mass, text in (
        (ones.triu(), "B: it is not symmetric"),
        (ones * torch.nan, "B: a product holds NaN"),
        (ones * 0, "B: is zero"),
        (kernel.diag(), "B: is not positive definite"),
    ):
        with pytest.raises(ValueError, match=text):
            eigs(a, 3, B=mass)
    with pytest.raises(ValueError, match="M: it is not symmetric"):
        eigs(a, 3, M=ones.triu())
    if num_rows == 100:
        with pytest.raises(CapacityError, match="give at least 320000"):
            eigs(a, 3, M=torch.eye(num_rows, dtype=torch.float64), max_bytes=1000)


def test_few_rows_keep_to_a_budget():
    a = with_spectrum(torch.linspace(-1, 1, 100, dtype=torch.float64))
    pairs = eigs(a, 3, max_bytes=40_000)
    assert pairs.report.method == "lanczos" and pairs.report.peak_device_bytes <= 40_000
    torch.testing.assert_close(pairs.values, torch.linspace(-1, 1, 100).double()[-3:])


@pytest.mark.parametrize("num_columns", [40, 5000])
def test_tables_in_a_lower_precision_of_products(num_columns: int):
    table = torch.randn(60, num_columns)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        s, variances = svds(table, 2).s, pca(table, 2).variances
    torch.testing.assert_close(s, torch.linalg.svdvals(table.double())[:2], rtol=1e-5, atol=0)
    centred = torch.linalg.svdvals((table - table.mean(0)).double())[:2]
    torch.testing.assert_close(variances, centred**2 / 59, rtol=1e-5, atol=0)
