"""Every rewrite leaves what a program computes as it was, and its gradients, on and off."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from _relational import (
    LAYERS,
    assert_same,
    graphs,
    layer_arguments,
    random_graph,
    random_tensor,
    recipes,
    results_and_gradients,
)
from penstock import rgnn
from penstock.rgnn import REWRITES, concat, dot, edge_mean
from penstock.rgnn._compile import _round_counts
from penstock.rgnn._compiled_program import CompiledProgram
from penstock.rgnn.ir import Program, find_coordinates
from penstock.rgnn.passes import optimize
from penstock.rgnn.spaces import EDGE_SRC_PAIR, Coordinate, Space

pytestmark = pytest.mark.usefixtures("one_thread")

DATA = Path(os.environ.get("PENSTOCK_DATA", "/nowhere")) / "rgnn"
SWITCHES = [frozenset(), *(frozenset({name}) for name in REWRITES), frozenset(REWRITES)]
SWITCHES += [frozenset(REWRITES) - {name} for name in REWRITES]


@settings(max_examples=60)
@given(recipe=recipes(), graph=graphs())
def test_random_programs_compute_what_the_reference_does(recipe, graph):
    """Most switches leave most programs as they are: what is the same runs once."""
    arguments = recipe.arguments(graph)
    function = rgnn.compile(recipe.__call__)
    expected = results_and_gradients(function.to_torch(), graph, arguments)
    traced, tensors = function._trace_call(graph, arguments, {})
    program, counts, run = traced.program, _round_counts(graph.counts), set()
    wrt = [name for name in tensors if name in traced.used]
    for without in SWITCHES:
        optimized = optimize(program, counts, wrt=wrt, without=without)
        if optimized.program not in run:
            run.add(optimized.program)
            compiled = CompiledProgram(optimized, "torch")

            def call(graph: rgnn.Graph, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
                return compiled(graph, [tensors[name] for name in compiled.names])  # noqa: B023

            assert_same(results_and_gradients(call, graph, arguments), expected)


@pytest.mark.parametrize("is_canonical", [False, True])
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(
    "without", SWITCHES, ids=lambda s: "without " + (", ".join(sorted(s)) or "none")
)
def test_layers_compute_what_the_reference_does(name, without, is_canonical):
    graph = random_graph(is_canonical=is_canonical)
    arguments = layer_arguments(name, graph)
    expected = results_and_gradients(LAYERS[name].to_torch(), graph, arguments)
    function = rgnn.compile(LAYERS[name].__wrapped__, without=without, backend="torch")
    assert_same(results_and_gradients(function, graph, arguments), expected)


@pytest.mark.skipif(not DATA.is_dir(), reason="needs $PENSTOCK_DATA")
@pytest.mark.parametrize("name", ["rgcn", "rgat"])
def test_a_real_graph_gives_the_same_with_and_without_rewrites(name):
    graph = rgnn.Graph.from_triples(DATA / "aifb" / "aifb_stripped.nt.gz").with_reverse_edges()
    arguments = layer_arguments(name, graph, dim=8)
    edgewise = rgnn.compile(LAYERS[name].__wrapped__, without=REWRITES, backend="torch")
    expected = results_and_gradients(edgewise, graph, arguments)
    assert_same(results_and_gradients(LAYERS[name], graph, arguments), expected)
    rows = [kernel[1] for kernel in gemm_rows(LAYERS[name].explain(graph, *arguments))]
    assert max(rows) < graph.num_edges


def applied(explanation: rgnn.Explanation, rewrite: str) -> list[bool]:
    """For each place where a rewrite was considered, whether it was applied."""
    return [d.applied for d in explanation.decisions if d.rewrite == rewrite]


def reasons(explanation: rgnn.Explanation, rewrite: str) -> str:
    return "\n".join(d.reason for d in explanation.decisions if d.rewrite == rewrite)


def gemm_rows(explanation: rgnn.Explanation) -> list[tuple[str, int]]:
    """Space and rows of each product of the forward."""
    return [
        (kernel.rows_of, kernel.num_rows)
        for kernel in explanation.kernels
        if kernel.kind == "segment GEMM" and not kernel.is_backward
    ]


def star(num_leaves: int, *, inward: bool) -> rgnn.Graph:
    """One relation, one hub: inward one (destination, relation), outward one (source, relation)."""
    leaves, hub = torch.arange(1, num_leaves + 1), torch.zeros(num_leaves, dtype=torch.int64)
    ends = (leaves, hub) if inward else (hub, leaves)
    return rgnn.Graph(torch.stack(ends), hub, num_nodes=num_leaves + 1)


@rgnn.compile
def weighted_sum(g, x, s, W):
    e = g.edges
    return g.sum_to_dst(e(s) * (e.src(x) @ W[e.type]))


@pytest.mark.parametrize(
    ("inward", "expected"),
    [(True, ("(dst, relation)", 1)), (False, ("(src, relation)", 1))],
)
def test_products_run_on_the_fewest_rows(inward, expected):
    graph = star(40, inward=inward)
    arguments = (random_tensor(41, 4), random_tensor(40), random_tensor(1, 4, 5))
    plan = weighted_sum.explain(graph, *arguments)
    assert gemm_rows(plan) == [expected]
    assert applied(plan, "aggregate first") == [inward]
    edgewise = rgnn.compile(weighted_sum.__wrapped__, without=REWRITES)
    assert gemm_rows(edgewise.explain(graph, *arguments)) == [("edge", 40)]


def test_products_of_a_graph_without_shared_ends_stay_on_edges():
    graph = rgnn.Graph(torch.tensor([[0, 1, 2], [3, 4, 5]]), torch.tensor([0, 1, 2]))
    arguments = (random_tensor(6, 4), random_tensor(3), random_tensor(3, 4, 5))
    plan = weighted_sum.explain(graph, *arguments)
    assert gemm_rows(plan) == [("edge", 3)]
    assert "no fewer rows than 4 edges" in reasons(plan, "compaction")  # 3, rounded as plans are


def test_aggregate_first_is_rejected_where_the_scale_has_features():
    @rgnn.compile
    def scaled(g, x, f, W):
        e = g.edges
        return g.sum_to_dst(e(f) * (e.src(x) @ W[e.type]))

    graph = star(40, inward=True)
    arguments = (random_tensor(41, 4), random_tensor(40, 5), random_tensor(1, 4, 5))
    plan = scaled.explain(graph, *arguments)
    assert applied(plan, "aggregate first") == [False]
    assert "c differs from feature to feature" in reasons(plan, "aggregate first")


def test_aggregate_first_is_rejected_where_the_product_is_needed_elsewhere():
    @rgnn.compile
    def attended(g, x, W, a):
        e = g.edges
        z = e.src(x) @ W[e.type]
        return g.sum_to_dst(dot(z, a[e.type]) * z)

    graph = star(40, inward=True)
    arguments = (random_tensor(41, 4), random_tensor(1, 4, 5), random_tensor(1, 5))
    plan = attended.explain(graph, *arguments)
    assert applied(plan, "aggregate first") == [False]
    assert "needed elsewhere" in reasons(plan, "aggregate first")


def test_reorder_should_multiply_weights_first_where_nothing_else_needs_the_projection():
    graph = random_graph()
    plan = LAYERS["rgat"].explain(graph, *layer_arguments("rgat", graph))
    # The source projection is the message as well, the destination's is not.
    assert applied(plan, "reorder") == [False, True]
    assert gemm_rows(plan) == [("(src, relation)", graph.stats().num_src_pairs)]


def test_reorder_is_rejected_where_weights_outnumber_rows():
    graph = rgnn.Graph(torch.tensor([[0], [1]]), torch.tensor([0]), num_relations=50)
    plan = LAYERS["rgat"].explain(graph, *layer_arguments("rgat", graph))
    assert applied(plan, "reorder") == [False, False]
    assert "multiplications among weights" in reasons(plan, "reorder")


def test_weights_of_node_types_join_those_of_relations_only_in_canonical_graphs():
    @rgnn.compile
    def projected(g, x, V, W):
        e, n = g.edges, g.nodes
        return g.sum_to_dst(rgnn.tanh(e.src(n(x) @ V[n.type]) @ W[e.type]))

    for is_canonical in (True, False):
        graph = random_graph(60, 400, is_canonical=is_canonical)
        arguments = (random_tensor(60, 3), random_tensor(2, 3, 3), random_tensor(4, 3, 3))
        plan = projected.explain(graph, *arguments)
        assert applied(plan, "reorder") == [is_canonical]
        expected = results_and_gradients(projected.to_torch(), graph, arguments)
        assert_same(results_and_gradients(projected, graph, arguments), expected)
    assert "do not decide node types" in reasons(plan, "reorder")


def test_weights_are_not_reordered_across_heads():
    graph = random_graph(is_canonical=True)
    plan = LAYERS["hgt"].explain(graph, *layer_arguments("hgt", graph))
    assert applied(plan, "reorder") == [False, False]
    assert "split into heads" in reasons(plan, "reorder")


@pytest.mark.parametrize(
    ("rewrite", "body"),
    [
        ("aggregate first", lambda e, z, s, a: e(s) * z),
        ("reorder", lambda e, z, s, a: dot(z, a[e.type])),
        (None, lambda e, z, s, a: (e(s) * z) @ a),
    ],
)
def test_matrices_of_one_head_serve_all_heads(rewrite, body):
    """Edges have scores for two heads: a rewrite multiplies what has two by what has one."""

    @rgnn.compile(backend="torch")
    def function(g, f, W, s, a):
        return g.sum_to_dst(body(g.edges, g.edges(f) @ W[g.edges.type], s, a))

    graph = random_graph(4, 200, num_relations=2)
    shape = (2, 2, 4) if rewrite else (1, 4, 5)
    shapes = ((200, 3), (2, 1, 3, 4), (200, 2), shape)
    arguments = tuple(random_tensor(*each, seed=seed) for seed, each in enumerate(shapes))
    if rewrite is not None:
        assert applied(function.explain(graph, *arguments), rewrite) == [True]
    expected = results_and_gradients(function.to_torch(), graph, arguments)
    assert_same(results_and_gradients(function, graph, arguments), expected)


def test_split_concat_lets_each_part_have_its_own_rows():
    @rgnn.compile
    def pairwise(g, x, a):
        e = g.edges
        return g.sum_to_dst(rgnn.sigmoid(dot(concat(e.src(x), e.dst(x)), a[e.type])) * e.src(x))

    graph = random_graph()
    arguments = (random_tensor(12, 3), random_tensor(4, 6))
    plan = pairwise.explain(graph, *arguments)
    assert applied(plan, "split concat") == [True]
    forward = [value for k in plan.kernels if not k.is_backward for value in k.values]
    rows = {value.rows_of for value in forward if "dot" in value.expression}
    assert rows == {"(src, relation)", "(dst, relation)"}
    expected = results_and_gradients(pairwise.to_torch(), graph, arguments)
    assert_same(results_and_gradients(pairwise, graph, arguments), expected)


def test_common_subexpressions_are_computed_once():
    @rgnn.compile
    def twice(g, x, W):
        e = g.edges
        return g.sum_to_dst(rgnn.tanh(e.src(x) @ W[e.type]) * rgnn.exp(e.src(x) @ W[e.type]))

    graph = random_graph()
    arguments = (random_tensor(12, 3), random_tensor(4, 3, 3))
    assert len(gemm_rows(twice.explain(graph, *arguments))) == 1
    alone = rgnn.compile(twice.__wrapped__, without=["common subexpressions"])
    assert len(gemm_rows(alone.explain(graph, *arguments))) == 2


def test_means_of_relations_scale_pairs_and_not_edges():
    @rgnn.compile
    def mean(g, x, W):
        e = g.edges
        return g.sum_to_dst(edge_mean(e.src(x) @ W[e.type]))

    graph = star(40, inward=True)
    plan = mean.explain(graph, random_tensor(41, 4).detach(), random_tensor(1, 4, 5).detach())
    spaces = [value.rows_of for kernel in plan.kernels for value in kernel.values]
    assert "edge" not in spaces
    assert spaces.count("(dst, relation)") == 3  # the sum, its mean, the product


def test_an_unknown_rewrite_is_refused_by_name():
    with pytest.raises(ValueError, match="'compression'"):
        rgnn.compile(LAYERS["rgcn"].__wrapped__, without=["compression"])


def test_a_laid_out_backward_multiplies_as_few_rows_as_its_forward():
    graph = star(40, inward=True)
    arguments = (random_tensor(41, 4), random_tensor(40), random_tensor(1, 4, 5))
    plan = weighted_sum.explain(graph, *arguments)
    products = [k for k in plan.kernels if k.multiplications]
    assert [k.num_rows for k in products] == [1, 1, 1]  # forward, to the rows, to the weights
    assert [k.is_backward for k in products] == [False, True, True]


def traced(body, *shapes: tuple[int, ...]) -> Program:
    from penstock.rgnn.frontend.values import Argument, Trace, TracedGraph

    names = [f"argument_{i}" for i in range(len(shapes))]
    trace = Trace(dict(zip(names, shapes, strict=True)))
    arguments = [
        Argument(trace, name, lambda space, name=name: trace.bind(name, space)) for name in names
    ]
    return trace.builder.program([body(TracedGraph(trace), *arguments).position])


def test_dependencies_are_those_of_what_is_read():
    program = traced(
        lambda g, x, W, a: (
            dot(g.edges.src(x) @ W[g.edges.type], g.edges.dst(x)) * dot(g.edges.dst(x), a)
        ),
        (5, 3),
        (2, 3, 3),
        (3,),
    )
    found = {
        node.op: depends
        for node, depends in zip(program.nodes, find_coordinates(program), strict=True)
        if node.space is Space.EDGE and node.op in ("matmul", "mul")
    }
    assert found["matmul"] == {Coordinate.SRC, Coordinate.TYPE}
    assert found["mul"] == {Coordinate.SRC, Coordinate.TYPE, Coordinate.DST}


def test_layouts_are_maps_beside_the_program():
    from penstock.rgnn.passes import choose_rows, lay_out

    program = traced(
        lambda g, x, W: g.sum_to_dst(g.edges.src(x) @ W[g.edges.type]), (12, 3), (4, 3, 3)
    )
    layout = choose_rows(program, random_graph().counts)
    (position,) = layout
    assert program.nodes[position].op == "matmul"
    assert layout[position] == EDGE_SRC_PAIR
    spaces = [node.space for node in lay_out(program, layout).nodes if node.op == "matmul"]
    assert spaces == [Space.SRC_PAIR]
    assert lay_out(program, {}) == program


def test_cheap_scores_of_edges_are_made_again_where_their_parts_are_fewer():
    dense, sparse = random_graph(12, 400), random_graph(400, 400)
    kept = {}
    for graph in (dense, sparse):
        arguments = layer_arguments("rgat", graph)
        for without in ((), ("recompute",)):
            function = rgnn.compile(LAYERS["rgat"].__wrapped__, without=without)
            traced, tensors = function._trace_call(graph, arguments, {})
            optimized = optimize(traced.program, graph.counts, wrt=tuple(tensors), without=without)
            spaces = [optimized.program.nodes[at].space for at in optimized.kept]
            kept[graph is dense, bool(without)] = spaces.count(Space.EDGE)
    # Without recomputation the score before its slope and the softmax are kept.
    assert kept == {(True, False): 1, (True, True): 2, (False, False): 2, (False, True): 2}
    plan = rgnn.compile(LAYERS["rgat"].__wrapped__).explain(dense, *layer_arguments("rgat", dense))
    assert applied(plan, "recompute") == [True]
    assert "512 saved" in reasons(plan, "recompute")  # 400, rounded as plans are
