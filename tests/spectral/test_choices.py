"""Choices of the solver: blocks, degrees, orthogonality, and tiles that are read once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.memory import ExtentFile, Ledger, Link
from penstock.spectral import CSR, eigs
from penstock.spectral._basis import Basis
from penstock.spectral._operator import SparseOperator
from penstock.spectral._solve import StandardSolution
from penstock.spectral._tiles import DenseSource, TileStream
from penstock.unified import unify
from spectral_cases import from_entries, grid_laplacian

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def plans(monkeypatch):
    """Plans of the bases of solutions, in order."""
    found = []
    original = StandardSolution._choose

    def choose(self):
        original(self)
        found.append(self._plan)

    monkeypatch.setattr(StandardSolution, "_choose", choose)
    return found


def test_blocks_are_for_sweeps_over_a_file(store, plans):
    """Single vectors where the basis is in memory, and where few sweeps are made."""
    matrix = grid_laplacian(20, 20, 10)
    vector_bytes = 4000 * 8
    budget = 20 * vector_bytes + 4 * 8192
    eigs(matrix, 6)
    eigs(matrix, 6, tol=1e-8, max_bytes=budget, store=store)
    eigs(matrix, 6, max_bytes=budget, store=store)
    assert [plan.block for plan in plans] == [1, 1, 4]
    assert [plan.num_resident < plan.num_vectors for plan in plans] == [False, True, True]
    assert plans[1].num_resident > plans[2].num_resident  # the workspace of a block


def test_gathered_bytes_are_the_lines_that_rows_read():
    """Of windows of neighbouring rows, in which a line is read once."""

    def gather_bytes(matrix: CSR) -> int:
        return SparseOperator(matrix.offsets, matrix.columns, matrix.values).gather_bytes

    rows, per_line = 100_000, 8
    place = np.arange(rows)
    diagonal = gather_bytes(from_entries(place, place, np.ones(rows), rows))
    assert abs(diagonal / (rows * 8) - 1) < 0.01  # in order: a vector
    turned = np.random.default_rng(0).permutation(rows)
    scattered = gather_bytes(from_entries(place, turned, np.ones(rows), rows))
    # 4,096 random places among 12,500 lines touch some 3,495 of them.
    lines = rows / per_line * (1 - np.exp(-4096 / (rows / per_line)))
    assert abs(scattered / (64 * lines * rows / 4096) - 1) < 0.02


@pytest.mark.parametrize(("accuracy", "num_sweeps"), [(0.0, 2), (1e-10, 1)])
def test_a_looser_orthogonality_saves_a_sweep(store, accuracy: float, num_sweeps: int):
    """A vector that has lost all but 1e-3 of its norm has kept 1e-13 of the basis."""
    file, ledger = ExtentFile(store), Ledger()
    basis = Basis(
        *(12, 4096, torch.float64, torch.device("cpu")),
        num_resident=0,
        file=file,
        ledger=ledger,
        reduce=lambda tensor: tensor,
        accuracy=accuracy,
    )
    vectors = torch.linalg.qr(torch.randn(4096, 13, dtype=torch.float64)).Q.T.contiguous()
    basis.append(vectors[:12])
    w = vectors[:12].sum(0, keepdim=True) + 1e-3 * vectors[12:]
    basis.orthogonalize(w)
    kept = (vectors[:12] @ w.T).abs().max() / w.norm()
    assert float(kept) < (1e-11 if accuracy else 1e-15)
    vector_bytes = 4096 * 8
    read = ledger.moved(Link.FILE_TO_DEVICE) / vector_bytes
    assert 12 * num_sweeps - 4 <= read <= 12 * num_sweeps
    basis.close()
    file.close()


def test_tiles_that_are_read_once_are_not_kept(store):
    path = store / "table.npy"
    np.save(path, np.arange(64_000.0).reshape(1000, 64))
    for is_read_once in (True, False):
        ledger = Ledger()
        tiles = TileStream(
            DenseSource(unify(path, device="cpu", cache=0)),
            budget_bytes=1 << 20,
            ledger=ledger,
            device=torch.device("cpu"),
            is_read_once=is_read_once,
        )
        for _ in range(2):
            rows = [tile.clone() for _, (tile,) in tiles]
            assert torch.equal(torch.cat(rows), torch.arange(64_000.0).double().view(1000, 64))
        assert tiles.num_tiles > 1
        assert tiles.num_kept == (0 if is_read_once else tiles.num_tiles)
        read = ledger.moved(Link.FILE_TO_DEVICE)
        assert (read >= 2 * 512_000) == is_read_once  # a second sweep reads it again
        tiles.close()
    path.unlink()


def test_layout_of_a_table_in_a_file(store):
    path = store / "table.npy"
    np.save(path, np.ones((30, 5), dtype=np.float32))
    table = unify(path, device="cpu", cache=0)
    layout = table.file_layout
    assert layout is not None and layout.path == str(path)
    assert (layout.shape, layout.dtype, layout.offset) == ((30, 5), torch.float32, 128)
    assert unify(torch.ones(30, 5)).file_layout is None
    path.unlink()
