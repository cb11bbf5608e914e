"""Layers together with the rest of torch: autocast, checkpoints, offloading, copies, transforms."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
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
