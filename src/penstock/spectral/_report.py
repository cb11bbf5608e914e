"""Results of eigensolvers: the pairs, their residuals, and the account of bytes."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

from torch import Tensor

from penstock.memory import Link, Tier
from penstock.spectral._problem import StandardProblem
from penstock.tables import Report


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpectralReport(Report, title="penstock.spectral"):
    """The account of one solution."""

    method: str
    """Method: "lanczos", "lobpcg" or "dense"."""
    degree: int
    """Degree of the polynomial of the operator that was iterated with; 1 for the operator."""
    num_products: int
    """Products of the operator with one vector."""
    num_steps: int
    """Steps, in each of which a block of vectors was orthogonalised."""
    num_restarts: int
    """Restarts of the basis."""
    num_sweeps: int = 0
    """Sweeps, in which vectors were orthogonalised against some of the basis or all of it."""
    num_swept_vectors: int = 0
    """Vectors of the basis that the sweeps went over."""
    num_basis_vectors: int
    """Vectors of the basis."""
    num_resident_vectors: int
    """Those of them that stayed on the device."""
    basis_bytes: int
    """Bytes of all of the basis."""
    peak_device_bytes: int
    """The most bytes that the solver held on the device: basis, workspace and buffers."""
    bytes_read: int
    """Bytes of the basis and the operator that came from a lower tier."""
    bytes_written: int
    """Bytes of the basis that went to a lower tier."""
    stall_seconds: float
    """Time in which the solver waited for a lower tier."""
    total_seconds: float
    """Time from the call to the result."""


@dataclasses.dataclass(frozen=True, eq=False)
class Eigenpairs:
    """Eigenvalues and eigenvectors; unpacks as `values, vectors`.

    Attributes:
        values: Eigenvalues, (k,), float64, rising.
        vectors: Eigenvectors as columns, (n, k), in the order of the values.
        residuals: Norms of A v - w v (A v - w B v), (k,), float64, as computed at the end.
        report: The account of the solution.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    report: SpectralReport

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.values, self.vectors))


def sort_pairs(pairs: Eigenpairs) -> Eigenpairs:
    """Return pairs in the order of their values, which refinement may have changed."""
    if not bool((pairs.values.diff() < 0).any()):
        return pairs
    order = pairs.values.argsort(stable=True)
    vectors = pairs.vectors.T[order.to(pairs.vectors.device)].T
    values, residuals = pairs.values[order], pairs.residuals[order]
    return dataclasses.replace(pairs, values=values, vectors=vectors, residuals=residuals)


def add_reports(first: SpectralReport, second: SpectralReport) -> SpectralReport:
    """Return the account of two solutions, one after the other, of one operator and ledger."""
    largest = {"degree", "num_basis_vectors", "num_resident_vectors", "basis_bytes"}
    # The ledger and the operator go on counting from the first one to the second.
    largest |= {"peak_device_bytes", "num_products", "bytes_read", "bytes_written", "stall_seconds"}
    fields = {}
    for field in dataclasses.fields(first):
        a, b = getattr(first, field.name), getattr(second, field.name)
        if isinstance(a, str):
            fields[field.name] = a if a == b else f"{a}, {b}"
        else:
            fields[field.name] = max(a, b) if field.name in largest else a + b
    return SpectralReport(**fields)


def make_report(
    problem: StandardProblem,
    started: float,
    *,
    method: str,
    degree: int,
    num_steps: int,
    num_restarts: int,
    num_vectors: int,
    num_resident: int,
    num_sweeps: int = 0,
    num_swept: int = 0,
) -> SpectralReport:
    """Return the report of a solution that was started at a time of `time.perf_counter`."""
    ledger, operator = problem.ledger, problem.operator
    return SpectralReport(
        method=method,
        degree=degree,
        num_products=operator.num_products,
        num_steps=num_steps,
        num_restarts=num_restarts,
        num_sweeps=num_sweeps,
        num_swept_vectors=num_swept,
        num_basis_vectors=num_vectors,
        num_resident_vectors=num_resident,
        basis_bytes=num_vectors * operator.length * operator.dtype.itemsize,
        peak_device_bytes=ledger.peak(Tier.DEVICE),
        bytes_read=sum(ledger.moved(link) for link in _READS),
        bytes_written=sum(ledger.moved(link) for link in _WRITES),
        stall_seconds=ledger.stall_seconds,
        total_seconds=time.perf_counter() - started,
    )


_READS = (Link.FILE_TO_DEVICE, Link.FILE_TO_HOST, Link.HOST_TO_DEVICE)
_WRITES = (Link.DEVICE_TO_FILE, Link.HOST_TO_FILE, Link.DEVICE_TO_HOST)
