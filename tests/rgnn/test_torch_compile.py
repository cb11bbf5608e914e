"""Layers inside torch.compile: no break, the same numbers, one compiled code for many graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
import torch._dynamo
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from _layer_models import DIM, LAYERS, METADATA, RELATIONS, apply, graph_of_size, model_of, step
from _relational import LAYERS as LAYER_FUNCTIONS
from _relational import (
    assert_same,
    layer_arguments,
    random_tensor,
    results_and_gradients,
)
from penstock import rgnn
from penstock.rgnn import _custom_ops
from penstock.rgnn.backends import Invocation, Results
from penstock.rgnn.graph import split_graph


@pytest.fixture(autouse=True)
def _fresh_compiler(one_thread) -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def assert_like_uncompiled(
    compiled: Callable, model: nn.Module, num_nodes: int, *graph: object
) -> None:
    pairs = zip(
        step(compiled, model, num_nodes, *graph), step(model, model, num_nodes, *graph), strict=True
    )
    for found, expected in pairs:
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["rgcn with bases", "rgat", "hgt"])
def test_graphs_of_all_sizes_go_through_two_compiled_codes(name):
    model, counter = model_of(name), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for seed, size in enumerate([(12, 60), (20, 90), (30, 40), (40, 7)]):
        assert_like_uncompiled(compiled, model, size[0], graph_of_size(*size, seed=seed))
    assert counter.frame_count == 2  # for the first graph, then for any


def test_dynamo_alone_does_as_well():
    model = model_of("rgat")
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for size in ((12, 60), (30, 40)):
        assert_like_uncompiled(compiled, model, size[0], graph_of_size(*size))


class All(nn.Module):
    """The three layers, one after another, so that the compiler is started once."""

    def __init__(self) -> None:
        super().__init__()
        self.rgcn, self.rgat, self.hgt = (LAYERS[name]() for name in ("rgcn", "rgat", "hgt"))
        self.last = nn.Linear(DIM, 3)

    def forward(self, x, graph):
        h = torch.relu(self.rgcn(x, graph))
        h = torch.relu(self.rgat(h, graph))
        return self.last(torch.relu(apply(self.hgt, h, graph)))


@pytest.mark.slow
def test_inductor_computes_the_same():
    torch.manual_seed(0)
    model = All().double()
    # Sizes are unknown from the beginning, so that it compiles once.
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    for size in ((12, 60), (30, 40)):
        assert_like_uncompiled(compiled, model, size[0], graph_of_size(*size))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("name", ["rgcn with bases", "rgat"])
def test_edges_as_tensors_need_no_graph(name, backend):
    model, counter = model_of(name), CompileCounterWithBackend(backend)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for seed, num_edges in enumerate((60, 90, 40)):
        graph = graph_of_size(12, num_edges, seed=seed)
        assert_like_uncompiled(compiled, model, 12, graph.edge_index, graph.edge_type)
    assert counter.frame_count == 2


@pytest.mark.parametrize("num_bases", [None, 2])
def test_nodes_without_features(num_bases):
    torch.manual_seed(0)
    layer = rgnn.RGCNConv(9, DIM, RELATIONS, num_bases=num_bases)
    graph = graph_of_size(9, 30)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for entities in (None, torch.arange(9) % 4):
        expected = layer(entities, graph)
        assert torch.equal(compiled(entities, graph), expected)
        assert torch.equal(compiled(entities, graph.edge_index, graph.edge_type), expected)


def test_edges_by_type_need_no_graph():
    layer = LAYERS["hgt"]().double()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    x = {name: torch.randn(5, DIM, dtype=torch.float64) for name in METADATA[0]}
    edges = {edge_type: torch.randint(5, (2, 9)) for edge_type in METADATA[1]}
    for name, h in compiled(x, edges).items():
        torch.testing.assert_close(h, layer(x, edges)[name])


def test_edges_with_features_need_no_graph():
    graph, x = graph_of_size(12, 60), torch.randn(12, DIM)
    layer = rgnn.RGATConv(DIM, 4, RELATIONS, heads=2, edge_dim=3)
    arguments = (x, graph.edge_index, graph.edge_type, torch.randn(60, 3))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*arguments), layer(*arguments))


def test_edges_that_change_in_place_are_read_anew():
    model = model_of("rgcn")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    graph = graph_of_size(12, 60)
    edge_index, edge_type = graph.edge_index, graph.edge_type
    assert_like_uncompiled(compiled, model, 12, edge_index, edge_type)
    edge_index.copy_(graph_of_size(12, 60, seed=1).edge_index)
    assert_like_uncompiled(compiled, model, 12, edge_index, edge_type)


@rgnn.compile
def branching(g, x, W, scale: float, times: int, mode: str, is_squared: bool, bias=None):
    """Results of nodes and of edges, with constants of every kind."""
    z = g.edges.src(x) @ W[g.edges.type] * scale
    for _ in range(times):
        z = rgnn.tanh(z)
    z = z * z if is_squared else z
    h = g.sum_to_dst(z) if mode == "dst" else g.sum_to_src(z)
    return h if bias is None else h + bias, z


def test_constants_and_several_results():
    graph = graph_of_size(12, 60)
    x, W = torch.randn(12, 3), torch.randn(RELATIONS, 3, 5, requires_grad=True)
    compiled = torch.compile(
        lambda *args, **kwargs: branching(*args, **kwargs), backend="aot_eager", fullgraph=True
    )
    for arguments in [
        (0.5, 2, "dst", True),
        (float("inf"), 1, "src", False),
        (0.25, 3, "dst", False, torch.randn(5)),
    ]:
        found, expected = (f(graph, x, W, *arguments) for f in (compiled, branching))
        assert len(found) == len(expected) == 2
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, equal_nan=True)
    with_name = compiled(graph, x, W, 0.5, times=1, mode="src", is_squared=True)
    assert with_name[1].shape == (60, 5)


def test_an_output_that_a_loss_does_not_use_has_no_part_in_gradients():
    both = rgnn.compile(lambda g, x, w: (g.nodes(x) * 2, rgnn.log(g.nodes(x) * w)), backend="torch")
    graph, x = graph_of_size(12, 60), torch.zeros(12, 3, requires_grad=True)
    w = torch.ones(3, requires_grad=True)
    used, _ = _custom_ops.call(both._registered.name, graph, (x, w))  # as compiled code does
    used.sum().backward()
    assert torch.equal(x.grad, torch.full((12, 3), 2.0))
    assert w.grad is None


def test_one_result_in_a_tuple_stays_in_it():
    single = rgnn.compile(lambda g, x: (g.sum_to_dst(g.edges.src(x)),))
    compiled = torch.compile(lambda g, x: single(g, x), backend="eager", fullgraph=True)
    (result,) = compiled(graph_of_size(12, 60), torch.randn(12, 3))
    assert result.shape == (12, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((graph_of_size(12, 60), torch.randn(11, 3)), "one row for each node, of which the graph"),
        ((graph_of_size(12, 60), torch.randn(12, 3).int()), "must be floating-point"),
        ((torch.zeros(2), torch.randn(12, 3)), "must be a penstock.rgnn.Graph"),
        ((graph_of_size(12, 60), [1]), "takes tensors, numbers, strings and None"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    summed = rgnn.compile(lambda g, x: g.sum_to_dst(g.edges.src(x)))
    compiled = torch.compile(lambda *args: summed(*args), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=message):
        compiled(*arguments)


def test_wrong_ids_are_refused_when_the_operator_runs():
    model = model_of("rgcn")
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x, types = torch.randn(12, DIM, dtype=torch.float64), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="edge_index holds 12, but num_nodes is 12"):
        compiled(x, torch.tensor([[0, 1, 2], [3, 4, 12]]), types)


class Counting:
    """The number of runs of a back end."""

    num_runs = 0


def counted(monkeypatch: pytest.MonkeyPatch) -> tuple[rgnn.CompiledFunction, Counting]:
    """RGAT in short, with a count of its forwards and backwards."""
    from penstock.rgnn.backends._torch import TorchBackend

    counting, run = Counting(), TorchBackend.__call__

    def run_and_count(self: TorchBackend, invocation: Invocation) -> Results:
        counting.num_runs += 1
        return run(self, invocation)

    monkeypatch.setattr(TorchBackend, "__call__", run_and_count)
    return rgnn.compile(LAYER_FUNCTIONS["rgat"].__wrapped__, backend="torch"), counting


def test_a_step_runs_a_forward_and_a_backward_and_leaves_nothing(monkeypatch):
    function, counting = counted(monkeypatch)
    graph = graph_of_size(12, 60)
    arguments = layer_arguments("rgat", graph)
    compiled = torch.compile(lambda *a: function(*a), backend="aot_eager", fullgraph=True)
    result = compiled(graph, *arguments)
    gc.collect()
    assert len(_custom_ops._owned) == 1
    result.sum().backward()
    assert counting.num_runs == 2
    del result
    gc.collect()
    assert len(_custom_ops._owned) == 0


def test_what_is_lost_between_forward_and_backward_is_computed_again(monkeypatch):
    function, counting = counted(monkeypatch)
    graph = graph_of_size(12, 60)
    arguments = layer_arguments("rgat", graph)
    expected = results_and_gradients(function, graph, arguments)
    compiled = torch.compile(lambda *a: function(*a), backend="aot_eager", fullgraph=True)
    num_runs = counting.num_runs
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        result = compiled(graph, *arguments)
    del graph
    weights = random_tensor(*result.shape, seed=100).detach()
    gradients = torch.autograd.grad((result * weights).sum(), arguments)
    assert counting.num_runs == num_runs + 3
    assert_same([result, *gradients], expected)


def test_a_graph_may_be_dropped_before_the_backward():
    graph = graph_of_size(12, 60)
    arguments = layer_arguments("rgat", graph)
    function = LAYER_FUNCTIONS["rgat"]
    expected = results_and_gradients(function, graph, arguments)
    compiled = torch.compile(lambda *a: function(*a), backend="aot_eager", fullgraph=True)
    result = compiled(graph, *arguments)
    del graph
    gc.collect()
    weights = random_tensor(*result.shape, seed=100).detach()
    assert_same([result, *torch.autograd.grad((result * weights).sum(), arguments)], expected)


def test_the_plan_is_that_of_the_graph_at_hand():
    function = rgnn.compile(LAYER_FUNCTIONS["rgat"].__wrapped__)
    compiled = torch.compile(lambda *a: function(*a), backend="aot_eager", fullgraph=True)
    for seed, num_edges in enumerate((40, 4000, 4000, 40)):
        graph = graph_of_size(40, num_edges, seed=seed)
        arguments = layer_arguments("rgat", graph)
        assert_same([compiled(graph, *arguments)], [function.to_torch()(graph, *arguments)])
    assert function.num_plans == 2


# torch 2.14 asks for `.grad` of opcheck's copies, where it hides warnings that are not errors.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("name", LAYER_FUNCTIONS)
def test_operators_keep_torchs_rules(name):
    graph = graph_of_size(12, 60)
    arguments = layer_arguments(name, graph)
    function = rgnn.compile(LAYER_FUNCTIONS[name].__wrapped__)
    traced, inputs, check = function._trace(split_graph(graph), arguments)
    program = _custom_ops._remember(function._registered, traced, check)
    numbers = [graph.num_nodes, graph.num_relations, graph.num_node_types]
    indices = [t for t in split_graph(graph) if isinstance(t, torch.Tensor)]
    is_wanted = [True] * len(inputs)
    common = (program, is_wanted, numbers, indices, inputs)
    torch.library.opcheck(torch.ops.penstock.rgnn_forward.default, common)
    *results, owner = torch.ops.penstock.rgnn_forward(*common)
    gradients = [torch.randn_like(result) for result in results]
    choice, plain = ([True] * len(results), is_wanted), [tensor.detach() for tensor in inputs]
    detached = (*common[:2], *choice, *common[2:4], plain, owner, gradients)
    torch.library.opcheck(torch.ops.penstock.rgnn_backward.default, detached)


def test_autocast_inside_gives_what_it_gives_uncompiled():
    model = model_of("rgat").float()
    graph, x = graph_of_size(12, 60), torch.randn(12, DIM)

    def forward(x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model.layer(model.first(x), graph)

    found, expected = torch.compile(forward, backend="aot_eager", fullgraph=True)(x), forward(x)
    assert found.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(found, expected)
