"""The checker accepts every right plan and names the rule that a wrong one breaks."""

import dataclasses
import functools
import random

import pytest
from hypothesis import given, settings

from graph_cases import (
    GraphBuilder,
    chain_step,
    machine,
    plan_from,
    planned_steps,
    random_graph,
    random_plan,
    request,
)
from penstock.errors import PlanError
from penstock.graph import Kind, Operator, StepGraph, Storage
from penstock.memory import Link, Tier
from penstock.planner import Bound, Budget, Copy, Plan, Transfer, check, simulate
from penstock.planner import plan as make_plan
from penstock.planner._live_ranges import ResidentInterval as Interval

GRAPH = chain_step()
# Operators: forward 0 to 2, loss 3; backward and update of layers 2 (4, 5), 1 (6, 7), 0 (8, 9).
# Values: input 0, weights 1 to 3, activations 4 to 6, loss 7, gradient 8, then per layer weight
# gradient, gradient, new weight: 9, 10, 11; 12, 13, 14; 15, 16, 17.
INTERVALS = [
    Interval(0, 0, 2),  # the input leaves for the host and comes back for the last backward
    Interval(0, 7, 9),
    Interval(
        17, 9, 11
    ),  # the first weight leaves after the next forward and comes back for its update
    Interval(1, 6, 9),
    Interval(14, 7, 17),  # the second one stays
    Interval(11, 5, 15),  # the third one too
    Interval(4, 0, 7),
    Interval(5, 1, 5),
    Interval(6, 2, 4),
    Interval(7, 3, 10),
    Interval(8, 3, 4),
    Interval(9, 4, 6),
    Interval(10, 4, 6),
    Interval(12, 6, 8),
    Interval(13, 6, 8),
    Interval(15, 8, 10),
    Interval(16, 8, 9),
]
TRANSFERS = [
    Transfer(0, Link.DEVICE_TO_HOST, 6, 1, 2),
    Transfer(0, Link.HOST_TO_DEVICE, 6, 7, 8),
    Transfer(1, Link.DEVICE_TO_HOST, 4, 0, 1),
    Transfer(1, Link.HOST_TO_DEVICE, 4, 6, 6),
]


def plan_of(intervals=INTERVALS, transfers=TRANSFERS) -> Plan:
    """A plan whose times and statements are right, whatever else is not."""
    transfers = sorted(transfers, key=lambda t: t.end)
    return plan_from(
        request(
            GRAPH,
            budget=Budget(device_bytes=1000, host_bytes=100, file_bytes=100),
            profile=machine(),
            seconds=[5.0] * 10,
        ),
        range(10),
        intervals,
        transfers,
    )


def but(**fields) -> Plan:
    """The plan with other fields."""
    return dataclasses.replace(plan_of(), **fields)


def rule_of(plan: Plan, graph: StepGraph = GRAPH) -> str:
    with pytest.raises(PlanError) as raised:
        check(graph, plan)
    assert str(raised.value)
    return raised.value.rule


def changed(items, old, *new):
    """Items with one replaced."""
    assert old in items
    return tuple(each for item in items for each in (new if item == old else (item,)))


def test_the_plan_without_a_fault_is_right():
    check(GRAPH, plan_of())


@settings(max_examples=300, deadline=None)
@given(planned_steps())
def test_every_valid_plan_is_accepted(planned):
    check(*planned)


def with_interval(old, *new):
    return plan_of(changed(INTERVALS, old, *new))


def with_transfer(old, *new):
    return plan_of(INTERVALS, changed(TRANSFERS, old, *new))


def moved(plan, value, start, offset):
    """The plan with a placement at another address."""
    [placement] = [p for p in plan.placements if (p.value, p.start) == (value, start)]
    return dataclasses.replace(
        plan,
        placements=changed(plan.placements, placement, placement._replace(offset=offset)),
    )


def offset_of(plan, value):
    return next(p.offset for p in plan.placements if p.value == value)


def with_copies(plan, **fields):
    return dataclasses.replace(plan, copies=tuple(c._replace(**fields) for c in plan.copies))


X_OUT, X_IN, W_OUT, W_IN = TRANSFERS
LATE_LOSS = Transfer(7, Link.DEVICE_TO_HOST, 1, 4, 5)
FAULTS = {
    "another graph's digest": ("graph", lambda: but(graph_digest="0" * 64)),
    "times of fewer operators": ("operators", lambda: but(operator_seconds=(1.0,))),
    "an operator of negative time": ("operators", lambda: but(operator_seconds=(-1.0,) * 10)),
    "an operator missing": ("operators", lambda: but(order=(0, 1, 2, 3, 4, 5, 6, 7, 8, 8))),
    "an unknown operator": ("operators", lambda: but(order=(*range(9), 10))),
    "read before made": ("order", lambda: but(order=(0, 2, 1, *range(3, 10)))),
    "written over before read": ("order", lambda: but(order=(1, 0, *range(2, 10)))),
    "a weight updated twice": ("recompute", lambda: but(order=(*range(10), 9))),
    "an unknown value": (
        "value",
        lambda: but(placements=(plan_of().placements[0]._replace(value=99),)),
    ),
    "a smaller placement": (
        "bytes",
        lambda: but(placements=(plan_of().placements[0]._replace(num_bytes=5),)),
    ),
    "half a transfer": ("bytes", lambda: with_transfer(X_OUT, X_OUT._replace(num_bytes=3))),
    "a stay that ends before it begins": (
        "interval",
        lambda: with_interval(INTERVALS[0], Interval(0, 2, 1)),
    ),
    "longer than a step": (
        "interval",
        lambda: with_interval(Interval(14, 7, 17), Interval(14, 7, 18)),
    ),
    "an activation in the next step": (
        "interval",
        lambda: with_interval(INTERVALS[-2], Interval(15, 8, 11)),
    ),
    "no boundary between host and file": (
        "window",
        lambda: but(transfers=(X_OUT, Transfer(0, Link.HOST_TO_FILE, 6, 3, 3))),
    ),
    "a window that ends before": ("window", lambda: but(transfers=(X_OUT, X_IN._replace(end=6)))),
    "a window in the next step": ("window", lambda: but(transfers=(X_OUT, X_IN._replace(end=11)))),
    "an unknown link": (
        "link",
        lambda: but(transfers=(X_OUT._replace(link=Link.DEVICE_TO_FILE),), machine=machine()),
    ),
    "waits for a later one": (
        "link_order",
        lambda: but(transfers=(W_OUT, X_OUT, X_IN, W_IN)),
    ),
    "beyond the budget": ("budget", lambda: but(budget=Budget(device_bytes=36, host_bytes=99))),
    "below the arena": ("budget", lambda: moved(plan_of(), 7, 3, -1)),
    "two at one address": ("overlap", lambda: moved(plan_of(), 9, 4, offset_of(plan_of(), 10))),
    "overlap over the end": ("overlap", lambda: moved(plan_of(), 4, 0, offset_of(plan_of(), 14))),
    "needed and not there": (
        "residency",
        lambda: with_interval(Interval(5, 1, 5), Interval(5, 1, 4)),
    ),
    "freed where it is needed": (
        "residency",
        lambda: with_interval(Interval(9, 4, 6), Interval(9, 4, 5)),
    ),
    "needed and not arrived": (
        "arrival",
        lambda: plan_of(
            changed(INTERVALS, INTERVALS[1], Interval(0, 7, 10)),
            changed(TRANSFERS, X_IN, X_IN._replace(end=9)),
        ),
    ),
    "made and no place": ("placement", lambda: with_interval(Interval(15, 8, 10))),
    "brought to no place": ("placement", lambda: with_interval(Interval(1, 6, 9))),
    "placed and nobody brings it": ("cause", lambda: with_transfer(X_IN)),
    "made and brought": (
        "cause",
        lambda: with_transfer(X_IN, X_IN, Transfer(9, Link.HOST_TO_DEVICE, 4, 4, 5)),
    ),
    "a copy that nobody writes": (
        "cause",
        lambda: but(copies=(*plan_of().copies, Copy(9, Tier.HOST, 4, 5, 6))),
    ),
    "placed twice": (
        "placed_twice",
        lambda: plan_of(
            [*INTERVALS, Interval(1, 7, 9)],
            [*TRANSFERS, Transfer(1, Link.HOST_TO_DEVICE, 4, 7, 7)],
        ),
    ),
    "sent on before it has arrived": (
        "source",
        lambda: with_transfer(X_OUT, X_OUT, Transfer(0, Link.HOST_TO_FILE, 6, 1, 4)),
    ),
    "sent out before it is made": (
        "source",
        lambda: with_transfer(X_OUT, X_OUT, Transfer(8, Link.DEVICE_TO_HOST, 6, 3, 4)),
    ),
    "a copy that went before": (
        "source",
        lambda: with_copies(plan_of(), end=5),
    ),
    "a copy that ends as it is read": (
        "in_flight",
        lambda: but(copies=tuple(c._replace(end=c.end - 1) for c in plan_of().copies)),
    ),
    "nowhere to write": ("copy", lambda: but(copies=())),
    "written twice": ("copy", lambda: with_transfer(X_OUT, X_OUT, X_OUT)),
    "freed while it leaves": ("in_flight", lambda: with_transfer(X_OUT, X_OUT._replace(end=3))),
    "handed over to another address": ("reuse", lambda: moved(plan_of(), 17, 9, 500)),
    "not handed over and not kept": ("residency", lambda: moved(plan_of(), 10, 4, 600)),
    "written over and still there": (
        "reuse",
        lambda: with_interval(Interval(1, 6, 9), Interval(1, 6, 10)),
    ),
    "written over while it leaves": (
        "reuse",
        lambda: plan_of(
            INTERVALS,
            [
                X_OUT,
                X_IN,
                W_IN,
                Transfer(1, Link.DEVICE_TO_HOST, 4, 0, 1),
                Transfer(2, Link.DEVICE_TO_HOST, 4, 6, 8),
            ],
        ),
    ),
    "begins where it did not end": (
        "steady_state",
        lambda: with_interval(Interval(14, 7, 17), Interval(14, 7, 9), Interval(2, 0, 7)),
    ),
    "no loss": ("loss", lambda: with_interval(Interval(7, 3, 10), Interval(7, 3, 9))),
    "more than the host has": (
        "host_budget",
        lambda: but(budget=Budget(device_bytes=1000, host_bytes=9)),
    ),
    "no host at all": ("host_budget", lambda: but(budget=Budget(device_bytes=1000))),
    "another workspace": ("workspace", lambda: but(workspace_bytes=1)),
    "another step time": ("step_seconds", lambda: but(step_seconds=50.0)),
    "another ideal time": ("ideal_seconds", lambda: but(ideal_seconds=49.0)),
    "a bound above the time": (
        "lower_bound",
        lambda: but(bound=Bound(seconds=99.0, binding="x", seconds_of={"x": 99.0})),
    ),
    "a bound that is none of its parts": (
        "lower_bound",
        lambda: but(bound=Bound(seconds=40.0, binding="x", seconds_of={"x": 20.0})),
    ),
}


@functools.cache
def stated() -> tuple[StepGraph, Plan]:
    """A plan of the planner, whose statements all follow from its graph and machine."""
    graph = chain_step(2, weight_bytes=2**21, activation_bytes=2**22)
    operators = tuple(
        dataclasses.replace(o, flops=10**8 * (2 + i % 3)) for i, o in enumerate(graph.operators)
    )
    graph = dataclasses.replace(graph, operators=operators)
    options = {"host_memory": "1GiB", "machine": "v100-16gb-pcie3", "time_limit": 1}
    roomy = make_plan(graph, **options)
    return graph, make_plan(graph, device_memory=roomy.peak_device_bytes * 3 // 4, **options)


def with_bound(plan, **fields):
    return dataclasses.replace(plan, bound=dataclasses.replace(plan.bound, **fields))


def retimed(graph, plan, times):
    plan = dataclasses.replace(plan, operator_seconds=tuple(times), ideal_seconds=sum(times))
    parts = {"compute": sum(times)}
    plan = with_bound(plan, seconds=sum(times), binding="compute", seconds_of=parts)
    return dataclasses.replace(plan, step_seconds=simulate(graph, plan).step_seconds)


def only(plan, seconds, name):
    return with_bound(plan, seconds=seconds, binding=name, seconds_of={name: seconds})


def raised_part(plan, name):
    parts = {**plan.bound.seconds_of, name: plan.step_seconds}
    return with_bound(plan, seconds=plan.step_seconds, binding=name, seconds_of=parts)


FALSE_STATEMENTS = {
    "a bound of the step's time": ("lower_bound", lambda g, p: only(p, p.step_seconds, "cut")),
    "a part of another name": ("lower_bound", lambda g, p: only(p, p.step_seconds, "divine")),
    "compute that is all of the step": ("lower_bound", lambda g, p: raised_part(p, "compute")),
    "a higher cut": ("lower_bound", lambda g, p: raised_part(p, "cut")),
    "a higher persistent": ("lower_bound", lambda g, p: raised_part(p, "persistent")),
    "no bound": ("lower_bound", lambda g, p: only(p, 0.0, "compute")),
    "binding of another name": ("lower_bound", lambda g, p: with_bound(p, binding="magic")),
    "binding that is not the largest": (
        "lower_bound",
        lambda g, p: with_bound(
            p, binding=min(p.bound.seconds_of, key=lambda name: p.bound.seconds_of[name])
        ),
    ),
    "operators that take a tenth": (
        "times",
        lambda g, p: retimed(g, p, [seconds / 10 for seconds in p.operator_seconds]),
    ),
    "times from nowhere": ("times", lambda g, p: dataclasses.replace(p, times="magic")),
    "no budget": (
        "lower_bound",
        lambda g, p: dataclasses.replace(
            p, budget=dataclasses.replace(p.budget, device_bytes=None)
        ),
    ),
    "proved": (
        "notes",
        lambda g, p: dataclasses.replace(p, method="exact", notes={"proved": True}),
    ),
    "proved by another method": (
        "notes",
        lambda g, p: dataclasses.replace(p, notes={**p.notes, "proved": True}),
    ),
    "proved and more than the least": (
        "notes",
        lambda g, p: dataclasses.replace(
            p,
            method="exact",
            notes={
                "proved": True,
                "non_compulsory_bytes": sum(p.bytes_moved.values()),
                "lower_bound_bytes": 1,
            },
        ),
    ),
}


@pytest.mark.parametrize("statement", FALSE_STATEMENTS)
def test_a_false_statement_is_found(statement):
    graph, plan = stated()
    assert plan.transfers
    rule, change = FALSE_STATEMENTS[statement]
    assert rule_of(change(graph, plan), graph) == rule


def test_what_is_not_computed_again_is_named():
    graph, plan = stated()
    assert set(check(graph, plan)) == {
        f"bound.{name}" for name in plan.bound.seconds_of if name in ("chain", "remaking")
    }
    assert check(graph, plan, bounds=True) == ()
    higher = raised_part(plan, "chain")
    assert "bound.chain" in check(graph, higher)
    with pytest.raises(PlanError, match="'chain' is stated"):
        check(graph, higher, bounds=True)
    given = dataclasses.replace(plan, times="given")
    assert "operator_seconds" in check(graph, given)


def test_a_bound_for_frozen_decisions_is_for_plans_that_keep_them():
    rng = random.Random(0)
    seen = set()
    while len(seen) < 4:
        graph = random_graph(rng, 6)
        plan = random_plan(graph, rng)
        first_runs = list(dict.fromkeys(plan.order))
        kept = {"reorder": first_runs == sorted(first_runs), "recompute": not plan.recomputed}
        for decision, is_kept in kept.items():
            seen.add((decision, is_kept))
            frozen = with_bound(plan, **{decision: False})
            if is_kept:
                check(graph, frozen)
            else:
                assert rule_of(frozen, graph) == "lower_bound"


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(fault):
    rule, plan = FAULTS[fault]
    assert rule_of(plan()) == rule


def test_a_value_that_stays_over_the_end_keeps_its_address():
    weight = Storage(name="w", num_bytes=4, kind=Kind.PARAMETER, initial=0, final=0)
    reads = [(0,), (), (0,)]
    operators = [Operator(name=f"op{i}", target="aten.op", reads=reads[i]) for i in range(3)]
    graph = StepGraph(storages=(weight,), storage_of_value=(0,), operators=tuple(operators))
    plan = plan_from(
        request(graph, budget=Budget(host_bytes=4), profile=machine(), seconds=[1.0] * 3),
        range(3),
        [Interval(0, 0, 1), Interval(0, 2, 3)],
        [Transfer(0, Link.HOST_TO_DEVICE, 4, 2, 2)],
    )
    check(graph, plan)
    assert rule_of(moved(plan, 0, 2, 8), graph) == "steady_state"


@pytest.mark.parametrize("offset", [0, 2, 4, 7])
@pytest.mark.parametrize("kind", [Kind.PARAMETER, Kind.BUFFER, Kind.INPUT])
def test_what_no_step_changes_and_stays_for_ever_overlaps_nothing(kind, offset):
    weights = [
        Storage(name=name, num_bytes=num_bytes, kind=kind, initial=value, final=value)
        for value, (name, num_bytes) in enumerate([("first", 8), ("second", 4), ("third", 4)])
    ]
    operators = [Operator(name=f"op{i}", target="aten.op", reads=(i,)) for i in range(3)]
    graph = StepGraph(
        storages=tuple(weights), storage_of_value=(0, 1, 2), operators=tuple(operators)
    )
    plan = plan_from(
        request(graph, budget=Budget(), profile=machine(), seconds=[1.0] * 3),
        range(3),
        [Interval(value, 0, 3) for value in range(3)],
        (),
        offsets=[0, 8, 12],
    )
    check(graph, plan)
    for value in (1, 2):
        assert rule_of(moved(plan, value, 0, offset), graph) == "overlap"
    both = moved(moved(plan, 1, 0, 0), 2, 0, offset)
    assert rule_of(both, graph) == "overlap"


def test_a_result_does_not_lie_over_the_rest_of_what_another_takes_over():
    build = GraphBuilder()
    x = build.storage(8, Kind.INPUT, given=True)
    small, other = build.storage(4), build.storage(4)
    build.run(reads=(x,), creates=(small, other), may_overwrite=((x, small),))
    graph = build.graph(other)
    intervals = [
        Interval(x, 0, 0),
        Interval(small, 0, 1),
        Interval(other, 0, 1),
    ]
    asked = request(graph, Budget())
    check(graph, plan_from(asked, [0], intervals, (), offsets=[0, 0, 8]))
    assert rule_of(plan_from(asked, [0], intervals, (), offsets=[0, 0, 4]), graph) == "overlap"


def test_arguments_of_other_types_are_named():
    graph = chain_step(1)
    plan = make_plan(graph, machine="h200", time_limit=0.1)
    with pytest.raises(TypeError, match="got a Plan and a StepGraph"):
        check(plan, graph)  # pyright: ignore[reportArgumentType]
