"""Layouts put every node's outputs in one place, and both planners lay out alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.batching.dynamic._layout import _FreeRows, plan_by_numpy, plan_execution
from penstock.batching.dynamic._schedule import order_by_numpy, order_nodes
from penstock.batching.dynamic._typed_graph import NodeGraph
from penstock.codegen import find_compiler


@st.composite
def typed_graphs(draw):
    """Graphs whose types have a fixed number of arguments each, as signatures have."""
    arities = draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    source = draw(st.randoms(use_true_random=False))
    types, arguments = [], []
    for node in range(draw(st.integers(1, 60))):
        kind = source.randrange(len(arities))
        if node == 0 and arities[kind]:
            arities[kind] = 0
        types.append(kind)
        arguments.append([source.randrange(node) for _ in range(arities[kind])])
    return NodeGraph.of(types, arguments)


def check(graph, plan, order):
    """All that must hold of a layout."""
    rows = list(zip(plan.pool_of_node.tolist(), plan.row_of_node.tolist(), strict=True))
    assert len(set(rows)) == graph.num_nodes
    assert sum(plan.pool_rows) == graph.num_nodes
    by_row = {row: node for node, row in enumerate(rows)}
    place_in_kind = [
        int((graph.types[:node] == kind).sum()) for node, kind in enumerate(graph.types)
    ]
    for number, batch in enumerate(plan.batches):
        nodes = [by_row[batch.pool, batch.start + k] for k in range(batch.num_nodes)]
        assert sorted(nodes) == sorted(order[0][order[1][number] : order[1][number + 1]].tolist())
        assert {int(plan.batch_of_node[node]) for node in nodes} == {number}
        assert {int(graph.types[node]) for node in nodes} == {batch.kind}
        places = [place_in_kind[node] for node in nodes]
        assert plan.input_index[batch.input_rows].tolist() == places
        if batch.inputs_in_order is not None:
            assert places == list(range(places[0], places[0] + len(places)))
            assert batch.inputs_in_order == places[0]
        reads = {}
        for operands in batch.operands:
            if operands.start is None:
                found = plan.index[operands.rows].tolist()
            else:
                found = list(range(operands.start, operands.start + batch.num_nodes))
            assert len(found) == len(operands.slots) * batch.num_nodes
            for place, slot in enumerate(operands.slots):
                for k, node in enumerate(nodes):
                    row = found[place * batch.num_nodes + k]
                    reads[node, slot] = by_row[operands.pool, row]
            sources = {int(plan.batch_of_node[by_row[operands.pool, row]]) for row in found}
            assert operands.sources == tuple(sorted(sources))
        for node in nodes:
            mine = graph.flat[graph.starts[node] : graph.starts[node + 1]].tolist()
            assert [reads.pop((node, slot)) for slot in range(len(mine))] == mine
        assert not reads


@settings(max_examples=200)
@given(typed_graphs())
def test_every_node_reads_its_arguments(graph):
    order = order_by_numpy(graph)
    check(graph, plan_by_numpy(graph, order), order)


@pytest.mark.skipif(find_compiler() is None, reason="there is no compiler")
@settings(max_examples=200)
@given(typed_graphs())
def test_both_planners_lay_out_alike(graph):
    order = order_nodes(graph)
    native, numpy = plan_execution(graph, order), plan_by_numpy(graph, order)
    assert (native.planned_by, numpy.planned_by) == ("C++", "NumPy")
    check(graph, native, order)
    assert native.batches == numpy.batches
    assert (native.pool_rows, native.lower_bound) == (numpy.pool_rows, numpy.lower_bound)
    for name in ("index", "input_index", "pool_of_node", "row_of_node", "batch_of_node"):
        np.testing.assert_array_equal(getattr(native, name), getattr(numpy, name))


@settings(max_examples=200)
@given(graph=typed_graphs(), data=st.data())
def test_rows_are_used_again_when_nobody_has_to_read_them(graph, data):
    kept = data.draw(st.sets(st.integers(0, graph.num_types - 1)))
    order = order_nodes(graph, frees_most=True)
    plan = plan_execution(graph, order, kept)
    holds: dict[tuple[int, int], int] = {}  # the node whose outputs a row has
    for number, batch in enumerate(plan.batches):
        nodes = order[0][order[1][number] : order[1][number + 1]].tolist()
        for node in nodes:
            for argument in graph.flat[graph.starts[node] : graph.starts[node + 1]].tolist():
                place = int(plan.pool_of_node[argument]), int(plan.row_of_node[argument])
                assert holds[place] == argument
        for node in nodes:
            assert plan.row_of_node[node] < plan.pool_rows[batch.pool]
            holds[batch.pool, int(plan.row_of_node[node])] = node
    for node, kind in enumerate(graph.types.tolist()):
        place = int(plan.pool_of_node[node]), int(plan.row_of_node[node])
        assert kind not in kept or holds[place] == node


def test_gaps_are_filled_and_joined():
    gaps = _FreeRows()
    assert [gaps.allocate(count) for count in (4, 2, 3, 5)] == [0, 4, 6, 9]
    gaps.free(0, 4)
    gaps.free(6, 3)
    assert gaps.allocate(3) == 6  # the smaller of two gaps that are large enough
    gaps.free(4, 2)
    assert gaps.allocate(6) == 0  # two gaps that touch are one
    gaps.free(9, 5)
    assert gaps.allocate(7) == 9  # and the last one goes on above


@pytest.mark.skipif(find_compiler() is None, reason="what frees most is chosen in C++")
def test_of_types_that_cost_nothing_the_one_runs_that_frees_most():
    """A node that ends two others, or five that end three."""
    types = [0] * 5 + [2, 1, 1, 1, 1, 1]
    arguments = [[], [], [], [], [], [0, 1], [2], [3], [4], [2], [3]]
    graph = NodeGraph.of(types, arguments)
    assert order_nodes(graph, frees_most=True)[2].tolist() == [0, 2, 1]
    assert order_nodes(graph)[2].tolist() == [0, 1, 2]


def test_whom_nobody_reads_lies_as_what_it_reads():
    """A classifier of every state of two chains: its operand is all states, and no row moves."""
    types = [0, 1, 1, 2, 2, 2, 0, 1, 2, 2]
    arguments = [[], [0], [1], [2], [1], [0], [], [6], [7], [6]]
    plan = plan_execution(NodeGraph.of(types, arguments))
    (classes,) = [batch for batch in plan.batches if batch.kind == 2]
    (operands,) = classes.operands
    assert operands.start == 0 and classes.num_nodes == 5
