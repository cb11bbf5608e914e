"""Sets of nodes: those of closures in either direction, within a budget, at fewer edges."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching import measured_peak
from penstock.errors import CapacityError
from penstock.traversal import CSRGraph, _native, khop, khop_nodes
from penstock.traversal._budget import SearchBudget


def random_graph(num_nodes: int, num_edges: int, seed: int = 0) -> CSRGraph:
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, num_nodes, (2, num_edges), generator=generator)
    return CSRGraph.from_edges(edges, num_nodes, flow="target_to_source")


@settings(max_examples=40)
@given(st.integers(0, 5), st.integers(0, 9), st.booleans(), st.booleans(), st.data())
def test_nodes_are_those_of_closures(hops, seed, pulls, native, data):
    graph = random_graph(60, 240, seed)
    seeds = torch.tensor(data.draw(st.lists(st.integers(0, 59), max_size=5)), dtype=torch.int64)
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(_native, "is_available", lambda: False)
        found = khop_nodes(graph, seeds, hops, reverse=graph.reverse() if pulls else None)
    closure = khop(graph, seeds, hops)
    assert torch.equal(found.nodes, closure.nodes)
    assert torch.equal(found.seed_positions, closure.seed_positions)
    assert found.num_nodes == closure.size.num_nodes
    assert found.frontier_edges == closure.size.frontier_edges


def test_a_search_pulls_where_that_looks_at_fewer_edges():
    if not _native.is_available():
        pytest.skip("a search by torch pushes")
    graph = random_graph(3000, 60_000)
    hub = torch.tensor([0])
    pushed, pulled = khop_nodes(graph, hub, 6), khop_nodes(graph, hub, 6, reverse=graph.reverse())
    assert torch.equal(pushed.nodes, pulled.nodes)
    assert pushed.touched_edges == pushed.frontier_edges and not any(pushed.pulled)
    assert pulled.pulled[:2] == (False, False) and any(pulled.pulled)
    assert sum(pulled.touched_edges) < sum(pushed.touched_edges) / 3
    # The nodes of each frontier are at most the edges that lead to them.
    counts = torch.tensor(pushed.num_nodes).diff().tolist()
    assert all(count <= edges for count, edges in zip(counts, pushed.frontier_edges, strict=True))


def test_hops_after_the_last_node_are_counted_without_a_search(monkeypatch: pytest.MonkeyPatch):
    checked: list[int] = []
    monkeypatch.setattr(SearchBudget, "check", lambda _, num_bytes: checked.append(num_bytes))
    found = khop_nodes(CSRGraph([0, 1, 2, 3], [1, 2, 0]), torch.tensor([0]), 1000)
    assert len(checked) < 50
    assert found.num_nodes == (1, 2, *[3] * 999)
    assert found.frontier_edges == found.touched_edges == (1, 1, 1, *[0] * 997)
    assert found.pulled == (False,) * 1000


def test_a_budget_is_kept_to_the_byte():
    graph = random_graph(3000, 20_000)
    seeds = torch.arange(0, 3000, 100)
    found = khop_nodes(graph, seeds, 2)
    if _native.is_available():
        assert measured_peak(lambda: khop_nodes(graph, seeds, 2))[0] == found.peak_bytes
    assert khop_nodes(graph, seeds, 2, max_bytes=found.peak_bytes).num_nodes == found.num_nodes
    with pytest.raises(CapacityError, match=rf"30 seeds need {found.peak_bytes} bytes"):
        khop_nodes(graph, seeds, 2, max_bytes=found.peak_bytes - 1)
