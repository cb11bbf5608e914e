"""Costs of seeds: the bytes of each closure by itself, and a bound of those of any batch."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching import BalancedBatchSampler, measured_peak
from penstock.traversal import CSRGraph, _native, count_khop, khop, khop_costs


def random_graph(num_nodes: int, num_edges: int, seed: int = 0) -> CSRGraph:
    generator = torch.Generator().manual_seed(seed)
    edges = torch.randint(0, num_nodes, (2, num_edges), generator=generator)
    return CSRGraph.from_edges(edges, num_nodes, edge_ids=True)


@settings(max_examples=40)
@given(
    st.sampled_from([(5, 12), (40, 60), (300, 900)]),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(["C++", "torch"]),
    st.data(),
)
def test_costs_are_bytes_of_closures_and_bound_those_of_batches(shape, hops, ids, path, data):
    graph = random_graph(*shape, seed=data.draw(st.integers(0, 5)))
    seeds = torch.tensor(data.draw(st.lists(st.integers(0, shape[0] - 1), min_size=1, max_size=9)))
    with pytest.MonkeyPatch.context() as patch:
        if path == "torch":
            patch.setattr(_native, "is_available", lambda: False)
        elif not _native.is_available():
            pytest.skip("there is no compiler")
        costs = khop_costs(graph, seeds, hops, edge_ids=ids)
        sizes = [count_khop(graph, seed[None], hops, edge_ids=ids) for seed in seeds]
        assert costs.closure_bytes.tolist() == [size.predicted_bytes for size in sizes]
        assert costs.num_nodes.tolist() == [size.num_nodes[-1] for size in sizes]
        assert costs.num_edges.tolist() == [size.num_edges for size in sizes]
        batch = data.draw(st.lists(st.integers(0, len(seeds) - 1), min_size=1, unique=True))
        whole = count_khop(graph, seeds[batch].int(), hops, edge_ids=ids)
        assert whole.peak_bytes <= costs.batch_costs.of_batch(batch)


@pytest.mark.parametrize("tier", ["memory", "file"])
def test_batches_of_the_sampler_keep_to_the_cap(tier, tmp_path):
    graph = random_graph(2000, 6000)
    graph = graph if tier == "memory" else graph.save(tmp_path)
    seeds = torch.arange(0, 2000, 20)
    costs = khop_costs(graph, seeds, 2)
    cap = int(costs.batch_costs.of_each().max()) + 20_000
    batches = list(BalancedBatchSampler(costs.batch_costs, max_bytes=cap))
    assert sorted(itertools.chain(*batches)) == list(range(100)) and 1 < len(batches) < 100
    for batch in batches:
        closure = khop(graph, seeds[batch], 2, max_bytes=cap)
        assert torch.equal(closure.nodes[closure.seed_positions], seeds[batch])
        if tier == "memory" and _native.is_available():
            assert measured_peak(lambda batch=batch: khop(graph, seeds[batch], 2))[0] <= cap
    # Without a cap, batches of equal work.
    balanced = BalancedBatchSampler(costs.closure_bytes, batch_size=25)
    loads = [int(costs.closure_bytes[batch].sum()) for batch in balanced]
    assert len(loads) == 4 and max(loads) - min(loads) < 0.02 * np.mean(loads)


def test_damage_is_noticed(tmp_path):
    changed = CSRGraph(torch.tensor([0, 1, 2]), torch.tensor([1, 0]))
    changed.indices[1] = 8
    with pytest.raises(ValueError, match=r"indices\[1\] is 8, but the graph has 2 nodes"):
        khop_costs(changed, torch.tensor([0]), 1)
    with pytest.raises(IndexError, match=r"seeds\[0\] is 2"):
        khop_costs(changed, torch.tensor([2]), 1)
