"""Graphs from PyG, from arrays and from files of triples."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock import rgnn

DATA = Path(os.environ.get("PENSTOCK_DATA", "/nowhere")) / "rgnn"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="needs $PENSTOCK_DATA")


def test_hetero_data_becomes_one_range_of_nodes():
    data_module = pytest.importorskip("torch_geometric.data")
    data = data_module.HeteroData()
    data["paper"].x = torch.zeros(3, 2)
    data["author"].num_nodes = 2
    data["author", "writes", "paper"].edge_index = torch.tensor([[0, 1], [2, 0]])
    data["paper", "cites", "paper"].edge_index = torch.tensor([[0], [1]])
    graph = rgnn.Graph.from_pyg(data)
    assert graph.edge_index.tolist() == [[3, 4, 0], [2, 0, 1]]
    assert graph.edge_type.tolist() == [0, 0, 1]
    assert graph.names.node_types == ("paper", "author")
    assert graph.names.relations == ("author writes paper", "paper cites paper")
    assert (graph.num_nodes, graph.num_node_types) == (5, 2)
    assert graph.counts.is_canonical
    assert graph.nodes_by_type is None


def test_hetero_data_without_a_number_of_nodes_is_refused():
    data_module = pytest.importorskip("torch_geometric.data")
    data = data_module.HeteroData()
    data["paper"].name = "x"
    with (
        pytest.warns(UserWarning, match="Unable to accurately infer"),
        pytest.raises(ValueError, match=r"data\['paper'\] does not say"),
    ):
        rgnn.Graph.from_pyg(data)


def two_types(edge_type: tuple[str, str, str], edge_index: object) -> Any:
    data = pytest.importorskip("torch_geometric.data").HeteroData()
    data["paper"].num_nodes, data["author"].num_nodes = 3, 2
    data[edge_type].edge_index = edge_index
    return data


WRITES = ("author", "writes", "paper")


@pytest.mark.parametrize(
    ("edge_type", "edge_index", "error", "message"),
    [
        # In one range of nodes, an author 2 would be what comes after the authors.
        (WRITES, torch.tensor([[2], [0]]), ValueError, "holds 2, and there are 2 nodes of type 'a"),
        (WRITES, torch.tensor([[0], [-1]]), ValueError, "holds -1, and there are 3 nodes of type"),
        (WRITES, torch.zeros(3, 1, dtype=torch.int64), ValueError, r"shape \(2, num_edges\)"),
        (WRITES, torch.zeros(2, 1), TypeError, r"'paper'\)\].edge_index must hold integers"),
        (
            ("author", "in", "club"),
            torch.tensor([[0], [0]]),
            ValueError,
            "of type 'club', of which",
        ),
    ],
    ids=["too large", "negative", "shape", "dtype", "type"],
)
def test_hetero_data_with_wrong_edges_is_refused(edge_type, edge_index, error, message):
    with pytest.raises(error, match=message):
        rgnn.Graph.from_pyg(two_types(edge_type, edge_index))


def test_what_is_no_hetero_data_is_refused():
    data = two_types(WRITES, torch.tensor([[0], [0]]))
    data["paper", "cites", "paper"].edge_attr = torch.zeros(4, 2)
    with pytest.raises(ValueError, match=r"'cites', 'paper'\)\] has no edge_index"):
        rgnn.Graph.from_pyg(data)
    with pytest.raises(TypeError, match=r"must be a torch_geometric.data.HeteroData; got dict"):
        rgnn.Graph.from_pyg({})


def test_hetero_data_with_isolated_types_and_with_none():
    data_module = pytest.importorskip("torch_geometric.data")
    data = two_types(WRITES, torch.tensor([[0, 0], [1, 1]], dtype=torch.int32))
    data["field"].num_nodes = 4
    graph = rgnn.Graph.from_pyg(data)
    assert (graph.num_nodes, graph.num_node_types, graph.num_relations) == (9, 3, 1)
    assert graph.edge_index.tolist() == [[3, 3], [1, 1]]  # an edge that occurs twice is two
    empty = rgnn.Graph.from_pyg(data_module.HeteroData())
    assert (empty.num_nodes, empty.num_edges, empty.num_relations) == (0, 0, 0)


@pytest.mark.parametrize("as_array", [torch.tensor, np.array])
def test_triples_are_head_relation_tail(as_array):
    graph = rgnn.Graph.from_triples(as_array([[0, 1, 2], [2, 0, 0]]), num_nodes=5)
    assert graph.edge_index.tolist() == [[0, 2], [2, 0]]
    assert graph.edge_type.tolist() == [1, 0]
    assert graph.num_nodes == 5


def test_triples_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"\(num_triples, 3\)"):
        rgnn.Graph.from_triples(torch.zeros(4, 2, dtype=torch.int64))


def test_arrays_that_torch_does_not_take_as_they_are():
    array = np.array([[0, 1, 2], [2, 0, 0]], dtype=np.uint16)
    array.flags.writeable = False
    for each in (array, array[::-1][::-1], array.tolist()):
        assert rgnn.Graph.from_triples(each).edge_index.tolist() == [[0, 2], [2, 0]]


@pytest.mark.parametrize("dtype", [str, object])
def test_names_in_an_array_are_numbered(dtype):
    array = np.array([["a", "to", "b"], ["b", "to", "a"], ["a", "to", "b"]], dtype=dtype)
    graph = rgnn.Graph.from_triples(array)
    assert graph.edge_index.tolist() == [[0, 1, 0], [1, 0, 1]]
    assert (graph.names.nodes, graph.names.relations) == (("a", "b"), ("to",))


@pytest.mark.parametrize(
    ("triples", "message"),
    [
        (np.zeros((1, 3)), "triples must hold integers, or names as strings; got float64"),
        (torch.zeros(1, 3), "triples must hold integers; got torch.float32"),
        ([[None, 1, "a"]], "got object"),
    ],
    ids=["float array", "float tensor", "mixed"],
)
def test_triples_of_other_dtypes_are_refused(triples, message):
    with pytest.raises(TypeError, match=message):
        rgnn.Graph.from_triples(triples)


N_TRIPLES = """\
# a comment
<http://a> <http://knows> <http://b> .
<http://b> <http://says> "one . two"@en .

<http://b> <http://knows> <http://a> . # and back
"""


@pytest.mark.parametrize("is_compressed", [False, True])
def test_n_triples_are_numbered_as_they_occur(tmp_path, is_compressed):
    path = tmp_path / ("graph.nt.gz" if is_compressed else "graph.nt")
    data = N_TRIPLES.encode()
    path.write_bytes(gzip.compress(data) if is_compressed else data)
    graph = rgnn.Graph.from_triples(path)
    assert graph.names.nodes == ("<http://a>", "<http://b>", '"one . two"@en')
    assert graph.names.relations == ("<http://knows>", "<http://says>")
    assert graph.edge_index.tolist() == [[0, 1, 1], [1, 2, 0]]
    assert graph.edge_type.tolist() == [0, 1, 0]
    back = graph.with_reverse_edges()
    assert back.names.relations[2] == "<http://knows> (reverse)"


def test_columns_of_ids_and_of_names(tmp_path):
    ids, names = tmp_path / "ids.tsv", tmp_path / "names.tsv"
    ids.write_text("4 0 1\n1 1 0\n")
    names.write_text("New York\tin\tUSA\nUSA\thas\tNew York\n")
    assert rgnn.Graph.from_triples(ids).edge_index.tolist() == [[4, 1], [1, 0]]
    graph = rgnn.Graph.from_triples(str(names))
    assert graph.names.nodes == ("New York", "USA")
    assert graph.edge_type.tolist() == [0, 1]


def test_open_ke_files_have_the_relation_last(tmp_path):
    path = tmp_path / "train2id.txt"
    path.write_text("2\n0 1 5\n2 3 1\n")
    graph = rgnn.Graph.from_triples(path)
    assert graph.edge_index.tolist() == [[0, 2], [1, 3]]
    assert graph.edge_type.tolist() == [5, 1]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.nt", "<a> <b> <c> .\n<a> <b>\n", "a.nt:2: not an N-Triples statement"),
        ("a.tsv", "0 1 2\n0 1\n", "a.tsv:2: expected 3 columns, found 2"),
        ("a.txt", "3\n0 1 2\n", "a.txt:1: announces 3 triples, the file has 1"),
        ("a.txt", "1\n0 x 2\n", "a.txt:2: expected ids from 0 on, found 'x'"),
        ("a.txt", "0 1 2\n\n0 -1 2\n", "a.txt:3: expected ids from 0 on, found '-1'"),
        ("a.txt", "h r t\n0 1 2\n", "a.txt:1: the only line without ids; if it is a header"),
        ("a.tsv", "a\tto\tb\na\t\tb\n", "a.tsv:2: a column is empty"),
        ("a.nt", "<a> <b> <c> <graph> .\n", "a.nt:1: not an N-Triples statement"),
        ("a.nt", '<a> <b> "two" "words" .\n', "a.nt:1: not an N-Triples statement"),
    ],
)
def test_a_bad_line_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=message):
        rgnn.Graph.from_triples(tmp_path / name)


@pytest.mark.parametrize(("name", "content"), [("a.tsv", b"\xff\xfe\t"), ("a.nt.gz", b"<a>")])
def test_a_file_that_is_no_text_is_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{name}: cannot be read as text in UTF-8"):
        rgnn.Graph.from_triples(tmp_path / name)


def test_n_triples_with_blank_nodes_quotes_and_no_blanks(tmp_path):
    statements = ['_:b1 <p> "a \\"b\\" . c"^^<t> .', "<a><p>_:b1.", '<a> <p> "" . # empty']
    (tmp_path / "a.nt").write_text("\n".join(statements))
    graph = rgnn.Graph.from_triples(tmp_path / "a.nt")
    assert graph.names.nodes == ("_:b1", '"a \\"b\\" . c"^^<t>', "<a>", '""')
    assert graph.edge_index.tolist() == [[0, 2, 2], [1, 0, 3]]


def test_columns_with_comments_a_byte_order_mark_and_other_line_ends(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_bytes("\ufeff# head relation tail\r\n#tag\tin \tx\r\n\r\n#\r\nx\tin\t#tag".encode())
    graph = rgnn.Graph.from_triples(path)
    assert graph.names.nodes == ("#tag", "x")
    assert (graph.names.relations, graph.num_edges) == (("in",), 2)


@pytest.mark.parametrize("text", ["", "0\n", "# nothing\n"])
def test_an_empty_file_is_a_graph_without_edges(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    assert rgnn.Graph.from_triples(tmp_path / "a.txt").num_edges == 0


@needs_data
def test_pair_ratios_of_fb15k_237_are_those_known():
    graph = rgnn.Graph.from_triples(DATA / "fb15k-237" / "train2id.txt", num_nodes=14541)
    stats = graph.stats()
    assert (stats.num_nodes, stats.num_edges, stats.num_relations) == (14541, 272115, 237)
    assert round(stats.src_ratio, 3) == 0.343
    assert round(stats.dst_ratio, 3) == 0.207
    both = graph.with_reverse_edges().stats()
    assert round(both.src_ratio, 3) == 0.275


@needs_data
def test_pair_ratios_of_aifb_are_those_known():
    stats = rgnn.Graph.from_triples(DATA / "aifb" / "aifb_stripped.nt.gz").stats()
    assert (stats.num_edges, stats.num_relations, stats.num_nodes) == (29043, 45, 8285)
    assert round(stats.src_ratio, 3) == 0.55
    assert round(stats.dst_ratio, 3) == 0.359
