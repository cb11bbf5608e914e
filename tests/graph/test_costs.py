"""Counts are exact where they can be checked by hand; times are rooflines or measured."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from _zoo import CASES
from penstock.graph import StepGraph, capture, measure, operator_seconds, with_workspace
from penstock.memory import machine


def graph_of(model, *batch, loss=lambda output, batch: output.sum()):
    return capture(model, torch.optim.SGD(model.parameters(), 0.1), batch, loss=loss)


def operators(graph, target):
    return [operator for operator in graph.operators if operator.target == target]


def test_a_linear_layer():
    graph = graph_of(nn.Linear(6, 5), torch.zeros(4, 6, requires_grad=True))
    (product,) = operators(graph, "aten.addmm.default")
    assert product.flops == 2 * 4 * 5 * 6
    assert product.bytes_written == 4 * 4 * 5
    assert product.bytes_read == 4 * (4 * 6 + 5 * 6 + 5)
    assert product.workspace_bytes == 0


def test_a_lookup_reads_its_rows_and_not_the_table():
    graph = graph_of(nn.Embedding(1000, 8), torch.zeros(3, dtype=torch.long))
    (lookup,) = operators(graph, "aten.embedding.default")
    assert (lookup.bytes_read, lookup.bytes_written) == (3 * 8 + 3 * 8 * 4, 3 * 8 * 4)
    assert lookup.flops == 0


def test_an_expanded_operand_is_read_once():
    class Expanded(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(7))

        def forward(self, x):
            return x * self.weight

    graph = graph_of(Expanded(), torch.zeros(5, 7))
    product = operators(graph, "aten.mul.Tensor")[0]
    assert (product.flops, product.bytes_read) == (35, 4 * (35 + 7))


def test_a_convolution_has_a_workspace_and_its_flops():
    graph = graph_of(nn.Conv2d(3, 8, 3, bias=False), torch.zeros(2, 3, 10, 10))
    (convolution,) = operators(graph, "aten.convolution.default")
    assert convolution.flops == 2 * (2 * 8 * 8 * 8) * (3 * 3 * 3)
    scratch_bytes = convolution.bytes_read + convolution.bytes_written
    (result,) = map(graph.num_bytes, convolution.creates)  # torch copies it to its place
    assert convolution.workspace_bytes == scratch_bytes + result


def counted_gradients(layer, x):
    """Gradients of a one-dimensional convolution's sum, product by product, and their number."""
    weight, stride, groups = layer.weight.detach(), layer.stride[0], layer.groups
    gradients = {"x": torch.zeros_like(x), "weight": torch.zeros_like(weight)}
    num_products = 0
    first, per_group, width = weight.shape  # of the layer's inputs if it is transposed
    for sample in range(len(x)):
        for one, other, tap in itertools.product(range(first), range(per_group), range(width)):
            partner = one // (first // groups) * per_group + other
            places = x.shape[2] if layer.transposed else (x.shape[2] - width) // stride + 1
            for place in range(places):
                channel, at = (one, place) if layer.transposed else (partner, place * stride + tap)
                gradients["x"][sample, channel, at] += weight[one, other, tap]
                gradients["weight"][one, other, tap] += x[sample, channel, at]
                num_products += 2
    return gradients, num_products


@pytest.mark.parametrize("groups", [1, 2, 6])
@pytest.mark.parametrize("kind", [nn.Conv1d, nn.ConvTranspose1d])
def test_gradients_of_grouped_convolutions_are_counted(kind, groups):
    layer = kind(6, 12, 3, stride=2, groups=groups, bias=False)
    x = torch.randn(2, 6, 9, requires_grad=True)
    layer(x).sum().backward()
    gradients, num_products = counted_gradients(layer, x.detach())
    torch.testing.assert_close(gradients["x"], x.grad)
    torch.testing.assert_close(gradients["weight"], layer.weight.grad)
    graph = graph_of(nn.Sequential(nn.Conv1d(6, 6, 1, bias=False), layer), x.detach())
    counts = [operator.flops for operator in operators(graph, "aten.convolution_backward.default")]
    assert counts[0] == 2 * num_products
    first = 2 * (2 * 9 * 6 * 6)
    assert counts[1] == first  # the gradient of the batch has no use


def test_every_count_is_a_whole_number():
    case = CASES["lstm"]
    model = case.make()
    graph = capture(model, torch.optim.AdamW(model.parameters()), case.batch, loss=case.loss)
    for operator in graph.operators:
        for count in ("flops", "bytes_read", "bytes_written", "workspace_bytes"):
            assert type(getattr(operator, count)) is int
            assert getattr(operator, count) >= 0


def test_a_roofline_over_a_built_in_machine():
    graph = graph_of(nn.Linear(64, 64), torch.zeros(32, 64))
    seconds = operator_seconds(graph, "v100-16gb-pcie3")
    profile = machine("v100-16gb-pcie3").compute
    for operator, took in zip(graph.operators, seconds, strict=True):
        moved = operator.bytes_read + operator.bytes_written
        if operator.target != "penstock.empty":
            assert took == profile.seconds(operator.flops, moved, "float32")
    assert sum(operator_seconds(graph, "h200")) < sum(seconds)


def test_measured_times_win():
    graph = graph_of(nn.Linear(64, 64), torch.zeros(32, 64))
    first = dataclasses.replace(graph.operators[0], seconds=7.0)
    graph = dataclasses.replace(graph, operators=(first, *graph.operators[1:]))
    assert operator_seconds(graph, "h200")[0] == 7.0


def test_a_profile_without_compute_is_refused():
    profile = dataclasses.replace(machine("h200"), compute=None)
    with pytest.raises(ValueError, match="refresh=True"):
        operator_seconds(graph_of(nn.Linear(2, 2), torch.zeros(2, 2)), profile)


def test_a_profile_without_compute_will_do_where_everything_was_measured():
    graph = graph_of(nn.Linear(2, 2), torch.zeros(2, 2))
    operators = tuple(dataclasses.replace(o, seconds=2.0) for o in graph.operators)
    profile = dataclasses.replace(machine("h200"), compute=None)
    seconds = operator_seconds(dataclasses.replace(graph, operators=operators), profile)
    assert seconds == (2.0,) * len(operators)


def test_every_operator_is_measured():
    case = CASES["unet"]
    model = case.make()
    graph = capture(model, torch.optim.AdamW(model.parameters()), case.batch)
    random_state = torch.get_rng_state()
    measured = measure(graph, num_runs=1)
    assert torch.equal(torch.get_rng_state(), random_state)
    for operator in measured.operators:
        assert operator.target.startswith("penstock.") or (operator.seconds or 0) > 0
    without = tuple(dataclasses.replace(each, seconds=None) for each in measured.operators)
    assert dataclasses.replace(measured, operators=without) == graph


def test_measured_workspace_is_seen():
    graph = graph_of(nn.Conv2d(16, 16, 3, bias=False), torch.zeros(2, 16, 40, 40))
    (convolution,) = operators(graph, "aten.convolution.default")
    none = dataclasses.replace(convolution, workspace_bytes=0)
    others = tuple(none if each is convolution else each for each in graph.operators)
    measured = measure(dataclasses.replace(graph, operators=others), num_runs=1, workspace=True)
    (again,) = operators(measured, "aten.convolution.default")
    assert 0 < again.workspace_bytes <= convolution.workspace_bytes


def test_convolutions_of_gpus_are_declared_to_need_less():
    model = nn.Conv2d(64, 64, 3, padding=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.device("meta"):
        images = torch.empty(64, 64, 128, 128)
    graph = capture(model, optimizer, images, loss=lambda output, batch: output.square().mean())
    there = with_workspace(graph, "cuda")
    largest = [max(o.workspace_bytes for o in each.operators) for each in (graph, there)]
    assert largest[0] > 2 * images.numel() * 4
    assert largest[1] == 256 * 2**20 + images.numel() * 4  # and its result, which is copied
    assert with_workspace(graph, "cpu") is graph
    loaded = StepGraph.from_dict(there.to_dict())
    assert with_workspace(loaded, "cuda") is loaded
    assert with_workspace(loaded, "cpu").operators == graph.operators
    for ours, theirs in zip(graph.operators, there.operators, strict=True):
        assert dataclasses.replace(theirs, workspace_bytes=ours.workspace_bytes) == ours
        if "convolution" not in ours.target:
            assert theirs.workspace_bytes <= ours.workspace_bytes


def test_operators_that_refuse_made_up_operands_are_measured_somehow():
    def log_of_determinant(model, x):
        return torch.linalg.slogdet(model.weight + 3 * torch.eye(8))[1] + model(x).square().mean()

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def forward(self, x):
            return log_of_determinant(self.layer, x)

    model = Model()
    graph = capture(model, torch.optim.SGD(model.parameters()), torch.ones(2, 8))
    measured = measure(graph, num_runs=1)
    seconds = {operator.target: operator.seconds for operator in measured.operators}
    assert any("linalg" in target for target in seconds)
    assert all(found is None or found > 0 for found in seconds.values())
