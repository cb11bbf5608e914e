import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import graph_cases
from penstock.errors import InfeasibleError
from penstock.graph import Kind
from penstock.planner import Budget, check
from penstock.planner.paging import _plan_paging, plan_by_paging
from penstock.planner.paging._accesses import (
    NEVER,
    order_step,
    peak_of_program_order,
)
from penstock.planner.paging._transfer_times import TimedTransfer, simulate_streams

POLICIES = ["lru", "lru-prefetch", "belady"]
UNIT = 256


def plan(graph, policy, *, device_bytes=None, seconds=None, rates=(1.0, 1.0), **options):
    return plan_by_paging(
        graph_cases.request(
            graph,
            budget=Budget(device_bytes=device_bytes, host_bytes=1 << 40),
            profile=graph_cases.machine(out=rates[0], back=rates[1]),
            seconds=seconds or [1.0] * len(graph.operators),
        ),
        policy=policy,
        **options,
    )


def chain(num_layers=4):
    graph = graph_cases.chain_step(num_layers, weight_bytes=UNIT, activation_bytes=2 * UNIT)
    return graph_cases.in_units(graph, UNIT)


@given(graph=graph_cases.step_graphs(max_operators=9), share=st.sampled_from([0.4, 0.6, 0.8, 1.0]))
@pytest.mark.parametrize("policy", POLICIES)
def test_every_plan_passes_the_checker(policy, graph, share):
    budget = int(peak_of_program_order(graph) * share)
    try:
        found = plan(graph, policy, device_bytes=budget, seconds=[2.0] * len(graph.operators))
    except InfeasibleError:
        return
    check(graph, found)
    assert found.peak_device_bytes <= budget


@pytest.mark.parametrize("policy", POLICIES)
def test_with_all_the_memory_nothing_moves(policy):
    graph = chain()
    found = plan(graph, policy)
    check(graph, found)
    assert found.transfers == ()
    assert found.step_seconds == found.ideal_seconds == len(graph.operators)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_peak_of_the_program_is_enough_for_it(policy):
    graph = graph_cases.chain_step(4, weight_bytes=UNIT, activation_bytes=UNIT)
    found = plan(graph, policy, device_bytes=peak_of_program_order(graph))
    assert found.transfers == ()


def test_memory_is_worth_time():
    graph = chain(6)
    seconds = [plan(graph, "belady", device_bytes=n * UNIT).step_seconds for n in (9, 12, 16, 30)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] > seconds[-1] == len(graph.operators)


def test_prefetching_hides_what_waiting_does_not():
    graph, rates = chain(6), (UNIT, UNIT)
    budget = 12 * UNIT
    waiting = plan(graph, "lru", device_bytes=budget, rates=rates).step_seconds
    ahead = plan(graph, "lru-prefetch", device_bytes=budget, rates=rates).step_seconds
    assert ahead < waiting


def test_without_prefetch_loads_begin_when_they_are_needed():
    found = plan(chain(6), "lru", device_bytes=12 * UNIT)
    assert found.transfers
    assert all(transfer.start == transfer.end for transfer in found.transfers)


def test_an_operator_that_does_not_fit_is_named():
    graph = chain()
    with pytest.raises(InfeasibleError, match="op") as caught:
        plan(graph, "belady", device_bytes=3 * UNIT)
    assert caught.value.operator is not None


def test_fewer_bytes_are_tried_until_there_are_addresses(monkeypatch):
    graph, attempts = chain(6), []
    try_capacity, assign = _plan_paging._Paging.try_capacity, _plan_paging.assign_offsets

    def recorded(paging, capacity):
        attempts.append(capacity)
        return try_capacity(paging, capacity)

    def picky(*arguments, **options):
        enough = attempts[-1] <= 11 * UNIT
        return assign(*arguments, **options) if enough else ([], 1 << 40)

    monkeypatch.setattr(_plan_paging._Paging, "try_capacity", recorded)
    monkeypatch.setattr(_plan_paging, "assign_offsets", picky)
    found = plan(graph, "belady", device_bytes=14 * UNIT)
    check(graph, found)
    assert attempts[0] == 14 * UNIT
    assert max(a for a in attempts if a <= 11 * UNIT) >= 10 * UNIT


def test_a_result_may_be_made_again():
    graph = chain(3)
    order = [0, 1, 2, 3, 3, *range(4, len(graph.operators))]  # the loss and the first gradient
    check(graph, plan(graph, "belady", order=order))


def test_without_a_tier_below_nothing_leaves():
    graph = chain()
    with pytest.raises(InfeasibleError):
        plan_by_paging(graph_cases.request(graph, budget=Budget(device_bytes=10 * UNIT)))
    found = plan_by_paging(graph_cases.request(graph, budget=Budget(device_bytes=40 * UNIT)))
    assert found.transfers == ()


def test_the_host_has_a_limit_too():
    graph = chain(6)
    with pytest.raises(InfeasibleError, match="host"):
        plan_by_paging(
            graph_cases.request(
                graph,
                budget=Budget(device_bytes=12 * UNIT, host_bytes=UNIT),
                profile=graph_cases.machine(),
                seconds=[1.0] * len(graph.operators),
            ),
            policy="belady",
        )


def test_only_candidates_leave():
    graph = chain(6)
    values = range(len(graph.storage_of_value))
    activations = {
        v for v in values if graph.storages[graph.storage_of_value[v]].kind == "activation"
    }
    found = plan(graph, "belady", device_bytes=16 * UNIT, candidates=activations)
    check(graph, found)
    assert found.transfers
    assert {transfer.value for transfer in found.transfers} <= activations


def test_times_of_another_graph_are_refused():
    with pytest.raises(ValueError, match="operator_seconds has 2 times"):
        plan(chain(), "belady", seconds=[1.0, 1.0])


@given(st.integers(0, 10_000))
def test_own_times_are_those_of_the_simulation(seed):
    rng = random.Random(seed)
    graph = chain(rng.randint(2, 6))
    seconds = [rng.choice([0.5, 1.0, 3.0]) for _ in graph.operators]
    rates = (rng.choice([100.0, 300.0]), rng.choice([100.0, 300.0]))
    found = plan(graph, "belady", device_bytes=13 * UNIT, seconds=seconds, rates=rates)
    out = [t for t in found.transfers if t.link.source == "device"]
    back = [t for t in found.transfers if t.link.source != "device"]
    of_order = [seconds[index] for index in found.order]
    own, _ = simulate_streams(
        of_order,
        [TimedTransfer(0, t.start, t.end, t.num_bytes / rates[0]) for t in out],
        [TimedTransfer(0, t.start, t.end, t.num_bytes / rates[1]) for t in back],
    )
    assert own == pytest.approx(found.step_seconds, rel=1e-3)


def test_peak_of_program_order_by_hand():
    # Two weights stay (2). In the forward: x, y1, y2 (2 each), loss (1) and a gradient (2).
    graph = chain(2)
    at_loss = 2 + 2 + 2 + 2 + 1 + 2
    at_last_backward = at_loss + 1 + 2  # y2 is gone after the loss, the loss stays
    at_last_backward -= 2
    workspace = 0
    assert peak_of_program_order(graph) == max(at_loss, at_last_backward) * UNIT + workspace
    assert peak_of_program_order(graph, in_place=True) <= peak_of_program_order(graph)


def test_uses_go_on_in_the_next_step():
    build = graph_cases.GraphBuilder()
    weight = build.storage(UNIT, Kind.PARAMETER)
    x = build.storage(UNIT, Kind.INPUT, given=True)
    y = build.storage(UNIT)
    build.run(reads=(weight, x), creates=(y,))
    build.run(reads=(y,), mutates=((weight, build.version(weight)),))
    step = order_step(build.graph())
    first, second = step.accesses
    assert dict(zip(first.needs, first.next_needs, strict=True)) == {weight: 1, x: NEVER}
    assert dict(zip(second.needs, second.next_needs, strict=True)) == {y: NEVER, weight: NEVER}
    assert second.reuses == ((weight, 3),)
    assert second.next_makes == (2,)  # position 0 of the next step
