"""Freedom makes no plan slower, and no plan is slower than paging."""

import dataclasses
import itertools
import random
import time

import pytest
import torch

import graph_cases
import penstock
from penstock.errors import InfeasibleError
from penstock.graph import operator_seconds
from penstock.planner import Budget, check, plan
from penstock.planner import _api as references
from penstock.planner.paging import PAGING_POLICIES, peak_of_program_order, plan_by_paging
from penstock.planner.search._auto import frozen_decisions

pytestmark = pytest.mark.usefixtures("processor_time")

UNIT = 512
FREEDOMS = list(itertools.product([False, True], repeat=2))


def random_step(seed):
    """A random step with times, of sizes that every planner aligns alike."""
    rng = random.Random(seed)
    graph = graph_cases.random_graph(rng, rng.randint(14, 20))
    storages = [dataclasses.replace(s, num_bytes=s.num_bytes * UNIT) for s in graph.storages]
    operators = [
        dataclasses.replace(o, seconds=rng.choice([1.0, 2.0, 4.0])) for o in graph.operators
    ]
    graph = dataclasses.replace(graph, storages=tuple(storages), operators=tuple(operators))
    return graph, rng.choice([0.5, 0.6, 0.7, 0.8])


def captured_step(name):
    torch.manual_seed(0)
    width = 96
    if name == "mlp":
        layers = [
            layer for _ in range(3) for layer in (torch.nn.Linear(width, width), torch.nn.GELU())
        ]
        model = torch.nn.Sequential(*layers)
        batch = torch.randn(256, width)
    else:
        model = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.Flatten()
        )
        batch = torch.randn(4, 3, 16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = lambda output, batch: output.square().mean()  # noqa: E731
    return penstock.capture(model, optimizer, batch, loss=loss), 0.8


def times_of_all(graph, share, machine):
    """The step's time by freedom, and by policy of paging, of those that have a plan."""
    budget = int(peak_of_program_order(graph) * share)
    found = {}
    for reorder, recompute in FREEDOMS:
        try:
            made = plan(
                graph,
                device_memory=budget,
                host_memory=1 << 40,
                machine=machine,
                reorder=reorder,
                recompute=recompute,
                time_limit=30,  # they take less; a busy machine may not cut them short
            )
        except InfeasibleError:
            continue
        check(graph, made)
        assert made.method == "auto"
        found[reorder, recompute] = made.step_seconds
    profile = machine.while_both_are_busy()
    for policy in PAGING_POLICIES:
        limits = Budget(device_bytes=budget, host_bytes=1 << 40)
        seconds = operator_seconds(graph, profile)
        try:
            made = plan_by_paging(
                graph_cases.request(graph, limits, profile, seconds=seconds), policy=policy
            )
        except InfeasibleError:
            continue
        found[policy] = made.step_seconds
    return found


def assert_freedom_is_no_loss(found):
    assert found, "nothing has a plan"
    for freedom in FREEDOMS:
        others = [other for other in frozen_decisions(*freedom) if other in found]
        others += [policy for policy in PAGING_POLICIES if policy in found]
        for other in others:
            assert found[freedom] <= found[other] * (1 + 1e-9), (freedom, other, found)


@pytest.mark.parametrize("seed", [0, 2, 3, 5])
def test_freedom_makes_no_plan_of_a_random_step_slower(seed):
    graph, share = random_step(seed)
    found = times_of_all(graph, share, graph_cases.machine(out=2.0 * UNIT, back=2.0 * UNIT))
    if found:
        assert_freedom_is_no_loss(found)


@pytest.mark.parametrize("name", ["mlp", "convolution"])
def test_freedom_makes_no_plan_of_a_captured_step_slower(name):
    graph, share = captured_step(name)
    assert_freedom_is_no_loss(
        times_of_all(graph, share, penstock.memory.machine("v100-16gb-pcie3"))
    )


def test_a_plan_by_paging_that_is_faster_is_taken(monkeypatch):
    """The search is made to find nothing good: the plan by paging is what `plan` returns."""
    graph, share = random_step(2)
    machine = graph_cases.machine(out=2.0 * UNIT, back=2.0 * UNIT)
    budget = int(peak_of_program_order(graph) * share)
    options = {"device_memory": budget, "host_memory": 1 << 40, "machine": machine}
    slow = plan(graph, **options, time_limit=10, reorder=False, recompute=False)
    slow = dataclasses.replace(slow, step_seconds=slow.step_seconds * 100)
    monkeypatch.setattr("penstock.planner._api.plan_auto", lambda *_, **__: slow)
    found = plan(graph, **options, time_limit=10)
    check(graph, found)
    assert found.notes["finalist"] in PAGING_POLICIES
    assert found.bound.seconds > 0 and found.step_seconds < slow.step_seconds


def test_a_hopeless_plan_by_paging_gets_no_addresses(monkeypatch):
    graph, share = random_step(2)
    machine = graph_cases.machine(out=2.0 * UNIT, back=2.0 * UNIT)
    seconds = operator_seconds(graph, machine)
    limits = Budget(device_bytes=int(peak_of_program_order(graph) * share), host_bytes=1 << 40)
    made = plan_by_paging(
        graph_cases.request(graph, budget=limits, profile=machine, seconds=seconds)
    )
    fast = dataclasses.replace(made, step_seconds=made.step_seconds / 100)
    monkeypatch.setattr(references, "_FEW_OPERATORS", 0)
    monkeypatch.setattr(references, "plan_by_paging", None)
    asked = graph_cases.request(graph, limits, machine, seconds=seconds)
    assert references.fastest_with_references(asked, fast, fast.bound) is fast


def test_addresses_of_plans_by_paging_are_searched_for_no_longer_than_there_is_time(monkeypatch):
    graph, share = random_step(2)
    machine = graph_cases.machine(out=2.0 * UNIT, back=2.0 * UNIT)
    seconds = operator_seconds(graph, machine)
    limits = Budget(device_bytes=int(peak_of_program_order(graph) * share), host_bytes=1 << 40)
    made = plan_by_paging(
        graph_cases.request(graph, budget=limits, profile=machine, seconds=seconds)
    )
    asked, now = [], 1000.0

    def find_nothing(buffers, *, time_limit, **options):
        nonlocal now
        asked.append(time_limit)
        now += time_limit
        raise InfeasibleError("nothing")

    monkeypatch.setattr("penstock.planner.paging._plan_paging.pack", find_nothing)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    short = graph_cases.request(graph, limits, machine, seconds=seconds, time_limit=0.2)
    assert references.fastest_with_references(short, made, made.bound) is made
    assert asked and sum(asked) <= 0.2 * (1 + 1e-9)
