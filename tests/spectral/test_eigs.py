"""Eigenvalues against analytic spectra, dense factorisations and ARPACK."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import NoConvergenceError
from penstock.spectral import CSR, SymmetricOperator, eigs, svds
from penstock.unified import unify
from spectral_cases import (
    dense,
    grid_laplacian,
    grid_spectrum,
    residuals,
    sparse_graph_laplacian,
    with_spectrum,
)

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = [torch.float32, torch.float64, torch.complex64, torch.complex128]


def wanted(spectrum, k: int, which: str):
    """The k values that `which` asks for, rising."""
    spectrum = spectrum.sort().values
    if which == "BE":
        return torch.cat([spectrum[: k // 2], spectrum[len(spectrum) - (k - k // 2) :]])
    if which in ("LM", "SM"):
        order = spectrum.abs().argsort(descending=which == "LM")
        return spectrum[order[:k]].sort().values
    return spectrum[:k] if which == "SA" else spectrum[len(spectrum) - k :]


@pytest.mark.parametrize("which", ["LA", "SA", "LM", "SM", "BE"])
def test_no_eigenvalue_of_a_grid_is_missed(which: str):
    """A cube: most eigenvalues are there three or six times."""
    pairs = eigs(grid_laplacian(11, 11, 11), 11, which=which)
    torch.testing.assert_close(
        pairs.values, wanted(grid_spectrum(11, 11, 11), 11, which), rtol=0, atol=1e-12
    )
    assert float(pairs.residuals.max()) < 1e-13
    gram = pairs.vectors.T @ pairs.vectors
    torch.testing.assert_close(gram, torch.eye(11, dtype=torch.float64), rtol=0, atol=1e-12)
    assert pairs.report.method == "lanczos"


@pytest.mark.parametrize("which", ["SA", "LM"])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_more_eigenvalues_than_the_rank(which: str, is_sparse: bool):
    """Those that are wanted are zero: rounding goes by the norm, not by them."""
    factor = torch.randn(331, 3, dtype=torch.float64)
    matrix = factor @ factor.T
    pairs = eigs(matrix.to_sparse_csr() if is_sparse else matrix, 7, which=which)
    expected = wanted(torch.linalg.eigvalsh(matrix), 7, which)
    torch.testing.assert_close(pairs.values, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("which", "k", "num_starts"), [("LM", 7, 0), ("BE", 7, 0), ("BE", 4, 2), ("LM", 100, 0)]
)
def test_vectors_of_an_eigenspace_that_both_ends_share(which: str, k: int, num_starts: int):
    """Each end finds some vectors of the kernel, of 127 dimensions."""
    factor = torch.randn(130, 3, dtype=torch.complex128)
    matrix = factor @ factor.mH
    start = torch.randn(130, num_starts, dtype=torch.complex128) if num_starts else None
    pairs = eigs(matrix, k, which=which, start=start)
    expected = wanted(torch.linalg.eigvalsh(matrix), k, which)
    torch.testing.assert_close(pairs.values, expected, rtol=0, atol=1e-11)
    overlaps = pairs.vectors.mH @ pairs.vectors
    torch.testing.assert_close(overlaps, torch.eye(k, dtype=torch.complex128), rtol=0, atol=1e-11)
    assert float(residuals(matrix, pairs).max()) < 1e-10


@pytest.mark.parametrize("which", ["LM", "BE"])
def test_products_for_both_ends_are_counted_once(which: str):
    matrix, num_products = with_spectrum(torch.linspace(-1, 1, 200, dtype=torch.float64)), 0

    def multiply(v):
        nonlocal num_products
        num_products += 1
        return matrix @ v

    pairs = eigs(SymmetricOperator(multiply, 200, dtype=torch.float64), 4, which=which, tol=1e-4)
    assert pairs.report.num_products == num_products


def test_values_around_zero_of_a_small_indefinite_matrix():
    spectrum = torch.linspace(-1, 2, 301, dtype=torch.float64)
    pairs = eigs(with_spectrum(spectrum), 7, which="SM")
    torch.testing.assert_close(pairs.values, wanted(spectrum, 7, "SM"), rtol=0, atol=1e-13)
    assert pairs.report.method == "dense"
    bytes_of_copies = 4 * 301**2 * 8
    assert pairs.report.peak_device_bytes == bytes_of_copies
    spectrum[:] = torch.linspace(1, 2, 301, dtype=torch.float64) * spectrum.sign()
    spectrum[7] = -0.01
    iterated = eigs(with_spectrum(spectrum), 1, which="SM", max_bytes=bytes_of_copies - 1)
    assert iterated.report.method == "lanczos"
    assert abs(float(iterated.values) + 0.01) < 1e-12


def test_a_loose_tolerance_misses_none_either():
    for side in (11, 14):
        pairs = eigs(grid_laplacian(side, side), 8, which="SA", tol=1e-3)
        expected = grid_spectrum(side, side)[:8]
        torch.testing.assert_close(pairs.values, expected, rtol=1e-3, atol=0)


@pytest.mark.parametrize("num_vectors", [100, 14])
def test_a_loose_tolerance_is_kept_and_verified_once(tmp_path, num_vectors: int):
    """Values go on growing within it, which is no reason to look for missed ones again."""
    matrix, budget = grid_laplacian(41, 41), 8 * 41 * 41 * num_vectors
    for which, tol in (("LA", 1e-2), ("LA", 1e-4), ("SA", 1e-4)):
        pairs = eigs(matrix, 6, which=which, tol=tol, max_bytes=budget, store=tmp_path)
        assert bool((pairs.residuals <= tol * pairs.values.abs()).all())
        assert pairs.report.num_restarts < 20
        exact = wanted(grid_spectrum(41, 41), 6, which)
        torch.testing.assert_close(pairs.values, exact, rtol=tol, atol=0)


@pytest.mark.parametrize("num_vectors", [None, 72, 40])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_values_that_thicken_towards_the_wanted_end(is_sparse: bool, num_vectors: int | None):
    """ARPACK needs 1,900 products, in as many passes over the matrix."""
    spectrum = torch.linspace(0.2154, 4.64, 150, dtype=torch.float64) ** 3
    matrix = with_spectrum(spectrum)
    source = matrix.to_sparse_csr() if is_sparse else matrix
    budget = None if num_vectors is None else 8 * 150 * num_vectors
    pairs = eigs(source, 6, which="SA", tol=1e-6, max_bytes=budget)
    torch.testing.assert_close(pairs.values, spectrum[:6], rtol=1e-6, atol=0)
    assert bool((pairs.residuals <= 1e-6 * pairs.values).all())
    assert pairs.report.num_steps < (1200 if num_vectors == 40 else 420)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_few_rows_that_lanczos_is_slow_for_are_solved_densely(dtype):
    """ARPACK needs ten thousands of products."""
    spectrum = torch.logspace(-2, 2, 200, dtype=torch.float64)
    matrix = with_spectrum(spectrum, dtype=dtype)
    operator = SymmetricOperator(lambda v: matrix @ v, 200, dtype=dtype)
    for source in (matrix, operator):
        pairs = eigs(source, 6, which="SA", tol=1e-6)
        assert pairs.report.method == "dense"
        torch.testing.assert_close(pairs.values, spectrum[:6], rtol=1e-9, atol=0)
    assert pairs.report.num_products < 3 * 200  # those of the matrix included
    with pytest.raises(NoConvergenceError, match="3 restarts"):
        eigs(matrix, 6, which="SA", tol=1e-6, max_restarts=3)


def test_an_operator_that_fails_while_its_matrix_is_made_leaves_the_best_iterate():
    matrix = with_spectrum(torch.logspace(-2, 2, 300, dtype=torch.float64))
    num_products, most = 0, 10_000

    def multiply(v):
        nonlocal num_products
        num_products += 1
        if num_products > most:
            raise RuntimeError("the device is gone")
        return matrix @ v

    operator = SymmetricOperator(multiply, 300, dtype=torch.float64)
    assert eigs(operator, 4, which="SA", tol=1e-6).report.method == "dense"
    num_products, most = 0, num_products - 100
    with pytest.raises(NoConvergenceError) as caught:
        eigs(operator, 4, which="SA", tol=1e-6)
    assert caught.value.vectors.shape == (300, 4)
    assert str(caught.value.__cause__) == "the device is gone"


def test_what_was_mixed_in_by_looking_for_copies_converges_too():
    """Two of five are of an eigenvalue that is there three times: the next copies come late."""
    for seed in range(3):
        for which in ("SA", "LA"):
            pairs = eigs(grid_laplacian(11, 11, 11), 5, which=which, seed=seed)
            assert float(pairs.residuals.max()) < 2e-14


def test_a_copy_that_has_not_converged_is_not_mixed_with_one_that_has():
    """The fifth and the sixth are equal: the sixth comes late, with a large residual."""
    pairs = eigs(grid_laplacian(57, 57), 5, which="LA", seed=19)
    assert float(pairs.residuals.max()) < 2e-14


@pytest.mark.parametrize("k", [1, 4])
def test_a_start_in_an_invariant_subspace_misses_nothing(k: int):
    """Products never leave it: only a random start sees the largest and the third."""
    spectrum = torch.cat([torch.tensor([1.9, 2.0, 0.5, 1.5]), torch.linspace(0, 1, 596)]).double()
    start = torch.randn(600, dtype=torch.float64)
    start[1::2] = 0
    pairs = eigs(torch.diag(spectrum).to_sparse_csr(), k, which="LA", start=start)
    torch.testing.assert_close(pairs.values, wanted(spectrum, k, "LA"), rtol=0, atol=1e-12)


def test_an_operator_of_zeros():
    pairs = eigs(SymmetricOperator(lambda v: 0 * v, 6000, dtype=torch.float64), 3)
    assert pairs.values.tolist() == [0.0] * 3
    assert float(pairs.residuals.max()) == 0
    assert pairs.report.num_restarts < 20


@pytest.mark.parametrize(
    ("shape", "k", "most_restarts", "most_products"),
    [((2000,), 20, 16, 8000), ((15, 15, 15), 20, 8, 2000)],  # 33 restarts and 3090 products
)
def test_the_filter_is_refined_where_that_saves_restarts(
    shape: tuple[int, ...], k: int, most_restarts: int, most_products: int
):
    report = eigs(grid_laplacian(*shape), k, which="SA").report
    assert report.num_restarts <= most_restarts
    assert report.num_products <= most_products


@pytest.mark.parametrize(("seed", "tol"), [(0, 1e-3), (1, 1e-10)])
def test_a_filter_that_damps_wanted_eigenvalues_is_changed(seed: int, tol: float):
    """More Ritz values of the estimate lie above the wanted ones than there are eigenvalues."""
    matrix = sparse_graph_laplacian(150, seed=seed)
    pairs = eigs(matrix.to_sparse_csr(), 30, tol=tol)
    expected = torch.linalg.eigvalsh(matrix)[-30:]
    torch.testing.assert_close(pairs.values, expected, rtol=0, atol=1e-9)
    assert pairs.report.method == "lanczos"


def test_a_callable_misses_no_multiple_eigenvalue():
    """Single vectors, no filter: copies come only from the random starts after convergence."""
    spectrum = torch.cat([torch.linspace(0, 1, 292), torch.tensor([2.0] * 5 + [3.0] * 3)]).double()
    q = with_spectrum(spectrum)
    pairs = eigs(SymmetricOperator(lambda v: q @ v, 300, dtype=torch.float64), 8)
    torch.testing.assert_close(pairs.values, wanted(spectrum, 8, "LA"), rtol=0, atol=1e-12)


@settings(max_examples=16)
@given(
    num_rows=st.integers(2, 200),
    k=st.integers(1, 7),
    which=st.sampled_from(["LA", "SA", "LM", "BE"]),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(["dense", "csr", "callable", "table"]),
    seed=st.integers(0, 99),
)
def test_shapes_and_dtypes(num_rows: int, k: int, which: str, dtype, kind: str, seed: int):
    k = min(k, num_rows - 1)
    generator = torch.Generator().manual_seed(seed)
    spectrum = torch.randn(num_rows, dtype=torch.float64, generator=generator)
    spectrum[torch.randint(num_rows, (3,), generator=generator)] *= 3
    matrix = with_spectrum(spectrum, dtype=dtype, seed=seed)
    source = {
        "dense": lambda: matrix,
        "csr": lambda: matrix.to_sparse_csr(),
        "callable": lambda: SymmetricOperator(lambda v: matrix @ v, num_rows, dtype=dtype),
        "table": lambda: unify(matrix),
    }[kind]()
    pairs = eigs(source, k, which=which)
    unit = torch.finfo(dtype).eps * float(spectrum.abs().max())
    expected = wanted(torch.linalg.eigvalsh(matrix.to(torch.complex128)), k, which)
    torch.testing.assert_close(pairs.values, expected, rtol=0, atol=200 * unit)
    assert pairs.vectors.shape == (num_rows, k) and pairs.vectors.dtype == dtype
    assert float(residuals(matrix, pairs).max()) < 400 * unit


STIFF = {
    "stiff": torch.logspace(-6, 3, 200, dtype=torch.float64),
    "clustered": torch.cat(
        [torch.linspace(0, 1, 190).double(), 2 + 1e-9 * torch.arange(10.0, dtype=torch.float64)]
    ),
    "indefinite": torch.linspace(-3, 3.01, 200, dtype=torch.float64) ** 3,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("name", sorted(STIFF))
def test_residuals_are_at_most_those_of_arpack(name: str, dtype):
    linalg = pytest.importorskip("scipy.sparse.linalg")
    for which, seed in (("LA", 0), ("LM", 1)):
        matrix = with_spectrum(STIFF[name], dtype=dtype, seed=seed)
        pairs = eigs(matrix, 6, which=which, seed=seed)
        start = torch.randn(200, dtype=dtype, generator=torch.Generator().manual_seed(seed))
        values, vectors = linalg.eigsh(matrix.numpy(), 6, which=which, v0=start.numpy())
        theirs = torch.from_numpy(matrix.numpy() @ vectors - vectors * values).norm(dim=0).max()
        assert float(residuals(matrix, pairs).max()) <= float(theirs)
        expected = wanted(STIFF[name], 6, which)
        torch.testing.assert_close(pairs.values, expected, rtol=0, atol=1e-10)


def test_refined_residuals_are_the_rounding_of_a_product():
    """Without refinement they are some six units."""
    for seed in range(3):
        pairs = eigs(with_spectrum(STIFF["stiff"], seed=seed), 6, seed=seed)
        assert float(pairs.residuals.max()) < 4 * torch.finfo(torch.float64).eps * 1e3
        gram = pairs.vectors.T @ pairs.vectors
        torch.testing.assert_close(gram, torch.eye(6, dtype=torch.float64), rtol=0, atol=2e-15)


@pytest.mark.parametrize(
    ("name", "which", "k"), [("hilbert", "BE", 50), ("hilbert", "SM", 30), ("signs", "LA", 90)]
)
def test_pairs_of_few_rows_rise_and_are_orthonormal(name: str, which: str, k: int):
    """Eigenvalues that rounding can hardly tell from each other."""
    place = torch.arange(100, dtype=torch.float64)
    matrix = 1 / (place[:, None] + place + 1)
    if name == "signs":
        matrix = with_spectrum(torch.where(place % 3 == 0, 1.0, -1.0).double())
    pairs = eigs(matrix, k, which=which)
    assert bool((pairs.values.diff() >= 0).all())
    gram = pairs.vectors.T @ pairs.vectors
    torch.testing.assert_close(gram, torch.eye(k, dtype=torch.float64), rtol=0, atol=1e-14)
    found = residuals(matrix, pairs)
    assert float(found.max()) < 2e-15
    torch.testing.assert_close(pairs.residuals, found, rtol=0, atol=2e-15)


def test_interior_eigenvalues_of_an_indefinite_matrix():
    matrix = dense(grid_laplacian(8, 7, 6)) - 5.03 * torch.eye(336, dtype=torch.float64)
    pairs = eigs(matrix.to_sparse_csr(), 5, which="SM")
    expected = wanted(grid_spectrum(8, 7, 6) - 5.03, 5, "SM")
    torch.testing.assert_close(pairs.values, expected, rtol=0, atol=1e-11)
    assert float(residuals(matrix, pairs).max()) < 1e-11


@pytest.mark.parametrize("k", [1, 5])
def test_values_around_zero_of_a_spectrum_that_is_symmetric_about_it(k: int):
    """As of bipartite graphs: of the square, w and -w are one eigenvalue, which k may cut."""
    high = torch.cat([torch.tensor([0.1, 0.1, 0.3]), torch.linspace(0.5, 1, 1100)]).double()
    place = torch.arange(2206)
    matrix = torch.sparse_coo_tensor(torch.stack([place] * 2), torch.cat([high, -high]))
    pairs = eigs(matrix, k, which="SM", tol=1e-6)
    assert pairs.report.method == "lanczos"
    torch.testing.assert_close(pairs.values.abs().sort().values, high[[0, 0, 1, 1, 2]][:k])
    product = torch.cat([high, -high])[:, None] * pairs.vectors
    assert (product - pairs.vectors * pairs.values).norm(dim=0).max() < 1e-7
    torch.testing.assert_close(pairs.vectors.T @ pairs.vectors, torch.eye(k).double())


@pytest.mark.parametrize(("dtype", "exponent"), [(torch.float32, -73), (torch.float64, -565)])
@pytest.mark.parametrize(("which", "kind"), [("SM", "csr"), ("LA", "function"), ("LA", "dense")])
def test_a_power_of_two_changes_no_digit(dtype, exponent: int, which: str, kind: str):
    """Their squares are below all numbers of the dtype."""
    diagonal = torch.logspace(0, 1, 1100 if which == "SM" else 150, dtype=dtype)
    diagonal[::2] *= -1
    found = []
    for factor in (1.0, 2.0**exponent):
        matrix = (diagonal * factor).diag()
        source = matrix.to_sparse_csr() if kind == "csr" else matrix
        if kind == "function":
            source = SymmetricOperator(lambda v, a=diagonal * factor: a * v, 150, dtype=dtype)
        pairs = eigs(source, 3, which=which, tol=1e-4)
        found.append((pairs.values / factor, pairs.vectors, pairs.residuals / factor))
    for first, second in zip(*found, strict=True):
        assert torch.equal(first, second)


def test_bits_do_not_depend_on_the_number_of_threads():
    matrix = grid_laplacian(30, 30)
    first = eigs(matrix, 3)
    again = eigs(matrix, 3)
    assert torch.equal(first.values, again.values)
    assert torch.equal(first.vectors, again.vectors)


def test_a_start_saves_products():
    matrix = with_spectrum(torch.linspace(0, 1, 300, dtype=torch.float64) ** 2)
    cold = eigs(matrix, 4)
    warm = eigs(matrix, 4, start=cold.vectors, tol=1e-8)
    assert warm.report.num_products < cold.report.num_products
    torch.testing.assert_close(warm.values, cold.values, rtol=0, atol=1e-8)


def test_objects_of_scipy():
    sparse = pytest.importorskip("scipy.sparse")
    matrix = grid_laplacian(13, 12)
    lists = (matrix.values.numpy(), matrix.columns.numpy(), matrix.offsets.numpy())
    theirs = sparse.csr_matrix(lists, shape=matrix.shape)
    expected = grid_spectrum(13, 12)[-3:]
    for source in (
        theirs,
        theirs.tocoo(),
        sparse.linalg.aslinearoperator(theirs),
        theirs.toarray(),
    ):
        torch.testing.assert_close(eigs(source, 3).values, expected, rtol=0, atol=1e-12)


def test_wide_indices_and_coo():
    matrix = dense(grid_laplacian(12, 13))
    expected = grid_spectrum(12, 13)[:2]
    for source in (matrix.to_sparse_csr(), matrix.to_sparse_coo()):
        assert source.layout != torch.strided
        found = eigs(source, 2, which="SA").values
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("turn", [torch.conj, torch._neg_view])
def test_values_that_are_conjugated_or_negated_lazily(turn):
    """Their memory has other numbers than they."""
    hermitian = with_spectrum(torch.linspace(-1, 2, 140).double(), dtype=torch.complex128)
    rows = hermitian.to_sparse_csr()
    lists = (rows.crow_indices(), rows.col_indices(), turn(rows.values().clone()))
    matrix = turn(hermitian).resolve_conj().resolve_neg()
    assert float(residuals(matrix, eigs(CSR(*lists, (140, 140)), 2)).max()) < 1e-13
    u, s, vh = svds(CSR(*lists, (140, 140)), 2)
    torch.testing.assert_close(matrix @ vh.mH, u * s, rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("error")
def test_arrays_of_any_byte_order_that_may_not_be_written():
    matrix = np.diag(np.arange(150.0))
    matrix.setflags(write=False)
    for array in (matrix, matrix.astype(">f8")):
        assert eigs(array, np.int64(2)).values.round().tolist() == [148.0, 149.0]


def test_without_a_compiler_the_values_are_the_same(monkeypatch):
    from penstock.spectral import _native

    matrix = grid_laplacian(15, 12)
    before = eigs(matrix, 3)
    monkeypatch.setattr(_native, "_library", lambda: None)
    torch.testing.assert_close(eigs(matrix, 3).values, before.values, rtol=0, atol=1e-13)


def test_a_diagonal_matrix_and_few_rows():
    values = torch.tensor([3.0, -1.0, 2.0, 0.0])
    pairs = eigs(torch.diag(values), 3, which="LM")
    assert pairs.values.tolist() == [-1.0, 2.0, 3.0]
    values, vectors = eigs(torch.diag(values), 1, which="SM")
    assert values.tolist() == [0.0] and vectors.abs().argmax() == 3


def test_the_zero_matrix_and_the_identity():
    for matrix in (torch.zeros(200, 200), torch.eye(200)):
        pairs = eigs(matrix.double(), 3)
        torch.testing.assert_close(pairs.values, matrix.double().diagonal()[:3])
        assert float(pairs.residuals.max()) < 1e-14
    empty = CSR(
        torch.zeros(201, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        torch.zeros(0, dtype=torch.float64),
        (200, 200),
    )
    assert eigs(empty, 2, which="SA").values.abs().max() < 1e-300
