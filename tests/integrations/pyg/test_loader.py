"""Mini-batches: PyG's fields, the rows that were sampled, the same from the same seed."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NodeLoader
from torch_geometric.sampler.base import SubgraphType

from penstock.batching import BalancedBatchSampler
from penstock.errors import StoreReadError
from penstock.integrations.pyg import NeighborLoader, UnifiedFeatureStore, UnifiedSampler
from penstock.traversal import CSRGraph, NeighborSampler, khop_costs
from penstock.unified import unify

NUM_NODES = 80


def test_batches_of_closures_under_a_cap():
    """A sampler of batches by the bytes of closures gives the loader its seeds."""
    edges = torch.randint(0, 500, (2, 1500), generator=torch.Generator().manual_seed(0))
    data = Data(x=torch.arange(500.0)[:, None], edge_index=edges)
    costs = khop_costs(CSRGraph.from_pyg(data), torch.arange(500), 2)
    sampler = BalancedBatchSampler(costs.batch_costs, max_bytes=30_000)
    seeds = []
    for batch in NeighborLoader(data, [-1, -1], batch_sampler=sampler):
        seeds += batch.input_id.tolist()
        bound = int(costs.num_nodes[batch.input_id].sum())
        assert batch.batch_size <= batch.num_nodes <= bound
        assert costs.batch_costs.of_batch(batch.input_id) <= 30_000
    assert sorted(seeds) == list(range(500)) and len(sampler) > 10


@pytest.fixture(params=["tensor", "memory", "file"])
def data(request, tmp_path) -> Data:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_NODES, 5, generator=generator)
    edges = torch.randint(0, NUM_NODES, (2, 400), generator=generator)
    data = Data(x=x, edge_index=edges, y=torch.arange(NUM_NODES), edge_attr=torch.arange(400.0))
    data.train_mask = torch.arange(NUM_NODES) % 2 == 0
    data.name = "a graph"
    if request.param == "memory":
        data.x, data.edge_attr = unify(x), unify(data.edge_attr)
    elif request.param == "file":
        np.save(tmp_path / "x.npy", x.numpy())
        data.x = unify(tmp_path / "x.npy")
    return data


def rows_of(data: Data) -> torch.Tensor:
    return data.x[torch.arange(NUM_NODES)]


def assert_fits(batch: Data, data: Data) -> None:
    """Everything in the batch is of the nodes and edges that it says."""
    assert torch.equal(batch.x, rows_of(data)[batch.n_id]) and type(batch.x) is torch.Tensor
    assert torch.equal(batch.y, batch.n_id)
    assert torch.equal(batch.train_mask, batch.n_id % 2 == 0)
    assert torch.equal(batch.n_id[batch.edge_index], data.edge_index[:, batch.e_id])
    assert torch.equal(batch.edge_attr, batch.e_id.float())
    assert sum(batch.num_sampled_nodes) == len(batch.n_id)
    assert sum(batch.num_sampled_edges) == batch.edge_index.shape[1]
    assert batch.num_sampled_nodes[0] == batch.batch_size == len(batch.input_id)
    assert batch.name == "a graph"


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_have_what_pyg_gives(data, prefetch):
    loader = NeighborLoader(
        data, [4, 2], input_nodes=data.train_mask, batch_size=16, prefetch=prefetch
    )
    assert len(loader) == 3
    batches = list(loader)
    seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in batches])
    assert torch.equal(seeds, data.train_mask.nonzero().flatten())
    assert torch.equal(torch.cat([batch.input_id for batch in batches]), seeds)
    for batch in batches:
        assert_fits(batch, data)
    shared = NeighborLoader(data, neighbor_sampler=loader.graph, batch_size=NUM_NODES)
    assert_fits(next(iter(shared)), data)
    by_pyg = NodeLoader(data, loader.node_sampler, input_nodes=data.train_mask, batch_size=16)
    assert next(iter(by_pyg)).keys() == batches[0].keys()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_make_batches_too(data, method):
    loader = NeighborLoader(
        data,
        [4, 2],
        batch_size=16,
        shuffle=True,
        num_workers=2,
        multiprocessing_context=method,
        generator=torch.Generator().manual_seed(0),
    )
    batches = list(loader)
    for batch in batches:
        assert_fits(batch, data)
        assert batch.x.is_shared()
    seeds = torch.cat([batch.n_id[: batch.batch_size] for batch in batches])
    assert torch.equal(seeds.sort().values, torch.arange(NUM_NODES))
    assert loader.report().num_batches == 0


def edges_of(loader: NeighborLoader) -> list[torch.Tensor]:
    return [torch.cat([batch.n_id, batch.e_id]) for batch in loader]


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))


def test_the_same_generator_gives_the_same_batches_whatever_else_is_drawn(data):
    found = []
    for prefetch in (0, 1, 4):
        loader = NeighborLoader(
            data,
            [3, 2],
            batch_size=9,
            shuffle=True,
            prefetch=prefetch,
            generator=torch.Generator().manual_seed(7),
        )
        epochs = []
        for _ in range(2):
            for batch in loader:
                torch.rand(prefetch + 1)  # what a model draws is none of the loader's business
                epochs.append(torch.cat([batch.n_id, batch.e_id]))
        found.append(epochs)
    assert equal(found[0], found[1]) and equal(found[0], found[2])
    assert not equal(found[0][:9], found[0][9:])


def test_without_a_generator_pytorchs_own_decides(data):
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(edges_of(NeighborLoader(data, [3], batch_size=9, shuffle=True)))
    assert equal(found[0], found[1]) and not equal(found[0], found[2])


def test_what_goes_wrong_in_the_other_thread_is_raised_here(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((NUM_NODES, 4096), dtype=np.float32))
    data = Data(x=unify(tmp_path / "x.npy"), edge_index=torch.zeros(2, 1, dtype=torch.int64))
    loader = NeighborLoader(data, [1], batch_size=20)
    batches = iter(loader)
    next(batches)
    with open(tmp_path / "x.npy", "r+b") as file:
        file.truncate(40 * 4096 * 4 + 128)
    with pytest.raises(StoreReadError, match=r"x\.npy"):
        list(batches)
    assert next(batches, None) is None


def test_an_abandoned_epoch_ends_its_thread_and_the_next_begins_anew(data):
    loader = NeighborLoader(data, [4, 2], batch_size=8)
    for batch in loader:
        assert_fits(batch, data)
        break
    del batch
    deadline = time.monotonic() + 60
    while any(thread.name.startswith("penstock") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert len(list(loader)) == 10


def test_gradient_mode_of_the_consumer_holds_in_the_other_thread():
    class Reading(UnifiedSampler):
        def sample_from_nodes(self, index, **kwargs):
            modes.append(torch.is_grad_enabled())
            return super().sample_from_nodes(index, **kwargs)

    modes: list[bool] = []
    edges = torch.randint(0, 10, (2, 30))
    data = Data(x=torch.randn(10, 2), edge_index=edges)
    graph = NeighborSampler.from_edges(edges, 10, fanouts=[2])
    loader = NeighborLoader(data, neighbor_sampler=Reading(graph), batch_size=5)
    list(loader)
    with torch.no_grad():
        list(loader)
    assert modes == [True, True, False, False]


@pytest.mark.gpu
def test_the_stream_of_the_consumer_holds_in_the_other_thread():
    streams: list[torch.cuda.Stream] = []

    def transform(batch: Data) -> Data:
        streams.append(torch.cuda.current_stream())
        return batch

    x, edges = torch.randn(10, 2), torch.randint(0, 10, (2, 30))
    data = Data(x=x.cuda(), edge_index=edges)
    loader = NeighborLoader(data, [2], batch_size=5, transform=transform)
    with torch.cuda.stream(torch.cuda.Stream()):
        expected = torch.cuda.current_stream()
        for batch in loader:
            assert torch.equal(batch.x.cpu(), x[batch.n_id])
    assert streams == [expected, expected]
    assert expected != torch.cuda.default_stream()


def test_a_trained_table_is_gathered_after_the_step_that_changes_it():
    edges = torch.randint(0, 10, (2, 30))
    data = Data(x=unify(torch.zeros(10, 2), requires_grad=True), edge_index=edges)
    with pytest.raises(ValueError, match="prefetch=1: 'x' requires gradients"):
        NeighborLoader(data, [2])
    stores = UnifiedFeatureStore({(None, "emb"): data.x}), data
    graph = NeighborSampler.from_edges(edges, 10, fanouts=[2])
    with pytest.raises(ValueError, match="prefetch=1: 'emb' requires gradients"):
        NeighborLoader(stores, neighbor_sampler=graph, input_nodes=torch.arange(3))
    for step, batch in enumerate(NeighborLoader(data, [-1], batch_size=2, prefetch=0)):
        assert torch.equal(batch.x.detach(), torch.full_like(batch.x, float(step)))
        batch.x.sum().backward()
        assert data.x.grad.layout == torch.sparse_coo
        with torch.no_grad():
            data.x.add_(1)


def test_the_graph_and_the_features_may_be_elsewhere(tmp_path):
    """A graph in files, whose data object has features only; and a feature store."""
    edges = torch.randint(0, NUM_NODES, (2, 300))
    order = edges[1].argsort(stable=True)
    starts = torch.searchsorted(edges[1][order], torch.arange(NUM_NODES + 1))
    np.save(tmp_path / "starts.npy", starts.numpy())
    np.save(tmp_path / "neighbors.npy", edges[0][order].numpy())
    graph = NeighborSampler(tmp_path / "starts.npy", tmp_path / "neighbors.npy", fanouts=[3, 3])
    x = unify(torch.randn(NUM_NODES, 3))
    stores = UnifiedFeatureStore({(None, "x"): x}), Data(edge_index=edges)
    for data in (Data(x=x), stores):
        loader = NeighborLoader(
            data, neighbor_sampler=graph, input_nodes=torch.arange(NUM_NODES), batch_size=40
        )
        for batch in loader:
            assert torch.equal(batch.x, x[batch.n_id])
            assert torch.equal(batch.n_id[batch.edge_index], edges[:, order[batch.e_id]])


def test_the_order_may_be_given(data):
    """As by a DistributedSampler, which gives each process its seeds."""
    loader = NeighborLoader(data, [2], sampler=[5, 3, 70, 1], batch_size=3)
    assert [batch.n_id[: batch.batch_size].tolist() for batch in loader] == [[5, 3, 70], [1]]


def test_batches_without_a_size_are_refused(data):
    with pytest.raises(ValueError, match="batch_size=None: expected a number of seeds"):
        next(iter(NeighborLoader(data, [2], batch_size=None)))


def test_transforms_apply(data):
    loader = NeighborLoader(data, [2], batch_size=40, transform=lambda batch: batch.num_nodes)
    assert [type(each) for each in loader] == [int, int]


def test_the_report_adds_up(data):
    loader = NeighborLoader(data, [4, 2], batch_size=16, prefetch=0)
    list(loader)
    report = loader.report()
    assert report.num_batches == 5
    assert report.sample_seconds > 0 and report.gather_seconds > 0
    assert report.wait_seconds >= report.sample_seconds + report.gather_seconds
    assert set(report.to_dict()) == {
        "num_batches",
        "sample_seconds",
        "gather_seconds",
        "wait_seconds",
    }
    assert "gather" in str(report)


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"data": HeteroData()}, TypeError, "got HeteroData; use PyG's loader with pyg-lib"),
        ({"data": torch.zeros(2)}, TypeError, r"expected torch_geometric\.data\.Data.* got Tensor"),
        ({"data": Data(x=torch.zeros(3, 1))}, ValueError, "expected an edge_index, or a neighbor_"),
        ({"num_neighbors": None}, ValueError, "num_neighbors: expected neighbours per node"),
        ({"num_neighbors": [0]}, ValueError, r"fanouts=\[0\]"),
        ({"prefetch": -1}, ValueError, "prefetch=-1: expected 0 or more"),
        ({"disjoint": True}, ValueError, "disjoint=True: .* does disjoint=False only"),
        ({"subgraph_type": "induced"}, ValueError, "does subgraph_type='directional' only"),
        ({"weight_attr": "w"}, ValueError, "weight_attr='w': .* does weight_attr=None only"),
        ({"shuffel": True}, TypeError, "shuffel"),
        (
            {"neighbor_sampler": NeighborSampler([0, 0], [], fanouts=[1])},
            ValueError,
            "it has its own fanouts",
        ),
    ],
)
def test_what_it_cannot_do_is_refused(arguments, error, says):
    plain = Data(x=torch.zeros(3, 1), edge_index=torch.zeros(2, 1, dtype=torch.int64))
    with pytest.raises(error, match=says):
        NeighborLoader(**({"data": plain, "num_neighbors": [2]} | arguments))


def test_options_of_pygs_that_change_nothing_are_taken(data):
    options = {"disjoint": False, "directed": True, "is_sorted": True, "time_attr": None}
    loader = NeighborLoader(data, [2], subgraph_type=SubgraphType.directional, **options)
    assert_fits(next(iter(loader)), data)


def test_a_pair_of_stores_needs_a_sampler():
    stores = UnifiedFeatureStore(), Data()
    with pytest.raises(ValueError, match="neighbor_sampler: needed where data is a pair of stores"):
        NeighborLoader(stores, [2], input_nodes=torch.arange(2))
