"""Differentiation of programs, held against autograd of the reference interpreter."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from _relational import assert_same, graphs, random_graph, random_tensor, recipes
from penstock import rgnn
from penstock.rgnn.interpreter import interpret
from penstock.rgnn.passes import differentiate, name_seed

pytestmark = pytest.mark.usefixtures("one_thread")


def program_of(function, graph, arguments):
    traced, tensors = rgnn.compile(function)._trace_call(graph, arguments, {})
    return traced.program, tensors


@settings(max_examples=100)
@given(recipe=recipes(), graph=graphs())
def test_gradients_of_unrewritten_programs_are_autograds(recipe, graph):
    program, tensors = program_of(recipe.__call__, graph, recipe.arguments(graph))
    tensors = {name: tensors[name] for name in program.inputs()}
    outputs = interpret(program, graph, tensors)
    seeds = [random_tensor(*output.shape, seed=i).detach() for i, output in enumerate(outputs)]
    names = list(tensors)
    expected = torch.autograd.grad(
        outputs, list(tensors.values()), seeds, allow_unused=True, materialize_grads=True
    )
    joint, wrt = differentiate(program, names)
    arguments = {name: tensor.detach() for name, tensor in tensors.items()}
    arguments |= {name_seed(k): seed for k, seed in enumerate(seeds)}
    found = interpret(joint, graph, arguments)
    assert_same(list(found[: len(outputs)]), list(outputs))
    gradients = dict(zip(wrt, found[len(outputs) :], strict=True))
    for name, gradient in zip(names, expected, strict=True):
        if name in gradients:
            assert_same([gradients[name]], [gradient])
        else:
            assert not gradient.any()


def test_only_what_is_asked_for_is_differentiated():
    def body(g, x, W):
        return g.sum_to_dst(g.edges.src(x) @ W[g.edges.type])

    graph = random_graph()
    program, _ = program_of(body, graph, (random_tensor(12, 3), random_tensor(4, 3, 3)))
    to_rows, wrt = differentiate(program, ["x"])
    assert wrt == ("x",)
    assert "outer" not in {node.op for node in to_rows.nodes}
    to_weights, _ = differentiate(program, ["W"])
    num_products = [node.op for node in to_weights.nodes].count("matmul")
    assert num_products == 1  # the forward's


def test_an_input_that_no_output_depends_on_has_no_gradient():
    def body(g, x, y):
        g.edges.dst(y)
        return g.sum_to_dst(g.edges.src(x))

    graph = random_graph()
    x, y = random_tensor(12, 3), random_tensor(12, 3)
    program, _ = program_of(body, graph, (x, y))
    assert differentiate(program, ["x", "y"])[1] == ("x",)
    rgnn.compile(body)(graph, x, y).sum().backward()
    assert x.grad is not None
    assert y.grad is None


@pytest.mark.parametrize(("backend", "losses"), [("torch", [[0], [3], [0, 3]]), ("cpp", [[0]])])
def test_an_output_that_a_loss_does_not_use_has_no_part_in_gradients(backend, losses):
    """Zeros times the slope of its logarithm would be NaN, where nodes have no edges."""

    def body(g, x, w, c):
        e, summed = g.edges, g.sum_to_dst(g.edges.src(x))
        return rgnn.tanh(summed), rgnn.log(summed * w), e(c) * 2, e.dst(g.nodes(x) * summed)

    graph, function = random_graph(30, 20), rgnn.compile(body, backend=backend)
    arguments = (random_tensor(30, 3), random_tensor(3), random_tensor(20).detach())
    found, expected = ([*f(graph, *arguments)] for f in (function, function.to_torch()))
    assert [one.requires_grad for one in found] == [one.requires_grad for one in expected]
    for used in losses:
        of_both = (
            torch.autograd.grad(
                [results[place].sum() for place in used],
                arguments[:2],
                retain_graph=True,
                allow_unused=True,
            )
            for results in (found, expected)
        )
        (of_x, of_w), (expected_of_x, _) = of_both
        assert of_w is None
        assert_same([of_x], [expected_of_x])


def test_a_matrix_used_twice_is_summed_over_edges_before_it_is_added_up():
    def body(g, x, W):
        e = g.edges
        w = W[e.type]
        return g.sum_to_dst(rgnn.tanh(e.src(x) @ w) * (e.dst(x) @ w))

    graph = random_graph()
    program, _ = program_of(body, graph, (random_tensor(12, 3), random_tensor(4, 3, 3)))
    joint = differentiate(program, ["W"])[0]
    for node in joint.nodes:
        if any(joint.nodes[operand].op == "outer" for operand in node.operands):
            assert node.op == "sum"
