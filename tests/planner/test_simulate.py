"""Simulated times are those that a discrete-event replay of many steps finds."""

import heapq
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
from penstock.graph import Kind
from penstock.memory import Link, Tier
from penstock.planner import Budget, Plan, Transfer, simulate
from penstock.planner._live_ranges import ResidentInterval as Interval


def weights_step(num_layers, num_bytes=4):
    """Layers that read a weight each, which no step changes."""
    build = GraphBuilder()
    x = build.storage(1, Kind.INPUT, given=True)
    for _ in range(num_layers):
        y = build.storage(1)
        build.run(reads=(x, build.storage(num_bytes, Kind.PARAMETER)), creates=(y,))
        x = y
    return build.graph(x)


def streamed(num_layers, *, ahead, seconds=1.0, num_bytes=4) -> Plan:
    """Weight by weight comes in `ahead` boundaries before its layer and goes."""
    graph = weights_step(num_layers, num_bytes)
    weights = [2 * layer + 2 for layer in range(num_layers)]
    intervals = [Interval(0, 0, 1)]
    transfers = []
    for layer, weight in enumerate(weights):
        value = graph.operators[layer].reads[1]
        assert value == weight
        start = (layer - ahead) % num_layers
        end = start + ahead
        transfers.append(Transfer(value, Link.HOST_TO_DEVICE, num_bytes, start, end))
        intervals.append(Interval(value, start, end + 1))
    for layer in range(num_layers):
        result = graph.operators[layer].creates[0]
        intervals.append(Interval(result, layer, min(layer + 2, num_layers)))
    transfers.sort(key=lambda t: t.end)
    return plan_from(
        request(
            graph,
            budget=Budget(host_bytes=1 << 20),
            profile=machine(back=4.0),
            seconds=[seconds] * num_layers,
        ),
        range(num_layers),
        intervals,
        transfers,
    )


@pytest.mark.parametrize(
    ("ahead", "seconds", "step"),
    [
        (0, 1.0, 8.0),  # each layer waits for its weight, a second each
        (1, 1.0, 4.0),  # the next weight comes while a layer runs
        (1, 0.5, 4.0),  # the link is what is slow
        (2, 0.5, 4.0),
        (2, 3.0, 12.0),
    ],
)
def test_weights_that_stream_in(ahead, seconds, step):
    plan = streamed(4, ahead=ahead, seconds=seconds)
    simulation = simulate(weights_step(4), plan)
    assert simulation.step_seconds == pytest.approx(step)
    assert simulation.busy_seconds == {Link.HOST_TO_DEVICE: 4.0}
    assert simulation.stall_seconds == pytest.approx(step - 4 * seconds)


def test_what_a_step_looks_like():
    simulation = simulate(weights_step(2), streamed(2, ahead=0, seconds=2.0))
    assert simulation.positions == ((1.0, 3.0), (4.0, 6.0))
    assert simulation.transfers == ((0.0, 1.0), (3.0, 4.0))
    assert [stall._asdict() for stall in simulation.stalls] == [
        {"position": 0, "seconds": 1.0, "transfer": 0},
        {"position": 1, "seconds": 1.0, "transfer": 1},
    ]
    assert simulation.memory_bytes == {
        Kind.PARAMETER: (4, 4),
        Kind.INPUT: (1, 0),
        Kind.ACTIVATION: (1, 2),
    }
    assert simulation.to_dict()["busy_seconds"] == {"host->device": 2.0}


def test_a_link_that_falls_behind_a_little_each_step_is_seen_to_bind():
    # Seven seconds of weights in a step of 6.999: it takes hundreds of steps until somebody waits.
    plan = streamed(7, ahead=6, seconds=0.9999)
    simulation = simulate(weights_step(7), plan)
    assert simulation.step_seconds == pytest.approx(7.0, rel=1e-9)
    assert simulation.num_steps < 20


def test_a_transfer_cannot_wait_for_a_later_one():
    plan = streamed(3, ahead=0)
    first, second, third = plan.transfers
    fields = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    with pytest.raises(PlanError, match="link") as raised:
        simulate(weights_step(3), Plan(**{**fields, "transfers": (second, first, third)}))
    assert raised.value.rule == "link_order"


def replayed_seconds(graph, plan, num_steps):
    """Mean step time of the second half of many steps, event by event.

    An independent model: resources with queues, tasks with the tasks that they wait for.
    """
    num_positions = len(plan.order)
    rates = {link: profile.bytes_per_second for link, profile in plan.machine.links.items()}
    tasks, waits = {}, {}  # task -> seconds; task -> tasks before it

    def before(task, *others):
        waits.setdefault(task, set()).update(other for other in others if other in tasks)

    for step in range(num_steps):
        last_on = {}
        for position in range(num_positions):
            at = step * num_positions + position
            tasks["reached", at] = tasks["left", at] = tasks["run", at] = 0.0
            tasks["run", at] = plan.operator_seconds[plan.order[position]]
        for index, transfer in enumerate(plan.transfers):
            tasks["move", step, index] = transfer.num_bytes / rates[transfer.link]
    for step in range(num_steps):
        for position in range(num_positions):
            at = step * num_positions + position
            before(("reached", at), ("run", at - 1))
            before(("left", at), ("reached", at))
            before(("run", at), ("left", at))
        for index, transfer in enumerate(plan.transfers):
            move = ("move", step, index)
            start, end = step * num_positions + transfer.start, step * num_positions + transfer.end
            enters = transfer.link.destination == Tier.DEVICE
            before(move, ("left" if enters else "reached", start))
            if transfer.link in last_on:
                before(move, last_on[transfer.link])
            last_on[transfer.link] = move
            if end < num_steps * num_positions:
                before(("run" if enters else "left", end), move)
    followers, missing = {}, {}
    for task in tasks:
        missing[task] = len(waits.get(task, ()))
        for other in waits.get(task, ()):
            followers.setdefault(other, []).append(task)
    ready = [(0.0, str(task), task) for task in tasks if not missing[task]]
    heapq.heapify(ready)
    finished, starts = {}, {}
    while ready:
        time, _, task = heapq.heappop(ready)
        finished[task] = time + tasks[task]
        for follower in followers.get(task, ()):
            missing[follower] -= 1
            starts[follower] = max(starts.get(follower, 0.0), finished[task])
            if not missing[follower]:
                heapq.heappush(ready, (starts[follower], str(follower), follower))
    assert len(finished) == len(tasks), "the plan waits for itself"
    half = num_steps // 2
    begin = finished["reached", half * num_positions]
    return (finished["reached", (num_steps - 1) * num_positions] - begin) / (num_steps - 1 - half)


@settings(max_examples=60, deadline=None)
@given(planned_steps())
def test_any_plan_takes_as_long_as_event_by_event(planned):
    graph, plan = planned
    assert simulate(graph, plan).step_seconds == pytest.approx(
        replayed_seconds(graph, plan, 40), rel=1e-9, abs=1e-9
    )


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(2, 12))
def test_operators_and_transfers_do_not_overlap_on_their_resource(seed, num_layers):
    rng = random.Random(seed)
    graph = chain_step(num_layers) if seed % 2 else random_graph(rng, num_layers)
    plan = random_plan(graph, rng)
    simulation = simulate(graph, plan)
    for (_, end), (start, _) in itertools.pairwise(simulation.positions):
        assert start >= end - 1e-9
    for link in Link:
        on_link = [
            interval
            for transfer, interval in zip(plan.transfers, simulation.transfers, strict=True)
            if transfer.link == link
        ]
        assert all(b[0] >= a[1] - 1e-9 for a, b in itertools.pairwise(on_link))
