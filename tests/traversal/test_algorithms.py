"""Searches, components and PageRank of whole graphs, against plain Python and NumPy."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import NoConvergenceError
from penstock.traversal import CSRGraph, bfs, connected_components, infer_layers, pagerank

FLOWS = ["source_to_target", "target_to_source"]
node_counts = st.integers(1, 25)


def draw_edges(data: Any, num_nodes: int) -> list[tuple[int, int]]:
    node = st.integers(0, num_nodes - 1)
    return data.draw(st.lists(st.tuples(node, node), max_size=60))


def make_graph(pairs: list[tuple[int, int]], num_nodes: int, flow: Any) -> CSRGraph:
    edges = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T
    return CSRGraph.from_edges(edges, num_nodes, flow=flow)


@given(node_counts, st.sampled_from(FLOWS), st.data())
def test_hops_are_those_of_a_queue(num_nodes: int, flow: str, data: Any):
    pairs = draw_edges(data, num_nodes)
    sources = data.draw(st.lists(st.integers(0, num_nodes - 1), max_size=3))
    expected = [-1] * num_nodes
    queue = deque(dict.fromkeys(sources))
    for node in queue:
        expected[node] = 0
    while queue:
        node = queue.popleft()
        for source, target in pairs:
            end, start = (source, target) if flow == "source_to_target" else (target, source)
            if start == node and expected[end] < 0:
                expected[end] = expected[node] + 1
                queue.append(end)
    found = bfs(make_graph(pairs, num_nodes, flow), torch.tensor(sources, dtype=torch.int64))
    assert found.dtype == torch.int32 and found.tolist() == expected


@given(node_counts, st.sampled_from(FLOWS), st.data())
def test_components_have_their_smallest_node(num_nodes: int, flow: str, data: Any):
    pairs = draw_edges(data, num_nodes)
    least = list(range(num_nodes))
    for _ in range(num_nodes):
        for a, b in pairs:
            least[a] = least[b] = min(least[a], least[b])
    assert connected_components(make_graph(pairs, num_nodes, flow)).tolist() == least


@given(node_counts, st.sampled_from(FLOWS), st.floats(0, 0.9), st.data())
def test_pagerank_solves_its_equations(num_nodes: int, flow: str, damping: float, data: Any):
    pairs = draw_edges(data, num_nodes)
    matrix = np.zeros((num_nodes, num_nodes))
    for source, target in pairs:
        matrix[target, source] += 1
    leaving = matrix.sum(0)
    matrix = np.where(leaving > 0, matrix / np.maximum(leaving, 1), 1 / num_nodes)
    constant = np.full(num_nodes, (1 - damping) / num_nodes)
    expected = np.linalg.solve(np.eye(num_nodes) - damping * matrix, constant)
    found = pagerank(make_graph(pairs, num_nodes, flow), damping=damping, tol=1e-13)
    # The last change is at most tol, and those that would follow add up to damping / (1 - damping).
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-12)


def test_long_lists_are_read_in_blocks_from_memory_and_files(tmp_path: Path):
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 3000, (2, 40_000), generator=generator)
    edges[1, :9000] = 7  # one list is longer than a block
    graph = CSRGraph.from_edges(edges, 3000)
    saved = graph.save(tmp_path)
    sources = torch.tensor([7])
    assert torch.equal(bfs(graph, sources), bfs(saved, sources))
    assert int(bfs(graph, sources).max()) > 1
    assert torch.equal(connected_components(graph), connected_components(saved))
    assert torch.equal(pagerank(graph), pagerank(saved))


def test_a_damaged_file_is_named(tmp_path: Path):
    np.save(tmp_path / "indptr.npy", np.array([0, 1, 2]))
    np.save(tmp_path / "indices.npy", np.array([1, 5]))
    graph = CSRGraph(tmp_path / "indptr.npy", tmp_path / "indices.npy")
    for call in (lambda: bfs(graph, torch.tensor([0])), lambda: connected_components(graph)):
        with pytest.raises(ValueError, match="indices: names node 5, but the graph has 2 nodes"):
            call()


@pytest.mark.parametrize(
    ("offsets", "place"), [((0, 3, 1, 4), 1), ((0, 9, 4, 4), 0), ((0, -2, 4, 4), 0)]
)
def test_damaged_offsets_are_named(offsets: tuple[int, ...], place: int, tmp_path: Path):
    np.save(tmp_path / "indptr.npy", np.array(offsets))
    np.save(tmp_path / "indices.npy", np.array([0, 1, 2, 0]))
    graph = CSRGraph(tmp_path / "indptr.npy", tmp_path / "indices.npy")
    calls = (
        lambda: bfs(graph, torch.tensor([0, 1])),
        lambda: connected_components(graph),
        lambda: pagerank(graph),
        lambda: infer_layers(graph, torch.eye(3), [lambda x, _: x]),
        lambda: graph.reverse(),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"indptr: (goes|falls) from .* at node"):
            call()
    with pytest.raises(ValueError, match=f"at node {place}"):
        pagerank(graph)


def test_a_node_that_is_none_is_named_by_reverse(tmp_path: Path):
    for node in (7, -1):
        np.save(tmp_path / f"{node}.npy", np.array([0, 1, node, 0]))
        graph = CSRGraph([0, 2, 4, 4], tmp_path / f"{node}.npy")
        with pytest.raises(ValueError, match=f"indices: names node {node}, but the graph has 3"):
            graph.reverse()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"damping": "x"}, "damping='x': expected a number"),
        ({"tol": None}, "tol=None: expected a number"),
        (
            {"max_iterations": 2.5},
            "max_iterations is 2.5 of type float, but must be a whole number",
        ),
    ],
)
def test_options_of_pagerank_that_are_no_numbers_are_named(options: dict[str, Any], says: str):
    with pytest.raises(TypeError, match=says):
        pagerank(CSRGraph([0, 1], [0]), **options)


def test_pagerank_gives_what_it_has_reached():
    graph = make_graph([(0, 1), (1, 2), (2, 0), (3, 0)], 4, "source_to_target")
    with pytest.raises(
        NoConvergenceError, match=r"pagerank changes by .* raise max_iterations"
    ) as e:
        pagerank(graph, max_iterations=2)
    assert float(e.value.values.sum()) == pytest.approx(1)
    with pytest.raises(NoConvergenceError):
        pagerank(graph, tol=1e-300)


@pytest.mark.parametrize(
    "options", [{"damping": 1.0}, {"damping": -0.1}, {"tol": 0.0}, {"max_iterations": 0}]
)
def test_numbers_that_make_no_sense_are_named(options: Any):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        pagerank(make_graph([(0, 1)], 2, "source_to_target"), **options)


def test_wrong_sources_and_graphs_are_named():
    graph = make_graph([(0, 1)], 2, "source_to_target")
    with pytest.raises(IndexError, match=r"seeds\[1\] is 2, but the graph has 2 nodes"):
        bfs(graph, torch.tensor([0, 2]))
    for function in (connected_components, pagerank):
        with pytest.raises(TypeError, match="graph: expected a CSRGraph or a RankGraph, got int"):
            function(3)  # type: ignore[arg-type]


def test_graphs_without_nodes_or_edges():
    empty = CSRGraph([0], [])
    for found in (bfs(empty, torch.empty(0).long()), connected_components(empty), pagerank(empty)):
        assert found.shape == (0,)
    alone = CSRGraph([0, 0, 0], [])
    assert pagerank(alone).tolist() == [0.5, 0.5]
