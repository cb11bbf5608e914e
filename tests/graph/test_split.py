"""Operators that are taken apart need less at once and give the same bits."""

import pytest
import torch

from _steps import unlike_eager
from _zoo import CASES
from penstock.graph import capture, split
from penstock.graph.splitting._choice import working_set_bytes

OPTIMIZERS = {
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, fused=True),
    "foreach adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "foreach sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=True),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_parts_give_the_same_bits(optimizer):
    def change(graph):
        parts = split(graph, 1)
        assert len(parts.operators) > len(graph.operators)
        return parts

    assert unlike_eager(CASES["lstm"], OPTIMIZERS[optimizer], change=change) == []


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_no_part_needs_more_than_one_parameter(optimizer):
    model = CASES["resnet"].make()
    case = CASES["resnet"]
    graph = capture(model, OPTIMIZERS[optimizer](model.parameters()), case.batch, loss=case.loss)
    largest = 4 * max(parameter.numel() for parameter in model.parameters())
    parts = split(graph, 4 * largest)
    for operator in parts.operators:
        if operator.target.startswith(("aten._fused", "aten._foreach")):
            assert working_set_bytes(parts, operator) <= 4 * largest
    for count in ("flops", "bytes_read", "bytes_written"):
        sums = [sum(getattr(each, count) for each in one.operators) for one in (graph, parts)]
        assert sums[0] == sums[1]


def test_what_fits_stays_whole():
    model = CASES["mixture"].make()
    optimizer = OPTIMIZERS["fused adamw"](model.parameters())
    graph = capture(model, optimizer, CASES["mixture"].batch)
    assert split(graph, 2**40) == graph


def test_states_that_are_views_of_one_storage_stay_in_one_operator():
    """As those are that were loaded from a file of views."""
    model = CASES["mixture"].make()
    optimizer = OPTIMIZERS["fused adamw"](model.parameters())
    first, *_ = parameters = [p for p in model.parameters() if p.dim() == 2]
    memory, begin = torch.zeros(sum(p.numel() for p in parameters)), 0
    for parameter in parameters:
        moment = memory[begin : begin + parameter.numel()].view(parameter.shape)
        state = {"step": torch.zeros(()), "exp_avg": moment, "exp_avg_sq": torch.zeros_like(moment)}
        optimizer.state[parameter] = state
        begin += parameter.numel()
    optimizer.param_groups[0]["params"] = parameters
    graph = capture(model, optimizer, CASES["mixture"].batch)
    assert split(graph, 8 * first.numel()) is graph
