"""Neighbourhoods: only real edges, every neighbour equally likely, hop after hop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.unified import unify
from penstock.unified._sampler import NeighborSampler, _distinct


def graph(degrees: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A graph with these out-degrees; different neighbours for each node."""
    generator = torch.Generator().manual_seed(seed)
    count = len(degrees)
    starts = torch.tensor([0, *degrees]).cumsum(0)
    parts = [torch.randperm(count, generator=generator)[:degree] for degree in degrees]
    return starts, torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64)


@given(
    degrees=st.lists(st.integers(0, 12), min_size=12, max_size=40),
    fanouts=st.lists(st.sampled_from([-1, 1, 2, 5]), min_size=1, max_size=3),
    replace=st.booleans(),
    num_seeds=st.integers(0, 6),
    seed=st.integers(0, 99),
)
def test_neighborhoods_are_part_of_the_graph(degrees, fanouts, replace, num_seeds, seed):
    starts, neighbors = graph(degrees, seed)
    torch.manual_seed(seed)
    seeds = torch.randperm(len(degrees))[:num_seeds]
    found = NeighborSampler(starts, neighbors, fanouts=fanouts, replace=replace).sample(seeds)
    nodes = found.node_ids
    assert torch.equal(nodes[:num_seeds], seeds)
    assert len(nodes.unique()) == len(nodes) == found.num_nodes[-1]
    assert found.edge_index.shape == (2, found.num_edges[-1])
    # Every edge is one of the graph, from the node that it says.
    assert torch.equal(nodes[found.edge_index[0]], neighbors[found.edge_ids])
    owner = torch.searchsorted(starts, found.edge_ids, right=True) - 1
    assert torch.equal(nodes[found.edge_index[1]], owner)
    for hop, fanout in enumerate(fanouts):
        begin = found.num_nodes[hop - 1] if hop else 0
        edges = slice(found.num_edges[hop], found.num_edges[hop + 1])
        centers = found.edge_index[1, edges]
        for position in range(begin, found.num_nodes[hop]):
            degree = degrees[int(nodes[position])]
            mine = found.edge_ids[edges][centers == position]
            if replace and fanout > 0:
                assert len(mine) == (fanout if degree else 0)
            else:
                assert len(mine) == len(mine.unique())
                assert len(mine) == (degree if fanout < 0 else min(degree, fanout))
        assert len(centers) == 0 or (centers >= begin).all()
        assert (
            found.edge_index[:, edges].numel() == 0
            or (found.edge_index[:, edges] < found.num_nodes[hop + 1]).all()
        )


@pytest.mark.parametrize("replace", [True, False])
def test_every_neighbour_is_equally_likely(replace):
    """Counts of 20 000 draws lie within five standard deviations."""
    starts, neighbors = graph([10] * 12)
    sampler = NeighborSampler(starts, neighbors, fanouts=[3], replace=replace)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(120)
    for _ in range(2000):
        ids = sampler.sample(torch.arange(12), generator=generator).edge_ids
        counts += torch.bincount(ids, minlength=120)
    expected = 2000 * 0.3
    assert (counts - expected).abs().max() < 5 * math.sqrt(expected)


def test_every_subset_is_equally_likely():
    generator = torch.Generator().manual_seed(0)
    chosen = _distinct(torch.full((30_000,), 6), 3, generator)
    subsets = (1 << chosen).sum(1)
    counts = torch.bincount(subsets)[subsets.unique()]
    assert len(counts) == math.comb(6, 3)
    expected = 30_000 / 20
    assert (counts - expected).abs().max() < 5 * math.sqrt(expected)


def test_tables_in_files_give_the_same(tmp_path):
    starts, neighbors = graph([5, 0, 9, 3, 12, 1, 7, 2, 2, 8, 4, 6, 3, 9])
    np.save(tmp_path / "starts.npy", starts.numpy())
    np.save(tmp_path / "neighbors.npy", neighbors.int().numpy())
    results = []
    for tables in [
        (starts, neighbors),
        (unify(tmp_path / "starts.npy"), unify(tmp_path / "neighbors.npy")),
    ]:
        sampler = NeighborSampler(*tables, fanouts=[4, 2])
        generator = torch.Generator().manual_seed(3)
        results.append(sampler.sample(torch.tensor([4, 2]), generator=generator))
    assert torch.equal(results[0].node_ids, results[1].node_ids)
    assert torch.equal(results[0].edge_index, results[1].edge_index)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        (([0, 2], [1], [3]), ValueError, "starts ends with 2, but there are 1 neighbors"),
        (([0, 1], [0], []), ValueError, "fanouts"),
        (([0, 1], [0], [0]), ValueError, "fanouts"),
        (([], [], [1]), ValueError, "starts: expected shape"),
        ((torch.zeros(3), [], [1]), TypeError, "starts: expected int32 or int64"),
        (([0, 1], torch.zeros(1, 1, dtype=torch.int64), [1]), TypeError, "neighbors: expected"),
    ],
)
def test_wrong_graphs_are_refused(arguments, error, says):
    starts, neighbors, fanouts = arguments
    with pytest.raises(error, match=says):
        NeighborSampler(starts, neighbors, fanouts=fanouts)


def test_wrong_seeds_are_refused():
    sampler = NeighborSampler([0, 1], [0], fanouts=[1])
    with pytest.raises(ValueError, match="every node at most once"):
        sampler.sample(torch.tensor([0, 0]))
    with pytest.raises(IndexError, match=r"seeds\[0\] is 1, but the graph has 1 nodes"):
        sampler.sample(torch.tensor([1]))
