"""Eigenvalues against ARPACK and LOBPCG: time, bytes moved, peaks and residuals.

    python benchmarks/spectral.py --store /mnt/nvme               # all parts
    python benchmarks/spectral.py --part speed --match random

`speed`: matrices of a million rows in memory, beside scipy's `eigsh`. `tiers`: a basis in a file
with room for an eighth of it, beside everything resident. `pca`: a table at twice the budget,
beside one reading of the file. `blocks`: LOBPCG of ours, of scipy and of torch.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _rows import BenchmarkRow, Limit, announce, argument_parser, environment, write_rows
from penstock import unify
from penstock.spectral import CSR, eigs, pca

SIDE, NODES, DEGREE = 100, 1_000_000, 8
OURS, ARPACK, RESIDENT, EIGHTH = "penstock", "scipy eigsh", "resident", "an eighth resident"
SPEED: dict[str, tuple[str, Any, int, Any]] = {
    "random": ("random graph Laplacian, 1000000 rows, LA, k 6, tol 1e-8", "LA", 6, 1e-8),
    "grid": ("grid Laplacian, 100 x 100 x 100, SA, k 6, tol 1e-3", "SA", 6, 1e-3),
}
TIERS = "grid Laplacian, 100 x 100 x 100, SA, k 6, tol 1e-6"
PCA = "table of 4000000 x 64 float32, k 10"
BLOCKS = "generalised grid Laplacian, 60 x 60, SA, k 6, tol 1e-8"


def grid_matrix(*lengths: int) -> CSR:
    """Return the Laplacian of a grid with zero boundaries."""
    num_rows = int(np.prod(lengths))
    place = np.arange(num_rows, dtype=np.int32).reshape(lengths)
    rows, columns, values = (
        [place.ravel()],
        [place.ravel()],
        [np.full(num_rows, 2.0 * len(lengths))],
    )
    for axis in range(len(lengths)):
        low, high = np.delete(place, -1, axis).ravel(), np.delete(place, 0, axis).ravel()
        rows += [low, high]
        columns += [high, low]
        values.append(np.full(2 * len(low), -1.0))
    row, column, value = (np.concatenate(each) for each in (rows, columns, values))
    return sorted_rows(row, column, value, num_rows)


def random_matrix() -> CSR:
    """Return the Laplacian of a random graph, whose degrees are those of a Poisson process."""
    generator = np.random.default_rng(0)
    ends = generator.integers(0, NODES, (2, NODES * DEGREE // 2), dtype=np.int32)
    degrees = np.bincount(ends.ravel(), minlength=NODES).astype(np.float64)
    place = np.arange(NODES, dtype=np.int32)
    rows = np.concatenate([place, ends[0], ends[1]])
    columns = np.concatenate([place, ends[1], ends[0]])
    values = np.concatenate([degrees, np.full(2 * ends.shape[1], -1.0)])
    return sorted_rows(rows, columns, values, NODES)


def sorted_rows(rows: Any, columns: Any, values: Any, num_rows: int) -> CSR:
    order = np.argsort(rows.astype(np.int64) * num_rows + columns, kind="stable")
    offsets = np.zeros(num_rows + 1, dtype=np.int32)
    np.cumsum(np.bincount(rows, minlength=num_rows), out=offsets[1:])
    lists = (offsets, columns[order].astype(np.int32), values[order])
    return CSR(*(torch.from_numpy(each) for each in lists), shape=(num_rows, num_rows))


def to_scipy(matrix: CSR) -> Any:
    from scipy.sparse import csr_matrix

    lists = (matrix.values.numpy(), matrix.columns.numpy(), matrix.offsets.numpy())
    return csr_matrix(lists, shape=matrix.shape)


def residual_of(matrix: Any, values: Any, vectors: Any) -> float:
    return float(np.linalg.norm(matrix @ vectors - vectors * values, axis=0).max())


def measure_speed(options: Any, where: Any):
    """Yield the rows of matrices in memory; the peer runs once, being slow."""
    from scipy.sparse.linalg import eigsh

    for name, (case, which, k, tol) in SPEED.items():
        if options.match not in case:
            continue
        matrix = random_matrix() if name == "random" else grid_matrix(SIDE, SIDE, SIDE)
        theirs = to_scipy(matrix)
        eigs(grid_matrix(6, 6, 6), 3)  # builds the library
        began = time.perf_counter()
        pairs = eigs(matrix, k, which=which, tol=tol)
        ours = time.perf_counter() - began
        began = time.perf_counter()
        values, vectors = eigsh(theirs, k, which=which, tol=tol)
        peers = time.perf_counter() - began
        bar = Limit(name="scipy's eigsh", value=peers, unit="s")
        mine = residual_of(theirs, pairs.values.numpy(), pairs.vectors.numpy())
        extra = {"residual": mine, "num_products": pairs.report.num_products}
        extra |= {"values": pairs.values.tolist()}
        peak = {"device": pairs.report.peak_device_bytes}
        yield row(case, OURS, [ours], where, limit=bar, peak_bytes=peak, extra=extra)
        extra = {
            "residual": residual_of(theirs, values, vectors),
            "values": np.sort(values).tolist(),
        }
        yield row(case, ARPACK, [peers], where, extra=extra)


def measure_tiers(options: Any, where: Any):
    """Yield the rows of a basis in a file beside one in memory."""
    matrix = grid_matrix(SIDE, SIDE, SIDE)
    resident = eigs(matrix, 6, which="SA", tol=1e-6)
    report = resident.report
    yield row(
        TIERS,
        RESIDENT,
        [report.total_seconds],
        where,
        peak_bytes={"device": report.peak_device_bytes},
        extra={"residual": float(resident.residuals.max())},
    )
    # Beside the workspace of two vectors and two buffers, an eighth of the basis.
    vector_bytes = report.basis_bytes // report.num_basis_vectors
    budget = report.basis_bytes // 8 + 4 * vector_bytes + 8192
    found = eigs(matrix, 6, which="SA", tol=1e-6, max_bytes=budget, store=options.store)
    streamed = found.report
    least = least_bytes(streamed, vector_bytes)
    extra = {"residual": float(found.residuals.max()), "max_bytes": budget}
    extra |= {"num_resident_vectors": streamed.num_resident_vectors, "least_bytes": least}
    extra |= {"bytes_over_least": streamed.bytes_read / least, "degree": streamed.degree}
    bar = Limit(name="1.5 x everything resident", value=1.5 * report.total_seconds, unit="s")
    moved = {"file->device": streamed.bytes_read, "device->file": streamed.bytes_written}
    peak = {"device": streamed.peak_device_bytes}
    yield row(
        TIERS,
        EIGHTH,
        [streamed.total_seconds],
        where,
        limit=bar,
        moved_bytes=moved,
        peak_bytes=peak,
        extra=extra,
    )


def least_bytes(report: Any, vector_bytes: int) -> int:
    """Return the bytes that any order of the same steps reads: what does not fit, once a step.

    A step needs each of the basis vectors once, and between restarts the basis grows by a block;
    the vectors that fit, and those in the two buffers, need not be read.
    """
    block, total, count, capacity = 1, 0, 0, report.num_basis_vectors
    room = report.num_resident_vectors + 2
    kept = report.num_basis_vectors // 2
    for _ in range(report.num_steps):
        count += block
        if count > capacity:
            count = kept
        total += max(0, count - room)
    return total * vector_bytes


def measure_pca(options: Any, where: Any):
    """Yield the rows of principal components of a table at twice the budget."""
    generator = torch.Generator().manual_seed(0)
    scales = 0.95 ** torch.arange(64)
    table = torch.randn(4_000_000, 64, generator=generator) * scales + 3
    with tempfile.TemporaryDirectory(dir=options.store) as directory:
        path = Path(directory) / "table.npy"
        np.save(path, table.numpy())
        num_bytes = table.nbytes
        began = time.perf_counter()
        source = unify(path, device="cpu", cache=0)
        buffer = torch.empty(65536, 64)
        for start in range(0, len(table), len(buffer)):
            index = torch.arange(start, min(start + len(buffer), len(table)))
            source.gather_rows(index, out=buffer[: len(index)])
        reading = time.perf_counter() - began
        found = pca(path, 10, max_bytes=num_bytes // 2)
    centred = table.double() - table.double().mean(0)
    values = torch.linalg.eigvalsh(centred.T @ centred / (len(table) - 1)).flip(0)[:10]
    error = float((found.variances / values - 1).abs().max())
    bar = Limit(name="1.3 x one reading of the file", value=1.3 * reading, unit="s")
    extra = {"relative_error": error, "reading_seconds": reading, "max_bytes": num_bytes // 2}
    yield row(
        PCA,
        OURS,
        [found.report.total_seconds],
        where,
        limit=bar,
        moved_bytes={"file->device": found.report.bytes_read},
        peak_bytes={"device": found.report.peak_device_bytes},
        extra=extra,
    )


def measure_blocks(options: Any, where: Any):
    """Yield the rows of LOBPCG, preconditioned by the diagonal."""
    from scipy.sparse import diags
    from scipy.sparse.linalg import aslinearoperator, lobpcg

    a = grid_matrix(60, 60)
    generator = np.random.default_rng(0)
    mass = 10 ** generator.random(3600)
    place = np.arange(3600, dtype=np.int32)
    b = sorted_rows(place, place, mass, 3600)
    start = generator.standard_normal((3600, 8))
    theirs, their_mass = to_scipy(a), diags(mass).tocsr()
    began = time.perf_counter()
    pairs = eigs(a, 6, which="SA", B=b, tol=1e-8)
    seconds = time.perf_counter() - began

    def residual(values: Any, vectors: Any) -> float:
        found = theirs @ vectors - (their_mass @ vectors) * values
        return float((np.linalg.norm(found, axis=0) / np.linalg.norm(vectors, axis=0)).max())

    extra = {"residual": residual(pairs.values.numpy(), pairs.vectors.numpy())}
    yield row(BLOCKS, OURS, [seconds], where, extra=extra)
    m = aslinearoperator(diags(np.full(3600, 0.25)))
    began = time.perf_counter()
    values, vectors = lobpcg(theirs, start, B=their_mass, M=m, largest=False, tol=1e-8, maxiter=600)
    seconds = time.perf_counter() - began
    extra = {"residual": residual(values[:6], vectors[:, :6])}
    yield row(BLOCKS, "scipy lobpcg", [seconds], where, extra=extra)
    lists = (a.offsets.long(), a.columns.long(), a.values)
    sparse = torch.sparse_csr_tensor(*lists, a.shape).to_sparse_coo()
    diagonal = torch.from_numpy(mass)
    heavy = torch.sparse_coo_tensor(torch.arange(3600).repeat(2, 1), diagonal, a.shape)
    began = time.perf_counter()
    values, vectors = torch.lobpcg(
        sparse, 6, B=heavy, X=torch.from_numpy(start[:, :6]), largest=False, tol=1e-8, niter=600
    )
    seconds = time.perf_counter() - began
    extra = {"residual": residual(values.numpy(), vectors.numpy())}
    yield row(BLOCKS, "torch.lobpcg", [seconds], where, extra=extra)


def row(case: str, arm: str, seconds: list[float], where: Any, **rest: Any) -> BenchmarkRow:
    return BenchmarkRow.of(seconds, topic="spectral", case=case, arm=arm, **where, **rest)


PARTS = {
    "speed": (measure_speed, [(s[0], arm) for s in SPEED.values() for arm in (OURS, ARPACK)]),
    "tiers": (measure_tiers, [(TIERS, RESIDENT), (TIERS, EIGHTH)]),
    "pca": (measure_pca, [(PCA, OURS)]),
    "blocks": (measure_blocks, [(BLOCKS, a) for a in (OURS, "scipy lobpcg", "torch.lobpcg")]),
}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--match", default="", help="cases whose names have this")
    parser.add_argument("--store", default=tempfile.gettempdir(), help="a directory on a disk")
    options = parser.parse_args()
    for part in options.part:
        measure, cases = PARTS[part]
        if options.dry_run:
            announce(case for case in cases if options.match in case[0])
            continue
        for each in measure(options, environment(options.device)):
            print(each, file=sys.stderr, flush=True)
            write_rows([each], options.out)


if __name__ == "__main__":
    main()
