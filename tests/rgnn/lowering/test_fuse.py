"""Products that are added up where they are made."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from _relational import (
    LAYERS,
    assert_same,
    layer_arguments,
    random_graph,
    random_tensor,
    results_and_gradients,
)
from penstock import rgnn
from penstock.codegen import find_compiler
from penstock.rgnn.backends.cpp import _graph_arrays
from penstock.rgnn.lowering import KernelKind, _program, lower, lower_for_arena
from penstock.rgnn.passes import OptimizedProgram, optimize
from penstock.rgnn.spaces import DST_PAIR_DST, SRC_PAIR_SRC

pytestmark = pytest.mark.usefixtures("one_thread")
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

SUMMED = KernelKind.SUMMED_GEMM.value


@pytest.fixture
def small(monkeypatch):
    """Products are joined on the smallest graph, and its nodes cut into several ranges."""
    monkeypatch.setattr(_program, "MIN_ROWS_OF_RELATION", 0)
    monkeypatch.setattr(_graph_arrays, "_MIN_RANGES", 3)


def sums(g, x, W):
    e = g.edges
    return g.sum_to_dst(e.src(x) @ W[e.type])


def optimized_program(body, graph: rgnn.Graph) -> OptimizedProgram:
    function = rgnn.compile(body, backend="torch")
    x = torch.randn(graph.num_nodes, 4, requires_grad=True)
    weight = torch.randn(graph.num_relations, 4, 4, requires_grad=True)
    traced, _ = function._trace_call(graph, (x, weight), {})
    return optimize(traced.program, graph.counts, wrt=("x", "W"))


def joined(optimized: OptimizedProgram) -> list[str | None]:
    """What the joined products of a optimized are summed along."""
    return [
        kernel.grouped_by and kernel.grouped_by.name
        for kernel in lower_for_arena(optimized).schedule.kernels
        if kernel.kind is KernelKind.SUMMED_GEMM
    ]


def few_destinations() -> rgnn.Graph:
    edge_index = torch.stack([torch.arange(300) % 100, torch.arange(300) % 3])
    return rgnn.Graph(edge_index, torch.arange(300) // 150, num_nodes=100)


def few_sources() -> rgnn.Graph:
    edge_index = torch.stack([torch.arange(300) % 3, torch.arange(300) % 100])
    return rgnn.Graph(edge_index, torch.arange(300) // 150, num_nodes=100)


def test_products_are_joined_with_the_sum_after_aggregation_and_in_the_backward(small):
    assert joined(optimized_program(sums, few_destinations())) == [DST_PAIR_DST.name]
    assert joined(optimized_program(sums, few_sources())) == [SRC_PAIR_SRC.name]


def test_a_joined_product_is_never_in_memory_and_all_else_stays(small):
    optimized = optimized_program(sums, few_sources())
    before, after = lower(optimized).schedule, lower_for_arena(optimized).schedule
    (gone,) = before.materialised - after.materialised
    assert optimized.program.nodes[gone].op == "matmul"
    assert after.materialised < before.materialised
    values = [value for kernel in after.kernels for value in kernel.values]
    assert sorted(values) == sorted(v for kernel in before.kernels for v in kernel.values)
    assert len(after.kernels) == len(before.kernels) - 1
    assert after.num_forward == before.num_forward


def test_kernels_of_the_forward_stay_in_it(small):
    optimized = optimized_program(sums, few_destinations())
    assert (
        lower_for_arena(optimized).schedule.num_forward == lower(optimized).schedule.num_forward - 1
    )


def test_with_few_rows_of_each_relation_products_stay_alone():
    graph = few_sources()
    rows = graph.counts.num_src_pairs
    assert rows < _program.MIN_ROWS_OF_RELATION * graph.num_relations
    assert joined(optimized_program(sums, graph)) == []


def test_a_product_that_is_read_elsewhere_is_made(small):
    graph = few_sources()
    optimized = optimized_program(sums, graph)
    (product,) = (
        lower(optimized).schedule.materialised - lower_for_arena(optimized).schedule.materialised
    )
    outputs = (*optimized.program.outputs, product)
    program = dataclasses.replace(optimized.program, outputs=outputs)
    assert (
        _program.fuse_sums(program, lower(optimized).schedule, graph.counts)
        == lower(optimized).schedule
    )


def with_bias(g, x, W, b):
    e = g.edges
    return g.sum_to_dst(b[e.type] + e.src(x) @ W[e.type])


def with_bias_and_without(g, x, W, b):
    e = g.edges
    z = e.src(x) @ W[e.type]
    return g.sum_to_dst(z + b[e.type]), g.sum_to_dst(z)


def with_a_bias_of_the_end(g, x, W, b):
    e = g.edges
    return g.sum_to_dst(e.dst(x) + e.src(x) @ W[e.type] + b[e.type])


@needs_compiler
@pytest.mark.parametrize("heads", [(), (2,)])
@pytest.mark.parametrize(
    ("body", "num_joined"),
    [(with_bias, 1), (with_bias_and_without, 0), (with_a_bias_of_the_end, 0)],
)
def test_a_bias_of_the_type_is_added_where_the_product_is_made(body, num_joined, heads):
    graph = random_graph(30, 300)
    x = random_tensor(30, *heads, 5)
    weight, bias = random_tensor(4, *heads, 5, 5, seed=1), random_tensor(4, *heads, 5, seed=2)
    function = rgnn.compile(body, backend="cpp")
    arguments = (x, weight, bias)
    expected = results_and_gradients(function.to_torch(), graph, arguments)
    assert_same(results_and_gradients(function, graph, arguments), expected)
    kernels = function.explain(graph, *arguments).kernels
    products = [kernel for kernel in kernels if kernel.kind == KernelKind.GEMM.value]
    assert sum(len(kernel.values) == 2 for kernel in products) == num_joined


@needs_compiler
@pytest.mark.parametrize("is_canonical", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_and_their_gradients_are_right(name, is_canonical, small):
    graph = random_graph(30, 200, is_canonical=is_canonical)
    arguments = layer_arguments(name, graph)
    function = rgnn.compile(LAYERS[name].__wrapped__, backend="cpp")
    expected = results_and_gradients(function.to_torch(), graph, arguments)
    assert_same(results_and_gradients(function, graph, arguments), expected)
    kinds = [kernel.kind for kernel in function.explain(graph, *arguments).kernels]
    # With heads that share their features, products are summed over heads before they are summed.
    assert (SUMMED in kinds) == (name != "rgat with heads")


@needs_compiler
@pytest.mark.parametrize("dim", [3, 16, 40])
@pytest.mark.parametrize("name", ["rgcn", "hgt"])
def test_bits_are_those_of_products_that_stay_alone(name, dim, monkeypatch):
    graph = random_graph(40, 700)
    arguments = [
        a.detach().float().requires_grad_() if isinstance(a, torch.Tensor) else a
        for a in layer_arguments(name, graph, dim)
    ]
    found = []
    for least, ranges in ((10**9, 8), (0, 8), (0, 1), (0, 40)):
        monkeypatch.setattr(_program, "MIN_ROWS_OF_RELATION", least)
        monkeypatch.setattr(_graph_arrays, "_MIN_RANGES", ranges)
        fresh = random_graph(40, 700)
        function = rgnn.compile(LAYERS[name].__wrapped__, backend="cpp")
        found.append(results_and_gradients(function, fresh, arguments))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@needs_compiler
def test_ranges_cover_all_nodes_and_rows(small):
    graph = random_graph(50, 400)
    arrays = _graph_arrays.find_arrays(graph)
    ranges = arrays.ranges(SRC_PAIR_SRC)
    assert ranges[0] == 0
    assert ranges[-1] == graph.num_nodes
    assert arrays.longest_range(SRC_PAIR_SRC) == int((ranges[1:] - ranges[:-1]).max())
    rows = arrays.range_rows(SRC_PAIR_SRC)
    assert rows.shape == (len(ranges), graph.num_relations)
    source = graph.index(SRC_PAIR_SRC)
    for place in range(len(ranges) - 1):
        for relation in range(graph.num_relations):
            begin, end = rows[place, relation], rows[place + 1, relation]
            inside = (source[begin:end] >= ranges[place]) & (source[begin:end] < ranges[place + 1])
            assert bool(inside.all())
    sizes = (rows[-1] - rows[0]).tolist()
    assert sum(sizes) == graph.counts.num_src_pairs
    assert sizes == [
        len(torch.unique(graph.edge_index[0, graph.edge_type == relation]))
        for relation in range(graph.num_relations)
    ]
