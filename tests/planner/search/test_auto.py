"""Every plan of the planner passes the checker, within its budget, on graphs of all sorts."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphs import chain_step, machine, step_graphs
from penstock.errors import InfeasibleError
from penstock.memory import Link
from penstock.planner import Bound, Budget, check
from penstock.planner.search._auto_plan import plan_auto
from penstock.planner.search._engine import OperatorSequence, Problem

LINKS = [(Link.DEVICE_TO_HOST, Link.HOST_TO_DEVICE)]


def planned(graph, seconds, device_bytes, *, links=LINKS, rate=256.0, **options):
    ideal = sum(seconds)
    return plan_auto(
        graph,
        operator_seconds=seconds,
        budget=Budget(device_bytes=device_bytes, host_bytes=1 << 40),
        machine=machine(out=rate, back=rate),
        links=links,
        bound=Bound(seconds=ideal, binding="compute", seconds_of={"compute": ideal}),
        time_limit=options.pop("time_limit", 0.3),
        **options,
    )


def program(graph, seconds):
    return OperatorSequence(Problem(graph, seconds), np.arange(len(graph.operators)))


@settings(max_examples=500)
@given(st.data())
def test_plans_pass_the_checker(data):
    graph = data.draw(step_graphs(max_operators=14))
    seconds = data.draw(
        st.lists(st.floats(0.01, 10), min_size=len(graph.operators), max_size=len(graph.operators))
    )
    sequence = program(graph, seconds)
    least, most = int(sequence.working_set.max(initial=0)), int(sequence.base.max(initial=0))
    share = data.draw(st.floats(0, 1))
    workspace = max((operator.workspace_bytes for operator in graph.operators), default=0)
    device_bytes = least + int(share * (most - least)) + workspace
    options = {
        "reorder": data.draw(st.booleans()),
        "recompute": data.draw(st.booleans()),
        "rate": data.draw(st.sampled_from([16.0, 256.0, 1e6])),
    }
    failure = None
    try:
        plan = planned(graph, seconds, device_bytes, time_limit=0.05, **options)
    except InfeasibleError as error:
        failure = error
    if failure is not None:  # addresses may need more than the bytes alone
        assert failure.minimum_device_bytes is not None
        assert failure.minimum_device_bytes > device_bytes and not failure.proved
        return
    check(graph, plan)
    assert plan.peak_device_bytes <= device_bytes
    if not options["reorder"] and not options["recompute"]:
        assert plan.order == tuple(range(len(graph.operators)))
    if not options["recompute"]:
        assert not plan.recomputed


def test_with_room_for_everything_nothing_moves():
    graph = chain_step(6, weight_bytes=4096, activation_bytes=8192)
    seconds = [1.0] * len(graph.operators)
    plan = planned(graph, seconds, int(program(graph, seconds).base.max()))
    check(graph, plan)
    assert not plan.transfers and not plan.recomputed
    assert plan.step_seconds == pytest.approx(len(seconds))


def test_no_tier_below_means_recomputation_or_nothing():
    graph = chain_step(12, weight_bytes=256, activation_bytes=65536)
    seconds = [1.0] * len(graph.operators)
    peak = int(program(graph, seconds).base.max())
    plan = planned(graph, seconds, peak * 2 // 3, links=[], time_limit=2)
    check(graph, plan)
    assert plan.recomputed and not plan.transfers
    with pytest.raises(InfeasibleError, match="no tier"):
        planned(graph, seconds, peak * 2 // 3, links=[], recompute=False)


def test_too_small_a_budget_names_the_operator_and_what_it_needs():
    graph = chain_step(4, weight_bytes=4096, activation_bytes=8192)
    seconds = [1.0] * len(graph.operators)
    sequence = program(graph, seconds)
    least = int(sequence.working_set.max())
    with pytest.raises(InfeasibleError) as raised:
        planned(graph, seconds, least - 1)
    assert raised.value.minimum_device_bytes == least
    worst = int(sequence.working_set.argmax())
    assert raised.value.operator == graph.operators[worst].name
    assert raised.value.proved


def test_the_same_seed_gives_the_same_plan():
    graph = chain_step(10, weight_bytes=4096, activation_bytes=8192)
    seconds = [1.0 + index % 3 for index in range(len(graph.operators))]
    peak = int(program(graph, seconds).base.max())
    first, second = (
        planned(graph, seconds, peak // 2, time_limit=60, seed=3).to_dict() for _ in range(2)
    )
    for plan in (first, second):
        plan["notes"].pop("search_seconds")
    assert first == second


def test_an_interrupt_gives_the_best_plan_so_far():
    graph = chain_step(10, weight_bytes=4096, activation_bytes=8192)
    seconds = [1.0] * len(graph.operators)
    peak = int(program(graph, seconds).base.max())

    def interrupt(progress):
        raise KeyboardInterrupt

    begin = time.monotonic()
    plan = planned(graph, seconds, peak // 2, time_limit=60, progress=interrupt)
    assert time.monotonic() - begin < 30
    check(graph, plan)
