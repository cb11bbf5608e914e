"""Graphs by the tensors that they are made from: made once, made anew when those change, let go."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from _relational import random_graph
from penstock import rgnn
from penstock.rgnn.graph import GraphTensors, _graph, find_graph, split_graph

N, R = 12, 4


def edges(seed: int = 0) -> GraphTensors:
    """Edges as a user has them: int64, and owned by the test alone."""
    graph = random_graph(N, 60, seed=seed)
    return GraphTensors(graph.edge_index, graph.edge_type, None, N, R, 1)


def test_the_same_tensors_are_the_same_graph():
    made_from = edges()
    graph = find_graph(made_from)
    assert find_graph(made_from) is graph
    assert torch.equal(graph.edge_index, made_from.edge_index)
    assert torch.equal(graph.edge_type, made_from.edge_type)


def test_layers_that_are_called_with_the_same_tensors_share_a_graph(monkeypatch):
    made = []
    monkeypatch.setattr(_graph, "Graph", lambda *a, **k: made.append(1) or rgnn.Graph(*a, **k))
    edge_index, edge_type, *_ = edges()
    layers = [rgnn.RGCNConv(6, 6, R), rgnn.RGATConv(6, 6, R)]
    h = torch.randn(N, 6)
    for layer in layers * 2:
        h = layer(h, edge_index, edge_type)
    assert len(made) == 1


@pytest.mark.parametrize("which", ["edge_index", "edge_type"])
def test_tensors_changed_in_place_are_another_graph(which):
    made_from = edges()
    first = find_graph(made_from)
    getattr(made_from, which)[..., 0] = 0
    second = find_graph(made_from)
    assert second is not first
    assert torch.equal(getattr(second, which), getattr(made_from, which))


def test_views_of_one_memory_are_different_graphs():
    made_from = edges()
    half = made_from._replace(
        edge_index=made_from.edge_index[:, :30], edge_type=made_from.edge_type[:30]
    )
    flipped = made_from._replace(edge_index=made_from.edge_index.flip(0))
    found = [find_graph(each) for each in (made_from, half, flipped)]
    assert [graph.num_edges for graph in found] == [60, 30, 60]
    assert torch.equal(found[2].edge_index[0], found[0].edge_index[1])


def test_numbers_are_part_of_what_a_graph_is():
    made_from = edges()
    assert find_graph(made_from).num_nodes == N
    assert find_graph(made_from._replace(num_nodes=N + 1)).num_nodes == N + 1


def test_a_graph_is_that_of_its_own_tensors_as_long_as_it_lives():
    graph = random_graph(N, 60)
    made_from = split_graph(graph)
    assert find_graph(made_from) is graph
    watched = weakref.ref(graph)
    del graph
    gc.collect()
    assert watched() is None  # its tensors alone do not keep it
    other = find_graph(made_from)
    assert other.num_node_types == 2
    assert torch.equal(split_graph(other).edge_index, made_from.edge_index)


def test_graphs_are_let_go_after_their_tensors():
    made_from = edges()
    watched = weakref.ref(find_graph(made_from))
    del made_from
    gc.collect()
    find_graph(edges(seed=1))
    gc.collect()
    assert watched() is None


def test_only_the_last_graphs_are_remembered():
    several = [edges(seed) for seed in range(_graph._NUM_REMEMBERED + 1)]
    watched = [weakref.ref(find_graph(each)) for each in several]
    gc.collect()
    assert watched[0]() is None
    assert all(graph() is not None for graph in watched[1:])


def test_tensors_that_do_not_count_changes_are_read_each_time():
    with torch.inference_mode():
        made_from = edges()._replace(edge_index=edges().edge_index.clone())
        first = find_graph(made_from)
        made_from.edge_index[:, 0] = 0
        assert not torch.equal(find_graph(made_from).edge_index, first.edge_index)


def test_tensors_in_an_arena_are_compared():
    """What writes into an arena by address, as planned steps do, counts no change."""
    arena = torch.zeros(1000, dtype=torch.int64)
    made_from = edges()
    place = arena[: made_from.edge_index.numel()].view_as(made_from.edge_index)
    in_arena = made_from._replace(edge_index=place)
    place.data.copy_(made_from.edge_index)
    first = find_graph(in_arena)
    assert find_graph(in_arena) is first
    place.data.copy_(edges(seed=1).edge_index)
    assert torch.equal(find_graph(in_arena).edge_index, edges(seed=1).edge_index)
