"""Graphs as lists: the same neighbours from every source and tier, and clear errors."""

from __future__ import annotations

import gzip
import os
import resource
import signal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StoreError
from penstock.traversal import CSRGraph, NeighborSampler
from penstock.unified import unify

FLOWS = ["source_to_target", "target_to_source"]


def neighbors_of(graph: CSRGraph) -> list[list[int]]:
    starts, degrees = graph.read_lists(torch.arange(graph.num_nodes))
    entries = graph.indices[torch.arange(graph.num_edges)].tolist()
    return [
        entries[start : start + degree]
        for start, degree in zip(starts.tolist(), degrees.tolist(), strict=True)
    ]


@given(st.integers(1, 12), st.data())
def test_neighbours_are_the_ends_that_the_flow_says(num_nodes, data):
    node = st.integers(0, num_nodes - 1)
    pairs = data.draw(st.lists(st.tuples(node, node), max_size=40))
    edges = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).T
    expected = {flow: [[] for _ in range(num_nodes)] for flow in FLOWS}
    for source, target in pairs:
        expected["source_to_target"][target].append(source)
        expected["target_to_source"][source].append(target)
    for flow in FLOWS:
        graph = CSRGraph.from_edges(edges, num_nodes, flow=flow, edge_ids=True)
        assert neighbors_of(graph) == expected[flow]
        assert (graph.num_nodes, graph.num_edges) == (num_nodes, len(pairs))
        assert torch.equal(edges[FLOWS.index(flow), graph.edge_ids.long()], graph.indices.long())
        # A reversed graph is that of the other flow, with the same ids.
        other = graph.reverse()
        assert other.flow != flow
        assert list(map(sorted, neighbors_of(other))) == list(map(sorted, expected[other.flow]))
        assert torch.equal(
            edges[FLOWS.index(other.flow), other.edge_ids.long()], other.indices.long()
        )


def test_narrow_lists_are_kept_without_a_copy():
    edges = torch.tensor([[1, 2, 0], [0, 0, 1]])
    graph = CSRGraph.from_edges(edges, 3)
    assert graph.indptr.dtype == graph.indices.dtype == torch.int32
    assert graph.num_bytes == 4 * (4 + 3)
    same = CSRGraph(graph.indptr, graph.indices.numpy())
    assert same.indptr.data_ptr() == graph.indptr.data_ptr()
    assert same.indices.data_ptr() == graph.indices.data_ptr()
    assert CSRGraph([0], []).num_nodes == 0
    assert repr(same) == "CSRGraph(num_nodes=3, num_edges=3, flow='source_to_target')"


@pytest.mark.parametrize("edge_ids", [False, True])
def test_lists_in_tables_and_files_are_the_same_graph(tmp_path, edge_ids):
    edges = torch.randint(0, 50, (2, 300), generator=torch.Generator().manual_seed(0))
    graph = CSRGraph.from_edges(edges, 50, flow="target_to_source", edge_ids=edge_ids)
    in_files = graph.save(tmp_path / "lists")
    assert in_files.indices.report().tier == "file" and in_files.flow == graph.flow
    in_host = CSRGraph(unify(graph.indptr), unify(graph.indices), flow=graph.flow)
    paths = [tmp_path / "lists" / f"{name}.npy" for name in ("indptr", "indices")]
    by_path = CSRGraph(*paths, flow=graph.flow)
    for other in (in_files, in_host, by_path):
        assert neighbors_of(other) == neighbors_of(graph)
        assert neighbors_of(other.reverse()) == neighbors_of(graph.reverse())
    assert (in_files.edge_ids is not None) == edge_ids
    again = in_files.save(tmp_path / "again")
    assert neighbors_of(again) == neighbors_of(graph)
    for other in (graph, in_files):
        with pytest.raises(StoreError, match=r"exists; (pass|give) another path"):
            other.save(tmp_path / "again")


def test_a_killed_process_leaves_whole_lists_or_none(tmp_path, monkeypatch):
    """Not the beginning of one, which would be in the way of the next attempt."""
    graph = CSRGraph([0, 1, 2], [1, 0])

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    child = os.fork()
    if child == 0:
        monkeypatch.setattr(os, "fsync", die)
        graph.save(tmp_path)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert neighbors_of(graph.save(tmp_path)) == neighbors_of(graph)


def test_nothing_is_left_of_lists_that_find_no_room(tmp_path):
    edges = torch.randint(0, 50, (2, 300), generator=torch.Generator().manual_seed(0))
    graph, before = CSRGraph.from_edges(edges, 50), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # indptr takes less
    try:
        with pytest.raises(StoreError, match=r"indices\.npy' does not fit: .*free space"):
            graph.save(tmp_path / "lists")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not list((tmp_path / "lists").iterdir())
    assert neighbors_of(graph.save(tmp_path / "lists")) == neighbors_of(graph)


def test_samplers_share_a_graph():
    edges = torch.randint(0, 30, (2, 200), generator=torch.Generator().manual_seed(0))
    graph = CSRGraph.from_edges(edges, 30, edge_ids=True)
    sampler = NeighborSampler.from_graph(graph, fanouts=[3, -1])
    found = sampler.sample(torch.tensor([4, 9]), generator=torch.Generator().manual_seed(1))
    assert torch.equal(found.node_ids[found.edge_index], edges[:, found.edge_ids])
    with pytest.raises(TypeError, match="graph: expected a CSRGraph, got list"):
        NeighborSampler.from_graph([0], fanouts=[1])


@pytest.mark.parametrize("layout", ["csr", "csc", "coo"])
def test_sparse_matrices_of_scipy(layout):
    sparse = pytest.importorskip("scipy.sparse", reason="penstock[dev] installs SciPy")
    dense = np.zeros((4, 4))
    dense[[0, 0, 2, 3], [1, 3, 0, 3]] = [1, np.nan, -1, 5]
    matrix = sparse.coo_array(dense).asformat(layout)
    assert neighbors_of(CSRGraph.from_scipy(matrix)) == [[2], [0], [], [0, 3]]
    following = CSRGraph.from_scipy(matrix, flow="target_to_source")
    assert neighbors_of(following) == [[1, 3], [], [0], [3]]
    if layout == "csr":
        assert following.indices.data_ptr() == matrix.indices.ctypes.data
    twice = sparse.coo_matrix(([1.0, 2.0], ([2, 2], [0, 0])), shape=(4, 4)).asformat("coo")
    assert neighbors_of(CSRGraph.from_scipy(twice)) == [[2, 2], [], [], []]
    with pytest.raises(ValueError, match=r"expected a square matrix, got shape \(4, 3\)"):
        CSRGraph.from_scipy(matrix.tocsr()[:, :3])
    with pytest.raises(TypeError, match="expected a sparse matrix of SciPy, got ndarray"):
        CSRGraph.from_scipy(dense)


def test_data_of_pyg():
    data = pytest.importorskip("torch_geometric.data", reason="penstock[pyg] installs it")
    edges = torch.tensor([[1, 2, 0], [0, 0, 1]])
    graph = CSRGraph.from_pyg(data.Data(edge_index=edges, num_nodes=4), edge_ids=True)
    assert neighbors_of(graph) == [[1, 2], [0], [], []]
    assert graph.edge_ids.tolist() == [0, 1, 2]
    with pytest.raises(TypeError, match=r"an object with edge_index.* got HeteroData"):
        CSRGraph.from_pyg(data.HeteroData())


MATRIX = """%%MatrixMarket matrix coordinate {field} {symmetry}
% a remark

4 4 {count}
{entries}"""


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("field", "symmetry", "entries", "expected"),
    [
        ("pattern", "general", "1 2\n3 1\n", [[1], [], [0], []]),
        ("real", "general", "1 2 nan\n3 1 -2.5e3\n", [[1], [], [0], []]),
        ("complex", "hermitian", "2 1 1.0 -2\n3 3 1 0\n", [[1], [0], [2], []]),
        ("integer", "skew-symmetric", "4 1 7\n", [[3], [], [], [0]]),
        ("real", "symmetric", "", [[], [], [], []]),
    ],
)
def test_matrix_market_files(tmp_path, packed, field, symmetry, entries, expected):
    text = MATRIX.format(field=field, symmetry=symmetry, count=entries.count("\n"), entries=entries)
    path = tmp_path / ("graph.mtx.gz" if packed else "graph.mtx")
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    assert neighbors_of(CSRGraph.from_matrix_market(path, flow="target_to_source")) == expected
    scipy_io = pytest.importorskip("scipy.io", reason="penstock[dev] installs SciPy")
    dense = scipy_io.mmread(path).tocsr()
    assert [dense[[row]].indices.tolist() for row in range(4)] == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "%%MatrixMarket matrix array real general\n2 2\n",
            "begins with '%%matrixmarket matrix arr",
        ),
        ("", "begins with ''; expected '%%MatrixMarket"),
        (MATRIX.format(field="real", symmetry="odd", count=0, entries=""), "one of general, symm"),
        ("%%MatrixMarket matrix coordinate real general\n", "line of sizes is ''"),
        ("%%MatrixMarket matrix coordinate real general\n2 3 0\n", "line of sizes is '2 3 0'"),
        ("%%MatrixMarket matrix coordinate pattern general\n2 2 2\n1 1\n", "has 1 entries, but"),
        ("%%MatrixMarket matrix coordinate pattern general\n2 2 0\n1 1\n", "has 1 entries, but"),
        (
            "%%MatrixMarket matrix coordinate pattern general\n2 2 1\n1 3\n",
            r"entry 1 is at \(1, 3\)",
        ),
        (
            "%%MatrixMarket matrix coordinate pattern general\n2 2 1\n0 1\n",
            r"entry 1 is at \(0, 1\)",
        ),
        (
            "%%MatrixMarket matrix coordinate pattern general\n2 2 1\nnan 1\n",
            "no whole row and col",
        ),
    ],
)
def test_damaged_matrix_market_files_are_refused(tmp_path, text, says):
    (tmp_path / "graph.mtx").write_text(text)
    with pytest.raises(ValueError, match=says):
        CSRGraph.from_matrix_market(tmp_path / "graph.mtx")


@pytest.mark.parametrize("name", ["cut.mtx.gz", "plain.mtx.gz", "binary.mtx"])
def test_matrix_market_files_that_are_no_text_are_named(tmp_path, name):
    packed = gzip.compress(b"%%MatrixMarket matrix coordinate pattern general\n2 2 1\n1 1\n")
    content = {"cut": packed[:-12], "plain": b"%%MatrixMarket", "binary": b"%%\xff\xfe"}
    (tmp_path / name).write_bytes(content[name.split(".")[0]])
    with pytest.raises(ValueError, match=rf"{name}: is no whole text"):
        CSRGraph.from_matrix_market(tmp_path / name)


def test_arrays_of_any_byte_order_that_may_not_be_written(recwarn):
    indptr, indices = np.array([0, 1, 2], dtype=">i8"), np.array([1, 0], dtype=np.int32)
    indices.flags.writeable = False
    graph = CSRGraph(indptr, indices)
    assert neighbors_of(graph) == [[1], [0]] and not recwarn.list
    assert graph.indices.data_ptr() == indices.ctypes.data


@pytest.mark.parametrize(
    ("indptr", "indices", "error", "says"),
    [
        ([0, 2], [1], ValueError, "with the number of indices, 1; got 0 and 2"),
        ([1, 1], [0], ValueError, "expected to begin with 0 .*; got 1 and 1"),
        ([0, 3, 1, 3], [0, 1, 2], ValueError, "indptr: falls from 3 to 1 at node 1"),
        ([0, 1], [1], ValueError, "indices: names node 1, but the graph has 1 nodes"),
        ([0, 1], [-1], ValueError, "indices: names node -1"),
        ([], [], ValueError, r"indptr: expected shape \(num_nodes \+ 1,\)"),
        ([0.0, 1.0], [0], TypeError, "indptr: expected int32 or int64 .* got torch.float32"),
        ([0, 1], [float("nan")], TypeError, "indices: expected int32 or int64"),
        ([0, 1], ["a"], TypeError, "indices: expected integers, got list"),
        ([0, 1], torch.zeros(1, 1).long(), TypeError, r"indices: .* of shape \(1, 1\)"),
        ([0, 1], torch.zeros(1, dtype=torch.int16), TypeError, "got torch.int16"),
        ([0, 1], torch.zeros(1, device="meta").long(), TypeError, "on the CPU, got .* on meta"),
        ([0, 1], 5, TypeError, "indices: expected a tensor, a table, .*, got int"),
    ],
)
def test_wrong_lists_are_refused(indptr, indices, error, says):
    with pytest.raises(error, match=says):
        CSRGraph(indptr, indices)


def test_wrong_arguments_are_refused():
    edges = torch.tensor([[0], [0]])
    with pytest.raises(ValueError, match="flow='both': expected one of 'source_to_target', "):
        CSRGraph([0], [], flow="both")
    with pytest.raises(ValueError, match="edge_ids: expected one for each of 1 edges, got 2"):
        CSRGraph([0, 1], [0], edge_ids=[4, 5])
    with pytest.raises(ValueError, match=r"num_nodes is -1, but must be at least 0"):
        CSRGraph.from_edges(edges, -1)
    with pytest.raises(TypeError, match=r"num_nodes is 2\.5 .* must be a whole number"):
        CSRGraph.from_edges(edges, 2.5)
    with pytest.raises(ValueError, match="names node 0, but num_nodes=0"):
        CSRGraph.from_edges(edges, 0)


def test_damage_inside_a_file_is_noticed_where_it_is_met(tmp_path):
    np.save(tmp_path / "indptr.npy", np.array([0, 3, 1, 3]))
    np.save(tmp_path / "indices.npy", np.array([0, 1, 2]))
    graph = CSRGraph(tmp_path / "indptr.npy", tmp_path / "indices.npy")
    assert graph.read_lists(torch.tensor([0]))[1].tolist() == [3]
    with pytest.raises(ValueError, match="indptr: goes from 3 to 1 at node 1"):
        graph.read_lists(torch.tensor([0, 1]))
