"""The plan as people read it: its numbers are the graph's, its reasons those of the rules."""

from __future__ import annotations

import json
import re

import torch

from _relational import LAYERS, layer_arguments, random_graph, random_tensor
from penstock import rgnn


@rgnn.compile
def summed(g, x, W):
    e = g.edges
    z = e.src(x) @ W[e.type]
    return g.sum_to_dst(rgnn.tanh(z))


GRAPH = random_graph(30, 500)
NUM_SRC_PAIRS = GRAPH.stats().num_src_pairs
ARGUMENTS = (random_tensor(30, 3).detach(), random_tensor(4, 3, 5).detach())


def test_rows_multiplications_and_bytes_are_counted():
    plan = summed.explain(GRAPH, *ARGUMENTS)
    product, traversal, reduction = plan.kernels
    assert (product.kind, product.num_rows) == ("segment GEMM", NUM_SRC_PAIRS)
    assert product.multiplications == plan.multiplications == NUM_SRC_PAIRS * 3 * 5
    assert [value.rows_of for value in traversal.values] == ["(src, relation)"]
    assert (reduction.rows_of, reduction.grouped_by) == ("edge", "dst")
    product_bytes = NUM_SRC_PAIRS * 5 * 8
    assert product.values[0].memory_bytes == traversal.values[0].memory_bytes == product_bytes
    assert plan.materialised_bytes == 2 * product_bytes + 30 * 5 * 8


def test_a_smaller_dtype_takes_fewer_bytes():
    halved = summed.explain(GRAPH, *(argument.float() for argument in ARGUMENTS))
    assert 2 * halved.materialised_bytes == summed.explain(GRAPH, *ARGUMENTS).materialised_bytes


def test_compaction_saves_the_bytes_that_the_counts_say():
    edgewise = rgnn.compile(summed.__wrapped__, without=["compaction"])
    values = [v for k in edgewise.explain(GRAPH, *ARGUMENTS).kernels for v in k.values]
    (product,) = [value for value in values if value.expression.startswith("matmul")]
    assert (product.num_rows, product.memory_bytes) == (500, 500 * 5 * 8)


def test_gradients_are_planned_for_what_requires_them():
    x, W = ARGUMENTS
    plan = summed.explain(GRAPH, x, W.clone().requires_grad_())
    kinds = [kernel.kind for kernel in plan.kernels if kernel.is_backward]
    assert kinds.count("weight gradient GEMM") == 1
    assert "segment GEMM" not in kinds  # that would be the gradient of x


def test_the_program_is_that_of_the_call():
    """Its backward is that of the call, too: none without gradients, none for what is not used."""

    def read_in_vain(g, x, W, unused):
        _ = g.edges.src(unused) @ W[g.edges.type]
        return g.sum_to_dst(g.edges.src(x) @ W[g.edges.type])

    function = rgnn.compile(read_in_vain, backend="torch")
    x, W = ARGUMENTS[0].clone().requires_grad_(), ARGUMENTS[1]
    arguments = (GRAPH, x, W, torch.ones(30, 3, dtype=x.dtype, requires_grad=True))
    for is_enabled in (True, False):
        with torch.set_grad_enabled(is_enabled):
            function(*arguments)
            num_plans = function.num_plans
            plan = function.explain(*arguments)
        assert function.num_plans == num_plans  # it is the program that has run
        assert any(kernel.is_backward for kernel in plan.kernels) == is_enabled


def test_the_text_names_lines_rows_and_reasons():
    arguments = layer_arguments("rgat", GRAPH)
    text = str(LAYERS["rgat"].explain(GRAPH, *arguments))
    assert text.startswith("rgat_body on 30 nodes, 500 edges")
    assert re.search(r"segment GEMM over \d+ \(src, relation\) rows", text)
    assert re.search(r"traversal over 500 edge rows, grouped by dst\n", text)
    assert "in registers  [_relational.py:" in text
    assert "reorder rejected: dot(x @ W, a) to dot(x, W a): x @ W is needed elsewhere" in text
    assert "aggregate first rejected" in text
    assert "[_relational.py:27: z = e.src(x) @ W[e.type]]" in text
    assert text.index("\nforward\n") < text.index("\nbackward\n") < text.index("\nrewrites")


def test_what_is_switched_off_is_said():
    edgewise = rgnn.compile(summed.__wrapped__, without=["reorder", "compaction"])
    plan = edgewise.explain(GRAPH, *ARGUMENTS)
    assert plan.without == ("compaction", "reorder")
    assert "compaction is switched off" in str(plan)
    assert "compaction" not in {decision.rewrite for decision in plan.decisions}


def test_a_plan_is_plain_data():
    plan = summed.explain(GRAPH, *ARGUMENTS)
    read = json.loads(json.dumps(plan.to_dict()))
    assert read["materialised_bytes"] == plan.materialised_bytes
    assert read["kernels"][0]["values"][0]["row_shape"] == [5]


def test_explaining_computes_nothing():
    graph = random_graph(5, 9)
    huge = torch.empty(1, dtype=torch.float64).expand(4, 3, 1 << 40)
    plan = summed.explain(graph, random_tensor(5, 3).detach(), huge)
    assert plan.materialised_bytes > 1 << 40
