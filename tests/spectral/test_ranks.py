"""Two processes over gloo, each with half of the rows, find what one finds."""

from __future__ import annotations

import os
import signal
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from _ranks import spawn
from penstock.errors import NoConvergenceError, RankError
from penstock.spectral import CSR, SymmetricOperator, _filter, eigs
from spectral_cases import dense, grid_laplacian, grid_spectrum, with_spectrum

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

NUM_RANKS, SIDE = 2, 15
SPLIT = 100  # rows of the first rank, of 225


def rows_of(matrix: CSR, begin: int, end: int) -> CSR:
    first, last = int(matrix.offsets[begin]), int(matrix.offsets[end])
    offsets = matrix.offsets[begin : end + 1] - first
    lists = (offsets, matrix.columns[first:last], matrix.values[first:last])
    return CSR(*lists, shape=(end - begin, matrix.shape[1]))


def solve_rank(folder: Path) -> dict[str, Any]:
    """What each process runs: values, and its rows of the vectors."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, directory = dist.get_rank(), str(folder)
    matrix = grid_laplacian(SIDE, SIDE)
    begin, end = (0, SPLIT) if rank == 0 else (SPLIT, SIDE * SIDE)
    mine = rows_of(matrix, begin, end)
    group = dist.group.WORLD
    found = {"sparse": tuple(eigs(mine, 5, which="SA", group=group))}
    budget = 14 * (SIDE * SIDE - SPLIT) * 8 + 8192
    streamed = eigs(mine, 5, which="SA", group=group, max_bytes=budget, store=directory)
    found["streamed"] = tuple(streamed)
    found["peak"] = (streamed.report.peak_device_bytes, budget)
    whole = with_spectrum(torch.linspace(-1, 2, 225, dtype=torch.float64), dtype=torch.complex128)
    found["dense"] = tuple(eigs(whole[begin:end], 4, which="LM", group=group))
    # The first rank has no rows: the second one, which has all, must not go on by itself.
    rows = torch.logspace(-4, 4, 48, dtype=torch.float64).diag()[: 48 * rank]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_filter, "_MOST_DEGREE", 4)  # 400 would exchange 10,000 vectors
        with pytest.raises(NoConvergenceError, match="after 6 restarts"):
            eigs(rows, 1, which="SA", max_restarts=6, group=group)
    found["empty"] = eigs(rows, 2, start=rows.sum(1), group=group).values
    return found


def test_two_ranks_find_what_one_finds(tmp_path: Path):
    parts = spawn(solve_rank, NUM_RANKS, tmp_path)
    grid = dense(grid_laplacian(SIDE, SIDE))
    whole = with_spectrum(torch.linspace(-1, 2, 225, dtype=torch.float64), dtype=torch.complex128)
    expected = grid_spectrum(SIDE, SIDE)[:5]
    ends = torch.linspace(-1, 2, 225, dtype=torch.float64)[-4:]
    for name, matrix, values in (
        ("sparse", grid, expected),
        ("streamed", grid, expected),
        ("dense", whole, ends),
    ):
        assert torch.equal(parts[0][name][0], parts[1][name][0])
        torch.testing.assert_close(parts[0][name][0], values, rtol=0, atol=1e-12)
        vectors = torch.cat([part[name][1] for part in parts])
        assert (matrix @ vectors - vectors * values).norm(dim=0).max() < 1e-11
    for part in parts:
        assert part["peak"][0] <= part["peak"][1]
        assert part["empty"].round().tolist() == [6758.0, 10000.0]


def die_or_notice(rank: int, directory: str) -> None:
    """What each process runs: the second one is killed in a product, the first one notices."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{directory}/meeting",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=60),
    )
    matrix = grid_laplacian(SIDE, SIDE)
    begin, end = (0, SPLIT) if rank == 0 else (SPLIT, SIDE * SIDE)
    mine = rows_of(matrix, begin, end)
    if rank == 1:
        kill_after_products(150)
    budget = 14 * (SIDE * SIDE - SPLIT) * 8 + 8192
    with pytest.raises(RankError) as caught:
        eigs(mine, 5, which="SA", group=dist.group.WORLD, max_bytes=budget, store=directory)
    best = caught.value.best
    rows = 0 if best is None or best.vectors is None else len(best.vectors)
    found = {"message": str(caught.value), "rank": caught.value.rank, "rows": rows}
    left = [each.name for each in threading.enumerate() if "spectral" in each.name]
    torch.save(found | {"left": left}, f"{directory}/rank{rank}.pt")


def kill_after_products(count: int) -> None:
    """Make this process kill itself in the middle of a product."""
    from penstock.spectral import _ranks

    gather, calls = _ranks.RowsOfRanks._gather, []

    def counted(self, x):
        calls.append(1)
        if len(calls) > count:
            os.kill(os.getpid(), signal.SIGKILL)
        return gather(self, x)

    _ranks.RowsOfRanks._gather = counted


def test_a_rank_that_dies_is_said_and_the_best_iterate_is_kept(tmp_path: Path):
    context = torch.multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=die_or_notice, args=(rank, str(tmp_path)))
        for rank in range(NUM_RANKS)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(120)
    assert ranks[1].exitcode == -signal.SIGKILL
    assert ranks[0].exitcode == 0
    found = torch.load(tmp_path / "rank0.pt")
    assert found["message"].startswith("rank 0 of 2: ") and found["rank"] == 0
    assert "another rank has ended" in found["message"]
    assert found["rows"] == SPLIT and found["left"] == []


def test_functions_have_no_rows(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/one", rank=0, world_size=1)
    try:
        with pytest.raises(TypeError, match="must be a matrix, the rows of this rank"):
            eigs(SymmetricOperator(lambda v: v, 200), 2, group=dist.group.WORLD)
        matrix = grid_laplacian(12, 12)
        with pytest.raises(ValueError, match="in one process only"):
            eigs(matrix, 2, which="SA", B=matrix, group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
