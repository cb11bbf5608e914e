"""Eigenvalues against ARPACK and LOBPCG: time, bytes moved, peaks and residuals.

    python benchmarks/spectral.py --store /mnt/nvme               # all parts
    python benchmarks/spectral.py --part speed --match random

`speed`: matrices of a million rows in memory, beside scipy's `eigsh`. `tiers`: a budget of an
eighth of the basis, which lies in a file, beside everything resident. `pca`: a table at twice the
budget, beside one reading of the file, both past the page cache. `blocks`: LOBPCG of ours, of scipy
and of torch.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from _rows import BenchmarkRow, Limit, announce, argument_parser, environment, write_rows
from penstock.memory import WholeFile
from penstock.memory.pages import map_anonymous, round_down
from penstock.spectral import CSR, eigs, pca

SIDE, NODES, DEGREE = 100, 1_000_000, 8
OURS, ARPACK, RESIDENT, EIGHTH = "penstock", "scipy eigsh", "resident", "an eighth of the basis"
READING = "one reading"
SPEED: dict[str, tuple[str, Any, int, Any]] = {
    "random": ("random graph Laplacian, 1000000 rows, LA, k 6, tol 1e-8", "LA", 6, 1e-8),
    "band": ("banded matrix, 1000000 rows, 7 diagonals, LA, k 20, tol 1e-8", "LA", 20, 1e-8),
    "grid": ("grid Laplacian, 100 x 100 x 100, SA, k 6, tol 1e-3", "SA", 6, 1e-3),
}
TIERS = "random graph Laplacian, 1000000 rows, LA, k 10, tol 1e-8"
PCA = "table of 4000000 x 64 float32, k 10"
READ_BYTES = 32 * 2**20
REPETITIONS = {"speed": 3, "tiers": 3, "pca": 9, "blocks": 3}
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


def banded_matrix() -> CSR:
    """Return a matrix of seven diagonals, whose main one falls as the logarithm does."""
    generator = np.random.default_rng(0)
    place = np.arange(NODES, dtype=np.int32)
    rows, columns, values = [place], [place], [-np.log1p(generator.permutation(NODES))]
    for step in (1, 2, 3):
        entries = 0.1 * generator.standard_normal(NODES - step)
        rows += [place[:-step], place[step:]]
        columns += [place[step:], place[:-step]]
        values += [entries, entries]
    row, column, value = (np.concatenate(each) for each in (rows, columns, values))
    return sorted_rows(row, column, value, NODES)


MATRICES: dict[str, Callable[[], CSR]] = {
    "random": random_matrix,
    "band": banded_matrix,
    "grid": lambda: grid_matrix(SIDE, SIDE, SIDE),
}


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
        matrix = MATRICES[name]()
        theirs = to_scipy(matrix)
        eigs(grid_matrix(6, 6, 6), 3)  # builds the library
        found = [eigs(matrix, k, which=which, tol=tol) for _ in range(REPETITIONS["speed"])]
        began = time.perf_counter()
        values, vectors = eigsh(theirs, k, which=which, tol=tol)
        peers = time.perf_counter() - began
        pairs = found[0]
        extra = {
            "residual": residual_of(theirs, pairs.values.numpy(), pairs.vectors.numpy()),
            "num_products": pairs.report.num_products,
            "degree": pairs.report.degree,
            "values": pairs.values.tolist(),
        }
        yield row(
            case,
            OURS,
            [each.report.total_seconds for each in found],
            where,
            limit=Limit(name="scipy's eigsh", value=peers, unit="s"),
            peak_bytes={"device": pairs.report.peak_device_bytes},
            extra=extra,
        )
        extra = {"residual": residual_of(theirs, values, vectors)}
        extra |= {"values": np.sort(values).tolist()}
        yield row(case, ARPACK, [peers], where, extra=extra)


def measure_tiers(options: Any, where: Any):
    """Yield the rows of a budget of an eighth of the basis beside one that holds everything."""
    matrix = random_matrix()
    eigs(grid_matrix(6, 6, 6), 3)  # builds the library
    resident, streamed = [], []
    for _ in range(REPETITIONS["tiers"]):
        resident.append(eigs(matrix, 10, tol=1e-8))
        budget = resident[0].report.basis_bytes // 8
        streamed.append(eigs(matrix, 10, tol=1e-8, max_bytes=budget, store=options.store))
    report = resident[0].report
    seconds = [each.report.total_seconds for each in resident]
    yield row(
        TIERS,
        RESIDENT,
        seconds,
        where,
        peak_bytes={"device": report.peak_device_bytes},
        extra={"residual": float(resident[0].residuals.max()), "degree": report.degree},
    )
    found, least = streamed[0].report, least_bytes(streamed[0].report)
    moved = {"file->device": found.bytes_read, "device->file": found.bytes_written}
    yield row(
        TIERS,
        EIGHTH,
        [each.report.total_seconds for each in streamed],
        where,
        limit=Limit(name="1.5 x everything resident", value=1.5 * median(seconds), unit="s"),
        moved_bytes=moved,
        peak_bytes={"device": found.peak_device_bytes},
        extra={
            "residual": float(streamed[0].residuals.max()),
            "max_bytes": report.basis_bytes // 8,
            "basis_bytes": found.basis_bytes,
            "num_resident_vectors": found.num_resident_vectors,
            "degree": found.degree,
            "num_products": found.num_products,
            "num_steps": found.num_steps,
            "num_sweeps": found.num_sweeps,
            "num_swept_vectors": found.num_swept_vectors,
            "num_restarts": found.num_restarts,
            "stall_seconds": found.stall_seconds,
            "least_bytes": least,
            "bytes_over_least": (found.bytes_read + found.bytes_written) / least,
        },
    )


def least_bytes(report: Any) -> int:
    """Return the bytes that any order of the same steps moves: what does not fit, once a use.

    A sweep reads the vectors that it goes over, which the estimate of orthogonality asks for; a
    step writes its vector; a restart reads all of the basis and writes what it keeps; the result is
    combined from all. The vectors that fit, and those in the two buffers, need not be moved.
    """
    vector_bytes = report.basis_bytes // report.num_basis_vectors
    room, capacity = report.num_resident_vectors + 2, report.num_basis_vectors
    swept = max(0, report.num_swept_vectors - room * report.num_sweeps)
    # Each restart is of a full basis, and those kept are what the steps between did not append.
    kept = report.num_restarts * capacity - (report.num_steps - capacity)
    restarts = report.num_restarts * max(0, capacity - 2 * room) + kept
    written = max(0, report.num_steps - room)
    return vector_bytes * (swept + written + restarts + max(0, capacity - room))


def measure_pca(options: Any, where: Any):
    """Yield the rows of principal components of a table at twice the budget.

    The file is synced and its pages are dropped; both arms read past the page cache.
    """
    generator = torch.Generator().manual_seed(0)
    scales = 0.95 ** torch.arange(64)
    table = torch.randn(4_000_000, 64, generator=generator) * scales + 3
    reading, found = [], []
    with tempfile.TemporaryDirectory(dir=options.store) as directory:
        path = Path(directory) / "table.npy"
        np.save(path, table.numpy())
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        pca(path, 10, max_bytes=table.nbytes // 2)  # builds the library
        for _ in range(REPETITIONS["pca"]):
            reading.append(time_reading(path))
            found.append(pca(path, 10, max_bytes=table.nbytes // 2))
    centred = table.double() - table.double().mean(0)
    values = torch.linalg.eigvalsh(centred.T @ centred / (len(table) - 1)).flip(0)[:10]
    report = found[0].report
    yield row(PCA, READING, reading, where, moved_bytes={"file->device": table.nbytes})
    yield row(
        PCA,
        OURS,
        [each.report.total_seconds for each in found],
        where,
        limit=Limit(name="1.3 x one reading of the file", value=1.3 * median(reading), unit="s"),
        moved_bytes={"file->device": report.bytes_read},
        peak_bytes={"device": report.peak_device_bytes},
        extra={
            "relative_error": float((found[0].variances / values - 1).abs().max()),
            "seconds_over_reading": median(
                each.report.total_seconds / once for each, once in zip(found, reading, strict=True)
            ),
            "max_bytes": table.nbytes // 2,
        },
    )


def time_reading(path: Path) -> float:
    """Return the seconds of one reading, in order, in the longest reads that pay."""
    memory = torch.frombuffer(map_anonymous(READ_BYTES, private=True), dtype=torch.uint8)
    began, file = time.perf_counter(), WholeFile(path)
    num_bytes = round_down(file.num_bytes)
    for start in range(0, num_bytes, READ_BYTES):
        file.read(start, memory.data_ptr(), min(READ_BYTES, num_bytes - start))
    file.close()
    return time.perf_counter() - began


def measure_blocks(options: Any, where: Any):
    """Yield the rows of LOBPCG, preconditioned by the diagonal, with one bound of the residuals.

    Ours is 1e-8 of each eigenvalue; scipy's is absolute, and torch's by the norms of A and B.
    """
    from scipy.sparse import diags
    from scipy.sparse.linalg import aslinearoperator, lobpcg

    a = grid_matrix(60, 60)
    generator = np.random.default_rng(0)
    mass = 10 ** generator.random(3600)
    place = np.arange(3600, dtype=np.int32)
    b = sorted_rows(place, place, mass, 3600)
    start = generator.standard_normal((3600, 8))
    theirs, their_mass = to_scipy(a), diags(mass).tocsr()
    least = 1e-8 * float(eigs(a, 6, which="SA", B=b).values[0])
    m = aslinearoperator(diags(np.full(3600, 0.25)))
    lists = (a.offsets.long(), a.columns.long(), a.values)
    sparse = torch.sparse_csr_tensor(*lists, a.shape).to_sparse_coo()
    heavy = torch.sparse_coo_tensor(
        torch.arange(3600).repeat(2, 1), torch.from_numpy(mass), a.shape
    )

    def ours() -> tuple[Any, Any]:
        values, vectors = eigs(a, 6, which="SA", B=b, tol=1e-8)
        return values.numpy(), vectors.numpy()

    def scipy() -> tuple[Any, Any]:
        options = {"largest": False, "tol": least, "maxiter": 2000}
        values, vectors = lobpcg(theirs, start, B=their_mass, M=m, **options)
        return values[:6], vectors[:, :6]

    def of_torch() -> tuple[Any, Any]:
        x, tol = torch.from_numpy(start[:, :6]), least / 8
        found = torch.lobpcg(sparse, 6, B=heavy, X=x, largest=False, tol=tol, niter=2000)
        return found[0].numpy(), found[1].numpy()

    for arm, solve in ((OURS, ours), ("scipy lobpcg", scipy), ("torch.lobpcg", of_torch)):
        seconds, (values, vectors) = [], solve()  # the first call is not timed
        for _ in range(REPETITIONS["blocks"]):
            began = time.perf_counter()
            solve()
            seconds.append(time.perf_counter() - began)
        found = theirs @ vectors - (their_mass @ vectors) * values
        residual = np.linalg.norm(found, axis=0) / np.linalg.norm(vectors, axis=0)
        yield row(BLOCKS, arm, seconds, where, extra={"residual": float(residual.max())})


def row(case: str, arm: str, seconds: list[float], where: Any, **rest: Any) -> BenchmarkRow:
    return BenchmarkRow.of(seconds, topic="spectral", case=case, arm=arm, **where, **rest)


PARTS = {
    "speed": (measure_speed, [(s[0], arm) for s in SPEED.values() for arm in (OURS, ARPACK)]),
    "tiers": (measure_tiers, [(TIERS, RESIDENT), (TIERS, EIGHTH)]),
    "pca": (measure_pca, [(PCA, arm) for arm in (READING, OURS)]),
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
