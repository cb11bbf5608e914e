"""Partial reorthogonalisation: estimates hold, few sweeps are made, and results stay the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.spectral import CSR, eigs
from penstock.spectral import _lanczos as lanczos
from penstock.spectral._native import _rotate_by_torch, rotate_rows
from spectral_cases import from_entries, grid_laplacian, grid_spectrum, sparse_graph_laplacian

pytestmark = pytest.mark.usefixtures("one_thread")


def random_graph(num_rows: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> CSR:
    """The Laplacian of a random graph; a complex one is turned by a diagonal of phases."""
    generator = np.random.default_rng(seed)
    ends = generator.integers(0, num_rows, (2, 4 * num_rows))
    degrees = np.bincount(ends.ravel(), minlength=num_rows).astype(np.float64)
    place = np.arange(num_rows)
    rows = np.concatenate([place, ends[0], ends[1]])
    columns = np.concatenate([place, ends[1], ends[0]])
    values = np.concatenate([degrees, np.full(2 * ends.shape[1], -1.0)])
    if dtype.is_complex:
        phases = np.exp(2j * np.pi * generator.random(num_rows))
        values = values * phases[rows] * phases[columns].conj()
    return from_entries(rows, columns, values, num_rows)


@pytest.fixture
def watched(monkeypatch):
    """Pairs of estimates and true components of new vectors in the basis, step by step."""
    found: list[tuple[torch.Tensor, torch.Tensor, float]] = []
    original = lanczos.ThickRestartLanczos._orthogonalize_partly

    def watch(self, estimate):
        column = original(self, estimate)
        basis = self.basis
        vectors = torch.cat([basis.fetch(each).clone() for each in range(basis.count)])
        true = (vectors.conj() @ (self._w[0] / self._w.norm())).abs()
        found.append((estimate._next[: basis.count].abs(), true, estimate.threshold))
        return column

    monkeypatch.setattr(lanczos.ThickRestartLanczos, "_orthogonalize_partly", watch)
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("num_vectors", [4.5, 12, 100])
def test_no_component_is_larger_than_the_threshold(store, watched, dtype, num_vectors: float):
    """Whatever lies in the file."""
    matrix = random_graph(1200, dtype)
    budget = int(num_vectors * 1200 * dtype.itemsize) + 3 * 8192
    pairs = eigs(matrix, 8, tol=1e-8, max_bytes=budget, store=store)
    assert (pairs.report.num_resident_vectors < 32) == (num_vectors < 40)
    assert len(watched) > 40
    for estimate, true, threshold in watched:
        assert float(true.max()) <= threshold
        assert float(estimate.max()) <= threshold
    gram = pairs.vectors.mH @ pairs.vectors
    torch.testing.assert_close(gram, torch.eye(8, dtype=dtype), rtol=0, atol=1e-13)


def test_sweeps_over_most_of_the_basis_lose_no_orthogonality_to_the_rest(watched):
    eigs(sparse_graph_laplacian(150).to_sparse_csr(), 50, tol=1e-3)
    assert len(watched) > 100
    for _, true, threshold in watched:
        assert float(true.max()) <= threshold


def test_sweeps_that_are_not_needed_are_left_out(store):
    matrix, budget = random_graph(6000), int(4.5 * 6000 * 8)
    partial = eigs(matrix, 10, tol=1e-8, max_bytes=budget, store=store)
    whole = eigs(matrix, 10, tol=1e-12, max_bytes=budget, store=store)
    torch.testing.assert_close(partial.values, whole.values, rtol=0, atol=1e-11)
    report, other = partial.report, whole.report
    assert report.peak_device_bytes <= budget
    assert report.num_swept_vectors / report.num_steps < 9
    assert other.num_swept_vectors / other.num_steps > 20
    # Besides the sweeps a step reads a vector, a restart and the result all of the basis.
    most = report.num_swept_vectors + report.num_steps + 36 * (report.num_restarts + 1)
    assert report.num_basis_vectors == 36 and report.bytes_read <= 8 * 6000 * most


@pytest.mark.parametrize("which", ["LA", "SA"])
@pytest.mark.parametrize("lengths", [(11, 11, 11), (30, 30), (18, 19, 3)])
def test_no_copy_is_missed_and_none_is_made(store, which: str, lengths: tuple[int, ...]):
    """Squares and cubes: most eigenvalues are there several times."""
    matrix, spectrum = grid_laplacian(*lengths), grid_spectrum(*lengths)
    expected = spectrum[:10] if which == "SA" else spectrum[-10:]
    for budget in (None, 6 * len(spectrum) * 8 + 4 * 8192):
        pairs = eigs(matrix, 10, which=which, tol=1e-8, max_bytes=budget, store=store)
        torch.testing.assert_close(pairs.values, expected, rtol=1e-10, atol=0)
        gram = pairs.vectors.T @ pairs.vectors
        torch.testing.assert_close(gram, torch.eye(10, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("m", "q", "n"), [(36, 16, 9001), (7, 3, 256), (33, 1, 5), (5, 5, 4096)])
def test_rotations_are_products(m: int, q: int, n: int):
    y = torch.randn(m, q, dtype=torch.float64)
    vectors = torch.randn(m, n + 3, dtype=torch.float64)[:, :n]
    expected, out = y.T @ vectors, torch.empty(q, n, dtype=torch.float64)
    gram = rotate_rows(y, vectors, out)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(gram, expected @ expected.T)
    torch.testing.assert_close(_rotate_by_torch(y, vectors, torch.empty_like(out)), gram)
    assert torch.equal(rotate_rows(y, vectors, vectors[:q]), gram)  # in place
    torch.testing.assert_close(vectors[:q], expected)
