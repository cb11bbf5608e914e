"""The torch backend: gradients by finite differences, equal bits in every run, memory let go."""

from __future__ import annotations

import dataclasses
import gc
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
from penstock.rgnn import interpreter, spaces
from penstock.rgnn._compile import _round_counts
from penstock.rgnn.backends._torch import sum_grouped_rows
from penstock.traversal import NeighborSampler

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("is_canonical", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_gradients_of_layers_are_right(name, is_canonical):
    graph = random_graph(7, 20, is_canonical=is_canonical)
    arguments = layer_arguments(name, graph, dim=2)  # each number is changed twice
    assert torch.autograd.gradcheck(lambda *args: LAYERS[name](graph, *args), arguments)


@settings(max_examples=10)
@given(recipe=recipes(max_steps=5), graph=graphs())
def test_gradients_of_random_programs_are_right(recipe, graph):
    function = rgnn.compile(recipe.__call__, backend="torch")
    arguments = recipe.arguments(graph)
    # The fast mode compares one random direction; the reference covers every entry elsewhere.
    assert torch.autograd.gradcheck(
        lambda *args: function(graph, *args), arguments, fast_mode=True, atol=1e-5
    )


@pytest.mark.parametrize("name", LAYERS)
def test_equal_bits_from_run_to_run_and_for_any_number_of_threads(name):
    graph = random_graph(300, 4000)
    arguments = layer_arguments(name, graph, dim=16)
    runs = []
    for num_threads in (1, 2, 2):
        torch.set_num_threads(num_threads)
        runs.append(results_and_gradients(LAYERS[name], graph, arguments))
    for other in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("name", LAYERS)
def test_a_graph_without_edges_works(name):
    graph = random_graph(5, 0)
    arguments = layer_arguments(name, graph)
    results = results_and_gradients(LAYERS[name], graph, arguments)
    reference = results_and_gradients(LAYERS[name].to_torch(), graph, arguments)
    for result, expected in zip(results, reference, strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize("name", ["rgcn", "rgat", "rgat with heads"])
def test_features_of_no_length(name, backend):
    graph = random_graph(5, 12)
    function = rgnn.compile(LAYERS[name].__wrapped__, backend=backend)
    arguments = layer_arguments(name, graph, dim=0)
    found = results_and_gradients(function, graph, arguments)
    assert_same(found, results_and_gradients(LAYERS[name].to_torch(), graph, arguments))


def test_single_precision_stays_single():
    graph = random_graph()
    arguments = [a.detach().float().requires_grad_() for a in layer_arguments("rgcn", graph)]
    result = LAYERS["rgcn"](graph, *arguments)
    assert result.dtype == torch.float32
    result.sum().backward()
    assert {a.grad.dtype for a in arguments} == {torch.float32}


def test_autocast_changes_nothing():
    graph = random_graph()
    arguments = layer_arguments("rgat with heads", graph)
    arguments = tuple(argument.detach().float().requires_grad_() for argument in arguments)
    weights = [random_tensor(12, 2, 3).float().detach()]
    found = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            result = LAYERS["rgat with heads"](graph, *arguments)
            found.append([result, *torch.autograd.grad([result], arguments, weights)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_arguments_that_the_backward_does_not_read_are_not_kept():
    @rgnn.compile(backend="torch")
    def shifted(g, x, b):
        return g.sum_to_dst(rgnn.tanh(g.edges.src(x) + b))

    graph = random_graph()
    x, b = random_tensor(12, 3), random_tensor(3)
    leaf = (x * 1.0).detach().requires_grad_()
    scaled = leaf * 1.0
    watched = weakref.ref(scaled)
    result = shifted(graph, scaled, b)
    del scaled
    gc.collect()
    assert watched() is None  # the slope of tanh is read from its result
    result.sum().backward()
    assert leaf.grad.any()


def test_without_gradients_no_backward_is_planned_and_nothing_is_kept():
    graph = random_graph()
    arguments = layer_arguments("rgat", graph)
    with torch.no_grad():
        result = LAYERS["rgat"](graph, *arguments)
    assert not result.requires_grad
    plan = LAYERS["rgat"].explain(graph, *(a.detach() for a in arguments))
    assert not any(kernel.is_backward for kernel in plan.kernels)


def test_a_second_derivative_is_refused():
    graph = random_graph()
    arguments = layer_arguments("rgat", graph)
    (gradient,) = torch.autograd.grad(
        LAYERS["rgat"](graph, *arguments).square().sum(), arguments[0], create_graph=True
    )
    with pytest.raises(RuntimeError, match="differentiable once, not twice"):
        gradient.sum().backward()


def test_an_argument_returned_as_it_is_does_not_alias_it():
    x = random_tensor(12, 3).detach()
    result = rgnn.compile(lambda g, x: g.nodes(x), backend="torch")(random_graph(), x)
    result.zero_()
    assert x.any()


def test_one_value_returned_twice_is_two_tensors():
    @rgnn.compile(backend="torch")
    def twice(g, x):
        summed = g.sum_to_dst(g.edges.src(x))
        return summed, summed

    x = random_tensor(12, 3)
    one, other = twice(random_graph(), x)
    assert one.data_ptr() != other.data_ptr()
    (one.sum() + 2 * other.sum()).backward()
    reference = torch.autograd.grad(twice.to_torch()(random_graph(), x)[0].sum() * 3, x)
    torch.testing.assert_close(x.grad, reference[0])


def test_the_graph_is_let_go_with_the_result():
    graph = random_graph()
    watched = weakref.ref(graph)
    result = LAYERS["rgat"](graph, *layer_arguments("rgat", graph))
    del graph
    assert watched() is not None  # the backward needs it
    del result
    gc.collect()
    assert watched() is None


def test_graphs_that_are_alike_share_a_plan():
    function = rgnn.compile(LAYERS["rgat"].__wrapped__, backend="torch")
    for seed in range(4):
        graph = random_graph(40, 4000, seed=seed)
        function(graph, *layer_arguments("rgat", graph))
    assert function.num_plans == 1
    other = random_graph(40, 40)
    function(other, *layer_arguments("rgat", other))
    assert function.num_plans == 2


def test_mini_batches_of_one_kind_share_a_few_plans():
    """Parts of one graph around seeds, as a sampler draws them: 30 of them, of many sizes."""
    whole = random_graph(2000, 8000, num_relations=8)
    sampler = NeighborSampler.from_edges(whole.edge_index, 2000, fanouts=[4, 4])
    function = rgnn.compile(LAYERS["rgat"].__wrapped__, backend="torch")
    generator = torch.Generator().manual_seed(0)
    sizes = set()
    for _ in range(30):
        seeds = torch.randperm(2000, generator=generator)[:12]
        around = sampler.sample(seeds, generator=generator)
        part = rgnn.Graph(
            around.edge_index,
            whole.edge_type[around.edge_ids],
            num_nodes=len(around.node_ids),
            num_relations=8,
        )
        sizes.add(part.num_edges)
        function(part, *layer_arguments("rgat", part))
    assert len(sizes) > 20
    assert function.num_plans <= 6


@given(st.lists(st.integers(0, 10**7), min_size=4, max_size=4))
def test_a_bucket_stands_for_graphs_that_are_alike(drawn):
    num_nodes, num_edges, *pairs = drawn
    num_src_pairs, num_dst_pairs = (min(n, num_edges) for n in pairs)
    counts = dataclasses.replace(
        random_graph().counts,
        num_nodes=num_nodes,
        num_edges=num_edges,
        num_src_pairs=num_src_pairs,
        num_dst_pairs=num_dst_pairs,
    )
    bucket = _round_counts(counts)
    assert bucket.num_relations == counts.num_relations
    assert num_edges / 1.42 <= bucket.num_edges <= num_edges * 1.42
    assert max(bucket.num_src_pairs, bucket.num_dst_pairs) <= bucket.num_edges
    for name in ("num_nodes", "num_src_pairs", "num_dst_pairs"):
        count, found = getattr(counts, name), getattr(bucket, name)
        if num_edges:
            expected = count / num_edges * bucket.num_edges
            assert abs(found - expected) <= 0.1 * expected + 1


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_results_that_are_views_can_be_changed_in_place(backend):
    @rgnn.compile(backend=backend)
    def sum_heads_apart(g, x):
        return g.sum_to_dst(g.edges.src(g.nodes(x).heads(2))).merge_heads()

    graph = random_graph()
    x = random_tensor(graph.num_nodes, 6)
    expected = torch.relu(sum_heads_apart(graph, x))
    assert torch.equal(torch.relu_(sum_heads_apart(graph, x)), expected)


def test_an_argument_changed_in_place_before_the_backward_is_noticed():
    graph = random_graph()
    arguments = layer_arguments("rgat", graph)
    leaf = arguments[1].detach().requires_grad_()
    weight = leaf * 1.0
    result = LAYERS["rgat"](graph, arguments[0], weight, *arguments[2:])
    weight.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
@given(graph=graphs())
def test_sums_over_grouped_rows_are_those_of_index_add(shape, graph):
    rows = random_tensor(graph.num_edges, *shape).detach()
    for row_map in (spaces.EDGE_DST, spaces.EDGE_SRC, spaces.EDGE_SRC_PAIR, spaces.EDGE_TYPE):
        found = sum_grouped_rows(rows, graph, row_map)
        torch.testing.assert_close(found, interpreter.sum_rows(rows, graph, row_map))


@pytest.mark.gpu
@pytest.mark.parametrize("name", LAYERS)
def test_a_gpu_computes_what_the_cpu_does_with_equal_bits_in_every_run(name):
    graph = random_graph(300, 4000)
    arguments = layer_arguments(name, graph, dim=16)
    expected = results_and_gradients(LAYERS[name], graph, arguments)
    moved, on_gpu = graph.to("cuda"), []
    for argument in arguments:
        is_tensor = isinstance(argument, torch.Tensor)
        on_gpu.append(argument.detach().cuda().requires_grad_() if is_tensor else argument)
    runs = []
    for _ in range(3):
        outputs = LAYERS[name](moved, *on_gpu)
        weights = random_tensor(*outputs.shape, seed=100).detach().cuda()
        leaves = [argument for argument in on_gpu if isinstance(argument, torch.Tensor)]
        runs.append([outputs, *torch.autograd.grad((outputs * weights).sum(), leaves)])
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(runs[0], run, strict=True))
    assert_same([tensor.cpu() for tensor in runs[0]], expected)
