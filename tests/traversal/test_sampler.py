"""Neighbourhoods: only real edges, every neighbour equally likely, hop after hop."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.traversal import NeighborSampler
from penstock.traversal._sampler import _draw_unique
from penstock.unified import unify


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


def within_chance(chi_square: float, degrees_of_freedom: int) -> bool:
    """Whether the statistic lies between its 0.1 % and 99.9 % quantiles (Wilson and Hilferty)."""
    spread = 2 / (9 * degrees_of_freedom)
    low, high = (degrees_of_freedom * (1 - spread + z * spread**0.5) ** 3 for z in (-3.09, 3.09))
    return low < chi_square < high


@pytest.mark.parametrize("replace", [True, False])
def test_every_neighbour_is_equally_likely(replace):
    """Pearson's test, for 12 nodes with 10 neighbours each, of which 3 are taken 2000 times.

    Twenty nodes in turn stand for one of them, of which each is sampled a hundred times.
    """
    starts, neighbors = graph([10] * 240)
    sampler = NeighborSampler(starts, neighbors, fanouts=[3], replace=replace)
    generator = torch.Generator().manual_seed(0)
    counts = torch.zeros(120)
    for _ in range(100):
        ids = sampler.sample(torch.arange(240), generator=generator).edge_ids
        counts += torch.bincount(ids, minlength=2400).view(20, 120).sum(0)
    expected = 2000 * 0.3
    statistic = ((counts - expected) ** 2).sum() / expected
    if not replace:
        # Three different ones: a count is binomial with p = 0.3, and two of them exclude each
        # other, so that the squares are smaller by 1 - p and by 9 / 10.
        statistic = statistic / (1 - 0.3) * 9 / 10
    assert within_chance(float(statistic), 12 * 9)


def test_every_subset_is_equally_likely():
    generator = torch.Generator().manual_seed(0)
    chosen = _draw_unique(torch.full((30_000,), 6), 3, generator)
    subsets = (1 << chosen).sum(1)
    counts = torch.bincount(subsets)[subsets.unique()]
    assert len(counts) == math.comb(6, 3)
    expected = 30_000 / 20
    assert within_chance(float(((counts - expected) ** 2).sum() / expected), 19)


@pytest.mark.parametrize("replace", [True, False])
def test_the_generator_decides(replace):
    sampler = NeighborSampler(*graph([20] * 30), fanouts=[4, 4], replace=replace)

    def sampled(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return sampler.sample(torch.arange(5), generator=generator).edge_ids

    first = sampled(1)
    torch.rand(100)
    assert torch.equal(sampled(1), first)
    assert not torch.equal(sampled(2), first)
    torch.manual_seed(5)
    by_default = sampler.sample(torch.arange(5)).edge_ids
    torch.manual_seed(5)
    assert torch.equal(sampler.sample(torch.arange(5)).edge_ids, by_default)


def test_edges_as_pairs():
    """Neighbours are where an edge comes from; edges are called by their place in the pairs."""
    edges = torch.randint(0, 30, (2, 200), generator=torch.Generator().manual_seed(0))
    sampler = NeighborSampler.from_edges(edges, 40, fanouts=[-1, 3])
    assert (sampler.num_nodes, sampler.num_edges, sampler.fanouts) == (40, 200, (-1, 3))
    found = sampler.sample(torch.tensor([7, 3, 39], dtype=torch.int32))
    assert torch.equal(found.node_ids[found.edge_index], edges[:, found.edge_ids])
    first = found.edge_ids[: found.num_edges[1]].sort().values
    expected = torch.isin(edges[1], torch.tensor([7, 3, 39])).nonzero().flatten()
    assert torch.equal(first, expected)
    assert NeighborSampler.from_edges(edges[:, :0], 3, fanouts=[2]).sample(
        torch.tensor([1])
    ).edge_index.shape == (2, 0)


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
        (([0, 2], [1], [3]), ValueError, "with the number of neighbors, 1; got 0 and 2"),
        (([1, 1], [0], [3]), ValueError, "expected to begin with 0 .*; got 1 and 1"),
        (([0, 1], [0], []), ValueError, "fanouts"),
        (([0, 1], [0], [0]), ValueError, "fanouts"),
        (([0, 1], [0], 2), ValueError, r"fanouts=2: expected numbers .* such as \[10, 5\]"),
        (([0, 1], [0], [2.5]), ValueError, r"fanouts=\[2\.5\]: expected numbers above zero"),
        (([], [], [1]), ValueError, "starts: expected shape"),
        ((torch.zeros(3), [], [1]), TypeError, "starts: expected int32 or int64"),
        (([0, 1], torch.zeros(1, 1, dtype=torch.int64), [1]), TypeError, "neighbors: expected"),
    ],
)
def test_wrong_graphs_are_refused(arguments, error, says):
    starts, neighbors, fanouts = arguments
    with pytest.raises(error, match=says):
        NeighborSampler(starts, neighbors, fanouts=fanouts)


@pytest.mark.parametrize(
    ("edges", "error", "says"),
    [
        (torch.rand(2, 3), TypeError, "edge_index: expected a tensor .*, got torch.float32"),
        ([[0], [1]], TypeError, "edge_index: expected a tensor of integers, got list"),
        (np.zeros((2, 1), int), TypeError, "expected a tensor of integers, got ndarray"),
        (torch.zeros(3, 2).long(), ValueError, r"expected shape \(2, num_edges\), got \(3, 2\)"),
        (torch.tensor([[0], [5]]), ValueError, "names node 5, but num_nodes=5"),
        (torch.tensor([[0], [-1]]), ValueError, "names node -1, but num_nodes=5"),
    ],
)
def test_wrong_pairs_are_refused(edges, error, says):
    with pytest.raises(error, match=says):
        NeighborSampler.from_edges(edges, 5, fanouts=[1])


def test_wrong_edge_ids_are_refused():
    with pytest.raises(ValueError, match="edge_ids: expected one for each of 2 neighbors, got 1"):
        NeighborSampler([0, 2], [0, 0], fanouts=[1], edge_ids=[7])


def test_damage_inside_a_graph_is_noticed_where_it_is_met():
    """A graph may be in a file, which is not read through to check it."""
    falling = NeighborSampler([0, 3, 1, 3], [0, 1, 2], fanouts=[1])
    with pytest.raises(ValueError, match="starts falls from node 1 to node 2"):
        falling.sample(torch.tensor([1]))
    for wrong in (3, -1):
        beyond = NeighborSampler([0, 1, 2, 3], [1, 0, wrong], fanouts=[-1])
        assert beyond.sample(torch.tensor([0])).node_ids.tolist() == [0, 1]
        with pytest.raises(ValueError, match=rf"neighbors\[2\] is {wrong}, but the graph has 3"):
            beyond.sample(torch.tensor([2]))


def test_wrong_seeds_are_refused():
    sampler = NeighborSampler([0, 1], [0], fanouts=[1])
    with pytest.raises(IndexError, match=r"seeds\[0\] is 1, but the graph has 1 nodes"):
        sampler.sample(torch.tensor([1]))
    with pytest.raises(TypeError, match=r"expected a tensor of integers, got torch\.float32"):
        sampler.sample(torch.tensor([0.0]))
    with pytest.raises(TypeError, match="seeds: expected a tensor of integers, got list"):
        sampler.sample([0])
    with pytest.raises(ValueError, match=r"seeds: expected shape \(n,\), got \(1, 1\)"):
        sampler.sample(torch.tensor([[0]]))


def test_fanouts_may_be_numbers_of_numpy():
    assert NeighborSampler([0, 1], [0], fanouts=np.array([2, -1])).fanouts == (2, -1)


def test_a_fanout_beyond_all_lists_takes_no_longer():
    sampler = NeighborSampler([0, 2, 3], [1, 1, 0], fanouts=[10**12])
    assert sampler.sample(torch.tensor([0])).node_ids.tolist() == [0, 1]


def test_a_seed_that_is_given_twice_has_neighbours_twice():
    """As samplers that draw seeds with replacement give it."""
    starts, neighbors = graph([9] * 30)
    seeds = torch.tensor([4, 7, 4, 4])
    found = NeighborSampler(starts, neighbors, fanouts=[3, 2]).sample(seeds)
    assert torch.equal(found.node_ids[:4], seeds)
    assert len(torch.unique(found.node_ids)) == len(found.node_ids) - 2
    of_seeds = found.edge_index[1, : found.num_edges[1]]
    assert of_seeds.bincount().tolist() == [3, 3, 3, 3]
    assert torch.equal(found.node_ids[found.edge_index[0]], neighbors[found.edge_ids])
    ends = found.node_ids[found.edge_index[1]]
    assert ((starts[ends] <= found.edge_ids) & (found.edge_ids < starts[ends + 1])).all()
    loop = NeighborSampler([0, 1], [0], fanouts=[1]).sample(torch.tensor([0, 0]))
    assert loop.node_ids.tolist() == [0, 0] and loop.edge_index.tolist() == [[0, 0], [0, 1]]


@pytest.mark.gpu
@pytest.mark.parametrize("replace", [True, False])
def test_seeds_on_a_gpu_are_sampled_there(replace):
    starts, neighbors = graph([7] * 50)
    seeds = torch.tensor([4, 17, 3])
    whole = NeighborSampler(starts, neighbors, fanouts=[-1, -1])
    expected, found = whole.sample(seeds), whole.sample(seeds.cuda())
    assert found.node_ids.is_cuda and found.edge_index.is_cuda
    assert torch.equal(found.node_ids.cpu(), expected.node_ids)
    assert torch.equal(found.edge_index.cpu(), expected.edge_index)
    some = NeighborSampler(starts, neighbors, fanouts=[3, 2], replace=replace)
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = some.sample(seeds.cuda(), generator=generator)
    nodes, edges = drawn.node_ids.cpu(), drawn.edge_index.cpu()
    assert torch.equal(nodes[edges[0]], neighbors[drawn.edge_ids.cpu()])
    assert drawn.num_edges[1] == 9
