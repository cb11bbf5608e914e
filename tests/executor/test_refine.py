"""Predicted and measured side by side, and plans that learn from it."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from _planned import plan_within
from penstock.errors import GraphFileError
from penstock.executor import bind
from penstock.graph import StepGraph, capture, measure
from penstock.planner import check, plan, refine

pytestmark = pytest.mark.usefixtures("one_thread")


def loss_of(output, batch):
    return output.square().mean()


def trainee():
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(256, 256), nn.ReLU())))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), torch.randn(512, 256)


def slowed(graph: StepGraph, times: float) -> StepGraph:
    """The graph with times that are far too long."""
    operators = tuple(
        dataclasses.replace(operator, seconds=(operator.seconds or 0.0) * times)
        for operator in graph.operators
    )
    return dataclasses.replace(graph, operators=operators)


def run(found, graph, num_steps=8):
    model, stepper, batch = trainee()
    with bind(found, model, stepper, graph=graph, loss=loss_of) as step:
        losses = [step(batch).item() for _ in range(num_steps)]
        return losses, step.report()


@pytest.fixture(scope="module")
def true_graph():
    model, stepper, batch = trainee()
    return measure(capture(model, stepper, batch, loss=loss_of))


@pytest.fixture
def graph(true_graph):
    return slowed(true_graph, 3)


def planned(graph, share):
    found = plan(graph, machine="h200", time_limit=0.5)
    if share < 1:
        found = plan_within(graph, int(found.peak_device_bytes * share), "host", machine="h200")
        assert found.transfers
    return found


@pytest.mark.parametrize("share", [1, 0.6])
def test_costs_that_are_wrong_are_put_right(true_graph, share):
    """A machine on which operators take exactly what they should: predictions become exact."""
    graph = slowed(true_graph, 3)
    found = planned(graph, share)
    _, report = run(found, graph, num_steps=3)
    true_seconds = tuple(operator.seconds or 0.0 for operator in true_graph.operators)
    report = dataclasses.replace(report, operator_seconds=true_seconds)
    refined = refine(found, report, graph, time_limit=0.5)
    check(graph, refined)
    assert refined.operator_seconds == pytest.approx(true_seconds)
    assert refined.ideal_seconds == pytest.approx(found.ideal_seconds / 3)
    assert refined.peak_device_bytes <= (found.budget.device_bytes or found.peak_device_bytes)
    if share < 1:
        rates = {link.value: p.bytes_per_second for link, p in refined.machine.links.items()}
        assert {link: rates[link] for link in report.bytes_per_second} == report.bytes_per_second


@pytest.mark.parametrize("share", [1, 0.6])
def test_a_refined_plan_predicts_what_is_measured(true_graph, share):
    """Costs are wrong by far more than a busy machine is."""
    graph = slowed(true_graph, 100)
    found = planned(graph, share)
    losses, report = run(found, graph)
    refined = refine(found, report, graph, time_limit=0.5)
    again, measured = run(refined, graph)
    assert again == losses
    error = abs(refined.step_seconds - measured.step_seconds)
    assert error < abs(found.step_seconds - measured.step_seconds) / 2


def test_decisions_that_were_frozen_stay_so(graph):
    frozen = {"reorder": False, "recompute": False}
    found = plan(graph, machine="h200", time_limit=0.3, **frozen)
    _, report = run(found, graph, num_steps=2)
    refined = refine(found, report, graph, time_limit=0.3)
    assert (refined.bound.reorder, refined.bound.recompute) == (False, False)
    assert refined.order == found.order == tuple(range(len(graph.operators)))


def test_phases_are_the_parts_of_a_step(graph):
    """Two steps, of which the second is timed: medians over more would be of several steps."""
    _, report = run(plan(graph, machine="h200", time_limit=0.5), graph, num_steps=2)
    for phases, whole in (
        (report.phase_seconds, report.step_seconds),
        (report.predicted_phase_seconds, report.predicted_step_seconds),
    ):
        assert list(phases) == ["forward", "backward", "optimizer"]
        assert all(seconds > 0 for seconds in phases.values())
        assert sum(phases.values()) <= whole * (1 + 1e-9)
    total = sum(report.predicted_phase_seconds.values())
    assert total == pytest.approx(report.predicted_step_seconds)
    assert "phase backward" in str(report)
    assert "operator seconds" not in str(report)
    assert len(report.to_dict()["operator_seconds"]) == len(graph.operators)


def test_operators_that_were_taken_apart_take_what_their_parts_do():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))
    stepper = torch.optim.AdamW(model.parameters(), fused=True)
    batch = torch.randn(8, 64)
    fused = measure(capture(model, stepper, batch, loss=loss_of))
    full = plan(fused, machine="h200", time_limit=0.3)
    found = plan_within(fused, full.peak_device_bytes // 3, "host", machine="h200")
    assert found.split_bytes is not None
    with bind(found, model, stepper, graph=fused, loss=loss_of) as step:
        for _ in range(3):
            step(batch)
        report = step.report()
    refined = refine(found, report, fused, time_limit=0.3)
    measured = sum(seconds or 0 for seconds in report.operator_seconds)
    assert refined.ideal_seconds == pytest.approx(measured, rel=1e-6)
    assert refined.graph_digest == fused.digest


def test_a_report_without_times_is_refused(graph):
    found = plan(graph, machine="h200", time_limit=0.3)
    _, report = run(found, graph, num_steps=1)
    with pytest.raises(ValueError, match="at least twice"):
        refine(found, report, graph)


@pytest.mark.parametrize(
    ("seconds", "time_limit", "message"),
    [(math.nan, 1, "takes nan seconds"), (-1.0, 1, "takes -1.0 seconds"), (1.0, -1, "time_limit")],
)
def test_times_that_are_none_are_refused(graph, seconds, time_limit, message):
    found = plan(graph, machine="h200", time_limit=0.3)
    _, report = run(found, graph, num_steps=2)
    times = (seconds, *report.operator_seconds[1:])
    with pytest.raises(ValueError, match=message):
        refine(
            found,
            dataclasses.replace(report, operator_seconds=times),
            graph,
            time_limit=time_limit,
        )


def test_a_report_of_another_plan_is_refused(graph):
    found = plan(graph, machine="h200", time_limit=0.3)
    _, report = run(found, graph)
    other = dataclasses.replace(report, operator_seconds=report.operator_seconds[1:])
    with pytest.raises(ValueError, match="is for"):
        refine(found, other, graph)
    with pytest.raises(GraphFileError, match="not for"):
        refine(found, report, dataclasses.replace(graph, device="cuda"))
