"""Graphs: what they are made from, what they refuse, and that every index says what it should."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given

from _relational import graphs, random_graph
from penstock import rgnn
from penstock.rgnn import spaces
from penstock.rgnn.graph import build_once
from penstock.rgnn.spaces import Coordinate, RowMap, Space

EDGE_MAPS = [
    spaces.EDGE_SRC,
    spaces.EDGE_DST,
    spaces.EDGE_TYPE,
    spaces.EDGE_SRC_PAIR,
    spaces.EDGE_DST_PAIR,
]
ALL_MAPS = [value for value in vars(spaces).values() if isinstance(value, RowMap)]


def edges_of(graph: rgnn.Graph) -> list[tuple[int, int, int]]:
    """(source, relation, destination) in the internal order, read through the indices."""
    columns = [
        graph.index(m).tolist() for m in (spaces.EDGE_SRC, spaces.EDGE_TYPE, spaces.EDGE_DST)
    ]
    return list(zip(*columns, strict=True))


@given(graph=graphs())
def test_the_internal_order_is_by_relation_then_destination_and_stable(graph):
    given_edges = list(
        zip(
            graph.edge_index[0].tolist(),
            graph.edge_type.tolist(),
            graph.edge_index[1].tolist(),
            strict=True,
        )
    )
    order = sorted(range(len(given_edges)), key=lambda i: (given_edges[i][1], given_edges[i][2]))
    assert graph.edge_order.tolist() == order
    assert edges_of(graph) == [given_edges[i] for i in order]


@given(graph=graphs())
def test_pairs_are_the_unique_ones_sorted_by_relation(graph):
    edges = edges_of(graph)
    for pair_map, node_map, type_map, end in [
        (spaces.EDGE_SRC_PAIR, spaces.SRC_PAIR_SRC, spaces.SRC_PAIR_TYPE, 0),
        (spaces.EDGE_DST_PAIR, spaces.DST_PAIR_DST, spaces.DST_PAIR_TYPE, 2),
    ]:
        pairs = list(
            zip(graph.index(type_map).tolist(), graph.index(node_map).tolist(), strict=True)
        )
        assert pairs == sorted({(edge[1], edge[end]) for edge in edges})
        of_edges = [pairs[i] for i in graph.index(pair_map).tolist()]
        assert of_edges == [(edge[1], edge[end]) for edge in edges]
        assert len(pairs) == graph.counts.rows(pair_map.into)


@given(graph=graphs())
def test_two_steps_lead_where_one_does(graph):
    num_factored = 0
    for whole in EDGE_MAPS:
        for through in EDGE_MAPS:
            rest = spaces.factor(whole, through)
            if rest is None:
                # A second step exists only where the first keeps what the whole depends on.
                assert not spaces.coordinates(whole) <= spaces.coordinates(through)
                continue
            num_factored += 1
            if whole != through:
                two_steps = graph.index(rest)[graph.index(through).long()]
                assert torch.equal(two_steps, graph.index(whole))
    assert num_factored == 9  # five identities, two ways out of each kind of pair


@given(graph=graphs())
def test_segments_and_groups_partition_the_rows(graph):
    for row_map in [*EDGE_MAPS, spaces.SRC_PAIR_TYPE, spaces.DST_PAIR_TYPE, spaces.NODE_TYPE_OF]:
        index = graph.index(row_map).tolist()
        starts, rows = (tensor.tolist() for tensor in graph.grouped(row_map))
        for target in range(graph.counts.rows(row_map.into)):
            expected = [row for row, to in enumerate(index) if to == target]
            assert rows[starts[target] : starts[target + 1]] == expected
        sizes = graph.group_sizes(row_map).tolist()
        assert sizes == [starts[i + 1] - starts[i] for i in range(len(starts) - 1)]
    for row_map in (spaces.EDGE_TYPE, spaces.SRC_PAIR_TYPE, spaces.DST_PAIR_TYPE):
        starts = graph.segment_starts(row_map)
        for kind in range(graph.num_relations):
            assert set(graph.index(row_map)[starts[kind] : starts[kind + 1]].tolist()) <= {kind}
        assert starts[-1] == graph.counts.rows(row_map.rows)


def test_nodes_are_sorted_by_type_only_where_they_are_not():
    edges = torch.zeros(2, 1, dtype=torch.int64)
    sorted_types = rgnn.Graph(edges, edges[0], node_type=torch.tensor([0, 0, 1]))
    assert sorted_types.nodes_by_type is None
    mixed = rgnn.Graph(edges, edges[0], node_type=torch.tensor([1, 0, 1, 0]))
    assert mixed.nodes_by_type.tolist() == [1, 3, 0, 2]


def test_relations_that_decide_node_types_are_canonical():
    canonical = random_graph(is_canonical=True)
    assert canonical.counts.is_canonical
    for end, edge_end in [
        (spaces.RELATION_SRC_TYPE, spaces.EDGE_SRC),
        (spaces.RELATION_DST_TYPE, spaces.EDGE_DST),
    ]:
        types = canonical.index(spaces.NODE_TYPE_OF)[canonical.index(edge_end).long()]
        by_relation = canonical.index(end)[canonical.index(spaces.EDGE_TYPE).long()]
        assert torch.equal(types, by_relation)
    mixed = random_graph()
    assert not mixed.counts.is_canonical
    with pytest.raises(ValueError, match="more than one type"):
        mixed.index(spaces.RELATION_SRC_TYPE)


def test_indices_are_int32_and_built_once():
    graph = random_graph()
    for row_map in ALL_MAPS:
        if row_map.rows is Space.RELATION:
            continue
        assert graph.index(row_map).dtype == torch.int32, row_map
        assert graph.index(row_map) is graph.index(row_map)
    assert graph.edge_order.dtype == torch.int32


def test_a_graph_keeps_its_own_edges():
    edge_index = torch.tensor([[0, 1], [1, 0]])
    graph = rgnn.Graph(edge_index, torch.tensor([0, 1]))
    edge_index.zero_()
    graph.edge_index.zero_()
    assert graph.edge_index.tolist() == [[0, 1], [1, 0]]
    with pytest.raises(AttributeError, match="immutable"):
        graph.num_nodes = 7


def test_a_graph_loads_as_weights_do(tmp_path):
    names = rgnn.GraphNames(nodes=("a", "b"), relations=("r", "s"))
    edges = torch.tensor([[0, 1], [1, 0]])
    graph = rgnn.Graph(edges, torch.tensor([0, 1]), node_type=torch.tensor([1, 0]), names=names)
    torch.save({"graph": graph}, tmp_path / "graph.pt")
    loaded = torch.load(tmp_path / "graph.pt", weights_only=True)["graph"]
    assert loaded.names == names
    assert torch.equal(loaded.edge_index, edges)
    assert loaded.stats() == graph.stats()


def test_pickling_keeps_the_graph_and_not_what_it_has_built():
    graph = random_graph(40, 300)
    small = len(pickle.dumps(graph))
    graph.stats()
    assert len(pickle.dumps(graph)) == small
    copy = pickle.loads(pickle.dumps(graph))
    assert copy.stats() == graph.stats()
    assert edges_of(copy) == edges_of(graph)
    assert copy.num_node_types == graph.num_node_types


def test_the_same_device_is_the_same_graph():
    graph = random_graph()
    assert graph.to("cpu") is graph


@pytest.mark.gpu
def test_another_device_has_the_same_graph():
    graph = random_graph()
    moved = graph.to("cuda")
    assert moved.device.type == "cuda"
    assert moved.stats() == graph.stats()
    for row_map in EDGE_MAPS:
        assert moved.index(row_map).cpu().equal(graph.index(row_map))


def test_stats_count_edges_and_pairs_of_each_relation():
    #          relation 0: 0->1, 0->2, 0->1;  relation 2: 1->2
    graph = rgnn.Graph(
        torch.tensor([[0, 0, 1, 0], [1, 2, 2, 1]]), torch.tensor([0, 0, 2, 0]), num_relations=4
    )
    stats = graph.stats()
    assert stats.num_edges_of_relation == (3, 0, 1, 0)
    assert stats.num_src_pairs_of_relation == (1, 0, 1, 0)
    assert stats.num_dst_pairs_of_relation == (2, 0, 1, 0)
    assert (stats.num_src_pairs, stats.num_dst_pairs) == (2, 3)
    assert (stats.src_ratio, stats.dst_ratio) == (0.5, 0.75)
    assert stats.to_dict()["dst_ratio"] == 0.75
    lines = str(stats).splitlines()
    assert any("unique (destination, relation)" in line and " 3 " in line for line in lines)
    assert any("relations without edges" in line and " 2 " in line for line in lines)


def test_reverse_edges_have_relations_of_their_own():
    graph = rgnn.Graph(torch.tensor([[0, 1], [1, 2]]), torch.tensor([0, 1])).with_reverse_edges()
    assert graph.edge_index.tolist() == [[0, 1, 1, 2], [1, 2, 0, 1]]
    assert graph.edge_type.tolist() == [0, 1, 2, 3]
    assert (graph.num_relations, graph.num_nodes) == (4, 3)


@pytest.mark.parametrize("num_nodes", [0, 3])
def test_a_graph_without_edges_works(num_nodes):
    graph = rgnn.Graph(
        torch.empty(2, 0, dtype=torch.int64),
        torch.empty(0, dtype=torch.int64),
        num_nodes=num_nodes,
        num_relations=2,
    )
    stats = graph.stats()
    assert (stats.num_edges, stats.num_src_pairs, stats.src_ratio) == (0, 0, 1.0)
    assert graph.segment_starts(spaces.EDGE_TYPE) == (0, 0, 0)
    assert str(stats)


EDGES = torch.tensor([[0, 1], [1, 2]])
TYPES = torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[0], [1]], TYPES), TypeError, "edge_index must be a tensor of integers; got list"),
        ((EDGES.float(), TYPES), TypeError, "edge_index must hold integers; got torch.float32"),
        ((torch.zeros(3, 2).long(), TYPES), ValueError, r"shape \(2, num_edges\)"),
        ((EDGES, TYPES[:1]), ValueError, r"edge_type must have shape \(2,\)"),
        ((EDGES, TYPES.bool()), TypeError, "edge_type must hold integers"),
        ((EDGES - 1, TYPES), ValueError, "edge_index holds -1; ids begin at 0"),
        ((EDGES, TYPES - 1), ValueError, "edge_type holds -1"),
    ],
)
def test_wrong_edges_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        rgnn.Graph(*arguments)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_nodes": 2}, ValueError, "edge_index holds 2, but num_nodes is 2"),
        ({"num_relations": 1}, ValueError, "edge_type holds 1, but num_relations is 1"),
        ({"num_nodes": -1}, ValueError, "num_nodes is -1, but must be at least 0"),
        ({"num_nodes": 3.0}, TypeError, "num_nodes is 3.0 of type float, but must be"),
        ({"num_nodes": True}, TypeError, "num_nodes is True of type bool, but must be"),
        ({"num_nodes": 3, "node_type": TYPES}, ValueError, r"node_type must have shape \(3,\)"),
        ({"node_type": [0, 1, 1]}, TypeError, "node_type must be a tensor of integers; got list"),
        ({"node_type": torch.zeros(3)}, TypeError, "node_type must hold integers"),
        (
            {"node_type": torch.tensor([0, 1, 2]), "num_node_types": 2},
            ValueError,
            "node_type holds 2, but num_node_types is 2",
        ),
        ({"num_node_types": 2}, ValueError, "without a node_type"),
    ],
)
def test_wrong_numbers_are_refused(options, error, message):
    with pytest.raises(error, match=message):
        rgnn.Graph(EDGES, TYPES, **options)


def test_coordinates_say_what_a_row_is_told_apart_by():
    assert spaces.coordinates(spaces.EDGE_DST_PAIR) == {Coordinate.DST, Coordinate.TYPE}
    assert spaces.coordinates(spaces.to_one(Space.EDGE)) == frozenset()
    assert spaces.coordinates(spaces.identity(Space.NODE)) == {Coordinate.NODE}


def test_threads_that_build_an_index_at_once_get_the_same():
    """Generated programs know an index by its address: it may not make room for another."""
    both = threading.Barrier(2)

    @build_once
    def index(owner: object) -> torch.Tensor:
        both.wait(timeout=10)
        return torch.zeros(1)

    owner = random_graph()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(index, [owner, owner])
    assert first is second is index(owner)
