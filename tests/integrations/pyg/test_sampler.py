"""Penstock's sampler within PyG: its neighbourhoods are what PyG's models and loaders expect."""

from __future__ import annotations

import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader
from torch_geometric.nn import GraphSAGE, SAGEConv
from torch_geometric.sampler import NodeSamplerInput
from torch_geometric.utils import k_hop_subgraph, trim_to_layer

from penstock.integrations.pyg import UnifiedSampler
from penstock.traversal import NeighborSampler
from penstock.unified import unify


@pytest.fixture
def data() -> Data:
    generator = torch.Generator().manual_seed(0)
    edges = torch.randint(0, 60, (2, 240), generator=generator)
    return Data(x=torch.randn(60, 5), edge_index=edges, edge_attr=torch.randn(240, 2))


def sampler_of(data: Data, fanouts: list[int]) -> UnifiedSampler:
    return UnifiedSampler(NeighborSampler.from_edges(data.edge_index, 60, fanouts=fanouts))


def test_all_neighbours_are_the_subgraph_of_as_many_hops(data):
    seeds = torch.tensor([5, 17, 42])
    found = sampler_of(data, [-1, -1]).sample_from_nodes(NodeSamplerInput(None, seeds))
    nodes, _, _, _ = k_hop_subgraph(seeds, 2, data.edge_index, num_nodes=60)
    assert torch.equal(found.node.sort().values, nodes)
    assert sum(found.num_sampled_nodes) == len(nodes) and found.num_sampled_nodes[0] == 3
    assert sum(found.num_sampled_edges) == len(found.row) and len(found.num_sampled_edges) == 2


def test_a_model_says_the_same_of_the_seeds_as_on_the_whole_graph(data):
    torch.manual_seed(0)
    model = GraphSAGE(5, 8, num_layers=2, out_channels=3)
    with torch.no_grad():
        expected = model(data.x, data.edge_index)
        for batch in NodeLoader(data, sampler_of(data, [-1, -1]), batch_size=7):
            found = model(batch.x, batch.edge_index)[: batch.batch_size]
            assert torch.allclose(found, expected[batch.input_id], atol=1e-6)


def test_a_table_goes_through_a_model_as_a_whole_where_it_fits(data):
    """As scripts do for their evaluation; sums over neighbours begin with rows of the table."""
    torch.manual_seed(0)
    model = GraphSAGE(5, 8, num_layers=2, out_channels=3)
    table = unify(data.x)
    assert torch.equal(model(table, data.edge_index), model(data.x, data.edge_index))
    assert table.report().num_rows_gathered == data.num_edges


def test_layers_can_be_trimmed_hop_by_hop(data):
    """PyG's `trim_to_layer` drops, layer by layer, what no seed needs any more."""
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([SAGEConv(5, 8), SAGEConv(8, 3)])
    sampler = sampler_of(data, [4, 3])
    batch = next(iter(NodeLoader(data, sampler, input_nodes=torch.arange(9), batch_size=9)))

    def run(*, trimmed: bool) -> torch.Tensor:
        x, edges = batch.x, batch.edge_index
        for number, layer in enumerate(layers):
            if trimmed:
                counts = batch.num_sampled_nodes, batch.num_sampled_edges
                x, edges, _ = trim_to_layer(number, *counts, x, edges)
            x = layer(x, edges)
        return x[:9]

    assert torch.allclose(run(trimmed=True), run(trimmed=False), atol=1e-6)


def test_edge_features_are_those_of_the_sampled_edges(data):
    data.edge_attr = unify(data.edge_attr)
    expected = data.edge_attr.cpu()
    for batch in NodeLoader(data, sampler_of(data, [3, 2]), batch_size=16):
        assert torch.equal(batch.edge_attr, expected[batch.e_id])
        assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])


def test_what_it_does_not_do_is_refused(data):
    sampler = sampler_of(data, [2])
    seeds = torch.tensor([1])
    with pytest.raises(ValueError, match="without times and without a node type"):
        sampler.sample_from_nodes(NodeSamplerInput(None, seeds, time=seeds))
    with pytest.raises(ValueError, match="without times and without a node type"):
        sampler.sample_from_nodes(NodeSamplerInput(None, seeds, input_type="paper"))
    with pytest.raises(NotImplementedError, match="give the nodes at both ends"):
        sampler.sample_from_edges(None)
    with pytest.raises(
        TypeError, match=r"expected a penstock\.traversal\.NeighborSampler, got Data"
    ):
        UnifiedSampler(data)
