"""The exact planner has the least traffic, and least peaks are those of all orders."""

import dataclasses
import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from graphs import GraphBuilder, chain_step, machine, random_graph
from penstock.errors import InfeasibleError
from penstock.graph import Kind, StepGraph
from penstock.planner import Budget, check
from penstock.planner.optima._assemble import packed_offsets
from penstock.planner.optima._brute_force import _cases, _choices, _moves, _topological
from penstock.planner.optima._exact import exact
from penstock.planner.optima._peak import min_peak, min_working_set

HOST = 1 << 30


def inference_graph(rng, num_operators) -> StepGraph:
    """Where results take the place of operands, both have the same bytes."""
    graph = random_graph(rng, num_operators, persistent=False)
    operators = [
        dataclasses.replace(
            operator,
            may_overwrite=tuple(
                (read, created)
                for read, created in operator.may_overwrite
                if graph.num_bytes(read) == graph.num_bytes(created)
            ),
        )
        for operator in graph.operators
    ]
    return dataclasses.replace(graph, operators=tuple(operators))


def least_traffic(graph: StepGraph, device_bytes: int) -> int | None:
    """The least bytes that move, over all orders and residencies."""
    budget, least = Budget(device_bytes=device_bytes, host_bytes=HOST), None
    for order in _topological(graph):
        for case in _cases(graph, order):
            for aways in _choices(graph, case, budget, float("inf")):
                stays, transfers = _moves(graph, case, aways)
                traffic = sum(transfer.num_bytes for transfer in transfers)
                if least is not None and traffic >= least:
                    continue
                if packed_offsets(graph, order, stays, device_bytes) is not None:
                    least = traffic
    return least


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([0.0, 0.5, 1.0]))
@example(random.Random(237), 0.0)  # an operand's place is taken, and it comes back later
@example(random.Random(402), 0.0)  # it comes back at once, for the operator that changes it
@example(random.Random(416), 0.5)  # so that less has to move
def test_no_order_and_residency_moves_less(rng, share):
    graph = inference_graph(rng, rng.randint(1, 5))
    lowest, highest = min_working_set(graph), min_peak(graph).num_bytes
    device_bytes = round(lowest + share * (highest - lowest))
    budget = Budget(device_bytes=device_bytes, host_bytes=HOST)
    seconds = [1.0] * len(graph.operators)
    least = least_traffic(graph, device_bytes)
    if least is None:
        with pytest.raises(InfeasibleError):
            exact(graph, seconds, budget, machine())
        return
    plan = exact(graph, seconds, budget, machine())
    check(graph, plan)
    assert plan.notes == {
        "non_compulsory_bytes": least,
        "lower_bound_bytes": least,
        "proved": True,
    }
    assert sum(transfer.num_bytes for transfer in plan.transfers) == least


@settings(max_examples=60, deadline=None)
@given(st.randoms(use_true_random=False))
def test_the_least_peak_is_that_of_the_best_order(rng):
    graph = inference_graph(rng, rng.randint(1, 6))
    workspace_bytes = max(operator.workspace_bytes for operator in graph.operators)
    peaks = {}
    for order in _topological(graph):
        peaks[order] = min(int(case.live_bytes.max()) for case in _cases(graph, order))
    found = min_peak(graph)
    assert found.proved
    assert found.num_bytes - workspace_bytes == min(peaks.values()) == peaks[found.order]


def branches(num_branches, num_layers) -> StepGraph:
    """Chains from one input, of which each ends in a small value; they are added up."""
    build = GraphBuilder()
    x = build.storage(8, Kind.INPUT, given=True)
    ends = []
    for _ in range(num_branches):
        y = x
        for layer in range(num_layers):
            y, read = build.storage(1 if layer == num_layers - 1 else 16), y
            build.run(reads=(read,), creates=(y,))
        ends.append(y)
    result = build.storage(1)
    build.run(reads=tuple(ends), creates=(result,))
    return build.graph(result)


def test_branches_one_after_the_other_have_the_least_peak():
    graph = branches(6, 4)
    peak = min_peak(graph)
    assert peak.proved
    # Within the last branch but one: the input, the ends of four, and two of its own.
    assert peak.num_bytes == 8 + 4 + 16 + 16
    program_order = tuple(range(len(graph.operators)))
    assert sorted(peak.order) == list(program_order)


def test_a_search_that_ends_early_says_so():
    rng = random.Random(5)
    graph = inference_graph(rng, 14)
    peak, best = min_peak(graph, max_states=3), min_peak(graph)
    assert not peak.proved
    assert best.proved
    assert peak.num_bytes >= best.num_bytes


def test_a_skip_connection_leaves_at_the_tightest_budget():
    build = GraphBuilder()
    x = build.storage(10, Kind.INPUT, given=True)
    skip = build.storage(10)
    build.run(reads=(x,), creates=(skip,))
    y = skip
    for _ in range(5):
        y, read = build.storage(20), y
        build.run(reads=(read,), creates=(y,))
    result = build.storage(10)
    build.run(reads=(y, skip), creates=(result,))
    graph = build.graph(result)
    assert (min_working_set(graph), min_peak(graph).num_bytes) == (40, 50)
    seconds = [1.0] * len(graph.operators)
    plan = exact(graph, seconds, Budget(device_bytes=40, host_bytes=HOST), machine())
    check(graph, plan)
    assert plan.notes["non_compulsory_bytes"] == 20  # out once, back once
    assert plan.notes["proved"]
    plan = exact(graph, seconds, Budget(device_bytes=50, host_bytes=HOST), machine())
    assert plan.notes["non_compulsory_bytes"] == 0


def test_training_steps_are_refused():
    with pytest.raises(ValueError, match="inference"):
        min_peak(chain_step(1))
    with pytest.raises(ValueError, match="inference"):
        exact(chain_step(1), [1.0] * 4, Budget(device_bytes=100), machine())
    with pytest.raises(ValueError, match="device_bytes"):
        exact(branches(1, 1), [1.0] * 2, Budget(), machine())


def test_a_budget_below_the_working_set_is_refused():
    graph = branches(2, 3)
    with pytest.raises(InfeasibleError) as raised:
        exact(graph, [1.0] * 7, Budget(device_bytes=31, host_bytes=HOST), machine())
    assert raised.value.minimum_device_bytes == min_working_set(graph) == 32
    assert raised.value.operator == "op1"


def test_what_is_written_over_later_is_not_given_away_before():
    build = GraphBuilder()
    given = build.storage(5, Kind.INPUT, given=True)
    made = build.storage(5)
    changed = build.version(given)
    build.run(reads=(given,), creates=(made,), may_overwrite=((given, made),))
    build.run(mutates=((given, changed),))
    result = build.storage(4)
    build.run(reads=(changed,), creates=(result,))
    graph = build.graph(loss=result)
    plan = exact(graph, [1.0] * 3, Budget(device_bytes=10, host_bytes=HOST), machine())
    check(graph, plan)
    assert not plan.transfers
