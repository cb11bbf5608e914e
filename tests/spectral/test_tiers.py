"""Bases and operators below the device: the same values, bytes that are counted, budgets kept."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.errors import CapacityError, StoreFullError
from penstock.memory import ExtentFile, FileStore, Ledger, Link, Tier
from penstock.spectral import CSR, eigs
from penstock.spectral._basis import Basis
from penstock.spectral._tiles import FileList, SparseSource
from penstock.unified import unify
from spectral_cases import dense, grid_laplacian, grid_spectrum, with_spectrum

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("num_vectors", [16, 60])
def test_a_basis_in_a_file(store, num_vectors: int):
    matrix, expected = grid_laplacian(12, 11, 10), grid_spectrum(12, 11, 10)[:6]
    budget = num_vectors * 12 * 11 * 10 * 8
    pairs = eigs(matrix, 6, which="SA", max_bytes=budget, store=store)
    torch.testing.assert_close(pairs.values, expected, rtol=0, atol=1e-13)
    report = pairs.report
    assert report.peak_device_bytes <= budget
    assert (report.num_resident_vectors < 32) == (num_vectors < 40)
    assert (report.bytes_read > 0) == (num_vectors < 40)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.complex128])
def test_a_basis_in_a_file_of_any_dtype(store, dtype):
    spectrum = torch.linspace(0, 1, 500, dtype=torch.float64) ** 3
    matrix = with_spectrum(spectrum, dtype=dtype)
    budget = 16 * 500 * dtype.itemsize + 3 * 8192
    pairs = eigs(matrix, 4, max_bytes=budget, store=store)
    atol = 100 * torch.finfo(dtype).eps
    torch.testing.assert_close(pairs.values, spectrum[-4:], rtol=0, atol=atol)
    assert pairs.report.num_resident_vectors < pairs.report.num_basis_vectors


def make_basis(num_resident: int, file, capacity: int = 8, length: int = 3000):
    ledger = Ledger()
    basis = Basis(
        *(capacity, length, torch.float64, torch.device("cpu")),
        num_resident=num_resident,
        file=file,
        ledger=ledger,
        reduce=lambda tensor: tensor,
    )
    return basis, ledger


@pytest.mark.parametrize("below", ["file", "host"])
def test_all_residencies_compute_the_same(store, below: str):
    vectors = torch.linalg.qr(torch.randn(3000, 8, dtype=torch.float64)).Q.T.contiguous()
    new, y = torch.randn(2, 3000, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)
    for num_resident in (0, 3, 8):
        file = ExtentFile(store) if below == "file" else None
        basis, _ = make_basis(num_resident, file)
        basis.append(vectors)
        w = new.clone()
        found = basis.orthogonalize(w)
        torch.testing.assert_close(found, vectors @ new.T, rtol=0, atol=1e-12)
        assert (vectors @ w.T).abs().max() < 1e-14
        found = torch.cat([basis.fetch(each).clone() for each in (5, 2, 4, 3)])
        torch.testing.assert_close(found, vectors[[5, 2, 4, 3]])
        combined = basis.combine(y, torch.empty(3, 3000, dtype=torch.float64))
        torch.testing.assert_close(combined, y.T @ vectors)
        basis.rotate(y)
        assert basis.count == 3
        found = torch.cat([basis.fetch(each).clone() for each in range(3)])
        torch.testing.assert_close(found, y.T @ vectors)
        basis.close()
        if file is not None:
            file.close()


def misses_of_belady(order: list[int], capacity: int) -> int:
    """The fewest loads of a cache in which each use needs its vector (Belady 1966)."""
    cache: set[int] = set()
    misses = 0
    for at, each in enumerate(order):
        if each in cache:
            continue
        misses += 1
        cache.add(each)
        if len(cache) > capacity:

            def following(candidate: int, at: int = at) -> int:
                rest = order[at + 1 :]
                return rest.index(candidate) if candidate in rest else len(order)

            cache.remove(max(cache, key=following))
    return misses


def test_sweeps_read_as_few_bytes_as_belady(store):
    """All that is resident is used from there; vectors that stay on the device are not written."""
    file = ExtentFile(store)
    basis, ledger = make_basis(3, file, capacity=24, length=4096)
    vectors = torch.linalg.qr(torch.randn(4096, 24, dtype=torch.float64)).Q.T.contiguous()
    basis.append(vectors)
    for _ in range(10):
        # Orthogonal to all already: one sweep each.
        w = torch.randn(1, 4096, dtype=torch.float64)
        w -= (w @ vectors.T) @ vectors
        basis.orthogonalize(w)
    read = ledger.moved(Link.FILE_TO_DEVICE) // (4096 * 8)
    # Two slots more than the resident ones: those that vectors pass through.
    least = misses_of_belady(list(range(24)) * 10, 5) - 5
    assert least <= read <= 1.2 * least
    basis.close()
    assert ledger.moved(Link.DEVICE_TO_FILE) == 21 * 4096 * 8
    file.close()
    assert ledger.resident(Tier.DEVICE) == ledger.resident(Tier.FILE) == 0


def test_a_dense_matrix_in_a_file_larger_than_the_budget(store):
    spectrum = torch.linspace(0, 1, 420, dtype=torch.float64) ** 2
    matrix = with_spectrum(spectrum)
    path = store / "matrix.npy"
    np.save(path, matrix.numpy())
    budget = 1 << 20
    for source in (path, unify(path)):
        pairs = eigs(source, 3, max_bytes=budget, tol=1e-9)
        torch.testing.assert_close(pairs.values, spectrum[-3:], rtol=0, atol=1e-9)
        report = pairs.report
        assert report.peak_device_bytes <= budget < matrix.numel() * 8
        sweeps = -(-report.num_products // 4)
        assert 0 < report.bytes_read <= sweeps * matrix.numel() * 8 * 1.35
    path.unlink()


def test_a_sparse_matrix_in_files(store):
    matrix, expected = grid_laplacian(16, 15, 5), grid_spectrum(16, 15, 5)[-3:]
    np.save(store / "columns.npy", matrix.columns.numpy())
    np.save(store / "values.npy", matrix.values.numpy())
    source = CSR(matrix.offsets, store / "columns.npy", store / "values.npy", matrix.shape)
    kept = eigs(source, 3)
    budget = 12 * 16 * 15 * 5 * 8 + 100_000
    streamed = eigs(source, 3, max_bytes=budget, store=store)
    for pairs in (kept, streamed):
        torch.testing.assert_close(pairs.values, expected, rtol=0, atol=1e-12)
    assert streamed.report.peak_device_bytes <= budget
    assert streamed.report.bytes_read > 20 * kept.report.bytes_read
    (store / "columns.npy").unlink()
    (store / "values.npy").unlink()


@pytest.mark.parametrize("max_bytes", [None, 200_000])
def test_a_small_sparse_matrix_in_files_is_read_once(store, max_bytes):
    """Its rows have fewer bytes than the pages that each would be read with."""
    matrix = grid_laplacian(200)
    paths = [store / "columns.npy", store / "values.npy"]
    for path, each in zip(paths, (matrix.columns, matrix.values), strict=True):
        np.save(path, each.numpy())
    source = CSR(matrix.offsets, *paths, matrix.shape)
    pairs = eigs(source, 3, tol=1e-3, max_bytes=max_bytes, store=store)
    lists = (matrix.offsets, matrix.columns, matrix.values)
    assert pairs.report.bytes_read == sum(each.nbytes for each in lists)
    for path in paths:
        path.unlink()


class Numbers(FileList):
    """A list that begins far into a file."""

    def __init__(self, numbers: torch.Tensor, first: int) -> None:
        self._numbers, self._first, self.dtype = numbers, first, numbers.dtype

    def read(self, begin: int, end: int, memory: torch.Tensor) -> torch.Tensor:
        return self._numbers[begin - self._first : end - self._first]


def test_offsets_beyond_what_the_dtype_of_columns_holds():
    first = 2**31 - 1
    columns = Numbers(torch.tensor([0, 1, 1], dtype=torch.int32), first)
    values = Numbers(torch.tensor([2.0, 3.0, 4.0]), first)
    source = SparseSource(torch.tensor([0, first, first + 2, first + 3]), columns, values, 2)
    tile = source.read(1, 3, torch.empty(1 << 16, dtype=torch.uint8))
    x, out = torch.tensor([[10.0, 100.0]]), torch.zeros(1, 3)
    source.combine(tile, 1, x, out, (1.0, out, 0.0, 0.0))
    assert out.tolist() == [[0.0, 320.0, 400.0]]


def test_budgets_that_are_too_small_say_what_is_enough(store):
    matrix = grid_laplacian(20, 20)
    with pytest.raises(CapacityError, match="give store="):
        eigs(matrix, 6, max_bytes=20 * 400 * 8)
    with pytest.raises(CapacityError, match="give at least 14592"):
        eigs(matrix, 6, max_bytes=10_000, store=store)
    assert eigs(matrix, 6, max_bytes=14592, store=store).report.num_resident_vectors == 0


def test_a_small_problem_takes_lobpcg_where_no_basis_fits():
    pairs = eigs(grid_laplacian(20, 20), 1, which="SA", max_bytes=25 * 400 * 8)
    assert pairs.report.method == "lobpcg"
    assert pairs.report.peak_device_bytes <= 25 * 400 * 8
    torch.testing.assert_close(pairs.values, grid_spectrum(20, 20)[:1], rtol=0, atol=1e-12)


def test_a_full_store_is_said_before_the_work(store):
    calls = []
    matrix = dense(grid_laplacian(20, 20))

    class Counted:
        shape, dtype = (400, 400), torch.float64

        def __call__(self, v):
            calls.append(1)
            return matrix @ v

    with pytest.raises(StoreFullError):
        eigs(Counted(), 6, max_bytes=16000, store=FileStore(store, max_bytes=8192))
    assert len(calls) <= 2  # whether it is symmetric
