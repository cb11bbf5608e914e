"""Arms of the benchmark of graphs have the same results, and its rows are those announced."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

import _graphs_inference
import _graphs_khop
import _graphs_ranks
from _rows import Environment

WHERE = Environment(device_name="test", versions={}, commit="unknown", command="test")
OPTIONS = argparse.Namespace(rounds=1, device="cpu", match="", part=["khop"])


@pytest.fixture
def one_graph(monkeypatch):
    """One graph in place of all, small enough for every arm."""
    edges = torch.randint(0, 300, (2, 900), generator=torch.Generator().manual_seed(0))
    edges = edges.unique(dim=1)
    monkeypatch.setattr(_graphs_khop, "read_edges", lambda name: (edges, 300))
    monkeypatch.setattr(_graphs_khop, "NUM_COSTS", 40)
    return edges


def test_arms_find_the_same_closure(one_graph, tmp_path):
    for package in ("scipy", "networkx", "torch_geometric"):
        pytest.importorskip(package)
    case = _graphs_khop.Case("any", 2, 5)
    arms = case.arms(tmp_path / "lists", is_small=True)
    found = {arm: find() for arm, find in arms.items()}
    ours = found[_graphs_khop.OURS]
    assert 0 < ours.size.num_edges < case.graph.num_edges
    for arm in (_graphs_khop.REVERSED, _graphs_khop.FILES):
        assert torch.equal(found[arm].edge_index, ours.edge_index)
    nodes, edge_index, *_ = found[_graphs_khop.PYG]
    assert torch.equal(nodes, ours.nodes.sort().values)
    assert edge_index.shape == ours.edge_index.shape
    assert found[_graphs_khop.SCIPY].nnz == len(found[_graphs_khop.NETWORKX]) == edge_index.shape[1]
    assert len(found[_graphs_khop.SAMPLER].node_ids) == len(nodes)


def test_rows_are_those_announced(one_graph, tmp_path, monkeypatch):
    for package in ("scipy", "networkx", "torch_geometric"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)
    rows = list(_graphs_khop.measure_rows(OPTIONS, WHERE))
    assert sorted((row.case, row.arm) for row in rows) == sorted(
        _graphs_khop.announce_rows(OPTIONS)
    )
    by_kind = {row.case.partition(":")[0]: row for row in rows if row.arm == _graphs_khop.OURS}
    assert by_kind["bytes"].limit_fraction == 1
    assert all((by_kind[kind].limit_fraction or 2) <= 1 for kind in ("budget", "costs"))
    assert list(Path(tmp_path).iterdir()) == []


def test_few_cases_are_announced():
    few = argparse.Namespace(**{**vars(OPTIONS), "match": "budget"})
    assert len(list(_graphs_khop.announce_rows(few))) == len(_graphs_khop.SHARES)


def test_rows_of_ranks_are_those_announced(one_graph, tmp_path, monkeypatch):
    """Each arm on one rank, in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_graphs_ranks, "NUM_SIDE", 30)
    monkeypatch.setattr(_graphs_ranks, "RANKS", (1,))
    monkeypatch.setattr(_graphs_ranks, "read_edges", lambda name: (one_graph, 300))
    monkeypatch.setattr(
        _graphs_ranks,
        "spawn",
        lambda run, args, nprocs: [run(rank, *args) for rank in range(nprocs)],
    )
    num_threads = torch.get_num_threads()
    try:
        rows = list(_graphs_ranks.measure_rows(OPTIONS, WHERE))
    finally:
        torch.set_num_threads(num_threads)
    assert [(row.case, row.arm) for row in rows] == list(_graphs_ranks.announce_rows(OPTIONS))
    for row in rows:
        assert row.median_seconds > 0 and not row.moved_bytes.get("rank->rank")
        assert row.case.startswith("ranks") or row.limit is not None


def test_rows_of_inference_are_those_announced(one_graph, tmp_path, monkeypatch):
    pytest.importorskip("torch_geometric")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_graphs_inference, "read_edges", lambda name: (one_graph, 300))
    rows = list(_graphs_inference.measure_rows(OPTIONS, WHERE))
    assert [(row.case, row.arm) for row in rows] == list(_graphs_inference.announce_rows(OPTIONS))
    assert all(row.extra["largest_difference"] < 1e-5 for row in rows)
    assert list(Path(tmp_path).iterdir()) == []
