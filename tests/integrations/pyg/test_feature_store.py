"""A feature store over tables does what PyG's own store of tensors does."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch
from torch_geometric.data import Data, HeteroData
from torch_geometric.loader import NodeLoader
from torch_geometric.loader.utils import filter_custom_hetero_store, filter_hetero_data

from penstock.errors import WholeTableError
from penstock.integrations.pyg import UnifiedFeatureStore, UnifiedSampler
from penstock.traversal import NeighborSampler
from penstock.unified import UnifiedTensor, unify


@pytest.fixture(params=["memory", "file"])
def stores(request, tmp_path) -> tuple[UnifiedFeatureStore, HeteroData]:
    """Ours, and PyG's with the same content."""
    theirs = HeteroData()
    theirs["paper"].x = torch.randn(40, 6)
    theirs["author"].x = torch.randn(20, 3)
    theirs["paper"].year = torch.arange(40)
    ours = {}
    for group, name in [("paper", "x"), ("author", "x"), ("paper", "year")]:
        tensor = theirs[group][name]
        path = tmp_path / f"{group}-{name}.npy"
        np.save(path, tensor.numpy())
        ours[group, name] = path if request.param == "file" else tensor
    return UnifiedFeatureStore(ours), theirs


INDICES = {
    "tensor": torch.tensor([3, 0, 3, 19]),
    "empty": torch.empty(0, dtype=torch.int64),
    "mask": torch.arange(20) % 3 == 0,
    "slice": slice(4, 15, 2),
    "int": 7,
}


@pytest.mark.parametrize("name", INDICES)
def test_rows_as_from_a_store_of_tensors(stores, name):
    ours, theirs = stores
    for group in ("author", "paper"):
        index = INDICES[name]
        if name == "mask" and group == "paper":
            index = torch.cat([index, index])
        expected = theirs.get_tensor(group, "x", index)
        found = ours.get_tensor(group, "x", index)
        assert torch.equal(found, torch.as_tensor(expected)), group
    assert torch.equal(ours["author"].x[torch.tensor([2])], theirs["author"].x[[2]])


def test_without_an_index_it_is_the_table_itself(stores):
    ours, _ = stores
    for table in (ours["paper", "x", None], ours["paper", "x", slice(None)], ours["paper", "x"]()):
        assert isinstance(table, UnifiedTensor) and table.shape == (40, 6)
    given = unify(torch.zeros(3, 2))
    assert UnifiedFeatureStore({(None, "x"): given})[None, "x", None] is given


def test_rows_are_written_where_they_lie(stores):
    ours, theirs = stores
    rows = torch.randn(2, 3)
    for index in (torch.tensor([4, 1]), slice(6, 8), torch.arange(20) % 13 == 3):
        assert ours.put_tensor(rows, "author", "x", index)
        theirs["author"].x[index] = rows
    assert ours.put_tensor(rows[0], "author", "x", 5)
    theirs["author"].x[5] = rows[0]
    assert ours.update_tensor(rows, "author", "x", torch.tensor([11, 12]))
    theirs["author"].x[11:13] = rows
    assert torch.equal(ours["author", "x", torch.arange(20)], theirs["author"].x)


def test_tables_come_and_go(stores):
    ours, _ = stores
    assert not ours.put_tensor(torch.zeros(1, 2), "venue", "x", torch.tensor([0]))
    assert not ours.update_tensor(torch.zeros(4, 2), "venue", "x", None)
    edge_type = ("author", "writes", "paper")
    assert ours.put_tensor(torch.ones(4, 2), edge_type, "weight", None)
    assert ours.get_tensor_size(edge_type, "weight") == (4, 2)
    assert ours.update_tensor(torch.ones(5, 2), edge_type, "weight", None)
    assert ours.get_tensor_size(edge_type, "weight") == (5, 2)
    assert repr(edge_type) in repr(ours) and "(5, 2)" in repr(ours)
    assert ours.remove_tensor(edge_type, "weight", None)
    assert not ours.remove_tensor(edge_type, "weight", None)
    assert ours.get_tensor_size(edge_type, "weight") is None


def test_attributes_are_listed_anew_each_time(stores):
    ours, theirs = stores
    listed = ours.get_all_tensor_attrs()
    known = {(attr.group_name, attr.attr_name) for attr in listed}
    assert known == {("paper", "x"), ("author", "x"), ("paper", "year")}
    listed[0].index = torch.tensor([0])  # as PyG's loaders do
    assert not ours.get_all_tensor_attrs()[0].is_set("index")
    assert ours.get_tensor_size("paper", "x") == theirs.get_tensor_size("paper", "x") == (40, 6)


def test_what_is_not_there_is_named(stores):
    ours, _ = stores
    with pytest.raises(KeyError, match=r"no features \('paper', 'y'\).*\('paper', 'x'\)"):
        ours.get_tensor("paper", "y", torch.tensor([0]))
    with pytest.raises(IndexError, match=r"index\[1\] is 20, but the table has 20 rows"):
        ours.get_tensor("author", "x", torch.tensor([0, 20]))
    with pytest.raises(TypeError, match=r"expected keys \(group, name\), got 'x'"):
        UnifiedFeatureStore({"x": torch.zeros(2, 2)})
    with pytest.raises(TypeError, match="expected a tensor, a NumPy array or a path, got list"):
        UnifiedFeatureStore({(None, "x"): [1, 2]})


def test_a_whole_file_is_not_read_behind_its_users_back(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((5, 2)))
    store = UnifiedFeatureStore({(None, "x"): tmp_path / "x.npy"})
    with pytest.raises(WholeTableError, match="slice of all rows"):
        store[None, "x", slice(0, 5)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pyg_loads_features_from_it(num_workers, tmp_path):
    x, edges = torch.randn(30, 4), torch.randint(0, 30, (2, 150))
    np.save(tmp_path / "y.npy", np.arange(30))
    store = UnifiedFeatureStore({(None, "x"): x, (None, "y"): tmp_path / "y.npy"})
    graph = NeighborSampler.from_edges(edges, 30, fanouts=[3])
    loader = NodeLoader(
        (store, Data(edge_index=edges)),  # Data is a GraphStore too
        UnifiedSampler(graph),
        input_nodes=torch.arange(0, 30, 2),
        batch_size=5,
        num_workers=num_workers,
        multiprocessing_context="spawn" if num_workers else None,
    )
    batches = list(loader)
    assert len(batches) == 3
    for batch in batches:
        assert torch.equal(batch.x, x[batch.n_id]) and torch.equal(batch.y, batch.n_id)
        assert torch.equal(batch.n_id[batch.edge_index], edges[:, batch.e_id])


def test_pyg_fetches_features_of_several_types(stores):
    """By the functions with which PyG's loaders fetch them, whose samplers are not at hand."""
    ours, theirs = stores
    writes = ("author", "writes", "paper")
    theirs[writes].edge_index = torch.tensor([[1, 2], [3, 4]])
    nodes = {"paper": torch.tensor([30, 2]), "author": torch.tensor([7])}
    sampled = nodes, {writes: torch.tensor([0])}, {writes: torch.tensor([1])}, {writes: None}
    expected = filter_hetero_data(theirs, *map(dict, sampled))
    tables = HeteroData()
    for attr in ours.get_all_tensor_attrs():
        tables[attr.group_name][attr.attr_name] = ours.get_tensor(
            attr.group_name, attr.attr_name, None
        )
    tables[writes].edge_index = theirs[writes].edge_index
    for found in (
        filter_hetero_data(tables, *map(dict, sampled)),
        filter_custom_hetero_store(ours, theirs, *map(dict, sampled)),
    ):
        for group, name in [("paper", "x"), ("author", "x"), ("paper", "year")]:
            assert torch.equal(found[group][name], expected[group][name])
        assert torch.equal(found[writes].edge_index, torch.tensor([[0], [1]]))


def test_a_store_in_memory_is_pickled_by_content():
    store = UnifiedFeatureStore({("paper", "x"): torch.arange(6.0).view(3, 2)})
    twin = pickle.loads(pickle.dumps(store))
    assert torch.equal(twin["paper", "x", torch.tensor([2])], torch.tensor([[4.0, 5.0]]))
