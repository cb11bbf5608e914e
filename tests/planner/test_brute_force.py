"""The brute force finds plans that are right and that no other plan beats."""

import random

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from brute_force import brute_force
from graph_cases import GraphBuilder, chain_step, machine, random_graph, random_plan, request
from penstock.errors import InfeasibleError
from penstock.graph import Kind
from penstock.planner import Budget, check
from penstock.planner._live_ranges import ResidentInterval as Interval
from penstock.planner.exact._addresses import find_offsets


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_no_random_plan_is_faster(rng, training, early):
    graph = chain_step(1) if training else random_graph(rng, rng.randint(1, 4))
    rates = rng.choice([(1.0, 1.0), (0.5, 1.0), (2.0, 3.0)])
    plan = random_plan(graph, rng, keep=rng.choice([0.2, 0.6]), rates=rates, early=early)
    assume(len(plan.recomputed) <= 1)
    budget = Budget(device_bytes=plan.peak_device_bytes, host_bytes=1000)
    best = brute_force(
        request(
            graph, budget=budget, profile=plan.machine, seconds=plan.operator_seconds, time_limit=1
        )
    )
    check(graph, best)
    assume(best.notes["complete"])
    assert best.step_seconds <= plan.step_seconds * (1 + 1e-9)


def read_twice(*, recomputable):
    """A value of 8 bytes is made, then one of 8 that is used at once, then the first is used."""
    build = GraphBuilder()
    x = build.storage(1, Kind.INPUT, given=True)
    first, second, middle, end = (build.storage(n) for n in (8, 8, 1, 1))
    build.run(reads=(x,), creates=(first,), recomputable=recomputable)
    build.run(reads=(first,), creates=(middle,), recomputable=False)
    build.run(reads=(middle,), creates=(second,), recomputable=False)
    build.run(reads=(second, middle), creates=(end,), recomputable=False)
    last = build.storage(1)
    build.run(reads=(end, first, x), creates=(last,), recomputable=False)
    return build.graph(last)


@pytest.mark.parametrize(
    ("recomputable", "device_bytes", "step"),
    [
        (False, 30, 5.0),  # enough for both
        (False, 12, 12.0),  # 8 bytes leave while the second runs (3 s more) and come back (4 s)
        (True, 12, 6.0),  # running the first operator again takes a second
    ],
)
def test_it_makes_again_what_is_slow_to_move(recomputable, device_bytes, step):
    graph = read_twice(recomputable=recomputable)
    budget = Budget(device_bytes=device_bytes, host_bytes=100)
    plan = brute_force(
        request(graph, budget=budget, profile=machine(out=2.0, back=2.0), seconds=[1.0] * 5)
    )
    check(graph, plan)
    assert plan.notes["complete"]
    assert plan.step_seconds == pytest.approx(step)
    assert bool(plan.recomputed) == (step == 6.0)


def test_a_frozen_order_is_kept():
    build = GraphBuilder()
    x = build.storage(1, Kind.INPUT, given=True)
    large = [build.storage(8) for _ in range(2)]
    small = [build.storage(1) for _ in range(2)]
    for value in large:  # both large ones first; better one after the other
        build.run(reads=(x,), creates=(value,), recomputable=False)
    for value, result in zip(large, small, strict=True):
        build.run(reads=(value,), creates=(result,))
    end = build.storage(1)
    build.run(reads=tuple(small), creates=(end,))
    graph, budget = build.graph(end), Budget(device_bytes=12, host_bytes=100)
    free = brute_force(request(graph, budget=budget, profile=machine(), seconds=[1.0] * 5))
    frozen = brute_force(
        request(graph, budget=budget, profile=machine(), seconds=[1.0] * 5, reorder=False)
    )
    assert free.step_seconds == 5.0
    assert frozen.order == (0, 1, 2, 3, 4)
    assert frozen.step_seconds > 5.0


def test_a_place_is_not_handed_over_while_its_owner_is_back():
    """An operand gives its place to a result, and is back, for the next step, before that dies."""
    build = GraphBuilder()
    weight = build.storage(4, Kind.PARAMETER)
    result, end = build.storage(4), build.storage(1)
    build.run(reads=(weight,), creates=(result,), may_overwrite=((weight, result),))
    build.run(reads=(result,), creates=(end,))
    graph = build.graph(end)
    intervals = [
        Interval(weight, 1, 2),
        Interval(result, 0, 2),
        Interval(end, 1, 2),
    ]
    assert find_offsets(graph, (0, 1), intervals, 100) is None
    apart = [
        Interval(weight, 1, 3),
        Interval(result, 0, 2),
        Interval(end, 1, 2),
    ]
    assert find_offsets(graph, (0, 1), apart, 9) is not None


def test_a_result_without_bytes_takes_over_no_place():
    build = GraphBuilder()
    x = build.storage(4, Kind.INPUT, given=True)
    made, nothing, end = build.storage(4), build.storage(0), build.storage(1)
    build.run(reads=(x,), creates=(made,))
    build.run(reads=(x, made), creates=(nothing,), may_overwrite=((made, nothing),))
    build.run(reads=(nothing,), creates=(end,))
    graph = build.graph(end)
    plan = brute_force(
        request(
            graph,
            budget=Budget(device_bytes=8, host_bytes=99),
            profile=machine(),
            seconds=[1.0] * 3,
        )
    )
    check(graph, plan)
    with pytest.raises(InfeasibleError):
        brute_force(
            request(
                graph,
                budget=Budget(device_bytes=7, host_bytes=99),
                profile=machine(),
                seconds=[1.0] * 3,
            )
        )


def test_what_nothing_fits_is_refused():
    with pytest.raises(InfeasibleError) as raised:
        brute_force(
            request(
                chain_step(1),
                budget=Budget(device_bytes=5, host_bytes=99),
                profile=machine(),
                seconds=[1.0] * 4,
            )
        )
    assert raised.value.proved


def test_with_no_budget_everything_stays():
    graph = random_graph(random.Random(3), 4)
    plan = brute_force(
        request(graph, budget=Budget(host_bytes=99), profile=machine(), seconds=[1.0] * 4)
    )
    check(graph, plan)
    assert plan.transfers == ()
    assert plan.step_seconds == 4.0
