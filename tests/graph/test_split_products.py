"""Products of matrices in slices: logits that are never whole, sums of gradients, plans."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from torch import nn

from penstock.errors import InfeasibleError, PlanError
from penstock.graph import StepGraph, capture, run, split
from penstock.graph.splitting._choice import needed_bytes
from penstock.graph.splitting._forms import find_slice_form
from penstock.planner import Plan, check, plan
from test_slices import head_case, sgd

VECTORS, WIDTH = 1024, 1000
LOGITS_BYTES = VECTORS * WIDTH * 4


def make(
    dtype: torch.dtype = torch.float32, bias: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer, StepGraph, dict]:
    case = head_case(
        num_vectors=VECTORS // 2,
        width=WIDTH,
        dtype=dtype,
        loss_dtype=torch.float32,
        options={},
        bias=bias,
    )
    torch.manual_seed(0)
    model = case.make()
    optimizer = sgd(model.parameters())
    return model, optimizer, capture(model, optimizer, case.batch, loss=case.loss), case.batch


def after_steps(change, bias: bool) -> tuple[list[float], list[torch.Tensor]]:
    model, optimizer, graph, batch = make(bias=bias)
    losses = [float(run(change(graph), model, optimizer, batch)) for _ in range(3)]
    return losses, [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("bias", [False, True])
def test_a_step_with_products_in_slices_is_the_same_but_for_rounding(bias):
    losses, weights = after_steps(lambda graph: graph, bias)
    parts = after_steps(lambda graph: split(graph, 1, products=True), bias)
    assert parts[0] == pytest.approx(losses, rel=1e-6)
    for ours, theirs in zip(parts[1], weights, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("bias", [False, True])
def test_no_operator_needs_whole_logits(bias):
    graph = make(bias=bias)[2]
    whole = max(needed_bytes(split(graph, 1)))
    parts = split(graph, 1, products=True)
    assert whole >= LOGITS_BYTES > 8 * max(needed_bytes(parts))
    names = [operator.name for operator in parts.operators]
    products = [
        operator
        for operator in graph.operators
        if ".mm." in operator.target or ".addmm." in operator.target
    ]
    assert all(f"{each.name}[1]" in names for each in products) and len(products) >= 2
    sums = [name for name in names if name.endswith(".put[1]")]
    assert len(sums) == bias  # of the gradient of the bias
    assert split(graph, 1, products=True) is parts and split(graph, 1) is not parts


def test_few_slices_where_few_are_enough():
    graph = make()[2]
    needed = max(needed_bytes(graph))
    counts = [
        sum(operator.target.startswith("aten.mm") for operator in parts.operators)
        for parts in (split(graph, needed // divisor, products=True) for divisor in (2, 8, 32))
    ]
    assert counts == sorted(counts) and counts[0] < counts[-1]


def test_operators_whose_first_operand_is_no_view_stay_whole():
    graph = make(bias=True)[2]
    targets = ("aten.mm.default", "aten.addmm.default", "aten.sum.dim_IntList")
    found = [operator for operator in graph.operators if operator.target in targets]
    assert {operator.target for operator in found} == set(targets)
    for operator in found:
        changed = dataclasses.replace(operator, args=(None, *operator.args[1:]))
        assert find_slice_form(graph, changed, products=True) is None


def test_gradients_in_half_precision_are_not_summed_slice_by_slice():
    graph = make(torch.bfloat16)[2]
    parts = split(graph, 1, products=True)
    assert not any(operator.target == "aten.addmm_.default" for operator in parts.operators)


@pytest.mark.parametrize("bias", [False, True])
def test_a_plan_with_products_in_slices_fits_where_no_other_does(bias):
    graph = make(bias=bias)[2]
    budget = LOGITS_BYTES * 3 // 4
    options = {"device_memory": budget, "host_memory": 8 * LOGITS_BYTES, "time_limit": 5,
               "machine": "h100-80gb"}  # fmt: skip
    with pytest.raises(InfeasibleError):
        plan(graph, **options)
    found = plan(graph, **options, split_products=True)
    assert found.splits_products and found.peak_device_bytes <= budget
    check(graph, found)
    again = Plan.from_dict(json.loads(json.dumps(found.to_dict())), graph=graph)
    assert again.splits_products and again.planned_graph(graph) is found.planned_graph(graph)
    other = dataclasses.replace(found, splits_products=False)
    with pytest.raises(PlanError, match="operators"):
        check(graph, other)
