"""Layers together with the rest of torch: autocast, checkpoints, offloading, copies, transforms."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import penstock
from _layer_models import (
    DIM,
    LAYERS,
    METADATA,
    RELATIONS,
    apply,
    features,
    graph_of_size,
    model_of,
    step,
)
from _relational import LAYERS as LAYER_FUNCTIONS
from _relational import assert_same, layer_arguments, random_graph
from penstock import rgnn

pytestmark = pytest.mark.usefixtures("one_thread")

N = 12
GRAPH = graph_of_size(N, 60)


@pytest.mark.parametrize("is_reentrant", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_activation_checkpoints_change_no_bit(name, is_reentrant):
    model, found = model_of(name), []
    for forward in (model, functools.partial(checkpoint, model, use_reentrant=is_reentrant)):
        model.zero_grad()
        x = features(N).requires_grad_()
        forward(x, GRAPH).square().sum().backward()
        found.append([x.grad, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", LAYERS)
def test_offloading_changes_no_bit(name, store):
    model = model_of(name)
    expected = step(model, model, N, GRAPH)
    with penstock.offload(store, policy="all", min_bytes="0B") as offload:
        found = step(model, model, N, GRAPH)
    assert offload.report().bytes_read > 0
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_under_autocast_results_are_of_the_weights_dtype(name, dtype):
    layer = model_of(name).float().layer
    x = torch.randn(N, DIM).to(dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = apply(layer, x, GRAPH)
    assert result.dtype == torch.float32
    result.sum().backward()
    assert x.grad.dtype == dtype
    assert all(p.grad is None or p.grad.dtype == torch.float32 for p in layer.parameters())


def test_under_autocast_dtypes_are_pygs():
    pyg = pytest.importorskip("torch_geometric.nn")
    x, edges, types = torch.randn(N, DIM), GRAPH.edge_index, GRAPH.edge_type
    x_dict = {"a": x[: N // 2], "b": x[N // 2 :]}
    edges_by_type = {edge_type: torch.randint(N // 2, (2, 9)) for edge_type in METADATA[1]}
    pairs = [
        ((x, edges, types), rgnn.RGCNConv(DIM, 4, RELATIONS), pyg.RGCNConv(DIM, 4, RELATIONS)),
        ((x, edges, types), rgnn.RGATConv(DIM, 4, RELATIONS), pyg.RGATConv(DIM, 4, RELATIONS)),
        *(
            ((x_dict, edges_by_type), rgnn.HGTConv(DIM, d, METADATA), pyg.HGTConv(DIM, d, METADATA))
            for d in (DIM, 4)  # with and without the skip connection
        ),
    ]
    for arguments, ours, theirs in pairs:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found, expected = (layer(*arguments) for layer in (ours, theirs))
        if isinstance(found, dict):
            found, expected = found["a"], expected["a"]
        assert found.dtype == expected.dtype


def test_without_autocast_dtypes_may_not_differ():
    layer = rgnn.RGCNConv(DIM, 4, RELATIONS)
    with pytest.raises(ValueError, match="convert one of them with"):
        layer(torch.randn(N, DIM).bfloat16(), GRAPH)


@pytest.mark.parametrize("name", LAYERS)
def test_layers_can_be_copied_and_pickled_after_use(name):
    model = model_of(name)
    expected = step(model, model, N, GRAPH)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        graph = pickle.loads(pickle.dumps(GRAPH))
        found = step(other, other, N, graph)
        assert all(torch.equal(one, known) for one, known in zip(found, expected, strict=True))


def test_a_compiled_function_is_copied_and_pickled_by_name():
    function = LAYER_FUNCTIONS["rgat"]
    assert copy.deepcopy(function) is function
    assert pickle.loads(pickle.dumps(rgnn.layers.rgat)) is rgnn.layers.rgat
    local = rgnn.compile(lambda g, x: g.sum_to_dst(g.edges.src(x)))
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(local)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_transforms_of_torch_func_are_refused(transform):
    arguments = layer_arguments("rgat", GRAPH)

    def loss(x):
        return LAYER_FUNCTIONS["rgat"](GRAPH, x, *arguments[1:]).sum()

    x = arguments[0].detach()
    with pytest.raises(RuntimeError, match=r"cannot be transformed by torch.func (.|\n)*to_torch"):
        transform(loss)(x if transform is torch.func.grad else torch.stack([x, x]))


def test_the_reference_can_be_differentiated_twice_and_transformed():
    graph = random_graph(5, 12)
    arguments = layer_arguments("rgcn", graph)
    reference = LAYER_FUNCTIONS["rgcn"].to_torch()
    assert torch.autograd.gradgradcheck(lambda *a: reference(graph, *a).tanh(), arguments)
    x, *rest = (argument.detach() for argument in arguments)
    found = torch.func.grad(lambda x: reference(graph, x, *rest).sum())(x)
    gradient = torch.autograd.grad(LAYER_FUNCTIONS["rgcn"](graph, *arguments).sum(), arguments[0])
    assert_same([found], list(gradient))


def test_a_gradient_with_create_graph_may_be_used_but_not_differentiated():
    arguments = layer_arguments("rgat", GRAPH)
    result = LAYER_FUNCTIONS["rgat"](GRAPH, *arguments)
    (gradient,) = torch.autograd.grad(result.square().sum(), arguments[0], create_graph=True)
    (plain,) = torch.autograd.grad(
        LAYER_FUNCTIONS["rgat"](GRAPH, *arguments).square().sum(), arguments[0]
    )
    assert torch.equal(gradient, plain)
    with pytest.raises(RuntimeError, match="differentiable once, not twice"):
        gradient.sum().backward()


def test_a_graph_made_in_inference_mode_can_be_trained_on():
    with torch.inference_mode():
        graph = graph_of_size(N, 60)
        graph.stats()
        LAYER_FUNCTIONS["rgat"](graph, *layer_arguments("rgat", graph))
    arguments = layer_arguments("rgat", GRAPH)
    for function in (LAYER_FUNCTIONS["rgat"], LAYER_FUNCTIONS["rgat"].to_torch()):
        found = torch.autograd.grad(function(graph, *arguments).sum(), arguments)
        expected = torch.autograd.grad(function(GRAPH, *arguments).sum(), arguments)
        assert_same(list(found), list(expected))


@pytest.mark.parametrize("backend", ["torch", "cpp"])
def test_numbers_that_are_negated_later_are_read_negated(backend):
    function = rgnn.compile(LAYER_FUNCTIONS["rgat"].__wrapped__, backend=backend)
    x, *rest = (argument.detach() for argument in layer_arguments("rgat", GRAPH))
    seed = torch.randn_like(function(GRAPH, x, *rest))
    found, expected = [], []
    for results, sign in ((found, torch._neg_view), (expected, torch.neg)):
        leaf = x.clone().requires_grad_()
        result = function(GRAPH, sign(leaf), *map(sign, rest))
        results += [result, *torch.autograd.grad(result, leaf, sign(seed))]
    assert_same(found, expected)


def _list_second_derivatives(function):
    """Yield second derivatives by functions that pass over what does not depend on x."""
    x, *rest = (argument.detach() for argument in layer_arguments("rgcn", GRAPH))
    functional = torch.autograd.functional

    def loss(x):
        return function(GRAPH, x, *rest).tanh().sum()

    def penalty():
        leaf = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        gradient.square().sum().backward(inputs=[leaf])

    yield lambda: functional.hvp(loss, x, x)
    yield lambda: functional.jvp(lambda x: function(GRAPH, x, *rest), x, x)
    yield penalty


@pytest.mark.parametrize("place", range(3))
def test_a_second_derivative_is_an_error_and_never_zero(place):
    second = list(_list_second_derivatives(LAYER_FUNCTIONS["rgcn"]))[place]
    with pytest.raises(RuntimeError, match="differentiable once, not twice"):
        second()


def test_a_gradient_of_hgt_with_create_graph_may_be_used():
    model, x = model_of("hgt"), features(N)
    found = []
    for create_graph in (False, True):
        leaf = x.clone().requires_grad_()
        result = apply(model.layer, leaf, GRAPH).square().sum()
        found.append(torch.autograd.grad(result, leaf, create_graph=create_graph)[0].detach())
    assert_same(found[:1], found[1:])


def test_other_derivatives_and_records_are_refused():
    function, arguments = LAYER_FUNCTIONS["rgat"], layer_arguments("rgat", GRAPH)
    x, *rest = (argument.detach() for argument in arguments)
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match="in forward mode"):
        function(GRAPH, forward_ad.make_dual(x, x), *rest)
    with pytest.raises(RuntimeError, match=r"traced by torch\.jit"):
        torch.jit.trace(lambda x: function(GRAPH, x, *rest), (x,))
    result = function(GRAPH, *arguments)
    seeds = torch.ones(2, *result.shape, dtype=result.dtype)
    with pytest.raises(RuntimeError, match="batched by autograd"):
        torch.autograd.grad(result, arguments[0], seeds, is_grads_batched=True)


@pytest.mark.parametrize("convert", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_sparse_tensors_are_refused(convert):
    layer = rgnn.RGCNConv(DIM, 4, RELATIONS)
    with pytest.raises(ValueError, match=r"x must be a dense tensor.*to_dense"):
        layer(convert(features(N).float()), GRAPH)
    with pytest.raises(ValueError, match="edge_index must be a dense tensor"):
        layer(features(N).float(), convert(GRAPH.edge_index), GRAPH.edge_type)


def test_what_is_recorded_is_the_program():
    """Without a call before: a graph builds its indices outside of what is recorded."""
    graph, x = graph_of_size(N, 60, seed=3), features(N)
    layer = model_of("rgat").layer
    recorded = make_fx(lambda x: layer(x, graph))(x)
    assert torch.equal(recorded(2 * x), layer(2 * x, graph))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        edges = mode.from_tensor(graph.edge_index)
        assert layer(mode.from_tensor(x), graph).shape == layer(x, graph).shape
        with pytest.raises(ValueError, match="edge_index is a fake tensor"):
            layer(x, edges, graph.edge_type)
    assert graph.stats() == graph_of_size(N, 60, seed=3).stats()


def test_planned_steps_have_the_losses_of_eager_ones():
    """Each layer has a graph of its own, of one size: in an arena one lies where another did."""
    graphs = [graph_of_size(N, 60, seed=seed) for seed in range(2)]

    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(rgnn.RGCNConv(DIM, DIM, RELATIONS) for _ in graphs)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer, graph in zip(self.layers, graphs, strict=True):
                x = torch.tanh(layer(x, graph))
            return x

    def run(is_planned: bool) -> list[float]:
        torch.manual_seed(0)
        x, model = features(N).float(), Layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def loss_of(output: torch.Tensor, _: object = None) -> torch.Tensor:
            return output.square().mean()

        def step(batch: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model(batch))
            loss.backward()
            optimizer.step()
            return loss

        if is_planned:
            memory = {"device_memory": "1MiB", "time_limit": 0.5}
            step = penstock.fit(model, optimizer, x, loss=loss_of, **memory)
        return [float(step(x).detach()) for _ in range(2)]

    assert run(is_planned=True) == run(is_planned=False)
