"""The order of kernels: it may save memory, and changes nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from _relational import graphs, random_graph, random_tensor, recipes, results_and_gradients
from penstock import rgnn
from penstock.codegen import find_compiler
from penstock.rgnn.lowering import (
    Kernel,
    KernelSchedule,
    LoweredProgram,
    _order,
    find_live_ranges,
    find_overwritten,
    find_reads,
    lower,
    lower_for_arena,
)
from penstock.rgnn.passes import OptimizedProgram, optimize

pytestmark = pytest.mark.usefixtures("one_thread")
needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")


def attention(g, x, q, key, value, bias):
    e = g.edges
    keys, values = e.src(x) @ key[e.type] + bias[e.type], e.src(x) @ value[e.type]
    s = rgnn.dot(keys, e.dst(q))
    return g.sum_to_dst(rgnn.edge_softmax(s) * values)


def arguments(graph: rgnn.Graph, width: int) -> tuple[torch.Tensor, ...]:
    nodes, relations = graph.num_nodes, graph.num_relations
    shapes = [(nodes, width)] * 2 + [(relations, width, width)] * 2 + [(relations, width)]
    return tuple(random_tensor(*shape, seed=seed) for seed, shape in enumerate(shapes))


def optimized_program(
    body, graph: rgnn.Graph, tensors: tuple[torch.Tensor, ...]
) -> OptimizedProgram:
    traced, _ = rgnn.compile(body, backend="torch")._trace_call(graph, tensors, {})
    wrt = tuple(name for name in traced.program.inputs())
    return optimize(traced.program, graph.counts, wrt=wrt)


def assert_runnable(lowered: LoweredProgram, kernels: tuple[Kernel, ...]) -> None:
    """Every kernel comes after those that make what it reads, and its values are all there."""
    made = [value for kernel in kernels for value in kernel.values]
    assert len(made) == len(set(made))
    done: set[int] = set()
    reads = find_reads(lowered.optimized.program)
    for kernel in kernels:
        own = set(kernel.values)
        read = set().union(*(reads[value] for value in kernel.values)) & set(made)
        assert read - own <= done & lowered.schedule.materialised
        done |= own


@settings(max_examples=30, deadline=None)
@given(recipes(), graphs())
def test_kernels_come_after_those_that_they_read(recipe, graph):
    optimized = optimized_program(recipe.__call__, graph, recipe.arguments(graph))
    lowered = lower_for_arena(optimized)
    before, after = lower(optimized).schedule, lowered.schedule
    made = [value for kernel in after.kernels for value in kernel.values]
    assert sorted(made) == sorted(v for kernel in before.kernels for v in kernel.values)
    assert_runnable(lowered, after.kernels)
    forward = {v for kernel in after.kernels[: after.num_forward] for v in kernel.values}
    assert forward == {v for k in before.kernels[: before.num_forward] for v in k.values}


def test_attention_needs_no_scratch_rows_of_its_own():
    """Gradients of keys and values lie, one after the other, in the gradient of queries."""
    graph = random_graph(2000, 3000)
    optimized = optimized_program(attention, graph, arguments(graph, 24))
    _, backward = lower_for_arena(optimized).scratch
    pairs = 24 * graph.counts.num_src_pairs
    assert backward.before >= 2 * pairs
    assert backward.after < pairs
    explained = rgnn.compile(attention, backend="cpp").explain(graph, *arguments(graph, 24))
    (decision,) = [found for found in explained.decisions if found.rewrite == "order"]
    assert decision.applied
    assert decision.what == "backward"


def two_sums(g, x, y, z):
    e = g.edges
    return g.sum_to_dst(e.src(x) * e.dst(y)), g.sum_to_dst(e.src(x) * e.dst(z))


@pytest.mark.parametrize(("width", "num_parts"), [(16, 2), (17, 1)])
def test_long_rows_that_two_sums_read_are_read_once(width, num_parts):
    graph = random_graph()
    optimized = optimized_program(
        two_sums, graph, tuple(random_tensor(12, width, seed=seed) for seed in range(3))
    )
    schedule = lower(optimized).schedule
    (kernel,) = schedule.kernels[: schedule.num_forward]
    model = _order._ScratchModel(
        optimized.program,
        schedule.materialised,
        frozenset(),
        graph.counts,
        find_reads(optimized.program),
    )
    parts = _order._split(model, kernel)
    assert len(parts) == num_parts
    assert sorted(v for part in parts for v in part.values) == sorted(kernel.values)


def unordered(program, schedule, owned, counts) -> tuple[KernelSchedule, tuple[()]]:
    return schedule, ()


@needs_compiler
def test_bits_are_those_of_kernels_as_they_were_written(monkeypatch):
    found = []
    for how in (_order.order_kernels, unordered):
        monkeypatch.setattr("penstock.rgnn.lowering._program.order_kernels", how)
        graph = random_graph(200, 300)
        function = rgnn.compile(attention, backend="cpp")
        found.append(results_and_gradients(function, graph, arguments(graph, 24)))
        plan = function.explain(graph, *arguments(graph, 24))
        found.append([len(plan.kernels)])
    assert found[1] > found[3]  # a loop was cut in parts
    assert all(torch.equal(a, b) for a, b in zip(found[0], found[2], strict=True))


def residual(g, x, W, V):
    e, n = g.edges, g.nodes
    return g.sum_to_dst(e.src(x) @ W[e.type]) + rgnn.tanh(n(x) @ V)


@needs_compiler
@pytest.mark.parametrize("num_edges", [60, 700])
def test_a_result_may_be_written_over_what_it_is_the_sum_of(num_edges):
    graph = random_graph(40, num_edges)
    tensors = (random_tensor(40, 6), random_tensor(4, 6, 6, seed=1), random_tensor(6, 6, seed=2))
    optimized = optimized_program(residual, graph, tensors)
    schedule = lower_for_arena(optimized).schedule
    forward = schedule.kernels[: schedule.num_forward]
    over = find_overwritten(
        optimized.program, forward, find_live_ranges(optimized.program, forward)
    )
    assert optimized.program.outputs[0] in over
    function = rgnn.compile(residual, backend="cpp")
    found = results_and_gradients(function, graph, tensors)
    expected = results_and_gradients(function.to_torch(), graph, tensors)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)
