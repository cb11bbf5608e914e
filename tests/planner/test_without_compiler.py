"""Without a C++ compiler plans are worse, and say so; they are plans nevertheless."""

import dataclasses

import pytest

import graph_cases
from penstock.errors import InfeasibleError
from penstock.memory import machine
from penstock.planner import Budget, PlanRequest, check, plan
from penstock.planner._assemble import compute_bound
from penstock.planner.packing import _native
from penstock.planner.paging import peak_of_program_order
from penstock.planner.search import _problem as _library
from penstock.planner.search import plan_auto
from penstock.report import plan_table

UNIT = 2**20


@pytest.fixture(autouse=True)
def no_compiler(monkeypatch):
    libraries = (_library.load_engine, _native.library)
    monkeypatch.setenv("CXX", "no-such-compiler")
    for library in libraries:
        library.cache_clear()
    yield
    for library in libraries:
        library.cache_clear()


def planned(graph, share, **options):
    budget = int(peak_of_program_order(graph) * share)
    fast = machine("v100-16gb-pcie3")
    return plan(
        graph, device_memory=budget, host_memory=1 << 40, machine=fast, time_limit=5, **options
    )


@pytest.mark.parametrize("method", ["auto", "genetic"])
@pytest.mark.parametrize(("num_layers", "share"), [(2, 0.8), (12, 0.6)])
def test_a_plan_pages_and_says_that_nothing_was_searched(method, num_layers, share, caplog):
    graph = graph_cases.chain_step(num_layers, weight_bytes=UNIT, activation_bytes=4 * UNIT)
    with caplog.at_level("INFO", logger="penstock"):
        plans = [planned(graph, share, method=method) for _ in range(2)]
    for made in plans:
        check(graph, made)
        assert made.budget.device_bytes is not None
        assert made.peak_device_bytes <= made.budget.device_bytes
        assert made.notes["searched"] is False
    said = [each for each in caplog.records if "plans are made by paging" in each.message]
    assert len(said) == 1 and said[0].levelname == "WARNING"
    assert "(no search: " in plan_table(graph, plans[0])
    assert "no-such-compiler" in said[0].message


def test_all_the_memory_is_planned_for():
    graph = graph_cases.chain_step(12, weight_bytes=UNIT, activation_bytes=4 * UNIT)
    made = plan(graph, machine="v100-16gb-pcie3", time_limit=5)
    check(graph, made)
    assert not made.transfers


def test_too_little_memory_is_said():
    graph = graph_cases.chain_step(12, weight_bytes=UNIT, activation_bytes=4 * UNIT)
    with pytest.raises(InfeasibleError) as raised:
        planned(graph, 0.01)
    assert raised.value.proved and raised.value.minimum_device_bytes is not None


@pytest.mark.parametrize("has_tier", [True, False])
def test_what_stands_in_the_way_is_said(has_tier):
    """The reason why nothing can be built; without a tier below, that there is none."""
    graph = graph_cases.chain_step(12, weight_bytes=UNIT, activation_bytes=4 * UNIT)
    fast = dataclasses.replace(machine("v100-16gb-pcie3"), links={}, tiers={})
    request = PlanRequest(
        graph=graph,
        budget=Budget(device_bytes=14 * UNIT, host_bytes=UNIT if has_tier else None),
        machine=machine("v100-16gb-pcie3") if has_tier else fast,
    )
    with pytest.raises(InfeasibleError) as raised:
        plan_auto(request.within(5), bound=compute_bound(request))
    text = str(raised.value)
    assert "Give more memory" in text and "14.00 MiB is too little" in text
    assert ("no-such-compiler" in text) is has_tier
    assert ("(store= or host_memory=)" in text) is not has_tier
